"""Frozen weights quantized to 4 or 8 bits: each row of a matrix is packed into bytes, codes first, then scales.

A row consists of blocks of 64 weights.  Each block has one float32 scale and a code per weight: 4 bits of NF4 or 8 bits
of float8 (e4m3).  The codes and scales of all rows form one uint8 parameter: (out, in) weights become (out, bytes).
FSDP2 shards such a parameter by rows and gathers it like any other; since torch 2.13, it does not cast integers.  No
block spans two rows, so the values do not depend on the mesh.

The matrices of stacked experts, (E, out, in), are packed as (E, out, bytes), and multiplied by `trainer.experts`.

A layer's weight is unpacked for each product, in both the forward and the backward pass, and freed afterwards;
autograd saves only the bytes.

Sources: Dettmers et al. 2023, "QLoRA", arXiv:2305.14314 (NF4, without double quantization, which takes a mean over an
entire tensor); Micikevicius et al. 2022, arXiv:2209.05433 (e4m3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.errors import setting_error

BLOCK = 64
"""Number of weights that share a scale."""

CODE_BITS = {"nf4": 4, "fp8": 8}
"""Bits per code, by the value of `lora.base_dtype`."""

_SCALE_BYTES = 4
_CHUNK_WEIGHTS = 2**20
"""Number of weights to pack or unpack at a time on a CPU, which limits temporaries to a few megabytes."""

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the 16 codes: quantiles of the normal distribution, as published in QLoRA."""


