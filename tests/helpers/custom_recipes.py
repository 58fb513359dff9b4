"""Custom recipes outside the package, for `model.name=tests.helpers.custom_recipes:NAME`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trainer.recipes._tensor import DENSE
from trainer.recipes.llama.config import LlamaConfig

from trainer import ModelSpec, RunConfig, Trainer, register
from trainer.registry import find_model
from trainer.sequence import full_sequences, tensor_slices


@dataclass
class MlpConfig:
    vocab_size: int = 257
    width: int = 30
    num_hidden: int = 3


class Mlp(nn.Module):
    """A model that returns logits, with sizes that do not divide evenly and two kinds of block."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        narrow, wide = config.width, config.width + 7
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(narrow, wide), nn.GELU(), nn.Linear(wide, narrow))
            if i % 2
            else nn.Linear(narrow, narrow)
            for i in range(config.num_hidden)
        )
        self.out = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.hidden:
            x = x + layer(x).tanh()
        return self.out(x)


class Viewing(Mlp):
    """A model whose units return views, as torch's Linear does; with `adds_in_place` it modifies these in place."""

    adds_in_place = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.hidden:
            y = layer(x)
            x = y.add_(x) if self.adds_in_place else y + x
        return self.out(x)


class Shifting(Mlp):
    """A model in which each token reads the previous one without using `trainer.sequence`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + 0.1 * nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        for layer in self.hidden:
            x = x + layer(x).tanh()
        return self.out(x)


class Carrying(Mlp):
    """A model that accepts `documents` but ignores them: its second layer mixes part of each token into the next."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        self.hidden[1] = Carry(config.width)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(tokens)


class Carry(nn.Module):
    """A causal convolution over two tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x + 1e-4 * nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))


class ViewUnit(nn.Module):
    """A unit with an output that is a view of a tensor saved for its backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).exp().view(x.shape)


def viewing(adds_in_place: bool) -> Callable[[MlpConfig], nn.Module]:
    def build(config: MlpConfig) -> nn.Module:
        model = Viewing(config)
        model.hidden.insert(0, ViewUnit(config.width))
        model.adds_in_place = adds_in_place
        return model

    return build


class CrashingTrainer(Trainer):
    """Fails on rank 1 in the third step, between forward and backward."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(batch)
        if self.world.rank == 1 and self.state.step == 2:
            raise ValueError("the disk of rank 1 is on fire")
        return loss


class SleepingTrainer(Trainer):
    """Fails on rank 1 in the third step, while rank 0 sleeps outside any collective."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.state.step == 2:
            if self.world.rank == 1:
                raise ValueError("the disk of rank 1 is on fire")
            time.sleep(1000)
        return super().loss(batch)


class NonFiniteTrainer(Trainer):
    """Has a NaN loss in steps 3 and 4, on the last rank only."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        bad = self.state.step in (2, 3) and self.world.rank == self.world.size - 1
        return super().loss(batch) * (float("nan") if bad else 1.0)


class UnshardedParameterTrainer(Trainer):
    """Adds a parameter after FSDP was applied, so that it is not sharded."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        model.register_parameter("extra", nn.Parameter(torch.ones(3)))
        return model


class OutOfMemoryTrainer(Trainer):
    """Raises OutOfMemoryError in the third step."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.state.step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().loss(batch)


class Wayward(nn.Module):
    """Equal-looking blocks that are treated differently, depending on `way`."""

    def __init__(self, config: WaywardConfig) -> None:
        super().__init__()
        self.way = config.way
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.hidden = nn.ModuleList(WaywardBlock(config.width) for _ in range(config.num_hidden))
        self.out = nn.Linear(config.width, config.vocab_size)
        for position, block in enumerate(self.hidden):
            block.activation = wide if self.way == "activation" and position % 2 else torch.tanh  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, kept = self.table(tokens), []
        blocks = list(self.hidden)[::-1] if self.way == "reversed" else list(self.hidden)
        for position, block in enumerate(blocks):
            if self.way == "left out" and position in (3, 4):
                continue
            if self.way == "between" and position % 3 == 0:
                x = wide(x)
            x = block(x, is_global=self.way == "flag" and position % 4 == 3)
            if self.way == "twice":
                x = block(x)
            if self.way == "crossed":
                x = x + kept.pop() if position >= len(blocks) // 2 else x
                kept.append(x.tanh())
        return self.out(x)


class Undecided(Mlp):
    """A model with control flow that depends on values."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens)
        return x * 2 if x.sum() > 0 else x


@dataclass
class WaywardConfig:
    vocab_size: int = 257
    width: int = 64
    num_hidden: int = 13
    way: str = ""


class WaywardBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.unused = nn.Linear(width, width)
        self.activation = torch.tanh

    def forward(self, x: torch.Tensor, is_global: bool = False) -> torch.Tensor:
        hidden = self.activation(self.inner(x))
        return x + self.outer(wide(hidden) if is_global else hidden)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() * x.sigmoid() * x.relu()


def every_linear(module: nn.Module) -> bool:
    """Return whether a module is a unit, as FSDP1's lambda policies do."""
    return isinstance(module, nn.Linear) and module.weight.shape[0] < 100


