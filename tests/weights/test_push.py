"""An export is uploaded to a hub on this machine, with a model card of its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.fake_hub import FakeHub
from tests.helpers.runs import STEPS, SharedRun

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as found:
        for name, value in found.environment(tmp_path / "home", HF_TOKEN=found.token).items():
            monkeypatch.setenv(name, value)
        # Both are read from the environment once.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield found


def test_pushed_as_exported(hub: FakeHub, one: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One commit with the same files as a local export, and a card; a second push replaces it."""
    pushed = meshtrainer("export", one.folder, tmp_path / "out", "--push", "tester/mine", "--private")
    assert pushed.code == 0, pushed.err
    repository = hub.repositories["model", "tester/mine"]
    commit = repository.refs["main"]
    assert f"{hub.url}/tester/mine/commit/{commit}" in pushed.out
    assert repository.is_private
    there = repository.commits[commit]
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name: there[name] for name in local} == local
    assert there.keys() - local.keys() == {"README.md"}
    card = there["README.md"].decode()
    assert card.startswith("---\n")
    assert f"| {STEPS} | {one.train('loss')[-1]:.4f} |" in card
    assert meshtrainer("export", one.folder, "--push", "tester/mine").code == 0
    refused = [meshtrainer("export", one.folder, "--push", "mine")]
    monkeypatch.setenv("HF_TOKEN", "")
    refused.append(meshtrainer("export", one.folder, "--push", "tester/mine"))
    assert [each.code for each in refused] == [2, 2]
    assert refused[0].err.startswith("error: --push=mine: ")
    assert refused[1].err.startswith("error: --push=tester/mine: ")


def test_a_card_says_what_it_is_made_from_and_no_private_path(hub: FakeHub, chat: SharedRun) -> None:
    base = Path(chat.overrides[1].removeprefix("model.path="))
    assert meshtrainer("export", chat.folder, "--push", "tester/adapter").code == 0
    repository = hub.repositories["model", "tester/adapter"]
    files = repository.commits[repository.refs["main"]]
    card = files["README.md"].decode()
    assert "adapter_config.json" in files
    assert 'library_name: "peft"' in card
    assert 'pipeline_tag: "text-generation"' in card
    assert base.name in card
    assert "chats.jsonl" in card
    assert str(base.parent) not in card
    assert "| `lora.rank` | 4 |" in card
