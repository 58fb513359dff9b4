"""Fault injection in real runs: counts their file operations, and kills, fails, slows or hangs them at a chosen one.

A run of the recipe `tests.helpers.custom_recipes:mlp_faulty` reads the environment variable `FAULT` (JSON) and
injects the fault that it describes; without the variable it is a plain run. Runs are real processes (see forked.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trainer.checkpoint.reader
import trainer.checkpoint.storage
import trainer.checkpoint.writer
import trainer.distributed.exchange
import trainer.experts.dispatch
import trainer.sequence.attention
from tests.helpers.forked import ForkedRanks, start_run
from tests.helpers.ranks import CommandResult
from trainer import Trainer
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.storage import LocalStorage
from trainer.checkpoint.writer import Checkpoints, Staging
from trainer.distributed.channel import Channel
from trainer.metrics.record import Record

VARIABLE = "FAULT"
PHASES = ("collect", "write", "publish", "prune", "load", "start")
"""The phases of a save in order, then those of a start."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject, and where."""

    kill: str = ""
    """Which ranks to kill: `one` or `all`; empty for other faults."""
    rank: int = 0
    """The rank on which it happens."""
    phase: str = ""
    number: int = -1
    """The number of the event within the phase."""
    at_step: int = -1
    """The step after which it happens, instead of at an event."""
    then: str = ""
    """What happens at `at_step` instead of a kill: `raise`, or the name of a signal that the rank sends to itself."""
    inside: str = ""
    """The function (a key of `_PLACES`) in which the rank sends itself the signal `then`, instead of after a step."""
    fail: str = ""
    """The function (a key of `_PLACES`) that raises."""
    hang: str = ""
    """The function (a key of `_PLACES`) that waits `hang_s`, or until the file `hang_until` exists, before its work."""
    hang_s: float = 0.0
    hang_until: str = ""
    first: int = 0
    last: int = 0
    """The first and last call that `fail`, `hang` and `inside` affect, counted from 0."""
    write_s: float = 0.0
    """Seconds by which to delay each write to a checkpoint file."""
    no_space_check: bool = False
    poison_step: int = -1
    """The step after which a weight becomes NaN."""
    step_s: float = 0.0
    """Seconds by which to delay each step."""
    commands: dict[str, str] = field(default_factory=dict)
    """Maps a step to the shell command that the rank runs after it."""
    log: str = ""
    """The folder in which each rank writes its events."""

    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


class _Injected(RuntimeError):
    """The error that a fault raises."""


_FAULT: Fault | None = None
_RANK = 0
_events: list[str] = []
_counts: dict[str, int] = {}
_calls: dict[str, int] = {}
_phase = threading.local()
_lock = threading.RLock()


def _install(fault: Fault) -> None:
    """Install the fault in this process; a process has only one."""
    global _FAULT, _RANK
    assert _FAULT is None
    _FAULT, _RANK = fault, int(os.environ.get("RANK", "0"))
    Path(fault.log, f"pid.{_RANK}").write_text(str(os.getpid()))
    for name, (owner, attribute) in _PLACES.items():
        _wrap(owner, attribute, lambda name=name: _fail_or_hang(name))
    take = Checkpoints.take_result

    def recording_take(self: Checkpoints, has_ended: bool = False) -> Any:
        result = take(self, has_ended)
        with open(Path(fault.log, f"results.{_RANK}"), "a") as file:
            file.write(json.dumps([result.step, result.error]) + "\n")
        return result

    Checkpoints.take_result = recording_take  # type: ignore[method-assign]
    for owner, attribute in ((os, "fsync"), (os, "preadv"), (Channel, "gather"), (Channel, "broadcast")):
        _wrap(owner, attribute, lambda attribute=attribute: _event(attribute))
    for owner, attribute in ((Staging, "copy"), (trainer.checkpoint.writer, "collect")):
        _wrap(owner, attribute, lambda attribute=attribute: _event(attribute), _event)
    for owner, attribute, phase in (
        (Checkpoints, "start", "collect"),
        (Checkpoints, "_save", "write"),
        (LocalStorage, "publish", "publish"),
        (Checkpoints, "_prune", "prune"),
        (Checkpoints, "_delete", "prune"),
        (CheckpointReader, "restore", "load"),
        (CheckpointReader, "load", "load"),
        (Trainer, "start", "start"),
    ):
        _in_phase(owner, attribute, phase)
    file = trainer.checkpoint.storage._SyncedFile
    write = file.write
    file.write = lambda self, data: _write(write, self, data)  # type: ignore[method-assign]
    if fault.no_space_check:
        LocalStorage.free_bytes = lambda self: None  # type: ignore[method-assign]
    sys.addaudithook(_audit)


