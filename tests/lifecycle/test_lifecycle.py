"""The states of a run, without processes: what each transition writes, and in which order."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from tests.helpers.ranks import tiny_overrides
from trainer.config import load_config
from trainer.distributed.channel import StepSync
from trainer.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, TrainingFailed, UserError
from trainer.lifecycle.lifecycle import TRANSITIONS, Event, Lifecycle, Phase
from trainer.metrics.step_metrics import SkipCounter
from trainer.metrics.stop_criterion import StopCriterion


class OneRank:
    """A world of one rank."""

    rank, size, is_main = 0, 1, True

    def __init__(self, said: list[str]) -> None:
        self._said = said
        self.failure_listeners: list[Any] = []
        self.env = SimpleNamespace(num_nodes=1)

    def sum(self, values: list[float]) -> list[float]:
        return [float(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def agreed(self, work: Any) -> Any:
        return work()

    def announce_failure(self, error: BaseException) -> None:
        self._said.append("announce")

    def close(self) -> None:
        self._said.append("leave the group")


class Run:
    """A lifecycle with collaborators that only record their calls."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.world = OneRank(self.said)
        self.step_sync = StepSync(self.world)  # type: ignore[arg-type]
        self.progress = SimpleNamespace(step=3, num_skipped=0, skips=SkipCounter(max_in_a_row=3))
        config = load_config("llama_small", tiny_overrides(f"run.dir={folder}", "train.steps=5"))
        metrics = SimpleNamespace(
            latest={},
            open=lambda path, step: self.say("open metrics"),
            tracking_id=None,
            start_fields={},
            clock=SimpleNamespace(now=lambda: 0.0, at=lambda seconds: 0.0),
            start=lambda facts: self.say("start block"),
            print=lambda text, style="": self.say(text),
            write=lambda record: self.say(f"record {record['kind']} {record.get('reason', '')}".strip()),
            goodput_fields=dict,
            close=lambda: self.say("close metrics"),
        )
        kept = SimpleNamespace(
            path=folder,
            loss=None,
            metrics=folder / "metrics.jsonl",
            run_reporting_errors=lambda work: work(),
            begin=lambda: self.say("config.yaml"),
            write_status=lambda state, code, step, reason: self.say(f"status {state} {code} {reason}".strip()),
            release=lambda: self.say("release"),
            has_finished=lambda: False,
        )
        watchdog = SimpleNamespace(explain=lambda error: None, stop=lambda: self.say("stop watching"))
        step_metrics = SimpleNamespace(
            productive_s=1.0,
            step_s=0.0,
            finish_pending_step=lambda: self.say("finish pending step"),
        )
        saver = SimpleNamespace(
            begin=list,
            best=None,
            expected_save_s=0.0,
            finish=lambda: None,
            wait=lambda seconds: self.say("wait for the save"),
            wait_for_deletion=list,
            quarantine_since=lambda step: None,
        )
        forecast = SimpleNamespace(result=dict, mismatches=list, explain=lambda error: None)
        relocation = SimpleNamespace(has_moved=False, move_if_lost=lambda: False)
        parts: Any = SimpleNamespace(
            config=config,
            world=self.world,
            state=self.progress,
            step_sync=self.step_sync,
            folder=kept,
            relocation=relocation,
            metrics=metrics,
            watchdog=watchdog,
            step_metrics=step_metrics,
            stop_criterion=StopCriterion(config),
            saver=saver,
            forecast=forecast,
        )
        self.life = Lifecycle(parts, None, None, start_time=0.0)

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self) -> None:
        self.life.begin({}, {"resumed_step": None}, [])
        self.said.clear()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.life.stop.uninstall()


def test_every_phase_and_event_is_in_the_table() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(get_args(Phase))
    assert {event for _, event in TRANSITIONS} == set(get_args(Event))
    missing = {(phase, event) for phase in get_args(Phase) for event in get_args(Event)} - set(TRANSITIONS)
    assert missing == {("running", "begin"), ("ended", "begin")}, "what runs, or has ended, does not begin"


