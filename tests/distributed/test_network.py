"""Two network namespaces act as two hosts connected by a cable, which is cut during training.

Needs root and iproute2; without them the tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import CommandResult, run_command, tiny_overrides

TIMEOUT_S = 12


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None:
        return False
    name = f"mesh-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2"),
]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.78.0.1 and 10.78.0.2."""
    names = [f"mesh-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "e0", "netns", names[0], "type", "veth", "peer", "name", "e0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "e0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "e0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(host: str, rank: int, arguments: list[str]) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29600",
        "GLOO_SOCKET_IFNAME": "e0",
        "OMP_NUM_THREADS": "1",
        "MESHTRAINER_TEST_REST_S": "0.05",
    }
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "trainer.run", *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | variables, **output)  # type: ignore[call-overload]


@pytest.mark.timeout(300)
def test_the_cable_is_cut(hosts: list[str], tmp_path: Path) -> None:
    own = ["model.name=tests.helpers.slow_trainer:slow_llama", "model.vocab_size=257", "model.num_kv_heads=2"]
    own += [f"run.timeout_s={TIMEOUT_S}", "checkpoint.every=5"]
    arguments = ["recipe=llama_small", *tiny_overrides(*own, "train.steps=100000"), f"run.dir={tmp_path / 'run'}"]
    ranks = [start(host, rank, arguments) for rank, host in enumerate(hosts)]
    wait_for_checkpoint(tmp_path / "run", ranks)
    ip("-n", hosts[1], "link", "set", "e0", "down")
    cut = time.monotonic()
    ended_s, errors = [], []
    for process in ranks:
        _, stderr = process.communicate(timeout=120)
        ended_s.append(time.monotonic() - cut)
        errors.append(stderr)
    print(f"ended {ended_s} s after the cut\n" + "\n----\n".join(errors))
    assert [process.returncode for process in ranks] == [1, 1]
    assert max(ended_s) < 60, "by the time-out, not by that of the kernel's connections"
    assert all(re.search("did not answer|no answer for|timed out", text) for text in errors), errors
    assert "rank 1" in errors[0], "who is lost"
    assert "rank 0" in errors[1]
    ip("-n", hosts[1], "link", "set", "e0", "up")

    newest = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    again = [*(item for item in arguments if not item.startswith("train.steps=")), f"train.steps={newest + 3}"]
    ranks = [start(host, rank, again) for rank, host in enumerate(hosts)]
    for process in ranks:
        assert process.wait(60) == 0, process.communicate()[1]
    both = CommandResult(0, "", "", tmp_path / "run")
    assert [line["resumed_step"] for line in both.metrics if line["kind"] == "start"] == [None, newest]
    alone = run_command(
        tmp_path / "alone", "recipe=llama_small", *tiny_overrides(*own, f"train.steps={newest + 3}"), "nproc=2"
    )
    assert both.train("loss") == alone.train("loss")


def wait_for_checkpoint(folder: Path, ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 60
    while not list((folder / "checkpoints").glob("step_*")):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in ranks), [process.communicate() for process in ranks]
        time.sleep(0.1)
