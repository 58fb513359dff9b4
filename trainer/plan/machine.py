"""Describes the machine that a plan is for, by its memory and rates, and stores calibrated rates.

Rates come from a data sheet, from the user's description or from measurements by `--calibrate`; for a CPU that has not
been measured, they are assumed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.config.keys import parse_text
from trainer.errors import UserError, choice_error, nearest, setting_error
from trainer.files import verify_checksum, with_checksum, write_atomically
from trainer.metrics.devices import DEVICES, Device, find_device
from trainer.plan.rates import Rates

GIB = 2**30

# Fractions of the data sheet's peaks that kernels reach in training; --calibrate replaces the rates that it measures.
# `python -m bench.published` has the published figures that they are fitted to and checked with.
_MATMUL_EFFICIENCY = 0.65
"""Of the peak of bf16 matmuls; fitted to the rows of KempnerForge, NeMo AutoModel and TRL on H100 and H200."""
_A100_MATMUL_EFFICIENCY = 0.78
"""The same for an A100; fitted to torchtitan's Llama 2 13B without recomputation.  Newer GPUs reach a smaller fraction
of their peak, since their power limit lowers the clock during large matmuls."""
_FLOAT8_EFFICIENCY = 0.6
"""Of the peak of float8 matmuls; fitted to torchtitan's Llama 3.1 8B on 8 H100."""
_ATTENTION_EFFICIENCY = 0.5
"""Of the peak of bf16 matmuls, by the kernel that torch chooses: on an A100, FlashAttention-2 reaches 0.5 to 0.73 (Dao
2023, arXiv:2307.08691); on an H100, cuDNN is 1.7 to 2.3 times as fast (huggingface/transformers#48163) as
FlashAttention-2, which reaches 0.35 (Shah et al. 2024, arXiv:2407.08608).  TRL's million tokens on 8 H100 take 0.5."""
_MEMORY_EFFICIENCY = 0.85
"""Of the memory bandwidth, by elementwise kernels; assumed."""
_LINK_EFFICIENCY = 0.8
"""Of the bandwidth of links and networks; on 8 A100, NCCL reaches 230 of 300 GB/s (NVIDIA/nccl#527)."""
_KERNEL_S = 2.5e-6
"""See `Rates.kernel_s`; assumed."""
_HOST_S = 8e-6
"""See `Rates.host_s`; assumed."""
_TAKEN_BY_COLLECTIVES = 0.15
"""Fraction of a GPU's multiprocessors that a collective occupies while it runs: NCCL takes 16 to 24, out of 108 on an
A100 and 132 on an H100."""
_LINK_LATENCY_S = 5e-6
_NETWORK_LATENCY_S = 15e-6
_ALLOCATOR_FRACTION = 0.16
"""Memory that the caching allocator reserves beyond live tensors, as a fraction of the live tensors.

In torchtitan's published figures for Llama 3 8B, the ratio of reserved to active memory is 1.16 to 1.21."""
_RESERVED_GIB = 1.0
"""GPU memory taken by the driver's context and the communicators."""


@dataclass(frozen=True)
class Machine:
    """The kind of device that a run uses, with its memory and its rates, including the speed of its links."""

    name: str
    rates: Rates
    memory_gib: float
    """Memory of one device; on a CPU, host memory divided by the number of ranks on the host."""
    peak_flops: float | None
    """Peak bf16 FLOP/s from the data sheet, the denominator of MFU; None without a data sheet."""
    allocator_share: float
    """Memory that the allocator reserves beyond live tensors, as a fraction of the live tensors."""
    reserved_gib: float
    """Memory that is unavailable to tensors."""
    is_measured: bool
    """True if the rates come from `--calibrate`, except those that it does not measure."""
    source: str
    """A description of where the rates come from."""
    imbalance: float = 1.0
    """With expert parallelism, token rows on the busiest rank relative to the mean; 1 for a balanced router."""

    @property
    def device_type(self) -> str:
        return "cpu" if self.name == "cpu" else "cuda"

    def with_budget(self, num_bytes: float) -> Machine:
        """Return a copy of the machine with just enough memory for `num_bytes` of live tensors."""
        return replace(self, memory_gib=num_bytes / GIB * (1 + self.allocator_share) + self.reserved_gib)

    @property
    def budget_bytes(self) -> float:
        """Bytes of live tensors that fit, next to reserved memory and what the allocator reserves."""
        return max(0.0, self.memory_gib - self.reserved_gib) * GIB / (1 + self.allocator_share)


