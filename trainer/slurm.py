"""Supervises a run inside a Slurm batch job: `python -m trainer.slurm recipe=NAME [section.key=value ...]`.

A batch file requests resources from Slurm and runs this command; see launch/slurm.sbatch.  The command starts the
ranks with `srun`, tells them when the job's time limit is near, requeues the job if the run stopped early, and gives
up after several consecutive attempts with little or no progress.  It logs the start of each attempt, and whether it
requeued the job, in the file attempts.log of the run's folder.

It takes the same settings as `trainer.run`; options may come before, between or after them.  The run's folder is
runs/<job name>, unless run.dir= is given.

Does not import torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.distributed.environment import first_node_address
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    CommandParser,
    UserError,
    print_stdout,
    run_command,
)
from trainer.lifecycle.folder import read_status
from trainer.lifecycle.run import CLEARED_NOTICE
from trainer.stopping import NOTICE

STEP_NAME = "ranks"
"""Name of the Slurm step that runs the ranks.  The step is found by this name, since it need not be the job's first."""


@dataclass
class Signals:
    """Which signals this job has received: USR1 (the time limit is near), TERM (see `is_cancelled`), or both."""

    stop_requested: bool = False
    """Whether at least one of the signals has arrived."""
    is_cancelled: bool = False
    """Whether a user has cancelled the job or Slurm itself is requeuing it.  Either way, do not requeue it here."""

    def install(self) -> None:
        """Handle both signals from now on, including those that arrived while the batch file blocked them."""
        signal.signal(signal.SIGUSR1, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGTERM])

    def _handle(self, number: int, frame: object) -> None:
        self.stop_requested = True
        self.is_cancelled |= number == signal.SIGTERM


