"""Context parallelism: slices of sequences on several ranks give the losses, gradients and checkpoints of one rank."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer.recipes.llama.config import LlamaConfig

from tests.helpers.ranks import run_command, run_ranks, run_tiny, tiny_overrides
from tests.helpers.runs import STEPS, SharedRun
from tests.plan.test_plan import measure
from tests.sequence.test_document_isolation import LENGTHS, TINY, alone, inputs, numbers
from tests.trainer.test_exactness import relative
from trainer import Trainer, UserError, load_config
from trainer.config import MeshShape, Slices, check_config, find_slices, resolve_context_method, smallest_mesh
from trainer.config.mesh import with_context
from trainer.data.loader import EvalLoader, TrainLoader, slice_batch
from trainer.data.opening import open_source
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan, without_data
from trainer.plan.search import fastest_choice, remedies
from trainer.sequence import Documents, attend, attention, positions, use_slices

CAMPAIGN = pytest.mark.campaign
GATHER, HEADS = "mesh.context_method=gather", "mesh.context_method=heads"
MASKED = ["data.documents=masked"]


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
    one_row = tiny_overrides("train.micro_batch_size=1")
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
            check_config(load_config("llama_small", tiny_overrides(*overrides)), ranks, ranks)
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
    config = load_config("llama_small", tiny_overrides("mesh.context=2", "model.num_kv_heads=2"))
    assert resolve_context_method(config, 4).mesh.context_method == "heads"
    assert resolve_context_method(config, 1).mesh.context_method == "gather"
    config = load_config("llama_small", tiny_overrides("mesh.context=4", "model.num_kv_heads=2"))
    assert resolve_context_method(config, 4).mesh.context_method == "gather"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "checkpointing", "num_kv_heads"),
    [
        (4, "none", 2),
        (8, "full", 4),
        pytest.param(8, "none", 4, marks=CAMPAIGN),
        *(pytest.param(c, how, 2, marks=CAMPAIGN) for c in (2, 8) for how in ("none", "full", "selective", "2")),
    ],
)
def test_slice_needs_the_memory_of_a_sequence_of_its_length(
    context: int, checkpointing: str, num_kv_heads: int
) -> None:
    """Plus the keys and values of one block; a real run needs what is planned (`test_plan.py`).

    Of three blocks, every second one is recomputed, so two keep their results.
    """

    def peak(num_tokens: int, *overrides: str) -> int:
        given = [f"data.seq_len={num_tokens}", "model.max_seq_len=8192", f"train.activation_checkpoint={checkpointing}"]
        given += [f"model.num_kv_heads={num_kv_heads}", "train.micro_batch_size=1"]
        config = without_data(load_config("llama_small", [*given, *overrides]))
        return make_plan(config, MeshShape(1, 8), find_machine("cpu")).memory.peak.total

    batch = f"train.global_batch_size={8 // context}"
    whole = peak(8192 // context, "train.global_batch_size=8")
    in_slices = peak(8192, batch, f"mesh.context={context}", GATHER)
    model = load_config("llama_small").model
    assert isinstance(model, LlamaConfig)
    keys_and_values = 4 * 2 * 8192 * model.dim * num_kv_heads // model.num_heads
    assert in_slices <= 1.05 * whole + keys_and_values * (2 if checkpointing == "2" else 1)


@pytest.mark.campaign
def test_planner_chooses_slices_if_a_sequence_does_not_fit() -> None:
    given = ["data.seq_len=4096", "model.max_seq_len=4096", "train.micro_batch_size=1", "train.global_batch_size=8"]
    config, mesh = without_data(load_config("llama_small", tiny_overrides(*given))), MeshShape(1, 8)
    plain = make_plan(config, mesh, find_machine("h100"))
    eighth = make_plan(resolve_context_method(with_context(config, 8), 8), mesh, plain.machine)
    assert eighth.memory.peak.total < 0.25 * plain.memory.peak.total
    narrow = plain.machine.with_budget(1.05 * eighth.memory.peak.total)
    assert any("mesh.context=8" in line for line in remedies(replace(plain, machine=narrow), limit=9))
    asks = replace(config, mesh=replace(config.mesh, context="auto"))
    assert fastest_choice(asks, mesh, narrow).plan.config.context == 8
    assert fastest_choice(asks, mesh, plain.machine).plan.config.context == 1, "there is room for all"
    sent = {found[:3] for found in eighth.collectives if found.axis == "context"}
    assert sent == {("all_gather", "context", 8), ("reduce_scatter", "context", 8)}


# ---------------------------------------------------------------------------------------------------------------
# On ranks


def train(runs: list[list[str]], num_steps: int, *shared: str) -> list[dict[str, Any]]:
    """Train and evaluate tiny llama_small with each list of overrides, one after another in one process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for overrides in runs:
        given = tiny_overrides("eval.every=100", "eval.steps=2", "train.steps=20", *shared, *overrides)
        trainer = Trainer(load_config("llama_small", given))
        records = list(islice(trainer.steps(), num_steps))
        held_out: Any = trainer.evaluate()
        trainer.close()
        fields = ("loss", "grad_norm", "tokens")
        found.append({name: [record[name] for record in records] for name in fields} | {"eval": held_out["loss"]})
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("method", [GATHER, HEADS])
def test_rank_of_a_hybrid_needs_the_memory_of_a_sequence_of_its_length(method: str) -> None:
    """Within 5 %: keys and values of one block, and the maps of linear attention, which do not grow with the sequence.

    Each of four ranks has 256 tokens of packed documents: a quarter of one sequence, or a sequence of its own.
    """
    shared = ["model.name=qwen3_next", "data.source=synthetic", *MASKED, "mesh.shard=4", "train.micro_batch_size=1"]
    shared += ["run.threads=1", "run.device=cpu", "log.sample_tokens=0"]
    own = ["data.seq_len=256", "train.global_batch_size=4"]
    quarter = ["data.seq_len=1024", "train.global_batch_size=1", "mesh.context=4", method]
    expected, found = (run_ranks(4, measure, [*shared, *more]) for more in (own, quarter))
    for (peak, _), (peak_of_own, _) in zip(found, expected, strict=True):
        assert peak <= 1.05 * peak_of_own


