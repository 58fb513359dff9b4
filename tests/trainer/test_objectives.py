"""Objectives: their losses follow the formulas of their papers, on any mesh and for any micro-batch size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.helpers.ranks import merged, run_ranks
from tests.model.test_lora import config_of
from tests.trainer.test_dpo import SEQ_LEN, Pairs, log_probabilities
from tests.weights.test_pretrained import SOURCE, folder_of
from trainer import load_weights
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.source import IGNORE, Fingerprint, Source
from trainer.model.parameters import local
from trainer.objective import Objective, Rows, find_objective
from trainer.objective_trainer import ObjectiveTrainer

NUM_STEPS = 4
PREFERENCES = ("dpo", "ipo", "simpo", "orpo")
SETTINGS = {
    "dpo": {"beta": 0.5},
    "ipo": {"beta": 0.2},
    "simpo": {"beta": 2.0, "gamma": 0.6},
    "orpo": {"beta": 0.3},
    "kto": {"beta": 0.4, "good_weight": 1.0, "bad_weight": 1.4},
    "reward": {"centering": 0.01},
    "classify": {"num_labels": 3},
}
OF_SCORES = ("reward", "classify")
MESHES = {
    "one": (1, ["train.micro_batch_size=1"]),
    "two": (2, ["train.micro_batch_size=2"]),
    "micro-batch 2": (1, ["train.micro_batch_size=2"]),
    "micro-batch 4": (1, ["train.micro_batch_size=4"]),
    "2 x 2": (4, ["mesh.replicate=2", "mesh.shard=2"]),
}


class Labelled(Pairs):
    """Of sample i, row 2i is an answer with a label, and row 2i + 1 an answer to another prompt."""

    num_labels = 2

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        return {**super().batch(indices), "labels": np.where(indices < 0, 0, indices % 3 != 0).astype(np.int64)}

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(len(self), 1, 0, "labelled")


class ScoredPairs(Pairs):
    """Pairs of answers that are scored at their last token, where the target is 0."""

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        batch = super().batch(indices)
        places = np.arange(SEQ_LEN) == ((batch["targets"] != IGNORE) * np.arange(SEQ_LEN)).argmax(1)[:, None]
        is_padding = (batch["targets"] == IGNORE).all(1, keepdims=True)
        return {**batch, "targets": np.where(places & ~is_padding, 0, IGNORE)}


class Classes(ScoredPairs):
    """Texts of three classes, which are the targets at their last tokens."""

    rows_per_sample, num_labels = 1, 3

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        chosen = {name: rows[::2] for name, rows in super().batch(indices).items()}
        labels = np.where(indices < 0, 0, indices % 3).astype(np.int64)
        return {**chosen, "targets": np.where(chosen["targets"] == 0, labels[:, None], IGNORE), "labels": labels}


def source_of(objective: Objective) -> Source:
    if "scores" in objective.needs:
        return Classes() if "labels" in objective.needs else ScoredPairs()
    return Labelled() if "labels" in objective.needs else Pairs()


class OnSamples(ObjectiveTrainer):
    def build_loader(self) -> Iterable[Batch]:
        source = source_of(self.config.objective)
        return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)

    def build_eval_loader(self) -> Iterable[Batch] | None:
        source = source_of(self.config.objective)
        return EvalLoader.from_config(source, self.config, self.world.rank, self.world.size)


def settings_of(name: str) -> list[str]:
    fields = [f"objective.{key}={value}" for key, value in SETTINGS[name].items()]
    lengths = [f"train.steps={NUM_STEPS}", f"data.seq_len={SEQ_LEN}", "train.global_batch_size=4", "eval.every=4"]
    # Not AdamW, which turns rounding errors of small gradients into full updates.
    plain = [
        "optim.name=sgd",
        "optim.lr=0.3",
        "optim.momentum=0",
        "optim.weight_decay=0",
        "lora.rank=0",
        "lora.alpha=16",
    ]
    return [f"train.objective={name}", *fields, *lengths, *plain]


def train(base: str, folder: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train to the end, and return the lines of metrics; on every rank."""
    trainer = OnSamples(config_of(base, Path(folder), *overrides))
    try:
        assert trainer.fit() == 0
    finally:
        trainer.close()
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def train_each(base: str, runs: list[tuple[str, list[str]]]) -> list[list[dict[str, Any]]]:
    return [train(base, folder, overrides) for folder, overrides in runs]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("objectives") / "base")


# ---------------------------------------------------------------------------------------------------------------
# Formulas, written with the probabilities themselves


