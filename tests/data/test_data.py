"""Data pipeline: every sample is at its position for all ranks and workers, and every token is a target once."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.forked import REPOSITORY
from tests.helpers.gate import wait_until
from trainer.config import DataSection
from trainer.data import stdlib as stdlib_module
from trainer.data.loader import EvalLoader, Prefetcher, TrainLoader
from trainer.data.mixture import sample_at
from trainer.data.opening import open_source
from trainer.data.shards import Shard, ShardWriter
from trainer.data.source import IGNORE, Source, SourceSubset, SyntheticSource, TokenSource
from trainer.data.stdlib import StdlibCorpus, find_source_files, gzip_bits_per_byte
from trainer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, find_tokenizer
from trainer.errors import UserError
from trainer.files import CHECKSUM


class Numbered(Source):
    """Sample i contains the number i, and the number of threads of the process that made it."""

    seq_len, vocab_size = 2, 10**6

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.stack([indices, indices * 0 + torch.get_num_threads()], axis=1)
        return tokens, np.where(indices[:, None] < 0, IGNORE, tokens)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def write_shards(folder: Path, *shards: list[bytes], name: str = "text", tokenizer: Tokenizer | None = None) -> str:
    """Write shards of documents and return the glob that names them."""
    for number, documents in enumerate(shards):
        writer = ShardWriter(folder / f"{name}-{number:05d}.bin", tokenizer or ByteTokenizer())
        for text in documents:
            writer.write((tokenizer or ByteTokenizer()).encode(text), len(text))
            writer.end_document()
        writer.close()
        writer.publish()
    return str(folder / f"{name}-?????.bin")


def without_checksums(folder: Path) -> None:
    """Rewrite shards as earlier versions wrote them, without checksums, so that their content can be modified."""
    for path in folder.glob("*.json"):
        content = {**json.loads(path.read_text()), "checksum": ""}
        path.write_text(json.dumps({name: value for name, value in content.items() if name != CHECKSUM}))


def test_run_reports_dropped_documents(tmp_path: Path) -> None:
    """It reports unreadable documents, and empty ones if there are more than a few."""

    def said_of(name: str, *lines: str, bad: str = "skip") -> list[str]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        data = DataSection(
            source="tokens", path=str(path), bad=bad, seq_len=8, cache_dir=str(tmp_path / "cache"), holdout=0.2
        )
        return [
            source.summary for source in (open_source(data, None, "train"), open_source(data, None, "eval")) if source
        ]

    text = [json.dumps({"text": f"a text of some length, number {number}"}) for number in range(20)]
    for said in said_of("good", *text, bad="error"):
        assert "skipped" not in said
    for said in said_of("bad", *text, '{"no": 1}', '{"text": ""}', '{"text": ""}'):
        assert "warning: 1 of 23 documents cannot be read and were skipped:\n" in said
        assert "bad.jsonl:21 has no such key" in said
        assert said.endswith("\nwarning: 2 of 23 documents are empty and were skipped")


def read_all(source: Source) -> tuple[np.ndarray, np.ndarray]:
    return source.batch(np.arange(len(source)))


def message_of(data: DataSection, vocab_size: int | None = None, split: Any = "train") -> str:
    with pytest.raises(UserError) as caught:
        open_source(data, vocab_size, split)
    return str(caught.value)


# -- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [*range(1, 70), 127, 128, 129, 1000, 4095, 4097, 65537, 300_001])
def test_each_epoch_visits_every_sample_once(num_samples: int) -> None:
    for seed in (0, 5):
        epochs = sample_at(np.arange(2 * num_samples), num_samples, seed).reshape(2, num_samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(num_samples), (2, 1)))


@pytest.mark.parametrize("num_samples", [2**31 + 11, 2**40 - 1, 2**40])
def test_huge_sizes_stay_in_range_without_collision(num_samples: int) -> None:
    positions = np.concatenate([np.arange(20_000), num_samples - 1 - np.arange(20_000)])
    found = sample_at(positions, num_samples, 3)
    assert found.min() >= 0
    assert found.max() < num_samples
    assert len(np.unique(found)) == len(found)


def test_order_has_not_changed_between_versions() -> None:
    """Runs resume from a position: changing these numbers would silently repeat some samples and skip others."""
    assert sample_at(np.arange(8), 10, 0).tolist() == [3, 5, 9, 4, 1, 6, 8, 7]
    assert sample_at(np.array([9, 10, 31]), 10, 0).tolist() == [0, 9, 2]
    assert sample_at(np.arange(8), 10, 1).tolist() == [5, 7, 9, 4, 6, 8, 3, 2]
    assert sample_at(np.arange(8), 1000, 0).tolist() == [265, 119, 68, 959, 986, 297, 837, 712]
    assert sample_at(np.array([0, 2**40 - 1, 3 * 2**40 + 1]), 2**40, 123).tolist() == [
        232321141618,
        334594879923,
        340433198073,
    ]


def test_the_order_is_random() -> None:
    num_samples, num_epochs = 7, 7000
    epochs = sample_at(np.arange(num_samples * num_epochs), num_samples, 1).reshape(num_epochs, num_samples)
    counts = np.stack([np.bincount(epochs[:, place], minlength=num_samples) for place in range(num_samples)])
    expected = num_epochs / num_samples
    assert ((counts - expected) ** 2 / expected).sum() < 36 + 5 * math.sqrt(72)  # chi-square, 36 degrees of freedom

    one = sample_at(np.arange(50_000), 50_000, 0)
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.03
    for other in (sample_at(np.arange(50_000), 50_000, 1), sample_at(50_000 + np.arange(50_000), 50_000, 0)):
        assert (one == other).sum() < 20


def test_sample_at_a_position_does_not_depend_on_the_query() -> None:
    together = sample_at(np.arange(300), 77, 4)
    assert [int(sample_at(np.array([p]), 77, 4)[0]) for p in range(300)] == together.tolist()
    assert sample_at(np.arange(300).reshape(3, 100), 77, 4).tolist() == together.reshape(3, 100).tolist()


# -- train loader -----------------------------------------------------------------------------------------------


def take(loader: TrainLoader, num_updates: int) -> np.ndarray:
    """Return the samples of some steps, shape (steps, samples of this rank in a step)."""
    count = num_updates * loader.micro_batches_per_step
    rows = [next(loader)["tokens"][:, 0].numpy() for _ in range(count)]
    return np.concatenate(rows).reshape(num_updates, -1)


def take_all_ranks(
    num_ranks: int, micro: int, num_updates: int, state: dict[str, Any] | None = None, **more: Any
) -> Any:
    parts = []
    for rank in range(num_ranks):
        loader = make_loader(dp_rank=rank, num_dp_ranks=num_ranks, micro_batch_size=micro, **more)
        if state is not None:
            loader.load_state_dict(state)
        parts.append(take(loader, num_updates))
        loader.close()
    return np.concatenate(parts, axis=1)


def make_loader(num_samples: int = 100, **more: Any) -> TrainLoader:
    settings = {"seed": 3, "global_batch_size": 24, "micro_batch_size": 2, **more}
    return TrainLoader(Numbered(num_samples), **settings)


@pytest.mark.parametrize(
    ("num_ranks", "micro"), [(1, 24), (1, 1), (2, 3), (3, 2), (4, 6), (4, 1), (6, 4), (12, 1), (24, 1)]
)
def test_global_batches_do_not_depend_on_ranks_or_micro_batches(num_ranks: int, micro: int) -> None:
    expected = sample_at(np.arange(12 * 24), 100, 3).reshape(12, 24)  # almost three epochs
    assert take_all_ranks(num_ranks, micro, 12).tolist() == expected.tolist()


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    expected = take_all_ranks(2, 3, 5)
    assert take_all_ranks(2, 3, 5, num_workers=2).tolist() == expected.tolist()


KILLED_WITH_WORKERS = """
import multiprocessing, os, signal, sys
from trainer.data.loader import TrainLoader
from trainer.data.source import SyntheticSource

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    source = SyntheticSource(16, 50, 0, "train")
    loader = TrainLoader(source, seed=0, global_batch_size=4, micro_batch_size=2, num_workers=1)
    next(loader)
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", pytest.param("fork", marks=pytest.mark.campaign)])
def test_workers_end_when_their_rank_is_killed(method: str, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED_WITH_WORKERS)
    with (tmp_path / "out").open("w") as out:  # no pipe, which a worker that lives on would hold open
        subprocess.run([sys.executable, str(tmp_path / "killed.py"), method], stdout=out, cwd=REPOSITORY, timeout=120)
    worker = Path("/proc", (tmp_path / "out").read_text().strip())
    wait_until(lambda: not worker.exists() or "\nState:\tZ" in (worker / "status").read_text(), "the worker ended", 20)


