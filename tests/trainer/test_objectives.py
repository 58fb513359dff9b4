"""Objectives: their losses follow the formulas of their papers, for any micro-batch size, with adapters or without."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

pytest.importorskip("transformers", reason="the base model is one of transformers")

from tests.helpers import hf_models
from tests.helpers.objectives import PLAIN_SGD, config_of, global_batches, log_probabilities, source_of, trainer_on
from tests.helpers.tiny import lines
from trainer import load_weights
from trainer.data.source import IGNORE
from trainer.model.lora import parse_adapter
from trainer.model.parameters import local
from trainer.objective import Objective, ObjectiveInputs, find_objective

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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.folder_of(tmp_path_factory.mktemp("objectives") / "base", "llama")


class Scores(nn.Linear):
    def forward(self, hidden: torch.Tensor, targets: None) -> torch.Tensor:
        return super().forward(hidden)


class Plain:
    """A model, and its reference, that a plain loop trains by the formula; adapters are added to the weights."""

    def __init__(self, base: Path, name: str, initial: Mapping[str, torch.Tensor]) -> None:
        self.name, self.model, self.reference = name, load_weights(base).requires_grad_(), load_weights(base)
        if name in OF_SCORES:
            head = initial["head.output.score"]
            self.model.head.output = Scores(head.shape[1], head.shape[0], bias=False)
            self.model.head.output.weight.data = head
        self.adapters = {key: value.requires_grad_() for key, value in initial.items() if parse_adapter(key)}
        own = list(self.adapters.values()) or list(self.model.parameters())
        self.optimizer = torch.optim.SGD(own)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        for layer in {part[0] for name in self.adapters if (part := parse_adapter(name))}:
            up, down = (self.adapters[f"{layer}.lora_{factor}.default.weight"] for factor in "BA")
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + 2.0 * up @ down
        return functional_call(self.model, weights, (tokens,)) if self.adapters else self.model(tokens)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits, targets = self.logits(batch["tokens"]).double(), batch["targets"]
        labels = batch.get("labels", torch.zeros(()))
        if self.name in OF_SCORES:
            assert (targets != IGNORE).sum(1).tolist() == [1] * len(targets)
            return scores_loss(self.name, logits[targets != IGNORE], labels).mean()
        logps = log_probabilities(logits, targets)
        fixed = log_probabilities(self.reference(batch["tokens"]).double(), targets)
        kl = (logps - fixed)[1::2].mean().detach()
        return loss_by_formula(self.name, logps, (targets != IGNORE).sum(1), fixed, labels > 0, kl).mean()

    def step(self, lr: float, batch: Mapping[str, torch.Tensor]) -> float:
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


WITHOUT = ["lora.rank=0"]
ADAPTERS = ["lora.rank=4", "lora.alpha=8"]
CASES = [("dpo", ADAPTERS), *((name, WITHOUT) for name in ("dpo", "ipo", "orpo", "kto", "reward", "classify"))]
"""With a reference and without, with a statistic, of pairs and of labels: simpo is computed like orpo."""


@pytest.mark.parametrize(("name", "lora"), CASES, ids=[f"{name}, {lora[0]}" for name, lora in CASES])
def test_training_follows_the_formula(name: str, lora: list[str], base: Path, tmp_path: Path) -> None:
    """With two micro-batches, whose statistics differ from that of the global batch.

    Of the ten samples that are evaluated, three at a time, the last batch lacks two: its padding must not count.
    """
    fields = [f"objective.{key}={value}" for key, value in SETTINGS[name].items()]
    own = [f"train.objective={name}", *fields, *PLAIN_SGD, *lora, "eval.every=3", "eval.steps=0"]
    config = config_of(base, tmp_path / "run", *own, "train.global_batch_size=6", "train.micro_batch_size=3")
    source = source_of(config.objective)
    trainer = trainer_on(source, config)
    initial = {key: local(p.detach()).clone() for key, p in trainer.model.named_parameters()}
    plain = Plain(base, name, initial)
    expected = [plain.step(lr, batch) for lr, batch in global_batches(trainer)]
    trainer.close()
    held_out = {entry: torch.from_numpy(rows) for entry, rows in source.batch(np.arange(len(source))).items()}
    expected.append(plain.loss(held_out).item())
    trainer = trainer_on(source, config)
    assert trainer.fit() == 0
    trainer.close()
    losses = [line["loss"] for line in lines(tmp_path / "run") if line["kind"] in ("train", "eval")]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-9)
    assert losses[-2] < losses[0], f"{name} learns"
