"""Specifications of common accelerators, taken from data sheets except for the memory sizes.  Does not import torch.

Compute rates and bandwidths are theoretical peaks; the planner estimates the fraction that kernels achieve.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_H100_URL, _MI300X_URL = "nvidia.com/en-us/data-center/h100", "amd.com/en/products/accelerators/instinct/mi300"


@dataclass(frozen=True)
class Device:
    """Specifications of one accelerator: dense compute rates (without sparsity) in FLOP/s, bandwidths in bytes/s."""

    name: str
    """Short name, for `device=` on the planner's command line."""
    driver_name: str
    """Substring of the device name that the driver reports."""
    bf16_flops: float
    fp32_flops: float
    """Peak for fp32 matmuls without TF32, as torch computes them by default."""
    fp8_flops: float | None
    """Peak for fp8 matmuls; None if the device has none."""
    memory_gib: float
    """Memory in GiB as reported by the driver; a smaller number than the marketed one, which is in GB."""
    memory_bandwidth: float
    link_bandwidth: float
    """Bandwidth to the other devices in the node, in one direction."""
    host_bandwidth: float
    """Bandwidth to host memory, in one direction, over 16 lanes of PCI Express 4 or 5."""
    power_w: float
    """Maximum power in watts, according to the data sheet."""
    source: str
    """Where the specifications are published."""

    def flops(self, element_size: int) -> float:
        """Return the peak for bf16 matmuls if elements have at most two bytes, otherwise the peak for fp32 matmuls."""
        return self.bf16_flops if element_size <= 2 else self.fp32_flops


DEVICES = (
    Device("a100", "A100", 312e12, 19.5e12, None, 79.2, 2.04e12, 300e9, 32e9, 400, "nvidia.com/en-us/data-center/a100"),
    Device(
        "h200", "H200", 989e12, 67e12, 1979e12, 139.8, 4.8e12, 450e9, 64e9, 700, "nvidia.com/en-us/data-center/h200"
    ),
    Device("h100", "H100", 989e12, 67e12, 1979e12, 79.1, 3.35e12, 450e9, 64e9, 700, f"{_H100_URL} (SXM)"),
    Device("h100-pcie", "H100 PCIe", 756e12, 51e12, 1513e12, 79.1, 2.0e12, 64e9, 64e9, 350, f"{_H100_URL} (PCIe)"),
    Device(
        "b200", "B200", 2250e12, 75e12, 4500e12, 178, 7.7e12, 900e9, 64e9, 1000, "nvidia.com/en-us/data-center/dgx-b200"
    ),
    Device(
        "l40s", "L40S", 362e12, 91.6e12, 733e12, 44.4, 0.864e12, 32e9, 32e9, 350, "nvidia.com/en-us/data-center/l40s"
    ),
    Device("mi300x", "MI300X", 1307e12, 163.4e12, 2615e12, 191.7, 5.3e12, 448e9, 64e9, 750, _MI300X_URL),
    Device(
        "rtx4090", "RTX 4090", 165e12, 82.6e12, 330e12, 23.5, 1.01e12, 32e9, 32e9, 450, "nvidia.com, Ada whitepaper"
    ),
)


def find_device(name: str) -> Device | None:
    """Return the device whose short name is `name` or whose driver name occurs in it; None if there is no such device.

    If several driver names occur in `name`, the longest one wins.
    """
    for device in DEVICES:
        if device.name == name.lower():
            return device
    by_length = sorted(DEVICES, key=lambda device: -len(device.driver_name))
    matches = (device for device in by_length if re.search(rf"\b{device.driver_name}\b", name, re.IGNORECASE))
    return next(matches, None)
