"""The real Weights & Biases client without a server or service: a run neither fails nor waits for it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers.fake_wandb import FakeWandbServer
from tests.helpers.forked import REPOSITORY, popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import CommandResult, tiny_overrides
from trainer.metrics.follower import Follower

STEPS = 20
PATIENCE_S = 3.0
"""How long the end of a run waits for the client here; in the campaign as long as outside of tests."""
MORE_S = 60.0
"""Longest time from the last record of a run to its end: 15 s for Weights & Biases, and more on a busy machine.

Nothing waits for the client before the end, and the time of the steps depends on how busy the machine is.
"""
MODEL = [
    "model.name=tests.helpers.slow_trainer:slow_llama",
    "model.vocab_size=257",
    "model.num_kv_heads=2",
    "run.threads=1",
]
COMMAND = ("-m", "trainer.run", "recipe=llama_small")
SCRIPT = "import sys; from trainer import *; sys.exit(Trainer(load_config('llama_small', sys.argv[1:])).fit())"


pytestmark = pytest.mark.slow


class StartedRun:
    """A run with the client in the given mode, in whose environment its processes can be found."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        port: int,
        rest_s: float,
        command: Sequence[str] = COMMAND,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.folder = folder
        self._mark = f"WANDB_NOTES={folder}"
        own = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
            "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
            "WANDB_NOTES": str(folder),
            "MESHTRAINER_TEST_REST_S": str(rest_s),
            "MESHTRAINER_TEST_PATIENCE_S": str(patience_s),
            "PYTHONPATH": str(REPOSITORY),
            "GOMP_SPINCOUNT": "10000",  # as the command line sets it
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        overrides = tiny_overrides(*MODEL, f"train.steps={STEPS}", f"log.wandb={mode}", f"run.dir={folder}")
        # Into a file: of a pipe, the end is not seen until all that have inherited it are gone.
        with open(f"{folder}.log", "w") as log:
            arguments = [sys.executable, *command, *overrides]
            self.process = popen(arguments, env=inherited | own, stdout=log, stderr=log)

    def processes(self, name: str = "") -> list[int]:
        """Return the processes of this run, of that name."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = self._mark.encode() in (path / "environ").read_bytes().split(b"\0")
                if is_ours and name in (path / "comm").read_text():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def wait_for(self, text: str) -> None:
        """Wait until the metrics have the text."""
        metrics = self.folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and text in metrics.read_text(), f"{text} in the metrics")

    def output(self) -> str:
        return Path(f"{self.folder}.log").read_text()

    def end(self) -> float:
        """Demand that the run ends well, complete, and leaves no process; returns how long its end took."""
        assert self.process.wait(240) == 0, self.output()
        ran = CommandResult(0, "", "", self.folder)
        assert ran.metrics[-1]["kind"] == "end"
        held_up_s = time.time() - ran.metrics[-1]["time"]
        print(f"held up for {held_up_s:.1f} s")
        assert ran.train("step") == list(range(1, STEPS + 1))
        assert ran.status["state"] == "finished"
        wait_until(lambda: not self.processes(), "the end of its service", timeout_s=60)
        return held_up_s


@pytest.fixture
def port_that(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port that refuses connections, or that accepts them and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            listener.listen(64)
        yield listener.getsockname()[1]


@pytest.mark.campaign
@pytest.mark.parametrize("port_that", ["never answers"], indirect=True)
def test_unreachable_at_the_start(port_that: int, tmp_path: Path) -> None:
    unreachable(COMMAND, port_that, tmp_path, PATIENCE_S)


@pytest.mark.campaign
@pytest.mark.parametrize("port_that", ["refuses", "never answers"], indirect=True)
@pytest.mark.parametrize("command", [COMMAND, ("-c", SCRIPT)], ids=["command line", "script"])
def test_unreachable_at_the_start_with_the_full_wait(command: Sequence[str], port_that: int, tmp_path: Path) -> None:
    unreachable(command, port_that, tmp_path, Follower.FINISH_TIMEOUT_S)


def unreachable(command: Sequence[str], port_that: int, folder: Path, patience_s: float) -> None:
    run = StartedRun(folder / "run", "online", port_that, 0.0, command, patience_s)
    assert run.end() < MORE_S
    assert run.output().count(f"warning: Weights & Biases did not finish within {patience_s:.0f} s") == 1


@pytest.mark.campaign
def test_its_service_is_killed(tmp_path: Path) -> None:
    run = StartedRun(tmp_path / "run", "offline", 1, 1.0, patience_s=Follower.FINISH_TIMEOUT_S)
    run.wait_for('"step": 4,')
    while not (services := run.processes("wandb-core")):  # it takes its time to start
        assert run.process.poll() is None, run.output()
    (service,) = services
    os.kill(service, signal.SIGKILL)
    assert run.end() < MORE_S
    assert run.output().count("warning: Weights & Biases") == 1


@pytest.fixture
def server() -> Iterator[FakeWandbServer]:
    server = FakeWandbServer()
    yield server
    server.stop()


@pytest.mark.campaign
@pytest.mark.parametrize("loss", ["", "gone", "mute"])
def test_the_server_is_lost_in_mid_run(loss: str, server: FakeWandbServer, tmp_path: Path) -> None:
    patience_s = PATIENCE_S if loss else 60.0  # where all is well nothing is waited for
    run = StartedRun(tmp_path / "run", "online", server.server_address[1], 0.1, patience_s=patience_s)
    run.wait_for('"step": 8,')
    if loss == "mute":
        server.is_unresponsive.set()
    elif loss == "gone":
        server.stop()
    assert run.end() < MORE_S
    assert run.output().count("warning: Weights & Biases") == bool(loss)
    if not loss:
        assert server.losses == CommandResult(0, "", "", run.folder).train("loss"), "all that was logged has arrived"
