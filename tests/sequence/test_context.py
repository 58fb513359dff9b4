"""Context parallelism: ranks with slices of sequences read the same rows, need less memory, and give the same numbers.

What attention computes on slices is in `test_windows_and_sinks.py` and `test_linear_attention.py`; that runs with
slices train like runs without is a row of the table in `tests/exactness/`.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.launch import merged, on_ranks, run, tiny
from tests.helpers.plan_truth import measure
from tests.helpers.slices import LENGTHS, numbers, part_of, slices_of
from trainer import Trainer, TrainLoader, UserError, load_config
from trainer.config.parallel import find_slices, resolve_context_method, smallest_mesh
from trainer.config.rules import check_config
from trainer.data.loader import EvalLoader, slice_batch
from trainer.data.opening import open_source
from trainer.data.source import IGNORE
from trainer.sequence import Documents, positions, use_slices

GATHER, HEADS = "mesh.context_method=gather", "mesh.context_method=heads"
MASKED = "data.documents=masked"


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_slices_make_up_the_sequence(method: str, count: int) -> None:
    found = slices_of(count, method)
    tokens = [token for each in found for start, stop in each.pieces for token in range(start, stop)]
    assert sorted(tokens) == list(range(32))
    assert all(sum(stop - start for start, stop in each.pieces) == each.num_tokens for each in found)
    if method == "gather":  # each token attends to those before it: all ranks have as much to do
        assert len({sum(sum(range(start, stop)) for start, stop in each.pieces) for each in found}) == 1


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("count", [2, 4])
def test_positions_of_a_slice_are_those_of_the_whole_sequence(method: str, count: int) -> None:
    of_documents = torch.tensor([[i for length in row for i in range(length)] for row in LENGTHS])
    for each in slices_of(count, method):
        with use_slices(each):
            tokens = part_of(each, of_documents, 1)
            assert torch.equal(positions(tokens), part_of(each, torch.arange(32), 0))
            assert torch.equal(positions(tokens, None, Documents.of(numbers(LENGTHS))), tokens)


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
    batch["targets"] = np.where(tokens % 3, tokens, IGNORE)
    for each in slices_of(2, "gather"):
        found = slice_batch(batch, each)
        assert found["tokens"].tolist() == part_of(each, torch.from_numpy(tokens), 1).tolist()
        assert all(np.array_equal(found[name], batch[name]) for name in ("documents", "source", "weights"))
        assert found["targets_per_row"].tolist() == [21, 21], "of whole rows"


@pytest.mark.parametrize(
    ("overrides", "ranks", "setting"),
    [
        (["mesh.context=3"], 4, "mesh.context=3"),
        (["mesh.context=4", "mesh.replicate=2"], 4, "mesh.context=4"),
        (["mesh.context=2", "train.global_batch_size=9"], 4, "train.global_batch_size=9"),
        (["mesh.context=2", "data.seq_len=30", GATHER], 2, "data.seq_len=30"),
        (["mesh.context=4", "data.seq_len=30", HEADS], 4, "data.seq_len=30"),
        (["mesh.context=8", HEADS], 8, HEADS),
        (["mesh.context=2", "train.objective=reward"], 2, "mesh.context=2"),
        (["mesh.context=2", "model.name=tests.helpers.custom_recipes:mlp"], 2, "mesh.context=2"),
    ],
)
def test_mistakes(overrides: list[str], ranks: int, setting: str) -> None:
    """Sizes that do not divide, objectives that score a text, and a model that does not declare that it may."""
    given = tiny(*overrides)
    if "mlp" in overrides[-1]:
        given = [item for item in given if not item.startswith("model.") or "mlp" in item]
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", given), ranks, ranks)
    assert str(refused.value).startswith(setting)


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

LLAMA = ["model.name=llama", "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.ffn_dim=64"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "ranks", "method"),
    [
        (LLAMA, 2, GATHER),
        (["model.name=qwen3_next"], 4, GATHER),
        (["model.name=qwen3_next"], 4, HEADS),
    ],
    ids=["gather", "hybrid gather", "hybrid heads"],
)
def test_rank_needs_the_memory_of_a_sequence_of_its_length(model: list[str], ranks: int, method: str) -> None:
    """Within 5 %: keys and values of one block, and the maps of linear attention, which do not grow with the sequence.

    Each rank has 256 tokens of packed documents: its part of one sequence, or a sequence of its own.
    """
    shared = [*model, "data.source=synthetic", MASKED, "train.micro_batch_size=1", "run.threads=1", "run.device=cpu"]
    shared += ["log.sample_tokens=0", "model.vocab_size=257", "run.dir=never_written", f"mesh.shard={ranks}"]
    own = ["data.seq_len=256", f"train.global_batch_size={ranks}"]
    part = [f"data.seq_len={256 * ranks}", "train.global_batch_size=1", f"mesh.context={ranks}", method]
    expected, found = (on_ranks(ranks, measure, "llama_small", [*shared, *more]) for more in (own, part))
    for (peak, _), (peak_of_own, _) in zip(found, expected, strict=True):
        assert peak <= 1.05 * peak_of_own


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "shifting",
        pytest.param("llama_attending", marks=pytest.mark.campaign),
        pytest.param("llama_counting", marks=pytest.mark.campaign),
    ],
)
def test_recipe_that_mixes_tokens_outside_attention_is_rejected(recipe: str, tmp_path: Path) -> None:
    """Although it claims not to. No files are left."""
    shape = [] if recipe == "shifting" else ["model.dim=32", "model.num_layers=2", "model.num_heads=4"]
    settings = [item for item in tiny("nproc=2", "mesh.context=2", GATHER) if not item.startswith("model.")]
    model = [f"model.name=tests.helpers.custom_recipes:{recipe}", *shape]
    ran = run(tmp_path / "run", "recipe=llama_small", *model, *settings, code=2)
    assert "trainer.sequence" in ran.err, "what it must use instead"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---------------------------------------------------------------------------------------------------------------
# More than the table's rows: other recomputation, data and models


def train(folder: Path, runs: list[list[str]], num_steps: int) -> list[dict[str, Any]]:
    """Train and evaluate with each list of overrides, one after another in one process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, overrides in enumerate(runs):
        own = ["eval.every=100", "eval.steps=2", "train.steps=20", f"run.dir={folder / str(number)}"]
        given = merged(tiny(*own), overrides)
        named = any(item.startswith("model.name=") for item in overrides)
        given = [item for item in given if not named or not item.startswith("model.") or item in overrides]
        trainer = Trainer(load_config("llama_small", given))
        records = list(islice(trainer.steps(), num_steps))
        held_out: Any = trainer.evaluate()
        trainer.close()
        fields = ("loss", "grad_norm", "tokens")
        found.append({name: [record[name] for record in records] for name in fields} | {"eval": [held_out["loss"]]})
    return found