def loss_by_formula(
    name: str, logps: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor, good: torch.Tensor, kl: torch.Tensor
) -> torch.Tensor:
    """Return the loss of each sample, as the papers define it: with odds, probabilities and ratios."""
    beta, lengths = SETTINGS[name]["beta"], lengths.double()
    won, lost = slice(0, None, 2), slice(1, None, 2)
    ratio = (logps - reference).exp()  # of the probabilities under the model and the reference
    if name == "dpo":
        strength = ratio**beta  # Bradley-Terry: the chosen one wins with probability w / (w + l)
        return -(strength[won] / (strength[won] + strength[lost])).log()
    if name == "ipo":
        per_target = ratio ** (1 / lengths)
        return ((per_target[won] / per_target[lost]).log() - 1 / (2 * beta)) ** 2
    if name == "simpo":
        strength = logps.exp() ** (beta / lengths)
        handicap = math.exp(SETTINGS[name]["gamma"])
        return -(strength[won] / (strength[won] + handicap * strength[lost])).log()
    if name == "orpo":
        likelihood = logps.exp() ** (1 / lengths)
        odds = likelihood / (1 - likelihood)
        return -likelihood[won].log() - beta * (odds[won] / (odds[won] + odds[lost])).log()
    assert name == "kto"
    strength, base_strength = ratio[won] ** beta, kl.clamp(min=0).exp() ** beta
    is_better = strength / (strength + base_strength)
    weight = torch.where(good, SETTINGS[name]["good_weight"], SETTINGS[name]["bad_weight"])
    return weight * torch.where(good, 1 - is_better, is_better)


def objective_of(name: str) -> Objective:
    return find_objective(name)(**SETTINGS[name])


