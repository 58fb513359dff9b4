"""Activation offloading changes no bit of losses and weights, frees the device's memory, and is in the plan."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.tiny import full, tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config import MeshShape, check_config
from trainer.model import offload as offloading
from trainer.model.offload import ActivationOffload, choose_offloaded_blocks
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

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


# -- the planner ----------------------------------------------------------------------------------------------------


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
