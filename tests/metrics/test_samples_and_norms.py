"""Optional outputs of a run: samples for prompts, and norms by layer."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from tests.helpers.cases import in_campaign
from tests.helpers.launch import on_ranks, run
from tests.helpers.runs import EVALUATED_STEPS, SAVED_STEPS, SharedRun
from tests.helpers.tiny import fit, full, lines
from trainer import Sampling, Trainer, UserError, generate_batch, load_config, load_weights
from trainer.config.rules import check_config
from trainer.data.tokenizer import find_tokenizer
from trainer.metrics.hooks import NormWatch
from trainer.metrics.record import Record
from trainer.model.parameters import local


def samples(ran: SharedRun) -> list[tuple[int, str, str]]:
    return [(line["step"], line["prompt"], line["text"]) for line in ran.of_kind("sample")]


def continued(folder: Path, prompt: str, num_tokens: int, ema: bool = False) -> str:
    """Return the text that the newest checkpoint generates, as `trainer.generate` does."""
    tokenizer = find_tokenizer("bytes")
    given = [*tokenizer.start_ids, *tokenizer.encode(prompt).tolist()]
    ends = {tokenizer.end_id}
    (text,) = generate_batch(load_weights(folder, ema=ema), [given], num_tokens, Sampling(), ends=ends)
    return tokenizer.decode([token for token in text.tokens if token not in ends])


@pytest.mark.slow
def test_prompts_are_continued_at_each_evaluation(one: SharedRun, two: SharedRun) -> None:
    """With the evaluated weights, and the same on two ranks."""
    found = samples(one)
    assert [(step, prompt) for step, prompt, _ in found] == [(step, "def") for step in EVALUATED_STEPS]
    assert found[-1][2] == continued(one.folder, "def", 4)
    assert samples(two) == found
    kept = (one.folder / "samples.txt").read_text()
    for step, prompt, text in found:
        assert f"step {step}: {prompt}" in kept
        assert text in kept
    assert one.out.count("\nsample step ") == len(EVALUATED_STEPS)


@pytest.mark.slow
def test_samples_do_not_change_training_and_are_of_the_averaged_weights(tmp_path: Path) -> None:
    own = ["train.steps=3", "eval.every=3", "eval.steps=1", "train.ema=0.5", "optim.lr=0.05"]
    sampled = run(tmp_path / "sampled", *own, 'log.prompts=["class A:"]', "log.prompt_tokens=5", "log.norms_every=1")
    plain = run(tmp_path / "plain", *own)
    for kind in ("train", "eval"):
        assert [line["loss"] for line in sampled.of_kind(kind)] == [line["loss"] for line in plain.of_kind(kind)]
    (line,) = sampled.of_kind("sample")
    assert line["text"] == continued(sampled.folder, "class A:", 5, ema=True)
    assert not plain.of_kind("sample")
    assert not (plain.folder / "samples.txt").exists()


@pytest.mark.slow
def test_run_ends_with_a_sample(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "train.steps=1", "log.sample_tokens=4")
    text = re.sub(r"[\x00-\x1f]", "", continued(ended.folder, "def ", 4))
    assert text in ended.out, "without control characters"


UNITS = {"tok_embeddings", "layers.0", "layers.1", "head"}


@pytest.mark.slow
def test_norms_by_layer(one: SharedRun, two: SharedRun, four: SharedRun) -> None:
    """Of weights after the step, and of gradients; the same on any mesh."""
    found = one.of_kind("norms")
    assert [line["step"] for line in found] == list(SAVED_STEPS)
    for line in found:
        assert line["grad_norm"].keys() == line["param_norm"].keys() == UNITS
        squares = dict.fromkeys(UNITS, 0.0)
        for name, weight in load_weights(one.checkpoints / f"step_{line['step']:08d}").named_parameters():
            squares[unit_of(name)] += float(weight.detach().double().square().sum())
        expected = {unit: math.sqrt(square) for unit, square in squares.items()}
        assert line["param_norm"] == pytest.approx(expected, rel=1e-5)
    for other in (two, four):
        for mine, theirs in zip(found, other.of_kind("norms"), strict=True):
            for kind in ("grad_norm", "param_norm"):
                assert theirs[kind] == pytest.approx(mine[kind], rel=1e-5)


class KeepingWeights(Trainer):
    """Keeps the weights after each step."""

    kept: list[dict[str, torch.Tensor]]

    def on_step(self, record: Record) -> None:
        self.kept.append({name: full(weight).detach().clone() for name, weight in self.model.named_parameters()})


def test_norms_of_gradients_are_before_clipping(tmp_path: Path) -> None:
    """Plain gradient descent moves the weights by the clipped gradient."""
    lr, limit = 5.0, 0.01
    own = ["optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", f"optim.lr={lr}", "log.norms_every=1"]
    own += [f"optim.max_grad_norm={limit}", "schedule.name=constant", "schedule.warmup_steps=0", "train.steps=3"]
    KeepingWeights.kept = []
    found = fit(tmp_path, *own, kind=KeepingWeights)
    records = {kind: [line for line in found if line["kind"] == kind] for kind in ("norms", "train")}
    for step in (2, 3):
        squares = dict.fromkeys(UNITS, 0.0)
        for name, weight in KeepingWeights.kept[step - 1].items():
            moved = weight.double() - KeepingWeights.kept[step - 2][name].double()
            squares[unit_of(name)] += float(moved.square().sum())
        norm = records["train"][step - 1]["grad_norm"]
        assert norm > limit
        expected = {unit: math.sqrt(square) / lr * norm / limit for unit, square in squares.items()}
        assert records["norms"][step - 1]["grad_norm"] == pytest.approx(expected, rel=1e-3)


def unit_of(name: str) -> str:
    return next((unit for unit in UNITS if name.startswith(f"{unit}.")), "head")  # the head has the last norm


class Damaged(Trainer):
    """Starts with a few rows of the embedding almost zero, where RMSNorm multiplies gradients by its largest factor."""

    rows = 4

    def start(self) -> None:
        super().start()
        if self.state.step == 0:
            with torch.no_grad():
                local(self.model.get_parameter("tok_embeddings.weight"))[: self.rows] *= 1e-20


class Healthy(Damaged):
    rows = 0


DAMAGED = ["train.steps=12", "model.num_layers=2", "optim.lr=1e-3", "log.norms_every=1", "eval.every=0"]


def train_damaged(folder: Path, kind: type[Damaged]) -> None:
    fit(folder, *DAMAGED, "train.micro_batch_size=1", kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *in_campaign(2)])
def test_unit_that_dominates_the_norm_is_named(ranks: int, tmp_path: Path) -> None:
    """Once, with the share that the logged norms have; a run with healthy weights prints nothing."""
    for kind in (Damaged, Healthy):
        on_ranks(ranks, train_damaged, tmp_path / kind.__name__, kind)
    log = (tmp_path / "Damaged" / "console.log").read_text()
    (step, share) = re.findall(r"step (\d+): ([\d.]+)% of the squared gradient norm come from tok_embeddings, ", log)[0]
    (line,) = (line for line in lines(tmp_path / "Damaged") if line["kind"] == "norms" and line["step"] == int(step))
    squares = {unit: norm**2 for unit, norm in line["grad_norm"].items()}
    assert float(share) == pytest.approx(100 * squares["tok_embeddings"] / sum(squares.values()), abs=0.06)
    assert float(share) >= 90
    assert log.count("gradient norm come") == 1
    assert "gradient norm come" not in (tmp_path / "Healthy" / "console.log").read_text()


@pytest.mark.parametrize(
    ("norms", "limit", "alarms"),
    [
        ([1.0] * 30 + [5.0] * 10, None, [33]),
        ([1.0] * 30 + [5.0, 5.0, 1.0] * 10, None, []),  # spikes
        ([10.0, *(3.0 / step for step in range(1, 60))], None, []),  # an ordinary beginning
        ([math.nan] * 40, 1.0, []),
        ([1.5] * 40, 1.0, []),
        ([5.0] * 120, 1.0, [5, 105]),
        ([5.0] * 120, None, []),
    ],
)
def test_steps_after_which_norms_are_examined(norms: list[float], limit: float | None, alarms: list[int]) -> None:
    watch = NormWatch(limit)
    found = []
    for number, norm in enumerate(norms, start=1):
        watch.add(norm)
        if watch.take_alarm():
            found.append(number)
    assert found == alarms


@pytest.mark.parametrize(
    "overrides",
    [
        ["log.prompts=[a]", "eval.every=0"],
        ["log.prompts=[a]", "eval.every=1", "data.source=synthetic"],
        ["log.prompt_tokens=0"],
        ["log.norms_every=-1"],
    ],
)
def test_mistakes(overrides: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", overrides), 1, 1)
    assert str(refused.value).startswith(overrides[0].partition("=")[0])