ON_TWO = [["mesh.context=2", GATHER], ["mesh.context=2", HEADS], ["mesh.context=2", GATHER]]
ON_FOUR = [
    ["mesh.context=4", GATHER, "train.micro_batch_size=1", "train.activation_checkpoint=full"],
    ["mesh.context=2", "mesh.replicate=2", HEADS, "fsdp.accumulate=sharded", "train.activation_checkpoint=selective"],
]
MORE_ON_FOUR = [
    [context, *method, *more]
    for context in ("mesh.context=2", "mesh.context=4")
    for method in ([GATHER], [HEADS])
    for more in (
        [],
        ["train.micro_batch_size=1", "fsdp.accumulate=sharded"],
        ["train.activation_checkpoint=selective"],
        ["train.activation_checkpoint=budget:0.3"],
        ["train.activation_checkpoint=2", "fsdp.reshard_after_forward=2"],
    )
]
COMPILED = [["mesh.context=2", "train.compile=true", *m] for m in ([GATHER], [HEADS])]
ON_EIGHT = [["mesh.context=4", "mesh.replicate=2", "train.global_batch_size=8", *m] for m in ([GATHER], [HEADS])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "runs", "data", "num_steps"),
    [
        pytest.param(2, ON_TWO, MASKED, 4, marks=CAMPAIGN),
        (4, ON_FOUR, MASKED, 4),
        pytest.param(4, MORE_ON_FOUR, [], 20, marks=CAMPAIGN),
        pytest.param(4, MORE_ON_FOUR, MASKED, 20, marks=CAMPAIGN),
        pytest.param(4, MORE_ON_FOUR, ["data.documents=masked", "data.fit=best"], 20, marks=CAMPAIGN),
        pytest.param(4, MORE_ON_FOUR, ["data.pack=false"], 20, marks=CAMPAIGN),
        pytest.param(2, COMPILED, MASKED, 20, marks=CAMPAIGN),
        pytest.param(2, COMPILED, [], 20, marks=CAMPAIGN),
        pytest.param(8, ON_EIGHT, MASKED, 20, marks=CAMPAIGN),
    ],
    ids=["2", "4", "4 joined", "4 masked", "4 packed", "4 ragged", "compiled masked", "compiled", "8"],
)
def test_slices_train_like_whole_sequences(
    ranks: int, runs: list[list[str]], data: list[str], num_steps: int, tmp_path: Path
) -> None:
    (whole,) = run_ranks(1, train, [[f"run.dir={tmp_path / 'one'}"]], num_steps, *data)[0]
    own = [[*overrides, f"run.dir={tmp_path / str(number)}"] for number, overrides in enumerate(runs)]
    found = run_ranks(ranks, train, own, num_steps, *data, timeout_s=900)[-1]
    for overrides, each in zip(runs, found, strict=True):
        assert relative(each["loss"], whole["loss"]) < 1e-6, overrides
        assert relative(each["grad_norm"], whole["grad_norm"]) < 1e-5, overrides
        assert relative([each["eval"]], [whole["eval"]]) < 1e-6, overrides
        assert each["tokens"] == whole["tokens"], overrides
    if runs is ON_TWO:
        assert found[0] == found[2], "the same mesh twice"


