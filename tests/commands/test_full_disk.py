"""Commands that meet a full disk or a signal: one message, and no partial file, folder or temporary file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers.commands import Ended, meshtrainer
from tests.helpers.faults import small_disk
from tests.helpers.launch import fork, run_module
from tests.helpers.runs import SharedRun

pytestmark = pytest.mark.slow  # the run that all look at is trained in a process

MODELS = ["deep/model", "deep/weights.pt", "deep/weights.safetensors"]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk with space for only a few pages."""
    with small_disk(tmp_path / "full", "64k") as folder:
        (folder / "other").write_bytes(bytes(40 << 10))
        yield folder


def assert_refused(ended: Ended, folder: Path, path: Path) -> None:
    """Assert one message with the path, exit code 2, and nothing left."""
    assert ended.code == 2, ended.err
    assert ended.err.count("error:") == 1
    assert str(path) in ended.err
    assert "Traceback" not in ended.err
    assert [each.name for each in folder.iterdir()] == ["other"]


@pytest.mark.parametrize("name", MODELS)
def test_export_that_does_not_fit(name: str, one: SharedRun, full: Path) -> None:
    assert_refused(meshtrainer("export", one.folder, full / name), full, full / name)


def test_report_that_does_not_fit(one: SharedRun, full: Path) -> None:
    assert_refused(meshtrainer("report", one.folder, "--out", full / "r.html"), full, full / "r.html")


def test_shards_that_do_not_fit(full: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("word " * 20_000)
    ended = meshtrainer("prepare", text, "--out", full / "deep" / "corpus")
    assert_refused(ended, full, full / "deep" / "corpus")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_text_generated_onto_a_full_disk(one: SharedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import generate

    with open("/dev/full", "w") as nowhere:
        monkeypatch.setattr("sys.stdout", nowhere)
        assert generate.command_line([str(one.folder), "--prompt", "def ", "--max-tokens", "2"]) == 2
        monkeypatch.undo()


def test_output_that_fits_is_written(one: SharedRun, tmp_path: Path) -> None:
    for name in MODELS[1:]:
        assert meshtrainer("export", one.folder, tmp_path / name).code == 0
    found = torch.load(tmp_path / "deep/weights.pt")
    loaded = safetensors.torch.load_file(tmp_path / "deep/weights.safetensors")
    assert found.keys() == loaded.keys()
    assert all(torch.equal(found[name], loaded[name]) for name in found)


def export_and_be_stopped(folder: Path, target: Path, number: int, at: int) -> int:
    """Export, and get a signal when the `at`-th file in the target is opened."""
    opened = []

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{target}/"):
            opened.append(arguments[0])
            if len(opened) == at:
                os.kill(os.getpid(), number)

    sys.addaudithook(on_event)
    return run_module("trainer.export", [str(folder), str(target)])


@pytest.mark.parametrize("at", [1, pytest.param(2, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_export_leaves_nothing(number: signal.Signals, at: int, one: SharedRun, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    ended = fork(export_and_be_stopped, [one.folder, target, number, at], tmp_path).wait()
    assert ended.code == 128 + number, ended.err
    assert "Traceback" not in ended.err
    assert not target.parent.exists()
