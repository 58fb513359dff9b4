"""The run folder: its owner, configuration and status, and the files of earlier attempts.

Only rank 0 writes here, and only after the run's settings have been validated.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from trainer.config import RunConfig
from trainer.config.load import CONFIG
from trainer.errors import EXIT_FAILED, UserError, masked, print_stderr, redact, setting_error
from trainer.files import find_folder, write_and_sync, write_atomically
from trainer.metrics.record import find_boot

RECORD = (
    *("metrics.jsonl", "metrics_superseded.jsonl", "console.log", "samples.txt", "trackers.json"),
    *("tensorboard", "wandb", "profile"),
)
"""Files, other than checkpoints, that are moved aside when a run starts over."""


@dataclass(frozen=True)
class FolderLoss:
    """A folder of the run that is no longer at its configured path."""

    setting: str
    folder: Path
    what: str
    """What happened to it, such as "was deleted"."""
    moved_to: Path | None = None
    """The folder's new path, if it was renamed."""

    def __str__(self) -> str:
        return f"{self.setting}={self.folder}: {self.what} while the run was training in it"


class RunFolder:
    """The folder `run.dir`: everything in it except metrics and checkpoints."""

    def __init__(self, config: RunConfig, is_main: bool, comment: str = "") -> None:
        """`comment` is written above the configuration in `config.yaml`."""
        self.config, self.path, self.is_main = config, config.run_dir, is_main
        self._comment = comment
        self._locks = [FolderLock(self.path, "run.dir")]
        self._is_owned = False
        self.loss: FolderLoss | None = None
        """The first folder of this run that was deleted, renamed or replaced.  On rank 0 only."""
        self.has_moved = False
        """True once the run writes elsewhere because of a loss."""
        self.checkpoint_dir = config.checkpoint.dir
        """The folder for checkpoints; None for one inside the run folder."""
        elsewhere = find_folder(config.checkpoint.dir) if config.checkpoint.dir else None
        if elsewhere is not None and self.path not in (elsewhere, *elsewhere.parents):
            self._locks.append(FolderLock(elsewhere, "checkpoint.dir"))
        for owner in self._locks:
            owner.on_loss = self._note_loss

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def previous_config(self) -> str | None:
        """Content of `config.yaml`, which until `begin` is that of the previous attempt; None if there is none."""
        try:
            return (self.path / CONFIG).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def acquire(self) -> None:
        """Acquire the folder for this run.  Raises UserError if a live run owns it, or it cannot be used."""
        if not self.is_main:
            return
        legal = {"run.dir": f"runs/{self.config.run.name}", "checkpoint.dir": None}
        for owner in self._locks:
            with _usable(owner.setting, owner.folder, legal[owner.setting]):
                owner.acquire()
        if not self._is_owned:
            with _usable("checkpoint.dir", Path(self.checkpoint_dir or self.path), None):
                self._make_parents()
        self._is_owned = True

    def release(self) -> None:
        """Release the folder for the next run.  Folders that were created and are still empty are removed."""
        self._is_owned = False
        if self.is_main:
            for owner in reversed(self._locks):
                owner.release()

    def look(self) -> FolderLoss | None:
        """Check that the run's folders still exist; return the first loss, and print it once.

        Always None except on rank 0.
        """
        for owner in self._locks if self._is_owned else ():
            if self.loss is None and (loss := owner.look()) is not None:
                self._note_loss(loss)
        return self.loss

    def _note_loss(self, loss: FolderLoss) -> None:
        """Remember and print the first loss.  On rank 0, called by the main thread or the heartbeat thread."""
        if self.loss is None:
            self.loss = loss
            print_stderr(f"warning: {loss}; the run stops after this step and saves its state elsewhere")

    def move(self) -> None:
        """Move the run after a loss: to the folder's new name if it was renamed, otherwise to a new folder next to it.

        On rank 0.  Raises OSError or UserError if that folder cannot be used.
        """
        for number, owner in enumerate(self._locks):
            loss = owner.look()
            if loss is None:
                continue
            if loss.moved_to is not None:
                owner.follow(loss.moved_to)
            else:
                owner.release()
                owner = self._locks[number] = FolderLock(_free_name(loss.folder), loss.setting)
                owner.acquire()
            checkpoint_dir = find_folder(self.checkpoint_dir) if self.checkpoint_dir else None
            if checkpoint_dir is not None and loss.folder.absolute() in (checkpoint_dir, *checkpoint_dir.parents):
                self.checkpoint_dir = str(owner.folder / checkpoint_dir.relative_to(loss.folder.absolute()))
            if loss.setting == "run.dir":
                self.path = owner.folder
                if loss.moved_to is None:
                    self._make_parents()
                    self.begin()
        self.has_moved = True

    def adopt(self, path: Path, checkpoint_dir: str | None) -> None:
        """Use the folders that rank 0 has moved the run to."""
        self.path, self.checkpoint_dir, self.has_moved = path, checkpoint_dir, True

    def _make_parents(self) -> None:
        """Create the folders between `run.dir` and a `checkpoint.dir` inside it.

        This happens once, when the run acquires its folder.  Saves create no parents, so that a folder that was deleted
        stays deleted.
        """
        checkpoint_dir = find_folder(self.checkpoint_dir) if self.checkpoint_dir else None
        if checkpoint_dir is not None and self.path.absolute() in checkpoint_dir.parents:
            self._locks[0].make(checkpoint_dir.parent)

    def using(self, work: Callable[[], object]) -> None:
        """Run `work`, and turn errors of this folder, such as a full disk, into UserError."""
        with _usable("run.dir", self.path, f"runs/{self.config.run.name}"):
            work()

    def begin(self) -> None:
        """Write `config.yaml`."""
        if self.is_main:
            comment = "".join(f"# {line}\n" for line in self._comment.splitlines())
            config = self.config.with_absolute_paths()
            if self.path != self.config.run_dir:
                config = replace(
                    config,
                    run=replace(config.run, dir=str(self.path)),
                    checkpoint=replace(config.checkpoint, dir=self.checkpoint_dir and masked(self.checkpoint_dir)),
                )
            write_atomically(self.path / CONFIG, comment + config.to_yaml())

    def move_aside(self, names: Sequence[str]) -> Path | None:
        """Move files that the new attempt does not continue into a folder `previous_NNN`; return that folder.

        Nothing is deleted.  If the metrics are moved, files that the new attempt will overwrite are copied along.
        """
        existing = [self.path / name for name in names if (self.path / name).exists()]
        if not existing:
            return None
        taken = [path.name.removeprefix("previous_") for path in self.path.glob("previous_*")]
        aside = self.path / f"previous_{1 + max((int(n) for n in taken if n.isdecimal()), default=0):03d}"
        aside.mkdir()
        for name in (CONFIG, "status.json") if self.metrics in existing else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self.path / name, aside / name)
        for path in existing:
            shutil.move(path, aside / path.name)
        return aside

    def write_status(self, state: str, exit_code: int | None, step: int, reason: str) -> None:
        """Write `status.json`: `state` is running, finished, stopped or failed.

        Nothing is written unless this run owns the folder, so that another run's file is never changed.
        """
        self.look()
        if self._is_owned and (self.loss is None or self.loss.setting != "run.dir" or self.has_moved):
            write_status(self.path, {"state": state, "exit_code": exit_code, "step": step, "reason": reason})

    def has_finished(self) -> bool:
        """Return whether `status.json` says that the run has finished."""
        try:
            return bool(json.loads((self.path / "status.json").read_text())["state"] == "finished")
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def clean(self) -> None:
        """Delete the partially written files of attempts that were killed."""
        for name in ("config.yaml", "status.json", "metrics.jsonl"):
            for partial in self.path.glob(f".{name}.*"):
                partial.unlink()


