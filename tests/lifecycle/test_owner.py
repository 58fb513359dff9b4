"""A folder has one run: what a second start is told, and when a dead owner's folder is free."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import RUN, resumed_steps
from tests.helpers.cases import in_campaign
from tests.helpers.gate import PATIENCE_S, Gate, wait_until
from tests.helpers.launch import PYTHON_MODULE, REPOSITORY, Run, fork, launch, merged, run, start
from trainer import UserError
from trainer.lifecycle import owner as owner_module
from trainer.lifecycle.owner import NAME, Owner, is_owned

OWNED = "another run owns it"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every 50 ms, and half a second until an owner without one is dead."""
    monkeypatch.setattr(owner_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(owner_module, "STALE_S", 0.5)
    monkeypatch.setattr(owner_module, "_PAUSE_S", 0.02)


def on_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)


def locks_as(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flock work as on other file systems: `seen` by all hosts, `hidden` from others, or `none`."""

    def no_lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if kind != "seen":
        monkeypatch.setattr(fcntl, "flock", no_lock if kind == "none" else lambda *arguments: None)


def stamps(folder: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != NAME]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def own(folder: str, at: str = "") -> int:
    """Own a folder until this process is killed, from the moment that the file `at` exists.  Returns 2 if refused."""
    while at and not os.path.exists(at):
        pass
    owner = Owner(Path(folder), "run.dir")
    try:
        owner.acquire()
    except UserError:
        return 2
    print("owner", flush=True)
    time.sleep(PATIENCE_S)
    return 0


def started_owner(folder: Path) -> Run:
    """Start a process that owns the folder."""
    started = fork(own, [str(folder)], folder)
    wait_until(lambda: started.out or not started.is_running, "the owner")
    assert started.is_running, started.err
    return started


# ---------------------------------------------------------------------------------------------------------------
# On one host


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, *in_campaign(1)])
def test_folder_belongs_to_one_run(num_workers: int, tmp_path: Path) -> None:
    """A second start is refused and changes nothing; a dead owner blocks nobody, not even if its workers live on."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "step 3")
    words = [*merged(RUN, ["checkpoint.mode=sync", f"data.num_workers={num_workers}"]), "nproc=1"]
    first = start(folder, *words, variables=gate.variables)
    wait_until(lambda: gate.is_reached() or not first.is_running, "step 3")
    before = stamps(folder)
    second = run(folder, *words, "run.seed=1", code=2)
    assert f"run.dir={folder}: {OWNED}" in second.err
    assert str(first.pids[0]) in second.err
    assert {path: stamp for path, stamp in stamps(folder).items() if path in before} == before
    assert first.is_running
    first.kill()
    third = run(folder, *words)
    assert resumed_steps(third) == [None, 2]


def own_with_child(folder: str) -> int:
    """Own a folder, and fork a process that outlives this one."""
    owner = Owner(Path(folder), "run.dir")
    owner.acquire()
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE_S)
        os._exit(0)
    print(child, flush=True)
    time.sleep(PATIENCE_S)
    return 0


@pytest.mark.slow
def test_forked_process_does_not_keep_the_folder(tmp_path: Path) -> None:
    parent = fork(own_with_child, [str(tmp_path)], tmp_path)
    wait_until(lambda: parent.out or not parent.is_running, "the child")
    assert is_owned(tmp_path)
    parent.kill()
    parent.wait(together=False)
    child = int(parent.out)
    assert not is_owned(tmp_path)
    Owner(tmp_path, "run.dir").acquire()
    os.kill(child, signal.SIGKILL)  # raises if it does not exist


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, *in_campaign(20)])
def test_simultaneous_starts_after_a_kill(rounds: int, tmp_path: Path) -> None:
    """Exactly one of them takes over the folder of the dead owner."""
    last = started_owner(tmp_path)
    for number in range(rounds):
        last.kill()
        last.wait(together=False)
        go = tmp_path / f"go-{number}"
        starts = [fork(own, [str(tmp_path), str(go)], tmp_path) for _ in range(7 if rounds == 1 else 8)]
        go.touch()
        wait_until(lambda each=starts: sum(one.is_running for one in each) <= 1, "all but one to be refused")
        assert [one.code for one in starts if not one.is_running] == [2] * (len(starts) - 1)
        (last,) = [one for one in starts if one.is_running]
        wait_until(lambda one=last: one.out, "the owner")


def test_released_folder_is_free_and_an_empty_file_is_no_owner(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "run.dir")
    owner.acquire()
    assert owner.is_held
    assert is_owned(tmp_path)
    owner.release()
    owner.release()
    assert not owner.is_held
    assert not is_owned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_report_does_not_refuse_a_start(tmp_path: Path) -> None:
    Owner(tmp_path, "run.dir").acquire()
    shutil.copytree(tmp_path, tmp_path / "copy")
    reading = os.open(tmp_path / "copy" / NAME, os.O_RDONLY)
    fcntl.flock(reading, fcntl.LOCK_SH)
    threading.Timer(0.3, os.close, [reading]).start()
    Owner(tmp_path / "copy", "run.dir").acquire()


def test_copied_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    original = Owner(tmp_path / "a", "run.dir")
    original.acquire()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert not is_owned(tmp_path / "b")
    Owner(tmp_path / "b", "run.dir").acquire()
    assert original.is_held


