"""Building shards from text: the same tokens from every kind of file, with any number of builders, even if some die."""

from __future__ import annotations

import csv
import errno
import gzip
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands.test_prepare import run, write_jsonl
from tests.data.test_data import write_shards, write_tokenizer
from tests.helpers.forked import REPOSITORY
from trainer.config import DataSection, load_config
from trainer.data import opening
from trainer.data.chat.formats import find_files as find_chats
from trainer.data.chat.formats import read_records
from trainer.data.ingest import build as building
from trainer.data.ingest import encode, inputs, readers
from trainer.data.ingest.build import BuildFolder, BuildJob, build
from trainer.data.ingest.inputs import SettingNames, find_inputs
from trainer.data.opening import is_untokenized, open_source
from trainer.data.prompts import read_prompts
from trainer.data.shards import Shard, ShardManifest, ShardWriter, read_info
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import UserError

TEXTS = [
    "one\r\ntwo\tthree\n",
    'zwölf Boxkämpfer\u2028 \\ "und" 👩‍🚀',
    "x" * 300,
    "四\n字。\n熟語",
    "the cat and the hat",
]


def settings(tmp_path: Path, path: object, **more: Any) -> DataSection:
    return DataSection(source="tokens", path=str(path), cache_dir=str(tmp_path / "cache"), seq_len=4, **more)


def texts_of(shards: Sequence[Shard], tokenizer: str = "bytes") -> list[str]:
    found = []
    for shard in shards:
        for start, end in itertools.pairwise(shard.read_offsets()):
            found.append(find_tokenizer(tokenizer).decode(shard.read(start, end - 1 - start)))
    return found


def texts_in(tmp_path: Path, path: object, **more: Any) -> list[str]:
    return texts_of(opening.find_shards(str(path), settings(tmp_path, path, **more), "data.path").train)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- every kind of file ---------------------------------------------------------------------------------------------


def as_files(folder: Path) -> Path:
    for number, each in enumerate(TEXTS):
        (folder / f"{number}{('.txt', '.md', '.py')[number % 3]}").write_bytes(each.encode())
    (folder / "left.out").write_text("of no kind that is known")
    return folder


