"""Forty deliberate defects, each of which the tests must find: `python -m tests.defects`.

A defect is a function in `plants.py` that replaces an object of the product or of a library in a running process: no
file changes. Importing this package plants the defect that the environment variable DEFECT names, and does nothing
without it. `conftest.py` imports it into the tests' own process, and the server from which the tests fork their ranks
imports it before anything else.

Each planted process, and each process forked from one, leaves a mark: a file in the folder DEFECT_MARKS, named after
its process, with the process that it was forked from. A server ignores modules that it cannot import, so without the
mark of a rank, the tests may not have met the defect at all.

DEFECT_CACHE names the cache folder of these tests: a defect may leave a damaged cache, which other tests must not read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

DEFECT, MARKS, CACHE = "DEFECT", "DEFECT_MARKS", "DEFECT_CACHE"
NOTHING = "nothing"
"""The defect that plants nothing: no test may find it."""

Kind = Literal["tests", "ranks"]
"""The processes in which a defect must have been planted: the tests' own, or ranks that they have forked."""


@dataclass(frozen=True)
class Defect:
    """A deliberate defect, and the tests that must find it."""

    name: str
    plant: Callable[[], None]
    acts_in: Kind
    file: str
    """The test file that must find it."""
    words: str = ""
    """pytest's `-k`, which selects tests of the file."""
    timeout_s: int = 0
    """Limit for each test, if the tests hang with the defect; 0 for the usual one."""


P = ParamSpec("P")
R = TypeVar("R")


def replace(found: Callable[P, R], replacement: Callable[P, R]) -> None:
    """Let every module that has imported the function `found` have `replacement`, except the one with the defects.

    A replacement may thus call what it replaces.
    """
    num_replaced = 0
    for module in [module for name, module in sys.modules.items() if name != "tests.defects.plants"]:
        for name, value in list(vars(module).items()):
            if value is found:
                setattr(module, name, replacement)
                num_replaced += 1
    assert num_replaced, f"no module has {found!r}"


def marks_of(folder: Path, tests: int) -> set[Kind]:
    """Return the kinds of processes that left a mark. tests: the tests' own process."""
    kinds: set[Kind] = set()
    for mark in folder.iterdir():
        parent = mark.read_text()
        if not parent:
            kinds |= {"tests"} if mark.name == str(tests) else set()
        elif parent != str(tests):
            kinds.add("ranks")
    return kinds


def _plant(name: str) -> None:
    from tests.defects.plants import DEFECTS

    if name != NOTHING:
        DEFECTS[name].plant()
    _mark("")
    planted = str(os.getpid())
    os.register_at_fork(after_in_child=lambda: _mark(planted))


def _mark(parent: str) -> None:
    (Path(os.environ[MARKS]) / str(os.getpid())).write_text(parent)


if DEFECT in os.environ:
    _plant(os.environ[DEFECT])
