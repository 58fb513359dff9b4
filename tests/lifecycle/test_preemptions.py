"""Twenty preemptions of one run at random moments: it continues each time, with the losses of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.checkpoint.test_faults import last_step
from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import CommandResult, run_command, tiny_overrides
from tests.lifecycle.test_stopping import wait_until_it_catches

STEPS = 400
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, "notice")


def start(folder: Path, arguments: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer.run", *arguments, f"run.dir={folder}"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | env, **output)  # type: ignore[call-overload]


def preempt(
    process: subprocess.Popen[str], folder: Path, how: signal.Signals | str, after_s: float, before_step: int
) -> None:
    """Request a stop after a while, or once the run reaches `before_step`, so that it does not end first."""
    wait_until_it_catches(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and last_step(folder) < before_step:
        time.sleep(0.05)
    if isinstance(how, signal.Signals):
        process.send_signal(how)
        return
    # Repeatedly, as a batch script does: the run ignores a notice that is older than its start.
    while process.poll() is None:
        if folder.exists():
            (folder / "notice").touch()
        time.sleep(0.5)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["nproc=2"],
        ["train.compile=true"],
    ],
    ids=["1 rank", "2 ranks", "compiled"],
)
@pytest.mark.timeout(900)
def test_twenty_preemptions(more: list[str], tmp_path: Path) -> None:
    own = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += [f"train.steps={STEPS}", "checkpoint.every=3", "eval.every=5", "eval.steps=3", "data.num_workers=1", *more]
    arguments = ["recipe=llama_small", *tiny_overrides(*own)]
    alone = run_command(tmp_path / "alone", *arguments, timeout_s=300)
    assert alone.exit_code == 0, alone.stderr

    draw, folder, codes = random.Random(5), tmp_path / "run", []
    longest_s = 12.0 if "train.compile=true" in more else 5.0
    for number in range(20):
        process = start(folder, arguments, {"MESHTRAINER_TEST_REST_S": "0.1"})
        before_step = STEPS * (number + 1) // 21
        preempt(process, folder, REQUESTS[number % 4], draw.uniform(0.0, longest_s), before_step)
        output, _ = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert process.returncode == 75, output
    ended = run_command(folder, *arguments, timeout_s=300)
    assert ended.exit_code == 0, ended.stderr
    assert ended.train("step") == list(range(1, STEPS + 1))
    assert ended.train("loss") == alone.train("loss")
    assert evaluations(ended) == evaluations(alone)
    starts = [line for line in ended.metrics if line["kind"] == "start"]
    print(f"{len(codes)} preemptions, {len(starts) - 1} of them after the first step had begun")


def evaluations(ran: CommandResult) -> dict[int, float]:
    """Return the evaluation losses by step. An evaluation aborted by a stop is made up for after the resume."""
    return {line["step"]: line["loss"] for line in ran.metrics if line["kind"] == "eval"}
