"""Text becomes tokens: the same documents from every kind of file, with what cannot be read refused or counted."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.data import END, read_all, text_of, texts_in, tokens_section, write_bpe, write_records, write_texts
from tests.helpers.launch import REPOSITORY, launch
from trainer import UserError, load_config
from trainer.data.chat.formats import find_chat_files, read_objects
from trainer.data.opening import find, open_source
from trainer.data.records import FilePart
from trainer.data.source import IGNORE
from trainer.prepare import prepare

TEXTS = [
    "one\r\ntwo\tthree\n",
    'zwölf Boxkämpfer\u2028 \\ "und" 👩‍🚀',
    "x" * 300,
    "四\n字。\n熟語",
    "the cat and the hat",
]


def documents_of(tmp_path: Path, path: object, split: Any = "train", **more: Any) -> list[str]:
    """Return the documents of a run on these files, in order, by the samples that it reads."""
    data = tokens_section(path, **{"cache_dir": str(tmp_path / "cache"), "documents": "apart", "seq_len": 2000, **more})
    source = open_source(data, 257, split)
    assert source is not None
    batch = read_all(source)
    rows = zip(batch["tokens"], batch["targets"], strict=True)
    ids = [[int(tokens[0]), *targets[targets != IGNORE].tolist()] for tokens, targets in rows]
    return [bytes(row[:-1]).decode() for row in ids]


def refusal_of(tmp_path: Path, path: object, **more: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        documents_of(tmp_path, path, **more)
    return caught.value


# ---------------------------------------------------------------------------------------------------------------
# Every kind of file


def as_files(folder: Path) -> Path:
    for number, each in enumerate(TEXTS):
        (folder / f"{number}{('.txt', '.md', '.py')[number % 3]}").write_bytes(each.encode())
    (folder / "left.out").write_text("of no kind that is known")
    return folder


def as_gz(folder: Path) -> Path:
    lines = write_texts(folder / "a.jsonl", TEXTS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()
    return folder / "*.gz"


def as_zst(folder: Path) -> Path:
    zstandard = pytest.importorskip("zstandard")
    lines = write_texts(folder / "a.jsonl", TEXTS).read_bytes()
    halves = (lines[:100], lines[100:])  # two frames, as `zstd` writes them when files are joined
    (folder / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
    return folder / "a.jsonl.zst"


def as_table() -> tuple[Any, Any]:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    return pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS}), pyarrow


def as_parquet(folder: Path) -> Path:
    table, pyarrow = as_table()
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def as_saved_by_datasets(folder: Path) -> Path:
    """The layout of `DatasetDict.save_to_disk`."""
    table, pyarrow = as_table()
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (folder / split).mkdir()
        (folder / split / "state.json").write_text("{}")
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


def as_cached_by_hugging_face(folder: Path) -> Path:
    """A link `train.parquet` to a file that is named by its hash."""
    (folder / "snapshots").mkdir()
    as_parquet(folder).rename(folder / "deadbeef")
    (folder / "snapshots" / "train.parquet").symlink_to(folder / "deadbeef")
    return folder / "snapshots"


KINDS = [
    *(as_files, as_gz, as_zst, as_parquet, as_saved_by_datasets, as_arrow_with_index),
    *(as_categories, as_bytes, as_cached_by_hugging_face),
]


@pytest.mark.parametrize("write", KINDS)
def test_every_kind_of_file_is_the_same_documents(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "in").mkdir()
    assert documents_of(tmp_path, write(tmp_path / "in")) == TEXTS


def test_arrays_and_csv_are_records(tmp_path: Path) -> None:
    """As text and as chats, by themselves and in a folder, where other .json files are no data."""
    texts = ['zwölf, "zitiert"', "two\nlines", "three"]
    records = [{"id": number, "text": text} for number, text in enumerate(texts)]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    array, lines, table, tabs = (folder / name for name in ("a.json", "b.json", "c.csv", "d.tsv"))
    array.write_text(json.dumps(records, indent=2))
    write_records(lines, records)
    for path, delimiter in ((table, ","), (tabs, "\t")):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)
    packed = folder / "e.json.gz"
    packed.write_bytes(gzip.compress(array.read_bytes()))
    for path in (array, lines, table, tabs, packed):
        assert documents_of(tmp_path, path) == texts, path
    assert documents_of(tmp_path, folder) == texts * 5
    chats, asked = tmp_path / "chats.json", tmp_path / "chats.csv"
    chats.write_text(json.dumps([{"instruction": "Hi", "output": "Yes"}] * 3))
    asked.write_text('prompt,completion\r\n"Hi, you",Yes\r\n')
    for path, expected in (
        (chats, [{"instruction": "Hi", "output": "Yes"}] * 3),
        (asked, [{"prompt": "Hi, you", "completion": "Yes"}]),
    ):
        (file,) = find_chat_files(str(path), "data.path")
        assert [record for _, record in read_objects(FilePart(file))] == expected


def test_large_files_are_cut_at_lines_and_no_line_is_lost(tmp_path: Path) -> None:
    """Files of more than 16 MiB are tokenized in pieces, here three: with lines of any length, and long ones."""
    texts = [f"{number}: " + "ab " * (1, 5, 40, 400, 100_000)[number % 5] for number in range(700)]
    lines = write_texts(tmp_path / "a.jsonl", texts)
    assert lines.stat().st_size > 2.2 * 2**24
    prepare([str(lines)], str(tmp_path / "out"))
    assert texts_in(*sorted(tmp_path.glob("out-*.bin"))) == texts


# ---------------------------------------------------------------------------------------------------------------
# What cannot be read


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


def test_unreadable_documents_are_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    path = bad_lines(tmp_path)
    assert "a.jsonl:4" in str(refusal_of(tmp_path, path))
    for limit in ("skip", "0.5"):
        assert documents_of(tmp_path, path, bad=limit) == [f"line {number}" for number in range(30)]
    refused = str(refusal_of(tmp_path, path, bad="0.1"))  # though the tokens are there by now
    assert refused.startswith("data.bad=0.1: ")
    assert "6 of 36" in refused
    assert "a.jsonl:4" in refused
    ended = meshtrainer("prepare", path, "--out", tmp_path / "out", "--bad", "skip")
    assert ended.code == 0
    assert "6 of 36" in ended.out
    assert str(refusal_of(tmp_path, path, bad="often")).startswith("data.bad=often: ")


def test_a_run_says_what_it_left_out(tmp_path: Path) -> None:
    """Unreadable documents, and empty ones if they are more than a few."""
    text = [{"text": f"a text of some length, number {number}"} for number in range(20)]
    said = {}
    for name, more in (("good", []), ("bad", ['{"no": 1}', '{"text": ""}', '{"text": ""}'])):
        path = write_records(tmp_path / f"{name}.jsonl", [*text, *more])
        data = tokens_section(path, bad="skip", cache_dir=str(tmp_path / "cache"), holdout=0.2)
        said[name] = open_source(data, None, "train").summary
    assert "warning: " not in said["good"]
    assert all(words in said["bad"] for words in ("warning: 1 of 23", "bad.jsonl:21", "warning: 2 of 23"))


@pytest.mark.parametrize("content", ["", "{", '{"text": "x"}', '["one", "two"]', '{"text": "x"\n"y"}\n{'])
def test_json_without_records_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert str(refusal_of(tmp_path, path)).startswith(f"data.path={path}: ")
    ended = meshtrainer("prepare", path, "--out", tmp_path / "out")
    assert (ended.code, ended.err.partition(": ")[2].startswith(f"INPUT={path}: ")) == (2, True)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """Also in a folder, where its records would otherwise be missing without a word."""
    write_texts(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.json").symlink_to(tmp_path / "moved.json")
    for path in (tmp_path, tmp_path / "b.json"):
        assert f"{tmp_path}/b.json" in str(refusal_of(tmp_path, path))


@pytest.mark.parametrize("name", ["half.jsonl.gz", "half.jsonl.zst"])
def test_a_file_that_was_cut_counts_as_more_than_one_document(tmp_path: Path, name: str) -> None:
    """How many documents are lost is not known, so that no share of `data.bad` covers it."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_texts(folder / "whole.jsonl", ["a line"] * 50)
    lines = b"".join(b'{"text": "line %d"}\n' % number for number in range(5000))
    content = gzip.compress(lines) if name.endswith("gz") else pytest.importorskip("zstandard").compress(lines)
    (folder / name).write_bytes(content[: len(content) // 2])
    for limit in ("0.5", "error", "0.5"):
        refused = str(refusal_of(tmp_path, folder, bad=limit))
        assert name in refused
        assert "data.bad=skip" in refused
        assert documents_of(tmp_path, folder, bad="skip")[-50:] == ["a line"] * 50
    assert name in str(refusal_of(tmp_path, folder / name))


@pytest.mark.parametrize("kind", ["not text", "an offset beyond", "an index beyond", "not parquet"])
def test_damaged_table_is_a_bad_file(tmp_path: Path, kind: str) -> None:
    """Whatever its offsets are: memory outside the file is never read."""
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "in"
    folder.mkdir()
    write_texts(folder / "whole.jsonl", ["a line"] * 50)
    path = folder / "a.arrow"
    if kind == "not parquet":
        path = folder / "a.parquet"
        path.write_bytes(b"PAR1" + bytes(100))
    else:
        column = pyarrow.array(["abc", "de", "abc", "f"])
        before, at = np.array([0, 3, 5, 8, 9], np.int32), 2
        if kind == "an index beyond":
            column = column.dictionary_encode()
            before, at = np.array([0, 1, 0, 2], np.int32), 1
        batch = pyarrow.record_batch({"text": column})
        with pyarrow.ipc.new_stream(str(path), batch.schema) as stream:
            stream.write_batch(batch)
        content = path.read_bytes()
        place, damaged = content.rindex(before.tobytes()), before.copy()
        damaged[at] = 2_000_000_000
        if kind == "not text":
            place, damaged = content.index(b"abcdeabcf"), np.frombuffer(b"\xff" * 8, np.int32)
        path.write_bytes(content[:place] + damaged.tobytes() + content[place + damaged.nbytes :])
    assert path.name in str(refusal_of(tmp_path, path))
    assert documents_of(tmp_path, folder, bad="skip")[-50:] == ["a line"] * 50


def test_a_bad_row_of_a_table_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": [{"b": "no"}] * 40, "a.b": [None if n == 33 else f"row {n}" for n in range(1, 41)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    assert "a.parquet, row 33" in str(refusal_of(tmp_path, tmp_path / "a.parquet", text_key="a.b"))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.json", '[{"text": "one"}, {"text": 2}]', ["a.json:2"]),
        ("a.json", '[{"text": "one"}, {"tex', ["a.json", "record 2"]),
        ("a.json", '[{"text": "one"},\n', ["a.json", "record 1"]),
        ("a.json", '[{"body": "one"}]', ["data.text_key=text", "a.json:1", "body"]),
        ("a.json", f'[{{"text": "one", "n": {"9" * 5000}}}]', ["a.json", "record 1"]),
        ("a.jsonl", '{"text": "a"}\n{"body": "b", "text": null}\n', ["a.jsonl:2", "data.bad=skip"]),
        ("a.csv", "id,text\n1,one\n2\n", ["a.csv", "row 2"]),
        ("a.csv", "id,body\n1,one\n", ["data.text_key=text", "a.csv:1", "id, body"]),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, name: str, content: str, named: list[str]) -> None:
    (tmp_path / name).write_text(content)
    refused = str(refusal_of(tmp_path, tmp_path / name))
    assert all(words in refused for words in named), refused


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"instruction": "Hi", "output": "Yes"},
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    ],
)
def test_chats_given_as_text_are_recognized(kind: str, record: dict[str, Any], tmp_path: Path) -> None:
    path = write_records(tmp_path / f"chats.{kind}", [record])
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([record]), path)
    assert "data.source=chat" in str(refusal_of(tmp_path, path))


