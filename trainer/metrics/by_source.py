"""Logs the loss of each source of a data mixture, in addition to the mean over all sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.mixture import SOURCE, MixedSource
from trainer.loss import IGNORE, row_losses
from trainer.metrics.logged_sums import Amount

Loss = Callable[[Batch], torch.Tensor]
Log = Callable[[str, Amount, Amount | None], None]


def loss_by_source(loss: Loss, loaders: Sequence[object], log: Log) -> Loss:
    """Return `loss`, wrapped to also log each source's mean as `loss_<source>` if a loader reads a mixture of sources.

    The per-row losses are recorded by the cross-entropy functions of `trainer.loss`.  If a model computes its loss in
    another way, they are unknown and the fields are null.
    """
    opened = [loader.source for loader in loaders if isinstance(loader, (TrainLoader, EvalLoader))]
    mixed = next((source for source in opened if isinstance(source, MixedSource)), None)
    return loss if mixed is None else _LossBySource(loss, list(mixed.sources), log)


class _LossBySource:
    def __init__(self, loss: Loss, names: Sequence[str], log: Log) -> None:
        self._loss, self._fields, self._log = loss, [f"loss_{name}" for name in names], log

    def __call__(self, batch: Batch) -> torch.Tensor:
        if SOURCE not in batch:
            return self._loss(batch)
        with row_losses() as found:
            loss = self._loss(batch)
        sources_B = batch[SOURCE]
        sums = torch.zeros(2, len(self._fields), dtype=torch.float64, device=sources_B.device)
        if len(found) == 1 and found[0].shape == sources_B.shape:
            counts_B = (batch["targets"] != IGNORE).sum(-1)
            sums.index_add_(1, sources_B, torch.stack([found[0], counts_B.double()]))
        for field, value, over in zip(self._fields, *sums, strict=True):
            self._log(field, value, over)
        return loss
