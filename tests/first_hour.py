"""A newcomer's first hour, timed: clone, first loss, Ctrl-C, resume, change, compare, generate, export.

    python -m tests.first_hour FOLDER            # as the quickstart has it: some six minutes on two cores
    python -m tests.first_hour FOLDER --small    # a smaller model: a minute

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

from tests.helpers.forked import REPOSITORY, popen

SMALL = ("model.dim=32", "model.num_layers=1", "model.ffn_dim=64", "data.seq_len=32", "eval.steps=2")
SMALL += ("train.micro_batch_size=8", "run.threads=1")
TRAIN = "python -m trainer.run recipe=llama_small"
STOPPED, FINISHED = 75, 0
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Step:
    """One step of a newcomer: a command and its exit code."""

    aim: str
    command: str
    exit_code: int = FINISHED
    ctrl_c_after: str = ""
    """The text on the screen after which Ctrl-C is pressed; empty: the command ends by itself."""


STEPS = (
    Step("see a first loss, then press Ctrl-C", TRAIN, STOPPED, ctrl_c_after="step      1/"),
    Step("resume, to the end", TRAIN),
    Step("change something", f"{TRAIN} run.name=hot optim.lr=0.008"),
    Step("compare", "python -m trainer.report runs/llama_small runs/hot"),
    Step("train longer", f"{TRAIN} train.steps=1600"),
    Step("generate", 'python -m trainer.generate runs/llama_small --prompt "def main(" --max-tokens 40'),
    Step("export", "python -m trainer.export runs/llama_small exported"),
)
LEFT = ("runs/llama_small/metrics.jsonl", "runs/hot/metrics.jsonl", "comparison.html", "exported/config.json")


@dataclass(frozen=True)
class Taken:
    """A step that was taken: seconds to the text that was waited for, seconds in all, exit code, and the screen."""

    step: Step
    seen_s: float | None
    seconds: float
    exit_code: int
    screen: str

    @property
    def complaint(self) -> str:
        """Return the error of a step; empty if there is none."""
        if self.exit_code != self.step.exit_code:
            return f"exit code {self.exit_code}, not {self.step.exit_code}"
        bad = next((text for text in ("Traceback", "nothing to do", "error: ") if text in self.screen), "")
        return f"the screen says {bad!r}" if bad else ""


def walk(folder: Path, settings: Sequence[str] = ()) -> Iterator[Taken]:
    """Clone the repository into `folder` and take the steps there, in order; `settings` go to each training run."""
    started = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(folder)], check=True)
    cloned_s = time.monotonic() - started
    for number, step in enumerate(STEPS):
        taken = take(step, folder, settings)
        if number == 0 and taken.seen_s is not None:
            taken = Taken(step, cloned_s + taken.seen_s, cloned_s + taken.seconds, taken.exit_code, taken.screen)
        yield taken


def take(step: Step, folder: Path, settings: Sequence[str]) -> Taken:
    """Run the command of a step as typed, plus `settings`, and read its output."""
    words = [*shlex.split(step.command), *(settings if step.command.startswith(TRAIN) else ())]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    started, seen_s, screen = time.monotonic(), None, []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = popen([sys.executable, *words[1:]], cwd=folder, env=environment, **pipes)
    for line in process.stdout or ():
        screen.append(line)
        if seen_s is None and step.ctrl_c_after and step.ctrl_c_after in line:
            seen_s = time.monotonic() - started
            process.send_signal(signal.SIGINT)
    return Taken(step, seen_s, time.monotonic() - started, process.wait(LIMIT_S), "".join(screen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk, and print a line for each step.  Returns 1 if one of them went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to clone to; it must not exist")
    parser.add_argument("--small", action="store_true", help="train a smaller model")
    chosen = parser.parse_args(arguments)
    wrong = False
    for taken in walk(chosen.folder, SMALL if chosen.small else ()):
        seen = "" if taken.seen_s is None else f"  (first loss {taken.seen_s:.1f} s after the clone began)"
        print(f"{taken.seconds:6.1f} s  {taken.step.aim}: {taken.step.command}{seen}", flush=True)
        if taken.complaint:
            wrong = True
            print(f"          {taken.complaint}\n{taken.screen}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