def test_more_steps_than_one_plan_covers() -> None:
    loader = make_loader(global_batch_size=2, micro_batch_size=1)
    assert take(loader, 2100).ravel().tolist() == sample_at(np.arange(4200), 100, 3).tolist()


def test_batches_are_int64_tensors_of_the_right_shape() -> None:
    batch = next(TrainLoader(SyntheticSource(16, 50, 0, "train"), seed=0, global_batch_size=4, micro_batch_size=2))
    assert set(batch) == {"tokens", "targets"}
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 16)
        assert tensor.is_contiguous()
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_is_exact_although_workers_read_ahead(num_workers: int) -> None:
    straight = take(make_loader(), 9)
    first = make_loader(num_workers=num_workers)
    assert take(first, 4).tolist() == straight[:4].tolist()
    assert first.state_dict()["samples"] == 4 * 24
    second = make_loader(num_workers=2 - num_workers)
    second.load_state_dict(first.state_dict())
    assert take(second, 5).tolist() == straight[4:].tolist()
    first.close()
    second.close()


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 8), (2, 12), (3, 4), (8, 3)])
def test_resume_on_another_number_of_ranks(num_ranks: int, micro: int) -> None:
    straight = take_all_ranks(4, 2, 9)
    rank = make_loader(dp_rank=3, num_dp_ranks=4)
    take(rank, 4)
    assert take_all_ranks(num_ranks, micro, 5, state=rank.state_dict()).tolist() == straight[4:].tolist()


