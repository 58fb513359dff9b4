"""The same losses on any mesh and as in a plain loop without FSDP; bit-identical resume."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import CommandResult, run_ranks, run_tiny, tiny_overrides
from tests.helpers.runs import STEPS, SharedRun
from tests.helpers.tiny import full
from trainer import Trainer, load_config

MESHES = {"1": [], "2": ["nproc=2"], "2x2": ["nproc=4", "mesh.replicate=2"]}


def relative(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def train_each(
    runs: list[list[str]], num_steps: int = 20, data: str = "data.pack=false"
) -> list[dict[str, list[float]]]:
    """Train tiny llama_small with each list of overrides, one after another in one process group.

    Each row has one document and is padded, so each rank has a different number of targets.
    """
    from itertools import islice

    import torch.distributed as dist

    dist.init_process_group("gloo")
    fields = ("loss", "grad_norm", "tokens")
    found = []
    for overrides in runs:
        trainer = Trainer(load_config("llama_small", tiny_overrides("train.steps=20", data, *overrides)))
        records = list(islice(trainer.steps(), num_steps))
        trainer.close()
        found.append({field: [record[field] for record in records] for field in fields})
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """20 steps on one rank."""
    return run_ranks(1, train_each, [[f"run.dir={tmp_path_factory.mktemp('one')}"]])[0][0]


ON_ONE = [["train.micro_batch_size=8"], ["train.micro_batch_size=1"]]
ON_TWO = [[], ["train.micro_batch_size=1"]]
ON_FOUR = [[], ["mesh.replicate=2", "train.micro_batch_size=1"]]
SETTINGS_ON_FOUR = [
    ["mesh.replicate=2"],
    ["mesh.shard=1", "mesh.replicate=-1"],
    ["fsdp.reshard_after_forward=never"],
    ["fsdp.reshard_after_forward=2", "fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"],
    ["fsdp.reshard_after_forward=[never,2,always,4]", "train.activation_checkpoint=full"],
    ["fsdp.wrap=size:5000", "train.activation_checkpoint=2"],
    ["fsdp.wrap=tests.helpers.custom_recipes:every_linear"],
    ["train.activation_checkpoint=selective"],
    ["train.activation_checkpoint=budget:0.3"],
    ["fsdp.cpu_offload=true"],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "runs", "num_steps"),
    [
        pytest.param(1, ON_ONE, 20, marks=pytest.mark.campaign),
        pytest.param(2, ON_TWO, 20, marks=pytest.mark.campaign),
        (4, ON_FOUR, 20),
        pytest.param(4, SETTINGS_ON_FOUR, 6, marks=pytest.mark.campaign),
    ],
    ids=["1", "2", "4", "4, other settings"],
)
def test_losses_agree_on_every_mesh(
    ranks: int, runs: list[list[str]], num_steps: int, reference: dict[str, list[float]], tmp_path: Path
) -> None:
    runs = [[*overrides, f"run.dir={tmp_path / str(number)}"] for number, overrides in enumerate(runs)]
    for overrides, found in zip(runs, run_ranks(ranks, train_each, runs, num_steps)[-1], strict=True):
        expected = {field: values[:num_steps] for field, values in reference.items()}
        assert relative(found["loss"], expected["loss"]) < 1e-5, overrides
        assert relative(found["grad_norm"], expected["grad_norm"]) < 1e-5, overrides
        assert found["tokens"] == expected["tokens"], overrides


@pytest.mark.slow
def test_a_plain_pytorch_loop_gives_the_same_losses(one: SharedRun) -> None:
    config = load_config("llama_small", tiny_overrides(f"train.steps={STEPS}"))
    assert relative(plain_loop(config), one.ran.train("loss")) < 1e-5


def make_loader(config: Any) -> Any:
    from trainer.data.loader import TrainLoader
    from trainer.data.opening import open_source

    size = config.train.global_batch_size
    return TrainLoader(
        open_source(config.data, 257, "train"),
        seed=0,
        global_batch_size=size,
        micro_batch_size=size,
        dp_rank=0,
        num_dp_ranks=1,
        num_workers=0,
    )


def plain_loop(config: Any) -> list[float]:
    """Train as a plain script would: no FSDP, no trainer, full batches, plain cross-entropy and AdamW."""
    from trainer.model.materialize import materialize

    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
    materialize(model, config.run.seed, torch.device("cpu"))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "tok_embeddings" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "tok_embeddings" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
    )
    loader = iter(make_loader(config))
    losses = []
    for step in range(1, 21):
        batch = next(loader)
        logits = model(batch["tokens"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        progress = max(0.0, (step - 5) / 15)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * (step / 5 if step <= 5 else cosine)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", pytest.param("one", marks=pytest.mark.campaign)])
def test_resume_is_bit_identical(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """After step 10, as after a crash."""
    straight: SharedRun = request.getfixturevalue(name)
    resumed = run_tiny(straight.copy_to(tmp_path / "run", up_to=10), *straight.overrides)
    assert [line["resumed_step"] for line in resumed.metrics if line["kind"] == "start"] == [None, 10]
    for field in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert resumed.train(field) == straight.ran.train(field), field
    final = "checkpoints/step_00000020"
    assert_equal_tensors(load_tensors(resumed.folder / final), load_tensors(straight.ran.folder / final))


def load_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return all full tensors of a checkpoint, in this process."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for name, part in tree.items() for k, v in flat(part, f"{prefix}/{name}").items()}
    return {prefix: tree}


def assert_equal_tensors(a: dict[str, Any], b: dict[str, Any]) -> None:
    left, right = flat(a), flat(b)
    assert left.keys() == right.keys()
    tensors = [name for name in left if isinstance(left[name], torch.Tensor)]
    assert len(tensors) > 30
    assert [name for name in tensors if not torch.equal(left[name], right[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("to", ["2", *(pytest.param(to, marks=pytest.mark.campaign) for to in ("1", "2x2"))])
def test_checkpoint_of_four_ranks_resumes_on_other_meshes(
    to: str, tmp_path: Path, four: SharedRun, one: SharedRun
) -> None:
    """No sample is repeated or missed: the losses are those of the undisturbed run."""
    ran = run_tiny(four.copy_to(tmp_path / "run", up_to=10), f"train.steps={STEPS}", *MESHES[to])
    assert [line["resumed_step"] for line in ran.metrics if line["kind"] == "start"] == [None, 10]
    assert relative(ran.train("loss"), one.ran.train("loss")) < 1e-5
    assert ran.train("tokens") == one.ran.train("tokens")


@pytest.mark.campaign
@pytest.mark.parametrize("to", list(MESHES))
def test_ragged_batches_resume_on_other_meshes(
    to: str, tmp_path: Path, ragged_four: Path, ragged_straight: CommandResult
) -> None:
    """Sequences end before their rows, so that ranks have different numbers of targets."""
    shutil.copytree(ragged_four, tmp_path / "run")
    ran = run_tiny(tmp_path / "run", "train.steps=20", "data.pack=false", *MESHES[to])
    assert [line["resumed_step"] for line in ran.metrics if line["kind"] == "start"] == [None, 10]
    assert relative(ran.train("loss"), ragged_straight.train("loss")) < 1e-5
    assert ran.train("tokens") == ragged_straight.train("tokens")


@pytest.fixture(scope="module")
def ragged_straight(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    return run_tiny(tmp_path_factory.mktemp("straight"), "train.steps=20", "data.pack=false")


@pytest.fixture(scope="module")
def ragged_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 ranks, stopped at step 10 of 20."""
    folder = tmp_path_factory.mktemp("four") / "run"
    run_tiny(folder, "train.steps=20", "data.pack=false", "checkpoint.every=10", "checkpoint.keep_last=0", "nproc=4")
    shutil.rmtree(folder / "checkpoints" / "step_00000020")
    return folder


