"""Compares a checkpoint with the state to restore, reports every difference, and applies the checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import Layout, StoredTensor, layout_from_json
from trainer.checkpoint.manifest import (
    Manifest,
    rank_file,
    read_file,
)
from trainer.checkpoint.snapshot import ComparablePart, DependentPart, RestartablePart, Savable, Stateful
from trainer.checkpoint.state_tree import join, split
from trainer.checkpoint.storage import Storage
from trainer.distributed.world import World
from trainer.errors import UserError, nearest, setting_error

_ALLOW_HINT = re.compile(r"allow it: checkpoint\.allow_changes=\[([^\]]+)\]")


_NUM_LINES, _NUM_CHARACTERS = 4, 300
"""Limits of the error message: one cause, such as a different width, shows up in every tensor."""


class IncompatibleCheckpoint(UserError):
    """Raised if a checkpoint cannot be restored into the state.

    `lines` holds all differences, settings first; the message shows some of them.
    """

    def __init__(self, storage: Storage, different: list[str], unfit: Mapping[str, list[str]]) -> None:
        """different: one line per differing setting.  unfit: other differences, by part of the state."""
        of_parts = [line for lines in unfit.values() for line in lines]
        self.lines = [*different, *of_parts]
        has_new_optimizer = any(line.startswith("optim.name:") for line in different)  # explains its state
        advised = [
            line for name, lines in unfit.items() if name != "optimizer" or not has_new_optimizer for line in lines
        ]
        parts = [name for name, lines in unfit.items() if any(not _ALLOW_HINT.search(line) for line in lines)]
        self._place, self._advice = storage, advice_for(different, advised, parts)
        most = _NUM_LINES if len(self.lines) <= _NUM_LINES else _NUM_LINES - 1  # one line says how many more
        first = [lines[0] for lines in unfit.values()]
        self._shown = [*different, *first, *(line for line in of_parts if line not in first)][:most]
        super().__init__(self.message())

    @property
    def is_short(self) -> bool:
        """True if the message shows all differences in full."""
        return len(self.lines) == len(self._shown) and all(len(line) <= _NUM_CHARACTERS for line in self.lines)

    def message(self, file: str = "") -> str:
        """Return the message; `file` names a file that holds all lines."""
        shown = [line if len(line) <= _NUM_CHARACTERS else f"{line[:_NUM_CHARACTERS]}..." for line in self._shown]
        if more := len(self.lines) - len(self._shown):
            shown.append(f"and {more} more differences" + f": {file}" * bool(file))
        elif file:
            shown.append(f"in full: {file}")
        return f"cannot resume from {self._place}:\n" + "\n".join(f"  {line}" for line in (*shown, self._advice))


class StoredState:
    """Everything in a checkpoint but the tensors.  Each file is verified as it is read."""

    def __init__(self, storage: Storage, manifest: Manifest, world: World) -> None:
        self.document: dict[str, Any] = json.loads(read_file(storage, manifest, "state.json"))
        self.layout = layout_from_json(read_file(storage, manifest, "layout.json"))
        self.config_yaml = read_file(storage, manifest, "config.yaml").decode()
        is_same_size = manifest.world_size == world.size
        self.own = read_file(storage, manifest, rank_file(world.rank)) if is_same_size else None


def find_targets(state: Savable, layout: Layout, left_out: set[str]) -> dict[str, torch.Tensor]:
    """Return the tensor to read each stored tensor into: the live tensor if it exists and has the same shape."""
    targets: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, part in state.parts.items():
            if name in left_out:
                continue
            stored = _within(layout, name)
            if isinstance(part, ComparablePart):
                part.prepare(stored)
            _, live = split(part.state_dict(), (name,))
            by_key = {".".join(path): tensor for path, tensor in live.items()}
            for key in stored:
                full = f"{name}.{key}"
                tensor = by_key.get(full)
                if tensor is None or tuple(tensor.shape) != stored[key].shape:
                    tensor = torch.empty(stored[key].shape, dtype=stored[key].dtype)
                targets[full] = tensor.detach()
    return targets


def _within(layout: Layout, name: str) -> dict[str, StoredTensor]:
    return {key.removeprefix(f"{name}."): stored for key, stored in layout.items() if key.startswith(f"{name}.")}


def check_compatible(
    storage: Storage,
    different: list[str],
    state: Savable,
    document: Mapping[str, Any],
    layout: Layout,
    allowed: frozenset[str],
    is_same_size: bool,
) -> tuple[set[str], list[str]]:
    """Return the parts that may be left unrestored because the user allows it, and remarks to print.

    Raises IncompatibleCheckpoint with all differences, `different` first.
    """
    unfit, left_out = find_differences(state, document, layout, allowed, is_same_size)
    all_remarks: list[str] = []
    for name, part in state.parts.items():
        if isinstance(part, DependentPart) and name in document["parts"] and f"state.{name}" not in allowed:
            changed, remarks = part.changes_outside(document["parts"][name], allowed)
            if changed:
                unfit[name] = unfit.get(name, []) + changed
            all_remarks += remarks
    if different or unfit:
        raise IncompatibleCheckpoint(storage, different, unfit)
    return left_out, all_remarks


def find_differences(
    state: Savable, document: Mapping[str, Any], layout: Layout, allowed: frozenset[str], is_same_size: bool
) -> tuple[dict[str, list[str]], set[str]]:
    """Return one line per difference, by part, and the parts left unrestored because the user allows it."""
    # The earliest checkpoints of this format did not list per-rank parts.
    parts, per_rank_parts = document["parts"], document.get("rank_parts", list(state.per_rank_parts))
    known = {*state.parts, *state.per_rank_parts, *parts, *per_rank_parts}
    for named in allowed:
        if named.startswith("state.") and named.removeprefix("state.") not in known:
            rule = f"the state has {', '.join(f'state.{name}' for name in sorted(known))}"
            best = nearest(named.removeprefix("state."), known)
            meant = [f"state.{best}"] if best else None
            fix = "" if best else "leave it out, or name one of these"
            raise setting_error("checkpoint.allow_changes", [named], rule, meant=meant, fix=fix)
    lines: dict[str, list[str]] = {}
    left_out = set()
    for name, part in [*state.parts.items(), *state.per_rank_parts.items()]:
        unfit: list[str] = []
        if name not in (parts if name in state.parts else per_rank_parts):
            unfit = [] if getattr(part, "may_be_absent", False) else [_other_state(name, "not in the checkpoint")]
        elif name in state.per_rank_parts:
            if not is_same_size and not isinstance(part, RestartablePart):
                unfit = [_other_state(name, "per-rank state, saved with a different number of ranks")]
        elif isinstance(part, ComparablePart):
            unfit = part.differences(parts[name], _within(layout, name))
        else:
            unfit = _sharded_differences(name, part, layout)
        if unfit and f"state.{name}" in allowed:
            left_out.add(name)
        elif unfit:
            lines[name] = unfit
    for name in [*parts, *per_rank_parts]:
        if name not in {*state.parts, *state.per_rank_parts} and f"state.{name}" not in allowed:
            lines[name] = [_other_state(name, "only in the checkpoint")]
    return lines, left_out


def advice_for(different: list[str], unfit: list[str], parts: Sequence[str] = ()) -> str:
    """Return advice on a checkpoint that was refused.

    parts: parts of the state with differences that do not say how to allow them.
    """
    keys = [line.partition(":")[0] for line in different] + [
        part for line in unfit for part in _ALLOW_HINT.findall(line)
    ]
    if len(keys) < len(different) + len(unfit):
        names = [f"state.{name}" for name in parts if name != "optimizer" or "model" not in parts]  # model implies it
        whole = ["model" if key == "model.name" else key for key in keys]  # covers all its settings
        allowed = shlex.quote(f"checkpoint.allow_changes=[{','.join(dict.fromkeys([*whole, *names]))}]")
        return (
            "to fix: undo the change, or train another run: run.name=NAME (train.init_from starts it from these "
            f"weights, if they fit); {allowed} starts what does not fit afresh"
        )
    needed = [key for key in dict.fromkeys(keys) if key.partition(".")[0] == key or key.partition(".")[0] not in keys]
    allowed = shlex.quote(f"checkpoint.allow_changes=[{','.join(needed)}]")
    return f"to fix: undo the change, train another run (run.name=NAME), or allow it: {allowed}"


def _other_state(name: str, where: str) -> str:
    return f"state {name!r}: {where} (allow it: checkpoint.allow_changes=[state.{name}])"


def _sharded_differences(name: str, part: Stateful, layout: Layout) -> list[str]:
    with torch.no_grad():
        _, live = split(part.state_dict(), (name,))
    lines = []
    for path, tensor in live.items():
        stored = layout.get(".".join(path))
        if isinstance(tensor, DTensor) and stored is not None and tuple(tensor.shape) != stored.shape:
            lines.append(
                f"{'.'.join(path)}: shape {_shape(stored.shape)} in the checkpoint, {_shape(tensor.shape)} now"
            )
    return lines


def tensor_differences(own: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield one line per difference in keys, shapes and dtypes, in either direction."""
    for key in [*own, *(key for key in stored if key not in own)]:
        if key not in stored:
            yield f"{key}: {_shape(own[key].shape)}, not in the checkpoint"
        elif key not in own:
            yield f"{key}: {_shape(stored[key].shape)}, only in the checkpoint"
        else:
            before, now = stored[key], own[key]
            if before.shape != tuple(now.shape):
                yield f"{key}: shape {_shape(before.shape)} in the checkpoint, {_shape(now.shape)} now"
            if before.dtype != now.dtype:
                yield f"{key}: dtype {_dtype(before.dtype)} in the checkpoint, {_dtype(now.dtype)} now"


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def apply(
    state: Savable,
    document: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor],
    own: bytes | None,
    left_out: set[str],
) -> None:
    """Load every part's state.  Call this only after everything has been read and verified."""
    plain, tensors = ({}, {}) if own is None else read_own(own)
    differing = {key: tensors[key] for key in document.get("unlike", []) if key in tensors}
    with torch.no_grad():
        for name, part in state.parts.items():
            if name in document["parts"] and name not in left_out:
                part.load_state_dict(join(document["parts"][name], {**targets, **differing}))
        for name, part in state.per_rank_parts.items():
            if name in plain and name not in left_out:
                part.load_state_dict(join(plain[name], tensors))


def read_own(own: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the plain values and the tensors in a per-rank file."""
    header = json.loads(own[8 : 8 + int.from_bytes(own[:8], "little")])
    return json.loads(header["__metadata__"]["state"]), safetensors.torch.load(own)
