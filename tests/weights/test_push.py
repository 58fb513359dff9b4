"""An export is uploaded to a hub on this machine, with a model card of its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_hub import FakeHub
from tests.helpers.forked import REPOSITORY
from tests.helpers.runs import SharedRun
from tests.weights.test_hub_models import folder
from trainer import load_config
from trainer.export import card_of
from trainer.weights.model_card import license_of, model_card

pytest.importorskip("huggingface_hub")

__all__ = ["folder"]


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with FakeHub() as found:
        yield found


def push(fake: FakeHub, home: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **fake.environment(home, **more), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "trainer.export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, cwd=home)


@pytest.mark.slow
def test_pushed_as_exported(fake: FakeHub, one: SharedRun, tmp_path: Path) -> None:
    """One commit with the same files as a local export, and a card; a second push replaces it."""
    ran = push(
        fake, tmp_path, one.ran.folder, tmp_path / "out", "--push", "tester/mine", "--private", HF_TOKEN=fake.token
    )
    assert ran.returncode == 0, ran.stderr
    repository = fake.repositories["model", "tester/mine"]
    commit = repository.refs["main"]
    assert f"{fake.url}/tester/mine/commit/{commit}" in ran.stdout
    assert repository.is_private
    there = repository.commits[commit]
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name: there[name] for name in local} == local
    assert there.keys() - local.keys() == {"README.md"}
    card = there["README.md"].decode()
    loss = one.ran.metrics[-2]["loss"] if one.ran.metrics[-2]["kind"] == "train" else one.ran.train("loss")[-1]
    assert f"| training | 20 | {loss:.4f} |" in card
    again = push(fake, tmp_path, one.ran.folder, "--push", "tester/mine", HF_TOKEN=fake.token)
    assert again.returncode == 0, again.stderr

    for name, more, message in (
        ("tester/mine", {}, f"error: --push=tester/mine: {fake.url} denies write access"),
        ("mine", {"HF_TOKEN": fake.token}, "error: --push=mine: must be a model's name on the Hugging Face Hub"),
    ):
        refused = push(fake, tmp_path, one.ran.folder, "--push", name, **more)
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_card_says_what_it_is_made_from(folder: Path, tmp_path: Path) -> None:
    base = ["model.name=auto", f"model.path={folder}", "lora.rank=4"]
    secret = tmp_path / "private" / "notes.txt"
    paths = f"{{a: {secret}, b: hf://datasets/tiny/texts@{'0' * 40}}}"
    config = load_config("llama_small", [f"data.path={paths}", *base])
    records = [{"kind": "train", "step": step, "loss": 5.0 - step, "tokens": 100 * step} for step in (1, 2, 3)]
    records.append({"kind": "eval", "step": 2, "loss": 2.5})
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    card = model_card(config, "mine", 2, records, "0.1.0", exported)
    assert license_of(str(folder)) == "apache-2.0"
    assert 'license: "apache-2.0"' in card
    assert 'library_name: "peft"' in card
    assert 'datasets: ["tiny/texts"]' in card
    assert "- notes.txt" in card
    assert str(tmp_path) not in card
    assert "2 steps on 200 tokens." in card
    assert "| training | 1 | 4.0000 |\n| training | 2 | 3.0000 |\n| evaluation | 2 | 2.5000 |" in card
    assert "| `lora.rank` | 4 |" in card
    assert f"The license of {folder.name} applies" in card
    assert 'pipeline_tag: "text-generation"' in card


def test_a_card_names_the_library_and_task_of_what_was_exported(folder: Path, tmp_path: Path) -> None:
    """Merged adapters are a model of transformers; a reward model or classifier does not generate."""
    config = load_config("llama_small", ["model.name=auto", f"model.path={folder}", "lora.rank=4"])
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    merged = model_card(config, "mine", 2, [], "0.1.0", tmp_path)
    assert 'library_name: "transformers"' in merged
    assert 'pipeline_tag: "text-classification"' in merged
    assert "A llama model, fine-tuned from " in merged
    (tmp_path / "adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    assert 'pipeline_tag: "text-classification"' in model_card(config, "mine", 2, [], "0.1.0", tmp_path)


@pytest.mark.slow
def test_a_card_without_metrics(one: SharedRun, tmp_path: Path) -> None:
    run = one.copy_to(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    config = run / "checkpoints" / "step_00000020"
    assert "trained from random weights" in card_of(config, "mine", tmp_path)
    assert json.loads(json.dumps(card_of(run, "mine", tmp_path)))
