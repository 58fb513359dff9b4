"""Samples, their order and the loaders: each sample is at its position for all ranks, each token a target once."""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.data import (
    BYTES_END,
    Numbered,
    flip_bit,
    read_all,
    stream_of,
    text_of,
    tokens_section,
    write_bpe,
    write_shards,
)
from tests.helpers.gate import wait_until
from tests.helpers.launch import fork
from trainer import UserError
from trainer.config.schema import DataSection
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.mixture import sample_at
from trainer.data.opening import open_source
from trainer.data.source import IGNORE, SyntheticSource
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import TrainingFailed


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


def refusal_of(data: DataSection, vocab_size: int | None = None, split: Any = "train") -> UserError:
    with pytest.raises(UserError) as caught:
        open_source(data, vocab_size, split)
    return caught.value


# ---------------------------------------------------------------------------------------------------------------
# The order of samples


@pytest.mark.parametrize("sizes", [range(1, 70), (127, 128, 129, 1000, 4095, 4097), (65_537, 300_001)])
def test_each_epoch_visits_every_sample_once(sizes: Any) -> None:
    for num_samples in sizes:
        for seed in (0, 5):
            epochs = sample_at(np.arange(2 * num_samples), num_samples, seed).reshape(2, num_samples)
            assert np.array_equal(np.sort(epochs), np.tile(np.arange(num_samples), (2, 1))), num_samples


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


# ---------------------------------------------------------------------------------------------------------------
# The loader of training


def make_loader(num_samples: int = 100, **more: Any) -> TrainLoader:
    return TrainLoader(Numbered(num_samples), **{"seed": 3, "global_batch_size": 24, "micro_batch_size": 2, **more})


def take(loader: TrainLoader, num_steps: int) -> np.ndarray:
    """Return the samples of some steps, shape (steps, samples of this rank in a step)."""
    count = num_steps * loader.micro_batches_per_step
    rows = [next(loader)["tokens"][:, 0].numpy() for _ in range(count)]
    return np.concatenate(rows).reshape(num_steps, -1)


def take_all_ranks(
    num_ranks: int, micro: int, num_steps: int, state: dict[str, Any] | None = None, **more: Any
) -> np.ndarray:
    parts = []
    for rank in range(num_ranks):
        loader = make_loader(dp_rank=rank, num_dp_ranks=num_ranks, micro_batch_size=micro, **more)
        if state is not None:
            loader.load_state_dict(state)
        parts.append(take(loader, num_steps))
        loader.close()
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(
    ("num_ranks", "micro"), [(1, 24), (1, 1), (2, 3), (3, 2), (4, 6), (4, 1), (6, 4), (12, 1), (24, 1)]
)
def test_global_batches_do_not_depend_on_ranks_or_micro_batches(num_ranks: int, micro: int) -> None:
    expected = sample_at(np.arange(12 * 24), 100, 3).reshape(12, 24)  # almost three epochs
    assert take_all_ranks(num_ranks, micro, 12).tolist() == expected.tolist()


def test_order_over_thousands_of_steps() -> None:
    loader = make_loader(global_batch_size=2, micro_batch_size=1)
    assert take(loader, 2100).ravel().tolist() == sample_at(np.arange(4200), 100, 3).tolist()
    loader.close()


def test_batches_are_int64_tensors_of_the_right_shape() -> None:
    batch = next(TrainLoader(SyntheticSource(16, 50, 0, "train"), seed=0, global_batch_size=4, micro_batch_size=2))
    assert set(batch) == {"tokens", "targets"}
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 16)
        assert tensor.is_contiguous()
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 8), (2, 12), (3, 4), (8, 3)])
def test_resume_on_another_number_of_ranks(num_ranks: int, micro: int) -> None:
    straight = take_all_ranks(4, 2, 9)
    rank = make_loader(dp_rank=3, num_dp_ranks=4)
    take(rank, 4)
    state = json.loads(json.dumps(rank.state_dict()))
    assert take_all_ranks(num_ranks, micro, 5, state=state).tolist() == straight[4:].tolist()


def test_resume_with_another_global_batch() -> None:
    straight = take_all_ranks(1, 1, 6).ravel()
    found = take_all_ranks(2, 2, 4, state={"samples": 48}, global_batch_size=12)
    assert found.ravel().tolist() == straight[48 : 48 + 48].tolist()


def test_state_advances_with_the_last_micro_batch_of_a_step() -> None:
    loader = make_loader(micro_batch_size=8)
    seen = []
    for _ in range(7):
        next(loader)
        seen.append(loader.state_dict()["samples"])
    assert seen == [0, 0, 24, 24, 24, 48, 48]


