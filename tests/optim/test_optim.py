"""Schedules at their limits, which parameters are decayed, and that each optimizer trains and resumes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.cases import in_campaign
from tests.helpers.launch import tiny
from tests.helpers.plain_model import plain_model
from tests.helpers.tiny import full
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.config.rules import check_schedule
from trainer.config.schema import OptimSection, ScheduleSection, TrainSection
from trainer.data.opening import resolve_from_data
from trainer.optim.muon import Muon
from trainer.optim.optimizer import Optimizer, Schedule, build_optimizer, step_on_device

# ---------------------------------------------------------------------------------------------------------------
# Schedules

PEAK, FLOOR = 0.5, 0.1
SHAPES = ["cosine", "linear", "wsd", "constant"]


def schedule(
    name: Any, warmup: int = 0, steps: int = 10, decay: float = 0.2, floor: float = FLOOR
) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, from 1 on."""
    shape = ScheduleSection(name, warmup_steps=warmup, min_lr_ratio=floor, decay_ratio=decay)
    return Schedule(RunConfig(optim=OptimSection(lr=PEAK), schedule=shape, train=TrainSection(steps=steps))).lr


@pytest.mark.parametrize("name", SHAPES)
def test_warmup_is_linear_and_reaches_the_peak(name: str) -> None:
    lr = schedule(name, warmup=4, steps=20)
    assert [lr(step) for step in (1, 2, 3, 4)] == [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK]
    assert lr(5) <= PEAK


@pytest.mark.parametrize("name", SHAPES)
def test_last_step_has_the_minimum_rate(name: str) -> None:
    for warmup, steps in ((0, 10), (4, 10), (9, 10), (0, 1)):
        expected = PEAK if name == "constant" else PEAK * FLOOR
        assert schedule(name, warmup, steps)(steps) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (0, 10), (4, 10), (9, 10), (10, 10), (40, 10)])
def test_decay_to_zero_still_trains_in_the_last_step(name: str, warmup: int, steps: int) -> None:
    """The rate is zero one step later: a run of one step has its peak, or most of it."""
    for decay in (0.2, 1.0):
        lr = schedule(name, warmup, steps, decay, floor=0.0)
        rates = [lr(step) for step in range(1, steps + 1)]
        assert min(rates) > 0
        after = rates[warmup:]
        assert all(earlier >= later for earlier, later in itertools.pairwise(after))
        if name != "constant" and warmup < steps:
            assert lr(steps + 1) == 0
            assert rates[-1] < 0.95 * PEAK
    assert schedule("linear", 0, 1, floor=0.0)(1) == PEAK / 2


@pytest.mark.parametrize("name", SHAPES)
def test_without_warmup_the_first_update_counts(name: str) -> None:
    lr = schedule(name, warmup=0, steps=100)
    assert 0.95 * PEAK < lr(1) <= PEAK


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("warmup", "last"), [(10, PEAK), (40, PEAK / 4)])
def test_a_warmup_as_long_as_the_run_or_longer(name: str, warmup: int, last: float) -> None:
    lr = schedule(name, warmup, steps=10)
    assert [lr(step) for step in range(1, 11)] == pytest.approx([PEAK * step / warmup for step in range(1, 11)])
    assert lr(10) == pytest.approx(last)


@pytest.mark.parametrize("name", SHAPES)
def test_rate_is_between_minimum_and_peak(name: str) -> None:
    """Also past the last step, where a custom loop may continue."""
    lr = schedule(name, warmup=5, steps=50)
    after = [lr(step) for step in range(5, 81)]
    assert all(earlier >= later for earlier, later in itertools.pairwise(after))
    assert min(after) >= PEAK * FLOOR - 1e-12
    assert max(after) == PEAK


def test_cosine_and_linear_are_halfway_in_the_middle() -> None:
    for name in ("cosine", "linear"):
        assert schedule(name, warmup=10, steps=110)(60) == pytest.approx(PEAK * (FLOOR + 1) / 2)
    assert schedule("cosine", steps=100)(25) > schedule("linear", steps=100)(25)


