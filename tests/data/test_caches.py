"""Damaged files in caches, and damaged shards of the user: the right samples or one message, never wrong samples.

Tables list the caches, their files, and the possible damages of a file. Files are read in this process, which first
forgets what it has verified, as a new process would.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.checkpoint.test_faults import small_disk
from tests.data.test_data import read_all, write_shards
from tests.data.test_remote import Server
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.ranks import run_tiny
from trainer import locks
from trainer.config import DataSection
from trainer.data import opening, packing, shards
from trainer.data import stdlib as stdlib_module
from trainer.data.cache import get_or_build
from trainer.data.ingest.build import BuildFolder
from trainer.data.opening import open_source
from trainer.data.remote import transport
from trainer.data.shards import Shard, ShardError, ShardManifest, manifest_rows
from trainer.data.source import as_mapping
from trainer.errors import UserError
from trainer.locks import locked, remove_unlocked
from trainer.plan.machine import calibration_path, read_calibration, write_calibration
from trainer.prepare import prepare
from trainer.stopping import StopRequested


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(transport, "MAX_PAUSE_S", 0.0)


def as_in_a_new_process() -> None:
    shards._VERIFIED.clear()
    shards.SHARD_FILES.close()
    from trainer.data.remote import shards as remote_shards

    remote_shards._CACHES.clear()


def samples_of(data: DataSection) -> list[Any]:
    """Return all that a run would read: of both splits, the samples, what identifies them, and bytes a token."""
    found: list[Any] = []
    for split in ("train", "eval"):
        source = open_source(data, None, split)  # type: ignore[call-overload]
        if source is not None:
            batch = {name: entry.tolist() for name, entry in as_mapping(source.batch(np.arange(len(source)))).items()}
            found += [batch, source.fingerprint.to_state(), source.bytes_per_token, source.summary]
    return found


# -- the caches -------------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """How a cache is filled and read: `use` returns the samples of a run; `folder` has the cache's files."""

    use: Callable[[], Any]
    folder: Path
    may_refuse: bool = False
    """Whether damage may be refused, as of what only the user can make again."""
    again: Callable[[], None] = lambda: None
    """Brings the cache to the state in which it is damaged, if that is not the state after a use."""


def interrupted_there(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def texts(count: int) -> list[str]:
    return [f"document {number} " * (number % 5 + 1) for number in range(count)]


def write_lines(path: Path, count: int = 40) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count)))
    return path


def of_text(tmp_path: Path, **more: Any) -> DataSection:
    lines = write_lines(tmp_path / "a.jsonl")
    return DataSection(
        source="tokens", path=str(lines), cache_dir=str(tmp_path / "cache"), seq_len=8, holdout=0.2, **more
    )


