"""The recurrent state of linear attention, passed from one chunk of tokens to the next by differentiable operators.

Within a chunk, everything is computed with matmuls; a loop passes the state from chunk to chunk.  Each loop is one
operator, so that autograd keeps only the states that it needs, and so that neither `torch.compile` nor the planner
unrolls the thousands of iterations that a long sequence takes.

A chunk of S tokens changes the state Z to decay x Z + keys^T (writes - seen Z).  The writes may have fewer columns
than the state; they are then added to its last columns only.

Shape suffixes: B rows, N heads, C chunks of S tokens, H key size, E columns of the writes, X columns of the state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("meshtrainer::chunk_states", mutates_args=())
def chunk_states(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    writes_BNCSE: torch.Tensor,
    state_BNHX: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state before each chunk, (B, N, C, H, X), and after the last, (B, N, H, X), given the initial one."""
    states_BNCHX = state_BNHX.new_empty(*decay_BNC.shape, *state_BNHX.shape[-2:])
    for index in range(decay_BNC.shape[2]):
        states_BNCHX[:, :, index] = state_BNHX
        state_BNHX = _after_chunk(index, decay_BNC, keys_BNCSH, seen_BNCSH, writes_BNCSE, state_BNHX)
    return states_BNCHX, state_BNHX.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("meshtrainer::last_state", mutates_args=())
def last_state(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    writes_BNCSE: torch.Tensor,
    state_BNHX: torch.Tensor,
) -> torch.Tensor:
    """Return the state after the last chunk, (B, N, H, X), given the initial one.

    No other states are kept.  The backward pass recomputes them for one group of about sqrt(C) chunks at a time.
    """
    for index in range(decay_BNC.shape[2]):
        state_BNHX = _after_chunk(index, decay_BNC, keys_BNCSH, seen_BNCSH, writes_BNCSE, state_BNHX)
    return state_BNHX.clone(memory_format=torch.contiguous_format)


def _after_chunk(
    index: int,
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    writes_BNCSE: torch.Tensor,
    state_BNHX: torch.Tensor,
) -> torch.Tensor:
    new_BNSX = -(seen_BNCSH[:, :, index] @ state_BNHX)
    new_BNSX[..., -writes_BNCSE.shape[-1] :] += writes_BNCSE[:, :, index]
    return decay_BNC[:, :, index, None, None] * state_BNHX + keys_BNCSH[:, :, index].mT @ new_BNSX


