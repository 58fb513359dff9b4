"""The optional libraries and compilers that settings need, found without importing torch.

They are checked before anything is built, so that a missing one is reported in one clear message.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from trainer.config.schema import AUTO, LogSection, RunConfig
from trainer.errors import nearest, setting_error
from trainer.registry import entry_points


def check_requirements(config: RunConfig, device_type: str) -> None:
    """Raise UserError for a missing library or compiler.  device_type: `cpu` or `cuda`."""
    _check_trackers(config.log)
    check_float8_installed(config.train.float8)
    if config.train.compile is True:
        _check_compilers("train.compile", True, device_type, "train.compile=false")
    for key, dtype in (
        ("train.weights_dtype", config.train.weights_dtype),
        ("optim.state_dtype", config.optim.state_dtype),
    ):
        # With bfloat16 weights or moments, the optimizer step is a compiled kernel.
        if dtype != "float32" and device_type == "cuda" and not config.fsdp.cpu_offload:
            _check_compilers(key, dtype, device_type, f"{key}=float32")


TRACKER_ENTRY_POINTS = "meshtrainer.trackers"
"""Entry-point group in which other packages register their trackers."""

BUILT_IN_TRACKERS = {
    "wandb": ("Weights & Biases", "trainer.metrics.trackers:WandB"),
    "tensorboard": ("TensorBoard", "trainer.metrics.trackers:TensorBoard"),
    "trackio": ("Trackio", "trainer.metrics.trackers:Trackio"),
    "mlflow": ("MLflow", "trainer.metrics.trackers:MLflow"),
}
"""The built-in trackers by the library that each needs, which is also its name in `log.trackers`: its product name, and
its class."""


def _check_trackers(log: LogSection) -> None:
    """Raise UserError if a configured tracker does not exist, or if a library that `log` needs is not installed."""
    installed = [point.name for point in entry_points(group=TRACKER_ENTRY_POINTS)]
    names = list(dict.fromkeys((*BUILT_IN_TRACKERS, *installed)))
    for name in log.trackers:
        if name not in names:
            best = nearest(name, names)
            rule = f"no tracker is called {name!r}; there are {', '.join(names)}"
            raise setting_error("log.trackers", log.trackers, rule, None if best is None else [best])
        if name in BUILT_IN_TRACKERS:
            product, _ = BUILT_IN_TRACKERS[name]
            _require(
                "log.trackers", log.trackers, name, product, "wandb" if name == "wandb" else f"meshtrainer[{name}]"
            )
    if log.tensorboard:
        _require("log.tensorboard", True, "tensorboard", "TensorBoard", "meshtrainer[tensorboard]")
    if log.prometheus is not None:
        package = "meshtrainer[prometheus]"
        _require("log.prometheus", log.prometheus, "prometheus_client", "the prometheus_client library", package)


def _require(key: str, value: object, module: str, product: str, package: str) -> None:
    """Raise UserError if the module that a setting needs is not installed.

    product: what the module belongs to, in words.
    package: what to give to pip.
    """
    if not _is_installed(module):
        fix = f"pip install {shlex.quote(package)}, or leave it out"
        raise setting_error(key, value, f"{product} is not installed", fix=fix)


def check_float8_installed(scaling: str) -> None:
    """Raise UserError if `train.float8=scaling` needs torchao and it is not installed."""
    if scaling != "none":
        _require("train.float8", scaling, "torchao", "the torchao library", "meshtrainer[float8]")


def likely_device(device: str) -> str:
    """Return the type that `run.device=device` resolves to on this machine, as far as it can be known without torch."""
    if device != "auto":
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return "cuda" if has_gpu and visible not in ("", "-1") else "cpu"


@functools.cache
def can_compile(device_type: str) -> bool:
    """Return whether torch.compile has the compilers it needs: Triton and a C compiler on a GPU, C++ on a CPU."""
    return not any(_missing_compiler(device_type))


def compiles_blocks(value: bool | str, device_type: str) -> bool:
    """Return whether `train.compile=value` compiles the blocks on a device of type `cpu` or `cuda`."""
    return value is True or (value == AUTO and device_type == "cuda" and can_compile("cuda"))


def compiles_when_planned(value: bool | str, device_type: str) -> bool:
    """Return whether a plan assumes that `train.compile=value` compiles the blocks.

    A GPU on another machine is assumed to have a compiler.
    """
    is_elsewhere = device_type == "cuda" and likely_device(AUTO) != "cuda"
    return compiles_blocks(value, device_type) or (value == AUTO and is_elsewhere)


def _check_compilers(key: str, value: object, device_type: str, alternative: str) -> None:
    """Raise UserError if a compiler that torch.compile needs is missing."""
    rule, fix = _missing_compiler(device_type)
    if rule:
        raise setting_error(key, value, rule, fix=f"{fix}, or {alternative}")


def _missing_compiler(device_type: str) -> tuple[str, str]:
    """Return the `rule` and `fix` of the error for a missing compiler; empty strings if none is missing."""
    if device_type == "cuda" and not _is_installed("triton"):
        return "needs Triton, which is included in torch's CUDA builds", "pip install triton"
    if device_type == "cuda":
        language = "C"
        variable = "CC"
        usual_names = ["gcc", "clang"]
    else:
        language = "C++"
        variable = "CXX"
        usual_names = ["clang++" if sys.platform == "darwin" else "g++"]
    names = shlex.split(os.environ.get(variable, ""))[:1] or usual_names
    if any(shutil.which(name) for name in names):
        return "", ""
    rule = f"needs a {language} compiler, but {' and '.join(names)} {'are' if len(names) > 1 else 'is'} not on PATH"
    return rule, f"install one (apt install g++), set {variable} to its path"


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # a module without a __spec__ was imported
        return library in sys.modules
