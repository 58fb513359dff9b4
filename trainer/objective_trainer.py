"""Trains with objectives that return one loss per sample, by computing their inputs and summing their losses.

An objective is called with the inputs for one micro-batch at a time (`trainer.objective.ObjectiveInputs`), and knows
nothing of the mesh, loss scaling or collectives.  The only global value that it receives is `mean_statistic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.loader import Batch
from trainer.data.transfer import prefetch_to_device
from trainer.errors import setting_error
from trainer.experts import find_balance
from trainer.loss import IGNORE, by_row, find_loss, loss_mode
from trainer.metrics.record import Record
from trainer.model.gradients import reshard
from trainer.model.lora import without_adapters
from trainer.objective import ObjectiveInputs, log_nothing
from trainer.sequence import sum_over_slices
from trainer.trainer import Trainer
from trainer.weights.adapters import REFERENCE
from trainer.weights.loading import load_base


class ObjectiveTrainer(Trainer):
    """Trains a model with an objective that returns one loss per sample, such as DPO, a reward loss or classification.

    The loss is the mean over the samples of the global batch.  The reference model, if any, has the initial weights.
    With adapters, it is the same model with the adapters disabled; otherwise it is a second, frozen model, sharded like
    the first.
    """

    takes_objectives = True
    """True if the Trainer computes the inputs of objectives other than next-token prediction."""

    def __init__(self, config: RunConfig) -> None:
        self.reference: nn.Module | None = None
        self._mean_statistic: torch.Tensor | None = None
        """The mean of the objective's statistic, if it has one, during a step or an evaluation; otherwise None."""
        super().__init__(config)
        if self.reference is not None:
            with self.world.building():
                self.state.add(REFERENCE, load_base(self.reference, self.config, self.world))

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        """Return the sharded model for `config` (default: this run's).

        The run's own model is built after its reference model, if that is a separate model.  Collective.
        """
        if config is None and self.config.has_reference_model:
            self.reference = super().build_model(self.config).requires_grad_(False).eval()
        model = super().build_model(config)
        balance = find_balance(model)
        if balance is not None:  # load-balancing losses are sums over tokens, so a loss per sample cannot include them
            balance.loss = balance.sequence_loss = balance.z_loss = 0.0
        return model

    def count(self, batch: Batch) -> float:
        """Return the number of samples in the batch, excluding padding (samples without targets)."""
        return int(self._sample_mask(batch).sum())

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss summed over the batch's samples.

        Collectives: those of the model's forward pass, then those of the reference model's, if the objective needs one.
        If the objective has a statistic, the first call in an evaluation also averages it (see `evaluate`).
        """
        objective, mask_S = self.config.objective, self._sample_mask(batch)
        if objective.has_statistic and self._mean_statistic is None:  # the first batch of an evaluation
            assert self.eval_loader is not None
            self._mean_statistic = self._compute_mean_statistic(self.eval_loader)
        num_samples = mask_S.sum()

        def log(name: str, values_S: torch.Tensor, over: torch.Tensor | None = None) -> None:
            over_S = mask_S if over is None else over & mask_S
            self.log(name, values_S.where(over_S, 0.0).sum(), over=num_samples if over is None else over_S.sum())

        return objective(self._objective_inputs(batch, log=log)).where(mask_S, 0.0).sum()

    @contextmanager
    def global_sums(self, micro_batches: Sequence[Batch]) -> Iterator[None]:
        """Compute the objective's mean statistic over the global batch, for calls of `loss` inside the block.

        Collectives, if the objective has a statistic: those of one more call of `loss` per micro-batch, without
        gradients, and a small all-reduce.
        """
        if self.config.objective.has_statistic:
            self._mean_statistic = self._compute_mean_statistic(micro_batches)
        try:
            with super().global_sums(micro_batches):
                yield
        finally:
            self._mean_statistic = None

    def evaluate(self) -> Record | None:
        """Return and log the mean loss over the held-out samples; see `Trainer.evaluate`.

        The objective's statistic, if it has one, is first averaged over all held-out samples, in an additional pass.
        """
        try:
            return super().evaluate()
        finally:
            self._mean_statistic = None

    @torch.no_grad()
    def _compute_mean_statistic(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Return the objective's statistic, averaged over the samples of all ranks' batches.  Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for batch in prefetch_to_device(batches, self.world.device):
            mask_S = self._sample_mask(batch)
            values_S = self.config.objective.statistic(self._objective_inputs(batch))
            sums += torch.stack([values_S.where(mask_S, 0.0).sum(), mask_S.sum()])
        total, count = self.world.sum_on_device(sums)
        return total / count.clamp(min=1)

    def _objective_inputs(self, batch: Batch, log: Callable[..., None] = log_nothing) -> ObjectiveInputs:
        """Return the objective's inputs for a batch.  Raises UserError if the model does not return a loss per row."""
        needs = self.config.objective.needs
        with loss_mode(self.config):
            outputs = super().loss(batch)  # each row's loss, (R,), or its scores at the last target, (R, outputs)
        self._check_rows(batch, outputs)
        outputs = sum_over_slices(outputs)  # scores need complete rows, which are not sliced
        return ObjectiveInputs(
            logps=torch.empty(0) if "scores" in needs else -outputs,
            lengths=_num_targets(batch).clamp(min=1),
            reference=self._reference_logps(batch) if "reference" in needs else None,
            labels=batch["labels"] if "labels" in needs else None,
            scores=outputs if "scores" in needs else None,
            mean_statistic=self._mean_statistic,
            log=log,
        )

    def _reference_logps(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each row's targets under the reference model, (R,)."""
        with torch.no_grad(), by_row():
            if self.reference is None:
                with _eval_mode(self.model), without_adapters(self.model):
                    return -sum_over_slices(super().loss(batch))
            losses_R = find_loss(self.reference)(batch)
            reshard(self.reference)
            return -sum_over_slices(losses_R)

    def _check_rows(self, batch: Batch, values: torch.Tensor) -> None:
        """Raise UserError if the model did not compute its loss with the functions of trainer.loss."""
        if values.shape[:1] != batch["tokens"].shape[:1]:
            name = self.spec.name
            objective = self.config.train.objective
            rule = f"model {name!r} sums the loss over all rows itself, but {objective} needs the loss of each row"
            fix = "compute it with trainer.linear_cross_entropy, or have the model return logits"
            raise setting_error("train.objective", objective, rule, fix=fix)

    def _sample_mask(self, batch: Batch) -> torch.Tensor:
        """Return a mask of the samples whose first row has targets, (S,); padding has none."""
        mask_R = _num_targets(batch) > 0
        return mask_R[:: self.config.objective.rows_per_sample]


def _num_targets(batch: Batch) -> torch.Tensor:
    """Return the number of targets in each complete row of a batch, (R,), of which this rank may hold slices."""
    return batch["targets_per_row"] if "targets_per_row" in batch else (batch["targets"] != IGNORE).sum(1)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, which disables dropout, inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
