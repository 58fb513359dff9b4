"""Manages the run folder: its owner, configuration and status, and the files of earlier attempts.

Only rank 0 writes these files, once the settings have been validated; if its ranks could not record how the run ended,
the launcher does (`record_end`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer.config import RunConfig
from trainer.config.stored import CONFIG
from trainer.errors import EXIT_FAILED, UserError, print_stderr, redact, setting_error
from trainer.files import local_path, write_and_sync, write_atomically
from trainer.metrics.record import find_boot_id

RECORD_FILES = (
    "metrics.jsonl",
    "metrics_superseded.jsonl",
    "console.log",
    "samples.txt",
    "trackers.json",
    "tensorboard",
    "wandb",
    "profile",
)
"""Files and folders, other than checkpoints, that are moved aside when a run starts over."""


class RunFolder:
    """The folder `run.dir`: its owner, `config.yaml` and `status.json`, and the files of earlier attempts."""

    def __init__(self, config: RunConfig, is_main: bool, comment: str = "") -> None:
        """comment: text to write above the configuration in `config.yaml`."""
        self.config, self.path, self.is_main = config, config.run_dir, is_main
        self._comment = comment
        self._locks = [FolderLock(self.path, "run.dir")]
        self._is_owned = False
        elsewhere = local_path(config.checkpoint.dir) if config.checkpoint.dir else None
        if elsewhere is not None and self.path not in (elsewhere, *elsewhere.parents):
            self._locks.append(FolderLock(elsewhere, "checkpoint.dir"))

    @property
    def checkpoints(self) -> Path:
        """The default folder for checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def previous_config(self) -> str | None:
        """The content of `config.yaml` (before `begin`, the previous attempt's); None if it cannot be read."""
        try:
            return (self.path / CONFIG).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def acquire(self) -> None:
        """Acquire the folder for this run; does nothing if this run owns it already, or on a rank other than 0.

        Raises UserError if another live run owns the folder or it is unusable.
        """
        if not self.is_main:
            return
        legal = {"run.dir": f"runs/{self.config.run.name}", "checkpoint.dir": None}
        for lock in self._locks:
            with _reporting_errors(lock.setting, lock.folder, legal[lock.setting]):
                lock.acquire()
        if not self._is_owned:
            with _reporting_errors("checkpoint.dir", Path(self.config.checkpoint.dir or self.path), None):
                self._make_parents()
        self._is_owned = True

    def release(self) -> None:
        """Release the folder for the next run.  Removes the folders that this run created and that are still empty."""
        self._is_owned = False
        if self.is_main:
            for lock in reversed(self._locks):
                lock.release()

    def _make_parents(self) -> None:
        """Create the folders between `run.dir` and a `checkpoint.dir` inside it.

        Done only when the run acquires its folder: saves create no parents, so that deleted folders stay deleted.
        """
        configured = self.config.checkpoint.dir
        checkpoint_dir = local_path(configured) if configured else None
        if checkpoint_dir is not None and self.path.absolute() in checkpoint_dir.parents:
            self._locks[0].make_folder(checkpoint_dir.parent)

    def run_reporting_errors(self, work: Callable[[], object]) -> None:
        """Run `work`; turn an OSError that it raises, such as for a full disk, into a UserError about `run.dir`."""
        with _reporting_errors("run.dir", self.path, f"runs/{self.config.run.name}"):
            work()

    def begin(self) -> None:
        """Write `config.yaml`."""
        if self.is_main:
            comment = "".join(f"# {line}\n" for line in self._comment.splitlines())
            write_atomically(self.path / CONFIG, comment + self.config.with_absolute_paths().to_yaml())

    def move_aside(self, names: Sequence[str]) -> Path | None:
        """Move those of the named files that exist to a new folder `previous_NNN`.  Returns that folder, or None.

        Deletes nothing.  If the metrics are moved, also copies the files that the new attempt will overwrite.
        """
        existing = [self.path / name for name in names if (self.path / name).exists()]
        if not existing:
            return None
        numbers = [path.name.removeprefix("previous_") for path in self.path.glob("previous_*")]
        target = self.path / f"previous_{1 + max((int(n) for n in numbers if n.isdecimal()), default=0):03d}"
        target.mkdir()
        for name in (CONFIG, "status.json") if self.metrics in existing else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self.path / name, target / name)
        for path in existing:
            shutil.move(path, target / path.name)
        return target

    def write_status(self, state: str, exit_code: int | None, step: int, reason: str) -> None:
        """Write `status.json`: `state` is running, finished, stopped or failed.

        Writes nothing unless this run owns the folder, so that it never changes the file of another run.
        """
        if self._is_owned:
            write_status(self.path, {"state": state, "exit_code": exit_code, "step": step, "reason": reason})

    def has_finished(self) -> bool:
        """Return whether `status.json` says that the run has finished."""
        try:
            return bool(json.loads((self.path / "status.json").read_text())["state"] == "finished")
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def clean(self) -> None:
        """Delete partially written files of killed attempts."""
        for name in ("config.yaml", "status.json", "metrics.jsonl"):
            for partial in self.path.glob(f".{name}.*"):
                partial.unlink()


