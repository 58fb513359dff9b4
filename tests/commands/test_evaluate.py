"""Evaluation of a run: it gives the loss that the run recorded, on any ranks and data, and writes nothing."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.ranks import run_python_module
from tests.helpers.runs import SharedRun
from tests.helpers.tiny import fit, tiny_config
from tests.helpers.tiny import lines as metrics_of
from tests.weights.test_pretrained import config_of, folder_of
from trainer import Trainer, evaluate, load_weights
from trainer.data.opening import open_source
from trainer.export import command_line as export


def evaluate_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def content_of(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, hashlib.sha256(f.read_bytes()).digest()) for f in files}


EVALUATED = ["train.steps=6", "eval.every=3", "eval.steps=3", "checkpoint.every=3", "checkpoint.keep_last=0"]


@pytest.mark.slow
def test_evaluation_equals_the_runs_own_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fit(tmp_path / "run", *EVALUATED)
    of_run = {line["step"]: line["loss"] for line in lines if line["kind"] == "eval"}
    before = content_of(tmp_path)
    newest = evaluate_json(capsys, tmp_path / "run")
    assert (newest["step"], newest["loss"]) == (6, of_run[6])
    older = evaluate_json(capsys, tmp_path / "run" / "checkpoints" / "step_00000003")
    assert (older["step"], older["loss"]) == (3, of_run[3]) != (6, of_run[6])
    single_rows = evaluate_json(capsys, tmp_path / "run", "train.micro_batch_size=1")
    assert single_rows["loss"] == pytest.approx(of_run[6], rel=1e-6)
    assert evaluate_json(capsys, tmp_path / "run", "eval.steps=1")["loss"] != of_run[6]
    assert content_of(tmp_path) == before


@pytest.mark.slow
def test_run_without_evaluations_and_a_model_folder_can_be_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "run", "train.steps=1", "eval.every=0")
    of_run = evaluate_json(capsys, tmp_path / "run", "eval.steps=2")
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    own = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=4", "eval.steps=2", "run.threads=1"]
    own.append("train.micro_batch_size=2")
    of_folder = evaluate_json(capsys, tmp_path / "out", *own)
    assert (of_folder["loss"], of_folder["step"]) == (of_run["loss"], None)
    config = tiny_config(tmp_path / "other")
    tokens, targets = map(torch.from_numpy, open_source(config.data, 32, "eval").batch(torch.arange(8).numpy()))
    logits = load_weights(tmp_path / "run")(tokens)
    assert of_run["loss"] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-6)


@pytest.mark.slow
def test_each_source_of_a_mixture_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(2000)))
    paths = "{" + ", ".join(f"{name}: {tmp_path / name}.txt" for name in ("a", "b")) + "}"
    data = ["data.source=tokens", f"data.path={paths}", "data.holdout=0.1", f"data.cache_dir={tmp_path / 'cache'}"]
    *_, of_run, _, _ = fit(tmp_path / "run", *data, "model.vocab_size=257", "train.steps=2", "eval.every=2")
    assert of_run["kind"] == "eval"
    again = evaluate_json(capsys, tmp_path / "run")
    assert again["loss_a"] != again["loss_b"]
    for field in ("loss", "loss_a", "loss_b"):
        assert again[field] == of_run[field]


@pytest.mark.slow
def test_adapters_are_evaluated_on_their_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source")
    own = [
        "lora.rank=2",
        "train.steps=3",
        "optim.lr=0.1",
        "eval.every=3",
        "eval.steps=2",
        f"run.dir={tmp_path / 'run'}",
    ]
    trainer = Trainer(config_of(source, *own))
    assert trainer.fit() == 0
    trainer.close()
    (of_run,) = [line["loss"] for line in metrics_of(tmp_path / "run") if line["kind"] == "eval"]
    assert evaluate_json(capsys, tmp_path / "run")["loss"] == of_run
    assert evaluate_json(capsys, source, "data.source=synthetic", "data.seq_len=16", "eval.steps=2")["loss"] != of_run


@pytest.mark.campaign
def test_evaluation_on_a_different_number_of_ranks(four: SharedRun) -> None:
    """As a command on two ranks, for a run on 2 x 2."""
    folder = four.ran.folder
    before = content_of(folder)
    losses = []
    for ranks in ("nproc=1", "nproc=2"):
        ran = run_python_module("trainer.evaluate", folder, "eval.steps=4", ranks, "--json")
        assert ran.exit_code == 0, ran.stderr
        losses.append(json.loads(ran.stdout)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert 1 < losses[0] < math.log(257)
    assert content_of(folder) == before


@pytest.mark.slow
def test_results_are_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "run", *EVALUATED)
    subject = evaluate.find_subject(str(tmp_path / "run"), [])
    record = {"kind": "eval", "step": 0, "loss": 1.5, "bits_per_byte": 2.25, "loss_code": 1.25, "loss_prose": None}
    first, *rows = evaluate.as_table(subject, record).splitlines()
    assert first.endswith("step_00000006 (step 6)")
    assert [row.split() for row in rows] == [
        ["loss", "bits", "per", "byte"],
        ["code", "1.250000"],
        ["prose", "-"],
        ["all", "1.500000", "2.250000"],
    ]
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "run")]) == 0
    assert f"{evaluate_json(capsys, tmp_path / 'run')['loss']:.6f}" in content_after(capsys, tmp_path / "run")


def test_sequence_length_and_number_of_tokens_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "folder")
    (tmp_path / "text.txt").write_text("abcdefgh" * 40)
    own = [str(folder), f"data.eval_path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    for more, length in (([], 256), (["data.seq_len=16"], 16)):
        assert evaluate.main([*own, *more, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert (content["seq_len"], content["tokens"]) == (length, 320)
        assert evaluate.main([*own, *more]) == 0
        assert f"sequences of {length} tokens (data.seq_len; the model supports " in capsys.readouterr().out


def content_after(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert evaluate.main([str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "none was given"),
        (["nowhere"], "nowhere: no such folder"),
        ([__file__], f"{__file__}: is a file"),
        (["FOLDER", "data.seq_len=0"], "data.seq_len=0: must be at least 1"),
        (["FOLDER", "data.sequence=1"], "data.sequence=1: no such key"),
        (["FOLDER", "--jsn"], "--jsn: no such option"),
        (["FOLDER", "model.dim=64"], "model.dim=64: "),
        (["FOLDER", "nproc=0"], "nproc=0: must be a number of processes"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "folder")
    words = [str(folder) if word == "FOLDER" else word for word in arguments]
    assert evaluate.main(words or ["data.seq_len=16"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.campaign
def test_tasks_of_lm_eval_in_one_command(tmp_path: Path) -> None:
    """A task in local files: which of two numbers follows the others, which a run with adapters has memorized."""
    pytest.importorskip("lm_eval", reason="the extra `lm-eval` is not installed")
    lines = [{"question": "ab" * 8, "choices": ["ab", "zz"], "answer": 0}] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    task = {"task": "goes_on", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}, "target_delimiter": ""}
    task |= {"doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer"}
    task |= {"metric_list": [{"metric": "acc"}]}
    (tasks / "goes_on.yaml").write_text(json.dumps(task))
    source = folder_of(tmp_path / "source")
    write_bytes_tokenizer(source)
    trainer = Trainer(config_of(source, "lora.rank=2", "train.steps=1", f"run.dir={tmp_path / 'run'}"))
    assert trainer.fit() == 0
    trainer.close()
    own = ("--lm-eval", "goes_on", "--tasks", tasks)
    ran = run_python_module("trainer.evaluate", tmp_path / "run", *own, "--json")
    assert ran.exit_code == 0, ran.stderr
    assert 0 <= json.loads(ran.stdout.splitlines()[-1])["results"]["goes_on"]["acc,none"] <= 1
    assert "|goes_on|" in run_python_module("trainer.evaluate", tmp_path / "run", *own).stdout
    wrong = run_python_module("trainer.evaluate", tmp_path / "run", "--lm-eval", "goes_off", "--tasks", tasks)
    assert (wrong.exit_code, "--lm-eval=goes_off" in wrong.stderr) == (2, True)


def write_bytes_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "</s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_without_lm_eval_it_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    assert evaluate.main([str(tmp_path), "--lm-eval", "arc_easy"]) == 2
    assert "--lm-eval=arc_easy: needs the lm_eval library\n  to fix: pip install 'meshtrainer[lm-eval]'" in (
        capsys.readouterr().err
    )
    assert evaluate.main([str(tmp_path), "--lm-eval", "arc_easy", "data.seq_len=1"]) == 2
    assert "data.seq_len=1: cannot be combined with --lm-eval" in capsys.readouterr().err


def test_evaluation_of_a_folder_needs_no_training_data(tmp_path: Path) -> None:
    """Training data is never opened."""
    given = ["data.source=tokens", "data.eval_path=held_out/*.bin", "data.seq_len=16"]
    folder = folder_of(tmp_path / "folder")
    assert evaluate.find_subject(str(folder), given).config.data.path == "held_out/*.bin"
    assert evaluate.find_subject(str(folder), [*given, "data.path=a.bin"]).config.data.path == "a.bin"
