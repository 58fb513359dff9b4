"""Sharding of a model: the collectives of a step, the units, and that numbers do not change."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.helpers.cases import campaign_except, in_campaign
from tests.helpers.launch import on_ranks, tiny
from tests.helpers.no_plan import make_no_plan
from tests.helpers.plan_truth import CollectiveLog, as_logged
from tests.helpers.tiny import full
from trainer import ModelSpec, RunConfig, Trainer, TrainLoader, UserError, load_config, register
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.weights import StoredWeights
from trainer.config.parallel import MeshShape
from trainer.data.opening import open_source
from trainer.model.gradients import gradient_sync, norm_and_clip_factor
from trainer.model.initial_weights import materialize
from trainer.model.parameters import count_parameters
from trainer.model.shard import check_sharding, is_unsharded
from trainer.optim.optimizer import Schedule, build_optimizer
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan, without_data

LLAMA = tiny("data.source=synthetic", "model.vocab_size=264", "train.steps=4")
ODD_LLAMA = tiny("data.source=synthetic", "model.vocab_size=263", "train.steps=4")
GPT2 = [
    *("data.source=synthetic", "data.seq_len=32", "fsdp.param_dtype=float32", "log.every=1", "checkpoint.every=0"),
    *("model.vocab_size=263", "model.dim=32", "model.num_layers=2", "model.num_heads=4", "schedule.warmup_steps=5"),
    *("train.steps=4", "train.global_batch_size=8", "train.micro_batch_size=2", "run.threads=1", "run.device=cpu"),
]


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(found, expected, strict=True))


def open_group() -> None:
    """Open the process group of all the Trainers that this process makes, and let them make no plans."""
    make_no_plan()
    dist.init_process_group("gloo")


def losses_of(recipe: str, overrides: list[str]) -> list[float]:
    """Return the losses of a run; on every rank."""
    trainer = Trainer(load_config(recipe, overrides))
    losses = [record["loss"] for record in trainer.steps()]
    trainer.close()
    return losses


def plain_model(config: RunConfig) -> nn.Module:
    """Return the unsharded model, without FSDP, with the initial weights of every mesh."""
    with torch.device("meta"):
        model = config.spec.build_model(config.model)
    materialize(model, config.run.seed, torch.device("cpu"))
    return model


def global_batches(config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    size = config.train.global_batch_size
    source = open_source(config.data, config.vocab_size, "train")
    return iter(TrainLoader(source, seed=config.data.seed, global_batch_size=size, micro_batch_size=size))


def plain_losses(config: RunConfig, num_steps: int = 4) -> list[float]:
    """Return the losses of a loop in this process, without FSDP."""
    model, schedule = plain_model(config), Schedule(config)
    optimizer = build_optimizer(model, config.optim)
    losses = []
    for step, batch in enumerate(islice(global_batches(config), num_steps), start=1):
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.set_lr(schedule.lr(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------------------------
# Collectives of a step


def collectives_of_each(runs: list[list[str]]) -> list[dict[str, Any]]:
    """Return, for each run, the collectives of its second step on parameters and gradients, and the bytes of its units
    in float32, the root's last.
    """
    open_group()
    found = []
    for overrides in runs:
        trainer = Trainer(load_config("llama_small", overrides))
        batches = iter(trainer.loader)
        for _ in range(2):
            with CollectiveLog() as log:
                trainer.train_step([next(batches) for _ in range(trainer.num_micro_batches)])
        sizes = [sum(p.numel() for module in unit.modules for p in module.parameters()) for unit in trainer.units]
        root = count_parameters(trainer.model) - sum(sizes)
        # Among the all-reduces are those of single numbers: the loss, the squared norm, and what ranks agree on.
        calls = {call: count for call, count in log.counts.items() if call[0] != "all_reduce" or call[2] > 1000}
        found.append({"calls": calls, "bytes": [4 * size for size in (*sizes, root)]})
        trainer.close()
    return found


S = -1
"""All ranks of the shard axis."""

# Over how many ranks a unit is gathered in one micro-batch, by what it does after its forward pass.  What is not
# resharded is still there in the backward pass.  What is resharded to 2 ranks is gathered from these 2.  After the
# backward pass all is resharded, so that each micro-batch gathers again.
GATHERS: dict[str | int, list[int]] = {"always": [S, S], "never": [S], 2: [S, 2]}

# fsdp.reshard_after_forward, and what it means for the units (embedding, block, block, head) and for the root.
RESHARD: dict[str, tuple[list[str | int], str]] = {
    "default": ([*["always"] * 3, "never"], "never"),  # the head's backward pass comes right after its forward pass
    "always": (["always"] * 4, "always"),
    "never": (["never"] * 4, "never"),
    "2": ([2] * 4, "never"),
    "1": (["never"] * 4, "never"),
    "4": (["always"] * 4, "never"),
    "[never,2,always,4]": (["never", 2, "always", "always"], "never"),
}


@dataclass(frozen=True)
class Case:
    """One run whose collectives are counted: `mesh` is (replicate, shard)."""

    reshard: str
    mesh: tuple[int, int]
    num_micro_batches: int = 1
    wrap: str = "block"

    @property
    def overrides(self) -> list[str]:
        replicate, shard = self.mesh
        return tiny(
            *("data.source=synthetic", "model.vocab_size=264", f"fsdp.wrap={self.wrap}", "train.global_batch_size=16"),
            *(f"mesh.replicate={replicate}", f"mesh.shard={shard}", f"fsdp.reshard_after_forward={self.reshard}"),
            f"train.micro_batch_size={16 // (replicate * shard * self.num_micro_batches)}",
        )

    @property
    def after_forward(self) -> list[str | int]:
        """What the units and the root do after their forward pass."""
        units, root = RESHARD[self.reshard]
        if self.mesh[1] == 2:  # to 2 ranks is to all
            units = ["always" if each == 2 else each for each in units]
        if self.wrap == ROOT:
            return [*units[1:3], root]
        # The embedding's backward pass reads no weight: it gathers once, whatever it does after the forward pass.
        return ["never", *units[1:], root]

    def expected(self, sizes: Sequence[int]) -> Counter[tuple[str, int, int]]:
        """Return the collectives of a step: those of `GATHERS`, and one reduction per unit in the last micro-batch."""
        replicate, shard = self.mesh
        calls: Counter[tuple[str, int, int]] = Counter()
        for after_forward, size in zip(self.after_forward, sizes, strict=True):
            if size == 0:
                continue  # a root without parameters of its own
            for ranks in GATHERS[after_forward] * self.num_micro_batches:
                calls["all_gather", shard if ranks == S else ranks, size] += 1
            calls["reduce_scatter", shard, size] += 1
            if replicate > 1:
                calls["all_reduce", 0, size // shard] += 1
        return calls


def only_blocks(model: nn.Module) -> list[str]:
    """Leave embedding and head to the root."""
    return ["layers.*"]


ROOT = "tests.model.test_sharding:only_blocks"
ON_TWO = [
    *(Case(setting, (1, 2), num_micro_batches=2) for setting in ("default", "never")),
    Case("always", (1, 2), wrap=ROOT),
]
ON_FOUR = [
    *(Case(setting, (1, 4)) for setting in RESHARD),
    *(Case(setting, (1, 4), num_micro_batches=4) for setting in ("always", "never", "2", "[never,2,always,4]")),
    *(Case(setting, (2, 2)) for setting in ("default", "2")),
    *(Case(setting, (2, 2), num_micro_batches=4) for setting in ("always", "never")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.campaign)], ids=["2", "4"]
)
def test_collectives_of_a_step(num_ranks: int, cases: list[Case]) -> None:
    for every_case in on_ranks(num_ranks, collectives_of_each, [case.overrides for case in cases]):
        for case, found in zip(cases, every_case, strict=True):
            assert found["calls"] == case.expected(found["bytes"]), case


# ---------------------------------------------------------------------------------------------------------------
# Units


def by_names(model: nn.Module) -> list[Any]:
    return ["tok_embeddings", ("layers.0", "layers.1"), "head"]


def by_modules(model: nn.Module) -> Iterator[nn.Module]:
    yield from model.layers  # type: ignore[misc]


def by_mixture(model: nn.Module) -> tuple[Any, ...]:
    return model.tok_embeddings, ["layers.0", model.layers[1]], ("head",)  # type: ignore[index]


def by_predicate(module: nn.Module) -> bool:
    return type(module).__name__ in ("LlamaBlock", "FeedForward")


def by_number(model: nn.Module) -> int:
    return 3


def by_stranger(model: nn.Module) -> list[nn.Module]:
    return [nn.Linear(2, 2)]


def by_repetition(model: nn.Module) -> list[str]:
    return ["layers.*", "layers.1"]


def by_number_later(module: nn.Module) -> Any:
    return 3 if isinstance(module, nn.Embedding) else True


def failing_later(module: nn.Module) -> bool:
    return module.dim > 0 if isinstance(module, nn.Embedding) else False  # type: ignore[operator]


def failing_while_it_lists(model: nn.Module) -> Any:
    yield "layers.*"
    raise KeyError("head")


no_function = 3


def nested(model: nn.Module) -> list[str]:
    return ["layers.*", "layers.*.attention", "layers.*.attention.wq", "head"]


HERE = "tests.model.test_sharding:"
WRAPS = {
    "block": ["tok_embeddings", "layers.0", "layers.1", "head"],
    HERE + "by_names": ["tok_embeddings", "layers.0 + layers.1", "head"],
    HERE + "by_modules": ["layers.0", "layers.1"],
    HERE + "by_mixture": ["tok_embeddings", "layers.0 + layers.1", "head"],
    HERE + "by_predicate": ["layers.0", "layers.0.feed_forward", "layers.1", "layers.1.feed_forward"],
    # A block has 9,792 parameters, 6,144 of them in its feed-forward; a table 8,448.
    "size:1_000_000": [],
    "size:9000": ["layers.0", "layers.1"],
    "size:8000": ["tok_embeddings", "layers.0", "layers.1", "head.output"],
    "size:6000": ["tok_embeddings", "layers.0.feed_forward", "layers.1.feed_forward", "head.output"],
}
SHARDED = "fsdp.cpu_offload=true"
"""Has one rank shard its model as well; on a CPU it changes nothing else."""


def sharded(recipe: str, overrides: list[str], *more: str) -> Trainer:
    return Trainer(load_config(recipe, [*overrides, *more, SHARDED, "run.dir=never_written"]))


@pytest.mark.parametrize(
    "wrap", campaign_except(WRAPS, ["block", HERE + "by_predicate", HERE + "by_mixture", "size:8000"])
)
def test_units_are_those_asked_for_in_the_order_of_the_forward_pass(wrap: str) -> None:
    trainer = sharded("llama_small", LLAMA, f"fsdp.wrap={wrap}")
    began: list[str] = []
    for unit in trainer.units:
        for module in unit.modules:
            module.register_forward_pre_hook(lambda *_, name=str(unit): began.append(name))
    trainer.model(torch.zeros(1, 4, dtype=torch.int64))
    trainer.close()
    assert [str(unit) for unit in trainer.units] == WRAPS[wrap]
    assert list(dict.fromkeys(began)) == WRAPS[wrap]


@pytest.mark.parametrize("size", [100, 9000, 20000])
def test_units_by_size_keep_tied_parameters_together(size: int) -> None:
    """Embedding and head share the table, so only the root unit contains both."""
    trainer = sharded("gpt2", GPT2, "model.max_seq_len=64", f"fsdp.wrap=size:{size}")
    names = [str(unit) for unit in trainer.units]
    trainer.close()
    assert not any(name.startswith(("wte", "head.output")) or name == "head" for name in names), names
    assert size != 9000 or names == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        ("by_number", []),
        ("by_stranger", []),
        ("by_repetition", ["layers.1"]),
        ("by_number_later", []),
        ("failing_later", ["tok_embeddings", "AttributeError"]),
        ("failing_while_it_lists", ["KeyError"]),
        ("no_function", []),
    ],
)
def test_invalid_units(wrap: str, names: list[str]) -> None:
    """The message begins with the function, and says what failed where."""
    with pytest.raises(UserError) as raised:
        check_sharding(load_config("llama_small", [*LLAMA, f"fsdp.wrap={HERE}{wrap}"]))
    assert str(raised.value).startswith(f"fsdp.wrap={HERE}{wrap}: ")
    assert all(name in str(raised.value) for name in names)


def losses_of_each(runs: list[list[str]]) -> list[list[float]]:
    open_group()
    return [losses_of("llama_small", overrides) for overrides in runs]


@pytest.mark.campaign
@pytest.mark.parametrize("override", [f"fsdp.wrap={HERE}nested", "train.compile=true"])
def test_two_ranks_train_like_a_plain_loop(override: str, tmp_path: Path) -> None:
    """With units inside units; with compiled blocks."""
    if "compile" in override and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler")
    for (losses,) in on_ranks(2, losses_of_each, [[*LLAMA, override, f"run.dir={tmp_path}"]]):
        assert relative(losses, plain_losses(load_config("llama_small", LLAMA))) < 1e-5


BF16 = ["train.weights_dtype=bfloat16", "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"]
WHOLE = [
    [],
    pytest.param([*BF16, "optim.state_dtype=bfloat16", "fsdp.output_dtype=float32"], marks=pytest.mark.campaign),
    pytest.param(["model.tie_embeddings=true", "train.activation_checkpoint=full"], marks=pytest.mark.campaign),
    pytest.param([*BF16, "train.compile=true"], marks=pytest.mark.campaign),
]


@pytest.mark.parametrize("overrides", WHOLE)
def test_one_rank_trains_a_plain_module_with_the_same_losses(overrides: list[str], tmp_path: Path) -> None:
    """Bit-identical to FSDP, which adds hooks to each unit and a copy of each weight per micro-batch."""
    losses = []
    for name, more in (("whole", []), ("sharded", [SHARDED])):
        trainer = Trainer(load_config("llama_small", [*LLAMA, *overrides, *more, f"run.dir={tmp_path / name}"]))
        assert any(isinstance(module, FSDPModule) for module in trainer.model.modules()) == bool(more)
        assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()) == bool(more)
        losses.append([record.loss for record in trainer.steps()])
        trainer.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("overrides", "num_shards", "is_whole"),
    [
        ([], 1, True),
        ([], 2, False),
        (BF16, 1, True),
        (BF16[:2], 1, False),  # gradients add up in float32, which nothing but FSDP keeps
        (["fsdp.reduce_dtype=bfloat16"], 1, False),
        ([*BF16, "lora.rank=4"], 1, False),  # adapters are float32
        (["lora.rank=4"], 1, True),
    ],
)
def test_models_that_are_not_sharded(overrides: list[str], num_shards: int, is_whole: bool) -> None:
    assert is_unsharded(load_config("llama_small", [*LLAMA, *overrides]), num_shards) == is_whole


def test_in_place_addition_to_units_that_return_views(tmp_path: Path) -> None:
    """FSDP2 attaches its backward hook to a unit's output; an in-place write to a view would drop the hook."""

    def losses(name: str) -> list[float]:
        own = [f"model.name=tests.helpers.custom_recipes:{name}", "data.source=synthetic", "train.steps=2", SHARDED]
        own += ["optim.lr=0.01", "eval.every=0", "log.every=1", "log.sample_tokens=0", "data.seq_len=16"]
        own += ["train.global_batch_size=4", "train.micro_batch_size=2", "run.threads=1", f"run.dir={tmp_path / name}"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return losses_of("llama_small", own)

    assert losses("viewing_in_place") == losses("viewing")


# ---------------------------------------------------------------------------------------------------------------
# Tied parameters


def train_tied(folder: Path) -> dict[str, Any]:
    """Train a tied GPT-2 for 4 steps with a save after 2."""
    open_group()
    trainer = Trainer(load_config("gpt2", [*GPT2, f"run.dir={folder / 'run'}"]))
    model: Any = trainer.model
    batch = next(iter(trainer.build_loader()))
    with gradient_sync(model, enabled=True):
        (trainer.loss(batch) / batch["targets"].numel()).backward()  # a mean over ranks, of means
    grad = full(model.wte.weight.grad)
    trainer.optimizer.zero_grad()

    losses = []
    for record in trainer.steps():
        losses.append(record["loss"])
        if record["step"] == 2:
            saved = trainer.save_checkpoint(wait=True)
    is_tied = model.head.output.weight is model.wte.weight
    count = count_parameters(model)
    trainer.close()
    found = {"grad": grad, "losses": losses, "tied": is_tied, "count": count}
    return {**found, "stored": sorted(StoredWeights(find_checkpoint(saved)).shapes)}


@pytest.mark.slow
def test_tied_table_is_one_parameter(tmp_path: Path) -> None:
    config = load_config("gpt2", GPT2)
    model: Any = plain_model(config)
    assert model.head.output.weight is model.wte.weight
    # Micro-batches of 2 on each of 2 ranks: of the first global batch of 8, samples 0, 1 and 4, 5.
    batch = {name: tensor[[0, 1, 4, 5]] for name, tensor in next(global_batches(config)).items()}
    model.head.output.weight = nn.Parameter(model.wte.weight.detach().clone())
    F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()).backward()
    both_uses = model.wte.weight.grad + model.head.output.weight.grad
    assert min(model.wte.weight.grad.norm(), model.head.output.weight.grad.norm()) > 0.01

    found = on_ranks(2, train_tied, tmp_path)[1]
    assert torch.allclose(found["grad"], both_uses, rtol=1e-4, atol=1e-7)
    assert relative(found["losses"], plain_losses(config)) < 1e-5
    assert found["tied"]
    assert found["count"] == count_parameters(plain_model(config))
    assert "wte.weight" in found["stored"]
    assert "head.output.weight" not in found["stored"]