def test_resume_with_another_global_batch() -> None:
    straight = take_all_ranks(1, 1, 6).ravel()
    found = take_all_ranks(2, 2, 4, state={"samples": 48}, global_batch_size=12)
    assert found.ravel().tolist() == straight[48 : 48 + 48].tolist()


def test_state_advances_with_the_last_micro_batch_of_a_step() -> None:
    loader = make_loader(micro_batch_size=8, global_batch_size=24)
    seen = []
    for _ in range(7):
        next(loader)
        seen.append(loader.samples)
    assert seen == [0, 0, 24, 24, 24, 48, 48]


def test_loading_in_the_middle_of_a_step_starts_at_that_step() -> None:
    loader = make_loader(micro_batch_size=8)
    straight = take(make_loader(micro_batch_size=8), 3)
    take(loader, 1)
    next(loader)  # one micro-batch of three
    loader.load_state_dict(loader.state_dict())
    found = [next(loader)["tokens"][:, 0].tolist() for _ in range(5)]
    assert found == straight[1:].reshape(-1, 8).tolist()[:5]
    assert loader.samples == 2 * 24


def test_more_ranks_than_samples() -> None:
    assert take_all_ranks(8, 3, 4, num_samples=1).tolist() == np.zeros((4, 24)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_random_generators_are_unchanged(num_workers: int) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    loader = make_loader(num_workers=num_workers)
    take(loader, 2)
    loader.close()
    list(EvalLoader(SyntheticSource(8, 50, 0, "eval"), global_batch_size=64, micro_batch_size=32))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert random.getstate() == before[2]


@pytest.mark.slow
def test_workers_survive_signals_and_end_with_close() -> None:
    others = set(multiprocessing.active_children())
    loader = make_loader(num_workers=2)
    batch = next(loader)
    assert batch["tokens"][:, 1].tolist() == [1, 1]  # threads in a worker
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    take(loader, 3)
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert set(multiprocessing.active_children()) == others


@pytest.mark.slow
def test_process_that_does_not_close_its_loader_ends() -> None:
    """Workers ignore SIGTERM, the only signal that multiprocessing sends them at exit before it waits for them."""
    program = (
        "from tests.data.test_data import make_loader; loader = make_loader(num_workers=1); next(loader); print('end')"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_thread_prefetches_and_raises_errors_at_the_right_item() -> None:
    made: list[int] = []
    full, go_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == 4:
                full.set()
            yield number
        go_on.wait()
        raise ValueError("the end")

    prefetcher = Prefetcher(items(), capacity=4)
    assert [next(prefetcher) for _ in range(2)] == [
        0,
        1,
    ]  # two of four items are left: the thread continues
    assert full.wait(60)
    assert [next(prefetcher) for _ in range(8)] == list(range(2, 10))
    assert made == list(range(10))
    go_on.set()
    for _ in range(2):
        with pytest.raises(ValueError, match="the end"):
            next(prefetcher)
    prefetcher.close()


@pytest.mark.parametrize(("soon_s", "makes_some"), [(0.0, False), (math.inf, True)])
def test_idle_caller_produces_items_itself(monkeypatch: pytest.MonkeyPatch, soon_s: float, makes_some: bool) -> None:
    """A thread would only contend with it for the GIL, and take 50% more CPU time per micro-batch."""
    monkeypatch.setattr("trainer.data.loader._IDLE_CALLER_S", soon_s)
    makers: list[str] = []

    def items() -> Iterator[int]:
        for number in range(200):
            makers.append(threading.current_thread().name)
            yield number
        raise ValueError("the end")

    prefetcher = Prefetcher(items(), capacity=4, is_nonblocking=True)
    caller = threading.current_thread().name
    assert [next(prefetcher) for _ in range(150)] == list(range(150))
    assert (caller in makers) == makes_some
    monkeypatch.setattr("trainer.data.loader._IDLE_CALLER_S", 0.0)  # the caller works again, and the thread resumes
    first = len(makers)
    assert [next(prefetcher) for _ in range(50)] == list(range(150, 200))
    assert set(makers[first:]) == {"data"}
    for _ in range(2):
        with pytest.raises(ValueError, match="the end"):
            next(prefetcher)
    prefetcher.close()


def test_error_in_an_item_that_the_caller_produces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.loader._IDLE_CALLER_S", math.inf)

    def items() -> Iterator[int]:
        yield from range(100)
        raise ValueError("the end")

    prefetcher = Prefetcher(items(), capacity=4, is_nonblocking=True)
    assert [next(prefetcher) for _ in range(100)] == list(range(100))
    for _ in range(2):
        with pytest.raises(ValueError, match="the end"):
            next(prefetcher)
    prefetcher.close()
    assert not any(thread.name == "data" for thread in threading.enumerate())


def test_prefetching_thread_ends_with_its_loader() -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(itertools.count(), capacity=2)
    assert next(prefetcher) == 0
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "data")
    del prefetcher
    thread.join(60)
    assert threading.active_count() == before


# -- eval loader ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (16, 3)])
@pytest.mark.parametrize(("num_batches", "expected"), [(0, 21), (1, 8), (2, 16), (9, 21)])
def test_evaluation_sees_each_sample_once_on_any_number_of_ranks(
    num_ranks: int, micro: int, num_batches: int, expected: int
) -> None:
    seen, lengths = [], set()
    for rank in range(num_ranks):
        loader = EvalLoader(
            Numbered(21),
            global_batch_size=8,
            micro_batch_size=micro,
            dp_rank=rank,
            num_dp_ranks=num_ranks,
            num_batches=num_batches,
        )
        batches = list(loader)
        assert [b["tokens"].tolist() for b in loader] == [b["tokens"].tolist() for b in batches]  # once more
        assert {b["tokens"].shape for b in batches} == {(micro, 2)}
        lengths.add((len(loader), len(batches)))
        for batch in batches:
            kept = batch["targets"][:, 0] != IGNORE
            assert (batch["tokens"][~kept, 0] == -1).all()
            seen += batch["tokens"][kept, 0].tolist()
    assert sorted(seen) == list(range(expected))
    count = math.ceil(expected / (num_ranks * micro))
    assert lengths == {(count, count)}


# -- windows over tokens ----------------------------------------------------------------------------------------

DOCUMENTS = [b"abcdefg", b"", b"h", b"ijklmnopqrstuvwxyz", b"0123"]


def stream_of(documents: list[bytes]) -> list[int]:
    return [token for text in documents for token in (*text, 256)]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 7, 33, 34])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_packed_every_token_but_the_first_is_a_target_once(tmp_path: Path, seq_len: int, cut: int) -> None:
    """Also if windows cross shard boundaries, and if the stream does not fill the last window."""
    shards = [part for part in (DOCUMENTS[:cut], DOCUMENTS[cut:3], DOCUMENTS[max(cut, 3) :]) if part]
    data = DataSection(source="tokens", path=write_shards(tmp_path, *shards), seq_len=seq_len)
    source = open_source(data, 257, "train")
    stream = stream_of(DOCUMENTS)
    tokens, targets = read_all(source)
    assert len(source) == math.ceil((len(stream) - 1) / seq_len)
    assert tokens.shape == targets.shape == (len(source), seq_len)
    kept = targets != IGNORE
    assert targets[kept].tolist() == stream[1:]
    assert tokens[kept].tolist() == stream[:-1]
    assert (tokens[~kept] == 256).all()
    assert source.bytes_per_token == pytest.approx(sum(map(len, DOCUMENTS)) / (len(stream) - 1))


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 18, 19, 40])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_unpacked_samples_lie_in_one_document(tmp_path: Path, seq_len: int, cut: int) -> None:
    shards = [part for part in (DOCUMENTS[:cut], DOCUMENTS[cut:]) if part]
    data = DataSection(source="tokens", path=write_shards(tmp_path, *shards), seq_len=seq_len, pack=False)
    source = open_source(data, 257, "train")
    expected = []
    for text in DOCUMENTS:
        document = [*text, 256]
        for start in range(0, len(document) - 1, seq_len):
            window = document[start : start + seq_len + 1]
            padding = seq_len + 1 - len(window)
            expected.append((window[:-1] + [256] * padding, window[1:] + [IGNORE] * padding))
    tokens, targets = read_all(source)
    assert list(zip(tokens.tolist(), targets.tolist(), strict=True)) == expected
    num_targets = int((targets != IGNORE).sum())
    assert source.bytes_per_token == pytest.approx(sum(map(len, DOCUMENTS)) / num_targets)


