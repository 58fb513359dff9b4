"""Starts runs, commands and functions on one or several ranks, and returns what they did as a `Run`.

Importing torch takes longer than most runs here. Therefore a server process imports it and the trainer once, and each
process is forked from it within milliseconds. It is as separate as any other: it has its own memory, signals, files and
environment, and the ranks of a run meet through sockets, as under torchrun. If the start itself is tested, `fresh=True`
starts a new interpreter, which costs seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import os
import random
import re
import runpy
import shutil
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
from pathlib import Path
from typing import Any

from tests.helpers.gate import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
PYTHON_MODULE = (sys.executable, "-m")
TORCHRUN = (*PYTHON_MODULE, "torch.distributed.run")

TINY = [
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.ffn_dim=64",
    "data.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "eval.every=0",
    "checkpoint.every=0",
    "log.every=1",
    "log.sample_tokens=0",
    "schedule.warmup_steps=5",
    "run.threads=1",
    "run.device=cpu",
]
"""Overrides with which a step of llama_small takes milliseconds, on the CPU even if the machine has a GPU.

A second thread would not speed up a model this small; on busy cores it made runs six times slower.
"""


def tiny(*overrides: str) -> list[str]:
    """Return the overrides of a tiny llama_small, with `overrides` replacing or extending them.

    If `overrides` set the global batch size, a micro-batch has one sequence, which suits any number of ranks.
    """
    keys = {override.partition("=")[0] for override in overrides}
    base = TINY
    if "train.global_batch_size" in keys and "train.micro_batch_size" not in keys:
        base = merged(TINY, ["train.micro_batch_size=1"])
    return merged(base, overrides)


def merged(base: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return `base` without the keys in `overrides`, followed by `overrides`."""
    overridden = {override.partition("=")[0] for override in overrides}
    return [*(item for item in base if item.partition("=")[0] not in overridden), *overrides]


# ---------------------------------------------------------------------------------------------------------------
# What was started


class Run:
    """The processes of a run or a command: how they ended, what they printed, and what the run left in its folder."""

    def __init__(self, folder: Path, processes: Sequence[Any], logs: Path) -> None:
        self.folder = folder
        self.processes = list(processes)
        self._logs = logs
        self._printed: dict[str, str] = {}

    def wait(self, together: bool = True) -> Run:
        """Wait until all processes have ended.

        together: end the other ranks with SIGTERM once one has failed, as a launcher does. Otherwise they must notice
        it themselves.
        """
        deadline = time.monotonic() + PATIENCE_S
        has_terminated = False
        while running := [process for process in self.processes if process.exitcode is None]:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"has not ended:\n{self.out}\n{self.err}")
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
            if together and not has_terminated and any(process.exitcode for process in self.processes):
                has_terminated = True
                self.signal(signal.SIGTERM)
        if not self._printed:
            self._printed = {path.name: path.read_text(errors="replace") for path in sorted(self._logs.iterdir())}
            shutil.rmtree(self._logs, ignore_errors=True)
        return self

    @property
    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    @property
    def codes(self) -> list[int]:
        """The exit codes of the processes, by rank; the negative number of a signal that killed one."""
        return [process.exitcode for process in self.processes]

    @property
    def code(self) -> int:
        """The exit code, as a launcher combines those of its ranks: 2 or 75 if one of them has it, else 1."""
        codes = set(self.codes)
        if len(codes) == 1:
            return self.codes[0]
        for specific in (2, 75):
            if specific in codes:
                # The others were terminated: some before they handled signals, some while they started, which is 75.
                assert codes <= {specific, 75, 0, 1, -signal.SIGTERM}, f"exit codes {self.codes}\n{self.err}"
                return specific
        return 1

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all that are running."""
        chosen = self.processes if rank is None else [self.processes[rank]]
        for process in chosen:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self, rank: int | None = None) -> None:
        """Kill one rank, or all that are running, with SIGKILL, and wait until they are gone."""
        self.signal(signal.SIGKILL, rank)
        for process in self.processes if rank is None else [self.processes[rank]]:
            process.join()

    @property
    def out(self) -> str:
        return self._all_printed(".out")

    @property
    def err(self) -> str:
        return self._all_printed(".err")

    def err_of(self, rank: int) -> str:
        return self._printed_by(f"{rank}.err")

    def _all_printed(self, ending: str) -> str:
        return "".join(self._printed_by(f"{rank}{ending}") for rank in range(len(self.processes)))

    def _printed_by(self, name: str) -> str:
        if self._printed:
            return self._printed.get(name, "")
        path = self._logs / name
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl; none if there is no file yet."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind: `start`, `train`, `eval`, `checkpoint`, `end` ..."""
        return [line for line in self.metrics if line["kind"] == kind]

    def train(self, field: str) -> list[Any]:
        """The values of a field in the `train` lines."""
        return [line[field] for line in self.of_kind("train")]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def steps_saved(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        names = [path.name for path in self.checkpoints.glob("step_*")] if self.checkpoints.exists() else []
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))


