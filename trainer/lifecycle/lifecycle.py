"""The lifecycle of a run: its phases, from built to ended, and the files that each transition writes.

    built ----restore----> restored          a checkpoint has been loaded
    built, restored ----begin----> running   config.yaml, the start record and status.json are written
    any ----end----> ended                   finished, stopped or failed: the end record and status.json are written,
                                             the folder is released

A user error or a stop request before `begin` causes no transition and is not recorded.  The files of an existing run
stay as they are, except that loading may have quarantined damaged checkpoints (`CheckpointReader.restore`), and that
superseded files are moved aside right before `begin` (`Resume.supersede`).
A standalone evaluation (`without_writing`) enters `ended` at once and writes nothing.

This module also runs the command `run.on_end`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from trainer.config import find_deadline
from trainer.distributed.environment import take_start_time
from trainer.distributed.stop_request import (
    NOTICE,
    STOPPING,
    STOPPING_EVALUATION,
    acknowledge_stop,
    causing_stop_request,
    file_identity,
    take_stale_notice,
    take_stop_request,
)
from trainer.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from trainer.lifecycle.summary import closing_summary
from trainer.metrics.record import Record
from trainer.sequence import disable_slices
from trainer.stopping import StopRequested

if TYPE_CHECKING:
    from trainer.lifecycle.assembly import TrainingRun

Phase = Literal["built", "restored", "running", "ended"]
Event = Literal["restore", "begin", "end"]

TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = {
    ("built", "restore"): "restored",
    ("restored", "restore"): "restored",
    ("running", "restore"): "running",
    ("ended", "restore"): "ended",
    ("built", "begin"): "running",
    ("restored", "begin"): "running",
    ("built", "end"): "ended",
    ("restored", "end"): "ended",
    ("running", "end"): "ended",
    ("ended", "end"): "ended",
}
"""The phase after each event.  A rollback during training is a `restore` that leaves the run `running`.  An event that
is not listed for a phase is a bug."""


class Lifecycle:
    """The run in this process: its phase and folder, how it handles stop requests, and how it ends.

    As one of `World.failure_listeners`, it is called from other threads: by the failure watch (`peer_failed`,
    `before_exit`) after another rank has failed or the launcher has died, and by the watchdog (`main_thread_hung`).
    """

    def __init__(self, run: TrainingRun, loader: object, start_time: float) -> None:
        """start_time: when the Trainer was created, by `time.monotonic`."""
        self._config, self._world, self._state = run.config, run.world, run.state
        self._folder, self._metrics = run.folder, run.metrics
        self._watchdog, self._step_metrics, self._stop_criterion = run.watchdog, run.step_metrics, run.stop_criterion
        self._saver, self._forecast, self._loader, self._start_time = run.saver, run.forecast, loader, start_time
        self._earlier_error = sys.exc_info()[1]  # an exception that the caller was already handling
        self.phase: Phase = "built"
        self._ran_end_command = False
        self.stopping = False
        """True on all ranks once any rank has been asked to stop.  This step is then the last."""
        self.stop = take_stop_request()
        """Detects requests to stop this rank."""
        if run.world.is_main:
            self.stop.on_first_signal, self.stop.on_second_interrupt = acknowledge_stop, self._quit
        self._stale_notice = take_stale_notice(run.config.run_dir)
        if self.stop.immediate_stop is not None:
            self.stop.immediate_stop.before_exit = self._record_immediate_stop
        run.step_sync.register(self._is_asked_to_stop, self._start_stopping)
        run.world.failure_listeners.append(self)

    @property
    def is_running(self) -> bool:
        """True from `begin` until the run ends."""
        return self.phase == "running"

    def _enter(self, event: Event) -> None:
        self.phase = TRANSITIONS[self.phase, event]

    # -- transitions ---------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Record that a checkpoint has been loaded."""
        self._enter("restore")

    def check_may_begin(self) -> None:
        """Raise UserError if this run has ended, because only a new Trainer can resume it."""
        if (self.phase, "begin") not in TRANSITIONS:
            raise UserError(f"this Trainer's run has {self.phase}: create a new Trainer, which continues from there")

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
        self._metrics.tracking_id = self._world.broadcast(self._metrics.tracking_id)
        self._enter("begin")
        if self._world.is_main:
            notice = self._folder.path / NOTICE
            if self._stale_notice and file_identity(notice) == self._stale_notice:
                notice.unlink(missing_ok=True)  # it was meant for an earlier attempt
            self.stop.watch(notice, find_deadline(self._config))
        self._folder.write_status("running", None, self._state.step, "")
        self._metrics.start(facts)
        for note in notes:
            self._metrics.print(note)
        clock, command_start = self._metrics.clock, take_start_time()
        # The start of the command, or of this Trainer if that is unknown, in seconds since the epoch.
        start_time = (
            clock.now() - (time.monotonic() - self._start_time)
            if command_start is None
            else clock.time_at(command_start)
        )
        nodes = self._world.env.num_nodes
        self._metrics.write(
            Record(kind="start", **record, nodes=nodes, started=start_time, **self._metrics.start_fields)
        )
        for note in self._saver.begin():  # reads measurements from the start record
            self._metrics.print(note)

    def end(self) -> int:
        """End the run as finished, or as stopped on request.  Returns the exit code.  Collective."""
        if self.stopping:
            reasons = self._world.gather(self.stop.reason(self._stopping_s()))
            reason = next((reason for reason in reasons if reason), "asked to stop")
            step = self._state.step
            resume_point = "the last good checkpoint (steps were being skipped)" if self._state.num_skipped else "there"
            self._metrics.print(
                f"stopped ({reason}) at step {step}; run the same command to resume from {resume_point}", "yellow"
            )
            self._end("stopped", EXIT_STOPPED, reason)
            return EXIT_STOPPED
        reason = self._stop_criterion.reason(self._state.step)
        best = self._saver.best if self._world.is_main else None
        lines = closing_summary(
            self._config, self._metrics, self._stop_criterion, best, time.monotonic() - self._start_time
        )
        if self._world.is_main:
            lines += self._stop_criterion.closing_lines(self._folder.path)
        for line in lines:
            self._metrics.print(line, "bold")
        self._end("finished", EXIT_FINISHED, reason)
        return EXIT_FINISHED

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
        if self._world.is_main and resumed_step is not None and not self._folder.has_finished():
            delete_leftovers()  # the last attempt was killed after its final save
            self._folder.write_status("finished", EXIT_FINISHED, step, stop_criterion.reason(step))
        self._folder.release()
        return EXIT_FINISHED

    def fail(self, error: BaseException) -> None:
        """Record that the run has failed.  Uses no collective, since the other ranks may be anywhere in their code."""
        if isinstance(error, StopRequested):  # before the first step of this attempt
            self._watchdog.stop()
            if self.phase == "running":
                self._end("stopped", EXIT_STOPPED, error.name)
            else:
                self._folder.release()
            return
        self.stop.ignore_requests()  # the launcher sends SIGTERM if another rank ends before the failure is recorded
        self._watchdog.explain(error)
        self._watchdog.stop()
        self._forecast.explain(error)
        first_failure = self._world.announce_failure(error)
        self._saver.wait(self._config.run.timeout_s)  # let a save in flight finish
        self._saver.quarantine_since(self._state.skips.failed_since)
        if isinstance(error, UserError) and self.phase != "running":
            self._folder.release()
            return
        exit_code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
        self._end("failed", exit_code, first_failure or f"{type(error).__name__}: {error}")

    def _record_immediate_stop(self) -> None:
        """Record the stop, from another thread, because the main thread is blocked."""
        if self.phase == "running":
            self._folder.write_status("stopped", EXIT_STOPPED, self._state.step, "asked to stop")
        self._folder.release()

    def disable_immediate_stop(self) -> None:
        """From now on, let a stop request finish the step and save, because there is state to save."""
        self.stop.disable_immediate_stop()

    def _end(self, state: str, exit_code: int, reason: str) -> None:
        self._enter("end")
        self._watchdog.stop()
        self._saver.wait_for_deletion()
        goodput = min(1.0, self._step_metrics.productive_s / (time.monotonic() - self._start_time))
        facts: dict[str, Any] = {"step": self._state.step, "reason": state, "goodput": goodput}
        if self._world.is_main:
            facts |= self._forecast.result()
            for deviation in self._forecast.mismatches():
                self._metrics.print(f"not as planned: {deviation}")
        self._metrics.write(Record(kind="end", **facts, **self._metrics.goodput_fields()))
        self._folder.write_status(state, exit_code, self._state.step, reason)
        command, step = self._config.run.on_end, self._state.step
        if command and self._world.is_main and not self._ran_end_command:
            self._ran_end_command = True  # both the watchdog and the main thread may detect the failure
            facts = {"RUN_DIR": self._folder.path, "STATE": state, "EXIT_CODE": exit_code, "STEP": step}
            if failure := run_end_command(command, facts):
                self._metrics.print(failure, "yellow")
        self._metrics.close()
        self._release()

    def _release(self) -> None:
        disable_slices()
        self._folder.release()
        close = getattr(self._loader, "close", None)
        if callable(close):
            close()  # it may have worker processes

    # -- around a loop -------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Catch stop requests inside the block.  If the block raises, record the failure or the stop, and re-raise."""
        self.stop.install()
        try:
            yield
        except BaseException as error:
            if (request := causing_stop_request(error)) is not None:
                self.fail(request)
                raise request from error
            self.fail(error)
            raise
        finally:
            self.stop.uninstall()

    @contextmanager
    def without_writing(self) -> Iterator[None]:
        """Catch stop requests inside the block, but write nothing to the run, even if the block raises."""
        self._enter("end")
        if self._world.is_main:
            self.stop.on_first_signal = partial(acknowledge_stop, STOPPING_EVALUATION)
        self.stop.is_acknowledged = True  # the usual message promises a save
        self.stop.install()
        try:
            yield
        finally:
            self.stop.uninstall()

    def close(self) -> None:
        """End the run if it is still running, and close the process group if this run opened it.  Collective.

        If this is called while an exception propagates, the run has failed, and this method uses no collective.
        """
        error = sys.exc_info()[1]
        if error is not None and error is not self._earlier_error:
            if self.phase != "ended":
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
            self._end("finished" if has_finished else "stopped", code, "closed")
        self._watchdog.stop()
        self._release()
        self._world.close()

    # -- requests to stop ----------------------------------------------------------------------------------------

    def _is_asked_to_stop(self) -> bool:
        return self.stop.reason(self._stopping_s()) is not None

    def _start_stopping(self) -> None:
        if not self.stopping:
            self.stopping = True
            if not self.stop.is_acknowledged:
                self._metrics.print(STOPPING, "yellow")

    def _stopping_s(self) -> float:
        """Return how long stopping may take, in seconds: two steps and the longest save so far, with a margin."""
        return 2.0 * self._step_metrics.step_s + 1.5 * self._saver.expected_save_s + 5.0

    def _quit(self) -> None:
        """Release the folder, before a second Ctrl-C ends the process."""
        self.before_exit(2.0, "a second Ctrl-C", saves=False)
        thread = threading.Thread(target=self._folder.release, daemon=True)
        thread.start()
        thread.join(2.0)

    # -- failures elsewhere --------------------------------------------------------------------------------------

    def peer_failed(self) -> None:
        """After another rank has failed, let SIGTERM end this process, because the main thread may hang."""
        self.stop.exits_on_sigterm = True

    def before_exit(self, timeout_s: float, reason: str, saves: bool = True) -> None:
        """Before this process exits, write `reason` to status.json and, if `saves`, wait for the save in flight.

        Called from another thread or a signal handler, because the main thread may hang.  The storage may hang as well,
        so each wait is limited.
        """
        if self.is_running:
            status = ("failed", EXIT_FAILED, self._state.step, reason)
            thread = threading.Thread(target=self._folder.write_status, args=status, daemon=True)
            thread.start()
            thread.join(max(1.0, timeout_s))
        if saves:
            self._saver.wait(min(timeout_s, self._config.run.timeout_s))

    def main_thread_hung(self, reason: str) -> None:
        """Record that the main thread hangs.  Called by the watchdog from its own thread."""
        self._folder.write_status("failed", EXIT_FAILED, self._state.step, reason)  # first, because `_end` may hang too
        self._end("failed", EXIT_FAILED, reason)


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
