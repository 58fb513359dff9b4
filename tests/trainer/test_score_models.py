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

from tests.helpers import hf_models
from tests.helpers.chats import CHATML, write_tokenizer
from tests.helpers.launch import command, run
from tests.helpers.objectives import write_pairs, write_records
from trainer import Trainer, UserError, load_config, load_weights
from trainer.data.opening import open_source
from trainer.export import export_checkpoint
from trainer.model.network import replace_head
from trainer.registry import find_model

QUICK = ["data.seq_len=64", "train.epochs=8", "train.global_batch_size=4", "optim.lr=1e-2", "run.threads=1"]
TEXTS = {0: ["Hi there", "Hello", "Hi Hi", "Hello there"], 1: ["Bye", "Bye now", "so Bye", "Bye Bye"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = hf_models.folder_of(tmp_path_factory.mktemp("scores") / "model", "llama", vocab_size=128)
    return write_tokenizer(folder, CHATML, eos_token="<|im_end|>")


def write_labelled(path: Path) -> Path:
    records = [{"text": text, "label": label} for label, texts in TEXTS.items() for text in texts]
    return write_records(path, records * 2)


def settings_of(recipe: str, model: Path, data: Path) -> list[str]:
    return [f"recipe={recipe}", f"model.path={model}", f"data.path={data}", f"data.cache_dir={data.parent / 'cache'}"]


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


@pytest.mark.campaign
@pytest.mark.parametrize("lora", [[], ["lora.rank=4"]], ids=["", "lora"])
def test_reward_model_is_exported_for_transformers(lora: list[str], model: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    settings = [*settings_of("reward", model, pairs), *QUICK, *lora]
    ran = run(tmp_path / "run", *settings)
    assert ran.train("accuracy")[-1] == 1.0
    assert ran.train("loss")[-1] < 0.5 * ran.train("loss")[0]
    export_checkpoint(tmp_path / "run", tmp_path / "out", merge=bool(lora) or None)
    scores, lengths, batch = scores_by_transformers(tmp_path / "out", settings)
    evaluated = command("trainer.evaluate", tmp_path / "run", f"data.eval_path={pairs}", "--json")
    margin = float((scores[0::2] - scores[1::2]).mean())
    assert json.loads(evaluated.out)["margin"] == pytest.approx(margin, rel=1e-5)
    ours = load_weights(tmp_path / "run")(torch.from_numpy(batch["tokens"]))[range(len(lengths)), lengths - 1]
    torch.testing.assert_close(scores, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_classifier_keeps_the_best_by_accuracy_and_is_exported(model: Path, tmp_path: Path) -> None:
    settings = [*settings_of("classify", model, write_labelled(tmp_path / "labelled.jsonl")), *QUICK]
    unseen = [{"text": "Hi now", "label": 0}, {"text": "Bye there", "label": 1}, {"text": "Hello so", "label": 0}]
    held_out = write_records(tmp_path / "held_out.jsonl", unseen)
    best = [f"data.eval_path={held_out}", "eval.metric=accuracy", "eval.every=2", "checkpoint.keep_best=1"]
    slowly = ["schedule.warmup_steps=24", "checkpoint.keep_last=0", "checkpoint.mode=sync"]
    ran = run(tmp_path / "run", *settings, *best, *slowly)
    accuracies = {line["step"]: line["accuracy"] for line in ran.of_kind("eval")}
    assert len(set(accuracies.values())) > 1, "otherwise the first is the best whatever is compared"
    first_best = min(step for step, accuracy in accuracies.items() if accuracy == max(accuracies.values()))
    listed = json.loads(command("trainer.checkpoints", tmp_path / "run", "--json").out)
    assert [entry["step"] for entry in listed if entry["is_best"]] == [first_best]
    assert len(listed) > 1, "a worse one is there to choose from"
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    scores, _, batch = scores_by_transformers(tmp_path / "out", settings)
    assert (scores.argmax(1).numpy() == batch["labels"]).mean() == ran.train("accuracy")[-1] == 1.0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["hf", "auto"])
@pytest.mark.parametrize("recipe", ["classify", "reward"])
def test_peft_gives_the_scores_of_an_adapter_and_its_head(name: str, recipe: str, model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    data = (write_labelled if recipe == "classify" else write_pairs)(tmp_path / "data.jsonl")
    own = [f"model.name={name}", "lora.rank=4", "optim.lr=1e-2", "data.seq_len=64", "train.steps=3"]
    settings = [*settings_of(recipe, model, data), *own, "train.global_batch_size=4", f"run.dir={tmp_path / 'run'}"]
    config = load_config(recipe, settings[1:])
    trainer = config.trainer_class(Trainer)(config)
    assert trainer.fit() == 0
    trainer.close()
    export_checkpoint(tmp_path / "run", tmp_path / "out")
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


GREETING = {"text": "Hi", "label": 0}
WRONG = {
    "no label": ([{"text": "Hi"}], ["records.jsonl:1", "label"]),
    "a word as label": ([{"text": "Hi", "label": "greeting"}], ["records.jsonl:1", "greeting"]),
    "one class": ([GREETING, {"text": "Hello", "label": 0}], ["label 0"]),
    "more classes": ([GREETING, {"text": "Bye", "label": 4}], ["objective.num_labels=2", "objective.num_labels=5"]),
    "a pair": ([{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}], ["records.jsonl:1", "train.objective"]),
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_wrong_records_are_reported(kind: str, model: Path, tmp_path: Path) -> None:
    records, named = WRONG[kind]
    settings = settings_of("classify", model, write_records(tmp_path / "records.jsonl", records))[1:]
    config = load_config("classify", [*settings, *QUICK, f"run.dir={tmp_path / 'run'}"])
    kind = config.trainer_class(Trainer)
    with pytest.raises(UserError) as error:
        kind(config)
    assert [name for name in named if name not in str(error.value)] == []


def test_a_recipe_must_name_its_output_projection() -> None:
    spec = find_model("llama")
    assert spec.hf is not None
    unnamed = replace(spec, hf=replace(spec.hf, names={}))
    shape = load_config("llama_small").model
    with torch.device("meta"):
        network = spec.build_model(shape)
    with pytest.raises(UserError, match="llama"):
        replace_head(network, unnamed, shape, num_outputs=2)
