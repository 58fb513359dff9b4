"""Two implementations of AdamW: torch's, and one for weights in bfloat16 and for moments in bfloat16 or 8 bits.

The second computes in float32, one parameter (or piece of a parameter) at a time, so no full float32 copy exists.  It
rounds the results, stochastically or to nearest.  The random bits depend on the seed, the parameter's name, the step
and the element's position in the full parameter.  This module does not depend on models or meshes.

Source: Loshchilov and Hutter 2019, arXiv:1711.05101; for stochastic rounding, see the comment above `hash_int32`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.errors import setting_error
from trainer.model.parameters import local, local_box, seed_of
from trainer.optim.blockwise import MEAN, SQUARE, block_length

_MAX_GRAPHS = 64
"""Limit on recompilations; see `_compiled_update`."""
_NUM_COLUMNS = 12
"""Number of scalars per parameter in each step, including padding; see `_step_scalars`."""

_PIECE_ELEMENTS = {"cpu": 2**16, "cuda": 2**30}
"""Maximum number of elements to update at a time, by device type.  On a CPU, temporaries then fit in the cache; on a
GPU, where the update is one compiled kernel, 32-bit indices set the limit."""

CODES = {"exp_avg": MEAN, "exp_avg_sq": SQUARE}
"""The 8-bit code for each of AdamW's moments, by torch's name for the moment."""
SCALE = "_scale"
"""Suffix added to a moment's name for the scales of its 8-bit codes in the optimizer state."""


