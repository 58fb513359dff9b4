"""`python -m trainer.data` shows and plans exactly the data that the tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.commands import meshtrainer
from tests.helpers.data import write_shards, write_texts
from tests.helpers.launch import command, merged


def shown(*arguments: object) -> list[str]:
    ended = meshtrainer("data", *arguments)
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


def test_samples_are_shown_as_the_model_sees_them(tmp_path: Path) -> None:
    """One document per row with the rest ignored, then two documents in one row."""
    own = ["data.source=tokens", "data.seq_len=14", "eval.every=0"]
    path = write_shards(tmp_path / "one", ["once upon"])
    title, trained, ignored = shown("show", *own, f"data.path={path}", "data.documents=apart", "--samples", 1)[:3]
    assert "step 1" in title
    assert "sample 0" in title
    assert trained.split(None, 4) == ["0-8", "document", "1", "trained", "on  'once upon'"]
    assert ignored.split(None, 4)[:4] == ["9-13", "document", "1", "ignored"]
    path = write_shards(tmp_path / "two", ["one", "two and"])
    lines = shown("show", *merged(own, ["data.seq_len=11"]), f"data.path={path}", "--samples", 1)
    rows = [line.split(None, 5) for line in lines if line.startswith("  ")]
    assert [(row[0], row[2], row[5]) for row in rows] == [("0-3", "1", "'one' [end]"), ("4-10", "2", "'two and'")]


@pytest.mark.slow
def test_chats_are_shown_as_text_without_padding(tmp_path: Path) -> None:
    """One or two chats per row, and both answers of a pair."""
    pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")
    tokenizer = write_tokenizer(tmp_path / "model", CHATML, eos_token="<|im_end|>")
    own = ["data.source=chat", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path / 'cache'}", "eval.every=0"]

    def lines_of(records: list[Any], *settings: str) -> list[str]:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        arguments = ["show", *own, f"data.path={path}", "data.seq_len=24", "--samples", 1, *settings]
        lines = command("trainer.data", *arguments).out.splitlines()
        return [" ".join(line.split()[1:]) for line in lines[1:] if line.startswith("  ")]

    first = ["document 1 ignored 'user \\n Hi \\n assistant'", "document 1 trained on '\\n Yes'"]
    chat = {"messages": conversation("Hi", "Yes")}
    assert lines_of([chat], "data.documents=apart") == [*first, "padding"]
    second = [line.replace("document 1", "document 2") for line in first]
    ends = ["document 1 ignored '' [end]", "document 2 ignored '' [end]"]
    assert lines_of([chat, chat]) == [*first, ends[0], *second, ends[1], "padding"]
    pair = {"prompt": "Hi", "chosen": conversation("a", "Yes")[1:], "rejected": conversation("a", "No")[1:]}
    assert lines_of([pair]) == [*first, "padding", first[0], first[1].replace("Yes", "No"), "padding"]


def test_plan_of_several_sources_and_phases(tmp_path: Path) -> None:
    names = ("web", "math", "code")
    for name in names:
        write_texts(tmp_path / f"{name}.jsonl", [f"{name} {number:04d}." for number in range(24)])
    paths = ", ".join(f"{name}: {tmp_path / name}.jsonl" for name in names)
    settings = [
        *("data.source=tokens", f"data.path={{{paths}}}", "data.weights={web: 3, math: 1, code: 0}"),
        *("data.phases=[{from: 3, weights: {code: 1}}]", "data.seq_len=16", "train.steps=4", "eval.every=0"),
        *("train.global_batch_size=8", f"data.cache_dir={tmp_path / 'cache'}"),
    ]
    rows = [line.split() for line in shown("plan", *settings)]
    tokens = {(row[0], row[1]): int(row[2].replace(",", "")) for row in rows if row and row[0] in ("1-2", "3-4")}
    assert tokens == {
        **{("1-2", "web"): 3 * 64, ("1-2", "math"): 64, ("1-2", "code"): 0},
        **{("3-4", "web"): 0, ("3-4", "math"): 0, ("3-4", "code"): 256},
    }
    lines = shown("show", *settings, "--step", 3, "--samples", 1)
    assert "source code" in lines[0]


@pytest.mark.parametrize("words", [[], ["shwo"], ["show", "--step", "0"], ["show", "--stp"]], ids=" ".join)
def test_mistake_is_one_message(words: list[str]) -> None:
    refused = meshtrainer("data", *words)
    assert refused.code == 2
    assert "".join(words[-1:]) in refused.err
    assert refused.err.count("error:") == 1
