"""Checks before the first step that attention does not cross documents packed into one row.

A model that accepts document ids but ignores them trains on contexts that it will never see, and only its outputs show
that.  The check runs the model itself and works for any recipe.
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
from trainer.model.gradients import evaluation_mode
from trainer.sequence import whole

_DOCUMENT_LENGTH = 6
"""Number of tokens of each test document."""

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Tolerance of the logits relative to the largest one, for a different order of summation.  Other dtypes have
`_DEFAULT_TOLERANCE`."""
_DEFAULT_TOLERANCE = 3e-2


def check_documents(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if documents share rows and the model lets them attend to each other.

    The logits of a document must be the same after one document, after another one, and alone.  A no-op if documents do
    not share rows, or with a custom loader.  Collectives: those of one forward pass of three short rows.
    """
    if not isinstance(loader, TrainLoader) or "documents" not in as_mapping(loader.source.batch(np.array([-1]))):
        return
    accepts_documents = "documents" in inspect.signature(model.forward).parameters
    if not accepts_documents or _mixes(model, loader.source.vocab_size, world.device):
        rule = f"model.name={config.model.name} lets documents in one row attend to each other"
        raise setting_error("data.documents", "masked", rule, "apart")


def _mixes(model: nn.Module, vocab_size: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    one, two, tried = (torch.randint(vocab_size, (_DOCUMENT_LENGTH,), generator=generator) for _ in range(3))
    tokens = torch.stack([torch.cat(pair) for pair in ((one, tried), (two, tried), (tried, one))]).to(device)
    documents = torch.arange(2, device=device).repeat_interleave(_DOCUMENT_LENGTH).expand_as(tokens).contiguous()
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"), whole():
        logits = model(tokens, documents=documents)
    behind_one, behind_two, alone = (
        logits[0, _DOCUMENT_LENGTH:],
        logits[1, _DOCUMENT_LENGTH:],
        logits[2, :_DOCUMENT_LENGTH],
    )
    largest = max(float((other - alone).abs().max()) for other in (behind_one, behind_two))
    return not largest <= _TOLERANCE.get(logits.dtype, _DEFAULT_TOLERANCE) * float(alone.abs().max())
