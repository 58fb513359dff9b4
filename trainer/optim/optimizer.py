"""Optimizers and learning-rate schedules.

An `Optimizer` wraps torch optimizers that step together, such as Muon for the hidden matrices and AdamW for the rest.
The scheduled learning rate is a pure function of the step, so that a resumed run can change the schedule or the number
of steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config.schema import OptimSection, RunConfig, ScheduleSection
from trainer.errors import setting_error
from trainer.model.mup import Growth
from trainer.model.parameters import local
from trainer.optim.adamw import FusedAdamW, RoundingAdamW
from trainer.optim.blockwise import block_length
from trainer.optim.groups import Assignment, assign, block_rows, matrices_for_muon
from trainer.optim.muon import Muon


class Optimizer:
    """One or more torch optimizers over disjoint parameters, stepped together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.step_listeners: list[Callable[[torch.Tensor | None], None]] = []
        """Functions that are called after each step; they must not block on the device.

        The argument is a scalar that is false if the step was skipped, or None if that was not checked."""
        self.notes: list[str] = []
        """Lines about the parameter groups, printed when the run starts."""

    @classmethod
    def of(cls, built: Optimizer | torch.optim.Optimizer) -> Optimizer:
        """Wrap what `Trainer.build_optimizer` returned, which may be a plain torch optimizer."""
        return built if isinstance(built, Optimizer) else cls(built)

    @property
    def lr(self) -> float:
        """The learning rate of the first group, including that group's `lr_scale`."""
        return float(self.parts[0].param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group; a group's `lr_scale`, if any, multiplies it."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return every group's settings, without its parameters."""
        return [{k: v for k, v in g.items() if k != "params"} for part in self.parts for g in part.param_groups]

    @torch.no_grad()  # with autograd, taking the shard of a gradient costs 5 us more
    def step(self, is_finite: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> None:
        """Update the parameters with their gradients times the scalar `scale`, which is the same on all ranks.

        This may scale the gradients in place.  If the scalar `is_finite`, the same on all ranks, is false, weights and
        states do not change.  AdamW and Muon check it on the device, and on a GPU they also apply `scale`, since they
        read the gradients anyway; elsewhere gradients are multiplied first.  With any other optimizer, or with
        offloaded parameters, checking `is_finite` needs a host sync.
        """
        for part in self.parts:
            checks_on_device = getattr(part, "supports_found_inf", False)
            if not checks_on_device and is_finite is not None and not is_finite:
                continue
            # Not on the CPU: the kernel divides by the inverse of `scale`, which is not bit-identical, and resumed runs
            # must continue bit-identically.
            scales_on_device = checks_on_device and _device_of(part).type != "cpu"
            if scale is not None and not scales_on_device:
                gradients = [
                    local(p.grad) for group in part.param_groups for p in group["params"] if p.grad is not None
                ]
                if gradients:
                    torch._foreach_mul_(gradients, scale.to(_device_of(part)))
            if checks_on_device:
                step_on_device(part, is_finite, scale if scales_on_device else None)
            else:
                part.step()
        for listener in self.step_listeners:
            listener(is_finite)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def _device_of(part: torch.optim.Optimizer) -> torch.device:
    return local(part.param_groups[0]["params"][0]).device


def step_on_device(part: torch.optim.Optimizer, is_finite: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    """Step with the attributes that the fused kernel reads: `found_inf`, and `grad_scale`, which divides gradients.

    These follow torch.amp.GradScaler.  They are copied to the parameters' device before the step, since torch itself
    would not wait for the copy.
    """
    device = _device_of(part)
    values = {
        "found_inf": None if is_finite is None else ~is_finite,
        "grad_scale": None if scale is None else 1 / scale,
    }
    attributes = {name: value.float().to(device) for name, value in values.items() if value is not None}
    for name, value in attributes.items():
        setattr(part, name, value)
    try:
        part.step()
    finally:
        for name in attributes:
            delattr(part, name)


def build_optimizer(
    model: nn.Module,
    config: OptimSection,
    seed: int = 0,
    blocks: Mapping[str, int | Sequence[int]] | None = None,
    growth: Mapping[str, Growth] | None = None,
) -> Optimizer:
    """Build the configured optimizer for the trainable parameters of `model` (DTensors or plain tensors).

    seed: the seed of stochastic rounding.
    blocks: see `ModelSpec.blocks`.
    growth: see `assign`.

    Raises UserError if there is nothing to train, or if `optim.groups` does not fit the model.
    """
    assignments = assign(model, config, growth)
    if not assignments:
        raise setting_error("model.name", type(model).__name__, "the model has no trainable parameter")
    if config.name == "muon" and not any(each.optimizer == "muon" for each in assignments):
        has_matrices = any(id(each.parameter) in matrices_for_muon(model) for each in assignments)
        rule = "optim.groups leaves it no parameter" if has_matrices else "the model has no hidden matrices for it"
        raise setting_error("optim.name", "muon", rule, "adamw")
    parts = []
    for name in sorted({each.optimizer for each in assignments}, key=_ORDER.index):
        members = [each for each in assignments if each.optimizer == name]
        parts.append(_build(name, members, config, seed, block_rows(model, blocks or {})))
    optimizer = Optimizer(*parts)
    if overlapping := [each.name for each in assignments if len(each.matching_groups) > 1]:
        which = overlapping[0] if len(overlapping) == 1 else f"{len(overlapping)} parameters"
        optimizer.notes.append(f"matched by several groups (the last one takes effect): {which}")
    return optimizer


_ORDER = ("muon", "sgd", "adamw")
"""Order of the torch optimizers in an `Optimizer`, and so in checkpoints."""


def optimizer_state_sizes(model: nn.Module, config: OptimSection) -> dict[int, tuple[int, float]]:
    """Return the size of the configured optimizer's state for each parameter, by the parameter's id.

    The size is a pair: the number of tensors of the parameter's shape, and the bytes per element of each, including the
    scales of 8-bit ones.
    """
    assignments = assign(model, config)
    needs_rounding = _needs_rounding([each.parameter for each in assignments if each.optimizer == "adamw"], config)
    num_tensors = {"adamw": 2, "muon": 1, "sgd": int(config.momentum > 0)}
    sizes: dict[int, tuple[int, float]] = {}
    for each in assignments:
        size: float = each.parameter.element_size()
        if each.optimizer == "adamw" and config.state_dtype == "int8":
            length = block_length(each.parameter.shape)
            size = 4 if length is None else 1 + 4 / length
        elif each.optimizer == "adamw" and needs_rounding:
            size = getattr(torch, config.state_dtype).itemsize
        sizes[id(each.parameter)] = num_tensors[each.optimizer], size
    return sizes


EMA_ELEMENT_SIZE = 4
"""Bytes per element of the average of the weights (EMA)."""


def training_bytes(model: nn.Module, config: OptimSection, has_average: bool = False) -> tuple[int, int, int]:
    """Return this rank's bytes of weights, gradients, and persistent state (optimizer state and weight average)."""
    moments = optimizer_state_sizes(model, config)
    weights = gradients = persistent = 0
    for parameter in model.parameters():
        numel, size = local(parameter).numel(), parameter.element_size()
        num_moments, moment_size = moments.get(id(parameter), (0, 0))
        weights += numel * size
        gradients += numel * size * parameter.requires_grad
        average_size = EMA_ELEMENT_SIZE * (parameter.requires_grad and has_average)
        persistent += int(numel * (num_moments * moment_size + average_size))
    return weights, gradients, persistent


def _needs_rounding(parameters: list[nn.Parameter], config: OptimSection) -> bool:
    """Return whether AdamW must round its results; if not, torch's fused implementation is used."""
    return config.state_dtype != "float32" or any(p.dtype == torch.bfloat16 for p in parameters)


def _build(
    name: str,
    members: list[Assignment],
    config: OptimSection,
    seed: int,
    blocks: Mapping[int, Sequence[int]],
) -> torch.optim.Optimizer:
    groups = _groups(members, config.peak_lr)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=config.peak_lr, momentum=config.momentum, foreach=True)
    if name == "muon":
        muon = config.muon
        return Muon(
            groups,
            config.peak_lr,
            momentum=config.momentum,
            variant=muon.variant,
            scale=muon.scale,
            dtype=getattr(torch, muon.dtype),
            bucket_bytes=muon.bucket_mib * 2**20,
            blocks=blocks,
        )
    if _needs_rounding([each.parameter for each in members], config):
        names = {id(each.parameter): each.name for each in members}
        return RoundingAdamW(
            groups,
            names=names,
            seed=seed,
            lr=config.peak_lr,
            betas=config.betas,
            eps=config.eps,
            state_dtype=getattr(torch, config.state_dtype),
            stochastic=config.rounding == "stochastic",
        )
    return FusedAdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(members: Sequence[Assignment], lr: float) -> list[dict[str, Any]]:
    """Return torch's parameter groups, one for each weight decay and scale of the learning rate."""
    by_settings: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for each in members:
        by_settings[each.weight_decay, each.lr_scale].append(each.parameter)
    groups = []
    for (decay, scale), parameters in by_settings.items():
        group = {"params": parameters, "weight_decay": decay}
        groups.append(group if scale == 1 else {**group, "lr": lr * scale, "lr_scale": scale})
    return groups