# ---------------------------------------------------------------------------------------------------------------
# What is held out, and the cache


def test_what_is_held_out_depends_on_the_text_alone(tmp_path: Path) -> None:
    """Not on names, order or other documents; twins are on one side."""
    texts = [f"document {number} " * 3 for number in range(200)]
    write_texts(tmp_path / "b.jsonl", texts[:120])
    write_texts(tmp_path / "c.jsonl", texts[100:])  # twenty of them twice
    train, before = (documents_of(tmp_path, tmp_path / "*.jsonl", split, holdout=0.2) for split in ("train", "eval"))
    assert len(train) + len(before) == 220
    assert 20 < len(before) < 70
    assert not {*train} & {*before}
    write_texts(tmp_path / "a.jsonl", ["in front of them"])
    os.rename(tmp_path / "b.jsonl", tmp_path / "d.jsonl")
    after = documents_of(tmp_path, tmp_path / "*.jsonl", "eval", holdout=0.2)
    assert {*before} == {*after} - {"in front of them"}


def test_holdout_of_a_single_document_takes_its_last_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 100)
    data = tokens_section(tmp_path / "a.txt", holdout=0.1, cache_dir=str(tmp_path / "cache"))
    train, held_out = open_source(data, 257, "train"), open_source(data, 257, "eval")
    assert held_out is not None
    assert (len(train), len(held_out)) == (90, 10)
    assert text_of(train) + text_of(held_out)[1:] == "abcd" * 100


