"""Reading token shards: with few file descriptors, by threads and processes, and with a message if they are damaged."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.data import BYTES_END, flip_bit, read_all, tokens_section, write_shards, write_texts
from tests.helpers.faults import Fault
from tests.helpers.launch import start
from trainer.data import shards
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.opening import open_source
from trainer.data.shards import ShardError, forget_files
from trainer.data.source import Source
from trainer.distributed.environment import raise_file_limit
from trainer.errors import TrainingFailed, UserError
from trainer.prepare import prepare


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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 400 shards of one document of three letters each; every tenth shard has other letters."""
    folder = tmp_path_factory.mktemp("many")
    for kind in range(10):
        write_shards(folder, [f"{kind}{kind}x"], name="made")
        for number in range(kind, 400, 10):
            for path in folder.glob("made-*"):
                shutil.copyfile(path, folder / f"text-{number:05d}{path.suffix}")
    for path in folder.glob("made-*"):
        path.unlink()
    return folder


def source_of(folder: Path) -> Source:
    return open_source(tokens_section(folder / "text-*.bin", cache_dir=str(folder / "cache")), 257, "train")


def expected_rows() -> np.ndarray:
    """Return the tokens of all samples but the last: each has one shard."""
    return np.array([[ord(str(n % 10)), ord(str(n % 10)), ord("x"), BYTES_END] for n in range(399)])


def test_more_shards_than_descriptors(many: Path) -> None:
    """The same samples, whatever `ulimit -n`; descriptors are left for others, and no shard is mapped into memory."""
    limit = len(open_files()) + 100
    forget_files()
    with file_limit(limit):
        source = source_of(many)
        order = np.random.default_rng(0).permutation(399)
        tokens, _ = source.batch(order)
    assert np.array_equal(tokens, expected_rows()[order])
    assert len([name for name in open_files() if name.startswith(str(many))]) <= limit // 2
    assert str(many) not in Path("/proc/self/maps").read_text()


def test_a_low_limit_of_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with file_limit(256):
        assert raise_file_limit() == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft


def test_threads_that_share_few_descriptors_read_the_right_bytes(many: Path) -> None:
    source, expected = source_of(many), expected_rows()
    wrong: list[object] = []

    def read(seed: int) -> None:
        order = np.random.default_rng(seed)
        try:
            for _ in range(40):
                rows = order.integers(0, 399, 8)
                if not np.array_equal(source.batch(rows)[0], expected[rows]):
                    wrong.append(rows)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    with file_limit(len(open_files()) + 40):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_processes_that_share_shards_read_the_right_bytes(many: Path, method: str) -> None:
    source = source_of(many)
    source.batch(np.arange(399))  # the parent's descriptors are open when it forks
    with multiprocessing.get_context(method).Pool(2) as pool:
        for found, _ in pool.map(source.batch, [np.arange(399)] * 4):
            assert np.array_equal(found, expected_rows())
        pool.close()
        pool.join()


def test_a_replaced_shard_is_read_again(tmp_path: Path) -> None:
    for text in ("old", "new"):
        lines = write_texts(tmp_path / "a.jsonl", [text])
        prepare([str(lines)], str(tmp_path / "x"), overwrite=True)
        source = open_source(tokens_section(tmp_path / "x-00000.bin", seq_len=3), None, "train")
        assert bytes(read_all(source)["tokens"][0].tolist()).decode() == text


@pytest.mark.parametrize("how", ["renamed", "overwritten"])
def test_no_sample_comes_from_a_shard_that_replaces_another_while_it_is_read(tmp_path: Path, how: str) -> None:
    """Even if the new files are consistent and of the same size, and not all of them are open."""
    path = write_shards(tmp_path / "old", ["a" * 9000])
    write_shards(tmp_path / "new", ["b" * 9000])
    source = open_source(tokens_section(path, seq_len=64), 257, "train")
    assert (source.batch(np.arange(4))[0] == ord("a")).all()
    for new in (tmp_path / "new").iterdir():
        if how == "renamed":
            os.replace(new, tmp_path / "old" / new.name)
        else:
            shutil.copyfile(new, tmp_path / "old" / new.name)
    forget_files()
    with pytest.raises(ShardError, match=r"text-00000\.crc is damaged"):
        source.batch(np.arange(4))


