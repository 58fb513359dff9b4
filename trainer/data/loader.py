"""Loaders that yield a rank's micro-batches for training and for evaluation.

The order of the samples does not depend on the number of ranks or workers.  Training reads an endless sequence of
samples (see `mixture`).  With a global batch size of G, step s (from 0) reads the G samples at positions s * G to
(s + 1) * G - 1.  Each data-parallel rank takes a contiguous slice of them and splits it into micro-batches.  Resuming
therefore needs only one integer, valid on any mesh: the number of samples consumed by finished steps.  It is stored
with a fingerprint of the data and, for a mixture, the phases, since the same position refers to a different sample if
the data or their order are different.

Ranks are plain integers in this module, which issues no collectives.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from itertools import islice, repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.parallel import Slices, find_slices
from trainer.config.schema import RunConfig
from trainer.data.mixture import (
    Permutation,
    SampleOrder,
    SourceUsage,
    epochs,
    eval_sample_indices,
    make_order,
    usage_by_phase,
)
from trainer.data.opening import check_tokenizer
from trainer.data.shards import ShardError
from trainer.data.source import IGNORE, Fingerprint, Source, as_mapping
from trainer.errors import EXIT_FAILED, TrainingFailed, UserError, setting_error
from trainer.sequence import compute_cu_seqlens
from trainer.stopping import STOP_SIGNALS

Batch: TypeAlias = "dict[str, Tensor]"
"""`tokens` and `targets`, both int64 of shape (B, seq_len), and any further entries from the source.

