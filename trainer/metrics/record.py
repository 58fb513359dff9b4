"""A record, the fields of one line of metrics; and reading lines back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TRAIN_FIELDS = (
    *("kind", "step", "loss", "epoch", "time", "mean_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"),
    *("data_s", "mfu", "peak_memory_gib", "skipped", "profiled"),
)
"""The fields that every `train` record may have; `Trainer.log` adds others."""
EVAL_FIELDS = ("kind", "step", "loss", "epoch", "time", "bits_per_byte", "eval_s")
"""The same of an `eval` record."""


def logged_names(names: Iterable[str]) -> list[str]:
    """Return which fields of `train` or `eval` records come from `Trainer.log`, in their order.

    `loss_<source>` and `epoch_<source>` do not count: a source is known by its epoch, which `Trainer.log` never writes
    for it.
    """
    names = list(names)
    sources = {name.removeprefix("epoch_") for name in names if name.startswith("epoch_")}
    by_source = {f"{prefix}_{source}" for source in sources for prefix in ("loss", "epoch")}
    return [name for name in names if name not in by_source and name not in TRAIN_FIELDS and name not in EVAL_FIELDS]


class Record(Mapping[str, Any]):
    """One line of metrics.  Its fields are keys and attributes alike: `record["loss"]`, `record.loss`.

    A field may be given as a function without arguments, which is called when the field is first read: what is not read
    is not waited for.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        value = self._fields[name]
        if callable(value):
            value = self._fields[name] = value()
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for theirs before there are fields
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a record of kind {self._fields.get('kind')!r} has no field {name!r}") from None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: all fields read."""
        return {"_fields": dict(self)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{name}={value!r}' for name, value in self.items())})"


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines that hold a record, as they stand and read."""
    for line, record in read_lines(path):
        if record is not None:
            yield line, record


def read_kinds(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the records of these kinds alone; other lines, most of a file, are not parsed."""
    with open(path, errors="replace") as file:
        for line in file:
            if any(f'"{kind}"' in line for kind in kinds):
                record = _parse(line)
                if record is not None and record.get("kind") in kinds:
                    yield record


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield every line as it stands and read; None for what is no record: half a line, of a killed process."""
    with open(path, errors="replace") as file:
        for line in file:
            yield line if line.endswith("\n") else line + "\n", _parse(line)


def last_step(path: Path) -> int:
    """Return the last step that any line of a file speaks of; 0 if there is none, or no file."""
    if not path.is_file():
        return 0
    steps = (record.get("step") for _, record in read_lines(path) if record is not None)
    return max((step for step in steps if isinstance(step, int)), default=0)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
