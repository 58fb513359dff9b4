"""Commands that write to a full disk: one message with the path and both sizes, and no partial file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch

from tests.checkpoint.test_faults import small_disk
from tests.helpers.runs import SharedRun
from trainer import export, generate, prepare
from trainer.errors import EXIT_USER_ERROR, UserError
from trainer.files import writing_to
from trainer.report import __main__ as report
from trainer.weights import exporting

pytestmark = pytest.mark.slow  # the run that all look at is trained in a process


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk with space for only a few pages."""
    with small_disk(tmp_path / "full", "64k") as folder:
        (folder / "other").write_bytes(bytes(40 << 10))
        yield folder


def message(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("name", ["deep/model", "deep/weights.pt", "deep/weights.safetensors"])
def test_export_that_does_not_fit_is_not_started(
    name: str, one: SharedRun, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.command_line([str(one.ran.folder), str(full / name)]) == EXIT_USER_ERROR
    said = message(capsys)
    assert f"target={full / name}: cannot be written (No space left on device): needs " in said
    assert "MiB, 0.0 MiB were free" in said
    assert [path.name for path in full.iterdir()] == ["other"]


@pytest.mark.parametrize("name", ["deep/model", "deep/weights.pt", "deep/weights.safetensors"])
def test_export_leaves_nothing_if_the_disk_fills_up(
    name: str, one: SharedRun, full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different process takes the space that was free at the start."""
    monkeypatch.setattr("trainer.files.free_bytes", lambda path: 1 << 40)
    assert export.command_line([str(one.ran.folder), str(full / name)]) == EXIT_USER_ERROR
    assert f"target={full / name}: cannot be written (No space left on device): needs " in message(capsys)
    assert [path.name for path in full.iterdir()] == ["other"]


def test_report_is_written_completely_or_not_at_all(
    one: SharedRun, full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = full / "r.html"
    assert report.command_line([str(one.ran.folder), "--out", str(page)]) == EXIT_USER_ERROR
    said = message(capsys)
    assert f"--out={page}: cannot be written (No space left on device): needs 0." in said
    assert "MiB, 0.0 MiB were free" in said
    monkeypatch.setattr("trainer.files.free_bytes", lambda path: 1 << 40)
    assert report.command_line([str(one.ran.folder), "--out", str(page)]) == EXIT_USER_ERROR
    assert f"--out={page}: cannot be written (No space left on device)" in message(capsys)
    assert [path.name for path in full.iterdir()] == ["other"]


def test_a_failed_write_on_a_disk_with_room_is_not_called_full(tmp_path: Path) -> None:
    """torch.save gives no reason."""
    with pytest.raises(UserError) as raised, writing_to("target", tmp_path / "w.pt"):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert "cannot be written (PytorchStreamWriter failed writing file data/0: file write failed)" in str(raised.value)
    assert "No space left" not in str(raised.value)


@pytest.mark.parametrize("is_seen", [True, False])
def test_shards_that_do_not_fit(
    is_seen: bool, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("word " * 20_000)
    if not is_seen:
        monkeypatch.setattr("trainer.files.free_bytes", lambda path: 1 << 40)
    out = full / "deep" / "corpus"
    assert prepare.command_line([str(text), "--out", str(out), "--procs", "1"]) == EXIT_USER_ERROR
    assert f"--out={out}: cannot be written (No space left on device): needs 0.2 MiB" in message(capsys)
    assert [path.name for path in full.iterdir()] == ["other"]


def test_generated_text_on_a_full_disk(
    one: SharedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as nowhere:
        monkeypatch.setattr("sys.stdout", nowhere)
        code = generate.command_line([str(one.ran.folder), "--prompt", "def ", "--max-tokens", "2"])
        monkeypatch.undo()
    assert code == EXIT_USER_ERROR
    memory, error = message(capsys).split("\n", 1)
    assert memory.startswith("memory: ")
    assert error == "error: standard output: cannot be written: the disk is full\n  to fix: free some space there\n"


@pytest.mark.parametrize("when", ["header", "rename"])
def test_an_export_that_is_interrupted_leaves_nothing(
    when: str, one: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_write_safetensors" if when == "header" else "_prepare_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export.export_checkpoint(one.ran.folder, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


def test_output_that_fits_is_written(one: SharedRun, tmp_path: Path) -> None:
    (written,) = export.export_checkpoint(one.ran.folder, tmp_path / "deep" / "weights.pt")
    (other,) = export.export_checkpoint(one.ran.folder, tmp_path / "deep" / "weights.safetensors")
    found, loaded = torch.load(written), safetensors.torch.load_file(other)
    assert found.keys() == loaded.keys()
    assert all(torch.equal(found[name], loaded[name]) for name in found)
