"""The check that documents in one row do not influence each other finds every kind of leak and names its module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.hf_models import KINDS, settings_of
from tests.helpers.launch import merged, run, tiny
from trainer import ModelSpec, Trainer, UserError, load_config, register
from trainer.loss import cross_entropy
from trainer.model.documents import guard_documents
from trainer.model.parameters import local
from trainer.sequence import Documents, attend

SEQ_LEN, VOCAB, WIDTH = 512, 257, 32


class Attention(nn.Module):
    """Attention that ignores documents if `leaks`, and adds a bias by absolute position if `biased`."""

    def __init__(self, leaks: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.leaks = leaks
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(SEQ_LEN)) if biased else None

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

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
        self.weight = nn.Parameter(torch.ones(WIDTH, 1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

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


@dataclass
class Config:
    vocab_size: int = VOCAB
    mixer: str = ""


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "nothing": Attention,
    "attention": lambda: Attention(leaks=True),
    "convolution": Convolution,
    "recurrent state": Recurrence,
    "bias by absolute position": lambda: Attention(biased=True),
    "normalization over tokens": NormOverTokens,
}
register(ModelSpec("mixing", Config, lambda config: Model(MIXERS[config.mixer]()), ["blocks.*"]))


def set_weights(model: nn.Module, kind: str) -> None:
    """Set weights: `fresh` ones are small, `zeros` also end each mixer with zeros, `trained` ones are large."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.split("."):
                continue
            noise = torch.randn(parameter.shape, generator=generator) * (0.4 if kind == "trained" else 0.02)
            local(parameter).copy_(noise)  # of one rank, which has all of it
            if kind == "zeros" and name.endswith("mixer.out.weight"):
                parameter.zero_()


def start(folder: Path, model: list[str], weights: str = "", *overrides: str) -> None:
    """Start a run of a model on rows with several documents; raises if the model lets them influence each other."""
    (folder / "text.txt").write_text("one two three\n\n" * 200)
    own = [*model, "data.source=tokens", f"data.path={folder / 'text.txt'}", "data.documents=masked", *overrides]
    base = [item for item in tiny(f"data.seq_len={SEQ_LEN}") if not item.startswith("model.")]
    trainer = Trainer(load_config("llama_small", [*merged(base, own), f"run.dir={folder / 'run'}"]))
    if weights:
        set_weights(trainer.model, weights)
    try:
        trainer.start()
    finally:
        trainer.close()


EVERYDAY = [("float32", "trained"), ("bfloat16", "fresh")]


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        pytest.param(dtype, weights, marks=[] if (dtype, weights) in EVERYDAY else pytest.mark.campaign)
        for dtype in ("float32", "bfloat16")
        for weights in ("fresh", "zeros", "trained")
    ],
)
@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if mixer != "nothing"])
def test_each_kind_of_leak_is_found_and_named(mixer: str, dtype: str, weights: str, tmp_path: Path) -> None:
    model = ["model.name=mixing", f"model.mixer={mixer}"]
    with pytest.raises(UserError) as refused:
        start(tmp_path, model, weights, f"train.weights_dtype={dtype}")
    assert "data.documents=masked" in str(refused.value)
    assert f"blocks.1.mixer ({type(MIXERS[mixer]()).__name__})" in str(refused.value)


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "fresh"), ("bfloat16", "trained")])
@pytest.mark.parametrize("seq_len", [SEQ_LEN, *(pytest.param(n, marks=pytest.mark.campaign) for n in (33, 4))])
def test_model_without_a_leak_passes(seq_len: int, dtype: str, weights: str, tmp_path: Path) -> None:
    model = ["model.name=mixing", "model.mixer=nothing"]
    start(tmp_path, model, weights, f"train.weights_dtype={dtype}", f"data.seq_len={seq_len}")


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mamba"])
def test_models_of_transformers_pass(kind: str, dtype: str, tmp_path: Path) -> None:
    """Dense and mixtures, windows, capped logits, tied and learned positions."""
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    settings_of(kind).save_pretrained(tmp_path / "model")
    model = ["model.name=hf", f"model.path={tmp_path / 'model'}"]
    start(tmp_path, model, "", f"train.weights_dtype={dtype}", "data.seq_len=128")


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
    shared = [item for item in tiny("data.documents=masked", *more) if not item.startswith("model.")]
    model = "model.name=tests.helpers.custom_recipes:carrying"
    refused = run(tmp_path / "run", "recipe=llama_small", model, *shared, code=2)
    assert refused.err.count("data.documents=masked") == 1
    assert model in refused.err
    assert "hidden.1 (Carry)" in refused.err
    assert not (tmp_path / "run").exists()


def test_a_model_of_ones_own_is_checked_at_its_first_call_with_documents() -> None:
    documents = torch.tensor([[0] * 5 + [1] * 7])
    tokens = torch.randint(VOCAB, documents.shape, generator=torch.Generator().manual_seed(2))
    for kind in ("nothing", "convolution"):
        model = Model(MIXERS[kind]())
        set_weights(model, "fresh")
        guard_documents(model)
        if kind == "nothing":
            expected = torch.cat([model(part, documents=torch.zeros_like(part)) for part in tokens.split([5, 7], 1)], 1)
            torch.testing.assert_close(model(tokens, documents=documents), expected)
            continue
        with pytest.raises(UserError, match=r"Model lets documents .* through blocks\.1\.mixer \(Convolution\)"):
            model(tokens, documents=documents)
