"""What `launch.generate` understands."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from trainers.config import BACKENDS, COMM_MODES, CommConfig, ConfigError
from trainers.data.text.tokenizer import END_OF_DOCUMENT

DEFAULT_PROMPT = "def "
WEIGHTS = ("random", "noise", "hf:<folder>", "run:<run or checkpoint directory>")
CHOICES = {"dtype": ("fp32", "bf16"), "device": ("cpu", "cuda"), "cuda_graph": ("auto", "on", "off")}


@dataclass
class GenerateConfig:
    """One of `prompts`, `prompt_file` and `prompt_length` says what to go on from; with none of them it is one short text."""

    comm: CommConfig = field(default_factory=CommConfig)
    prompts: list[str] | None = None
    prompt_file: str | None = None  # a prompt a line
    prompt_length: int | None = (
        None  # random tokens, that many a prompt, to take times: nothing becomes text or ends early
    )
    batch: int | None = None  # sequences; more than there are prompts repeats them in turn; None = one a prompt
    max_new_tokens: int = 64
    stop: bool = True  # a sequence ends with the tokenizer's end of document
    temperature: float = 0.0  # 0 = the likeliest token; the next two need more
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0  # of sampling, random prompts and random weights
    # random: first weights of a training run | noise: drawn where they lie, fast, others at each number of ranks |
    # hf:<Llama folder> | run:<run or checkpoint directory>; the last two bring their model along
    weights: str = "random"
    tokenizer: str = (
        "auto"  # auto (that of the run or folder the weights are from, else byte) | byte | a tokenizer.json
    )
    end_of_document: str = END_OF_DOCUMENT  # that tokenizer's token
    dtype: str = "fp32"  # fp32 | bf16
    device: str = "cpu"  # cpu | cuda
    ranks_per_gpu: int = 1  # ranks that share each card, in a one-GPU lab that is set up for it (docs/one-gpu-lab.md)
    cuda_graph: str = "auto"  # auto (on a GPU) | on | off
    split_steps: int = 16  # decode steps, beside those timed, that say how a step's time is split; 0 = none
    out: str | None = None  # a file for all of it, as JSON

    def source(self) -> tuple[str, str]:
        """`weights` as (kind, path), the path empty where there is none."""
        kind, _, path = self.weights.partition(":")
        return kind, path


def check(config: GenerateConfig) -> None:
    """ConfigError, one line, for what the types cannot say; it needs no process group, GPU or model."""
    for key, allowed in CHOICES.items():
        if getattr(config, key) not in allowed:
            raise ConfigError(f"{key}={getattr(config, key)} is not a choice (allowed: {', '.join(allowed)})")
    for key, least in (
        ("prompt_length", 1),
        ("batch", 1),
        ("max_new_tokens", 1),
        ("ranks_per_gpu", 1),
        ("split_steps", 0),
    ):
        value = getattr(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key}={value} must be at least {least}")
    for problem in (
        _comm(config),
        _prompts(config),
        _weights(config),
        _tokenizer(config),
        _device(config),
        _out(config),
    ):
        if problem:
            raise ConfigError(problem)
    from models.transformer.sampling import Sampling  # torch, which what is above need not wait for

    try:
        Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _comm(config: GenerateConfig) -> str | None:
    comm = config.comm
    if comm.gemm_all_reduce not in COMM_MODES:
        return f"comm.gemm_all_reduce={comm.gemm_all_reduce} is not a choice (allowed: {', '.join(COMM_MODES)})"
    if comm.backend not in BACKENDS:
        return f"comm.backend={comm.backend} is not a choice (allowed: {', '.join(BACKENDS)})"
    if comm.require_fused and comm.gemm_all_reduce != "fused":
        return f"comm.require_fused=true contradicts comm.gemm_all_reduce={comm.gemm_all_reduce}"
    if not (math.isfinite(comm.timeout_s) and comm.timeout_s > 0):
        return f"comm.timeout_s={comm.timeout_s} must be a positive number of seconds"
    return None


def _prompts(config: GenerateConfig) -> str | None:
    given = [key for key in ("prompts", "prompt_file", "prompt_length") if getattr(config, key) is not None]
    if len(given) > 1:
        return f"{' and '.join(given)} are given; one of them says what the prompts are"
    if config.prompts is not None and not all(config.prompts or [""]):
        return "prompts is empty or has an empty text; every prompt needs at least one token"
    if config.prompt_file is not None and not Path(config.prompt_file).is_file():
        return f"prompt_file={config.prompt_file} is no file"
    if config.prompts is not None and config.batch is not None and config.batch < len(config.prompts):
        return f"batch={config.batch}, and there are {len(config.prompts)} prompts"
    return None


def _weights(config: GenerateConfig) -> str | None:
    kind, path = config.source()
    if kind not in ("random", "noise", "hf", "run") or bool(path) != (kind in ("hf", "run")):
        return f"weights={config.weights} is not a choice (allowed: {', '.join(WEIGHTS)})"
    if path and not Path(path).is_dir():
        return f"weights={config.weights}: {path} is no directory"
    return None


def _tokenizer(config: GenerateConfig) -> str | None:
    if config.tokenizer not in ("auto", "byte") and not Path(config.tokenizer).exists():
        return f"tokenizer={config.tokenizer} is neither auto nor byte nor a file or folder"
    return None


def _device(config: GenerateConfig) -> str | None:
    if config.device == "cpu" and config.cuda_graph == "on":
        return "cuda_graph=on needs device=cuda"
    if config.device == "cpu" and config.ranks_per_gpu > 1:
        return f"ranks_per_gpu={config.ranks_per_gpu} needs device=cuda"
    if config.device == "cuda" and config.cuda_graph == "off" and config.split_steps:
        return "on a GPU a step's time is split over replays of its CUDA graph: with cuda_graph=off set split_steps=0"
    return None


def _out(config: GenerateConfig) -> str | None:
    if config.out is None:
        return None
    folder = Path(config.out).absolute().parent
    if Path(config.out).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        return f"out={config.out} is not a file in a directory that is there and can be written to"
    return None
