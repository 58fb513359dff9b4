"""Runs the trainer's command line and times its parts, up to the first line of metrics.

    python -m bench.stopwatch TIMES.json recipe=llama_small ...

The time of a part excludes the other parts that it calls.  `bench.startup` runs this module, which imports very little
itself, so that every expensive import is attributed.
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import json
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

LAUNCHED = "BENCH_LAUNCHED"
"""Environment variable with the start time of the process, in seconds since the epoch."""

PACKAGES = {
    "numpy": "numpy",
    "omegaconf": "omegaconf",
    "yaml": "omegaconf",
    "torch": "torch",
    "torch.distributed.tensor": "torch's DTensor",
    "sympy": "sympy (of DTensor)",
    "torch.distributed.fsdp": "torch's FSDP2",
    "torch.distributed.checkpoint": "torch's checkpoints",
    "torch._dynamo": "torch._dynamo (of FSDP2)",
    "torch.utils.tensorboard": "tensorboard",
    "torchdata": "torchdata",
    "rich": "rich",
    "wandb": "wandb",
    "fsspec": "fsspec",
    "safetensors": "safetensors",
    "isal": "isal",
    "matplotlib": "matplotlib",
    "trainer.trainer": "the trainer itself",
}
"""Packages whose import is a separate part, including the imports of unlisted packages that it causes."""

METHODS = {
    "trainer.config.load": {"load": "configuration"},
    "trainer.config.rules": {"check_config": "configuration"},
    "trainer.data.opening": {"open_source": "data"},
    "trainer.distributed.world": {"World.__init__": "process group", "World.build_mesh": "process group"},
    "trainer.lifecycle.checks": {"check_same_run": "self-check", "check_start": "self-check"},
    "trainer.plan.forecast": {"resolve_on_device": "planner's forecast", "Forecast.summary": "planner's forecast"},
    "trainer.trainer": {
        "Trainer.build_model": "model",
        "Trainer.build_optimizer": "optimizer",
        "Trainer.build_loader": "data",
        "Trainer.build_eval_loader": "data",
        "Trainer._set_up_run": "checkpoints, folder, metrics",
        "Trainer.load_checkpoint": "checkpoints, folder, metrics",
        "Trainer.train_step": "first step",
    },
    "trainer.lifecycle.folder": {"RunFolder.begin": "checkpoints, folder, metrics"},
    "trainer.metrics.writers": {"Metrics.open": "checkpoints, folder, metrics"},
}
"""The functions to time, by module, and the part to which each belongs.  A missing function is an error."""

INTERPRETER, IMPORT, GARBAGE_COLLECTION, REST = "interpreter", "import ", "garbage collection", "everything else"


class Stopwatch:
    """Attributes CPU and wall time to the part on top of a stack."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {INTERPRETER: [time.process_time(), time.time() - _launched()]}
        self._stack, self._last = [REST], self._now()

    def _now(self) -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def _attribute(self) -> None:
        now = self._now()
        times = self.parts.setdefault(self._stack[-1], [0.0, 0.0])
        for kind in (0, 1):
            times[kind] += now[kind] - self._last[kind]
        self._last = now

    def begin(self, part: str) -> None:
        self._attribute()
        self._stack.append(part)

    def end(self) -> None:
        self._attribute()
        self._stack.pop()

    @contextmanager
    def during(self, part: str) -> Any:
        self.begin(part)
        try:
            yield
        finally:
            self.end()

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Callback for `gc.callbacks`: attribute garbage collection to its own part."""
        if phase == "start":
            self.begin(GARBAGE_COLLECTION)
        else:
            self.end()

    def result(self) -> dict[str, Any]:
        """Return the parts so far as [CPU s, wall s], and their sums."""
        self._attribute()
        cpu_s, wall_s = (sum(times[kind] for times in self.parts.values()) for kind in (0, 1))
        return {"cpu_s": cpu_s, "wall_s": wall_s, "parts": self.parts}


class TimingFinder:
    """Import finder that wraps Python's own and times the import of each listed module."""

    def __init__(
        self, stopwatch: Stopwatch, is_first_line: Callable[[Any], bool], exit_process: Callable[[], None]
    ) -> None:
        self._stopwatch, self._is_first_line, self._exit = stopwatch, is_first_line, exit_process

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PACKAGES and name not in METHODS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._timed(name, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _timed(self, name: str, execute: Callable[..., None]) -> Callable[[types.ModuleType], None]:
        def timed(module: types.ModuleType) -> None:
            if name in PACKAGES:
                with self._stopwatch.during(IMPORT + PACKAGES[name]):
                    execute(module)
            else:
                execute(module)
            for path, part in METHODS.get(name, {}).items():
                self._time_function(module, path, part)
            if name == "trainer.metrics.writers":
                self._exit_after_first_line(module.Metrics)

        return timed

    def _time_function(self, module: types.ModuleType, path: str, part: str) -> None:
        *owners, name = path.split(".")
        owner: Any = functools.reduce(getattr, owners, module)
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            with self._stopwatch.during(part):
                return function(*args, **kwargs)

        setattr(owner, name, timed_function)

    def _exit_after_first_line(self, metrics: Any) -> None:
        write = metrics.write

        def write_and_exit(sinks: Any, record: Any) -> Any:
            written = write(sinks, record)
            if self._is_first_line(record):
                self._exit()
            return written

        metrics.write = write_and_exit


def _launched() -> float:
    return float(os.environ.get(LAUNCHED, time.time()))


def main(path: str, arguments: list[str]) -> int:
    """Run the command line; once the first step is recorded, write the times to `path` and end the process."""
    stopwatch = Stopwatch()
    gc.callbacks.append(stopwatch.on_collection)

    def write_and_exit() -> None:
        with open(path, "w") as file:
            json.dump({**stopwatch.result(), "modules": sorted(sys.modules)}, file)
        os._exit(0)

    sys.meta_path.insert(0, TimingFinder(stopwatch, lambda record: record["kind"] == "train", write_and_exit))  # type: ignore[arg-type]
    from trainer.run import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