def scores_loss(name: str, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, by the probabilities that its scores stand for."""
    weights = scores.exp()
    if name == "reward":
        chosen, rejected = weights[0::2, 0], weights[1::2, 0]
        return -(chosen / (chosen + rejected)).log() + SETTINGS[name]["centering"] * (chosen * rejected).log() ** 2
    return -(weights[range(len(labels)), labels] / weights.sum(1)).log()


@pytest.mark.parametrize("name", OF_SCORES)
def test_losses_of_scores_follow_the_formulas(name: str) -> None:
    objective, labels = objective_of(name), torch.tensor([0, 2, 1, 1])
    shape = (4 * objective.rows, objective.outputs)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fields: dict[str, torch.Tensor] = {}
    rows = Rows(torch.empty(0), torch.ones(len(scores)), labels=labels, scores=scores)
    losses = objective(replace(rows, log=lambda field, values, over=None: fields.update({field: values})))
    torch.testing.assert_close(losses, scores_loss(name, scores, labels), rtol=1e-12, atol=0)
    assert set(fields) == set(objective.better)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in OF_SCORES])
def test_losses_of_samples_follow_the_formulas(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (12,), generator=draw)
    logps, reference = (-lengths * (0.2 + torch.rand(12, generator=draw, dtype=torch.float64)) for _ in range(2))
    labels, objective = torch.tensor([1, 0, 0, 1, 1, 0]), objective_of(name)
    rows = Rows(logps, lengths, reference=reference, labels=labels)
    kl = (logps - reference)[1::2].mean()
    if objective.has_statistic:
        rows = replace(rows, known=objective.statistic(rows).mean())
        torch.testing.assert_close(rows.known, kl)
    fields: dict[str, torch.Tensor] = {}
    losses = objective(replace(rows, log=lambda field, values, over=None: fields.update({field: values})))
    expected = loss_by_formula(name, logps, lengths, reference, labels > 0, kl)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert losses.shape == (6,)
    assert set(fields) == set(objective.better), "every metric says which direction is better"
    assert all(values.shape == (6,) and not values.requires_grad for values in fields.values())


@pytest.mark.slow
def test_losses_equal_trls() -> None:
    """On the same log-probabilities, pair by pair.  TRL's CPO has no reference, so DPO and IPO pass it the gains."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.orpo import ORPOTrainer

    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 24, (8,), generator=draw)
    logps, reference = (-lengths * (0.5 + 2 * torch.rand(8, generator=draw, dtype=torch.float64)) for _ in range(2))
    rows, (chosen, rejected) = Rows(logps, lengths, reference=reference), (logps[0::2], logps[1::2])
    device = {"accelerator": SimpleNamespace(device=torch.device("cpu")), "label_smoothing": 0.0, "alpha": 0.0}

    def cpo(kind: str, values: torch.Tensor, **fields: float) -> torch.Tensor:
        theirs = SimpleNamespace(loss_type=kind, **device, **fields)
        return CPOTrainer.cpo_loss(theirs, values[0::2], values[1::2])[0]  # type: ignore[no-any-return]

    gain = logps - reference
    of = {name: SETTINGS[name] for name in PREFERENCES}
    expected = {
        "dpo": cpo("sigmoid", gain, beta=of["dpo"]["beta"]),
        "ipo": cpo("ipo", gain / lengths, beta=of["ipo"]["beta"]),
        "simpo": cpo("simpo", logps / lengths, beta=of["simpo"]["beta"], simpo_gamma=of["simpo"]["gamma"]),
    }
    orpo = SimpleNamespace(beta=of["orpo"]["beta"], **device)
    odds, *_ = ORPOTrainer.odds_ratio_loss(orpo, chosen / lengths[0::2], rejected / lengths[1::2])
    expected["orpo"] = -chosen / lengths[0::2] - odds
    for name, theirs in expected.items():
        torch.testing.assert_close(objective_of(name)(rows), theirs.double(), rtol=1e-6, atol=0, msg=name)

    student, teacher = torch.randn(2, 12, 31, dtype=torch.float64, generator=draw)
    for beta, temperature in ((0.0, 2.0), (0.5, 1.0), (1.0, 2.0)):
        ours = find_objective("distill")(teacher="unused", beta=beta, temperature=temperature)
        found = ours.divergence(student.log_softmax(-1), teacher.log_softmax(-1)).sum()
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=temperature, reduction="sum")
        torch.testing.assert_close(found, theirs, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------
# Training


class Scores(nn.Linear):
    def forward(self, hidden: torch.Tensor, targets: None) -> torch.Tensor:
        return super().forward(hidden)


def plain_loop(base: Path, name: str) -> list[float]:
    """Train by the formula in one process on full batches; return the loss of each step, and of the evaluation."""
    config = config_of(base, Path("unused"), *settings_of(name))
    trainer = OnSamples(replace(config, run=replace(config.run, dir="/nonexistent")))
    batches, lrs = iter(trainer.loader), [trainer.schedule.lr(step) for step in range(1, NUM_STEPS + 1)]
    per_step = trainer.num_micro_batches
    weights = {name: local(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    trainer.close()
    model, reference = load_weights(base).requires_grad_(), load_weights(base)
    if name in OF_SCORES:
        model.head.output = Scores(SOURCE.dim, config.objective.outputs, bias=False)
        model.head.output.weight.data = weights["head.output.score"]
        assert weights["head.output.score"].std().item() == pytest.approx(0.02, rel=0.2)
    optimizer = torch.optim.SGD(model.parameters())

    def loss_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name in OF_SCORES:
            logits, counts = model(batch["tokens"]), batch["targets"] != IGNORE
            assert counts.sum(1).tolist() == [1] * len(counts)
            return scores_loss(name, logits[counts].double(), batch.get("labels", torch.zeros(()))).mean()
        logps, fixed = (log_of(each, batch) for each in (model, reference))
        kl = (logps - fixed)[1::2].mean().detach()
        good = batch.get("labels", torch.zeros(())) > 0
        lengths = (batch["targets"] >= 0).sum(1)
        return loss_by_formula(name, logps, lengths, fixed, good, kl).mean()

    losses = []
    for lr in lrs:
        micro = [next(batches) for _ in range(per_step)]
        loss = loss_of({entry: torch.cat([batch[entry] for batch in micro]) for entry in micro[0]})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    source = source_of(config.objective)
    held_out = {entry: torch.from_numpy(rows) for entry, rows in source.batch(np.arange(len(source))).items()}
    return [*losses, loss_of(held_out).item()]


def log_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return log_probabilities(model(batch["tokens"]).double(), batch["targets"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["two", *(pytest.param(mesh, marks=pytest.mark.campaign) for mesh in MESHES if mesh != "two")]
)
def test_objectives_train_the_same_on_any_mesh(mesh: str, base: Path, tmp_path: Path) -> None:
    num_ranks, overrides = MESHES[mesh]
    names = list(SETTINGS)
    runs = [(str(tmp_path / name), merged(settings_of(name), overrides)) for name in names]
    found = run_ranks(num_ranks, train_each, str(base), runs)[0]
    for name, lines in zip(names, found, strict=True):
        expected = plain_loop(base, name)
        losses = [line["loss"] for line in lines if line["kind"] in ("train", "eval")]
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-9, msg=f"{name}: {losses} {expected}")
        assert losses[-2] < losses[0], f"{name} learns"