def as_gz(folder: Path) -> Path:
    lines = write_jsonl(folder / "a.jsonl", TEXTS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()
    return folder / "*.gz"


def as_zst(folder: Path) -> Path:
    zstandard = pytest.importorskip("zstandard")
    lines = write_jsonl(folder / "a.jsonl", TEXTS).read_bytes()
    halves = (lines[:100], lines[100:])  # two frames, as `zstd` writes them when files are joined
    (folder / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
    return folder / "a.jsonl.zst"


def as_parquet(folder: Path) -> Path:
    table, pyarrow = as_table()
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def as_saved_by_datasets(folder: Path) -> Path:
    """The layout of `DatasetDict.save_to_disk`."""
    table, pyarrow = as_table()
    (folder / "train").mkdir()
    (folder / "test").mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (folder / "train" / "state.json").write_text("{}")
    for split in ("train", "test"):
        with pyarrow.ipc.new_stream(str(folder / split / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    return folder


def as_arrow_with_index(folder: Path) -> Path:
    table, pyarrow = as_table()
    with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return folder / "a.arrow"


def as_categories(folder: Path) -> Path:
    """Text of which each is stored once, as pandas stores categories."""
    table, pyarrow = as_table()
    table = table.set_column(1, "text", table["text"].dictionary_encode())
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def as_bytes(folder: Path) -> Path:
    table, pyarrow = as_table()
    table = table.set_column(1, "text", table["text"].cast(pyarrow.binary()))
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def as_views(folder: Path) -> Path:
    table, pyarrow = as_table()
    table = table.set_column(1, "text", table["text"].cast(pyarrow.string_view()))
    with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return folder / "a.arrow"


def as_cached_by_hugging_face(folder: Path) -> Path:
    """A link `train.parquet` to a file that is named by its hash."""
    (folder / "snapshots").mkdir()
    as_parquet(folder).rename(folder / "deadbeef")
    (folder / "snapshots" / "train.parquet").symlink_to(folder / "deadbeef")
    return folder / "snapshots"


TABLES = [
    *(as_parquet, as_saved_by_datasets, as_arrow_with_index, as_categories, as_bytes, as_views),
    as_cached_by_hugging_face,
]


def as_table() -> tuple[Any, Any]:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    return pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS}), pyarrow


@pytest.mark.parametrize("write", [as_files, as_gz, as_zst, *TABLES])
def test_every_kind_of_file_is_the_same_documents(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "in").mkdir()
    assert texts_in(tmp_path, write(tmp_path / "in")) == TEXTS


def test_each_line_belongs_to_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any unit boundaries and block sizes, also with lines that are longer than both."""
    rng = random.Random(0)
    texts = ["".join(rng.choices('ab\n"\\é👩', k=rng.choice([1, 5, 40, 400]))) for _ in range(40)]
    lines = write_jsonl(tmp_path / "a.jsonl", texts)
    for block, longest, size in ((64, 100, 150), (7, 30, 1000), (1 << 20, 1 << 22, 500)):
        monkeypatch.setattr(inputs, "BLOCK_BYTES", block)
        monkeypatch.setattr(readers, "BLOCK_BYTES", block)
        monkeypatch.setattr(readers, "MAX_IN_MEMORY_BYTES", longest)
        monkeypatch.setattr(building, "MIN_UNIT_BYTES", size)
        found = texts_in(tmp_path / f"{block}", lines)
        assert found == texts
        assert len(building.split_into_units(find_inputs([str(lines)], "data.path"))) > 5


# -- bad places -----------------------------------------------------------------------------------------------------


def bad_lines(folder: Path, good: int = 30) -> Path:
    lines = [json.dumps({"text": f"line {number}"}).encode() for number in range(good)]
    lines[3:3] = [
        b'{"text": "cut',
        b'{"other": "x"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[]",
        b'{"text": 3}',
    ]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    return folder / "a.jsonl"


@pytest.mark.parametrize("longest", [1 << 22, 8])
def test_unreadable_input_is_rejected_or_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, longest: int
) -> None:
    monkeypatch.setattr(readers, "MAX_IN_MEMORY_BYTES", longest)
    monkeypatch.setattr(readers, "BLOCK_BYTES", min(longest, inputs.BLOCK_BYTES))
    path = bad_lines(tmp_path)
    with pytest.raises(UserError, match=r"a\.jsonl:4: is not JSON"):
        texts_in(tmp_path, path)
    for limit in ("skip", "0.5"):
        assert texts_in(tmp_path, path, bad=limit) == [f"line {number}" for number in range(30)]
    with pytest.raises(UserError, match="6 of 36 documents") as caught:  # though the tokens are there by now
        texts_in(tmp_path, path, bad="0.1")
    assert "a.jsonl:4: is not JSON" in str(caught.value)
    assert run(path, "--out", tmp_path / "out", "--bad", "skip") == 0
    assert "6 of 36 documents cannot be read and were skipped" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"data.bad=often: must be error, skip, or the fraction"):
        texts_in(tmp_path, path, bad="often")


@pytest.mark.parametrize("content", ["", "{", '{"text": "x"}', '["one", "two"]', '{"text": "x"\n"y"}\n{'])
def test_json_without_records_is_named_as_such(tmp_path: Path, content: str, capsys: Any) -> None:
    """Its suffix is a supported one, so a message about suffixes would be wrong."""
    path = tmp_path / "a.json"
    path.write_text(content)
    assert run(path, "--out", tmp_path / "out") == 2
    assert f"INPUT={path}: holds no records: a .json file must be an array of objects" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"data\.path=\S+/a\.json: holds no records: a .json file must be an array"):
        find_chats("data.path", str(path))
    with pytest.raises(UserError, match=r"a\.json is neither a manifest of token shards nor a file of documents"):
        open_source(settings(tmp_path, path), 257, "train")


def test_json_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder, where its records would otherwise be missing without a word."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.json").symlink_to(tmp_path / "moved.json")
    reads = {
        "prepare": lambda path: find_inputs([str(path)], "data.path"),
        "train": lambda path: open_source(settings(tmp_path, path), 257, "train"),
        "chats": lambda path: find_chats("data.path", str(path)),
    }
    for name in ("prepare", "train"):
        with pytest.raises(UserError, match=r"data\.path=\S+/b\.json: cannot be read \(No such file or directory\)"):
            reads[name](tmp_path)
    (tmp_path / "b.json").unlink()
    (tmp_path / "b.json").write_text('[{"text": "x"}]')

    def refuse(path: object, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("trainer.data.records.open", refuse, raising=False)  # root may read everything
    for name, read in reads.items():
        for path in (tmp_path, tmp_path / "b.json"):
            with pytest.raises(UserError, match=r"data\.path=\S+/b\.json: cannot be read \(Permission denied\)"):
                pytest.fail(f"{name}: {read(path)}")
    with pytest.raises(UserError, match=r"--prompts=\S+/b\.json: cannot be read \(Permission denied\)"):
        list(read_prompts(tmp_path / "b.json", "--prompts"))


def test_truncated_file_counts_as_more_than_one_document(tmp_path: Path) -> None:
    """The number of lost documents is unknown, so no `data.bad` share covers it; skipping it is reported."""
    (tmp_path / "whole.jsonl").write_text('{"text": "a line"}\n' * 50)
    content = gzip.compress(b"".join(b'{"text": "line %d"}\n' % number for number in range(5000)))
    (tmp_path / "half.jsonl.gz").write_bytes(content[: len(content) // 2])
    for limit in ("0.5", "error"):
        with pytest.raises(UserError, match=r"half\.jsonl\.gz: cannot be read to its end (.|\n)*data\.bad=skip skips"):
            texts_in(tmp_path, tmp_path, bad=limit)
    assert texts_in(tmp_path, tmp_path, bad="skip") == ["a line"] * 50
    for limit in ("0.5", "error"):  # though the tokens of the rest are there by now
        with pytest.raises(UserError, match=r"half\.jsonl\.gz: cannot be read to its end (.|\n)*data\.bad=skip"):
            texts_in(tmp_path, tmp_path, bad=limit)
    with pytest.raises(UserError, match=r"no readable text in it: .*half\.jsonl\.gz: cannot be read to its end"):
        texts_in(tmp_path, tmp_path / "half.jsonl.gz", bad="skip")


def test_build_that_goes_on_with_another_limit_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`--bad` is not part of the work's name, so that nothing is read twice; but the result obeys the last one."""
    path = bad_lines(tmp_path)

    def go_on(how: str) -> int:
        return run(path, "--out", tmp_path / "out", "--bad", how)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("trainer.prepare.publish", kill)
        go_on("skip")
    for how in ("error", "0.1"):
        capsys.readouterr()
        assert go_on(how) == 2
        assert f"--bad={how}: 6 of 36 documents cannot be read" in capsys.readouterr().err
        assert not list(tmp_path.glob("out-*"))
    assert go_on("0.5") == 0
    assert "6 of 36 documents cannot be read and were skipped" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["not text", "an offset beyond", "an index beyond", "not parquet"])
def test_damaged_table_is_a_bad_file(tmp_path: Path, kind: str) -> None:
    """Whatever its offsets are: memory outside the file is never read."""
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "whole.jsonl").write_text('{"text": "a line"}\n' * 50)
    path = tmp_path / "a.arrow"
    if kind == "not parquet":
        path = tmp_path / "a.parquet"
        path.write_bytes(b"PAR1" + bytes(100))
    else:
        column = pyarrow.array(["abc", "de", "abc", "f"])
        before, at, width = np.array([0, 3, 5, 8, 9], np.int32), 2, np.int32
        if kind == "an index beyond":
            column = column.dictionary_encode()
            before, at, width = np.array([0, 1, 0, 2], np.int32), 1, np.int32
        batch = pyarrow.record_batch({"text": column})
        with pyarrow.ipc.new_stream(str(path), batch.schema) as stream:
            stream.write_batch(batch)
        content = path.read_bytes()
        place = content.rindex(before.astype(width).tobytes())
        damaged = before.copy()
        damaged[at] = 2_000_000_000
        if kind == "not text":
            place, damaged = content.index(b"abcdeabcf"), np.frombuffer(b"\xff" * 8, np.int32)
        path.write_bytes(content[:place] + damaged.tobytes() + content[place + damaged.nbytes :])
    with pytest.raises(UserError, match=r"a\.(arrow|parquet)(: cannot be read to its end|, row 1: is not UTF-8)"):
        texts_in(tmp_path, path)
    assert texts_in(tmp_path, tmp_path, bad="skip")[-50:] == ["a line"] * 50


