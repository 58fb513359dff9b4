"""Caches that are damaged, full, or built by processes that die: the right samples or one message, never wrong samples.

What is in a cache is of no interest here: every file of it is damaged, and every file operation may be the last one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer.data.chat.source  # noqa: F401 - imported once, and not by each process that reads a cache of chats
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.data import content_of, flip_bit, write_records, write_shards, write_texts
from tests.helpers.faults import Fault, reach, small_disk
from tests.helpers.launch import Run, fork, on_ranks, run
from trainer import UserError
from trainer.config.schema import DataSection
from trainer.data import records, shards
from trainer.data.opening import open_source
from trainer.data.source import as_mapping
from trainer.prepare import prepare

TEXTS = [f"document {number} " * (number % 5 + 1) for number in range(40)]
WORDS = ["Yes", "No", "Hello", "there", "two", "and"]

# ---------------------------------------------------------------------------------------------------------------
# The caches


def text(inputs: Path) -> DataSection:
    return DataSection(source="tokens", path=str(write_texts(inputs / "a.jsonl", TEXTS)), seq_len=8, holdout=0.2)


def stdlib(inputs: Path) -> DataSection:
    """The library of this Python, or of a smaller one if the test has written it (`library_in`)."""
    return DataSection(source="stdlib", seq_len=64)


def chats(inputs: Path) -> DataSection:
    lines = [{"messages": conversation("Hi", word, "Bye", "Bye now")} for word in WORDS * 4]
    return _chats(inputs, lines)


def pairs(inputs: Path) -> DataSection:
    answers = {word: [{"role": "assistant", "content": word}] for word in [*WORDS, "Bye"]}
    lines = [{"prompt": conversation("Hi"), "chosen": answers[word], "rejected": answers["Bye"]} for word in WORDS * 4]
    return _chats(inputs, lines)


def _chats(inputs: Path, lines: list[dict[str, Any]]) -> DataSection:
    tokenizer = str(write_tokenizer(inputs / "model", CHATML))
    path = str(write_records(inputs / "chats.jsonl", lines))
    return DataSection(source="chat", path=path, tokenizer=tokenizer, seq_len=64, holdout=0.2)


def packed(inputs: Path) -> DataSection:
    """Rows of many documents, which are kept in files."""
    path = write_shards(inputs, TEXTS)
    return DataSection(source="tokens", path=path, seq_len=16, fit="best", documents="masked")


CACHES: dict[str, Callable[[Path], DataSection]] = {
    kind.__name__: kind for kind in (text, stdlib, chats, pairs, packed)
}


def digest(data: DataSection) -> str:
    """Return a checksum of all samples of both splits, and of what identifies them."""
    found = []
    for split in ("train", "eval"):
        source = open_source(data, None, split)  # type: ignore[call-overload]
        if source is not None:
            entries = as_mapping(source.batch(np.arange(len(source))))
            found.append({name: entry.tolist() for name, entry in entries.items()})
            found.append(source.fingerprint.to_state())
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def write_inputs(kind: str, folder: Path, cache: Path) -> DataSection:
    """Write what a cache is made of, in this process, and return the settings for a cache in a folder."""
    import sysconfig

    shards.MAX_DOCUMENTS_IN_MEMORY = 0  # a million documents would take seconds
    library = folder / "lib"
    library.mkdir(exist_ok=True)
    for number in range(60):
        (library / f"m{number}.py").write_text(f"x = {number}\n" * 5)
    sysconfig.get_path = lambda *_, **__: str(library)  # type: ignore[assignment]
    return dataclasses.replace(CACHES[kind](folder), cache_dir=str(cache))


def in_a_new_process(function: Callable[[], str]) -> str:
    """Return what a function returns in a fork of this process, or the error that it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = function()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode(errors="replace")
    os.waitpid(child, 0)
    return said


# ---------------------------------------------------------------------------------------------------------------
# Damaged files

DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit turned over": flip_bit,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
}


def damaged_one_by_one(kind: str, folder: Path, bits: int) -> list[str]:
    """Damage each file of a cache in each way, and return the cases in which a new process has other samples.

    bits: how many random bits of each file to turn over, instead of the DAMAGES.
    """
    rng = random.Random(kind)
    random_bits = [partial(flip_bit, bit=rng.randrange(1 << 20)) for _ in range(bits)]
    damages = {f"bit {flip.keywords['bit']}": flip for flip in random_bits} if bits else DAMAGES
    cache, pristine = folder / "cache", folder / "pristine"
    data = write_inputs(kind, folder, cache)
    expected = in_a_new_process(lambda: digest(data))
    assert len(expected) == 64, expected
    shutil.copytree(cache, pristine)
    wrong, count = [], 0
    for name in content_of(cache):
        for damage, change in damages.items():
            if (cache / name).stat().st_size == 0 and damage != "removed":
                continue
            change(cache / name)
            found = in_a_new_process(lambda: digest(data))
            if found != expected:
                wrong.append(f"{name} {damage}: {found}")
            count += 1
            shutil.rmtree(cache)
            shutil.copytree(pristine, cache)
    assert count >= len(damages)
    return wrong


CAMPAIGN = pytest.mark.campaign


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["text", *(pytest.param(kind, marks=CAMPAIGN) for kind in ("stdlib", "chats", "packed", "pairs"))]
)
@pytest.mark.parametrize("bits", [0, pytest.param(40, marks=CAMPAIGN)])
def test_a_damaged_file_of_a_cache_changes_no_sample(tmp_path: Path, kind: str, bits: int) -> None:
    assert on_ranks(1, damaged_one_by_one, kind, tmp_path, bits) == [[]]


