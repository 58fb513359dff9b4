"""Compares what two runs computed: numbers of their records, and tensors of their checkpoints as torch reads them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainer.checkpoint.torch_metadata import pickled_metadata


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two lists of the same length."""
    assert len(found) == len(expected) > 0
    assert all(map(math.isfinite, found)), found  # `max` may overlook a NaN
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all full tensors of a checkpoint by their path, read by torch and not by the trainer."""
    with tempfile.TemporaryDirectory() as name:
        folder, whole = Path(name), Path(name) / "whole.pt"
        for path in checkpoint.glob("*.distcp"):
            (folder / path.name).symlink_to(path.absolute())
        (folder / ".metadata").write_bytes(pickled_metadata((checkpoint / "layout.json").read_bytes()))
        dcp_to_torch_save(folder, whole)
        state = torch.load(whole, weights_only=False)
    return {name: value for name, value in _flat(state).items() if isinstance(value, torch.Tensor)}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for name, part in tree.items() for k, v in _flat(part, f"{prefix}/{name}").items()}
    return {prefix: tree}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not the same to the bit; both must have the same names."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]
