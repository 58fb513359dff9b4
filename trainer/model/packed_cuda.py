"""The GPU kernel that unpacks the weights quantized by `trainer.model.packed`.

It needs Triton, so `trainer.model.packed` imports this module only to unpack weights on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Number of code bytes that each program unpacks."""


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    packed,
    scales,
    values,
    weights,
    width,
    row_bytes,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Unpack up to TILE bytes of codes from one of the R rows.

    packed: the codes and scales of all rows, (R, row_bytes), uint8.
    scales: the same memory, viewed as float32.
    values: the value of each code, in float32.
    weights: the output, (R, width).
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    offsets = first + tl.arange(0, TILE)
    code_bytes = width // PER_BYTE
    is_inside = offsets < code_bytes
    codes = tl.load(packed + row * row_bytes + offsets, mask=is_inside, other=0).to(tl.int32)
    first_scale = (row * row_bytes + code_bytes) // 4
    scale = tl.load(scales + first_scale + offsets * PER_BYTE // BLOCK, mask=is_inside, other=0.0)
    if BITS == 4:
        high = tl.load(values + (codes >> 4)) * scale
        low = tl.load(values + (codes & 15)) * scale
        columns = first * 2 + tl.arange(0, 2 * TILE)
        tl.store(weights + row * width + columns, tl.interleave(high, low), mask=columns < width)
    else:
        tl.store(weights + row * width + offsets, tl.load(values + codes) * scale, mask=is_inside)


def unpack_into(weights: torch.Tensor, packed: torch.Tensor, values: torch.Tensor, bits: int, block: int) -> None:
    """Unpack the rows of `packed` (R, bytes) into `weights` (R, width), of any floating dtype.

    values: the value of each code, in float32.
    bits: the number of bits per code.
    block: the number of weights that share a scale.
    """
    (num_rows, width), row_bytes = weights.shape, packed.shape[1]
    grid = (num_rows, triton.cdiv(width * bits // 8, _TILE))
    if num_rows:
        with torch.cuda.device_of(weights):
            _unpack[grid](packed, packed.view(torch.float32), values, weights, width, row_bytes, bits, block, _TILE)
