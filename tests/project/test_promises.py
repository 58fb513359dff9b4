"""Tests of the tests: the table of promises, the planted defects, the limits of durations, and the campaign's parts."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.budget import ALLOWANCE_S, DEFAULT_LIMIT_S, LIMIT_FACTOR, Budget, tier_of
from tests.campaign import PARTS, REST
from tests.old_defects import DEFECTS, find_code, untracked
from tests.helpers.forked import REPOSITORY
from tests.promises import TABLE, TESTS, read_promises


class Collected:
    """The tests that pytest collects in this process, as `test_file.py::test_name` without parameters."""

    def __init__(self) -> None:
        self.everyday: set[str] = set()
        self.campaign: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            file = item.path.name
            tier = self.campaign if tier_of(item) == "campaign" else self.everyday
            tier |= {file, f"{file}::{item.name.partition('[')[0]}"}


@functools.cache
def collected() -> Collected:
    found = Collected()
    assert pytest.main(["--collect-only", "-qq", "-s", "-p", "no:cacheprovider", str(TESTS)], plugins=[found]) == 0
    assert len(found.everyday) > len(found.campaign) > 20
    return found


@pytest.mark.slow
def test_each_promise_is_held_by_existing_tests_of_its_tier() -> None:
    found = collected()
    for promise in read_promises().values():
        assert set(promise.tests) <= found.everyday, f"{promise.name}: {set(promise.tests) - found.everyday}"
        assert set(promise.campaign) <= found.campaign, f"{promise.name}: {set(promise.campaign) - found.campaign}"
        assert promise.tests or (promise.campaign and promise.reason), f"{promise.name} has no test"


@pytest.mark.slow
def test_every_file_is_in_one_part_of_the_campaign() -> None:
    files = {name for name in collected().campaign if "::" not in name}
    named = [name for part in PARTS if part is not REST for name in part.files]
    assert len(named) == len(set(named))
    assert set(named) <= files
    assert set(REST.files) == files - set(named)


def test_no_two_test_files_have_the_same_name() -> None:
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_every_row_of_the_table_is_parsed() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `") and "make test" not in line]
    assert len(rows) == len(read_promises())
    for row in rows:
        for cell in row.split(" | ")[2:]:
            assert cell.count("`test_") == len(re.findall(r"`test_\w+\.py(?:::test_\w+)?`", cell)), row


def test_the_copy_for_a_defect_has_what_git_would_keep(tmp_path: Path) -> None:
    """A developer's environments, builds and torch for a fake GPU are gigabytes; .gitignore lists them all."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    kept = ["trainer/runs.py", "tests/data/build", "docs/exported/page.md", "docs/comparison.md"]
    left_out = [".fake-gpu/lib/torch.so", ".venv311/bin/python", ".git/HEAD", "runs/r/status.json", "exported/a.bin"]
    left_out += ["trainer/__pycache__/a.pyc", "meshtrainer.egg-info/PKG-INFO", "build/lib/a.py", "comparison.html"]
    for name in (*kept, *left_out):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    shutil.copy(REPOSITORY / ".gitignore", source)
    shutil.copytree(source, copy, ignore=untracked(source))
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert copied == {*kept, ".gitignore"}


def test_defects_can_be_planted() -> None:
    """Each matches one place in one function, leaves valid Python, and breaks a promise of the table."""
    promises = read_promises()
    assert len(DEFECTS) >= 30
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    for defect in DEFECTS:
        assert defect.promise in promises, defect.name
        path, text = defect.planted(REPOSITORY)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text())), defect.name


def test_code_is_found_in_any_layout() -> None:
    text = "def f():\n    return g(\n        a,\n        b,\n    )\n"
    ((begin, end),) = find_code(text, "g(a, b)")
    assert text[begin:end] == "g(\n        a,\n        b,\n    )"
    assert find_code(text, "g(a)") == []
    assert len(find_code("a + a", "a")) == 2


# ---------------------------------------------------------------------------------------------------------------
# Limits of durations


def budget(reference_s: Iterator[float] | float, **recorded: float) -> Budget:
    values = reference_s if isinstance(reference_s, Iterator) else iter([reference_s] * 9)
    return Budget({"reference_s": 0.1, "tests": recorded}, measure=lambda: next(values))


def test_limit_is_a_multiple_of_the_recorded_duration() -> None:
    limit_s = 10.0 * LIMIT_FACTOR + ALLOWANCE_S
    assert budget(0.1, known=10.0).overrun("known", "test", limit_s - 0.1) == ""
    message = budget(0.1, known=10.0).overrun("known", "test", limit_s + 0.1)
    assert message.startswith(f"known took {limit_s + 0.1:.1f} s: 10.0 s were recorded")


@pytest.mark.parametrize("tier", DEFAULT_LIMIT_S)
def test_limit_of_a_new_test_depends_on_its_tier(tier: str) -> None:
    assert budget(0.1).overrun("new", tier, DEFAULT_LIMIT_S[tier]) == ""
    assert "a new test of its tier" in budget(0.1).overrun("new", tier, DEFAULT_LIMIT_S[tier] + ALLOWANCE_S + 0.1)


def test_slow_machine_extends_limits_and_fast_one_keeps_them() -> None:
    seconds = 2 * DEFAULT_LIMIT_S["fast"] + ALLOWANCE_S
    assert budget(0.1).overrun("new", "fast", seconds)
    assert budget(0.21).overrun("new", "fast", seconds) == ""
    assert budget(0.01).overrun("new", "fast", DEFAULT_LIMIT_S["fast"]) == ""
    busy_once = budget(iter([0.21, 0.1]))
    assert busy_once.overrun("new", "fast", seconds) == ""
    assert busy_once.overrun("newer", "fast", seconds) == "", "it was busy, so it may have been"


def test_markers_set_the_tier() -> None:
    def item(*markers: str) -> SimpleNamespace:
        return SimpleNamespace(get_closest_marker=lambda name: name if name in markers else None)

    assert [tier_of(item(*markers)) for markers in ((), ("slow",), ("campaign",), ("slow", "campaign"))] == [
        "fast",
        "test",
        "campaign",
        "campaign",
    ]
