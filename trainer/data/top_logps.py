"""Stores and loads a teacher's top-k log-probabilities of the next token, for each token of a source's samples.

`python -m trainer.teach` writes a folder with three files: `ids.npy` (the k token ids: int32, shape (samples, seq_len,
k)), `logps.npy` (their log-probabilities: float32, same shape), and `top.json`, which names the teacher and identifies
the samples.  This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.teacher import TEACHER_KEY, TOP_FILE
from trainer.data.source import Source, SourceSubset, as_mapping
from trainer.errors import setting_error
from trainer.files import write_atomically


class TopLogps(SourceSubset):
    """All samples of a source, with the entries `top_ids` (int64) and `top_logps` from a folder, both (B, seq_len, k).

    Raises UserError if the folder was written for other samples.
    """

    def __init__(self, base: Source, folder: str) -> None:
        super().__init__(base, 0, len(base))
        content = json.loads((Path(folder) / TOP_FILE).read_text())
        if content["samples"] != _describe_samples(base):
            rule = "was written for other samples: the data, their tokenizer and data.seq_len must be the same"
            raise setting_error(TEACHER_KEY, folder, rule, fix="write it again with python -m trainer.teach")
        self._ids, self._logps = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("ids", "logps"))

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Return the samples at `indices`; see `Source.batch`."""
        clamped = np.maximum(np.asarray(indices), 0)  # padding has no targets, so any row will do
        top = {"top_ids": self._ids[clamped].astype(np.int64), "top_logps": self._logps[clamped]}
        return {**as_mapping(super().batch(indices)), **top}


def _describe_samples(source: Source) -> dict[str, Any]:
    """Return JSON values that identify the samples of a source."""
    return {"seq_len": source.seq_len, "data": json.loads(json.dumps(source.fingerprint.to_state()))}


@contextmanager
def new_top_logps(
    folder: Path, source: Source, num_top: int, teacher: str
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Yield the arrays of a new folder, `ids` and `logps`, to be filled in; then write `top.json`, which completes it.

    Arrays in an incomplete folder are overwritten.  Raises UserError if the folder is complete.
    """
    if (folder / TOP_FILE).exists():
        raise setting_error("--out", folder, "has already been written", fix="choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    shape = (len(source), source.seq_len, num_top)
    ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.int32, shape)
    logps = np.lib.format.open_memmap(folder / "logps.npy", "w+", np.float32, shape)
    yield ids, logps
    ids.flush()
    logps.flush()
    content = {"teacher": teacher, "samples": _describe_samples(source)}
    write_atomically(folder / TOP_FILE, json.dumps(content, indent=1) + "\n")
