"""meshtrainer as a new user installs it: from a wheel, in a separate environment, without a checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import REPOSITORY


@dataclass(frozen=True)
class Installed:
    """The wheel, the sdist that it was built from, and the environment in which it is installed."""

    wheel: Path
    sdist: Path
    environment: Path

    def run(self, *command: str, folder: Path, **variables: str) -> str:
        """Run a command of the environment in a folder, assert that it succeeds, and return its output."""
        completed = self.try_run(*command, folder=folder, **variables)
        assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
        return completed.stdout + completed.stderr

    def try_run(self, *command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {"CUDA_VISIBLE_DEVICES": "", **variables, "PATH": path}
        return subprocess.run(command, cwd=folder, env=inherited | variables, capture_output=True, text=True)


_PACKAGED = ("trainer", "recipes", "objectives", "conf", "launch", "examples", "pyproject.toml", "README.md", "LICENSE")
_BUILD = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist from a copy of its files, and the wheel from the sdist; return the paths (wheel, sdist)."""
    copy = folder / "copy"
    copy.mkdir()
    for name in _PACKAGED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy2(source, copy / name)
    sdist = folder / _backend("build_sdist", copy, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return folder / _backend("build_wheel", unpacked, folder), sdist


def _backend(hook: str, source: Path, target: Path) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", _BUILD, hook, str(target)], cwd=source, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout.splitlines()[-1]


def install(base: Path) -> Installed:
    """Return the wheel, installed in a new environment that has this one's libraries but not its meshtrainer.

    All workers of pytest-xdist share the one below `base`.
    """
    folder = base / "installed"
    with open(base / "installed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            wheel, _ = build(folder)
            environment = folder / "environment"
            venv.create(environment, with_pip=True)
            own_packages = Path(sysconfig.get_path("purelib"))
            (site,) = (environment / "lib").glob("python*/site-packages")
            # List folders, because .pth files in them are not read: one of these refers to this checkout.
            linked_folders = [
                line
                for file in own_packages.glob("*.pth")
                for line in file.read_text().splitlines()
                if os.path.isdir(line)
            ]
            python = str(environment / "bin" / "python")
            command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
            completed = subprocess.run(command, capture_output=True, text=True)
            assert completed.returncode == 0, completed.stdout + completed.stderr
            (site / "libraries.pth").write_text("\n".join([str(own_packages), *linked_folders]) + "\n")
            (folder / "done").touch()
        (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        return Installed(wheel, sdist, folder / "environment")