def test_index_minus_one_is_ignored(tmp_path: Path) -> None:
    path = write_shards(tmp_path, DOCUMENTS)
    for source in (
        open_source(DataSection(source="tokens", path=path, seq_len=4), None, "train"),
        open_source(DataSection(source="tokens", path=path, seq_len=4, pack=False), None, "train"),
        SyntheticSource(4, 9, 0, "train"),
    ):
        tokens, targets = source.batch(np.array([-1, 0, -1]))
        assert (targets[[0, 2]] == IGNORE).all()
        assert ((tokens >= 0) & (tokens < source.vocab_size)).all()
        assert targets[1].tolist() == source.batch(np.array([0]))[1][0].tolist()


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    path = write_shards(tmp_path, DOCUMENTS[:2], [*DOCUMENTS[2:], b"long" * 5000])
    source = open_source(DataSection(source="tokens", path=path, seq_len=4), None, "train")
    before = read_all(source)  # maps the files
    content = pickle.dumps(source)
    assert len(content) < 3000
    for mine, theirs in zip(before, read_all(pickle.loads(content)), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")]
)
def test_token_dtype_is_the_smallest_for_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    class Sized(ByteTokenizer):
        end_id = vocab_size - 1
        end_ids = (end_id,)

    tokenizer = Sized()
    tokenizer.vocab_size = vocab_size
    path = write_shards(tmp_path, [b"ab"], tokenizer=tokenizer)
    shard = Shard(Path(path.replace("?????", "00000")))
    assert shard.info.dtype == dtype
    assert shard.path.stat().st_size == 3 * np.dtype(dtype).itemsize
    source = open_source(DataSection(source="tokens", path=path, seq_len=2), vocab_size, "train")
    assert read_all(source)[1].tolist() == [[98, vocab_size - 1]]


