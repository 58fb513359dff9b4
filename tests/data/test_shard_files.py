"""Reading token shards: few file descriptors, only the requested bytes, and a message that names damaged shards."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import Numbered, stream_of, take, without_checksums, write_shards
from tests.helpers.ranks import run_tiny
from tests.helpers.tiny import tiny_config
from trainer import Trainer
from trainer.config import DataSection
from trainer.data import shards
from trainer.data import source as source_module
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.opening import open_source
from trainer.data.shards import Shard
from trainer.data.source import Source, TokenSource
from trainer.distributed import environment
from trainer.distributed.environment import raise_file_limit
from trainer.errors import TrainingFailed


@pytest.fixture(autouse=True)
def _written_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of temporary files
    yield
    shards.SHARD_FILES.close()


@contextlib.contextmanager
def file_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_files() -> list[str]:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def take_all(others: contextlib.ExitStack) -> None:
    """Open files until no descriptor is left."""
    with contextlib.suppress(OSError):
        while True:
            others.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def many_shards(folder: Path, count: int) -> tuple[TokenSource, list[int]]:
    """Return the source over `count` shards of one document each, and its tokens."""
    documents = [bytes([number % 256, number // 256, 7]) for number in range(count)]
    write_shards(folder, *([document] for document in documents))
    shards = [Shard(path) for path in sorted(folder.glob("*.bin"))]
    return TokenSource(shards, seq_len=4), stream_of(documents)


def test_more_shards_than_descriptors(tmp_path: Path) -> None:
    """The same samples, whatever `ulimit -n`."""
    source, stream = many_shards(tmp_path, 400)
    limit = len(open_files()) + 100
    with file_limit(limit):
        order = np.random.default_rng(0).permutation(len(source))
        tokens, _ = source.batch(order)
    assert tokens[np.argsort(order)].ravel().tolist()[: len(stream) - 1] == stream[:-1]
    held = [name for name in open_files() if name.startswith(str(tmp_path))]
    assert 0 < len(held) <= limit // 4
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_few_free_descriptors_suffice(tmp_path: Path) -> None:
    source, stream = many_shards(tmp_path, 40)
    source.batch(np.arange(30))
    with file_limit(len(open_files()) + 3), contextlib.ExitStack() as others:
        take_all(others)
        tokens, _ = source.batch(np.arange(40)[:-1])
    assert tokens.ravel().tolist() == stream[: 39 * 4]


def test_message_without_free_descriptors_names_the_limit(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    sources = [many_shards(folder, 2)[0] for folder in folders]
    limit = len(open_files())
    with file_limit(limit), contextlib.ExitStack() as others:
        for source in sources:  # a thread that an earlier test has left may close a file in between
            take_all(others)
            try:
                source.batch(np.arange(2))
            except source_module.ShardError as error:
                message = str(error)
                break
        else:
            pytest.fail("it found a descriptor each time")
    assert re.search(rf"text-0000\d\.bin.*`ulimit -n` is {limit}", message), message


def test_low_descriptor_limit_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with file_limit(256):
        assert raise_file_limit() == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
    monkeypatch.setattr(environment.resource, "getrlimit", lambda _: (512, 512))
    assert raise_file_limit() == (
        "`ulimit -n` allows 512 open files, which is the maximum; 1024 are usual: raise the limit, or "
        "training may fail with `Too many open files`"
    )


def test_only_requested_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [b"x" * 100_000])
    source = open_source(DataSection(source="tokens", path=path, seq_len=64), None, "train")
    asked: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: list[np.ndarray], offset: int) -> int:
        asked.extend(buffer.nbytes for buffer in buffers)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(shards.os, "preadv", preadv)
    source.batch(np.array([3, 700, 1200]))
    assert asked == [65 * 2] * 3


def test_interrupted_reads_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path, [b"abcdefgh"])
    source = open_source(DataSection(source="tokens", path=path, seq_len=8), None, "train")
    real = os.preadv
    monkeypatch.setattr(
        shards.os,
        "preadv",
        lambda file, buffers, offset: real(file, [memoryview(buffers[0]).cast("B")[:3]], offset),
    )
    assert bytes(source.batch(np.array([0]))[0][0].tolist()) == b"abcdefgh"


def test_replaced_file_is_read_again(tmp_path: Path) -> None:
    """By a process that opens it now, while the old file is still open."""
    for text in (b"old", b"new"):
        path = write_shards(tmp_path, [text])
        source = open_source(DataSection(source="tokens", path=path, seq_len=3), None, "train")
        assert bytes(source.batch(np.array([0]))[0][0].tolist()) == text


def test_threads_that_share_few_descriptors_read_the_right_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shards, "MAX_OPEN_FILES", 2)  # so that each read closes what another thread is reading from
    source, stream = many_shards(tmp_path, 60)
    expected = np.array(stream[: 59 * 4]).reshape(59, 4)
    wrong: list[object] = []

    def read(seed: int) -> None:
        order = np.random.default_rng(seed)
        try:
            for _ in range(40):
                rows = order.integers(0, 59, 8)
                if not np.array_equal(source.batch(rows)[0], expected[rows]):
                    wrong.append(rows)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_share_shards_read_the_right_bytes(tmp_path: Path, method: str) -> None:
    source, _ = many_shards(tmp_path, 40)
    expected = source.batch(np.arange(39))[0]  # the parent's descriptors are open when it forks
    assert len(pickle.dumps(source)) < 20_000
    with multiprocessing.get_context(method).Pool(3) as pool:
        for found, _ in pool.map(source.batch, [np.arange(39)] * 6):
            assert np.array_equal(found, expected)
        pool.close()
        pool.join()


# -- damaged while it is read -----------------------------------------------------------------------------------


def token_settings(path: str, **more: Any) -> DataSection:
    return DataSection(source="tokens", path=path, seq_len=8, **more)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_truncated_shard_is_named(tmp_path: Path, num_workers: int) -> None:
    path = write_shards(tmp_path, [b"abcdefgh" * 50], [b"ijklmnop" * 50])
    second = tmp_path / "text-00001.bin"
    source = open_source(token_settings(path), 257, "train")
    loader = TrainLoader(source, seed=0, global_batch_size=100, micro_batch_size=100, num_workers=num_workers)
    assert next(loader)["tokens"].shape == (100, 8)
    os.truncate(second, 100)
    with pytest.raises(TrainingFailed) as failed:
        take(loader, 50)
    loader.close()
    found = str(failed.value)
    assert re.fullmatch(
        rf"sample \d+ cannot be read: {second} is truncated: it has 100 bytes, but its metadata says 802.*", found
    )
    held_out = EvalLoader(source, global_batch_size=101, micro_batch_size=101)
    with pytest.raises(TrainingFailed, match="is truncated"):
        list(held_out)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    source = open_source(token_settings(write_shards(tmp_path, [b"abcdefgh" * 50])), 257, "train")
    (tmp_path / "text-00000.bin").unlink()
    shards.SHARD_FILES.close()  # it is open since it was verified, and could be read on
    loader = EvalLoader(source, global_batch_size=2, micro_batch_size=2)
    with pytest.raises(
        TrainingFailed, match=r"^sample 0 cannot be read: .*text-00000\.bin cannot be read \(No such file"
    ):
        next(iter(loader))


@pytest.mark.parametrize("position", [0, 7, 211, 300])
def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path, position: int) -> None:
    """With the shard, the sample and the rule: in a last token, in a target only, and across two shards."""
    path = write_shards(tmp_path, [b"abcdefgh" * 50], [b"ijklmnop" * 50])
    damaged = tmp_path / "text-00001.bin"
    with open(damaged, "r+b") as file:
        file.seek(2 * position)
        file.write((60_000).to_bytes(2, "little"))
    without_checksums(tmp_path)
    source = open_source(token_settings(path, holdout=0.1), 257, "train")
    sample = (401 + position) // 8
    with pytest.raises(TrainingFailed) as failed:
        list(EvalLoader(source, global_batch_size=20, micro_batch_size=20))
    found = re.fullmatch(
        rf"sample (\d+) holds the id 60000, token {position} of {damaged}: ids must be below 257, .* damaged.*",
        str(failed.value),
    )
    assert found, str(failed.value)
    assert int(found[1]) in (sample, sample - ((401 + position) % 8 == 0))  # the last target of one starts the next


class Beyond(Numbered):
    vocab_size = 40


def test_id_of_a_custom_source_beyond_its_vocabulary(tmp_path: Path) -> None:
    own: Source = Beyond(50)
    loader = TrainLoader(own, seed=0, global_batch_size=50, micro_batch_size=50)
    with pytest.raises(TrainingFailed, match=r"^sample 4\d holds the id 4\d: ids must be below 40, "):
        next(loader)


def test_run_with_truncated_data_reports_it(tmp_path: Path) -> None:
    """Its ranks end with a message in status.json, not by a signal."""
    (tmp_path / "data").mkdir()
    path = write_shards(tmp_path / "data", [b"abcdefgh" * 500])
    config = tiny_config(
        tmp_path / "run", "data.source=tokens", f"data.path={path}", "model.vocab_size=257", "train.steps=9"
    )
    trainer = Trainer(config)
    os.truncate(tmp_path / "data" / "text-00000.bin", 200)
    with pytest.raises(TrainingFailed, match="is truncated"):
        trainer.fit()
    trainer.close()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "text-00000.bin is truncated" in status["reason"]


@pytest.mark.slow
def test_a_run_on_two_ranks_ends_with_one_message(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [b"abcdefgh" * 500])
    with open(tmp_path / "text-00000.bin", "r+b") as file:
        file.write((60_000).to_bytes(2, "little") * 4000)
    without_checksums(tmp_path)
    ran = run_tiny(tmp_path / "run", "data.source=tokens", f"data.path={path}", "train.steps=3", "nproc=2", exit_code=1)
    assert ran.stderr.count("holds the id 60000") == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.status["state"] == "failed"
    assert "text-00000.bin" in ran.status["reason"]


@pytest.mark.campaign
def test_cold_reads_fetch_little_more_than_is_used(tmp_path: Path) -> None:
    """Counted by the kernel; for storage that it does not count (memory), the test is skipped."""
    path = write_shards(tmp_path, [bytes(200) * 320_000])  # 128 MB
    source = open_source(DataSection(source="tokens", path=path, seq_len=2048), 257, "train")
    monitored = tmp_path / "text-00000.bin"
    descriptor = os.open(monitored, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    before = fetched()
    count = 300
    source.batch(np.random.default_rng(0).choice(len(source), count, replace=False))
    num_bytes = fetched() - before
    if num_bytes == 0:
        pytest.skip("the file is in memory")
    assert num_bytes < 2.6 * count * 2049 * 2


def fetched() -> int:
    content = Path("/proc/self/io").read_text()
    return int(re.search(r"^read_bytes: (\d+)", content, re.MULTILINE)[1])  # type: ignore[index]
