"""Slots of device channels: who may have one, and how many there are."""

import pytest
import torch

from fused_ops.symmetric import device_slots
from fused_ops.symmetric.device_slots import Arena, Slot, slot_size_for, slots_of


class FakeCapture:
    over = False


def arena_of(slots):
    arena = Arena(number=3, slot_size=1 << 16, memory=None, base=1 << 30, device=torch.device("cpu"))
    arena.slots = [Slot(arena, i) for i in range(slots)]
    return arena


def test_the_first_slot_is_for_staging_and_held_or_posted_ones_are_not_free():
    arena = arena_of(4)
    arena.slots[1].held = True
    arena.slots[2].posted = True
    assert arena.free_slot() is arena.slots[3]
    arena.slots[3].held = True
    assert arena.free_slot() is None
    arena.slots[1].let_go()
    assert arena.free_slot() is arena.slots[1]


def test_calls_of_one_graph_share_a_slot_that_nobody_else_gets():
    arena, first, second = arena_of(4), FakeCapture(), FakeCapture()
    slot = arena.free_slot(first)
    assert arena.free_slot(first) is slot  # its tensor has died
    slot.held = True
    assert arena.free_slot(first) is not slot
    slot.held = False
    others = {arena.free_slot(second), arena.free_slot()}
    assert slot not in others


def test_a_capture_leaves_one_slot_to_calls_outside():
    arena = arena_of(3)
    assert arena.free_slot(FakeCapture()) is not None
    assert arena.free_slot(FakeCapture()) is None
    assert arena.free_slot() is not None


def test_a_slot_comes_free_when_its_graph_cannot_be_replayed_any_more():
    arena, capture = arena_of(3), FakeCapture()
    slot = arena.free_slot(capture)
    assert not slot.is_free()
    arena.capture(capture)
    assert arena.in_a_graph
    capture.over = True
    assert slot.is_free()
    assert slot.capture is None
    assert not arena.in_a_graph


def test_a_place_names_arena_and_offset():
    slot = arena_of(3).slots[2]
    assert slot.place == 3 << device_slots.ARENA_SHIFT | 2 * (1 << 16) >> device_slots.PLACE_SHIFT
    assert slot.address == (1 << 30) + 2 * (1 << 16)


@pytest.mark.parametrize(
    ("largest_output", "slots"),
    [(1, 64), (1 << 16, 64), (1 << 20, 64), (1 << 25, 8), (1 << 28, 4), (1 << 30, 2), (1 << 33, 2), (1 << 34, 1)],
)
def test_small_slots_are_many_and_large_ones_few(largest_output, slots):
    size = slot_size_for(largest_output)
    assert size >= largest_output
    assert slots_of(size) == slots
    assert slots * size <= device_slots.LARGEST_SLOT
