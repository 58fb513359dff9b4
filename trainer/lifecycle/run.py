"""One run in this process: how it begins and how it ends.

    built ----> running ----> ended
       \\________________________/

`begin` writes config.yaml, the start record and status.json.  `end`, which any thread may call, writes the end record
and status.json, runs the command `run.on_end` and releases the folder; it does so once.  A user error or a stop request
before `begin` is not recorded: the files of an existing run stay as they are, except that loading may have quarantined
damaged checkpoints (`CheckpointReader.restore`), and that superseded files are moved aside right before `begin`
(`Resume.supersede`).  A standalone evaluation (`write_nothing`) leaves no files at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.rules import find_deadline
from trainer.distributed.environment import take_start_time
from trainer.distributed.monitor import Failure
from trainer.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from trainer.lifecycle.folder import read_status, record_end
from trainer.lifecycle.summary import closing_summary
from trainer.metrics.record import Record
from trainer.sequence import disable_slices
from trainer.stopping import NOTICE, stop

if TYPE_CHECKING:
    from trainer.trainer import Trainer

CLEARED_NOTICE = "MESHTRAINER_CLEARED_NOTICE"
"""Environment variable with the run folder from which `trainer.slurm` has deleted the notice of an earlier attempt: one
that exists when the run begins is then for this attempt."""


class Run:
    """The run of a Trainer in this process: its state, and how it ends.

    state: `built`, `running` from `begin` on, or `ended`.
    """

    def __init__(self, trainer: Trainer, start_time: float) -> None:
        """start_time: when the Trainer was created, by `time.monotonic`."""
        self._config = trainer.config
        self._world = trainer.world
        self._state = trainer.state
        self._folder = trainer.folder
        self._metrics = trainer.metrics
        self._saver = trainer.saver
        self._resume = trainer.resume
        self._step_metrics, self._stop_criterion = trainer.step_metrics, trainer.stop_criterion
        self._monitor = trainer.world.monitor
        self._forecast = trainer.forecast
        self._loader = trainer.loader
        self._start_time = start_time
        self._earlier_error = sys.exc_info()[1]  # an exception that the caller was already handling
        self.state: Literal["built", "running", "ended"] = "built"
        self.failure: Failure | None = None
        """The first failure of any rank, if this run has failed."""
        self._lock = threading.Lock()
        record_leaving = weakref.WeakMethod(self._record_leaving)

        def record_leaving_unless_forgotten(exit_code: int, reason: str) -> None:
            if (record := record_leaving()) is not None:
                record(exit_code, reason)

        self._on_exit = record_leaving_unless_forgotten
        """Records the end if this process leaves.  It does not keep a Trainer alive that was forgotten."""
        stop.on_exit.append(self._on_exit)

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def check_may_begin(self) -> None:
        """Raise UserError if this run has ended, because only a new Trainer can resume it."""
        if self.state == "ended":
            raise UserError("this Trainer's run has ended: create a new Trainer, which continues from there")

    def begin(self, facts: Mapping[str, str], record: Mapping[str, Any], notes: Sequence[str]) -> None:
        """Write config.yaml, open the metrics and write the start record.  The run is then running.  Collective.

        The folder must have been acquired.

        facts: the entries of the start block on the console, by name.
        record: fields of the start record.
        notes: lines to print below the start block.
        """
        resumed_step = record["resumed_step"] or 0
        for work in (self._folder.begin, lambda: self._metrics.open(self._folder.metrics, resumed_step)):
            self._world.agreed(partial(self._folder.run_reporting_errors, work))
        self.state, stop.is_ending = "running", False
        if self._world.is_main:
            notice = self._folder.path / NOTICE
            if os.environ.get(CLEARED_NOTICE) != os.path.abspath(self._folder.path):
                notice.unlink(missing_ok=True)  # it was meant for an earlier attempt
            stop.watch(notice, find_deadline(self._config))
        self._folder.write_status("running", None, self._state.step, "")
        self._metrics.start(facts)
        for note in notes:
            self._metrics.print(note)
        # The start of the command, or of this Trainer if that is unknown, in seconds since the epoch.
        start_time = take_start_time() or time.time() - (time.monotonic() - self._start_time)
        nodes = self._world.env.num_nodes
        self._metrics.write(
            Record(kind="start", **record, nodes=nodes, started=start_time, **self._metrics.start_fields)
        )
        for note in self._saver.begin():  # reads measurements from the start record
            self._metrics.print(note)

    # -- ends ----------------------------------------------------------------------------------------------------

    def end(self, state: str, exit_code: int, reason: str) -> None:
        """End the run, once: whoever calls this first, on any thread, says how it has ended.  Not collective.

        Another thread waits until the first is done.

        state: `finished`, `stopped` or `failed`.
        """
        with self._lock:
            previous, self.state = self.state, "ended"
            if previous == "ended":
                return
            stop.is_ending = True
            if previous == "running" or state == "failed":
                self._write_end(state, exit_code, reason, has_begun=previous == "running")
            if previous == "running" and self._stands_in_for_rank_0():
                record_end(self._folder.path, read_status(self._folder.path), self._state.step, reason)
            self._release()

    def _write_end(self, state: str, exit_code: int, reason: str, has_begun: bool) -> None:
        step = self._state.step
        goodput = min(1.0, self._step_metrics.productive_s / (time.monotonic() - self._start_time))
        facts: dict[str, Any] = {"step": step, "reason": state, "goodput": goodput}
        if self._world.is_main and has_begun:  # before that, the plan may still have to be made
            facts |= self._forecast.result()
            for deviation in self._forecast.mismatches():
                self._metrics.print(f"not as planned: {deviation}")
        self._metrics.write(Record(kind="end", **facts, **self._metrics.goodput_fields()))
        self._folder.write_status(state, exit_code, step, reason)
        if self._world.is_main:
            if state == "stopped" and reason == NOTICE:
                (self._folder.path / NOTICE).unlink(missing_ok=True)
            if command := self._config.run.on_end:
                facts = {"RUN_DIR": self._folder.path, "STATE": state, "EXIT_CODE": exit_code, "STEP": step}
                if problem := run_end_command(command, facts):
                    self._metrics.print(problem, "yellow")
        self._metrics.close()

    def _stands_in_for_rank_0(self) -> bool:
        """Return whether rank 0 is gone, and this is the first of the ranks that are left."""
        failure = self._monitor.failure
        if failure is None or 0 not in failure.silent_ranks:
            return False
        left = [rank for rank in range(self._world.size) if rank not in failure.silent_ranks]
        return self._world.rank in left[:1]

    def _release(self) -> None:
        if self._on_exit in stop.on_exit:
            stop.on_exit.remove(self._on_exit)
        stop.watch_nothing()
        disable_slices()
        self._folder.release()
        close = getattr(self._loader, "close", None)
        if callable(close):
            close()  # it may have worker processes

    def finish(self) -> int:
        """End the run as finished.  Returns the exit code.  Not collective."""
        best = self._saver.best if self._world.is_main else None
        seconds = time.monotonic() - self._start_time
        lines = closing_summary(self._config, self._metrics, self._stop_criterion, best, self._resume.step, seconds)
        if self._world.is_main:
            lines += self._stop_criterion.closing_lines(self._folder.path)
        for line in lines:
            self._metrics.print(line, "bold")
        self._saver.wait_for_deletion()
        self.end("finished", EXIT_FINISHED, self._stop_criterion.reason(self._state.step))
        return EXIT_FINISHED

    def end_stopped(self) -> int:
        """End the run as stopped on request.  Returns the exit code.  One all-gather."""
        reasons = self._world.gather(stop.reason())
        reason = next((reason for reason in reasons if reason), "asked to stop")
        resume_point = "the last good checkpoint (steps were being skipped)" if self._state.num_skipped else "there"
        self._metrics.print(
            f"stopped ({reason}) at step {self._state.step}; run the same command to resume from {resume_point}",
            "yellow",
        )
        self._saver.wait_for_deletion()
        self.end("stopped", EXIT_STOPPED, reason)
        return EXIT_STOPPED

    def end_without_work(self, resumed_step: int | None, delete_leftovers: Callable[[], None]) -> int:
        """End a run that has no steps left.  Returns the exit code.

        delete_leftovers: deletes the partial files of killed attempts.
        """
        step, config, stop_criterion = self._state.step, self._config, self._stop_criterion
        is_early = step < config.train.steps
        setting = "eval.patience=0" if is_early else f"train.steps={max(1, 2 * step)}"
        self._metrics.print(
            f"nothing to do: {config.run.dir} is at step {step} of {config.train.steps}"
            f"{f' ({stop_criterion.reason(step)})' if is_early else ''}\n"
            f"  to train longer: {setting}\n"
            "  to train another run: run.name=NAME\n"
            "  to start over: checkpoint.resume=none"
        )
        is_own = self._folder.previous_config is not None  # else it is the checkpoint of another run
        if self._world.is_main and resumed_step is not None and is_own and not self._folder.has_finished():
            delete_leftovers()  # the last attempt was killed after its final save
            self._folder.write_status("finished", EXIT_FINISHED, step, stop_criterion.reason(step))
        self._folder.release()
        return EXIT_FINISHED

    def fail(self, error: BaseException) -> None:
        """End the run because of an exception on this rank.  Not collective: the other ranks may be anywhere."""
        stop.is_ending = True  # the launcher sends SIGTERM if another rank ends before the failure is recorded
        failure = self.failure = self._monitor.fail(error)
        if self._monitor.is_own(failure, error):
            self._forecast.explain(error)
        if failure.can_save:
            self._saver.wait(self._config.run.timeout_s)  # let a save in flight finish
        self._saver.quarantine_since(self._state.skips.failed_since)
        is_mistake = isinstance(error, UserError)
        if is_mistake and not self.is_running:
            self._release()
        elif failure.exit_code == EXIT_STOPPED:  # before the first step of this attempt
            self.end("stopped", EXIT_STOPPED, failure.reason)
        else:
            self.end("failed", EXIT_USER_ERROR if is_mistake else EXIT_FAILED, failure.reason)

    def _record_leaving(self, exit_code: int, reason: str) -> None:
        """Record that this process leaves at once; one of `stop.on_exit`."""
        self.end("stopped" if exit_code == EXIT_STOPPED else "failed", exit_code, reason)

    # -- around a loop -------------------------------------------------------------------------------------------

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Hear requests to stop inside the block.  If the block raises, record the failure and re-raise.

        If the command line hears them already, a request before the first step has ended this process; otherwise, in a
        script or notebook, it always lets the step finish and saves.
        """
        with stop.hearing_signals(exit_code=lambda number: EXIT_STOPPED, has_state=True):
            try:
                yield
            except BaseException as error:
                self.fail(error)
                raise

    def write_nothing(self) -> None:
        """Never write anything to the run folder, because this process only evaluates."""
        self.state = "ended"

    def close(self) -> None:
        """End the run if it is still running, and close the process group if this run opened it.  Collective.

        If this is called while an exception propagates, the run has failed, and this method uses no collective.
        """
        error = sys.exc_info()[1]
        if error is not None and error is not self._earlier_error:
            if self.state != "ended":
                self.fail(error)
            self._release()
            if self._world.size == 1:
                self._world.close()
            return
        try:
            self._saver.finish()
            if self.is_running:
                self._step_metrics.finish_pending_step()
                if self._stop_criterion.is_reached(self._state.step):
                    self._state.skips.check_end(self._state.step)
        except BaseException as failure:
            self.fail(failure)
            raise
        if self.is_running:
            has_finished = self._stop_criterion.is_reached(self._state.step)
            code = EXIT_FINISHED if has_finished else EXIT_STOPPED
            self.end("finished" if has_finished else "stopped", code, "closed")
        self._release()
        self._world.close()


