"""Selective activation checkpointing, which saves the outputs of some operators and recomputes the others.

Operators are selected by kind, or to fit a memory budget.  With a budget, the outputs that take the most FLOPs per byte
to recompute are saved first, as long as they fit.  FLOPs and bytes are counted in a forward pass on fake tensors, so
that every rank, the planner and compiled blocks make the same choice.  This module needs no model spec, mesh or
configuration.

Sources: for selection by kind, Korthikanti et al. 2022, arXiv:2205.05198; for a budget, the knapsack formulation behind
torch._functorch.config.activation_memory_budget, which is available only under torch.compile; here the knapsack problem
is solved greedily.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import sdpa_flop

from trainer.experts import GROUPED_MM, TORCH_GROUPED_MM, fake_tensors
from trainer.model.parameters import storage_id
from trainer.sequence.attention import ATTENTION_OPERATORS
from trainer.sequence.chunk_states import CHUNK_STATES

_aten = torch.ops.aten

_KIND_OF = {
    _aten.mm.default: "matmul",
    _aten.addmm.default: "matmul",
    _aten.bmm.default: "batched matmul",
    GROUPED_MM: "grouped matmul",
    TORCH_GROUPED_MM: "torch grouped matmul",
    CHUNK_STATES: "linear-attention states",
    **dict.fromkeys(ATTENTION_OPERATORS, "attention"),
}
"""The kinds of the operators that are expensive to recompute, except float8 matmuls, which are never selected by
budget.

All attention kernels have the same kind, since the device determines which one runs."""

OperatorId = tuple[str, int]
"""The kind of an expensive operator, and its index among the operators of that kind in a block's forward pass."""

ContextFactory = Callable[[Callable[..., CheckpointPolicy]], Any]
"""Creates the pair of contexts for `torch.utils.checkpoint` from a policy."""


def save_expensive_operators(make_contexts: ContextFactory = create_selective_checkpoint_contexts) -> Any:
    """Return contexts for `torch.utils.checkpoint` that save the outputs of all expensive operators.

    `make_contexts` creates them from the policy; activation offloading passes its own (`trainer.model.offload`).
    """

    expensive = {*_KIND_OF, _aten._scaled_mm.default}  # float8 matmul

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return make_contexts(policy)


@functools.cache
def save_only(
    operator_ids: frozenset[OperatorId], make_contexts: ContextFactory = create_selective_checkpoint_contexts
) -> Callable[[], Any]:
    """Return a `context_fn` for `torch.utils.checkpoint` that saves the outputs of the operators in `operator_ids`.

    Cached, so that equal sets get the same function: compiled code is guarded on its identity.
    """

    def make() -> Any:
        counts: Counter[tuple[str, bool]] = Counter()

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kind = _KIND_OF.get(operator)
            if kind is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            # Before torch 2.13 the policy is called again during recomputation.
            index = counts[kind, context.is_recompute]
            counts[kind, context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if (kind, index) in operator_ids else CheckpointPolicy.PREFER_RECOMPUTE

        return make_contexts(policy)

    return make


# ---------------------------------------------------------------------------------------------------------------
# Selection by memory budget


@dataclass(frozen=True)
class _Operator:
    """One call of an expensive operator in a block's forward pass."""

    operator_id: OperatorId
    flops: int
    num_bytes: int
    """Size of the outputs."""


@dataclass
class _BlockTrace:
    """A trace of one forward pass of a block: its expensive operators, and the tensors that autograd saved."""

    operators: list[_Operator] = field(default_factory=list)
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors saved by autograd, one per storage."""
    num_needed: int = 0
    """Number of operators that run before autograd saves its last tensor; recomputation stops there."""


def choose_saved_operators(
    model: nn.Module, blocks: Sequence[nn.Module], tokens_shape: tuple[int, int], dtype: torch.dtype, budget: float
) -> list[frozenset[OperatorId]]:
    """Choose the operators whose outputs each block saves.

    budget: the bytes to save, as a fraction of those that the block saves without checkpointing: all tensors that
        autograd saves in the block, except its inputs, parameters and buffers, for tokens of shape (B, T) and
        parameters in `dtype`, with CPU kernels.

    Operators with the most FLOPs per byte of output come first; ties go to the earlier operator.
    `model` may be on any device and is not changed.  Errors that the model raises on fake tensors propagate.
    """
    traces = {id(block): _BlockTrace() for block in blocks}
    with fake_tensors():
        fakes = {
            name: torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype, requires_grad=p.requires_grad)
            for name, p in model.named_parameters()
        }
        fakes |= {name: torch.empty(buffer.shape, dtype=buffer.dtype) for name, buffer in model.named_buffers()}
        model_storages = {storage_id(tensor.untyped_storage()) for tensor in fakes.values()}
        forwards = [vars(block).get("forward") for block in blocks]
        try:
            for block in blocks:
                block.forward = _with_recording(block.forward, traces[id(block)], model_storages)  # type: ignore[method-assign]
            functional_call(model, fakes, (torch.zeros(tokens_shape, dtype=torch.int64),))
        finally:
            for block, forward in zip(blocks, forwards, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward  # type: ignore[method-assign]
    return [_fill_knapsack(traces[id(block)], budget) for block in blocks]


def _fill_knapsack(trace: _BlockTrace, budget: float) -> frozenset[OperatorId]:
    bytes_left = budget * sum(tensor.untyped_storage().nbytes() for tensor in trace.saved.values())
    chosen = set()
    candidates = trace.operators[: trace.num_needed]
    for operator in sorted(candidates, key=lambda operator: -operator.flops / operator.num_bytes):
        if operator.num_bytes <= bytes_left:
            bytes_left -= operator.num_bytes
            chosen.add(operator.operator_id)
    return frozenset(chosen)


def _with_recording(forward: Callable[..., Any], trace: _BlockTrace, model_storages: set[int]) -> Callable[..., Any]:
    """Return `forward` wrapped to record its operators and saved tensors in `trace`; each call starts over."""

    def run(*args: Any, **kwargs: Any) -> Any:
        input_tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = {storage_id(tensor.untyped_storage()) for tensor in input_tensors}
        trace.operators, trace.saved, trace.num_needed = [], {}, 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = storage_id(tensor.untyped_storage())
            trace.num_needed = len(trace.operators)
            if storage not in inputs and storage not in model_storages:
                trace.saved[storage] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _OperatorRecorder(trace):
            return forward(*args, **kwargs)

    return run


class _OperatorRecorder(TorchDispatchMode):
    """Records expensive operators in a trace."""

    def __init__(self, trace: _BlockTrace) -> None:
        super().__init__()
        self._trace = trace
        self._seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = _KIND_OF.get(func)
        if kind is not None:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
            operator = _Operator((kind, self._seen[kind]), _flops(kind, args, outputs[0]), max(1, num_bytes))
            self._seen[kind] += 1
            self._trace.operators.append(operator)
        return result


def _flops(kind: str, args: Sequence[Any], output: torch.Tensor) -> int:
    """Return the FLOPs of an operator; a causal mask halves those of attention."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    if kind == "linear-attention states":
        return 4 * tensors[1].numel() * output.shape[-1]  # two matmuls of (S, H) and (H, E) for each chunk
    if kind != "attention":
        return 2 * output.numel() * tensors[-1].shape[-2]
    query, key, value = (tensor.shape for tensor in tensors[:3])
    heads = query[:2]
    flops = sdpa_flop(query, (*heads, *key[2:]), (*heads, *value[2:]))
    return int(flops) // (2 if any(arg is True for arg in args) else 1)