def test_ended_run_does_not_start_again(run: Run) -> None:
    run.begin()
    assert run.life.end() == EXIT_FINISHED
    with pytest.raises(UserError, match="create a new Trainer"), run.life.running():
        run.life.check_may_begin()
    assert "record end failed" not in run.said, "what it came to stays on record"


def test_the_start_is_recorded_before_anything_is_trained(run: Run) -> None:
    run.life.restore()
    assert run.life.phase == "restored"
    run.life.begin({}, {"resumed_step": 3}, ["a note"])
    assert run.said == ["config.yaml", "open metrics", "status running None", "start block", "a note", "record start"]
    assert run.life.is_running


ENDS = {
    "finished": (None, EXIT_FINISHED, "finished"),
    "stopped": (None, EXIT_STOPPED, "stopped"),
    "failed": (TrainingFailed("no"), EXIT_FAILED, "failed"),
    "a mistake": (UserError("no"), EXIT_USER_ERROR, "failed"),
    "an interrupt": (KeyboardInterrupt(), EXIT_FAILED, "failed"),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_run_ends(case: str, run: Run) -> None:
    error, code, state = ENDS[case]
    run.begin()
    if error is not None:
        with pytest.raises(type(error)), run.life.running():
            raise error
    else:
        if state == "stopped":
            run.life.stop.exits_on_sigterm = False
            run.life.stop.watch(None, deadline=0.0)
            run.step_sync.all_reduce()
            assert run.life.stopping
        assert run.life.end() == code
    told = [line for line in run.said if line.startswith(("record", "status", "release"))]
    reason = told[1].removeprefix(f"status {state} {code}")
    assert told == [f"record end {state}", f"status {state} {code}{reason}", "release"], "the status last, then let go"
    assert run.life.phase == "ended"


@pytest.mark.parametrize("phase", ["built", "restored"])
def test_user_error_before_the_start_leaves_the_run_unchanged(phase: str, run: Run) -> None:
    if phase == "restored":
        run.life.restore()
    with pytest.raises(UserError), run.life.running():
        raise UserError("no such checkpoint")
    assert run.said == ["stop watching", "announce", "wait for the save", "release"]
    assert run.life.phase == phase


def test_other_ranks_are_notified_before_waiting(run: Run) -> None:
    run.begin()
    run.life.fail(TrainingFailed("no"))
    assert run.said.index("announce") < run.said.index("wait for the save") < run.said.index("record end failed")


def test_closing_while_an_exception_propagates_is_a_failure(run: Run) -> None:
    run.begin()
    with pytest.raises(ZeroDivisionError), closing(SimpleNamespace(close=run.life.close)):
        raise ZeroDivisionError
    assert "record end failed" in run.said
    assert "leave the group" in run.said, "alone, nobody is waited for"


def test_closing_while_handling_an_earlier_error_is_no_failure(tmp_path: Path) -> None:
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        run = Run(tmp_path)
        run.begin()
        run.life.close()
        assert sys.exc_info()[1] is not None
    assert run.said[0] == "finish pending step"
    assert "record end stopped" in run.said
    run.life.stop.uninstall()


def test_closing_twice_ends_once(run: Run) -> None:
    run.begin()
    for _ in range(2):
        run.life.close()
    assert run.said.count("record end stopped") == 1


def test_status_is_written_before_steps_that_may_hang(run: Run) -> None:
    run.begin()
    run.life.main_thread_hung("watchdog: rank 0 stood still")
    assert run.said[0] == "status failed 1 watchdog: rank 0 stood still", "what follows may hang too"
    assert run.life.phase == "ended"


def test_launcher_does_not_cut_off_a_rank_that_records_its_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher sends SIGTERM as soon as another rank has exited, in the first step too."""
    run.begin()
    stop, said = run.life.stop, run.said
    monkeypatch.setattr(os, "_exit", lambda code: said.append("cut off"))
    stop.on_first_signal = lambda: said.append("acknowledged")
    stop.install()
    try:
        stop.enable_immediate_stop()
        run.life.fail(TrainingFailed("no"))
        run.life.peer_failed()  # a thread may notice it late
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.5)  # `ImmediateStop` raises in this thread after a second
    finally:
        stop.uninstall()
    assert not {"cut off", "acknowledged"} & set(said)


def test_run_that_is_tried_again_after_a_user_error_heeds_requests(run: Run) -> None:
    acknowledged: list[bool] = []
    with pytest.raises(UserError), run.life.running():
        raise UserError("no such checkpoint")
    run.life.stop.on_first_signal = lambda: acknowledged.append(True)
    with run.life.running():
        signal.raise_signal(signal.SIGTERM)
    assert acknowledged == [True]


def test_failure_of_a_different_rank_is_written_from_a_thread(run: Run) -> None:
    run.begin()
    (listener,) = run.world.failure_listeners
    listener.peer_failed()
    assert run.life.stop.exits_on_sigterm
    listener.before_exit(1.0, "rank 1: gone")
    assert run.said == ["status failed 1 rank 1: gone", "wait for the save"]


def test_finished_run_completes_the_record_of_a_killed_attempt(run: Run) -> None:
    run.life.restore()
    run.progress.step = 5
    assert run.life.end_without_work(5, lambda: run.say("clean")) == EXIT_FINISHED
    assert run.said[1:] == ["clean", "status finished 0 train.steps reached", "release"]


class Ranks(OneRank):
    """A channel on which the other ranks' numbers are given."""

    size = 3

    def __init__(self, others: list[list[float]]) -> None:
        super().__init__([])
        self._others = others

    def sum(self, values: list[float]) -> list[float]:
        return [float(sum(column)) for column in zip(values, *self._others, strict=True)]


def test_ballot_sums_targets_and_votes() -> None:
    asked: list[str] = []
    step_sync = StepSync(Ranks([[10, 0, True, False, True], [20, 0, True, False, False]]))  # type: ignore[arg-type]
    all_yes = step_sync.register(lambda: True)
    nobody = step_sync.register(lambda: False, lambda: asked.append("nobody"))
    one = step_sync.register(lambda: False, lambda: asked.append("one"))
    assert step_sync.all_reduce(5) == [35]
    assert (all_yes.all_yes, all_yes.any_yes) == (True, True)
    assert (nobody.all_yes, nobody.any_yes) == (False, False)
    assert (one.all_yes, one.any_yes) == (False, True)
    assert asked == ["one"]


def test_custom_step_without_ballot_gets_one() -> None:
    casts: list[int] = []
    step_sync = StepSync(OneRank([]))  # type: ignore[arg-type]
    step_sync.register(lambda: bool(casts.append(1)))
    step_sync.begin_step()
    step_sync.ensure_all_reduced()
    assert len(casts) == 1
    step_sync.begin_step()
    step_sync.all_reduce(3)
    step_sync.ensure_all_reduced()
    assert len(casts) == 2


def test_end_command_runs_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog and the main thread may both detect the failure of a run."""
    told: list[str] = []
    monkeypatch.setattr("trainer.lifecycle.lifecycle.run_end_command", lambda command, facts: told.append(command))
    config = run.life._config
    run.life._config = dataclasses.replace(config, run=dataclasses.replace(config.run, on_end="true"))
    run.begin()
    run.life.main_thread_hung("hangs")
    run.life.fail(ConnectionError("the others have left"))
    assert told == ["true"]


def test_stopped_evaluation_announces_no_save(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    with run.life.without_writing():
        signal.raise_signal(signal.SIGTERM)
        run.step_sync.all_reduce()
    assert run.life.stopping
    assert capfd.readouterr().err == "Stopping: the evaluation is abandoned. Press Ctrl-C again to quit immediately.\n"
    assert run.said == []
