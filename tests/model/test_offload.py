"""Activation offloading changes no bit of losses and weights, frees the device's memory, and is in the plan."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_tiny
from tests.helpers.tiny import full, tiny_config
from tests.plan.test_plan import config_of
from trainer import Trainer, UserError, load_config
from trainer.config import AUTO, MeshShape, check_config
from trainer.model import offload as offloading
from trainer.model.offload import ActivationOffload, choose_offloaded_blocks
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan
from trainer.plan.search import fastest_choice

DEEP = ["model.num_layers=4", "train.steps=4", "log.every=1"]


class Block(nn.Module):
    """Saves its input and the output of tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.saved: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.saved.append(weakref.ref(y.untyped_storage()))
        return x + y


def stack(share: float, kind: type[nn.Module] = Block) -> tuple[nn.ModuleList, ActivationOffload]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(kind() for _ in range(4))
    offload = ActivationOffload(blocks, list(blocks), share, torch.device("cpu"))
    offload.attach()
    return blocks, offload


def run(blocks: nn.ModuleList) -> torch.Tensor:
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
    for block in blocks:
        x = block(x)
    return x.square().sum()


@pytest.mark.parametrize(
    ("num_blocks", "share", "expected"),
    [
        (4, 1.0, [True, True, True, False]),
        (4, 0.5, [False, True, False, False]),
        (8, 0.25, [False, False, False, True, False, False, False, False]),
        (5, 0.6, [False, True, False, True, False]),
        (1, 1.0, [False]),
        (10, 0.1, [False] * 10),
    ],
)
def test_blocks_are_chosen_evenly_and_never_the_last(num_blocks: int, share: float, expected: list[bool]) -> None:
    assert choose_offloaded_blocks(num_blocks, share) == expected


def test_memory_is_free_when_the_next_block_ends() -> None:
    blocks, offload = stack(1.0)
    x = torch.randn(64, 64, requires_grad=True)
    for number, block in enumerate(blocks):
        x = block(x)
        alive = [b.saved[0]() is not None for b in blocks[: number + 1]]  # type: ignore[union-attr, index]
        assert alive == [False] * number + [True]
    assert offload.host_bytes == offload.copied_bytes == 3 * 2 * 64 * 64 * 4  # input and tanh of three blocks
    x.sum().backward()
    assert offload.fetched_bytes == offload.copied_bytes
    del x
    assert offload.host_bytes == 0


