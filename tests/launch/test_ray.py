"""launch/ray_train.py on a real Ray cluster on this machine. Needs pip install 'meshtrainer[ray]'."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gate import wait_until
from tests.helpers.launch import Run, launch, run, tiny

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

STEPS = 40
MODEL = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
OVERRIDES = [*MODEL, "checkpoint.every=5", "run.threads=1"]


@pytest.fixture(scope="module")
def ray_env() -> Iterator[dict[str, str]]:
    """The environment of a Ray cluster for these tests, in /tmp because socket paths have at most 107 characters."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "", "MESHTRAINER_TEST_REST_S": "0.3"}
    own |= {"RAY_raylet_start_wait_time_s": "240"}  # it starts slowly on a busy machine
    yield os.environ | own
    shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, env: dict[str, str], *options: str, steps: int = STEPS) -> Run:
    overrides = tiny(*OVERRIDES, f"train.steps={steps}", f"run.dir={folder / 'run'}")
    command = [sys.executable, "launch/ray_train.py", *options, f"--storage={folder / 'ray'}", "recipe=llama_small"]
    return launch([*command, *overrides], folder / "run", env)


def end(started: Run, folder: Path, code: int = 0) -> Run:
    assert started.wait().code == code, started.out + started.err
    return started


def wait_for_step(started: Run, folder: Path, step: int) -> None:
    wait_until(lambda: step in started.train("step") or not started.is_running, f"step {step}")
    assert started.is_running, started.err


def workers(env: dict[str, str]) -> list[int]:
    """Return the training processes of this Ray cluster."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_worker = path.read_bytes().startswith(b"ray::RayTrainWorker")
            parent = path.parent.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            raylet = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if is_worker and env["RAY_TMPDIR"].encode() in raylet:
            found.append(int(path.parent.name))
    return sorted(found)


def test_killed_worker_and_resume_with_a_different_number(ray_env: dict[str, str], tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", *OVERRIDES, f"train.steps={STEPS}", "nproc=2")
    process = start(tmp_path, ray_env, "--workers=2", "--max-failures=2")
    wait_for_step(process, tmp_path, 12)
    first = workers(ray_env)
    assert len(first) == 2
    os.kill(first[1], signal.SIGKILL)
    ran = end(process, tmp_path)
    starts = [line for line in ran.metrics if line["kind"] == "start"]
    assert [line["world_size"] for line in starts] == [2, 2]
    assert starts[1]["resumed_step"] >= 10
    assert ran.train("step") == list(range(1, STEPS + 1))
    assert ran.train("loss") == alone.train("loss"), "bit for bit"
    assert list((tmp_path / "ray").glob("*/checkpoint_*/*")), "Ray has the last checkpoint"

    further = end(start(tmp_path, ray_env, "--workers=1", steps=STEPS + 5), tmp_path)
    last = [line for line in further.metrics if line["kind"] == "start"][-1]
    assert (last["world_size"], last["resumed_step"]) == (1, STEPS)
    assert further.train("step") == list(range(1, STEPS + 6))


def test_notice_file_stops_the_run(ray_env: dict[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, ray_env, "--workers=2")
    wait_for_step(process, tmp_path, 3)
    (tmp_path / "run" / "notice").touch()
    ran = end(process, tmp_path, code=75)
    assert (ran.status["state"], ran.status["reason"]) == ("stopped", "notice")
    assert 3 <= ran.status["step"] < STEPS
    assert (tmp_path / "run" / "checkpoints" / f"step_{ran.status['step']:08d}").is_dir()
