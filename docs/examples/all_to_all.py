"""Exchange rows between ranks over symmetric memory, forward and backward.

torchrun --nproc-per-node 2 docs/examples/all_to_all.py
"""

import torch
import torch.distributed as dist

import fused_ops

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# Rank r sends r + 1 rows to every rank, so it receives 1, 2, 3, ... rows.
rows = torch.full((world * (rank + 1), 4), float(rank), requires_grad=True)
received = fused_ops.all_to_all(
    rows, input_splits=[rank + 1] * world, output_splits=[source + 1 for source in range(world)], require_fused=True
)
received.sum().backward()  # the exchange of the gradient, with the splits swapped

print(
    f"rank {rank}: rows from ranks {received[:, 0].tolist()}, gradient {tuple(rows.grad.shape)}, ran {fused_ops.counters()}"
)
dist.barrier()
dist.destroy_process_group()
