"""`trainer.prepare` turns text files into token shards; exactly the same text can be read from them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import Ended, meshtrainer
from tests.helpers.data import texts_in, write_texts
from trainer.config.schema import DataSection
from trainer.data.opening import open_source
from trainer.data.source import IGNORE


def prepared(*arguments: object) -> Ended:
    ended = meshtrainer("prepare", *arguments)
    assert ended.code == 0, ended.err
    return ended


def texts_of(folder: Path, pattern: str) -> list[str]:
    return texts_in(*sorted(folder.glob(pattern)))


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


TEXTS = ["one\r\ntwo\rthree\n", "zwölf\r\nBoxkämpfer\u2028", "x" * 100, "\ufeff四", "end"]


def test_all_text_can_be_restored(tmp_path: Path) -> None:
    """Of files in folders, compressed, as lines of JSON; empty ones are no documents."""
    source, out = tmp_path / "in", tmp_path / "out"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_bytes(TEXTS[0].encode())
    with gzip.open(source / "b.txt.gz", "wb") as file:
        file.write(TEXTS[1].encode())
    write_texts(source / "c.jsonl", TEXTS[2:4])
    with gzip.open(source / "deep" / "d.jsonl.gz", "wb") as file:
        file.write(("\n" + json.dumps({"text": TEXTS[4]}) + "\n\n" + json.dumps({"text": ""})).encode())
    (source / "e.txt").write_text("")
    (source / "notes.xyz").write_text("not asked for")
    prepared(source, source / "a.txt", "--out", out / "all")
    assert texts_of(out, "all-*.bin") == TEXTS
    assert {path.suffix for path in out.iterdir()} <= {".bin", ".idx", ".crc", ".json"}


LARGE_TEXTS = [f"document {number} " * 10_000 for number in range(200)]
"""Texts of more than 16 MiB together, so that they become several shards."""


def test_shards_end_with_documents_and_the_printed_settings_read_them(tmp_path: Path) -> None:
    out = tmp_path / "a b" / "web"  # a space, which the printed settings must quote
    printed = prepared(write_texts(tmp_path / "web.jsonl", LARGE_TEXTS), "--out", out, "--holdout", 0.1)
    train, held_out = texts_of(out.parent, "web-?????.bin"), texts_of(out.parent, "web-eval-?????.bin")
    assert sorted(train + held_out) == sorted(LARGE_TEXTS)
    assert 5 <= len(held_out) <= 40
    assert train == [text for text in LARGE_TEXTS if text in train], "still in order"
    assert len(list(out.parent.glob("web-?????.bin"))) == 2
    settings = dict(setting.split("=", 1) for setting in shlex.split(printed.out.splitlines()[-1]))
    data = DataSection(source="tokens", path=settings["data.path"], eval_path=settings["data.eval_path"], seq_len=64)
    by_glob = dataclasses.replace(data, path=f"{out}-?????.bin")
    for split, documents in (("train", train), ("eval", held_out)):
        vocab_size = int(settings["model.vocab_size"])
        source, same = (open_source(each, vocab_size, split) for each in (data, by_glob))  # type: ignore[call-overload]
        targets = source.batch(np.arange(len(source)))[1]
        assert int((targets != IGNORE).sum()) + 1 == sum(len(text) + 1 for text in documents)
        assert source.fingerprint == same.fingerprint
    by_manifest = dataclasses.replace(data, eval_path=data.path)
    held_out_source = open_source(by_manifest, 257, "eval")
    assert held_out_source is not None
    assert held_out_source.fingerprint == source.fingerprint


def test_the_same_documents_are_held_out_every_time(tmp_path: Path) -> None:
    """Wherever else they are: a hash that changes would leak text."""
    texts = [f"document {number}" for number in range(300)]
    write_texts(tmp_path / "whole.jsonl", texts)
    write_texts(tmp_path / "half.jsonl", texts[:150])
    for name in ("whole", "half"):
        prepared(tmp_path / f"{name}.jsonl", "--out", tmp_path / name, "--holdout", 0.05)
    whole, half = (texts_of(tmp_path, f"{name}-eval-*.bin") for name in ("whole", "half"))
    assert half == [text for text in whole if text in texts[:150]]
    assert whole[:3] == ["document 16", "document 28", "document 71"]


def test_existing_shards_are_an_error_or_all_replaced(tmp_path: Path) -> None:
    many = write_texts(tmp_path / "many.jsonl", LARGE_TEXTS)
    few = write_texts(tmp_path / "few.jsonl", ["new"])
    out = tmp_path / "out" / "name"
    prepared(many, "--out", out, "--holdout", 0.2)
    (tmp_path / "out" / "name-of-another-00000.bin").write_text("stays")
    before = content_of(tmp_path / "out")
    refused = meshtrainer("prepare", few, "--out", out)
    assert (refused.code, "--overwrite" in refused.err) == (2, True)
    assert content_of(tmp_path / "out") == before
    prepared(few, "--out", out, "--overwrite")
    assert texts_of(tmp_path / "out", "name-?????.bin") == ["new"]
    left = {name for name in content_of(tmp_path / "out") if not name.startswith("name-00000.")}
    assert left == {"name.manifest.json", "name-of-another-00000.bin"}


def test_late_error_in_the_input_keeps_existing_shards(tmp_path: Path) -> None:
    out = tmp_path / "out" / "name"
    prepared(write_texts(tmp_path / "good.jsonl", ["text"]), "--out", out)
    before = content_of(tmp_path / "out")
    (tmp_path / "late.jsonl").write_text('{"text": "fine"}\n{"text": ')
    arguments: list[Any] = [tmp_path / "late.jsonl", "--out", out, "--overwrite"]
    refused = meshtrainer("prepare", *arguments)
    assert (refused.code, f"{tmp_path}/late.jsonl:2" in refused.err) == (2, True)
    assert content_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text" "y"}\n'),
        ("a.jsonl", b"[1, 2]\n"),
        ("a.jsonl", b'\n{"id": 1, "txt": "x"}'),
        ("a.jsonl", b'{"text": 7, "body": "x"}'),
        ("a.jsonl", b'{"text": "\xff"}'),
        ("a.txt", b"caf\xe9 au lait"),
        ("a.txt", b""),
        ("a.txt.gz", gzip.compress(b"cut short" * 100, mtime=0)[:-9]),
        ("a.xls", b"1,2"),
    ],
)
def test_unreadable_input_is_named_and_leaves_nothing(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refused = meshtrainer("prepare", tmp_path / name, "--out", tmp_path / "out" / "name")
    assert refused.code == 2
    assert name in refused.err
    assert "Traceback" not in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [["--holdout", "1.5"], ["--tokenizer", "gpt2"]], ids="=".join)
def test_mistake_is_one_message_and_leaves_nothing(option: list[str], tmp_path: Path) -> None:
    lines = write_texts(tmp_path / "lines.jsonl", [f"text {number}" for number in range(10)])
    refused = meshtrainer("prepare", lines, "--out", tmp_path / "name", *option)
    assert refused.code == 2
    assert refused.err.startswith(f"error: {'='.join(option)}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_killed_build_gives_no_permission_to_replace_what_others_have_published(tmp_path: Path) -> None:
    """Nor does a corpus whose name begins alike."""
    own = write_texts(tmp_path / "own.jsonl", ["own"] * 40)
    partly = write_texts(tmp_path / "partly.jsonl", ["other"] * 40)
    partly.write_text(partly.read_text() + "[]\n")
    out = tmp_path / "out" / "name"
    assert meshtrainer("prepare", partly, "--out", out, "--bad", "0.001").code == 2  # its work stays, to be continued
    prepared(own, "--out", out)
    before = content_of(out.parent)
    assert set(before) == {
        "name-00000.bin",
        "name-00000.idx",
        "name-00000.crc",
        "name-00000.json",
        "name.manifest.json",
    }
    assert meshtrainer("prepare", partly, "--out", out, "--bad", "skip").code == 2
    assert content_of(out.parent) == before
    prepared(own, "--out", f"{out}-eval")
    prepared(partly, "--out", out, "--bad", "skip", "--overwrite")
    assert texts_of(out.parent, "name-eval-?????.bin") == ["own"] * 40
    assert meshtrainer("prepare", own, "--out", out, "--holdout", "0.5", "--overwrite").code == 2
