"""Generates text: `torchrun --nproc-per-node 2 -m launch.generate [model=option] [key=value] ...`; `--help` says more.

`python -m launch.generate` is one rank. Exit codes: 0 generated; 1 failed; 2 the config cannot run.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from launch import last_words
from launch.config_errors import CONFIG_ERRORS, known_keys, stop
from launch.generation.config import GenerateConfig, check
from launch.run_directory import join_alone
from models.transformer.config import TransformerConfig
from trainers.config import ConfigError, DataConfig, ModelConfig, register_schema
from trainers.transformer.config import TransformerModelConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i")


@dataclass
class GenerateRun(GenerateConfig):
    """`configs/generate.yaml`. A model brings its training data along, which nothing here looks at."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


KEYS = ["model", "comm", *known_keys(GenerateConfig()), *known_keys(TransformerModelConfig(), "model.")]


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="generate")
def _compose(composed: DictConfig) -> None:
    """One rank of one run; never returns."""
    try:
        config, model = typed(composed)
        check(config)
        if "RANK" not in os.environ:
            join_alone()
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if config.ranks_per_gpu > 1 and world > 1:
            _share_cards(config)
        architecture = _architecture(config, model)
    except CONFIG_ERRORS as error:  # here, since Hydra adds a line to what passes through it
        stop(error, KEYS)
    _leave(_run(config, architecture, rank, world))


def typed(composed: DictConfig) -> tuple[GenerateConfig, TransformerModelConfig]:
    """The dataclasses of a composed config. OmegaConf's errors for unknown keys and wrong types, ConfigError for a model that
    generates no text."""
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    model: Any = values.get("model") or {}
    if model.get("family") != "transformer":
        raise ConfigError(f"model={model.get('name')} is a {model.get('family')}; a transformer generates text")
    schema = OmegaConf.structured(GenerateRun)
    schema.model = TransformerModelConfig
    own = {key: value for key, value in values.items() if key not in ("hydra", "data")}
    run = OmegaConf.merge(schema, own)
    del run.data
    plain = {f.name: getattr(run, f.name) for f in fields(GenerateConfig)}
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GenerateConfig), plain))
    architecture = OmegaConf.to_object(run.model)
    assert isinstance(config, GenerateConfig)
    assert isinstance(architecture, TransformerModelConfig)
    return config, architecture


def _architecture(config: GenerateConfig, model: TransformerModelConfig) -> TransformerConfig:
    from launch.generation.weights import architecture_of
    from trainers.transformer.architecture import architecture

    try:
        return architecture_of(config) or architecture(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _run(config: GenerateConfig, architecture: TransformerConfig, rank: int, world: int) -> int:
    try:
        from launch.generation.run import run

        run(config, architecture, rank, world)
    except KeyboardInterrupt:
        return 130
    except ConfigError as error:
        stop(error, KEYS)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        last_words.say(f"rank {rank} failed: {said}", traceback.format_exc())
        return 1
    return 0


def _share_cards(config: GenerateConfig) -> None:
    from launch.lab import LabError, torchrun

    try:
        torchrun.enter(config.ranks_per_gpu, timeout_s=config.comm.timeout_s)
    except LabError as error:
        raise ConfigError(f"ranks_per_gpu={config.ranks_per_gpu}: {error}") from error


def _leave(code: int) -> NoReturn:
    # Threads of the collective library may abort an interpreter that is being torn down, after a run that went well.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    last_words.PROGRAM = "launch.generate: "
    register_schema()
    ConfigStore.instance().store(name="generate_schema", node=GenerateRun)
    if os.environ.get("RANK", "0") != "0" and any(arg.split("=")[0] in TEXT_FLAGS for arg in sys.argv[1:]):
        sys.exit(0)
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing an essay
    try:
        _compose()
    except KeyboardInterrupt:
        last_words.say("interrupted")
        sys.exit(130)
    except (*CONFIG_ERRORS, ValueError) as error:
        if wants_traceback:
            raise
        stop(error, KEYS)


if __name__ == "__main__":
    main()
