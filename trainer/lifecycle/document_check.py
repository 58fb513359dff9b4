"""The self-check for documents that are packed into one row: no document may influence another."""

from __future__ import annotations

import inspect

import numpy as np
from torch import nn

from trainer.config import RunConfig
from trainer.config.rules import compiles_blocks
from trainer.data.loader import TrainLoader
from trainer.data.source import as_mapping
from trainer.distributed.world import World
from trainer.errors import setting_error
from trainer.model.documents import separate_documents


def check_documents(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if documents share rows and the model lets them influence each other.

    A model from transformers is first made to keep them apart, where possible (`trainer.model.documents`).  The message
    names up to three modules, if they can be found.  Also raises UserError if compiled blocks would have to separate
    documents in recurrent layers of transformers.  Does nothing if documents do not share rows, or if the loader is a
    custom one.

    Collectives: those of `separate_documents`, and a gather; only the gather if the model takes no documents.
    """
    if not isinstance(loader, TrainLoader) or "documents" not in as_mapping(loader.source.batch(np.array([-1]))):
        return
    leak: str | None = "its forward pass takes no documents"
    if "documents" in inspect.signature(model.forward).parameters:
        model.are_documents_apart = True  # type: ignore[assignment]  # checked here, so not again in its first call
        leak = separate_documents(model, loader.source.vocab_size, config.data.seq_len, world.device)
    leaks = [name for name in world.gather(leak) if name is not None]
    if leaks:
        rule = f"model.name={config.model.name} lets documents in one row influence each other: {leaks[0]}"
        raise setting_error("data.documents", "masked", rule, "apart")
    if getattr(model, "has_recurrent_layers", False) and compiles_blocks(config.train.compile, world.device.type):
        rule = "compiled blocks cannot separate documents in recurrent layers of transformers"
        raise setting_error("train.compile", config.train.compile, rule, False)
