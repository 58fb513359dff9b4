"""docs/compatibility.md, the page of what works with what: it is complete, and runs do what it states."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
pytest.importorskip("tokenizers", reason="an objective's chats are tokenized with the library `tokenizers`")

from tests import compatibility
from tests.compatibility import FEATURES, KINDS, WORKS, Pair
from trainer import UserError
from trainer.config.rules import check_config

REFUSED = [
    Pair("llama", ("exchange",)),
    Pair("hf_dense", ("context",)),
    Pair("llama", ("context", "reward")),
    Pair("llama", ("tensor", "reward")),
    Pair("llama", ("tensor", "float8")),
    Pair("llama", ("tensor", "int8")),
    Pair("llama", ("context", "classify")),
    Pair("llama", ("nf4", "float8")),
    Pair("llama", ("budget", "float8")),
    Pair("llama", ("muon", "int8")),
    Pair("gpt2", ("gather",)),
    Pair("qwen3_moe", ("exchange", "compile")),
]
"""Pairs that a configuration alone decides, before a model is built."""


def stated() -> dict[Pair, str]:
    return compatibility.read_page(compatibility.PAGE.read_text())


def test_the_page_lists_every_kind_and_feature_and_each_pair_once() -> None:
    names = list(FEATURES)
    expected = [*compatibility.pairs_of_kinds(names), *compatibility.pairs_of_features(names)]
    assert sorted(map(repr, stated())) == sorted(map(repr, expected))
    text = compatibility.PAGE.read_text()
    assert compatibility.page(stated()) == text, "the page was edited by hand: python -m tests.compatibility --write"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and weights for the pairs of this file."""
    path = tmp_path_factory.mktemp("compatibility")
    compatibility.prepare(path, ["llama", "hf_dense"])
    return path


@pytest.mark.slow
def test_a_refusal_prints_the_sentence_of_the_page(folder: Path) -> None:
    page = stated()
    for pair in REFUSED:
        with pytest.raises(UserError) as refusal:
            check_config(compatibility.config_of(pair, folder), pair.num_ranks, pair.num_ranks)
        assert compatibility.first_line(refusal.value, folder) == page[pair], pair


@pytest.mark.slow
def test_pairs_that_ranks_try_do_what_the_page_says(folder: Path) -> None:
    """One that works, and one that is refused only when the model has been built."""
    pairs = [Pair("llama", ("masked", "ema")), Pair("llama", ("lora_experts",))]
    results, page = compatibility.try_pairs(pairs, folder), stated()
    assert results == {pair: page[pair] for pair in pairs}
    assert [result == WORKS for result in results.values()] == [True, False]


@pytest.mark.campaign
def test_the_page_is_what_all_tries_write() -> None:
    """Without torchao, float8 is left as the page states it."""
    names = compatibility.available_features()
    pairs = [*compatibility.pairs_of_kinds(names), *compatibility.pairs_of_features(names)]
    assert len(pairs) > len(KINDS) * len(names)
    results = stated() | compatibility.try_all(pairs)
    assert compatibility.page(results) == compatibility.PAGE.read_text()
