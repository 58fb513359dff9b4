"""Splits a state dict into tensors and JSON, and joins them again without loss.

There is no pickle, so that reading a checkpoint cannot run code.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TAG = "!"
"""Key that marks values without a JSON type."""

Path = tuple[str, ...]
"""Path of a tensor in the state dict.  Joined by dots, it is the tensor's key in the checkpoint."""


def split(state: Any, path: Path) -> tuple[Any, dict[Path, torch.Tensor]]:
    """Return `state` as JSON values, and its tensors by path (each path begins with `path`).

    Raises TypeError, naming the path, for a value that is neither a tensor nor plain data.
    """
    tensors: dict[Path, torch.Tensor] = {}
    return _plain(state, path, tensors), tensors


def join(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the state that was split by `split`.  `tensors` maps keys (paths joined by dots) to tensors."""
    if isinstance(plain, list):
        return [join(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {name: join(item, tensors) for name, item in plain.items()}
    kind, value = plain[_TAG], plain["value"]
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "dict":
        return {_hashable(join(name, tensors)): join(item, tensors) for name, item in value}
    items = [join(item, tensors) for item in value]
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _plain(value: Any, path: Path, tensors: dict[Path, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "value": _put(value, path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        return {_TAG: "array", "value": _put(torch.from_numpy(np.array(value, order="C")), path, tensors)}
    if isinstance(value, np.generic):
        return _plain(value.item(), path, tensors)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        named = all(type(name) is str and name != _TAG for name in value)
        if named:
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


def _put(tensor: torch.Tensor, path: Path, tensors: dict[Path, torch.Tensor]) -> str:
    """Add a tensor under its path; return its key."""
    key = ".".join(path)
    if path in tensors:
        raise TypeError(f"two tensors of the state have the name {key} (a dictionary with keys such as 1 and '1'?)")
    tensors[path] = tensor
    return key


_KINDS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
