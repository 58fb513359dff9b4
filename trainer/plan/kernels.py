"""The planner's assumptions about kernels: the work of operators, a GPU's kernels, compiler fusion and float8 casts.

A GPU's fused kernels save fewer activations for the backward pass than a CPU's kernels.  `use_gpu_kernels` imitates the
GPU's kernels while a model is traced, so that a plan made on a laptop is valid for GPUs.  This module depends neither
on the model nor on the speed of the device.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop, sdpa_flop

from trainer.distributed.world import EXPERT, TENSOR
from trainer.experts import TORCH_GROUPED_MM
from trainer.loss import use_gpu_chunks
from trainer.sequence import attention

aten = torch.ops.aten

GroupAxis = Literal["context", "tensor", "expert"]
"""The groups of ranks that communicate inside a forward pass."""


class Work(NamedTuple):
    """The work of one kernel or collective: floating-point operations, and bytes read and written.

    For a collective, `num_bytes` is instead the size of its larger buffer.
    """

    kind: str
    """`matmul`, `grouped` (the experts' matmuls), `attention`, `memory` (memory-bound), or, for a collective that the
    forward or backward pass itself issues, its operation."""
    flops: int
    num_bytes: int
    element_size: int
    """Bytes per element of the output, or 1 for a float8 matmul; the speed of a matmul depends on it."""
    axis: GroupAxis = "context"
    """For a collective: the group of ranks that it runs in."""

    @property
    def operation(self) -> Literal["all_gather", "reduce_scatter", "all_to_all"] | None:
        """The operation of a collective; None for a kernel."""
        return next((operation for operation in COLLECTIVES.values() if operation == self.kind), None)


NO_WORK = Work("memory", 0, 0, 0)

COLLECTIVES: Mapping[Any, Literal["all_gather", "reduce_scatter", "all_to_all"]] = {
    torch.ops.meshtrainer.gather_parts.default: "all_gather",
    torch.ops.meshtrainer.sum_parts.default: "reduce_scatter",
    torch.ops.meshtrainer.exchange_parts.default: "all_to_all",
    torch.ops.meshtrainer.exchange_rows.default: "all_to_all",
}
"""Operators that are collectives among the ranks of a context-, tensor- or expert-parallel group."""

_GROUPED_MATMULS = {
    torch.ops.meshtrainer.grouped_mm,
    torch.ops.meshtrainer.grouped_outer,
    TORCH_GROUPED_MM.overloadpacket,
}

_WITHOUT_KERNEL = {  # operators that launch nothing
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

_ATTENTION = {getattr(aten, f"{name}{suffix}") for name in attention.KERNELS for suffix in ("", "_backward")}


def _grouped_flop(first: Sequence[int], second: Sequence[int], *others: Any, **options: Any) -> int:
    """Return the FLOPs of a grouped matmul, given its operands' shapes; each row or column belongs to one group."""
    num_groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * num_groups * first[-2] * first[-1] * second[-1]


if TORCH_GROUPED_MM.overloadpacket not in flop_registry:
    register_flop_formula(TORCH_GROUPED_MM.overloadpacket)(_grouped_flop)


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Return the work of one ATen operator call; `NO_WORK` for views, allocations and queries."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not outputs or func.is_view or func in _WITHOUT_KERNEL:
        return NO_WORK
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)]
    if func in COLLECTIVES:
        axes: dict[str, GroupAxis] = {EXPERT: "expert", TENSOR: "tensor"}
        return Work(COLLECTIVES[func], 0, max(sizes), outputs[0].element_size(), axes.get(args[-1], "context"))
    num_bytes = sum(sizes)
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return Work("attention", _attention_flops(packet, args, kwargs), num_bytes, outputs[0].element_size())
    if packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        return Work("grouped" if packet in _GROUPED_MATMULS else "matmul", flops, num_bytes, outputs[0].element_size())
    return Work("memory", 0, num_bytes, outputs[0].element_size())


