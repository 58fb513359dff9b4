"""Computes the cost of operators, and substitutes a GPU's kernels when a model is traced on a CPU.

A GPU's fused kernels save fewer activations for the backward pass than the CPU's do.  `use_gpu_kernels` imitates them
while a model is traced, so that a plan made on a laptop is right for GPUs.  Independent of any model and of the speed
of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop, sdpa_flop

from trainer.loss import use_gpu_chunks
from trainer.model.experts import GROUPED_PRODUCT
from trainer.sequence import attention

aten = torch.ops.aten


class Work(NamedTuple):
    """The work of one kernel or collective: floating-point operations, and bytes read and written."""

    kind: str
    """`matmul`, `attention`, `memory` (memory-bound), or the name of a collective issued within a pass."""
    flops: int
    num_bytes: int
    element_size: int
    """Bytes per element of the output; the speed of a matrix product depends on it."""

    @property
    def operation(self) -> Literal["all_gather", "reduce_scatter", "all_to_all"] | None:
        """The collective, with `num_bytes` those of the full tensor, or None for a kernel."""
        return next((operation for operation in SENT.values() if operation == self.kind), None)


NOTHING = Work("memory", 0, 0, 0)

SENT: Mapping[Any, Literal["all_gather", "reduce_scatter", "all_to_all"]] = {
    torch.ops.meshtrainer.gather_parts.default: "all_gather",
    torch.ops.meshtrainer.sum_parts.default: "reduce_scatter",
    torch.ops.meshtrainer.exchange_parts.default: "all_to_all",
}
"""Operators that are context-parallel collectives, among the ranks that hold slices of the same sequences."""

_FREE = {aten.detach.default, aten.empty.memory_format, aten.new_empty.default, aten.new_empty_strided.default}

_ATTENTION = {getattr(aten, f"{name}{way}") for name in attention.KERNELS for way in ("", "_backward")}


def _grouped_flop(first: Sequence[int], second: Sequence[int], *others: Any, **options: Any) -> int:
    """Return the FLOPs of a grouped matrix product; each row or column belongs to exactly one group."""
    num_groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * num_groups * first[-2] * first[-1] * second[-1]


if GROUPED_PRODUCT.overloadpacket not in flop_registry:
    register_flop_formula(GROUPED_PRODUCT.overloadpacket)(_grouped_flop)


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Return the work of one ATen operator call; `NOTHING` for views, allocations and queries."""
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not made or func.is_view or func in _FREE:
        return NOTHING
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*read, *made)]
    if func in SENT:
        return Work(SENT[func], 0, max(sizes), made[0].element_size())
    num_bytes = sum(sizes)
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return Work("attention", _attention_flops(packet, args, kwargs), num_bytes, made[0].element_size())
    if packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        return Work("matmul", flops, num_bytes, made[0].element_size())
    return Work("memory", 0, num_bytes, made[0].element_size())


def _attention_flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the FLOPs of an attention kernel; a causal mask removes half of the score matrix.

    With fewer queries than keys, the queries are the last tokens, and the mask removes half of a square only.
    """
    is_backward = "backward" in packet.__name__
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    q, k, v = tensors[1:4] if is_backward else tensors[:3]
    heads = (q.shape[0], q.shape[1])
    shapes = [q.shape, (*heads, *k.shape[2:]), (*heads, *v.shape[2:])]
    flops = sdpa_backward_flop(q.shape, *shapes) if is_backward else sdpa_flop(*shapes)
    flags = [a for a in (*args, *kwargs.values()) if isinstance(a, bool)]
    return int(flops * (1 - q.shape[2] / (2 * k.shape[2]))) if any(flags) else int(flops)


class _FusedRmsNorm(torch.autograd.Function):
    """Saves for backward what the GPU's fused kernel saves: its input and one fp32 value per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> torch.Tensor:
        rstd = x.new_empty(x.shape[: x.ndim - num_dims], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.add(x, x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.add(x, x), None if weight is None else torch.add(weight, weight), None


class _GpuKernels(TorchFunctionMode):
    """Replaces attention and RMSNorm with the kernels that a GPU would run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and _takes_flash(*args, **kwargs):
            return _flash(*args, **kwargs)
        if func is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _takes_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> bool:
    return attn_mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    return out


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    out: torch.Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return out


def use_gpu_kernels(model: nn.Module) -> None:
    """Make every forward pass in `model` use flash attention, fused RMSNorm and the loss chunks of a GPU.

    This includes recomputed forward passes.  They are why each module is wrapped: a single mode around the whole step
    would be inactive during `backward`, and so during recomputation.
    """
    is_on = False

    def with_kernels(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_on
            if is_on:
                return forward(*args, **kwargs)
            is_on = True
            try:
                with _GpuKernels(), use_gpu_chunks(), attention.use_gpu_attention(_GpuKernels):
                    return forward(*args, **kwargs)
            finally:
                is_on = False

        return functools.update_wrapper(run, forward)

    for module in model.modules():
        module.forward = with_kernels(module.forward)  # type: ignore[method-assign]