# ---------------------------------------------------------------------------------------------------------------
# Clipping


def clip_on_each(meshes: list[list[str]]) -> list[list[tuple[float, float, list[torch.Tensor], list[torch.Tensor]]]]:
    """Return for each mesh and bound: the norm, the bound, the clipped gradients, and the full gradients before."""
    open_group()
    found = []
    for mesh in meshes:
        trainer = Trainer(load_config("llama_small", [*ODD_LLAMA, *mesh]))
        batch = next(iter(trainer.loader))
        cases = []
        for share in (0.3, 3.0):
            with gradient_sync(trainer.model, enabled=True):
                trainer.loss(batch).backward()
            whole = [full(p.grad).clone() for p in trainer.model.parameters()]
            bound = share * math.sqrt(sum(float(grad.double().square().sum()) for grad in whole))
            norm, scale = norm_and_clip_factor(trainer.model, trainer.mesh, bound)
            assert scale is not None
            cases.append((float(norm), bound, [scale * grad for grad in whole], whole))
            trainer.optimizer.zero_grad()
        found.append(cases)
        trainer.close()
    return found


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (2, [[], ["mesh.shard=1", "mesh.replicate=2"]]),
        (4, [[], ["mesh.replicate=2"]]),
    ],
    ids=["2", "4"],
)
def test_clipping_equals_torchs_on_full_gradients(ranks: int, meshes: list[list[str]]) -> None:
    """A vocabulary of 263 makes shards of 132 and 131 rows."""
    norms = []
    for every_mesh in on_ranks(ranks, clip_on_each, meshes):
        for cases in every_mesh:
            for norm, bound, clipped, whole in cases:
                plain = [nn.Parameter(torch.empty_like(grad)) for grad in whole]
                for parameter, grad in zip(plain, whole, strict=True):
                    parameter.grad = grad
                expected = float(torch.nn.utils.clip_grad_norm_(plain, bound))
                assert math.isclose(norm, expected, rel_tol=1e-6)
                for ours, parameter in zip(clipped, plain, strict=True):
                    torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=1e-9)
                norms.append(norm)
    assert max(norms) / min(norms) - 1 < 1e-5, "the same on every rank and mesh"