# ---------------------------------------------------------------------------------------------------------------
# Damaged while they are read


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_any_bit_of_any_file_may_flip(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard is refused, at the start or when the page is read: no sample has other tokens or other boundaries."""
    monkeypatch.setattr(shards, "MAX_BYTES_VERIFIED_AT_START", limit)
    path = write_shards(tmp_path, ["abcdefgh" * 900, "the second", "x" * 5000])
    rng = np.random.default_rng(0)
    for name in ("text-00000.bin", "text-00000.idx", "text-00000.crc", "text-00000.json"):
        for bit in rng.integers(0, 1 << 40, 12).tolist():
            flip_bit(tmp_path / name, bit)
            with pytest.raises((UserError, ShardError), match=r"text-00000\.(bin|idx|crc|json)"):
                read_all(open_source(tokens_section(path, seq_len=64, documents="masked"), 257, "train"))
            flip_bit(tmp_path / name, bit)
    read_all(open_source(tokens_section(path, seq_len=64, documents="masked"), 257, "train"))


def test_a_truncated_shard_is_named_with_the_sample(tmp_path: Path) -> None:
    path = write_shards(tmp_path, ["abcdefgh" * 50], ["ijklmnop" * 50])
    source = open_source(tokens_section(path, seq_len=8), 257, "train")
    loader = TrainLoader(source, seed=0, global_batch_size=100, micro_batch_size=100)
    assert next(loader)["tokens"].shape == (100, 8)
    os.truncate(tmp_path / "text-00001.bin", 100)
    with pytest.raises(TrainingFailed) as caught:
        list(islice(loader, 50))
    loader.close()
    assert "sample " in str(caught.value)
    assert f"{tmp_path}/text-00001.bin" in str(caught.value)
    with pytest.raises(TrainingFailed):
        list(EvalLoader(source, global_batch_size=101, micro_batch_size=101))


@pytest.mark.campaign
def test_damage_in_shards_of_gigabytes_is_found_when_it_is_read(tmp_path: Path) -> None:
    """More than a gigabyte is not read through at the start; a flipped bit is found, other samples can be read."""
    text = "x" * 90_000_000
    paths = [tmp_path / f"text-{number:05d}.bin" for number in range(7)]
    write_shards(tmp_path, [text])
    for number in range(1, 7):
        for path in list(tmp_path.glob("text-00000.*")):
            os.link(path, tmp_path / f"text-{number:05d}{path.suffix}")
    paths[3].unlink()
    shutil.copyfile(paths[0], paths[3])
    flip_bit(paths[3])
    source = open_source(tokens_section(tmp_path / "text-*.bin", seq_len=1000), 257, "train")
    assert (source.batch(np.array([5, 100_000]))[0] == ord("x")).all()
    damaged = (3 * 90_000_001 + 45_000_000) // 1000
    loader = EvalLoader(source, global_batch_size=1, micro_batch_size=1)
    assert len(loader) > damaged
    with pytest.raises(Exception, match=paths[3].name):
        source.batch(np.array([damaged - 1, damaged, damaged + 1]))


@pytest.mark.slow
def test_a_run_on_data_that_are_cut_fails_with_the_name_of_the_shard(tmp_path: Path) -> None:
    """On all ranks, with the reason in status.json, and neither by a signal nor with a traceback."""
    path = write_shards(tmp_path / "data", ["abcdefgh" * 60_000])
    shard = tmp_path / "data" / "text-00000.bin"
    fault = Fault(tmp_path / "notes", {"step 2": f"truncate -s 200 {shard}"})
    settings = [
        *("model.name=tests.helpers.custom_recipes:llama_faulty", "model.vocab_size=257", "model.num_kv_heads=2"),
        *("data.source=tokens", f"data.path={path}", "train.steps=500", "nproc=2"),
    ]
    ran = start(tmp_path / "run", *settings, variables=fault.variables).wait(together=False)
    assert ran.codes == [1, 1]
    assert "Traceback" not in ran.err
    assert ran.err.count("error: ") <= 1
    assert ran.status["state"] == "failed"
    assert shard.name in ran.status["reason"]