class Schedule:
    """The learning rate at every step: a linear warmup, then the named shape, at or above `min_lr_ratio` of the peak.

    The shape `range` has neither a warmup nor a floor.
    """

    def __init__(self, config: RunConfig) -> None:
        self.peak = config.optim.peak_lr
        self.num_steps = config.train.steps
        self.section: ScheduleSection = config.schedule

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 1."""
        section, warmup = self.section, self.section.warmup(self.num_steps)
        if section.name == "range":
            first, last = section.lr_range
            return float(first * (last / first) ** ((step - 1) / max(1, self.num_steps - 1)))
        if step <= warmup:
            return self.peak * step / warmup
        return self.peak * (section.min_lr_ratio + (1 - section.min_lr_ratio) * self._relative_height(step))

    def _relative_height(self, step: int) -> float:
        """Return the height between floor (0) and peak (1) after the warmup.

        The last step is at the floor.  If the floor is zero, that step would change nothing, and a run of one step
        would train nothing at all; the decay is then one step longer, and reaches zero just after the last step.

        wsd (warmup, stable, decay): Hu et al. 2024, arXiv:2404.06395; its decay is linear, over a fraction of the run.
        """
        name, warmup = self.section.name, self.section.warmup(self.num_steps)
        extra = int(self.section.min_lr_ratio == 0)
        steps_left = max(0, self.num_steps + extra - step)
        fraction_left = steps_left / max(1, self.num_steps + extra - warmup)
        if name == "cosine":
            return 0.5 * (1 - math.cos(math.pi * fraction_left))
        if name == "linear":
            return fraction_left
        if name == "wsd" and self.section.decay_ratio > 0:
            return min(1.0, steps_left / (self.section.decay_ratio * self.num_steps + extra))
        return 1.0
