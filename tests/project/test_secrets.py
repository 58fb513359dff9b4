"""Credentials are neither stored nor printed, and no terminal escape sequence reaches a terminal."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from tests.helpers.commands import meshtrainer
from trainer import UserError, load_config, run
from trainer.config.rules import check_config
from trainer.errors import print_stderr, print_stdout

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "is_secret"),
    [
        (f"s3://key:{SECRET}@bucket/run", True),
        (f"s3://key:{SECRET}/with/slashes@bucket/run", True),
        (f"s3://key:with@{SECRET}@bucket/run", True),
        (f"hf://datasets/me:{SECRET}@x/y", True),
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
    keys = ("data.path", "train.init_from", "checkpoint.dir", "model.path", "data.tokenizer")
    settings = [f"{key}={url}" for key in keys] + [f"data.path={{a: '{url}', b: x}}", f"data.path={{'{url}': x}}"]
    for setting in settings if is_secret else [f"train.init_from={url}"]:
        code = run.main(["recipe=llama_small", setting, "--print-config"])
        printed = "".join(capsys.readouterr())
        assert SECRET not in printed
        assert code == (2 if is_secret else 0)
        assert ("environment" in printed and setting.partition("=")[0] in printed) if is_secret else url in printed


@pytest.mark.parametrize(
    "words", ["evaluate URL x", "checkpoints nowhere URL", "report URL", "export nowhere URL", "run --help URL"]
)
def test_credentials_in_the_words_of_a_command_are_not_shown(words: str) -> None:
    refused = meshtrainer(*words.replace("URL", f"s3://key:{SECRET}@bucket/run").split())
    assert refused.code == 2
    assert SECRET not in refused.out + refused.err


def test_credentials_in_a_recipe_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"recipe: llama_small\ncheckpoint: {{dir: 's3://me:{SECRET}@host/ck'}}\n")
    with pytest.raises(UserError, match=r"^checkpoint\.dir=s3://\*\*\*@host/ck: ") as refused:
        load_config(str(tmp_path / "mine.yaml"))
    assert SECRET not in str(refused.value)


def test_a_command_is_stored_as_it_is() -> None:
    """A URL in it may contain anything; its secrets belong into variables that its shell expands."""
    command = f"curl https://host/?token={SECRET}"
    assert command in load_config("llama_small", [f"run.on_end={command}"]).stored_yaml()


CONTROLS = ["\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x9d0;title\x9c\x9b2J", "\x1b\x1b[0m[2J", "a\rb\b\b\x7f", "\udc9b2J"]


@pytest.mark.parametrize("text", CONTROLS)
def test_no_control_character_reaches_a_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_stderr(f"before {text} after\n\tnext line: ü, 日本")
    print_stdout(f"before {text} after\n\tnext line: ü, 日本")
    for printed in capsys.readouterr():
        controls = {character for character in printed if unicodedata.category(character) in ("Cc", "Cs")}
        assert controls == {"\n", "\t"}
        assert printed.startswith("before ")
        assert printed.endswith(" after\n\tnext line: ü, 日本\n")


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
    assert not [control for control in ("\x1b", "\x9b", "\x07") if control in listed]