class _Program:
    """A fresh process with the attributes of a multiprocessing process that `Run` uses."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.sentinel = os.pidfd_open(popen.pid)

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()

    def join(self) -> None:
        self.popen.wait()

    def __del__(self) -> None:
        os.close(self.sentinel)


# ---------------------------------------------------------------------------------------------------------------
# Starting


def run(folder: Path, *overrides: str, code: int = 0, **options: Any) -> Run:
    """Train to the end, as `start` does, and assert the exit code."""
    return _ended(start(folder, *overrides, **options), code)


def start(
    folder: Path,
    *overrides: str,
    variables: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    fresh: bool = False,
) -> Run:
    """Start `python -m trainer.run` in the run folder `folder`: a tiny llama_small, or the `recipe=` in `overrides`.

    As on the command line, `nproc=N` gives N ranks. `variables` are added to the environment.
    """
    has_recipe = any(item.startswith("recipe=") for item in overrides)
    arguments = [*(overrides if has_recipe else ["recipe=llama_small", *tiny(*overrides)]), f"run.dir={folder}"]
    if fresh:
        return launch([*PYTHON_MODULE, "trainer.run", *arguments], folder, variables, cwd)
    ranks = next((int(item[6:]) for item in arguments if re.fullmatch(r"nproc=\d+", item)), 1)
    workers = _nproc_variables(ranks) if ranks > 1 else {}
    return fork(run_module, ["trainer.run", arguments], folder, ranks, {**workers, **(variables or {})}, cwd)


def command(module: str, *arguments: object, code: int = 0, **options: Any) -> Run:
    """Run `python -m module arguments...` to its end, and assert the exit code."""
    return _ended(start_command(module, *arguments, **options), code)


def start_command(
    module: str,
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    fresh: bool = False,
) -> Run:
    """Start `python -m module arguments...` in the folder `cwd`."""
    words = [str(argument) for argument in arguments]
    if fresh:
        return launch([*PYTHON_MODULE, module, *words], cwd, variables, cwd)
    return fork(run_module, [module, words], cwd, 1, variables, cwd)


def launch(
    program: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
) -> Run:
    """Start a program in a session of its own. `folder` is the run folder, if it trains."""
    logs = Path(tempfile.mkdtemp(prefix="meshtrainer-logs-"))
    with open(logs / "0.out", "w") as out, open(logs / "0.err", "w") as err:
        popen = subprocess.Popen(
            program, cwd=cwd, env={**os.environ, **(variables or {})}, stdout=out, stderr=err, start_new_session=True
        )
    _programs.append(popen)
    _logs.append(logs)
    return Run(folder, [_Program(popen)], logs)


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the result of `function(*arguments)` for each rank; `function` must be a module-level function.

    The ranks have torchrun's variables; nothing is initialized. Raises AssertionError, with what they printed, if one
    fails.
    """
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = fork(_call, [function, arguments, name], folder, ranks, {"OMP_NUM_THREADS": "1"}, meet=True).wait()
        sys.stdout.write(ended.out)
        sys.stderr.write(ended.err)
        assert ended.codes == [0] * ranks, f"exit codes {ended.codes}:\n{ended.err}"
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _ended(started: Run, code: int) -> Run:
    started.wait()
    assert started.code == code, f"exit code {started.code} instead of {code}\n{started.err}{started.out}"
    return started


