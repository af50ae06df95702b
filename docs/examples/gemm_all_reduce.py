"""A row-parallel linear of your own: each rank holds some columns of the input and of the weight, and all need the sum.

torchrun --nproc-per-node 2 docs/examples/gemm_all_reduce.py
"""

import torch
import torch.distributed as dist

import fused_ops

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

tokens, inner, outer = 8, 256, 512
torch.manual_seed(0)  # the same on all ranks; each takes its part
whole_input, whole_weight, bias = torch.randn(tokens, inner), torch.randn(outer, inner), torch.randn(outer)
mine = slice(rank * inner // world, (rank + 1) * inner // world)
input, weight = (whole[:, mine].clone().requires_grad_() for whole in (whole_input, whole_weight))

output = fused_ops.gemm_all_reduce(input, weight, bias, require_fused=True)  # the same bits on all ranks
output.square().mean().backward()  # the gradient is the same on all ranks, so nothing is sent

error = (output - torch.nn.functional.linear(whole_input, whole_weight, bias)).abs().max().item()
print(
    f"rank {rank}: {tuple(output.shape)}, off by {error:.1e}, gradient {tuple(weight.grad.shape)}, {fused_ops.counters()}"
)
dist.barrier()
dist.destroy_process_group()