def train_models(models: list[list[str]], *mesh: str) -> list[list[float]]:
    """Train each model for three steps; return losses and norms."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    shared = [item for item in tiny_overrides("data.documents=masked", *mesh) if not item.startswith("model.")]
    found = []
    for overrides in models:
        trainer = Trainer(load_config("llama_small", [*shared, *overrides]))
        records = list(islice(trainer.steps(), 3))
        trainer.close()
        found.append([record[name] for record in records for name in ("loss", "grad_norm")])
    return found


_SHAPE = ["model.dim=32", "model.num_layers=2", "model.num_heads=4"]
MODELS = {
    "gpt2": ["model.name=gpt2", *_SHAPE, "model.max_seq_len=32", "model.vocab_size=257"],
    "qwen3": ["model.name=qwen3", *_SHAPE, "model.head_dim=8"],
    "qwen3_moe": ["model.name=qwen3_moe", *_SHAPE, "model.head_dim=8"],
    "qwen3_next": ["model.name=qwen3_next", "model.attention_every=2", *_SHAPE, "model.delta_key_dim=8"],
    "gpt_oss": ["model.name=gpt_oss", *_SHAPE, "model.head_dim=8", "model.window=5"],
    "deepseek_v3": ["model.name=deepseek_v3", *_SHAPE],
    "adapters": [*_SHAPE, "model.ffn_dim=64", "lora.rank=2"],
}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, ["mesh.context=2", GATHER]), (2, ["mesh.context=2", HEADS]), (4, ["mesh.context=4", GATHER])],
    ids=["gather", "heads", "4"],
)
def test_every_model_trains_in_slices(ranks: int, mesh: list[str], tmp_path: Path) -> None:
    runs = [[*overrides, f"run.dir={tmp_path / name}"] for name, overrides in MODELS.items()]
    whole = run_ranks(1, train_models, runs)[0]
    for name, found, right in zip(MODELS, run_ranks(ranks, train_models, runs, *mesh)[-1], whole, strict=True):
        assert relative(found, right) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "to",
    [
        ["nproc=2", "mesh.context=2", GATHER],
        pytest.param(["nproc=4", "mesh.context=4"], marks=CAMPAIGN),
        pytest.param(["nproc=4", "mesh.context=2", "mesh.replicate=2"], marks=CAMPAIGN),
    ],
    ids=["2", "4", "2x2"],
)
def test_run_resumes_with_slices(to: list[str], tmp_path: Path, one: SharedRun) -> None:
    ran = run_tiny(one.copy_to(tmp_path / "run", up_to=10), f"train.steps={STEPS}", "log.sample_tokens=4", *to)
    starts = [line for line in ran.metrics if line["kind"] == "start"]
    assert [line["resumed_step"] for line in starts] == [None, 10]
    assert starts[-1]["mesh"]["context"] == int(to[1][-1])
    assert "context" not in starts[0]["mesh"]
    assert "Warning" not in ran.stderr
    assert relative(ran.train("loss"), one.ran.train("loss")) < 1e-6
    assert ran.train("tokens") == one.ran.train("tokens")


@pytest.mark.campaign
@pytest.mark.parametrize("to", [["nproc=1"], ["nproc=4"], ["nproc=4", "mesh.context=4"]], ids=["1", "4", "4 of 4"])
def test_run_with_slices_resumes_on_different_meshes(to: list[str], tmp_path: Path, one: SharedRun) -> None:
    run_tiny(tmp_path / "run", "nproc=2", "mesh.context=2", "train.steps=10", "schedule.name=constant")
    ran = run_tiny(tmp_path / "run", "train.steps=20", *to, "schedule.name=constant")
    straight = run_tiny(tmp_path / "straight", "train.steps=20", "schedule.name=constant")
    assert relative(ran.train("loss"), straight.train("loss")) < 1e-6


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
    settings = [text for text in tiny_overrides("nproc=2", "mesh.context=2", GATHER) if not text.startswith("model.")]
    shape = [] if recipe == "shifting" else ["model.dim=32", "model.num_layers=2", "model.num_heads=4"]
    model = [f"model.name=tests.helpers.custom_recipes:{recipe}", *shape]
    ran = run_command(tmp_path / "run", "recipe=llama_small", *model, *settings)
    assert ran.exit_code == 2, ran.stderr
    assert "mixes or counts tokens outside trainer.sequence" in ran.stderr
    assert re.search(r"tokens is [\d.]+ on full sequences and [\d.]+ on slices", ran.stderr)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
