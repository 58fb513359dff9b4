"""Weights of custom recipes: where they are, how missing ones are drawn, and the shape that a folder declares."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer
from tests.helpers.native_models import Memory
from tests.helpers.tiny import full
from trainer import ModelSpec, Trainer, UserError, load_config, register
from trainer.config.declare import declare
from trainer.model.initial_weights import materialize


class Table(nn.Embedding):
    """A table, and a buffer that no file contains."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__(num, width)
        self.register_buffer("scale", torch.empty(1), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            self.scale.fill_(2.0)


class StoredTensor(nn.Module):
    """A table, scaled, and a head."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table, self.head = Table(vocab_size, 4), nn.Linear(4, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) * self.table.scale)


@dataclass(frozen=True)
class StoredConfig:
    path: str = declare("", "a folder")
    vocab_size: int = declare(1, "found in the folder")


def settle(config: StoredConfig) -> StoredConfig:
    return replace(config, vocab_size=json.loads((Path(config.path) / "shape.json").read_text()))


def weights_of(config: StoredConfig) -> Memory:
    torch.manual_seed(5)
    return Memory(StoredTensor(config.vocab_size).state_dict())


register(
    ModelSpec(
        "stored", StoredConfig, lambda config: StoredTensor(config.vocab_size), resolve=settle, weights=weights_of
    )
)


@pytest.fixture
def never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers for a weight are an error, but for weights that are nowhere."""

    def refuse(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        assert tensor.is_meta, "a weight is drawn that will be read"
        return tensor

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


def test_weights_that_are_read_are_not_drawn_and_buffers_are_filled(never_drawn: None) -> None:
    with torch.device("meta"):
        model = StoredTensor(7)
    materialize(model, 0, torch.device("cpu"), is_loaded_later=lambda name: True)
    assert model.table.scale == 2.0
    assert model.table.weight.isnan().all()
    assert model.head.weight.isnan().all()


def test_some_weights_are_read_and_others_drawn() -> None:
    with torch.device("meta"):
        model, whole = StoredTensor(7), StoredTensor(7)
    materialize(whole, 3, torch.device("cpu"))
    materialize(model, 3, torch.device("cpu"), is_loaded_later=lambda name: name.startswith("table."))
    assert torch.equal(model.head.weight, whole.head.weight)
    source = Memory({"table.weight": torch.ones(7, 4)})
    with pytest.raises(UserError, match=r"missing there: head\.weight"):
        trainer.fill(model, source)
    trainer.fill(model, source, only=lambda name: name != "head.weight")
    assert torch.equal(model.table.weight, torch.ones(7, 4))
    assert torch.equal(model.head.weight, whole.head.weight)


def test_init_may_take_the_name_and_the_model() -> None:
    asked = []

    def init(module: nn.Module, name: str, model: nn.Module) -> None:
        asked.append((name, model.get_submodule(name) is module))
        module.reset_parameters()  # type: ignore[operator]

    with torch.device("meta"):
        model = StoredTensor(7)
    materialize(model, 0, torch.device("cpu"), init)
    assert asked == [("table", True), ("head", True)]


def test_recipe_declares_the_shape_and_weights_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text("257")
    (tmp_path / "own.yaml").write_text(f"model:\n  name: stored\n  path: {tmp_path}\ndata:\n  source: synthetic\n")
    sizes = ["data.seq_len=8", "train.global_batch_size=2", "train.micro_batch_size=2", "train.steps=1"]
    config = load_config(str(tmp_path / "own.yaml"), [*sizes, f"run.dir={tmp_path / 'run'}"])
    assert config.model.vocab_size == 257
    run = Trainer(config)
    assert run.model.head.weight.isnan().all(), "until it begins"  # type: ignore[union-attr, operator]
    run.load_checkpoint()
    expected = weights_of(config.model)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(full(parameter), expected.read(name))
    other = run.build_model(replace(config, run=replace(config.run, seed=9)))
    assert torch.equal(full(other.head.weight), expected.read("head.weight")), "a second model, at once"
    run.close()
