"""Edge cases of context parallelism: few targets, half precision, what a run shows and stores, and resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from tests.helpers.faults import Fault, StartedRun, start
from tests.helpers.ranks import CommandResult, run_command, run_ranks, run_tiny, tiny_overrides
from tests.helpers.tiny import full
from tests.trainer.test_exactness import relative
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.opening import open_source
from trainer.data.source import IGNORE, Samples, Source, SourceSubset, as_mapping

CAMPAIGN = pytest.mark.campaign
GATHER, HEADS = "mesh.context_method=gather", "mesh.context_method=heads"

# ---------------------------------------------------------------------------------------------------------------
# Few targets

Holes = Callable[[NDArray[np.int64], NDArray[Any]], None]


class WithHoles(SourceSubset):
    """Samples of another source, with some targets ignored."""

    def __init__(self, whole: Source, holes: Holes) -> None:
        super().__init__(whole, 0, len(whole))
        self._holes = holes

    def batch(self, indices: NDArray[np.int64]) -> Samples:
        found = as_mapping(super().batch(indices))
        found["targets"] = found["targets"].copy()
        self._holes(indices, found["targets"])
        return found


def beginnings(indices: NDArray[np.int64], targets: NDArray[Any]) -> None:
    """Keep only the first eighth of each row: all but the first slices have no target."""
    targets[:, targets.shape[1] // 8 :] = IGNORE


def endings(indices: NDArray[np.int64], targets: NDArray[Any]) -> None:
    """Keep only the last eighth of each row."""
    targets[:, : -(targets.shape[1] // 8)] = IGNORE


def one_in(rows: Iterable[int]) -> Holes:
    """Leave one target of these rows, and none of any other."""
    chosen = np.asarray(list(rows))

    def holes(indices: NDArray[np.int64], targets: NDArray[Any]) -> None:
        kept = targets[:, 5].copy()
        targets[:] = IGNORE
        targets[:, 5] = np.where(np.isin(indices, chosen), kept, IGNORE)

    return holes


class Sparse(Trainer):
    """Trains on few targets: `beginnings`, `endings`, or one target in each global batch."""

    def __init__(self, config: RunConfig, kind: str) -> None:
        self.holes = {"beginnings": beginnings, "endings": endings}.get(kind)
        super().__init__(config)

    def build_loader(self) -> Iterable[Batch]:
        source = open_source(self.config.data, 257, "train")
        loader = TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)
        size = self.config.train.global_batch_size
        rows = loader._order.at(np.arange(3, 100 * size, size))
        loader.source = WithHoles(source, self.holes or one_in(rows))
        return loader

    def build_eval_loader(self) -> Iterable[Batch] | None:
        source = open_source(self.config.data, 257, "eval")
        assert source is not None
        holes = WithHoles(source, self.holes or one_in([3]))
        return EvalLoader.from_config(holes, self.config, self.world.rank, self.world.size)


def digest_of(trainer: Trainer) -> str:
    """Return one hash of all weights, independent of the sharding."""
    found = hashlib.sha256()
    for name, parameter in trainer.model.named_parameters():
        whole: torch.Tensor = full(parameter)
        found.update(f"{name} {tuple(whole.shape)}".encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()


def train(runs: list[list[str]], kinds: list[str], num_steps: int, *shared: str) -> list[list[dict[str, Any]]]:
    """Train and evaluate tiny llama_small on each kind of targets with each list of overrides, in one process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for overrides in runs:
        own = []
        for kind in kinds:
            given = tiny_overrides("eval.every=100", "eval.steps=2", "train.steps=20", *shared, *overrides)
            config = load_config("llama_small", given)
            trainer = Trainer(config) if kind == "all" else Sparse(config, kind)
            initial = digest_of(trainer)
            records = list(islice(trainer.steps(), num_steps))
            held_out: Any = trainer.evaluate()
            trainer.close()
            values = {name: [record[name] for record in records] for name in ("loss", "grad_norm", "tokens")}
            own.append(values | {"eval": [held_out["loss"]], "initial": initial})
        found.append(own)
    return found


