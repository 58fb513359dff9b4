"""`trainer.evaluate`: the loss of a run, a checkpoint or a folder on held-out data; it writes nothing."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.commands import meshtrainer
from tests.helpers.launch import command, run
from tests.helpers.runs import STEPS, SharedRun
from trainer import load_config, load_weights
from trainer.data.opening import open_source

pytestmark = pytest.mark.slow


def evaluated(*arguments: object) -> dict[str, Any]:
    ended = meshtrainer("evaluate", *arguments, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def content_of(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, hashlib.sha256(f.read_bytes()).digest()) for f in files}


def test_evaluation_equals_the_runs_own_and_writes_nothing(one: SharedRun) -> None:
    of_run = {line["step"]: line["loss"] for line in one.of_kind("eval")}
    before = content_of(one.folder)
    newest = evaluated(one.folder)
    assert (newest["step"], newest["loss"]) == (STEPS, of_run[STEPS])
    older = evaluated(one.checkpoints / "step_00000008")
    assert older["step"] == 8
    assert older["loss"] != newest["loss"]
    assert evaluated(one.folder, "train.micro_batch_size=1")["loss"] == pytest.approx(of_run[STEPS], rel=1e-6)
    assert evaluated(one.folder, "eval.steps=1")["loss"] != of_run[STEPS]
    table = meshtrainer("evaluate", one.folder)
    assert f"{of_run[STEPS]:.6f}" in table.out
    assert content_of(one.folder) == before


def test_folder_is_evaluated_like_the_run_that_it_is_exported_from(one: SharedRun, tmp_path: Path) -> None:
    """And both as a plain cross-entropy over the same samples."""
    command("trainer.export", one.folder, tmp_path / "out")
    own = ["data.documents=apart", "data.seq_len=32", "train.global_batch_size=8", "eval.steps=2", "data.holdout=0.01"]
    of_folder = evaluated(tmp_path / "out", *own, "data.tokenizer=bytes", "data.source=stdlib", "run.threads=1")
    of_run = evaluated(one.folder)
    assert of_folder["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert of_folder["step"] is None
    config = load_config(str(one.folder))
    samples = open_source(config.data, 257, "eval").batch(torch.arange(16).numpy())
    tokens, targets = map(torch.from_numpy, samples)
    logits = load_weights(one.folder)(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert of_run["loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.campaign
def test_each_source_of_a_mixture_is_evaluated(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(2000)))
    paths = "{" + ", ".join(f"{name}: {tmp_path / name}.txt" for name in ("a", "b")) + "}"
    data = ["data.source=tokens", f"data.path={paths}", "data.holdout=0.1", f"data.cache_dir={tmp_path / 'cache'}"]
    trained = run(tmp_path / "run", *data, "train.steps=2", "eval.every=2")
    (of_run,) = trained.of_kind("eval")
    again = evaluated(trained.folder)
    assert again["loss_a"] != again["loss_b"]
    assert all(again[field] == of_run[field] for field in ("loss", "loss_a", "loss_b"))


@pytest.mark.campaign
def test_adapters_are_evaluated_on_their_base(chat: SharedRun) -> None:
    ended = command("trainer.evaluate", chat.folder, "--json")
    assert json.loads(ended.out)["loss"] == chat.of_kind("eval")[-1]["loss"]


@pytest.mark.campaign
def test_evaluation_on_another_number_of_ranks(four: SharedRun) -> None:
    """As a command on two ranks, for a run on 2 x 2."""
    losses = []
    for ranks in ("nproc=1", "nproc=2"):
        ended = command("trainer.evaluate", four.folder, "eval.steps=4", ranks, "--json", fresh=True)
        losses.append(json.loads(ended.out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert 1 < losses[0] < math.log(257)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        [__file__],
        ["RUN", "data.seq_len=0"],
        ["RUN", "data.sequence=1"],
        ["RUN", "--jsn"],
        ["RUN", "--dry-run"],
        ["RUN", "model.dim=64"],
        ["RUN", "nproc=0"],
    ],
    ids=" ".join,
)
def test_mistake_is_one_message(arguments: list[str], one: SharedRun) -> None:
    words = [str(one.folder) if word == "RUN" else word for word in arguments]
    refused = meshtrainer("evaluate", *words)
    assert refused.code == 2
    assert arguments[-1] in refused.err
    assert refused.err.count("error:") == 1
