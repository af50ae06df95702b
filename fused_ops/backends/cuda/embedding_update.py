"""What follows the gradients' exchange on one GPU: lookups in order of their row, tables or dense gradients changed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.backends.cuda.embedding_native import (
    OPTIMIZER_CODES,
    VECTOR,
    Lookups,
    OptimizerParams,
    UpdateParams,
    power_of_two,
)
from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from fused_ops.symmetric.cuda_channel import CudaChannel, cuda_channel
from fused_ops.symmetric.cuda_memory import check_cuda, library
from fused_ops.symmetric.group import GroupContext

MOST_VECTORS = 4  # a lane has of a row in the kernels for aligned rows


def sort_lookups(lookups: Lookups, order: Tensor, stream: torch.cuda.Stream) -> list[Tensor]:
    """Fill `order` [nnz] on that stream; what is returned has to live until it is done."""
    shift = lookups.payload_bits
    end_bit = shift + lookups.row_bits
    unsorted, bag_of = torch.empty_like(order), _bag_of(lookups)
    _fill_entries(lookups, shift, unsorted, bag_of, ctypes.c_void_p(stream.cuda_stream))
    scratch = _sort_words(lookups.lane.lib, unsorted, order, shift, end_bit, stream)
    return [scratch, unsorted, *([] if bag_of is None else [bag_of])]


def _sort_words(
    lib: ctypes.CDLL, unsorted: Tensor, order: Tensor, first_bit: int, end_bit: int, stream: torch.cuda.Stream
) -> Tensor:
    """Returns the scratch memory that the sort uses."""
    count, scratch_bytes = ctypes.c_int64(order.numel()), ctypes.c_int64()
    code = lib.fo_cuda_sort_bytes(count, first_bit, end_bit, ctypes.byref(scratch_bytes))
    check_cuda(lib, code, "sizing the sort of the lookups")
    scratch = torch.empty(max(scratch_bytes.value, 1), dtype=torch.uint8, device=order.device)
    if order.numel():
        code = lib.fo_cuda_sort_words(
            ctypes.c_void_p(unsorted.data_ptr()),
            ctypes.c_void_p(order.data_ptr()),
            count,
            first_bit,
            end_bit,
            ctypes.c_void_p(scratch.data_ptr()),
            scratch_bytes,
            ctypes.c_void_p(stream.cuda_stream),
        )
        check_cuda(lib, code, "sorting the lookups")
    return scratch


@functools.cache
def load_kernels(device_index: int) -> None:
    """Load what backward launches, the sort's kernels too: a lazy load would wait behind a kernel that waits for a peer."""
    lib, device = library(device_index), torch.device("cuda", device_index)
    for load in (lib.fo_cuda_update_load, lib.fo_cuda_entries_load):
        check_cuda(lib, load(), "loading the kernels")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        for count in (1 << 8, 1 << 20):  # which kernels sort depends on how many words there are
            words = torch.zeros(count, dtype=torch.int64, device=device)
            _sort_words(lib, words, torch.empty_like(words), 8, 40, stream)
        stream.synchronize()


