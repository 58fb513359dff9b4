"""Ensures that at most one run trains in a folder: a run claims its folder with a lock and a heartbeat (`Owner`)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from trainer.errors import EXIT_FAILED, UserError, print_stderr

NAME = ".owner.json"
"""The file in a folder that names its owner."""

HEARTBEAT_S, STALE_S = 5.0, 30.0
"""Seconds between two heartbeats, and seconds without one after which an owner on another host is dead."""

_PATIENCE_S = 1.0
"""Seconds to wait for a lock that a process on this host holds: a report holds it for a moment (`is_owned`)."""
_PAUSE_S = 0.2
"""Seconds between two looks at a lock or heartbeat."""


@dataclass(frozen=True)
class Claim:
    """The content of `.owner.json`: the process that owns the folder."""

    host: str
    pid: int
    since: str
    token: str
    """Different for each claim."""
    job: str
    """The id of the Slurm job; empty outside of one."""
    restarts: int
    """The number of times that Slurm had requeued the job."""

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job} since {self.since}"

    def has_requeued(self, other: Claim | None) -> bool:
        """Return whether Slurm has requeued the job of `other` since, and so has ended that process."""
        return other is not None and other.job != "" and other.job == self.job and other.restarts < self.restarts


def exit_taken_over(message: str) -> None:
    """End this process at once and record nothing, because another run owns the folder now."""
    print_stderr(f"error: {message}")
    os._exit(EXIT_FAILED)


class Owner:
    """The ownership of a folder, which at most one process on any host has.

    The owner locks the file `.owner.json` (flock); the kernel releases the lock when the process ends, however it ends.
    But some file systems have no locks, some hide them from other hosts, and that of a host that crashed may remain for
    minutes.  So the owner also sends a heartbeat, the modification time of the file:

    | lock    | process in the file                           | the folder                               |
    |---------|-----------------------------------------------|------------------------------------------|
    | free    | on this host                                  | is free: it died, or the file is a copy  |
    | held    | on this host                                  | is owned                                 |
    | any     | of the same Slurm job, before it was requeued | is free: Slurm has ended the process     |
    | any     | on another host                               | is owned as long as there are heartbeats |
    | unknown | on any host                                   | is owned as long as there are heartbeats |

    Where the lock proves nothing, a new owner moves the file away and creates another, which only one process can.
    """

    def __init__(self, folder: Path, setting: str, on_taken_over: Callable[[str], None] = exit_taken_over) -> None:
        """setting: the setting that names the folder, for messages.

        on_taken_over: called by the heartbeat's thread, with a message, after another run has taken over the folder.
        It must end this process, which was suspended for so long that it counted as dead.
        """
        self.folder, self.setting = folder, setting
        self._path, self._on_taken_over = folder / NAME, on_taken_over
        self._claim = _new_claim()
        self._descriptor = -1
        """The open and locked file; -1 if this process does not own the folder."""
        self._lock = threading.Lock()
        """Protects the descriptor from being closed while it is used."""
        self._is_released = threading.Event()

    def acquire(self) -> None:
        """Claim the folder, which must exist, unless this process owns it already.

        Waits up to `STALE_S` seconds for the heartbeat of an owner on another host.  An owner in this process, which
        was not released, gives way.

        Raises UserError that names the owner if it is alive, and OSError if the file cannot be written.
        """
        if self._descriptor >= 0:
            return
        self._claim, self._is_released = _new_claim(), threading.Event()
        give_up_at = time.monotonic() + _PATIENCE_S
        while not self._try_to_acquire(give_up_at):
            pass
        threading.Thread(target=self._send_heartbeats, args=[self._is_released], name="owner", daemon=True).start()

    @property
    def is_held(self) -> bool:
        """True while this process owns the folder; false after another one has taken it over, or it was moved away."""
        try:
            return self._descriptor >= 0 and _read(self._path)[0] == self._claim
        except OSError:  # the storage may recover
            return True

    def release(self) -> None:
        """Leave the folder to the next run.  Does nothing if this process does not own it."""
        self._is_released.set()
        with self._lock:
            if self._descriptor < 0:
                return
            with contextlib.suppress(OSError):  # closing the file frees the lock in any case
                if self.is_held:
                    self._path.unlink()  # while it is locked
            _held.remove(self)
            os.close(self._descriptor)
            self._descriptor = -1

    def _try_to_acquire(self, give_up_at: float) -> bool:
        """Claim the folder if it is free.  If this returns False, look again: something has changed, or may soon.

        give_up_at: when to refuse because of a lock held on this host, by `time.monotonic`.
        """
        try:
            descriptor, is_new = _open_or_create(self._path)
        except FileNotFoundError:
            if self.folder.is_dir():  # the file was released in between
                return False
            raise
        try:
            lock = _try_to_lock(descriptor, is_new)
            owner, _ = _read(self._path)
            is_here = owner is not None and owner.host == self._claim.host
            if lock == "ours" and (is_new or is_here):
                if self._write_claim(descriptor):
                    self._descriptor, descriptor = descriptor, -1
                    _held.append(self)
                    return True
            elif self._claim.has_requeued(owner):
                self._move_away(owner)
            elif lock == "held" and (is_here or owner is None):
                self._wait_for_lock(owner, give_up_at)
            elif self._is_silent(owner):
                self._move_away(owner)
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _wait_for_lock(self, owner: Claim | None, give_up_at: float) -> None:
        """Wait a moment for a lock that a process on this host holds.  Raises UserError after `give_up_at`."""
        for earlier in [held for held in _held if held._claim == owner]:
            earlier.release()
            return
        if time.monotonic() >= give_up_at:
            raise self._refusal(owner)
        time.sleep(_PAUSE_S)

    def _is_silent(self, owner: Claim | None) -> bool:
        """Watch the heartbeat; return whether there is none for `STALE_S`.  Returns False if the owner changes.

        Raises UserError at the first heartbeat.
        """
        _, first_heartbeat = _read(self._path)
        age_s = time.time() - (first_heartbeat or 0.0)
        # Clocks of two hosts may differ, so the age alone proves nothing.
        watch_s = min(max(STALE_S - age_s, 1.5 * HEARTBEAT_S), STALE_S)
        watch_until = time.monotonic() + watch_s
        while True:
            time.sleep(_PAUSE_S)
            current, heartbeat = _read(self._path)
            if current != owner or heartbeat is None:
                return False
            if heartbeat != first_heartbeat:
                raise self._refusal(owner)
            if time.monotonic() >= watch_until:
                return True

    def _refusal(self, owner: Claim | None) -> UserError:
        return UserError(
            f"{self.setting}={self.folder}: another run owns it: {owner or 'a process'}\n  wait for it, stop it, or "
            f"choose another {self.setting}"
        )

    def _write_claim(self, descriptor: int) -> bool:
        """Write this process's claim to the file.  Returns False if the file is no longer in place."""
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._claim)).encode(), 0)
            os.fsync(descriptor)  # other hosts see it from here on
        except OSError:  # such as a full disk
            if os.path.samestat(os.stat(self._path), os.fstat(descriptor)):
                self._path.unlink()
            raise
        return _read(self._path)[0] == self._claim

    def _move_away(self, owner: Claim | None) -> None:
        """Move the file of a dead owner away.  If several processes want to, one finds the file of that owner."""
        aside = self._path.with_name(f"{NAME}.{self._claim.token}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            if _read(aside)[0] == owner:
                aside.unlink()
            else:  # that of a process that was faster
                os.rename(aside, self._path)

    def _send_heartbeats(self, is_released: threading.Event) -> None:
        num_missed = 0
        while not is_released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # the storage may recover
                owner, _ = _read(self._path)
                if owner == self._claim:
                    num_missed = 0
                    with self._lock:
                        if self._descriptor >= 0:
                            os.utime(self._descriptor)
                    continue
                if owner is None and not self.folder.is_dir():  # it was moved or deleted: the next save fails
                    continue
                num_missed += 1
                is_put_back = owner is None and num_missed == 1  # perhaps: see `_move_away`
                if not is_put_back and not is_released.is_set():
                    self._on_taken_over(self._taken_over_message(owner))
                    return

    def _taken_over_message(self, owner: Claim | None) -> str:
        """Return the message with which this process ends.  owner: None if the other run has ended meanwhile."""
        return (
            f"{self.setting}={self.folder}: another run has taken it over{f' ({owner})' if owner else ''}, because "
            f"this one was suspended for more than {STALE_S:.0f} s or its folder was replaced\n  this run ends here, "
            "without saving; the other one continues from the newest checkpoint"
        )


def is_owned(folder: Path) -> bool:
    """Return whether a process that seems to be alive owns the folder.  For reports, not for claiming the folder."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        has_locks = True
    except BlockingIOError:
        return True
    except OSError:
        has_locks = False
    finally:
        os.close(descriptor)
    try:
        owner, heartbeat = _read(folder / NAME)
    except OSError:
        return False
    if heartbeat is None or (has_locks and (owner is None or owner.host == socket.gethostname())):
        return False
    return time.time() - heartbeat < STALE_S


# ---------------------------------------------------------------------------------------------------------------
# The file


def _new_claim() -> Claim:
    return Claim(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        token=uuid.uuid4().hex,
        job=os.environ.get("SLURM_JOB_ID", ""),
        restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    )


def _read(path: Path) -> tuple[Claim | None, float | None]:
    """Return the claim in the file, and its last heartbeat in seconds since the epoch; None for what does not exist.

    Opens the file each time: NFS may cache the modification time of a file that is not opened for a minute.
    """
    try:
        with open(path, "rb") as file:
            heartbeat = os.fstat(file.fileno()).st_mtime
            content = json.loads(file.read(4096))
            if [type(content[field.name]) for field in fields(Claim)] == [str, int, str, str, str, int]:
                return Claim(**content), heartbeat
    except FileNotFoundError:
        return None, None
    except (ValueError, KeyError, TypeError):  # it was just created, or is not ours
        pass
    return None, heartbeat


def _open_or_create(path: Path) -> tuple[int, bool]:
    """Open a file for reading and writing.  Returns its descriptor, and whether this process has created it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), False


def _try_to_lock(descriptor: int, is_new: bool) -> Literal["ours", "held", "unknown"]:
    """Lock a file.  Where there are no locks, the process that has created the file counts as holding its lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:  # the file system has no locks
        return "ours" if is_new else "unknown"
    return "ours"


# ---------------------------------------------------------------------------------------------------------------
# Forked processes

_held: list[Owner] = []
"""The owners in this process that hold their folder."""


def _close_in_child() -> None:
    """Close the files: a forked process, such as a worker of a loader, would keep the lock of a run that has died."""
    for owner in _held:
        with contextlib.suppress(OSError):  # it was about to be closed
            os.close(owner._descriptor)
        owner._descriptor = -1
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
