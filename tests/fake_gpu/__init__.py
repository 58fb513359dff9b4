"""Fake GPUs: torch's CUDA build on a fake runtime and driver for which every call succeeds (runtime.c, driver.c).

A command on fake GPUs executes all host code for a GPU: streams, events, page-locked memory, process groups
of NCCL, and compilation of Triton kernels. No kernel runs, so all values are zero and times are meaningless.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import REPOSITORY

SOURCES = Path(__file__).parent
PYTHON = "MESHTRAINER_CUDA_PYTHON"
"""Variable with the Python interpreter of an environment with torch's CUDA build; by default the current one."""
MOST_BYTES = 64 << 30
"""Limit of a process's address space, so that an absurd allocation fails."""


@dataclass(frozen=True)
class Stand:
    """The interpreter with torch's CUDA build, and the fake libraries that are loaded before it."""

    python: str
    libraries: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """Return this process's environment with fake GPUs."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "PYTORCH_"))},
            "LD_PRELOAD": str(self.libraries / "runtime.so"),
            "LD_LIBRARY_PATH": str(self.libraries),
            "PYTHONPATH": str(REPOSITORY),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN is not among what says yes
            "OMP_NUM_THREADS": "1",
            **variables,
        }

    def command(self, arguments: Sequence[str], wrapped: Sequence[str] = ()) -> list[str]:
        """Return a command line of Python with limited address space."""
        return ["prlimit", f"--as={MOST_BYTES}", self.python, *wrapped, *arguments]

    def run(self, *arguments: str, wrapped: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the arguments; `variables` are added to its environment."""
        command, env = self.command(arguments, wrapped), self.environment(**variables)
        return subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True)


@functools.cache
def find_stand() -> Stand | str:
    """Build the fake libraries for this test run; return the stand, or the reason why there is none."""
    python = os.environ.get(PYTHON, sys.executable)
    look = "import torch, triton, sysconfig; print(torch.version.cuda or '', sysconfig.get_paths()['purelib'])"
    found = subprocess.run([python, "-c", look], capture_output=True, text=True)
    version, _, site = found.stdout.strip().partition(" ")
    if found.returncode or not version:
        return f"torch's CUDA build is not installed in {python}: see `make test-fake-gpu`"
    missing = [program for program in ("gcc", "prlimit") if shutil.which(program) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    headers = [Path(site, "nvidia", f"cu{version.split('.')[0]}", "include")]
    headers += [Path(site, "nvidia", "cuda_runtime", "include"), Path(site, "triton/backends/nvidia/include")]
    folder = Path(tempfile.mkdtemp(prefix="fake-gpu-"))
    options = ["-std=gnu11", "-O1", "-w", "-shared", "-fPIC", "-pthread", *(f"-I{path}" for path in headers)]
    driver = folder / "libcuda.so.1"
    for source, target in (("runtime.c", folder / "runtime.so"), ("driver.c", driver)):
        name = f"-Wl,-soname,{target.name}"
        subprocess.run(["gcc", *options, name, "-o", str(target), str(SOURCES / source)], check=True)
    (folder / "libcuda.so").symlink_to(driver)
    return Stand(python, folder)
