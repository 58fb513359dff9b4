"""Commands that are interrupted by a signal or a full disk: one line is printed, and no partial file is left."""

from __future__ import annotations

import errno
import json
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from trainer import export, load_config
from trainer.errors import EXIT_INTERRUPTED, run_command
from trainer.files import verify_checksum
from trainer.metrics.follower import TrackingFile
from trainer.plan.machine import calibration_path, write_calibration
from trainer.report import __main__ as report
from trainer.run import run_trainer


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def full(path: Path, content: Any) -> NoReturn:
    path.touch()
    raise OSError(errno.ENOSPC, "No space left on device")


def test_ctrl_c_ends_a_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(interrupt) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_interrupted_command_leaves_no_temporary_folder(number: signal.Signals) -> None:
    made: list[Path] = []

    def work() -> int:
        assert signal.getsignal(number) is not signal.SIG_DFL, "it would end these tests"
        with tempfile.TemporaryDirectory() as folder:
            made.append(Path(folder))
            signal.raise_signal(number)
        return 0

    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert run_command(work) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert [folder.exists() for folder in made] == [False]


def test_ctrl_c_before_an_evaluation_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.ignore_termination", lambda: None)  # these tests continue
    interrupted: Any = lambda _: interrupt()  # noqa: E731 - in the place of a Trainer's class
    assert run_trainer(load_config("llama_small"), interrupted, lambda _: 0) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"


def test_report_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("the page of before")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        report._write_all({tmp_path / "report.html": b"page"})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "the page of before")]


def test_plain_weight_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(_: object, path: Path) -> NoReturn:
        path.touch()
        interrupt()

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        export._write_state_dict(torch.nn.Linear(1, 1), tmp_path / "weights.pt")
    assert list(tmp_path.iterdir()) == []


def test_calibration_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_calibration("cpu", {"memory": 1.0})
    monkeypatch.setattr("trainer.files.os.fsync", lambda _: interrupt())
    with pytest.raises(KeyboardInterrupt):
        write_calibration("cpu", {"memory": 2.0})
    path = calibration_path("cpu")
    assert list(path.parent.iterdir()) == [path]
    assert verify_checksum(json.loads(path.read_text())) == {"memory": 1.0}


def test_an_empty_file_of_trackers_is_none(tmp_path: Path) -> None:
    """A disk that was full as the run began has left the file empty."""
    (tmp_path / TrackingFile.NAME).touch()
    first = TrackingFile(tmp_path, None)
    assert first.id
    first.set_last_sent("mine", 7)
    again = TrackingFile(tmp_path, "another")
    assert (again.id, again.last_sent("mine"), again.last_sent("other")) == (first.id, 7, 0)
