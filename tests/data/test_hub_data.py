"""Data sets by name: which files a name means, and that they are fetched from a local hub, pinned, and found again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.test_data import read_all
from tests.helpers.fake_hub import FakeHub
from trainer.config import RunConfig, load_config
from trainer.data.chat.formats import find_files, read_records
from trainer.data.opening import open_source
from trainer.data.remote.datasets import find_data
from trainer.errors import UserError

pytest.importorskip("huggingface_hub")

BASE = "hf://datasets/tiny/texts"


def lines(*texts: str, column: str = "text") -> bytes:
    return "".join(json.dumps({column: text}) + "\n" for text in texts).encode()


FILES = {
    "README.md": b"# Texts\n",
    "data/train-00000-of-00002.jsonl": lines(*["first part " * 30] * 5),
    "data/train-00001-of-00002.jsonl": lines(*["second part " * 30] * 5),
    "data/test.jsonl": lines("held out " * 50),
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
    "en/a.csv": b"text\n" + b"one two three four five six seven\n" * 30,
    "en/extra/deep/b.jsonl": lines("extra"),
    "de/all.json": json.dumps([{"inhalt": "eins zwei drei vier"}] * 40).encode(),
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


def text_of(config: RunConfig) -> str:
    source = open_source(config.data, None, "train")
    tokens = read_all(source)[0].ravel().tolist()
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (BASE, ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
        (f"{BASE}?split=test", ["data/test.jsonl"]),
        (f"{BASE}/data", ["data/test.jsonl", "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
        (f"{BASE}@main/data/train-00001*", ["data/train-00001-of-00002.jsonl"]),
        ("hf://datasets/tiny/languages", ["en/a.csv"]),
        ("hf://datasets/tiny/languages?split=dev", ["en/extra/deep/b.jsonl"]),
        ("hf://datasets/tiny/languages?config=de&column=inhalt", ["de/all.json"]),
    ],
)
def test_the_files_that_a_name_means(fake: FakeHub, setting: str, names: list[str]) -> None:
    assert [each.path for each in find_data(setting, "data.path").files] == names
    assert not any(name != "README.md" for name in fake.sent), "the list alone says which files there are"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "hf://datasets/tiny/text",
            r"data\.path=hf://datasets/tiny/text: \S+ has no dataset tiny/text, or you have no access to it",
        ),
        (f"{BASE}?split=dev", r"has the splits train, test, not dev\n  for example: \S*split=train"),
        (f"{BASE}?config=en", r"has no configuration en; its folders are data"),
        (
            "hf://datasets/tiny/languages?config=fr",
            r"has the configurations en, de, not fr\n  for example: ",
        ),
        (f"{BASE}?splits=dev", r"has no option splits; the options are config, split, column"),
        (f"{BASE}/nothing", r"names no file that ends in \.txt"),
        (f"{BASE}/data?split=test", r"names files by their path, so it cannot also name a split"),
        (f"{BASE}@v9", r"dataset tiny/texts has no revision v9"),
        ("hf://tiny/texts", r"is not a dataset on the Hugging Face Hub\n  for example: data\.path=hf://datasets/"),
    ],
)
def test_what_is_not_there_is_one_message(fake: FakeHub, setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_data(config_of(setting).data.path, "data.path")  # type: ignore[arg-type]


def test_pinned_fetched_once_and_found_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commit = fake.repositories["dataset", "tiny/texts"].refs["main"]
    config = config_of(BASE)
    assert config.data.path == f"hf://datasets/tiny/texts@{commit}"
    text = text_of(config)
    assert "first part" in text
    assert "second part" in text
    assert "held out" not in text
    train = {name: content for name, content in FILES.items() if "train" in name}
    assert {name: fake.sent[name] for name in train} == {name: len(content) for name, content in train.items()}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(fake.requests)
    assert text_of(config_of(BASE)) == text
    for path in (tmp_path / "home").rglob("*.jsonl"):
        path.unlink()
    assert text_of(config_of(BASE)) == text, "the tokens are in the cache, and the files are not needed"
    assert len(fake.requests) == asked


def test_a_run_stays_with_its_commit(fake: FakeHub, tmp_path: Path) -> None:
    first = config_of(BASE)
    run = tmp_path / first.run.dir
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "config.yaml").write_text(first.to_yaml())
    (run / "status.json").write_text("{}")
    moved = fake.add("tiny/texts", {**FILES, "data/train-00000-of-00002.jsonl": lines("other")}, "dataset")
    assert config_of(BASE).data.path == first.data.path
    assert config_of(BASE, "run.name=other").data.path == f"hf://datasets/tiny/texts@{moved}"


def test_each_revision_stays_with_its_own_commit(fake: FakeHub, tmp_path: Path) -> None:
    """Also if a source is added, or all of them move."""
    repository = fake.repositories["dataset", "tiny/texts"]
    commits = {"main": repository.refs["main"]}
    for revision in ("v2", "v3"):
        commits[revision] = repository.commit({**FILES, "data/test.jsonl": lines(revision * 50)}, revision)
    two = f"a: {BASE}, b: {BASE}@v2"
    first = config_of(f"{{{two}}}", f"data.eval_path={{b: {BASE}@v2?split=test}}")
    expected = {name: f"{BASE}@{commits[revision]}" for name, revision in (("a", "main"), ("b", "v2"))}
    assert first.data.path == expected
    run = tmp_path / first.run.dir
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "config.yaml").write_text(first.to_yaml())
    (run / "status.json").write_text("{}")
    for revision in ("main", "v2"):
        repository.commit({**FILES, "data/test.jsonl": lines(f"moved {revision}" * 50)}, revision)
    again = config_of(f"{{{two}, c: {BASE}@v3, d: {BASE}@v2/data/test.jsonl}}", f"data.eval_path={BASE}@v2?split=test")
    added = {"c": f"{BASE}@{commits['v3']}", "d": f"{BASE}@{commits['v2']}/data/test.jsonl"}
    assert again.data.path == expected | added
    assert again.data.eval_path == f"{BASE}@{commits['v2']}?split=test"


def test_mixtures_columns_and_chats(fake: FakeHub) -> None:
    config = config_of(f"{{a: {BASE}, b: hf://datasets/tiny/languages?config=de&column=inhalt}}")
    assert isinstance(config.data.path, dict)
    assert all("@" in path for path in config.data.path.values())
    assert {
        name: "eins zwei" in text_of(dataclasses.replace(config, data=dataclasses.replace(config.data, path=path)))
        for name, path in config.data.path.items()
    } == {"a": False, "b": True}
    assert open_source(config.data, None, "train") is not None
    chats = json.dumps([{"instruction": "Hi", "output": "Yes"}] * 4).encode()
    fake.add("tiny/chats", {"train.json": chats}, "dataset")
    (file,) = find_files("data.path", "hf://datasets/tiny/chats")
    assert [record for _, record in read_records(file, "data.path")] == [{"instruction": "Hi", "output": "Yes"}] * 4
