"""The run folder: its owner, configuration, status and history.

Written by rank 0 alone.  Nothing here is written before the run is known to be without mistake.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.config.relocate import CONFIG
from trainer.errors import EXIT_FAILED, UserError, redact, say, setting_error
from trainer.files import find_folder, write_and_sync, write_atomically

RECORD = ("metrics.jsonl", "metrics_superseded.jsonl", "console.log", "samples.txt", "tensorboard", "wandb", "profile")
"""What a run that begins anew leaves behind, beside its checkpoints."""


class RunFolder:
    """The folder `run.dir`: everything in it but metrics and checkpoints."""

    def __init__(self, config: RunConfig, is_main: bool, comment: str = "") -> None:
        """`comment` is put above the configuration in `config.yaml`."""
        self.config, self.path, self.is_main = config, config.run_dir, is_main
        self._comment = comment
        self._owners = [Owner(self.path, "run.dir")]
        self._is_owned = False
        elsewhere = find_folder(config.checkpoint.dir) if config.checkpoint.dir else None
        if elsewhere is not None and self.path not in (elsewhere, *elsewhere.parents):
            self._owners.append(Owner(elsewhere, "checkpoint.dir"))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def before(self) -> str | None:
        """Content of `config.yaml`: until `begin`, that of the attempt before; None if there is none."""
        try:
            return (self.path / CONFIG).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def own(self) -> None:
        """Make the folder this run's.  Raises UserError if another run that is alive owns it, or it cannot be used."""
        if not self.is_main:
            return
        legal = {"run.dir": f"runs/{self.config.run.name}", "checkpoint.dir": None}
        for owner in self._owners:
            with _usable(owner.setting, owner.folder, legal[owner.setting]):
                owner.acquire()
        self._is_owned = True

    def release(self) -> None:
        """Let the next run have the folder; a folder made for nothing goes."""
        self._is_owned = False
        if self.is_main:
            for owner in reversed(self._owners):
                owner.release()

    def using(self, work: Callable[[], object]) -> None:
        """Do something of the start in this folder.  Raises UserError if it cannot be used: its disk is full, say."""
        with _usable("run.dir", self.path, f"runs/{self.config.run.name}"):
            work()

    def begin(self) -> None:
        """Write `config.yaml`."""
        if self.is_main:
            comment = "".join(f"# {line}\n" for line in self._comment.splitlines())
            write_atomically(self.path / CONFIG, comment + self.config.on_record().to_yaml())

    def set_aside(self, *names: str) -> Path | None:
        """Move what the new attempt leaves behind into a folder `previous_NNN`: never deleted.  Returns the folder.

        Where the metrics go, a copy goes along of what the new attempt is going to overwrite.
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
        """Say how the run stands: `state` is running, finished, stopped or failed.

        Only of a run that owns the folder: another's word stays as it is.
        """
        if self._is_owned:
            write_status(self.path, {"state": state, "exit_code": exit_code, "step": step, "reason": reason})

    def has_finished(self) -> bool:
        """Return whether `status.json` says so."""
        try:
            return bool(json.loads((self.path / "status.json").read_text())["state"] == "finished")
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def clean(self) -> None:
        """Remove the half-written files of attempts that were killed."""
        for name in ("config.yaml", "status.json", "metrics.jsonl"):
            for partial in self.path.glob(f".{name}.*"):
                partial.unlink()


@contextlib.contextmanager
def _usable(setting: str, folder: Path, legal: str | None) -> Iterator[None]:
    """Turn what the file system refuses into a mistake in where things are to be: which file, and why."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename not in (None, str(folder)) else ""
        raise setting_error(setting, folder, f"cannot be used ({error.strerror or error}{where})", legal) from error


_PAUSES_S = (0.2, 1.0)
"""Before each further try to say how a run stands: storage may be away for a moment."""


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Write `status.json`.  Where that cannot be it is said: a full disk must not hide what the run has to say."""
    text = json.dumps({**status, "reason": redact(str(status["reason"]))}) + "\n"
    for pause_s in (*_PAUSES_S, None):
        try:
            write_atomically(run_dir / "status.json", text)
            return
        except OSError as error:
            if pause_s is None:
                say(f"warning: {run_dir}/status.json cannot be written: {error}")
            else:
                time.sleep(pause_s)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return what `status.json` holds, empty if there is none."""
    try:
        status = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def note_end(run_dir: Path, before: Mapping[str, Any], reached: int, reason: str) -> None:
    """Have `status.json` say how the run ended: for a launcher that has seen all its ranks go.

    `reached` is the last step on record, `before` what it held when they were started: what an attempt before has said
    stays, but for `running`; and so does all if another run that is alive owns the folder.
    """
    status = read_status(run_dir)
    failed_now = status.get("state") == "failed" and status != before
    if (status.get("state") == "running" or failed_now) and not is_owned(run_dir):
        step = status.get("step") if failed_now else reached
        write_status(run_dir, {"state": "failed", "exit_code": EXIT_FAILED, "step": step, "reason": reason})


