"""Experiment trackers (`log.trackers`): the `Tracker` interface, and trackers for W&B, TensorBoard, Trackio and MLflow.

Other packages can add trackers through entry points.  W&B, Trackio and MLflow read environment variables, such as
WANDB_BASE_URL, TRACKIO_DIR and MLFLOW_TRACKING_URI, which determine where runs are stored.  TensorBoard always writes
to the run folder.  The code that calls the trackers is in `follower.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from trainer.config import RunConfig
from trainer.config.rules import TRACKER_ENTRY_POINTS
from trainer.config.schema import LogSection
from trainer.errors import masked_argument
from trainer.recipe import entry_points


@dataclass(frozen=True)
class TrackedRun:
    """The information about a run that `Tracker.open` receives."""

    id: str
    """The run's ID, the same for all trackers.  It is stored in the run folder and in checkpoints, so all attempts at
    the run share it."""
    folder: Path
    """The run folder."""
    config: RunConfig
    resumed_step: int
    """Step of the checkpoint that this attempt resumes from, or 0 for a fresh start; after `rewind(step)`, `step`."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def project(self) -> str:
        return self.config.log.wandb_project


class Tracker(Protocol):
    """The interface to an experiment tracker, such as Weights & Biases.

    Other packages can add trackers: an entry point in the group `meshtrainer.sinks` names a tracker class or another
    callable that, called without arguments, returns a tracker.  All methods except `abandon` are called one at a
    time, in the tracker's own thread on rank 0.  They may block, and exceptions that they raise do not stop the run.
    After an exception, `open` is retried until the run ends; an ImportError disables the tracker.

    Two more methods are optional, and therefore not declared below:

    rewind(step): called when the steps after `step` will be repeated within this run.  It must drop those steps'
        values.  Without this method, the old values remain, and repeated steps up to the last one sent are not sent
        again.
    abandon(): called at the end of the run if not everything could be sent in time.  It is called in the main thread,
        possibly while another method is running, and must neither block nor raise.
    """

    def open(self, run: TrackedRun) -> int | None:
        """Open or resume the run.  Return the last step that the tracker has received, or 0 if it has received none.

        Steps up to that one are not sent again.  Return None if the tracker cannot tell; then the last step for which
        `write` has returned, in any attempt, is used instead.
        """

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add the values of one step, such as `train/loss`.  time: when they were recorded, in seconds since the epoch.

        Any key may be missing.  Except after `rewind`, steps never decrease.  A step is normally sent once, together
        with its evaluation; a record that arrives late, such as an evaluation, is sent with the same step again.
        """

    def close(self) -> None:
        """End the run in the tracker, once everything has arrived there."""


class TensorBoard:
    """Event files in `run.dir/tensorboard`.  A resumed run purges the events past its checkpoint."""

    def open(self, run: TrackedRun) -> int:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), purge_step=run.resumed_step + 1)  # type: ignore[no-untyped-call]
        return run.resumed_step

    def rewind(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer.close()  # type: ignore[no-untyped-call]
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """Weights & Biases, online or offline.  W&B's step numbers are those of the run.

    Measured with wandb 0.31: if the server is unreachable at the start, the client blocks for 101 s; if the connection
    is lost during the run, `finish` does not return within 130 s.
    """

    FINISH_TIMEOUT_S = 10.0
    """Seconds that the client may take to end a run."""
    _TEARDOWN_TIMEOUT_S = 1.0
    """Seconds to wait for the client after its service has been killed."""

    def open(self, run: TrackedRun) -> int:
        import wandb

        folder = run.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier_services = _service_pids()
        is_offline = run.config.log.wandb == "offline"
        stored = _last_stored_step(folder, run.id) if is_offline else 0
        settings = wandb.Settings(
            init_timeout=60,
            finish_timeout=self.FINISH_TIMEOUT_S,
            console="off",
            silent=True,
            # The metadata includes the command line, which may contain secrets.
            x_disable_meta=any(masked_argument(word) != word for word in sys.argv),
        )
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(folder),
            mode="offline" if is_offline else "online",
            config=run.config.to_dict(),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return stored if is_offline else max(0, self._run.step - 1)  # the server reports the next step

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({**values, "step": step}, step=step)

    def close(self) -> None:
        self._run.finish()

    def abandon(self) -> None:
        """End the client's service process, which would outlive this process by up to a minute while it retries.

        The client offers no other way to do this.  The data remains in the run folder for `wandb sync`.
        """
        import wandb

        for service in _service_pids() - self._earlier_services:
            with contextlib.suppress(ProcessLookupError):
                os.kill(service, signal.SIGKILL)

        def tear_down() -> None:
            """Remove the client's exit hook, which would wait for the service at interpreter exit."""
            with contextlib.suppress(Exception):
                wandb.teardown()

        ending = threading.Thread(target=tear_down, name="wandb-teardown", daemon=True)
        ending.start()
        ending.join(self._TEARDOWN_TIMEOUT_S)


