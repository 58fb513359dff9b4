"""Grouped matmuls: each row is multiplied by its group's matrix (one group per expert, for example).

Group sizes are known only on the device, so these matmuls are custom operators: fake tensors, compiled code and
activation checkpointing see a single operator, whatever its implementation.  This module does not depend on any model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from trainer.model.packed import Packing


@torch.library.custom_op("meshtrainer::grouped_mm", mutates_args=())
def grouped_mm(x_MK: torch.Tensor, weight_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each row of `x_MK` by the matrix of its group, giving (M, N).

    `ends_E[e]` (int32) is the exclusive end row of group e; the last group ends with the last row.  If `ends_E` has one
    entry more than there are matrices, the last group has no matrix: the results and gradients of its rows are zero.
    On a GPU in bfloat16, with K and N multiples of 8, one kernel computes the product without a host sync; otherwise
    there is one matmul per group, and the host reads `ends_E`.
    """
    num_groups = weight_EKN.shape[0]
    if _has_kernel(x_MK, weight_EKN):
        out_MN = F.grouped_mm(x_MK, weight_EKN, offs=ends_E[:num_groups])
        if ends_E.shape[0] > num_groups:  # the kernel does not write these rows
            has_no_matrix_M = torch.arange(x_MK.shape[0], device=x_MK.device) >= ends_E[num_groups - 1]
            out_MN.masked_fill_(has_no_matrix_M[:, None], 0)
        return out_MN
    out_MN = x_MK.new_empty(x_MK.shape[0], weight_EKN.shape[2])
    for group, rows in enumerate(_rows(ends_E)):
        if group < num_groups:
            torch.mm(x_MK[rows], weight_EKN[group], out=out_MN[rows])
        else:
            out_MN[rows] = 0
    return out_MN


@torch.library.custom_op("meshtrainer::grouped_outer", mutates_args=())
def grouped_outer(x_MK: torch.Tensor, y_MN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return x.T @ y for the rows of each group, (E, K, N).

    `ends_E` is as in `grouped_mm`, but has no extra entry; rows after the last group are ignored.
    """
    if _has_kernel(x_MK, y_MN):
        return F.grouped_mm(x_MK.t(), y_MN, offs=ends_E)
    out_EKN = x_MK.new_empty(len(ends_E), x_MK.shape[1], y_MN.shape[1])
    for group, rows in enumerate(_rows(ends_E)):
        torch.mm(x_MK[rows].t(), y_MN[rows], out=out_EKN[group])
    return out_EKN


def grouped_bias(bias_EN: torch.Tensor, ends_E: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the bias of each row's group, (M, N); zero for the rows of an extra group (see `grouped_mm`).

    The result is computed as a matmul with ones, so that its gradient, a sum over rows, needs no atomic additions on a
    GPU.
    """
    ones_M8 = bias_EN.new_ones(num_rows, 8)  # the GPU kernel needs a multiple of 8 columns
    out_MN: torch.Tensor = grouped_mm(ones_M8, F.pad(bias_EN.unsqueeze(1), (0, 0, 0, 7)), ends_E)
    return out_MN


def _rows(ends_E: torch.Tensor) -> list[slice]:
    ends = ends_E.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """Return whether torch's kernel supports these tensors: it needs strides that are multiples of 16 bytes."""
    fits = all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[-1] % 8 == t.shape[-2] % 8 == 0 for t in tensors[1:])
    first = tensors[0]
    return fits and first.is_cuda and first.dtype == torch.bfloat16 and first.shape[-1] % 8 == 0


@grouped_mm.register_fake
def _(x_MK: torch.Tensor, weight_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_EKN.shape[2])


