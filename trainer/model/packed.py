"""Frozen weights quantized to 4 or 8 bits: each row of a matrix is packed into bytes, codes first, then scales.

A row consists of blocks of 64 weights.  A block has one float32 scale and, for each weight, a code of 4 bits (NF4) or
8 bits (float8, e4m3).  The codes and scales of all rows form one uint8 parameter: weights of shape (out, in) become
(out, bytes).  FSDP2 shards and gathers such a parameter like any other; since torch 2.13, its mixed precision leaves
integers alone.  No block spans two rows, so the values do not depend on the mesh.

The matrices of stacked experts, (E, out, in), are packed as (E, out, bytes); their matmuls are in `trainer.experts`.

A layer's weight is unpacked for each matmul, in both the forward and the backward pass, and freed afterwards;
autograd saves only the bytes.

Sources: Dettmers et al. 2023, "QLoRA", arXiv:2305.14314 (NF4; its double quantization needs a mean over an entire
tensor, and so is left out); Micikevicius et al. 2022, arXiv:2209.05433 (e4m3).
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

BLOCK_SIZE = 64
"""Number of weights that share a scale."""

CODE_BITS = {"nf4": 4, "fp8": 8}
"""Bits per code, by code type (a value of `lora.base_dtype`)."""

_SCALE_BYTES = 4
_CHUNK_WEIGHTS = 2**20
"""Number of weights to pack at a time, or to unpack at a time on a CPU; limits temporaries to several megabytes."""

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the 16 NF4 codes: quantiles of the normal distribution, as published in QLoRA."""