def _attention_flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the FLOPs of an attention kernel; a causal mask removes half of the score matrix.

    With fewer queries than keys, the queries are the last tokens, and the mask removes only half of the square of
    scores between these tokens.
    """
    is_backward = "backward" in packet.__name__
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    q, k, v = tensors[1:4] if is_backward else tensors[:3]
    heads = (q.shape[0], q.shape[1])
    k_shape, v_shape = (*heads, *k.shape[2:]), (*heads, *v.shape[2:])
    if is_backward:
        flops = sdpa_backward_flop(q.shape, q.shape, k_shape, v_shape)  # the gradient has the queries' shape
    else:
        flops = sdpa_flop(q.shape, k_shape, v_shape)
    flags = [a for a in (*args, *kwargs.values()) if isinstance(a, bool)]
    return int(flops * (1 - q.shape[2] / (2 * k.shape[2]))) if any(flags) else int(flops)


class _FusedRmsNorm(torch.autograd.Function):
    """Imitates the GPU's fused kernel: saves its inputs and one fp32 value per row for the backward pass."""

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
    """Replaces attention and RMSNorm with operators that save what a GPU's fused kernels would save."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (out := _flash(*args, **kwargs)) is not None:
            return out
        if func is F.rms_norm:
            return rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor | None:
    """Return the output of flash attention, or None if the kernel does not support the arguments."""
    if attn_mask is not None or query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] > 256:
        return None
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    return out


def rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Return what stands for `F.rms_norm` while a model is traced."""
    out: torch.Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return out


