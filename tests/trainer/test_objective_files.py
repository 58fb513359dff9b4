"""Objectives as files: the example of the docs, the section `objective`, and the data that they read."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")

from tests.helpers import hf_models
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.launch import REPOSITORY, merged, run
from tests.helpers.objectives import write_pairs, write_records
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.config.files import recipe_files
from trainer.config.rules import check_config
from trainer.data.opening import open_source
from trainer.data.source import as_mapping
from trainer.objective import all_objectives
from trainer.run import main

HINGE = "train.objective=hinge:Hinge"


def example() -> str:
    """Return the example of the docs: the content of hinge.py."""
    page = (REPOSITORY / "docs" / "objectives.md").read_text()
    (code,) = re.findall(r"```python\n# hinge\.py\n(.*?)```", page, re.DOTALL)
    return str(code)


@pytest.fixture
def hinge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hinge.py").write_text(example())
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("hinge", None)
    return tmp_path


@pytest.mark.slow
def test_example_of_the_docs_trains(hinge: Path) -> None:
    """As one file, without an edit elsewhere."""
    pytest.importorskip("transformers", reason="the model is one of transformers")
    model = hf_models.folder_of(hinge / "model", "llama", vocab_size=128)
    write_tokenizer(model, CHATML, eos_token="<|im_end|>")
    data = write_pairs(hinge / "pairs.jsonl")
    settings = ["recipe=dpo", f"model.path={model}", f"data.path={data}", f"data.cache_dir={hinge / 'cache'}"]
    quick = ["data.seq_len=64", "train.epochs=6", "train.global_batch_size=4", "optim.lr=1e-2", "run.threads=1"]
    unseen = [{"prompt": "Hi there", "chosen": "Yes", "rejected": "No"}]
    held_out = write_records(hinge / "held.jsonl", unseen)
    own = [HINGE, "objective.beta=0.5", "eval.every=4", "eval.metric=accuracy", f"data.eval_path={held_out}"]
    ran = run(hinge / "run", *settings, *quick, *own, cwd=hinge)
    assert ran.train("loss")[0] == pytest.approx(1.0), "the margin is zero at first"
    assert ran.train("loss")[-1] < 0.5
    following = ran.out.partition("  next: ")[2].splitlines()
    assert [command for command in following if "trainer.export" in command and "--allow-import hinge" in command]
    assert 0 <= ran.of_kind("eval")[-1]["accuracy"] <= 1


def test_fields_of_an_objective_are_keys(hinge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("llama_small", [HINGE, "objective.beta=0.3"])
    assert config.objective.beta == 0.3
    again = hinge / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(str(again)) == config
    assert main(["--help", "objective"]) == 0
    helped = capsys.readouterr().out
    assert all(f"train.objective={name}" in helped for name in all_objectives())


@pytest.mark.parametrize(
    ("wrong", "proposed"),
    [
        ("objective.bta=1", "objective.beta=1"),
        ("objective.beta=0", ""),
        ("objective.beta=much", ""),
        ("train.objective=hinge:Hing", HINGE),
        ("train.objective=hinge:pairs", ""),
        ("train.objective=ipoo", "train.objective=ipo"),
        ("eval.metric=acuracy", "eval.metric=accuracy"),
    ],
)
def test_mistakes_name_their_setting_and_what_was_meant(wrong: str, proposed: str, hinge: Path) -> None:
    with pytest.raises(UserError, match=re.escape(wrong)) as error:
        check_config(load_config("llama_small", [HINGE, "eval.every=1", wrong]), 1, 1)
    assert proposed in str(error.value)


def test_configuration_of_a_run_does_not_import_an_objective(hinge: Path) -> None:
    config = load_config("llama_small", [HINGE, f"run.dir={hinge / 'run'}"])
    (hinge / "run").mkdir()
    (hinge / "run" / "config.yaml").write_text(config.to_yaml())
    (hinge / "run" / "status.json").write_text("{}")
    sys.modules.pop("hinge", None)
    with pytest.raises(UserError, match=f"^{HINGE}"):
        load_config(str(hinge / "run"))
    assert "hinge" not in sys.modules
    assert load_config(str(hinge / "run"), allow_import=["hinge"]).train.objective == "hinge:Hinge"


def test_every_objective_has_a_recipe_and_says_what_is_better() -> None:
    for name, objective in all_objectives().items():
        assert name == "tokens" or (objective.better and f"objective: {name}\n" in recipe_files()[name].read_text())
        assert set(objective.better.values()) <= {"higher", "lower"}


# ---------------------------------------------------------------------------------------------------------------
# Data


def kto(folder: Path, records: list[dict[str, Any]], *overrides: str) -> RunConfig:
    tokenizer, path = write_tokenizer(folder / "model", CHATML), write_records(folder / "labelled.jsonl", records)
    data = ["data.source=chat", f"data.path={path}", f"data.tokenizer={tokenizer}", "data.seq_len=48"]
    model = ["model.vocab_size=128", "model.dim=32", "model.num_layers=1", "model.num_heads=2", "run.threads=1"]
    own = ["train.objective=kto", "eval.every=0", f"run.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    return load_config("llama_small", merged([*data, *model, *own], overrides))


def test_labelled_answers_and_mismatched_prompts(tmp_path: Path) -> None:
    """Of sample i, row 2i is the answer with its label, and row 2i + 1 its prompt with the next record's answer."""
    records = [
        {"messages": conversation("Hi", "Yes"), "label": True},
        {"messages": conversation("Bye", "No No"), "label": False},
    ]
    config = kto(tmp_path, records)
    batch = as_mapping(open_source(config.data, 128, "train").batch(np.array([0, 1, -1])))
    assert batch["labels"].tolist() == [1, 0, 0]
    assert batch["tokens"].shape == (6, 48)
    answers = [row[row >= 0].tolist() for row in batch["targets"]]
    assert answers[0] == answers[3], "the second record's prompt with the first one's answer"
    assert answers[1] == answers[2] != answers[0]
    start = int((batch["targets"][0] >= 0).argmax())
    assert (batch["tokens"][0, :start] == batch["tokens"][1, :start]).all(), "the same prompt"
    assert answers[4:] == [[], []], "padding"