# -- generated --------------------------------------------------------------------------------------------------


def test_synthetic_samples_repeat_a_pattern() -> None:
    source = SyntheticSource(100, 50, 0, "train")
    tokens, targets = source.batch(np.arange(200))
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    periods = set()
    for row in np.concatenate([tokens, targets[:, -1:]], axis=1):
        periods.add(next(p for p in range(1, 101) if np.array_equal(row[p:], row[:-p])))
    assert min(periods) >= 2  # a pattern of four may repeat within itself
    assert max(periods) == 32
    assert len(periods) > 20
    assert tokens.min() == 0
    assert tokens.max() == 49


def test_synthetic_samples_have_not_changed_between_versions() -> None:
    train, held_out = SyntheticSource(8, 100, 0, "train"), SyntheticSource(8, 100, 1, "eval")
    assert (len(train), len(held_out)) == (2**20, 256)
    assert train.batch(np.array([0, 2**20 - 1]))[0].tolist() == [
        [58, 49, 56, 3, 25, 67, 96, 5],
        [69, 61, 55, 13, 0, 24, 74, 62],
    ]
    assert held_out.batch(np.array([0]))[0].tolist() == [[87, 55, 67, 12, 70, 79, 18, 68]]
    assert train.bits_per_byte(1.0) is None
    assert open_source(DataSection(source="synthetic"), None, "eval").vocab_size == 256  # type: ignore[union-attr]


# -- the standard library ---------------------------------------------------------------------------------------


def test_stdlib_holds_out_whole_files_and_counts_every_byte(cache: str) -> None:
    data = DataSection(cache_dir=cache, seq_len=512)
    train, held_out = open_source(data, 257, "train"), open_source(data, 257, "eval")
    assert held_out is not None
    text = b"".join(StdlibCorpus().documents("eval"))
    share = len(text) / sum(map(len, StdlibCorpus().documents("train")))
    assert 0.01 < share < 0.2
    assert not set(StdlibCorpus().documents("eval")) & set(filter(None, StdlibCorpus().documents("train")))

    targets = read_all(held_out)[1]
    targets = targets[targets != IGNORE]
    assert ByteTokenizer().decode(targets) == text[1:].decode(errors="replace")  # the first byte is no target
    # A model that gives every target one bit, in nats: the sum over targets is what the text takes.
    assert held_out.bits_per_byte(math.log(2)) == pytest.approx(len(targets) / len(text))
    assert train.bytes_per_token is not None
    assert 0.999 < train.bytes_per_token < 1


