"""The newest versions of libraries that the tests have passed with; the start block names newer ones."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable

NEWEST_TESTED = {
    "torch": "2.13.0",
    "torchdata": "0.11.0",
    "transformers": "5.24.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "omegaconf": "2.4.0",
}
"""The libraries whose behaviour a run depends on; a test keeps the versions equal to those in constraints.txt."""


def newer_libraries(version_of: Callable[[str], str] = importlib.metadata.version) -> str:
    """Return a line that names the installed libraries which are newer than the newest tested ones; empty without any.

    version_of: returns the installed version of a library, or raises PackageNotFoundError.
    """
    found = []
    for name, tested in NEWEST_TESTED.items():
        try:
            installed = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _release(installed) > _release(tested):
            found.append(f"{name} {installed} (tested up to {tested})")
    return f"newer than tested: {', '.join(found)}" if found else ""


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) for "2.13.0+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return () if numbers is None else tuple(map(int, numbers[0].split(".")))
