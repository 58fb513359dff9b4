"""Train one run for each combination of settings, compare the runs, and show the best.

    meshtrainer sweep recipe=llama_small optim.lr=1e-4,3e-4,1e-3                 three runs in sequence
    meshtrainer sweep recipe=llama_small optim.lr=1e-4,3e-4 run.seed=1,2 --parallel 2
    meshtrainer sweep recipe=llama3_8b optim.lr=1e-4,3e-4 --slurm --nodes 2      a Slurm job array

Separate the values of a key with commas; a list in brackets is a single value.  The run folders are in --dir (default:
runs/sweep).  Run the same command again to continue a sweep: it skips finished runs, and resumes the others from their
checkpoints.  The best run is the finished run with the lowest loss in its last evaluation.  If some finished runs have
not been evaluated, training losses are compared instead.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from trainer.config import check_config, load_config
from trainer.config.command_line import Arguments, missing_recipe_error, parse
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    CommandParser,
    print_stderr,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.files import write_atomically
from trainer.lifecycle.folder import read_status
from trainer.recipe import add_working_directory_to_sys_path
from trainer.runs import RunSummary, summarize, table_of
from trainer.stopping import stop
from trainer.submit import ClusterJob, add_size_options, batch_file, make_job, require_at_least, send_to_slurm

SWEEP = "sweep.json"
"""The file in a sweep's folder that describes the sweep: its recipe, settings and runs."""

REPORT = "report.html"
"""The file in a sweep's folder that compares the runs."""

_MAX_RUNS = 1000
"""Maximum number of runs in a sweep."""

_POLL_S = 0.5
"""Seconds between checks of the active runs."""

_MAX_NAME_LENGTH = 150
"""Maximum number of characters in a run's name before a number is added to make it unique."""


@dataclass
class Trial:
    """One run of a sweep."""

    folder: Path
    setting: tuple[str, ...]
    """The overrides that distinguish the run from the others."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        return str(read_status(self.folder).get("state") or "")

    @property
    def output(self) -> Path:
        """The file with the run's output.  The run's processes hold a lock on it, so that a restarted sweep can tell
        whether they are still alive."""
        return self.folder / "output.log"

    @property
    def is_active(self) -> bool:
        """Whether the run is in progress: the process that this sweep started is alive or, if it has started none, some
        process holds the lock."""
        if self.process is not None and self.process.poll() is None:
            return True
        return self.process is None and _is_locked(self.output)


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@dataclass
class Sweep:
    """The runs of a sweep, in the order in which they start."""

    folder: Path
    recipe: str
    fixed: list[str]
    """Overrides that all runs share."""
    trials: list[Trial]

    def overrides(self, trial: Trial) -> list[str]:
        return [*self.fixed, *trial.setting, f"run.name={trial.folder.name}", f"run.dir={trial.folder}"]

    def write(self) -> None:
        """Store the sweep's description, so that a later sweep with other settings in the same folder is detected."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / SWEEP, json.dumps(self.description(), indent=1) + "\n")

    def description(self) -> dict[str, object]:
        runs = [{"folder": trial.folder.name, "setting": list(trial.setting)} for trial in self.trials]
        return {"recipe": self.recipe, "fixed": self.fixed, "runs": runs}


def make_sweep(arguments: Arguments, folder: Path) -> Sweep:
    """Return the sweep for a command line.

    Raises UserError if no recipe is given, no key has several values, there are too many combinations, or `run.name` or
    `run.dir` is given, since these differ for each run.
    """
    if arguments.recipe is None:
        raise missing_recipe_error(
            "usage: meshtrainer sweep recipe=NAME section.key=value,value,... ", arguments.overrides
        )
    fixed, axes = [], dict[str, list[str]]()
    for override in arguments.overrides:
        key, _, text = override.partition("=")
        values = split_values(text)
        if key in ("run.dir", "run.name"):
            raise setting_error(key, text, "differs for each run of a sweep", fix=f"use --dir (now {folder})")
        if len(values) == 1:
            fixed.append(override)
        else:
            axes[key] = list(dict.fromkeys(values))
    if not axes:
        rule = "no key has several values"
        raise setting_error("sweep", " ".join(arguments.overrides), rule, fix="for example: optim.lr=1e-4,3e-4,1e-3")
    settings = [
        tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]
    if len(settings) > _MAX_RUNS:
        raise setting_error("sweep", len(settings), f"must be at most {_MAX_RUNS} runs", _MAX_RUNS)
    trials = [Trial(folder / name, setting) for name, setting in zip(names_of(settings), settings, strict=True)]
    return Sweep(folder, arguments.recipe, fixed, trials)


def split_values(text: str) -> list[str]:
    """Split a value at commas outside brackets, braces and quotes: `1e-4,3e-4`, but not `[1,2]`."""
    values, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        depth += (char in "[{(") - (char in "]})") if not quote else 0
        if char == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += char
    return values if all(value.strip() for value in values) else [text]


