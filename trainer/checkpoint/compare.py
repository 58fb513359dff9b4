"""Compares a checkpoint with the state of a run that is to be restored from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import Layout, StoredTensor, part_of_layout
from trainer.checkpoint.state_parts import StatePart, split_state
from trainer.checkpoint.storage import Storage
from trainer.errors import UserError, nearest, setting_error

if TYPE_CHECKING:
    from trainer.checkpoint.restore import StoredState
    from trainer.lifecycle.state import TrainState

_ALLOW_HINT = re.compile(r"allow it: checkpoint\.allow_changes=\[([^\]]+)\]")

_MAX_LINES, _MAX_CHARACTERS = 20, 300
"""Maximum number of differences in the error message, and of characters in each: a single cause, such as a different
width, shows up in every tensor."""


class IncompatibleCheckpoint(UserError):
    """Raised if a checkpoint cannot be restored into the state.  The message shows the differences, settings first."""

    def __init__(self, storage: Storage, settings: list[str], by_part: Mapping[str, list[str]], new_name: str) -> None:
        """settings: the differences in settings, one line each.

        by_part: the differences in the state, one line each, by part.
        new_name: a name for another run, to propose.
        """
        part_lines = [line for lines in by_part.values() for line in lines]
        # A different optimizer explains the differences in its state, which then need no advice of their own.
        has_new_optimizer = any(line.startswith("optim.name:") for line in settings)
        lines_to_advise_on = [
            line for name, lines in by_part.items() if name != "optimizer" or not has_new_optimizer for line in lines
        ]
        parts = [name for name, lines in by_part.items() if any(not _ALLOW_HINT.search(line) for line in lines)]
        first_lines = [lines[0] for lines in by_part.values()]
        others = [line for line in part_lines if line not in first_lines]
        lines = [*settings, *first_lines, *others]
        shown = [
            line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..." for line in lines[:_MAX_LINES]
        ]
        if len(lines) > _MAX_LINES:
            shown.append(f"and {len(lines) - _MAX_LINES} more differences")
        shown.append(advice_for(settings, lines_to_advise_on, parts, new_name))
        super().__init__(f"cannot resume from {storage}:\n" + "\n".join(f"  {line}" for line in shown))


def check_compatible(
    storage: Storage,
    settings: list[str],
    state: TrainState,
    stored: StoredState,
    allowed: frozenset[str],
    new_name: str,
) -> tuple[set[str], list[str]]:
    """Return the parts not to restore, which differ but are in `allowed`, and remarks to print.

    settings: forbidden differences in settings, one line each.
    new_name: a name for another run, to propose.

    Raises IncompatibleCheckpoint with these and all forbidden differences in the state, and UserError if `allowed`
    names a part that does not exist.
    """
    parts, per_rank_parts = stored.shared.parts, stored.shared.per_rank_parts
    names = {*state.parts, *state.per_rank_parts, *parts, *per_rank_parts}
    for entry in allowed:
        if entry.startswith("state.") and entry.removeprefix("state.") not in names:
            rule = f"the state has {', '.join(f'state.{name}' for name in sorted(names))}"
            best = nearest(entry.removeprefix("state."), names)
            meant = [f"state.{best}"] if best else None
            fix = "" if best else "leave it out, or name one of these"
            raise setting_error("checkpoint.allow_changes", [entry], rule, proposal=meant, fix=fix)
    by_part: dict[str, list[str]] = {}
    left_out = set()
    for name, stateful in [*state.parts.items(), *state.per_rank_parts.items()]:
        part = StatePart.of(stateful)
        differences: list[str] | None = []
        if name not in (parts if name in state.parts else per_rank_parts):
            differences = [_state_differs(name, "not in the checkpoint")]
        elif name in state.per_rank_parts:
            if stored.per_rank_bytes is None and not part.can_restart:
                differences = [_state_differs(name, "per-rank state, saved with a different number of ranks")]
        else:
            differences = part.differences(parts[name], part_of_layout(stored.layout, name))
            if differences is None:
                differences = _sharded_differences(name, part, stored.layout)
        if differences and f"state.{name}" in allowed:
            left_out.add(name)
        elif differences:
            by_part[name] = differences
    for name in [*parts, *per_rank_parts]:
        if name not in {*state.parts, *state.per_rank_parts} and f"state.{name}" not in allowed:
            by_part[name] = [_state_differs(name, "only in the checkpoint")]
    all_remarks: list[str] = []
    for name, stateful in state.parts.items():
        if name in parts and f"state.{name}" not in allowed:
            changed, remarks = StatePart.of(stateful).changes_from(parts[name], allowed)
            if changed:
                by_part[name] = by_part.get(name, []) + changed
            all_remarks += remarks
    if settings or by_part:
        raise IncompatibleCheckpoint(storage, settings, by_part, new_name)
    return left_out, all_remarks


def advice_for(settings: list[str], part_lines: list[str], parts: Sequence[str], new_name: str) -> str:
    """Return advice on a checkpoint that was refused.

    settings: the differences in settings, one line each.
    part_lines: the differences in parts of the state, one line each.
    parts: the parts that have a difference whose line does not say how to allow it.
    new_name: a name for another run, to propose.
    """
    keys = [line.partition(":")[0] for line in settings]
    keys += [key for line in part_lines for key in _ALLOW_HINT.findall(line)]
    if len(keys) < len(settings) + len(part_lines):
        names = [f"state.{name}" for name in parts if name != "optimizer" or "model" not in parts]  # model implies it
        keys = ["model" if key == "model.name" else key for key in keys]  # covers all its settings
        allowed = shlex.quote(f"checkpoint.allow_changes=[{','.join(dict.fromkeys([*keys, *names]))}]")
        return (
            f"to fix: undo the change, or train another run: run.name={new_name} (train.init_from starts it from these "
            f"weights, if they match); {allowed} reinitializes what does not match"
        )
    needed = [key for key in dict.fromkeys(keys) if key.partition(".")[0] == key or key.partition(".")[0] not in keys]
    allowed = shlex.quote(f"checkpoint.allow_changes=[{','.join(needed)}]")
    return f"to fix: undo the change, train another run (run.name={new_name}), or allow it: {allowed}"


def _state_differs(name: str, where: str) -> str:
    return f"state {name!r}: {where} (allow it: checkpoint.allow_changes=[state.{name}])"


def _sharded_differences(name: str, part: StatePart, layout: Layout) -> list[str]:
    """Return one line per DTensor of a part whose shape differs from the stored one."""
    with torch.no_grad():
        _, tensors = split_state(part.state_dict(), (name,))
    lines = []
    for path, tensor in tensors.items():
        stored = layout.get(".".join(path))
        if isinstance(tensor, DTensor) and stored is not None and tuple(tensor.shape) != stored.shape:
            lines.append(
                f"{'.'.join(path)}: shape {_shape(stored.shape)} in the checkpoint, {_shape(tensor.shape)} now"
            )
    return lines


def tensor_differences(live: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield one line per difference between live and stored tensors in keys, shapes and dtypes."""
    for key in [*live, *(key for key in stored if key not in live)]:
        if key not in stored:
            yield f"{key}: {_shape(live[key].shape)}, not in the checkpoint"
        elif key not in live:
            yield f"{key}: {_shape(stored[key].shape)}, only in the checkpoint"
        else:
            before, now = stored[key], live[key]
            if before.shape != tuple(now.shape):
                yield f"{key}: shape {_shape(before.shape)} in the checkpoint, {_shape(now.shape)} now"
            if before.dtype != now.dtype:
                yield f"{key}: dtype {_dtype(before.dtype)} in the checkpoint, {_dtype(now.dtype)} now"


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
