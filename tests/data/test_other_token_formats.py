"""Token files of nanoGPT, llm.c and Megatron are converted exactly, and `data.bos` sets how documents begin."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands.test_data_command import ask
from tests.commands.test_prepare import run, write_jsonl
from tests.data.test_data import write_tokenizer
from trainer.config import DataSection
from trainer.data.ingest import readers as reading
from trainer.data.opening import find_shards, open_source
from trainer.data.shards import Shard
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import UserError

END = "<|endoftext|>"
Documents = Sequence[Sequence[int]]


def plain(path: Path, documents: Documents, dtype: str = "<u2") -> None:
    """Write a file as nanoGPT's data/openwebtext/prepare.py does."""
    np.array([number for each in documents for number in each], dtype).tofile(path)


def with_header(path: Path, documents: Documents) -> None:
    """Write a file as llm.c's dev/data/data_common.py does."""
    ids = np.array([number for each in documents for number in each], "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def megatron(path: Path, documents: Documents, code: int = 4, dtype: str = "<i4") -> None:
    """Write files as Megatron's IndexedDatasetBuilder does: each document in sequences, here of two tokens at most."""
    sequences, borders = [], [0]
    for each in documents:
        sequences += [each[start : start + 2] for start in range(0, len(each), 2)]
        borders.append(len(sequences))
    ids = np.array([number for each in sequences for number in each], dtype)
    lengths = [len(each) for each in sequences]
    pointers = [start * ids.itemsize for start in itertools.accumulate(lengths[:-1], initial=0)]
    ids.tofile(path)
    with open(path.with_suffix(".idx"), "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders)))
        index.write(np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes())
        index.write(np.array(borders, "<i8").tobytes())


def settings(tmp_path: Path, path: object, **more: Any) -> DataSection:
    return DataSection(source="tokens", path=str(path), cache_dir=str(tmp_path / "cache"), seq_len=4, **more)


def documents_of(shards: Sequence[Shard]) -> list[list[int]]:
    return [
        shard.read(start, end - start).tolist()
        for shard in shards
        for start, end in itertools.pairwise(shard.read_offsets())
    ]


@pytest.mark.parametrize("write", [plain, with_header, megatron, lambda *given: megatron(*given, code=8, dtype="<u2")])
def test_tokens_and_documents_are_converted_exactly(
    tmp_path: Path, write: Callable[[Path, Documents], None], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json", END))
    end = find_tokenizer(tokenizer).end_id
    ends_in = [end] if write in (plain, with_header) else []  # Megatron's need none: their index says it
    documents = [[*range(1, size), *ends_in] for size in (3, 9, 2, 30, 6)]
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "train.bin", documents)
    monkeypatch.setattr(reading, "_CHUNK_TOKENS", 7)
    for path in (tmp_path / "there" / "train.bin", tmp_path / "there", tmp_path / "there" / "*.bin"):
        data = settings(tmp_path, path, tokenizer=tokenizer)
        assert documents_of(find_shards(str(data.path), data, "data.path").train) == documents
    source = open_source(data, None, "train")
    assert source.bytes_per_token is None
    out = tmp_path / "out" / "x"
    command = (tmp_path / "there" / "train.bin", "--out", out, "--tokenizer", tokenizer, "--shard-tokens", 8)
    assert run(*command) == 0
    shards = [Shard(path) for path in sorted(out.parent.glob("*.bin"))]
    assert len(shards) > 2
    assert documents_of(shards) == documents
    assert "tokens/byte" not in capsys.readouterr().out


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json", END))
    path = tmp_path / "train.bin"

    def refused(words: str, **more: Any) -> None:
        with pytest.raises(UserError, match=words):
            open_source(settings(tmp_path, path, **{"tokenizer": tokenizer, **more}), None, "train")

    plain(path, [[1, 2, 3]])
    refused("data.tokenizer=bytes: .*train.bin does not say which tokenizer", tokenizer="bytes")
    refused("data.bos=false: the tokens of .*train.bin are used unchanged", bos=False)
    plain(path, [[1, 60_000]])
    refused("train.bin holds the id 60000, but the tokenizer's ids are below")
    path.write_bytes(b"abc")
    refused("is not a complete token file: its size is not a multiple of 2")
    with_header(path, [[1, 2, 3]])
    path.write_bytes(path.read_bytes()[:-2])
    refused("its header says 1030")
    megatron(path, [[1, 2, 3], [4]])
    path.write_bytes(path.read_bytes()[:-4])
    refused("its .idx does not cover all of its bytes")
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:40])
    refused("its .idx has 40 bytes and needs")


# -- the token that begins a text -----------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The path of one that knows a token to begin with, and does not add it itself."""
    (tmp_path / "tok").mkdir()
    path = write_tokenizer(tmp_path / "tok" / "tokenizer.json", END)
    stored = json.loads(path.read_text())
    begin = len(stored["model"]["vocab"]) + len(stored["added_tokens"])
    added = {**stored["added_tokens"][0], "id": begin, "content": "<s>"}
    path.write_text(json.dumps({**stored, "added_tokens": [*stored["added_tokens"], added]}))
    return str(path)


def test_documents_begin_as_data_bos_says(tmp_path: Path, tokenizer: str, capsys: Any) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", ["the cat", "and the hat " * 3])
    begin = find_tokenizer(tokenizer, bos=True).start_ids
    assert len(begin) == 1
    found = {}
    for bos in (None, False, True):
        data = settings(tmp_path, lines, tokenizer=tokenizer, bos=bos)
        found[bos] = documents_of(find_shards(str(data.path), data, "data.path").train)
    assert found[None] == found[False] == [each[1:] for each in found[True]]
    assert [each[0] for each in found[True]] == [*begin] * 2
    assert run(lines, "--out", tmp_path / "out" / "x", "--tokenizer", tokenizer, "--bos") == 0
    assert documents_of([Shard(tmp_path / "out" / "x-00000.bin")]) == found[True]
    assert "data.bos=true" in capsys.readouterr().out
    shards = f"data.path={tmp_path / 'out' / 'x-00000.bin'}"
    common = ("data.source=tokens", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path / 'cache'}")
    code, out, _ = ask(capsys, "show", *common, shards, "data.bos=true", "data.seq_len=8")
    assert code == 0
    assert "[begin] 'the cat'" in out


def test_impossible_bos_is_rejected(tmp_path: Path, tokenizer: str) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", ["the cat"] * 9)
    lone = str(write_tokenizer(tmp_path / "lone.json", END))
    for other in ("bytes", lone):
        with pytest.raises(UserError, match=r"data.bos=true: .* has no beginning-of-text token"):
            open_source(settings(tmp_path, lines, tokenizer=other, bos=True), None, "train")
    assert run(lines, "--out", tmp_path / "x", "--tokenizer", tokenizer) == 0
    with pytest.raises(UserError, match=r"data.bos=true: .* is already tokenized, with a different data.bos"):
        open_source(settings(tmp_path, tmp_path / "x-00000.bin", tokenizer=tokenizer, bos=True), None, "train")
