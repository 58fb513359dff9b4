"""Matmuls with the matrices of stacked experts, and LoRA adapters for these matrices.

An expert module multiplies by its matrices through `expert_matmuls`, which adds the output of any adapter.  The
module's attribute `matrices` maps each transformers parameter name to the module's own parameter names, for example
{"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.  Each of these parameters stacks the matrices of all experts:
(E, out, in), or (E, in, out) if the module's attribute `is_transposed` is true.  Parameters that transformers
concatenates along the output dimension, in the order listed, share one adapter, as in peft.

Parameters named in the module's attribute `packings` are frozen and quantized (NF4 or FP8; see `trainer.model.packed`).

Shape suffixes: E experts, M token-expert pairs, K inputs and N outputs of a matrix, R rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from trainer.experts.grouped import grouped_mm, packed_grouped_mm

ADAPTER_NAME = "default"
"""Name of a layer's adapter.  Here, a layer has only one; peft supports several."""

ADAPTERS = "adapters"
"""Name of the child module that holds an expert module's adapters."""


class ExpertFactor(nn.Module):
    """The LoRA factor A or B of every expert, stacked in `weight`: (E, out, in), stored in float32."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, zero_init: bool) -> None:
        super().__init__()
        self.zero_init = zero_init
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.zero_init:
            nn.init.zeros_(self.weight)
        else:  # as in `LoraFactor`; for three dimensions, torch's functions use the wrong fan-in
            bound = 1 / math.sqrt(self.weight.shape[2])
            nn.init.uniform_(self.weight, -bound, bound)


class ExpertAdapter(nn.Module):
    """All experts' LoRA adapters for the matrices listed under a name in `matrices`: x @ W.T + scaling * x @ A.T @ B.T.

    `forward` returns only x @ A.T @ B.T; `expert_matmuls` scales and adds it.  B starts at zero, so the adapters do
    not change the initial output.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        self.is_enabled = True
        """Whether the adapters are applied; see `trainer.model.lora.without_adapters`."""
        first = ExpertFactor(num_experts, in_features, rank, zero_init=False)
        second = ExpertFactor(num_experts, rank, out_features, zero_init=True)
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER_NAME: first}), nn.ModuleDict({ADAPTER_NAME: second})

    def forward(self, x_MK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return x @ A.T @ B.T, (M, N), for rows sorted by expert; see `grouped_mm`."""
        down_ERK: torch.Tensor = self.lora_A[ADAPTER_NAME].weight  # type: ignore[assignment]
        up_ENR: torch.Tensor = self.lora_B[ADAPTER_NAME].weight  # type: ignore[assignment]
        low_MR = grouped_mm(x_MK.to(down_ERK.dtype), down_ERK.transpose(1, 2), ends_E)
        return grouped_mm(low_MR, up_ENR.transpose(1, 2), ends_E)


def expert_matmuls(experts: nn.Module, name: str, x_MK: torch.Tensor, ends_E: torch.Tensor) -> list[torch.Tensor]:
    """Multiply rows by each matrix that `experts.matrices` lists under `name`; return one (M, N) tensor per matrix.

    Rows are sorted by expert; `ends_E[e]` is the exclusive end of expert e's rows (see `grouped_mm`).
    Rows are converted to the dtype of the matrices; quantized matrices are unpacked to the dtype of the rows instead.
    """
    outputs = [_expert_matmul(experts, matrix, x_MK, ends_E) for matrix in matrices_of(experts)[name]]
    adapter = adapters_of(experts).get(name)
    if adapter is None or not adapter.is_enabled:
        return outputs
    deltas = adapter(x_MK, ends_E).split([out_MN.shape[1] for out_MN in outputs], dim=1)
    # Not in place: selective activation checkpointing may save the experts' own outputs.
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
    """Map the name of each possible adapter of an expert module to its parameters; empty for other modules."""
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