class Owner:
    """The process that owns a run's folder: one at a time, on any node, and never a dead one for long.

    A file `.owner.json` names it.  On the same machine the process is looked for; on another (or on this one before it
    was last started: host names are not unique) its heartbeat is, the file's modification time, compared with that of
    a file made now, so that no two clocks are.
    """

    NAME = ".owner.json"
    BEAT_S, STALE_S = 5.0, 30.0

    def __init__(self, folder: Path, setting: str) -> None:
        self.folder, self.path, self.setting = folder, folder / self.NAME, setting
        self._own = {**_this_process(), "token": uuid.uuid4().hex}
        self._made: list[Path] = []
        self._stopped = threading.Event()
        self._beat: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the folder.  Waits up to `STALE_S` for the heartbeat of a process on another node.

        Raises UserError that names the owner if it is alive; OSError if the folder cannot be written.
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
        self._clean()
        self._beat = threading.Thread(target=self._keep_alive, name="owner", daemon=True)
        self._beat.start()

    def release(self) -> None:
        if self._beat is None:
            return
        self._stopped.set()
        self._beat.join()
        self._beat = None
        with contextlib.suppress(OSError):  # a folder that can no longer be written: the next run finds us gone
            if self._read() == self._own:
                self.path.unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()  # unless it was of use

    def _clean(self) -> None:
        """Remove what claimants that were killed have left, but nothing of one that is alive."""
        for path in self.folder.glob(f"{self.NAME}.*"):
            owner = _parse(path)
            if owner is None or (_where(owner) == _where(self._own) and _start_of(owner["pid"]) != owner["started"]):
                path.unlink(missing_ok=True)

    def _wait_for_death(self, mine: Path) -> None:
        """Return once the folder's owner has gone, and its file with it."""
        owner, first_beat = self._read(), self._last_beat()
        while not self._is_dead(owner, mine):
            is_remote = owner is None or _where(owner) != _where(self._own)
            if not is_remote or self._last_beat() != first_beat:
                who = "a process" if owner is None else f"process {owner.get('pid')} on {owner.get('host')}"
                job = f", Slurm job {owner['job']}" if owner and owner.get("job") else ""
                since = f" since {owner['since']}" if owner and owner.get("since") else ""
                raise UserError(
                    f"{self.setting}={self.folder}: another run owns it: {who}{job}{since}\n  wait for it, stop "
                    f"it, or choose another {self.setting}"
                )
            time.sleep(0.5)
        # Of several that wait for the same death one moves the file; the others find it gone.
        moved = self.path.with_name(f"{self.NAME}.stale-{self._own['token']}")
        try:
            os.rename(self.path, moved)
        except FileNotFoundError:
            return
        if _parse(moved) != owner:  # another process was quicker: it is alive
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
            return bool(owner["restarts"] < self._own["restarts"])  # Slurm has requeued it: its processes have gone
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
        while not self._stopped.wait(self.BEAT_S):
            try:
                owner = self._read()
                if owner is not None and owner != self._own and owner.get("pid") != self._own["pid"]:
                    # This process stood still for so long that it was taken for dead.  Two must not write here.
                    say(f"error: {self.folder} was taken over by {owner}; this run ends")
                    os._exit(EXIT_FAILED)
                os.utime(self.path)
            except OSError:  # the file system is away; it may come back
                continue


def is_owned(folder: Path) -> bool:
    """Return whether the folder's owner is alive, as far as can be told by looking: for reports, not for claims.

    Of a process on another node the heartbeat tells, compared with this node's clock.
    """
    path = folder / Owner.NAME
    owner = _parse(path)
    if owner is not None and _where(owner) == _where(_this_process()):
        return _start_of(owner["pid"]) == owner["started"] and not _is_copied(owner, folder)
    try:
        return time.time() - path.stat().st_mtime < Owner.STALE_S
    except OSError:
        return False


def _link(source: Path, target: Path) -> bool:
    """Give `source` the name `target` too, unless it is taken; returns whether it was free.  Atomic, on NFS as well."""
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
    return {
        "host": socket.gethostname(),
        "boot": _read_line("/proc/sys/kernel/random/boot_id"),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _this_folder(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder.resolve()), "inode": folder.stat().st_ino}


def _is_copied(owner: dict[str, Any], folder: Path) -> bool:
    """Return whether the file came with a copy of a run's folder: its owner, on this machine, has another one."""
    return all(name in owner and owner[name] != value for name, value in _this_folder(folder).items())


def _where(owner: dict[str, Any]) -> tuple[Any, ...]:
    """Return where a process's number means something: the machine since its last start, and the container."""
    return owner["host"], owner["boot"], owner["namespace"]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Return when a process was started, in the kernel's ticks; empty if there is none (or it is dead, unburied)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "alive"
    return "" if fields[0] in ("Z", "X") else fields[19]


def _read_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