@contextlib.contextmanager
def _usable(setting: str, folder: Path, legal: str | None) -> Iterator[None]:
    """Turn OSError inside the block into a UserError about the setting, with the file and the reason."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename not in (None, str(folder)) else ""
        raise setting_error(setting, folder, f"cannot be used ({error.strerror or error}{where})", legal) from error


def _free_name(folder: Path) -> Path:
    """Return an unused name next to `folder`, for rescuing the state of a run that has lost it."""
    names = (f"{folder.name}-rescued{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


_PAUSES_S = (0.2, 1.0)
"""Pauses before retries of writing the status, since storage may be unreachable for a moment."""


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Write `status.json`.  A failure is only printed, so that a full disk does not mask the run's own message."""
    text = json.dumps({**status, "reason": redact(str(status["reason"]))}) + "\n"
    for pause_s in (*_PAUSES_S, None):
        try:
            write_atomically(run_dir / "status.json", text)
            return
        except OSError as error:
            if pause_s is None:
                print_stderr(f"warning: {run_dir}/status.json cannot be written: {error}")
            else:
                time.sleep(pause_s)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of `status.json`, or an empty dictionary if it cannot be read."""
    try:
        status = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def note_end(run_dir: Path, before: Mapping[str, Any], reached: int, reason: str) -> None:
    """Write how the run ended into `status.json`, for a launcher whose ranks have all exited.

    reached: the last recorded step.  before: the content of `status.json` when the ranks were started; if it is
    unchanged and not `running`, it is an earlier attempt's and is left alone, as is everything if a live run owns the
    folder.
    """
    status = read_status(run_dir)
    failed_now = status.get("state") == "failed" and status != before
    if (status.get("state") == "running" or failed_now) and not is_owned(run_dir):
        step = status.get("step") if failed_now else reached
        write_status(run_dir, {"state": "failed", "exit_code": EXIT_FAILED, "step": step, "reason": reason})


class FolderLock:
    """A lock on a run's folder, held by one process at a time on any node, and broken if its owner is dead.

    A file `.owner.json` identifies the owner.  On the same machine its process is looked up.  On another machine (or on
    this one before a reboot, since host names are not unique) its heartbeat counts: the modification time of the file,
    compared with that of a file written now, so that clocks are not compared.
    """

    NAME = ".owner.json"
    BEAT_S, STALE_S = 5.0, 30.0
    LOOK_S = 1.0
    """Interval at which the owner checks that the folder still exists."""
    _AGAIN_S = 0.2
    """Delay before a missing folder is checked again, since it may be in the middle of being replaced."""

    def __init__(self, folder: Path, setting: str) -> None:
        self.folder, self.path, self.setting = folder, folder / self.NAME, setting
        self._own = {**_this_process(), "token": uuid.uuid4().hex}
        self._made: list[Path] = []
        self._stopped = threading.Event()
        self._beat: threading.Thread | None = None
        self._descriptor = -1
        """An open descriptor of the folder, which stays valid if the folder is renamed."""
        self.on_loss: Callable[[FolderLoss], None] = lambda loss: None
        """Called on another thread if the folder was deleted, renamed or replaced."""

    def acquire(self) -> None:
        """Acquire the folder.  Waits up to `STALE_S` for the heartbeat of an owner on another node.

        Raises UserError, naming the owner, if it is alive, and OSError if the folder cannot be written.
        """
        if self._beat is not None:
            return
        self._made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own |= _this_folder(self.folder)
        mine = self.folder / f"{self.NAME}.{self._own['token']}"
        try:
            write_and_sync(mine, json.dumps(self._own))
            while not _link(mine, self.path):
                self._wait_for_death(mine)
        finally:
            mine.unlink(missing_ok=True)
        for path in self.folder.glob(f"{self.NAME}.*"):  # temporary files of claimants: those of live ones stay
            other = _parse(path)
            if other is None or (_where(other) == _where(self._own) and _start_of(other["pid"]) != other["started"]):
                path.unlink(missing_ok=True)
        self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._beat = threading.Thread(target=self._keep_alive, name="owner", daemon=True)
        self._beat.start()

    def make(self, folder: Path) -> None:
        """Create a folder inside this one, and its parents; `release` removes those that are still empty."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._made = [*missing, *self._made]

    def release(self) -> None:
        if self._beat is None:
            return
        self._stopped.set()
        if self._beat is not threading.current_thread():
            self._beat.join()
        self._beat = None
        with contextlib.suppress(OSError):  # if the folder is not writable, the next run sees that this process is gone
            if self._read() == self._own:
                self.path.unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()  # fails unless it is empty
        os.close(self._descriptor)
        self._descriptor = -1

    def look(self) -> FolderLoss | None:
        """Return what happened to the folder, or None if it is still in place.

        Unreachable storage is not a loss, since it may recover.
        """
        if self._descriptor < 0 or self._read() == self._own:
            return None
        if self._is_in_place():
            return None
        time.sleep(self._AGAIN_S)
        if self._is_in_place():
            return None
        try:
            is_deleted = os.fstat(self._descriptor).st_nlink == 0
        except OSError:  # deleted on another node
            is_deleted = True
        moved_to = None if is_deleted else self._find()
        what = "was deleted" if is_deleted else "is no longer there (was its disk unmounted?)"
        if moved_to is not None:
            what = f"was renamed to {moved_to}"
        elif os.path.lexists(self.folder):
            what += ", and something else has its name"
        return FolderLoss(self.setting, self.folder, what, moved_to)

    def _is_in_place(self) -> bool:
        """Return whether the acquired folder is still at its path."""
        try:
            there, own = os.stat(self.folder), os.fstat(self._descriptor)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        return os.path.samestat(there, own)

    def _find(self) -> Path | None:
        """Return the current path of the folder, or None if it is unknown."""
        with contextlib.suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            if os.path.samestat(path.stat(), os.fstat(self._descriptor)):
                return path
        return None

    def follow(self, folder: Path) -> None:
        """Continue with the folder under its new name `folder`."""
        self.folder, self.path, self._made = folder, folder / self.NAME, []

    def _wait_for_death(self, mine: Path) -> None:
        """Return once the owner is dead and its file has been removed.  Raises UserError if the owner is alive."""
        owner, first_beat = self._read(), self._last_beat()
        while not self._is_dead(owner, mine):
            is_remote = owner is None or _where(owner) != _where(self._own)
            if not is_remote or self._last_beat() != first_beat:
                raise UserError(
                    f"{self.setting}={self.folder}: another run owns it: {_name(owner)}\n  wait for it, stop "
                    f"it, or choose another {self.setting}"
                )
            time.sleep(0.5)
        # If several processes wait for the same owner, one of them moves the file and the others find it gone.
        moved = self.path.with_name(f"{self.NAME}.stale-{self._own['token']}")
        try:
            os.rename(self.path, moved)
        except FileNotFoundError:
            return
        if _parse(moved) != owner:  # another process was faster, and is alive
            _link(moved, self.path)
        moved.unlink()

    def _is_dead(self, owner: dict[str, Any] | None, mine: Path) -> bool:
        last_beat = self._last_beat()
        if last_beat is None:
            return True
        if owner is not None and _where(owner) == _where(self._own):
            is_self = owner["pid"] == self._own["pid"]
            return is_self or _is_copied(owner, self.folder) or _start_of(owner["pid"]) != owner["started"]
        if owner is not None and owner["job"] and owner["job"] == self._own["job"]:
            return bool(owner["restarts"] < self._own["restarts"])  # Slurm requeued the job: its old processes are gone
        os.utime(mine)
        return mine.stat().st_mtime - last_beat > self.STALE_S

    def _last_beat(self) -> float | None:
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return None

    def _read(self) -> dict[str, Any] | None:
        return _parse(self.path)

    def _keep_alive(self) -> None:
        has_told, num_missed, beat_at = False, 0, time.monotonic() + self.BEAT_S
        while not self._stopped.wait(self.LOOK_S):
            try:
                owner = self._read()
                if owner != self._own and not has_told:
                    loss = self.look()
                    if loss is not None:
                        has_told = True
                        self.on_loss(loss)
                    elif owner is None:
                        num_missed += 1
                        if num_missed % 2 == 0:  # not immediately: the entire folder may be being deleted
                            self._claim_again()
                    elif owner.get("pid") != self._own["pid"] and self._read() == owner:
                        # Read again: meanwhile this run may have moved out of a folder whose name another run took.
                        self._give_way(owner)
                elif owner == self._own and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self.BEAT_S
                    os.utime(self.path)
            except OSError:  # the file system may recover
                continue

    def _claim_again(self) -> None:
        """Restore the owner file, which somebody deleted while the folder still exists."""
        if not self.path.exists():
            mine = self.folder / f"{self.NAME}.{self._own['token']}"
            try:
                write_and_sync(mine, json.dumps(self._own))
                _link(mine, self.path)
            finally:
                mine.unlink(missing_ok=True)

    def _give_way(self, owner: dict[str, Any]) -> NoReturn:
        """End this process, because it was suspended for so long that another run has taken over the folder."""
        print_stderr(
            f"error: {self.setting}={self.folder}: another run has taken it over ({_name(owner)}), because this one "
            f"gave no sign of life for {self.STALE_S:.0f} s\n  this run ends here, without saving; the other one "
            "continues from the newest checkpoint"
        )
        os._exit(EXIT_FAILED)


