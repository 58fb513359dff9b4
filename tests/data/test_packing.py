"""Packing of documents into rows: masked, best fit or one per row. What is learned does not depend on the packing."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer.recipes.gpt2.config import GPT2Config
from trainer.recipes.gpt2.model import GPT2

from tests.data.test_data import DOCUMENTS, stream_of, write_shards
from tests.helpers.ranks import run_ranks, run_tiny
from tests.trainer.test_custom_loops import tiny_config
from tests.trainer.test_exactness import relative, train_each
from trainer import Recipe, Trainer, UserError, load_config, register
from trainer.config import DataSection, check_config
from trainer.data import packing
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.mixture import sample_at
from trainer.data.opening import open_source
from trainer.data.packing import best_fit
from trainer.data.source import IGNORE
from trainer.plan.probe import Probe

Pairs = list[tuple[int, int]]
MASKED, BEST = "data.documents=masked", "data.fit=best"


def section(path: str, seq_len: int, documents: Any = "masked", fit: Any = "cut", **more: Any) -> DataSection:
    return DataSection(source="tokens", path=path, seq_len=seq_len, documents=documents, fit=fit, **more)


def texts(seed: int, count: int, longest: int = 40) -> list[bytes]:
    draws = np.random.default_rng(seed)
    return [draws.integers(0, 256, draws.integers(0, longest), dtype=np.uint8).tobytes() for _ in range(count)]


def pieces_in(batch: Any) -> list[tuple[list[int], Pairs]]:
    """Return the positions, and the pairs of token and target, of each document in each row."""
    found = []
    for row in range(len(batch["tokens"])):
        columns = zip(
            *(batch[name][row].tolist() for name in ("documents", "positions", "tokens", "targets")), strict=True
        )
        for _, entries in itertools.groupby(columns, key=lambda entry: entry[0]):
            kept = [(position, token, target) for _, position, token, target in entries if target != IGNORE]
            found.append(([position for position, _, _ in kept], [(token, target) for _, token, target in kept]))
    return [piece for piece in found if piece[1]]


@pytest.fixture(params=["kept in memory", "kept in files"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Positions of a few documents are kept in memory, or in files as those of many documents are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "kept in files":
        monkeypatch.setattr(packing, "MAX_DOCUMENTS_IN_MEMORY", 0)
        monkeypatch.setattr(packing, "_BLOCK", 7)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 33, 34])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_masked_windows_are_the_stream_with_document_numbers(tmp_path: Path, seq_len: int, cut: int) -> None:
    """An end-of-document token may occur within a document, and a shard may end anywhere."""
    shards = [part for part in (DOCUMENTS[:cut], DOCUMENTS[cut:]) if part]
    source = open_source(section(write_shards(tmp_path, *shards), seq_len), 257, "train")
    batch: Any = source.batch(np.arange(len(source)))
    stream, place, expected = stream_of(DOCUMENTS), 0, []
    for text in DOCUMENTS:
        ends = place + len(text)  # where its last token is, which has no target
        for start, inside in itertools.groupby(range(place, ends), key=lambda at: at // seq_len):
            first = max(place, start * seq_len)
            expected.append([(at - first, stream[at], stream[at + 1]) for at in inside])
        place = ends + 1
    found = [list(zip(where, *zip(*pairs, strict=True), strict=True)) for where, pairs in pieces_in(batch)]
    assert found == expected
    assert batch["documents"].dtype == batch["positions"].dtype == np.int32
    assert (np.diff(batch["documents"]) >= 0).all()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("documents", ["masked", "joined", "apart"])
def test_each_document_is_in_exactly_one_row(tmp_path: Path, documents: str) -> None:
    seq_len, corpus = 32, [texts(0, 150), texts(1, 80)]
    fit = "cut" if documents == "apart" else "best"
    source = open_source(section(write_shards(tmp_path, *corpus), seq_len, documents, fit), 257, "train")
    tokens, targets = (np.asarray(entry) for entry in [*_entries(source)][:2])
    expected: list[Pairs] = []
    for text in itertools.chain(*corpus):
        pairs = list(itertools.pairwise([*text, 256]))
        expected += [pairs[start : start + seq_len] for start in range(0, len(pairs), seq_len)]
    kept = targets != IGNORE
    assert sorted(zip(tokens[kept], targets[kept], strict=True)) == sorted(itertools.chain(*expected))
    if documents == "masked":
        found = pieces_in(source.batch(np.arange(len(source))))
        assert sorted(pairs for _, pairs in found) == sorted(pairs for pairs in expected if pairs)
        assert all(where == list(range(len(where))) for where, _ in found)
    if fit == "best":
        assert kept.mean() > (0.95 if packing.MAX_DOCUMENTS_IN_MEMORY else 0.85), (
            "of small blocks some rows are left over"
        )


def _entries(source: Any) -> Any:
    found = source.batch(np.arange(len(source)))
    return found if isinstance(found, tuple) else found.values()


def test_best_fit_fills_rows_and_is_stable() -> None:
    """A position refers to an order of rows: a changed packing would repeat some documents and skip others."""
    lengths = np.random.default_rng(0).integers(1, 100, 5000)
    order, begins = best_fit(lengths, 128)
    filled = np.add.reduceat(lengths[order], begins[:-1])
    assert sorted(order.tolist()) == list(range(5000))
    assert filled.max() <= 128
    assert len(filled) <= np.ceil(lengths.sum() / 128) * 1.01
    assert best_fit(np.array([3, 9, 5, 5, 1, 7]), 10)[0].tolist() == [1, 4, 0, 5, 2, 3]


def test_packing_is_computed_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_DOCUMENTS_IN_MEMORY", 0)
    data = section(write_shards(tmp_path, texts(0, 50)), 32, fit="best", cache_dir=str(tmp_path / "cache"))
    first = open_source(data, 257, "train").batch(np.arange(8))
    monkeypatch.setattr(packing, "_row_blocks", lambda *_: pytest.fail("it is there"))
    again = open_source(data, 257, "train").batch(np.arange(8))
    assert all(np.array_equal(first[name], again[name]) for name in first)  # type: ignore[index, call-overload]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [""]


def test_mean_attended_length(tmp_path: Path) -> None:
    """The sum of squared document lengths divided by the tokens of a row, however the documents were found."""
    path = write_shards(tmp_path, texts(0, 100))
    for fit in ("cut", "best"):
        source = open_source(section(path, 64, fit=fit), 257, "train")
        batch: Any = source.batch(np.arange(len(source)))
        lengths = [n for row in batch["documents"] for n in np.unique(row, return_counts=True)[1]]
        if fit == "best":
            lengths = [len(where) for where, _ in pieces_in(batch)]
        assert source.attended == pytest.approx(np.square(lengths).sum() / batch["tokens"].size, rel=1e-6)
    assert open_source(section(path, 64, "joined"), 257, "train").attended is None


def test_loaders_pass_document_boundaries_on(tmp_path: Path) -> None:
    source = open_source(section(write_shards(tmp_path, texts(0, 100)), 32, fit="best"), 257, "train")
    sizes: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 4}
    expected: Any = source.batch(sample_at(np.arange(4), len(source), 0))
    for loader in (TrainLoader(source, seed=0, **sizes), EvalLoader(source, **sizes)):
        batch = next(iter(loader))
        begins = (batch["positions"] == 0).flatten().nonzero().flatten()
        assert batch["cu_seqlens"].tolist() == [*begins.tolist(), 4 * 32]
        assert {name: entry.shape for name, entry in batch.items() if name != "cu_seqlens"} == dict.fromkeys(
            ("tokens", "targets", "documents", "positions"), torch.Size([4, 32])
        )
        if isinstance(loader, TrainLoader):
            assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def trainer_on(folder: Path, documents: str) -> Trainer:
    own = ["data.source=stdlib", "model.vocab_size=257", "data.seq_len=2048", documents, "train.steps=1"]
    return Trainer(tiny_config(folder, *own))


class Ignores(GPT2):
    """Takes documents, and makes nothing of them."""

    def forward(self, tokens: Any, targets: Any = None, documents: Any = None) -> Any:
        return super().forward(tokens, targets)


class CountsOn(GPT2):
    """Keeps documents to themselves, but counts through the row."""

    def forward(self, tokens: Any, targets: Any = None, documents: Any = None) -> Any:
        return super().forward(tokens, targets, torch.arange(tokens.shape[1]), documents)


class KnowsNone(GPT2):
    """Knows nothing of documents."""

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        return super().forward(tokens, targets)


for kind in (Ignores, CountsOn, KnowsNone):
    register(Recipe(name=f"packing_{kind.__name__}", config=GPT2Config, build=kind, units=["blocks.*"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Ignores, CountsOn, KnowsNone])
def test_model_that_mixes_documents_is_rejected(kind: type, tmp_path: Path) -> None:
    shape = [f"model.name=packing_{kind.__name__}", "model.dim=32", "model.num_heads=2", "model.num_layers=2"]
    data = ["data.source=stdlib", "data.path=null", "model.vocab_size=257", "data.tokenizer=bytes", "data.seq_len=32"]
    own = [*shape, *data, MASKED, "run.threads=1", "eval.every=0", "fsdp.param_dtype=float32", f"run.dir={tmp_path}"]
    trainer = Trainer(load_config("gpt2", own))
    with pytest.raises(UserError, match=r"data\.documents=masked: .*influence each other: .*\n.*data\.documents=apart"):
        trainer.fit()
    trainer.close()
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_flops_and_plan_use_the_attended_length(tmp_path: Path) -> None:
    """FLOPs per token, on which mfu is based, and the plan's attention cost are lower."""
    trainer, joined = (trainer_on(tmp_path / end, f"data.documents={end}") for end in ("masked", "joined"))
    attended = trainer.loader.source.attended  # type: ignore[attr-defined]
    assert 200 < attended < 2048
    flops, config = trainer.recipe.flops, trainer.config
    assert flops is not None
    assert (
        joined.flops_per_token == flops(config.model, 2048) > trainer.flops_per_token == flops(config.model, attended)
    )
    work = []
    for each in (config, joined.config):
        found: Counter[str] = Counter()
        for event in Probe(each, "cpu").trace(2, "none").events:
            for kernel, count in event.segment.work:
                found[kernel.kind] += kernel.flops * count
        work.append(found)
    assert work[0]["matmul"] == work[1]["matmul"]
    assert work[0]["attention"] == pytest.approx(work[1]["attention"] * attended / 2048, rel=1e-4)
    for each in (trainer, joined):
        each.close()


