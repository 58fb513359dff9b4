"""Reads the table in tests/README.md, which lists the tests that check each promise, by tier."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS / "README.md"
_ROW = re.compile(r"^\| `([\w-]+)` \| (.+?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+\.py(?:::test_\w+)?)`")


@dataclass(frozen=True)
class Promise:
    """One row of the table."""

    name: str
    text: str
    tests: tuple[str, ...]
    """Tests in `make test`: `test_file.py::test_name`, or a whole file."""
    campaign: tuple[str, ...]
    """Further tests in `make test-campaign`."""
    reason: str
    """Why no test in `make test` checks it; empty if one does."""


def read_promises() -> dict[str, Promise]:
    """Return the rows of the table by name."""
    found = {}
    for name, text, tests, campaign in _ROW.findall(TABLE.read_text()):
        assert name not in found, f"two rows have the name {name}"
        regular_tests, campaign_tests = tuple(_TEST.findall(tests)), tuple(_TEST.findall(campaign))
        reason = "" if regular_tests else _TEST.sub("", campaign).strip(" ,:;")
        found[name] = Promise(name, text, regular_tests, campaign_tests, reason)
    return found


def path_of(test: str) -> str:
    """Return the path from the repository's root for `test_file.py` or `test_file.py::test_name`.

    The table has only file names without folders, so no two files may have the same name.
    """
    name, colons, function = test.partition("::")
    (path,) = TESTS.rglob(name)
    return f"{path.relative_to(TESTS.parent)}{colons}{function}"