def use_gpu_kernels(model: nn.Module) -> None:
    """Make every forward pass in `model` use flash attention, fused RMSNorm and the loss chunks of a GPU.

    This includes recomputation.  A mode around the whole step would be inactive during `backward`, and thus during
    recomputation, so each module's `forward` is wrapped instead.
    """
    is_active = False

    def with_kernels(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_active
            if is_active:
                return forward(*args, **kwargs)
            is_active = True
            try:
                with _GpuKernels(), use_gpu_chunks(), attention.use_gpu_attention(_GpuKernels):
                    return forward(*args, **kwargs)
            finally:
                is_active = False

        return functools.update_wrapper(run, forward)

    for module in model.modules():
        module.forward = with_kernels(module.forward)  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------
# Fusion by torch.compile: which kernels a block runs, and which tensors are never materialized.
#
# Memory-bound operators are fused if one reads the output of another or both read the same tensor, unless a matmul or
# an attention kernel must run in between.  A fused kernel reads each input once and writes only outputs that later
# kernels read or that are saved; everything else stays in registers.
#
# Source: Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and
# Graph Compilation", section 4.


@dataclass(frozen=True)
class Operator:
    """One call of an operator: its work, and the bytes it reads and writes, by serial number of the storage."""

    work: Work
    reads: dict[int, int]
    writes: dict[int, int]
    is_fused: bool
    """Whether it can be fused: it is memory-bound and inside a compiled block."""


def fuse(operators: Sequence[Operator], live_after: Collection[int]) -> tuple[Counter[Work], frozenset[int]]:
    """Return the kernels into which `operators` are fused, and the storages that fusion never materializes.

    operators: in execution order.  live_after: the storages that are still alive after the last one.
    """
    work = Counter[Work]()
    read_by: dict[int, set[int]] = defaultdict(set)
    written_by: dict[int, int] = {}
    members: dict[int, list[Operator]] = defaultdict(list)
    for group, operator in zip(_groups(operators), operators, strict=True):
        for storage in operator.reads:
            read_by[storage].add(group)
        for storage in operator.writes:
            written_by[storage] = group
        if operator.is_fused:
            members[group].append(operator)
        else:
            work[operator.work] += 1
    not_materialized: set[int] = set()
    for group, fused in members.items():
        read, written = Counter[int](), Counter[int]()
        for operator in fused:
            for storage, num_bytes in operator.reads.items():
                if written_by.get(storage) != group:
                    read[storage] = max(read[storage], num_bytes)
            for storage, num_bytes in operator.writes.items():
                if storage in live_after or read_by[storage] - {group}:
                    written[storage] = max(written[storage], num_bytes)
                else:
                    not_materialized.add(storage)
        num_bytes = sum(read.values()) + sum(written.values())
        if num_bytes:
            work[Work("memory", 0, num_bytes, fused[-1].work.element_size)] += 1
    return work, frozenset(not_materialized)


def _groups(operators: Sequence[Operator]) -> list[int]:
    """Return the kernel that each operator belongs to, identified by the index of one of the kernel's operators.

    Operators of the same stage that share a storage are fused.  Reading the result of an operator that cannot be fused,
    such as a matmul, starts a new stage.
    """
    stage_of: dict[int, tuple[int, bool]] = {}
    parents = list(range(len(operators)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    seen: dict[tuple[int, int], int] = {}
    for number, operator in enumerate(operators):
        inputs = [stage_of[storage] for storage in operator.reads if storage in stage_of]
        # An operator that reads the result of a matmul belongs to a later stage than the inputs of the matmul.
        stage = max((earlier + (operator.is_fused and not is_fused) for earlier, is_fused in inputs), default=0)
        for storage in operator.writes:
            stage_of[storage] = stage, operator.is_fused
        if operator.is_fused:
            for storage in (*operator.reads, *operator.writes):
                first = seen.setdefault((stage, storage), number)
                parents[root(number)] = root(first)
    return [root(number) for number in range(len(operators))]


# ---------------------------------------------------------------------------------------------------------------
# Float8 matmuls: the casts before each matmul, and the matmul itself.
#
# Reproduces what torchao's float8 layers do, without importing torchao.  Both operands of each matmul are cast.  With
# tensorwise scaling, the largest element of the tensor must be found first; with rowwise scaling, one kernel finds the
# scales and casts.


_FLOAT8_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_FLOAT8_MULTIPLE = 16
"""A layer is converted to float8 only if both of its dimensions are multiples of this."""


class Float8Casts:
    """Replaces the matmuls inside blocks with float8 casts and float8 matmuls.

    setting: the value of `train.float8`; with `none`, nothing is replaced.
    are_fused: whether torch.compile fuses the casts.
    """

    def __init__(self, setting: str, are_fused: bool) -> None:
        self._setting, self._are_fused = setting, are_fused
        self._num_serials = 0
        self._cast: dict[int, int] = {}
        """Maps the serial number of each storage that has been cast to that of its float8 copy."""

    def clear(self) -> None:
        """Forget which tensors have been cast; called at the start of each segment."""
        self._cast.clear()

    def cast(self, func: Any, args: Sequence[Any], operator: Operator, serials: Sequence[int]) -> Iterator[Operator]:
        """Yield the operators that run in place of `operator`, a call of `func` inside a block.

        Yields `operator` unchanged unless it is a matmul that is converted to float8.

        serials: the serial numbers of the storages of the tensors in `args`, in order.
        """
        operands = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
        if (
            self._setting == "none"
            or func not in _FLOAT8_MATMULS
            or any(n % _FLOAT8_MULTIPLE for operand in operands for n in operand.shape)
        ):
            yield operator
            return
        reads: dict[int, int] = {}
        for operand, serial in zip(operands, serials[-2:], strict=True):
            # With rowwise scaling, each use scales the tensor along a different dimension, so no cast is reused.
            if serial not in self._cast or self._setting == "rowwise":
                yield from self._cast_of(serial, operand.numel())
            reads[self._cast[serial]] = operand.numel()
        num_bytes = sum(reads.values()) + sum(operator.writes.values())
        yield Operator(operator.work._replace(num_bytes=num_bytes, element_size=1), reads, operator.writes, False)

    def _cast_of(self, serial: int, numel: int) -> Iterator[Operator]:
        reads, cast = {serial: 2 * numel}, self._new_serial()
        if self._setting == "tensorwise":
            amax, scale = self._new_serial(), self._new_serial()
            yield self._memory_bound(reads, {amax: 4}, self._are_fused)
            yield self._memory_bound({amax: 4}, {scale: 4}, False)
            reads = {**reads, scale: 4}
        yield self._memory_bound(reads, {cast: numel}, self._are_fused)
        self._cast[serial] = cast

    def _memory_bound(self, reads: dict[int, int], writes: dict[int, int], is_fused: bool) -> Operator:
        num_bytes = sum(reads.values()) + sum(writes.values())
        return Operator(Work("memory", 0, num_bytes, 1), reads, writes, is_fused)

    def _new_serial(self) -> int:
        """Return a serial number for a storage that was not traced, such as the output of a cast."""
        self._num_serials += 1
        return 10**15 + self._num_serials  # far above those of traced storages
