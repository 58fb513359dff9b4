"""Objectives as files: the example of the docs, the section `objective`, its old name, and the data that they read."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.ranks import merged, run_command
from tests.project.test_docs import DOCS
from tests.trainer.test_score_models import model as model
from tests.trainer.test_score_models import pairs, write
from trainer import RunConfig, UserError, load_config
from trainer.config import compare_configs
from trainer.config.command_line import full_help
from trainer.data.opening import open_source
from trainer.data.source import as_mapping
from trainer.objective import all_objectives, find_objective
from trainer.objective_trainer import ObjectiveTrainer
from trainer.run import main

OBJECTIVES = ["classify", "distill", "dpo", "ipo", "kto", "orpo", "reward", "simpo", "tokens"]


HELD_OUT = [
    {"prompt": "Hi there", "chosen": "Yes", "rejected": "No"},
    {"prompt": "so", "chosen": "Yes now", "rejected": "No"},
]


def example() -> str:
    """Return the example of the docs: the content of hinge.py."""
    (code,) = re.findall(r"```python\n# hinge\.py\n(.*?)```", (DOCS / "objectives.md").read_text(), re.DOTALL)
    return str(code)


@pytest.fixture
def hinge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hinge.py").write_text(example())
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("hinge", None)
    return tmp_path


@pytest.mark.slow
def test_example_of_the_docs_trains(hinge: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file of at most 25 lines, and no edit elsewhere."""
    assert len([line for line in example().splitlines() if line.strip()]) <= 25
    monkeypatch.setenv("PYTHONPATH", str(hinge))
    data = pairs(hinge)
    settings = ["recipe=dpo", f"model.path={model}", f"data.path={data}", f"data.cache_dir={hinge / 'cache'}"]
    quick = ["data.seq_len=64", "train.epochs=6", "train.global_batch_size=4", "optim.lr=1e-2", "run.threads=1"]
    own = ["train.objective=hinge:Hinge", "objective.beta=0.5", "eval.every=4", "eval.metric=accuracy", "nproc=2"]
    own.append(f"data.eval_path={write(hinge / 'held.jsonl', HELD_OUT)}")
    ran = run_command(hinge / "run", *settings, *quick, *own)
    assert ran.exit_code == 0, ran.stderr
    assert ran.train("loss")[0] == pytest.approx(1.0), "the margin is zero at first"
    assert ran.train("loss")[-1] < 0.5
    assert [line["accuracy"] for line in ran.metrics if line["kind"] == "eval"][-1] >= 0.5