@contextlib.contextmanager
def _reporting_errors(setting: str, folder: Path, legal: str | None) -> Iterator[None]:
    """Turn an OSError in the block into a UserError about the setting, with the file and the cause.

    legal: a value to suggest for the setting, or None.
    """
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename not in (None, str(folder)) else ""
        raise setting_error(setting, folder, f"cannot be used ({error.strerror or error}{where})", legal) from error


_RETRY_PAUSES_S = (0.2, 1.0)
"""Pauses before further attempts to write the status: storage may be unreachable for a moment."""


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Write `status.json`.  A failure is only printed, so that a full disk does not hide the run's own message."""
    text = json.dumps({**status, "reason": redact(str(status["reason"]))}) + "\n"
    for pause_s in (*_RETRY_PAUSES_S, None):
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


def record_end(run_dir: Path, initial_status: Mapping[str, Any], last_step: int, reason: str) -> None:
    """Write to `status.json` how the run ended.  Called by a launcher after all its ranks have exited.

    Writes nothing if a live run owns the folder, or if the file belongs to an earlier attempt.

    initial_status: the content of `status.json` before the ranks were started.
    last_step: the last recorded step.
    """
    status = read_status(run_dir)
    has_failed = status.get("state") == "failed" and status != initial_status
    if (status.get("state") == "running" or has_failed) and not is_owned(run_dir):
        step = status.get("step") if has_failed else last_step
        write_status(run_dir, {"state": "failed", "exit_code": EXIT_FAILED, "step": step, "reason": reason})


class FolderLock:
    """A lock on a run's folder: at most one process on any node holds it.  The lock of a dead process is broken.

    A file `.owner.json` identifies the owner.  An owner on this machine (the same host name, boot and PID namespace) is
    alive if its process exists.  An owner on another node in the same Slurm job is alive unless the job was requeued
    since.  Any other owner is alive if its heartbeat, the modification time of the file, is recent compared with that
    of a file written now, which avoids comparing the clocks of two nodes.
    """

    NAME = ".owner.json"
    HEARTBEAT_S, STALE_S = 5.0, 30.0
    """Seconds between heartbeats, and the age in seconds at which the last heartbeat means that the owner is dead."""

    def __init__(self, folder: Path, setting: str) -> None:
        self.folder, self.path, self.setting = folder, folder / self.NAME, setting
        self._identity = {**_process_identity(), "token": uuid.uuid4().hex}
        self._created_folders: list[Path] = []
        self._stop_event = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquire the folder, unless this run owns it already.

        Waits up to `STALE_S` seconds for the heartbeat of an owner on another node.

        Raises UserError that describes the owner if it is alive, and OSError if the folder cannot be written.
        """
        if self._heartbeat is not None:
            return
        self._created_folders = []
        self.make_folder(self.folder)
        self._identity |= _folder_identity(self.folder)
        temporary = self.folder / f"{self.NAME}.{self._identity['token']}"
        try:
            write_and_sync(temporary, json.dumps(self._identity))
            while not _link(temporary, self.path):
                self._wait_until_owner_is_dead(temporary)
        finally:
            temporary.unlink(missing_ok=True)
        for path in self.folder.glob(f"{self.NAME}.*"):  # temporary files of dead claimants
            claimant = _read_owner(path)
            if claimant is None or (
                _pid_scope(claimant) == _pid_scope(self._identity)
                and _process_start_time(claimant["pid"]) != claimant["started"]
            ):
                path.unlink(missing_ok=True)
        self._heartbeat = threading.Thread(target=self._run_heartbeat, name="owner", daemon=True)
        self._heartbeat.start()

    def make_folder(self, folder: Path) -> None:
        """Create this folder or one inside it, and its parents; `release` removes those that are still empty."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._created_folders = [*missing, *self._created_folders]

    def release(self) -> None:
        if self._heartbeat is None:
            return
        self._stop_event.set()
        if self._heartbeat is not threading.current_thread():
            self._heartbeat.join()
        self._heartbeat = None
        with contextlib.suppress(OSError):  # if this fails, the next run finds that this process is dead
            if self._owner() == self._identity:
                self.path.unlink(missing_ok=True)
                for folder in self._created_folders:
                    folder.rmdir()  # fails unless it is empty

    def _wait_until_owner_is_dead(self, temporary: Path) -> None:
        """Wait until the owner counts as dead, then remove its file.  Raises UserError if the owner is alive."""
        owner, first_heartbeat = self._owner(), self._last_heartbeat()
        while not self._is_dead(owner, temporary):
            is_remote = owner is None or _pid_scope(owner) != _pid_scope(self._identity)
            if not is_remote or self._last_heartbeat() != first_heartbeat:
                raise UserError(
                    f"{self.setting}={self.folder}: another run owns it: {_describe_owner(owner)}\n  wait for it, stop "
                    f"it, or choose another {self.setting}"
                )
            time.sleep(0.5)
        # If several processes wait for the same owner, one of them moves the file, and the others find it missing.
        stale = self.path.with_name(f"{self.NAME}.stale-{self._identity['token']}")
        try:
            os.rename(self.path, stale)
        except FileNotFoundError:
            return
        if _read_owner(stale) != owner:  # another process was faster, and is alive
            _link(stale, self.path)
        stale.unlink()

    def _is_dead(self, owner: dict[str, Any] | None, temporary: Path) -> bool:
        last_heartbeat = self._last_heartbeat()
        if last_heartbeat is None:
            return True
        if owner is not None and _pid_scope(owner) == _pid_scope(self._identity):
            is_self = owner["pid"] == self._identity["pid"]
            return is_self or _is_copied(owner, self.folder) or _process_start_time(owner["pid"]) != owner["started"]
        if owner is not None and owner["job"] and owner["job"] == self._identity["job"]:
            # If Slurm has requeued the job, it has ended the processes of the earlier attempt.
            return bool(owner["restarts"] < self._identity["restarts"])
        os.utime(temporary)
        return temporary.stat().st_mtime - last_heartbeat > self.STALE_S

    def _last_heartbeat(self) -> float | None:
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return None

    def _owner(self) -> dict[str, Any] | None:
        return _read_owner(self.path)

    def _run_heartbeat(self) -> None:
        while not self._stop_event.wait(self.HEARTBEAT_S):
            with contextlib.suppress(OSError):  # the file system may recover
                owner = self._owner()
                if owner == self._identity:
                    os.utime(self.path)
                elif owner is not None and owner["pid"] != self._identity["pid"]:
                    self._exit_taken_over(owner)

    def _exit_taken_over(self, owner: dict[str, Any]) -> NoReturn:
        """Exit, because this process was suspended for so long that another run has taken over the folder."""
        print_stderr(
            f"error: {self.setting}={self.folder}: another run has taken it over ({_describe_owner(owner)}), because "
            f"this one wrote no heartbeat for {self.STALE_S:.0f} s\n  this run ends here, without saving; the other "
            "one continues from the newest checkpoint"
        )
        os._exit(EXIT_FAILED)


