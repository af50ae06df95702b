"""What generation is given, checked on every rank together, so that no rank waits for one that has refused."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from models.parallel.tensor_parallel import TensorParallel
from models.transformer.model import Transformer
from models.transformer.sampling import Sampling


def check(
    model: Transformer,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_token: int | None,
    sampling: tuple[float, int | None, float | None, int],
    use_cuda_graph: bool | str,
) -> tuple[Sampling, bool]:
    """The `Sampling` of its four values, and whether to capture. Collective; ValueError on every rank where one has reason to
    refuse, or where ranks were given different things."""
    problem, checked = None, (Sampling(), False)
    try:
        _check_prompts(model, prompts, max_new_tokens)
        if stop_token is not None and not 0 <= stop_token < model.config.vocabulary:
            raise ValueError(f"stop_token is {stop_token}, outside the vocabulary of {model.config.vocabulary}")
        checked = Sampling(*sampling), _captures(use_cuda_graph, model.embedding.weight.device)
    except ValueError as error:
        problem = str(error)
    _agree(model.tp, problem, repr((prompts, max_new_tokens, stop_token, checked)))
    return checked


def _check_prompts(model: Transformer, prompts: list[list[int]], max_new_tokens: int) -> None:
    config = model.config
    if not prompts:
        raise ValueError("no prompts; at least one is needed")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; it needs at least one token")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < config.vocabulary:
                raise ValueError(f"prompt {number} has token {token}, outside the vocabulary of {config.vocabulary}")
    longest = max(map(len, prompts))
    needed = longest + max_new_tokens - 1  # the last token is never fed
    if model.positions is not None and needed > config.max_length:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} more need {needed} positions, and the model has "
            f"{config.max_length} learned ones"
        )


def _captures(use_cuda_graph: bool | str, device: torch.device) -> bool:
    if use_cuda_graph not in (True, False, "auto"):
        raise ValueError(f"use_cuda_graph is {use_cuda_graph!r}; allowed: True, False, 'auto'")
    if use_cuda_graph is True and device.type != "cuda":
        raise ValueError(f"use_cuda_graph=True, and the model is on {device}; a CUDA graph needs it on a GPU")
    return device.type == "cuda" if use_cuda_graph == "auto" else bool(use_cuda_graph)


def _agree(tp: TensorParallel, problem: str | None, facts: str) -> None:
    mine = (problem, hashlib.blake2b(facts.encode(), digest_size=16).hexdigest())
    everyone = [mine] * tp.world
    if tp.world > 1:
        dist.all_gather_object(everyone, mine, group=tp.group)
    for rank, (said, _) in enumerate(everyone):
        if said is not None:
            raise ValueError(said if rank == tp.rank or said == problem else f"rank {rank}: {said}")
    others = [rank for rank, (_, digest) in enumerate(everyone) if digest != everyone[0][1]]
    if others:
        raise ValueError(f"ranks {others} were given other prompts or options than rank 0; all must be given the same")