@torch.library.custom_op("meshtrainer::chunk_state_gradients", mutates_args=())
def chunk_state_gradients(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    grad_states_BNCHX: torch.Tensor | None,
    grad_last_BNHX: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the state after each chunk, (B, N, C, H, X), and of the initial one, (B, N, H, X).

    grad_states_BNCHX, grad_last_BNHX: the gradients of the outputs of `chunk_states`.
    """
    grad_BNHX = grad_last_BNHX
    grads_BNCHX = grad_last_BNHX.new_empty(*decay_BNC.shape, *grad_last_BNHX.shape[-2:])
    for index in reversed(range(decay_BNC.shape[2])):
        grads_BNCHX[:, :, index] = grad_BNHX
        grad_new_BNSX = keys_BNCSH[:, :, index] @ grad_BNHX
        grad_BNHX = decay_BNC[:, :, index, None, None] * grad_BNHX - seen_BNCSH[:, :, index].mT @ grad_new_BNSX
        if grad_states_BNCHX is not None:
            grad_BNHX += grad_states_BNCHX[:, :, index]
    return grads_BNCHX, grad_BNHX.clone(memory_format=torch.contiguous_format)


@chunk_states.register_fake
def _(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    writes_BNCSE: torch.Tensor,
    state_BNHX: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return state_BNHX.new_empty(*decay_BNC.shape, *state_BNHX.shape[-2:]), state_BNHX.new_empty(state_BNHX.shape)


@last_state.register_fake
def _(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    writes_BNCSE: torch.Tensor,
    state_BNHX: torch.Tensor,
) -> torch.Tensor:
    return state_BNHX.new_empty(state_BNHX.shape)


@chunk_state_gradients.register_fake
def _(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    grad_states_BNCHX: torch.Tensor | None,
    grad_last_BNHX: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = grad_last_BNHX.shape
    return grad_last_BNHX.new_empty(*decay_BNC.shape, *shape[-2:]), grad_last_BNHX.new_empty(shape)


def _input_gradients(
    decay_BNC: torch.Tensor,
    keys_BNCSH: torch.Tensor,
    seen_BNCSH: torch.Tensor,
    writes_BNCSE: torch.Tensor,
    states_BNCHX: torch.Tensor,
    grad_states_BNCHX: torch.Tensor | None,
    grad_last_BNHX: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of decay, keys, seen, writes and the initial state."""
    grads_BNCHX, grad_first_BNHX = chunk_state_gradients(
        decay_BNC, keys_BNCSH, seen_BNCSH, grad_states_BNCHX, grad_last_BNHX
    )
    width = writes_BNCSE.shape[-1]
    # A dot product, since an elementwise product would take as much memory as all states.
    grad_decay_BNC = (grads_BNCHX.flatten(-2).unsqueeze(-2) @ states_BNCHX.flatten(-2).unsqueeze(-1))[..., 0, 0]
    new_BNCSX = F.pad(writes_BNCSE, (states_BNCHX.shape[-1] - width, 0)) - seen_BNCSH @ states_BNCHX
    grad_keys_BNCSH = new_BNCSX @ grads_BNCHX.mT
    del new_BNCSX
    grad_new_BNCSX = keys_BNCSH @ grads_BNCHX
    grad_seen_BNCSH = (grad_new_BNCSX @ states_BNCHX.mT).neg_()
    return grad_decay_BNC, grad_keys_BNCSH, grad_seen_BNCSH, grad_new_BNCSX[..., -width:], grad_first_BNHX


def _backward_of_last(ctx: Any, grad_BNHX: torch.Tensor) -> tuple[torch.Tensor, ...]:
    decay_BNC, keys_BNCSH, seen_BNCSH, writes_BNCSE, state_BNHX = ctx.saved_tensors
    size = math.isqrt(decay_BNC.shape[2] - 1) + 1  # rounded up
    groups = list(
        zip(*(tensor.split(size, 2) for tensor in (decay_BNC, keys_BNCSH, seen_BNCSH, writes_BNCSE)), strict=True)
    )
    entering = [state_BNHX]
    for group in groups[:-1]:
        entering.append(last_state(*group, entering[-1]))
    group_gradients = []
    for decay, keys, seen, writes in reversed(groups):
        states, _ = chunk_states(decay, keys, seen, writes, entering.pop())
        *gradients, grad_BNHX = _input_gradients(decay, keys, seen, writes, states, None, grad_BNHX)
        group_gradients.append(gradients)
    return *(torch.cat(parts[::-1], 2) for parts in zip(*group_gradients, strict=True)), grad_BNHX


chunk_states.register_autograd(
    lambda ctx, *gradients: _input_gradients(*ctx.saved_tensors, *gradients),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:-1], output[0]),
)
last_state.register_autograd(
    _backward_of_last, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def _flops(decay: torch.Size, keys: torch.Size, seen: torch.Size, *others: Any, **options: Any) -> int:
    """Return the FLOPs of a loop: two matmuls of (S, H) and (H, X) per iteration."""
    return 4 * math.prod(keys) * others[-1][-1]


CHUNK_STATES = torch.ops.meshtrainer.chunk_states.default
"""The operator as seen by dispatch modes."""
for _operator in (
    CHUNK_STATES.overloadpacket,
    torch.ops.meshtrainer.last_state,
    torch.ops.meshtrainer.chunk_state_gradients,
):
    register_flop_formula(_operator)(_flops)