def embedding_update(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    optimizer: OptimizerInputs,
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> Tensor:
    """See `fused_ops.embedding_backward._update`. Nothing changes when the exchange before has failed."""
    optimizer.check(inputs)
    lane = cuda_channel(group, channel, grad.device)
    with torch.cuda.device(grad.device):
        lookups = Lookups(inputs, lane)
        weights_grad = _weights_gradient(grad, lookups, weight_gradient)
        _run(grad, order, lookups, optimizer, list(inputs.tables))
    return weights_grad


def embedding_gradients(
    grad: Tensor,
    order: Tensor,
    inputs: EmbeddingInputs,
    wanted: Sequence[int],
    weight_gradient: bool,
    group: GroupContext,
    channel: int,
) -> list[Tensor]:
    """See `fused_ops.embedding_backward._gradients`. After an exchange that failed, the rows looked up are NaN."""
    lane = cuda_channel(group, channel, grad.device)
    with torch.cuda.device(grad.device):
        lookups = Lookups(inputs, lane)
        dense = {t: torch.zeros_like(inputs.tables[t]) for t in wanted}
        targets = [dense.get(t) for t in range(len(inputs.tables))]
        _run(grad, order, lookups, OptimizerInputs("none", [], None, []), targets)
        return [*dense.values(), _weights_gradient(grad, lookups, weight_gradient)]


def _run(
    grad: Tensor, order: Tensor, lookups: Lookups, optimizer: OptimizerInputs, targets: Sequence[Tensor | None]
) -> None:
    lane, inputs, grad = lookups.lane, lookups.inputs, grad.contiguous()
    first, second = (optimizer.table_states(which, len(targets)) for which in (0, 1))
    any_kind = _any_kind(inputs, [grad], targets, first, second)
    dims = list(zip(inputs.dims, inputs.feature_tables, strict=True))
    width = _padded(max((dim for dim, t in dims if not any_kind[t]), default=0))
    any_width = _padded(max((dim for dim, t in dims if any_kind[t]), default=0))
    vectors = power_of_two(-(-width * inputs.dtype.itemsize // (32 * VECTOR))) if width else 0
    bag_of = _bag_of(lookups)
    if bag_of is not None:
        _fill_entries(lookups, 0, None, bag_of, lane.stream_pointer())
    scratch = torch.empty(
        lane.lib.fo_cuda_update_scratch(ctypes.c_int64(lookups.struct.nnz), vectors, width, any_width),
        dtype=torch.float32,
        device=grad.device,
    )
    params = UpdateParams(
        lookups=lookups.struct,
        optimizer=OptimizerParams(
            None if optimizer.learning_rate is None else optimizer.learning_rate.data_ptr(),
            None if optimizer.step is None else optimizer.step.data_ptr(),
            optimizer.eps,
            *optimizer.betas,
        ),
        order=order.data_ptr(),
        bag_of=None if bag_of is None else bag_of.data_ptr(),
        targets=_targets(lane, targets, first, second, any_kind),
        grad=grad.data_ptr(),
        grad_stride=inputs.local_dim * inputs.dtype.itemsize,
        halted=lane.halted_address,
        shift=lookups.payload_bits,
        width=width,
        lanes=min(32, power_of_two(-(-width * inputs.dtype.itemsize // (VECTOR * max(vectors, 1))))),
        index_bytes=lookups.index_bytes,
    )
    code = lane.lib.fo_cuda_update(
        ctypes.byref(params),
        lookups.dtype,
        OPTIMIZER_CODES[optimizer.kind],
        vectors,
        any_width,
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_void_p(None if optimizer.step is None else optimizer.step.data_ptr()),
        lane.stream_pointer(),
    )
    check_cuda(lane.lib, code, f"updating tables ({optimizer.kind})")


def _padded(dim: int) -> int:
    """Floats of a partial sum's row."""
    return -(-dim // 8) * 8


def _any_kind(inputs: EmbeddingInputs, shared: Sequence[Tensor], *of_table: Sequence[Tensor | None]) -> list[bool]:
    """By table: too wide, or not aligned, for the kernels that move 16 bytes a lane."""
    size = inputs.dtype.itemsize
    stride_aligned = inputs.local_dim * size % VECTOR == 0 and all(t.data_ptr() % VECTOR == 0 for t in shared)
    packed_aligned = dict.fromkeys(range(len(inputs.tables)), True)
    at = 0
    for dim, t in zip(inputs.dims, inputs.feature_tables, strict=True):
        packed_aligned[t] &= at % VECTOR == 0
        at += dim * size
    kinds = []
    for t, table in enumerate(inputs.tables):
        row_bytes = table.shape[1] * size
        own = [tensors[t] for tensors in of_table if tensors]
        aligned = row_bytes % VECTOR == 0 and all(x is None or x.data_ptr() % VECTOR == 0 for x in own)
        fits = row_bytes <= MOST_VECTORS * 32 * VECTOR
        kinds.append(not (stride_aligned and packed_aligned[t] and aligned and fits))
    return kinds


def _targets(
    lane: CudaChannel,
    targets: Sequence[Tensor | None],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    any_kind: Sequence[bool],
) -> int:
    """The kernels' `Target`s: rows, state, second state and kind of each table."""
    none: list[Tensor | None] = [None] * len(targets)
    flat = [
        number
        for *tensors, kind in zip(targets, first or none, second or none, any_kind, strict=True)
        for number in (*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), int(kind))
    ]
    return lane.tables.address(("targets", *flat), lambda: (ctypes.c_int64 * len(flat))(*flat))


def _weights_gradient(grad: Tensor, lookups: Lookups, wanted: bool) -> Tensor:
    lane, inputs = lookups.lane, lookups.inputs
    out = torch.empty(lookups.struct.nnz if wanted else 0, dtype=torch.float32, device=grad.device)
    if wanted:
        code = lane.lib.fo_cuda_weights_gradient(
            lookups.pointer,
            lookups.dtype,
            lookups.index_bytes,
            ctypes.c_void_p(grad.contiguous().data_ptr()),
            ctypes.c_int64(inputs.local_dim * inputs.dtype.itemsize),
            ctypes.c_void_p(out.data_ptr()),
            lane.stream_pointer(),
        )
        check_cuda(lane.lib, code, "the gradient of per-sample weights")
    return out


def _bag_of(lookups: Lookups) -> Tensor | None:
    """[nnz] int32 for each lookup's bag, where sorted words hold positions."""
    if lookups.weights is None:
        return None
    return torch.empty(lookups.struct.nnz, dtype=torch.int32, device=lookups.indices.device)


def _fill_entries(
    lookups: Lookups, shift: int, entries: Tensor | None, bag_of: Tensor | None, stream: ctypes.c_void_p
) -> None:
    lane = lookups.lane
    code = lane.lib.fo_cuda_entries(
        lookups.pointer,
        lookups.index_bytes,
        shift,
        _lanes_a_bag(lookups),
        ctypes.c_void_p(None if entries is None else entries.data_ptr()),
        ctypes.c_void_p(None if bag_of is None else bag_of.data_ptr()),
        stream,
    )
    check_cuda(lane.lib, code, "numbering the lookups")


def _lanes_a_bag(lookups: Lookups) -> int:
    bags = max(1, lookups.struct.num_features * lookups.struct.batch)
    return min(32, power_of_two(lookups.struct.nnz // bags))
