"""Matrix products of stacked experts, and adapters (LoRA) for their matrices.

An expert module lists its matrices in an attribute `matrices`, and multiplies by them through `expert_matmuls`, which
adds the products of their adapters.  The attribute maps the names of transformers' parameters to those of the module,
which are stacked by expert: {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.  Parameters that transformers
concatenates along the outputs, in this order, share an adapter, as in peft.  Each parameter is (E, out, in), or
(E, in, out) if the module's attribute `is_transposed` is true.
Frozen parameters named in the module's `packings` have packed rows (`trainer.model.packed`).

Shape suffixes: E experts, M token-expert pairs, K and N inputs and outputs of a matrix, R rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from trainer.experts.grouped import grouped_mm, packed_grouped_mm

ADAPTER = "default"
"""Name of a layer's adapter.  A layer has only one here; peft supports several."""

ADAPTERS = "adapters"
"""Name of the child module that holds the adapters of an expert module."""


class ExpertFactor(nn.Module):
    """One of the two matrices of each expert's adapter: `weight` (E, out, in), always in float32."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, starts_at_zero: bool) -> None:
        super().__init__()
        self.starts_at_zero = starts_at_zero
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.starts_at_zero:
            nn.init.zeros_(self.weight)
        else:  # as in `LoraFactor`; for three dimensions, torch's functions use the wrong fan-in
            bound = 1 / math.sqrt(self.weight.shape[2])
            nn.init.uniform_(self.weight, -bound, bound)


class ExpertAdapter(nn.Module):
    """The adapters of one matrix per expert, which add `scaling * x @ A.T @ B.T` to `x @ W.T`.

    The second factor starts at zero, so the initial output equals that of the experts alone.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        self.is_enabled = True
        """Whether the adapters are applied (see `trainer.model.lora.without_adapters`)."""
        first = ExpertFactor(num_experts, in_features, rank, starts_at_zero=False)
        second = ExpertFactor(num_experts, rank, out_features, starts_at_zero=True)
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER: first}), nn.ModuleDict({ADAPTER: second})

    def forward(self, x_MK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the products without `scaling`, (M, N), for rows sorted by expert; see `grouped_mm`."""
        down_ERK: torch.Tensor = self.lora_A[ADAPTER].weight  # type: ignore[assignment]
        up_ENR: torch.Tensor = self.lora_B[ADAPTER].weight  # type: ignore[assignment]
        low_MR = grouped_mm(x_MK.to(down_ERK.dtype), down_ERK.transpose(1, 2), ends_E)
        return grouped_mm(low_MR, up_ENR.transpose(1, 2), ends_E)


def expert_matmuls(experts: nn.Module, name: str, x_MK: torch.Tensor, ends_E: torch.Tensor) -> list[torch.Tensor]:
    """Multiply rows by each matrix that `experts.matrices` lists under `name`; return one (M, N) tensor per matrix.

    Rows are sorted by expert, and those of each expert end before row `ends_E`; see `grouped_mm`.
    Rows are converted to the dtype of the matrices; packed matrices are unpacked to the dtype of the rows instead.
    """
    outputs = [_expert_matmul(experts, matrix, x_MK, ends_E) for matrix in matrices_of(experts)[name]]
    adapter = adapters_of(experts).get(name)
    if adapter is None or not adapter.is_enabled:
        return outputs
    deltas = adapter(x_MK, ends_E).split([out_MN.shape[1] for out_MN in outputs], dim=1)
    # Not in place: selective activation checkpointing may save the experts' own products.
    return [
        torch.add(out_MN, delta_MN, alpha=adapter.scaling).to(out_MN.dtype)
        for out_MN, delta_MN in zip(outputs, deltas, strict=True)
    ]


def _expert_matmul(experts: nn.Module, matrix: str, x_MK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = getattr(experts, matrix)
    is_transposed = bool(getattr(experts, "is_transposed", False))
    packing = getattr(experts, "packings", {}).get(matrix)
    if packing is not None:
        return packed_grouped_mm(x_MK, weight, ends_E, packing, is_transposed)
    out_MN: torch.Tensor = grouped_mm(
        x_MK.to(weight.dtype), weight if is_transposed else weight.transpose(1, 2), ends_E
    )
    return out_MN


def matrices_of(module: nn.Module) -> Mapping[str, Sequence[str]]:
    """Return the parameters of an expert module that can have adapters, by adapter name; empty for other modules."""
    matrices: Mapping[str, Sequence[str]] = getattr(module, "matrices", {})
    return matrices


def adapters_of(experts: nn.Module) -> dict[str, ExpertAdapter]:
    """Return the adapters of an expert module by name."""
    adapters = getattr(experts, ADAPTERS, {})
    return {name: adapter for name, adapter in adapters.items() if isinstance(adapter, ExpertAdapter)}


def add_adapter(experts: nn.Module, name: str, rank: int, scaling: float) -> None:
    """Add an adapter to the matrices that `experts.matrices` lists under `name`."""
    shapes = [getattr(experts, matrix).shape for matrix in matrices_of(experts)[name]]
    if getattr(experts, "is_transposed", False):
        shapes = [torch.Size((shape[0], shape[2], shape[1])) for shape in shapes]
    num_experts, in_features = shapes[0][0], shapes[0][2]
    if ADAPTERS not in dict(experts.named_children()):
        experts.add_module(ADAPTERS, nn.ModuleDict())
    adapters: nn.ModuleDict = getattr(experts, ADAPTERS)
    adapters[name] = ExpertAdapter(num_experts, in_features, sum(shape[1] for shape in shapes), rank, scaling)
