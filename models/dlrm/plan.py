"""One sharding plan for both modes: which rank owns which table, or which columns of it.

TorchRec's planner chooses, among whole tables and column slices only. A plan depends on the model's configuration and
on the number of ranks, on nothing else: not on `comm`, the batch or the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import _remote_device
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, PlannerError, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingPlan, ShardingType

from models.dlrm.model import DLRMConfig, build_dlrm, table_name

COLLECTION = "sparse_arch.embedding_bag_collection"
SHARDING_TYPES = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)
ELEMENT_BYTES = {"fp32": 4, "fp16": 2}
SMALLEST_SLICE = 32  # columns; narrower slices cost more in copies of indices than they balance
# How far above an equal share of all tables' bytes a rank may be, tried in turn; the planner balances time within it.
# The machine's own memory is left out, so that a plan doesn't depend on where it is made.
SHARE_LIMITS = (1.25, 1.5, 2.0, 4.0, float("inf"))
SMALL = 1 << 30  # bytes nobody need balance


@dataclass(frozen=True)
class PlannedTable:
    """A table, and its slices: `ranks[i]` holds columns `column_offsets[i]` on; `bytes` is the weights' size in all."""

    table: str
    rows: int
    dim: int
    sharding: str
    ranks: tuple[int, ...]
    column_offsets: tuple[int, ...]
    bytes: int


def build_plan(
    config: DLRMConfig,
    world: int,
    *,
    in_backward: bool = True,
    constraints: dict[str, ParameterConstraints] | None = None,
    model: nn.Module | None = None,
    devices: Sequence[torch.device] | None = None,
) -> ShardingPlan:
    """Plans without a process group; every rank comes to the same plan.

    `in_backward=False` gives the tables plain gradients (TorchRec's DENSE kernel), placed alike.
    `constraints` replaces the planner's, table by table.
    `devices`: each rank's own, which several ranks may share; None = the CPU. They change placements, not the plan.
    """
    if world < 1:
        raise ValueError(f"a plan needs at least one rank, got {world}")
    model = model if model is not None else build_dlrm(config)
    all_constraints = {**_default_constraints(config), **(constraints or {})}
    table_bytes = sum(config.table_rows) * config.embedding_dim * ELEMENT_BYTES[config.embedding_dtype]
    for limit in SHARE_LIMITS:
        memory = SMALL + min(limit * table_bytes / world, float(1 << 50))
        planner = EmbeddingShardingPlanner(
            topology=TopologyFactory.create_topology(
                TrainerConfig(world_size=world, local_world_size=world, ddr_cap_bytes=int(memory)),
                kernel_config=KernelConfig(compute_device="cpu"),
            ),
            constraints=all_constraints,
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            stats=[],
            debug=False,
        )
        try:
            plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
            break
        except PlannerError:
            if limit == SHARE_LIMITS[-1]:
                raise
    for sharding in plan.plan[COLLECTION].values():
        if sharding.sharding_type not in SHARDING_TYPES:
            raise ValueError(f"the planner chose {sharding.sharding_type}; allowed: {', '.join(SHARDING_TYPES)}")
        if not in_backward:
            sharding.compute_kernel = EmbeddingComputeKernel.DENSE.value
        if devices is not None:
            for shard in sharding.sharding_spec.shards:
                rank = shard.placement.rank()
                shard.placement = _remote_device(f"rank:{rank}/{devices[rank]}")
    return plan


def _default_constraints(config: DLRMConfig) -> dict[str, ParameterConstraints]:
    sliceable = config.embedding_dim >= 2 * SMALLEST_SLICE
    return {
        table_name(t): ParameterConstraints(
            sharding_types=list(SHARDING_TYPES if sliceable else SHARDING_TYPES[:1]),
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            min_partition=SMALLEST_SLICE,
            pooling_factors=[float(factor)],
        )
        for t, factor in enumerate(config.multi_hot_sizes or [1] * len(config.table_rows))
    }


def describe_plan(config: DLRMConfig, world: int) -> list[PlannedTable]:
    """The plan of `world` ranks as rows, in the order of the tables, without a process group."""
    plan = build_plan(config, world).plan[COLLECTION]
    rows = []
    for t, table_rows in enumerate(config.table_rows):
        sharding = plan[table_name(t)]
        shards = sharding.sharding_spec.shards
        rows.append(
            PlannedTable(
                table=table_name(t),
                rows=table_rows,
                dim=config.embedding_dim,
                sharding=sharding.sharding_type,
                ranks=tuple(shard.placement.rank() for shard in shards),
                column_offsets=tuple(shard.shard_offsets[1] for shard in shards),
                bytes=table_rows * config.embedding_dim * ELEMENT_BYTES[config.embedding_dtype],
            )
        )
    return rows


def bytes_per_rank(plan: list[PlannedTable], world: int) -> list[int]:
    """Bytes of table weights on every rank."""
    sizes = [0] * world
    for table in plan:
        edges = [*sorted(table.column_offsets), table.dim]
        width = {start: end - start for start, end in itertools.pairwise(edges)}
        for rank, start in zip(table.ranks, table.column_offsets, strict=True):
            sizes[rank] += table.bytes * width[start] // table.dim
    return sizes
