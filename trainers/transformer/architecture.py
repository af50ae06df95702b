"""From `model=` to the architecture that `models.transformer` builds."""

from __future__ import annotations

from dataclasses import fields

from models.transformer.config import RotaryScaling, TransformerConfig
from trainers.transformer.config import TransformerModelConfig


def architecture(model: TransformerModelConfig) -> TransformerConfig:
    """ValueError where the keys make no model."""
    values = {field.name: getattr(model, field.name) for field in fields(TransformerConfig)}
    if model.rope_scaling is not None:
        scaling = {field.name: getattr(model.rope_scaling, field.name) for field in fields(RotaryScaling)}
        values["rope_scaling"] = RotaryScaling(**scaling)
    return TransformerConfig(**values)
