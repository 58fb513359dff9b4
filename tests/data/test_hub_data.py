"""Data sets by name: which files a name means, and that they are fetched from a local hub, pinned, and found again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.data import text_of
from tests.helpers.fake_hub import FakeHub
from trainer import UserError
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.data.chat.formats import find_chat_files, read_objects
from trainer.data.opening import open_source
from trainer.data.records import FilePart

pytest.importorskip("huggingface_hub")

BASE = "hf://datasets/tiny/texts"


def lines(*texts: str, column: str = "text") -> bytes:
    return "".join(json.dumps({column: text}) + "\n" for text in texts).encode()


FILES = {
    "README.md": b"# Texts\n",
    "data/train-00000-of-00002.jsonl": lines("first part " * 9),
    "data/train-00001-of-00002.jsonl": lines("second part " * 9),
    "data/test.jsonl": lines("held out " * 9),
    "dataset_infos.json": b"{}",
}
CONFIGS = b"""---
license: mit
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: en/*.csv
  - split: dev
    path: [en/extra/**/*.jsonl]
- config_name: de
  data_files: de/all.json
---
# Two languages
"""
LANGUAGES = {
    "README.md": CONFIGS,
    "en/a.csv": b"text\n" + b"one two three four five six seven\n" * 3,
    "en/extra/deep/b.jsonl": lines("extra and more than one sample"),
    "de/all.json": json.dumps([{"inhalt": "eins zwei drei vier"}] * 4).encode(),
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as found:
        found.add("tiny/texts", FILES, "dataset")
        found.add("tiny/languages", LANGUAGES, "dataset")
        for name, value in found.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from the environment once
        monkeypatch.chdir(tmp_path)
        yield found


def config_of(path: str, *more: str) -> RunConfig:
    own = [f"data.path={path}", "data.cache_dir=cache", "data.seq_len=16", "eval.every=0", *more]
    return load_config("llama_small", own)


def read(config: RunConfig) -> str:
    return text_of(open_source(config.data, None, "train"))


FIRST, SECOND, HELD_OUT = "first part " * 9, "second part " * 9, "held out " * 9


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (BASE, FIRST + SECOND),
        (f"{BASE}?split=test", HELD_OUT),
        (f"{BASE}/data", HELD_OUT + FIRST + SECOND),
        (f"{BASE}@main/data/train-00001*", SECOND),
        ("hf://datasets/tiny/languages", "one two three four five six seven" * 3),
        ("hf://datasets/tiny/languages?split=dev", "extra and more than one sample"),
        ("hf://datasets/tiny/languages?config=de&column=inhalt", "eins zwei drei vier" * 4),
    ],
)
def test_the_text_that_a_name_means(fake: FakeHub, setting: str, text: str) -> None:
    """Of its split, configuration, folder, revision and column; no other file is fetched."""
    assert read(config_of(setting)) == text
    fetched = sum(size for name, size in fake.sent.items() if name != "README.md")
    assert fetched <= len(text) + 400, "braces, quotes and keys"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("hf://datasets/tiny/text", ["tiny/text"]),
        (f"{BASE}?split=dev", ["train, test", "dev"]),
        (f"{BASE}?config=en", ["en", "data"]),
        ("hf://datasets/tiny/languages?config=fr", ["en, de", "fr"]),
        (f"{BASE}?splits=dev", ["splits", "config, split, column"]),
        (f"{BASE}/nothing", []),
        (f"{BASE}/data?split=test", []),
        (f"{BASE}@v9", ["tiny/texts", "v9"]),
        ("hf://tiny/texts", ["hf://datasets/"]),
    ],
)
def test_what_is_not_there_is_one_message(fake: FakeHub, setting: str, named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(config_of(setting))
    assert str(caught.value).startswith("data.path=hf://")
    assert all(words in str(caught.value) for words in named)


def test_pinned_fetched_once_and_found_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fake.repositories["dataset", "tiny/texts"].refs["main"]
    config = config_of(BASE)
    assert config.data.path == f"{BASE}@{commit}"
    assert read(config) == FIRST + SECOND
    train = {name: content for name, content in FILES.items() if "train" in name}
    assert {name: fake.sent[name] for name in train} == {name: len(content) for name, content in train.items()}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(fake.requests)
    assert read(config_of(BASE)) == FIRST + SECOND
    assert len(fake.requests) == asked


def as_a_run(config: RunConfig, folder: Path) -> None:
    """Leave a run that has saved with this configuration."""
    run = folder / config.run.dir
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "status.json").write_text("{}")


def test_a_run_stays_with_its_commits(fake: FakeHub, tmp_path: Path) -> None:
    """Each revision with its own, also if a source is added; another run takes the newest."""
    repository = fake.repositories["dataset", "tiny/texts"]
    commits = {"main": repository.refs["main"]}
    for revision in ("v2", "v3"):
        commits[revision] = repository.commit({**FILES, "data/test.jsonl": lines(revision * 50)}, revision)
    two = f"a: {BASE}, b: {BASE}@v2"
    first = config_of(f"{{{two}}}", f"data.eval_path={{b: {BASE}@v2?split=test}}")
    expected = {name: f"{BASE}@{commits[revision]}" for name, revision in (("a", "main"), ("b", "v2"))}
    assert first.data.path == expected
    as_a_run(first, tmp_path)
    moved = {
        revision: repository.commit({**FILES, "data/test.jsonl": lines(f"moved {revision}" * 50)}, revision)
        for revision in ("main", "v2")
    }
    again = config_of(f"{{{two}, c: {BASE}@v3, d: {BASE}@v2/data/test.jsonl}}", f"data.eval_path={BASE}@v2?split=test")
    added = {"c": f"{BASE}@{commits['v3']}", "d": f"{BASE}@{commits['v2']}/data/test.jsonl"}
    assert again.data.path == expected | added
    assert again.data.eval_path == f"{BASE}@{commits['v2']}?split=test"
    assert config_of(BASE, "run.name=other").data.path == f"{BASE}@{moved['main']}"


def test_a_branch_of_a_run_stays_with_its_commits(fake: FakeHub, tmp_path: Path) -> None:
    first = config_of(BASE, "run.name=first")
    as_a_run(first, tmp_path)
    moved = fake.repositories["dataset", "tiny/texts"].commit(
        {**FILES, "data/test.jsonl": lines("moved " * 50)}, "main"
    )
    checkpoint = f"{first.run.dir}/checkpoints/step_00000001"
    (tmp_path / checkpoint / "config.yaml").write_text(first.to_yaml())
    for start in (first.run.dir, f"{first.run.dir}/best", checkpoint):
        assert config_of(BASE, "run.name=branch", f"checkpoint.resume={start}").data.path == first.data.path
    assert config_of(BASE, "run.name=branch").data.path == f"{BASE}@{moved}"


def test_mixtures_and_chats_by_name(fake: FakeHub) -> None:
    config = config_of(f"{{a: {BASE}, b: hf://datasets/tiny/languages?config=de&column=inhalt}}")
    source: Any = open_source(config.data, None, "train")
    assert {name: text_of(own) for name, own in source.sources.items()} == {
        "a": FIRST + SECOND,
        "b": "eins zwei drei vier" * 4,
    }
    chats = json.dumps([{"instruction": "Hi", "output": "Yes"}] * 4).encode()
    fake.add("tiny/chats", {"train.json": chats}, "dataset")
    (file,) = find_chat_files("hf://datasets/tiny/chats", "data.path")
    assert [record for _, record in read_objects(FilePart(file))] == [{"instruction": "Hi", "output": "Yes"}] * 4
