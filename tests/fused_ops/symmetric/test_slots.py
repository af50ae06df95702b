"""The slot pool: a slot is reused when its tensor has died and not before, and never past the budget."""

import os

import pytest
import torch

from fused_ops.symmetric import slots
from fused_ops.symmetric.slots import SlotPool


def test_a_slot_is_free_when_the_last_view_of_its_tensor_dies():
    pool = SlotPool(lambda: 0)
    slot = pool.take(100)
    tensor = slot.tensor((5, 2), torch.float32)
    slot.pinned = False
    row = tensor[1].numpy()
    del tensor
    assert pool.take(100) is not slot
    del row
    assert pool.take(100) is slot


def test_pinned_and_quarantined_slots_are_not_given_out():
    passed = 4
    pool = SlotPool(lambda: passed)
    slot = pool.take(1)
    assert pool.take(1) is not slot
    slot.pinned, slot.quarantined_call = False, 4
    assert pool.take(1) is not slot
    passed = 5
    assert pool.take(1) is slot


def test_the_budget_is_kept_and_free_slots_make_room():
    pool = SlotPool(lambda: 0, budget=4 << 20)
    small = [pool.take(1 << 20) for _ in range(4)]
    assert pool.take(1) is None
    assert pool.bytes == 4 << 20
    for slot in small:
        slot.pinned = False
    assert pool.take(4 << 20) is not None
    assert pool.bytes == 4 << 20


def test_the_number_of_slots_and_with_it_of_files_is_bounded():
    before = len(os.listdir("/proc/self/fd"))
    pool = SlotPool(lambda: 0)
    taken = [pool.take(1) for _ in range(slots.MOST_SLOTS + 3)]
    assert taken[-3:] == [None] * 3
    assert len(os.listdir("/proc/self/fd")) - before == 2 * slots.MOST_SLOTS
    del taken, pool
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropped_slots_give_their_pages_back_although_a_peer_maps_them():
    pool = SlotPool(lambda: 0, budget=8 << 20)
    slot = pool.take(8 << 20)
    peer = os.open(f"/proc/self/fd/{slot.segment.fd}", os.O_RDWR)
    slot.tensor((8 << 20,), torch.uint8).fill_(1)
    assert os.fstat(peer).st_blocks * 512 >= 8 << 20
    slot.pinned = False
    assert pool.take(6 << 20) is slot
    slot.pinned = False
    pool._drop_free()
    assert os.fstat(peer).st_blocks == 0
    os.close(peer)


def test_what_a_slot_gives_out_can_be_changed_in_place_and_is_no_view():
    tensor = SlotPool(lambda: 0).take(64).tensor((2, 3), torch.bfloat16)
    assert not tensor._is_view()
    assert tensor.is_contiguous()
    assert torch.equal(tensor.fill_(3), torch.full((2, 3), 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 16) + 1, 3 << 19, (3 << 19) + 1, (1 << 21) - 1])
def test_rounding_fits_and_wastes_at_most_a_third(size):
    rounded = slots._round_up(size)
    assert rounded >= size
    assert rounded == slots.SMALLEST_SLOT or rounded * 2 <= size * 3
