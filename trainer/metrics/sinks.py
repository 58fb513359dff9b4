"""Sinks for metrics records: `metrics.jsonl`, `samples.txt`, TensorBoard and Weights & Biases.

`Metrics` creates a run's sinks and sends each record to all of them.  The console sink is in `console.py`.  To add a
sink, write a class with the methods of `Sink` and create it in `Metrics.open`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from trainer.config import RunConfig
from trainer.errors import masked_argument, print_stderr, redact, setting_error
from trainer.files import append_and_sync, content_of, write_atomically
from trainer.metrics.console import ConsoleSink, LogFile, NonBlockingStream, PlainScreen, find_screen
from trainer.metrics.goodput import RunHistory, TimeLedger
from trainer.metrics.record import Clock, Record, read_lines


class Sink(Protocol):
    """Receives every record of a run, on rank 0.

    Training calls `write` directly, so it must neither raise nor wait for a server or the reader of a pipe.  `close` is
    called once, at the end of the run.
    """

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one JSON object per line, appended and written immediately.

    A resumed run first drops the lines past its checkpoint that it will write again (the kinds in `_WRITTEN_AGAIN`).
    Dropped lines are appended to `metrics_superseded.jsonl`, and the rest is rewritten atomically, so a crash leaves
    either the old or the new file.  `lost_steps` and `before` are computed before any lines are dropped.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        self._unwritten = b""
        self._missing_since: float | None = None
        """Time at which the file was first found to be deleted or replaced, or None if it is in place."""
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        """Descriptor of the file's folder, which stays valid if the folder is renamed or replaced."""
        self._file = self._open_past(resumed_step)

    def _open_past(self, step: int) -> io.FileIO:
        ledger = TimeLedger(step)
        if self._path.exists():
            kept: list[str] = []
            dropped: list[str] = []
            for line, record in read_lines(self._path):
                if record is not None:
                    ledger.add(record)
                is_kept = record is not None and _is_kept(record, step)
                (kept if is_kept else dropped).append(line)
            self._keep_superseded("".join(dropped))
            write_atomically(self._path, "".join(kept))
        self.ledger = ledger
        self.lost_steps, self.before = ledger.lost_steps, ledger.total()
        return open(self._path, "a+b", buffering=0)

    def go_back(self, step: int) -> None:
        """Drop the lines past `step` during a run.  Raises OSError if that fails, leaving the file unchanged."""
        kept, dropped = b"", b""
        for line in self._unwritten.splitlines(keepends=True):
            if _is_kept(json.loads(line), step):
                kept += line
            else:
                dropped += line
        self._keep_superseded(dropped.decode())
        old_file, self._file = self._file, self._open_past(step)
        old_file.close()
        self._unwritten = kept

    def _keep_superseded(self, lines: str) -> None:
        if lines:
            append_and_sync(self._path.with_name(SUPERSEDED), lines)

    def write(self, record: Record) -> None:
        """Append the record.  If the disk is full or unavailable, keep the line in memory and retry later."""
        had_failed = bool(self._unwritten)
        # Mask secrets, and write None in place of non-finite numbers, which JSON does not have.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = {k: redact(v) if isinstance(v, str) and k != "kind" else v for k, v in finite.items()}
        self._unwritten += json.dumps(line).encode() + b"\n"
        try:
            self._restore_file(_RESTORE_AFTER_S)
            self._flush()
        except OSError as error:
            if not had_failed:
                warn(f"{self._path} cannot be written; lines are kept in memory until it can: {error}")

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _restore_file(self, after_s: float) -> None:
        """Restore the file if it was deleted, or continue in the new one if it was replaced.

        A deleted file is written again, since its content can still be read through the open descriptor.  This happens
        no earlier than `after_s` seconds after the file was first found missing: otherwise a command that is deleting
        the entire folder would fail because the folder is not empty.
        """
        opened = os.fstat(self._file.fileno())
        try:
            current = os.stat(self._path.name, dir_fd=self._folder)
        except FileNotFoundError:
            current = None
        if current is not None and (opened.st_nlink or os.path.samestat(current, opened)):
            self._missing_since = None
            return
        self._missing_since = time.monotonic() if self._missing_since is None else self._missing_since
        if time.monotonic() - self._missing_since < after_s:
            return
        try:
            self._continue_in_folder(with_content=current is None)
        except FileNotFoundError:  # the folder itself was deleted: its owner reports that and calls `move_to`
            return
        warn(f"{self._path} was {'deleted: it was written again' if current is None else 'replaced: it is continued'}")

    def move_to(self, folder: Path) -> None:
        """Continue the file in another folder, copying its content unless the file already exists there."""
        old_folder, self._path = self._folder, folder / self._path.name
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.close(old_folder)
        self._continue_in_folder(with_content=not self._path.exists())
        self._flush()

    def _continue_in_folder(self, with_content: bool) -> None:
        """Open the file of the same name in the folder.  `with_content`: queue the previous content for writing."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path.name, flags, 0o666, dir_fd=self._folder)
        old_file, self._file = self._file, io.FileIO(descriptor, "a+b")
        if with_content:
            self._unwritten = content_of(old_file.fileno()) + self._unwritten
        old_file.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._restore_file(0.0)
            self._flush()
        if self._unwritten:
            warn(f"{self._path}: {self._unwritten.count(b'}')} lines could not be written")
        self._file.close()
        os.close(self._folder)


_RESTORE_AFTER_S = 1.0
"""Seconds after which a missing metrics file is written again."""

SUPERSEDED = "metrics_superseded.jsonl"
"""File for the lines that a resume removed from the metrics because the run will write them again."""

_WRITTEN_AGAIN = ("train", "eval", "profile", "sample", "norms")
"""Kinds of records that a resumed run writes again."""


def _is_kept(record: Mapping[str, Any], resumed_step: int) -> bool:
    return record.get("kind") not in _WRITTEN_AGAIN or record["step"] <= resumed_step


class SampleFile:
    """`samples.txt`: the samples generated from the prompts, in readable form, appended over all attempts."""

    def __init__(self, path: Path) -> None:
        self._name, self._text = path.name, LogFile(path)

    def write(self, record: Record) -> None:
        if record.kind == "sample":
            self._text.write(f"-- step {record.step}: {record.prompt}\n{record.text}\n\n")

    def move_to(self, folder: Path) -> None:
        self._text.move_to(folder / self._name)

    def close(self) -> None:
        self._text.close()


class TensorBoard:
    """Writes event files to `run.dir/tensorboard`.  A resumed run purges events past its checkpoint."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            rule = "TensorBoard is not installed: pip install 'meshtrainer[tensorboard]'"
            raise setting_error("log.tensorboard", True, rule, False) from error
        self._failed = False
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)  # type: ignore[no-untyped-call]

    def write(self, record: Record) -> None:
        if record.kind in _PLOTTED and not self._failed:
            try:
                for name, value in _numbers(record).items():
                    self._writer.add_scalar(f"{record.kind}/{name}", value, record.step)  # type: ignore[no-untyped-call]
                self._writer.flush()  # type: ignore[no-untyped-call]
            except Exception as error:  # of the file system or the client: the run continues without events
                self._failed = True
                warn(f"TensorBoard events cannot be written; continuing without them: {error}")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()  # type: ignore[no-untyped-call]


