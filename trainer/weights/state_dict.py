"""Fills models from weight sources, and collects a model's full state dict.

A source reads rows of named tensors; its format (a checkpoint, a Hugging Face folder) is hidden from the model.  Each
rank reads only the rows that it holds, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.errors import UserError, print_stderr
from trainer.model.parameters import local, local_rows, tied_names
from trainer.recipe import WeightSource as WeightSource

BLOCK_BYTES = 64 * 2**20
"""Maximum size of a block of rows that is read at once."""


@torch.no_grad()
def fill(
    model: nn.Module, source: WeightSource, setting: str = "weights", only: Callable[[str], bool] | None = None
) -> None:
    """Copy the weights of `source` into `model`, in place and in the model's own dtypes.

    `only` is a predicate on our names.  If given, only matching weights are copied, and others may be missing or extra
    in the source.

    The model must be materialized, and may be sharded: each rank reads its own rows, a block at a time.  (A tensor
    sharded along another dimension is read in full.)  Persistent buffers missing from the source keep their values.  No
    collectives; one host sync.

    Raises UserError on all ranks, before anything is written, if the source does not fit the model (see
    `find_weights`).  Raises UserError on those ranks whose rows of a parameter hold NaN or infinity, which no loss
    survives; warns of matrices whose rows here are all zero.  Errors of the source while reading may be raised on a
    single rank.
    """
    model_weights, dtypes = named_weights(model), source.dtypes
    is_finite: dict[str, torch.Tensor] = {}
    is_zero: dict[str, torch.Tensor] = {}
    for name, stored in find_weights(model, source, setting, only).items():
        weight = model_weights[name].detach()
        rows = local_rows(weight)
        if rows is None:
            assert isinstance(weight, DTensor)
            full = source.read(stored)
            parts = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
            local(weight).copy_(local(parts))
        elif weight.ndim == 0:
            local(weight).copy_(source.read(stored))
        else:
            first, last = rows
            for start, stop in row_blocks(weight.shape, dtypes[stored], first, last):
                local(weight)[start - first : stop - first].copy_(source.read(stored, start, stop))
        if isinstance(model_weights[name], nn.Parameter):  # a buffer may well hold -inf, as a causal mask does
            is_finite[stored] = torch.isfinite(local(weight)).all()
            if weight.ndim > 1 and local(weight).numel():
                is_zero[stored] = ~local(weight).any()
    if is_finite and not torch.stack([*is_finite.values()]).all():
        listed = _listed(name for name, flag in is_finite.items() if not flag)
        raise UserError(
            f"{setting}: the weights in {source.description} are not all finite: NaN or infinity in {listed}"
        )
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    if is_main and is_zero and torch.stack([*is_zero.values()]).any():
        zeros = [name for name, flag in is_zero.items() if flag]
        print_stderr(
            f"warning: {setting}: {len(zeros)} of {len(is_zero)} matrices in {source.description} are all zero, as "
            f"after an interrupted download: {_listed(zeros)}"
        )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def find_weights(
    model: nn.Module, source: WeightSource, setting: str, only: Callable[[str], bool] | None = None
) -> dict[str, str]:
    """Map the names of the model's weights to their names in `source`; of tied weights, only the first name is
    included.

    With `only`, restricted to the names for which it is true.

    Raises UserError that begins with `setting` and lists every difference: weights missing on either side, different
    shapes, and weights that are tied in the model but different in the source.  Persistent buffers may be missing in
    the source.
    """
    source_shapes = source.shapes
    model_weights = {name: tuple(weight.shape) for name, weight in named_weights(model).items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = {group[0]: group for group in tied_names(model)}
    aliases = {alias for group in groups.values() for alias in group[1:]}
    found: dict[str, str] = {}
    missing, untied = [], []
    wanted = {name for name in model_weights if only is None or only(name)}
    for name in [name for name in model_weights if name in wanted and name not in aliases]:
        stored = [alias for alias in groups.get(name, [name]) if alias in source_shapes]
        if stored:
            found[name] = stored[0]
            # Equal copies of a tied weight are fine; of two different weights, one would be lost.
            others = [other for other in stored[1:] if _are_different(source, stored[0], other)]
            untied += [f"{stored[0]} and {other} are one tensor here, but two there" for other in others]
        elif name in parameters:
            missing.append(f"missing there: {name} {model_weights[name]}")
    dtypes = source.dtypes
    integers = [
        f"{stored}: {str(dtypes[stored]).removeprefix('torch.')} there, as in a quantized folder whose scales are "
        "missing; floating point here"
        for name, stored in found.items()
        if name in parameters and not dtypes[stored].is_floating_point
    ]
    differences = [
        *missing,
        *integers,
        *(f"missing here: {name} {shape}" for name, shape in source_shapes.items() if name not in model_weights),
        *(
            f"{name}: {source_shapes[name]} there, {shape} here"
            for name, shape in model_weights.items()
            if name in wanted and source_shapes.get(name, shape) != shape
        ),
        *untied,
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(
            f"{setting}: the weights in {source.description} do not fit the model:\n  {listed}\n"
            "  to fix: download or export the folder again if it is incomplete, or set model.* to what it holds"
        )
    return found


def _are_different(source: WeightSource, one: str, other: str) -> bool:
    """Compare three rows to decide whether two names in the source are different weights."""
    shape = source.shapes[one]
    if source.shapes[other] != shape or not shape or not shape[0]:
        return False  # shapes are compared by the caller
    rows = (0, shape[0] // 2, shape[0] - 1)
    return not all(torch.equal(source.read(one, row, row + 1), source.read(other, row, row + 1)) for row in rows)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers under all their names; DTensors if the model is sharded.

    The tensors are the model's own.  Parameters that a forward pass left gathered are resharded.
    """
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def row_blocks(shape: Sequence[int], dtype: torch.dtype, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split the rows [start, stop) of a tensor of `shape` into blocks of at most `BLOCK_BYTES`, or one row."""
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsharded model, on the CPU, on rank 0; an empty dict on other ranks.

    Tied names share one tensor.  Collective: one all-gather per sharded tensor, one after another, so every rank must
    call it and briefly holds one full tensor.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    full: dict[str, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}
    for name, weight in named_weights(model).items():
        if id(weight) not in gathered:
            tensor = weight.detach()
            if isinstance(tensor, DTensor):
                # Offloaded shards are on the CPU, which the mesh's process group may not support.
                tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
            gathered[id(weight)] = tensor.to("cpu", copy=True) if is_first else tensor.new_empty(0)
        if is_first:
            full[name] = gathered[id(weight)]
    return full
