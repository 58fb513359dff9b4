"""Stores and loads a teacher's top-k log-probabilities of the next token, for each token of a source's samples.

`python -m trainer.teach` writes a folder with three files: `ids.npy` (the k token ids: int32, shape (samples, seq_len,
k)), `logps.npy` (their log-probabilities: float32, same shape), and `top.json`, which names the teacher and identifies
the samples.  This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.teacher import TEACHER_KEY, TOP_FILE
from trainer.data.source import Fingerprint, Source, SourceSubset, as_mapping
from trainer.errors import setting_error
from trainer.files import write_atomically


class TopLogps(SourceSubset):
    """All samples of a source, with the entries `top_ids` (int64) and `top_logps` from a folder, both (B, seq_len, k).

    Raises UserError if the folder was written for other samples.
    """

    def __init__(self, base: Source, folder: str) -> None:
        super().__init__(base, 0, len(base))
        content = json.loads((Path(folder) / TOP_FILE).read_text())
        if content["samples"] != describe_samples(base.fingerprint, base.seq_len):
            rule = "was written for other samples: the data, their tokenizer and data.seq_len must be the same"
            raise setting_error(TEACHER_KEY, folder, rule, fix="write it again with python -m trainer.teach")
        self._ids, self._logps = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("ids", "logps"))

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Return the samples at `indices`; see `Source.batch`."""
        clamped = np.maximum(np.asarray(indices), 0)  # padding has no targets, so any row will do
        top = {"top_ids": self._ids[clamped].astype(np.int64), "top_logps": self._logps[clamped]}
        return {**as_mapping(super().batch(indices)), **top}


def describe_samples(fingerprint: Fingerprint, seq_len: int) -> dict[str, Any]:
    """Return JSON values that identify the samples of a source."""
    return {"seq_len": seq_len, "data": json.loads(json.dumps(fingerprint.to_state()))}


def create_files(folder: Path, num_samples: int, seq_len: int, num_top: int) -> None:
    """Create `ids.npy` and `logps.npy` without filling in values, overwriting those in an incomplete folder.

    Raises UserError if the folder is complete.
    """
    if (folder / TOP_FILE).exists():
        raise setting_error("--out", folder, "has already been written", fix="choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, dtype in (("ids", np.int32), ("logps", np.float32)):
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (num_samples, seq_len, num_top))


def finish_files(folder: Path, fingerprint: Fingerprint, seq_len: int, teacher: str) -> None:
    """Mark the folder as complete by writing `top.json`."""
    content = {"teacher": teacher, "samples": describe_samples(fingerprint, seq_len)}
    write_atomically(folder / TOP_FILE, json.dumps(content, indent=1) + "\n")
