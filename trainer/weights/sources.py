"""Sources of weights, and `fill`, which copies weights from a source into a model.

A source reads rows of named tensors, and hides where they are stored: in a checkpoint, a Hugging Face folder or a
single file.  `MappedSource` makes one source of others.  Each rank reads the rows that it needs, without communication.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.config.model_folder import CONFIG_JSON, INDEX, weight_files
from trainer.errors import UserError, first_few, print_stderr, setting_error
from trainer.files import read_json
from trainer.model.head import is_score_name, replaced_output_name
from trainer.model.lora import is_base_weight
from trainer.model.network import HuggingFaceNames, MappedTensor
from trainer.model.packed import find_packings
from trainer.model.parameters import is_vector, local, local_box, tied_names
from trainer.model_spec import ModelSpec, StoredTensors
from trainer.model_spec import WeightSource as WeightSource
from trainer.weights.quantized import with_dequantizing_readers
from trainer.weights.two_sources import unread_weights

BLOCK_BYTES = 64 * 2**20
"""Bytes of a tensor to read at a time, in whole rows."""


@torch.no_grad()
def fill(
    model: nn.Module, source: WeightSource, setting: str = "weights", only: Callable[[str], bool] | None = None
) -> None:
    """Copy the weights of `source` into `model`, in place, in the dtypes or quantized formats of the model's weights.

    only: a predicate on the names of the model's weights; None copies all weights.  If given, only weights for which
        it is true are copied; the source may lack the others, and may contain additional tensors.

    The model must be materialized, and may be sharded.  Each rank reads only the rows that it holds, a block at a time;
    if a tensor is sharded along another dimension, it reads all rows.  Persistent buffers that the source lacks keep
    their values.  No collectives.

    Raises UserError on all ranks, before anything is written, if the source does not fit the model (see
    `find_weights`).  Raises UserError on a rank that finds, in its part of a parameter, NaN or infinity, or rows that
    differ between the source's copies of a tied weight.  Rank 0 warns about matrices whose local part is all zero.
    Errors while reading from the source may be raised on a single rank.
    """
    model_weights, packings = named_weights(model), find_packings(model)
    shapes, dtypes = source.shapes, source.dtypes
    is_finite: dict[str, torch.Tensor] = {}
    is_zero: dict[str, torch.Tensor] = {}
    copies = _tied_copies(model, shapes)
    for name, stored in find_weights(model, source, setting, only).items():
        weight, packing = model_weights[name].detach(), packings.get(name)
        box = local_box(weight)
        scales = [torch.empty(0, device=weight.device)]
        if box is None:
            assert isinstance(weight, DTensor)
            full = source.read(stored)
            _check_copies(source, stored, copies.get(name, ()), full, 0, setting)
            if packing is not None:
                full = packing.pack(full.to(weight.device))
                scales.append(packing.scales(full).flatten())
            parts = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
            local(weight).copy_(local(parts))
        elif weight.ndim == 0:
            local(weight).copy_(source.read(stored))
        else:
            first, last = box[0]
            other_dims = (slice(None), *(slice(start, stop) for start, stop in box[1:]))
            for start, stop in row_blocks(shapes[stored], dtypes[stored], first, last):
                rows = source.read(stored, start, stop)
                _check_copies(source, stored, copies.get(name, ()), rows, start, setting)
                if packing is not None:
                    rows = packing.pack(rows.to(weight.device))
                    scales.append(packing.scales(rows).flatten())
                local(weight)[start - first : stop - first].copy_(rows[other_dims])
        if isinstance(model_weights[name], nn.Parameter):  # a buffer may hold -inf, for example a causal mask
            values = local(weight) if packing is None else torch.cat(scales)
            is_finite[stored] = torch.isfinite(values).all()
            if values.numel() and not is_vector(name, weight) and is_base_weight(name):
                is_zero[stored] = ~values.any()
    if is_finite and not torch.stack([*is_finite.values()]).all():
        listed = first_few(name for name, flag in is_finite.items() if not flag)
        raise UserError(
            f"{setting}: the weights in {source.description} are not all finite: NaN or infinity in {listed}"
        )
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    if is_main and is_zero and torch.stack([*is_zero.values()]).any():
        zeros = [name for name, flag in is_zero.items() if flag]
        print_stderr(
            f"warning: {setting}: {len(zeros)} of {len(is_zero)} matrices in {source.description} are all zero, as "
            f"after an interrupted download: {first_few(zeros)}"
        )


def find_weights(
    model: nn.Module, source: WeightSource, setting: str, only: Callable[[str], bool] | None = None
) -> dict[str, str]:
    """Map the names of the model's weights to their names in `source`.  Of tied weights, only the first is a key.

    With `only`, the result is restricted to the names for which it is true.  The source may lack a new head
    (`ScoreHead`), and may have the output projection that the head replaces.  It may also lack persistent buffers.

    Raises UserError, starting with `setting`, that lists every difference: weights missing on either side, different
    shapes, and quantized weights without their scales.
    """
    source_shapes, packings = source.shapes, find_packings(model)
    model_weights = {name: tuple(weight.shape) for name, weight in named_weights(model).items()}
    model_weights |= {name: (*model_weights[name][:-1], packing.width) for name, packing in packings.items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = {group[0]: group for group in tied_names(model)}
    aliases = {alias for group in groups.values() for alias in group[1:]}
    source_names: dict[str, str] = {}
    missing = []
    selected = {name for name in model_weights if only is None or only(name)}
    for name in [name for name in model_weights if name in selected and name not in aliases]:
        stored = [alias for alias in groups.get(name, [name]) if alias in source_shapes]
        if stored:
            source_names[name] = stored[0]
        elif name in parameters and not is_score_name(name):
            missing.append(f"missing there: {name} {model_weights[name]}")
    dtypes, expected = source.dtypes, {*model_weights, replaced_output_name(model)}
    integers = [
        f"{stored}: {str(dtypes[stored]).removeprefix('torch.')} there, as in a quantized folder whose scales are "
        "missing; floating point here"
        for name, stored in source_names.items()
        if name in parameters and not dtypes[stored].is_floating_point
    ]
    differences = [
        *missing,
        *integers,
        *(f"missing here: {name} {shape}" for name, shape in source_shapes.items() if name not in expected),
        *(
            f"{name}: {source_shapes[name]} there, {shape} here"
            for name, shape in model_weights.items()
            if name in selected and source_shapes.get(name, shape) != shape
        ),
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(
            f"{setting}: the weights in {source.description} do not fit the model:\n  {listed}\n"
            "  to fix: download or export the folder again if it is incomplete, or set model.* to match it"
        )
    return source_names


def _tied_copies(model: nn.Module, stored_names: Iterable[str]) -> dict[str, list[str]]:
    """Return the further names under which a source has a tied weight, by the first of the weight's names."""
    stored = set(stored_names)
    return {group[0]: [name for name in group if name in stored][1:] for group in tied_names(model)}