def test_stdlib_excludes_tests_and_packages(tmp_path: Path) -> None:
    names = [f"kept_{number}.py" for number in range(100)]
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "notes.txt"]
    for name in [*names, "json/kept.py", *left_out]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = StdlibCorpus(tmp_path)
    found = [text.decode() for split in ("train", "eval") for text in corpus.documents(split)]  # type: ignore[arg-type]
    assert sorted(found) == sorted([*names, "json/kept.py"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.source=stdlib.*\n.*data\.source=synthetic"):
        StdlibCorpus(tmp_path / "empty")


@pytest.fixture
def small_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of sixty small files, and a home without a cache."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for number in range(60):
        (folder / f"m{number}.py").write_text(f"x = {number}\n")
    monkeypatch.setattr(stdlib_module.sysconfig, "get_path", lambda _: str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return folder


def stdlib_text(**settings: Any) -> str:
    source = open_source(DataSection(seq_len=8, **settings), None, "train")
    tokens, targets = read_all(source)
    return ByteTokenizer().decode(np.concatenate([tokens[0, :1], targets[targets != IGNORE]]))


def test_stdlib_cache_is_used_and_rebuilt_if_damaged(small_stdlib: Path, tmp_path: Path, monkeypatch: Any) -> None:
    expected = stdlib_text()
    (entry,) = (tmp_path / "cache" / "meshtrainer").iterdir()
    files = {path.suffix: path for path in entry.iterdir()}
    assert set(files) == {".bin", ".idx", ".json"}
    contents = {suffix: path.read_bytes() for suffix, path in files.items()}

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", None)  # no second tokenization
        assert stdlib_text() == expected
    damages = {".bin": contents[".bin"][:-2], ".idx": contents[".idx"] + b"1", ".json": contents[".json"][:20]}
    for suffix, damage in damages.items():
        files[suffix].write_bytes(damage)
        assert stdlib_text() == expected
        assert files[suffix].read_bytes() == contents[suffix]
        files[suffix].unlink()
        assert stdlib_text() == expected

    (small_stdlib / "m3.py").write_text("y = 3\n")  # same length
    os.utime(small_stdlib / "m3.py", ns=(1, 1))
    find_source_files.cache_clear()  # as in another process
    assert "y = 3" in stdlib_text()


def test_stdlib_cache_is_in_the_configured_folder(small_stdlib: Path, tmp_path: Path, monkeypatch: Any) -> None:
    stdlib_text(cache_dir=str(tmp_path / "own" / "folder"))
    assert len(list((tmp_path / "own" / "folder").glob("*/*"))) == 3
    assert not (tmp_path / "cache").exists()

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # cannot become a folder
    stdlib_text()
    private = tmp_path / f"meshtrainer-{os.getuid()}"
    assert len(list(private.glob("*/*"))) == 3
    assert private.stat().st_mode & 0o77 == 0

    message = message_of(DataSection(cache_dir=str(tmp_path / "file")))  # set explicitly: no other folder is tried
    assert message.startswith(f"data.cache_dir={tmp_path / 'file'}: ")
    assert message.endswith("to fix: choose a writable folder")

    shutil.rmtree(private)
    private.symlink_to(tmp_path)  # created by another user
    assert "data.cache_dir=null" in message_of(DataSection())


def test_stdlib_cache_is_built_by_many_processes_at_once(small_stdlib: Path, tmp_path: Path) -> None:
    found: list[str] = []
    start = threading.Barrier(8)

    def build() -> None:
        start.wait()
        found.append(stdlib_text())

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(list((tmp_path / "cache" / "meshtrainer").iterdir())) == 1  # nothing temporary is left


def test_gzip_bits_per_byte() -> None:
    text = b"to be or not to be " * 1000
    assert gzip_bits_per_byte(text) == 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)
    assert gzip_bits_per_byte(np.random.default_rng(0).bytes(100_000)) == pytest.approx(8, rel=0.01)


# -- errors -----------------------------------------------------------------------------------------------------


def test_a_path_that_matches_nothing_names_the_nearest_file(tmp_path: Path) -> None:
    write_shards(tmp_path, DOCUMENTS, name="corpus")
    message = message_of(DataSection(source="tokens", path=str(tmp_path / "korpus-00000.bin")))
    assert message.startswith(f"data.path={tmp_path}/korpus-00000.bin: no such file")
    assert message.endswith(f"did you mean data.path={tmp_path}/corpus-00000.bin?")
    assert open_source(DataSection(source="tokens", path=str(tmp_path), seq_len=3), None, "train").tokenizer == "bytes"
    message = message_of(DataSection(source="tokens", path=str(tmp_path / "corpus-00000.json")))
    assert "give its .bin file" in message
    assert message.endswith("corpus-00000.bin?")
    assert "data.path=null" in message_of(DataSection(source="tokens"))
    assert open_source(DataSection(source="tokens", path=str(tmp_path / "*.bin"), seq_len=3), None, "eval") is None
    message = message_of(DataSection(source="tokens", path=str(tmp_path / "*.bin"), eval_path="none.bin"), split="eval")
    assert message.startswith("data.eval_path=none.bin: ")


def damage_metadata(folder: Path, **changes: Any) -> None:
    path = folder / "text-00000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "text-00000.json").unlink(), "metadata .*00000.json cannot be read"),
        (lambda folder: (folder / "text-00000.json").write_text("{"), "not the metadata of a token shard"),
        (lambda folder: (folder / "text-00000.json").write_text('{"dtype": 1}'), "not the metadata of a token shard"),
        (lambda folder: damage_metadata(folder, num_tokens="9"), "num_tokens is '9'"),
        (lambda folder: damage_metadata(folder, format=2), "format 2, but this version reads format 1"),
        (lambda folder: damage_metadata(folder, dtype="uint8"), "is damaged"),
        (lambda folder: os.truncate(folder / "text-00000.bin", 50), "has 50 bytes, but its metadata says 70"),
        (lambda folder: os.truncate(folder / "text-00000.idx", 8), "has 8 bytes, but its metadata says 48"),
        (lambda folder: (folder / "text-00000.idx").unlink(), "idx cannot be read"),
        (lambda folder: (folder / "text-00000.idx").write_bytes(bytes(48)), "00000.idx is damaged: its checksum is"),
        (lambda folder: write_other(folder), "must be made in the same way"),
    ],
)
def test_inconsistent_shards_are_rejected(tmp_path: Path, damage: Any, words: str) -> None:
    data = DataSection(source="tokens", path=write_shards(tmp_path, DOCUMENTS), seq_len=4, pack=False)
    open_source(data, 257, "train")
    damage(tmp_path)
    message = message_of(data)
    assert message.startswith(f"data.path={tmp_path}/text-?????.bin: ")
    assert re.search(words, message), message


