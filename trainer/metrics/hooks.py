"""The hooks that log the norms of each FSDP unit, generate samples and schedule garbage collection.

The profiling hook is in `profile.py`.  `loss_by_source`, which is not a hook, logs the loss of each source in a
mixture.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.schema import LogSection, RunConfig
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.mixture import SOURCE, MixedSource
from trainer.data.prompts import chat_prompt_tokens, chat_stop_ids, prompt_tokens
from trainer.data.tokenizer import find_tokenizer
from trainer.data.transfer import HostScalars
from trainer.distributed.world import World
from trainer.hooks import Hook
from trainer.loss import IGNORE, row_losses
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import Amount, Update
from trainer.metrics.writers import Metrics
from trainer.model.gradients import sum_of_squares
from trainer.model.sample import Sampling, generate_batch
from trainer.model.units import ShardUnit, parameters_by_unit
from trainer.optim.ema import WeightAverage

_HISTORY, _MIN_HISTORY = 100, 20
"""Number of steps whose median is the usual gradient norm: at most, and at least."""
_FAR, _NUM_FAR = 4.0, 3
"""The norm is unusual if it is this many times the usual one, in this many steps in a row."""
_CLIPPED, _NUM_CLIPPED = 2.0, 5
"""Clipping is unusual if the norm is this many times `optim.max_grad_norm`, in this many steps in a row."""
_PAUSE = 100
"""Number of steps after which unusual norms are examined again."""
_DOMINANT, _MIN_UNITS = 0.9, 3
"""Fraction of the squared norm above which a unit dominates it, in a model with at least this many units."""


class NormWatch:
    """Finds steps in which the global gradient norm is unusually large: the same steps on all ranks, like the norm."""

    def __init__(self, max_norm: float | None) -> None:
        """`max_norm`: `optim.max_grad_norm`."""
        self._max_norm = max_norm
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._num_far = self._num_clipped = self._num_to_wait = 0

    def add(self, norm: float) -> None:
        """Add the norm of a step, before clipping."""
        if not math.isfinite(norm):
            return
        self._num_to_wait -= self._num_to_wait > 0
        is_far = len(self._history) >= _MIN_HISTORY and norm > _FAR * statistics.median(self._history)
        self._num_far = self._num_far + 1 if is_far else 0
        is_clipped = self._max_norm is not None and norm > _CLIPPED * self._max_norm
        self._num_clipped = self._num_clipped + 1 if is_clipped else 0
        self._history.append(norm)

    def take_alarm(self) -> str:
        """Return what is unusual; empty if nothing is, or if it was returned within the last `_PAUSE` steps."""
        if self._num_to_wait:
            return ""
        if self._num_far >= _NUM_FAR:
            alarm = f"is above {_FAR:g} times its usual value ({statistics.median(self._history):.3g})"
        elif self._num_clipped >= _NUM_CLIPPED:
            alarm = f"has been above {_CLIPPED:g} times optim.max_grad_norm for {self._num_clipped} steps"
        else:
            return ""
        self._num_to_wait = _PAUSE
        return alarm


class UnitNorms(Hook):
    """Logs the gradient norm and the weight norm of each FSDP unit every `log.norms_every` steps.

    Also names the unit that dominates the global norm, once for each unit, when that norm is unusually large.  In other
    steps, nothing is computed.  Where norms are computed, the host waits for the device only at the end of the step.
    """

    def __init__(
        self,
        log: LogSection,
        model: nn.Module,
        units: Sequence[ShardUnit],
        mesh: DeviceMesh,
        metrics: Metrics,
        max_norm: float | None = None,
    ) -> None:
        """`max_norm`: `optim.max_grad_norm`."""
        self._log, self._mesh, self._metrics = log, mesh, metrics
        self._parameters = parameters_by_unit(model, units)
        self._is_due = False
        self._watch, self._alarm = NormWatch(max_norm), ""
        """What is unusual about the norms of the last steps; empty if nothing is."""
        self._named: set[str] = set()
        """The units that have been named."""
        self._num_late = 0 if mesh.device_type == "cpu" else 1
        self._unread: deque[Update] = deque()
        """The last steps, whose norms have not been examined: that of the very last one may still be on the device."""
        self._pending: HostScalars | None = None
        """Squared norms that the device is computing; None unless this step needs them."""

    def begin_step(self, step: int) -> None:
        while len(self._unread) > self._num_late:
            self._watch.add(self._unread.popleft().grad_norm)
        self._is_due = self._log.norms_every > 0 and step % self._log.norms_every == 0
        self._alarm = self._watch.take_alarm() if len(self._parameters) >= _MIN_UNITS else ""

    def after_update(self, is_finite: torch.Tensor | None) -> None:
        """If norms are due or examined in this step, start computing them: one all-reduce over the `shard` axis."""
        if self._is_due or self._alarm:
            self._pending = HostScalars(*self._squared_norms())

    @torch.no_grad()
    def _squared_norms(self) -> list[torch.Tensor]:
        """Return the squared norms over all ranks: each unit's gradients first, then each unit's weights."""
        device = torch.device(self._mesh.device_type)
        units = self._parameters.values()
        gradients = [sum_of_squares([p.grad for p in unit if p.grad is not None], device) for unit in units]
        squares = torch.stack([*gradients, *(sum_of_squares(unit, device) for unit in units)])
        if self._mesh.size(self._mesh.ndim - 1) > 1:
            dist.all_reduce(squares, group=self._mesh.get_group(self._mesh.ndim - 1))
        return list(squares.unbind())

    def end_step(self, step: int, update: Update) -> None:
        """If norms were computed in this step, wait for the device, write their record and name a dominant unit."""
        self._unread.append(update)
        if self._pending is None:
            return
        norms, self._pending = [math.sqrt(square) for square in self._pending.read()], None
        gradients, weights = norms[: len(self._parameters)], norms[len(self._parameters) :]
        clipped_norm = math.sqrt(sum(norm**2 for norm in gradients))
        if self._alarm and clipped_norm and math.isfinite(clipped_norm):
            self._name_dominant(step, [(norm / clipped_norm) ** 2 for norm in gradients])
        if not self._is_due:
            return
        # Clipping scales all gradients by the same factor, so this undoes it.
        scale = update.grad_norm / clipped_norm if clipped_norm else 1.0
        self._metrics.write(
            Record(
                kind="norms",
                step=step,
                grad_norm=self._by_unit([scale * norm for norm in gradients]),
                param_norm=self._by_unit(weights),
            )
        )

    def _name_dominant(self, step: int, shares: Sequence[float]) -> None:
        """Print the unit that dominates the norm, if there is one; shares: fractions of the squared norm by unit."""
        share, unit = max(zip(shares, self._parameters, strict=True))
        if share >= _DOMINANT and unit not in self._named:
            self._named.add(unit)
            self._metrics.print(
                f"warning: step {step}: {share:.1%} of the squared gradient norm come from {unit}, and the norm "
                f"{self._alarm}: look for damaged weights there; clipping holds back all other units",
                "yellow",
            )

    def _by_unit(self, norms: Sequence[float]) -> dict[str, float | None]:
        finite = (norm if math.isfinite(norm) else None for norm in norms)
        return dict(zip(self._parameters, finite, strict=True))


class Samples(Hook):
    """Completes `log.prompts`, or replies to them if the run trains on chats.

    The seed is fixed, so that samples from different steps are comparable.
    """

    def __init__(
        self, config: RunConfig, world: World, model: nn.Module, average: WeightAverage, metrics: Metrics
    ) -> None:
        self._config, self._world, self._model = config, world, model
        self._average, self._metrics = average, metrics

    @cached_property
    def _prompts(self) -> list[tuple[str, list[int]]]:
        """Each prompt with its tokens."""
        data = self._config.data
        if not self._config.log.prompts:
            return []
        if data.source == "chat":
            settings = (data.tokenizer, "log.prompts", data.chat_template, data.special_tokens)
            return [(text, chat_prompt_tokens(text, *settings)) for text in self._config.log.prompts]
        tokenizer = find_tokenizer(data.tokenizer)
        return [(text, prompt_tokens(text, tokenizer)) for text in self._config.log.prompts]

    @cached_property
    def _stop_ids(self) -> set[int]:
        """The tokens that end a document or an assistant's turn."""
        data = self._config.data
        if data.source == "chat":
            return chat_stop_ids(data.tokenizer, data.chat_template)
        return {find_tokenizer(data.tokenizer).end_id}

    def check(self) -> None:
        """Raise UserError for a prompt that cannot be tokenized, for example without a chat template."""
        assert len(self._prompts) == len(self._config.log.prompts)

    def after_evaluation(self, step: int) -> None:
        """Write a sample record for each prompt.  Collectives: those of `generate_batch`."""
        if not self._prompts:
            return
        config, tokenizer = self._config, find_tokenizer(self._config.data.tokenizer)
        with self._average.swapped_in():
            completions = generate_batch(
                self._model,
                [tokens for _, tokens in self._prompts],
                config.log.prompt_tokens,
                Sampling(),
                ends=self._stop_ids,
                context=config.data.seq_len,
                device=self._world.device,
            )
        for (prompt, _), completion in zip(self._prompts, completions, strict=True):
            text = tokenizer.decode([token for token in completion.tokens if token not in self._stop_ids])
            self._metrics.write(Record(kind="sample", step=step, prompt=prompt, text=text))


