"""Prompts as token ids."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import torch

from launch.generation.config import DEFAULT_PROMPT, GenerateConfig
from trainers.config import ConfigError
from trainers.data.text.tokenizer import Tokenizer


def make_prompts(config: GenerateConfig, tokenizer: Tokenizer | None, vocabulary: int) -> list[list[int]]:
    """`config.batch` prompts, random without a tokenizer. ConfigError where there are more, or one has no token."""
    if tokenizer is None:
        assert config.prompt_length is not None
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.batch or 1, config.prompt_length)
        return torch.randint(0, vocabulary, shape, generator=generator).tolist()
    texts = config.prompts or [DEFAULT_PROMPT]
    if config.prompt_file is not None:
        try:
            texts = Path(config.prompt_file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt_file={config.prompt_file} is not UTF-8 text: {error}") from error
        if not texts or not all(texts):
            raise ConfigError(f"prompt_file={config.prompt_file} is empty or has an empty line; a line is a prompt")
    prompts = [ids.tolist() for ids in tokenizer.encode(texts)]
    batch = len(prompts) if config.batch is None else config.batch
    if batch < len(prompts):
        raise ConfigError(f"batch={batch}, and there are {len(prompts)} prompts")
    return list(islice(cycle(prompts), batch))
