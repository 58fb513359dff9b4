"""Credentials are neither stored nor printed, and no terminal escape sequence reaches a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError, load_config, run
from trainer.config.rules import check_config
from trainer.errors import print_stderr, print_stdout

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "is_secret"),
    [
        (f"s3://key:{SECRET}@bucket/run", True),
        (f"https://{SECRET}@host/run", True),
        (f"https://host/run?a=1&token={SECRET}", True),
        (f"https://host/run?X-Amz-Date=1&X-Amz-Signature={SECRET}", True),
        ("s3://bucket/run", False),
        ("https://host:8080/run@2?versionId=3", False),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(
    url: str, is_secret: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"train.init_from={url}", *([f"data.path={{a: '{url}', b: x}}"] if is_secret else [])]
    for setting in settings:
        code = run.main(["recipe=llama_small", setting, "--print-config"])
        printed = "".join(capsys.readouterr())
        assert SECRET not in printed
        assert code == (2 if is_secret else 0)
        assert ("environment" in printed and setting.partition("=")[0] in printed) if is_secret else url in printed


@pytest.mark.slow
def test_credentials_are_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the folder of a run, nor in messages about a URL that cannot be used."""
    with pytest.raises(UserError) as refused:
        Trainer(tiny_config(tmp_path / "run", f"checkpoint.dir=s3://me:{SECRET}@host/ck")).fit()
    print_stderr(str(refused.value))
    assert SECRET not in str(refused.value) + "".join(capsys.readouterr())
    fit(tmp_path / "run", "train.steps=1", f"run.on_end=true --password {SECRET}")
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not any(SECRET.encode() in content for content in kept)


ATTACKS = {
    "title": ("\x1b]0;PWNED\x07", ""),
    "clear": ("\x1b[2J\x1b[H", ""),
    "C1": ("\x9d0;PWNED\x9c\x9b2J", ""),
    "nested": ("\x1b\x1b[0m[2J", "[2J"),
    "overwriting": ("error\rfine\b\b\x7f", "errorfine"),
    "half a character": ("\udc9b2J", "\ufffd2J"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_escape_sequences_are_stripped(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, left = ATTACKS[attack]
    print_stderr(f"before {text} after\n\tnext line: ü, 日本")
    print_stdout(f"before {text} after\n\tnext line: ü, 日本")
    cleaned = f"before {left} after\n\tnext line: ü, 日本\n"
    assert capsys.readouterr() == (cleaned, cleaned)


@pytest.mark.parametrize("name", ["a\x9bb", "a\x7fb", "a\x1b[2Jb"])
def test_run_names_with_control_characters_are_rejected(name: str) -> None:
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", [f"run.name={name}"]), 1, 1)
    assert str(refused.value).startswith("run.name=")


def test_listing_of_checkpoints_shows_names_as_text(tmp_path: Path) -> None:
    """Names in a stranger's folder are neither escape sequences nor markup."""
    folder = tmp_path / "[/red]\x1b]0;PWNED\x07"
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    (folder / "checkpoints" / "damaged-\x9b2Jstep_00000002").mkdir(parents=True)
    listed = meshtrainer("checkpoints", folder).out
    assert "[/red]" in listed
    assert not [control for control in ("\x1b", "\x9b", "\x07", "PWNED") if control in listed]
