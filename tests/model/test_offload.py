"""Activation offloading changes no bit of losses and weights, and frees the device's memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.cases import in_campaign
from tests.helpers.tiny import full, tiny_config
from trainer import ModelSpec, Trainer, UserError, load_config, register
from trainer.config.rules import check_config

NUM_BLOCKS = 4


@dataclass(frozen=True)
class StackConfig:
    vocab_size: int = 64
    kind: str = "plain"


class Block(nn.Module):
    """Saves its input and the output of tanh, and knows whether the latter is still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.saved: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def is_in_memory(self) -> bool:
        return self.saved is not None and self.saved() is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.saved = weakref.ref(y.untyped_storage())
        return x + y


class Gated(Block):
    """Saves two views of one storage, and their bits in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.wide(x).chunk(2, dim=-1)
        pairs = torch.view_as_complex(super().forward(x).unflatten(-1, (-1, 2)))
        return x + value * gate * pairs.abs().repeat(1, 1, 2)


class Overwriting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        y.mul_(2.0)
        return x + y


KINDS = {"plain": Block, "gated": Gated, "overwriting": Overwriting}


class Stack(nn.Module):
    """Notes after each block which of the blocks so far have their activations in memory."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, 64)
        self.blocks = nn.ModuleList(KINDS[config.kind]() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(64, config.vocab_size, bias=False)
        self.seen: list[list[bool]] = []

    def forward(self, tokens: torch.Tensor) -> Any:
        x, self.seen = self.table(tokens), []
        for number, block in enumerate(self.blocks, 1):
            x = block(x)
            self.seen.append([each.is_in_memory for each in self.blocks[:number]])  # type: ignore[union-attr]
        return self.head(x)


register(ModelSpec("offloaded_stack", StackConfig, Stack, ["table", "blocks.*", "head"]))


def stack_of(folder: Path, kind: str, share: str) -> Trainer:
    own = ["model.name=offloaded_stack", f"model.kind={kind}", "data.source=synthetic", "data.seq_len=64"]
    own += ["train.global_batch_size=2", "train.micro_batch_size=2", "train.steps=2", "run.threads=1", "eval.every=0"]
    own += ["checkpoint.every=0", f"train.offload_activations={share}", "run.device=cpu", f"run.dir={folder}"]
    return Trainer(load_config("llama_small", own))


def losses_and_weights(trainer: Trainer) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    batches, updates = iter(trainer.loader), []
    for _ in range(2):
        update = trainer.train_step([next(batches) for _ in range(trainer.num_micro_batches)])
        updates.append((float(update.loss), float(update.grad_norm)))
    weights = {name: full(parameter).detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.close()
    return updates, weights


def assert_same_bits(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert [name for name, weight in found[1].items() if not torch.equal(weight, expected[1][name])] == []


@pytest.mark.parametrize(
    ("share", "offloaded"),
    [
        ("none", [False, False, False, False]),
        ("1", [True, True, True, False]),  # never the last: its backward pass comes next
        ("0.5", [False, True, False, False]),
    ],
)
def test_memory_is_free_when_the_next_block_ends(share: str, offloaded: list[bool], tmp_path: Path) -> None:
    trainer = stack_of(tmp_path, "plain", share)
    trainer.loss(next(iter(trainer.loader))).backward()
    trainer.close()
    model: Any = trainer.model
    for ended, in_memory in enumerate(model.seen, 1):
        for block, is_in_memory in enumerate(in_memory, 1):
            assert is_in_memory == (block == ended or not offloaded[block - 1]), (block, ended)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_views_and_other_dtypes_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    plain, offloaded = (losses_and_weights(stack_of(tmp_path / share, kind, share)) for share in ("none", "1"))
    assert_same_bits(offloaded, plain)


def test_overwritten_saved_tensor_is_an_error(tmp_path: Path) -> None:
    """As without offloading, rather than a wrong gradient."""
    for share in ("none", "1"):
        trainer = stack_of(tmp_path / share, "overwriting", share)
        batch = next(iter(trainer.loader))
        with pytest.raises(RuntimeError) as raised:
            trainer.loss(batch).backward()
        trainer.close()
        assert ("train.offload_activations" in str(raised.value)) == (share == "1")


CHECKPOINTING = [
    "none",
    *in_campaign("selective", "full", "budget:0.5", "2"),
]


@pytest.mark.parametrize("compiles", ["false", pytest.param("true", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_no_bit_of_a_run_changes(checkpointing: str, compiles: str, tmp_path: Path) -> None:
    """Storages of a few kilobytes are offloaded, smaller ones are not."""
    own = ["model.num_layers=4", "model.dim=32", "data.seq_len=64"]
    own += [f"train.activation_checkpoint={checkpointing}", f"train.compile={compiles}"]

    def trained(share: str) -> Any:
        return losses_and_weights(Trainer(tiny_config(tmp_path / share, *own, f"train.offload_activations={share}")))

    plain = trained("none")
    for share in ("1", "0.5"):
        assert_same_bits(trained(share), plain)


@pytest.mark.parametrize(("value", "nearest"), [("2", "1"), ("-0.5", "0"), ("half", "")])
def test_a_share_is_between_0_and_1(value: str, nearest: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.offload_activations={value}") as refused:
        check_config(load_config("llama_small", [f"train.offload_activations={value}"]), 1, 1)
    assert not nearest or refused.value.proposal == f"train.offload_activations={nearest}"
