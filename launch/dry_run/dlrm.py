"""A DLRM's parameter count, sharding plan and bytes a rank."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from trainers.config import RunConfig
from trainers.dlrm.config import DLRMConfig

MIB = 1 << 20


def report(config: RunConfig, world: int, console: Console) -> None:
    from models.dlrm.model import dense_parameter_count, table_parameter_count
    from models.dlrm.plan import describe_plan

    model = config.model
    assert isinstance(model, DLRMConfig)
    tables, dense = table_parameter_count(model), dense_parameter_count(model)
    console.print(f"parameters: {tables + dense:,} ({tables:,} in {len(model.table_rows)} tables, {dense:,} dense)")

    plan = describe_plan(model, world)
    rows = Table(
        "table", "rows", "dim", "sharding", "rank, or rank:first column", "MiB", title=f"sharding plan of {world} ranks"
    )
    for table in plan:
        where = ", ".join(map(str, table.ranks))
        if len(table.column_offsets) > 1:
            slices = zip(table.ranks, table.column_offsets, strict=True)
            where = ", ".join(f"{rank}:{first}" for rank, first in slices)
        size = f"{table.bytes / MIB:,.1f}"
        rows.add_row(table.table, f"{table.rows:,}", str(table.dim), table.sharding, where, size)
    console.print(rows)

    sizes = Table(
        "rank",
        "tables",
        "their optimizer",
        "dense",
        "total MiB",
        title="bytes a rank (activations and gradients of tables not counted)",
    )
    for rank, (weights, states) in enumerate(_table_bytes(config, plan, world)):
        whole = weights + states + _dense_bytes(config, dense)
        sizes.add_row(
            str(rank), f"{weights:,}", f"{states:,}", f"{_dense_bytes(config, dense):,}", f"{whole / MIB:,.1f}"
        )
    console.print(sizes)


def _table_bytes(config: RunConfig, plan: list, world: int) -> list[tuple[int, int]]:
    """(weights, optimizer states) of each rank's tables; states are fp32 in FBGEMM whatever the weights are."""
    from models.dlrm.plan import bytes_per_rank

    assert isinstance(config.model, DLRMConfig)
    weights = bytes_per_rank(plan, world)
    element = {"fp32": 4, "fp16": 2}[config.model.embedding_dtype]
    states = [0] * world
    if config.optim.name in ("adagrad", "adam"):
        states = [4 * size // element * (2 if config.optim.name == "adam" else 1) for size in weights]
    elif config.optim.name == "rowwise_adagrad":
        for table in plan:
            for rank in table.ranks:
                states[rank] += 4 * table.rows
    return list(zip(weights, states, strict=True))


def _dense_bytes(config: RunConfig, parameters: int) -> int:
    """fp32 weights, gradients and what the optimizer keeps of each: one state, for Adam two."""
    return 4 * parameters * {"sgd": 2, "adam": 4}.get(config.optim.name, 3)
