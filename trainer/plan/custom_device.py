"""Parses a device that the user describes: a known data sheet with some values replaced.

device={like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.load import parse_override
from trainer.errors import UserError, choice_error, nearest, setting_error
from trainer.metrics.devices import DEVICES, Device, find_device

_STATIC_POWER = 0.2
"""Share of a device's power that goes to memory and leakage, regardless of the compute load.

Under a power limit a chip lowers its clock, and with it the power of its compute units.  Treating compute as
proportional to the remaining power is an approximation.  The value was fitted to one published figure: torchtitan's
Llama 3 8B on 8 H100 at 500 W, compiled.  For the effect of power limits on clocks, see Ujeniya et al. 2026,
arXiv:2604.11391."""


@dataclass(frozen=True)
class CustomDevice:
    """A data sheet, and the share of its compute that is available under the power limit."""

    sheet: Device
    compute_share: float = 1.0


def is_description(text: str) -> bool:
    """Return whether `text` describes a device instead of naming one."""
    return text.lstrip().startswith("{")


def read_description(text: str) -> CustomDevice:
    """Parse a mapping that describes a device.  Raises UserError if `text` is not a valid description."""
    given = parse_override("device", text, dict)
    if not isinstance(given, Mapping) or not isinstance(given.get("like"), str):
        rule = "must be the name of a device, or a mapping that says which one it is like"
        raise setting_error("device", text, rule, example="{like: h100, power_w: 500, memory_gib: 96}")
    sheet = find_device(given["like"])
    if sheet is None:
        raise choice_error("device.like", given["like"], [known.name for known in DEVICES])
    values = {key: _number(key, value) for key, value in given.items() if key != "like"}
    power_w = values.pop("power_w", sheet.power_w)
    least_w = _STATIC_POWER * sheet.power_w
    if not least_w < power_w <= sheet.power_w:
        rule = f"{sheet.name} takes up to {sheet.power_w:g} W, {least_w:g} of them for its memory"
        raise setting_error("device.power_w", power_w, rule, example=f"{sheet.power_w:g}")
    differing = "".join(f", {given[key]:g} {_UNITS[key]}" for key in given if key != "like")
    differs: dict[str, Any] = {_FIELDS[key]: value * _SIZES.get(key, 1.0) for key, value in values.items()}
    described = replace(
        sheet,
        name=f"{sheet.name}{differing}",
        source=f"{sheet.source}, as described",
        **differs,
    )
    return CustomDevice(described, (power_w - least_w) / (sheet.power_w - least_w))


_FIELDS = {
    "memory_gib": "memory_gib",
    "memory_tb_s": "memory_bandwidth",
    "link_gb_s": "link_bandwidth",
    "bf16_tflops": "bf16_flops",
    "fp8_tflops": "fp8_flops",
}
_SIZES = {"memory_tb_s": 1e12, "link_gb_s": 1e9, "bf16_tflops": 1e12, "fp8_tflops": 1e12}
_UNITS = {
    "power_w": "W",
    "memory_gib": "GiB",
    "memory_tb_s": "TB/s",
    "link_gb_s": "GB/s links",
    "bf16_tflops": "TFLOP/s",
    "fp8_tflops": "TFLOP/s in float8",
}


def _number(key: Any, value: Any) -> float:
    if key not in _UNITS:
        best = nearest(key, _UNITS)
        meant = f"\n  did you mean device.{best}?" if best else ""
        raise UserError(f"device.{key}={value}: there is no such property, but {', '.join(_UNITS)}{meant}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise setting_error(f"device.{key}", value, f"must be a number above 0, in {_UNITS[key]}")
    return float(value)
