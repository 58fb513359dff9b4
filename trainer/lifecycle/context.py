"""Does the model give the same loss in slices of sequences as whole?  Asked of the model itself, before the first step.

A model that mixes or counts tokens elsewhere than in `trainer.sequence` trains on something else in slices, and nothing
in its curve shows that.  Knows no recipe by name.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from trainer.config import RunConfig, Slices
from trainer.data.loader import Batch, TrainLoader
from trainer.distributed.world import World
from trainer.errors import setting_error
from trainer.loss import IGNORE, find_loss
from trainer.model.gradients import evaluating
from trainer.sequence import current_slices, sliced

_TOKENS = 32
"""Tokens of each slice that it is tried on, at most."""

_CLOSE = {"float32": 1e-6, "bfloat16": 2e-3}
"""Share by which the loss may differ where its parts are added in another order.  Fresh weights hardly attend to
anything: with them, positions that begin anew in each slice change it by no more than 2e-6."""


def check_context(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError, on all ranks alike, if a model gives another loss in slices than for the whole sequence.

    Asked of the first tokens of a rank's next sample, piece by piece, without gradients; nothing where sequences are
    whole, or the loader is a user's own.  Collectives: those of two forward passes, and a gather of two numbers.
    """
    slices = current_slices()
    if slices is None or not isinstance(loader, TrainLoader):
        return
    slices = replace(slices, seq_len=min(slices.seq_len, _TOKENS * slices.count))
    whole_batch, own_batch = world.agreed(lambda: _batches(loader, slices))
    loss_of = find_loss(model)
    # Not compiled: that would be for these sizes, and once more for those of the run.
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        with sliced(None):
            expected = float(loss_of(_on(whole_batch, world)))
        with sliced(slices):
            found = float(loss_of(_on(own_batch, world)))
    tolerance = _CLOSE[config.fsdp.param_dtype]
    for rank, (one, other) in enumerate(world.gather((expected, found))):
        if not abs(one - other) <= tolerance * abs(one):
            rule = (
                f"recipe {config.recipe.name!r} mixes or counts tokens outside trainer.sequence: the loss of "
                f"rank {rank}'s part of {slices.seq_len} tokens is {one:.8g} in the whole and {other:.8g} in slices"
            )
            raise setting_error("mesh.context", slices.count, rule, 1)


def _batches(loader: TrainLoader, slices: Slices) -> tuple[Batch, Batch]:
    """Return the beginning of the next sample, with the targets of this rank's slice alone, and that slice of it.

    What has no target there, as a prompt has none, gets its own token for one: any loss tells both apart.
    """
    batch = _with_targets(loader.first_tokens(slices.seq_len))
    own = _with_targets(loader.first_tokens(slices.seq_len, slices))
    kept = torch.full_like(batch["targets"], IGNORE)
    for start, stop in slices.pieces:
        kept[:, start:stop] = batch["targets"][:, start:stop]
    return {**batch, "targets": kept}, own


def _with_targets(batch: Batch) -> Batch:
    return {**batch, "targets": torch.where(batch["targets"] == IGNORE, batch["tokens"], batch["targets"])}


def _on(batch: Batch, world: World) -> Batch:
    return {name: entry.to(world.device) for name, entry in batch.items()}
