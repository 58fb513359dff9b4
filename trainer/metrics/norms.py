"""Logs the gradient norm and the weight norm of each unit (layer) every `log.norms_every` steps.

Other steps compute nothing.  The host never waits for the device before the end of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.schema import LogSection
from trainer.data.transfer import HostScalars
from trainer.metrics.hub import Metrics
from trainer.metrics.record import Record
from trainer.model.parameters import local
from trainer.model.units import ShardUnit, parameters_by_unit


class UnitNorms:
    """Computes and logs the norms of each unit.  Runs after the optimizer step and observes training steps."""

    def __init__(
        self,
        log: LogSection,
        model: nn.Module,
        units: Sequence[ShardUnit],
        mesh: DeviceMesh,
        metrics: Metrics,
        grad_norm: Callable[[], float],
    ) -> None:
        """`grad_norm()` returns the global gradient norm before clipping of the step that has just ended."""
        self._log, self._mesh, self._metrics = log, mesh, metrics
        self._parameters = parameters_by_unit(model, units)
        self._grad_norm = grad_norm
        self._is_due = False
        self._found: HostScalars | None = None

    def begin_step(self, step: int) -> None:
        self._is_due = self._log.norms_every > 0 and step % self._log.norms_every == 0

    def after_step(self, is_finite: torch.Tensor | None = None) -> None:
        """Start computing the norms if they are due in this step.  Collective in that case: one all-reduce over the
        `shard` axis.
        """
        if self._is_due:
            self._found = HostScalars(*self._squares())

    @torch.no_grad()
    def _squares(self) -> list[torch.Tensor]:
        """Return the squared norms over all ranks: first of each unit's gradients, then of each unit's weights."""
        device = torch.device(self._mesh.device_type)
        units = self._parameters.values()
        gradients = [_square([p.grad for p in own if p.grad is not None], device) for own in units]
        squares = torch.stack([*gradients, *(_square(own, device) for own in units)])
        if self._mesh.size(self._mesh.ndim - 1) > 1:
            dist.all_reduce(squares, group=self._mesh.get_group(self._mesh.ndim - 1))
        return list(squares.unbind())

    def end_step(self, step: int) -> None:
        """Write the norms record if norms were due in this step.  Waits for the device in that case."""
        if self._found is None:
            return
        norms, self._found = [math.sqrt(square) for square in self._found.read()], None
        gradients, weights = norms[: len(self._parameters)], norms[len(self._parameters) :]
        clipped = math.sqrt(sum(norm**2 for norm in gradients))
        scale = self._grad_norm() / clipped if clipped else 1.0  # clipping scales all gradients by the same factor
        self._metrics.write(
            Record(
                kind="norms",
                step=step,
                grad_norm=self._by_unit([scale * norm for norm in gradients]),
                param_norm=self._by_unit(weights),
            )
        )

    def _by_unit(self, norms: Sequence[float]) -> dict[str, float | None]:
        finite = (norm if math.isfinite(norm) else None for norm in norms)
        return dict(zip(self._parameters, finite, strict=True))


def _square(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares over this rank's shards as a scalar on `device`, in float32."""
    if not tensors:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(local(tensor.detach()), dtype=torch.float32) for tensor in tensors]
    return torch.stack(norms).to(device).square().sum()