def _name(owner: Mapping[str, Any] | None) -> str:
    """Describe the process in an owner file."""
    if owner is None:
        return "a process"
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    since = f" since {owner['since']}" if owner.get("since") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{job}{since}"


def is_owned(folder: Path) -> bool:
    """Return whether the folder's owner seems to be alive.  For reports, not for acquiring the folder.

    The heartbeat of a process on another node is compared with this node's clock.
    """
    path = folder / FolderLock.NAME
    owner = _parse(path)
    if owner is not None and _where(owner) == _where(_this_process()):
        return _start_of(owner["pid"]) == owner["started"] and not _is_copied(owner, folder)
    try:
        return time.time() - path.stat().st_mtime < FolderLock.STALE_S
    except OSError:
        return False


def _link(source: Path, target: Path) -> bool:
    """Hard-link `source` to `target`; return False if `target` exists.  Atomic, also on NFS."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with open(target, "x") as file:
                file.write(source.read_text())
        except FileExistsError:
            return False
    return True


def _parse(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and set(_this_process()) <= set(owner) else None


def _this_process() -> dict[str, Any]:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "boot": find_boot(),
        "namespace": namespace,
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _this_folder(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder.resolve()), "inode": folder.stat().st_ino}


def _is_copied(owner: dict[str, Any], folder: Path) -> bool:
    """Return whether the owner file was copied with its run folder: its owner, on this machine, has the original."""
    return all(name in owner and owner[name] != value for name, value in _this_folder(folder).items())


def _where(owner: dict[str, Any]) -> tuple[Any, ...]:
    """Return the scope of a PID: the machine since its last boot, and the PID namespace (container)."""
    return owner["host"], owner["boot"], owner["namespace"]


def _start_of(pid: int) -> str:
    """Return a process's start time in kernel ticks; empty if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "alive"
    return "" if fields[0] in ("Z", "X") else fields[19]