def _nproc_variables(ranks: int) -> dict[str, str]:
    """Return the variables that the workers of `nproc=N` have in addition to those of their ranks."""
    return {
        "MESHTRAINER_NPROC": str(ranks),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


# ---------------------------------------------------------------------------------------------------------------
# Forking

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

_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Forked processes run on the CPU, since a process that has counted its GPUs cannot be forked (`warm.py`)."""

_PR_SET_PDEATHSIG = 1

_starting = threading.Lock()
_forked: list[Any] = []
_programs: list[subprocess.Popen[str]] = []
_logs: list[Path] = []


@functools.cache
def fork_server() -> Any:
    """Return multiprocessing's fork server, in which all modules that a run needs are imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # OpenMP reads its variables when it is loaded; the command line sets the same ones for several ranks.  The Hub's
    # client also reads its own once: a test that goes there starts a server.
    at_import = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    with _environment(PYTHONPATH=str(REPOSITORY), **at_import, **_ON_CPU):
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


def fork(
    target: Callable[..., int],
    arguments: Sequence[Any],
    folder: Path,
    ranks: int = 1,
    variables: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    meet: bool | None = None,
) -> Run:
    """Start `target(*arguments)`, which returns an exit code, in `ranks` forked processes.

    They get this process's environment and `variables`; with several ranks, or `meet`, also those of torchrun.
    """
    sys.audit("tests.fork", ranks)
    meet = ranks > 1 if meet is None else meet
    port = str(free_port()) if meet else ""
    logs = Path(tempfile.mkdtemp(prefix="meshtrainer-logs-"))
    _logs.append(logs)
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **(_rank_variables(rank, ranks, port) if meet else {}), **(variables or {})}
        work = (target, arguments, environment | _ON_CPU, str(logs / str(rank)), str(cwd))
        process = fork_server().Process(target=_main, args=work)
        with _starting:
            process.start()
            # `Process.start` polls all children that multiprocessing lists. An exit code can be read once: another
            # thread that is waiting for it would get 255.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        processes.append(process)
    _forked.extend(processes)
    return Run(folder, processes, logs)


def _rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _main(
    target: Callable[..., int], arguments: Sequence[Any], environment: Mapping[str, str], log: str, cwd: str
) -> None:
    """Run `target` in a forked process, whose output goes to the files `log`.out and `log`.err."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case the tests themselves are killed
    os.chdir(cwd)
    for number, ending in ((1, ".out"), (2, ".err")):
        descriptor = os.open(log + ending, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment of this process has it, not as that of the server had
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


def run_script(path: str, argv: Sequence[str]) -> int:
    """Run `python path argv...` in this process."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")
    return 0


def _call(function: Callable[..., Any], arguments: Sequence[Any], folder: str) -> int:
    """Write the result of `function(*arguments)` to `folder`, and end together with the other ranks."""
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    part = Path(folder) / f"{rank}.part"
    torch.save(function(*arguments), part)
    part.rename(Path(folder) / f"{rank}.pt")
    while len(list(Path(folder).glob("*.pt"))) < world_size:
        time.sleep(0.01)  # rank 0 hosts the store, and other ranks may still be connecting to this one
    return 0


@atexit.register
def kill_leftovers() -> None:
    """Kill all processes that tests started and that still run, and delete what they printed.

    Forked processes do not end with their parent: they are not daemons, because daemons cannot start data workers.
    """
    for process in _forked:
        if process.exitcode is None:
            process.kill()
            process.join()
    for program in _programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        if program.poll() is None:
            program.wait()
    for logs in _logs:
        shutil.rmtree(logs, ignore_errors=True)
    _forked.clear()
    _programs.clear()
    _logs.clear()


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