# ---------------------------------------------------------------------------------------------------------------
# The command `run.on_end`


END_COMMAND_TIMEOUT_S = 30.0
"""The command's time limit in seconds; short, because a stop request may be pending."""
_GRACE_S = 5.0
"""Seconds past the limit after which `timeout` kills the command, in case this process no longer can."""


def run_end_command(command: str, facts: Mapping[str, object]) -> str:
    """Run a shell command with `facts` in its environment.  Returns an error message; empty if the command succeeded.

    The command runs in its own session, so that signals to the run's process group do not reach it.
    """
    env = os.environ | {name: str(value) for name, value in facts.items()}
    try:
        limiter = shutil.which("timeout")
        # If this process is killed, `timeout` still kills the command and its children.
        limiter_arguments = [] if limiter is None else [limiter, "-s", "KILL", f"{END_COMMAND_TIMEOUT_S + _GRACE_S:g}"]
        arguments = [*limiter_arguments, "/bin/sh", "-c", command]
        process = subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    except (OSError, ValueError) as error:
        return f"run.on_end cannot be started: {error}"
    try:
        code = process.wait(END_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"run.on_end was stopped: it took more than {END_COMMAND_TIMEOUT_S:.0f} s"
    return f"run.on_end failed with exit code {code}" if code else ""
