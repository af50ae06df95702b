"""Vocabulary-parallel cross-entropy (Megatron-LM, arXiv 1909.08053): logits stay where they were computed.

With z_v the logits, m their maximum and y the target: loss = log(sum_v exp(z_v - m)) - (z_y - m), of which ranks exchange m,
the sum and z_y: three numbers a token. gradient: softmax(z) - onehot(y).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_ops import exposed
from models.parallel.range_check import outside
from models.parallel.tensor_parallel import TensorParallel

IGNORED = -100


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, first: int, vocabulary: int, tp: TensorParallel
) -> Tensor:
    """Loss of every token, [M], fp32 (fp64 for fp64 logits); the same on all ranks.

    Per rank: logits [M, V_r], the columns [first, first + V_r) of the vocabulary (padding cut off, V_r may be 0); targets [M]
    int64, the same on all ranks; a target of -100 has loss and gradient zero. The gradient given must be the same on all
    ranks. A target outside the vocabulary is a ValueError on the CPU and a loss of NaN on a device.
    """
    if targets.shape != logits.shape[:1]:
        raise ValueError(
            f"targets must be [{logits.shape[0]}] for logits {list(logits.shape)}, got {list(targets.shape)}"
        )
    bad = outside(targets, vocabulary, "target", IGNORED)
    losses = _CrossEntropy.apply(logits, targets, first, tp)
    return losses.masked_fill(bad, float("nan"))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, tp):
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        rows, columns = scores.shape
        largest = scores.amax(-1) if columns else scores.new_full((rows,), float("-inf"))
        if tp.world > 1:
            with exposed.whole(largest.device):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
        scores.sub_(largest.unsqueeze(-1))

        local = targets - first
        here = (local >= 0) & (local < columns)
        index = local.masked_fill(~here, 0).unsqueeze(-1)
        at_target = scores.gather(-1, index).squeeze(-1) if columns else torch.zeros_like(largest)
        at_target = at_target.masked_fill(~here, 0)
        sums = torch.stack([scores.exp_().sum(-1), at_target])
        if tp.world > 1:
            with exposed.whole(sums.device):
                dist.all_reduce(sums, group=tp.group)

        ignored = targets == IGNORED
        ctx.save_for_backward(scores.div_(sums[0].unsqueeze(-1)), index, here, ignored)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        softmax, index, here, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0).unsqueeze(-1)
        grad_logits = softmax * grad
        if softmax.shape[1]:
            grad_logits.scatter_add_(-1, index, -grad * here.unsqueeze(-1))
        return grad_logits.to(ctx.dtype), None, None, None