def test_row_numbers_count_from_the_beginning_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": [{"b": "no"}] * 40, "a.b": [None if n == 33 else f"row {n}" for n in range(1, 41)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    monkeypatch.setattr(building, "MIN_UNIT_BYTES", 50)
    with pytest.raises(UserError, match=r"a\.parquet, row 33: has no text"):
        texts_in(tmp_path, tmp_path / "a.parquet", text_key="a.b")


def test_null_text_does_not_select_a_different_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x", "text": "a"}\n{"id": "y", "text": null}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: has no text: its 'text' is null\n  to fix: data\.bad=skip"):
        texts_in(tmp_path, tmp_path / "a.jsonl")
    assert texts_in(tmp_path, tmp_path / "a.jsonl", bad="skip") == ["a"]


# -- held out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "more"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, {}),
        ({"messages": [{"role": "user", "content": "Hi"}]}, {"text_key": "messages"}),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, {}),
        ({"instruction": "Hi", "output": "Yes"}, {}),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, {}),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_given_as_text_are_recognized_by_their_keys(
    kind: str, record: dict[str, Any], more: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / f"chats.{kind}"
    path.write_text(json.dumps(record) + "\n")
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([record]), path)
    with pytest.raises(UserError, match=r"these records are chats, not text: set data\.source=chat") as error:
        texts_in(tmp_path, path, **more)
    assert "nearest legal value" not in str(error.value)


