"""Balance of experts: biases, losses and loads are the same on any mesh, and follow their formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.experts.test_expert_parallel import EXCHANGE, FOUR, GATHER, TWO, assert_planned, config_of, measure, plan_of
from tests.helpers.ranks import run_ranks
from tests.trainer.test_exactness import relative
from trainer import Trainer, load_weights
from trainer.config import MeshShape
from trainer.config.rules import check_config
from trainer.errors import UserError
from trainer.experts import Balance, ExpertBalance, Load, TopKExperts, expert_load, find_balance
from trainer.export import command_line as main
from trainer.loss import IGNORE
from trainer.plan.experts import advice_on_balance
from trainer.plan.kernels import work_of
from trainer.plan.machine import find_machine
from trainer.plan.plan import Plan, make_plan, without_data
from trainer.plan.step import Step, Watcher

CAMPAIGN = pytest.mark.campaign
BIAS = ["model.balance_rate=0.01"]
LAST = ["model.balance=0.1", "model.balance_shares=last"]
EXACT = ["model.balance=0.1", "model.balance_shares=exact"]
WITHIN = ["model.sequence_balance=0.1", "model.z_loss=0.01"]
ALL = [*BIAS, *LAST, *WITHIN]
STEPS = 8


def biases_of(trainer: Trainer) -> list[list[float]]:
    return [m.bias.tolist() for m in trainer.model.modules() if isinstance(m, TopKExperts) and m.bias is not None]


def result_of(trainer: Trainer, num_steps: int) -> dict[str, Any]:
    records = list(itertools.islice(trainer.steps(), num_steps))
    fields = ("loss", "grad_norm", "busiest_expert", "dead_experts")
    return {field: [record[field] for record in records] for field in fields} | {"biases": biases_of(trainer)}


def train_each(folder: Path, runs: list[list[str]], num_steps: int = STEPS, control: str = "") -> list[dict[str, Any]]:
    """Train with each list of overrides, one after another in one process group.  `control`: a deliberate mistake."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    with CONTROLS[control]():
        for number, overrides in enumerate(runs):
            trainer = Trainer(config_of(folder / str(number), *overrides))
            found.append(result_of(trainer, num_steps))
            trainer.close()
    return found


@contextmanager
def counted_in_blocks() -> Iterator[None]:
    """Each layer adds up its own choices whenever it runs.  All tokens of the data here count."""
    forward, after_step = TopKExperts.forward, ExpertBalance.after_step
    seen: dict[int, torch.Tensor] = {}

    def counting(self: TopKExperts, scores_SE: torch.Tensor) -> Any:
        scores_SA, chosen_SA = forward(self, scores_SE)
        ones_SE = torch.zeros_like(scores_SE, dtype=torch.int64).scatter(1, chosen_SA, 1)
        seen[id(self)] = seen.get(id(self), 0) + ones_SE.sum(0)
        return scores_SA, chosen_SA

    def after(self: Any, is_finite: torch.Tensor | None = None) -> None:
        choices = [module for module in self.model.modules() if isinstance(module, TopKExperts)]
        find_balance(self.model).counted_LE = torch.stack([seen.pop(id(choice)) for choice in choices])
        after_step(self, is_finite)

    with mock.patch.object(TopKExperts, "forward", counting), mock.patch.object(ExpertBalance, "after_step", after):
        yield


@contextmanager
def last_micro_batch_alone() -> Iterator[None]:
    forward = Balance.forward

    def forgetting(self: Balance, loads: list[Load]) -> torch.Tensor:
        self.counted_LE = None
        return forward(self, loads)

    with mock.patch.object(Balance, "forward", forgetting):
        yield


@contextmanager
def no_mistake() -> Iterator[None]:
    yield


CONTROLS: dict[str, Callable[[], Any]] = {
    "": no_mistake,
    "counted in blocks": counted_in_blocks,
    "last micro-batch alone": last_micro_batch_alone,
}


# ---------------------------------------------------------------------------------------------------------------
# On any mesh


