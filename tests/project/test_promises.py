"""The table of tests/README.md lists every test file, and only files that exist."""

from __future__ import annotations

import re

import pytest

from tests.helpers.launch import REPOSITORY

TESTS = REPOSITORY / "tests"


def test_every_test_file_is_listed_with_the_promise_that_it_holds() -> None:
    table = (TESTS / "README.md").read_text().partition("| promise |")[2]
    listed = set(re.findall(r"`([\w/]+\.py)`", table))
    existing = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert listed == existing


def test_rows_that_the_campaign_holds_say_so(request: pytest.FixtureRequest) -> None:
    """A file without a test in `make test` is in a row with the word."""
    if len(request.session.items) < 1000 or "slow" in request.config.option.markexpr:
        pytest.skip("not all tests were collected")
    everyday = {item.path.relative_to(TESTS).as_posix() for item in request.session.items}
    rows = [line for line in (TESTS / "README.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        files = set(re.findall(r"`([\w/]+\.py)`", row))
        assert files <= everyday or "(campaign)" in row, row


def test_readme_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", (REPOSITORY / "README.md").read_text()))
    assert named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
