"""Models of attention and layers with a state (`model.name=hf`): packed documents equal documents in separate rows."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.helpers.cases import campaign_except
from tests.helpers.hf_models import HYBRIDS, STATE_SPACE, folder_of, model_of, overrides, settings_of
from tests.helpers.launch import on_ranks
from tests.helpers.tiny import lines
from trainer import Source, Trainer, TrainLoader, UserError, generate_batch, load_config, load_weights
from trainer.config.schema import LoraSection
from trainer.loss import IGNORE
from trainer.model.lora import AdaptedLinear, add_adapters
from trainer.model.units import find_blocks
from trainer.registry import find_model
from trainer.sequence import Documents, apply_by_document

LENGTHS = (17, 1, 70, 40)
"""Lengths of the documents in a row: within chunks and across them."""

EVERYDAY = ("qwen3_next", "nemotron_h", "lfm2")
"""A gated delta rule with a mixture, a state space, and convolutions alone."""


def build(kind: str) -> Any:
    """Return the model as a run has it, with the weights of `model_of`."""
    torch.manual_seed(0)
    there, spec = model_of(kind), find_model("hf")
    model = spec.build_model(spec.config(path="unused", config=there.config.to_dict()))
    model.load_state_dict(there.state_dict())
    return model


def batch_of(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    tokens, targets = (torch.randint(3, 257, documents.shape, generator=generator) for _ in range(2))
    targets[0, 20:25] = IGNORE
    return {"tokens": tokens, "targets": targets, "documents": documents}


SEPARABLE = [*HYBRIDS, "granitemoehybrid", "lfm2_moe", "minimax", "qwen3_5_moe"]
MIXING = ["mamba", "mamba2", "falcon_mamba", "jamba", "recurrent_gemma", "rwkv", "bloom"]
"""Their blocks pass nothing on to the layers that mix documents, or only masks tell these where documents begin."""


@pytest.mark.parametrize("kind", campaign_except(SEPARABLE, EVERYDAY))
def test_packed_documents_equal_documents_apart(kind: str) -> None:
    """Loss and gradients."""
    model, batch = build(kind), batch_of(LENGTHS)
    loss = model(**batch)
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    spans = [slice(end - length, end) for length, end in zip(LENGTHS, itertools.accumulate(LENGTHS), strict=True)]
    losses = [model(batch["tokens"][:, span], batch["targets"][:, span]) for span in spans]
    sum(losses).backward()
    separate = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert loss.item() == pytest.approx(sum(one.item() for one in losses), rel=1e-6)
    assert packed.keys() == separate.keys()
    errors = {name: (packed[name] - gradient).norm() for name, gradient in separate.items()}
    total = torch.stack([gradient.norm() for gradient in separate.values()]).norm()
    assert torch.stack([*errors.values()]).norm() < 1e-6 * total
    for name, error in errors.items():  # those of decays are sums that cancel
        assert error <= 5e-5 * separate[name].norm(), name


@pytest.mark.parametrize("kind", campaign_except(MIXING, ("mamba", "bloom")))
def test_a_model_that_mixes_documents_raises(kind: str) -> None:
    """Whoever calls it, and also the second time."""
    model, batch = build(kind).eval(), batch_of(LENGTHS)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(UserError, match="lets documents in one row influence each other: through"):
            model(batch["tokens"], documents=batch["documents"])
    expected = model_of(kind).eval()(input_ids=batch["tokens"], use_cache=False).logits
    torch.testing.assert_close(model(batch["tokens"]), expected)


def test_documents_are_kept_apart_in_weights_that_are_loaded(tmp_path: Path) -> None:
    model, batch = load_weights(folder_of(tmp_path / "source", "lfm2")), batch_of(LENGTHS)
    with torch.inference_mode():
        expected = torch.cat([model(part) for part in batch["tokens"].split(list(LENGTHS), 1)], 1)
        torch.testing.assert_close(model(batch["tokens"], documents=batch["documents"]), expected)
    with pytest.raises(UserError, match="MambaForCausalLM lets documents in one row"):
        load_weights(folder_of(tmp_path / "other", "mamba"))(batch["tokens"], documents=batch["documents"])


def with_another_release(model: Any, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return the model with convolutions that are called otherwise, as if the library had changed both sides."""
    original = next(type(module) for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")

    class Lfm2ShortConv(original):  # type: ignore[misc, valid-type]
        def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            return super().__call__(**changed({"hidden_states": hidden_states, **kwargs}))

        def forward(self, states: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(states, **kwargs)

    for module in model.modules():
        if type(module) is original:
            module.__class__ = Lfm2ShortConv
    return model


def test_a_library_that_renames_arguments_of_its_layers_keeps_documents_apart() -> None:
    def renamed(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"states" if name == "hidden_states" else name: value for name, value in arguments.items()}

    model, batch = with_another_release(build("lfm2"), renamed), batch_of(LENGTHS)
    with torch.no_grad():
        expected = torch.cat([model(part) for part in batch["tokens"].split(list(LENGTHS), 1)], 1)
        torch.testing.assert_close(model(batch["tokens"], documents=batch["documents"]), expected)


def test_a_library_that_passes_on_other_arguments_is_refused() -> None:
    """Without documents at the first call, or later without hidden states that can be divided into documents."""
    left_out = {"documents"}

    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        states = arguments.pop("hidden_states")
        kept = {name: value for name, value in arguments.items() if name not in left_out}
        return {"states": states if left_out else states.unsqueeze(1), **kept}

    model, batch = with_another_release(build("lfm2"), changed), batch_of(LENGTHS)
    with torch.no_grad(), pytest.raises(UserError, match="lets documents in one row influence each other: through"):
        model(batch["tokens"], documents=batch["documents"])
    model, left_out = with_another_release(build("lfm2"), changed), set()
    model.are_documents_apart = True  # as if checked
    model.reset_at_documents([next(name for name, module in model.named_modules() if name.endswith(".conv"))])
    with torch.no_grad(), pytest.raises(ValueError, match="Lfm2ShortConv has to reset its state at documents"):
        model(batch["tokens"], documents=batch["documents"])


def test_no_size_of_a_convolution_is_taken_for_a_number_of_tokens() -> None:
    """A convolution has inputs (B, D, T): with D = T it could be taken for the layer that mixes documents."""
    settings = settings_of("lfm2", hidden_size=320, intermediate_size=32)
    torch.manual_seed(0)
    spec = find_model("hf")
    model, batch = spec.build_model(spec.config(path="unused", config=settings.to_dict())), batch_of(LENGTHS)
    with torch.no_grad():
        expected = torch.cat([model(part) for part in batch["tokens"].split(list(LENGTHS), 1)], 1)
        torch.testing.assert_close(model(batch["tokens"], documents=batch["documents"]), expected)


def logits_of_a_sharded_model(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of packed documents and of documents apart, with weights divided among ranks."""
    own = ["data.seq_len=128", "mesh.shard=2", "train.steps=1", f"run.dir={folder / 'run'}"]
    trainer = Trainer(load_config("llama_small", overrides(folder / "source", *own)))
    assert len([*trainer.steps()]) == 1
    batch = batch_of(LENGTHS)
    with torch.no_grad():
        packed = trainer.model(batch["tokens"], documents=batch["documents"])
        apart = torch.cat([trainer.model(part) for part in batch["tokens"].split(list(LENGTHS), 1)], 1)
    trainer.close()
    return packed, apart


@pytest.mark.slow
def test_documents_are_kept_apart_in_a_sharded_model_that_was_built_without_them(tmp_path: Path) -> None:
    folder_of(tmp_path / "source", "lfm2")
    for packed, apart in on_ranks(2, logits_of_a_sharded_model, tmp_path):
        torch.testing.assert_close(packed, apart)


def test_documents_become_rows_of_similar_length() -> None:
    """Few calls with little padding, whatever the lengths; rows that are one document are passed on as they are."""
    lengths_of_rows = [LENGTHS, (128,), (64, 64)]
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


# ---------------------------------------------------------------------------------------------------------------
# Adapters and generated texts


@pytest.mark.parametrize("kind", campaign_except([*HYBRIDS, *STATE_SPACE], ("mamba", "nemotron_h", "jamba")))
def test_adapters_equal_weights_with_their_product_added(kind: str) -> None:
    """Also in layers whose weight is used without a call of the layer; and every factor gets a gradient."""
    model: Any = build(kind)
    add_adapters(model, find_blocks(model, find_model("hf")), LoraSection(rank=4, alpha=8.0, targets="all-linear"))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}
    generator, there = torch.Generator().manual_seed(9), model_of(kind)
    with torch.no_grad():
        for name, layer in layers.items():
            for factor in layer.factors:
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
            there.get_submodule(name).weight += 2.0 * layer.factors[1] @ layer.factors[0]
    batch = batch_of(LENGTHS)
    model.train()
    model(batch["tokens"], batch["targets"]).backward()
    assert layers
    for name, layer in layers.items():
        assert all(factor.grad is not None and factor.grad.any() for factor in layer.factors), name
    expected = there.eval()(input_ids=batch["tokens"], use_cache=False).logits
    found = model.eval()(batch["tokens"])
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("kind", campaign_except([*HYBRIDS, *STATE_SPACE], (*EVERYDAY, "mamba", "recurrent_gemma")))
@pytest.mark.filterwarnings("error")
def test_texts_equal_those_without_a_cache(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a warning about a name that the library will drop."""
    prompts = [[5, 40, 3, 99, 7], [17, 4, 8, 100, 23]]
    for model in (build(kind).eval(), model_of(kind).eval()):
        with without_warnings_once(caplog):
            found = [completion.tokens for completion in generate_batch(model, prompts, 8)]
        assert not [message for message in caplog.messages if "deprecated" in message]
        sequences = torch.tensor(prompts)
        with torch.no_grad():
            for _ in range(8):
                logits = model(input_ids=sequences, use_cache=False).logits[:, -1]
                sequences = torch.cat([sequences, logits.argmax(1, keepdim=True)], 1)
        assert found == sequences[:, 5:].tolist()


@contextmanager
def without_warnings_once(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let transformers log its warnings again that it logs once, and to `caplog`."""
    logger = logging.getLogger("transformers")
    type(logger).warning_once.cache_clear()  # type: ignore[attr-defined]
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


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
    """Train three updates; return the losses.

    The settings do not amplify rounding: a larger learning rate, or AdamW's usual epsilon, which moves a weight by the
    learning rate even if its gradient is only a rounding error, changes the losses as much as packing does.
    """
    number = 2 if packed else 4
    own = ["data.seq_len=48", f"train.global_batch_size={number}", f"data.seed={int(packed)}", f"run.dir={out}"]
    own += [f"train.micro_batch_size={1 if packed else 4}", "optim.lr=2e-5", "optim.eps=1e-6", "train.steps=3"]
    trainer = OnRows(load_config("llama_small", overrides(folder, *own, *more, name=name)))
    assert name == "hf" or trainer.config.model.name == "qwen3_next"
    assert trainer.fit() == 0
    trainer.close()
    return [line["loss"] for line in lines(out) if line["kind"] == "train"]


ADAPTERS = ["lora.rank=4", "lora.targets=all-linear"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        pytest.param("lfm2", "hf", ADAPTERS, id="adapters"),
        pytest.param("nemotron_h", "hf", ADAPTERS, id="state space"),
        pytest.param("qwen3_next", "hf", [], id="delta rule"),
        pytest.param("falcon_h1", "hf", ADAPTERS, id="in parallel"),
        pytest.param("qwen3_5", "hf", ["train.freeze=['*embed*','*norm*']"], id="frozen"),
        pytest.param("qwen3_next", "auto", [], id="native"),
        pytest.param("qwen3_next", "auto", ADAPTERS, id="native adapters"),
    ],
)
def test_runs_on_packed_documents_equal_runs_on_documents_apart(
    kind: str, name: str, more: list[str], tmp_path: Path
) -> None:
    """With accumulated gradients and recomputation in one of them."""
    folder = folder_of(tmp_path / "source", kind)
    expected = losses_of(folder, tmp_path / "apart", *more, packed=False, name=name)
    found = losses_of(folder, tmp_path / "packed", "train.activation_checkpoint=full", *more, name=name)
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0], "they train"


def test_compiled_blocks_reject_packed_documents(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "source", "lfm2")
    with pytest.raises(UserError, match=r"^train\.compile=true"):
        losses_of(folder, tmp_path / "run", "train.compile=true")
