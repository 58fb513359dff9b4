"""Measures what rank 0 does for one save of a large state on many ranks, in one process and without any data.

    python -m bench.save_plan [--dim 8192] [--layers 80] [--ffn 28672] [--vocab 128256] [--kv 1024] [--ranks 512]

The defaults are a 70B model with two moments.  The messages of the other ranks are made here, one by one, as each rank
would make its own; they are pickled as torch.distributed.checkpoint does.  Times are CPU seconds of rank 0.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from bench.results import emit, show
from trainer.checkpoint import CheckedWriter, checked_writer
from trainer.checkpoint.layout import Boxes, TensorBox, WrittenChunks
from trainer.checkpoint.messages import pack
from trainer.checkpoint.planner import ColumnSavePlanner
from trainer.checkpoint.snapshot import Snapshot


def tensors_of(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return the weights and moments of a llama without memory, by key."""
    dim, ffn, kv = options.dim, options.ffn, options.kv
    block = {"wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim), "norm1": (dim,), "norm2": (dim,)}
    block |= {"w1": (ffn, dim), "w3": (ffn, dim), "w2": (dim, ffn)}
    model = {"embed.weight": (options.vocab, dim), "norm.weight": (dim,), "head.weight": (options.vocab, dim)}
    model |= {f"layers.{n}.{name}.weight": shape for n in range(options.layers) for name, shape in block.items()}
    forms = ("model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq")
    return {form.format(name): torch.empty(shape, device="meta") for form in forms for name, shape in model.items()}


def boxes_of(tensors: dict[str, torch.Tensor], rank: int, num_ranks: int) -> list[TensorBox]:
    """Return the boxes of a rank, which has its share of the rows of every tensor."""
    boxes = []
    for key, tensor in tensors.items():
        num_rows, *others = tensor.shape
        each = -(-num_rows // num_ranks)
        start, stop = min(num_rows, rank * each), min(num_rows, (rank + 1) * each)
        boxes.append(TensorBox(key, (start, *(0 for _ in others)), (stop - start, *others), tensor.dtype))
    return boxes


def plan_of(planner: ColumnSavePlanner, boxes: list[TensorBox]) -> bytes:
    planner.boxes = boxes
    return pickle.dumps(planner.create_local_plan())


def report_of(boxes: list[TensorBox], rank: int) -> bytes:
    """Return what a rank reports about the files that it would have written."""
    table = Boxes.of((box.key, box.offsets, box.sizes) for box in boxes)
    lengths = table.sizes.prod(axis=1) * 4 + 1000
    starts = np.cumsum(lengths) - lengths
    name = f"__{rank}_0.distcp"
    chunks = WrittenChunks(name, table, np.column_stack((starts, lengths, starts + 600)))
    files = pack({name: (int(lengths.sum()), 1)})
    return pickle.dumps([WriteResult(MetadataIndex(f"rank {rank}"), 1, (files, checked_writer._pack_chunks(chunks)))])


class Measurement:
    """Saves the same state twice, as rank 0 of `num_ranks`, and notes a line for each thing that it does."""

    def __init__(self, tensors: dict[str, torch.Tensor], num_ranks: int, folder: str) -> None:
        self.lines: list[list[object]] = []
        self._tensors, self._num_ranks, self._base_mb = tensors, num_ranks, peak_mb()
        self._planner, self._writer = ColumnSavePlanner(), CheckedWriter(f"{folder}/step_00000001")
        self._planner.snapshot = Snapshot(1, tensors)
        checked_writer.check_visible = lambda *arguments: None  # no rank has written anything

    def save(self, name: str) -> None:
        ranks, planner, writer = range(self._num_ranks), self._planner, self._writer
        sent = [plan_of(planner, boxes_of(self._tensors, rank, self._num_ranks)) for rank in ranks]
        plans = self._time(f"{name}: unpickle the plans", lambda: [pickle.loads(m) for m in sent], sent)
        replies, metadata = self._time(f"{name}: make the global plan", lambda: planner.create_global_plan(plans))
        self._time(f"{name}: pickle the replies", lambda: [pickle.dumps(reply) for reply in replies])
        reports = [report_of(boxes_of(self._tensors, rank, self._num_ranks), rank) for rank in ranks]
        results = self._time(f"{name}: unpickle the reports", lambda: [pickle.loads(m) for m in reports], reports)
        writer.prepare_global_plan([SavePlan([])])  # creates the folder
        self._time(f"{name}: write layout and manifest, publish", lambda: writer.finish(metadata, results))
        self._time(f"{name}: pickle the end", lambda: [pickle.dumps(metadata)])
        planner._is_sent = True

    def _time(self, what: str, work: Callable[[], Any], messages: list[bytes] | None = None) -> Any:
        """Return the result of `work()`.  messages: what it reads, unless it returns messages itself."""
        started = time.process_time()
        result = work()
        seconds = time.process_time() - started
        if messages is None and isinstance(result, list):
            messages = result
        megabytes = None if messages is None else sum(map(len, messages)) / 1e6
        emit("save_plan", what=what, seconds=seconds, megabytes=megabytes, peak_mb=peak_mb() - self._base_mb)
        self.lines.append([what, seconds, megabytes, peak_mb() - self._base_mb])
        return result


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.save_plan", description=__doc__.partition("\n")[0])
    for name, value in (("dim", 8192), ("layers", 80), ("ffn", 28672), ("vocab", 128256), ("kv", 1024), ("ranks", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    tensors = tensors_of(options)
    with tempfile.TemporaryDirectory() as folder:
        measurement = Measurement(tensors, options.ranks, folder)
        for name in ("first save", "second save"):
            measurement.save(name)
    title = f"bench.save_plan: {len(tensors)} tensors, {options.ranks} ranks"
    show(title, ["rank 0", "CPU s", "MB", "peak, MB more"], measurement.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