def _zero_scales(parameter: torch.Tensor, length: int) -> torch.Tensor:
    """Return a zero scale for each block of a parameter's rows, sharded like the rows."""
    return torch.zeros_like(parameter.detach()[..., : parameter.shape[-1] // length], dtype=torch.float32)


class FusedAdamW(torch.optim.AdamW):
    """Torch's fused AdamW on the local shards, which is possible because it is elementwise.

    With DTensors, torch would propagate the sharding of four tensors per parameter in every step.
    """

    algorithm = "AdamW"
    supports_found_inf = True

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        if any(isinstance(p, DTensor) for p in group["params"]):
            for tensors in lists:
                tensors[:] = map(local, tensors)
        return has_complex


class RoundingAdamW(torch.optim.Optimizer):
    """AdamW for parameters of any floating-point dtype, with moments in `state_dtype`.

    The moments have torch's names; the step count is a float32 on the parameter's device (`capturable`), and there is
    no host sync.  As with torch's fused optimizers, the step is skipped if the attribute `found_inf`, a scalar tensor,
    is 1, and gradients are divided by the attribute `grad_scale`, also a scalar tensor.

    names: parameter names by id.  seed: the seed for stochastic rounding.  stochastic: whether to round stochastically
    instead of to nearest.  Raises UserError for stochastic rounding if a parameter is sharded in an unknown way.
    """

    algorithm = "AdamW"
    supports_found_inf = True

    def __init__(
        self,
        params: Any,
        names: Mapping[int, str],
        seed: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype,
        stochastic: bool,
    ) -> None:
        name = str(state_dtype).removeprefix("torch.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "state_dtype": name, "capturable": True}
        super().__init__(params, defaults)
        self._state_dtype, self._stochastic = state_dtype, stochastic
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._positions = {id(p): _shard_position(p, names[id(p)], seed) if stochastic else (0, 0) for p in parameters}
        """See `_shard_position`."""
        self._stacked: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Perform one step for all parameters that have a gradient.  No collectives."""
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if with_gradient:
                self._step_group(group, with_gradient)

    def _step_group(self, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self._state_of(p) for p in parameters]
        step_counts = [state["step"] for state in states]
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        torch._foreach_add_(step_counts, 1)
        if found_inf is not None:  # as a list, because a tensor as the scalar argument would cause a host sync
            torch._foreach_sub_(step_counts, [found_inf] * len(step_counts))
        steps = torch.stack(step_counts)
        scalars = _step_scalars(group, steps, found_inf, grad_scale)
        positions = self._shard_positions(parameters, steps.device)
        origins = torch.cat([hash_keys(positions[:, 0], steps)[:, None], positions[:, 1:]], dim=1)
        for p, state, row, origin in zip(parameters, states, scalars.unbind(), origins.unbind(), strict=True):
            if not local(p).numel():
                continue  # but it still has a state, since checkpoints compare states across ranks
            names = [*CODES, *(f"{name}{SCALE}" for name in CODES if f"{name}{SCALE}" in state)]
            tensors = [_flat(tensor) for tensor in (p, p.grad, *(state[name] for name in names))]
            _update_by_pieces(tensors, row, origin, self._stochastic)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            length = block_length(parameter.shape) if self._state_dtype == torch.int8 else None
            for name, code in CODES.items():
                uncoded_dtype = torch.float32 if self._state_dtype == torch.int8 else self._state_dtype
                state[name] = torch.zeros_like(parameter.detach(), dtype=code.dtype if length else uncoded_dtype)
                if length:
                    state[f"{name}{SCALE}"] = _zero_scales(parameter, length)
        return state

    def _shard_positions(self, parameters: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the seed and the position of each shard, int32, copied to the device once.  See `random_bits`.

        (P, 4) if all shards are contiguous, else (P, 8): each row starts at a multiple of 16 bytes, as compiled kernels
        require.
        """
        key = tuple(id(p) for p in parameters)
        if key not in self._stacked:
            positions = [self._positions[number] for number in key]
            width = 8 if any(len(position) > 2 for position in positions) else 4
            rows = [(*position, *_CONTIGUOUS[len(position) - 2 : width - 2]) for position in positions]
            self._stacked[key] = torch.tensor(rows, dtype=torch.int32, device=device)
        return self._stacked[key]


_CONTIGUOUS_WIDTH = 4
"""Width of the rows of `_shard_positions` if all shards are contiguous."""
_CONTIGUOUS = (0, 0, 1, 0, 0, 0)
"""Entries after the seed and the first position for a contiguous shard; see `random_bits`."""


def _shard_position(parameter: torch.Tensor, name: str, seed: int) -> tuple[int, ...]:
    """Return the seed of a parameter's bits, and this shard's position in the full tensor; int32, wrapped.

    The second number is the position of the shard's first element.  A non-contiguous shard consists of runs of equal
    length; two zeros, the length of a run and the number of elements between two runs then follow.
    """
    box, shape = local_box(parameter), parameter.shape
    if box is None:
        rule = f"{name} is sharded in an unknown way, and random bits depend on the positions of its elements"
        raise setting_error("optim.rounding", "stochastic", rule, "nearest")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(max(1, len(shape)))]
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    position = seed_of(seed, name) % 2**32 - 2**31, _wrap_int32(first)
    divided = [dim for dim, span in enumerate(box) if dim and span != (0, shape[dim])]
    if not divided or all(stop - start == 1 for start, stop in box[: divided[0]]):
        return position
    (dim,) = divided
    run, full = ((stop - start) * strides[dim] for start, stop in (box[dim], (0, shape[dim])))
    return (*position, 0, 0, max(1, run), _wrap_int32(full - run))


def _wrap_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _step_scalars(
    group: Mapping[str, Any],
    steps: torch.Tensor,
    found_inf: torch.Tensor | None,
    grad_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scalars for each parameter's step: float32 of shape (P, 12), computed on the device of `steps`.

    Padded to 12, so that each row starts at a multiple of 16 bytes, as compiled kernels require.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    # 1 - beta^t, accurate for beta near 1: computed directly in float32, the relative error would be 2e-5.
    corrections = [-torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps) for beta in (beta1, beta2)]
    fixed = (1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"])
    is_update = torch.ones_like(steps) if found_inf is None else (1 - found_inf).expand_as(steps)
    scale = torch.ones_like(steps) if grad_scale is None else grad_scale.reciprocal().expand_as(steps)
    columns = [lr / corrections[0], corrections[1].rsqrt(), *(torch.full_like(steps, n) for n in fixed), is_update]
    columns += [scale, *[torch.zeros_like(steps)] * (_NUM_COLUMNS - len(columns) - 1)]
    return torch.stack(columns, dim=1)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the elements of this rank's shard, flattened."""
    assert tensor is not None
    return local(tensor).detach().view(-1)


def _update(tensors: list[torch.Tensor], scalars: torch.Tensor, origin: torch.Tensor, stochastic: bool) -> None:
    """Update N elements of a parameter and its two moments in place.

    tensors: parameter, gradient, and the averages of the gradient and of its square; if these are one-byte codes, also
    the scales of their blocks.  scalars: (12,), see `_step_scalars`.  origin: (4,), see `random_bits`.
    """
    parameter, _, mean, square, *scales = tensors
    step_size, inverse_root, decay, gain1, keep2, gain2, eps, is_update, scale, *_ = scalars.unbind()
    p, g = parameter.float(), tensors[1].float()
    m, v = (
        (
            code.decode(moment.view(scale.shape[0], -1), scale).view(-1)
            for moment, scale, code in zip((mean, square), scales, CODES.values(), strict=True)
        )
        if scales
        else (mean.float(), square.float())
    )
    g = scale * g
    new_m = m + gain1 * (g - m)
    new_v = keep2 * v + gain2 * g * g
    new_p = decay * p - step_size * new_m / (new_v.sqrt() * inverse_root + eps)
    bits = random_bits(origin, parameter.shape[0])
    # Each needs 16 random bits, so 32 are enough for two tensors.
    updates = [(parameter, p, new_p, bits), (mean, m, new_m, bits >> 16), (square, v, new_v, hash_int32(bits))]
    for scale, code in zip(scales, CODES.values(), strict=False):
        moment, _, after, own_bits = updates.pop(1)
        own_bits = own_bits if stochastic else torch.full_like(own_bits, 0x8000)
        shape = (scale.shape[0], -1)
        codes, new_scale = code.encode(after.view(shape), own_bits.view(shape))
        moment.copy_(torch.where(is_update > 0, codes.view(-1), moment))
        scale.copy_(torch.where(is_update > 0, new_scale, scale))
    for tensor, before, after, own_bits in updates:
        value = torch.where(is_update > 0, after, before)
        is_rounded = stochastic and tensor.dtype == torch.bfloat16
        tensor.copy_(round_stochastically(value, own_bits) if is_rounded else value)


def _update_by_pieces(
    tensors: list[torch.Tensor], scalars: torch.Tensor, origin: torch.Tensor, stochastic: bool
) -> None:
    """Update whole shards of shape (N,); on a GPU, use a compiled kernel.  See `_update`."""
    device, count = origin.device.type, tensors[0].numel()
    update: Callable[..., None] = _update
    if device == "cuda":
        # Clone: views at different offsets of one tensor would cause recompilation.
        update, scalars, origin = _compiled_update(), scalars.clone(), origin.clone()
    length = count // tensors[4].numel() if len(tensors) > 4 else 1  # of a block, which is never divided
    step = _PIECE_ELEMENTS[device] // length * length
    for start in range(0, count, step):
        piece = slice(start, min(count, start + step))
        piece_origin = _advance(origin, start) if start else origin
        blocks = slice(piece.start // length, piece.stop // length)
        pieces = [tensor[piece] for tensor in tensors[:4]] + [scales[blocks] for scales in tensors[4:]]
        update(pieces, scalars, piece_origin, stochastic)


def _advance(origin: torch.Tensor, start: int) -> torch.Tensor:
    """Return the origin of a shard's elements from index `start` on; see `random_bits`."""
    if len(origin) <= _CONTIGUOUS_WIDTH:
        return torch.stack((origin[0], origin[1] + start))
    return torch.cat((origin[:2], origin[2:3] + start, origin[3:]))


@cache
def _compiled_update() -> Callable[..., None]:
    """Compile `_update` into one kernel that reads and writes each element once, instead of about fifty kernels.

    For each combination of dtypes, one graph serves shards of all sizes.  Tensors are flat: with more
    dimensions, each element's position would require 64-bit divisions.
    """
    compiled: Callable[..., None] = torch.compile(_update, dynamic=True, fullgraph=True)

    def update(*arguments: Any) -> None:
        # Several models of several dtypes in one process can need more graphs than the default limit.
        with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
            compiled(*arguments)

    return update


# ---------------------------------------------------------------------------------------------------------------
# Stochastic rounding to bfloat16, with random bits that do not depend on the mesh
#
# A bfloat16 has 8 bits of precision: an update of less than half the distance to the next number, about 1/500 of the
# weight, is lost when rounding to nearest.  Rounding up or down at random, with the probability that makes the mean
# exact, preserves it on average.  The bits are a hash of the element's position and the step, not the output of a
# stateful generator: every rank draws the same bits for an element, and a resumed run draws the same bits as an
# uninterrupted one.
#
# Sources: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551; Zamirai et al. 2020,
# "Revisiting BFloat16 Training", arXiv:2010.06192; for bits that are a function of a counter, Salmon et al. 2011,
# "Parallel Random Numbers: As Easy as 1, 2, 3".

_GOLDEN = 0x9E3779B9 - 2**32
"""2**32 divided by the golden ratio, as an int32: spreads consecutive numbers evenly."""


def hash_int32(words: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32: a bijection in which each input bit flips each output bit with probability one half.

    Products wrap around.  The constants are `lowbias32` of C.  Wellons' hash prospector,
    https://nullprogram.com/blog/2018/07/31/.
    """
    words = (words ^ _shift_right(words, 16)) * 0x7FEB352D
    words = (words ^ _shift_right(words, 15)) * (0x846CA68B - 2**32)
    return words ^ _shift_right(words, 16)


def _shift_right(words: torch.Tensor, by: int) -> torch.Tensor:
    """Return the logical right shift of int32; torch's own shift is arithmetic."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def hash_keys(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the key of each parameter's bits (int32) from its seed (int32) and the step number."""
    return hash_int32(hash_int32(seeds) + steps.to(torch.int32) * _GOLDEN)


def random_bits(origin: torch.Tensor, count: int) -> torch.Tensor:
    """Return 32 random bits for each of `count` consecutive elements of a tensor: int32 of shape (count,).

    `origin`: int32, the key, and the row-major position of the first element in the full tensor.  For elements of a
    shard that consists of runs, it has 8 entries: the key, the position of the shard's first element, the number of the
    first element in the shard, 0, the length of a run, and the number of elements between two runs.  Positions wrap
    around.
    """
    numbers = torch.arange(count, dtype=torch.int32, device=origin.device)
    if len(origin) > _CONTIGUOUS_WIDTH:
        numbers = origin[2] + numbers
        numbers = numbers + torch.div(numbers, origin[4], rounding_mode="floor") * origin[5]
    return hash_int32(((origin[1] + numbers) * _GOLDEN) ^ origin[0])


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 `values` to bfloat16, up or down, so that the expected result is the value.

    `bits`: int32, whose lower 16 bits are used.  Values that bfloat16 can represent do not change, nor do infinities
    and NaN; values beyond the largest finite number may round to infinity, as when rounding to nearest.  Denormals need
    no special case: there, too, consecutive numbers differ by one in the upper half of the word.
    """
    # The upper half of a float32 is the value truncated to bfloat16; the lower half is the fraction to the next one.
    rounded = ((values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
