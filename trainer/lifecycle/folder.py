"""Manages the run folder: its owner, configuration and status, and the files of earlier attempts.

If the folder is deleted, renamed or replaced during the run, the run saves its state in another one and ends
(`Relocation`).  Only rank 0 writes these files, once the settings have been validated; if its ranks could not record
how the run ended, the launcher does (`record_end`).
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
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from trainer.checkpoint.storage import open_storage
from trainer.config import RunConfig
from trainer.config.stored import CONFIG
from trainer.errors import EXIT_FAILED, TrainingFailed, UserError, as_typed, print_stderr, redact, setting_error
from trainer.files import local_path, write_and_sync, write_atomically
from trainer.metrics.record import find_boot_id

if TYPE_CHECKING:
    from trainer.checkpoint.saves import Checkpoints
    from trainer.distributed.world import World
    from trainer.metrics.writers import Metrics

Result = TypeVar("Result")

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


@dataclass(frozen=True)
class FolderLoss:
    """Describes how the run lost one of its folders, which is no longer at its configured path."""

    setting: str
    """The setting that names the folder: `run.dir` or `checkpoint.dir`."""
    folder: Path
    event: str
    """What happened, such as "was deleted"."""
    moved_to: Path | None = None
    """The folder's new path; None if it was not renamed or the path is unknown."""

    def __str__(self) -> str:
        return f"{self.setting}={self.folder}: {self.event} while the run was training in it"


class RunFolder:
    """The folder `run.dir`: its owner, `config.yaml` and `status.json`, and the files of earlier attempts."""

    def __init__(self, config: RunConfig, is_main: bool, comment: str = "") -> None:
        """comment: text to write above the configuration in `config.yaml`."""
        self.config, self.path, self.is_main = config, config.run_dir, is_main
        self._comment = comment
        self._locks = [FolderLock(self.path, "run.dir")]
        self._is_owned = False
        self.loss: FolderLoss | None = None
        """The first loss of one of this run's folders; None if there was none, and on all ranks except rank 0."""
        self.has_moved = False
        """True once the run writes elsewhere because a folder was lost; see `Relocation`."""
        self.checkpoint_dir = config.checkpoint.dir
        """The folder or URL for checkpoints; None for the default, `checkpoints` in the run folder."""
        elsewhere = local_path(config.checkpoint.dir) if config.checkpoint.dir else None
        if elsewhere is not None and self.path not in (elsewhere, *elsewhere.parents):
            self._locks.append(FolderLock(elsewhere, "checkpoint.dir"))
        for lock in self._locks:
            lock.on_loss = self._record_loss

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
            with _reporting_errors("checkpoint.dir", Path(self.checkpoint_dir or self.path), None):
                self._make_parents()
        self._is_owned = True

    def release(self) -> None:
        """Release the folder for the next run.  Removes the folders that this run created and that are still empty."""
        self._is_owned = False
        if self.is_main:
            for lock in reversed(self._locks):
                lock.release()

    def find_loss(self) -> FolderLoss | None:
        """Check that the run's folders still exist.  Returns the first loss, which is printed once, or None.

        Returns None on all ranks but rank 0.
        """
        for lock in self._locks if self._is_owned else ():
            if self.loss is None and (loss := lock.find_loss()) is not None:
                self._record_loss(loss)
        return self.loss

    def _record_loss(self, loss: FolderLoss) -> None:
        """Record and print the first loss.  Called on rank 0, by the main thread or the heartbeat thread."""
        if self.loss is None:
            self.loss = loss
            print_stderr(f"warning: {loss}; the run stops after this step and saves its state elsewhere")

    def move(self) -> None:
        """Move the run after a loss: to the renamed folder, otherwise to a new folder next to the old path.

        Rank 0 only.  Raises OSError or UserError if the new place cannot be used.
        """
        for index, lock in enumerate(self._locks):
            loss = lock.find_loss()
            if loss is None:
                continue
            if loss.moved_to is not None:
                lock.follow(loss.moved_to)
            else:
                lock.release()
                lock = self._locks[index] = FolderLock(_rescue_folder(loss.folder), loss.setting)
                lock.acquire()
            checkpoint_dir = local_path(self.checkpoint_dir) if self.checkpoint_dir else None
            if checkpoint_dir is not None and loss.folder.absolute() in (checkpoint_dir, *checkpoint_dir.parents):
                self.checkpoint_dir = str(lock.folder / checkpoint_dir.relative_to(loss.folder.absolute()))
            if loss.setting == "run.dir":
                self.path = lock.folder
                if loss.moved_to is None:
                    self._make_parents()
                    self.begin()
        self.has_moved = True

    def _make_parents(self) -> None:
        """Create the folders between `run.dir` and a `checkpoint.dir` inside it.

        Done only when the run acquires its folder: saves create no parents, so that deleted folders stay deleted.
        """
        checkpoint_dir = local_path(self.checkpoint_dir) if self.checkpoint_dir else None
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
            config = self.config.with_absolute_paths()
            if self.path != self.config.run_dir:
                config = replace(
                    config,
                    run=replace(config.run, dir=str(self.path)),
                    checkpoint=replace(config.checkpoint, dir=self.checkpoint_dir),
                )
            write_atomically(self.path / CONFIG, comment + config.to_yaml())

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
        self.find_loss()
        if self._is_owned and (self.loss is None or self.loss.setting != "run.dir" or self.has_moved):
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