FEW = [["mesh.context=2", GATHER]]
FEW_ON_FOUR = [
    ["mesh.context=2", GATHER],
    ["mesh.context=2", HEADS, "mesh.replicate=2", "fsdp.accumulate=sharded"],
    ["mesh.context=4", GATHER, "train.micro_batch_size=1", "train.activation_checkpoint=full"],
    ["mesh.context=4", HEADS],
]
KINDS = ["beginnings", "one"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("ranks", "runs", "data", "num_steps"),
    [
        (2, FEW, "data.documents=masked", 3),
        (4, FEW_ON_FOUR, "data.documents=masked", 10),
        (4, FEW_ON_FOUR, "data.documents=joined", 10),
    ],
    ids=["2", "4 masked", "4 joined"],
)
def test_slices_without_a_target(ranks: int, runs: list[list[str]], data: str, num_steps: int, tmp_path: Path) -> None:
    """Slices without a target, and one target in a whole global batch; and the initial weights, bit for bit."""
    (whole,) = run_ranks(1, train, [[f"run.dir={tmp_path / 'one'}"]], KINDS, num_steps, data)[0]
    assert whole[1]["tokens"] == list(range(1, num_steps + 1)), "one target in each step"
    own = [[*overrides, f"run.dir={tmp_path / str(number)}"] for number, overrides in enumerate(runs)]
    for overrides, each in zip(runs, run_ranks(ranks, train, own, KINDS, num_steps, data)[-1], strict=True):
        for kind, found, right in zip(KINDS, each, whole, strict=True):
            assert relative(found["loss"], right["loss"]) < 1e-6, (kind, overrides)
            assert relative(found["grad_norm"], right["grad_norm"]) < 1e-5, (kind, overrides)
            assert relative(found["eval"], right["eval"]) < 1e-6, (kind, overrides)
            assert found["tokens"] == right["tokens"], (kind, overrides)
            assert found["initial"] == right["initial"], (kind, overrides)


MESHES = {
    "1": (1, []),
    "shard 4": (4, []),
    "context 2": (2, ["mesh.context=2"]),
    "context 4": (4, ["mesh.context=4"]),
    "2x2, context 2": (4, ["mesh.context=2", "mesh.replicate=2"]),
}


