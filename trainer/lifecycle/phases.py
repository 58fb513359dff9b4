"""Detects the phases of a step by hooks on the model and the optimizers, so that custom train steps work too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

IN_STEP = ("data", "forward", "backward", "reduce", "optimizer")
"""Phases of a step, in order.  Other phases: start, evaluate, save, profile and between steps."""


class PhaseTracker(Protocol):
    """Tracks the phase of this rank; implemented by the watchdog."""

    phase: str

    def enter(self, phase: str) -> None: ...
    def begin_forward(self) -> None: ...


def watch_phases(tracker: PhaseTracker, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Register hooks on the model and the optimizers that report the phases of a step to `watched`."""

    def before_forward(module: nn.Module, inputs: Any) -> None:
        tracker.begin_forward()

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if tracker.phase == "forward" and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(in_backward)

    def in_backward(gradient: torch.Tensor) -> None:
        if tracker.phase == "forward":
            tracker.enter("backward")
            torch.autograd.Variable._execution_engine.queue_callback(after_backward)

    def after_backward() -> None:
        if tracker.phase == "backward":
            tracker.enter("reduce")

    def before_optimizer(*_: Any) -> None:
        if tracker.phase in IN_STEP:
            tracker.enter("optimizer")

    # Before FSDP's hook, which all-gathers and waits.
    model.register_forward_pre_hook(before_forward, prepend=True)
    model.register_forward_hook(after_forward)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before_optimizer)
