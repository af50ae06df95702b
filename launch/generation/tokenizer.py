"""The tokenizer that goes with the weights, or the one asked for."""

from __future__ import annotations

from pathlib import Path

import yaml

from launch.generation.checkpoint import checkpoint_of
from launch.generation.config import GenerateConfig
from trainers.config import ConfigError
from trainers.data.errors import DataError
from trainers.data.text.build import standard_library_directory
from trainers.data.text.layout import TOKENIZER_NAME
from trainers.data.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer


def make_tokenizer(config: GenerateConfig, vocabulary: int) -> Tokenizer | None:
    """None where there is no text. ConfigError where it cannot be read, or has ids that a model of that vocabulary lacks."""
    if config.prompt_length is not None:
        return None
    name = _of_the_weights(config) if config.tokenizer == "auto" else config.tokenizer
    try:
        tokenizer = ByteTokenizer() if name == "byte" else load_tokenizer(_file(Path(name)), config.end_of_document)
    except DataError as error:
        raise ConfigError(f"{error} (tokenizer, end_of_document)") from error
    if tokenizer.vocabulary > vocabulary:
        raise ConfigError(
            f"the tokenizer ({name}) has {tokenizer.vocabulary} tokens, and the model a vocabulary of {vocabulary}"
        )
    return tokenizer


def _of_the_weights(config: GenerateConfig) -> str:
    kind, path = config.source()
    if kind == "hf":
        return path
    return _of_the_run(config, path) if kind == "run" else "byte"


def _of_the_run(config: GenerateConfig, path: str) -> str:
    """What its training data was tokenized with."""
    file = checkpoint_of(path).parent.parent / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"weights={config.weights}: {file}, which would say the tokenizer, is not there; set tokenizer"
        )
    data = yaml.safe_load(file.read_text(encoding="utf-8"))["data"]
    if data["path"] is not None:
        if not _file(Path(data["path"])).is_file():
            raise ConfigError(f"weights={config.weights}: its data, {data['path']}, has no tokenizer; set tokenizer")
        return str(data["path"])
    if data["tokenizer"] == "byte":
        return "byte"
    return str(standard_library_directory(data["tokenizer"], data["tokenizer_vocabulary"]))


def _file(path: Path) -> Path:
    return path / TOKENIZER_NAME if path.is_dir() else path
