"""Experiment trackers (`log.trackers`): the `Tracker` interface, its threads, and W&B, TensorBoard, Trackio and MLflow.

Other packages can add trackers through entry points.  W&B, Trackio and MLflow read environment variables, such as
WANDB_BASE_URL, TRACKIO_DIR and MLFLOW_TRACKING_URI, which determine where runs are stored.  TensorBoard always writes
to the run folder.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.config.requirements import BUILT_IN_TRACKERS, TRACKER_ENTRY_POINTS
from trainer.config.schema import LogSection, RunConfig
from trainer.errors import reason_of
from trainer.metrics.record import Record, RecordWriter, numeric_fields, read_records
from trainer.registry import entry_points, import_object


@dataclass(frozen=True)
class TrackedRun:
    """The information about a run that `Tracker.open` receives."""

    id: str
    """The run's ID, the same for all trackers and for all attempts at the run: `run_id` in the start records."""
    folder: Path
    """The run folder."""
    config: RunConfig
    resumed_step: int
    """Step of the checkpoint that this attempt resumes from, or 0 for a fresh start."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def project(self) -> str:
        return self.config.log.wandb_project


class Tracker(Protocol):
    """The interface to an experiment tracker, such as Weights & Biases.

    Other packages can add trackers: an entry point in the group `meshtrainer.trackers` names a tracker class or another
    callable that, called without arguments, returns a tracker.  All methods are called one at a time, in the tracker's
    own thread on rank 0.  They may block.  After the first exception, the run continues without the tracker.
    """

    def open(self, run: TrackedRun) -> int | None:
        """Open or resume the run.  Return the last step that the tracker has received, or 0 if it has received none.

        Of the records up to that step, only its evaluation is sent again; of those after it, also the ones that an
        earlier attempt has written.  Return None if the tracker cannot tell; then it receives the records of this
        attempt, which may repeat steps of an earlier one.
        """

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add the numbers of one record, such as `train/loss`.  time: when it was written, in seconds since the epoch.

        Any key may be missing.  A step may have several records, such as its evaluation.  Steps never decrease, unless
        a checkpoint is loaded during training.
        """

    def close(self) -> None:
        """End the run in the tracker, once everything has arrived there."""