def _service_pids() -> set[int]:
    """Return the process IDs of the W&B service processes that this process started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text(errors="replace").rpartition(")")
            if name.endswith("(wandb-core") and int(rest.split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def _last_stored_step(folder: Path, run_id: str) -> int:
    """Return the last step in the files that the client wrote in earlier offline attempts, or 0.

    If an attempt is killed, its service loses the rows not yet written: 10 of 36 in a test.  So only the files show
    which steps `wandb sync` will find.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    last = 0
    for path in folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"):
        for content in _stored_records(path.read_bytes()):
            if b"_step" in content:
                record = Record()
                record.ParseFromString(content)
                for item in record.history.item:
                    if "_step" in (item.key, *item.nested_key):
                        last = max(last, int(float(item.value_json)))
    return last


def _stored_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of one of the W&B client's files.

    After a 7-byte header, the format is that of LevelDB's log: blocks of 32 KiB with fragments of records
    (https://github.com/google/leveldb/blob/main/doc/log_format.md).
    """
    block, header = 1 << 15, 7
    position, parts = header, b""
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        position += header
        if kind not in (1, 2, 3, 4) or position + length > len(data):
            return
        parts = data[position : position + length] if kind in (1, 2) else parts + data[position : position + length]
        position += length
        if kind in (1, 4):
            yield parts


class Trackio:
    """Trackio: a local database (TRACKIO_DIR), a server (TRACKIO_SERVER_URL) or a Space (TRACKIO_SPACE_ID).

    Trackio identifies runs by name, so the name includes the ID.
    """

    _CONNECT_TIMEOUT_S = 10.0

    def open(self, run: TrackedRun) -> int:
        import trackio
        import trackio.run
        import trackio.utils
        from trackio.sqlite_storage import SQLiteStorage

        server = os.environ.get("TRACKIO_SERVER_URL")
        if server and not os.environ.get("TRACKIO_SPACE_ID"):
            # The client would carry on without the server, and could not report which steps the server has.
            url = urlsplit(server)
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), timeout=self._CONNECT_TIMEOUT_S).close()
        for module in (trackio, trackio.run, trackio.utils):  # they would print to the console of the run
            module.print = lambda *words, **options: None  # type: ignore[attr-defined]
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            resume="allow",
            config=run.config.to_dict(),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Rows that a killed attempt left in the local database are sent by the client itself.
        local_step = SQLiteStorage.get_max_step_for_run(run.project, self._run.name, run_id=self._run.id)
        return max(0, local_step or 0, self._run._next_step - 1)

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, with any store (MLFLOW_TRACKING_URI).  The tag `meshtrainer.id` identifies the run."""

    _ENVIRONMENT_DEFAULTS = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",  # keeps the console free for the run
        # Its retries pause for minutes, and create a run twice if a response is lost; Follower retries instead.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    _MAX_METRICS, _MAX_PARAMS, _MAX_CHARS = 900, 100, 6000
    """Maximum metrics and parameters in one request, and characters of a parameter's value, within MLflow's limits."""

    def open(self, run: TrackedRun) -> int:
        for name, value in self._ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
        tag = "meshtrainer.id"
        runs = self._client.search_runs([experiment], f"tags.`{tag}` = '{run.id}'", order_by=["start_time ASC"])
        for extra in runs[1:]:  # empty duplicates: the responses to their creation were lost
            self._client.delete_run(extra.info.run_id)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return int(runs[0].data.metrics.get("step", 0))
        self._id = self._client.create_run(experiment, run_name=run.name, tags={tag: run.id}).info.run_id
        values = [
            Param(f"{section}.{key}", str(value)[: self._MAX_CHARS])
            for section, keys in run.config.to_dict().items()
            for key, value in keys.items()
        ]
        for start in range(0, len(values), self._MAX_PARAMS):
            self._client.log_batch(self._id, params=values[start : start + self._MAX_PARAMS])
        return 0

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        # `step` comes last, since a resumed run reads its progress from it.  Repeating a request changes nothing,
        # because the times are the same.
        metrics = [
            Metric(re.sub(r"[^\w\-. /:]", "_", name), value, round(time * 1000), step)  # characters that MLflow allows
            for name, value in values.items()
        ]
        metrics.append(Metric("step", step, round(time * 1000), step))
        for start in range(0, len(metrics), self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + self._MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, tuple[str, Callable[[], Tracker]]] = {
    "wandb": ("Weights & Biases", WandB),
    "tensorboard": ("TensorBoard", TensorBoard),
    "trackio": ("Trackio", Trackio),
    "mlflow": ("MLflow", MLflow),
}
"""The built-in trackers by their name in `log.trackers`, each with its display name and its class.

`_TRACKERS` in `config/rules.py` lists the same names: settings are checked there, in a lower layer that must not
import these classes.  A test compares the two."""


def tracker_names(log: LogSection) -> tuple[str, ...]:
    """Return the names in `log.trackers`, plus those that `log.wandb` and `log.tensorboard` turn on, each once."""
    from_switches = [*(["wandb"] if log.wandb != "off" else []), *(["tensorboard"] if log.tensorboard else [])]
    return tuple(dict.fromkeys((*from_switches, *log.trackers)))


def find_tracker(name: str) -> tuple[str, Callable[[], Tracker]]:
    """Return a tracker's display name and a function that creates it, from this package or from an entry point."""
    if name in TRACKERS:
        return TRACKERS[name]
    point = next(point for point in entry_points(group=TRACKER_ENTRY_POINTS) if point.name == name)
    return name, lambda: point.load()()
