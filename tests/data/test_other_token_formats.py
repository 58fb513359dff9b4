"""Token files of nanoGPT, llm.c and Megatron are converted exactly, and `data.bos` sets how documents begin."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.data import documents_in, read_all, tokens_section, write_bpe, write_texts
from trainer import UserError
from trainer.data.opening import open_source
from trainer.data.source import IGNORE
from trainer.data.tokenizer import find_tokenizer

pytest.importorskip("tokenizers")

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


def megatron_of_two_bytes(path: Path, documents: Documents) -> None:
    megatron(path, documents, code=8, dtype="<u2")


@pytest.mark.parametrize("write", [plain, with_header, megatron, megatron_of_two_bytes])
def test_tokens_and_documents_are_converted_exactly(tmp_path: Path, write: Callable[[Path, Documents], None]) -> None:
    tokenizer = write_bpe(tmp_path / "tokenizer.json")
    end = find_tokenizer(str(tokenizer)).end_id
    ends_in = [end] if write in (plain, with_header) else []  # Megatron's need none: their index says it
    documents = [[*range(1, size), *ends_in] for size in (3, 9, 2, 30, 6)]
    folder = tmp_path / "there"
    folder.mkdir()
    write(folder / "train.bin", documents)
    for path in (folder / "train.bin", folder, folder / "*.bin"):
        data = tokens_section(
            path, seq_len=40, documents="apart", tokenizer=str(tokenizer), cache_dir=str(tmp_path / "cache")
        )
        source = open_source(data, None, "train")
        batch = read_all(source)
        rows = zip(batch["tokens"], batch["targets"], strict=True)
        found = [[int(tokens[0]), *targets[targets != IGNORE].tolist()] for tokens, targets in rows]
        assert found == [document for document in documents if len(document) > 1]
        assert source.bytes_per_token is None
    out = tmp_path / "out" / "x"
    assert meshtrainer("prepare", folder / "train.bin", "--out", out, "--tokenizer", tokenizer).code == 0
    stored = np.fromfile(f"{out}-00000.bin", "<u2").tolist()
    assert stored == [token for document in documents for token in document]


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_invalid_files_are_refused_by_name(tmp_path: Path) -> None:
    tokenizer = str(write_bpe(tmp_path / "tokenizer.json"))
    path = tmp_path / "train.bin"

    def refused(named: str, **more: object) -> None:
        cache = str(tmp_path / "cache")
        data = tokens_section(path, **{"tokenizer": tokenizer, "cache_dir": cache, **more})  # type: ignore[arg-type]
        with pytest.raises(UserError) as caught:
            open_source(data, None, "train")
        assert str(caught.value).startswith(named)
        assert "train.bin" in str(caught.value)

    plain(path, [[1, 2, 3]])
    refused("data.tokenizer=bytes: ", tokenizer="bytes")
    refused("data.bos=false: ", bos=False)
    plain(path, [[1, 60_000]])
    refused("data.tokenizer=")
    path.write_bytes(b"abc")
    refused(f"data.path={path}: ")
    with_header(path, [[1, 2, 3]])
    cut(path, 2)
    refused(f"data.path={path}: ")
    megatron(path, [[1, 2, 3], [4]])
    cut(path, 4)
    refused(f"data.path={path}: ")
    megatron(path, [[1, 2, 3], [4]])
    cut(path.with_suffix(".idx"), 30)
    refused(f"data.path={path}: ")


# ---------------------------------------------------------------------------------------------------------------
# The token that begins a text


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The path of one that knows a token to begin with, and does not add it itself."""
    path = write_bpe(tmp_path / "tok" / "tokenizer.json")
    stored = json.loads(path.read_text())
    begin = len(stored["model"]["vocab"]) + len(stored["added_tokens"])
    added = {**stored["added_tokens"][0], "id": begin, "content": "<s>"}
    path.write_text(json.dumps({**stored, "added_tokens": [*stored["added_tokens"], added]}))
    return str(path)


def test_documents_begin_as_data_bos_says(tmp_path: Path, tokenizer: str) -> None:
    lines = write_texts(tmp_path / "a.jsonl", ["the cat", "and the hat " * 3])
    (begin,) = find_tokenizer(tokenizer, bos=True).start_ids
    found = {}
    for bos in (None, False, True):
        data = tokens_section(
            lines, documents="apart", seq_len=40, tokenizer=tokenizer, bos=bos, cache_dir=str(tmp_path / "cache")
        )
        found[bos] = read_all(open_source(data, None, "train"))
    assert np.array_equal(found[None]["tokens"], found[False]["tokens"])
    assert found[True]["tokens"][:, 0].tolist() == [begin] * 2
    assert np.array_equal(found[True]["tokens"][:, 1:], found[False]["tokens"][:, :-1])
    out = tmp_path / "out" / "x"
    ended = meshtrainer("prepare", lines, "--out", out, "--tokenizer", tokenizer, "--bos")
    assert ended.code == 0
    assert "data.bos=true" in ended.out, "one of the settings to train with"
    assert [document[0] for document in documents_in(tmp_path / "out" / "x-00000.bin")] == [begin] * 2


def test_impossible_bos_is_refused(tmp_path: Path, tokenizer: str) -> None:
    lines = write_texts(tmp_path / "a.jsonl", ["the cat"] * 9)
    lone = str(write_bpe(tmp_path / "lone.json"))
    assert meshtrainer("prepare", lines, "--out", tmp_path / "x", "--tokenizer", tokenizer).code == 0
    for path, other in ((lines, "bytes"), (lines, lone), (tmp_path / "x-00000.bin", tokenizer)):
        with pytest.raises(UserError) as caught:
            open_source(tokens_section(path, tokenizer=other, bos=True), None, "train")
        assert str(caught.value).startswith("data.bos=true: ")
