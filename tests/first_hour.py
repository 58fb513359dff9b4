"""Times a new user's first hour: clone, first loss, Ctrl-C, resume, change, compare, generate, export.

    python -m tests.first_hour FOLDER            # as in the quickstart: about six minutes on two cores
    python -m tests.first_hour FOLDER --small    # a smaller model: about a minute

Each step is one command, typed in the clone.  Nothing is deleted or edited by hand between them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import REPOSITORY

SMALL = ("model.dim=32", "model.num_layers=1", "model.ffn_dim=64", "data.seq_len=32", "eval.steps=2")
SMALL += ("train.micro_batch_size=8", "run.threads=1")
TRAIN = "python -m trainer.run recipe=llama_small"
STOPPED, FINISHED = 75, 0


@dataclass(frozen=True)
class Step:
    """One step of a new user: a command and its expected exit code."""

    aim: str
    command: str
    exit_code: int = FINISHED
    ctrl_c_after: str = ""
    """Output after which to press Ctrl-C; empty if the command ends by itself."""


STEPS = (
    Step("see a first loss, then press Ctrl-C", TRAIN, STOPPED, ctrl_c_after="step      1/"),
    Step("resume, to the end", TRAIN),
    Step("change something", f"{TRAIN} run.name=hot optim.lr=0.008"),
    Step("compare", "python -m trainer.report runs/llama_small runs/hot"),
    Step("train longer", f"{TRAIN} train.steps=1600"),
    Step("generate", 'python -m trainer.generate runs/llama_small --prompt "def main(" --max-tokens 40'),
    Step("export", "python -m trainer.export runs/llama_small exported"),
)
EXPECTED_FILES = ("runs/llama_small/metrics.jsonl", "runs/hot/metrics.jsonl", "comparison.html", "exported/config.json")


@dataclass(frozen=True)
class StepResult:
    """A finished step: seconds until `ctrl_c_after` appeared, seconds in total, exit code, and output."""

    step: Step
    text_seen_s: float | None
    seconds: float
    exit_code: int
    screen: str

    @property
    def problem(self) -> str:
        """What is wrong with the result; empty if nothing is."""
        if self.exit_code != self.step.exit_code:
            return f"exit code {self.exit_code}, not {self.step.exit_code}"
        bad = next((text for text in ("Traceback", "nothing to do", "error: ") if text in self.screen), "")
        return f"the screen says {bad!r}" if bad else ""


def run_steps(folder: Path, settings: Sequence[str] = ()) -> Iterator[StepResult]:
    """Clone the repository into `folder` and run the steps there; `settings` are added to training commands."""
    start_time = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(folder)], check=True)
    cloned_s = time.monotonic() - start_time
    for number, step in enumerate(STEPS):
        result = run_step(step, folder, settings)
        if number == 0 and result.text_seen_s is not None:
            result = StepResult(
                step, cloned_s + result.text_seen_s, cloned_s + result.seconds, result.exit_code, result.screen
            )
        yield result


def run_step(step: Step, folder: Path, settings: Sequence[str]) -> StepResult:
    """Run the command of a step as it is typed, plus `settings` if it trains, and read its output."""
    words = [*shlex.split(step.command), *(settings if step.command.startswith(TRAIN) else ())]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    start_time, text_seen_s, screen = time.monotonic(), None, []
    command = [sys.executable, *words[1:]]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout or ():
        screen.append(line)
        if text_seen_s is None and step.ctrl_c_after and step.ctrl_c_after in line:
            text_seen_s = time.monotonic() - start_time
            process.send_signal(signal.SIGINT)
    return StepResult(step, text_seen_s, time.monotonic() - start_time, process.wait(), "".join(screen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps and print a line for each; return 1 if one of them has a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to clone to; it must not exist")
    parser.add_argument("--small", action="store_true", help="train a smaller model")
    chosen = parser.parse_args(arguments)
    has_problem = False
    for result in run_steps(chosen.folder, SMALL if chosen.small else ()):
        seen = "" if result.text_seen_s is None else f"  (first loss {result.text_seen_s:.1f} s after the clone began)"
        print(f"{result.seconds:6.1f} s  {result.step.aim}: {result.step.command}{seen}", flush=True)
        if result.problem:
            has_problem = True
            print(f"          {result.problem}\n{result.screen}")
    return int(has_problem)


if __name__ == "__main__":
    sys.exit(main())
