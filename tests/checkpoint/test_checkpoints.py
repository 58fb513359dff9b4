"""What checkpoints hold and who reads them: resumes, state of the user's own, remote storage, other tools."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.runs import assert_same_weights, resumed_steps, show_checkpoints, step_folder, weights_of
from tests.helpers.cases import in_campaign
from tests.helpers.launch import Run, merged, on_ranks, run, tiny
from tests.helpers.runs import SharedRun
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError, load_config
from trainer.export import command_line as export
from trainer.prepare import command_line as prepare

slow, campaign = pytest.mark.slow, pytest.mark.campaign


# ---------------------------------------------------------------------------------------------------------------
# What resumes bit for bit

SMALL_GPT2 = ["model.name=gpt2", "model.vocab_size=263", "model.dim=32", "model.num_layers=2", "model.num_heads=4"]


@slow
@pytest.mark.parametrize("what", ["dropout and workers", "past the end of an epoch"])
def test_resumes_bit_equal(what: str, tmp_path: Path) -> None:
    """Workers are processes of the loader. The undisturbed run has none; the other has them in both halves."""
    base = [item for item in tiny() if not (item.startswith("model.") and what == "dropout and workers")]
    if what == "dropout and workers":
        workers = "data.num_workers=2"
        base += [*SMALL_GPT2, "model.dropout=0.2", "data.source=synthetic", "schedule.name=constant"]
    else:
        workers = "data.num_workers=0"
        (tmp_path / "plain.txt").write_text("".join(map(str, range(500))))  # fewer samples than four steps take
        assert prepare([str(tmp_path / "plain.txt"), "--out", str(tmp_path / "shard")]) == 0
        base += [f"data.path={tmp_path / 'shard-*.bin'}", "schedule.name=constant"]

    def losses(folder: Path, *more: str) -> list[float]:
        trainer = Trainer(load_config("llama_small", [*base, f"run.dir={folder}", *more]))
        found = []
        for record in trainer.steps():
            found.append(record["loss"])
            assert len(multiprocessing.active_children()) == trainer.config.data.num_workers
        trainer.save_checkpoint()
        trainer.close()
        return found

    straight = losses(tmp_path / "straight", "train.steps=8")
    halves = losses(tmp_path / "halves", "train.steps=4", workers)
    assert halves + losses(tmp_path / "halves", "train.steps=8", workers) == straight


@slow
def test_a_changed_learning_rate_takes_effect(one: SharedRun, tmp_path: Path) -> None:
    changed = ["optim.lr=0.5", "optim.weight_decay=0.25", "schedule.name=constant", "schedule.warmup_steps=0"]
    ran = run(one.copy_to(tmp_path / "run"), *merged(one.overrides, ["train.steps=14", *changed]))
    assert ran.train("lr")[-3:] == [one.train("lr")[-1], 0.5, 0.5]
    printed = ran.out + ran.err
    assert "optim.lr" in printed
    assert "optim.weight_decay" in printed


@slow
def test_checkpoint_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes it: at the rename, every file and folder has been flushed as it is, and then the name is."""
    flushed: dict[str, int] = {}
    published: list[dict[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        fsync(number)
        flushed[os.readlink(f"/proc/self/fd/{number}")] = os.fstat(number).st_size

    def noted_rename(source: Any, target: Any, **named: Any) -> None:
        inside = {str(path.relative_to(source)): path.stat().st_size for path in Path(source).rglob("*")}
        if Path(target).name.startswith("step_"):
            published.append({name: size for name, size in inside.items() if flushed.get(f"{source}/{name}") != size})
        rename(source, target, **named)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    trainer = Trainer(tiny_config(tmp_path, "train.steps=1"))
    next(trainer.steps())
    saved = Path(trainer.save_checkpoint(wait=True))
    trainer.close()
    assert len(list(saved.rglob("*"))) > 3
    assert published == [{}], "what was not on disk as it is, folders included"
    assert str(saved.parent) in flushed, "the name too"


# ---------------------------------------------------------------------------------------------------------------
# Elsewhere


@slow
@pytest.mark.parametrize(("kind", "ranks"), [("file", 1), *in_campaign(("file", 2), ("local", 2))])
def test_remote_storage(kind: str, ranks: int, tmp_path: Path) -> None:
    """`local://` is accessed through fsspec, like an object store: a checkpoint that is not complete does not count."""
    elsewhere = tmp_path / "elsewhere"
    options = [f"nproc={ranks}", f"checkpoint.dir={kind}://{elsewhere}", "checkpoint.every=2"]
    run(tmp_path / "run", "train.steps=6", *options)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["step_00000004", "step_00000006"]
    largest = max(elsewhere.rglob("step_00000006/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    ran = run(tmp_path / "run", "train.steps=8", *options)
    assert resumed_steps(ran) == [None, 4]
    assert largest.name in ran.err
    assert (elsewhere / "damaged-step_00000006").exists(), "saved again, and kept"
    assert "damaged-step_00000006" in show_checkpoints(tmp_path / "run")[1]
    run(tmp_path / "other", "train.steps=1", f"train.init_from={kind}://{elsewhere}/step_00000008")


@slow
def test_storage_in_memory(tmp_path: Path) -> None:
    options = ["train.steps=4", f"checkpoint.dir=memory://{tmp_path.name}", "checkpoint.keep_last=1"]
    fit(tmp_path, *options)
    again = Trainer(tiny_config(tmp_path, *options))
    assert again.load_checkpoint() == 4
    again.close()
    with pytest.raises(UserError, match=r"nowhere://x: "):
        Trainer(tiny_config(tmp_path, "checkpoint.dir=nowhere://x"))


@slow
def test_one_plain_file(one: SharedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As torch and DDP write it too."""
    ours, paths = weights_of(one.folder), [tmp_path / "weights.pt", tmp_path / "weights.safetensors"]
    for path in paths:
        assert export([str(one.folder), str(path)]) == 0
        assert export([str(one.folder), str(path)]) == 2
        assert "--overwrite" in capsys.readouterr().err
    plain = torch.load(paths[0], weights_only=True)
    torch.save({"model": {f"module._orig_mod.{name}": tensor for name, tensor in plain.items()}}, tmp_path / "ddp.pt")
    for path in (*paths, tmp_path / "ddp.pt"):
        settings = [*tiny("train.steps=1", "optim.lr=0", f"train.init_from={path}"), f"run.dir={tmp_path / 'run'}"]
        trainer = Trainer(load_config("llama_small", settings))
        trainer.load_checkpoint()
        found = dict(trainer.model.named_parameters())
        assert [name for name, tensor in ours.items() if not torch.equal(tensor, found[name])] == []
        trainer.close()


@slow
def test_pickles_that_could_run_code_are_not_loaded(one: SharedRun, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    trainer = Trainer(tiny_config(tmp_path / "run", f"train.init_from={tmp_path / 'evil.pt'}"))
    with pytest.raises(UserError, match=r"evil\.pt"):
        trainer.load_checkpoint()
    trainer.close()
    folder = one.copy_to(tmp_path / "good")
    (step_folder(folder, 12) / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert_same_weights(folder, one.folder)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------------------------
# State of the user's own


class Counter:
    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Adaptive(torch.optim.SGD):
    """An optimizer that changes one of its own settings while it trains."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["d"] = self.param_groups[0].get("d", 1.0) * 1.5


class OwnTrainer(Trainer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.counter, self.noise, self.average = Counter(), torch.Generator().manual_seed(1), torch.nn.Linear(2, 2)
        self.second = torch.optim.AdamW(self.average.parameters(), lr=0.1)
        self.state.add("counter", self.counter)
        self.state.add("noise", self.noise, per_rank=True)
        self.state.add("average", self.average)
        self.state.add("second", self.second)

    def build_optimizer(self) -> torch.optim.Optimizer:
        self.adaptive = Adaptive(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.adaptive


@slow
def test_custom_state_is_restored(tmp_path: Path) -> None:
    odd = {"a": (1, 2.5, None), 3: {b"x"}, "array": np.arange(3), "inf": float("inf"), "nested": [{"t": torch.ones(2)}]}
    first = OwnTrainer(tiny_config(tmp_path, "train.steps=3"))
    for _ in first.steps():
        first.average(torch.ones(2)).sum().backward()
        first.second.step()
    first.counter.value = odd
    first.noise.manual_seed(42)
    expected = torch.rand(3, generator=first.noise)
    first.noise.manual_seed(42)
    first.save_checkpoint()
    first.close()
    second = OwnTrainer(tiny_config(tmp_path, "train.steps=3"))
    assert second.load_checkpoint() == 3
    assert torch.equal(torch.rand(3, generator=second.noise), expected)
    value = second.counter.value
    assert (value["a"], value[3], value["inf"]) == (odd["a"], odd[3], odd["inf"])
    assert value["array"].tolist() == [0, 1, 2]
    assert torch.equal(value["nested"][0]["t"], torch.ones(2))
    assert torch.equal(second.average.weight, first.average.weight)
    moments = [next(iter(own.second.state.values()))["exp_avg"] for own in (first, second)]
    assert torch.equal(*moments)
    assert second.adaptive.param_groups[0]["d"] == pytest.approx(1.5**3)
    second.close()


class Forgetful(Trainer):
    """Has state that it did not register."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))


class Averaging(Trainer):
    """Has state that looks unused, until it changes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.average = torch.nn.Linear(3, 3).requires_grad_(False)


def test_forgotten_state_is_an_error(tmp_path: Path) -> None:
    forgetful = Forgetful(tiny_config(tmp_path / "run"))
    with pytest.raises(UserError, match=r"self\.state\.add\('average'"):
        forgetful.fit()
    forgetful.close()
    assert not (tmp_path / "run" / "checkpoints").exists()
    averaging = Averaging(tiny_config(tmp_path / "averaging", "train.steps=2"))
    next(averaging.steps())
    averaging.save_checkpoint()
    averaging.average.weight.data.lerp_(torch.ones(3, 3), 0.1)
    with pytest.raises(UserError, match=r"self\.state\.add\('average'"):
        averaging.save_checkpoint()
    averaging.close()


def test_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    trainer = OwnTrainer(tiny_config(tmp_path, "train.steps=1"))
    next(trainer.steps())
    for value, name in (
        ({"deep": [object()]}, r"value\.deep\.0"),
        ({1: torch.ones(1), "1": torch.ones(1)}, r"value\.1"),
    ):
        trainer.counter.value = value
        with pytest.raises(UserError, match=name):
            trainer.save_checkpoint()
    trainer.close()


def differing_state(folder: str) -> tuple[str, list[float]]:
    """Return the error for shared state that differs between ranks, and what is restored of each rank's own."""
    import torch.distributed as dist

    dist.init_process_group("gloo")

    class Own(Trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.shared, self.own = Counter(), Counter()
            self.model.register_buffer("seen", torch.full((3,), float(self.world.rank)))
            self.state.add("shared", self.shared)
            self.state.add("own", self.own, per_rank=True)

    first = Own(load_config("llama_small", [*tiny("train.steps=1"), f"run.dir={folder}"]))
    next(first.steps())
    first.own.value = first.shared.value = first.world.rank
    error = ""
    try:
        first.save_checkpoint()
    except UserError as raised:
        error = str(raised)
    first.shared.value = 0
    first.save_checkpoint()
    first.close()
    second = Own(load_config("llama_small", [*tiny("train.steps=1"), f"run.dir={folder}"]))
    second.model.seen.zero_()
    second.load_checkpoint()
    second.close()
    return error, [*second.model.seen.tolist(), second.own.value]


@slow
def test_state_that_differs_between_ranks(tmp_path: Path) -> None:
    """Is an error, unless it is registered as each rank's own, or is a buffer; then each gets its own back."""
    (error, first), (other_error, second) = on_ranks(2, differing_state, str(tmp_path))
    assert error == other_error
    assert "'shared'" in error
    assert "per_rank=True" in error
    assert first == [0.0, 0.0, 0.0, 0]
    assert second == [1.0, 1.0, 1.0, 1]


# ---------------------------------------------------------------------------------------------------------------
# What a resume refuses


def test_added_or_removed_state_is_rejected_unless_allowed(tmp_path: Path) -> None:
    first = OwnTrainer(tiny_config(tmp_path, "train.steps=2"))
    next(first.steps())
    first.save_checkpoint()
    first.close()

    class Fewer(Trainer):
        def build_optimizer(self) -> torch.optim.Optimizer:
            return Adaptive(self.model.parameters(), lr=0.1, momentum=0.9)

    parts = ["state.counter", "state.average", "state.second", "state.noise"]
    with pytest.raises(UserError) as refused:
        Fewer(tiny_config(tmp_path, "train.steps=2")).load_checkpoint()
    assert [part for part in parts if f"checkpoint.allow_changes=[{part}]" not in str(refused.value)] == []
    misspelt = ",".join([*parts[:-1], "state.noisy"])
    with pytest.raises(UserError) as refused:
        Fewer(tiny_config(tmp_path, "train.steps=2", f"checkpoint.allow_changes=[{misspelt}]")).load_checkpoint()
    assert "[state.noise]" in str(refused.value)
    allowed = Fewer(tiny_config(tmp_path, "train.steps=2", f"checkpoint.allow_changes=[{','.join(parts)}]"))
    assert allowed.load_checkpoint() == 1
    allowed.close()


@slow
@pytest.mark.parametrize("change", ["optim.name=sgd", "model.dim=64"])
def test_advice_about_a_change_works_as_printed(change: str, tmp_path: Path) -> None:
    """No placeholder is left for the reader to fill in. What has another shape starts anew, with its moments."""
    fit(tmp_path, "train.steps=1")
    with pytest.raises(UserError) as refused:
        fit(tmp_path, "train.steps=2", change)
    (advice,) = [word for word in str(refused.value).split("'") if word.startswith("checkpoint.allow_changes=")]
    assert change.partition("=")[0] in advice
    lines = fit(tmp_path, "train.steps=2", change, advice)
    assert [line["resumed_step"] for line in lines if line["kind"] == "start"] == [None, 1]


# ---------------------------------------------------------------------------------------------------------------
# Where a resume begins


@slow
def test_loading_an_older_checkpoint_during_a_run(tmp_path: Path) -> None:
    """Later checkpoints and records no longer belong to the run, and it does not resume from them."""
    trainer = Trainer(tiny_config(tmp_path, "train.steps=6", "checkpoint.keep_last=0"))
    for record in trainer.steps():
        trainer.save_checkpoint()
        if record.step == 4:
            break
    trainer.load_checkpoint(step_folder(tmp_path, 2))
    trainer.load_checkpoint(step_folder(tmp_path, 4))  # looked at, no step taken: nothing is left behind
    trainer.load_checkpoint(step_folder(tmp_path, 2))
    next(trainer.steps())
    trainer.save_checkpoint()
    trainer.close()
    ran = Run(tmp_path, [], tmp_path)
    assert ran.steps_saved == ran.train("step") == [1, 2, 3]
    again = Trainer(tiny_config(tmp_path, "train.steps=6"))
    assert again.load_checkpoint() == 3
    again.close()


@slow
def test_same_command_continues_the_run(tmp_path: Path) -> None:
    """Started from a different run (checkpoint.resume=<path>), it does not start from there again.

    Neither if the configuration of its newest checkpoint is damaged.
    """
    fit(tmp_path / "a", "train.steps=2")
    origin = ["checkpoint.every=1", "checkpoint.keep_last=0", f"checkpoint.resume={tmp_path / 'a'}"]
    fit(tmp_path / "b", "train.steps=4", *origin)
    stored = step_folder(tmp_path / "b", 4) / "config.yaml"
    stored.write_text(stored.read_text() + "#")
    lines = fit(tmp_path / "b", "train.steps=5", *origin)
    assert [line["resumed_step"] for line in lines if line["kind"] == "start"] == [2, 3]


@slow
def test_requeued_job_that_started_over_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpoint.resume=none in the batch file, Slurm's restart continues, and a new job starts over."""

    def attempt(steps: int, job: str, restarts: int) -> list[int | None]:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        lines = fit(tmp_path, f"train.steps={steps}", "checkpoint.resume=none")
        assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, steps + 1))
        return [line["resumed_step"] for line in lines if line["kind"] == "start"]

    assert attempt(2, "7", 0) == [None]
    assert attempt(4, "7", 1) == [None, 2]
    assert attempt(2, "8", 1) == [None]
    assert (tmp_path / "previous_001" / "step_00000004").is_dir()


# ---------------------------------------------------------------------------------------------------------------
# Looking inside


@slow
def test_checkpoints_command(two: SharedRun, tmp_path: Path) -> None:
    """It lists and verifies."""
    folder = two.copy_to(tmp_path / "run", up_to=8)
    run(folder, *merged(two.overrides, ["train.steps=10", "optim.lr=1e-3", "nproc=1"]))
    code, listed = show_checkpoints(folder, "--json", "--verify")
    assert code == 0
    entries = json.loads(listed)
    assert [(entry["step"], entry["state"]) for entry in entries] == [(n, "verified") for n in (4, 8, 10)]
    assert entries[1]["mesh"] != entries[2]["mesh"]
    assert show_checkpoints(tmp_path / "nowhere")[0] == 2
    largest = max(step_folder(folder, 8).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    largest.write_bytes(content)
    assert show_checkpoints(folder)[0] == 0, "sizes are right"
    code, damaged = show_checkpoints(folder, "--verify")
    assert code == 1
    assert str(largest) in damaged