class WandB:
    """Logs to Weights & Biases in a separate thread that training never waits for.

    Measured with wandb 0.31: if the server is unreachable at the start, the client blocks for 101 s; if the connection
    is lost during the run, `finish` does not return within 130 s.  In both cases this sink drops records with a single
    warning, and the end of the run waits at most `FINISH_S`.
    """

    FINISH_S = 10.0
    _TEARDOWN_S = 1.0
    _QUEUE_SIZE = 10_000

    def __init__(self, config: RunConfig, warn: Callable[[str], None], restored_id: str | None = None) -> None:
        self._config, self._warn = config, warn
        self._folder = config.run_dir / "wandb"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.id = _stored_id(self._folder, restored_id)
        self._records: queue.Queue[Record | None] = queue.Queue(self._QUEUE_SIZE)
        self._has_timed_out = False
        self._other_services = _service_pids()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        with contextlib.suppress(queue.Full):  # the thread is stuck or has exited with a warning
            self._records.put_nowait(record)

    def close(self) -> None:
        self.write(None)  # type: ignore[arg-type]
        self._thread.join(self.FINISH_S)
        if self._thread.is_alive():
            self._has_timed_out = True
            self._warn(f"Weights & Biases did not finish within {self.FINISH_S:.0f} s; the run ends without it")
            # The client offers no other way to stop its service process at this point, which would otherwise outlive
            # this process by up to a minute while it retries.  The data remains in the run folder for `wandb sync`.
            for pid in _service_pids() - self._other_services:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            teardown = threading.Thread(target=self._tear_down, name="wandb-teardown", daemon=True)
            teardown.start()
            teardown.join(self._TEARDOWN_S)

    def _tear_down(self) -> None:
        """Remove the client's exit hook, which would wait for the service when the interpreter exits."""
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown()

    def _work(self) -> None:
        try:
            run = self._start()
            while (record := self._records.get()) is not None:
                if record.kind in _PLOTTED:
                    run.log({f"{record.kind}/{k}": v for k, v in _numbers(record).items()} | {"step": record.step})
            run.finish()
        except Exception as error:  # a failure of W&B must not stop training
            if not self._has_timed_out:
                self._warn(f"Weights & Biases failed; continuing without it: {type(error).__name__}: {error}")

    def _start(self) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=60,
            finish_timeout=self.FINISH_S,
            console="off",
            silent=True,
            x_disable_meta=any(masked_argument(word) != word for word in sys.argv),  # it includes the command line
        )
        run = wandb.init(
            project=self._config.log.wandb_project,
            name=self._config.run.name,
            id=self.id,
            resume="allow",
            dir=str(self._folder),
            mode=self._config.log.wandb if self._config.log.wandb == "offline" else "online",
            config=self._config.to_dict(),
            settings=settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


def _service_pids() -> set[int]:
    """Return the process IDs of the W&B service processes that this process started."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = path.read_text(errors="replace").rpartition(")")
            if name.endswith("(wandb-core") and int(fields.split()[1]) == os.getpid():
                pids.add(int(path.parent.name))
    return pids


def _stored_id(folder: Path, restored: str | None) -> str:
    """Return the W&B run ID, created once and stored in the folder so that a resumed run continues its curves."""
    path = folder / "id"
    run_id = path.read_text() if path.exists() else ""
    if not run_id:  # no file, or an empty one because the disk was full
        run_id = restored or os.urandom(4).hex()
        write_atomically(path, run_id)
    return run_id


_PLOTTED = ("train", "eval", "norms")
"""Record kinds that are plotted over steps."""


def _numbers(record: Record) -> dict[str, float]:
    """Return the numeric fields of a record, with per-layer fields flattened to `grad_norm/<layer>`."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return {
        name: value
        for name, value in flat.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "time")
    }


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print_stderr(f"warning: {message}")


