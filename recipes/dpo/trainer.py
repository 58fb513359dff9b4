"""The Trainer for direct preference optimisation (DPO)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import RunConfig
from trainer.data.loader import Batch
from trainer.errors import setting_error
from trainer.loss import IGNORE, by_row, find_loss
from trainer.model.gradients import reshard
from trainer.model.lora import without_adapters
from trainer.trainer import Trainer
from trainer.weights.adapters import REFERENCE
from trainer.weights.loading import load_base


class PreferenceTrainer(Trainer):
    """Trains a model to prefer chosen over rejected answers, relative to a reference model.

    Row 2i of a batch is the chosen answer to a prompt, and row 2i + 1 the rejected one; only target tokens count.  The
    loss of a pair is -log sigmoid(beta * ((c - c') - (r - r'))), where c and r are the log-probabilities of the chosen
    and the rejected answer, and c' and r' those under the reference.  With adapters, the reference is the model without
    them; otherwise it is a second, frozen copy of the initial weights, sharded like the model.

    Source: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290.
    """

    objective = "dpo"

    def __init__(self, config: RunConfig) -> None:
        self.reference: nn.Module | None = None
        super().__init__(config)
        if self.reference is not None:
            self.state.add(REFERENCE, load_base(self.reference, self.config, self.world))

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        """Return the sharded model; for the run's own model, build the reference first if it is a separate model."""
        if config is None and self.config.has_reference_model:
            self.reference = super().build_model(self.config).requires_grad_(False).eval()
        return super().build_model(config)

    def count(self, batch: Batch) -> float:
        """Return the number of pairs; padding rows, which have no targets, do not count."""
        return int(_pair_mask(batch).sum())

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss summed over the batch's pairs.

        Collectives: those of two forward passes, the reference's first.
        """
        with by_row():
            with torch.no_grad():
                reference_logprobs = self._reference_logprobs(batch)
            logprobs = -super().loss(batch)
        if logprobs.shape != batch["tokens"].shape[:1]:
            rule = f"recipe {self.recipe.name!r} sums the loss over all rows itself, but DPO needs the loss of each row"
            fix = "compute it with trainer.linear_cross_entropy, or have the model return logits"
            raise setting_error("train.objective", self.objective, rule, fix=fix)
        rewards, counts = self.config.dpo.beta * (logprobs - reference_logprobs), _pair_mask(batch)
        chosen, rejected = rewards[0::2], rewards[1::2]
        self._log_rewards(chosen.detach(), rejected.detach(), counts)
        return -(F.logsigmoid(chosen - rejected) * counts).sum()

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each row under the reference: (2 x pairs,)."""
        if self.reference is None:
            with _eval_mode(self.model), without_adapters(self.model):
                return -super().loss(batch)
        logprobs = -find_loss(self.reference)(batch)
        reshard(self.reference)
        return logprobs

    def _log_rewards(self, chosen: torch.Tensor, rejected: torch.Tensor, counts: torch.Tensor) -> None:
        num_pairs = counts.sum()
        for name, values in (
            ("accuracy", (chosen > rejected).float()),
            ("margin", chosen - rejected),
            ("reward_chosen", chosen),
            ("reward_rejected", rejected),
        ):
            self.log(name, (values * counts).sum(), over=num_pairs)


def _pair_mask(batch: Batch) -> torch.Tensor:
    """Return a mask of the pairs that have targets: (pairs,)."""
    return (batch["targets"] != IGNORE).any(dim=1)[0::2]


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, which disables dropout, inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
