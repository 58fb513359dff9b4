"""Context parallelism: slices of sequences on several ranks give the losses, gradients and checkpoints of one rank."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.launch import start, tiny
from tests.sequence.test_document_isolation import LENGTHS, TINY, alone, inputs, numbers
from trainer import Trainer, UserError, load_config
from trainer.config import Slices, check_config, find_slices, resolve_context_method, smallest_mesh
from trainer.data.loader import EvalLoader, TrainLoader, slice_batch
from trainer.data.opening import open_source
from trainer.sequence import Documents, attend, attention, positions, use_slices

CAMPAIGN = pytest.mark.campaign
GATHER, HEADS = "mesh.context_method=gather", "mesh.context_method=heads"


def slices_of(count: int, method: str, seq_len: int = 32) -> list[Slices]:
    return [Slices(number, count, method, seq_len) for number in range(count)]


def part_of(slices: Slices, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in slices.pieces], dim)


# ---------------------------------------------------------------------------------------------------------------
# Without processes


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_slices_make_up_the_sequence(method: str, count: int) -> None:
    found = slices_of(count, method)
    tokens = [token for each in found for start, stop in each.pieces for token in range(start, stop)]
    assert sorted(tokens) == list(range(32))
    assert all(sum(stop - start for start, stop in each.pieces) == each.num_tokens for each in found)
    if method == "gather":  # each token attends to those before it: all ranks have as much to do
        assert len({sum(sum(range(start, stop)) for start, stop in each.pieces) for each in found}) == 1


@pytest.mark.parametrize("lengths", [None, LENGTHS, TINY], ids=["whole rows", "documents", "tiny documents"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_slice_attends_to_its_whole_sequence(
    lengths: list[list[int]] | None, count: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the formula, with the keys and values of other ranks passed in without processes."""
    if is_packed:  # as a GPU does
        monkeypatch.setattr(attention, "varlen_attn", _packed)
        monkeypatch.setattr(attention, "_attend_per_document", lambda *given: attention._attend_packed(*given[:4]))
        monkeypatch.setattr(Documents, "are_tiny", False)
    whole = inputs(lengths or [[32]] * 2)
    expected = alone(*whole, lengths or [[32]] * 2)
    every = slices_of(count, "gather", whole[0].shape[2])
    parts = torch.stack([torch.cat([part_of(each, tensor, 2) for tensor in whole[1:]], -1) for each in every])
    monkeypatch.setattr(attention, "gather_parts", lambda part, num_parts, group: parts)
    found = []
    for each in every:
        with use_slices(each):
            documents = None if lengths is None else Documents.of(numbers(lengths))
            q, k, v = (part_of(each, tensor, 2) for tensor in whole)
            found.append(attend(q, k, v, documents))
            right = torch.arange(each.seq_len) if lengths is None else Documents(numbers(lengths)).positions_BT
            assert torch.equal(positions(q[:, 0, :, 0], None, documents), part_of(each, right, -1))
    expected_parts = [part_of(each, expected, 2) for each in every]
    for mine, theirs in zip(found, expected_parts, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    shares = [part_of(each, weights, 2) for each in every]
    total = sum((mine * share).sum() for mine, share in zip(found, shares, strict=True))
    for mine, theirs in zip(
        torch.autograd.grad(total, whole), torch.autograd.grad((expected * weights).sum(), whole), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def _packed(q: Any, k: Any, v: Any, of_queries: Any, of_keys: Any, *sizes: int, **more: Any) -> Any:
    """Compute by a loop what the kernel does on a GPU: a document's last query is aligned with its last key."""
    found = []
    for number in range(len(of_keys) - 1):
        start, stop = of_queries[number : number + 2].tolist()
        first, last = of_keys[number : number + 2].tolist()
        if start < stop:
            heads = [x.transpose(0, 1)[None] for x in (q[start:stop], k[first:last], v[first:last])]
            found.append(attention.attend_full(*heads)[0].transpose(0, 1))
    return torch.cat(found)


def test_ranks_of_a_group_read_the_same_rows() -> None:
    one_row = tiny("train.micro_batch_size=1")
    config = load_config("llama_small", [*one_row, "mesh.context=2", GATHER])
    source = open_source(config.data, 257, "train")
    whole = TrainLoader.from_config(source, load_config("llama_small", one_row), 0, 1, torch.device("cpu"))
    expected = [next(whole) for _ in range(8)]
    for rank in range(4):
        loader = TrainLoader.from_config(source, config, rank, 4, torch.device("cpu"))
        assert loader.micro_batches_per_step == config.num_micro_batches(4) == 4
        slices = find_slices(config, rank)
        assert slices is not None
        for number in range(4):
            batch, right = next(loader), expected[4 * (rank // 2) + number]
            for name in ("tokens", "targets"):
                assert torch.equal(batch[name], part_of(slices, right[name], 1))
    held_out = [EvalLoader.from_config(source, config, rank, 4) for rank in range(4)]
    batches = [next(iter(loader))["targets"] for loader in held_out]
    assert not torch.equal(batches[0], batches[2])
    assert batches[0].shape == (1, 16)


def test_entries_with_one_value_per_row_are_not_sliced() -> None:
    """Such as the source of a row; nor are document numbers, which each slice needs."""
    tokens = np.arange(64).reshape(2, 32)
    batch = {"tokens": tokens, "documents": tokens // 8, "source": np.array([0, 1]), "weights": np.ones((2, 3))}
    for each in slices_of(2, "gather"):
        found = slice_batch(batch, each)
        assert found["tokens"].tolist() == part_of(each, torch.from_numpy(tokens), 1).tolist()
        assert all(np.array_equal(found[name], batch[name]) for name in ("documents", "source", "weights"))


def test_mistakes() -> None:
    for overrides, ranks, said in (
        (["mesh.context=3"], 4, "mesh.context=3: must divide the shard axis, 4.*2"),
        (["mesh.context=4", "mesh.replicate=2"], 4, "mesh.context=4: must divide the shard axis, 2.*2"),
        (["mesh.context=2", "train.global_batch_size=9"], 4, "4 ranks / mesh.context=2 x train.micro.*a multiple of 2"),
        (["mesh.context=2", "data.seq_len=30", GATHER], 2, "data.seq_len=30: must be a multiple of 4: 2 x mesh.*32"),
        (["mesh.context=4", "data.seq_len=30", HEADS], 4, "data.seq_len=30: must be a multiple of 4: mesh.context=4"),
        (["mesh.context=8", HEADS], 8, "mesh.context_method=heads: mesh.context=8 does not divide model.num_heads=4"),
        (["mesh.context=2", "train.objective=dpo"], 2, "compares whole responses"),
    ):
        with pytest.raises(UserError, match=f"(?s){said}"):
            check_config(load_config("llama_small", tiny(*overrides)), ranks, ranks)
    own = load_config(
        "llama_small", ["model.name=tests.helpers.custom_recipes:mlp", "mesh.context=2", "data.seq_len=32"]
    )
    with pytest.raises(UserError, match=r"does not declare that only trainer\.sequence"):
        check_config(own, 2, 2)


def test_configuration_is_valid_if_the_number_of_ranks_is_unknown() -> None:
    config = load_config("llama_small", ["mesh.context=4", "train.global_batch_size=8"])
    least = smallest_mesh(config)
    assert least.shard == 4
    check_config(config, least.num_ranks, least.shard)


def test_the_method_follows_from_heads_and_nodes() -> None:
    config = load_config("llama_small", tiny("mesh.context=2", "model.num_kv_heads=2"))
    assert resolve_context_method(config, 4).mesh.context_method == "heads"
    assert resolve_context_method(config, 1).mesh.context_method == "gather"
    config = load_config("llama_small", tiny("mesh.context=4", "model.num_kv_heads=2"))
    assert resolve_context_method(config, 4).mesh.context_method == "gather"


# ---------------------------------------------------------------------------------------------------------------
# On ranks


def train(runs: list[list[str]], num_steps: int, *shared: str) -> list[dict[str, Any]]:
    """Train and evaluate tiny llama_small with each list of overrides, one after another in one process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for overrides in runs:
        given = tiny("eval.every=100", "eval.steps=2", "train.steps=20", *shared, *overrides)
        trainer = Trainer(load_config("llama_small", given))
        records = list(islice(trainer.steps(), num_steps))
        held_out: Any = trainer.evaluate()
        trainer.close()
        fields = ("loss", "grad_norm", "tokens")
        found.append({name: [record[name] for record in records] for name in fields} | {"eval": held_out["loss"]})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "shifting",
        pytest.param("llama_attending", marks=CAMPAIGN),
        pytest.param("llama_counting", marks=CAMPAIGN),
    ],
)
def test_recipe_that_mixes_tokens_outside_attention_is_rejected(recipe: str, tmp_path: Path) -> None:
    """The recipe claims not to; the message has both numbers, and no files are left."""
    settings = [text for text in tiny("nproc=2", "mesh.context=2", GATHER) if not text.startswith("model.")]
    shape = [] if recipe == "shifting" else ["model.dim=32", "model.num_layers=2", "model.num_heads=4"]
    model = [f"model.name=tests.helpers.custom_recipes:{recipe}", *shape]
    ran = start(tmp_path / "run", "recipe=llama_small", *model, *settings).wait()
    assert ran.code == 2, ran.err
    assert "mixes or counts tokens outside trainer.sequence" in ran.err
    assert re.search(r"tokens is [\d.]+ on full sequences and [\d.]+ on slices", ran.err)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
