"""Balance of experts: biases, losses and loads follow their formulas, and are neither lost nor made up.

That they are the same on any mesh is in `tests/exactness/table.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import command
from tests.helpers.moe import moe
from trainer import Trainer, UserError, load_weights
from trainer.config.parallel import MeshShape
from trainer.config.rules import check_config
from trainer.experts import Balance, Load, TopKExperts, expert_load
from trainer.loss import IGNORE
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

BIAS = ["model.balance_rate=0.01"]


def biases_of(model: torch.nn.Module) -> list[list[float]]:
    return [m.bias.tolist() for m in model.modules() if isinstance(m, TopKExperts) and m.bias is not None]


def test_balance_loss_is_smallest_for_uniform_experts() -> None:
    """It is then the coefficient times the number of chosen experts, for each token."""
    balance = Balance(3, num_experts=4, num_chosen=2, loss=0.5)

    def loss_of(choices: list[int], probs: list[float]) -> float:
        load = Load(torch.tensor([choices]), torch.tensor([probs]), None)
        return float(balance([load] * 3))

    even = loss_of([5, 5, 5, 5], [2.5] * 4)
    assert even == pytest.approx(0.5 * 2 * 10)
    assert loss_of([10, 10, 0, 0], [5.0, 5.0, 0.0, 0.0]) > even


def test_losses_equal_a_loop() -> None:
    """The losses within sequences and of the logits, over the tokens that count, one token at a time."""
    generator = torch.Generator().manual_seed(0)
    num_layers, num_experts, num_chosen = 2, 5, 2
    is_target_BT = torch.rand(3, 7, generator=generator) < 0.7
    is_target_BT[2] = False  # a sequence without targets
    expected, loads = 0.0, []
    for _ in range(num_layers):
        logits_SE = torch.randn(21, num_experts, generator=generator)
        probs_SE = logits_SE.softmax(-1)
        _, chosen_SA = TopKExperts(num_experts, num_chosen, has_bias=False)(probs_SE)
        loads.append(expert_load(chosen_SA, is_target_BT, num_experts, probs_SE, logits_SE))
        for row in range(3):
            tokens = [7 * row + time for time in range(7) if is_target_BT[row, time]]
            for token in tokens:
                expected += 0.25 * float(logits_SE[token].exp().sum().log() ** 2)
            for expert in range(num_experts):
                num_chosen_here = sum(expert in chosen_SA[token].tolist() for token in tokens)
                share = num_chosen_here * num_experts / (num_chosen * len(tokens)) if tokens else 0.0
                expected += 0.5 * share * sum(float(probs_SE[token, expert]) for token in tokens)
    found = Balance(num_layers, num_experts, num_chosen, sequence_loss=0.5, z_loss=0.25)(loads)
    assert float(found) == pytest.approx(expected, rel=1e-5)


class Watched(Trainer):
    """Moves biases of its own by what the layers choose in training; step 3 is skipped."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.choices = [m for m in self.model.modules() if isinstance(m, TopKExperts)]
        self.expected = [[0] * 4 for _ in self.choices]
        self._seen: list[list[int]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        counts = (batch["targets"] != IGNORE).flatten().tolist()

        def note(number: int) -> Callable[..., None]:
            def hook(choice: Any, args: Any, output: Any) -> None:
                for chosen, is_counted in zip(output[1].tolist(), counts, strict=True):
                    for expert in chosen if is_counted else ():
                        self._seen[number][expert] += 1

            return hook

        if not self._seen:
            self._seen = [[0] * 4 for _ in self.choices]
        handles = [choice.register_forward_hook(note(number)) for number, choice in enumerate(self.choices)]
        loss = super().loss(batch)
        for handle in handles:
            handle.remove()
        return loss * float("nan") if self.state.step == 2 and self.model.training else loss

    def train_step(self, micro_batches: Any) -> Any:
        self._seen = []
        update = super().train_step(micro_batches)
        for numbers, seen in zip(self.expected, self._seen, strict=True):
            for expert, number in enumerate(seen if self.state.step != 2 else ()):
                mean = sum(seen) / len(seen)
                numbers[expert] += (number < mean) - (number > mean)
        self.evaluate()
        return update


@pytest.mark.slow
def test_biases_follow_the_choices_that_count(tmp_path: Path) -> None:
    """Not those of evaluations, of skipped steps, or for tokens without a target."""
    text = ["data.source=stdlib", "data.documents=apart", "eval.every=100", "eval.steps=1", "train.steps=6"]
    trainer = Watched(moe(tmp_path, *BIAS, *text))
    records = list(itertools.islice(trainer.steps(), 6))
    trainer.close()
    assert records[-1].skipped == 1
    for found, expected in zip(biases_of(trainer.model), trainer.expected, strict=True):
        assert any(expected)
        assert found == pytest.approx([0.01 * number for number in expected], abs=1e-7)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    choice = TopKExperts(3, 1, has_bias=True)
    scores = torch.tensor([[0.5, 0.3, 0.2]])
    assert choice(scores)[1].tolist() == [[0]]
    assert choice.bias is not None
    choice.bias.copy_(torch.tensor([0.0, 0.0, 0.4]))
    weights, chosen = choice(scores)
    assert chosen.tolist() == [[2]]
    assert weights.tolist() == [[pytest.approx(0.2)]]


@pytest.mark.campaign
def test_exact_shares_are_planned_as_a_forward_pass_more() -> None:
    """With full recomputation that makes five passes of four; the shares of the last step, or a bias, cost nothing."""
    large = [
        *("model.dim=2048", "model.num_layers=8", "model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=128"),
        *("model.expert_dim=768", "model.num_experts=64", "model.num_chosen=4", "fsdp.param_dtype=bfloat16"),
        *("data.seq_len=4096", "train.activation_checkpoint=full", "train.global_batch_size=64"),
    ]
    choices = [["model.balance=0"], ["model.balance=0.1", "model.balance_shares=exact"]]
    choices += [["model.balance=0.1", "model.balance_shares=last"], ["model.balance=0", *BIAS]]
    plans = [make_plan(moe("none", *large, *own), MeshShape(1, 16), find_machine("h100")) for own in choices]
    none, exact, last, bias = (plan.time.compute_s for plan in plans)
    assert exact == pytest.approx(1.25 * none, rel=0.03)
    assert last == pytest.approx(none, rel=0.03)
    assert bias == pytest.approx(none, rel=0.01)


@pytest.mark.slow
def test_bias_is_not_lost_silently(tmp_path: Path) -> None:
    """Hugging Face's qwen3_moe has none: an export is refused. It is used everywhere else."""
    trainer = Trainer(moe(tmp_path / "run", *BIAS))
    assert trainer.fit() == 0
    refused = command("trainer.export", tmp_path / "run", tmp_path / "out", code=2)
    assert "layers.0.moe.choice.bias" in refused.err
    loaded = biases_of(load_weights(tmp_path / "run"))
    assert loaded == biases_of(trainer.model)
    assert any(value for layer in loaded for value in layer)


def test_adapters_cannot_change_biases() -> None:
    with pytest.raises(UserError, match=r"^model\.balance_rate=0\.01: "):
        check_config(moe("none", *BIAS, "lora.rank=4"), 1, 1)
