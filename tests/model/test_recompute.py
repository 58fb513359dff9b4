"""Recomputation by memory budget: which results are kept, that they fit, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.launch import on_ranks, tiny
from trainer import Trainer, UserError, load_config
from trainer.config import check_config
from trainer.model.recompute import choose_saved_operators
from trainer.model.shard import check_sharding


class Block(nn.Module):
    """A product that costs twice as much per byte as a second one, one with an unused output, and a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.last = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.wide(self.narrow(x).sin()).sin())  # saves: narrow, sin, wide, sin


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


NARROW, WIDE = ("matmul", 0), ("matmul", 1)
# For each of B x T positions: 32 and 32, 16 and 16 numbers are saved, so 96.
CHOICES = [
    (0.0, set()),
    (15 / 96, set()),
    (16 / 96, {WIDE}),
    (47 / 96, {WIDE}),
    (48 / 96, {WIDE, NARROW}),
    (1.0, {WIDE, NARROW}),
]


@pytest.mark.parametrize(("share", "expected"), CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_most_expensive_results_are_kept_first_and_fit(share: float, expected: set[Any], dtype: torch.dtype) -> None:
    """The last product is never kept, because recomputation stops before it."""
    with torch.device("meta"):
        model = Net()
    assert choose_saved_operators(model, list(model.blocks), (3, 5), dtype, share) == [expected, expected]
    assert not any("forward" in vars(block) for block in model.blocks)
    assert all(parameter.is_meta for parameter in model.parameters())


class Falling(nn.Module):
    """The larger of its two products is the one that costs more for each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.last = nn.Linear(4, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).sin()).sin())  # saves: 8 and 8, 4 and 4 numbers


def test_cost_per_byte_decides() -> None:
    with torch.device("meta"):
        model = Net()
        model.blocks = nn.ModuleList([Falling()])
    for share, expected in ((4 / 24, {("matmul", 1)}), (8 / 24, {("matmul", 0)})):
        assert choose_saved_operators(model, list(model.blocks), (3, 5), torch.float32, share) == [expected]


def losses_and_gradients(folder: Path, settings: list[list[str]]) -> list[tuple[list[float], list[float]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, own in enumerate(settings):
        overrides = tiny("train.steps=4", "run.threads=1", *own)
        trainer = Trainer(load_config("llama_small", [*overrides, f"run.dir={folder / str(number)}"]))
        records = list(trainer.steps())
        trainer.close()
        found.append(([r.loss for r in records], [r.grad_norm for r in records]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[0.15], pytest.param([0, 0.3, 1], marks=pytest.mark.campaign)])
def test_recomputation_changes_only_memory(shares: list[float], tmp_path: Path) -> None:
    """Bit for bit; a compiler may round in a different order."""
    chosen = ["none", *(f"budget:{share}" for share in shares)]
    settings = [[f"train.activation_checkpoint={setting}"] for setting in chosen]
    eager = on_ranks(2, losses_and_gradients, tmp_path, settings)[0]
    assert all(found == eager[0] for found in eager)


@pytest.mark.parametrize(("value", "legal"), [("half", "0.5"), ("nan", "0.5"), ("1.5", "1"), ("-0.1", "0")])
def test_share_must_be_between_0_and_1(value: str, legal: str) -> None:
    config = load_config("llama_small", [f"train.activation_checkpoint=budget:{value}"])
    with pytest.raises(UserError, match=rf"needs a number from 0 to 1\n.*budget:{legal}$"):
        check_config(config, 1, 1)


def test_unit_inside_a_block_is_rejected() -> None:
    own = ["fsdp.wrap=tests.helpers.custom_recipes:every_linear", "train.activation_checkpoint=budget:0.5"]
    with pytest.raises(UserError, match=r"budget:0\.5: cannot partially recompute a block"):
        check_sharding(load_config("llama_small", own))