# ---------------------------------------------------------------------------------------------------------------
# Precision


BF16_TOLERANCE = 1e-3
"""A bf16 number has 8 bits: relative steps of 4e-3 to 8e-3.  Over ten steps the losses differed by 1.0e-4."""


def train_in_bf16(folder: Path) -> dict[str, Any]:
    """Train in mixed precision; also return the dtypes of outputs and parameters, the bytes of gradients that are sent
    for each parameter, and RoPE's angles.
    """
    open_group()
    found: dict[str, Any] = {"output": {}, "sent": {}, "compute": set(), "angles": []}
    for output, reduced in (("null", "float32"), ("float32", "bfloat16")):
        own = ["fsdp.param_dtype=bfloat16", f"fsdp.reduce_dtype={reduced}", f"fsdp.output_dtype={output}"]
        trainer = Trainer(load_config("llama_small", [*LLAMA, *own, f"run.dir={folder / reduced}"]))
        first = trainer.model.layers[0].attention  # type: ignore[index, union-attr]
        if reduced == "float32":
            first.rope.register_forward_hook(lambda module, args, outputs: found["angles"].extend(outputs))
            first.wq.register_forward_hook(lambda module, args, output: found["compute"].update({output.dtype}))
            found["losses"] = [record["loss"] for record in trainer.steps()]
            found["kept"] = {p.dtype for p in trainer.model.parameters()} | {first.rope.inv_freq.dtype}
        with torch.no_grad():
            found["output"][output] = trainer.model(torch.zeros(1, 4, dtype=torch.int64)).dtype
        batches = iter(trainer.build_loader())
        with CollectiveLog() as log:
            trainer.train_step([next(batches) for _ in range(trainer.num_micro_batches)])
        sent = sum(size * count for (kind, _, size), count in log.counts.items() if kind == "reduce_scatter")
        found["sent"][reduced] = sent / count_parameters(trainer.model)
        trainer.close()
    return found | {"angles": found["angles"][:2]}


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path) -> None:
    found = on_ranks(2, train_in_bf16, tmp_path)[0]
    assert found["output"] == {"null": torch.bfloat16, "float32": torch.float32}
    assert found["sent"] == {"float32": 4, "bfloat16": 2}
    assert found["compute"] == {torch.bfloat16}
    assert found["kept"] == {torch.float32}
    config = load_config("llama_small", LLAMA)
    expected = plain_losses(config)
    assert found["losses"] != expected
    assert relative(found["losses"], expected) < BF16_TOLERANCE
    model: Any = plain_model(config)
    cos, sin = model.layers[0].attention.rope(torch.arange(config.data.seq_len))
    assert torch.equal(found["angles"][0], cos)
    assert torch.equal(found["angles"][1], sin)