def test_wrong_combinations_are_rejected() -> None:
    for overrides, said in (
        (["data.pack=false", MASKED], "data.documents=masked: data.pack=false puts"),
        (["data.documents=apart", BEST], "data.fit=best: with one document"),
    ):
        with pytest.raises(UserError, match=said):
            check_config(load_config("llama_small", overrides), 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("several", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_packed_documents_train_the_same_on_every_mesh(several: int, tmp_path: Path) -> None:
    runs = [[], [BEST], [BEST, "train.activation_checkpoint=full", "train.micro_batch_size=1"]]
    found = {}
    for ranks, mesh in ((1, []), (several, ["mesh.replicate=2"] if several == 4 else [])):
        own = [[*run, *mesh, f"run.dir={tmp_path / f'{ranks}-{number}'}"] for number, run in enumerate(runs)]
        found[ranks] = run_ranks(ranks, train_each, own, 6, MASKED)[-1]
    for one, others in zip(found[1], found[several], strict=True):
        for field in ("loss", "grad_norm", "tokens"):
            assert relative(one[field], others[field]) < 1e-5
    assert found[1][1]["loss"] != found[1][0]["loss"]
    assert relative(found[1][1]["loss"], found[1][2]["loss"]) < 1e-6


@pytest.mark.campaign
def test_packed_documents_resume_bit_for_bit(tmp_path: Path) -> None:
    settings = [MASKED, BEST, "nproc=2", "eval.every=3", "eval.steps=1"]
    straight = run_tiny(tmp_path / "straight", *settings, "train.steps=4")
    run_tiny(tmp_path / "cut", *settings, "train.steps=2", "schedule.name=constant")
    resumed = run_tiny(tmp_path / "cut", *settings, "train.steps=4")
    assert resumed.train("loss")[2:] == straight.train("loss")[2:]
    held_out = [[line["loss"] for line in ran.metrics if line["kind"] == "eval"] for ran in (straight, resumed)]
    assert held_out[0][-2:] == held_out[1][-2:]