class Gated(Block):
    """Saves two views of one storage, and their bits in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.wide(x).chunk(2, dim=-1)
        pairs = torch.view_as_complex(super().forward(x).unflatten(-1, (-1, 2)))
        return x + value * gate * pairs.abs().repeat(1, 2)


@pytest.mark.parametrize("kind", [Block, Gated])
def test_gradients_are_the_same_in_repeated_backward_passes(kind: type[nn.Module]) -> None:
    """A second backward pass copies the tensors from the host again."""
    plain, offloaded = stack(0.0, kind)[0], stack(1.0, kind)[0]
    for blocks in (plain, offloaded):
        loss = run(blocks)
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


class Overwrites(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        y.mul_(2.0)
        return x + y


def test_overwritten_saved_tensor_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(stack(0.0, Overwrites)[0]).backward()
    with pytest.raises(RuntimeError, match=r"train\.offload_activations: .* modified by an inplace operation"):
        run(stack(1.0, Overwrites)[0]).backward()


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[ActivationOffload]:
    """The offloading of the models that are built; small storages are offloaded too."""
    monkeypatch.setattr(offloading, "MIN_BYTES", 1)
    found: list[ActivationOffload] = []
    attach = ActivationOffload.attach

    def note(self: ActivationOffload, *args: Any) -> None:
        if type(self) is ActivationOffload:
            found.append(self)
        attach(self, *args)

    monkeypatch.setattr(ActivationOffload, "attach", note)
    return found


def train(folder: Path, *overrides: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    trainer = Trainer(tiny_config(folder, *DEEP, *overrides))
    records = [(record.loss, record.grad_norm) for record in trainer.steps()]
    weights = {name: full(parameter).detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.close()
    return records, weights


CHECKPOINTING = [
    "none",
    "selective",
    *(pytest.param(how, marks=pytest.mark.campaign) for how in ("full", "budget:0.5", "2")),
]


@pytest.mark.parametrize("compiles", ["false", pytest.param("true", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_no_bit_changes_and_host_memory_is_as_planned(
    checkpointing: str, compiles: str, tmp_path: Path, attached: list[ActivationOffload]
) -> None:
    own = [f"train.activation_checkpoint={checkpointing}", f"train.compile={compiles}"]
    expected, weights = train(tmp_path / "plain", *own)
    for share in ("1", "0.5"):
        records, offloaded = train(tmp_path / share, *own, f"train.offload_activations={share}")
        assert records == expected
        assert all(torch.equal(weights[name], offloaded[name]) for name in weights)
        (offload,) = attached
        attached.clear()
        config = tiny_config(tmp_path / share, *DEEP, *own, f"train.offload_activations={share}")
        plan = make_plan(config, MeshShape(1, 1), find_machine("cpu"))
        assert offload.peak_host_bytes > 0
        assert offload.fetched_bytes == offload.copied_bytes
        if compiles == "false":  # on a CPU, what the compiler saves is not planned
            assert offload.peak_host_bytes == plan.memory.offloaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ["nproc=2"],
        pytest.param(["nproc=4", "mesh.replicate=2"], marks=pytest.mark.campaign),
        pytest.param(["nproc=2", "mesh.replicate=-1", "mesh.shard=1"], marks=pytest.mark.campaign),
        pytest.param(["nproc=2", "fsdp.accumulate=sharded"], marks=pytest.mark.campaign),
        pytest.param(["nproc=2", "mesh.context=2"], marks=pytest.mark.campaign),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("checkpointing", ["selective", pytest.param("none", marks=pytest.mark.campaign)])
def test_no_bit_changes_on_several_ranks(mesh: list[str], checkpointing: str, tmp_path: Path) -> None:
    given = ["model.num_layers=4", "model.dim=64", "train.steps=4", "train.global_batch_size=8", "data.seq_len=64"]
    given += [f"train.activation_checkpoint={checkpointing}", *mesh]
    plain = run_tiny(tmp_path / "plain", *given)
    moved = run_tiny(tmp_path / "offloaded", *given, "train.offload_activations=1")
    for field in ("loss", "grad_norm"):
        assert moved.train(field) == plain.train(field)


# -- the planner ----------------------------------------------------------------------------------------------------

LONG = ["data.seq_len=16384", "model.max_seq_len=16384", "model.num_layers=12"]


def plan_of(*overrides: str, network: str = "h100") -> Any:
    config = config_of("llama3_1b", *LONG, *overrides, shape=MeshShape(1, 8))
    return make_plan(config, MeshShape(1, 8), find_machine(network))


def test_plan_moves_memory_to_the_host_and_shows_exposed_copies() -> None:
    plain, moved, half = (plan_of(f"train.offload_activations={share}") for share in ("none", "1", "0.5"))
    assert plain.memory.offloaded == 0
    assert 0.4 < half.memory.offloaded / moved.memory.offloaded < 0.5  # five blocks of twelve, against eleven
    saved = plain.memory.peak.by_kind["activations"] - moved.memory.peak.by_kind["activations"]
    assert 0.7 * moved.memory.offloaded < saved <= moved.memory.offloaded  # a block or two are always on the device
    assert moved.time.offload_s == pytest.approx(2 * moved.memory.offloaded / moved.machine.rates.host)
    assert moved.time.total_s == pytest.approx(plain.time.total_s + moved.time.exposed_offload_s, rel=1e-3)
    assert 0 < half.time.exposed_offload_s < moved.time.exposed_offload_s < moved.time.offload_s
    inputs_alone = plan_of("train.offload_activations=1", "train.activation_checkpoint=full")
    assert inputs_alone.time.offload_s > 0
    assert inputs_alone.time.exposed_offload_s == 0


@pytest.mark.parametrize("share", [pytest.param(s, marks=pytest.mark.campaign) for s in ("1", "0.25")] + ["0.5"])
def test_short_plan_equals_the_full_one(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = plan_of(f"train.offload_activations={share}")
    monkeypatch.setattr("trainer.plan.probe._find_runs", lambda *_: [])
    whole = plan_of(f"train.offload_activations={share}")
    assert short.memory.offloaded == whole.memory.offloaded
    assert short.memory.peak == whole.memory.peak
    assert short.time.total_s == pytest.approx(whole.time.total_s, rel=1e-3)


@pytest.mark.campaign
def test_auto_offloads_if_that_is_faster_than_recomputing() -> None:
    """At 131,072 tokens, attention hides the copies, and is expensive to recompute."""
    shape = MeshShape(1, 8)
    sliced = ["model.num_layers=12", "data.seq_len=131072", "mesh.context=8"]
    own = [f"train.offload_activations={AUTO}", f"train.activation_checkpoint={AUTO}"]
    tight = find_machine("h100").with_budget(33e9)
    both = fastest_choice(config_of("llama3_8b", *sliced, *own, shape=shape), shape, tight).plan
    recomputed = fastest_choice(config_of("llama3_8b", *sliced, own[1], shape=shape), shape, tight).plan
    assert both.config.train.offload_activations != "none"
    assert both.fits
    assert both.time.total_s < 0.95 * recomputed.time.total_s
    on_cpu = fastest_choice(tiny_config(Path("run"), *own), MeshShape(1, 1), find_machine("cpu")).plan
    assert on_cpu.config.train.offload_activations == "none"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", "must be a fraction of the blocks, from 0 to 1\n  nearest legal value: train.offload_activations=1.0"),
        ("-0.5", "nearest legal value: train.offload_activations=none"),
        ("half", "must be a fraction from 0 to 1, or one of none, auto"),
    ],
)
def test_legal_and_illegal_values(value: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(load_config("llama_small", [f"train.offload_activations={value}"]), 1, 1)
    assert message in str(caught.value)