def test_arrays_and_csv_are_records(tmp_path: Path) -> None:
    """As text and as chats, by themselves and in a folder, where other .json files are no data."""
    texts = ['zwölf, "zitiert"', "two\nlines", "three"]
    records = [{"id": number, "text": text} for number, text in enumerate(texts)]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    array, lines, table, tabs = (folder / name for name in ("a.json", "b.json", "c.csv", "d.tsv"))
    array.write_text(json.dumps(records, indent=2))
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    for path, delimiter in ((table, ","), (tabs, "\t")):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)
    packed = folder / "e.json.gz"
    packed.write_bytes(gzip.compress(array.read_bytes()))
    for path in (array, lines, table, tabs, packed):
        assert texts_in(tmp_path, path) == texts, path
    assert texts_in(tmp_path, folder) == texts * 5
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([{"instruction": "Hi", "output": "Yes"}] * 3))
    asked = tmp_path / "chats.csv"
    asked.write_text('prompt,completion\r\n"Hi, you",Yes\r\n')
    assert [record for _, record in read_records(chats, "data.path")] == [{"instruction": "Hi", "output": "Yes"}] * 3
    assert list(read_records(asked, "data.path")) == [("chats.csv:1", {"prompt": "Hi, you", "completion": "Yes"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "one"}, {"text": 2}]', r"at \S+a\.json:2 it is not text but int"),
        ("a.json", '[{"text": "one"}, {"tex', r"record 2 is not JSON"),
        ("a.json", '[{"text": "one"},\n', r"the array does not end: the file is cut off after record 1"),
        ("a.json", '[{"body": "one"}]', r"data\.text_key=text: \S+:1 has no such key; its keys: body"),
        ("a.csv", "id,text\n1,one\n2\n", r"row 2 has 1 fields, but the header has 2"),
        ("a.csv", "id,body\n1,one\n", r"data\.text_key=text: \S+:1 has no such key; its keys: id, body"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        texts_in(tmp_path, tmp_path / name)


def test_records_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.records._BLOCK_CHARS", 7)
    texts = ["x" * 100, "ü" * 30, "}{[],"]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts], ensure_ascii=False))
    assert texts_in(tmp_path, tmp_path / "a.json") == texts


