"""`trainer.prepare` keeps all text once, cut at document ends; on an error it prints one message and writes nothing."""

from __future__ import annotations

import gzip
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import write_tokenizer
from trainer import prepare
from trainer.config import DataSection
from trainer.data.ingest import encode
from trainer.data.opening import open_source
from trainer.data.shards import Shard
from trainer.data.source import IGNORE
from trainer.data.tokenizer import find_tokenizer


def run(*arguments: object) -> int:
    return prepare.command_line([str(argument) for argument in arguments])


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts))
    return path


def read_documents(folder: Path, pattern: str, tokenizer: str = "bytes") -> list[str]:
    """Return the documents of all shards, decoded, each found by its offsets."""
    found = []
    for path in sorted(folder.glob(pattern)):
        shard = Shard(path)
        offsets = shard.read_offsets()
        for start, end in itertools.pairwise(offsets):
            assert shard.read(end - 1, 1) == shard.info.end_id
            found.append(find_tokenizer(tokenizer).decode(shard.read(start, end - 1 - start)))
    return found


def settings_of(output: str) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in shlex.split(output.splitlines()[-1]))


TEXTS = ["one\r\ntwo\rthree\n", "zwölf\r\nBoxkämpfer\u2028", "x" * 100, "\ufeff四", "end"]


@pytest.mark.parametrize("tokenizer", ["bytes", "file"])
def test_all_text_can_be_restored(tmp_path: Path, tokenizer: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(encode, "MAX_PIECE_BYTES", 3)  # so that files are read in several pieces
    if tokenizer == "file":
        tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_bytes(TEXTS[0].encode())
    with gzip.open(source / "b.txt.gz", "wb") as file:
        file.write(TEXTS[1].encode())
    write_jsonl(source / "c.jsonl", TEXTS[2:4])
    with gzip.open(source / "deep" / "d.jsonl.gz", "wb") as file:
        file.write(("\n" + json.dumps({"text": TEXTS[4]}) + "\n\n" + json.dumps({"text": ""})).encode())
    (source / "e.txt").write_text("")  # no text, no document
    (source / "notes.xyz").write_text("not asked for")

    assert run(source, source / "a.txt", "--out", tmp_path / "out" / "all", "--tokenizer", tokenizer) == 0
    assert read_documents(tmp_path / "out", "all-*.bin", tokenizer) == TEXTS
    info = Shard(tmp_path / "out" / "all-00000.bin").info
    assert (info.num_documents, info.num_bytes) == (5, len("".join(TEXTS).encode()))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"all-00000.{end}" for end in ("bin", "idx", "json")
    ]
    settings = settings_of(capsys.readouterr().out)
    assert settings["model.vocab_size"] == str(find_tokenizer(tokenizer).vocab_size)
    assert settings.get("data.tokenizer", "bytes") == tokenizer


def test_shards_end_with_documents_and_match_the_report(tmp_path: Path, capsys: Any) -> None:
    texts = [f"document {number} " * (number % 7 + 1) for number in range(200)]
    out = tmp_path / "a b" / "web"  # a space, as the report must quote it
    lines = write_jsonl(tmp_path / "web.jsonl", texts)
    assert run(lines, "--out", out, "--holdout", "0.1", "--shard-tokens", "1000") == 0
    train, held_out = read_documents(out.parent, "web-?????.bin"), read_documents(out.parent, "web-eval-?????.bin")
    assert sorted(train + held_out) == sorted(texts)
    assert 5 <= len(held_out) <= 40
    assert train == [text for text in texts if text in train]  # still in order
    for path in sorted(out.parent.glob("web-?????.bin"))[:-1]:
        assert 1000 <= Shard(path).info.num_tokens < 1000 + 7 * 14 + 1

    output = capsys.readouterr().out
    settings = settings_of(output)
    data = DataSection(source="tokens", path=settings["data.path"], eval_path=settings["data.eval_path"], seq_len=64)
    counts = {}
    for split in ("train", "eval"):
        source = open_source(data, int(settings["model.vocab_size"]), split)  # type: ignore[arg-type]
        assert source is not None
        targets = source.batch(np.arange(len(source)))[1]
        counts[split] = int((targets != IGNORE).sum()) + 1
    assert counts["train"] == sum(len(text) + 1 for text in train)
    assert counts["eval"] == sum(len(text) + 1 for text in held_out)
    assert f"held out: {len(held_out)} documents, {counts['eval']:,} tokens" in output


def test_the_same_documents_are_held_out_every_time(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(300)]
    lines = write_jsonl(tmp_path / "in.jsonl", texts)
    found = []
    for name, shard_tokens in (("a", 10**6), ("b", 100)):
        assert run(lines, "--out", tmp_path / name, "--holdout", "0.05", "--shard-tokens", shard_tokens) == 0
        found.append(read_documents(tmp_path, f"{name}-eval-*.bin"))
    assert found[0] == found[1]
    assert found[0][:3] == ["document 16", "document 28", "document 71"]  # a hash that changes would leak text


