"""Packing of documents into rows: masked, best fit or one per row. What is learned does not depend on the packing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.data import BYTES_END, read_all, stream_of, tokens_section, write_shards
from tests.helpers.tiny import tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config.rules import check_config
from trainer.data import shards as shard_files
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.mixture import sample_at
from trainer.data.opening import open_source
from trainer.data.packing import best_fit
from trainer.data.source import IGNORE

DOCUMENTS = ["abcdefg", "h", "ijklmnopqrstuvwxyz", "0123"]
Pairs = list[tuple[int, int]]


def texts(seed: int, count: int, longest: int = 40) -> list[str]:
    draws = np.random.default_rng(seed)
    return ["".join(map(chr, draws.integers(33, 127, draws.integers(1, longest)))) for _ in range(count)]


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


@pytest.fixture(scope="module", params=[0, 1, 3])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The documents in one or two shards."""
    parts = [part for part in (DOCUMENTS[: request.param], DOCUMENTS[request.param :]) if part]
    return write_shards(tmp_path_factory.mktemp("shards"), *parts)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 32, 33])
def test_masked_windows_are_the_stream_with_document_numbers(shards: str, seq_len: int) -> None:
    batch = read_all(open_source(tokens_section(shards, seq_len=seq_len, documents="masked"), 257, "train"))
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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """Two shards of documents of many lengths, and their texts."""
    corpus = [texts(0, 150), texts(1, 80)]
    return write_shards(tmp_path_factory.mktemp("many"), *corpus), [*corpus[0], *corpus[1]]


@pytest.mark.parametrize(("documents", "fit"), [("masked", "best"), ("joined", "best"), ("apart", "cut")])
@pytest.mark.parametrize("is_in_files", [False, True])
def test_each_document_is_in_exactly_one_row(
    many: tuple[str, list[str]], documents: str, fit: str, is_in_files: bool, monkeypatch: Any, tmp_path: Path
) -> None:
    """Uncut if it fits, and cut into as few pieces as possible if not; whether rows are held in memory or in files."""
    path, corpus = many
    seq_len = 32
    if is_in_files:  # as those of millions of documents are
        monkeypatch.setattr(shard_files, "MAX_DOCUMENTS_IN_MEMORY", 0)
    data = tokens_section(path, seq_len=seq_len, documents=documents, fit=fit, cache_dir=str(tmp_path / "cache"))
    batch = read_all(open_source(data, 257, "train"))
    expected: list[Pairs] = []
    for text in corpus:
        pairs = list(itertools.pairwise(stream_of([text])))
        expected += [pairs[start : start + seq_len] for start in range(0, len(pairs), seq_len)]
    kept = batch["targets"] != IGNORE
    found = zip(batch["tokens"][kept].tolist(), batch["targets"][kept].tolist(), strict=True)
    assert sorted(found) == sorted(itertools.chain(*expected))
    assert (batch["tokens"][~kept] <= BYTES_END).all()
    if documents == "masked":
        pieces = pieces_in(batch)
        assert sorted(pairs for _, pairs in pieces) == sorted(expected)
        assert all(where == list(range(len(where))) for where, _ in pieces), "positions are counted from 0"
    if fit == "best":
        assert kept.mean() > 0.95


def test_best_fit_fills_rows_and_is_stable() -> None:
    """A position refers to an order of rows: a changed packing would repeat some documents and skip others."""
    lengths = np.random.default_rng(0).integers(1, 100, 5000)
    order, begins = best_fit(lengths, 128)
    filled = np.add.reduceat(lengths[order], begins[:-1])
    assert sorted(order.tolist()) == list(range(5000))
    assert filled.max() <= 128
    assert len(filled) <= np.ceil(lengths.sum() / 128) * 1.01
    assert best_fit(np.array([3, 9, 5, 5, 1, 7]), 10)[0].tolist() == [1, 4, 0, 5, 2, 3]


def test_rows_have_not_changed_between_versions(tmp_path: Path) -> None:
    """As with the order of samples, a resumed run would repeat some documents and skip others."""
    documents = ["aa", "bbbbbbbb", "cccc", "dddd", "e", "ffffff"]
    data = tokens_section(write_shards(tmp_path, documents), seq_len=10, documents="masked", fit="best")
    batch = read_all(open_source(data, 257, "train"))
    kept = batch["targets"] != IGNORE
    rows = ["".join(map(chr, tokens[own])) for tokens, own in zip(batch["tokens"], kept, strict=True)]
    assert rows == ["ccccffffff", "dddde", "aabbbbbbbb"]


def test_mean_attended_length(tmp_path: Path) -> None:
    """The sum of squared document lengths divided by the tokens of a row, however the documents were found."""
    path = write_shards(tmp_path, texts(0, 100))
    for fit in ("cut", "best"):
        source = open_source(tokens_section(path, seq_len=64, documents="masked", fit=fit), 257, "train")
        batch = read_all(source)
        lengths = [n for row in batch["documents"] for n in np.unique(row, return_counts=True)[1]]
        if fit == "best":
            lengths = [len(where) for where, _ in pieces_in(batch)]
        assert source.attended == pytest.approx(np.square(lengths).sum() / batch["tokens"].size, rel=1e-6)
    assert open_source(tokens_section(path, seq_len=64), 257, "train").attended is None


def test_loaders_pass_document_boundaries_on(many: tuple[str, list[str]]) -> None:
    source = open_source(tokens_section(many[0], seq_len=32, documents="masked", fit="best"), 257, "train")
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
            loader.close()


def test_flops_are_those_of_the_attended_length(many: tuple[str, list[str]], tmp_path: Path) -> None:
    """The FLOPs per token, on which `mfu` is based, are lower for masked documents."""
    data = ["data.source=tokens", f"data.path={many[0]}", "model.vocab_size=257", "data.seq_len=256", "train.steps=1"]
    found = {}
    for documents in ("masked", "joined"):
        trainer = Trainer(tiny_config(tmp_path / documents, *data, f"data.documents={documents}"))
        assert trainer.spec.flops is not None
        attended = trainer.loader.source.attended or 256
        assert trainer.flops_per_token == trainer.spec.flops(trainer.config.model, attended)
        found[documents] = trainer.flops_per_token
        trainer.close()
    assert found["masked"] < found["joined"]


def test_one_document_a_row_is_not_packed() -> None:
    with pytest.raises(UserError) as caught:
        check_config(load_config("llama_small", ["data.documents=apart", "data.fit=best"]), 1, 1)
    assert str(caught.value).startswith("data.fit=best: ")