SMALL_BYTES = 1000

# The dtypes of stored weights, of the computation and of reductions, and the number of replicas.
PRECISIONS = [
    ("float32", "bfloat16", "bfloat16", 1),
    ("float32", "bfloat16", "float32", 1),
    ("float32", "float32", "bfloat16", 1),
    ("bfloat16", "bfloat16", "bfloat16", 1),
    ("bfloat16", "bfloat16", "float32", 1),
    ("bfloat16", "float32", "float32", 1),
    ("float32", "float32", "float32", 1),
    ("float32", "bfloat16", "bfloat16", 2),
    ("float32", "float32", "bfloat16", 2),
]


def collectives_in(precision: tuple[str, str, str, int]) -> tuple[set[torch.dtype], dict[Any, int], dict[Any, int]]:
    """Return the dtypes in which a step's gradients were reduced, all its large collectives, and those planned."""
    stored, computed, reduced, replicate = precision
    dtypes = [f"train.weights_dtype={stored}", f"fsdp.param_dtype={computed}", f"fsdp.reduce_dtype={reduced}"]
    sizes = [f"mesh.replicate={replicate}", f"mesh.shard={2 // replicate}"]
    trainer = Trainer(load_config("llama_small", [*LLAMA, *dtypes, *sizes]))
    with CollectiveLog() as log:
        trainer.train_step(list(islice(trainer.loader, trainer.num_micro_batches)))
    trainer.close()
    plan = make_plan(without_data(trainer.config), MeshShape(replicate, 2 // replicate), find_machine("cpu"))
    # Smaller ones are those of the loss, of the squared norm, and of what ranks agree on.
    found, expected = (
        {key: count for key, count in counts.items() if key[2] > SMALL_BYTES}
        for counts in (log.counts, as_logged(plan.collectives))
    )
    return {dtype for num_bytes, dtype in log.reduced if num_bytes > SMALL_BYTES}, found, expected


def collectives_in_each_precision() -> list[Any]:
    open_group()
    return [collectives_in(precision) for precision in PRECISIONS]


@pytest.mark.slow
def test_gradients_are_reduced_in_the_planned_dtype() -> None:
    """Whatever a version of torch takes `reduce_dtype=None` to mean."""
    for (*dtypes, reduced, replicate), (found_dtypes, found, expected) in zip(
        PRECISIONS, on_ranks(2, collectives_in_each_precision)[0], strict=True
    ):
        assert found == expected, (*dtypes, reduced, replicate)
        assert found_dtypes == {getattr(torch, reduced)}, (*dtypes, reduced, replicate)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs torch 2.13")
def test_a_communicator_of_its_own_for_reductions_changes_no_bit(tmp_path: Path) -> None:
    runs = [[*LLAMA, *own, f"run.dir={tmp_path / str(len(own))}"] for own in ([], ["fsdp.separate_reduce=true"])]
    plain, separate = on_ranks(2, losses_of_each, runs)[0]
    assert plain == separate


# ---------------------------------------------------------------------------------------------------------------
# Materialization


class Parts(nn.Module):
    """Owns every kind of tensor; `fill` says which of them `reset_parameters` writes."""

    def __init__(self, fill: Sequence[str]) -> None:
        super().__init__()
        self.fill = fill
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.register_buffer("scale", torch.empty(2))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("counts", torch.empty(5, dtype=torch.int64))

    def reset_parameters(self) -> None:
        for name in self.fill:
            getattr(self, name).copy_(torch.rand(getattr(self, name).shape) * 10)


ALL = ("weight", "scale", "table", "counts")


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def fill(model: nn.Module) -> nn.Module:
    materialize(model, 0, torch.device("cpu"))
    return model


@pytest.mark.parametrize("missing", ALL)
def test_unfilled_tensor_is_named(missing: str) -> None:
    """Uninitialized floats may look right by chance; integers always do."""
    rest = [name for name in ALL if name != missing]
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Parts(rest)))
    with pytest.raises(UserError, match=rf"\b1\.{missing}\b"):
        fill(model)


