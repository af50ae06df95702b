"""Weights of a Hugging Face folder in Llama's format (config.json and safetensors), split over ranks as they are read.

Each rank reads its own part of the files and nothing more. Needs `safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.parallel.shards import Shard, parameter_shards
from models.transformer.config import RotaryScaling, TransformerConfig
from models.transformer.model import Transformer

Read = Callable[[str, slice, slice], Tensor]  # name, rows, columns (of a matrix) -> that part of the file


def llama_config(folder: str | Path) -> TransformerConfig:
    """The config of the folder's `config.json`. ValueError for an architecture or option this model does not have."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; a Hugging Face model folder is needed")
    values: dict[str, Any] = json.loads(path.read_text())
    if values.get("model_type") != "llama":
        raise ValueError(f"{path}: model_type is {values.get('model_type')!r}; only 'llama' can be loaded")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act is {values['hidden_act']!r}; only 'silu' can be loaded")
    bias = bool(values.get("attention_bias", False))
    if bias != bool(values.get("mlp_bias", False)):
        raise ValueError(f"{path}: attention_bias and mlp_bias differ; they must be both on or both off")
    theta, scaling = _rotary(values, path)
    return TransformerConfig(
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        heads=values["num_attention_heads"],
        kv_heads=values.get("num_key_value_heads"),
        head_dim=values.get("head_dim"),
        ffn=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        max_length=values.get("max_position_embeddings", 2048),
        activation="swiglu",
        norm="rmsnorm",
        norm_eps=values.get("rms_norm_eps", 1e-6),
        positions="rope",
        rope_theta=theta,
        rope_scaling=scaling,
        tied_output=bool(values.get("tie_word_embeddings", False)),
        bias=bias,
    )


def _rotary(values: dict[str, Any], path: Path) -> tuple[float, RotaryScaling | None]:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier ones."""
    rotary = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(rotary.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{path}: rope_type is {kind!r}; allowed: default, llama3")
    return theta, RotaryScaling(
        factor=rotary["factor"],
        low_frequency_factor=rotary["low_freq_factor"],
        high_frequency_factor=rotary["high_freq_factor"],
        original_length=rotary["original_max_position_embeddings"],
    )


@torch.no_grad()
def load_llama(model: Transformer, folder: str | Path) -> None:
    """Fill `model`, built with `llama_config(folder)`, from the folder's safetensors.

    ValueError names tensors that are missing, have another shape, or that the model has no place for.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        where: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for file in _files(Path(folder)):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            where.update(dict.fromkeys(opened.keys(), opened))
        expected = _expected(model.config)
        _check(expected, where, model.config)

        def read(name: str, rows: slice, columns: slice) -> Tensor:
            part = where[name].get_slice(name)
            return part[rows, columns] if len(expected[name]) == 2 else part[rows]

        shards = parameter_shards(model)
        for name, parameter in model.named_parameters():
            _fill(name, parameter, shards.get(name), read, model.config)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    return [single]


def _expected(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors of such a model, and their shapes."""
    width, ffn = config.width, config.ffn_width
    heads, kv = config.heads * config.size_of_head, config.num_kv_heads * config.size_of_head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary, width),
        "model.norm.weight": (width,),
    }
    if not config.tied_output:
        shapes["lm_head.weight"] = (config.vocabulary, width)
    linears = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for linear, shape in linears.items():
            shapes[f"{prefix}{linear}.weight"] = shape
            if config.bias:
                shapes[f"{prefix}{linear}.bias"] = shape[:1]
    return shapes


def _check(expected: dict[str, tuple[int, ...]], where: dict[str, Any], config: TransformerConfig) -> None:
    missing = sorted(expected.keys() - where.keys())
    unknown = {name for name in where.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_output:
        unknown.discard("lm_head.weight")
    if missing or unknown:
        raise ValueError(f"the tensors do not fit: missing {missing[:5]}, without a place {sorted(unknown)[:5]}")
    for name, shape in expected.items():
        found = tuple(where[name].get_slice(name).get_shape())
        if found != shape:
            raise ValueError(f"{name} has shape {found}, the config says {shape}")


ALL = slice(None)
RENAMED = {
    "embedding.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.out": "self_attn.o_proj",
    "mlp.down": "mlp.down_proj",
}


def _fill(name: str, parameter: Tensor, shard: Shard | None, read: Read, config: TransformerConfig) -> None:
    """This rank's part of the parameter `name`."""
    if name in RENAMED:  # the tables, whose padding is in no file, and the last norm
        rows = slice(0, len(parameter))
        if shard is not None:
            rows = slice(min(shard.start, config.vocabulary), min(shard.stop, config.vocabulary))
        held = rows.stop - rows.start
        parameter[held:] = 0
        if held:
            parameter[:held] = read(RENAMED[name], rows, ALL)
        return
    _, layer, *middle, kind = name.split(".")
    module, prefix = ".".join(middle), f"model.layers.{layer}."
    if module == "attention.qkv":
        assert shard is not None
        parameter.copy_(torch.cat(list(_groups(f"{prefix}self_attn", kind, shard, read, config))))
    elif module == "mlp.up":
        assert shard is not None
        for target, theirs in zip(parameter, ("gate_proj", "up_proj"), strict=True):
            target.copy_(read(f"{prefix}mlp.{theirs}.{kind}", slice(shard.start, shard.stop), ALL))
    else:
        columns = ALL if shard is None else slice(shard.start, shard.stop)
        parameter.copy_(read(f"{prefix}{RENAMED[module]}.{kind}", ALL, columns))


def _groups(prefix: str, kind: str, shard: Shard, read: Read, config: TransformerConfig) -> Iterator[Tensor]:
    """Query heads, key head and value head of every group of this rank, in the order of `Attention.qkv`."""
    size, queries = config.size_of_head, config.heads // config.num_kv_heads
    whole = (queries + 2) * size
    first, last = shard.start // whole, shard.stop // whole
    parts = [
        read(f"{prefix}.{name}.{kind}", slice(first * rows, last * rows), ALL).unflatten(0, (last - first, rows))
        for name, rows in (("q_proj", queries * size), ("k_proj", size), ("v_proj", size))
    ]
    yield from torch.cat(parts, dim=1)
