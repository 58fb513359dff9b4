"""Starts `nproc` ranks on this machine with torch's elastic launcher; records how the run ended if they could not.

Also gives a dry run, which stops before the first step, a temporary run folder (`dry_run_config`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import RunConfig
from trainer.distributed.environment import ENDS_SILENT_RANK, LAUNCHER_PID_VARIABLE, NPROC_VARIABLE, Environment
from trainer.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, print_stderr
from trainer.lifecycle.folder import read_status, record_end
from trainer.metrics.record import last_step
from trainer.stopping import STOP_SIGNALS, stop

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig


def spawn(nproc: int, arguments: Sequence[str], config: RunConfig) -> int:
    """Start `nproc` workers through torch's elastic launcher, wait for them, and return the run's exit code.

    arguments: the arguments of the Python interpreter in each worker.
    """
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the workers report their own errors
    os.environ[NPROC_VARIABLE] = str(nproc)
    os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its number of threads later
    _set_shutdown_timeout()
    launch = _launch_config(nproc)
    initial_status = read_status(config.run_dir)

    num_interrupts = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal num_interrupts
        num_interrupts += number == signal.SIGINT
        if num_interrupts > 1:
            _quit_children()
        else:
            raise SignalException(f"asked to stop by {signal.Signals(number).name}", signal.Signals(number))

    try:
        # From here on, this process must outlive its workers, which may be saving.  In `elastic_launch` the launcher
        # replaces these handlers, except that of Ctrl-C.
        for number in _heeded_signals():
            signal.signal(number, interrupt)
        stop.uninstall()
        elastic_launch(launch, sys.executable)(*arguments)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if deaths := describe_killed_ranks(error.failures):
            _report_end(config, initial_status, deaths)
            return EXIT_FAILED
        return next((code for code in (EXIT_USER_ERROR, EXIT_STOPPED) if code in codes), EXIT_FAILED)
    except SignalException:
        # The launcher only knows that its workers have exited; how the run ended is in status.json.
        status = read_status(config.run_dir)
        if status == initial_status:
            return EXIT_STOPPED  # the ranks had not started training
        if status.get("exit_code") is None:
            _report_end(config, initial_status, "the run was asked to stop, and its ranks exited without reporting")
            return EXIT_FAILED
        return int(status["exit_code"])
    return EXIT_FINISHED


def _launch_config(nproc: int) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        # An unhandled SIGUSR1 would kill the launcher and orphan the ranks.  Signals that nohup ignores stay ignored.
        signals_to_handle=",".join(number.name for number in _heeded_signals() if number != signal.SIGINT),
    )


def _quit_children() -> None:
    """Interrupt each child twice, so that it quits without saving.  The first time, the launcher may send SIGTERM."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                os.kill(int(path.parent.name), signal.SIGINT)
                time.sleep(0.05)  # or both would count as one
                os.kill(int(path.parent.name), signal.SIGINT)


def _heeded_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop, without those that this process was started with ignored."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def describe_killed_ranks(failures: Mapping[int, ProcessFailure]) -> str:
    """Describe which ranks were killed first, and by which signals; "" if none were, or only by the launcher.

    failures: for each rank, how its process ended, according to the launcher.  A negative exit code is a signal, as in
        `subprocess`.
    """
    first_death = min((failure.timestamp for failure in failures.values()), default=0)
    # Later deaths do not count: the launcher kills ranks that do not exit, with SIGTERM first.  Nor do those of ranks
    # that other ranks have ended because they did not answer.
    killed = {
        rank: failure
        for rank, failure in sorted(failures.items())
        if failure.exitcode < 0 and failure.exitcode != -ENDS_SILENT_RANK and failure.timestamp <= first_death + 1
    }
    by_others = {rank: failure for rank, failure in killed.items() if failure.exitcode != -signal.SIGTERM}
    if not killed or (not by_others and len(killed) < len(failures)):
        return ""
    reported = list((by_others or killed).items())
    messages = [_describe_death(rank, failure) for rank, failure in reported[:_MAX_NAMED]]
    return "; ".join([*messages, *([f"and {len(reported) - _MAX_NAMED} more"] if len(reported) > _MAX_NAMED else [])])


_MAX_NAMED = 4
"""Maximum number of dead ranks to name."""


def _describe_death(rank: int, failure: ProcessFailure) -> str:
    reason = "; the kernel does this if the host runs out of memory" if failure.exitcode == -signal.SIGKILL else ""
    return f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}{reason}"


def _set_shutdown_timeout() -> None:
    """Give workers 600 s to save after a stop request, unless the environment sets another time; torch's default is 30.

    torch reads the variable from version 2.13 on.  Earlier versions always wait 30 s, the default of `PContext.close`.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.launcher.api import LaunchConfig

    timeout_s = int(os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600"))
    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
        close = PContext.close

        def close_after_a_save(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            close(self, death_sig, timeout_s if death_sig else timeout)  # no signal: a worker has failed

        PContext.close = close_after_a_save  # type: ignore[method-assign]


def _report_end(config: RunConfig, initial_status: Mapping[str, Any], reason: str) -> None:
    """Print how the ranks ended, and record it in `status.json`, since they could not do so themselves."""
    print_stderr(f"error: {reason}")
    record_end(config.run_dir, initial_status, last_step(config.run_dir / "metrics.jsonl"), reason)


# ---------------------------------------------------------------------------------------------------------------
# Dry runs


_DRY_RUN_FOLDER = "MESHTRAINER_DRY_RUN"
"""Environment variable with the folder of a dry run, which ranks inherit from the process that starts them."""


@contextmanager
def dry_run_config(config: RunConfig, env: Environment) -> Iterator[RunConfig]:
    """Yield the configuration of a dry run, which writes only to a temporary folder that is removed afterwards.

    A dry run resumes as the actual run would, without changing its checkpoints.
    """
    # All ranks of a node must use the same folder, under any launcher.
    start_id = os.environ.get("TORCHELASTIC_RUN_ID") or env.job or os.getpid()
    key = f"{os.getuid()} {start_id} {Path(config.run.dir).absolute()}"
    default_folder = (
        Path(tempfile.gettempdir()) / f"meshtrainer-dry-run-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    )
    inherited = os.environ.get(_DRY_RUN_FOLDER)
    folder = Path(inherited or default_folder)
    os.environ[_DRY_RUN_FOLDER] = str(folder)
    checkpoint_dir = config.checkpoint.dir or f"{config.run.dir}/checkpoints"
    resume = config.checkpoint.resume
    if resume == "auto":
        resume = checkpoint_dir if "://" in checkpoint_dir or any(Path(checkpoint_dir).glob("step_*")) else "none"
    try:
        yield replace(
            config,
            run=replace(config.run, dir=str(folder / config.run.name), on_end=None),
            checkpoint=replace(config.checkpoint, dir=None, resume=resume),
            log=config.log.without_trackers(),
        )
    finally:
        if inherited is None:
            os.environ.pop(_DRY_RUN_FOLDER)
            if env.rank == 0:  # only rank 0 writes
                shutil.rmtree(folder, ignore_errors=True)