def test_all_unfilled_tensors_are_named_at_once() -> None:
    with pytest.raises(UserError, match=r"a\.weight.*a\.table.*b\.counts"):
        fill(on_meta(lambda: nn.ModuleDict({"a": Parts(["scale", "counts"]), "b": Parts(ALL[:3])})))
    assert isinstance(fill(on_meta(lambda: Parts(ALL))), Parts)


def test_half_filled_tensor_is_an_error() -> None:
    class Half(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight[:1])
            nn.init.zeros_(self.bias)

    with pytest.raises(UserError, match=r"\bweight\b"):
        fill(on_meta(lambda: Half(2, 2)))


def test_tensor_filled_with_nan_is_an_error() -> None:
    class NotANumber(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, math.nan)
            nn.init.zeros_(self.bias)

    with pytest.raises(UserError, match=r"\bweight\b"):
        fill(on_meta(lambda: NotANumber(2, 2)))


def test_tensors_with_values_keep_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Parts(ALL))
    given = {"weight": nn.Parameter(torch.ones(3, 2)), "table": torch.arange(4.0)}
    model[1].weight = given["weight"]
    model[1].table = given["table"]
    model[1].fill = ("scale", "counts")
    fill(model)
    assert torch.equal(model[1].weight, torch.ones(3, 2))
    assert torch.equal(model[1].table, torch.arange(4.0))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_tied_parameter_is_filled_once_by_its_first_owner() -> None:
    class Constant(nn.Linear):
        def __init__(self, value: float) -> None:
            self.value = value
            super().__init__(2, 2, bias=False)

        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, self.value)

    def tied() -> nn.Module:
        model = nn.Sequential(Constant(1.0), Constant(2.0), Constant(3.0))
        model[2].weight = model[0].weight
        return model

    model = fill(on_meta(tied))
    assert model[2].weight is model[0].weight  # type: ignore[index]
    assert [float(layer.weight.detach().sum()) for layer in model] == [4.0, 8.0, 4.0]  # type: ignore[attr-defined]