def test_holdout_depends_only_on_the_text(tmp_path: Path) -> None:
    texts = [f"document {number} " * 3 for number in range(200)]
    write_jsonl(tmp_path / "b.jsonl", texts[:120])
    write_jsonl(tmp_path / "c.jsonl", texts[100:])  # twenty of them twice
    data = settings(tmp_path, tmp_path / "*.jsonl", holdout=0.2)
    before = opening.find_shards(str(data.path), data, "data.path")
    train, held_out = texts_of(before.train), texts_of(before.held_out)
    assert len(train) + len(held_out) == 220
    assert 20 < len(held_out) < 70
    assert not {*train} & {*held_out}
    write_jsonl(tmp_path / "a.jsonl", ["in front of them"])
    os.rename(tmp_path / "b.jsonl", tmp_path / "d.jsonl")
    after = opening.find_shards(str(data.path), data, "data.path")
    assert {*held_out} == {*texts_of(after.held_out)} - {"in front of them"}


def test_holdout_of_a_single_document_takes_its_last_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 100)
    data = settings(tmp_path, tmp_path / "a.txt", holdout=0.1)
    train, held_out = open_source(data, 257, "train"), open_source(data, 257, "eval")
    assert (len(train), len(held_out or [])) == (90, 10)


# -- the configuration ----------------------------------------------------------------------------------------------


def test_a_path_implies_tokens() -> None:
    def source(*overrides: str) -> str:
        return load_config("llama_small", overrides).data.source

    assert source() == "stdlib"
    assert source("data.path=a.txt") == "tokens"
    assert source("data.path={a: b.txt}") == "tokens"
    assert source("data.path=a.txt", "data.source=synthetic") == "synthetic"  # which the rules refuse, with a word


def test_tokenized_text_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = settings(tmp_path, as_files(tmp_path))
    assert is_untokenized(data)
    first = open_source(data, 257, "train").fingerprint
    assert not is_untokenized(data)
    monkeypatch.setattr("trainer.data.ingest.build.split_into_units", lambda _: pytest.fail("a second time"))
    assert open_source(data, 257, "train").fingerprint == first
    shard = next((tmp_path / "cache").rglob("*.bin"))
    monkeypatch.undo()
    os.truncate(shard, 3)
    assert open_source(data, 257, "train").fingerprint == first  # made again


def test_many_shards_are_opened_with_one_index_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that has changed is read again."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    path = write_shards(tmp_path, *([f"shard {number}".encode()] for number in range(100)))
    data = settings(tmp_path, path)
    read: list[str] = []
    monkeypatch.setattr("trainer.data.shards.read_info", lambda path: read.append(path) or read_info(path))
    first = open_source(data, 257, "train")
    assert len(read) == 100
    second = open_source(data, 257, "train")
    assert len(read) == 100
    assert second.fingerprint == first.fingerprint
    places = np.arange(len(first))
    assert np.array_equal(second.batch(places)[0], first.batch(places)[0])
    write_shards(tmp_path, [b"another text"])
    assert len(open_source(data, 257, "train")) == len(first) + 1


# -- engines --------------------------------------------------------------------------------------------------------

END = "<|endoftext|>"
ODD = [
    f"a{END}b",
    END,
    "it's  \n\n we'LL 123456 x\t\t y",
    "naïve ﬁ 中文 हिन्दी 👩‍🚀",
    "\x00\x7f\ufeff",
    " " * 50 + "x",
    "",
]


@pytest.mark.parametrize("name", ["gigatoken", "tiktoken"])
def test_fast_engine_gives_the_ids_of_the_tokenizers_library(tmp_path: Path, name: str) -> None:
    """Also for text that spells a special token."""
    pytest.importorskip(name)
    tokenizer = find_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json", END)))
    reference = encode.find_reference(tokenizer)
    engine = {"gigatoken": encode._Gigatoken, "tiktoken": encode._Tiktoken}[name](tokenizer, reference)  # type: ignore[arg-type]
    encoded = [each.encode() for each in ODD]
    for found, expected in zip(engine.encode(encoded), reference.encode(encoded), strict=True):
        assert np.array_equal(found, expected)
    ids, counts = engine.encode(encoded)
    assert np.array_equal(ids, np.concatenate([tokenizer.encode(each) for each in encoded]))
    assert counts.tolist() == [len(tokenizer.encode(each)) for each in encoded]