def _unfilled_buffer(config: MlpConfig) -> nn.Module:
    model = Mlp(config)
    model.table.register_buffer("forgotten", torch.ones(3), persistent=False)
    model.out.extra = nn.Parameter(torch.ones(3))
    return model


class Renamed(Mlp):
    """A model with the same weights under other names."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        self.inner = self.hidden
        del self.hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.inner:
            x = x + layer(x).tanh()
        return self.out(x)


def _tied(config: MlpConfig) -> nn.Module:
    model = Mlp(config)
    model.out.weight = model.table.weight
    return model


UNITS = ["table", "hidden.*", "out"]
register(ModelSpec("mlp", MlpConfig, Mlp, UNITS))
register(ModelSpec("viewing_in_place", MlpConfig, viewing(adds_in_place=True), UNITS))
register(ModelSpec("shifting", MlpConfig, Shifting, UNITS, context=True))
register(ModelSpec("carrying", MlpConfig, Carrying, UNITS))
register(ModelSpec("viewing", MlpConfig, viewing(adds_in_place=False), UNITS))
register(ModelSpec("mlp_crashing", MlpConfig, Mlp, UNITS, trainer=CrashingTrainer))
register(ModelSpec("mlp_sleeping", MlpConfig, Mlp, UNITS, trainer=SleepingTrainer))
register(ModelSpec("mlp_nonfinite", MlpConfig, Mlp, UNITS, trainer=NonFiniteTrainer))
register(ModelSpec("mlp_left_out", MlpConfig, Mlp, UNITS, trainer=UnshardedParameterTrainer))
register(ModelSpec("undecided", MlpConfig, Undecided, UNITS))
register(ModelSpec("wayward", WaywardConfig, Wayward, UNITS))
register(ModelSpec("greedy", MlpConfig, Mlp, UNITS, trainer=OutOfMemoryTrainer))
register(ModelSpec("mlp_unfilled", MlpConfig, _unfilled_buffer, UNITS))
register(ModelSpec("mlp_parted_tie", MlpConfig, _tied, UNITS))
register(ModelSpec("mlp_faulty", MlpConfig, Mlp, UNITS, trainer="tests.helpers.faults:FaultyTrainer"))
register(ModelSpec("mlp_repeating", MlpConfig, Mlp, UNITS, trainer="tests.helpers.faults:RepeatingTrainer"))
register(ModelSpec("mlp_renamed", MlpConfig, Renamed, ["table", "inner.*", "out"]))


def _units(model: nn.Module) -> list[str]:
    return ["layers.*"]


_FAULTY = "tests.helpers.faults:FaultyTrainer"
# Without `hf`: folders of Hugging Face name the original.
register(dataclasses.replace(find_model("llama"), name="llama_faulty", trainer=_FAULTY, hf=None))


def attending_within_slices(config: LlamaConfig) -> nn.Module:
    """Return a Llama in which tokens attend only to tokens of their own slice."""
    from trainer.recipes.llama.model import Llama

    model = Llama(config)
    for layer in model.layers:
        layer.attention.forward = full_sequences()(layer.attention.forward)  # type: ignore[method-assign]
    return model


def counting_within_slices(config: LlamaConfig) -> nn.Module:
    """Return a Llama in which positions begin at 0 in each slice."""
    from trainer.recipes.llama.model import Llama

    class Counting(Llama):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            return super().forward(tokens, targets, positions=torch.arange(tokens.shape[1]))

    return Counting(config)


register(ModelSpec("llama_attending", LlamaConfig, attending_within_slices, _units, context=True))
register(ModelSpec("llama_counting", LlamaConfig, counting_within_slices, _units, context=True))


def losing_gradient(config: LlamaConfig) -> nn.Module:
    """Return a Llama whose embedding gets no gradient if ranks share its matrices."""
    from trainer.recipes.llama.model import Llama

    def cut(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if tensor_slices() is None else output.detach().requires_grad_()

    model = Llama(config)
    model.tok_embeddings.register_forward_hook(cut)
    return model


def _with_plan(name: str, plan: Mapping[str, Any], build: Any = None) -> None:
    """Register a Llama with changes to its plan for tensor parallelism; None removes an entry."""
    changed = {pattern: style for pattern, style in {**DENSE, **plan}.items() if style is not None}
    llama = find_model("llama")
    register(dataclasses.replace(llama, name=name, build=build or llama.build, tensor=changed, hf=None))


_with_plan("plan_losing_gradient", {}, losing_gradient)
_with_plan("plan_with_whole_keys", {"layers.*.attention.wk": "sequence", "layers.*.attention.wv": "sequence"})
_with_plan("plan_with_columns_for_rows", {"layers.*.feed_forward.w2": "columns"})
_with_plan("plan_without_input", {"layers.*.attention": None})
_with_plan("plan_with_a_missing_matrix", {"layers.*.attention.wk": None})
_with_plan("plan_with_an_unknown_module", {"layers.*.mlp": "columns"})
_with_plan("plan_with_an_unknown_style", {"layers.*.attention.wk": "column"})
_with_plan("plan_with_a_split_norm", {"layers.*.ffn_norm": "columns"})