def test_initialization_neither_uses_nor_changes_the_global_generator() -> None:
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        weights.append(fill(on_meta(lambda: nn.Linear(4, 4))).weight)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])


def test_weights_depend_on_the_name_of_their_module() -> None:
    model = fill(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    assert not torch.equal(model[0].weight, model[1].weight)  # type: ignore[index]


def test_weights_do_not_depend_on_the_device() -> None:
    """A device's generator differs from the CPU's, so weights are always drawn and computed on the CPU."""

    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.empty(8))

        def reset_parameters(self) -> None:
            self.angles = 1e4 ** -torch.linspace(0, 1, 8, device=self.angles.device)

    def fill_on(device: str) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def init(module: nn.Module) -> None:
            module.reset_parameters()  # type: ignore[operator]
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            seen.extend(tensor.detach().clone() for tensor in own)

        model = on_meta(lambda: nn.ModuleList([nn.Linear(5, 3), nn.Embedding(7, 4), Angles()]))
        materialize(model, 0, torch.device(device), init)
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device}
        return seen

    here, there = fill_on("cpu"), fill_on("meta")  # the latter keeps no values, as a device out of reach
    assert len(here) == 4
    assert {tensor.device.type for tensor in there} == {"cpu"}
    assert all(torch.equal(own, other) for own, other in zip(here, there, strict=True))