_PLACES: dict[str, tuple[Any, str]] = {
    "collect": (trainer.checkpoint.writer, "collect"),
    "stage": (Staging, "copy"),
    "begin": (LocalStorage, "begin"),
    "write": (trainer.checkpoint.writer, "write_tensors"),
    "write_files": (trainer.checkpoint.writer, "write_files"),
    "finish": (Checkpoints, "_write_shared_files"),
    "publish": (LocalStorage, "publish"),
    "prune": (LocalStorage, "unpublish"),
    "delete": (LocalStorage, "delete"),
    "load": (trainer.checkpoint.reader, "read_tensors"),
    "attend": (trainer.sequence.attention, "gather_parts"),
    "attend backward": (trainer.distributed.exchange, "sum_parts"),
    "experts": (trainer.experts.dispatch, "exchange_rows"),
    "experts backward": (trainer.distributed.exchange, "exchange_rows"),
}
"""The functions that can fail or hang, by the operation that they perform."""


def _wrap(owner: Any, attribute: str, before: Callable[[], None], after: Callable[[str], None] | None = None) -> None:
    original = getattr(owner, attribute)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before()
        result = original(*arguments, **named)
        if after is not None:
            after(f"after {attribute}")
        return result

    setattr(owner, attribute, wrapped)


def _in_phase(owner: Any, attribute: str, phase: str) -> None:
    original = getattr(owner, attribute)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        outer, _phase.name = getattr(_phase, "name", ""), phase
        try:
            _event("begins")
            result = original(*arguments, **named)
            _event("ends")
            return result
        finally:
            _phase.name = outer

    setattr(owner, attribute, wrapped)


_NAMESPACE = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.listdir", "os.truncate"}


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if name in _NAMESPACE and isinstance(arguments[0], (str, os.PathLike)):
        _event(f"{name} {arguments[0]}")