def test_fields_of_an_objective_are_keys(hinge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("llama_small", ["train.objective=hinge:Hinge", "objective.beta=0.3"])
    assert config.objective.beta == 0.3
    assert load_config(write_yaml(hinge, config.to_yaml())) == config
    shown = full_help(["objective"], config)
    assert "objective (train.objective=hinge:Hinge): Prefer one of two responses by a margin of 1." in shown
    assert "objective.beta  [a number; default 0.1; here 0.3]" in shown
    for settings, message in (
        (["objective.bta=1"], "objective.bta=1: no such key\n  did you mean objective.beta=1?"),
        (["objective.beta=0"], "objective.beta=0.0: must be above 0"),
        (["objective.beta=much"], "objective.beta=much: must be a number"),
        (["train.objective=hinge:Hing"], "did you mean train.objective=hinge:Hinge?"),
        (["train.objective=hinge:pairs"], "train.objective=hinge:pairs: must be a subclass of trainer.Objective"),
        (["train.objective=ipoo"], "did you mean train.objective=ipo?"),
        (["eval.metric=acuracy", "eval.every=1"], "did you mean eval.metric=accuracy?"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load_with_rules(["train.objective=hinge:Hinge", *settings])
    assert main(["--help", "objective"]) == 0
    helped = capsys.readouterr().out
    assert all(f"objective (train.objective={name})" in helped for name in OBJECTIVES)


def load_with_rules(settings: list[str]) -> None:
    from trainer.config import check_config

    check_config(load_config("llama_small", settings), 1, 1)


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "again.yaml"
    path.write_text(text)
    return str(path)


def test_configuration_of_a_run_does_not_import_an_objective(hinge: Path) -> None:
    config = load_config("llama_small", ["train.objective=hinge:Hinge", f"run.dir={hinge / 'run'}"])
    (hinge / "run").mkdir()
    (hinge / "run" / "config.yaml").write_text(config.to_yaml())
    (hinge / "run" / "status.json").write_text("{}")
    sys.modules.pop("hinge", None)
    with pytest.raises(UserError, match=r"^train\.objective=hinge:Hinge: a run or checkpoint names it"):
        load_config(str(hinge / "run"))
    assert load_config(str(hinge / "run"), allow_import=["hinge"]).train.objective == "hinge:Hinge"


def test_every_objective_has_a_recipe_and_says_what_is_better() -> None:
    from trainer.config import recipe_files

    assert list(all_objectives()) == OBJECTIVES
    for name in OBJECTIVES:
        objective = find_objective(name)
        assert name == "tokens" or (objective.better and f"objective: {name}\n" in recipe_files()[name].read_text())
        assert set(objective.better.values()) <= {"higher", "lower"}


def test_old_keys_of_dpo_work(tmp_path: Path) -> None:
    dpo = load_config("llama_small", ["train.objective=dpo", "dpo.beta=0.3"])
    assert dpo.objective.beta == 0.3
    with pytest.warns(DeprecationWarning, match="dpo is now called objective"):
        assert dpo.dpo.beta == 0.3
    old = dpo.to_yaml().replace("\nobjective:\n", "\ndpo:\n")
    assert "\ndpo:\n  beta: 0.3" in old
    assert load_config(write_yaml(tmp_path, old)) == dpo
    assert compare_configs(dpo, old) == ([], [])
    tokens = load_config("llama_small")
    of_tokens = tokens.to_yaml().replace("\nobjective: {}\n", "\ndpo:\n  beta: 0.1\n")
    assert load_config(write_yaml(tmp_path, of_tokens)) == tokens, "older versions wrote the section into every run"
    assert compare_configs(tokens, of_tokens) == ([], [])
    changed, _ = compare_configs(load_config("llama_small", ["train.objective=dpo", "objective.beta=0.4"]), old)
    assert changed == ["objective.beta: 0.3 in the checkpoint, 0.4 now"]
    with pytest.raises(UserError, match=re.escape("dpo.beta=0.3: only applies to train.objective=dpo, not to ipo")):
        load_config("llama_small", ["train.objective=ipo", "dpo.beta=0.3"])
    switched = load_config(write_yaml(tmp_path, old), ["train.objective=simpo"])
    assert switched.objective.beta == 2.0, "settings of another objective are not taken over"


def test_labelled_answers_and_mismatched_prompts(tmp_path: Path) -> None:
    """Of sample i, row 2i is the answer with its label, and row 2i + 1 its prompt with the next record's answer."""
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    records = [
        {"messages": conversation("Hi", "Yes"), "label": True},
        {"messages": conversation("Bye", "No No"), "label": False},
    ]
    path = write(tmp_path / "labelled.jsonl", records)
    settings = ["train.objective=kto", "data.source=chat", f"data.path={path}", f"data.tokenizer={tokenizer}"]
    config = load_config(
        "llama_small",
        [*settings, "eval.every=0", "data.seq_len=48", "model.vocab_size=128", f"data.cache_dir={tmp_path / 'cache'}"],
    )
    assert (config.data.labels, config.data.train_on) == ("mismatched", "assistant")
    source = open_source(config.data, 128, "train")
    batch = as_mapping(source.batch(np.array([0, 1, -1])))
    assert batch["labels"].tolist() == [1, 0, 0]
    assert batch["tokens"].shape == (6, 48)

    def targets(row: int) -> list[int]:
        return [int(token) for token in batch["targets"][row] if token >= 0]

    assert targets(0) == targets(3), "the second record's prompt with the first one's answer"
    assert targets(1) == targets(2) != targets(0)
    start = int((batch["targets"][0] >= 0).argmax())
    assert (batch["tokens"][0, :start] == batch["tokens"][1, :start]).all(), "the same prompt"
    assert not (batch["targets"][4:] >= 0).any(), "padding"


@pytest.mark.parametrize(
    ("prompt", "labels", "message", "fix"),
    [
        ("Hi", [True, False], "all conversations in the data have the same prompt", "add responses to another prompt"),
        (
            "Bye",
            [True, 2],
            "supports labels up to 1, but the data has labels up to 2",
            "label a good response 1 or true",
        ),
        ("Bye", [True, 1], "all records of data.path have label 1", "add records with label 0 or false"),
        ("Bye", [0, False], "all records of data.path have label 0", "add records with label 1 or true"),
        (
            "Bye",
            [1, 0.5],
            "labelled.jsonl:2: label=0.5: must be true or false, or a whole",
            "number the classes from 0",
        ),
        ("Bye", [1, -1], "labelled.jsonl:2: label=-1: must be true or false, or a", "a bad response is 0 or false"),
        ("Bye", [1, "bad"], "labelled.jsonl:2: label='bad': must be true or false", "a bad response is 0 or false"),
    ],
)
def test_answers_that_kto_cannot_compare_are_refused(
    prompt: str, labels: list[Any], message: str, fix: str, tmp_path: Path
) -> None:
    answers = [conversation("Hi", "Yes"), conversation(prompt, "No")]
    records = [{"messages": answer, "label": label} for answer, label in zip(answers, labels, strict=True)]
    with pytest.raises(UserError, match=f"{re.escape(message)}(.|\n)*to fix: .*{fix}"):
        ObjectiveTrainer(kto(tmp_path, records))


def test_labels_of_csv_and_of_columns_with_gaps_are_read(tmp_path: Path) -> None:
    """In CSV they are text, and in parquet floats."""
    rows = (("Hi", "Yes", "True"), ("Bye", "No No", "0"), ("so", "now", "1.0"))
    path = tmp_path / "labelled.csv"
    path.write_text("".join(f"{','.join(row)}\n" for row in (("prompt", "completion", "label"), *rows)))
    config = kto(tmp_path, [])
    source = open_source(replace(config.data, path=str(path)), 128, "train")
    assert as_mapping(source.batch(np.arange(3)))["labels"].tolist() == [1, 0, 1]


def test_objectives_for_pairs_and_for_labels_are_told_apart(tmp_path: Path) -> None:
    """Each message names what to use for the data that there are, and not the setting that they have already."""
    records = [{"messages": conversation(text, "Yes"), "label": text == "Hi"} for text in ("Hi", "Bye")]
    config = kto(tmp_path, records, "train.objective=dpo")
    rule = r"train\.objective=dpo: needs preference pairs, but data\.path has none"
    with pytest.raises(UserError, match=rf"^{rule}\n  to fix: use records with .* recipe=kto$"):
        ObjectiveTrainer(config)


@pytest.mark.parametrize(("objective", "given", "legal"), [("dpo", "end", "assistant"), ("reward", "last", "end")])
def test_tokens_that_an_objective_is_not_trained_on_are_refused(objective: str, given: str, legal: str) -> None:
    settings = [f"train.objective={objective}", "data.source=chat", "data.path=pairs.jsonl", f"data.train_on={given}"]
    with pytest.raises(UserError, match=rf"data\.train_on={given}: .*\n.*data\.train_on={legal}"):
        load_config("llama_small", settings)


def test_mismatched_answers_are_of_another_prompt(tmp_path: Path) -> None:
    """Several answers to one prompt often follow one another in a file."""
    asked = (("Hi", "Yes"), ("Hi", "No"), ("Bye", "now"))
    config = kto(tmp_path, [{"messages": conversation(prompt, answer), "label": True} for prompt, answer in asked])
    batch = as_mapping(open_source(config.data, 128, "train").batch(np.arange(3)))
    yes, _, no, _, now, _ = (row[row >= 0].tolist() for row in batch["targets"])
    assert [row[row >= 0].tolist() for row in batch["targets"]] == [yes, now, no, now, now, yes]
    assert len({*map(tuple, (yes, no, now))}) == 3


def kto(folder: Path, records: list[dict[str, Any]], *overrides: str) -> RunConfig:
    tokenizer, path = write_tokenizer(folder / "model", CHATML), write(folder / "labelled.jsonl", records)
    data = ["data.source=chat", f"data.path={path}", f"data.tokenizer={tokenizer}", "data.seq_len=48"]
    model = ["model.vocab_size=128", "model.dim=32", "model.num_layers=1", "model.num_heads=2", "run.threads=1"]
    own = ["train.objective=kto", "eval.every=0", f"run.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    return load_config("llama_small", merged([*data, *model, *own], overrides))


def test_labels_of_a_pair_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [{"prompt": "Hi", "chosen": "Yes", "rejected": "No", "label": 1}])
    settings = ["train.objective=kto", "data.source=chat", f"data.path={path}", f"data.cache_dir={tmp_path / 'cache'}"]
    with pytest.raises(UserError, match=r"is a pair of responses, but train\.objective needs one response with"):
        open_source(load_config("llama_small", settings).data, None, "train")
