"""Models of attention and layers with a state (`model.name=hf`): packed documents equal documents in separate rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.helpers.hf_models import HYBRIDS, folder_of, model_of
from tests.model.test_hf import kinds, overrides
from trainer import Source, Trainer, TrainLoader, UserError, load_config
from trainer.lifecycle.document_check import find_leak
from trainer.loss import IGNORE
from trainer.recipe import find_recipe
from trainer.sequence import Documents, apply_by_document

LENGTHS = ((17, 1, 70, 40),)
"""Lengths of the documents in each row: within chunks and across them."""

EVERYDAY = ("qwen3_next", "nemotron_h", "lfm2")
"""A gated delta rule with a mixture, a state space, and convolutions alone."""


def build(kind: str) -> Any:
    """Return the model as a run has it, with the weights of `model_of`."""
    torch.manual_seed(0)
    there, recipe = model_of(kind), find_recipe("hf")
    model = recipe.build_model(recipe.config(path="unused", config=there.config.to_dict()))
    model.load_state_dict(there.state_dict())
    return model


def batch_of(lengths: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    documents = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths])
    tokens, targets = (torch.randint(3, 257, documents.shape, generator=generator) for _ in range(2))
    targets[0, 20:25] = IGNORE
    return {"tokens": tokens, "targets": targets, "documents": documents}


def apart(batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens and targets of each document, in a row for each."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            found.append(tuple(batch[name][row : row + 1, end - length : end] for name in ("tokens", "targets")))
    return found


@pytest.mark.parametrize("kind", kinds([*HYBRIDS], EVERYDAY))
def test_packed_documents_equal_documents_apart(kind: str) -> None:
    """Loss and gradients; and no gradient crosses a border."""
    model, batch = build(kind), batch_of(LENGTHS)
    loss = model(**batch)
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    losses = [model(tokens, targets) for tokens, targets in apart(batch)]
    sum(losses).backward()
    separate = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert loss.item() == pytest.approx(sum(one.item() for one in losses), rel=1e-6)
    assert packed.keys() == separate.keys()
    errors = {name: (packed[name] - gradient).norm() for name, gradient in separate.items()}
    total = torch.stack([gradient.norm() for gradient in separate.values()]).norm()
    assert torch.stack([*errors.values()]).norm() < 1e-6 * total
    for name, error in errors.items():  # those of decays are sums that cancel
        assert error <= 5e-5 * separate[name].norm(), name
    assert find_leak(model, 257, 320, torch.device("cpu")) is None


def test_documents_become_rows_of_similar_length() -> None:
    """Few calls with little padding, whatever the lengths; rows that are one document are passed on as they are."""
    lengths_of_rows = [*LENGTHS, (128,), (64, 64)]
    documents = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths_of_rows])
    x = torch.randn(3, 128, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    shapes: list[tuple[int, ...]] = []

    def layer(rows: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(rows.shape))
        return rows.cumsum(1)

    packed = Documents.of(documents)
    assert packed is not None
    found = apply_by_document(layer, x, packed)
    parts = [part for row, lengths in zip(x, lengths_of_rows, strict=True) for part in row.split(list(lengths))]
    expected = torch.cat([part.cumsum(0) for part in parts]).view_as(x)
    torch.testing.assert_close(found, expected)
    assert shapes == [(1, 17, 2), (1, 1, 2), (3, 70, 2), (1, 40, 2), (1, 128, 2)]
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    mine, theirs = (torch.autograd.grad((output * weights).sum(), x)[0] for output in (found, expected))
    torch.testing.assert_close(mine, theirs)
    shapes.clear()
    whole = Documents.of(torch.zeros(3, 128, dtype=torch.int64))
    assert whole is not None
    assert torch.equal(apply_by_document(layer, x, whole), x.cumsum(1))
    assert shapes == [(3, 128, 2)]


# ---------------------------------------------------------------------------------------------------------------
# In a run

SIZES = (17, 31, 40, 8)
"""Of the documents that every update trains on: two in each row of 48 tokens, or each in a row of its own."""


class Rows(Source):
    """The same documents in every epoch of as many samples as an update has."""

    def __init__(self, is_packed: bool) -> None:
        self.seq_len, self.vocab_size = 48, 257
        generator = np.random.default_rng(3)
        documents = [generator.integers(3, 257, size) for size in SIZES]
        self.rows = [documents[:2], documents[2:]] if is_packed else [[document] for document in documents]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Any) -> dict[str, Any]:
        shape = (len(indices), self.seq_len)
        tokens, targets = np.ones(shape, np.int64), np.full(shape, IGNORE, np.int64)
        documents = np.full(shape, 9, np.int64)  # of what is left of a row
        for row, index in enumerate(indices):
            start = 0
            for number, document in enumerate(self.rows[index]):
                end = start + len(document)
                tokens[row, start:end], documents[row, start:end] = document, number
                targets[row, start : end - 1] = document[1:]
                start = end
        return {"tokens": tokens, "targets": targets, "documents": documents}


class OnRows(Trainer):
    """Trains on them; `data.seed=1` packs them."""

    def build_loader(self) -> TrainLoader:
        source = Rows(self.config.data.seed == 1)
        return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)


def losses_of(folder: Path, out: Path, *more: str, packed: bool = True, name: str = "hf") -> list[float]:
    """Train 20 updates; return the losses.

    The settings do not amplify rounding.  With larger ones, documents apart in other micro-batches, or weights that
    differ in the last bit, change the losses as much as packing: after 20 updates qwen3_next, which chooses experts,
    differs by 2.6e-4 at a learning rate of 1e-4, and by 2.7e-7 at this one; qwen3_5 by up to 4.5e-5 with AdamW's usual
    epsilon of 1e-8, which moves a weight by the learning rate even if its gradient is only a rounding error.
    """
    number = 2 if packed else 4
    settings = ["data.seq_len=48", f"train.global_batch_size={number}", f"data.seed={int(packed)}", f"run.dir={out}"]
    settings += ["optim.lr=2e-5", "optim.eps=1e-6", "checkpoint.every=0"]
    trainer = OnRows(load_config("llama_small", overrides(folder, *settings, *more, name=name)))
    assert name == "hf" or trainer.config.model.name == "qwen3_next"
    assert trainer.fit() == 0
    trainer.close()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds(["qwen3_next", "nemotron_h", "falcon_h1", "qwen3_5"], ("nemotron_h",)))
@pytest.mark.parametrize(
    "more",
    [
        ["lora.rank=4", "lora.targets=all-linear"],
        pytest.param([], marks=pytest.mark.campaign),
        pytest.param(["train.freeze=['*embed*','*norm*']"], marks=pytest.mark.campaign),
    ],
    ids=["adapters", "plain", "frozen"],
)
def test_runs_on_packed_documents_equal_runs_on_documents_apart(kind: str, more: list[str], tmp_path: Path) -> None:
    """With accumulated gradients, with and without recomputation, on one rank: 20 updates."""
    folder = folder_of(tmp_path / "source", kind)
    expected = losses_of(folder, tmp_path / "apart", "train.micro_batch_size=4", *more, packed=False)
    found = losses_of(folder, tmp_path / "packed", "train.activation_checkpoint=full", *more)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.campaign
@pytest.mark.parametrize("more", [[], ["lora.rank=4", "lora.targets=all-linear"]], ids=["plain", "adapters"])
def test_native_runs_on_packed_documents_equal_runs_on_documents_apart(more: list[str], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "source", "qwen3_next")
    apart = ["train.micro_batch_size=4", *more]
    expected = losses_of(folder, tmp_path / "apart", *apart, packed=False, name="auto")
    found = losses_of(folder, tmp_path / "packed", "train.activation_checkpoint=full", *more, name="auto")
    assert found == pytest.approx(expected, rel=1e-5)


def test_compiled_blocks_reject_packed_documents(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "source", "lfm2")
    with pytest.raises(UserError, match=r"train\.compile=true: compiled blocks cannot separate documents(?s:.*)=false"):
        losses_of(folder, tmp_path / "run", "train.compile=true")