@dataclass(frozen=True)
class Job:
    """One attempt of a run inside a Slurm job: its settings, and the rules for requeuing it."""

    recipe: str
    run_dir: Path
    overrides: Sequence[str]
    job_id: str
    """Job id for scontrol.  In a job array this is ARRAY_TASK, because a plain id can mean the entire array."""
    restart: int
    """Number of times that Slurm has restarted the job."""
    requeue: bool
    """Whether the job may be requeued at all."""
    requeue_failed: bool
    """Whether to requeue it after a crash too."""
    max_idle: int
    """Number of attempts in a row with fewer than `min_steps` steps each, after which the job is not requeued."""
    min_steps: int
    leave_s: int
    """Grace period in seconds for ranks to exit once one has exited or the run has ended."""
    signals: Signals

    @property
    def log(self) -> Path:
        return self.run_dir / "attempts.log"

    @property
    def train_command(self) -> list[str]:
        """The arguments of the Python interpreter of each rank."""
        return ["-m", "trainer.run", f"recipe={self.recipe}", f"run.dir={self.run_dir}", *self.overrides]

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run the srun command as one attempt, and requeue the job if needed.  Returns the exit code of the job."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / NOTICE).unlink(missing_ok=True)  # of an earlier attempt
        env = {**env, CLEARED_NOTICE: os.path.abspath(self.run_dir)}
        if self.restart and self._gives_up():  # Slurm itself requeues after a node failure
            return EXIT_FAILED
        self._record("begins")
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) as srun:
            self._wait(srun)
        # A shell reports death by signal N as 128 + N.
        code = srun.returncode if srun.returncode >= 0 else 128 - srun.returncode

        # torchrun exits with 1 after any failure or stop, and a cancelled step exits with 0.
        state = self._reported_state()
        if code == EXIT_FINISHED and state not in ("stopped", "failed"):
            return EXIT_FINISHED
        stopped = code == EXIT_STOPPED or state == "stopped"
        may_requeue = stopped or (self.requeue_failed and code != EXIT_USER_ERROR)
        if not may_requeue or not self.requeue or self.signals.is_cancelled:
            return code or EXIT_FAILED
        if self._gives_up():
            return EXIT_FAILED
        self._record(f"requeued, exit code {code}")
        return subprocess.run(["scontrol", "requeue", self.job_id]).returncode

    def _wait(self, srun: subprocess.Popen[bytes]) -> None:
        """Wait for srun, pass on the notice of the time limit, and end a step that outlives its ranks.

        srun waits forever for a slurmstepd that has died.  Therefore this method cancels the step `leave_s` seconds
        after the run has reported its end, and kills srun `leave_s` seconds later, so that the job can end.
        """
        cancel_at = kill_at = float("inf")
        while True:
            with suppress(subprocess.TimeoutExpired):
                srun.wait(timeout=1)
                return
            now = time.monotonic()
            if self.signals.stop_requested:
                # With cgroup tracking, signals do not reach ranks started by torchrun; this file does.
                with suppress(OSError):  # such as a full disk; tried again a second later
                    (self.run_dir / NOTICE).touch()
            if cancel_at == float("inf") and self._reported_state() in ("finished", "stopped", "failed"):
                cancel_at = now + self.leave_s
            if now >= cancel_at and kill_at == float("inf"):
                kill_at = now + self.leave_s
                squeue = ["squeue", "-hs", "-j", self.job_id, "-o", "%i %j"]
                lines = subprocess.run(squeue, stdout=subprocess.PIPE, text=True).stdout.splitlines()
                if steps := [line.split()[0] for line in lines if line.split()[1:] == [STEP_NAME]]:
                    subprocess.run(["scancel", *steps])
            if now >= kill_at:
                srun.kill()

    def _reported_state(self) -> str:
        """Return the state in status.json; empty if this attempt has not written it yet."""
        with suppress(OSError):
            if (self.run_dir / "status.json").stat().st_mtime_ns >= self.log.stat().st_mtime_ns:
                return str(read_status(self.run_dir).get("state", ""))
        return ""

    def _gives_up(self) -> bool:
        """Return whether the last `max_idle` attempts made fewer than `min_steps` steps each; if so, log that."""
        status = read_status(self.run_dir)
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        idle = count_idle(lines, self.job_id, int(status.get("step") or 0), self.min_steps)
        if idle < self.max_idle or status.get("state") == "finished":
            return False
        self._record(f"not requeued: fewer than {self.min_steps} steps in each of {idle} attempts in a row")
        return True

    def _record(self, event: str) -> None:
        """Append a line to attempts.log, which `count_idle` parses, and print it."""
        step = int(read_status(self.run_dir).get("step") or 0)
        now = time.strftime("%FT%T")
        line = f"{now} job {self.job_id} restart {self.restart} step {step} {event}"
        print_stdout(line)
        with self.log.open("a") as log:
            log.write(f"{line}\n")


def count_idle(lines: Sequence[str], job_id: str, step: int, min_steps: int) -> int:
    """Return the number of a job's most recent consecutive attempts that made fewer than `min_steps` steps each.

    An attempt ends at the step at which the next attempt, of any job, starts; the last attempt ends at `step`.  An
    attempt of a different job in the same folder resets the count.

    lines: the lines of attempts.log.
    step: the current step.
    """
    starts = [(words[2], int(words[6])) for line in lines if (words := line.split())[7:8] == ["begins"]]
    reached = [from_step for _, from_step in starts[1:]] + [step]
    idle = 0
    for (job, from_step), to_step in zip(starts, reached, strict=True):
        idle = idle + 1 if job == job_id and to_step - from_step < min_steps else 0
    return idle


