"""A tiny model of a recipe, unsharded and in this process."""

from __future__ import annotations

from torch import nn

from trainer import load_config


def plain_model(recipe: str, *overrides: str) -> nn.Module:
    size = ["model.dim=16", "model.num_layers=1", "model.num_heads=2", "model.vocab_size=20", *overrides]
    config = load_config(recipe, size)
    return config.spec.build_model(config.model)