ODD_LLAMA = tiny_overrides("model.vocab_size=263", "train.global_batch_size=12", "train.micro_batch_size=1")
ODD_GPT2 = [
    "data.source=synthetic",
    "data.seq_len=32",
    "fsdp.param_dtype=float32",
    "model.vocab_size=263",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "train.global_batch_size=12",
    "train.micro_batch_size=1",
]


def initial_weights(meshes: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    """Return the full initial weights of a llama and a tied gpt2 on each mesh."""
    import torch.distributed as dist

    from trainer import Trainer

    dist.init_process_group("gloo")
    found = []
    for mesh in meshes:
        whole = {}
        for recipe, overrides in (("llama_small", ODD_LLAMA), ("gpt2", ODD_GPT2)):
            trainer = Trainer(load_config(recipe, overrides + mesh))
            for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
                whole[f"{recipe}.{name}"] = full(parameter).detach().clone()
            trainer.close()
        found.append(whole)
    return found


@pytest.mark.slow
def test_initial_weights_are_bit_identical_on_every_mesh() -> None:
    """An odd vocabulary gives uneven shards; gpt2 has a tied table."""
    ((one, other_seed),) = run_ranks(1, initial_weights, [[], ["run.seed=1"]])
    assert torch.equal(one["gpt2.wte.weight"], one["gpt2.head.output.weight"])
    for name, tensor in one.items():
        is_constant = tensor.eq(tensor.flatten()[0]).all()
        assert is_constant or not torch.equal(other_seed[name], tensor), name
    for ranks, meshes in ((3, [[]]), (4, [[], ["mesh.replicate=2"], ["mesh.shard=1", "mesh.replicate=4"]])):
        for every_mesh in run_ranks(ranks, initial_weights, meshes):
            for mesh, found in zip(meshes, every_mesh, strict=True):
                assert found.keys() == one.keys()
                assert [name for name in one if not torch.equal(found[name], one[name])] == [], (ranks, mesh)