# ---------------------------------------------------------------------------------------------------------------
# All sinks of a run


LOG = "console.log"
"""Copy of the console output in the run folder."""
SAMPLES = "samples.txt"
"""File in the run folder for the samples generated from `log.prompts`."""


class Metrics:
    """The sinks of a run.  Only rank 0 has sinks; on other ranks, calls write nothing."""

    def __init__(self, config: RunConfig, is_main: bool) -> None:
        self._config = config
        self.clock = Clock()
        self.console: ConsoleSink | None = None
        """The console on rank 0, otherwise None."""
        if is_main:
            stream = cast(TextIO, NonBlockingStream(sys.stdout))
            self.console = ConsoleSink(config.train.steps, find_screen(stream), stream.close)
        self._log: ConsoleSink | None = None
        self._log_file: LogFile | None = None
        self._sinks: list[Sink] = []
        self._ledger = TimeLedger()
        self.before: dict[str, Any] = {}
        """Fields of the start record: lost steps and wall time of earlier attempts, and this attempt's clock."""
        self.latest: dict[str, Record] = {}
        """The last record of each kind, on rank 0; empty on other ranks."""
        self.wandb_id: str | None = None
        """ID of the run in Weights & Biases, or None before one exists.  The same on all ranks, and saved in
        checkpoints so that every attempt continues the same W&B run."""

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self.wandb_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wandb_id = state["wandb_id"]

    def open(self, path: Path, resumed_step: int) -> None:
        """Open all sinks, including the metrics file at `path`, for a run that continues after `resumed_step`."""
        if self.console is None:
            return
        file = JsonLines(path, resumed_step)
        before = dataclasses.asdict(file.before) if file.before.num_attempts else None
        clock = {"boot": self.clock.boot, "booted": self.clock.booted}
        self.before = {"lost_steps": file.lost_steps, "before": before, **clock}
        self._ledger.remember(file.ledger)
        log_file = self._log_file = LogFile(path.parent / LOG)
        self._log = ConsoleSink(self._config.train.steps, PlainScreen(cast(TextIO, log_file)), log_file.close)
        self._log.say(f"-- {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._sinks = [file, self.console, self._log]
        if self._config.log.prompts:
            self._sinks.append(SampleFile(path.parent / SAMPLES))
        if self._config.log.tensorboard:
            self._sinks.append(TensorBoard(path.parent / "tensorboard", resumed_step))
        if self._config.log.wandb != "off":
            sink = WandB(self._config, warn, self.wandb_id)
            self.wandb_id = sink.id
            self._sinks.append(sink)

    def go_back(self, step: int) -> None:
        """Drop the lines past `step` from the metrics file, because those steps will be repeated.

        The other sinks show the repeated steps twice.
        """
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.go_back(step)

    def move_to(self, folder: Path) -> None:
        """Continue the files in another folder, because their folder was renamed or deleted.

        Their contents are preserved.  TensorBoard event files and W&B's local files are not moved.
        """
        for sink in self._sinks:
            if isinstance(sink, (JsonLines, SampleFile)):
                sink.move_to(folder)
        if self._log_file is not None:
            self._log_file.move_to(folder / LOG)

    def write(self, record: Record) -> Record:
        """Send the record to all sinks, with a `time` field added (seconds since the epoch).

        Returns the record without that field.
        """
        if self._sinks:
            stamped = self.latest[record.kind] = Record(**record, time=self.clock.now())
            self._ledger.add(stamped)
            for sink in self._sinks:
                sink.write(stamped)
        return record

    def experience(self) -> RunHistory:
        """Return the history of saves and failures over all attempts, on rank 0; an empty one on other ranks."""
        return self._ledger.experience()

    def totals(self) -> dict[str, Any]:
        """Return the breakdown of wall time over all attempts, which is added to the end record."""
        self._ledger.add(Record(time=self.clock.now()))
        return self._ledger.total().fields()

    def start(self, facts: Mapping[str, str]) -> None:
        for console in self._consoles():
            console.start(facts)

    def say(self, text: str, style: str = "") -> None:
        for console in self._consoles():
            console.say(text, style)

    def _consoles(self) -> list[ConsoleSink]:
        return [console for console in (self.console, self._log) if console is not None]

    def progress(self, step: int) -> None:
        if self.console is not None:
            self.console.progress(step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks, self._log, self._log_file = [], None, None
