"""Reads weights from Hugging Face folders in safetensors format, row by row.

`Recipe.hf` maps their tensor names and their config.json to ours; `transformers` is not needed.  Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.config.pretrained import INDEX, LARGEST_INDEX, WEIGHTS, check_no_gguf, no_weights
from trainer.errors import UserError, setting_error
from trainer.files import read_json
from trainer.model.names import HuggingFaceNames, MappedTensor
from trainer.recipe import Recipe

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file: how to read it, and its shape and dtype in our orientation."""

    file: Path
    reader: Any
    transposed: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _StackedTensor:
    """One of our tensors, whose rows are separate tensors in the files."""

    rows: Mapping[int, _StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.rows[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype


class SafetensorsFolder:
    """A `WeightSource` for a folder with `model.safetensors`, or with an index and shards.

    Files are memory-mapped, and pages are loaded as rows are read; until then, only headers are.  Tensors unknown to
    the recipe keep their names, so that a comparison with the model lists them.  Raises UserError, beginning with
    `setting`, for a folder, index or file that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe, model_config: Any, setting: str = "path") -> None:
        self._read_headers(path, HuggingFaceNames(recipe, model_config), setting)

    @classmethod
    def as_stored(cls, path: str | os.PathLike[str], setting: str = "path") -> SafetensorsFolder:
        """Open a folder, keeping the names and shapes of its tensors."""
        folder = cls.__new__(cls)
        folder._read_headers(path, None, setting)
        return folder

    def _read_headers(self, path: str | os.PathLike[str], names: HuggingFaceNames | None, setting: str) -> None:
        self.description = str(path)
        self._setting = setting
        self._stored: dict[str, _StoredTensor | _StackedTensor] = {}
        stacks: dict[str, dict[str, _StoredTensor]] = {}
        for file, listed in _find_files(path, setting).items():
            handle = self._open(file)
            held = list(handle.keys())
            absent = sorted(listed - set(held))
            if absent:
                raise self._unreadable(file, f"has no {', '.join(absent)}, which {INDEX} lists")
            for name in listed or held:
                if names is not None and names.is_ignored(name):
                    continue
                mapped = (names and names.ours(name)) or MappedTensor(name)
                stored = self._describe(file, handle.get_slice(name), name, mapped.is_transposed)
                if mapped.row is None:
                    self._stored[mapped.name] = stored
                else:
                    stacks.setdefault(mapped.name, {})[mapped.row] = stored
        self._stored |= {name: self._stack(name, rows) for name, rows in stacks.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, in our orientation."""
        return {name: stored.shape for name, stored in self._stored.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor."""
        return {name: stored.dtype for name, stored in self._stored.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, as a view of the file.  Raises UserError if it cannot be read."""
        stored = self._stored[name]
        if isinstance(stored, _StackedTensor):
            return torch.stack([self._read(stored.rows[row]) for row in range(len(stored.rows))[start:stop]])
        return self._read(stored, start, stop)

    def _read(self, stored: _StoredTensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        try:
            if not stored.shape:
                tensor: torch.Tensor = stored.reader[...]
            elif stored.transposed:
                tensor = stored.reader[:, start:stop].t()
            else:
                tensor = stored.reader[start:stop]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(stored.file, f"cannot be read ({error})") from error
        return tensor

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise self._unreadable(file, f"is not a complete safetensors file ({error}); download it again") from error
        except OSError as error:
            raise self._unreadable(file, f"cannot be read ({error.strerror or error})") from error

    def _describe(self, file: Path, reader: Any, name: str, transposed: bool) -> _StoredTensor:
        shape, dtype = tuple(reader.get_shape()), reader.get_dtype()
        if dtype not in DTYPES:
            raise self._unreadable(file, f"{name} is stored as {dtype}; convert it to one of {', '.join(DTYPES)}")
        transposed = transposed and len(shape) == 2
        return _StoredTensor(file, reader, transposed, shape[::-1] if transposed else shape, DTYPES[dtype])

    def _stack(self, name: str, rows: Mapping[str, _StoredTensor]) -> _StackedTensor:
        """Combine the rows of one of our tensors.  Raises UserError if rows are missing or differ in shape or dtype."""
        first = next(iter(rows.values()))
        numbered = {int(row): stored for row, stored in rows.items() if row.isdecimal()}
        if absent := sorted({*range(len(rows))} - {*numbered}):
            listed = ", ".join(map(str, absent))
            raise self._unreadable(first.file, f"of the {len(rows)} parts of {name}, number {listed} is missing")
        for row, stored in numbered.items():
            if (stored.shape, stored.dtype) != (numbered[0].shape, numbered[0].dtype):
                rule = f"part {row} of {name} is {stored.shape}, {stored.dtype}, and part 0 {numbered[0].shape}, "
                raise self._unreadable(stored.file, f"{rule}{numbered[0].dtype}")
        return _StackedTensor(numbered)

    def _unreadable(self, file: Path, what: str) -> UserError:
        return setting_error(self._setting, self.description, f"{file.name}: {what}")


def _find_files(path: str | os.PathLike[str], setting: str) -> dict[Path, set[str]]:
    """Return the folder's safetensors files, each with the names that the index assigns to it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        rule = "is a file; give the folder that contains it" if folder.exists() else "there is no such folder"
        raise setting_error(setting, path, rule)
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: set()}
    if not (folder / INDEX).is_file():
        check_no_gguf(folder, setting)
        raise setting_error(setting, path, no_weights(folder))
    try:
        weight_map = read_json(folder / INDEX, LARGEST_INDEX)["weight_map"]
        for name in weight_map.values():
            if Path(name).is_absolute() or ".." in Path(name).parts or not name.endswith(".safetensors"):
                rule = f"{INDEX} names {name!r}: an index may only name .safetensors files inside of its folder"
                raise setting_error(setting, path, rule, fix="correct the index, or download the model again")
        files = {
            folder / name: {key for key, file in weight_map.items() if file == name}
            for name in sorted(set(weight_map.values()))
        }
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise setting_error(setting, path, f"{INDEX}: is not an index of safetensors files ({error!r})") from error
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise setting_error(setting, path, f"{INDEX} names {', '.join(absent)}, which is missing; download it again")
    return files