def write_other(folder: Path, name: str = "text", number: int = 1) -> None:
    class Other(ByteTokenizer):
        name = "other"

    writer = ShardWriter(folder / f"{name}-{number:05d}.bin", Other())
    writer.write(np.zeros(9, dtype=np.int64), 9)
    writer.end_document()
    writer.close()
    writer.publish()


@pytest.mark.parametrize("spelled", ["{}/text-eval-00000.bin", "./text-eval-00000.bin", "link/text-eval-00000.bin"])
def test_held_out_shards_differ_from_training_shards_however_spelled(
    tmp_path: Path, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, DOCUMENTS)
    write_shards(tmp_path, DOCUMENTS, name="text-eval")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    data = DataSection(source="tokens", path="text-*.bin", eval_path=spelled.format(tmp_path), seq_len=4)
    message = message_of(data)
    assert "text-eval-00000.bin, which data.eval_path holds out" in message
    assert message.endswith("'data.path=text-?????.bin'")


def test_held_out_chats_must_differ_from_training_chats(tmp_path: Path) -> None:
    for name in "train", "held":
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    held = str(tmp_path / "held.jsonl")
    data = DataSection(source="chat", path=str(tmp_path), eval_path=held, seq_len=4)
    message = message_of(data)
    assert f"includes {held}, which data.eval_path holds out" in message
    assert message.endswith(f"data.path={tmp_path}/train.jsonl")
    mixed = dataclasses.replace(data, path={"own": str(tmp_path)}, eval_path={"own": held})
    assert "source own: data.path=" in message_of(mixed)


def test_held_out_shards_must_differ_and_have_the_same_tokenizer(tmp_path: Path) -> None:
    path = write_shards(tmp_path, DOCUMENTS)
    held_out = write_shards(tmp_path, DOCUMENTS, name="text-eval")
    too_wide = DataSection(source="tokens", path=str(tmp_path / "text-*.bin"), eval_path=held_out, seq_len=4)
    message = message_of(too_wide)
    assert "includes" in message
    assert message.endswith(f"'data.path={path}'")
    assert open_source(dataclasses.replace(too_wide, path=path), 257, "eval") is not None
    same = dataclasses.replace(too_wide, path=path, eval_path=path)
    assert open_source(same, 257, "eval") is not None

    write_other(tmp_path, "strange", 0)
    strange = dataclasses.replace(too_wide, path=path, eval_path=str(tmp_path / "strange-00000.bin"))
    message = message_of(strange, split="eval")
    assert message.startswith(f"data.eval_path={tmp_path}/strange-00000.bin: ")
    assert "tokenizer other" in message


def test_too_few_tokens_and_too_small_a_vocabulary(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [b"abc"])
    message = message_of(DataSection(source="tokens", path=path, seq_len=4))
    assert message.startswith("data.seq_len=4: ")
    assert message.endswith("nearest legal value: data.seq_len=3")
    assert len(open_source(DataSection(source="tokens", path=path, seq_len=3), None, "train")) == 1
    long_and_short = DataSection(source="tokens", path=path, eval_path=path, seq_len=4)
    assert len(open_source(long_and_short, None, "eval") or []) == 1  # padding is harmless in evaluation
    write_shards(tmp_path, [b""], name="empty")
    message = message_of(DataSection(source="tokens", path=str(tmp_path / "empty-00000.bin")))
    assert "has no targets" in message

    message = message_of(DataSection(source="tokens", path=path, seq_len=2), vocab_size=256)
    assert message.startswith("model.vocab_size=256: ")
    assert message.endswith("nearest legal value: model.vocab_size=257")