def test_mismatched_answers_are_of_another_prompt(tmp_path: Path) -> None:
    """Several answers to one prompt often follow one another in a file."""
    asked = (("Hi", "Yes"), ("Hi", "No"), ("Bye", "now"))
    config = kto(tmp_path, [{"messages": conversation(prompt, answer), "label": True} for prompt, answer in asked])
    batch = as_mapping(open_source(config.data, 128, "train").batch(np.arange(3)))
    yes, _, no, _, now, _ = (row[row >= 0].tolist() for row in batch["targets"])
    assert [row[row >= 0].tolist() for row in batch["targets"]] == [yes, now, no, now, now, yes]
    assert len({*map(tuple, (yes, no, now))}) == 3


def test_labels_of_csv_and_of_columns_with_gaps_are_read(tmp_path: Path) -> None:
    """In CSV they are text, and in parquet floats."""
    rows = (("Hi", "Yes", "True"), ("Bye", "No No", "0"), ("so", "now", "1.0"))
    path = tmp_path / "labelled.csv"
    path.write_text("".join(f"{','.join(row)}\n" for row in (("prompt", "completion", "label"), *rows)))
    source = open_source(replace(kto(tmp_path, []).data, path=str(path)), 128, "train")
    assert as_mapping(source.batch(np.arange(3)))["labels"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "labels", "named"),
    [
        ("Hi", [True, False], "prompt"),
        ("Bye", [True, 2], "2"),
        ("Bye", [True, 1], "label 1"),
        ("Bye", [0, False], "label 0"),
        ("Bye", [1, 0.5], "labelled.jsonl:2: label=0.5"),
        ("Bye", [1, -1], "labelled.jsonl:2: label=-1"),
        ("Bye", [1, "bad"], "labelled.jsonl:2: label='bad'"),
    ],
)
def test_answers_that_kto_cannot_compare_are_refused(
    prompt: str, labels: list[Any], named: str, tmp_path: Path
) -> None:
    answers = [conversation("Hi", "Yes"), conversation(prompt, "No")]
    config = kto(tmp_path, [{"messages": a, "label": label} for a, label in zip(answers, labels, strict=True)])
    kind = config.trainer_class(Trainer)
    with pytest.raises(UserError, match=re.escape(named)):
        kind(config)


def test_objectives_for_pairs_and_for_labels_are_told_apart(tmp_path: Path) -> None:
    """Each message names what to use for the data that there are."""
    labelled = [{"messages": conversation(text, "Yes"), "label": text == "Hi"} for text in ("Hi", "Bye")]
    config = kto(tmp_path, labelled, "train.objective=dpo")
    kind = config.trainer_class(Trainer)
    with pytest.raises(UserError, match=r"^train\.objective=dpo(.|\n)*recipe=kto"):
        kind(config)
    pair = [{"prompt": "Hi", "chosen": "Yes", "rejected": "No", "label": 1}]
    with pytest.raises(UserError, match=r"labelled\.jsonl:1"):
        open_source(kto(tmp_path, pair).data, None, "train")


@pytest.mark.parametrize(("objective", "given", "legal"), [("dpo", "end", "assistant"), ("reward", "last", "end")])
def test_tokens_that_an_objective_is_not_trained_on_are_refused(objective: str, given: str, legal: str) -> None:
    settings = [f"train.objective={objective}", "data.source=chat", "data.path=pairs.jsonl", f"data.train_on={given}"]
    with pytest.raises(UserError, match=rf"^data\.train_on={given}(.|\n)*data\.train_on={legal}"):
        load_config("llama_small", settings)