ON_FOUR = [
    ["mesh.context=4", GATHER, "train.micro_batch_size=1", "train.activation_checkpoint=full"],
    ["mesh.context=2", "mesh.replicate=2", HEADS, "fsdp.accumulate=sharded", "train.activation_checkpoint=selective"],
    ["mesh.context=4", HEADS, "train.activation_checkpoint=budget:0.3"],
    ["mesh.context=2", GATHER, "train.activation_checkpoint=2", "fsdp.reshard_after_forward=2"],
]


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "meshes", "data"),
    [
        (4, ON_FOUR, ["data.documents=joined"]),
        (4, ON_FOUR, [MASKED]),
        (4, ON_FOUR, [MASKED, "data.fit=best"]),
        (4, ON_FOUR, ["data.documents=apart"]),
        (2, [["mesh.context=2", "train.compile=true", method] for method in (GATHER, HEADS)], [MASKED]),
        (8, [["mesh.context=4", "mesh.replicate=2", GATHER]], [MASKED]),
    ],
    ids=["joined", "masked", "best fit", "apart", "compiled", "8"],
)
def test_slices_train_like_whole_sequences(
    ranks: int, meshes: list[list[str]], data: list[str], tmp_path: Path
) -> None:
    ((whole,),) = on_ranks(1, train, tmp_path / "whole", [data], 20)
    sliced = on_ranks(ranks, train, tmp_path / "sliced", [[*data, *mesh] for mesh in meshes], 20)[-1]
    for mesh, found in zip(meshes, sliced, strict=True):
        assert_same(found, whole, str(mesh))


def assert_same(found: dict[str, Any], whole: dict[str, Any], what: str) -> None:
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6), what
    assert found["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5), what
    assert found["eval"] == pytest.approx(whole["eval"], rel=1e-6), what
    assert found["tokens"] == whole["tokens"], what


_SHAPE = ["model.dim=32", "model.num_layers=2", "model.num_heads=4"]
MODELS = {
    "gpt2": [*_SHAPE, "model.max_seq_len=32", "model.vocab_size=257"],
    "qwen3": [*_SHAPE, "model.head_dim=8"],
    "qwen3_moe": [*_SHAPE, "model.head_dim=8"],
    "qwen3_next": ["model.attention_every=2", *_SHAPE, "model.delta_key_dim=8"],
    "gpt_oss": [*_SHAPE, "model.head_dim=8", "model.window=5"],
    "deepseek_v3": _SHAPE,
    "llama": [*_SHAPE, "model.ffn_dim=64", "lora.rank=2"],
}


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "method"), [(2, GATHER), (2, HEADS), (4, GATHER)])
def test_every_model_trains_in_slices(ranks: int, method: str, tmp_path: Path) -> None:
    runs = [[f"model.name={name}", *overrides, MASKED] for name, overrides in MODELS.items()]
    sliced = [[*overrides, f"mesh.context={ranks}", method] for overrides in runs]
    (whole,) = on_ranks(1, train, tmp_path / "whole", runs, 3)
    found_in_slices = on_ranks(ranks, train, tmp_path / "sliced", sliced, 3)[-1]
    for name, found, right in zip(MODELS, found_in_slices, whole, strict=True):
        for field in ("loss", "grad_norm"):
            assert found[field] == pytest.approx(right[field], rel=1e-5), name
