"""The interface of a part of a run's state, and how state dicts are stored.

State dicts are split into tensors and JSON, and rejoined when they are loaded.  The shared tensors are in the data
files (`layout`); the rest is in `state.json` and, if it differs between ranks, in one file per rank.  Nothing is
pickled, so reading a checkpoint cannot run code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import safetensors.torch
import torch

if TYPE_CHECKING:
    from trainer.checkpoint.layout import StoredTensor


class Stateful(Protocol):
    """Anything that can be saved and restored, such as a torch module."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StatePart:
    """One part of the state, with `state_dict`, `load_state_dict`, and hooks that do nothing by default.

    Any object with the first two methods can be a part.  If it does not derive from this class, `StatePart.of` wraps it
    and adds the hooks that it lacks; its `differences`, `prepare` and `may_differ` are used only if it has all three.
    """

    can_restart = False
    """True if `restart` can replace stored per-rank state when the checkpoint is from a different number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str] | None:
        """Compare the part with its stored form, before anything is loaded.  Returns one line per difference.

        plain: the stored state with a placeholder for each tensor (see `split_state`).
        stored: the stored tensors, by their keys within the part.

        If this returns None, as it does by default, the reader compares only the shapes of DTensors.
        """
        return None

    def prepare(self, stored: Mapping[str, StoredTensor]) -> None:
        """Allocate the tensors that loading will fill but that do not exist yet.  stored: as in `differences`."""

    def may_differ(self, key: str) -> bool:
        """Return whether an unsharded tensor may differ between ranks; each rank then stores and restores its own."""
        return False

    def changes_from(self, plain: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Check that what the part refers to outside the checkpoint, such as the training data, is unchanged.

        plain: as in `differences`.
        allowed: keys and parts of the state that may differ (`checkpoint.allow_changes`).

        Returns the changes since `plain` was stored as two lists with one line per change: those that forbid resuming,
        and those that are only reported.
        """
        return [], []

    def restart(self, step: int) -> None:
        """Reinitialize a per-rank part for `step`; called if the checkpoint has a different number of ranks."""

    @staticmethod
    def of(thing: Stateful) -> StatePart:
        """Return `thing` as a part of the state."""
        return thing if isinstance(thing, StatePart) else _WrappedPart(thing)


class _WrappedPart(StatePart):
    """An object that does not derive from StatePart, with the default for each hook that is not taken from it."""

    def __init__(self, thing: Any) -> None:
        names = ["state_dict", "load_state_dict"]
        # Take all three or none: the user's object may have a method `prepare` for another purpose.
        hooks = ("differences", "prepare", "may_differ")
        names += hooks if all(hasattr(thing, name) for name in hooks) else ()
        names += [name for name in ("changes_from", "restart") if hasattr(thing, name)]
        vars(self).update({name: getattr(thing, name) for name in names})
        self.can_restart = "restart" in names


# ---------------------------------------------------------------------------------------------------------------
# The files with the rest of the state


@dataclass(frozen=True)
class SharedState:
    """The state in `state.json`, which is the same on all ranks."""

    parts: Mapping[str, Any]
    """Everything except the tensors, by part, as JSON values (see `split_state`)."""
    per_rank_parts: Sequence[str]
    """Names of the per-rank parts."""
    differing_keys: Sequence[str]
    """Keys of unsharded tensors that each rank stores separately, because their values differ."""

    def to_json(self) -> str:
        """Return the content of the file."""
        content = {
            "parts": self.parts,
            "per_rank_parts": self.per_rank_parts,
            "differing_keys": self.differing_keys,
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> SharedState:
        """Parse what `to_json` has written."""
        return cls(**json.loads(text))


def rank_state_to_bytes(plain: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the content of a rank's own file, in the format of safetensors.

    plain: everything except the tensors, by part, as JSON values.
    tensors: by key.
    """
    return safetensors.torch.save(tensors, metadata={"state": json.dumps(plain)})


def rank_state_from_bytes(content: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the two arguments of `rank_state_to_bytes`."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # safetensors does not return it
    return json.loads(header["__metadata__"]["state"]), safetensors.torch.load(content)


# ---------------------------------------------------------------------------------------------------------------
# State dicts as tensors and JSON

_TAG = "!"
"""Key that marks values without a JSON type."""

Path = tuple[str, ...]
"""Path of a tensor in the state dict.  Joined by dots, it is the tensor's key in the checkpoint."""


def split_state(state: Any, path: Path) -> tuple[Any, dict[Path, torch.Tensor]]:
    """Return `state` as JSON values with a placeholder for each tensor, and its tensors by path.

    path: the beginning of each tensor's path.

    Raises TypeError, with the path, for a value that is neither a tensor nor plain data, or if tensors share a path.
    """
    tensors: dict[Path, torch.Tensor] = {}
    return _plain(state, path, tensors), tensors


def join_state(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild a state that `split_state` has split.  `tensors` maps keys (paths joined by dots) to tensors."""
    if isinstance(plain, list):
        return [join_state(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {name: join_state(item, tensors) for name, item in plain.items()}
    kind, value = plain[_TAG], plain["value"]
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "dict":
        joined = ((join_state(name, tensors), join_state(item, tensors)) for name, item in value)
        return {tuple(name) if isinstance(name, list) else name: item for name, item in joined}
    items = [join_state(item, tensors) for item in value]
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def _plain(value: Any, path: Path, tensors: dict[Path, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "value": _add_tensor(value, path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        return {_TAG: "array", "value": _add_tensor(torch.from_numpy(np.array(value, order="C")), path, tensors)}
    if isinstance(value, np.generic):
        return _plain(value.item(), path, tensors)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(type(name) is str and name != _TAG for name in value):
            return {name: _plain(item, (*path, name), tensors) for name, item in value.items()}
        items = [[_plain(n, path, tensors), _plain(item, (*path, str(n)), tensors)] for n, item in value.items()]
        return {_TAG: "dict", "value": items}
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = value if isinstance(value, (list, tuple)) else sorted(value, key=repr)
        items = [_plain(item, (*path, str(number)), tensors) for number, item in enumerate(ordered)]
        if isinstance(value, list):
            return items
        return {_TAG: next(k for k in ("tuple", "set", "frozenset") if isinstance(value, _KINDS[k])), "value": items}
    if isinstance(value, (int, float, str)):  # store an enum or another subclass as its plain value
        return _plain(next(kind for kind in (int, float, str) if isinstance(value, kind))(value), path, tensors)
    raise TypeError(
        f"{'.'.join(path)} is a {type(value).__qualname__}; a state_dict may hold tensors, numbers, text, bytes, "
        "arrays, None, and lists, tuples, sets and dictionaries of them"
    )


def _add_tensor(tensor: torch.Tensor, path: Path, tensors: dict[Path, torch.Tensor]) -> str:
    """Add a tensor under its path; return its key."""
    key = ".".join(path)
    if path in tensors:
        raise TypeError(f"two tensors in the state have the name {key} (a dictionary with keys such as 1 and '1'?)")
    tensors[path] = tensor
    return key


_KINDS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
