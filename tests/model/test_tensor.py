"""Tensor parallelism: which tokens a rank holds, plans that do not fit a model, and states that go from mesh to mesh.

That runs with shared matrices train like runs without is a row of the table in `tests/exactness/`; that the planner
knows their collectives and their memory is in `tests/plan/`.
"""

from __future__ import annotations

import hashlib
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.helpers.cases import needs_torch
from tests.helpers.launch import merged, on_ranks, run, tiny
from tests.helpers.tiny import full
from trainer import Trainer, UserError, load_config
from trainer.config.parallel import Slices
from trainer.config.rules import check_config
from trainer.export import export_checkpoint
from trainer.model.network import build_network
from trainer.model.tensor import TensorGroup, find_plan, split_model, split_parameters
from trainer.sequence import Documents, attention_positions, positions, use_slices

MODEL = ("model.dim=64", "model.num_heads=4", "model.num_kv_heads=2", "model.num_layers=2", "model.ffn_dim=128")


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize(("count", "tensor"), [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (2, 3)])
def test_ranks_hold_each_token_once_and_groups_share_a_slice(method: str, count: int, tensor: int) -> None:
    found = [
        [Slices(number, count, method, 96, tensor_number=rank, tensor_count=tensor) for rank in range(tensor)]
        for number in range(count)
    ]
    every_token = []
    for group in found:
        own = [token for each in group for start, stop in each.own_pieces for token in range(start, stop)]
        assert own == [token for start, stop in group[0].pieces for token in range(start, stop)]
        every_token += own
        for each in group:
            with use_slices(each):
                tokens = torch.zeros(1, 96 // each.num_ranks)
                assert positions(tokens).tolist() == [t for start, stop in each.own_pieces for t in range(start, stop)]
                assert attention_positions(tokens).tolist() == own
                documents = Documents.of(torch.tensor([[0] * 40 + [1] * 56]))
                restarted = [token if token < 40 else token - 40 for token in own]
                assert attention_positions(tokens, None, documents).tolist() == [restarted]
    assert sorted(every_token) == list(range(96))


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["mesh.tensor=3"], 4, "mesh.tensor=3: must divide the shard axis, 4"),
        (["mesh.tensor=2", "mesh.shard=1", "mesh.replicate=2"], 2, "mesh.tensor=2: must divide the shard axis, 1"),
        (["mesh.tensor=2", "mesh.context=4"], 4, "mesh.context=4: must divide the shard axis, 4 / mesh.tensor=2"),
        (["mesh.tensor=4"], 4, "mesh.tensor=4: must divide model.num_kv_heads=2"),
        (["mesh.tensor=8", "model.num_kv_heads=4"], 8, "mesh.tensor=8: must divide model.num_heads=4"),
        (["mesh.tensor=2", "data.seq_len=31"], 2, "data.seq_len=31: must be a multiple of mesh.tensor=2"),
        (
            ["mesh.tensor=2", "train.global_batch_size=3"],
            4,
            "train.global_batch_size=3: must be 4 ranks / mesh.tensor",
        ),
        (["mesh.tensor=2", "fsdp.reshard_after_forward=2"], 2, "fsdp.reshard_after_forward=2: a number of ranks"),
        (["mesh.tensor=2", "train.objective=classify", "objective.num_labels=2"], 2, "mesh.tensor=2: train.objective"),
        (["mesh.tensor=2", "optim.state_dtype=int8"], 2, "optim.state_dtype=int8: rounds moments"),
        (["mesh.tensor=2", "optim.name=muon", "optim.muon.variant=normuon"], 2, "optim.muon.variant=normuon: keeps"),
        (["mesh.tensor=2", "train.float8=rowwise", "fsdp.param_dtype=bfloat16"], 2, "train.float8=rowwise: scales"),
        (["mesh.tensor=2", "model.name=qwen3_next"], 2, "mesh.tensor=2: model 'qwen3_next' does not say"),
    ],
)
def test_mistakes(overrides: list[str], ranks: int, message: str) -> None:
    given = tiny(*merged(MODEL, overrides))
    if "qwen3_next" in overrides[-1]:
        given = [item for item in given if not item.startswith("model.") or "qwen3_next" in item]
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", given), ranks, ranks)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("plan_with_a_missing_matrix", "no entry covers the matrix layers.0.attention.wk.weight"),
        ("plan_with_an_unknown_module", "the model has no module 'layers.*.mlp'"),
        ("plan_with_an_unknown_style", "unknown style 'column'"),
        ("plan_with_a_split_norm", "cannot split layers.0.ffn_norm by columns: it is a RMSNorm"),
    ],
)
def test_plan_that_does_not_name_the_models_matrices(plan: str, message: str) -> None:
    config = load_config("llama_small", tiny(*MODEL, f"model.name=tests.helpers.custom_recipes:{plan}"))
    with pytest.raises(UserError, match=r"tensor") as refused:
        split_model(build_network(config), config.spec, TensorGroup(2, 0, ""), mesh=None)
    assert message in str(refused.value)


def test_matrix_that_does_not_divide() -> None:
    config = load_config("llama_small", tiny(*merged(MODEL, ["model.ffn_dim=130"])))
    with pytest.raises(UserError, match=r"mesh.tensor=4: must divide the 130 rows of layers.0.feed_forward.w1.weight"):
        split_parameters(build_network(config), config.spec, 4)


