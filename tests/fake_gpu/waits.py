"""Trains on fake GPUs and counts how often the host waits for the device in the fourth step, on rank 0, as JSON.

python tests/fake_gpu/waits.py RECIPE OVERRIDE...

All values on a fake GPU are zero, also the numbers of rows that ranks exchange: the host reads them, and then exchanges
as if every expert had equally many.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from trainer import Trainer, load_config
from trainer.data.loader import Batch
from trainer.experts import ExpertGroup, dispatch
from trainer.metrics.step_metrics import Update

read_splits = dispatch._splits


def even_splits(
    group: ExpertGroup, sent_NL: torch.Tensor, received_NL: torch.Tensor, num_sent: int
) -> tuple[list[int], list[int]]:
    read_splits(group, sent_NL, received_NL, num_sent)
    return dispatch._split_evenly(num_sent, group.size), dispatch._split_evenly(num_sent, group.size)


class Counting(Trainer):
    """Prints by source file how often the host waits in step 4."""

    def train_step(self, micro_batches: Sequence[Batch]) -> Update:
        if self.state.step != 3:
            return super().train_step(micro_batches)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update = super().train_step(micro_batches)
        torch.cuda.set_sync_debug_mode("default")
        waits = Counter(Path(w.filename).name for w in caught if "synchronizing" in str(w.message))
        if self.world.is_main:
            print(json.dumps(waits), flush=True)
        return update


if __name__ == "__main__":
    with mock.patch.object(dispatch, "_splits", even_splits):
        sys.exit(Counting(load_config(sys.argv[1], sys.argv[2:])).fit())