def test_loading_in_the_middle_of_a_step_starts_at_that_step() -> None:
    loader = make_loader(micro_batch_size=8)
    straight = take(make_loader(micro_batch_size=8), 3)
    take(loader, 1)
    next(loader)  # one micro-batch of three
    loader.load_state_dict(loader.state_dict())
    found = [next(loader)["tokens"][:, 0].tolist() for _ in range(5)]
    assert found == straight[1:].reshape(-1, 8).tolist()[:5]


def test_global_random_generators_are_unchanged() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    take(make_loader(), 2)
    list(EvalLoader(SyntheticSource(8, 50, 0, "eval"), global_batch_size=64, micro_batch_size=32))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert random.getstate() == before[2]


class Failing(Numbered):
    """Cannot give the sample at position `bad`."""

    def __init__(self, is_read_ahead: bool, bad: int) -> None:
        super().__init__(1000)
        self.waits_for_storage, self.bad = is_read_ahead, int(sample_at(np.array([bad]), 1000, 3)[0])

    def batch(self, indices: Any) -> Any:
        if self.bad in indices:
            raise ValueError(f"sample {self.bad} is lost")
        return super().batch(indices)


@pytest.mark.parametrize("is_read_ahead", [False, True])
def test_an_error_is_raised_at_its_micro_batch(is_read_ahead: bool) -> None:
    """Also if a thread reads ahead, which ends with the loader."""
    before = threading.active_count()
    loader = TrainLoader(Failing(is_read_ahead, 121), seed=3, global_batch_size=24, micro_batch_size=2)
    expected = sample_at(np.arange(120), 1000, 3)
    assert take(loader, 5).ravel().tolist() == expected.tolist()
    with pytest.raises(ValueError, match="is lost"):
        next(loader)
    loader.close()
    wait_until(lambda: threading.active_count() <= before, "the end of the thread that reads ahead")


class Small(Numbered):
    vocab_size = 40


def test_id_beyond_the_vocabulary_of_a_source_is_named() -> None:
    loader = TrainLoader(Small(50), seed=0, global_batch_size=50, micro_batch_size=50)
    with pytest.raises(TrainingFailed) as caught:
        next(loader)
    assert "sample 4" in str(caught.value), "41 to 49: a sample holds its number"
    assert "40" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------
# Worker processes


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_resume_is_exact_although_workers_read_ahead(num_workers: int) -> None:
    straight = take(make_loader(), 9)
    first = make_loader(num_workers=num_workers)
    assert take(first, 4).tolist() == straight[:4].tolist()
    state = first.state_dict()
    assert state["samples"] == 4 * 24
    second = make_loader(num_workers=2 - num_workers)
    second.load_state_dict(state)
    assert take(second, 5).tolist() == straight[4:].tolist()
    first.close()
    second.close()


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
    assert take(loader, 3).shape == (3, 24)
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    assert not any(worker.is_alive() for worker in workers)


def hold_a_worker(note: str) -> int:
    """Write the process id of a data worker, and wait."""
    loader = make_loader(num_workers=1)
    next(loader)
    part = Path(f"{note}.part")
    part.write_text(str(multiprocessing.active_children()[0].pid))
    part.rename(note)
    signal.pause()
    return 0


@pytest.mark.slow
def test_workers_end_when_their_rank_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "worker"
    rank = fork(hold_a_worker, [str(note)], tmp_path)
    wait_until(note.exists, "the first sample of the worker")
    worker = Path("/proc", note.read_text())
    rank.kill()
    wait_until(lambda: not worker.exists() or "\nState:\tZ" in (worker / "status").read_text(), "the worker's end")


def leave_a_worker() -> int:
    """Exit as an interpreter does, without closing the loader."""
    loader = make_loader(num_workers=1)
    next(loader)
    atexit._run_exitfuncs()
    return 0


@pytest.mark.slow
def test_process_that_does_not_close_its_loader_ends(tmp_path: Path) -> None:
    """Workers ignore SIGTERM, the only signal that multiprocessing sends them at exit before it waits for them."""
    assert fork(leave_a_worker, [], tmp_path).wait().code == 0