WHOLE = {
    "gpt2": {"weight", "attention.qkv.weight"},
    "deepseek_v3": {"attention.wq_a.weight", "attention.wkv_a.weight"},
}
"""Position embeddings, fused matrices, and projections to latent vectors, which all heads need."""


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_plans_split_the_matrices_outside_experts(name: str) -> None:
    config = load_config("llama_small", [f"model.name={name}"])
    model = build_network(config)
    whole = {style for _, style in find_plan(model, config.spec, 2)} & {"sequence"}
    left = {
        parameter.partition(".")[2].lstrip("0123456789.")
        for parameter, tensor in model.named_parameters()
        if tensor.ndim > 1 and parameter not in split_parameters(model, config.spec, 2) and ".moe." not in parameter
    }
    assert left == WHOLE.get(name, set())
    assert bool(whole) == (name not in ("llama", "qwen3"))


# ---------------------------------------------------------------------------------------------------------------
# On ranks


@pytest.mark.slow
@needs_torch("2.12")
@pytest.mark.parametrize(
    ("plan", "more", "message"),
    [
        ("plan_with_columns_for_rows", [], "does not run with its plan"),
        ("plan_without_input", [], "does not run with its plan"),
        ("plan_with_whole_keys", ["model.num_kv_heads=4", "model.num_heads=8"], " of its norm, and "),
        ("plan_losing_gradient", ["train.compile=true"], "tok_embeddings.weight by 1 of its norm"),
    ],
)
def test_wrong_plan_is_found_before_the_first_step(plan: str, more: list[str], message: str, tmp_path: Path) -> None:
    settings = tiny(*merged(MODEL, more), f"model.name=tests.helpers.custom_recipes:{plan}", "mesh.tensor=2", "nproc=2")
    ran = run(tmp_path / "run", "recipe=llama_small", *settings, code=2)
    assert "ModelSpec.tensor" in ran.err
    assert message in ran.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@needs_torch("2.12")
@pytest.mark.skipif(TorchVersion(torch.__version__) >= "2.15", reason="this torch compiles such blocks")
def test_compiled_blocks_that_are_recomputed_whole_are_refused(tmp_path: Path) -> None:
    """Before torch 2.15, their forward pass would fail; those that are recomputed in part are in the table."""
    settings = tiny(*MODEL, "mesh.tensor=2", "nproc=2", "train.activation_checkpoint=full", "train.compile=true")
    ran = run(tmp_path / "run", "recipe=llama_small", *settings, code=2)
    assert "train.compile=true: with mesh.tensor=2 and train.activation_checkpoint=full" in ran.err


MESHES = (
    (),
    ("mesh.tensor=2",),
    ("mesh.tensor=2", "mesh.replicate=2"),
    ("mesh.tensor=2", "mesh.context=2"),
    ("mesh.replicate=2",),
    ("mesh.tensor=2",),
)


def walk(folder: Path, meshes: tuple[tuple[str, ...], ...]) -> list[str]:
    """Train two steps on the first mesh, hand the state from mesh to mesh, and return a digest of it on each."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    resume = ""
    digests = []
    for number, mesh in enumerate(meshes):
        own = [
            *MODEL,
            *mesh,
            "train.global_batch_size=4",
            "train.steps=9",
            "train.ema=0.9",
            f"run.dir={folder / str(number)}",
        ]
        if resume:
            own.append(f"checkpoint.resume={resume}")
        trainer = Trainer(load_config("llama_small", tiny(*own, "model.vocab_size=257")))
        if resume:
            trainer.load_checkpoint()
        else:
            list(islice(trainer.steps(), 2))
        resume = str(trainer.save_checkpoint(wait=True))
        digest = hashlib.sha256()
        for name, parameter in trainer.model.named_parameters():
            moments = trainer.optimizer.parts[0].state[parameter]
            for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"], trainer.average.averages[name]):
                digest.update(full(tensor.detach()).numpy().tobytes())
        digests.append(digest.hexdigest())
        if dist.get_rank() == 0:
            export_checkpoint(resume, folder / f"export{number}")
        trainer.close()
    return digests


@pytest.mark.slow
@needs_torch("2.12")
def test_state_goes_from_any_mesh_to_any_other_bit_by_bit(tmp_path: Path) -> None:
    """Weights, moments and averaged weights, and exports."""
    by_rank = on_ranks(4, walk, tmp_path, MESHES)
    assert len({*by_rank[0]}) == 1
    exports = [(tmp_path / f"export{number}" / "model.safetensors").read_bytes() for number in range(len(MESHES))]
    assert all(first == second for first, second in pairwise(exports))


def start(folder: Path, meshes: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Return a digest of the initial weights on each mesh, and a text that each of its ranks generates by itself."""
    import torch.distributed as dist

    from trainer import gathered
    from trainer.model.sample import generate_batch

    dist.init_process_group("gloo")
    found = []
    for number, mesh in enumerate(meshes):
        own = [*MODEL, *mesh, "train.global_batch_size=4", f"run.dir={folder / str(number)}"]
        trainer = Trainer(load_config("llama_small", tiny(*own, "model.vocab_size=257")))
        trainer.load_checkpoint()
        digest = hashlib.sha256()
        for parameter in trainer.model.parameters():
            digest.update(full(parameter.detach()).numpy().tobytes())
        prompt = torch.tensor([[1 + dist.get_rank(), 2, 3]])
        with gathered(trainer.model):
            texts = generate_batch(trainer.model, prompt.tolist(), max_tokens=5)
        found.append((digest.hexdigest(), str(texts)))
        trainer.close()
    return found


@pytest.mark.slow
@needs_torch("2.12")
def test_initial_weights_and_generated_texts_are_those_of_any_mesh(tmp_path: Path) -> None:
    """Of each rank's own prompt, though the ranks of a group share its matrices."""
    for found in on_ranks(4, start, tmp_path, (*MESHES[:4], ("mesh.tensor=4", "model.num_kv_heads=4"))):
        *alike, other = found
        assert len({*alike}) == 1
        assert other[0] != alike[0][0], "of another model"