def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    data = of_text(tmp_path)
    return Cache(lambda: samples_of(data), tmp_path / "cache")


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Tokens of which all parts are built, and no manifest is there yet."""
    monkeypatch.setattr("trainer.data.ingest.build.MIN_UNIT_BYTES", 1300)
    monkeypatch.setattr("trainer.data.ingest.build.default_num_procs", lambda: 1)
    data = of_text(tmp_path)

    def interrupt() -> None:
        shutil.rmtree(tmp_path / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(BuildFolder, "finish", interrupted_there)
            with pytest.raises(KeyboardInterrupt):
                samples_of(data)

    return Cache(lambda: samples_of(data), tmp_path / "cache", again=interrupt)


def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    (tmp_path / "lib").mkdir()
    for number in range(60):
        (tmp_path / "lib" / f"m{number}.py").write_text(f"x = {number}\n")
    monkeypatch.setattr(stdlib_module.sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    data = DataSection(cache_dir=str(tmp_path / "cache"), seq_len=8)
    return Cache(lambda: samples_of(data), tmp_path / "cache")


ANSWERS = ["Yes", "No", "Hello", "there", "two", "and"] * 4


def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML) / "tokenizer.json"
    lines = [
        {"messages": conversation("Hi", word, "Bye", "Bye now")}
        for word in ["Yes", "No", "Hello", "there", "two", "and"] * 4
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataSection(
        source="chat",
        path=str(tmp_path / "chats.jsonl"),
        tokenizer=str(tokenizer),
        cache_dir=str(tmp_path / "cache"),
        seq_len=64,
        holdout=0.2,
    )
    return Cache(lambda: samples_of(data), tmp_path / "cache")


def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML) / "tokenizer.json"
    lines = [
        {"prompt": conversation("Hi"), "chosen": conversation("", word)[1:], "rejected": conversation("", "Bye")[1:]}
        for word in ANSWERS
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataSection(
        source="chat",
        path=str(tmp_path / "pairs.jsonl"),
        tokenizer=str(tokenizer),
        cache_dir=str(tmp_path / "cache"),
        seq_len=64,
    )
    return Cache(lambda: samples_of(data), tmp_path / "cache")


def packed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(packing, "MAX_DOCUMENTS_IN_MEMORY", 0)
    (tmp_path / "data").mkdir()
    path = write_shards(tmp_path / "data", [text.encode() for text in texts(40)])
    data = DataSection(
        source="tokens", path=path, cache_dir=str(tmp_path / "cache"), seq_len=16, fit="best", documents="masked"
    )
    return Cache(lambda: samples_of(data), tmp_path / "cache")


def many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """With a catalogue."""
    monkeypatch.setattr(opening, "MIN_CATALOG_SHARDS", 4)
    (tmp_path / "data").mkdir()
    path = write_shards(tmp_path / "data", *([text.encode()] for text in texts(5)))
    data = DataSection(source="tokens", path=path, cache_dir=str(tmp_path / "cache"), seq_len=8)
    return Cache(lambda: samples_of(data), tmp_path / "cache")


def from_afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    (tmp_path / "there").mkdir()
    write_shards(tmp_path / "there", *([text.encode()] for text in texts(3)))
    server = _served(tmp_path / "there")
    data = DataSection(
        source="tokens",
        path=f"{server.url}/text-*.bin",
        cache_dir=str(tmp_path / "cache"),
        seq_len=8,
        documents="masked",
        cache_gib=0.1,
    )
    return Cache(lambda: samples_of(data), tmp_path / "cache")


def from_afar_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Shards that have no checksum."""
    found = from_afar(tmp_path, monkeypatch)
    for path in (tmp_path / "there").glob("*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({name: content[name] for name in content if name not in ("crc32", "checksum")}))
    return found


def text_from_afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Fetched by a process that was killed before it had tokenized it."""
    (tmp_path / "there").mkdir()
    write_lines(tmp_path / "there" / "a.jsonl")
    server = _served(tmp_path / "there")
    data = DataSection(
        source="tokens", path=f"{server.url}/a.jsonl", cache_dir=str(tmp_path / "cache"), seq_len=8, holdout=0.2
    )

    def interrupt() -> None:
        for path in (tmp_path / "cache").glob("tokens-*"):
            shutil.rmtree(path)
        with monkeypatch.context() as patch:
            patch.setattr("trainer.data.ingest.build.build", interrupted_there)
            with pytest.raises(KeyboardInterrupt):
                samples_of(data)

    return Cache(lambda: samples_of(data), tmp_path / "cache", again=interrupt)


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """What `trainer.prepare` leaves if it is interrupted."""
    monkeypatch.setattr("trainer.data.ingest.build.MIN_UNIT_BYTES", 1300)
    lines = write_lines(tmp_path / "a.jsonl")
    out = tmp_path / "out"

    def use() -> Any:
        for path in out.glob("x-*"):
            path.unlink()
        prepare([str(lines)], str(out / "x"), holdout=0.2, procs=1)
        return {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupt() -> None:
        for path in out.glob("x-*"):
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(BuildFolder, "finish", interrupted_there)
            with pytest.raises(KeyboardInterrupt):
                prepare([str(lines)], str(out / "x"), holdout=0.2, procs=1)

    return Cache(use, out, again=interrupt)


def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = {
        "measured": "today", "matmul": {2: 1e9, 4: 1e9}, "attention": {2: 1e9, 4: 1e9}, "memory": 1e9,
        "kernel_s": 1e-6, "host_s": 0.0,
    }  # fmt: skip
    write_calibration("cpu", rates)
    before = calibration_path("cpu").read_bytes()

    def use() -> Any:
        found = read_calibration("cpu")
        return found if found is not None else json.loads(before) and "none"

    def use_or_none() -> Any:
        found = use()
        return expected if found == "none" else found  # removed: there is none, and the data sheet is taken

    expected = use()
    return Cache(use_or_none, tmp_path / "cache", may_refuse=True)


def shards_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    (tmp_path / "data").mkdir()
    path = write_shards(tmp_path / "data", *([text.encode()] for text in texts(3)))
    data = DataSection(source="tokens", path=path, cache_dir=str(tmp_path / "cache"), seq_len=8)
    return Cache(lambda: samples_of(data), tmp_path / "data", may_refuse=True)


def manifest_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    found = shards_of_the_user(tmp_path, monkeypatch)
    listed = [Shard(path) for path in sorted(found.folder.glob("*.bin"))]
    checksums = [shard.info.checksum for shard in listed]
    kind, rows_of_it = listed[0].info.shared_properties, manifest_rows(listed, found.folder)
    ShardManifest(*kind, train=rows_of_it, held_out=[], checksums=checksums).write(found.folder / "manifest.json")
    data = DataSection(source="tokens", path=str(found.folder / "manifest.json"), seq_len=8)
    return Cache(lambda: samples_of(data), found.folder, may_refuse=True)


def large_shards_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """With checksums of their pages, which are compared when a page is read."""
    monkeypatch.setattr(shards, "MAX_BYTES_VERIFIED_AT_START", 0)
    monkeypatch.setattr(shards, "_MAX_BYTES_WITHOUT_CRC", 64)
    monkeypatch.setattr(shards, "_PAGE_BYTES", 32)
    return shards_of_the_user(tmp_path, monkeypatch)


def large_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Damaged pages are refused once, and the next start builds them again."""
    monkeypatch.setattr(shards, "MAX_BYTES_VERIFIED_AT_START", 0)
    monkeypatch.setattr(shards, "_MAX_BYTES_WITHOUT_CRC", 64)
    monkeypatch.setattr(shards, "_PAGE_BYTES", 32)
    data = of_text(tmp_path)

    def use() -> Any:
        refused = ""
        try:
            return samples_of(data)
        except (ShardError, UserError) as error:
            refused = str(error)
        assert "the next start builds it again" in refused
        as_in_a_new_process()
        return samples_of(data)

    return Cache(use, tmp_path / "cache")


CACHES: dict[str, Callable[[Path, pytest.MonkeyPatch], Cache]] = {
    kind.__name__: kind
    for kind in (
        tokens, interrupted, stdlib, chats, pairs, packed_rows, many_shards, from_afar, from_afar_of_before,
        text_from_afar, prepared, calibration, shards_of_the_user, manifest_of_the_user,
        large_shards_of_the_user, large_tokens,
    )
}  # fmt: skip

SLOW = ("interrupted", "pairs", "from_afar_of_before", "prepared", "large_tokens")
"""Caches whose files are damaged in the campaign only, because filling them takes seconds."""

_servers: list[Server] = []


def _served(folder: Path) -> Server:
    _servers.append(Server(folder))
    return _servers[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _servers:
        _servers.pop().close()


# -- the damages ------------------------------------------------------------------------------------------------------


def flipped(path: Path, bit: int | None = None) -> None:
    """Turn over one bit, as a disk does: the times of the file stay."""
    content, times = bytearray(path.read_bytes()), path.stat()
    if content:
        bit = len(content) * 8 // 2 if bit is None else bit % (len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one bit turned over": flipped,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "replaced by a folder": as_folder,
}


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".damaged"))


