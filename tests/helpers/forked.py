"""Starts processes in milliseconds, by forking a server that has already imported torch and the trainer.

Importing them takes longer than most runs here, so a fresh interpreter is started only if the start itself is tested.
A forked process is as separate as any other: it has its own memory, signals, files and environment, and
the ranks of a run meet through sockets, as under torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.util
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

_PRELOADED = [
    "tests.defects",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
    "trainer.trainer",
    "trainer.prepare",
    "trainer.export",
    "trainer.checkpoints",
    "trainer.plan.__main__",
    "trainer.report.__main__",
    "trainer.recipes",
    *(["trainer.recipes.hf.model"] if importlib.util.find_spec("transformers") else []),
    "tests.helpers.faults",
    "tests.helpers.custom_recipes",
    "tests.helpers.warm",
]

_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""Forked processes run on the CPU, since a process that has counted its GPUs cannot be forked (`warm.py`)."""


@functools.cache
def fork_server() -> Any:
    """Return multiprocessing's fork server, in which all modules that a run needs are imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # OpenMP reads these variables when it is loaded; the command line sets the same ones for several ranks.
    with _environment(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", GOMP_SPINCOUNT="10000", **_WITHOUT_GPUS):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@dataclass
class ForkedRanks:
    """The processes of some ranks, and the files with their output."""

    processes: list[Any]
    logs: Path
    since: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float = 240) -> list[int | None]:
        """Return the exit codes; None for a rank that is still running after `timeout_s`, which is then killed."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def wait_like_launcher(self, timeout_s: float) -> list[int]:
        """Return the exit codes. Once a rank has failed, the others get a SIGTERM, as from torch's launcher."""
        deadline = time.monotonic() + timeout_s
        has_terminated = False
        while alive := [process for process in self.processes if process.exitcode is None]:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still running after {timeout_s} s:\n{self.stdout}\n{self.stderr}")
            multiprocessing.connection.wait([process.sentinel for process in alive], timeout=0.5)
            if not has_terminated and any(process.exitcode for process in self.processes):
                has_terminated = True
                for process in self.processes:
                    if process.exitcode is None:
                        process.terminate()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """Kill the ranks that are still running."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()

    @property
    def stdout(self) -> str:
        return self._output(".out")

    @property
    def stderr(self) -> str:
        return self._output(".err")

    def stderr_of(self, rank: int) -> str:
        return (self.logs / f"{rank}.err").read_text(errors="replace")

    def _output(self, ending: str) -> str:
        paths = (self.logs / f"{rank}{ending}" for rank in range(len(self.processes)))
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())


Target = Callable[..., int]


def fork(
    target: Target,
    arguments: Sequence[Any],
    logs: Path,
    ranks: int = 1,
    variables: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    meet: bool | None = None,
) -> ForkedRanks:
    """Run `target(*arguments)`, which returns an exit code, in `ranks` processes.

    They get this process's environment and `variables`; with several ranks, or `meet`, also those of torchrun.
    """
    sys.audit("tests.fork", target.__name__)
    meet = ranks > 1 if meet is None else meet
    port = str(free_port()) if meet else ""
    processes = []
    for rank in range(ranks):
        environment = dict(os.environ) | dict(variables or {}) | _WITHOUT_GPUS
        if meet:
            environment |= rank_variables(rank, ranks, port)
        log = str(logs / str(rank))
        process = fork_server().Process(target=_main, args=(target, arguments, environment, log, str(cwd)))
        _start(process)
        processes.append(process)
    _started.extend(processes)
    return ForkedRanks(processes, logs)


def _start(process: Any) -> None:
    """Start a process whose exit code is read only by the thread that waits for it.

    `Process.start` polls all children that multiprocessing lists. An exit code can be read once: another thread that
    is waiting for it would get 255.
    """
    with _starting:
        process.start()
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


_starting = threading.Lock()
_started: list[Any] = []
_commands: list[subprocess.Popen[str]] = []


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command in its own session, so that the end of the test can kill it and all processes that it started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **{"cwd": REPOSITORY, "text": True, **pipes, **options}, start_new_session=True)
    _commands.append(process)
    return process


@atexit.register
def kill_leftover_processes() -> None:
    """Kill all processes that tests started.

    Forked processes do not end with their parent: they are not daemons, because daemons cannot start data workers.
    """
    for process in _started:
        if process.exitcode is None:
            process.kill()
            process.join()
    for command in _commands:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        if command.poll() is None:
            command.wait()
    _started.clear()
    _commands.clear()


def rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


_PR_SET_PDEATHSIG = 1


def _main(target: Target, arguments: Sequence[Any], environment: Mapping[str, str], log: str, cwd: str) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case the tests themselves are killed
    os.chdir(cwd)
    for number, ending in ((1, ".out"), (2, ".err")):
        descriptor = os.open(log + ending, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # the garbage collector need not scan what the server imported
    code = 1
    try:
        code = target(*arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_script(path: str, argv: Sequence[str]) -> int:
    """Run `python path argv...` in this process."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")
    return 0


def run_module(module: str, argv: Sequence[str]) -> int:
    """Run `python -m module argv...` in this process."""
    if module == "trainer.run":
        from trainer import run

        run.exit_process(run.main(list(argv)))
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def start_run(
    arguments: Sequence[str], logs: Path, ranks: int = 1, variables: Mapping[str, str] | None = None, **options: Any
) -> ForkedRanks:
    """Start `python -m trainer.run ARGUMENTS` on some ranks."""
    return fork(run_module, ["trainer.run", list(arguments)], logs, ranks, variables, **options)


def nproc_worker_variables(ranks: int) -> dict[str, str]:
    """Return the variables that workers of `nproc=N` have in addition to those of their ranks."""
    return {
        "MESHTRAINER_NPROC": str(ranks),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def call_on_ranks(ranks: int, function: Callable[..., Any], arguments: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return the result of `function(*arguments)` for each rank; AssertionError with their stderr if a rank failed."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        started = fork(_call, [function, arguments, folder], Path(folder), ranks, {"OMP_NUM_THREADS": "1"}, meet=True)
        codes = started.wait_like_launcher(timeout_s)
        sys.stdout.write(started.stdout)
        sys.stderr.write(started.stderr)
        assert codes == [0] * ranks, f"exit codes {codes}:\n{started.stderr}"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _call(function: Callable[..., Any], arguments: Sequence[Any], folder: str) -> int:
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    part = Path(folder) / f"{rank}.part"
    torch.save(function(*arguments), part)
    part.rename(Path(folder) / f"{rank}.pt")
    while len(list(Path(folder).glob("*.pt"))) < world_size:
        time.sleep(0.01)  # rank 0 hosts the store, and other ranks may still be connecting to this one
    return 0


def free_port() -> int:
    """Return a free port outside the kernel's ephemeral range, so that it stays free."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first, last = map(int, file.read().split())
    candidates = range(5_000, first) if first > 10_000 else range(last + 1, 65_536)
    while True:
        port = random.SystemRandom().choice(candidates)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
