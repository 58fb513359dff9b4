"""Error messages for values of the wrong type: name the expected type and suggest a value.

The unit of a number follows from the suffix of its key: `_s` is in seconds, `_h` in hours, `_gib` in GiB.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from typing import Any, Literal

from trainer.errors import nearest


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """Return a type in words, as error messages and `--help` show it."""
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "a value",
    }
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        return "{name: " + ("..." if value is Any else type_name(value)) + "}"
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        several = {int: "whole numbers", float: "numbers"}.get(items[0])
        if Ellipsis in items:
            return f"a list of {several or type_name(items[0])}"
        return f"a list of {len(items)} {several or f'x {type_name(items[0])}'}"
    options = union_members(hint)
    if len(options) > 1:
        return " or ".join(type_name(option) for option in options)
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def example_value(key: dataclasses.Field[Any]) -> Any:
    """Return an example value for a key, or None if there is none."""
    default = None if key.default is dataclasses.MISSING else key.default
    return _FORMS.get(key.name, default)


_SWITCHES = {
    **dict.fromkeys(("y", "t", "1", "enable", "enabled"), True),
    **dict.fromkeys(("n", "f", "0", "disable", "disabled", "none"), False),
}


def suggest_value(value: Any, hint: Any, key: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the keyword arguments of `setting_error` (`legal`, `meant` or `example`) for a value of the wrong type."""
    options = union_members(hint)
    if int in options and isinstance(value, (float, bool)) and math.isfinite(value):
        return {"legal": max(round(value), key.metadata.get("at_least", -math.inf))}
    if bool in options:
        meant = _SWITCHES.get(str(value).lower(), nearest(value, ("true", "false")))
        return {"meant": bool(value) if isinstance(value, int) else meant}
    default = None if key.default is dataclasses.MISSING else key.default
    for items in (typing.get_args(option) for option in options if typing.get_origin(option) is tuple):
        given = value if isinstance(value, list) else [value]
        if items[0] is str and isinstance(value, str):
            is_all = value.lower() in _ALL and key.name in _FORMS
            return {"example": _FORMS[key.name]} if is_all else {"legal": given}
        numbers = [
            round(n) if items[0] is int else n for n in given if isinstance(n, (int, float)) and abs(n) < math.inf
        ]
        if numbers and items[0] in (int, float):
            rest = list(default or numbers[-1:] * len(items))[len(numbers) :]
            return {"legal": numbers if Ellipsis in items else (numbers + rest)[: len(items)]}
    if float in options or int in options:
        number = _number_in(str(value), key.name)
        if number is None or not (float in options or number.is_integer()):
            return {"example": example_value(key)}
        return {"meant": int(number) if number.is_integer() else number}
    for values in (typing.get_args(option)[1] for option in options if typing.get_origin(option) is dict):
        if (meant := _with_spaces(value)) is not None and values is str:
            return {"meant": meant}
        form = {"a": "a.jsonl", "b": "b/*.bin"} if values is str else {"a": 0.7, "b": 0.3}
        return {"example": _FORMS.get(key.name, form) if default is None else default}
    return {"example": example_value(key)}


def _with_spaces(value: Any) -> dict[str, str] | None:
    """Return the mapping meant by {a:b, c:d}, which lacks YAML's space after the colon; None for anything else."""
    if isinstance(value, dict):
        items = [str(name) for name, own in value.items() if own is None]
        if len(items) < len(value):
            return None
    else:
        items = [item.strip() for item in str(value).strip().strip("{}").split(",")]
    found = [re.fullmatch(r"([^:\s]+):\s*([^:\s]+)", item) for item in items]
    return {item[1]: item[2] for item in found if item} if found and all(found) else None


_FORMS = {
    "columns": {"messages": "dialog"},
    "profile_steps": [10, 13],
    "phases": [{"from": "80%", "weights": {"a": 0.7, "b": 0.3}}],
    "every": 100,
    "warmup_steps": 100,
    "warmup_ratio": 0.03,
    "ema": 0.999,
    "allow_changes": ["optim.name"],
}
"""Example values of keys whose default is empty or means never."""

_ALL = ("all", "any", "*", "true", "yes")
"""Words that users write to mean every entry of a list."""

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "%": 0.01}
_MINUTES = ("m", "min", "mins", "minutes")
_UNITS = {
    "s": {
        "ms": 1e-3,
        **dict.fromkeys(("", "s", "sec", "seconds"), 1.0),
        **dict.fromkeys(_MINUTES, 60.0),
        **dict.fromkeys(("h", "hours"), 3600.0),
        **dict.fromkeys(("d", "days"), 86400.0),
    },
    "h": {**dict.fromkeys(("", "h", "hours"), 1.0), **dict.fromkeys(_MINUTES, 1 / 60), "d": 24.0, "days": 24.0},
    "gib": {
        **dict.fromkeys(("m", "mb", "mib"), 1 / 1024),
        **dict.fromkeys(("", "g", "gb", "gib"), 1.0),
        **dict.fromkeys(("t", "tb", "tib"), 1024.0),
    },
}
"""For each key suffix: the accepted units, converted to the unit of the key."""


def _number_in(text: str, name: str) -> float | None:
    """Return the number meant by 10k, 1,000 steps, 0,5 or, for a key in seconds, 30m; None for anything else."""
    if re.fullmatch(r"[+-]?(0,\d+|\d+,(\d{1,2}|\d{4,}))", text):
        text = text.replace(",", ".")
    found = re.fullmatch(
        r"([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([a-z%]*)", re.sub(r",(?=\d{3})", "", text.strip().lower())
    )
    if found is None:
        return None
    units, unit = _UNITS.get(name.rpartition("_")[2]), found[2]
    size = (units or _COUNTS).get(unit)
    if size is None and (units or any(unit in others for others in _UNITS.values())):
        return None  # a unit of time for a key that counts steps
    size = 1.0 if size is None else size
    try:
        number = round(float(found[1]) * size, 12)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