class Lying:
    """An engine that is right on all but one word."""

    name = "lying"

    def __init__(self, reference: encode.Engine) -> None:
        self._reference = reference
        self.num_texts = 0

    def encode(self, texts: Sequence[bytes]) -> encode.IdsAndCounts:
        self.num_texts += len(texts)
        ids, counts = self._reference.encode(texts)
        return (ids * 0 if any(b"lie" in each for each in texts) else ids), counts


def test_engine_with_different_ids_is_not_used_for_that_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": [f"true {number}" for number in range(50)], "b": [f"a lie {number}" for number in range(50)]}
    for name, each in texts.items():
        lines = write_jsonl(tmp_path / f"{name}.jsonl", each)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json", END))
    monkeypatch.setattr(building, "MIN_UNIT_BYTES", lines.stat().st_size)
    lying = Lying(encode.find_reference(find_tokenizer(tokenizer)))
    monkeypatch.setattr(building, "find_engine", lambda _: lying)
    data = settings(tmp_path, tmp_path / "*.jsonl", tokenizer=tokenizer)
    found = opening.find_shards(str(data.path), data, "data.path").train
    assert texts_of(found, tokenizer) == [*texts["a"], *texts["b"]]
    assert lying.num_texts > 50


# -- long documents -------------------------------------------------------------------------------------------------


def tokenizer_with(folder: Path, before: Any) -> Any:
    import tokenizers

    path = write_tokenizer(folder / "tokenizer.json", END)
    made = tokenizers.Tokenizer.from_file(str(path))
    made.pre_tokenizer = before
    made.save(str(path))
    return find_tokenizer(str(path))


