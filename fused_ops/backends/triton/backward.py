"""What backward does on the tables' owner: the sorted lookups, cut into pieces and handed to the update kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fused_ops.backends.triton.launch import NUM_WARPS, block_of, persistent_grid
from fused_ops.backends.triton.lookups import WIDEST_ROW, Lookups, byte_alignment
from fused_ops.backends.triton.row_update import OPTIMIZERS, TARGET_WORDS
from fused_ops.backends.triton.update import update_kernel, update_long_rows_kernel
from fused_ops.backends.triton.weight_gradient import weight_gradient_kernel
from fused_ops.embedding_inputs import OptimizerInputs

PIECE = 64


def update_rows(
    grad: Tensor, order: Tensor, lookups: Lookups, optimizer: OptimizerInputs, targets: Sequence[Tensor | None]
) -> None:
    """Sum the gradients of every row that was looked up and apply them: to the tables, or to dense gradients ("none").

    grad: [B, D]. order: from `Lookups.sorted_order`. targets: one a table, None = leave it alone.
    """
    num_lookups = order.numel()
    if num_lookups == 0:
        return
    lane, inputs = lookups.lane, lookups.inputs
    rows, block_d = block_of(lookups.widest, limit=WIDEST_ROW)
    pieces, num_pieces = cut_in_pieces(order >> lookups.payload_bits, PIECE)
    blocks = triton.cdiv(num_lookups, PIECE)
    scratch = torch.empty(2 * blocks, block_d, dtype=torch.float32, device=order.device)
    unused = scratch  # in the place of a tensor that the optimizer does not have
    shared = {
        "state": lane.state,
        "order": order,
        "scratch": scratch,
        "long_rows": torch.full((blocks,), -1, dtype=torch.int64, device=order.device),
        "features": lookups.features,
        "targets": lane.constants(_target_words(lookups, optimizer, targets)),
        "bag_of_lookup": lookups.bag_of_lookup if lookups.is_weighted else order,
        "learning_rate": unused if optimizer.learning_rate is None else optimizer.learning_rate,
        "corrections": unused if optimizer.step is None else _bias_corrections(optimizer.step, optimizer.betas),
        "eps": optimizer.eps,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "num_lookups": num_lookups,
        "batch": lookups.batch,
        "BITS": lookups.payload_bits,
        "WEIGHTED": lookups.is_weighted,
        "OPTIMIZER": OPTIMIZERS.index(optimizer.kind),
        "DTYPE": lookups.dtype,
        "ALIGN": lookups.alignment,
        "TARGET_BYTES": byte_alignment(targets),
        "STATE_BYTES": byte_alignment(optimizer.states),
        "PIECE": PIECE,
        "BLOCK_D": block_d,
        "num_warps": NUM_WARPS,
    }
    update_kernel[persistent_grid(lane, triton.cdiv(num_lookups, rows))](
        **shared,
        pieces=pieces,
        num_pieces=num_pieces,
        offsets=lookups.offsets,
        weights=lookups.weights,
        grad=grad.contiguous(),
        local_dim=inputs.local_dim,
        MEAN=lookups.mean,
        ROWS=rows,
    )
    update_long_rows_kernel[persistent_grid(lane, blocks)](**shared, num_blocks=blocks)


def weights_gradient(grad: Tensor, order: Tensor, lookups: Lookups, wanted: bool) -> Tensor:
    """The gradient of per-sample weights [nnz] from the tables as they are now, or [0] where it is not wanted."""
    num_lookups = order.numel()
    out = torch.empty(num_lookups if wanted else 0, dtype=torch.float32, device=order.device)
    if out.numel():
        rows, block_d = block_of(lookups.widest, limit=WIDEST_ROW)
        weight_gradient_kernel[persistent_grid(lookups.lane, triton.cdiv(num_lookups, rows))](
            lookups.lane.state,
            out,
            order,
            lookups.features,
            lookups.offsets,
            lookups.bag_of_lookup,
            grad.contiguous(),
            num_lookups,
            lookups.batch,
            lookups.inputs.local_dim,
            BITS=lookups.payload_bits,
            MEAN=lookups.mean,
            DTYPE=lookups.dtype,
            ALIGN=lookups.alignment,
            TABLE_BYTES=byte_alignment(lookups.inputs.tables),
            ROWS=rows,
            BLOCK_D=block_d,
            num_warps=NUM_WARPS,
        )
    return out


def cut_in_pieces(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Where the pieces of sorted `rows` [nnz] begin, then nnz for the rest of [nnz + 1]; and their number [1].

    A piece is up to `most` adjacent entries of one row, and only the last piece of a row has fewer than `most`.
    """
    count = rows.numel()
    positions = torch.arange(count, device=rows.device)
    is_new_row = torch.ones(count, dtype=torch.bool, device=rows.device)
    is_new_row[1:] = rows[1:] != rows[:-1]
    row_begin = torch.where(is_new_row, positions, 0).cummax(0).values
    begins = (positions - row_begin) % most == 0
    number = begins.cumsum(0)
    pieces = torch.full((count + 2,), count, dtype=torch.int64, device=rows.device)
    pieces.scatter_(0, torch.where(begins, number - 1, count + 1), positions)
    return pieces[:-1], number[-1:]


def _target_words(lookups: Lookups, optimizer: OptimizerInputs, targets: Sequence[Tensor | None]) -> list[int]:
    """[features, TARGET_WORDS] addresses: what is updated, and its states."""
    inputs = lookups.inputs
    states = [optimizer.table_states(which, len(inputs.tables)) for which in (0, 1)]
    words = []
    for t in inputs.feature_tables:
        target = targets[t]
        addresses = [0 if target is None else target.data_ptr(), *(of[t].data_ptr() if of else 0 for of in states)]
        words += addresses + [0] * (TARGET_WORDS.value - len(addresses))
    return words


def _bias_corrections(step: Tensor, betas: tuple[float, float]) -> Tensor:
    """fp32 [2]: 1 - beta^step."""
    return torch.cat([1 - torch.pow(beta, step.double()) for beta in betas]).to(torch.float32)
