"""Differentiable collectives that no matrix product feeds: embeddings, norms under sequence parallelism, logits.

Rows are split as `even_split` says. Collectives of a library want equal pieces, so uneven ones travel padded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_ops import exposed
from models.parallel.shards import even_split
from models.parallel.tensor_parallel import TensorParallel

# Renamed in torch 2.13.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def reduce_rows(partial: Tensor, replicated: Tensor | None, tp: TensorParallel, scatter: bool) -> Tensor:
    """The sum of all ranks' `partial` plus `replicated` once.

    Per rank: partial, replicated [M, H] (replicated: equal on all ranks); returns [M, H], or this rank's rows [M_r, H] with
    `scatter`. backward: the gradient of all rows, gathered with `scatter`, for both inputs; so a parameter behind
    `replicated` gets its whole gradient on every rank.
    """
    if tp.world == 1:
        return partial if replicated is None else partial + replicated
    return _ReduceRows.apply(partial, replicated, tp, scatter)


def sum_gradients(parameters: tuple[Tensor, ...], tp: TensorParallel) -> tuple[Tensor, ...]:
    """The same values; backward: their gradients added up over ranks, in one all-reduce.

    For replicated parameters that see this rank's rows alone.
    """
    return _SumGradients.apply(tp, *parameters)


def gather_columns(local: Tensor, sizes: list[int], tp: TensorParallel) -> Tensor:
    """Per rank: local [..., sizes[rank]]; returns [..., sum(sizes)], the same on all ranks.

    backward: this rank's columns of the gradient, which must be the same on all ranks.
    """
    if tp.world == 1:
        return local
    return _GatherColumns.apply(local, sizes, tp)


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, replicated, tp, scatter):
        ctx.tp, ctx.rows, ctx.scatter, ctx.has_replicated = tp, partial.shape[0], scatter, replicated is not None
        mine = partial + replicated if replicated is not None and tp.rank == 0 else partial.clone()
        if scatter:
            return _reduce_scatter(mine, tp)
        with exposed.whole(mine.device):
            dist.all_reduce(mine, group=tp.group)
        return mine

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.scatter:
            grad = _all_gather(grad, ctx.rows, ctx.tp)
        return grad, grad if ctx.has_replicated else None, None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tp, *parameters):
        ctx.tp = tp
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        with exposed.whole(flat.device):
            dist.all_reduce(flat, group=ctx.tp.group)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, sizes, tp):
        ctx.first, ctx.size = sum(sizes[: tp.rank]), sizes[tp.rank]
        padded = local.new_zeros(*local.shape[:-1], max(sizes))
        padded[..., : local.shape[-1]] = local
        pieces = [torch.empty_like(padded) for _ in sizes]
        with exposed.whole(padded.device):
            dist.all_gather(pieces, padded, group=tp.group)
        return torch.cat([piece[..., :size] for piece, size in zip(pieces, sizes, strict=True)], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.narrow(-1, ctx.first, ctx.size), None, None


def _reduce_scatter(full: Tensor, tp: TensorParallel) -> Tensor:
    rows = full.shape[0]
    most = -(-rows // tp.world)
    if rows % tp.world:
        padded = full.new_zeros(tp.world, most, *full.shape[1:])
        for rank in range(tp.world):
            start, stop = even_split(rows, tp.world, rank)
            padded[rank, : stop - start] = full[start:stop]
        full = padded.flatten(0, 1)
    mine = full.new_empty(most, *full.shape[1:])
    if most:
        with exposed.whole(mine.device):
            _reduce_scatter_single(mine, full.contiguous(), group=tp.group)
    start, stop = even_split(rows, tp.world, tp.rank)
    return mine[: stop - start]


def _all_gather(mine: Tensor, rows: int, tp: TensorParallel) -> Tensor:
    most = -(-rows // tp.world)
    if not most:
        return mine
    if mine.shape[0] < most:
        mine = torch.cat([mine, mine.new_zeros(most - mine.shape[0], *mine.shape[1:])])
    full = mine.new_empty(tp.world * most, *mine.shape[1:])
    with exposed.whole(full.device):
        _all_gather_single(full, mine.contiguous(), group=tp.group)
    if not rows % tp.world:
        return full
    spans = [even_split(rows, tp.world, rank) for rank in range(tp.world)]
    return torch.cat([full[r * most : r * most + stop - start] for r, (start, stop) in enumerate(spans)])