def names_of(settings: Sequence[Sequence[str]]) -> list[str]:
    """Return a folder name for each run; the names are unique, and short enough for a file system."""
    names: list[str] = []
    for setting in settings:
        name = plain = name_of(setting)[:_MAX_NAME_LENGTH].rstrip(",.-")
        number = 1
        while name in names:
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names


def name_of(setting: Sequence[str]) -> str:
    """Return a folder name for a run: the last part of each key with its value, `lr=3e-4,seed=1`."""
    parts = []
    for override in setting:
        key, _, value = override.partition("=")
        parts.append(f"{key.rpartition('.')[2]}={re.sub(r'[^A-Za-z0-9_.+-]+', '-', value).strip('-')}")
    return ",".join(parts)


# ---------------------------------------------------------------------------------------------------------------
# Running the trials on this machine


class Supervisor:
    """Trains the runs of a sweep on this machine, `parallel` at a time.

    Passes stop signals on to the runs, which save and exit.  The sweep then exits with 75 (1 if a run has failed), and
    can be started again.
    """

    def __init__(self, sweep: Sweep, parallel: int, nproc: int | None) -> None:
        self._sweep, self._parallel, self._nproc = sweep, parallel, nproc
        self._num_failed = self._num_stopped = 0
        self._is_stopping = False

    def run(self) -> int:
        """Train every run that has not finished; return the exit code of the sweep."""
        pending = [trial for trial in self._sweep.trials if trial.state != "finished"]
        stop.uninstall()  # the runs need time to save
        previous_handlers = {
            number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            active: list[Trial] = []
            while active or (pending and not self._is_stopping):
                for trial in [trial for trial in active if not trial.is_active]:
                    active.remove(trial)
                    self._record_end(trial, pending)
                while pending and len(active) < self._parallel and not self._is_stopping:
                    active.append(self._start(pending.pop(0)))
                time.sleep(_POLL_S)
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
        if self._num_failed:
            return EXIT_FAILED
        return EXIT_STOPPED if self._num_stopped or self._is_stopping else EXIT_FINISHED

    def _start(self, trial: Trial) -> Trial:
        """Start a run, unless an earlier process of this sweep has started it and it is still training."""
        if trial.is_active:
            print_stdout(f"{trial.folder.name}: is already training")
            return trial
        trial.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "trainer.run", f"recipe={self._sweep.recipe}", *self._sweep.overrides(trial)]
        command += [f"nproc={self._nproc}"] if self._nproc else []
        with open(trial.output, "ab") as output:
            fcntl.flock(output, fcntl.LOCK_EX)
            # In a new session, so that Ctrl-C reaches the run only once, through this process.
            trial.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        print_stdout(f"{trial.folder.name}: started")
        return trial

    def _record_end(self, trial: Trial, pending: list[Trial]) -> None:
        """Record how a run ended.  Queue an unfinished run again if an earlier process of this sweep started it."""
        state = trial.state
        if trial.process is None:
            if state != "finished":
                pending.insert(0, trial)
                return
        elif trial.process.returncode == EXIT_STOPPED:
            state = "stopped"
            self._num_stopped += 1
        elif trial.process.returncode != EXIT_FINISHED:
            state = "failed"
            self._num_failed += 1
            print_stderr(f"{trial.folder.name}: exit code {trial.process.returncode}, see {trial.output}")
            print_stderr("\n".join(f"  {line}" for line in trial.output.read_text(errors="replace").splitlines()[-4:]))
        print_stdout(f"{trial.folder.name}: {state}")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            print_stderr(f"{signal.Signals(number).name}: the runs save and stop; run the same command to continue")
        for trial in self._sweep.trials:
            if trial.process is not None and trial.process.poll() is None:
                trial.process.send_signal(signal.SIGTERM)


# ---------------------------------------------------------------------------------------------------------------
# A job array


def array_file(sweep: Sweep, job: ClusterJob, parallel: int | None) -> str:
    """Return the batch file of a Slurm job array with one task per run.

    job: the job for any one of the runs.
    parallel: the maximum number of tasks at the same time; None for no limit.
    """
    settings = [shlex.join([*trial.setting, f"run.name={trial.folder.name}"]) for trial in sweep.trials]
    setup = [
        f"FOLDERS=({shlex.join(str(trial.folder) for trial in sweep.trials)})",
        f"SETTINGS=({shlex.join(settings)})",
        "export RUN_DIR=${FOLDERS[$SLURM_ARRAY_TASK_ID]}",
        'eval "setting=(${SETTINGS[$SLURM_ARRAY_TASK_ID]})"',
    ]
    shared = replace(job, name=sweep.folder.name, arguments=[f"recipe={sweep.recipe}", *sweep.fixed])
    limit = f"%{parallel}" if parallel else ""
    return batch_file(shared, f"0-{len(sweep.trials) - 1}{limit}", setup, '"${setting[@]}"')


# ---------------------------------------------------------------------------------------------------------------
# The outcome