def try_all(found: Cache, damages: list[Callable[[Path], None]], names: list[str]) -> int:
    """Damage each file in each way, and compare the samples with those before; returns the number of cases."""
    expected = found.use()
    found.again()
    pristine = found.folder.with_name("pristine")
    shutil.copytree(found.folder, pristine)
    count = 0
    for path in files_in(found.folder):
        for damage, name in zip(damages, names, strict=True):
            damage(path)
            as_in_a_new_process()
            what = f"{path.relative_to(found.folder)} {name}"
            refused = ""
            try:
                same = found.use() == expected
            except (UserError, ShardError) as error:
                refused, same = str(error), False
            if found.may_refuse and refused:
                assert path.stem in refused, f"{what}: {refused}"
            else:
                assert same, f"{what}: {refused or 'other samples'}"
            count += 1
            shutil.rmtree(found.folder)
            shutil.copytree(pristine, found.folder)
            as_in_a_new_process()
    return count


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.campaign if kind in SLOW else ()) for kind in CACHES]
)
def test_a_damaged_file_gives_the_same_samples_or_one_message(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CACHES[kind](tmp_path, monkeypatch)
    assert try_all(found, list(DAMAGES.values()), list(DAMAGES)) >= len(DAMAGES)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", CACHES)
def test_any_bit_of_any_file_may_flip(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, rng = CACHES[kind](tmp_path, monkeypatch), random.Random(kind)
    bits = [rng.randrange(1 << 20) for _ in range(40)]
    try_all(
        found,
        [lambda path, bit=bit: flipped(path, bit) for bit in bits],
        [f"bit {bit}" for bit in bits],  # type: ignore[misc]
    )


@pytest.mark.slow
def test_runs_train_the_same_or_are_rejected_in_one_message(tmp_path: Path) -> None:
    """With real processes: a flipped bit in a cache is repaired with one line; in shards of the user it is an error."""
    lines = write_lines(tmp_path / "a.jsonl", 200)
    own = ["model.vocab_size=257", "train.steps=2", "checkpoint.every=0", f"data.cache_dir={tmp_path / 'cache'}"]
    losses = []
    for name in ("first", "again"):
        ran = run_tiny(tmp_path / name, *own, f"data.path={lines}", "nproc=2")
        losses.append([line["loss"] for line in ran.metrics if line["kind"] == "train"])
        assert ran.stderr.count("is damaged") == (name == "again"), ran.stderr
        (shard,) = (tmp_path / "cache").rglob("00000.bin")
        for bit in range(0, 8 * shard.stat().st_size, 160):
            flipped(shard, bit)
    assert losses[0] == losses[1]

    (tmp_path / "data").mkdir()
    path = write_shards(tmp_path / "data", [text.encode() for text in texts(200)])
    flipped(tmp_path / "data" / "text-00000.bin")
    ran = run_tiny(tmp_path / "refused", *own, f"data.path={path}", "nproc=2", exit_code=2)
    assert ran.stderr.count("text-00000.bin is damaged: its checksum is ") == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "refused").exists()


# -- pages of large shards --------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard:
    """A shard of 12 MB, whose pages have checksums; nothing of it has been verified."""
    write_shards(tmp_path, [np.random.default_rng(0).bytes(6_000_000)])
    as_in_a_new_process()
    return Shard(tmp_path / "text-00000.bin")


def test_pages_of_a_large_shard_are_verified_when_read(large: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = os.preadv
    monkeypatch.setattr(
        shards.os,
        "preadv",
        lambda file, buffers, at: (
            asked.extend(len(memoryview(each).cast("B")) for each in buffers) or real(file, buffers, at)
        ),
    )
    plain = np.fromfile(large.path, "<u2")
    for start, count in ((0, 10), (2047, 2), (1_000_001, 5_000), (5_999_990, 11), (2048, 2048)):
        assert np.array_equal(large.read(start, count), plain[start : start + count])
    assert sum(asked) < 50_000, asked
    flipped(large.path, 8 * 4_000_000)
    as_in_a_new_process()
    damaged = Shard(large.path)
    assert np.array_equal(damaged.read(0, 10), plain[:10])
    with pytest.raises(ShardError, match=r"text-00000\.bin is damaged: its checksum is \w{8}, but \w{8} was written"):
        damaged.read(1_999_000, 2_000)


def test_damaged_page_checksums_are_rebuilt(large: Shard) -> None:
    expected = large.read(1_000, 3_000)
    for damage in DAMAGES.values():
        sums = large.path.with_suffix(".crc")
        content = sums.read_bytes()
        damage(sums)
        as_in_a_new_process()
        again = Shard(large.path)
        assert np.array_equal(again.read(1_000, 3_000), expected)
        assert np.array_equal(again.read(5_000_000, 10), large.read(5_000_000, 10))
        locks.remove(sums)
        sums.write_bytes(content)


def test_small_shard_that_replaces_a_large_one_has_no_page_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_MAX_BYTES_WITHOUT_CRC", 1000)
    for count, suffixes in ((100, {".bin", ".idx", ".crc", ".json"}), (10, {".bin", ".idx", ".json"})):
        lines = write_lines(tmp_path / "a.jsonl", count)
        prepare([str(lines)], str(tmp_path / "out" / "x"), overwrite=True, procs=1)
        assert {path.suffix for path in (tmp_path / "out").iterdir()} == suffixes


def test_shards_of_earlier_versions_have_no_page_checksums(large: Shard) -> None:
    """They are verified completely before they are first read."""
    large.path.with_suffix(".crc").unlink()
    plain = np.fromfile(large.path, "<u2")
    assert np.array_equal(Shard(large.path).read(7, 100), plain[7:107])
    flipped(large.path)
    as_in_a_new_process()
    with pytest.raises(ShardError, match="is damaged"):
        Shard(large.path).read(7, 100)


# -- building once ----------------------------------------------------------------------------------------------------


def load(folder: Path) -> str:
    content: str = json.loads((folder / "content").read_text())
    return content


def test_an_entry_is_built_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    built: list[int] = []

    def build(folder: Path) -> None:
        built.append(1)
        (folder / "content").write_text('"made"')

    (tmp_path / ".entry.1-killed.tmp").mkdir()  # by a process that was killed
    threads = [
        threading.Thread(target=get_or_build, args=(str(tmp_path), "entry", "things", build, load)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]

    def fail(folder: Path) -> None:
        (folder / "content").write_text("half")
        raise UserError("there is nothing to train on")

    with pytest.raises(UserError, match="nothing to train on"):
        get_or_build(str(tmp_path), "other", "things", fail, load)
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_without_locks_each_process_builds_and_the_first_result_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    meet = threading.Barrier(2)

    def build(folder: Path) -> None:
        (folder / "content").write_text('"made"')
        meet.wait()

    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(get_or_build(str(tmp_path), "entry", "things", build, load)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["made", "made"]
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob(".*.tmp"))


def test_code_that_requires_a_lock_fails_with_advice_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with (
        pytest.raises(OSError, match=r"has no locks; set data\.cache_dir to a local disk"),
        locked(tmp_path / "lock", is_required=True),
    ):
        pass
    with locked(tmp_path / "lock") as held:
        assert not held.is_locked


def test_last_holder_of_a_shared_lock_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, is_shared=True) as first:
        with locked(path, is_shared=True) as second:
            assert not second.make_exclusive()
        assert path.exists()
        assert not remove_unlocked(path)
        assert first.make_exclusive()
    assert not path.exists()
    path.touch()
    assert remove_unlocked(path)
    assert not path.exists()


@pytest.mark.parametrize("keeps_share", [False, True], ids=["local", "nfs"])
def test_of_holders_that_all_give_up_their_share_the_last_one_cleans_up(
    tmp_path: Path, keeps_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems keep the share of a holder whose lock cannot be made exclusive."""
    real = fcntl.flock

    def flock(descriptor: int, kind: int) -> None:
        try:
            real(descriptor, kind)
        except BlockingIOError:
            if keeps_share:
                real(descriptor, fcntl.LOCK_SH)
            raise

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    path = tmp_path / "lock"
    with locked(path, is_shared=True) as first, locked(path, is_shared=True) as second:
        assert [lock.make_exclusive() for lock in (first, second)] == [False, True]
    assert not path.exists()


def test_locked_file_that_was_renamed_is_kept(tmp_path: Path) -> None:
    """The same for a file that a different process has created under the old name."""
    with locked(tmp_path / "part"):
        (tmp_path / "part").rename(tmp_path / "whole")
        (tmp_path / "part").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part", "whole"]


def test_lock_excludes_others_even_if_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder removes the file; a process that opened it before must not take it for the file that others lock."""
    path, real = tmp_path / "lock", locks.open_lock
    with contextlib.ExitStack() as first:
        first.enter_context(locked(path))

        def open_just_before_it_is_removed(path: Path) -> int:
            descriptor = real(path)
            first.close()
            return descriptor

        monkeypatch.setattr(locks, "open_lock", open_just_before_it_is_removed)
        with locked(path):
            other = real(path)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(other)
    assert not path.exists()


def test_a_stop_request_ends_the_wait_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise StopRequested("SIGTERM")

    monkeypatch.setattr(locks, "raise_if_stop_requested", asked)
    with locked(tmp_path / "lock"), pytest.raises(StopRequested), locked(tmp_path / "lock"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chats", "tokens", "stdlib", "text_from_afar"])
def test_a_full_disk_is_one_message_and_no_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.data.test_caches.ANSWERS", ["Hello"] * 500)
    monkeypatch.setattr("tests.data.test_caches.texts", lambda _: ["a document"] * 2000)
    with small_disk(tmp_path / "cache", "8k") as disk:
        found = CACHES[kind](tmp_path, monkeypatch)
        with pytest.raises(UserError) as caught:
            found.use()
        left = [path for path in disk.rglob("*") if path.is_file() and not path.name.startswith("listed-")]
    message = str(caught.value)
    assert message.startswith(f"data.cache_dir={disk}: ")
    assert f"cannot be stored in {disk}: the disk is full: 0.0 MB are free" in message
    assert message.endswith("to fix: free some space, or give a folder on another disk")
    assert left == []


@pytest.mark.slow
def test_remote_shards_on_a_full_disk_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.data.test_caches.texts", lambda _: ["a document " * 2000] * 2)
    with small_disk(tmp_path / "cache", "8k") as disk:
        with pytest.raises(UserError) as caught:
            from_afar(tmp_path, monkeypatch).use()
        left = [path.name for path in disk.rglob("*.bin*")]
    assert "No space left on device for the cache; free some space, set data.cache_dir to another disk" in str(
        caught.value
    )
    assert left == []


# -- text from afar ---------------------------------------------------------------------------------------------------


def test_text_that_changes_between_lookup_and_download_is_rejected(tmp_path: Path) -> None:
    """Same size, new time: it would be cached under the version of the lookup."""
    (tmp_path / "there").mkdir()
    path = write_lines(tmp_path / "there" / "a.jsonl")
    server = _served(tmp_path / "there")

    def change(name: str) -> None:
        if server.asked[name] == 2:
            path.write_text(path.read_text().replace("document", "sentence"))
            os.utime(path, (1, 1))

    server.on_request = change
    data = DataSection(source="tokens", path=f"{server.url}/a.jsonl", cache_dir=str(tmp_path / "cache"), seq_len=8)
    with pytest.raises(UserError, match=r"a\.jsonl: has changed since it was looked up(.|\n)*start again"):
        open_source(data, None, "train")
    assert b"sentence" in bytes(read_all(open_source(data, None, "train"))[0].astype(np.uint8))
    assert not list((tmp_path / "cache" / "text").glob("*a.jsonl*"))
