"""Tables and help fit the terminal, without losing text on a narrow one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.tiny import fit

PLAN = ["plan", "recipe=llama_small", "ranks=2", "device=h100"]


def words_of(text: str) -> set[str]:
    return set(re.split(r"[\s:,]+", text))


@pytest.mark.parametrize("columns", [40, *(pytest.param(n, marks=pytest.mark.campaign) for n in (80, 60))])
def test_tables_fit_and_no_word_is_lost(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = meshtrainer(*PLAN).out
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = meshtrainer(*PLAN).out
    assert max(map(len, narrow.splitlines())) <= columns
    assert max(map(len, wide.splitlines())) > 80
    assert "\u2026" not in narrow
    broken = {word for word in words_of(wide) if len(word) > 30 or "-" in word}  # paths and hyphens may break a line
    assert words_of(wide) - broken <= words_of(narrow)


@pytest.mark.parametrize("columns", [40, pytest.param(100, marks=pytest.mark.campaign)])
def test_list_of_checkpoints_fits(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, "train.steps=2", "checkpoint.every=1", "checkpoint.keep_last=0", "eval.every=1")
    monkeypatch.setenv("COLUMNS", str(columns))
    listed = meshtrainer("checkpoints", tmp_path).out
    rows = [line for line in listed.splitlines() if str(tmp_path) not in line]
    assert max(map(len, rows)) <= columns
    assert {"step_00000001", "step_00000002", "best"} <= words_of(listed)
