"""Reward models and classifiers: trained from a folder on files of records, exported, and loaded by transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")
pytest.importorskip("transformers", reason="exports are loaded with transformers")

import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.native_models import SOURCE, folder_of
from tests.helpers.ranks import run_command, run_python_module
from tests.project.test_docs import check_fields
from trainer import Trainer, load_config, load_weights
from trainer.data.opening import open_source
from trainer.errors import UserError
from trainer.export import command_line as export
from trainer.model.network import replace_head
from trainer.objective_trainer import ObjectiveTrainer
from trainer.recipe import find_recipe

ASSISTANT = {"role": "assistant"}
QUICK = ["data.seq_len=64", "train.epochs=8", "train.global_batch_size=4", "optim.lr=1e-2", "run.threads=1"]
TEXTS = {0: ["Hi there", "Hello", "Hi Hi", "Hello there"], 1: ["Bye", "Bye now", "so Bye", "Bye Bye"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = replace(SOURCE, vocab_size=128)
    folder = folder_of(tmp_path_factory.mktemp("scores") / "model", config=source)
    return write_tokenizer(folder, CHATML, eos_token="<|im_end|>")


def pairs(folder: Path) -> Path:
    asked = (("Hi", "Yes", "No"), ("Bye", "Yes now", "No"), ("two and two", "Yes", "No No"))
    lines = [
        {"prompt": conversation(text), "chosen": [ASSISTANT | {"content": a}], "rejected": [ASSISTANT | {"content": b}]}
        for text, a, b in asked
    ]
    return write(folder / "pairs.jsonl", lines * 4)


def labelled(folder: Path) -> Path:
    return write(
        folder / "labelled.jsonl",
        [{"text": text, "label": label} for label, texts in TEXTS.items() for text in texts] * 2,
    )


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings_of(model: Path, data: Path, *more: str) -> list[str]:
    recipe = "reward" if data.name == "pairs.jsonl" else "classify"
    return [
        f"recipe={recipe}",
        f"model.path={model}",
        f"data.path={data}",
        f"data.cache_dir={data.parent / 'cache'}",
        *more,
    ]


def scores_by_transformers(folder: Path, settings: list[str]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the scores of every sample by transformers, one by one without padding; their lengths; and the batch."""
    config = load_config(settings[0].partition("=")[2], settings[1:])
    source = open_source(config.data, config.vocab_size, "train")
    batch = dict(source.batch(np.arange(len(source))))  # type: ignore[arg-type]
    lengths = (batch["targets"] != -100).argmax(1) + 1
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert theirs.score.weight.shape[0] == config.objective.outputs
    tokens = torch.from_numpy(batch["tokens"])
    with torch.no_grad():
        found = torch.cat([theirs(tokens[row : row + 1, :length]).logits for row, length in enumerate(lengths)])
    return found, torch.from_numpy(lengths), batch


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], pytest.param(["lora.rank=4"], marks=pytest.mark.campaign)])
def test_reward_model_is_exported_for_transformers(lora: list[str], model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, pairs(tmp_path), *QUICK, *lora)
    ran = run_command(tmp_path / "run", *settings, "nproc=2")
    assert ran.exit_code == 0, ran.stderr
    for kind in ("start", "train"):
        check_fields(ran, kind)
    assert ran.train("accuracy")[-1] == 1.0 > ran.train("accuracy")[0]
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), *(["--merged"] if lora else [])]) == 0
    scores, lengths, batch = scores_by_transformers(tmp_path / "out", settings)
    evaluated = run_python_module(
        "trainer.evaluate", tmp_path / "run", f"data.eval_path={tmp_path / 'pairs.jsonl'}", "--json"
    )
    record = json.loads(evaluated.stdout)
    assert record["margin"] == pytest.approx(float((scores[0::2] - scores[1::2]).mean()), rel=1e-5)
    ours = load_weights(tmp_path / "run")(torch.from_numpy(batch["tokens"]))[range(len(lengths)), lengths - 1]
    torch.testing.assert_close(scores, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["hf", "auto"])