# -- tokenizers -------------------------------------------------------------------------------------------------


def write_tokenizer(path: Path, end: str = "<|endoftext|>") -> Path:
    """Write a tokenizer.json: byte-level BPE, trained on a few words."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the cat and the hat and the bat"] * 20, learner)
    made.save(str(path))
    return path


def test_byte_tokenizer() -> None:
    tokenizer = find_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9] == tokenizer.encode("aé".encode()).tolist()
    assert tokenizer.decode([97, 0xC3, 256, 0xA9, 256]) == "aé"
    assert tokenizer.decode(np.array([97, 0xC3])) == "a\ufffd"


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|eot_id|>"])
def test_file_tokenizer(tmp_path: Path, end: str) -> None:
    tokenizer = find_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json", end)))
    text = "the cat, the häät"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode())
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert tokenizer.decode([*ids, tokenizer.end_id]) == text
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "other.json")
    assert find_tokenizer(str(tmp_path / "other.json")).name.split(":")[1] == tokenizer.name.split(":")[1]


def test_invalid_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer=byte: must be bytes, or the path"):
        find_tokenizer("byte")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a Hugging Face tokenizer\.json"):
        find_tokenizer(str(tmp_path / "broken.json"))
    endless = write_tokenizer(tmp_path / "endless.json", end="<pad>")
    with pytest.raises(UserError, match=r"no end-of-document token.*<\|endoftext\|>"):
        find_tokenizer(str(endless))
    with pytest.raises(UserError, match="cannot be read"):
        FileTokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"meshtrainer\[hf\]"):
        find_tokenizer(str(endless))


def test_stdlib_with_a_tokenizer_file(small_stdlib: Path, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    data = DataSection(seq_len=8, tokenizer=str(tokenizer))
    source = open_source(data, 1000, "train")
    targets = read_all(source)[1]
    ids = np.concatenate([read_all(source)[0][0, :1], targets[targets != IGNORE]])
    assert find_tokenizer(str(tokenizer)).decode(ids) == stdlib_text()
    assert "model.vocab_size=257" in message_of(data, vocab_size=257)


# -- no torch ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_building_shards_imports_neither_torch_nor_the_configuration() -> None:
    """Both take longer to import than small texts take to tokenize."""
    program = (
        "import sys, trainer.data.source, trainer.prepare; "
        "print(bool({'torch', 'omegaconf', 'trainer.config'} & {*sys.modules}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_token_source_reads_three_shards_at_once(tmp_path: Path) -> None:
    write_shards(tmp_path, [b"a"], [b"b"], [b""], [b"cdefghij"])
    shards = [Shard(path) for path in sorted(tmp_path.glob("*.bin"))]
    tokens, targets = read_all(TokenSource(shards, seq_len=6))
    assert tokens.tolist()[0] == [97, 256, 98, 256, 256, 99]
    assert targets.tolist()[0] == [256, 98, 256, 256, 99, 100]


def test_token_shards_without_an_eval_path_hold_out_their_last_windows(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [bytes(range(200))])
    settings = DataSection(source="tokens", path=path, seq_len=4, holdout=0.1)
    train, held_out = open_source(settings, 257, "train"), open_source(settings, 257, "eval")
    assert held_out is not None
    assert (len(train), len(held_out)) == (45, 5)
    assert train.batch(np.array([44]))[0].tolist() == [[176, 177, 178, 179]]
    assert held_out.batch(np.array([0, -1]))[0][0].tolist() == [180, 181, 182, 183]
    assert (held_out.batch(np.array([-1]))[1] == -100).all()
    nothing = dataclasses.replace(settings, holdout=0.0)
    assert len(open_source(nothing, 257, "train")) == 50
    assert open_source(nothing, 257, "eval") is None


def test_a_subset_has_all_properties_of_its_source() -> None:
    """Also those that a kind of source added later than the subset."""

    class Base(SyntheticSource):
        facts = {"trained_share": 0.5}

    base = Base(8, 30, 1, "train")
    base.tokenizer, base.bytes_per_token, base.attended = "bytes", 1.5, 4.0
    base.checks_ids, base.waits_for_storage, base.is_local = True, True, True
    base.rows_per_sample, base.num_labels, base.only_label = 2, 3, 1
    subset = SourceSubset(base, 2, 5)
    declared = [name for name in Source.__annotations__ if not name.startswith("_")]
    assert {name: getattr(subset, name) for name in declared} == {name: getattr(base, name) for name in declared}
    assert subset.facts == {"trained_share": 0.5}