B is the micro-batch size times `Source.rows_per_sample`.  A batch with `documents` (the number of each token's document
within its row, from 0, same shape) also has `cu_seqlens`: see `trainer.sequence`.  With context or tensor parallelism,
entries with a value per token, except `documents`, hold only this rank's tokens: (B, seq_len / number of ranks).  A
batch then also has `targets_per_row`, the number of targets in each complete row, (B,)."""


class TrainLoader:
    """An endless iterator over this rank's micro-batches.

    Its state advances when the last micro-batch of a step is handed out, however far workers have prefetched, so a
    state saved between two steps is exact.  A state can be loaded with a different number of ranks or workers,
    micro-batch size or global batch size.  The global random number generators are not used.
    """

    @classmethod
    def from_config(
        cls, source: Source, config: RunConfig, rank: int, num_ranks: int, device: torch.device
    ) -> TrainLoader:
        """Return the loader that a configuration describes, for one rank and its device.

        Raises UserError if the data cannot be read, if they do not match `train.objective` or the tokenizer of the
        initial weights, or if `make_order` raises it.
        """
        _check_samples(source, config)
        _check_labels_differ(source, config)
        check_tokenizer(source, config)
        return cls(
            source,
            seed=config.data.seed,
            order=make_order(source, config),
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=int(config.train.micro_batch_size),
            dp_rank=rank // config.ranks_per_sample,
            num_dp_ranks=config.num_groups(num_ranks),
            slices=find_slices(config, rank),
            num_workers=config.data.num_workers,
            pin_memory=device.type == "cuda",
        )

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        num_dp_ranks: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        order: SampleOrder | None = None,
        slices: Slices | None = None,
    ) -> None:
        assert global_batch_size % (num_dp_ranks * micro_batch_size) == 0, "check_config refuses such a batch"
        assert 0 <= dp_rank < num_dp_ranks, (dp_rank, num_dp_ranks)
        self.source, self._seed = source, seed
        self._order = Permutation(len(source), seed) if order is None else order
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._dp_rank, self._samples_per_rank = dp_rank, global_batch_size // num_dp_ranks
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self.slices = slices
        """This rank's slices of each sample.  All ranks that split samples read the same ones."""
        self._samples = 0
        self.fingerprint = _fingerprint_of(source)
        """Fingerprint of the data, stored with the position; the same on all ranks."""
        self._num_yielded = 0
        self._batches: Any = None
        if num_workers and not source.waits_for_storage:
            atexit.register(_close_if_alive, weakref.ref(self))

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per step on this rank."""
        return self._samples_per_rank // self._micro_batch_size

    @property
    def samples(self) -> int:
        """Number of samples consumed by finished steps, over all ranks."""
        return self._samples

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The values that determine the order from here on: position, number of samples, seed, digest of the data.

        Must be the same on all ranks.
        """
        return self._samples, len(self.source), self._seed, _fingerprint_of(self.source).content

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each source in finished steps, keyed `epoch_<source>`, or `epoch` for a single source."""
        return {f"epoch_{name}" if name else "epoch": n for name, n in epochs(self._order, self._samples).items()}

    def usage_by_phase(self, steps: int) -> list[SourceUsage]:
        """Return how much of each source a run of `steps` steps reads in each phase."""
        return usage_by_phase(self._order, self._global_batch_size, steps, self.source.seq_len)

    def next_samples(self, all_ranks: bool = False) -> NDArray[np.int64]:
        """Return the sample indices of the next step, for this rank or for all ranks in rank order."""
        if all_ranks:
            positions = self._samples + np.arange(self._global_batch_size)
            return self._order.at(positions)
        return np.concatenate(list(islice(self._sample_indices(), self.micro_batches_per_step)))

    def first_tokens(self, num_tokens: int, slices: Slices | None = None) -> Batch:
        """Return the first `num_tokens` tokens of this rank's next sample as a one-row batch, or `slices` of them."""
        complete = as_mapping(self.source.batch(self.next_samples()[:1]))
        has_token_axis = {
            name: entry.ndim > 1 and entry.shape[1] == self.source.seq_len for name, entry in complete.items()
        }
        shortened = {name: entry[:, :num_tokens] if has_token_axis[name] else entry for name, entry in complete.items()}
        return _raise_if_failed(
            _tensors(shortened if slices is None else slice_batch(shortened, slices), pin_memory=False)
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._open()
        batch = _raise_if_failed(next(self._batches))
        self._num_yielded += 1
        if self._num_yielded == self.micro_batches_per_step:
            self._num_yielded = 0
            self._samples += self._global_batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and values that identify the data and their order so far; equal on all ranks."""
        return {"samples": self._samples, "data": self.fingerprint.to_state(), **self._order.order_state(self._samples)}

    def changes_from(self, stored: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Compare the data, and their order so far, with a stored state.

        Returns two lists with a line per change: changes that forbid resuming, and changes to report only.
        """
        refused, reported = self.fingerprint.changes(stored["data"], allowed)
        order_changes = self._order.changes(stored, stored["samples"], self._global_batch_size, allowed)
        return [*refused, *order_changes[0]], [*reported, *order_changes[1]]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position in `state`."""
        self.close()
        self._samples = int(state["samples"])

    def close(self) -> None:
        """Stop the thread or the workers, if any; workers that do not end within seconds are killed.

        The loader can still be used: the next micro-batch is the first one of the unfinished step.
        """
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._num_yielded = 0

    def _open(self) -> _Batches | _Prefetcher | _Workers:
        """Return an iterator over the next micro-batches: prefetched by a thread, by workers, or not at all."""
        reader = _BatchReader(self.source, self.slices)
        if self._num_workers and not self.source.waits_for_storage:
            return _Workers(reader, self._sample_indices(), self._num_workers, self._pin_memory)
        device = torch.cuda.current_device() if self._pin_memory else None
        batches = _batches_in_process(reader, self._sample_indices(), device)
        num_bytes = 16 * self._micro_batch_size * self.source.seq_len
        max_burst = max(1, min(_MAX_BURST, _MAX_BURST_BYTES // num_bytes))
        return _Prefetcher(batches, max_burst) if self.source.waits_for_storage else batches

    def _sample_indices(self) -> Iterator[NDArray[np.int64]]:
        """Yield the sample indices of each of this rank's micro-batches."""
        offset = self._dp_rank * self._samples_per_rank
        return _micro_batch_indices(
            self._order, self._samples, self._global_batch_size, offset, self._samples_per_rank, self._micro_batch_size
        )


_Batches: TypeAlias = "Generator[Batch | TrainingFailed]"


def _micro_batch_indices(
    order: SampleOrder, start: int, global_batch_size: int, offset: int, num_samples: int, micro_batch_size: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the sample indices of each micro-batch in turn, from position `start` on.

    Micro-batches are cut from samples `offset` to `offset + num_samples` of each global batch.  The indices of many
    steps are computed at once, which is cheaper.
    """
    num_steps = max(1, 4096 // num_samples)
    positions = np.arange(num_steps)[:, None] * global_batch_size + offset + np.arange(num_samples)
    while True:
        yield from order.at(start + positions).reshape(-1, micro_batch_size)
        start += num_steps * global_batch_size


def _batches_in_process(reader: _BatchReader, indices: Iterator[NDArray[np.int64]], device: int | None) -> _Batches:
    """Yield the micro-batches with the given sample indices, in pinned memory if `device` is given."""
    if device is not None:
        torch.cuda.set_device(device)  # per thread: otherwise this thread would pin memory for device 0
    for batch_indices in indices:
        yield _tensors(reader.read(batch_indices), device is not None)


def _fingerprint_of(source: Source) -> Fingerprint:
    try:
        return source.fingerprint
    except ShardError as error:
        raise UserError(f"the data cannot be read: {error}") from error


def _check_samples(source: Source, config: RunConfig) -> None:
    """Raise UserError if the samples lack the labels or pairs that the objective needs, or have unsupported ones."""
    key, objective, outputs = "train.objective", config.train.objective, config.objective.outputs
    if "labels" in config.objective.needs and not source.num_labels:
        rule = f"needs records with a label, but data.source={config.data.source} has none"
        raise setting_error(key, objective, rule, fix="use data.source=chat and files with a `label` in each record")
    if source.num_labels > outputs > 0:
        rule = (
            f"train.objective={objective} has fewer classes than the labels in the data, 0 to {source.num_labels - 1}"
        )
        raise setting_error("objective.num_labels", outputs, rule, source.num_labels)
    if source.num_labels > config.objective.num_classes > 0:
        max_supported, max_label = config.objective.num_classes - 1, source.num_labels - 1
        rule = f"supports labels up to {max_supported}, but the data has labels up to {max_label}"
        raise setting_error(key, objective, rule, fix="label a good response 1 or true, and a bad one 0 or false")
    if source.rows_per_sample == config.rows_per_sample:
        return
    if config.rows_per_sample > 1:
        is_chat = config.data.source == "chat"
        rule = f"needs preference pairs, but {'data.path' if is_chat else 'data.source'} has none"
        fix = "use records with prompt, chosen and rejected; for single responses with labels, use recipe=kto"
        raise setting_error(key, objective, rule, fix=fix if is_chat else f"set data.source=chat, and {fix}")
    raise setting_error(key, objective, "does not support preference pairs", "dpo")


def _check_labels_differ(source: Source, config: RunConfig) -> None:
    """Raise UserError if all training samples have the same label, but the objective distinguishes labels."""
    objective, label = config.objective, source.only_label
    if label is None or max(objective.num_classes, objective.outputs) < 2:
        return
    rule = f"learns to tell labels apart, but all records of data.path have label {label}"
    missing = "1 or true" if label == 0 else "0 or false"
    fix = f"add records with label {missing}; to imitate responses, use recipe=sft"
    if objective.outputs:
        fix = "add records with other labels"
    raise setting_error("train.objective", config.train.objective, rule, fix=fix)


class EvalLoader:
    """This rank's micro-batches of an evaluation over `num_batches` global batches (0: over all samples).

    The samples are those of `eval_sample_indices`, in the same order in each iteration.  Every rank has the same
    number of micro-batches, so that collectives match: the end is padded with samples that have only ignored targets.
    """

    @classmethod
    def from_config(cls, source: Source, config: RunConfig, rank: int, num_ranks: int) -> EvalLoader:
        """Return the loader that a configuration describes, for one rank; see `TrainLoader.from_config`."""
        _check_samples(source, config)
        check_tokenizer(source, config)
        return cls(
            source,
            num_batches=config.eval.steps,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=int(config.train.micro_batch_size),
            dp_rank=rank // config.ranks_per_sample,
            num_dp_ranks=config.num_groups(num_ranks),
            slices=find_slices(config, rank),
        )

    def __init__(
        self,
        source: Source,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        num_dp_ranks: int = 1,
        num_batches: int = 0,
        slices: Slices | None = None,
    ) -> None:
        assert 0 <= dp_rank < num_dp_ranks, (dp_rank, num_dp_ranks)
        self.source, self._reader = source, _BatchReader(source, slices)
        self.num_samples = min(len(source), num_batches * global_batch_size or len(source))
        self._shape = (-1, num_dp_ranks, micro_batch_size)
        self._dp_rank = dp_rank

    def __len__(self) -> int:
        return len(self._sample_indices())

    def __iter__(self) -> Iterator[Batch]:
        for indices in self._sample_indices():
            yield _raise_if_failed(_tensors(self._reader.read(indices), pin_memory=False))

    def _sample_indices(self) -> NDArray[np.int64]:
        """Return this rank's sample indices, one row per micro-batch; ranks take micro-batches round-robin."""
        _, num_ranks, micro_batch_size = self._shape
        missing = -self.num_samples % (num_ranks * micro_batch_size)
        indices = np.pad(eval_sample_indices(self.source, self.num_samples), (0, missing), constant_values=-1)
        return indices.reshape(self._shape)[:, self._dp_rank]


Arrays: TypeAlias = "dict[str, NDArray[Any]]"


class _BatchReader:
    """Reads the micro-batch for given sample indices.

    Errors in the data are returned, not raised: an exception raised in a worker would reach the rank with a traceback
    in its message.
    """

    def __init__(self, source: Source, slices: Slices | None) -> None:
        self._source, self._slices = source, slices

    def read(self, indices: NDArray[np.int64]) -> Arrays | TrainingFailed:
        """Return the micro-batch of samples `indices`, or this rank's slice of it, or the error if reading fails."""
        try:
            batch = as_mapping(self._source.batch(indices))
        except ShardError as error:
            return TrainingFailed(str(error))
        limit = self._source.vocab_size
        for ids in () if self._source.checks_ids else (batch["tokens"], batch["targets"]):
            if ids.max(initial=0) >= limit:
                row, position = np.argwhere(ids >= limit)[0]
                rule = f"ids must be below {limit}, the size of the vocabulary"
                return TrainingFailed(f"sample {indices[row]} holds the id {ids[row, position]}: {rule}")
        return batch if self._slices is None else slice_batch(batch, self._slices)


def slice_batch(batch: Arrays, slices: Slices) -> Arrays:
    """Return this rank's slices of all entries with a value per token, except `documents`, which stays complete.

    Targets are already shifted: the last target of a slice is the first token of the next slice.  Adds the entry
    `targets_per_row`, the number of targets of each complete row.
    """
    sliced = dict(batch)
    sliced["targets_per_row"] = (batch["targets"] != IGNORE).sum(1)
    for name, entry in batch.items():
        if entry.ndim > 1 and entry.shape[1] == slices.seq_len and name != "documents":
            sliced[name] = np.concatenate([entry[:, start:stop] for start, stop in slices.own_pieces], axis=1)
    return sliced


def _tensors(batch: Arrays | TrainingFailed, pin_memory: bool) -> Batch | TrainingFailed:
    if isinstance(batch, TrainingFailed):
        return batch
    tensors = {name: torch.from_numpy(entry) for name, entry in batch.items()}
    if "documents" in tensors:  # counted before the transfer: on the device it would need a host sync
        tensors["cu_seqlens"] = compute_cu_seqlens(tensors["documents"])
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin_memory else tensors


def _raise_if_failed(batch: Batch | TrainingFailed) -> Batch:
    if isinstance(batch, TrainingFailed):
        raise batch
    return batch


# -- a thread that prefetches -----------------------------------------------------------------------------------------

_MAX_BURST, _MAX_BURST_BYTES = 8, 4 << 20
"""Limits on the number and the total bytes of micro-batches that the thread makes each time it wakes.  Waking costs
several times more than making a micro-batch, while too many would be evicted from the CPU's caches before use."""

_JOIN_TIMEOUT_S = 2.0
"""Seconds to wait for the thread when closing.  A thread that still waits for storage is left to end by itself."""

_Burst: TypeAlias = "list[Batch | BaseException]"


class _Prefetcher:
    """Iterator whose micro-batches are made by a thread in bursts: one burst while the previous one is taken.

    The first burst has one micro-batch, so that training starts early, and each later one up to twice as many as the
    one before.  An exception is raised once all earlier micro-batches have been taken, and from then on each time.  The
    thread ends when `close` is called or this object is deleted, so it holds no reference to this object.
    """

    def __init__(self, batches: _Batches, max_burst: int) -> None:
        self._max_burst = max_burst
        self._lengths: queue.SimpleQueue[int] = queue.SimpleQueue()
        """The length of each burst to make; 0 ends the thread."""
        self._bursts: queue.SimpleQueue[_Burst] = queue.SimpleQueue()
        self._ready: deque[Batch | BaseException] = deque()
        self._thread = threading.Thread(
            target=_make_bursts, args=[batches, self._lengths, self._bursts], name="data", daemon=True
        )
        self._thread.start()
        self._lengths.put(1)

    def __next__(self) -> Batch:
        if not self._ready:
            self._ready.extend(self._bursts.get())
            self._lengths.put(min(self._max_burst, 2 * len(self._ready)))
        item = self._ready.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread, and wait briefly for it to end."""
        self._lengths.put(0)
        self._thread.join(_JOIN_TIMEOUT_S)

    def __del__(self) -> None:
        self._lengths.put(0)  # unlike Queue.put, SimpleQueue.put may be called anywhere by the garbage collector


def _make_bursts(
    batches: Iterator[Batch | BaseException], lengths: queue.SimpleQueue[int], bursts: queue.SimpleQueue[_Burst]
) -> None:
    """Make bursts of the given lengths until a length is 0.  After an exception, every item is that exception."""
    while length := lengths.get():
        burst: _Burst = []
        try:
            for batch in islice(batches, length):
                burst.append(batch)
        except BaseException as error:
            burst.append(error)
            batches = repeat(error)
        bursts.put(burst)


# -- worker processes ------------------------------------------------------------------------------------------------


class _Workers:
    """Iterator over micro-batches made by worker processes."""

    def __init__(
        self, reader: _BatchReader, indices: Iterator[NDArray[np.int64]], num_workers: int, pin_memory: bool
    ) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
            loader = StatefulDataLoader(
                _MicroBatches(reader),
                batch_size=None,  # an item is a complete micro-batch
                sampler=indices,
                collate_fn=_identity,
                num_workers=num_workers,
                worker_init_fn=_prepare_worker,
                # The StatefulDataLoader draws a seed for its workers, by default from the global generator.
                generator=torch.Generator(),
                # No snapshots: its state could only be loaded with the same number of workers.
                snapshot_every_n_steps=2**62,
            )
            self._batches: Any = iter(loader)
        self._pin_memory = pin_memory

    def __next__(self) -> Batch | TrainingFailed:
        return _tensors(next(self._batches), self._pin_memory)

    def close(self) -> None:
        """Stop the workers; workers that do not end within seconds are killed."""
        workers = self._batches._workers
        self._batches = None  # drops the last reference, so that the iterator stops its workers here
        for worker in workers:
            if worker.is_alive():
                worker.kill()  # the iterator only sends SIGTERM, which workers ignore


class _MicroBatches(Dataset["Arrays | TrainingFailed"]):
    """Dataset for `StatefulDataLoader`: its items are micro-batches, and an item's key is its sample indices.

    The entries are arrays, which are sent through a pipe: torch would pass each tensor in a shared-memory file.
    """

    def __init__(self, reader: _BatchReader) -> None:
        self._reader = reader

    def __getitem__(self, indices: NDArray[np.int64]) -> Arrays | TrainingFailed:
        return self._reader.read(indices)


def _identity(batch: Arrays | TrainingFailed) -> Arrays | TrainingFailed:
    return batch


def _prepare_worker(worker_id: int) -> None:
    """Make a worker ignore stop signals to the process group, but exit when its rank exits.

    After a stop signal, the rank still has to finish the step and save.  With the start method forkserver, the default
    since Python 3.14, torch's own check does not notice if the rank is killed: it watches the worker's parent, which is
    then the fork server.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_rank, name="exit-with-rank", daemon=True).start()


def _exit_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(EXIT_FAILED)


def _close_if_alive(reference: weakref.ref[TrainLoader]) -> None:
    """Stop the workers at exit, before multiprocessing joins them: they ignore the SIGTERM that it would send."""
    loader = reference()
    if loader is not None:
        loader.close()