@pytest.mark.parametrize(("warmup", "decay", "last_at_peak"), [(0, 0.2, 80), (10, 0.2, 80), (40, 0.5, 50)])
def test_wsd_decays_over_its_share_of_the_run(warmup: int, decay: float, last_at_peak: int) -> None:
    """schedule.decay_ratio is the share of the whole run, not of the steps after the warmup, that decays at its end."""
    lr = schedule("wsd", warmup, steps=100, decay=decay)
    assert lr(warmup + 1) == PEAK
    assert lr(last_at_peak) == pytest.approx(PEAK)
    assert lr(last_at_peak + 1) < 0.999 * PEAK
    half_way = (last_at_peak + 100) // 2
    assert lr(half_way) == pytest.approx(PEAK * (FLOOR + 1) / 2)


def test_wsd_limits() -> None:
    assert schedule("wsd", steps=10, decay=0.0)(10) == PEAK
    linear, all_decay = schedule("linear", steps=10), schedule("wsd", steps=10, decay=1.0)
    assert [all_decay(step) for step in range(1, 11)] == pytest.approx([linear(step) for step in range(1, 11)])


def test_accepted_wsd_schedule_never_drops_at_once() -> None:
    """It falls by at most two steps of a linear decay: one that rounding adds, and its own."""
    num_accepted = 0
    for steps, warmup, decay in itertools.product((1, 2, 3, 10, 100), (0, 1, 5, 50, 90, 99, 100, 120), (0.1, 0.5, 1.0)):
        shape = ScheduleSection("wsd", warmup_steps=warmup, min_lr_ratio=0.0, decay_ratio=decay)
        config = RunConfig(optim=OptimSection(lr=PEAK), schedule=shape, train=TrainSection(steps=steps))
        with contextlib.suppress(UserError):
            check_schedule(config)
            num_accepted += 1
            rates = [0.0, *map(Schedule(config).lr, range(1, steps + 1))]
            drop = max(earlier - later for earlier, later in itertools.pairwise(rates[: warmup + 2]))
            assert drop <= PEAK * (2 / max(1, decay * steps) + 1e-9), (steps, warmup, decay)
    assert 40 < num_accepted < 120


