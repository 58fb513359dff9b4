"""Tables, the start block and help fit the terminal, without losing text on a narrow one."""

from __future__ import annotations

import re
import sys
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trainer import checkpoints
from trainer.checkpoints import CheckpointEntry
from trainer.errors import CommandParser
from trainer.metrics.terminal import Terminal
from trainer.plan import forecast
from trainer.tables import table_lines

HEADS = ("source", "tokens", "share")
ROWS = [("books", "1,234", "12.00 %"), ("code and some more", "98,765,432", "88.00 %")]


def test_columns_that_fit_are_aligned() -> None:
    assert table_lines(HEADS, ROWS, 80, text_columns=(0,)) == [
        "source                  tokens    share",
        "books                    1,234  12.00 %",
        "code and some more  98,765,432  88.00 %",
    ]


def test_rows_of_a_table_that_does_not_fit_become_blocks() -> None:
    assert table_lines(HEADS, ROWS, 36) == [
        "source books",
        "  tokens: 1,234, share: 12.00 %",
        "source code and some more",
        "  tokens: 98,765,432, share: 88.00 %",
    ]


def test_text_in_the_last_column_is_wrapped() -> None:
    rows = [("saves", "every 0.8 s, pausing for 2.1 ms, published after 11 ms"), ("mtbf", "250 days")]
    assert table_lines(("", ""), rows, 40, text_columns=(0, 1)) == [
        "saves  every 0.8 s, pausing for 2.1 ms,",
        "       published after 11 ms",
        "mtbf   250 days",
    ]


@pytest.mark.parametrize("columns", [120, 80, 60, 40, 20])
def test_no_line_is_too_long_and_no_word_is_lost(columns: int) -> None:
    lines = table_lines(HEADS, ROWS, columns)
    assert max(map(len, lines)) <= columns
    words = set(re.split(r"[\s:]+|, ", " ".join(lines)))
    assert {word for row in (HEADS, *ROWS) for cell in row for word in cell.split()} <= words


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_checkpoint_list_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    fields = {"bytes": 2**30, "created": 0.0, "mesh": "replicate 2 x shard 4", "torch": "2.13.0+cpu"}
    entries = [
        CheckpointEntry(name="step_00000100", state="verified", evaluation={"loss": 1.25}, is_best=True, **fields),
        CheckpointEntry(name="step_00000200", state="quarantined", **fields),
    ]
    checkpoints._show_list("runs/mine/checkpoints", entries)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "\u2026" not in "".join(lines)
    for text in ("step_00000100", "verified", "1.2500 best", "step_00000200", "quarantined"):
        assert text in " ".join(map(str.strip, lines))


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_the_start_block_fits_its_terminal(columns: int) -> None:
    file = StringIO()
    screen = Terminal(Console(file=file, width=columns, force_terminal=True, color_system=None, soft_wrap=True))
    screen.show_summary(
        {"model": "llama, 135 M parameters, 31 FSDP units and the root", "plan": "a b c\n" + "word " * 30}
    )
    screen.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= columns
    assert "".join(lines).count("word") == 30


def test_help_of_a_command_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = CommandParser(
        "python -m trainer.some", "Do something.\n\n    python -m trainer.some " + 12 * "<argument> "
    )
    assert max(map(len, parser.format_help().splitlines())) > 80, "as it is, where it is not a terminal"
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert max(map(len, parser.format_help().splitlines())) <= 60


# ---------------------------------------------------------------------------------------------------------------
# Memory on a CPU


def forecast_of(monkeypatch: pytest.MonkeyPatch, peaks: list[float], device: str = "cpu", **checkpoint: Any) -> Any:
    """Return the forecast of a run with 2 GiB of tensors, a quarter of them weights, in a process of 0.5 GiB.

    Its checkpoints have 1 GiB.
    peaks: what is measured, one after the other.
    """
    monkeypatch.setattr(forecast, "peak_memory_gib", lambda device: peaks.pop(0) if len(peaks) > 1 else peaks[0])
    monkeypatch.setattr(forecast, "machine_of", lambda *arguments: None)
    plan = SimpleNamespace(
        peak_gib=2.0,
        checkpoint_bytes=2**30,
        mesh=SimpleNamespace(num_ranks=1),
        memory=SimpleNamespace(peak=SimpleNamespace(place="backward of root", by_kind={"parameters": 2**29})),
        machine=SimpleNamespace(is_measured=False, peak_flops=None),
    )
    monkeypatch.setattr(forecast, "make_plan", lambda *arguments: plan)
    section = SimpleNamespace(**{"every": 0, "mode": "async", **checkpoint})
    config = SimpleNamespace(checkpoint=section, train=SimpleNamespace(steps=10))
    world = SimpleNamespace(device=SimpleNamespace(type=device))
    return forecast.Forecast(config, None, world)  # type: ignore[arg-type]


def test_start_block_shows_memory_besides_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = forecast_of(monkeypatch, [0.5]).summary().splitlines()
    assert lines[0] == "2.00 GiB of tensors per rank at the peak, in the backward of root"
    assert lines[1] == "on top: 512.00 MiB for the process and its libraries,"
    assert lines[-1] == "in all about 3.25 GiB per rank, between 2.50 GiB and 3.70 GiB"
    saving = forecast_of(monkeypatch, [0.5], every=5).summary()
    assert "1.00 GiB for a copy that is saved in the background" in saving
    assert "between 3.50 GiB" in saving
    for unlike in ({"every": 10}, {"every": 5, "mode": "sync"}):
        assert "copy" not in forecast_of(monkeypatch, [0.5], **unlike).summary()
    on_gpu = forecast_of(monkeypatch, [0.5], "cuda", every=5)
    assert on_gpu.summary() == lines[0]
    assert on_gpu.peak_gib == 2.0


@pytest.mark.parametrize(("peak", "is_missed"), [(2.5, False), (3.5, False), (3.9, False), (4.0, True), (2.2, True)])
def test_only_values_outside_the_planned_range_are_reported(
    peak: float, is_missed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = forecast_of(monkeypatch, [0.5, peak])
    for _ in range(3):
        found.record_step(0.1, is_profiled=False)
    assert [text.startswith("peak memory was ") for text in found.mismatches()] == [True] * is_missed
