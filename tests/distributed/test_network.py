"""Two network namespaces act as two hosts connected by a cable, which is cut during training.

Needs root and iproute2; without them the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gate import wait_until
from tests.helpers.launch import PYTHON_MODULE, Run, launch, run, tiny

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


def start(host: str, rank: int, folder: Path, arguments: list[str]) -> Run:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29600",
        "GLOO_SOCKET_IFNAME": "e0",
        "OMP_NUM_THREADS": "1",
    }
    words = [*PYTHON_MODULE, "trainer.run", "recipe=llama_small", *arguments, f"run.dir={folder}"]
    as_host = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return launch(["ip", "netns", "exec", host, *as_host, *words], folder, variables)


def test_the_cable_is_cut(hosts: list[str], tmp_path: Path) -> None:
    """Both ranks end by the time-out and name the other; with the cable back, the run is resumed."""
    folder, own = tmp_path / "run", [f"run.timeout_s={TIMEOUT_S}", "checkpoint.every=5"]
    arguments = tiny(*own, "train.steps=100000")
    ranks = [start(host, rank, folder, arguments) for rank, host in enumerate(hosts)]
    wait_until(lambda: ranks[0].steps_saved or not ranks[0].is_running, "a checkpoint")
    ip("-n", hosts[1], "link", "set", "e0", "down")
    for rank in ranks:
        rank.wait()
    assert [rank.code for rank in ranks] == [1, 1]
    assert "rank 1" in ranks[0].err, "who is lost"
    assert "rank 0" in ranks[1].err
    ip("-n", hosts[1], "link", "set", "e0", "up")

    newest = ranks[0].steps_saved[-1]
    again = tiny(*own, f"train.steps={newest + 3}")
    ranks = [start(host, rank, folder, again) for rank, host in enumerate(hosts)]
    assert [rank.wait().code for rank in ranks] == [0, 0], ranks[0].err
    assert [line["resumed_step"] for line in ranks[0].of_kind("start")] == [None, newest]
    alone = run(tmp_path / "alone", *own, f"train.steps={newest + 3}", "nproc=2")
    assert ranks[0].train("loss") == alone.train("loss")