def srun_command(options: argparse.Namespace, job: Job, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the srun command that starts the ranks on all nodes of the job, and its environment.

    Each rank has its own exit code.  `leave_s` seconds after the first rank has exited, srun ends the remaining ranks.
    """
    env = dict(env)
    srun = ["srun", f"--job-name={STEP_NAME}", "--kill-on-bad-exit=0", f"--wait={job.leave_s}"]
    srun.append(f"--cpus-per-task={env.get('SLURM_CPUS_PER_TASK', '1')}")
    srun += options.srun
    python = shlex.split(options.python)
    if "MASTER_ADDR" not in env:  # looked up here, because a container has no scontrol
        env["MASTER_ADDR"] = first_node_address(env["SLURM_JOB_NODELIST"])
    if not options.torchrun:
        return [*srun, *python, *job.train_command], env
    # Without --max-restarts: torchrun would also restart a run that has stopped on request.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # seconds for the ranks' last save; by default 30
    job_number = int(env["SLURM_JOB_ID"])
    port = 20000 + (job_number * 7 + job.restart) % 10000  # the same on all nodes, different for each attempt
    return [
        *srun,
        "--ntasks-per-node=1",
        *python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={env.get('SLURM_JOB_NUM_NODES', '1')}",
        f"--nproc-per-node={options.nproc or env.get('SLURM_GPUS_ON_NODE') or 2}",
        f"--rdzv-id={job_number}.{job.restart}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={env['MASTER_ADDR']}:{port}",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        *job.train_command,
    ], env


def make_job(options: argparse.Namespace, env: Mapping[str, str], signals: Signals) -> Job:
    """Return the attempt that a command line and Slurm's variables describe.

    Raises UserError outside of a job, and without a recipe.
    """
    if not env.get("SLURM_JOB_ID"):
        raise UserError(
            "trainer.slurm runs inside a Slurm job, and SLURM_JOB_ID is not set\n"
            "  to fix: submit a batch file that runs this command: sbatch launch/slurm.sbatch recipe=llama3_8b"
        )
    settings = [argument.partition("=") for argument in options.settings]
    given = {key: value for key, _, value in settings if key in ("recipe", "run.dir")}
    if not given.get("recipe"):
        raise UserError("no recipe\n  for example: python -m trainer.slurm recipe=llama3_8b", "recipe=llama3_8b")
    array = env.get("SLURM_ARRAY_JOB_ID")
    return Job(
        recipe=given["recipe"],
        run_dir=Path(given.get("run.dir") or f"runs/{env.get('SLURM_JOB_NAME', 'slurm')}"),
        overrides=[argument for argument in options.settings if argument.partition("=")[0] not in given],
        job_id=f"{array}_{env['SLURM_ARRAY_TASK_ID']}" if array else env["SLURM_JOB_ID"],
        restart=int(env.get("SLURM_RESTART_COUNT", "0")),
        requeue=options.requeue,
        requeue_failed=options.requeue_failed,
        max_idle=options.max_idle,
        min_steps=options.min_steps,
        leave_s=options.leave_s,
        signals=signals,
    )


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Run the command line inside a batch job; return the job's exit code."""
    signals = Signals()
    signals.install()
    options = make_parser().parse_intermixed_args(arguments)

    def work() -> int:
        job = make_job(options, os.environ, signals)
        command, env = srun_command(options, job, os.environ)
        return job.run(command, env)

    return run_command(work, hears_signals=False)


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog="python -m trainer.slurm", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="recipe=NAME and settings, as for trainer.run")
    parser.add_argument(
        "--no-requeue", dest="requeue", action="store_false", help="never requeue the job (default: if the run stopped)"
    )
    parser.add_argument(
        "--requeue-failed",
        action="store_true",
        help="requeue it after a crash too, but not after a mistake in the settings (exit code 2, which torchrun turns "
        "into 1)",
    )
    parser.add_argument(
        "--max-idle",
        type=_positive,
        default=3,
        metavar="N",
        help="stop requeuing after N attempts in a row with too few steps (default: 3)",
    )
    parser.add_argument(
        "--min-steps", type=int, default=3, metavar="N", help="fewer steps than this are too few (default: 3)"
    )
    parser.add_argument(
        "--leave-s",
        type=_positive,  # srun takes --wait=0 for no limit
        default=60,
        metavar="SECONDS",
        help="grace period for ranks to exit once one rank has exited or the run has ended (default: 60)",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="COMMAND",
        help='Python for the ranks, for example "apptainer exec --nv image.sif python" (default: this one)',
    )
    parser.add_argument("--srun", action="append", default=[], metavar="OPTION", help="an additional srun option")
    parser.add_argument(
        "--torchrun", action="store_true", help="start one torchrun on each node, which starts the ranks"
    )
    parser.add_argument(
        "--nproc",
        type=_positive,
        metavar="N",
        help="with --torchrun: ranks of a node (default: one for each GPU, else 2)",
    )
    return parser


def _positive(text: str) -> int:
    """Convert the value of an option.  Raises ArgumentTypeError unless it is a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(command_line())