def test_existing_shards_are_an_error_or_all_replaced(tmp_path: Path, capsys: Any) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", [f"text {number}" for number in range(100)])
    few = write_jsonl(tmp_path / "few.jsonl", ["new"])
    out = tmp_path / "out" / "name"
    assert run(many, "--out", out, "--holdout", "0.2", "--shard-tokens", "50") == 0
    (tmp_path / "out" / "name-of-another-00000.bin").write_text("stays")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert run(few, "--out", out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert run(few, "--out", out, "--overwrite") == 0
    assert read_documents(tmp_path / "out", "name-?????.bin") == ["new"]
    assert len(list((tmp_path / "out").iterdir())) == 3 + 1


def test_late_input_error_keeps_existing_shards(tmp_path: Path, capsys: Any) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["text"])
    (tmp_path / "late.jsonl").write_text('{"text": "fine"}\n{"text": ')
    out = tmp_path / "out" / "name"
    assert run(good, "--out", out) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert run(tmp_path / "late.jsonl", "--out", out, "--overwrite", "--shard-tokens", 1) == 2
    assert f"{tmp_path}/late.jsonl:2: is not JSON" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text" "y"}\n', ["a.jsonl:2: is not JSON"]),
        ("a.jsonl", b"[1, 2]\n", ["a.jsonl:1: must be a JSON object, not list"]),
        (
            "a.jsonl",
            b'\n{"id": 1, "txt": "x"}',
            ["--text-key=text: ", "a.jsonl:2", "its keys: id, txt", "--text-key=txt"],
        ),
        ("a.jsonl", b'{"text": 7, "body": "x"}', ["--text-key=text: ", "not text but int", "--text-key=body"]),
        ("a.jsonl", b'{"text": "\\ud800"}', ["a.jsonl:1: is not valid Unicode"]),
        ("a.jsonl", b'{"text": "\xff"}', ["a.jsonl: is not UTF-8"]),
        ("a.txt", b"caf\xe9 au lait", ["a.txt: is not UTF-8"]),
        ("a.txt", b"", ["there is no text in it"]),
        ("a.jsonl", b'\n{"text": ""}\n', ["there is no text in it"]),
        ("a.txt.gz", b"not gzipped", ["a.txt.gz: cannot be read"]),
        ("a.txt.gz", gzip.compress(b"cut short" * 100, mtime=0)[:-9], ["a.txt.gz: cannot be read"]),
        ("a.xls", b"1,2", ["a.xls: its name must end in .txt, .md, .jsonl"]),
    ],
)
def test_unreadable_input(tmp_path: Path, name: str, content: bytes, words: list[str], capsys: Any) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path / name, "--out", tmp_path / "out" / "name") == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


def test_invalid_arguments(tmp_path: Path, capsys: Any) -> None:
    lines = write_jsonl(tmp_path / "lines.jsonl", [f"text {number}" for number in range(10)])
    out = tmp_path / "name"

    def error(*arguments: object) -> str:
        assert run(*arguments) == 2
        return str(capsys.readouterr().err)

    assert f"did you mean INPUT={lines}?" in error(tmp_path / "line.jsonl", "--out", out)
    (tmp_path / "empty").mkdir()
    assert "has no file that ends in .txt" in error(tmp_path / "empty", "--out", out)
    assert f"--out={tmp_path}/corpus" in error(lines, "--out", tmp_path)
    assert "folder cannot be created" in error(lines, "--out", lines / "name")
    assert "--holdout=1.5: " in error(lines, "--out", out, "--holdout", "1.5")
    assert "--shard-tokens=0: " in error(lines, "--out", out, "--shard-tokens", "0")
    assert "--tokenizer=gpt2: must be bytes" in error(lines, "--out", out, "--tokenizer", "gpt2")
    assert "holds out all of 10" in error(lines, "--out", out, "--holdout", "0.999999")

    message = error(lines, "--out", out, "--holdout", "0.0001")
    assert message.startswith("error: --holdout=0.0001: holds out none of 10 documents\n")
    legal = message.strip().rpartition("=")[2]
    assert not list(tmp_path.glob("name-*"))
    assert not list(tmp_path.glob(".*"))
    assert run(lines, "--out", out, "--holdout", legal) == 0
    assert len(read_documents(tmp_path, "name-eval-*.bin")) >= 1


def test_full_disk(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.data.shards.os.fsync", fail)
    assert run(write_jsonl(tmp_path / "a.jsonl", ["x"]), "--out", tmp_path / "out" / "name") == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    command = [sys.executable, "-m", "trainer.prepare", str(tmp_path / "*.jsonl")]
    done = subprocess.run([*command, "--out", str(tmp_path / "o")], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"data.source=tokens data.path={tmp_path}/o-00000.bin model.vocab_size=257\n")
    done = subprocess.run([*command, "--out", str(tmp_path / "o")], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --out={tmp_path}/o: {tmp_path}/o-00000.bin already exists")
