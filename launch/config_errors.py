"""Says in one line what is wrong with a command line or a config, and stops.

Under torchrun every rank composes the same config and finds the same error; it is printed by rank 0 alone.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from launch.last_words import say
from trainers import families
from trainers.config import ConfigError, RunConfig
from trainers.config import typed as trainers_typed
from trainers.config_rules import did_you_mean

CONFIG_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)
# What another rank leaves rank 0 to report the error they share, before it reports one that only its own host has.
LEAVE_TO_RANK_0_S = 5.0

GROUPS = ("experiment", "sweep", "hydra/launcher")  # beside those that are keys of RunConfig
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.launcher.nproc_per_node", "hydra.launcher.max_parallel")
KINDS = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false", "bool": "true or false"}


def stop(error: Exception, keys: Iterable[str] | None = None) -> NoReturn:
    """Prints one line on stderr and exits with 2. `keys`: those that the program understands; None: `launch.train`'s."""
    rank = os.environ.get("RANK", "0")
    where = ""
    if rank != "0":
        time.sleep(LEAVE_TO_RANK_0_S)
        where = f" (rank {rank})"
    say(f"error{where}: {explain(error, keys)}")
    sys.exit(2)


def explain(error: Exception, keys: Iterable[str] | None = None) -> str:
    """One line for any of `CONFIG_ERRORS`, with a suggestion where a name looks misspelt."""
    text = _explain(error, _train_keys() if keys is None else list(keys))
    return " ".join(text.split())


def _explain(error: Exception, keys: list[str]) -> str:
    for cause in _chain(error):
        if isinstance(cause, ConfigError):
            return str(cause)
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return f"can't read '{error.override}'; expected key=value, with quotes around special characters"
    unknown = re.match(r"Could not override '([^'@]+)", str(error))
    if unknown:
        return _unknown_key(unknown[1], keys)
    for cause in _chain(error):
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
            return _unknown_key(str(cause.full_key or cause.key), keys)
        if isinstance(cause, MissingMandatoryValue):
            return f"{cause.full_key} has no value; set it with {cause.full_key}=..."
        if isinstance(cause, ValidationError):
            return f"{cause.full_key}: {_wrong_type(cause)}"
        if isinstance(cause, OmegaConfBaseException):
            return f"{cause.full_key}: {_first_line(cause)}"
    return _hydra_message(error)


def known_keys(schema: Any = None, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, of all families and kinds of data."""
    if schema is None:
        schema = RunConfig()
        for family in families.FAMILIES:
            yield from known_keys(families.model_schema(family)(), "model.")
        for kind in families.data_schemas().values():
            yield from known_keys(kind(), "data.")
    for field in fields(schema):
        value = getattr(schema, field.name)
        if is_dataclass(value):
            yield from known_keys(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _train_keys() -> list[str]:
    return [*(field.name for field in fields(RunConfig)), *GROUPS, *HYDRA_KEYS, *known_keys()]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _unknown_key(key: str, keys: list[str]) -> str:
    return f"unknown key '{key}'{did_you_mean(key, keys)}"


def _wrong_type(error: ValidationError) -> str:
    message = _first_line(error)
    if "is not Optional" in message:
        return "null is not allowed"
    if "is not a ListConfig" in message:
        return "not a list; write [a,b,c]"
    match = re.match(r"Value '(.*)' (?:of type '.*' could not be converted to (\w+)|is not a valid (\w+))", message)
    kind = KINDS.get(match[2] or match[3]) if match else None
    return f"'{match[1]}' is not {kind}" if match and kind else message


def _missing_option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file or "")
    group, _, option = missing.rpartition("/")
    options = [str(name) for name in error.options or ()]
    if not options:
        return _hydra_message(error)
    return f"{group} has no option '{option}' (allowed: {', '.join(options)}){did_you_mean(option, options)}"


def _hydra_message(error: Exception) -> str:
    message = str(error).strip()
    ambiguous = re.match(r"Ambiguous value for argument '([^']+)'", message)
    if ambiguous:
        return f"'{ambiguous[1]}' has several values; sweep over them with -m, or write a list as key=[a,b]"
    return message


def typed(config: DictConfig) -> RunConfig:
    """The dataclasses of a composed config, without Hydra's own part.

    Raises for keys that the schema doesn't have; Hydra's `+key=value` can put them there.
    """
    task = OmegaConf.to_container(config, resolve=False)
    assert isinstance(task, dict)
    return trainers_typed({str(key): value for key, value in task.items() if key != "hydra"})
