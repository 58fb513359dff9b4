"""Checks before the first step that context parallelism does not change the model's loss.

A model that mixes or counts tokens outside `trainer.sequence` computes a different loss on slices of sequences, and
nothing in its loss curve shows that.  The check runs the model itself and works for any recipe.
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
from trainer.model.gradients import evaluation_mode
from trainer.sequence import current_slices, sliced

_MAX_SLICE_TOKENS = 32
"""Largest number of tokens per slice in the test input."""

_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}
"""Relative tolerance of the loss, for a different order of summation.  It must be tight: freshly initialized weights
hardly attend to anything, so that even restarting positions in each slice changes their loss by at most 2e-6."""


def check_context(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if the model's loss on slices differs from that on complete sequences.

    The test input is the beginning of this rank's next sample; no gradients are computed.  A no-op without context
    parallelism, or with a custom loader.  Collectives: those of two forward passes, and a gather of two numbers.
    """
    slices = current_slices()
    if slices is None or not isinstance(loader, TrainLoader):
        return
    slices = replace(slices, seq_len=min(slices.seq_len, _MAX_SLICE_TOKENS * slices.count))
    whole_batch, own_batch = world.agreed(lambda: _batches(loader, slices))
    loss_of = find_loss(model)
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        with sliced(None):
            expected = float(loss_of(_on(whole_batch, world)))
        with sliced(slices):
            found = float(loss_of(_on(own_batch, world)))
    tolerance = _TOLERANCE[config.fsdp.param_dtype]
    for rank, (one, other) in enumerate(world.gather((expected, found))):
        if not abs(one - other) <= tolerance * abs(one):
            rule = (
                f"recipe {config.recipe.name!r} mixes or counts tokens outside trainer.sequence: the loss of "
                f"rank {rank}'s part of {slices.seq_len} tokens is {one:.8g} in the whole and {other:.8g} in slices"
            )
            raise setting_error("mesh.context", slices.count, rule, 1)


def _batches(loader: TrainLoader, slices: Slices) -> tuple[Batch, Batch]:
    """Return the beginning of the next sample, with targets only in this rank's slice, and the slice itself.

    Positions without a target, such as a prompt's, get their own token as target, so that every position counts.
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
