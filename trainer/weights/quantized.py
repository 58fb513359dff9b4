"""Dequantizes the weights of published models to bfloat16 as their rows are read.

`quantization_config` in config.json names one of two formats:

- `mxfp4`: the experts of gpt-oss.  `NAME_blocks` (E, N, K / 32, 16) packs two 4-bit numbers per byte, and `NAME_scales`
  (E, N, K / 32) holds the exponent, biased by 127, that each group of 32 numbers shares.  The dequantized weight is
  `NAME`, (E, K, N).
  Format: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.2 and 5.3.
- `fp8`: the matrices of DeepSeek-V3.  `NAME` (N, K) holds 8-bit numbers, and `NAME_scale_inv` the factor by which each
  block of shape `weight_block_size` is multiplied.  Format: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2, and the
  published code.

Dequantized 4-bit numbers are exact in bfloat16; 8-bit numbers are scaled in float32, and then rounded to bfloat16.

Shape suffixes: E experts, N outputs, K inputs, B groups of 32 numbers, X bytes and Y numbers per group (16 and 32).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError

_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"
_FP8 = "F8_E4M3"
"""The name of the 8-bit dtype in safetensors."""

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Magnitude of a 4-bit number by its lower three bits; the highest bit is the sign."""


def with_dequantizing_readers(
    readers: Mapping[str, tuple[Path, Any]], quantization: Mapping[str, Any]
) -> dict[str, tuple[Path, Any]]:
    """Return `readers`, with the readers of each quantized weight replaced by one that dequantizes the rows it reads.

    readers: the file and the reader of each tensor, by name (readers are from safetensors' `get_slice`).
    quantization: the value of `quantization_config` in config.json.

    Raises UserError for other formats, for an invalid block shape, and for weights whose scales are missing or do not
    fit their shape.
    """
    method = quantization.get("quant_method")
    if method not in ("mxfp4", "fp8"):
        raise UserError(f"quantization_config: quant_method={method}: only mxfp4 and fp8 are supported")
    new_readers: dict[str, tuple[Path, Any]] = {}
    for name, (file, reader) in readers.items():
        if method == "mxfp4" and name.endswith(_BLOCKS):
            weight = name.removesuffix(_BLOCKS)
            new_readers[weight] = file, _Mxfp4(reader, _find_scales(readers, weight + _SCALES, name))
        elif method == "fp8" and reader.get_dtype() == _FP8:
            scales = _find_scales(readers, name + _SCALE_INV, name)
            new_readers[name] = file, _Fp8(reader, scales, _block_shape(quantization))
        elif not name.endswith(_SCALES if method == "mxfp4" else _SCALE_INV):
            new_readers[name] = file, reader
    for name, (_, reader) in new_readers.items():
        if isinstance(reader, (_Mxfp4, _Fp8)) and (mistake := reader.mistake()):
            raise UserError(f"{name}: {mistake}")
    return new_readers


def _find_scales(readers: Mapping[str, tuple[Path, Any]], scales: str, name: str) -> Any:
    if scales not in readers:
        raise UserError(f"{name}: cannot be dequantized, because {scales} is missing; download the folder again")
    return readers[scales][1]


def _block_shape(quantization: Mapping[str, Any]) -> tuple[int, int]:
    block = quantization.get("weight_block_size")
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise UserError(
            f"quantization_config: weight_block_size={block}: must be two whole numbers, such as [128, 128]"
        )
    return block[0], block[1]


@dataclass(frozen=True)
class _Mxfp4:
    """Reads stacked matrices (E, K, N) from blocks (E, N, K / 32, 16) and scales (E, N, K / 32)."""

    blocks: Any
    scales: Any

    def mistake(self) -> str:
        blocks, scales = list(self.blocks.get_shape()), list(self.scales.get_shape())
        fits = len(blocks) == 4 and blocks[3] == 16 and blocks[:3] == scales
        return "" if fits else f"its blocks {blocks} and scales {scales} have inconsistent shapes"

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        num_experts, rows, blocks, _ = self.blocks.get_shape()
        return [num_experts, 32 * blocks, rows]

    def __getitem__(self, experts: slice) -> torch.Tensor:
        """Return the dequantized matrices of a range of experts."""
        blocks_ENBX, scales_ENB = self.blocks[experts], self.scales[experts]
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
        # The number in the lower four bits of a byte comes first.
        low_and_high = [values[half.int()] for half in (blocks_ENBX & 15, blocks_ENBX >> 4)]
        numbers_ENBY = torch.stack(low_and_high, -1).flatten(-2)
        exponents_ENB1 = scales_ENB.int().unsqueeze(-1) - 127
        return torch.ldexp(numbers_ENBY, exponents_ENB1).flatten(-2).mT


@dataclass(frozen=True)
class _Fp8:
    """Reads a matrix (N, K) from 8-bit numbers and one factor per block."""

    numbers: Any
    scales: Any
    block: tuple[int, int]

    def mistake(self) -> str:
        shape, scales = list(self.numbers.get_shape()), list(self.scales.get_shape())
        expected = [math.ceil(size / block) for size, block in zip(shape, self.block, strict=False)]
        if len(shape) == 2 and scales == expected:
            return ""
        return f"is {shape} with scales {scales}, but blocks of {list(self.block)} need {expected}"

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        shape: list[int] = self.numbers.get_shape()
        return shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Return a range of dequantized rows."""
        (num_rows, num_columns), (height, width) = self.get_shape(), self.block
        start, stop, _ = rows.indices(num_rows)
        first = start // height
        scales = self.scales[first : math.ceil(stop / height)].float()
        scales = scales.repeat_interleave(height, 0)[start - first * height :][: stop - start]
        scales = scales.repeat_interleave(width, 1)[:, :num_columns]
        return (self.numbers[start:stop].float() * scales).to(torch.bfloat16)