def test_steps_that_follow_from_the_data_must_fit_the_schedule(tmp_path: Path) -> None:
    """20 rows of 16 tokens are 5 steps of 4 rows."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 40)
    own = ["data.source=tokens", f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    own += ["data.holdout=0", "eval.every=0", "model.vocab_size=300", "data.seq_len=16", "train.epochs=1"]
    own += ["schedule.name=wsd", "train.global_batch_size=4", f"run.dir={tmp_path / 'run'}"]
    for warmup, decay, is_legal in ((2, 0.6, True), (2, 0.9, False), (50, 0.9, True)):
        config = load_config(
            "llama_small", tiny(*own, f"schedule.warmup_steps={warmup}", f"schedule.decay_ratio={decay}")
        )
        if is_legal:
            assert resolve_from_data(config).train.steps == 5
        else:
            with pytest.raises(UserError, match=r"^schedule\.decay_ratio=0\.9: .* 5 steps\n  try .*=0\.6"):
                resolve_from_data(config)


# ---------------------------------------------------------------------------------------------------------------
# Weight decay


def decay_of(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Return every parameter's weight decay by its name, and see that each is in one group."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for part in optimizer.parts for group in part.param_groups]
    pairs = [(name_of[id(p)], group["weight_decay"]) for group in groups for p in group["params"]]
    assert sorted(name for name, _ in pairs) == sorted(name_of.values())
    return dict(pairs)


DECAYED = {
    "llama_small": {
        *(f"layers.0.attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")),
        *(f"layers.0.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
        "head.output.weight",
    },
    "gpt2": {f"blocks.0.{w}.weight" for w in ("attention.qkv", "attention.out", "up", "down")},
}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("recipe", list(DECAYED))
def test_only_matrices_are_decayed(recipe: str, name: Any) -> None:
    """Not norms, biases or embeddings. gpt2's head is its embedding; llama's is a separate matrix."""
    kv = ["model.num_kv_heads=2"] if recipe == "llama_small" else []
    model = plain_model(recipe, *kv)
    found = decay_of(model, build_optimizer(model, OptimSection(name, weight_decay=0.3)))
    assert {key for key, value in found.items() if value == 0.3} == DECAYED[recipe]
    assert {value for key, value in found.items() if key not in DECAYED[recipe]} == {0.0}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "bfloat16"])
def test_step_scales_gradients(kind: Any) -> None:
    """Bit-identical to scaling them before the step, with a new scale in each step, on which moments depend."""
    config = OptimSection(state_dtype="bfloat16") if kind == "bfloat16" else OptimSection(name=kind, lr=0.01)
    results = []
    for is_multiplied_before in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
        optimizer = build_optimizer(model, config)
        for scale in (torch.tensor(0.37), None, torch.tensor(0.01)):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
                if is_multiplied_before and scale is not None:
                    parameter.grad *= scale
            optimizer.step(torch.tensor(True), None if is_multiplied_before else scale)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        optimizer.step(torch.tensor(False), torch.tensor(torch.nan))
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_kernel_scales_gradients(kind: Any) -> None:
    """As AdamW does on a GPU, where clipping needs no separate pass; the kernel divides by the inverse."""
    results = []
    for is_multiplied_before in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        (part,) = build_optimizer(model, OptimSection(state_dtype=kind, rounding="nearest")).parts
        for scale in (torch.tensor(0.37), torch.tensor(0.01)):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * (scale if is_multiplied_before else 1.0)
            step_on_device(part, torch.tensor(True), None if is_multiplied_before else scale)
        results.append(model.weight.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_tied_head_is_not_decayed() -> None:
    model = plain_model("llama_small", "model.num_kv_heads=2", "model.tie_embeddings=true")
    found = decay_of(model, build_optimizer(model, OptimSection(weight_decay=0.3)))
    assert found["tok_embeddings.weight"] == 0.0
    assert {key for key, value in found.items() if value} == DECAYED["llama_small"] - {"head.output.weight"}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_decay_all(name: Any) -> None:
    model = plain_model("gpt2")
    found = decay_of(model, build_optimizer(model, OptimSection(name, weight_decay=0.3, decay_all=True)))
    assert set(found.values()) == {0.3}


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = plain_model("gpt2")
    muon, adamw = build_optimizer(model, OptimSection("muon")).parts
    assert isinstance(muon, Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for group in muon.param_groups for p in group["params"]} == DECAYED["gpt2"]


def test_frozen_parameters_are_not_optimized() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    (part,) = build_optimizer(model, OptimSection()).parts
    assert [p is model.weight for group in part.param_groups for p in group["params"]] == [True]
    model.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"^model\.name=Linear"):
        build_optimizer(model, OptimSection())


def test_muon_without_a_hidden_matrix_is_rejected() -> None:
    with pytest.raises(UserError, match=r"optim\.name=muon"):
        build_optimizer(nn.Embedding(4, 4), OptimSection("muon"))


# ---------------------------------------------------------------------------------------------------------------
# Training and resuming

STEPS = 8


class OneBatch:
    """The same four sequences in every step, so that any optimizer that works learns them by heart."""

    def __init__(self, rank: int, world_size: int) -> None:
        stream = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(0))
        self.micro_batches = [{"tokens": row[:-1][None], "targets": row[1:][None]} for row in stream[rank::world_size]]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.cycle(self.micro_batches)


class OneBatchTrainer(Trainer):
    def build_loader(self) -> OneBatch:
        return OneBatch(self.world.rank, self.world.size)


def tiny_config(folder: Path, *overrides: str) -> RunConfig:
    own = ["model.num_kv_heads=2", "model.dim=16", "model.vocab_size=32", "data.source=synthetic", "data.seq_len=16"]
    own += ["train.steps=8", "schedule.warmup_steps=2", "train.global_batch_size=4", "train.micro_batch_size=1"]
    given = {override.partition("=")[0] for override in overrides}
    own = [item for item in own if item.partition("=")[0] not in given]
    return load_config("llama_small", tiny(*own, *overrides, f"run.dir={folder}"))


def train(config: RunConfig, kind: type[Trainer] = OneBatchTrainer, save_at: int | None = None) -> dict[str, Any]:
    """Train to the end, or to `save_at`; return the losses and the full final weights."""
    trainer = kind(config)
    losses = []
    for record in trainer.steps():
        losses.append(record.loss)
        if record.step == save_at:
            trainer.save_checkpoint()
            break
    weights = [full(p).detach().flatten() for p in trainer.model.parameters()]
    trainer.close()
    return {"losses": losses, "weights": torch.cat(weights)}


@pytest.mark.parametrize("name", ["muon", *in_campaign("adamw", "sgd")])
def test_configured_rates_override_stored_ones(name: str, tmp_path: Path) -> None:
    train(tiny_config(tmp_path, f"optim.name={name}", "optim.lr=0.01"), save_at=4)
    changed = tiny_config(
        tmp_path,
        f"optim.name={name}",
        "optim.lr=0.005",
        "optim.weight_decay=0.7",
        "optim.momentum=0.5",
        "optim.betas=[0.8,0.9]",
        "schedule.name=linear",
        "schedule.warmup_steps=0",
        "train.steps=10",
    )
    trainer = OneBatchTrainer(changed)
    record = next(iter(trainer.steps()))
    groups = [group for part in trainer.optimizer.parts for group in part.param_groups]
    trainer.close()
    assert record.step == 5
    assert record.lr == Schedule(changed).lr(5) == pytest.approx(0.005 * (0.05 + 0.95 * 0.5))
    assert {group["lr"] for group in groups} == {record.lr}
    assert {group["weight_decay"] for group in groups} == {0.7, 0.0}
    for group in groups:
        assert group.get("momentum", 0.5) == 0.5
        assert tuple(group.get("betas", (0.8, 0.9))) == (0.8, 0.9)


class AdamTrainer(OneBatchTrainer):
    """Uses a torch optimizer that it builds itself."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=123.0, foreach=True)


