"""Loaders: a rank's micro-batches, in an order that no number of ranks or workers changes.

Training counts positions in an endless run of samples (see `order`).  Update u takes the positions from u * G on,
G the global batch size; of these each data-parallel rank takes a contiguous share, cut into micro-batches.  So all that
is resumed is one integer, the number of samples that finished steps have consumed, and it holds on any mesh.  With it
goes a fingerprint of the data: in others it would be a place in another order.

Knows ranks as numbers; calls no collective.
"""

from __future__ import annotations

import atexit
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config import RunConfig, Slices, find_slices
from trainer.data.fingerprint import Fingerprint
from trainer.data.mixed_source import evenly_spaced_indices, find_order
from trainer.data.prefetch import Prefetcher, WaitAbandoned
from trainer.data.sample_order import Permutation, SampleOrder, epochs
from trainer.data.shards import ShardError
from trainer.data.source import Source, entries
from trainer.data.tokenizer_check import check_tokenizer
from trainer.data.usage import SourceUsage, usage_by_phase
from trainer.distributed.stop import STOP_SIGNALS
from trainer.errors import TrainingFailed, UserError, setting_error
from trainer.sequence import find_borders

Batch: TypeAlias = "dict[str, Tensor]"
"""`tokens` and `targets`, both int64 of shape (micro_batch_size, seq_len), and what else the source has of each.

Where it has `documents` (the number of each token's document in its row) and `positions`, both of that shape, there are
`borders` as well: see `trainer.sequence`.  With a context axis all but those two are this rank's slice: (B, seq_len /
mesh.context)."""