@dataclass(frozen=True)
class Packing:
    """The format of a quantized weight's packed rows.

    dtype: a key of `CODE_BITS`.
    width: number of weights in a row, a multiple of `BLOCK`.
    """

    dtype: str
    width: int

    @property
    def code_bytes(self) -> int:
        """Number of bytes of codes per row."""
        return self.width * CODE_BITS[self.dtype] // 8

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + self.width // BLOCK * _SCALE_BYTES

    def scales(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the scales (..., width / 64) of packed rows (..., bytes), as a view in float32.

        An NF4 scale is the largest magnitude in its block.
        """
        return packed[..., self.code_bytes :].view(torch.float32)

    @torch.no_grad()
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack the rows of `weight` (..., width), of any floating dtype, into (..., bytes) on the same device.

        NaN and infinity propagate to the scale of their block.
        """
        rows = weight.reshape(-1, self.width)
        packed = torch.empty(rows.shape[0], self.row_bytes, dtype=torch.uint8, device=weight.device)
        step = max(1, _CHUNK_WEIGHTS // self.width)
        for start in range(0, rows.shape[0], step):
            self._pack_into(packed[start : start + step], rows[start : start + step].float())
        return packed.view(*weight.shape[:-1], self.row_bytes)

    def _pack_into(self, packed: torch.Tensor, rows: torch.Tensor) -> None:
        blocks = rows.view(rows.shape[0], -1, BLOCK)
        max_abs = blocks.abs().amax(dim=-1)
        # The scaled weights and the ties between two codes are rounded exactly as in bitsandbytes.
        if self.dtype == "nf4":
            scaled = (blocks * (1.0 / max_abs.clamp(min=1e-38))[..., None]).clamp_(-1, 1)
            values = _values("nf4", rows.device)
            codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)
            codes = codes.view(rows.shape[0], -1, 2)
            packed[:, : self.code_bytes] = codes[..., 0] << 4 | codes[..., 1]
            self.scales(packed).copy_(max_abs)
            return
        max_code = torch.finfo(torch.float8_e4m3fn).max
        scaled = (blocks * (max_code / max_abs.clamp(min=1e-35))[..., None]).clamp_(-max_code, max_code)
        packed[:, : self.code_bytes] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(rows.shape)
        self.scales(packed).copy_(max_abs / max_code)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Unpack rows (..., bytes) to weights (..., width).

        A weight is the value of its code times the scale, computed in float32 and rounded to `dtype`.
        """
        return unpack_rows(packed, self.dtype, self.width, dtype)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` (..., width) after packing and unpacking, in float32."""
        return self.unpack(self.pack(weight), torch.float32)


@functools.cache
def _values(dtype: str, device: torch.device) -> torch.Tensor:
    """Return the values of all codes in float32: (16,) or (256,)."""
    if dtype == "nf4":
        return torch.tensor(_NF4, dtype=torch.float32, device=device)
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@torch.library.custom_op("meshtrainer::unpack_rows", mutates_args=())
def unpack_rows(packed: torch.Tensor, packing: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Unpack rows (..., bytes) in the format `packing` to weights (..., width) in `dtype`.

    One kernel on a GPU.  A custom operator, so that compilation and activation checkpointing treat it as opaque.
    """
    rows = packed.reshape(-1, packed.shape[-1])
    weights = torch.empty(rows.shape[0], width, dtype=dtype, device=packed.device)
    if packed.is_cuda:
        from trainer.model.packed_cuda import unpack_into  # imports Triton

        unpack_into(weights, rows, _values(packing, packed.device), CODE_BITS[packing], BLOCK)
    else:
        _unpack_on_cpu(weights, rows, Packing(packing, width))
    return weights.view(*packed.shape[:-1], width)


@unpack_rows.register_fake
def _(packed: torch.Tensor, packing: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-1], width), dtype=dtype)


def _unpack_on_cpu(weights: torch.Tensor, packed: torch.Tensor, packing: Packing) -> None:
    """Unpack rows (R, bytes) into `weights` (R, width)."""
    table = _values(packing.dtype, packed.device)
    if packing.dtype == "nf4":  # look up both values of a byte at once, as one 64-bit number
        table = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).view(torch.float64).flatten()
    step = max(1, _CHUNK_WEIGHTS // packing.width)
    for start in range(0, packed.shape[0], step):
        rows = packed[start : start + step]
        codes = rows[:, : packing.code_bytes].flatten().to(torch.int32)
        values = table.index_select(0, codes).view(torch.float32).view(rows.shape[0], -1, BLOCK)
        scaled = values.mul_(packing.scales(rows)[..., None])
        weights[start : start + step].copy_(scaled.view(rows.shape[0], packing.width))


class PackedLinear(nn.Module):
    """A frozen linear layer with a quantized, packed weight: x (..., in) to (..., out).

    `packings` maps each packed parameter's name in this module to its format.  Other code recognizes packed
    parameters by this attribute (see `find_packings`).
    """

    def __init__(self, layer: nn.Module, dtype: str) -> None:
        """Create the packed form of `layer`: torch's `Linear`, or transformers' `Conv1D`, whose weight is (in, out).

        The new weight is uninitialized, on the same device.
        """
        super().__init__()
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        self.is_transposed = not isinstance(layer, nn.Linear)
        self.out_features, self.in_features = weight.shape[::-1] if self.is_transposed else weight.shape
        packing = Packing(dtype, weight.shape[1])
        self.packings = {"weight": packing}
        num_bytes = (weight.shape[0], packing.row_bytes)
        self.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8, device=weight.device), requires_grad=False)
        self.bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]

    def unpacked(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights (out, in) of `packed`, this layer's weight as saved or gathered."""
        weight = self.packings["weight"].unpack(packed, dtype)
        return weight.t() if self.is_transposed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PackedProduct.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return,no-untyped-call]


class _PackedProduct(torch.autograd.Function):
    """x (..., in) to (..., out); unpacks the weight in the forward and in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: PackedLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return F.linear(x, layer.unpacked(weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        (weight,) = ctx.saved_tensors
        return grad @ ctx.layer.unpacked(weight, grad.dtype), None, None, None


def pack_layer(layer: nn.Module, name: str, dtype: str) -> PackedLinear:
    """Return the packed form of a linear layer.  Raises UserError if its row length is not a multiple of `BLOCK`."""
    _check_width(layer.get_parameter("weight"), name, dtype)
    return PackedLinear(layer, dtype)


def pack_experts(experts: nn.Module, matrix: str, name: str, dtype: str) -> None:
    """Replace the parameter `matrix` of stacked experts with an uninitialized packed one.

    name: the parameter's full name in the model.  Raises UserError if its row length is not a multiple of `BLOCK`.
    """
    weight = experts.get_parameter(matrix)
    _check_width(weight, name, dtype)
    packing = Packing(dtype, weight.shape[-1])
    packed = torch.empty(*weight.shape[:-1], packing.row_bytes, dtype=torch.uint8, device=weight.device)
    experts.register_parameter(matrix, nn.Parameter(packed, requires_grad=False))
    experts.packings = {**getattr(experts, "packings", {}), matrix: packing}  # type: ignore[assignment]


def _check_width(weight: torch.Tensor, name: str, dtype: str) -> None:
    width = weight.shape[-1]
    if width % BLOCK:
        rule = f"packs blocks of {BLOCK} weights of a row, which do not divide the {width} of {name}"
        raise setting_error("lora.base_dtype", dtype, rule, "bfloat16")


# ---------------------------------------------------------------------------------------------------------------
# The packed parameters of a model


def _packed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Packing]]:
    for module_name, module in model.named_modules():
        for name, packing in getattr(module, "packings", {}).items():
            yield f"{module_name}.{name}" if module_name else name, module.get_parameter(name), packing


def find_packings(model: nn.Module) -> dict[str, Packing]:
    """Return the format of each packed parameter of a model, by name."""
    return {name: packing for name, _, packing in _packed_parameters(model)}


def num_weights(model: nn.Module) -> dict[int, int]:
    """Return the number of weights (for packed parameters, not bytes) in each parameter, by the parameter's id."""
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for _, parameter, packing in _packed_parameters(model):
        counts[id(parameter)] = math.prod((*parameter.shape[:-1], packing.width))
    return counts
