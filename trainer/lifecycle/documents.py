"""Does the model keep documents that share a row to themselves?  Asked of the model itself, before the first step.

A model that is told of documents and lets attention cross them all the same trains on what it will never see; nothing
but its outputs shows it.  Knows no recipe by name.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
from torch import nn

from trainer.config import RunConfig
from trainer.data.loader import TrainLoader
from trainer.data.source import as_mapping
from trainer.distributed.world import World
from trainer.errors import setting_error
from trainer.model.gradients import evaluating
from trainer.sequence import whole

_LENGTH = 6
"""Tokens of each document that it is tried on."""

_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""By how much logits may differ, as a share of the largest, where the same sums are taken in another order; in
dtypes that are not here by `_ROUGHLY`."""
_ROUGHLY = 3e-2


def check_documents(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError, on all ranks alike, if the data has documents that share rows, and the model mixes them.

    A document must come out the same behind one document, behind another, and alone: one forward pass of three short
    rows.  Nothing is asked where the data has none, or the loader is a user's own.  Collectives: those of that pass.
    """
    if not isinstance(loader, TrainLoader) or "documents" not in as_mapping(loader.source.batch(np.array([-1]))):
        return
    is_told = "documents" in inspect.signature(model.forward).parameters
    if not is_told or _mixes(model, loader.source.vocab_size, world.device):
        rule = f"model.name={config.model.name} lets documents in one row attend to each other"
        raise setting_error("data.documents", "masked", rule, "apart")


def _mixes(model: nn.Module, vocab_size: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    one, two, tried = (torch.randint(vocab_size, (_LENGTH,), generator=generator) for _ in range(3))
    tokens = torch.stack([torch.cat(pair) for pair in ((one, tried), (two, tried), (tried, one))]).to(device)
    documents = torch.arange(2, device=device).repeat_interleave(_LENGTH).expand_as(tokens).contiguous()
    # Not compiled: that would be for these sizes, and once more for those of the run.
    with evaluating(model), torch.compiler.set_stance("force_eager"), whole():
        logits = model(tokens, documents=documents)
    behind_one, behind_two, alone = logits[0, _LENGTH:], logits[1, _LENGTH:], logits[2, :_LENGTH]
    largest = max(float((other - alone).abs().max()) for other in (behind_one, behind_two))
    return not largest <= _CLOSE.get(logits.dtype, _ROUGHLY) * float(alone.abs().max())