def test_a_path_implies_tokens() -> None:
    def source(*overrides: str) -> str:
        return load_config("llama_small", overrides).data.source

    assert source() == "stdlib"
    assert source("data.path=a.txt") == "tokens"
    assert source("data.path={a: b.txt}") == "tokens"


def test_text_is_tokenized_once(tmp_path: Path) -> None:
    """A second run writes nothing to the cache; a changed file is tokenized anew."""
    (tmp_path / "in").mkdir()
    folder = as_files(tmp_path / "in")
    assert documents_of(tmp_path, folder) == TEXTS
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")}
    assert before
    assert documents_of(tmp_path, folder) == TEXTS
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")} == before
    (folder / "0.txt").write_text("changed")
    assert documents_of(tmp_path, folder) == ["changed", *TEXTS[1:]]


def test_shards_of_a_path_are_found_whatever_their_number(tmp_path: Path) -> None:
    """A shard that has changed is read again, however many there are."""
    base = write_texts(tmp_path / "a.jsonl", ["shard"])
    prepare([str(base)], str(tmp_path / "one"))
    names = sorted(tmp_path.glob("one-00000.*"))
    for number in range(99):
        for path in names:
            (tmp_path / f"one-{number + 1:05d}{path.suffix}").write_bytes(path.read_bytes())
    data = tokens_section(tmp_path / "one-*.bin", cache_dir=str(tmp_path / "cache"))
    assert text_of(open_source(data, 257, "train")) == "shard" * 100
    assert len(find(str(data.path), data, "data.path").load().train) == 100
    prepare([str(write_texts(tmp_path / "a.jsonl", ["other text"]))], str(tmp_path / "one"), overwrite=True)
    assert "other text" in text_of(open_source(data, 257, "train"))