def scores_of(runs: Sequence[RunSummary]) -> list[float]:
    """Return the loss by which to compare each run; infinity if it has none.

    That is the evaluation loss if all finished runs with a loss have one, otherwise the training loss.
    """
    finished = [run for run in runs if run.state == "finished" and (run.eval_loss, run.loss) != (None, None)]
    are_evaluated = all(run.eval_loss is not None for run in finished)
    losses = [run.eval_loss if are_evaluated else run.loss for run in runs]
    return [math.inf if loss is None else loss for loss in losses]


def find_best(runs: Sequence[RunSummary]) -> tuple[RunSummary, float] | None:
    """Return the finished run with the lowest loss (see `scores_of`) and that loss, or None."""
    finished = [(run, score) for run, score in zip(runs, scores_of(runs), strict=True) if run.state == "finished"]
    best = min(finished, key=lambda pair: pair[1], default=None)
    return best if best is not None and math.isfinite(best[1]) else None


def show_outcome(sweep: Sweep) -> bool:
    """Print a table of the runs and the best one, and write a report that compares them.

    Returns False if no run has started.
    """
    runs = [summarize(trial.folder) for trial in sweep.trials if (trial.folder / "metrics.jsonl").exists()]
    if not runs:
        return False
    scores = {run.folder: score for run, score in zip(runs, scores_of(runs), strict=True)}
    ordered = sorted(runs, key=lambda run: (run.state != "finished", scores[run.folder]))
    print_stdout("\n".join(["", *table_of(ordered, sweep.folder)]))
    page = sweep.folder / REPORT
    command = [sys.executable, "-m", "trainer.report", *(run.folder for run in runs), "--out", str(page)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode == 0:
        print_stdout(f"\nreport: {page}")
    else:
        print_stderr(f"warning: no report could be written: {finished.stderr.strip()}")
    if (found := find_best(runs)) is not None:
        best, loss = found
        print_stdout(f"best: {Path(best.folder).name}, loss {loss:.4f}: {best.folder}")
    return True


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.sweep", description=__doc__)
    parser.add_argument("--dir", default="runs/sweep", help="folder for the runs (default: runs/sweep)")
    parser.add_argument("--parallel", type=int, metavar="N", help="runs at the same time (default: 1; on Slurm: all)")
    parser.add_argument("--slurm", action="store_true", help="submit a Slurm job array instead of training here")
    parser.add_argument("--report", action="store_true", help="only compare the runs as they are now")
    add_size_options(parser)
    parser.add_argument(
        "arguments", nargs="*", metavar="key=value", help="recipe=NAME and overrides, with several values"
    )
    options, other_options = parser.parse_known_intermixed_args(argv)
    return run_command(lambda: _sweep(options, [*options.arguments, *other_options]))


def _check_same_sweep(sweep: Sweep) -> None:
    """Raise UserError if the folder belongs to a different sweep, so that the runs of two sweeps do not mix."""
    path = sweep.folder / SWEEP
    if sweep.folder.exists() and not sweep.folder.is_dir():
        raise setting_error("--dir", sweep.folder, "is a file, not a folder", example="runs/sweep")
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise setting_error(
            "--dir", sweep.folder, f"its {SWEEP} cannot be read ({error})", fix="use another --dir"
        ) from error
    if stored != sweep.description():
        rule = f"belongs to a different sweep, see {path}"
        raise setting_error("--dir", sweep.folder, rule, example=f"{sweep.folder}-2")


def _sweep(options: argparse.Namespace, words: Sequence[str]) -> int:
    add_working_directory_to_sys_path()
    arguments = parse(words)
    require_at_least(1, parallel=options.parallel)
    sweep = make_sweep(arguments, Path(options.dir))
    _check_same_sweep(sweep)
    for trial in sweep.trials:  # check all runs before the first one starts
        config = load_config(sweep.recipe, sweep.overrides(trial), arguments.allow_import)
        if not options.slurm:  # a job's number of ranks is checked by `make_job`
            ranks = arguments.nproc or 1
            check_config(config, ranks, ranks)
    if options.report:
        if not show_outcome(sweep):
            raise setting_error("--dir", sweep.folder, "has no run of this sweep yet", fix="start it without --report")
        return EXIT_FINISHED
    if options.slurm:
        job = make_job(options, Arguments(sweep.recipe, sweep.overrides(sweep.trials[0])))
        text = array_file(sweep, job, options.parallel)
        if options.dry_run:
            print_stdout(text, end="")
            return EXIT_FINISHED
        sweep.write()
        return send_to_slurm(text)
    if options.dry_run:
        for trial in sweep.trials:
            print_stdout(shlex.join(["python", "-m", "trainer.run", f"recipe={sweep.recipe}", *sweep.overrides(trial)]))
        return EXIT_FINISHED
    sweep.write()
    code = Supervisor(sweep, options.parallel or 1, arguments.nproc).run()
    show_outcome(sweep)
    return code


if __name__ == "__main__":
    sys.exit(command_line())
