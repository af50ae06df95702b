"""A feed-forward layer under sequence parallelism: AllGather + GEMM going in, GEMM + ReduceScatter coming out.

Between such layers each rank holds some rows (tokens) instead of a copy of them all. 7 tokens over 2 ranks: 4 and 3.

torchrun --nproc-per-node 2 docs/examples/sequence_parallel.py
"""

import torch
import torch.distributed as dist

import fused_ops

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

tokens, width, hidden = 7, 64, 256
mine = tokens // world + (rank < tokens % world)  # the first ranks have one more
rows = torch.randn(mine, width, requires_grad=True)
up = torch.randn(hidden // world, width, requires_grad=True)  # this rank's columns of the hidden layer
down = torch.randn(width, hidden // world, requires_grad=True)

activations = torch.relu(fused_ops.all_gather_gemm(rows, up, total_rows=tokens))  # [all tokens, my hidden columns]
output = fused_ops.gemm_reduce_scatter(activations, down)  # [my tokens, width]
output.sum().backward()  # the two operators are each other's backward

print(f"rank {rank}: {tuple(activations.shape)} -> {tuple(output.shape)}, gradient {tuple(rows.grad.shape)}")
dist.barrier()
dist.destroy_process_group()