class TwoPartTrainer(OneBatchTrainer):
    """Brings two optimizers, the second with a tenth of the learning rate."""

    def build_optimizer(self) -> Optimizer:
        embedding = list(self.model.tok_embeddings.parameters())  # type: ignore[union-attr, operator]
        rest = [p for p in self.model.parameters() if id(p) not in {id(e) for e in embedding}]
        slow = torch.optim.SGD([{"params": embedding, "lr_scale": 0.1}], momentum=0.9)
        return Optimizer(torch.optim.AdamW(rest), slow)


@pytest.mark.parametrize("kind", [TwoPartTrainer, pytest.param(AdamTrainer, marks=pytest.mark.campaign)])
def test_custom_optimizer_trains_and_resumes(kind: type[Trainer], tmp_path: Path) -> None:
    own = ["optim.lr=0.02", f"train.steps={STEPS}"]
    straight = train(tiny_config(tmp_path / "straight", *own), kind)
    first = train(tiny_config(tmp_path / "halves", *own), kind, save_at=3)
    second = train(tiny_config(tmp_path / "halves", *own), kind)
    assert straight["losses"][-1] < 0.85 * straight["losses"][0]
    assert first["losses"] + second["losses"] == straight["losses"]
    assert torch.equal(second["weights"], straight["weights"])


def test_parts_step_together_at_their_own_rates(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = TwoPartTrainer(config)
    for record in trainer.steps():
        rates = [group["lr"] for part in trainer.optimizer.parts for group in part.param_groups]
        assert rates == [record.lr, pytest.approx(record.lr * 0.1)]
    trainer.close()
    assert record.lr == Schedule(config).lr(8)