def _describe_owner(owner: Mapping[str, Any] | None) -> str:
    """Describe the process in an owner file."""
    if owner is None:
        return "a process"
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    since = f" since {owner['since']}" if owner.get("since") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{job}{since}"


def is_owned(folder: Path) -> bool:
    """Return whether the folder has an owner that seems to be alive.  For reports, not for acquiring the folder.

    Compares the heartbeat of an owner on another node with this node's clock.
    """
    path = folder / FolderLock.NAME
    owner = _read_owner(path)
    if owner is not None and _pid_scope(owner) == _pid_scope(_process_identity()):
        return _process_start_time(owner["pid"]) == owner["started"] and not _is_copied(owner, folder)
    try:
        return time.time() - path.stat().st_mtime < FolderLock.STALE_S
    except OSError:
        return False


def _link(source: Path, target: Path) -> bool:
    """Hard-link `source` to `target`; return False if `target` exists.  Atomic, even on NFS."""
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


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and set(_process_identity()) <= set(owner) else None


def _process_identity() -> dict[str, Any]:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "boot": find_boot_id(),
        "namespace": namespace,
        "pid": os.getpid(),
        "started": _process_start_time(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _folder_identity(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder.resolve()), "inode": folder.stat().st_ino}


def _is_copied(owner: dict[str, Any], folder: Path) -> bool:
    """Return whether the owner file was copied, together with its run folder, from another folder on this machine."""
    return all(name in owner and owner[name] != value for name, value in _folder_identity(folder).items())


def _pid_scope(owner: dict[str, Any]) -> tuple[Any, ...]:
    """Return the scope of a PID: the machine since its last boot, and the PID namespace (container)."""
    return owner["host"], owner["boot"], owner["namespace"]


def _process_start_time(pid: int) -> str:
    """Return the start time of a process in kernel ticks; empty if there is no such process or it is a zombie.

    Without /proc, returns "alive" for any process that exists.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "alive"
    return "" if fields[0] in ("Z", "X") else fields[19]