# ---------------------------------------------------------------------------------------------------------------
# The loader of evaluations


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (16, 3)])
@pytest.mark.parametrize(("num_batches", "expected"), [(0, 21), (1, 8), (2, 16), (9, 21)])
def test_evaluation_sees_each_sample_once_on_any_number_of_ranks(
    num_ranks: int, micro: int, num_batches: int, expected: int
) -> None:
    seen, lengths = [], set()
    sizes: dict[str, int] = {"global_batch_size": 8, "micro_batch_size": micro, "num_batches": num_batches}
    for rank in range(num_ranks):
        loader = EvalLoader(Numbered(21), **sizes, dp_rank=rank, num_dp_ranks=num_ranks)
        batches = list(loader)
        assert [b["tokens"].tolist() for b in loader] == [b["tokens"].tolist() for b in batches]  # once more
        assert {b["tokens"].shape for b in batches} == {(micro, 2)}
        lengths.add(len(batches))
        for batch in batches:
            kept = batch["targets"][:, 0] != IGNORE
            seen += batch["tokens"][kept, 0].tolist()
    assert sorted(seen) == list(range(expected))
    assert lengths == {math.ceil(expected / (num_ranks * micro))}


# ---------------------------------------------------------------------------------------------------------------
# Windows over tokens

DOCUMENTS = ["abcdefg", "h", "ijklmnopqrstuvwxyz", "0123"]


@pytest.fixture(scope="module", params=[0, 1, 2])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The documents in one or two shards."""
    parts = [part for part in (DOCUMENTS[: request.param], DOCUMENTS[request.param :]) if part]
    return write_shards(tmp_path_factory.mktemp("shards"), *parts)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 7, 32, 33])
def test_joined_every_token_but_the_first_is_a_target_once(shards: str, seq_len: int) -> None:
    """Also if windows cross shard boundaries, and if the stream does not fill the last window."""
    source = open_source(tokens_section(shards, seq_len=seq_len), 257, "train")
    stream = stream_of(DOCUMENTS)
    batch = read_all(source)
    assert len(source) == math.ceil((len(stream) - 1) / seq_len)
    assert batch["tokens"].shape == batch["targets"].shape == (len(source), seq_len)
    kept = batch["targets"] != IGNORE
    assert batch["targets"][kept].tolist() == stream[1:]
    assert batch["tokens"][kept].tolist() == stream[:-1]
    assert source.bytes_per_token == pytest.approx(sum(map(len, DOCUMENTS)) / (len(stream) - 1))


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 18, 19, 40])
def test_apart_a_sample_is_in_one_document(shards: str, seq_len: int) -> None:
    source = open_source(tokens_section(shards, seq_len=seq_len, documents="apart"), 257, "train")
    expected = []
    for text in DOCUMENTS:
        document = stream_of([text])
        for start in range(0, len(document) - 1, seq_len):
            window = document[start : start + seq_len + 1]
            padding = seq_len + 1 - len(window)
            expected.append((window[:-1] + [BYTES_END] * padding, window[1:] + [IGNORE] * padding))
    batch = read_all(source)
    assert list(zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)) == expected


def test_ids_have_two_bytes_where_they_fit(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for vocab_size, num_bytes in ((2**16, 2), (2**16 + 1, 4)):
        words = {str(number): number for number in range(vocab_size - 1)} | {"</s>": vocab_size - 1}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        path = write_shards(tmp_path, ["12 65000 7"], name=str(num_bytes), tokenizer=tmp_path / "tokenizer.json")
        assert (tmp_path / f"{num_bytes}-00000.bin").stat().st_size == 4 * num_bytes
        source = open_source(tokens_section(path, seq_len=3), vocab_size, "train")
        assert read_all(source)["targets"].tolist() == [[65000, 7, vocab_size - 1]]


def test_shards_without_an_eval_path_hold_out_their_last_windows(tmp_path: Path) -> None:
    letters = "".join(chr(33 + number % 90) for number in range(200))
    path = write_shards(tmp_path, [letters])
    settings = tokens_section(path, holdout=0.1)
    train, held_out = open_source(settings, 257, "train"), open_source(settings, 257, "eval")
    assert held_out is not None
    assert (len(train), len(held_out)) == (45, 5)
    assert text_of(train) + text_of(held_out)[1:] == letters
    nothing = tokens_section(path, holdout=0.0)
    assert len(open_source(nothing, 257, "train")) == 50
    assert open_source(nothing, 257, "eval") is None


# ---------------------------------------------------------------------------------------------------------------
# Generated samples


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
    assert (tokens.min(), tokens.max()) == (0, 49)


def test_synthetic_samples_have_not_changed_between_versions() -> None:
    train, held_out = SyntheticSource(8, 100, 0, "train"), SyntheticSource(8, 100, 1, "eval")
    assert (len(train), len(held_out)) == (2**20, 256)
    assert train.batch(np.array([0, 2**20 - 1]))[0].tolist() == [
        [58, 49, 56, 3, 25, 67, 96, 5],
        [69, 61, 55, 13, 0, 24, 74, 62],
    ]
    assert held_out.batch(np.array([0]))[0].tolist() == [[87, 55, 67, 12, 70, 79, 18, 68]]
    assert train.bits_per_byte(1.0) is None


# ---------------------------------------------------------------------------------------------------------------
# The standard library


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A standard library of a hundred small files, and of others that do not count; the cache is in the test's folder.

    Returns the texts that count.
    """
    folder = tmp_path / "lib"
    names = [f"kept_{number}.py" for number in range(100)] + ["json/kept.py"]
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "notes.txt"]
    for name in [*names, *left_out]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return [f"# {name}\n" for name in names]


