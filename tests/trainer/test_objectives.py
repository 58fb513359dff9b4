"""Objectives: their losses follow the formulas of their papers, on any mesh and for any micro-batch size."""

from __future__ import annotations

import json
import math
from collections import defaultdict
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
from trainer.objective import Objective, ObjectiveInputs, find_objective
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
    """Row 2i is a labelled answer of sample i, and row 2i + 1 an answer to another prompt."""

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
    shape = (4 * objective.rows_per_sample, objective.outputs)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fields: dict[str, torch.Tensor] = {}
    inputs = ObjectiveInputs(torch.empty(0), torch.ones(len(scores)), labels=labels, scores=scores)
    losses = objective(replace(inputs, log=lambda field, values, over=None: fields.update({field: values})))
    torch.testing.assert_close(losses, scores_loss(name, scores, labels), rtol=1e-12, atol=0)
    assert set(fields) == set(objective.better)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in OF_SCORES])
def test_losses_of_samples_follow_the_formulas(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (12,), generator=draw)
    logps, reference = (-lengths * (0.2 + torch.rand(12, generator=draw, dtype=torch.float64)) for _ in range(2))
    labels, objective = torch.tensor([1, 0, 0, 1, 1, 0]), objective_of(name)
    inputs = ObjectiveInputs(logps, lengths, reference=reference, labels=labels)
    kl = (logps - reference)[1::2].mean()
    if objective.has_statistic:
        inputs = replace(inputs, mean_statistic=objective.statistic(inputs).mean())
        torch.testing.assert_close(inputs.mean_statistic, kl)
    fields: dict[str, torch.Tensor] = {}
    losses = objective(replace(inputs, log=lambda field, values, over=None: fields.update({field: values})))
    expected = loss_by_formula(name, logps, lengths, reference, labels > 0, kl)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert losses.shape == (6,)
    assert set(fields) == set(objective.better), "every metric says which direction is better"
    assert all(values.shape == (6,) and not values.requires_grad for values in fields.values())


class Bigrams(nn.Module):
    """Gives fixed logits to the tokens that follow a token, in the fields that TRL's trainers read of a model."""

    is_gradient_checkpointing = False

    def __init__(self, logits_VV: torch.Tensor) -> None:
        super().__init__()
        self.logits_VV = nn.Parameter(logits_VV)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> SimpleNamespace:
        logits, targets = self.logits_VV[input_ids[:, :-1]], labels[:, 1:]
        logps, counts = logits.log_softmax(-1), targets != IGNORE
        chosen = logps.gather(2, targets.where(counts, 0).unsqueeze(2)).squeeze(2)
        return SimpleNamespace(
            log_probs=chosen.where(counts, 0.0),
            entropy=-(logps.exp() * logps).sum(-1),
            mean_logits=logits.mean(-1),
            is_top1=logits.argmax(-1) == targets,
        )


class Scorer(nn.Module):
    """Gives each sequence the score that is passed in place of its tokens."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=input_ids)


def trl_trainer(kind: type, model: nn.Module, **fields: Any) -> Any:
    """Return one of TRL's trainers with only what its `compute_loss` reads: to build one takes the files of a model."""
    trainer: Any = object.__new__(kind)
    alone = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
    )
    common = {"aux_loss_enabled": False, "precompute_ref_logps": False, "_total_train_tokens": 0, "_tp_size": 1}
    metrics = {mode: defaultdict[str, list[float]](list) for mode in ("train", "eval")}
    vars(trainer).update(common, model=model, accelerator=alone, _metrics=metrics, **fields)
    return trainer