@pytest.mark.parametrize("recipe", ["classify", "reward"])
def test_peft_gives_the_scores_of_an_adapter_and_its_head(name: str, recipe: str, model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    data = labelled(tmp_path) if recipe == "classify" else pairs(tmp_path)
    own = [f"model.name={name}", "lora.rank=4", "optim.lr=1e-2", "data.seq_len=64", "train.steps=3"]
    settings = settings_of(model, data, *own, "train.global_batch_size=4", f"run.dir={tmp_path / 'run'}")
    trainer = ObjectiveTrainer(load_config(recipe, settings[1:]))
    assert trainer.fit() == 0
    trainer.close()
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    tokens = torch.arange(2, 26).view(2, 12)
    ours = load_weights(tmp_path / "run")(tokens)[:, -1]
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=ours.shape[1], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        scores = torch.cat([theirs(input_ids=tokens[row : row + 1]).logits for row in range(2)])
        theirs.base_model.disable_adapter_layers()
        without = torch.cat([theirs(input_ids=tokens[row : row + 1]).logits for row in range(2)])
    torch.testing.assert_close(scores, ours, rtol=1e-5, atol=1e-5)
    assert (without - scores).abs().max() > 1e-3


@pytest.mark.slow
def test_classifier_keeps_the_best_by_accuracy_and_is_exported(model: Path, tmp_path: Path) -> None:
    data = labelled(tmp_path)
    settings = settings_of(model, data, *QUICK)
    best = [
        f"data.eval_path={write(tmp_path / 'held_out.jsonl', held_out())}",
        "eval.metric=accuracy",
        "eval.every=1",
        "schedule.warmup_steps=24",
    ]
    every_one = ["checkpoint.keep_last=0", "checkpoint.mode=sync", "checkpoint.every=0"]
    ran = run_command(tmp_path / "run", *settings, *best, "checkpoint.keep_best=1", *every_one)
    assert ran.exit_code == 0, ran.stderr
    accuracies = {line["step"]: line["accuracy"] for line in ran.metrics if line["kind"] == "eval"}
    assert len(set(accuracies.values())) > 1, "otherwise the first is the best whatever is compared"
    assert (tmp_path / "run/checkpoints/step_00000001").is_dir(), "a worse one is there to choose from"
    first_best = min(step for step, accuracy in accuracies.items() if accuracy == max(accuracies.values()))
    assert f"best: step {first_best}, {max(accuracies.values()):.4f}" in ran.stdout
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    scores, _, batch = scores_by_transformers(tmp_path / "out", settings)
    assert (scores.argmax(1).numpy() == batch["labels"]).mean() == ran.train("accuracy")[-1] == 1.0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}


def held_out() -> list[dict[str, Any]]:
    return [{"text": "Hi now", "label": 0}, {"text": "Bye there", "label": 1}, {"text": "Hello so", "label": 0}]


@pytest.mark.slow
def test_wrong_records_are_reported(model: Path, tmp_path: Path) -> None:
    def message_of(records: list[dict[str, Any]], *more: str) -> str:
        recipe, *settings = settings_of(model, write(tmp_path / "records.jsonl", records), *QUICK, *more)
        config = load_config(recipe.partition("=")[2], [*settings, f"run.dir={tmp_path / 'run'}"])
        with pytest.raises(UserError) as error:
            config.trainer_class(Trainer)(config)
        return str(error.value)

    assert "records.jsonl:1: has no key 'label'; its keys: text" in message_of([{"text": "Hi"}])
    assert "label='greeting': must be true or false, or a whole number from 0 to 32767" in message_of(
        [{"text": "Hi", "label": "greeting"}]
    )
    alone = message_of([{"text": text, "label": 1} for text in ("Hi", "Bye")])
    assert "learns to tell labels apart, but all records of data.path have label 1\n  to fix: add records" in alone
    said = message_of([{"text": "Hi", "label": 0}, {"text": "Bye", "label": 4}])
    assert "objective.num_labels=2: train.objective=classify has fewer classes than the labels" in said
    assert "nearest legal value: objective.num_labels=5" in said
    assert "is a pair of responses, but train.objective needs one response with a label" in message_of(
        [{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}]
    )
    assert "matches none of the formats" in message_of([{"text": "Hi"}], "train.objective=tokens")


def test_a_recipe_must_name_its_output_projection() -> None:
    recipe = find_recipe("llama")
    assert recipe.hf is not None
    unnamed = replace(recipe, hf=replace(recipe.hf, names={}))
    with torch.device("meta"):
        network = recipe.build_model(SOURCE)
    with pytest.raises(UserError, match="a new head replaces the output projection, which recipe 'llama'"):
        replace_head(network, unnamed, SOURCE, num_outputs=2)