# ---------------------------------------------------------------------------------------------------------------
# Parameters without gradients


@dataclass
class PartlyConfig:
    vocab_size: int = 257
    width: int = 24


class Partly(nn.Module):
    """A model of which a part is frozen, a part never runs, and the rest trains."""

    def __init__(self, config: PartlyConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(4))
        self.unused = nn.Linear(config.width, 3)
        self.out = nn.Linear(config.width, config.vocab_size)
        for module in (self.table, self.blocks[1]):
            module.requires_grad_(False)  # whole units
        self.blocks[2].bias.requires_grad_(False)  # a part of one

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.out(x)


register(ModelSpec("partly_frozen", PartlyConfig, Partly, ["table", "blocks.*", "unused", "out"]))
register(ModelSpec("partly_frozen_in_root", PartlyConfig, Partly, ["blocks.*"]))

FROZEN = ["table.weight", "blocks.1.weight", "blocks.1.bias", "blocks.2.bias"]
STILL = [*FROZEN, "unused.weight", "unused.bias"]


PARTLY = [
    "data.source=synthetic",
    "data.seq_len=16",
    "train.steps=4",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "log.every=1",
]


def train_partly(recipe: Path) -> dict[str, Any]:
    """Train a recipe; return its losses and the names of what has not changed since the start."""
    make_no_plan()
    trainer = Trainer(load_config(str(recipe), [*PARTLY, f"run.dir={recipe.with_suffix('')}"]))
    parameters = dict(trainer.model.named_parameters())
    before = {n: full(p).detach().clone() for n, p in parameters.items()}
    losses = [record["loss"] for record in trainer.steps()]
    trainer.save_checkpoint()
    still = [n for n, p in parameters.items() if torch.equal(full(p), before[n])]
    trainer.close()
    return {"losses": losses, "still": still}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partly_frozen", pytest.param("partly_frozen_in_root", marks=pytest.mark.campaign)])