def optimizer_digest(trainer: Trainer) -> str:
    """Return one hash of the optimizer's state, independent of the sharding."""
    found = hashlib.sha256()
    for parameter in trainer.model.parameters():
        for name, value in sorted(trainer.optimizer.parts[0].state[parameter].items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(name.encode() + whole.numpy().tobytes())
    return found.hexdigest()


def go_on(runs: list[list[str]], num_steps: int) -> list[tuple[str, str, list[float]]]:
    """Begin or resume each run and save it after `num_steps` steps; return hashes of the state that it began with, and
    the losses.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for overrides in runs:
        given = tiny_overrides("train.steps=20", "schedule.name=constant", "data.documents=masked", *overrides)
        trainer = Trainer(load_config("llama_small", given))
        trainer.load_checkpoint()
        began = (digest_of(trainer), optimizer_digest(trainer))
        losses = [record.loss for record in islice(trainer.steps(), num_steps)]
        trainer.save_checkpoint(wait=True)
        trainer.close()
        found.append((*began, losses))
    return found


@pytest.mark.campaign
def test_checkpoint_of_any_mesh_resumes_on_any_other(tmp_path: Path) -> None:
    """With bit-identical state, and the same losses afterwards."""
    for name, (ranks, mesh) in MESHES.items():
        run_ranks(ranks, go_on, [[*mesh, f"run.dir={tmp_path / name}"]], 5)
    began: dict[str, set[tuple[str, str]]] = {name: set() for name in MESHES}
    losses: dict[str, list[list[float]]] = {name: [] for name in MESHES}
    for to, (ranks, mesh) in MESHES.items():
        saved = [tmp_path / name / "checkpoints" / "step_00000005" for name in MESHES]
        own = [tmp_path / "on" / to / name for name in MESHES]
        runs = [[*mesh, f"checkpoint.resume={a}", f"run.dir={b}"] for a, b in zip(saved, own, strict=True)]
        for name, (weights, moments, after) in zip(MESHES, run_ranks(ranks, go_on, runs, 10)[-1], strict=True):
            began[name].add((weights, moments))
            losses[name].append(after)
    assert {name: len(states) for name, states in began.items()} == dict.fromkeys(MESHES, 1), "bit for bit"
    right = losses["1"][0]
    assert max(relative(found, right) for of_one in losses.values() for found in of_one) < 1e-6


@pytest.mark.campaign
def test_half_precision_is_as_accurate_as_without_slices(tmp_path: Path) -> None:
    """The distance to one rank is at most three times that of two ranks without slices."""
    half = ["all"], 20, "fsdp.param_dtype=bfloat16"
    runs = [[], ["mesh.context=2", GATHER], ["mesh.context=2", HEADS]]
    own = [[*overrides, f"run.dir={tmp_path / str(number)}"] for number, overrides in enumerate(runs)]
    whole: Any = run_ranks(1, train, [[f"run.dir={tmp_path / 'one'}"]], *half)[0][0][0]
    plain, *sliced = [each[0] for each in run_ranks(2, train, own, *half)[-1]]
    distance = relative(plain["loss"], whole["loss"])
    assert distance > 0
    for each in sliced:
        print(distance, relative(each["loss"], whole["loss"]), relative(each["grad_norm"], whole["grad_norm"]))
        assert relative(each["loss"], whole["loss"]) < 3 * distance
        assert relative(each["grad_norm"], whole["grad_norm"]) < 2e-2


def refusal(recipe: str, folder: str) -> str:
    """Return the error for a recipe with samples that begin without targets, as prompts do; empty if it trains."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    given = tiny_overrides("mesh.context=2", GATHER, "data.seq_len=256", f"run.dir={folder}")
    own = [
        f"model.name=tests.helpers.custom_recipes:{recipe}",
        *(item for item in given if not item.startswith("model.")),
    ]
    trainer = Sparse(load_config("llama_small", own), "endings")
    try:
        next(trainer.steps())
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.slow
def test_recipe_that_mixes_tokens_is_rejected_even_without_targets(tmp_path: Path) -> None:
    for said in run_ranks(2, refusal, "shifting", str(tmp_path / "run")):
        assert "mixes or counts tokens outside trainer.sequence" in said


# ---------------------------------------------------------------------------------------------------------------
# What a run shows and keeps

SHOWN = ["eval.every=4", "eval.steps=2", "train.steps=12", "train.ema=0.6", "log.norms_every=3", "log.sample_tokens=4"]
SHOWN += ["log.prompts=[def ]", "checkpoint.keep_best=1", "optim.lr=0.02"]


@pytest.mark.campaign
@pytest.mark.parametrize("method", [GATHER, HEADS], ids=["gather", "heads"])
def test_evaluations_norms_samples_and_best_checkpoint_with_slices(method: str, tmp_path: Path) -> None:
    """Evaluations of averages and per source, norms by layer, samples, and the best checkpoint."""
    for name in ("a", "b"):
        text = "".join(f"{name} {number} * {number} = {number * number}\n" for number in range(3000))
        (tmp_path / f"{name}.txt").write_text(text)
    data = f"data.path={{a: {tmp_path / 'a.txt'}, b: {tmp_path / 'b.txt'}}}"
    whole = run_tiny(tmp_path / "one", data, *SHOWN)
    found = run_tiny(tmp_path / "two", data, *SHOWN, "nproc=2", "mesh.context=2", method)
    for kind in ("train", "eval", "norms", "sample"):
        ours, theirs = ([line for line in ran.metrics if line["kind"] == kind] for ran in (found, whole))
        assert len(ours) == len(theirs) > 0, kind
        for our, their in zip(ours, theirs, strict=True):
            for name in our.keys() - {"time", "step_s", "ts"}:
                compare(name, our[name], their[name])
    assert "Warning" not in found.stderr
    best = [(run.folder / "best").resolve().name for run in (found, whole)]
    assert best[0] == best[1]


TIMED = ("tokens_per_s", "tflops", "mfu", "_s", "time", "memory", "gib", "goodput", "wall")


def compare(name: str, ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            compare(f"{name}.{key}", ours[key], theirs[key])
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not any(part in name for part in TIMED):
            assert ours == pytest.approx(theirs, rel=1e-5), name
    elif not any(part in name for part in TIMED):
        assert ours == theirs, name


# ---------------------------------------------------------------------------------------------------------------
# Ranks that fail, or are asked to stop, inside attention

OF_FAULTS = ["recipe=llama_small", "model.name=tests.helpers.custom_recipes:llama_faulty", "schedule.name=constant"]
CALLS = {"attend": 39, "attend backward": 19}
"""Calls, counted from 0, that are of step 3: 8 a step, each forward one once more backward, and 2 before the first."""


def started(folder: Path, inside: str, then: str) -> StartedRun:
    """Start six steps on 4 ranks in 2 groups, whose rank 1 sends itself a signal inside attention."""
    own = ["mesh.context=2", GATHER, "train.micro_batch_size=1", "train.steps=6", "checkpoint.every=2"]
    own += ["checkpoint.mode=sync"]  # what was saved after step 2 is there in step 3
    fault = Fault(rank=1, inside=inside, then=then, first=CALLS[inside], last=CALLS[inside])
    return start(folder, *OF_FAULTS, *tiny_overrides(*own, "run.step_timeout_s=6"), ranks=4, fault=fault)


def went_on(folder: Path, *overrides: str) -> CommandResult:
    ran = run_command(folder, *OF_FAULTS, *tiny_overrides("train.steps=6", "train.micro_batch_size=1", *overrides))
    assert ran.exit_code == 0, ran.stderr
    return ran


@pytest.mark.campaign
@pytest.mark.parametrize("place", CALLS)
def test_rank_suspended_inside_attention(place: str, tmp_path: Path) -> None:
    run = started(tmp_path / "run", place, "SIGSTOP")
    try:
        run.processes[0].join(240)
    finally:
        run.kill()
    assert run.processes[0].exitcode == 1, run.stderr
    assert "watchdog: rank 1 did not answer" in run.stderr
    (waits,) = [line.split() for line in run.stderr.splitlines() if line.endswith("waits for its context group")]
    assert waits[0] == "0", "the only one that shares its sequences"
    stack = run.stderr.partition("rank 0 waits at\n")[2]
    assert "recipes/llama/model.py" in stack or "backward" in place
    assert f"in {'sum_parts' if 'backward' in place else 'gather_parts'}" in stack


@pytest.mark.campaign
def test_run_continues_without_slices_after_a_kill_inside_attention(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "attend", "SIGKILL")
    codes = run.wait()
    assert codes == [1, -9, 1, 1], run.stderr
    assert "rank 1" in run.stderr
    straight = went_on(tmp_path / "straight")
    ran = went_on(tmp_path / "run", "nproc=2")
    assert [line["resumed_step"] for line in ran.metrics if line["kind"] == "start"] == [None, 2]
    assert relative(ran.train("loss"), straight.train("loss")) < 1e-6


@pytest.mark.campaign
def test_stop_request_inside_attention(tmp_path: Path) -> None:
    """The ranks agree on it when the next step begins, which is the last; the run continues with different slices."""
    run = started(tmp_path / "run", "attend", "SIGTERM")
    assert run.wait() == [75] * 4, run.stderr
    straight = went_on(tmp_path / "straight")
    ran = went_on(tmp_path / "run", "nproc=4", "mesh.context=4", HEADS)
    assert [line["resumed_step"] for line in ran.metrics if line["kind"] == "start"] == [None, 4]
    assert relative(ran.train("loss"), straight.train("loss")) < 1e-6