@dataclass(frozen=True)
class Packing:
    """The format of a quantized weight's packed rows.

    code_type: a key of `CODE_BITS`.
    width: number of weights in a row, a multiple of `BLOCK_SIZE`.
    """

    code_type: str
    width: int

    @property
    def code_bytes(self) -> int:
        """Number of bytes that a row's codes take up."""
        return self.width * CODE_BITS[self.code_type] // 8

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + self.width // BLOCK_SIZE * _SCALE_BYTES

    def with_width_of(self, packed: torch.Tensor) -> Packing:
        """Return the packing of rows (..., bytes) of this code type, whatever their width."""
        block_bytes = BLOCK_SIZE * CODE_BITS[self.code_type] // 8 + _SCALE_BYTES
        return Packing(self.code_type, packed.shape[-1] // block_bytes * BLOCK_SIZE)

    def scales(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the scales (..., width / 64) of packed rows (..., bytes), as a view in float32.

        An NF4 scale is the largest magnitude in its block; a float8 scale is that divided by the largest e4m3 number.
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
        blocks = rows.view(rows.shape[0], -1, BLOCK_SIZE)
        max_abs = blocks.abs().amax(dim=-1)
        # Scaled weights, including ties between two codes, are rounded exactly as in bitsandbytes.
        if self.code_type == "nf4":
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
        return unpack_rows(packed, self.code_type, self.width, dtype)

    def columns(self, packed: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return columns [start, stop), multiples of `BLOCK_SIZE`, of packed rows: rows of a narrower `Packing`."""
        bits = CODE_BITS[self.code_type]
        scale_bytes = _SCALE_BYTES * start // BLOCK_SIZE, _SCALE_BYTES * stop // BLOCK_SIZE
        codes = packed[..., start * bits // 8 : stop * bits // 8]
        scales = packed[..., self.code_bytes + scale_bytes[0] : self.code_bytes + scale_bytes[1]]
        return torch.cat((codes, scales), -1)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` (..., width) after packing and unpacking, in float32."""
        return self.unpack(self.pack(weight), torch.float32)


@functools.cache
def _values(code_type: str, device: torch.device) -> torch.Tensor:
    """Return the value of each code in float32: (16,) or (256,)."""
    if code_type == "nf4":
        return torch.tensor(_NF4, dtype=torch.float32, device=device)
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@torch.library.custom_op("meshtrainer::unpack_rows", mutates_args=())
def unpack_rows(packed: torch.Tensor, code_type: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Unpack rows (..., bytes) of the given type to weights (..., width) in `dtype`.

    One kernel on a GPU.  A custom operator, so that compilation and activation checkpointing treat it as opaque.
    """
    rows = packed.reshape(-1, packed.shape[-1])
    weights = torch.empty(rows.shape[0], width, dtype=dtype, device=packed.device)
    if packed.is_cuda:
        from trainer.model.packed_cuda import unpack_into  # imports Triton

        unpack_into(weights, rows, _values(code_type, packed.device), CODE_BITS[code_type], BLOCK_SIZE)
    else:
        _unpack_on_cpu(weights, rows, Packing(code_type, width))
    return weights.view(*packed.shape[:-1], width)


@unpack_rows.register_fake
def _(packed: torch.Tensor, code_type: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-1], width), dtype=dtype)


def _unpack_on_cpu(weights: torch.Tensor, packed: torch.Tensor, packing: Packing) -> None:
    """Unpack rows (R, bytes) into `weights` (R, width)."""
    table = _values(packing.code_type, packed.device)
    if packing.code_type == "nf4":  # look up both values of a byte at once, as one 64-bit number
        table = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).view(torch.float64).flatten()
    step = max(1, _CHUNK_WEIGHTS // packing.width)
    for start in range(0, packed.shape[0], step):
        rows = packed[start : start + step]
        codes = rows[:, : packing.code_bytes].flatten().to(torch.int32)
        values = table.index_select(0, codes).view(torch.float32).view(rows.shape[0], -1, BLOCK_SIZE)
        scaled = values.mul_(packing.scales(rows)[..., None])
        weights[start : start + step].copy_(scaled.view(rows.shape[0], packing.width))


class PackedLinear(nn.Module):
    """A frozen linear layer with a quantized, packed weight: x (..., in) to (..., out).

    `packings` maps each packed parameter's name in this module to its format.  Other code recognizes packed
    parameters by this attribute (see `find_packings`).
    """

    def __init__(self, layer: nn.Module, name: str, code_type: str) -> None:
        """Create the packed form of `layer`: torch's `Linear`, or transformers' `Conv1D`, whose weight is (in, out).

        The new weight is uninitialized, on the same device.  name: the layer's name in the model.
        Raises UserError if the weight's row length is not a multiple of `BLOCK_SIZE`.
        """
        super().__init__()
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        _check_width(weight, name, code_type)
        self.is_transposed = not isinstance(layer, nn.Linear)
        self.out_features, self.in_features = weight.shape[::-1] if self.is_transposed else weight.shape
        packing = Packing(code_type, weight.shape[1])
        self.packings = {"weight": packing}
        num_bytes = (weight.shape[0], packing.row_bytes)
        self.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8, device=weight.device), requires_grad=False)
        self.bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]

    def unpacked(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights (out, in) of `packed`: this layer's weight as saved or gathered, or columns of it."""
        weight = self.packings["weight"].with_width_of(packed).unpack(packed, dtype)
        return weight.t() if self.is_transposed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PackedMatmul.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return,no-untyped-call]


class _PackedMatmul(torch.autograd.Function):
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


def pack_experts(experts: nn.Module, matrix: str, name: str, code_type: str) -> None:
    """Replace the parameter `matrix` of stacked experts with an uninitialized packed one.

    name: the parameter's full name in the model.
    Raises UserError if its row length is not a multiple of `BLOCK_SIZE`.
    """
    weight = experts.get_parameter(matrix)
    _check_width(weight, name, code_type)
    packing = Packing(code_type, weight.shape[-1])
    packed = torch.empty(*weight.shape[:-1], packing.row_bytes, dtype=torch.uint8, device=weight.device)
    experts.register_parameter(matrix, nn.Parameter(packed, requires_grad=False))
    experts.packings = {**getattr(experts, "packings", {}), matrix: packing}  # type: ignore[assignment]


def _check_width(weight: torch.Tensor, name: str, code_type: str) -> None:
    width = weight.shape[-1]
    if width % BLOCK_SIZE:
        rule = f"packs each row in blocks of {BLOCK_SIZE} weights, which do not divide the row length {width} of {name}"
        raise setting_error("lora.base_dtype", code_type, rule, "bfloat16")


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
    """Return the number of weights in each parameter, by the parameter's id; packed weights are counted, not bytes."""
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for _, parameter, packing in _packed_parameters(model):
        counts[id(parameter)] = math.prod((*parameter.shape[:-1], packing.width))
    return counts