@pytest.mark.slow
def test_damage_found_while_reading_a_large_cache_is_built_again_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in data of more than a gigabyte, which are not read through at the start."""
    monkeypatch.setattr(shards, "MAX_BYTES_VERIFIED_AT_START", 0)
    cache = tmp_path / "cache"
    data = dataclasses.replace(text(tmp_path), cache_dir=str(cache))
    expected = in_a_new_process(lambda: digest(data))
    assert len(expected) == 64, expected
    content, rng = content_of(cache), random.Random(0)
    assert {Path(name).suffix for name in content} >= {".bin", ".crc"}
    num_found = 0
    for name in content:
        for _ in range(3):
            flip_bit(cache / name, rng.randrange(1 << 30))
            found = in_a_new_process(lambda: digest(data))
            if found != expected:
                assert found.startswith("ShardError: "), found
                assert found.endswith("; the next start builds it again"), found
                num_found += 1
                assert in_a_new_process(lambda: digest(data)) == expected
            for other, bytes_before in content.items():
                (cache / other).write_bytes(bytes_before)  # also what no sample needs, such as the .idx of joined rows
    assert num_found


@pytest.mark.slow
def test_runs_train_the_same_or_are_refused_in_one_message(tmp_path: Path) -> None:
    """A flipped bit in a cache is repaired; in shards of the user it is an error, before anything is written."""
    lines = write_texts(tmp_path / "a.jsonl", TEXTS * 5)
    own = ["model.vocab_size=257", "train.steps=2", "checkpoint.every=0", f"data.cache_dir={tmp_path / 'cache'}"]
    first = run(tmp_path / "first", *own, f"data.path={lines}")
    for path in (tmp_path / "cache").rglob("*.bin"):
        for bit in range(0, 8 * path.stat().st_size, 160):
            flip_bit(path, bit)
    assert run(tmp_path / "again", *own, f"data.path={lines}").train("loss") == first.train("loss")

    path = write_shards(tmp_path / "data", TEXTS * 5)
    flip_bit(tmp_path / "data" / "text-00000.bin")
    refused = run(tmp_path / "refused", *own, f"data.path={path}", code=2)
    assert refused.err.count("error: ") == 1, refused.err
    assert f"data.path={path}" in refused.err
    assert "text-00000.bin" in refused.err
    assert not (tmp_path / "refused").exists()


# ---------------------------------------------------------------------------------------------------------------
# Full disks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "chats"])
def test_a_full_disk_is_one_message_and_no_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, items in (("TEXTS", TEXTS), ("WORDS", WORDS)):
        monkeypatch.setattr(f"tests.data.test_caches.{name}", items * 50)
    data = CACHES[kind](tmp_path)
    with small_disk(tmp_path / "cache", "8k") as disk:
        with pytest.raises(UserError) as caught:
            open_source(dataclasses.replace(data, cache_dir=str(disk)), None, "train")
        assert str(caught.value).startswith(f"data.cache_dir={disk}: ")
        assert not [path for path in disk.rglob("*") if path.is_file() and not path.name.startswith("listed-")]


# ---------------------------------------------------------------------------------------------------------------
# Builders that die


def build(data: DataSection, out: Path) -> int:
    """Fill a cache, or prepare shards, in the folder `out`; the process may die on the way (`Fault`)."""
    records.MIN_PIECE_BYTES = 1 << 9  # several pieces
    reach("start")
    if data.cache_dir is None:
        prepare([str(data.path)], str(out / "x"), holdout=0.2)
    else:
        (out.parent / f"{out.name}.digest").write_text(digest(data))
    return 0


def points(count: int) -> list[float]:
    return [number / count for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("chats", 1 / 2),
        *(pytest.param("prepare", share, marks=CAMPAIGN) for share in points(40)),
        *(pytest.param("text", share, marks=CAMPAIGN) for share in points(40)),
        *(pytest.param("chats", share, marks=CAMPAIGN) for share in points(40)),
    ],
)
def test_a_killed_builder_is_continued_by_four_to_the_same_bytes(tmp_path: Path, kind: str, when: float) -> None:
    """Killed at any file operation: four others at once make the bytes of an undisturbed one, and no other file.

    What was finished is not built again.
    """
    (tmp_path / "in").mkdir()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    made = text(tmp_path / "in") if kind == "prepare" else CACHES[kind](tmp_path / "in")

    def start(out: Path, fault: Fault | None = None) -> Run:
        data = made if kind == "prepare" else dataclasses.replace(made, cache_dir=str(out))
        return fork(build, [data, out], out, variables=fault.variables if fault else None)

    def finished_pieces() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in killed.rglob("*.done")}

    undisturbed = Fault(tmp_path / "notes", below=whole)
    first = start(whole, undisturbed).wait()
    assert first.code == 0, first.err
    place = f"file {1 + int(when * (len(undisturbed.files()) - 1))}"
    assert start(killed, Fault(tmp_path / "fault", {place: "SIGKILL"}, below=killed)).wait().codes == [-signal.SIGKILL]
    finished = finished_pieces()
    ended = [builder.wait() for builder in [start(killed) for _ in range(4)]]
    codes = [each.code for each in ended]
    assert 0 in codes, [each.err for each in ended]
    left = {name: content for name, content in content_of(killed).items() if not name.endswith(".lock")}
    assert left == content_of(whole)
    if kind != "prepare":
        assert codes == [0] * 4, [each.err for each in ended]
        assert (tmp_path / "killed.digest").read_text() == (tmp_path / "whole.digest").read_text()
        assert finished.items() <= finished_pieces().items()