def test_partly_frozen_model_trains(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text(f"model:\n  name: tests.model.test_sharding:{name}\n")
    found = on_ranks(2, train_partly, recipe)[1]
    assert sorted(found["still"]) == sorted(STILL)
    assert relative(found["losses"], plain_losses(load_config(str(recipe), PARTLY))) < 1e-5


# ---------------------------------------------------------------------------------------------------------------
# Parameters that cannot be sharded


@dataclass
class UnusualConfig:
    vocab_size: int = 64
    kind: str = ""
    in_root: bool = False
    trains: bool = True


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.empty(()),
    "one element": lambda: torch.empty(1),
    "no rows": lambda: torch.empty(0, 4),
    "empty rows": lambda: torch.empty(3, 0),
    "expanded": lambda: torch.empty(1).expand(8),
    "transposed": lambda: torch.empty(4, 8).t(),
    "float16": lambda: torch.empty(3, dtype=torch.float16),
    "float64": lambda: torch.empty(3, dtype=torch.float64),
    "complex64": lambda: torch.empty(3, dtype=torch.complex64),
    "int64": lambda: torch.ones(3, dtype=torch.int64),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
}


class Unusual(nn.Module):
    """A model with one unusual parameter, in a block or in the root, and a buffer without dimensions."""

    def __init__(self, config: UnusualConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gain = nn.Parameter(torch.empty(8))
        self.register_buffer("scale", torch.empty(()))
        owner = self if config.in_root else self.blocks[1]
        owner.register_parameter("extra", nn.Parameter(UNUSUAL[config.kind](), requires_grad=config.trains))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.constant_(self.scale, 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + self.scale * block(x) * self.gain
        return x @ self.table.weight.T


def fill_unusual(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if (extra := dict(module.named_parameters(recurse=False)).get("extra")) is not None:
        with torch.no_grad():
            extra.fill_(1)


register(ModelSpec("unusual", UnusualConfig, Unusual, ["blocks.*"], init=fill_unusual))


def unusual(folder: Path, kind: str, *more: str) -> RunConfig:
    own = ["model.name=tests.model.test_sharding:unusual", f"model.kind={kind}", f"run.dir={folder}"]
    return load_config("llama_small", [*own, *PARTLY, "eval.every=0", "log.sample_tokens=0", *more])


@pytest.mark.parametrize(
    ("kind", "more", "problem"),
    [
        ("scalar", (), "blocks.1.extra has no dimensions"),
        ("scalar", ("model.in_root=true",), "extra has no dimensions"),
        ("scalar", ("model.trains=false",), "blocks.1.extra has no dimensions"),
        ("scalar", ("fsdp.wrap=size:60",), "blocks.1.extra has no dimensions"),
        ("empty rows", (), "rows without elements"),
        ("expanded", (), "not contiguous"),
        ("transposed", (), "not contiguous"),
        ("float16", (), "is float16, but blocks.1.weight"),
        ("float64", ("model.in_root=true",), "is float64"),
        ("complex64", (), "is complex64"),
    ],
)
def test_parameter_that_cannot_be_sharded_is_named(
    kind: str, more: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    """On one rank too, before anything is built."""
    with pytest.raises(UserError, match="^model.name=unusual: its parameter .*" + re.escape(problem)) as refused:
        check_sharding(unusual(tmp_path, kind, *more))
    assert "to fix: " in str(refused.value)
    with pytest.raises(UserError, match=re.escape(problem)):
        Trainer(unusual(tmp_path, kind, *more))


def train_unusual(folder: Path, kind: str, *more: str) -> list[float]:
    trainer = Trainer(unusual(folder, kind, "train.micro_batch_size=1", *more))
    losses = [record["loss"] for record in trainer.steps()]
    trainer.save_checkpoint(wait=True)
    trainer.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("one element", ()),
        *in_campaign(
            ("no rows", ()),
            ("int64", ("model.trains=false",)),
            ("bool", ("model.trains=false", "model.in_root=true")),
            ("float16", ("model.trains=false",)),
            ("float16", ("train.weights_dtype=bfloat16",)),
        ),
    ],
)
def test_unusual_parameter_trains_alike_on_any_number_of_ranks(
    kind: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    one, two = (on_ranks(ranks, train_unusual, tmp_path / str(ranks), kind, *more)[0] for ranks in (1, 2))
    assert len(one) == 4
    assert relative(two, one) < (2e-2 if "train.weights_dtype=bfloat16" in more else 1e-5)
