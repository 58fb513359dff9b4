"""How a run ends on several ranks: cleanly, with the first error of any rank, or because a rank was killed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.helpers.faults import Fault, processes_of
from tests.helpers.launch import REPOSITORY, TORCHRUN, Run, fork, launch, merged, run, run_module, start, tiny
from tests.helpers.runs import STEPS, SharedRun

pytestmark = pytest.mark.slow

OWN = "model.name=tests.helpers.custom_recipes:"
MLP = ["recipe=llama_small", "data.source=synthetic", "data.seq_len=16", "train.steps=6", "eval.every=0", "log.every=1"]
SMALL = ["train.global_batch_size=8", "run.threads=1", "log.sample_tokens=0"]
FAULTY = [*MLP, f"{OWN}mlp_faulty", *SMALL]


# ---------------------------------------------------------------------------------------------------------------
# Ends


@pytest.mark.campaign
def test_finished_run_ends_cleanly(tmp_path: Path) -> None:
    """With workers, and a mesh that is still open: most such runs used to abort when the interpreter exited."""
    for number in range(6):
        ended = run(tmp_path / str(number), "train.steps=5", "nproc=2", "data.num_workers=1", fresh=True)
        assert ended.status["state"] == "finished"
        assert (ended.status["exit_code"], ended.status["step"]) == (0, 5)
        assert processes_of(ended.folder) == []


@pytest.mark.campaign
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_script_of_ones_own_ends_cleanly(by_torchrun: bool, tmp_path: Path) -> None:
    """With `fit()`, and without `close()`."""
    script = tmp_path / "mine.py"
    overrides = tiny("train.steps=3", f"run.dir={tmp_path / 'run'}")
    script.write_text(
        "from trainer import Trainer, load_config\n"
        f"raise SystemExit(Trainer(load_config('llama_small', {overrides!r})).fit())\n"
    )
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node=2"] if by_torchrun else [TORCHRUN[0]]
    ended = launch([*launcher, str(script)], tmp_path / "run", {"PYTHONPATH": str(REPOSITORY)}).wait()
    assert ended.code == 0, ended.err
    assert ended.train("step") == [1, 2, 3]


def test_finished_run_that_is_started_again_does_nothing(one: SharedRun, tmp_path: Path) -> None:
    folder = one.copy_to(tmp_path / "run")
    before = (folder / "metrics.jsonl").read_bytes()
    run(folder, *one.overrides)
    assert (folder / "metrics.jsonl").read_bytes() == before
    further = run(folder, *merged(one.overrides, [f"train.steps={STEPS + 1}"]))
    assert further.train("step") == list(range(1, STEPS + 2))


# ---------------------------------------------------------------------------------------------------------------
# Failures


def test_error_of_one_rank_ends_all_and_is_printed_once(tmp_path: Path) -> None:
    """The other rank ends by itself, and its error is not printed."""
    failed = start(tmp_path / "run", *MLP, f"{OWN}mlp_crashing", "nproc=2").wait(together=False)
    assert failed.codes == [1, 1], failed.err
    assert failed.err.count("Traceback") == 1
    assert failed.err.count("\nValueError") == 1
    assert failed.status["state"] == "failed"
    assert failed.status["exit_code"] == 1
    assert failed.status["reason"].startswith("rank 1: ValueError")
    assert failed.metrics[-1]["kind"] == "end"
    assert failed.metrics[-1]["reason"] == "failed"


@pytest.mark.campaign
def test_launcher_ends_the_others_when_one_rank_fails(tmp_path: Path) -> None:
    """One of the others sleeps, and would not notice."""
    failed = run(tmp_path / "run", *MLP, f"{OWN}mlp_sleeping", "nproc=2", fresh=True, code=1)
    assert failed.err.count("Traceback") == 1, failed.err
    assert processes_of(failed.folder) == []


def test_user_error_on_ranks_of_any_launcher_is_one_message(tmp_path: Path) -> None:
    """The other ranks used to print a page each, because rank 0 had closed the store."""
    given = [*MLP, f"{OWN}mlp", "run.threads=1", "train.global_batch_size=6", "fsdp.wrap=foo.bar:baz", "nproc=3"]
    refused = start(tmp_path / "run", *given).wait(together=False)
    assert refused.codes == [2, 2, 2], refused.err
    assert refused.err_of(0).startswith("error: fsdp.wrap=foo.bar:baz")
    assert refused.err_of(1) + refused.err_of(2) == ""


def test_steps_that_are_not_finite_are_skipped_on_all_ranks(tmp_path: Path) -> None:
    skipped = run(tmp_path / "run", *MLP, f"{OWN}mlp_nonfinite", "nproc=2", *SMALL)
    assert [loss is None for loss in skipped.train("loss")] == [False, False, True, True, False, False]
    assert skipped.train("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.campaign
def test_too_many_steps_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    limit = "train.max_skipped_updates=2"
    failed = run(tmp_path / "run", *MLP, f"{OWN}mlp_nonfinite", "nproc=2", limit, *SMALL, code=1)
    assert "Traceback" not in failed.err
    assert failed.status["state"] == "failed"


# ---------------------------------------------------------------------------------------------------------------
# Killed ranks


def assert_named(failed: Run, words: str) -> None:
    """Assert that the message and the status name the killed rank, once and without what follows from it."""
    assert failed.status["state"] == "failed"
    assert failed.status["exit_code"] == 1
    assert failed.status["reason"].startswith(words), failed.status
    assert failed.err.count(words) == 1, failed.err
    assert "Traceback" not in failed.err


def test_other_rank_names_a_killed_one(tmp_path: Path) -> None:
    """Without a launcher that could. The run is then resumed."""
    fault = Fault(tmp_path / "notes", {"step 3 of rank 1": "SIGKILL"})
    overrides = [*FAULTY, "checkpoint.every=2", "checkpoint.mode=sync", f"run.dir={tmp_path / 'run'}"]
    ranks = fork(run_module, ["trainer.run", overrides], tmp_path / "run", 2, fault.variables)
    failed = ranks.wait(together=False)
    assert failed.codes == [1, -9], failed.err
    assert_named(failed, f"rank 1 (process {failed.pids[1]} on {socket.gethostname()}): no answer")
    resumed = run(tmp_path / "run", *overrides, "nproc=2")
    assert resumed.train("step") == [1, 2, 3, 4, 5, 6]
    assert [line["resumed_step"] for line in resumed.of_kind("start")] == [None, 2]


@pytest.mark.campaign
@pytest.mark.parametrize(("rank", "name"), [(1, "SIGKILL"), (0, "SIGKILL"), (0, "SIGSEGV"), (1, "SIGBUS")])
def test_launcher_names_a_killed_rank_and_its_signal(rank: int, name: str, tmp_path: Path) -> None:
    fault = Fault(tmp_path / "notes", {f"step 3{' of rank 1' * rank}": name})
    failed = run(tmp_path / "run", *FAULTY, "nproc=2", fresh=True, variables=fault.variables, code=1)
    pid = (tmp_path / "notes" / f"pid.{rank}").read_text()
    assert_named(failed, f"rank {rank} (process {pid}) was killed by {name}")
    assert not list(failed.folder.glob(".status*"))


# ---------------------------------------------------------------------------------------------------------------
# Launchers


def test_nproc_must_equal_the_launchers_world_size(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "trainer.run", "recipe=llama_small", "nproc=3"]
    refused = launch(command, tmp_path).wait()
    assert refused.code == 1  # torchrun's
    assert refused.err.count("error: nproc=3: ") == 1


@pytest.mark.campaign
def test_exit_code_of_workers_is_that_of_nproc(tmp_path: Path) -> None:
    run(tmp_path / "refused", *MLP, f"{OWN}mlp_unfilled", "nproc=2", fresh=True, code=2)
    fault = Fault(tmp_path / "notes", {"step 2 of rank 1": "SIGTERM"})
    run(tmp_path / "stopped", *FAULTY, "nproc=2", fresh=True, variables=fault.variables, code=75)