def test_trainer_that_was_not_closed_gives_way_in_its_own_process(tmp_path: Path) -> None:
    first, second = Owner(tmp_path, "run.dir"), Owner(tmp_path, "run.dir")
    first.acquire()
    second.acquire()
    first.release()
    assert not first.is_held
    assert second.is_held


def test_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space"):
        Owner(tmp_path, "run.dir").acquire()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------
# On several hosts


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("locks", ["seen", "hidden", "none"])
def test_owner_on_another_host(locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to leave only if it sends no heartbeat, and says so when it wakes up again."""
    locks_as(locks, monkeypatch)
    messages: list[str] = []
    far, near = Owner(tmp_path, "run.dir", messages.append), Owner(tmp_path, "run.dir")
    on_host("far", monkeypatch)
    far.acquire()
    on_host("near", monkeypatch)
    with pytest.raises(UserError, match=rf"^run\.dir={tmp_path}: {OWNED}: .* on far"):
        near.acquire()
    assert is_owned(tmp_path)
    monkeypatch.setattr(os, "utime", lambda descriptor: None)  # as if it were suspended
    near.acquire()
    assert near.is_held
    assert not far.is_held
    wait_until(lambda: messages, "the message of the first owner")
    assert messages[0].startswith(f"run.dir={tmp_path}: another run has taken it over")
    assert "on near" in messages[0]
    far.release()
    assert near.is_held
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("locks", ["seen", "hidden", "none"])
def test_requeued_job_does_not_wait_for_its_earlier_attempt(
    locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has ended it, although its lock may remain on a server, and its last heartbeat was just now."""
    locks_as(locks, monkeypatch)
    monkeypatch.setattr(Owner, "_is_silent", None)  # it is not even asked
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    on_host("far", monkeypatch)
    earlier = Owner(tmp_path, "run.dir", lambda message: None)
    earlier.acquire()
    on_host("near", monkeypatch)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    later = Owner(tmp_path, "run.dir")
    later.acquire()
    assert later.is_held
    assert not earlier.is_held


@pytest.mark.usefixtures("hurried")
def test_without_locks_the_file_of_a_dead_owner_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks_as("none", monkeypatch)
    Owner(tmp_path, "run.dir").acquire()
    (tmp_path / "copy").mkdir()
    for content in ((tmp_path / NAME).read_text(), "", '{"host": 1}'):
        (tmp_path / "copy" / NAME).write_text(content)
        assert is_owned(tmp_path / "copy"), "until it has been silent"
        owner = Owner(tmp_path / "copy", "run.dir")
        owner.acquire()
        assert owner.is_held
        owner.release()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_folder_that_vanishes_ends_only_a_run_that_another_one_may_follow(how: str, tmp_path: Path) -> None:
    """If the folder is deleted or moved, the next save fails; if it is replaced, another run may have been there."""
    folder, messages = tmp_path / "run", list[str]()
    folder.mkdir()
    owner = Owner(folder, "run.dir", messages.append)
    owner.acquire()
    if how == "deleted":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "moved")
    assert not owner.is_held
    if how == "replaced":
        folder.mkdir()
        wait_until(lambda: messages, "the message of the owner")
    time.sleep(0.3)  # several heartbeats
    assert len(messages) == (how == "replaced")
    owner.release()


@pytest.mark.campaign
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process another host name")
def test_killed_run_is_continued_on_another_host(tmp_path: Path) -> None:
    """While it trains, the other host is refused; after a kill, it continues within 35 seconds."""
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "step 3")
    words = [*merged(RUN, ["checkpoint.mode=sync"]), f"run.dir={folder}", "nproc=1"]
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh", *PYTHON_MODULE, "trainer.run"]
    first = start(folder, *words, variables=gate.variables)
    wait_until(lambda: gate.is_reached() or not first.is_running, "step 3")
    refused = launch([*elsewhere, *words], folder, cwd=REPOSITORY).wait()
    assert refused.code == 2
    assert OWNED in refused.err
    first.kill()
    first.wait(together=False)
    killed_at = time.monotonic()
    second = launch([*elsewhere, *words], folder, cwd=REPOSITORY)
    wait_until(lambda: is_claimed_by(folder, "elsewhere") or not second.is_running, "the other host")
    assert time.monotonic() - killed_at <= 35
    second.wait()
    assert second.code == 0, second.err
    assert resumed_steps(second) == [None, 2]


def is_claimed_by(folder: Path, host: str) -> bool:
    try:
        return bool(json.loads((folder / NAME).read_text())["host"] == host)
    except (OSError, ValueError):
        return False


@pytest.mark.campaign
def test_suspended_run_ends_when_it_was_taken_over(tmp_path: Path) -> None:
    folder, gate = tmp_path / "run", Gate(tmp_path / "gate", "step 3")
    words = [*merged(RUN, ["checkpoint.mode=sync"]), "nproc=1"]
    first = start(folder, *words, variables=gate.variables)
    wait_until(lambda: gate.is_reached() or not first.is_running, "step 3")
    first.signal(signal.SIGSTOP)
    mark = folder / NAME
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"host": "elsewhere"}))
    second = run(folder, *words)
    assert second.code == 0
    first.signal(signal.SIGCONT)
    first.wait(together=False)
    assert first.code == 1
    assert first.err.count("another run has taken it over") == 1