def _check_copies(
    source: WeightSource, stored: str, copies: Iterable[str], rows: torch.Tensor, start: int, setting: str
) -> None:
    """Raise UserError if a copy of a tied weight differs: all but one of them would be lost.

    rows: the rows of the weight `stored` that begin with number `start`.
    """
    for copy in copies:
        others = source.read(copy, start, start + len(rows))
        if others.dtype == rows.dtype and torch.equal(others, rows):
            continue
        differs = (others != rows) & ~(others.isnan() & rows.isnan())
        different_rows = differs.reshape(len(rows), -1).any(1).nonzero().flatten().tolist()
        if not different_rows:
            continue
        rule = f"{stored} and {copy} are one tensor in the model, but two in {source.description}: they differ in row "
        rule += first_few(str(start + row) for row in different_rows)
        config = Path(source.description).expanduser() / CONFIG_JSON
        fix = f"remove {copy} if it is not needed"
        if config.is_file():
            fix += f", or set tie_word_embeddings to false in {config} if both are"
        raise UserError(f"{setting}: {rule}\n  to fix: {fix}")


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters and persistent buffers, under all their names; DTensors if the model is sharded.

    Parameters that a forward pass has left gathered are resharded.
    """
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def row_blocks(shape: Sequence[int], dtype: torch.dtype, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split the rows [start, stop) of a tensor of `shape` into blocks of at most `BLOCK_BYTES`, or of one row."""
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


# ---------------------------------------------------------------------------------------------------------------
# Sources made of others