class Sender(RecordWriter):
    """Sends a run's records to one tracker, in a thread that training never waits for.

    If the tracker raises an exception or is `_MAX_WAITING` records behind, the run continues without it, with a
    warning.  At its end, the run waits until all records are sent, for at most `FINISH_TIMEOUT_S`.
    """

    FINISH_TIMEOUT_S = 10.0
    _KINDS = ("train", "eval", "norms")
    """Kinds of records with numbers to plot over steps."""
    _MAX_WAITING = 10_000

    def __init__(self, name: str, create: Callable[[], Tracker], run: TrackedRun, warn: Callable[[str], None]) -> None:
        """Start the thread.

        name: the tracker's name in messages.
        create: returns the tracker; called in the thread.
        """
        self._name, self._warn = name, warn
        self._has_ended = False
        self._finish_by = 0.0
        """When `close` stops waiting, by `time.monotonic`."""
        self._waiting: queue.Queue[Record | None] = queue.Queue(self._MAX_WAITING)
        """The records to send; None at the end of the run."""
        self._thread = threading.Thread(target=self._send, args=(create, run), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if record.kind in self._KINDS:
            self._put(record)

    def finish(self) -> None:
        """Let the thread send the remaining records and close the tracker."""
        self._finish_by = time.monotonic() + self.FINISH_TIMEOUT_S
        self._put(None)

    def close(self) -> None:
        self._thread.join(max(0.0, self._finish_by - time.monotonic()))
        if self._thread.is_alive():
            self._continue_without(f"did not finish within {self.FINISH_TIMEOUT_S:.0f} s")

    def _put(self, record: Record | None) -> None:
        if not self._has_ended:
            try:
                self._waiting.put_nowait(record)
            except queue.Full:
                self._continue_without(f"is {self._MAX_WAITING} records behind")

    def _continue_without(self, problem: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._warn(f"{self._name} {problem}; the run continues without it")

    def _send(self, create: Callable[[], Tracker], run: TrackedRun) -> None:
        try:
            tracker = create()
            last_step = tracker.open(run)
            for record in self._records(run, last_step):
                # The last attempt may have been interrupted between a step and its evaluation.
                if record.step > (last_step or 0) or (record.step == last_step and record.kind == "eval"):
                    tracker.write(record.step, _values_of(record), record.time)
            tracker.close()
        except BaseException as error:  # whatever a tracker raises, the run continues
            self._continue_without(f"failed ({type(error).__name__}: {reason_of(error)})")

    def _records(self, run: TrackedRun, last_step: int | None) -> Iterator[Record]:
        """Yield the records of this attempt, and before them those that earlier attempts may not have sent."""
        if last_step is not None and last_step < run.resumed_step:
            for _, fields in read_records(run.folder / "metrics.jsonl"):
                if fields.get("kind") in self._KINDS and fields["step"] <= run.resumed_step and not self._has_ended:
                    yield Record(**{"time": 0.0, **fields})
        while not self._has_ended and (record := self._waiting.get()) is not None:
            yield record


def _values_of(record: Record) -> dict[str, float]:
    """Return the numbers to plot, such as `train/loss`, without those that are not finite."""
    return {
        f"{record.kind}/{name}": value
        for name, value in numeric_fields(record).items()
        if name not in ("step", "time") and math.isfinite(value)
    }


class TensorBoard:
    """Event files in `run.dir/tensorboard`.  A resumed run purges the events past its checkpoint."""

    def open(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.resumed_step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """Weights & Biases, online or offline.  W&B's step numbers are those of the run.

    Records of the same step become one row there.  Offline, every attempt writes a file of its own.
    """

    _START_TIMEOUT_S = 60.0
    """Seconds that the client may take to reach the server.  By default it takes 101 s if there is none."""
    _FINISH_TIMEOUT_S = 10.0
    """Seconds that the client may take to end a run.  By default it waits without limit for a server that is gone."""

    def open(self, run: TrackedRun) -> int | None:
        import wandb

        folder = run.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        is_offline = run.config.log.wandb == "offline"
        wandb.setup()
        atexit.register(self._leave)  # called before what `setup` has registered
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(folder),
            mode="offline" if is_offline else "online",
            config=run.config.to_dict(),
            settings=wandb.Settings(
                init_timeout=self._START_TIMEOUT_S,
                finish_timeout=self._FINISH_TIMEOUT_S,
                console="off",
                silent=True,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return None if is_offline else max(0, self._run.step - 1)  # the server reports the next step

    @staticmethod
    def _leave() -> None:
        """Keep the client from delaying the exit of a script: it would wait a minute for a server that is gone."""
        import wandb

        ending = threading.Thread(target=wandb.teardown, name="wandb teardown", daemon=True)
        ending.start()
        ending.join(1.0)

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({**values, "step": step}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio: a local database (TRACKIO_DIR), a server (TRACKIO_SERVER_URL) or a Space (TRACKIO_SPACE_ID).

    Trackio identifies runs by name, so the name includes the ID.
    """

    def open(self, run: TrackedRun) -> int:
        import trackio
        import trackio.run
        import trackio.utils

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
        return max(0, self._run._next_step - 1)

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, with any store (MLFLOW_TRACKING_URI).  The tag `meshtrainer.id` identifies the run."""

    _ENVIRONMENT_DEFAULTS = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",  # keeps the console free for the run
    }
    _TAG = "meshtrainer.id"
    _MAX_METRICS, _MAX_PARAMS, _MAX_CHARS = 900, 100, 6000
    """Maximum metrics and parameters in one request, and characters of a parameter's value, within MLflow's limits."""

    def open(self, run: TrackedRun) -> int:
        for name, value in self._ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
        runs = self._client.search_runs([experiment], f"tags.`{self._TAG}` = '{run.id}'", order_by=["start_time ASC"])
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return int(runs[0].data.metrics.get("step", 0))
        self._id = self._client.create_run(experiment, run_name=run.name, tags={self._TAG: run.id}).info.run_id
        self._log_settings(run.config)
        return 0

    def _log_settings(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        values = [
            Param(f"{section}.{key}", str(value)[: self._MAX_CHARS])
            for section, keys in config.to_dict().items()
            for key, value in keys.items()
        ]
        for start in range(0, len(values), self._MAX_PARAMS):
            self._client.log_batch(self._id, params=values[start : start + self._MAX_PARAMS])

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        # `step` comes last, since a resumed run reads its progress from it.
        metrics = [
            Metric(re.sub(r"[^\w\-. /:]", "_", name), value, round(time * 1000), step)  # characters that MLflow allows
            for name, value in {**values, "step": step}.items()
        ]
        for start in range(0, len(metrics), self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + self._MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def tracker_names(log: LogSection) -> tuple[str, ...]:
    """Return the names in `log.trackers`, plus those that `log.wandb` and `log.tensorboard` turn on, each once."""
    from_switches = [*(["wandb"] if log.wandb != "off" else []), *(["tensorboard"] if log.tensorboard else [])]
    return tuple(dict.fromkeys((*from_switches, *log.trackers)))


def find_tracker(name: str) -> tuple[str, Callable[[], Tracker]]:
    """Return a tracker's display name and a function that creates it, from this package or from an entry point."""
    if name in BUILT_IN_TRACKERS:
        product, path = BUILT_IN_TRACKERS[name]
        return product, import_object(path, "log.trackers")
    point = next(point for point in entry_points(group=TRACKER_ENTRY_POINTS) if point.name == name)
    return name, lambda: point.load()()