class TrainLoader:
    """An endless iterator over this rank's micro-batches.

    Its state advances when the last micro-batch of a step has been handed out, however far workers have read ahead:
    saved between two steps, it is exact.  It can be loaded on another number of ranks or workers, and with another
    micro-batch or global batch.  The global random generators are not used.
    """

    @classmethod
    def from_config(
        cls, source: Source, config: RunConfig, rank: int, num_ranks: int, device: torch.device
    ) -> TrainLoader:
        """Return the loader that a configuration describes, for one rank and its device.

        Raises UserError for data that are not what `train.objective` is for.
        """
        _check_rows(source, config)
        check_tokenizer(source, config)
        return cls(
            source,
            seed=config.data.seed,
            order=find_order(source, config),
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=int(config.train.micro_batch_size),
            dp_rank=rank // config.context,
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
        self._dp_rank, self._share = dp_rank, global_batch_size // num_dp_ranks
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self.slices = slices
        """The slices of its samples that this rank takes; the other ranks that share them read the same ones."""
        self._samples = self._step_start = 0
        self.should_abandon: Callable[[], bool] = lambda: False
        """Asked while a micro-batch is waited for; once it is true, `WaitAbandoned` is raised in its place."""
        self.fingerprint = _fingerprint_of(source)
        """Of the data, kept with the position; the same on all ranks."""
        self._num_yielded = 0
        self._batches: Any = None
        if num_workers and not source.waits_for_storage:
            atexit.register(_close_if_alive, weakref.ref(self))

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per step on this rank."""
        return self._share // self._micro_batch_size

    @property
    def samples(self) -> int:
        """Samples, over all ranks, that the finished steps have consumed."""
        return self._samples

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The inputs of the order from here on, the same on all ranks: position, number of samples, seed, and
        a digest of the data.
        """
        return self._samples, len(self.source), self._seed, _fingerprint_of(self.source).content

    @property
    def epochs(self) -> dict[str, float]:
        """The passes of the finished steps over each source: `epoch_<source>`; `epoch` of one alone."""
        return {f"epoch_{name}" if name else "epoch": n for name, n in epochs(self._order, self._samples).items()}

    def usage_by_phase(self, steps: int) -> list[SourceUsage]:
        """Return what a run of `steps` steps reads, by phase and source."""
        return usage_by_phase(self._order, self._global_batch_size, steps, self.source.seq_len)

    def next_samples(self, of_all_ranks: bool = False) -> NDArray[np.int64]:
        """Return the indices of the samples that this rank, or all of them in turn, will read for the next step."""
        if of_all_ranks:
            positions = self._samples + np.arange(self._global_batch_size)
            return self._order.at(positions)
        return np.concatenate(list(islice(self._sample_indices(), self.micro_batches_per_step)))

    def beginning(self, num_tokens: int, slices: Slices | None = None) -> Batch:
        """Return the first tokens of the sample that this rank reads next, (1, num_tokens), or a slice of these."""
        whole = entries(self.source.batch(self.next_samples()[:1]))
        is_of_tokens = {name: entry.ndim > 1 and entry.shape[1] == self.source.seq_len for name, entry in whole.items()}
        first = {name: entry[:, :num_tokens] if is_of_tokens[name] else entry for name, entry in whole.items()}
        return _raise_if_failed(_tensors(first if slices is None else slice_batch(first, slices), pins=False))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._open()
        if not self._num_yielded:
            self._step_start = self._samples
        batch = _raise_if_failed(next(self._batches))
        self._num_yielded += 1
        if self._num_yielded == self.micro_batches_per_step:
            self._num_yielded = 0
            self._samples += self._global_batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and in which order of which data it is one: the same on every rank."""
        return {"samples": self._samples, "data": self.fingerprint.to_state(), **self._order.past(self._samples)}

    def changes_outside(self, plain: Mapping[str, Any], allowed: Collection[str]) -> tuple[list[str], list[str]]:
        """Return how the data, and their order so far, differ from those of a stored state: what forbids to go on, and
        what is only told.
        """
        if "data" not in plain:
            return [], ["does not record its training data, so changes to it cannot be detected"]
        refused, told = self.fingerprint.changes(plain["data"], allowed)
        others = self._order.changes(plain, plain["samples"], self._global_batch_size, allowed)
        return [*refused, *others[0]], [*told, *others[1]]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the position of `state`."""
        self.close()
        self._samples = self._step_start = int(state["samples"])

    def rewind_step(self) -> None:
        """Be where the step began whose micro-batches were taken last, all or some: it does not take place."""
        self.close()
        self._samples = self._step_start

    def close(self) -> None:
        """End the thread or the workers, if there are any; workers that do not answer within seconds are killed.

        The loader stays usable: the next micro-batch is the first one of the step that is not finished.
        """
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._num_yielded = 0

    def _open(self) -> Iterator[Batch | TrainingFailed]:
        """Return the micro-batches from here on, made by a thread, by workers, or as they are asked for."""
        made = _BatchReader(self.source, self.slices)
        num_bytes = 16 * self._micro_batch_size * self.source.seq_len
        if self._num_workers and not self.source.waits_for_storage:
            most = max(1, min(_MAX_IN_MESSAGE, _MAX_MESSAGE_BYTES // num_bytes))
            return _Workers(made, self._sample_indices(), self._num_workers, most, self._pin_memory)
        most = max(2, min(_MAX_PREFETCHED, _MAX_PREFETCHED_BYTES // num_bytes))
        device = torch.cuda.current_device() if self._pin_memory else None
        everywhere = self._global_batch_size
        steps = _indices(self._order, self._samples, everywhere, 0, everywhere, everywhere)
        own = slice(self._dp_rank * self._share, (self._dp_rank + 1) * self._share)
        batches = _batches_in_process(made, self.source.follow(self._sample_indices(), steps, own), device)
        if not self.source.waits_for_storage:
            return batches
        return Prefetcher(batches, most, lambda: self.should_abandon(), is_nonblocking=self.source.is_here)

    def _sample_indices(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of one micro-batch after the other."""
        own = self._dp_rank * self._share
        return _indices(self._order, self._samples, self._global_batch_size, own, self._share, self._micro_batch_size)


_MAX_PREFETCHED, _MAX_PREFETCHED_BYTES = 16, 4 << 20
"""Micro-batches, and bytes of them, that a thread has ready at most.  What has left the processor's caches before it is
used costs as much again."""
_MAX_IN_MESSAGE, _MAX_MESSAGE_BYTES = 32, 8 << 20
"""The same for what a worker hands over at a time."""


def _indices(
    order: SampleOrder, start: int, global_batch: int, own: int, share: int, micro_batch: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of a rank's micro-batches from position `start` on: of each global batch its samples `own` to
    `own + share`.  Many steps are computed at a time, which is cheap.
    """
    num_updates = max(1, 4096 // share)
    positions = np.arange(num_updates)[:, None] * global_batch + own + np.arange(share)
    while True:
        yield from order.at(start + positions).reshape(-1, micro_batch)
        start += num_updates * global_batch


def _batches_in_process(
    batches: _BatchReader, indices: Iterator[NDArray[np.int64]], device: int | None
) -> Generator[Batch | TrainingFailed]:
    """Yield the micro-batches, in pinned memory if there is a device to copy them to."""
    if device is not None:
        torch.cuda.set_device(device)  # of this thread, which would otherwise pin memory for the first one
    for some in indices:
        yield _tensors(batches.read(some), device is not None)


class _Workers:
    """The micro-batches that worker processes make."""

    def __init__(
        self, made: _BatchReader, indices: Iterator[NDArray[np.int64]], num_workers: int, most: int, pins: bool
    ):
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
            loader = StatefulDataLoader(
                _Messages(made),
                batch_sampler=_group_into_messages(indices, most),
                collate_fn=_identity,
                num_workers=num_workers,
                worker_init_fn=_ignore_signals,
                # It draws a seed for its workers, from the global generator if it has none of its own.
                generator=torch.Generator(),
                # Its own state holds each worker's, so that it loads on the same number of workers only: never taken.
                snapshot_every_n_steps=2**62,
            )
            self._messages: Any = iter(loader)
        self._pins = pins
        self._ready: deque[Arrays | TrainingFailed] = deque()

    def __iter__(self) -> Iterator[Batch | TrainingFailed]:
        return self

    def __next__(self) -> Batch | TrainingFailed:
        if not self._ready:
            self._ready.extend(_unpack(next(self._messages)))
        return _tensors(self._ready.popleft(), self._pins)

    def close(self) -> None:
        """End the workers; those that do not answer within seconds are killed."""
        workers = self._messages._workers
        self._messages = None  # the last reference: the iterator's own clean-up runs here
        for worker in workers:
            if worker.is_alive():
                worker.kill()  # they ignore SIGTERM, which is all that the clean-up sends


Message: TypeAlias = "dict[str, Tensor] | list[Arrays | TrainingFailed]"


class _Messages(Dataset["Message"]):
    """Several micro-batches at a time: what `StatefulDataLoader` asks of a dataset.

    Each entry is one tensor for all of them: torch hands a tensor of another process over through a file of its own,
    which costs more than a micro-batch does.
    """

    def __init__(self, batches: _BatchReader) -> None:
        self._batches = batches

    def __getitems__(self, message: list[NDArray[np.int64]]) -> Message:
        found = [self._batches.read(indices) for indices in message]
        whole = [batch for batch in found if not isinstance(batch, TrainingFailed)]
        if len(whole) < len(found):
            return found
        return {name: torch.from_numpy(np.stack([batch[name] for batch in whole])) for name in whole[0]}


def _unpack(message: Message) -> Iterable[Arrays | TrainingFailed]:
    if isinstance(message, list):
        return message
    names, arrays = list(message), (tensor.numpy() for tensor in message.values())
    return [dict(zip(names, entries, strict=True)) for entries in zip(*arrays, strict=True)]


def _group_into_messages(indices: Iterator[NDArray[np.int64]], most: int) -> Iterator[list[NDArray[np.int64]]]:
    """Yield what workers are asked for at a time: one micro-batch at first, so that training soon begins, then more."""
    length = 1
    while message := list(islice(indices, length)):
        yield message
        length = min(most, 2 * length)


def _fingerprint_of(source: Source) -> Fingerprint:
    try:
        return source.fingerprint
    except ShardError as error:
        raise UserError(f"the data cannot be read: {error}") from error


def attended_length(loader: object) -> float | None:
    """Return the `attended` of what a loader of this room reads; None of any other."""
    return loader.source.attended if isinstance(loader, TrainLoader) else None


def _check_rows(source: Source, config: RunConfig) -> None:
    objective = config.train.objective
    if source.rows_per_sample == config.rows_per_sample:
        return
    if config.rows_per_sample > 1:
        rule = f"needs preference pairs, but data.source={config.data.source} has none"
        fix = "use data.source=chat and files with prompt, chosen and rejected"
        raise setting_error("train.objective", objective, rule, fix=fix)
    raise setting_error("train.objective", objective, "does not support preference pairs", "dpo")


class EvalLoader:
    """This rank's share of the first `num_batches` global batches (0: of all samples), in order; can be repeated.

    Every rank gets the same number of micro-batches, so that collectives match; what is missing at the end is filled
    with samples whose targets are all ignored.
    """

    @classmethod
    def from_config(cls, source: Source, config: RunConfig, rank: int, num_ranks: int) -> EvalLoader:
        """Return the loader that a configuration describes, for one rank; see `TrainLoader.from_config`."""
        _check_rows(source, config)
        check_tokenizer(source, config)
        return cls(
            source,
            num_batches=config.eval.steps,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=int(config.train.micro_batch_size),
            dp_rank=rank // config.context,
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
        self.source, self._batches = source, _BatchReader(source, slices)
        self.should_abandon: Callable[[], bool] = lambda: False
        """Asked while data that are elsewhere are waited for; once it is true, samples that count for nothing come in
        place of the next micro-batch, and no others after them: the evaluation is to be abandoned."""
        self.num_samples = min(len(source), num_batches * global_batch_size or len(source))
        self._shape = (-1, num_dp_ranks, micro_batch_size)
        self._dp_rank = dp_rank

    def __len__(self) -> int:
        return len(self._sample_indices())

    def __iter__(self) -> Iterator[Batch]:
        made = (_tensors(self._batches.read(indices), pins=False) for indices in self._sample_indices())
        if self.source.is_here or not self.source.waits_for_storage:
            yield from map(_raise_if_failed, made)
            return
        coming = Prefetcher(made, 2, lambda: self.should_abandon())
        try:
            yield from map(_raise_if_failed, coming)
        except WaitAbandoned:
            nothing = np.full(self._shape[-1], -1)
            yield _raise_if_failed(_tensors(self._batches.read(nothing), pins=False))
            raise TrainingFailed("held-out data do not come, and the run was asked to stop") from None
        finally:
            coming.close()

    def _sample_indices(self) -> NDArray[np.int64]:
        """Return this rank's indices, a row for each micro-batch: ranks take micro-batches in turn."""
        _, num_ranks, micro_batch_size = self._shape
        missing = -self.num_samples % (num_ranks * micro_batch_size)
        indices = np.pad(evenly_spaced_indices(self.source, self.num_samples), (0, missing), constant_values=-1)
        return indices.reshape(self._shape)[:, self._dp_rank]


Arrays: TypeAlias = "dict[str, NDArray[Any]]"


class _BatchReader:
    """Complete micro-batches, by the indices of their samples.

    In place of one that cannot be had stands why: an exception of a worker's would arrive with its traceback for text.
    """

    def __init__(self, source: Source, slices: Slices | None) -> None:
        self._source, self._slices = source, slices

    def read(self, indices: NDArray[np.int64]) -> Arrays | TrainingFailed:
        """Return the micro-batch of some samples, or this rank's slice of it."""
        try:
            batch = entries(self._source.batch(indices))
        except ShardError as error:
            return TrainingFailed(str(error))
        ids = (batch["tokens"], batch["targets"])
        if not self._source.checks_ids and (found := _out_of_vocabulary(self._source.vocab_size, indices, *ids)):
            return TrainingFailed(found)
        return batch if self._slices is None else slice_batch(batch, self._slices)


def slice_batch(batch: Arrays, slices: Slices) -> Arrays:
    """Return a slice of the entries that have a value for each token of a row, but for `documents`, which stays whole.

    Targets were shifted before: a slice's last one is the first token of the next.
    """
    found = dict(batch)
    for name, entry in batch.items():
        if entry.ndim > 1 and entry.shape[1] == slices.seq_len and name != "documents":
            found[name] = np.concatenate([entry[:, start:stop] for start, stop in slices.pieces], axis=1)
    return found


def _tensors(batch: Arrays | TrainingFailed, pins: bool) -> Batch | TrainingFailed:
    if isinstance(batch, TrainingFailed):
        return batch
    tensors = {name: torch.from_numpy(entry) for name, entry in batch.items()}
    if "documents" in tensors:  # here the host can count them; after the transfer it would have to wait for that
        tensors["borders"] = find_borders(tensors["documents"])
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pins else tensors


def _raise_if_failed(batch: Batch | TrainingFailed) -> Batch:
    if isinstance(batch, TrainingFailed):
        raise batch
    return batch


def _out_of_vocabulary(limit: int, indices: NDArray[np.int64], *batch: NDArray[np.int64]) -> str:
    """Return what to say of the first id that is beyond the vocabulary; nothing if none is."""
    for ids in batch:
        if ids.max(initial=0) >= limit:
            row, position = np.argwhere(ids >= limit)[0]
            rule = f"ids must be below {limit}, the size of the vocabulary"
            return f"sample {indices[row]} holds the id {ids[row, position]}: {rule}"
    return ""


def _identity(message: Message) -> Message:
    return message


def _ignore_signals(worker_id: int) -> None:
    """Let a worker outlive the signal that asks its whole process group to stop: its rank still has to save."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _close_if_alive(reference: weakref.ref[TrainLoader]) -> None:
    """End workers before multiprocessing waits for them: they ignore the SIGTERM that it would send."""
    loader = reference()
    if loader is not None:
        loader.close()
