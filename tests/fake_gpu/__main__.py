"""Runs the tests on fake GPUs, in an environment with torch's CUDA build.

    python -m tests.fake_gpu [--torch 2.11.0] [-k EXPRESSION]

If this interpreter's torch is a CUDA build, that is tested. Otherwise an environment with the requested version is
created in .fake-gpu/, which takes a few gigabytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.fake_gpu import PYTHON
from tests.helpers.launch import REPOSITORY


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", default="", help="version of torch; by default the one that is here, or the newest")
    parser.add_argument("-k", dest="expression", default="", help="only the tests that pytest selects by this")
    options = parser.parse_args()
    python = os.environ.get(PYTHON) or (sys.executable if not options.torch and is_cuda_build(sys.executable) else "")
    os.environ[PYTHON] = python or make_environment(options.torch)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/project/test_fake_gpu.py"]
    return subprocess.run([*command, "-k", options.expression], cwd=REPOSITORY).returncode


def is_cuda_build(python: str) -> bool:
    """Return whether that interpreter's torch is a CUDA build."""
    look = "import sys, torch, triton; sys.exit(torch.version.cuda is None)"
    return subprocess.run([python, "-c", look], capture_output=True).returncode == 0


def make_environment(version: str) -> str:
    """Return the interpreter of an environment with that torch and the trainer's requirements; create it if needed."""
    folder = REPOSITORY / ".fake-gpu" / (version or "newest")
    python = str(folder / "bin" / "python")
    if not Path(python).exists() or not is_cuda_build(python):
        venv.create(folder, with_pip=True)
        required = [f"torch==={version}" if version else "torch", "-e", f"{REPOSITORY}[float8]"]  # no 2.13.0+cpu
        subprocess.run([python, "-m", "pip", "install", "--quiet", *required], check=True)
        if not is_cuda_build(python):
            sys.exit(f"{folder}: the torch {version} that pip finds is no CUDA build; name another with --torch")
    return python


if __name__ == "__main__":
    sys.exit(main())