def _write(write: Callable[..., int], file: Any, data: Any) -> int:
    fault = _FAULT
    assert fault is not None
    if fault.write_s:
        time.sleep(fault.write_s)
    view = memoryview(data).cast("B")
    _event(f"write {len(view)} bytes", torn=lambda: write(file, view[: len(view) // 2]))
    return write(file, data)


def _event(what: str, torn: Callable[[], object] | None = None) -> None:
    """Count one event, and kill the run if it is the chosen one."""
    phase = getattr(_phase, "name", "")
    if not phase:
        return
    fault = _FAULT
    assert fault is not None
    with _lock:
        number = _counts.get(phase, 0)
        _counts[phase] = number + 1
        _events.append(f"{phase} {what}")
        if fault.kill and fault.rank == _RANK and fault.phase == phase and fault.number == number:
            if torn is not None:
                torn()
            _kill(fault)


def _kill(fault: Fault) -> None:
    if fault.kill == "all":
        for path in Path(fault.log).glob("pid.*"):
            if path.name != f"pid.{_RANK}":
                os.kill(int(path.read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def _fail_or_hang(name: str) -> None:
    fault = _FAULT
    assert fault is not None
    if fault.rank != _RANK or name not in (fault.fail, fault.hang, fault.inside):
        return
    with _lock:
        number = _calls.get(name, 0)
        _calls[name] = number + 1
    if not fault.first <= number <= fault.last:
        return
    if name == fault.hang:
        time.sleep(fault.hang_s)
        while fault.hang_until and not os.path.exists(fault.hang_until):
            time.sleep(0.01)
    if name == fault.inside:
        os.kill(os.getpid(), signal.Signals[fault.then])
    if name == fault.fail:
        raise _Injected(f"{name} fails on purpose")


class FaultyTrainer(Trainer):
    """Injects the fault described by the environment variable FAULT."""

    def __init__(self, config: Any) -> None:
        if VARIABLE in os.environ and _FAULT is None:
            _install(Fault(**json.loads(os.environ[VARIABLE])))
        super().__init__(config)

    def on_step(self, record: Record) -> None:
        fault = _FAULT
        if fault is None:
            return
        time.sleep(fault.step_s)
        command = fault.commands.get(str(record.step))
        if command and fault.rank == self.world.rank:
            subprocess.run(command, shell=True, check=True, capture_output=True)
        if fault.poison_step == record.step and fault.rank == self.world.rank:
            parameter = next(iter(self.model.parameters()))
            parameter.to_local().detach()[0, 0] = float("nan")  # type: ignore[attr-defined]
        if fault.at_step == record.step and fault.rank == self.world.rank:
            if fault.kill:
                _kill(fault)
            if fault.then == "raise":
                raise _Injected(f"rank {fault.rank} fails on purpose at step {record.step}")
            os.kill(os.getpid(), signal.Signals[fault.then])

    def fit(self) -> int:
        try:
            return super().fit()
        finally:
            if _FAULT is not None:
                Path(_FAULT.log, f"events.{_RANK}").write_text("\n".join(_events))


class RepeatingTrainer(FaultyTrainer):
    """Saves each checkpoint a second time, from a custom loop, so that each step is published twice."""

    def fit(self) -> int:
        try:
            for record in self.steps():
                self.on_step(record)
                if record.step % self.config.checkpoint.every == 0:
                    for _ in range(2):
                        self.save_checkpoint(wait=True)
            self.lifecycle.end()
            return 0
        finally:
            if _FAULT is not None:
                Path(_FAULT.log, f"events.{_RANK}").write_text("\n".join(_events))


# ---------------------------------------------------------------------------------------------------------------
# Processes


@dataclass
class StartedRun(ForkedRanks):
    """A run on some ranks, each a separate process."""

    folder: Path = Path()

    def events_of(self, rank: int) -> list[str]:
        """Return the events of a rank in order, each with its phase. The run had a Fault and was not killed."""
        return (self.logs / f"events.{rank}").read_text().splitlines()

    def results_of(self, rank: int) -> list[tuple[int, str]]:
        """Return step and error of each save, as this rank received them. The run had a Fault."""
        path = self.logs / f"results.{rank}"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def ran(self, timeout_s: float = 240) -> CommandResult:
        """Wait for the end and return the finished command; all ranks must have the same exit code."""
        codes = self.wait(timeout_s)
        assert codes[0] is not None and set(codes) == {codes[0]}, f"exit codes {codes}\n{self.stderr}"  # noqa: PT018
        return CommandResult(codes[0], self.stdout, self.stderr, self.folder)


def start(
    folder: Path, *arguments: str, ranks: int = 1, fault: Fault | None = None, logs_in: Path | None = None
) -> StartedRun:
    """Start `python -m trainer.run ARGUMENTS run.dir=FOLDER` on forked ranks. Logs are written next to the folder."""
    logs = Path(tempfile.mkdtemp(prefix=f"logs-{folder.name}-", dir=logs_in or folder.parent))
    fault = dataclasses.replace(fault, log=str(logs)) if fault else None
    forked = start_run([*arguments, f"run.dir={folder}"], logs, ranks, fault.variables() if fault else {})
    return StartedRun(forked.processes, logs, folder=folder)