class Origin(NamedTuple):
    """What a tensor of a `MappedSource` is: a tensor of another source, one row of it, or what `transform` makes of it.

    The result of `transform` has the same dtype.
    """

    source: WeightSource
    name: str
    row: int | None = None
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None

    def shape(self, original: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, given that of the original."""
        if self.row is not None:
            return original[1:]
        if self.transform is not None:
            return tuple(self.transform(torch.empty(original, device="meta")).shape)
        return original

    def read(self) -> torch.Tensor:
        """Return all of the tensor."""
        if self.row is not None:
            return self.source.read(self.name, self.row, self.row + 1)[0]
        tensor = self.source.read(self.name)
        return tensor if self.transform is None else self.transform(tensor)


class MappedSource:
    """A `WeightSource` whose tensors come from other sources.

    origins: where each tensor comes from, by its name here.  A row, or the result of a `transform`, is kept until
        another one is read.
    """

    def __init__(self, description: str, origins: Mapping[str, Origin]) -> None:
        self.description = description
        self._origins = origins
        sources = {id(origin.source): origin.source for origin in origins.values()}
        shapes = {key: source.shapes for key, source in sources.items()}
        dtypes = {key: source.dtypes for key, source in sources.items()}
        self.shapes = {name: each.shape(shapes[id(each.source)][each.name]) for name, each in origins.items()}
        self.dtypes = {name: dtypes[id(each.source)][each.name] for name, each in origins.items()}
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        origin = self._origins[name]
        if origin.row is None and origin.transform is None:
            return origin.source.read(origin.name, start, stop)
        if self._last[0] != name:
            self._last = name, origin.read()
        tensor = self._last[1]
        return tensor[start:stop] if tensor.ndim else tensor


def renamed(source: WeightSource, rename: Callable[[str], str | None]) -> MappedSource:
    """Return a source with renamed tensors.  `rename` returns a tensor's new name, or None to leave it out."""
    new_names = {name: rename(name) for name in source.shapes}
    origins = {new: Origin(source, name) for name, new in new_names.items() if new is not None}
    return MappedSource(source.description, origins)


def joined(*sources: WeightSource) -> MappedSource:
    """Return a source with the tensors of all `sources`, whose names differ."""
    origins = {name: Origin(source, name) for source in sources for name in source.shapes}
    return MappedSource(" and ".join(source.description for source in sources), origins)


# ---------------------------------------------------------------------------------------------------------------
# Hugging Face folders

_DTYPES = {
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


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file: its reader, whether it is stored transposed, and its shape and dtype in our model."""

    file: Path
    reader: Any
    is_transposed: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _StackedTensor:
    """One tensor of our model whose rows are separate tensors in the files."""

    rows: Mapping[int, _StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.rows[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype


class SafetensorsFolder(StoredTensors):
    """A `WeightSource` for a Hugging Face folder, with a single `model.safetensors` or several files and an index.

    `ModelSpec.hf` maps the folder's tensor names to ours; `transformers` is not needed.  Files are memory-mapped:
    opening a file reads only its header, and pages are loaded as rows are read.  Tensors unknown to the model keep
    their names, so that a comparison with the model reports them.  Raises UserError, starting with `setting`, for a
    folder, index or file that cannot be read.  Format: https://github.com/huggingface/safetensors#format.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: ModelSpec | None = None,
        model_config: Any = None,
        setting: str = "path",
    ) -> None:
        """Without a model spec, tensors have the names and shapes that they have in the files."""
        names = None if spec is None else HuggingFaceNames(spec, model_config)
        self.description = str(path)
        self._setting = setting
        self.remarks: list[str] = []
        """Differences from the files to report: dequantization, parts that the model lacks, and what is not read."""
        readers: dict[str, tuple[Path, Any]] = {}
        left_out: Counter[str] = Counter()
        unlisted: list[str] = []
        files = weight_files(path, setting)
        for file, expected in files.items():
            handle = self._open(file)
            present = list(handle.keys())
            absent = sorted(expected - set(present))
            if absent:
                raise self._unreadable(file, f"has no {', '.join(absent)}, which {INDEX} lists")
            for name in present:
                if names is not None and (part := names.left_out(name)) is not None:
                    left_out[part] += 1
                    continue
                if names is not None and names.is_ignored(name):
                    continue
                if name in readers:
                    raise self._unreadable(file, f"has {name}, and so has {readers[name][0].name}; remove one of them")
                if expected and name not in expected:
                    unlisted.append(name)
                readers[name] = file, handle.get_slice(name)
        self.remarks += [f"without {part} ({number} tensors)" for part, number in left_out.items()]
        if unlisted:
            self.remarks.append(f"with {first_few(unlisted)}, which {INDEX} does not list")
        self.remarks += unread_weights(path, [file.name for file in files])
        if spec is not None and spec.hf is not None and "quantization_config" in spec.hf.dropped:
            readers = self._dequantized(readers)
        self._stored: dict[str, _StoredTensor | _StackedTensor] = {}
        stacks: dict[str, dict[str, _StoredTensor]] = {}
        for name, (file, reader) in readers.items():
            mapped = (names and names.from_huggingface(name)) or MappedTensor(name)
            stored = self._describe(file, reader, name, mapped.is_transposed)
            if mapped.row is None:
                self._stored[mapped.name] = stored
            else:
                stacks.setdefault(mapped.name, {})[mapped.row] = stored
        self._stored |= {name: self._stack(name, rows) for name, rows in stacks.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor; where possible, as a view of the file.  Raises UserError."""
        stored = self._stored[name]
        if isinstance(stored, _StackedTensor):
            return torch.stack([self._read(stored.rows[row]) for row in range(len(stored.rows))[start:stop]])
        return self._read(stored, start, stop)

    def _read(self, stored: _StoredTensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        try:
            if not stored.shape:
                tensor: torch.Tensor = stored.reader[...]
            elif stored.is_transposed and len(stored.shape) == 2:
                tensor = stored.reader[:, start:stop].t()
            elif stored.is_transposed:
                tensor = stored.reader[start:stop].mT
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

    def _describe(self, file: Path, reader: Any, name: str, is_transposed: bool) -> _StoredTensor:
        shape, dtype = tuple(reader.get_shape()), reader.get_dtype()
        if dtype not in _DTYPES:
            raise self._unreadable(file, f"{name} is stored as {dtype}; convert it to one of {', '.join(_DTYPES)}")
        is_transposed = is_transposed and len(shape) >= 2
        shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        return _StoredTensor(file, reader, is_transposed, shape, _DTYPES[dtype])

    def _dequantized(self, readers: dict[str, tuple[Path, Any]]) -> dict[str, tuple[Path, Any]]:
        """Replace quantized tensors with dequantizing readers, if the folder's config.json declares a quantization."""
        path = Path(self.description).expanduser() / CONFIG_JSON
        quantization = read_json(path).get("quantization_config") if path.is_file() else None
        if not quantization:
            return readers
        try:
            new_readers = with_dequantizing_readers(readers, quantization)
        except UserError as error:
            raise setting_error(self._setting, self.description, str(error)) from error
        self.remarks.append(f"dequantized from {quantization['quant_method']} to bfloat16")
        return new_readers

    def _stack(self, name: str, rows: Mapping[str, _StoredTensor]) -> _StackedTensor:
        """Stack tensors, given by row number.  Raises UserError if rows are missing or differ in shape or dtype."""
        first = next(iter(rows.values()))
        numbered = {int(row): stored for row, stored in rows.items() if row.isdecimal()}
        if absent := sorted({*range(len(rows))} - {*numbered}):
            listed = ", ".join(map(str, absent))
            raise self._unreadable(first.file, f"part {listed} of the {len(rows)} parts of {name} is missing")
        for row, stored in numbered.items():
            if (stored.shape, stored.dtype) != (numbered[0].shape, numbered[0].dtype):
                rule = f"part {row} of {name} is {stored.shape}, {stored.dtype}, and part 0 {numbered[0].shape}, "
                raise self._unreadable(stored.file, f"{rule}{numbered[0].dtype}")
        return _StackedTensor(numbered)

    def _unreadable(self, file: Path, rule: str) -> UserError:
        return setting_error(self._setting, self.description, f"{file.name}: {rule}")


# ---------------------------------------------------------------------------------------------------------------
# Single files


class StateDictFile(StoredTensors):
    """A `WeightSource` for a single file of unsharded tensors under our names, such as a state dict from `torch.save`.

    The state dict may be the entry `model` of another dict.  The file is memory-mapped, so that only the requested rows
    are loaded.  Pickled files are read with `weights_only=True`, so that no code in them runs.
    """

    _PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

    def __init__(self, path: Path, setting: str) -> None:
        self.description = str(path)
        content: Any
        try:
            if path.suffix == ".safetensors":
                content = safetensors.torch.load_file(path)
            else:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
            raise setting_error(setting, path, f"cannot be read as a state dict ({error})") from error
        if isinstance(content, dict) and isinstance(content.get("model"), dict):
            content = content["model"]
        if not isinstance(content, dict):
            raise setting_error(setting, path, "has no state dict")
        wrappers = re.compile("|".join(map(re.escape, self._PREFIXES)))
        self._stored = {wrappers.sub("", name): t for name, t in content.items() if isinstance(t, torch.Tensor)}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        tensor = self._stored[name]
        return tensor[start:stop] if tensor.ndim else tensor
