"""FBGEMM's table-batched CUDA kernels, the ones behind SplitTableBatchedEmbeddingBagsCodegen, over the caller's own tables.

All tables are one kernel call, wherever they lie. Nothing waits for the device, so that a call can be captured in a CUDA
graph; a captured update has the learning rate that it was captured with, as FBGEMM takes it from the host. The operators
are those that FBGEMM's own autograd calls (`*_pt2_wrapper`); they have CPU kernels too, which is how CI runs this file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.backends.baseline.fbgemm_metadata import Features, Placed, features, nothing, placed
from fused_ops.backends.baseline.index_checks import IndexChecks, still_valid
from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs, OptimizerInputs
from fused_ops.host_values import host_value, remember

OUTPUT_DTYPES = {torch.float32: 0, torch.float16: 1}  # FBGEMM's SparseType
POOLING_MODES = {"sum": 0, "mean": 1}
WIDEST = 2048
ALIGNMENT = 16
LONGEST_SEGMENT, BLOCK = 32, 32  # what FBGEMM passes on NVIDIA GPUs


@functools.cache
def _missing(operator: str) -> str | None:
    try:
        import fbgemm_gpu  # noqa: F401

        getattr(torch.ops.fbgemm, operator)
    except (ImportError, OSError, AttributeError) as error:
        return f"FBGEMM cannot be used: {error}".split("\n")[0]
    return None


def why_not(inputs: EmbeddingInputs, optimizer: str = "none") -> str | None:
    """Why these kernels cannot take the call; None when they can."""
    if inputs.dtype not in OUTPUT_DTYPES:
        return f"FBGEMM's CUDA kernels do not take {inputs.dtype} tables"
    for t in set(inputs.feature_tables):
        table = inputs.tables[t]
        if table.shape[1] % 4 or table.shape[1] > WIDEST:
            return f"FBGEMM's CUDA kernels take widths that are multiples of 4 up to {WIDEST}, got {table.shape[1]}"
        if table.data_ptr() % ALIGNMENT:
            return f"FBGEMM's CUDA kernels take tables aligned to {ALIGNMENT} bytes"
        if table.shape[0] == 0:
            return "FBGEMM's CUDA kernels take tables of at least one row"
    updated = "sgd" if optimizer == "none" else optimizer
    return _missing(f"split_embedding_backward_codegen_{updated}_unweighted_pt2_wrapper")


def pool(inputs: EmbeddingInputs, checks: IndexChecks | None = None) -> Tensor:
    """[B, D], features side by side. `checks` learns of bad indices; without, the next call without raises."""
    batch = inputs.layout.global_batch
    if not inputs.dims or not batch:
        if inputs.indices.numel():
            raise ValueError(f"{OPERATOR}: offsets make no bags, but there are {inputs.indices.numel()} indices")
        return inputs.indices.new_empty((batch, inputs.local_dim), dtype=inputs.dtype)
    about = features(inputs)
    indices, offsets = (checks or _checks_alone(inputs.indices.device)).valid(inputs, about)
    tables = placed(inputs.tables, inputs.feature_tables)
    weights = _weights(inputs)
    return _operator(f"split_embedding_codegen_forward_{_weighted(weights)}_pt2_wrapper")(
        **_tables(tables, about),
        total_D=about.total_dim,
        max_D=about.widest,
        hash_size_cumsum=about.hash_size_cumsum,
        indices=indices,
        offsets=offsets,
        pooling_mode=POOLING_MODES[inputs.pooling],
        indice_weights=weights,
        uvm_cache_stats=nothing(indices.device, torch.int32),
        is_experimental=False,
        output_dtype=OUTPUT_DTYPES[inputs.dtype],
    )


@functools.cache
def _checks_alone(device: torch.device) -> IndexChecks:
    return IndexChecks(device)


def weights_gradient(inputs: EmbeddingInputs, grad: Tensor) -> Tensor:
    """[nnz] float32."""
    if inputs.indices.numel() == 0:
        return torch.empty(0, dtype=torch.float32, device=grad.device)
    about = features(inputs)
    indices, offsets = still_valid(inputs, about)
    gradient = _operator("split_embedding_codegen_grad_indice_weights_pt2_wrapper")(
        grad_output=grad,
        **_tables(placed(inputs.tables, inputs.feature_tables), about),
        max_D=about.widest,
        indices=indices,
        offsets=offsets,
        feature_requires_grad=about.ones,
    )
    if inputs.pooling == "sum":
        return gradient
    positions = torch.arange(indices.numel(), dtype=offsets.dtype, device=offsets.device)
    bags = torch.bucketize(positions, offsets[1:], right=True).clamp(max=offsets.numel() - 2)
    return gradient / offsets.diff().index_select(0, bags)


def dense_gradients(inputs: EmbeddingInputs, grad: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    """One gradient of the table's shape and dtype for each wanted table: SGD's step with rate -1 from zero."""
    sizes = [table.numel() for table in inputs.tables]
    zeros = torch.zeros(sum(sizes), dtype=inputs.dtype, device=grad.device)
    dense = [part.view(t.shape) for part, t in zip(zeros.split(sizes), inputs.tables, strict=True)]
    if inputs.indices.numel():
        _step("sgd", inputs, grad, dense, learning_rate_tensor=torch.tensor([-1.0]))
    return [dense[t] for t in wanted]


def update(inputs: EmbeddingInputs, grad: Tensor, optimizer: OptimizerInputs) -> None:
    """Apply the optimizer to the distinct rows, in place."""
    assert optimizer.learning_rate is not None
    rate = optimizer.learning_rate
    if rate.is_cuda:
        rate = torch.tensor([host_value(rate, "the learning rate")])
    hyper: dict[str, Any] = {"learning_rate_tensor": rate}
    if optimizer.kind != "sgd":
        hyper["eps"] = optimizer.eps
    if optimizer.step is not None:
        hyper["beta1"], hyper["beta2"] = optimizer.betas
        hyper["iter"] = _next_step(optimizer.step)
    if inputs.indices.numel():
        _step(optimizer.kind, inputs, grad, inputs.tables, optimizer, **hyper)


def _next_step(step: Tensor) -> int:
    """Adds one to Adam's step; its number on the host."""
    if step.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "FBGEMM takes Adam's step from the host: a CUDA graph would repeat the step it was captured in"
        )
    number = int(host_value(step, "Adam's step")) + 1
    step.add_(1)
    remember(step, number, announced_writes=1)  # by `embedding_update`, when it comes to the next step
    return number


