"""Weights with adapters (LoRA), as sources: the base under the names of a model with adapters, the two joined, merged.

A checkpoint of such a run holds the adapters alone, and names the base by its path and a checksum.  So the base is read
from where it was, and what is read is known to be what was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from trainer.files import crc32
from trainer.model.lora import ADAPTER, adapter_part, plain_name
from trainer.weights.access import WeightSource, row_blocks

BASE = "base"
"""The part of a run's state that names the weights under its adapters."""

REFERENCE = "reference"
"""The part that names the weights of a reference model of its own."""


class Base:
    """The weights under a run's adapters, or of its reference model: part of its state, the same on all ranks.

    path: where they came from; empty if they were drawn, so that checkpoints hold them.
    checksum: of their values (see `checksum_of`).
    names: what of the model's state they are, and checkpoints do not hold.
    """

    def __init__(self, path: str = "", checksum: str = "", names: Collection[str] = ()) -> None:
        self.path, self.checksum, self.names = path, checksum, frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        return {"path": self.path, "checksum": self.checksum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: they are where they were, which `changes_outside` has seen to."""

    def changes_outside(self, plain: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Return a line if these are not the weights that the stored adapters are for; a place is no difference."""
        return ([] if plain["checksum"] == self.checksum else [not_the_base(self.path, self.checksum, plain)]), []


def not_the_base(path: str, checksum: str, named: Mapping[str, Any]) -> str:
    """Return the mistake of other weights than those that a run is based on, which `named` names."""
    return (
        f"train.init_from={path or 'null'}: is not the base model that this was trained on; that was "
        f"{named['path'] or 'drawn at random'} (checksum {named['checksum'] or 'none'}, this has {checksum or 'none'})"
    )


def checksums_of(source: WeightSource, names: Iterable[str], rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """Return a line for each of the tensors `names` that are this rank's share: shape, dtype and CRC-32 of the values.

    The share is every `num_ranks`-th, the largest first.  Reads a block at a time.
    """
    shapes, dtypes = source.shapes, source.dtypes
    largest_first = sorted(names, key=lambda name: (-torch.Size(shapes[name]).numel(), name))
    lines = {}
    for name in largest_first[rank::num_ranks]:
        crc = 0
        for start, stop in row_blocks(shapes[name], dtypes[name], 0, shapes[name][0]) if shapes[name] else [(0, None)]:
            block = source.read(name, start, stop).contiguous().flatten()
            crc = crc32(block.view(torch.uint8).numpy().data, crc)
        lines[name] = f"{name} {list(shapes[name])} {dtypes[name]} {crc:08x}"
    return lines


def checksum_of(lines: Iterable[Mapping[str, str]]) -> str:
    """Return the checksum of all the tensors that ranks have made lines of; it depends on names and values alone."""
    together = {name: line for share in lines for name, line in share.items()}
    return hashlib.sha256("\n".join(together[name] for name in sorted(together)).encode()).hexdigest()[:16]


class Renamed:
    """A source under other names: a `WeightSource`.  `rename` returns a tensor's new name, None to leave it out."""

    def __init__(self, source: WeightSource, rename: Callable[[str], str | None]) -> None:
        self.description, self._source = source.description, source
        self._theirs = {ours: name for name in source.shapes if (ours := rename(name)) is not None}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes
        return {name: shapes[theirs] for name, theirs in self._theirs.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._source.dtypes
        return {name: dtypes[theirs] for name, theirs in self._theirs.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        return self._source.read(self._theirs[name], start, stop)


def under_adapters(source: WeightSource, names: Iterable[str]) -> WeightSource:
    """Return a source of plain weights under the names that they have in a model; `names` are of its parameters."""
    layers = adapted_layers(names)

    def rename(name: str) -> str:
        layer, _, last = name.rpartition(".")
        return f"{layer}.base_layer.{last}" if layer in layers else name

    return Renamed(source, rename) if layers else source


def without_adapters(source: WeightSource) -> WeightSource:
    """Return the base in a source that has adapters, too, under the names of a model without any."""
    return Renamed(source, lambda name: None if adapter_part(name) else plain_name(name))


class Joined:
    """Two sources as one, which have no weight in common: a `WeightSource`."""

    def __init__(self, one: WeightSource, other: WeightSource) -> None:
        self.description = f"{one.description} and {other.description}"
        self._home = {name: source for source in (one, other) for name in source.shapes}
        self._sources = (one, other)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for source in self._sources for name, shape in source.shapes.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for source in self._sources for name, dtype in source.dtypes.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        return self._home[name].read(name, start, stop)


class Merged:
    """A model without adapters, whose weights do what those of `base` do with these beside them: a `WeightSource`.

    Each weight is W + (B @ A) * scaling, computed in float32 and kept in the dtype of W.  The product is made whole, as
    others make it, so that they come to the same bits; that of one layer at a time is held.  `transposed` are the
    layers that have W as (in, out).
    """

    def __init__(
        self, base: WeightSource, adapters: WeightSource, scaling: float, transposed: Collection[str] = ()
    ) -> None:
        self.description, self.adapters = adapters.description, adapters
        self._under, self._scaling, self._transposed = base, scaling, frozenset(transposed)
        self._layers = {f"{layer}.weight": layer for layer in adapted_layers(adapters.shapes)}
        self._product: tuple[str, torch.Tensor] = ("", torch.empty(0))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._under.shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._under.dtypes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or all of it."""
        own = self._under.read(name, start, stop)
        return (own + self._added(name)[start:stop]).to(own.dtype) if name in self._layers else own

    def _added(self, name: str) -> torch.Tensor:
        if self._product[0] != name:
            layer = self._layers[name]
            first, second = (self.adapters.read(f"{layer}.lora_{part}.{ADAPTER}.weight").float() for part in "AB")
            product = second @ first
            self._product = (name, (product.t() if layer in self._transposed else product) * self._scaling)
        return self._product[1]


def adapted_layers(names: Iterable[str]) -> set[str]:
    """Return the layers that have an adapter among the parameters of these names."""
    return {part[0] for name in names if (part := adapter_part(name))}
