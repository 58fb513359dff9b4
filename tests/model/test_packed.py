"""Packed base weights (lora.base_dtype=nf4, fp8): their values, on any mesh, in exports and in the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.model.test_lora import config_of
from tests.weights.test_huggingface import TINY
from tests.weights.test_pretrained import folder_of
from trainer import Trainer

WIDE = replace(TINY, dim=64, ffn_dim=192)
"""Rows of 64 and 192 weights. 3 ranks divide none of 64, 32 and 192 x 3 / 64 rows evenly."""
PACKINGS = ["nf4", "fp8"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama folder in Hugging Face format, in float32."""
    return folder_of(tmp_path / "base", config=WIDE)


# ---------------------------------------------------------------------------------------------------------------
# Meshes


def train_here(base: str, runs: list[tuple[str, list[str]]]) -> list[list[float]]:
    """Train each run to its end, or on; return the losses of its steps. On every rank."""
    found = []
    for folder, overrides in runs:
        trainer = Trainer(config_of(base, Path(folder), *overrides))
        assert trainer.fit() == 0
        trainer.close()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        found.append([line["loss"] for line in lines if line["kind"] == "train"])
    return found


@pytest.mark.slow
def test_meshes(base: Path, tmp_path: Path) -> None:
    steps = ["train.steps=6", "lora.base_dtype=nf4", "train.global_batch_size=6"]
    (alone,) = train_here(str(base), [(str(tmp_path / "alone"), steps)])
    for losses in run_ranks(3, train_here, str(base), [(str(tmp_path / "2"), steps)])[0]:
        torch.testing.assert_close(losses, alone, rtol=1e-6, atol=0)