def find_machine(
    device: str = "auto",
    memory_gib: float | None = None,
    ranks_per_node: int | None = None,
    network_gbps: float = 400.0,
    memory_key: str = "memory_gib",
) -> Machine:
    """Return the machine for `device`.

    device: `cpu`, the name of a data sheet or of a calibrated device, a mapping that describes a variant of a data
        sheet (see `read_description`), or `auto`: the GPU of this machine, or an H100 if it has none.
    ranks_per_node: by default 8, or 1 on a CPU.
    network_gbps: the bandwidth of one rank to other nodes, in Gbit/s.
    memory_key: the setting to name in the error if `memory_gib` is too small.

    Measurements by `--calibrate` replace the estimates from the data sheet, except for a described variant.  Raises
    UserError for an unknown device, an invalid description or calibration file, or too little memory.
    """
    is_local_gpu = device == "auto" and torch.cuda.is_available()
    if is_local_gpu:
        device = torch.cuda.get_device_name()
        memory_gib = memory_gib or torch.cuda.get_device_properties().total_memory / GIB
    elif device == "auto":
        device = "h100"
    if device.lstrip().startswith("{"):
        described = _from_sheet(read_description(device), ranks_per_node or 8, network_gbps)
        return _with_memory(described, memory_gib, memory_key)
    sheet, measured = find_device(device), read_calibration(device)
    if device.lower() == "cpu":
        machine = _cpu_machine(ranks_per_node or 1)
    elif sheet is not None:
        machine = _from_sheet(sheet, ranks_per_node or 8, network_gbps)
    elif measured is not None or is_local_gpu:
        machine = replace(
            _from_sheet(_UNKNOWN, ranks_per_node or 8, network_gbps),
            name=device,
            peak_flops=None,
            source=f"data sheet of {_UNKNOWN.name}, since this GPU has none",
        )
    else:
        raise choice_error("device", device, [*(each.name for each in DEVICES), "cpu"])
    measured = measured or read_calibration(machine.name)
    if measured is not None:
        machine = _with_measurements(machine, measured)
    return _with_memory(machine, memory_gib, memory_key)


def _with_memory(machine: Machine, memory_gib: float | None, key: str) -> Machine:
    if memory_gib is None:
        return machine
    if memory_gib <= machine.reserved_gib:
        rule = f"must be above {machine.reserved_gib:g}, which the driver and libraries take"
        raise setting_error(key, memory_gib, rule, f"{machine.memory_gib:.4g}")
    return replace(machine, memory_gib=memory_gib)


_UNKNOWN = DEVICES[0]
"""The data sheet to use for a GPU that has none, so that settings can be compared; runs then show no planned time."""


def _from_sheet(device: Device, ranks_per_node: int, network_gbps: float) -> Machine:
    """Return a machine built from a data sheet, which the user may have described.

    Under a power limit, a chip lowers its clock: compute rates fall in proportion to the power.  This is an
    approximation; see Ujeniya et al. 2026, arXiv:2604.11391.
    """
    original = next(each for each in DEVICES if each.driver_name == device.driver_name)
    compute_fraction = device.power_w / original.power_w
    peaks = {2: device.bf16_flops * compute_fraction, 4: device.fp32_flops * compute_fraction}
    matmul_efficiency = _A100_MATMUL_EFFICIENCY if device.driver_name == "A100" else _MATMUL_EFFICIENCY
    matmul = {size: peak * matmul_efficiency for size, peak in peaks.items()}
    if device.fp8_flops is not None:
        matmul[1] = device.fp8_flops * compute_fraction * _FLOAT8_EFFICIENCY
    rates = Rates(
        matmul=matmul,
        attention={size: peak * _ATTENTION_EFFICIENCY for size, peak in peaks.items()},
        memory=device.memory_bandwidth * _MEMORY_EFFICIENCY,
        optimizer=device.memory_bandwidth * _MEMORY_EFFICIENCY,
        kernel_s=_KERNEL_S,
        host_s=_HOST_S,
        host=device.host_bandwidth * _LINK_EFFICIENCY,
        link=device.link_bandwidth * _LINK_EFFICIENCY,
        network=network_gbps / 8 * 1e9 * _LINK_EFFICIENCY,
        link_latency_s=_LINK_LATENCY_S,
        network_latency_s=_NETWORK_LATENCY_S,
        ranks_per_node=ranks_per_node,
        taken_by_collectives=_TAKEN_BY_COLLECTIVES,
    )
    return Machine(
        device.name,
        rates,
        device.memory_gib,
        peak_flops=device.bf16_flops,
        allocator_share=_ALLOCATOR_FRACTION,
        reserved_gib=_RESERVED_GIB,
        is_measured=False,
        source=f"data sheet, {device.source}",
    )


