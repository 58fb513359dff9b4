"""A tiny mixture of experts for tests of experts."""

from __future__ import annotations

from pathlib import Path

from tests.exactness.table import BASE, KINDS
from tests.helpers.launch import merged
from trainer import RunConfig, load_config


def moe(folder: Path | str, *overrides: str) -> RunConfig:
    """Return the configuration of a tiny mixture of four experts on synthetic data, to run in `folder`."""
    own = ["model.name=qwen3_moe", *KINDS["qwen3_moe"].fields, "data.source=synthetic", "data.seq_len=32"]
    base = [item for item in BASE if not item.startswith("data.")]
    return load_config("llama_small", [*merged([*base, *own], overrides), f"run.dir={folder}"])
