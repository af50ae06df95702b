"""A Mixture of Experts layer of your own: each rank has some tokens and some of the experts, and each token goes to two of them.

torchrun --nproc-per-node 2 docs/examples/mixture_of_experts.py
"""

import torch
import torch.distributed as dist

import fused_ops

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

num_tokens, width, hidden, experts, top_k = 10 + rank, 64, 128, 4 * world, 2
tokens = torch.randn(num_tokens, width, requires_grad=True)
router = torch.randn(experts, width)  # the same on all ranks in a real model
up = torch.randn(experts // world, hidden, width, requires_grad=True)  # of this rank's experts
down = torch.randn(experts // world, width, hidden, requires_grad=True)

probabilities, chosen = torch.nn.functional.linear(tokens, router).softmax(1).topk(top_k)
sorted_experts, order = chosen.flatten().sort(stable=True)  # a row for each (token, expert), sorted by expert
routing = order // top_k, sorted_experts.bincount(minlength=experts)

inner, _, received = fused_ops.all_to_all_gemm(tokens, up, *routing)  # [rows that came to my experts, hidden]
gates = probabilities.flatten()[order]
output = fused_ops.gemm_all_to_all(torch.relu(inner), down, received, *routing, gates, num_tokens)
output.sum().backward()  # the two operators are each other's backward

print(
    f"rank {rank}: {num_tokens} tokens, {inner.shape[0]} rows at its experts, output {tuple(output.shape)}, "
    f"gradient {tuple(up.grad.shape)}"
)
dist.barrier()
dist.destroy_process_group()