def _rescue_folder(folder: Path) -> Path:
    """Return an unused path next to `folder`, for the state of a run that has lost this folder."""
    names = (f"{folder.name}-rescued{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


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
    CHECK_S = 1.0
    """Seconds between the owner's checks that the folder still exists."""
    _RECHECK_S = 0.2
    """Seconds until a missing folder is checked again: a program may be replacing it."""

    def __init__(self, folder: Path, setting: str) -> None:
        self.folder, self.path, self.setting = folder, folder / self.NAME, setting
        self._identity = {**_process_identity(), "token": uuid.uuid4().hex}
        self._created_folders: list[Path] = []
        self._stop_event = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self._descriptor = -1
        """An open descriptor of the folder, which survives a rename."""
        self.on_loss: Callable[[FolderLoss], None] = lambda loss: None
        """Called from the heartbeat thread after the folder was deleted, renamed or replaced."""

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
        self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        os.close(self._descriptor)
        self._descriptor = -1

    def find_loss(self) -> FolderLoss | None:
        """Return how the folder was lost, or None if it is still in place.

        Unreachable storage does not count as a loss: it may recover.
        """
        if self._descriptor < 0 or self._owner() == self._identity:
            return None
        if self._is_in_place():
            return None
        time.sleep(self._RECHECK_S)
        if self._is_in_place():
            return None
        try:
            is_deleted = os.fstat(self._descriptor).st_nlink == 0
        except OSError:  # deleted on another node
            is_deleted = True
        moved_to = None if is_deleted else self._current_path()
        event = "was deleted" if is_deleted else "is no longer there (was its disk unmounted?)"
        if moved_to is not None:
            event = f"was renamed to {moved_to}"
        elif os.path.lexists(self.folder):
            event += ", and something else has its name"
        return FolderLoss(self.setting, self.folder, event, moved_to)

    def _is_in_place(self) -> bool:
        """Return whether the acquired folder is still at its path."""
        try:
            current, acquired = os.stat(self.folder), os.fstat(self._descriptor)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        return os.path.samestat(current, acquired)

    def _current_path(self) -> Path | None:
        """Return the current path of the folder, or None if it is unknown."""
        with contextlib.suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            if os.path.samestat(path.stat(), os.fstat(self._descriptor)):
                return path
        return None

    def follow(self, folder: Path) -> None:
        """Keep the lock on the folder, which was renamed to `folder`."""
        self.folder, self.path, self._created_folders = folder, folder / self.NAME, []

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
        has_reported, num_missed, next_heartbeat = False, 0, time.monotonic() + self.HEARTBEAT_S
        while not self._stop_event.wait(self.CHECK_S):
            try:
                owner = self._owner()
                if owner != self._identity and not has_reported:
                    loss = self.find_loss()
                    if loss is not None:
                        has_reported = True
                        self.on_loss(loss)
                    elif owner is None:
                        num_missed += 1
                        if num_missed % 2 == 0:  # not immediately: somebody may be deleting the entire folder
                            self._restore_owner_file()
                    elif owner.get("pid") != self._identity["pid"] and self._owner() == owner:
                        # Read again: this run may have moved meanwhile, and another run may have taken the old path.
                        self._exit_taken_over(owner)
                elif owner == self._identity and time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + self.HEARTBEAT_S
                    os.utime(self.path)
            except OSError:  # the file system may recover
                continue

    def _restore_owner_file(self) -> None:
        """Restore the owner file, which somebody has deleted although the folder still exists."""
        if not self.path.exists():
            temporary = self.folder / f"{self.NAME}.{self._identity['token']}"
            try:
                write_and_sync(temporary, json.dumps(self._identity))
                _link(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)

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


# ---------------------------------------------------------------------------------------------------------------
# Relocation: saves a run elsewhere after one of its folders was deleted, renamed or replaced
#
# If training continued, its results would be lost.  If the folder were recreated, its files would reappear where
# somebody has just deleted them, or where another run has started.  So the run ends after the current step.  Its state,
# metrics and status go to the renamed folder, or if it cannot be found, to a new folder next to the old one.  The run
# can be resumed there.


class Relocation:
    """Moves a run after it has lost a folder.  All methods are collective."""

    def __init__(self, world: World, folder: RunFolder, checkpoints: Checkpoints, metrics: Metrics) -> None:
        self._world, self._folder, self._checkpoints, self._metrics = world, folder, checkpoints, metrics
        self.has_moved = False
        """True on all ranks once the run writes elsewhere."""

    def move_if_lost(self) -> bool:
        """If one of the run's folders is lost, redirect all further writes to another folder.

        Returns whether a folder is lost.  Raises on all ranks if the other folder cannot be used.  If no folder is
        lost, one broadcast.
        """
        if self.has_moved:
            return True
        loss = self._world.broadcast(self._folder.find_loss())
        if loss is None:
            return False
        self._agreed(loss, self._move_files)
        folder = self._folder
        folder.path, folder.checkpoint_dir = self._world.broadcast((folder.path, folder.checkpoint_dir))
        folder.has_moved = True
        storage = self._agreed(loss, lambda: open_storage(folder.checkpoint_dir or folder.path / "checkpoints"))
        self._checkpoints.move_to(storage)
        self.has_moved = True
        return True

    def _move_files(self) -> None:
        if self._world.is_main:
            self._folder.move()
            self._metrics.move_to(self._folder.path)

    def _agreed(self, loss: FolderLoss, work: Callable[[], Result]) -> Result:
        """Return the result of `work()`; if it fails, raise TrainingFailed on that rank, PeerFailed on others."""

        def attempt() -> Result:
            try:
                return work()
            except (OSError, UserError) as error:
                raise TrainingFailed(f"{loss}\n  its state cannot be saved elsewhere: {error}") from error

        return self._world.agreed(attempt)

    def final_error(self, outcome: str) -> TrainingFailed:
        """Return the error that ends the run: the cause, the location of the files, and how to resume.

        outcome: the location of the state, such as "the state of step 7 is in runs/a-rescued/checkpoints".
        """
        folder, config = self._folder, self._folder.config
        configured = {"run.dir": config.run_dir, "checkpoint.dir": config.checkpoint.dir}
        current = {"run.dir": folder.path, "checkpoint.dir": folder.checkpoint_dir}
        settings = " ".join(as_typed(key, current[key]) for key in current if current[key] != configured[key])
        lines = [str(folder.loss), outcome]
        if "run.dir=" in settings:
            lines.append(f"its metrics and its status are in {folder.path}")
        lines.append(f"to continue: the same command with {settings}")
        return TrainingFailed(self._world.broadcast("\n  ".join(lines)))
