"""Training on pairs of answers, of which one is preferred."""

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
from trainer.weights.inference import take_base


class PreferenceTrainer(Trainer):
    """Direct preference optimisation: the preferred answer is to gain on the other, beside a reference model.

    Row 2i of a batch is the answer that was chosen, row 2i + 1 the one that was rejected, to the same prompt; what
    counts of each are its targets.  The loss of a pair is -log sigmoid(beta * ((c - c') - (r - r'))), with c and r the
    log-probabilities of the two, and c' and r' those that the reference gives.  That is the model without its adapters
    where it has any, and else a second copy of the weights that training starts from, frozen and sharded alike.

    Source: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290.
    """

    objective = "dpo"

    def __init__(self, config: RunConfig) -> None:
        self.reference: nn.Module | None = None
        super().__init__(config)
        if self.reference is not None:
            self.state.add(REFERENCE, take_base(self.reference, self.config, self.world))

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        """Return the sharded model; before the run's own also build the reference, if that is a second one."""
        if config is None and self.config.has_reference_model:
            self.reference = super().build_model(self.config).requires_grad_(False).eval()
        return super().build_model(config)

    def count(self, batch: Batch) -> float:
        """Return the number of pairs: what fills a batch up has no target."""
        return int(_are_pairs(batch).sum())

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss summed over the batch's pairs.

        Collectives: those of two forward passes, the reference's first.
        """
        with by_row():
            with torch.no_grad():
                expected = self._expected(batch)
            found = -super().loss(batch)
        if found.shape != batch["tokens"].shape[:1]:
            rule = f"recipe {self.recipe.name!r} sums the loss of all rows itself, and here it is needed of each"
            fix = "compute it with trainer.linear_cross_entropy, or have the model return logits"
            raise setting_error("train.objective", self.objective, rule, fix=fix)
        rewards, counts = self.config.dpo.beta * (found - expected), _are_pairs(batch)
        chosen, rejected = rewards[0::2], rewards[1::2]
        self._log_rewards(chosen.detach(), rejected.detach(), counts)
        return -(F.logsigmoid(chosen - rejected) * counts).sum()

    def _expected(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each row under the reference: (2 x pairs,)."""
        if self.reference is None:
            with _evaluated(self.model), without_adapters(self.model):
                return -super().loss(batch)
        expected = -find_loss(self.reference)(batch)
        reshard(self.reference)
        return expected

    def _log_rewards(self, chosen: torch.Tensor, rejected: torch.Tensor, counts: torch.Tensor) -> None:
        num_pairs = counts.sum()
        for name, values in (
            ("accuracy", (chosen > rejected).float()),
            ("margin", chosen - rejected),
            ("reward_chosen", chosen),
            ("reward_rejected", rejected),
        ):
            self.log(name, (values * counts).sum(), over=num_pairs)


def _are_pairs(batch: Batch) -> torch.Tensor:
    """Return which pairs have a target at all: (pairs,)."""
    return (batch["targets"] != IGNORE).any(dim=1)[0::2]


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Have the model in evaluation mode inside the block, without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
