"""Embedding tables sharded over ranks inside your own model: lookups fused with the All-to-All, optimizer in backward.

torchrun --nproc-per-node 2 docs/examples/embedding_all_to_all.py
"""

import torch
import torch.distributed as dist

import fused_ops
from fused_ops import EmbeddingLayout, FusedOptimizer

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

tables_per_rank, rows, dim, local_batch = 2, 1000, 16, 8
layout = EmbeddingLayout.table_wise([[dim] * tables_per_rank] * world, batch_sizes=[local_batch] * world)
tables = [torch.randn(rows, dim) for _ in range(tables_per_rank)]
optimizer = FusedOptimizer(
    "rowwise_adagrad", learning_rate=0.05, states=FusedOptimizer.make_states("rowwise_adagrad", tables)
)

# Indices of this rank's tables, for every rank's samples: feature-major bags of 0 to 3 ids, as FBGEMM takes them.
lengths = torch.randint(0, 4, (tables_per_rank * layout.global_batch,))
offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
indices = torch.randint(0, rows, (int(offsets[-1]),))

before = tables[0].clone()
pooled = fused_ops.embedding_all_to_all(tables, indices, offsets, layout, optimizer=optimizer)
pooled.square().mean().backward()  # gradients travel to the tables' owners, who update them

changed = int((tables[0] != before).any(dim=1).sum())
print(f"rank {rank}: my samples' rows {tuple(pooled.shape)}, {changed} rows of my first table updated")
dist.barrier()
dist.destroy_process_group()
