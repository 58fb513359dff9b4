"""The check that documents in one row do not influence each other finds every kind of leak and names its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.hf_models import KINDS, model_of, settings_of
from tests.helpers.ranks import run_command, tiny_overrides
from tests.sequence.test_document_isolation import SHAPES, build
from trainer.lifecycle.document_check import find_leak
from trainer.loss import cross_entropy
from trainer.recipe import find_recipe
from trainer.sequence import Documents, attend

SEQ_LEN, VOCAB, WIDTH = 512, 97, 32


class Attention(nn.Module):
    """Attention that ignores documents if `leaks`, and adds a bias by absolute position if `biased`."""

    def __init__(self, leaks: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.leaks = leaks
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.empty(SEQ_LEN)) if biased else None

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.bias is None:
            y = attend(q, k, v, None if self.leaks else documents)
        else:
            scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias[: x.shape[1]]
            y = scores.masked_fill(~documents.mask, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A causal convolution over the row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        return self.out(self.conv(x.mT)[..., : x.shape[1]].mT)


class Recurrence(nn.Module):
    """A decaying state that is carried from one chunk of 64 tokens to the next, across documents."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        decays, state, outputs = self.decay(x).float().sigmoid(), torch.zeros_like(x[:, 0]).float(), []
        for t in range(x.shape[1]):
            begins = documents.positions_BT[:, t] == 0
            if t % 64:  # what is carried into a chunk is not reset
                state = torch.where(begins[:, None], 0, state)
            state = decays[:, t] * state + x[:, t]
            outputs.append(state)
        return self.out(torch.stack(outputs, 1).to(x.dtype))


class NormOverTokens(nn.Module):
    """A normalisation over the tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 1))

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        return (F.layer_norm(x.mT, (x.shape[1],)) * self.weight).mT


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        x = x + self.mixer(self.norm(x), documents)
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """Three blocks, of which the second has the mixer to test."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(Attention()), Block(mixer), Block(Attention())])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Any, targets: Any = None, documents: Any = None, cu_seqlens: Any = None) -> torch.Tensor:
        packed, x = Documents.of(documents, cu_seqlens), self.table(tokens)
        for block in self.blocks:
            x = block(x, packed)
        logits = self.head(x)
        return logits if targets is None else cross_entropy(logits, targets)


def weigh(model: nn.Module, weights: str) -> nn.Module:
    """Set weights: `fresh` ones are small and end each mixer with zeros, `trained` ones are large."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.split("."):
                continue
            parameter.copy_(noise * (0.02 if weights == "fresh" else 0.4))
            if weights == "zeros" and name.endswith("mixer.out.weight"):
                parameter.zero_()
    return model


MIXERS = {
    "attention": lambda: Attention(leaks=True),
    "convolution": Convolution,
    "recurrent state": Recurrence,
    "bias by absolute position": lambda: Attention(biased=True),
    "normalisation over tokens": NormOverTokens,
}


EVERYDAY = [("float32", "trained"), ("bfloat16", "fresh")]


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        pytest.param(dtype, weights, marks=[] if (dtype, weights) in EVERYDAY else pytest.mark.campaign)
        for dtype in ("float32", "bfloat16")
        for weights in ("fresh", "zeros", "trained")
    ],
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_each_kind_of_leak_is_found_and_named(mixer: str, dtype: str, weights: str) -> None:
    model = weigh(Model(MIXERS[mixer]()), weights).to(getattr(torch, dtype))
    leak = find_leak(model, VOCAB, SEQ_LEN, torch.device("cpu"))
    kind = type(model.blocks[1].mixer).__name__  # type: ignore[index, union-attr]
    assert leak == f"through blocks.1.mixer ({kind})"


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "fresh"), ("bfloat16", "trained")])
def test_model_without_a_leak_passes(dtype: str, weights: str) -> None:
    """With frozen weights, on rows of any length; no gradient of a weight is left."""
    model = weigh(Model(Attention()), weights).to(getattr(torch, dtype))
    model.table.requires_grad_(False)  # type: ignore[union-attr, operator]
    for seq_len in (SEQ_LEN, 33, 4, 1):
        assert find_leak(model, VOCAB, seq_len, torch.device("cpu")) is None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.campaign)])
def test_own_models_pass(name: str, dtype: str) -> None:
    model = build(name).to(getattr(torch, dtype))
    assert find_leak(model, 50, 32 if name == "gpt2" else 512, torch.device("cpu")) is None


@pytest.mark.campaign
@pytest.mark.parametrize("weights", ["fresh", "trained"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mamba"])
def test_models_of_transformers_pass(kind: str, dtype: str, weights: str) -> None:
    """Dense and mixtures, windows, capped logits, tied and learned positions."""
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    recipe, settings = find_recipe("hf"), settings_of(kind).to_dict()
    torch.manual_seed(0)
    model = recipe.build_model(recipe.config(path="unused", config=settings))
    if weights == "trained":
        model.load_state_dict(model_of(kind).state_dict())
    assert find_leak(model.to(getattr(torch, dtype)), 257, 128, torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["nproc=2", "fsdp.param_dtype=bfloat16", "train.activation_checkpoint=full"],
        pytest.param([], marks=pytest.mark.campaign),
        pytest.param(["fsdp.param_dtype=bfloat16", "train.compile=true"], marks=pytest.mark.campaign),
    ],
    ids=["sharded and recomputed", "plain", "compiled"],
)
def test_run_is_rejected_before_its_first_step(more: list[str], tmp_path: Path) -> None:
    """What the model carries over a border is less than the rounding of bfloat16."""
    shared = [item for item in tiny_overrides("data.documents=masked", *more) if not item.startswith("model.")]
    model = "model.name=tests.helpers.custom_recipes:carrying"
    ran = run_command(tmp_path / "run", "recipe=llama_small", model, *shared)
    assert ran.exit_code == 2
    assert ran.stderr.count("data.documents=masked") == 1
    assert (
        "model.name=tests.helpers.custom_recipes:carrying lets documents in one row influence each other" in ran.stderr
    )
    assert "through hidden.1 (Carry)" in ran.stderr
    assert not (tmp_path / "run").exists()
