"""Tables fit the terminal without losing text; into a pipe, each row is one line."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.tiny import fit
from trainer.tables import table

HEADERS = ["checkpoint", "size", "mesh"]
ROWS = [
    ["step_00000001", "1.50 MiB", "replicate 2 x shard 4"],
    ["step_00000002[red]", "2 B", "a\N{HORIZONTAL ELLIPSIS}"],
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_no_text_is_lost_on_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with redirect_stdout(Terminal()):
        lines = table(HEADERS, ROWS, text_columns=(0, 2)).splitlines()
    assert max(map(len, lines)) <= columns
    found = sorted(re.sub(r"\s", "", "".join(lines)))
    assert found == sorted(re.sub(r"\s", "", "".join(["".join(HEADERS), *map("".join, ROWS)])))


@pytest.mark.parametrize("variables", [{"COLUMNS": "40"}, {"FORCE_COLOR": "1", "TERM": "dumb"}], ids=str)
def test_in_a_pipe_each_row_is_a_line(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with redirect_stdout(io.StringIO()):
        lines = table([*HEADERS, "note"], [[*row, "word " * 100] for row in ROWS]).splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", *(row[0] for row in ROWS)]
    assert "\x1b" not in "".join(lines)


def test_list_of_checkpoints_has_no_control_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even from the name of a folder."""
    monkeypatch.setenv("COLUMNS", "40")
    fit(tmp_path / "run", "train.steps=2", "checkpoint.every=1", "checkpoint.keep_last=0", "eval.every=1")
    run = (tmp_path / "run").rename(tmp_path / "run\x1b]0;x\x07")
    (run / "checkpoints" / "step_00000002").rename(run / "checkpoints" / "damaged-\x1b]0;x\x07step_00000002")
    listed = meshtrainer("checkpoints", run).out
    assert "\x1b" not in listed
    title, header, *rows = listed.splitlines()
    assert title.endswith("run]0;x/checkpoints")
    assert header.split()[0] == "checkpoint"
    assert [row.split()[0] for row in rows] == ["step_00000001", "damaged-]0;xstep_00000002"]
