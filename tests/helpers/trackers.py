"""Trackers with their real clients and a server that can go down and come back; tests read what each has received."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from tests.helpers.fake_wandb import FakeWandbServer
from tests.helpers.gate import wait_until

SERVE_TRACKIO = (
    "import sys, trackio; "
    "trackio.show(open_browser=False, block_thread=True, share=False, server_port=int(sys.argv[1]))"
)


class Proxy:
    """A port in front of a server; closing it simulates an outage that breaks the connections of all clients."""

    def __init__(self, port: int, behind: int) -> None:
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._behind))
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class Tracker:
    """One of `log.trackers`, and the place where it stores runs.  Its server, if it has one, is behind a proxy."""

    name = ""
    process: subprocess.Popen[bytes] | None = None
    _proxy: Proxy | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.port, self._behind = (int(listener.getsockname()[1]) for listener in listeners)
        for listener in listeners:
            listener.close()

    @property
    def overrides(self) -> list[str]:
        return [f"log.trackers=[{self.name}]"]

    @property
    def env(self) -> dict[str, str]:
        """The variables of the run's process."""
        return {}

    def start(self) -> None:
        """Start the server, if the tracker has one, and wait until it answers."""

    def _serve(self, *command: str, env: dict[str, str]) -> None:
        with open(self.folder / "server.log", "ab") as log:
            output = {"stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen([sys.executable, *command], env=os.environ | env, cwd=self.folder, **output)  # type: ignore[call-overload]
        wait_until(self._answers, f"the server of {self.name}")
        self.come_back()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self._behind}/", timeout=30).close()
            return True
        return False

    def go_down(self) -> None:
        """Make the server unreachable."""
        if self._proxy is not None:
            self._proxy.close()

    def come_back(self) -> None:
        self._proxy = Proxy(self.port, self._behind)

    def stop(self) -> None:
        """Kill the server and all of its processes."""
        self.go_down()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None

    def received(self, folder: Path) -> list[tuple[int, float]]:
        """Return the step and the loss of everything received from the run in `folder`, in order."""
        raise NotImplementedError


class TensorBoard(Tracker):
    name = "tensorboard"

    def received(self, folder: Path) -> list[tuple[int, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return [(event.step, event.value) for event in events.Scalars("train/loss")]


class Wandb(Tracker):
    name = "wandb"
    server: FakeWandbServer | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._rows: dict[int, str] = {}

    @property
    def env(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.port}", "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567"}

    def start(self) -> None:
        self.server = FakeWandbServer(self._behind)
        self.come_back()

    def stop(self) -> None:
        self.go_down()
        if self.server is not None:
            self.server.stop()
            self._rows, self.server = self.server.rows, None

    def received(self, folder: Path) -> list[tuple[int, float]]:
        rows = [json.loads(self._rows[number]) for number in sorted(self._rows)]
        return [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]


class WandbOffline(Wandb):
    """Without a server: the files of all attempts are uploaded afterwards with `wandb sync`."""

    @property
    def overrides(self) -> list[str]:
        return ["log.wandb=offline"]

    def start(self) -> None:
        pass

    def received(self, folder: Path) -> list[tuple[int, float]]:
        super().start()
        for path in sorted((folder / "wandb" / "wandb").glob("offline-run-*")):
            command = [sys.executable, "-m", "wandb", "sync", str(path)]
            subprocess.run(command, env=os.environ | self.env, cwd=folder, check=True, capture_output=True, timeout=120)
        super().stop()
        return super().received(folder)


class Mlflow(Tracker):
    name = "mlflow"

    @property
    def env(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.port}"}

    def start(self) -> None:
        store = f"sqlite:///{self.folder}/mlflow.db"
        options = ["--backend-store-uri", store, "--port", str(self._behind), "--workers", "1"]
        own = {"MLFLOW_DISABLE_TELEMETRY": "true"}
        self._serve("-m", "mlflow", "server", *options, "--default-artifact-root", str(self.folder), env=own)

    def received(self, folder: Path) -> list[tuple[int, float]]:
        with sqlite3.connect(self.folder / "mlflow.db") as store:
            assert len(store.execute("select * from runs where lifecycle_stage = 'active'").fetchall()) == 1
            return store.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()


class Trackio(Tracker):
    name = "trackio"

    @property
    def env(self) -> dict[str, str]:
        return {
            "TRACKIO_SERVER_URL": f"http://127.0.0.1:{self.port}",
            "TRACKIO_WRITE_TOKEN": "token-of-the-test",
            "TRACKIO_DIR": str(self.folder / "client"),
        }

    def start(self) -> None:
        own = {"TRACKIO_DIR": str(self.folder / "server"), "TRACKIO_WRITE_TOKEN": "token-of-the-test"}
        self._serve("-c", SERVE_TRACKIO, str(self._behind), env=own)

    def received(self, folder: Path) -> list[tuple[int, float]]:
        (path,) = (self.folder / "server").glob("*.db")
        return _rows_of(path)


class TrackioLocal(Tracker):
    name = "trackio"

    @property
    def env(self) -> dict[str, str]:
        return {"TRACKIO_DIR": str(self.folder)}

    def received(self, folder: Path) -> list[tuple[int, float]]:
        return _rows_of(self.folder / "meshtrainer.db")


def _rows_of(path: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(path) as store:
        rows = [(step, json.loads(text)) for step, text in store.execute("select step, metrics from metrics")]
    return sorted((step, values["train/loss"]) for step, values in rows if "train/loss" in values)


def pause(seconds: float) -> None:
    """Wait, in a test whose subject is the passing of time."""
    time.sleep(seconds)
