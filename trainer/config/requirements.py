"""Checks the optional libraries and compilers that a configuration needs.

The checks run before anything is built, so that a missing requirement is one clear message.  Does not import torch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.config.sections.limits import AUTO
from trainer.errors import setting_error


def check_requirements(config: RunConfig, device_type: str) -> None:
    """Raise UserError for a missing library or compiler.  device_type: `cpu` or `cuda`."""
    if config.log.tensorboard and not _is_installed("tensorboard"):
        rule = "TensorBoard is not installed"
        raise setting_error("log.tensorboard", True, rule, fix="pip install 'meshtrainer[tensorboard]', or false")
    check_float8_installed(config.train.float8)
    if config.train.compile is True:
        _check_compilers("train.compile", True, device_type, "train.compile=false")
    for key, dtype in (
        ("train.weights_dtype", config.train.weights_dtype),
        ("optim.state_dtype", config.optim.state_dtype),
    ):
        # With bfloat16 weights or moments, the optimizer step is a compiled kernel.
        if dtype == "bfloat16" and device_type == "cuda" and not config.fsdp.cpu_offload:
            _check_compilers(key, dtype, device_type, f"{key}=float32")


def check_float8_installed(setting: str) -> None:
    """Raise UserError if `train.float8` needs torchao and it is not installed."""
    if setting != "none" and not _is_installed("torchao"):
        rule = "float8 needs the library `torchao`: pip install 'meshtrainer[float8]'"
        raise setting_error("train.float8", setting, rule, "none")


def likely_device(asked: str) -> str:
    """Return the device type that `run.device` resolves to here, as far as can be determined without torch."""
    if asked != "auto":
        return asked
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return "cuda" if has_gpu and visible not in ("", "-1") else "cpu"


@functools.cache
def can_compile(device_type: str) -> bool:
    """Return whether torch.compile has the compilers it needs: Triton and a C compiler on a GPU, C++ on a CPU."""
    return not any(_missing_compiler(device_type))


def compiles_blocks(setting: bool | str, device_type: str) -> bool:
    """Return whether `train.compile` compiles the blocks on a device of type `cpu` or `cuda`."""
    return setting is True or (setting == AUTO and device_type == "cuda" and can_compile("cuda"))


def compiles_when_planned(setting: bool | str, device_type: str) -> bool:
    """Return whether blocks will be compiled on a planned device; a GPU elsewhere is assumed to have a compiler."""
    is_elsewhere = device_type == "cuda" and likely_device(AUTO) != "cuda"
    return compiles_blocks(setting, device_type) or (setting == AUTO and is_elsewhere)


def _check_compilers(key: str, value: object, device_type: str, instead: str) -> None:
    """Raise UserError unless torch.compile has the compilers it needs."""
    rule, fix = _missing_compiler(device_type)
    if rule:
        raise setting_error(key, value, rule, fix=f"{fix}, or {instead}")


def _missing_compiler(device_type: str) -> tuple[str, str]:
    """Return the `rule` and `fix` of the error for a missing compiler; empty strings if none is missing."""
    if device_type == "cuda" and not _is_installed("triton"):
        return "needs Triton, which is included in torch's CUDA builds", "pip install triton"
    language, variable, known = (
        ("C", "CC", ("gcc", "clang"))
        if device_type == "cuda"
        else ("C++", "CXX", ("clang++",) if sys.platform == "darwin" else ("g++",))
    )
    names = shlex.split(os.environ.get(variable, ""))[:1] or known
    if any(shutil.which(name) for name in names):
        return "", ""
    rule = f"needs a {language} compiler, but {' and '.join(names)} {'are' if len(names) > 1 else 'is'} not on PATH"
    return rule, f"install one (apt install g++), set {variable} to its path"


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # an imported module without a __spec__
        return library in sys.modules