def pre_tokenizers() -> dict[str, tuple[Any, bool]]:
    """Return ways to split text, and whether each allows a document to be cut."""
    tokenizers = pytest.importorskip("tokenizers")
    ways = tokenizers.pre_tokenizers
    gpt4 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    lines = r"[^\n]*\n[^\n]*\n"  # two at a time: a line end is no border by itself
    split = {
        name: ways.Sequence(
            [ways.Split(tokenizers.Regex(pattern), "isolated"), ways.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        for name, pattern in (("gpt4", gpt4), ("lines", lines))
    }
    return {
        "gpt2": (ways.ByteLevel(add_prefix_space=False), True),
        "gpt4": (split["gpt4"], True),
        "lines": (split["lines"], False),
        "metaspace": (ways.Metaspace(), True),
    }


@pytest.mark.parametrize("name", ["gpt2", "gpt4", "lines", "metaspace"])
def test_long_document_in_pieces_has_the_same_ids(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, is_cut = pre_tokenizers()[name]
    tokenizer = tokenizer_with(tmp_path, before)
    monkeypatch.setattr(encode, "MAX_PIECE_BYTES", 200)
    rng = random.Random(0)
    words = [*("the", " cat", " ", "  ", "\n", "\n\n", "\r\n", "'ll", "1234", "...", "。", "中文", "\t", "é", "\xa0")]
    cutter = encode.DocumentSplitter(tokenizer)
    for _ in range(8):
        document = "".join(rng.choices(words, k=800)).encode()
        parts = [document[start : start + 90] for start in range(0, len(document), 90)]
        pieces = list(cutter.cut(parts))
        assert b"".join(pieces) == document
        assert (len(pieces) > 1) == is_cut
        found = np.concatenate([tokenizer.encode(piece) for piece in pieces])
        assert np.array_equal(found, tokenizer.encode(document))


# -- any number of builders, any of whom may die --------------------------------------------------------------------

POINTS: dict[str, tuple[type, str, int]] = {
    "tokens are being written": (ShardWriter, "write_documents", 3),
    "a unit is about to be named": (ShardWriter, "publish", 2),
    "a unit is about to be recorded": (BuildFolder, "write", 2),
    "the manifest is about to be written": (ShardManifest, "write", 1),
    "what is left over is about to be removed": (BuildFolder, "clean_up", 1),
}


def corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BuildJob:
    lines = write_jsonl(folder / "in.jsonl", [f"document {number} " * (number % 9) for number in range(400)])
    monkeypatch.setattr(building, "MIN_UNIT_BYTES", lines.stat().st_size // 8)
    return BuildJob(tuple(find_inputs([str(lines)], "data.path")), find_tokenizer("bytes"), holdout=0.1)


def killed_at(owner: type, name: str, count: int, job: BuildJob, path: Path) -> None:
    """Build, and die when `name` is called for the `count`-th time."""
    real = getattr(owner, name)
    calls = itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(owner, name, call)
    build(job, path)


@pytest.mark.slow
@pytest.mark.parametrize("point", list(POINTS))
def test_killed_build_continued_by_two_gives_the_same_bytes(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = corpus(tmp_path, monkeypatch)
    build(job, tmp_path / "undisturbed")
    fork = multiprocessing.get_context("fork")
    killed = fork.Process(target=killed_at, args=(*POINTS[point], job, tmp_path / "killed"))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert content_of(tmp_path / "killed") != content_of(tmp_path / "undisturbed")
    builders = [fork.Process(target=build, args=(job, tmp_path / "killed")) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "undisturbed")


@pytest.mark.slow
def test_helper_processes_give_the_same_bytes_and_report_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = corpus(tmp_path, monkeypatch)
    build(job, tmp_path / "one")
    build(job, tmp_path / "four", procs=4)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "four")
    monkeypatch.setattr(building, "MIN_UNIT_BYTES", 100)
    bad = tuple(find_inputs([str(bad_lines(tmp_path))], "INPUT"))
    with pytest.raises(UserError, match=r"INPUT=.*a\.jsonl"):
        build(BuildJob(bad, find_tokenizer("bytes"), keys=SettingNames(inputs="INPUT")), tmp_path / "bad", procs=3)
    assert multiprocessing.active_children() == []


@pytest.mark.campaign
def test_prepare_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    texts = [f"{number} the cat and the hat {number * 7919}\n" * (number % 50) for number in range(30_000)]
    lines = write_jsonl(tmp_path / "in.jsonl", texts)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", END)
    command = [sys.executable, "-m", "trainer.prepare", str(lines), "--tokenizer", str(tokenizer), "--holdout", "0.01"]

    def start(out: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, "--out", str(tmp_path / out / "x")], cwd=REPOSITORY, stdout=subprocess.DEVNULL
        )

    assert start("undisturbed").wait() == 0
    undisturbed = content_of(tmp_path / "undisturbed")
    rng = random.Random(0)
    for number in range(20):
        out = tmp_path / f"killed-{number}"
        first = start(out.name)
        try:
            first.wait(rng.uniform(0.3, 4.0))
        except subprocess.TimeoutExpired:
            first.kill()
            first.wait()
            if not out.is_dir() or content_of(out) != undisturbed:  # else it was through, all but its exit
                builders = [start(out.name), start(out.name)]
                assert 0 in [builder.wait() for builder in builders], number
        assert content_of(out) == undisturbed, number


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_document_of_a_gigabyte_needs_no_memory(tmp_path: Path, name: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", END)
    line = "the cat and the hat, and some more of what stands in a line of text\\n" * 1000
    with open(tmp_path / name, "w") as file:
        file.write('{"text": "' if name.endswith("jsonl") else "")
        for _ in range(1_000_000_000 // len(line)):
            file.write(line if name.endswith("jsonl") else line.replace("\\n", "\n"))
        file.write('"}\n' if name.endswith("jsonl") else "")
    script = (
        "import sys; from trainer.prepare import command_line; code = command_line(sys.argv[1:]);"
        "print(code, open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / name), "--out", str(tmp_path / "x"), "--tokenizer"]
    done = subprocess.run([*command, str(tokenizer)], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    code, peak_kib = done.stdout.splitlines()[-1].split()
    assert code == "0"
    assert int(peak_kib) < 500_000
    assert Shard(tmp_path / "x-00000.bin").info.num_documents == 1