@grouped_outer.register_fake
def _(x_MK: torch.Tensor, y_MN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return x_MK.new_empty(ends_E.shape[0], x_MK.shape[1], y_MN.shape[1])


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    x_MK, weight_EKN, ends_E = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.num_groups = weight_EKN.shape[0]
    ctx.save_for_backward(x_MK if needs_weight else None, weight_EKN if needs_x else None, ends_E)


def _backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x_MK, weight_EKN, ends_E = ctx.saved_tensors
    grad_MN = grad_MN.contiguous()
    grad_x = None if weight_EKN is None else grouped_mm(grad_MN, weight_EKN.transpose(1, 2), ends_E)
    grad_weight = None if x_MK is None else grouped_outer(x_MK, grad_MN, ends_E[: ctx.num_groups])
    return grad_x, grad_weight, None


grouped_mm.register_autograd(_backward, setup_context=_setup_context)

GROUPED_MM = torch.ops.meshtrainer.grouped_mm.default
"""The operator as seen by dispatch modes."""


_PIECE_WEIGHTS = 2**27
"""Maximum number of weights to unpack at a time: 256 MiB in bfloat16."""


def packed_grouped_mm(
    x_MK: torch.Tensor, packed: torch.Tensor, ends_E: torch.Tensor, packing: Packing, is_transposed: bool
) -> torch.Tensor:
    """Multiply rows by frozen quantized matrices, packed as (E, N, bytes); see `grouped_mm`.

    The matrices are unpacked to the dtype of `x_MK`, in both the forward and the backward pass, some rows of all
    experts at a time; autograd saves only the bytes.  is_transposed: the matrices are (E, K, N) before packing, not
    (E, N, K).
    """
    out_MN: torch.Tensor = _PackedGroupedMatmul.apply(x_MK, packed, ends_E, packing, is_transposed)  # type: ignore[no-untyped-call]
    return out_MN


class _PackedGroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, packed: torch.Tensor, ends_E: torch.Tensor, packing: Packing, is_transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, ends_E)
        ctx.packing, ctx.is_transposed = packing, is_transposed
        multiply = _multiply_by_columns if is_transposed else _multiply_by_rows
        return multiply(x_MK, packed, ends_E, packing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_MN,) = grad_outputs
        packed, ends_E = ctx.saved_tensors
        multiply = _multiply_by_rows if ctx.is_transposed else _multiply_by_columns
        return multiply(grad_MN.contiguous(), packed, ends_E, ctx.packing), None, None, None, None


def _multiply_by_rows(x: torch.Tensor, packed: torch.Tensor, ends_E: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return x @ W.T for x (M, width) and packed W (E, R, width): (M, R)."""
    parts = [grouped_mm(x, weight.transpose(1, 2), ends_E) for _, weight in _unpacked(packed, packing, x.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _multiply_by_columns(x: torch.Tensor, packed: torch.Tensor, ends_E: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return x @ W for x (M, R) and packed W (E, R, width): (M, width)."""
    total: torch.Tensor | None = None
    for rows, weight in _unpacked(packed, packing, x.dtype):
        if weight.shape[1] == x.shape[1]:
            out: torch.Tensor = grouped_mm(x, weight, ends_E)
            return out
        part = grouped_mm(x[:, rows].contiguous(), weight, ends_E).float()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(x.dtype)


def _unpacked(packed: torch.Tensor, packing: Packing, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Unpack matrices (E, R, bytes) piece by piece: yield a range of rows and their weights (E, rows, width)."""
    step = max(8, _PIECE_WEIGHTS // (packed.shape[0] * packing.width) // 8 * 8)  # the kernel needs multiples of 8
    for start in range(0, packed.shape[1], step):
        rows = slice(start, start + step)
        yield rows, packing.unpack(packed[:, rows], dtype)


@register_flop_formula(torch.ops.meshtrainer.grouped_mm)
def _(x: Sequence[int], weight: Sequence[int], ends: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.meshtrainer.grouped_outer)
def _(x: Sequence[int], y: Sequence[int], ends: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * y[1]


# ---------------------------------------------------------------------------------------------------------------
# Fake tensors, which have only shapes and dtypes, so that models run in milliseconds and without memory

TORCH_GROUPED_MM = torch.ops.aten._grouped_mm.default
"""Torch's own grouped matmul, which some mixture-of-experts models use."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor created inside the block a fake tensor."""
    with _FakeTensors():
        yield


class _FakeTensors(FakeTensorMode):
    """Supports torch's grouped matmul in any dtype; torch's own fake kernel is for GPUs and only supports bfloat16."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not TORCH_GROUPED_MM:
            return super().dispatch(func, types, args, kwargs)
        first, second, *rest = args
        ends = rest[0] if rest else kwargs["offs"]
        num_rows, num_columns = first.shape[-2], second.shape[-1]
        if first.ndim == second.ndim:  # 2D: groups along the shared dimension; 3D: one matmul per matrix
            return first.new_empty(first.shape[0] if first.ndim == 3 else ends.shape[0], num_rows, num_columns)
        return first.new_empty(num_rows, num_columns)