ON_ONE = [["train.micro_batch_size=8"], ["train.activation_checkpoint=full"], ["train.activation_checkpoint=2"]]
ON_FOUR = [
    [TWO, EXCHANGE, "mesh.replicate=2", "train.activation_checkpoint=full"],
    [FOUR, GATHER, "train.micro_batch_size=2"],
    [TWO, GATHER, "mesh.context=2", "fsdp.accumulate=sharded"],
]
MORE_ON_FOUR = [
    *([], ["mesh.replicate=2"], ["mesh.shard=1", "mesh.replicate=4"], ["mesh.context=4", "mesh.context_method=gather"]),
    *([TWO, EXCHANGE], [TWO, GATHER, "train.activation_checkpoint=full"], [FOUR, EXCHANGE, "mesh.context=2"]),
    *(["mesh.context=2", "train.activation_checkpoint=full"], ["mesh.context=2", "mesh.replicate=2"]),
    *(["fsdp.reshard_after_forward=never"], ["model.num_experts=2", "model.num_chosen=2"]),
]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], run: object) -> None:
    print(run, relative(ours["loss"], theirs["loss"]), relative(ours["grad_norm"], theirs["grad_norm"]))
    assert relative(ours["loss"], theirs["loss"]) < 1e-6, run
    assert relative(ours["grad_norm"], theirs["grad_norm"]) < 1e-5, run
    assert ours["biases"] == theirs["biases"], run
    assert ours["busiest_expert"] == theirs["busiest_expert"], run
    assert ours["dead_experts"] == theirs["dead_experts"], run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "balance", "num_steps"),
    [
        (ON_FOUR, ALL, 4),
        pytest.param([*ON_FOUR, *MORE_ON_FOUR], BIAS, 20, marks=CAMPAIGN),
        pytest.param([*ON_FOUR, *MORE_ON_FOUR], [*LAST, *WITHIN], 20, marks=CAMPAIGN),
        pytest.param([*ON_FOUR, *MORE_ON_FOUR], [*EXACT, *WITHIN], 20, marks=CAMPAIGN),
    ],
    ids=["everyday", "bias", "last", "exact"],
)
def test_balance_is_the_same_on_any_mesh(
    runs: list[list[str]], balance: list[str], num_steps: int, tmp_path: Path
) -> None:
    """Losses within 1e-6, biases and loads to the bit."""
    of_model = [[*balance, *(item for item in run if item.startswith("model."))] for run in runs]
    different = [list(run) for run in dict.fromkeys(map(tuple, of_model))]
    on_one = [*different, *([*balance, *run] for run in ON_ONE)]
    alone = run_ranks(1, train_each, tmp_path / "one", on_one, num_steps, timeout_s=900)[0]
    for run, ours in zip(ON_ONE, alone[len(different) :], strict=True):
        assert_same(ours, alone[different.index(balance)], run)
    for found in run_ranks(4, train_each, tmp_path, [[*balance, *run] for run in runs], num_steps, timeout_s=900)[::3]:
        for run, model, ours in zip(runs, of_model, found, strict=True):
            assert_same(ours, alone[different.index(model)], run)


@pytest.mark.slow
def test_controls_fail(tmp_path: Path) -> None:
    """Choices that blocks count themselves count twice under recomputation; those of one micro-batch are too few."""
    recomputed = [LAST, [*LAST, "train.activation_checkpoint=2"]]
    once, twice = run_ranks(1, train_each, tmp_path, recomputed, 4, "counted in blocks")[0]
    assert relative(once["loss"], twice["loss"]) > 1e-6
    accumulated = [BIAS, [*BIAS, "train.micro_batch_size=8"]]
    several, single = run_ranks(1, train_each, tmp_path, accumulated, 3, "last micro-batch alone")[0]
    assert several["biases"] != single["biases"]