def _cpu_machine(num_ranks: int) -> Machine:
    """Return one rank's part of this host, with its cores and memory divided evenly; a guess until it is calibrated."""
    cores = max(1, len(os.sched_getaffinity(0)) // num_ranks) if hasattr(os, "sched_getaffinity") else 1
    rates = Rates(
        matmul={2: 20e9 * cores, 4: 40e9 * cores},
        attention={2: 10e9 * cores, 4: 20e9 * cores},
        memory=8e9,
        optimizer=8e9,
        kernel_s=3e-6,
        host_s=0.0,  # the host is the device
        host=4e9,
        link=1e9,
        network=1e9,
        link_latency_s=1e-4,
        network_latency_s=1e-4,
        ranks_per_node=num_ranks,
    )
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        "cpu",
        rates,
        host_bytes / GIB / num_ranks,
        peak_flops=None,
        allocator_share=0.0,
        reserved_gib=0.4,
        is_measured=False,
        source="a guess",
    )


# ---------------------------------------------------------------------------------------------------------------
# Calibration files


def calibration_path(name: str) -> Path:
    """Return the path of the calibration file for the device called `name`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "meshtrainer" / "machines" / f"{name.replace('/', '-').replace(' ', '-')}.json"


def write_calibration(name: str, rates: dict[str, Any]) -> Path:
    """Write the measured rates to the cache atomically; return the path."""
    path = calibration_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(with_checksum(json.loads(json.dumps(rates))), indent=1))
    return path


def read_calibration(name: str) -> dict[str, Any] | None:
    """Return the rates measured on the device called `name`, or None.  Raises UserError if the file is damaged."""
    path = calibration_path(name)
    if not path.is_file():
        return None
    try:
        return verify_checksum(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        rule = f"is not a valid calibration file ({error}); measure again with --calibrate, or delete it"
        raise UserError(f"{path}: {rule}") from error


def _with_measurements(machine: Machine, values: dict[str, Any]) -> Machine:
    rates = {each.name: values[each.name] for each in fields(Rates) if each.name in values}
    for key in ("matmul", "attention", "orthogonalize"):
        rates[key] = {int(size): rate for size, rate in values[key].items()}
    if 1 in machine.rates.matmul:  # float8 is not measured: its speedup is that of the data sheet
        rates["matmul"][1] = rates["matmul"][2] * machine.rates.matmul[1] / machine.rates.matmul[2]
    source = f"measured here, {values['measured']}"
    return replace(machine, rates=replace(machine.rates, **rates), is_measured=True, source=source)


# ---------------------------------------------------------------------------------------------------------------
# Devices that the user describes: a known data sheet with some values replaced, such as
# device={like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}


class _Property(NamedTuple):
    """A property of a device that a description may contain."""

    field: str
    """The field of `Device` that it replaces."""
    unit: str
    scale: float = 1.0
    """The factor from the description's unit to the field's."""


_PROPERTIES = {
    "power_w": _Property("power_w", "W"),
    "memory_gib": _Property("memory_gib", "GiB"),
    "memory_tb_s": _Property("memory_bandwidth", "TB/s", 1e12),
    "link_gb_s": _Property("link_bandwidth", "GB/s links", 1e9),
    "bf16_tflops": _Property("bf16_flops", "TFLOP/s", 1e12),
    "fp8_tflops": _Property("fp8_flops", "TFLOP/s in float8", 1e12),
}


def read_description(text: str) -> Device:
    """Parse a mapping that describes a device.  Raises UserError if `text` is not a valid description."""
    description = parse_text("device", text, dict)
    if not isinstance(description, Mapping) or not isinstance(description.get("like"), str):
        rule = "must be the name of a device, or a mapping that says which one it is like"
        raise setting_error("device", text, rule, proposal="{like: h100, power_w: 500, memory_gib: 96}")
    sheet = find_device(description["like"])
    if sheet is None:
        raise choice_error("device.like", description["like"], [device.name for device in DEVICES])
    values = {key: _parse_number(key, value) for key, value in description.items() if key != "like"}
    if values.get("power_w", 0.0) > sheet.power_w:
        rule = f"{sheet.name} takes up to {sheet.power_w:g} W"
        raise setting_error("device.power_w", values["power_w"], rule, fix="leave it out for full power, or lower it")
    changes: dict[str, Any] = {_PROPERTIES[key].field: value * _PROPERTIES[key].scale for key, value in values.items()}
    suffix = "".join(f", {value:g} {_PROPERTIES[key].unit}" for key, value in values.items())
    return replace(sheet, name=f"{sheet.name}{suffix}", source=f"{sheet.source}, as described", **changes)


def _parse_number(key: Any, value: Any) -> float:
    if key not in _PROPERTIES:
        best = nearest(key, _PROPERTIES)
        meant = f"\n  did you mean device.{best}?" if best else ""
        known = ", ".join(_PROPERTIES)
        raise UserError(f"device.{key}={value}: there is no such property; choose from {known}{meant}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise setting_error(f"device.{key}", value, f"must be a number above 0, in {_PROPERTIES[key].unit}")
    return float(value)