def test_stdlib_holds_out_whole_files_and_counts_every_byte(library: list[str]) -> None:
    data = DataSection(source="stdlib", seq_len=64)
    train, held_out = open_source(data, 257, "train"), open_source(data, 257, "eval")
    assert held_out is not None
    found = [text_of(train).splitlines(), text_of(held_out).splitlines()]
    assert sorted([*found[0], *found[1]]) == sorted(text.strip() for text in library)
    assert 0 < len(found[1]) < 30
    # A model that gives every target one bit, in nats: the sum over targets is what the text takes.
    num_targets = int((read_all(held_out)["targets"] != IGNORE).sum())
    assert held_out.bits_per_byte(math.log(2)) == pytest.approx(num_targets / len(text_of(held_out)))


def test_stdlib_with_a_tokenizer_file(library: list[str], tmp_path: Path) -> None:
    tokenizer = write_bpe(tmp_path / "tokenizer.json")
    data = DataSection(source="stdlib", seq_len=8, tokenizer=str(tokenizer))
    batch = read_all(open_source(data, 1000, "train"))
    ids = np.concatenate([batch["tokens"][0, :1], batch["targets"][batch["targets"] != IGNORE]])
    text = find_tokenizer(str(tokenizer)).decode(ids)
    assert text == text_of(open_source(DataSection(source="stdlib", seq_len=8), None, "train"))
    refused = refusal_of(data, vocab_size=257)
    assert str(refused).startswith("model.vocab_size=257: ")