# ---------------------------------------------------------------------------------------------------------------
# The tokenizer's own ids


def library_ids(tokenizer: Path, text: str) -> list[int]:
    """Return the ids of a text by the library `tokenizers`, with no special token."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_ids_are_those_of_the_tokenizers_library(tmp_path: Path, engine: str) -> None:
    """Also for text that spells a special token, for several documents at once, and for one of several MiB."""
    if engine == "gigatoken":
        pytest.importorskip("gigatoken")
    odd = ["it's  \n\n we'LL 123456 x\t\t y", "naïve ﬁ 中文 हिन्दी 👩‍🚀", "\x00\x7f\ufeff", " " * 50 + "x"]
    odd += ["a<|endoftext|>b", "<|endoftext|>", "the cat\n\nand the hat.\né中\r\n" * 50_000]
    tokenizer = write_bpe(tmp_path / "tokenizer.json")
    (end,) = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer)).encode("<|endoftext|>").ids
    lines = write_texts(tmp_path / "a.jsonl", odd)
    prepare([str(lines)], str(tmp_path / "out"), tokenizer=str(tokenizer), engine=engine)
    found = np.fromfile(tmp_path / "out-00000.bin", "<u2")
    assert np.array_equal(found, [token for text in odd for token in (*library_ids(tokenizer, text), end)])


def test_a_tokenizer_that_an_engine_does_not_know_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "[UNK]": 1, END: 2}, "[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    write_texts(tmp_path / "a.jsonl", TEXTS)
    more = {"tokenizer": str(tmp_path / "tokenizer.json"), "engine": "gigatoken"}
    refused = refusal_of(tmp_path, tmp_path / "a.jsonl", **more)
    assert str(refused).startswith("data.engine=gigatoken: ")
    assert refused.proposal == "data.engine=tokenizers"


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_many_large_documents_need_little_memory(tmp_path: Path, name: str) -> None:
    """A gigabyte, in documents of 10 MB."""
    text = "the cat and the hat, and some more of what stands in a line of text\n" * 150_000
    files = [tmp_path / name] if name.endswith("jsonl") else [tmp_path / f"{number}.txt" for number in range(100)]
    for path in files:
        if name.endswith("jsonl"):
            write_texts(path, (text for _ in range(100)))
        else:
            path.write_text(text)
    script = (
        "import sys; from trainer.prepare import command_line; code = command_line(sys.argv[1:]);"
        "print(code, open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    ended = launch(
        [sys.executable, "-c", script, *map(str, files), "--out", str(tmp_path / "x")], tmp_path, cwd=REPOSITORY
    )
    code, peak_kib = ended.wait().out.splitlines()[-1].split()
    assert code == "0"
    assert int(peak_kib) < 2_000_000
