"""Faults in real runs: kills at a file operation; failures, signals and waits in the user's own code; small disks.

The recipes `mlp_faulty` and `llama_faulty` of custom_recipes.py have the Trainer below. A test names places in the run,
and what happens there:

    fault = Fault(tmp_path / "notes", {"forward 3 of rank 1": "SIGKILL"})
    start(folder, *RUN, variables=fault.variables)

Places, all on rank 0 unless they end with `of rank N`:

    start           before the ranks are connected          build           before the model is built
    data 3          the data of step 3 is read              forward 3       the loss of step 3 is computed
    backward 3      the embedding has its gradient          step 3          step 3 has ended
    evaluation 3    the loss of an evaluation               save 3          the state after step 3 is collected
    file 17         file operation 17 in the folder `below`, counted from 0 in each process

What happens there, once: `raise`, `hang`, `kill all` (every rank, with SIGKILL), `nan` (the loss is NaN), `poison` (a
weight becomes NaN), the name of a signal, which the rank sends to itself, or a shell command. With a `Gate`, the run
waits at a place.

File operations are the interpreter's audit events. They say nothing about who writes a checkpoint, or how.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.helpers.gate import pass_gate, wait_until
from trainer import RunConfig, Trainer
from trainer.metrics.record import Record

_VARIABLE = "MESHTRAINER_TEST_FAULT"

_FILE_EVENTS = (
    *("open", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"),
)


class Fault:
    """What happens where; see the module. In the folder `notes` each rank notes its process and its file operations."""

    def __init__(self, notes: Path, at: Mapping[str, str] | None = None, below: Path | None = None) -> None:
        self.notes, self.at, self.below = notes, dict(at or {}), below
        notes.mkdir(exist_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the run."""
        return {_VARIABLE: json.dumps([str(self.notes), self.at, str(self.below or "")])}

    def files(self, rank: int = 0) -> list[str]:
        """The file operations of a rank, in order: `os.rename /path`."""
        return (self.notes / f"files.{rank}").read_text().splitlines()


class Injected(RuntimeError):
    """The failure of `raise`."""


class _Places:
    """The places of this process, which has one Trainer after another."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        notes, self.at, below = json.loads(os.environ.get(_VARIABLE, '["", {}, ""]'))
        self.notes = Path(notes)
        if notes:
            (self.notes / f"pid.{self.rank}").write_text(str(os.getpid()))
        if below:
            self._below, self._num_files, self._lock = below, 0, threading.RLock()
            self._log = os.open(self.notes / f"files.{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sys.addaudithook(self._on_event)

    def reach(self, place: str, owner: Trainer | None = None) -> bool:
        """Return whether the loss is to be NaN here."""
        name = f"{place} of rank {self.rank}" if self.rank else place
        pass_gate(name)
        action = self.at.pop(name, "")
        if action == "nan":
            return True
        if action == "raise":
            raise OSError(errno.EIO, "fails on purpose") if place.startswith("file") else Injected(f"fails in {place}")
        if action == "hang":
            hang()
        elif action == "kill all":
            for path in self.notes.glob("pid.*"):
                if path.name != f"pid.{self.rank}":
                    os.kill(int(path.read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "poison":
            assert owner is not None
            weight = next(iter(owner.model.parameters())).detach()
            (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] = float("nan")
        elif action.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[action])
        elif action:
            subprocess.run(action, shell=True, check=True, capture_output=True)
        return False

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _FILE_EVENTS or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.fspath(arguments[0])
        if not path.startswith(self._below):
            return
        with self._lock:
            number = self._num_files
            self._num_files += 1
            os.write(self._log, f"{event} {path}\n".encode())
        self.reach(f"file {number}")


def hang() -> None:
    while True:
        time.sleep(1000)


_places: _Places | None = None


def reach(place: str, owner: Trainer | None = None) -> bool:
    """Let happen what the test has for this place of the run; return whether the loss is to be NaN."""
    global _places
    _places = _places or _Places()
    return _places.reach(place, owner)


class FaultyTrainer(Trainer):
    """Comes to the places in its methods, which are those that a user may override."""

    def __init__(self, config: RunConfig) -> None:
        reach("start")
        super().__init__(config)
        self.state.add("places", _Saved(self))
        tables = (module for module in self.model.modules() if isinstance(module, torch.nn.Embedding))
        next(tables).register_forward_hook(self._watch_gradient)

    def build_model(self, config: RunConfig | None = None) -> torch.nn.Module:
        reach("build")
        return super().build_model(config)

    def build_loader(self) -> Iterable[dict[str, torch.Tensor]]:
        assert _places is not None
        loader = super().build_loader()
        return _Loader(loader, self) if any(place.startswith("data") for place in _places.at) else loader

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            reach(f"evaluation {self.state.step}")
            return super().loss(batch)
        step = self.state.step + 1
        is_nan = reach(f"forward {step}")
        loss = super().loss(batch)
        return loss * float("nan") if is_nan else loss

    def on_step(self, record: Record) -> None:
        reach(f"step {record.step}", self)

    def _watch_gradient(self, table: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        step = self.state.step + 1

        def on_gradient(gradient: torch.Tensor) -> None:
            reach(f"backward {step}")

        if output.requires_grad:
            output.register_hook(on_gradient)


class RepeatingTrainer(FaultyTrainer):
    """Saves each checkpoint twice, as a loop of one's own may."""

    def on_step(self, record: Record) -> None:
        super().on_step(record)
        if record.step % self.config.checkpoint.every == 0:
            for _ in range(2):
                self.save_checkpoint(wait=True)


class _Loader:
    """A loader that comes to a place before each batch."""

    def __init__(self, loader: Iterable[dict[str, torch.Tensor]], owner: Trainer) -> None:
        self._loader, self._owner = loader, owner

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._loader:
            reach(f"data {self._owner.state.step + 1}")
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Saved:
    """State of the user's own, which is collected in every save."""

    def __init__(self, owner: Trainer) -> None:
        self._owner = owner

    def state_dict(self) -> dict[str, int]:
        reach(f"save {self._owner.state.step}")
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def processes_of(folder: Path) -> list[str]:
    """Return the processes whose command line names a run's folder: ranks that a launcher has started, say."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in words and path.parent.name != str(os.getpid()):
                found.append(words)
    return found


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    return caught is None or "State:\tZ" in status or bool(int(caught[1], 16) >> (number - 1) & 1)


def wait_until_it_catches(pid: int, number: int) -> None:
    """Wait for a process to have a handler for a signal: an interpreter that has only just begun has none."""
    wait_until(lambda: catches(pid, number), f"a handler of signal {number}")


# ---------------------------------------------------------------------------------------------------------------
# Storage


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of this size (`4m`), in memory; skips the test where that is not permitted, except in CI."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"mount is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> str:
    """Return a shell command that fills the disk of a folder, until its file `fill` is removed."""
    return f"head -c 99999999 /dev/zero > {folder}/fill || true"