@pytest.mark.slow
def test_losses_equal_trls() -> None:
    """On the same logits, by the trainers of TRL themselves: each computes a batch, or for CPO and ORPO a pair."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.reward_trainer import RewardTrainer

    draw = torch.Generator().manual_seed(0)
    reference, model = (Bigrams(torch.randn(31, 31, generator=draw, dtype=torch.float64)) for _ in range(2))
    num_rows, length = 12, 24
    tokens = torch.randint(0, 31, (num_rows, length), generator=draw)
    first = torch.randint(1, length - 1, (num_rows, 1), generator=draw)
    last = first + 1 + (torch.rand(num_rows, 1, generator=draw) * (length - 1 - first)).long()
    completion = (torch.arange(length) >= first) & (torch.arange(length) <= last)
    logps, fixed = (each(tokens, tokens.where(completion, IGNORE)).log_probs.sum(1) for each in (model, reference))
    lengths, labels = completion.sum(1), torch.tensor([1, 0, 0, 1, 1, 0])
    inputs = ObjectiveInputs(logps, lengths, reference=fixed, labels=labels)
    settings = {name: SimpleNamespace(**fields) for name, fields in SETTINGS.items()}
    checkpointing = SimpleNamespace(gradient_checkpointing_kwargs=None)

    def batch_of(chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "input_ids": tokens[chosen],
            "attention_mask": torch.ones_like(tokens[chosen]),
            "completion_mask": completion[chosen].long(),
        }

    expected: dict[str, torch.Tensor] = {}
    of_pairs = {"f_divergence_type": "reverse_kl", "loss_weights": [1.0], "ld_alpha": None, "use_weighting": False}
    for name, kind in (("dpo", "sigmoid"), ("ipo", "ipo")):
        fields = {**of_pairs, "loss_types": [kind], "beta": settings[name].beta}
        theirs = trl_trainer(DPOTrainer, model, ref_model=reference, args=checkpointing, **fields)
        halves = batch_of(torch.cat([torch.arange(0, num_rows, 2), torch.arange(1, num_rows, 2)]))
        expected[name] = theirs.compute_loss(model, halves)

    weights = {
        "desirable_weight": settings["kto"].good_weight,
        "undesirable_weight": settings["kto"].bad_weight,
    }
    fields = {"calculate_KL": True, "loss_type": "kto", "beta": settings["kto"].beta, **weights}
    theirs = trl_trainer(KTOTrainer, model, ref_model=reference, args=checkpointing, **fields)
    others = {f"KL_{key}": value for key, value in batch_of(torch.arange(1, num_rows, 2)).items()}
    expected["kto"] = theirs.compute_loss(model, {**batch_of(torch.arange(0, num_rows, 2)), **others, "label": labels})
    kl = objective_of("kto").statistic(inputs).mean()
    assert kl > 0, "the term of the divergence is not cut off at 0"
    assert theirs._metrics["train"]["kl"] == [pytest.approx(kl.item(), rel=1e-6)]

    scores = torch.randn(num_rows, 1, generator=draw, dtype=torch.float64)
    coefficient = SimpleNamespace(center_rewards_coefficient=settings["reward"].centering)
    of_scores = {"input_ids": torch.cat([scores[0::2], scores[1::2]]), "attention_mask": torch.ones(1)}
    expected["reward"] = trl_trainer(RewardTrainer, Scorer(), args=coefficient).compute_loss(Scorer(), of_scores)

    alone = {"accelerator": SimpleNamespace(device=torch.device("cpu")), "label_smoothing": 0.0, "alpha": 0.0}
    means, beta, gamma = logps / lengths, settings["simpo"].beta, settings["simpo"].gamma
    cpo = SimpleNamespace(loss_type="simpo", beta=beta, simpo_gamma=gamma, **alone)
    expected["simpo"] = CPOTrainer.cpo_loss(cpo, means[0::2], means[1::2])[0].mean()
    orpo = SimpleNamespace(beta=settings["orpo"].beta, **alone)
    odds, *_ = ORPOTrainer.odds_ratio_loss(orpo, means[0::2], means[1::2])
    expected["orpo"] = (-means[0::2] - odds).mean()

    for name, value in expected.items():
        seen = replace(inputs, scores=scores) if name == "reward" else replace(inputs, mean_statistic=kl)
        found = objective_of(name)(seen).mean()
        print(f"{name}: {found.item():.9f}, TRL {value.item():.9f}, {abs(found.item() / value.item() - 1):.1e} apart")
        torch.testing.assert_close(found, value.double(), rtol=1e-6, atol=0, msg=name)

    student, teacher = torch.randn(2, 12, 31, dtype=torch.float64, generator=draw)
    for beta, temperature in ((0.0, 2.0), (0.5, 1.0), (1.0, 2.0)):
        ours = find_objective("distill")(teacher="unused", beta=beta, temperature=temperature)
        found = ours.divergence(student.log_softmax(-1), teacher.log_softmax(-1)).sum()
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=temperature, reduction="sum")
        print(f"distill, beta {beta}: {found.item():.9f}, TRL {theirs.item():.9f}")
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


DIFFERENT = ["ipo", "orpo", "kto", "reward", "classify"]
"""With a reference and without, with a statistic, of pairs and of labels: the others are computed like one of these."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "names"),
    [("two", DIFFERENT), *(pytest.param(mesh, list(SETTINGS), marks=pytest.mark.campaign) for mesh in MESHES)],
)
def test_objectives_train_the_same_on_any_mesh(mesh: str, names: list[str], base: Path, tmp_path: Path) -> None:
    num_ranks, overrides = MESHES[mesh]
    runs = [(str(tmp_path / name), merged(settings_of(name), overrides)) for name in names]
    found = run_ranks(num_ranks, train_each, str(base), runs)[0]
    for name, lines in zip(names, found, strict=True):
        expected = plain_loop(base, name)
        losses = [line["loss"] for line in lines if line["kind"] in ("train", "eval")]
        apart = max(abs(loss / value - 1) for loss, value in zip(losses, expected, strict=True))
        print(f"{name}, {mesh}: losses {apart:.1e} apart from the plain loop")
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-9, msg=f"{name}: {losses} {expected}")
        assert losses[-2] < losses[0], f"{name} learns"