def _step(
    kind: str,
    inputs: EmbeddingInputs,
    grad: Tensor,
    tables: Sequence[Tensor],
    optimizer: OptimizerInputs | None = None,
    **hyper: Any,
) -> None:
    about = features(inputs)
    indices, offsets = still_valid(inputs, about)
    weights = _weights(inputs)
    _operator(f"split_embedding_backward_codegen_{kind}_{_weighted(weights)}_pt2_wrapper")(
        grad_output=grad,
        **_tables(placed(tables, inputs.feature_tables), about),
        max_D=about.widest,
        mixed_D=about.mixed_dims,
        hash_size_cumsum=about.hash_size_cumsum,
        total_hash_size_bits=about.linear_bits,
        indices=indices,
        offsets=offsets,
        pooling_mode=POOLING_MODES[inputs.pooling],
        indice_weights=weights,
        BT_block_size=BLOCK,
        max_segment_length_per_warp=LONGEST_SEGMENT,
        stochastic_rounding=False,
        info_B_num_bits=about.batch_bits,
        info_B_mask_int64=about.batch_mask,
        use_uniq_cache_locations=False,
        use_homogeneous_placements=True,
        **({} if optimizer is None else _states(optimizer, inputs, about)),
        **hyper,
        output_dtype=OUTPUT_DTYPES[inputs.dtype],
    )


def _operator(name: str) -> Any:
    return getattr(torch.ops.fbgemm, name)


def _weights(inputs: EmbeddingInputs) -> Tensor | None:
    return None if inputs.weights is None else inputs.weights.detach().contiguous()


def _weighted(weights: Tensor | None) -> str:
    return "unweighted" if weights is None else "weighted"


def _tables(tables: Placed, about: Features) -> dict[str, Tensor]:
    """Weights that lie on the device, none of them in managed memory or behind a cache."""
    device, dtype = about.rows.device, tables.flat.dtype
    none = nothing(device, dtype)
    return {
        **_on_either("{}_weights", tables.flat, none),
        "uvm_weights": none,
        "lxu_cache_weights": nothing(device, dtype, 2),
        "lxu_cache_locations": nothing(device, torch.int32),
        "weights_placements": about.placements,
        "weights_offsets": tables.offsets,
        "D_offsets": about.dim_offsets,
    }


def _states(optimizer: OptimizerInputs, inputs: EmbeddingInputs, about: Features) -> dict[str, Tensor]:
    device = about.rows.device
    none = nothing(device, torch.float32)
    arguments: dict[str, Tensor] = {}
    for number in (1, 2):
        states = optimizer.table_states(number - 1, len(inputs.tables))
        if states:
            state = placed(states, inputs.feature_tables)
            name = f"momentum{number}"
            arguments |= {**_on_either(name + "_{}", state.flat, none), f"{name}_uvm": none}
            arguments |= {f"{name}_placements": about.placements, f"{name}_offsets": state.offsets}
    if optimizer.kind == "adam":  # its bias correction by rows, which is off
        arguments |= {f"row_counter_{where}": none for where in ("host", "dev", "uvm")}
        arguments["row_counter_placements"] = nothing(device, torch.int32)
        arguments["row_counter_offsets"] = nothing(device, torch.int64)
    return arguments


def _on_either(name: str, flat: Tensor, none: Tensor) -> dict[str, Tensor]:
    """A kernel of the CPU takes the one, a kernel of the GPU the other."""
    on_host = flat.device.type == "cpu"
    return {name.format("host"): flat if on_host else none, name.format("dev"): none if on_host else flat}