def test_cache_is_in_the_configured_folder(library: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    def use(**settings: Any) -> None:
        open_source(DataSection(source="stdlib", seq_len=8, **settings), None, "train")

    use(cache_dir=str(tmp_path / "own" / "folder"))
    assert list((tmp_path / "own" / "folder").rglob("*.bin"))
    assert not (tmp_path / "cache").exists()

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # cannot become a folder
    use()
    private = tmp_path / f"meshtrainer-{os.getuid()}"
    assert list(private.rglob("*.bin"))
    assert private.stat().st_mode & 0o77 == 0

    explicit = DataSection(source="stdlib", cache_dir=str(tmp_path / "file"))  # set: no other folder is tried
    assert str(refusal_of(explicit)).startswith(f"data.cache_dir={tmp_path / 'file'}: ")


# ---------------------------------------------------------------------------------------------------------------
# Data that cannot be trained on


def test_a_path_that_matches_nothing_names_the_nearest_file(tmp_path: Path) -> None:
    write_shards(tmp_path, DOCUMENTS, name="corpus")
    for key, data, split in (
        ("data.path", tokens_section(tmp_path / "korpus-00000.bin"), "train"),
        ("data.eval_path", tokens_section(tmp_path, eval_path=str(tmp_path / "korpus-00000.bin")), "eval"),
    ):
        refused = refusal_of(data, split=split)
        assert str(refused).startswith(f"{key}={tmp_path}/korpus-00000.bin: ")
        assert refused.proposal == f"{key}={tmp_path}/corpus-00000.bin"
    metadata = refusal_of(tokens_section(tmp_path / "corpus-00000.json"))
    assert metadata.proposal == f"data.path={tmp_path}/corpus-00000.bin"
    assert len(open_source(tokens_section(tmp_path), None, "train")) > 0


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no metadata": lambda folder: (folder / "text-00000.json").unlink(),
    "metadata cut": lambda folder: os.truncate(folder / "text-00000.json", 20),
    "other metadata": lambda folder: (folder / "text-00000.json").write_text('{"dtype": 1}'),
    "tokens cut": lambda folder: os.truncate(folder / "text-00000.bin", 50),
    "a bit of the tokens": lambda folder: flip_bit(folder / "text-00000.bin"),
    "index cut": lambda folder: os.truncate(folder / "text-00000.idx", 8),
    "no index": lambda folder: (folder / "text-00000.idx").unlink(),
    "a bit of the index": lambda folder: flip_bit(folder / "text-00000.idx"),
    "no checksums": lambda folder: (folder / "text-00000.crc").unlink(),
    "checksums cut": lambda folder: os.truncate(folder / "text-00000.crc", 4),
    "a bit of the checksums": lambda folder: flip_bit(folder / "text-00000.crc"),
    "a bit of the metadata": lambda folder: flip_bit(folder / "text-00000.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    data = tokens_section(write_shards(tmp_path, DOCUMENTS), documents="apart")
    DAMAGES[damage](tmp_path)
    message = str(refusal_of(data))
    assert message.startswith(f"data.path={tmp_path}/text-?????.bin: ")
    assert "text-00000." in message


def test_shards_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    tokenizer = write_bpe(tmp_path / "tokenizer.json")
    path = write_shards(tmp_path, DOCUMENTS)
    write_shards(tmp_path, DOCUMENTS, name="text-other", tokenizer=tokenizer)
    both, held_out = tmp_path / "text-*.bin", tmp_path / "text-other-00000.bin"
    assert str(refusal_of(tokens_section(both))).startswith(f"data.path={both}: ")
    strange = refusal_of(tokens_section(path, eval_path=str(held_out)), split="eval")
    assert str(strange).startswith(f"data.eval_path={held_out}: ")


@pytest.mark.parametrize("spelled", ["{}/text-eval-00000.bin", "./text-eval-00000.bin", "link/text-eval-00000.bin"])
def test_held_out_shards_are_not_trained_on_however_spelled(tmp_path: Path, spelled: str, monkeypatch: Any) -> None:
    write_shards(tmp_path, DOCUMENTS)
    write_shards(tmp_path, DOCUMENTS, name="text-eval")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    refused = refusal_of(tokens_section("text-*.bin", eval_path=spelled.format(tmp_path)))
    assert str(refused).startswith("data.path=text-*.bin: includes ")
    assert "text-eval-00000.bin, which data.eval_path holds out" in str(refused)
    assert refused.proposal == "data.path=text-?????.bin"
    assert open_source(tokens_section("text-?????.bin", eval_path="text-eval-00000.bin"), 257, "eval") is not None


def test_held_out_chats_are_not_trained_on(tmp_path: Path) -> None:
    for name in "train", "held":
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    held = str(tmp_path / "held.jsonl")
    refused = refusal_of(DataSection(source="chat", path=str(tmp_path), eval_path=held))
    assert f"includes {held}, which data.eval_path holds out" in str(refused)
    assert refused.proposal == f"data.path={tmp_path}/train.jsonl"


def test_too_few_tokens_and_too_small_a_vocabulary(tmp_path: Path) -> None:
    path = write_shards(tmp_path, ["abc"])
    refused = refusal_of(tokens_section(path, seq_len=4))
    assert (str(refused).partition(" ")[0], refused.proposal) == ("data.seq_len=4:", "data.seq_len=3")
    assert len(open_source(tokens_section(path, seq_len=3), None, "train")) == 1
    long_and_short = tokens_section(path, eval_path=path, seq_len=4)
    assert len(open_source(long_and_short, None, "eval") or []) == 1, "padding is harmless in an evaluation"
    refused = refusal_of(tokens_section(path, seq_len=2), vocab_size=256)
    assert str(refused).startswith("model.vocab_size=256: ")
    assert refused.proposal == "model.vocab_size=257"


# ---------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_byte_tokenizer() -> None:
    tokenizer = find_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9] == tokenizer.encode("aé".encode()).tolist()
    assert tokenizer.decode([97, 0xC3, 256, 0xA9, 256]) == "aé"
    assert tokenizer.decode(np.array([97, 0xC3])) == "a\ufffd"


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|eot_id|>"])
def test_file_tokenizer(tmp_path: Path, end: str) -> None:
    tokenizer = find_tokenizer(str(write_bpe(tmp_path / "tokenizer.json", end)))
    text = "the cat, the häät"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode())
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert tokenizer.decode([*ids, tokenizer.end_id]) == text


def test_invalid_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.json").write_text("{}")
    endless = write_bpe(tmp_path / "endless.json", end="<pad>")
    good = write_bpe(tmp_path / "good.json")
    for name in ("byte", tmp_path / "broken.json", endless, tmp_path / "none.json"):
        with pytest.raises(UserError) as caught:
            find_tokenizer(str(name))
        assert str(caught.value).startswith(f"data.tokenizer={name}: ")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError) as caught:
        find_tokenizer(str(good))
    assert "pip install 'meshtrainer[hf]'" in str(caught.value)