def resume_each(folder: Path, checkpoint: str, runs: list[list[str]]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, overrides in enumerate(runs):
        trainer = Trainer(config_of(folder / str(number), *ALL, *overrides, f"checkpoint.resume={checkpoint}"))
        trainer.load_checkpoint()
        found.append(result_of(trainer, 6))
        trainer.close()
    return found


def save_one(folder: Path, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """Train four steps, save, and train six more."""
    trainer = Trainer(config_of(folder, *ALL, *overrides))
    list(itertools.islice(trainer.steps(), 4))
    path = str(trainer.save_checkpoint(wait=True))
    result = result_of(trainer, 6)
    trainer.close()
    return path, result


@pytest.mark.slow
def test_a_resumed_run_keeps_biases_and_shares(tmp_path: Path) -> None:
    path, expected = run_ranks(1, save_one, tmp_path / "one", [])[0]
    runs = [[TWO, EXCHANGE, "mesh.replicate=2"], ["mesh.context=2"]]
    for run, ours in zip(runs, run_ranks(4, resume_each, tmp_path / "four", path, runs)[0], strict=True):
        assert_same(ours, expected, run)
    path, expected = run_ranks(4, save_one, tmp_path / "from", [TWO, GATHER])[0]
    assert_same(run_ranks(1, resume_each, tmp_path / "to", path, [[]])[0][0], expected, "to one rank")


# ---------------------------------------------------------------------------------------------------------------
# By their formulas


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
    overrides = ["data.source=stdlib", "data.pack=false", "model.vocab_size=257", "eval.every=100", "eval.steps=1"]
    trainer = Watched(config_of(tmp_path, *BIAS, *overrides))
    records = list(itertools.islice(trainer.steps(), 6))
    trainer.close()
    assert records[-1].skipped == 1
    for found, expected in zip(biases_of(trainer), trainer.expected, strict=True):
        assert any(expected)
        assert found == pytest.approx([0.01 * number for number in expected], abs=1e-7)


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    choice = TopKExperts(3, 1, has_bias=True)
    scores = torch.tensor([[0.5, 0.3, 0.2]])
    assert choice(scores)[1].tolist() == [[0]]
    assert choice.bias is not None
    choice.bias.copy_(torch.tensor([0.0, 0.0, 0.4]))
    weights, chosen = choice(scores)
    assert chosen.tolist() == [[2]]
    assert weights.tolist() == [[pytest.approx(0.2)]]


@pytest.mark.campaign
def test_the_bias_evens_out_the_load(tmp_path: Path) -> None:
    """With data in which some tokens are frequent, the busiest expert has less to do with a bias than without."""
    skewed = ["data.source=stdlib", "model.vocab_size=257", "model.init_std=0.2"]
    runs = [skewed, [*skewed, "model.balance_rate=0.02"]]
    without, with_bias = run_ranks(1, train_each, tmp_path, runs, 20)[0]
    assert with_bias["busiest_expert"][-1] < 0.8 * without["busiest_expert"][-1]


# ---------------------------------------------------------------------------------------------------------------
# Plans


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.total += work_of(func, args, kwargs or {}, result).flops
        return result


class PlannedFlops(Watcher):
    def __init__(self) -> None:
        self.total, self._repeats = 0, 1

    def begin(self, repeats: int) -> None:
        self._repeats = repeats

    def compute(self, segment: Any, unit: int, is_backward: bool, accumulates: bool) -> None:
        self.total += self._repeats * sum(work.flops * count for work, count in segment.work)


def measure_each(folder: Path, runs: list[list[str]]) -> list[tuple[Any, int]]:
    """Return, for each run, the measurements of its third step, and its FLOPs."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, overrides in enumerate(runs):
        measured = measure(folder / str(number), overrides)
        trainer, flops = Trainer(config_of(folder / f"{number} again", *overrides)), Flops()
        with flops:
            trainer.train_step(list(itertools.islice(trainer.loader, trainer.num_micro_batches)))
        found.append((measured, flops.total))
        trainer.close()
    return found


RECOMPUTED = ["train.activation_checkpoint=full", "mesh.replicate=2"]
PLANNED = [[*EXACT, *RECOMPUTED], [*ALL, "mesh.context=2", "mesh.context_method=gather"]]
MORE_PLANNED = [
    *(EXACT, [*EXACT, "train.micro_batch_size=2"], [*EXACT, "fsdp.reshard_after_forward=never"]),
    *([*EXACT, TWO, EXCHANGE], [*EXACT, FOUR, EXCHANGE, "fsdp.accumulate=sharded"]),
    *([*EXACT, "fsdp.reshard_after_forward=always"], [*EXACT, "fsdp.prefetch_forward=1"], BIAS),
    [*EXACT, "mesh.context=2", "mesh.context_method=heads"],
]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [PLANNED, pytest.param(MORE_PLANNED, marks=CAMPAIGN)], ids=["everyday", "more"])
def test_a_run_does_what_was_planned(runs: list[list[str]], tmp_path: Path) -> None:
    """The forward passes that only count are in the plan: their collectives exactly, their FLOPs within 1 %."""
    ranks = run_ranks(4, measure_each, tmp_path, runs, timeout_s=900)
    for number, run in enumerate(runs):
        plan, planned = plan_of(tmp_path, run), PlannedFlops()
        assert_planned([rank[number][0] for rank in ranks], plan)
        Step(plan.trace, plan.layout, plan.num_micro_batches, planned).run()
        flops = sum(rank[number][1] for rank in ranks) / len(ranks)
        print(run, planned.total / flops)
        assert planned.total == pytest.approx(flops, rel=0.01), run


LARGE = [
    *("model.dim=2048", "model.num_layers=8", "model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=128"),
    *("model.expert_dim=768", "model.num_experts=64", "model.num_chosen=4", "fsdp.param_dtype=bfloat16"),
    *("data.seq_len=4096", "train.activation_checkpoint=full", "train.global_batch_size=64"),
]


def test_the_planner_knows_what_balance_costs() -> None:
    """With full recomputation a forward pass more makes five passes of four; a bias or the last shares cost nothing."""

    def planned(*overrides: str) -> Plan:
        return make_plan(without_data(config_of("x", *LARGE, *overrides)), MeshShape(1, 16), find_machine("h100"))

    none, exact, last, bias = (planned(*balance) for balance in ([], EXACT, LAST, BIAS))
    assert exact.num_micro_batches == 4
    assert exact.time.compute_s == pytest.approx(1.25 * none.time.compute_s, rel=0.03)
    assert last.time.total_s == pytest.approx(none.time.total_s, rel=0.03)
    assert bias.time.total_s == pytest.approx(none.time.total_s, rel=0.01)
    assert exact.memory.peak.total == pytest.approx(last.memory.peak.total, rel=0.01)
    (said,) = advice_on_balance(exact)
    assert f"{exact.time.total_s:.3g} s per step instead of {last.time.total_s:.3g}" in said
    assert not [*advice_on_balance(last), *advice_on_balance(planned(*EXACT, "train.micro_batch_size=4"))]


# ---------------------------------------------------------------------------------------------------------------
# Exports


@pytest.mark.slow
def test_a_bias_is_not_lost_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Hugging Face's qwen3_moe has no bias: the start says so, and an export is rejected.  Ours is used everywhere."""
    trainer = Trainer(config_of(tmp_path / "run", *BIAS, "train.steps=3"))
    assert trainer.fit() == 0
    assert "warning: this model cannot be exported: Hugging Face's qwen3_moe has no" in capfd.readouterr().out
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "has no layers.0.moe.choice.bias" in capfd.readouterr().err
    loaded = load_weights(tmp_path / "run")
    assert [m.bias.tolist() for m in loaded.modules() if isinstance(m, TopKExperts)] == biases_of(trainer)
    assert any(value for layer in biases_of(trainer) for value in layer)


def test_an_adapter_has_no_biases() -> None:
    with pytest.raises(UserError, match=r"model.balance_rate=0.01: would change the biases .*\n.*model.balance_rate=0"):
        check_config(config_of("x", *BIAS, "lora.rank=4"), 1, 1)