class CollectGarbage(Hook):
    """Collects garbage at the same steps on all ranks, since a collection on one rank delays all others."""

    EVERY, FULL_EVERY = 100, 1000
    """Steps between collections of the two younger generations, and of all generations."""

    def __init__(self) -> None:
        self._is_active = False

    def begin_step(self, step: int) -> None:
        if not self._is_active:
            self._is_active = True
            gc.collect()
            gc.disable()

    def end_step(self, step: int, update: Update) -> None:
        if step % self.FULL_EVERY == 0:
            gc.collect()
        elif step % self.EVERY == 0:
            gc.collect(1)

    def close(self, has_failed: bool) -> None:
        if self._is_active:
            self._is_active = False
            gc.enable()


Loss = Callable[[Batch], torch.Tensor]
Log = Callable[[str, Amount, Amount | None], None]


def loss_by_source(loss: Loss, loaders: Sequence[object], log: Log) -> Loss:
    """Return `loss` or, if a loader reads a mixture, a wrapper that also logs `loss_<source>` for each source.

    The cross-entropy functions of `trainer.loss` record the loss of each row.  If a model computes its loss in another
    way, the row losses are unknown and the fields are null.
    """
    sources = [loader.source for loader in loaders if isinstance(loader, (TrainLoader, EvalLoader))]
    mixture = next((source for source in sources if isinstance(source, MixedSource)), None)
    return loss if mixture is None else _LossBySource(loss, list(mixture.sources), log)


class _LossBySource:
    def __init__(self, loss: Loss, names: Sequence[str], log: Log) -> None:
        self._loss, self._fields, self._log = loss, [f"loss_{name}" for name in names], log

    def __call__(self, batch: Batch) -> torch.Tensor:
        if SOURCE not in batch:
            return self._loss(batch)
        with row_losses() as losses_B:
            loss = self._loss(batch)
        sources_B = batch[SOURCE]
        sums = torch.zeros(2, len(self._fields), dtype=torch.float64, device=sources_B.device)
        if len(losses_B) == 1 and losses_B[0].shape == sources_B.shape:
            counts_B = (batch["targets"] != IGNORE).sum(-1)
            sums.index_add_(1, sources_B, torch.stack([losses_B[0], counts_B.double()]))
        for index, field in enumerate(self._fields):
            self._log(field, sums[0, index], sums[1, index])
        return loss
