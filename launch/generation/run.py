"""One rank of one generation, from process group to report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import fused_ops
from launch.generation import report as reports
from launch.generation.config import GenerateConfig, check
from launch.generation.prompts import make_prompts
from launch.generation.tokenizer import make_tokenizer
from launch.generation.weights import build
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.generation import generate
from models.transformer.model import Transformer
from models.transformer.step_split import split_step, steps_that_fit
from trainers import device as devices
from trainers.config import CommConfig, ConfigError, TrainerConfig
from trainers.data.text.tokenizer import Tokenizer
from trainers.run_summary import backend_that_ran, counter_rows, versions

WARM_UP_TOKENS = 3  # a run before those that count: sources are compiled, channels made, `comm=auto` decides
GRAPH: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}


def run(config: GenerateConfig, architecture: TransformerConfig, rank: int, world: int) -> dict[str, Any]:
    """One rank of one run, all of whose ranks share the model; returns the report, which rank 0 prints and writes.

    Needs the environment that torchrun sets. Raises ConfigError before ranks meet, where they can all see what is wrong.
    On any other failure the process should exit at once: its exit is what frees ranks that wait for it.
    """
    check(config)
    if architecture.num_kv_heads < world:
        raise ConfigError(
            f"{world} ranks cannot split a model of {architecture.num_kv_heads} KV heads; use at most those"
        )
    tokenizer = make_tokenizer(config, architecture.vocabulary)
    prompts = make_prompts(config, tokenizer, architecture.vocabulary)
    _check_length(config, architecture, prompts)
    trainer = TrainerConfig(device=config.device, ranks_per_gpu=config.ranks_per_gpu)
    device = devices.take(trainer)
    timeout = timedelta(seconds=config.comm.timeout_s)
    dist.init_process_group(devices.BACKENDS[config.device], rank=rank, world_size=world, timeout=timeout)
    fused_ops.set_timeout(config.comm.timeout_s)
    tp = TensorParallel(
        dist.group.WORLD if world > 1 else None, comm=_comm(config.comm), require_fused=config.comm.require_fused
    )
    model = build(config, architecture, tp, device)
    found = _generate(config, model, tokenizer, prompts)
    link = None if found["backend"] is None else devices.describe_link(trainer, found["backend"])
    report = {"ranks": world, "comm": config.comm.gemm_all_reduce, "link": link, **found}
    report |= {"config": asdict(config), "architecture": asdict(architecture), "versions": versions()}
    if rank == 0:
        _tell(config, report)
    dist.barrier()
    dist.destroy_process_group()
    return report


def _check_length(config: GenerateConfig, architecture: TransformerConfig, prompts: list[list[int]]) -> None:
    longest = max(map(len, prompts))
    needed = longest + config.max_new_tokens - 1  # the last token is never fed
    if architecture.positions == "learned" and needed > architecture.max_length:
        raise ConfigError(
            f"max_new_tokens={config.max_new_tokens} after a prompt of {longest} tokens needs {needed} positions, and the "
            f"model has learned {architecture.max_length}"
        )


def _generate(
    config: GenerateConfig, model: Transformer, tokenizer: Tokenizer | None, prompts: list[list[int]]
) -> dict[str, Any]:
    graph = GRAPH[config.cuda_graph]
    generate(model, prompts, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens), use_cuda_graph=graph)
    fused_ops.reset_counters()
    generated = generate(
        model,
        prompts,
        max_new_tokens=config.max_new_tokens,
        stop_token=tokenizer.end_of_document if tokenizer is not None and config.stop else None,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        use_cuda_graph=graph,
    )
    counters = counter_rows(fused_ops.counters())
    steps = config.split_steps
    if (fit := steps_that_fit(model, prompts)) is not None:
        steps = min(steps, fit)
    split = split_step(model, prompts, steps=steps) if steps else None
    return {
        "batch": len(prompts),
        "prompt_tokens": prompts,
        "tokens": generated.tokens,
        "texts": None if tokenizer is None else _texts(tokenizer, prompts, generated.tokens),
        "backend": backend_that_ran(counters),
        "counters": counters,
        **reports.figures(generated, split),
    }


def _texts(tokenizer: Tokenizer, prompts: list[list[int]], tokens: list[list[int]]) -> list[dict[str, str]]:
    return [
        {"prompt": tokenizer.decode(prompt), "continuation": tokenizer.decode(_known(tokenizer, new))}
        for prompt, new in zip(prompts, tokens, strict=True)
    ]


def _known(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[int]:
    """Without ids of the model's vocabulary that mean nothing to the tokenizer."""
    return [token for token in tokens if token < tokenizer.vocabulary]


def _comm(comm: CommConfig) -> str:
    fused = comm.gemm_all_reduce == "fused"
    return comm.backend if fused and comm.backend != "auto" else comm.gemm_all_reduce


def _tell(config: GenerateConfig, report: dict[str, Any]) -> None:
    for line in reports.lines(report):
        print(line, flush=True)
    if config.out is not None:
        reports.write(config.out, report)
        print(f"report: {config.out}", flush=True)
