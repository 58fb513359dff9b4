"""Credentials in URLs are used and never kept; what a terminal would obey never reaches one."""

from __future__ import annotations

import sys
import uuid
from io import StringIO
from pathlib import Path

import fsspec
import pytest
from rich.console import Console

from tests.tiny import fit, lines, tiny_config
from trainer import Trainer, UserError, checkpoints, export, load_config, run
from trainer.config import check_config, compare_configs
from trainer.errors import is_masked, mask_credentials, masked, printable, say, setting_error, tell
from trainer.lifecycle.folder import RunFolder
from trainer.metrics.console import ConsoleSink
from trainer.metrics.screen import PlainScreen
from trainer.metrics.terminal import Terminal
from trainer.report.__main__ import write_report

PASSWORD, TOKEN = "hunter2", "s3cr3tt0ken"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:hunter2@bucket/run", "s3://key:***@bucket/run"),
        ("s3://key:hunt@er2@bucket/run@2", "s3://key:***@bucket/run@2"),
        ("s3://key:hunt/er2@bucket/run", "s3://key:***@bucket/run"),
        ("s3://key:hunt er2'@bucket/run", "s3://key:***@bucket/run"),
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("https://hunter2@host/weights.pt", "https://***@host/weights.pt"),
        ("simplecache::ftp://me:hunter2@host/x", "simplecache::ftp://me:***@host/x"),
        ("https://host/x?a=1&token=hunter2&b=2", "https://host/x?a=1&token=***&b=2"),
        (
            "https://host/x?X-Amz-Date=1&X-Amz-Signature=hunter2&X-Amz-Credential=hunter2%2F1&X-Amz-Security-Token=hunter2",
            "https://host/x?X-Amz-Date=1&X-Amz-Signature=***&X-Amz-Credential=***&X-Amz-Security-Token=***",
        ),
        ("https://host/x?sv=2022&sig=hunter2", "https://host/x?sv=2022&sig=***"),
        ("https://host/x?X-Goog-Signature=hunter2#access_token=hunter2", "https://host/x?X-Goog-Signature=***#access_token=***"),
        ("https://host/x?AWSAccessKeyId=hunter2&Signature=hunter2", "https://host/x?AWSAccessKeyId=***&Signature=***"),
        ("https://host/x?api_key=hunter2&key=hunter2&access_key_id=hunter2", "https://host/x?api_key=***&key=***&access_key_id=***"),
    ],
)  # fmt: skip
def test_credentials_are_masked(url: str, shown: str) -> None:
    assert masked({"key": [url]}) == {"key": [shown]}
    assert is_masked(shown)
    assert not is_masked(url)
    assert mask_credentials(shown) == masked(shown) == shown
    if " " not in url:
        said = mask_credentials(f"cannot read '{url}': gone")
        assert "hunter2" not in said
        assert said.endswith(": gone"), said


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run",
        "http://host:8080/path@2",
        "http://[::1]:8080/path@2",
        "abfs://container@account.dfs.core.windows.net/run",
        "ssh://git@host/path",
        "https://host/x?versionId=3&author=me&design=5",
        "a@b:c@d",
        "runs/a=b&token=c",
        "C:\\runs\\mine",
        "shards/***-?.bin",
    ],
)
def test_what_holds_no_credentials_stays(text: str) -> None:
    assert mask_credentials(text) == text
    assert not is_masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 200_000,
        "s3://b/?" + "x" * 200_000,
        "\x9d" * 200_000,
        "\x1b[" + "0" * 200_000,
        "://x:" * 5_000,
        "#key" * 50_000,
    ],
    ids=["word", "URL", "C1", "CSI", "schemes", "names"],
)
def test_a_long_text_takes_no_long_time(text: str) -> None:
    """Whose time would grow with the square of its length, it would take hours."""
    assert len(printable(text)) <= len(text)
    assert not is_masked(text)
    assert len(masked(text)) <= len(text) + 3


def url_of(name: str) -> str:
    return f"memory://me:{PASSWORD}@{name}/ck"


def everything_kept(folder: Path) -> bytes:
    """Return what a run has left, in its folder and in memory, names included."""
    parts = [str(path.relative_to(folder)).encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    memory = fsspec.filesystem("memory")
    return b"\n".join([*parts, *(memory.cat_file(path) for path in memory.find("/"))])


@pytest.fixture
def name() -> str:
    return f"host-{uuid.uuid4().hex}"


@pytest.mark.slow
def test_credentials_are_used_and_not_kept(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = tmp_path / "start"
    fit(init, "train.steps=1")
    url = url_of(name)
    extra = ["checkpoint.every=1", "checkpoint.mode=sync", f"checkpoint.dir={url}"]
    fit(tmp_path / "run", "train.steps=2", *extra)
    kept = everything_kept(tmp_path / "run")
    assert PASSWORD.encode() not in kept
    assert f"me:***@{name}".encode() in kept
    fit(tmp_path / "run", "train.steps=4", *extra)
    assert [line["resumed_step"] for line in lines(tmp_path / "run") if line["kind"] == "start"] == [None, 2]
    assert PASSWORD.encode() not in everything_kept(tmp_path / "run")
    write_report([tmp_path / "run"])
    assert PASSWORD not in (tmp_path / "run" / "report.html").read_text()
    assert PASSWORD not in "".join(capsys.readouterr())


def test_a_stored_configuration_lacks_its_credentials(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder = url_of(name), tmp_path / "run"
    fit(folder, "train.steps=2", f"checkpoint.dir={url}")
    again = f"recipe={folder / 'config.yaml'}"
    assert run.main([again]) == 2
    said = capsys.readouterr().err
    assert f"checkpoint.dir=memory://me:***@{name}/ck" in said
    assert "command line" in said
    assert said.count("error:") == 1
    trainer = Trainer(load_config(str(folder / "config.yaml"), [f"checkpoint.dir={url}", "train.steps=3"]))
    assert trainer.load_checkpoint() == 2
    trainer.close()


def test_tools_say_that_a_runs_configuration_lacks_them(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder = url_of(name), tmp_path / "run"
    fit(folder, "train.steps=2", f"checkpoint.dir={url}")
    for command in ([str(folder)], [str(folder), "--verify"]):
        assert checkpoints.command_line(command) == 2
        assert f"memory://me:***@{name}/ck" in capsys.readouterr().err
    assert export.command_line([str(folder), str(tmp_path / "out.pt")]) == 2
    assert f"memory://me:***@{name}/ck" in capsys.readouterr().err
    for flag in ([], ["--json"]):
        assert checkpoints.command_line([url, *flag]) == 0
        assert PASSWORD not in "".join(capsys.readouterr())
    assert export.command_line([url, str(tmp_path / "out.pt")]) == 0


def test_print_config_masks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"checkpoint.dir={url_of('host')}", f"train.init_from=https://host/w.pt?token={TOKEN}"]
    assert run.main(["recipe=llama_small", *asked, "--print-config"]) == 0
    said = "".join(capsys.readouterr())
    assert "me:***@host/ck" in said
    assert "?token=***" in said
    assert PASSWORD not in said
    assert TOKEN not in said


def test_a_mistake_shows_no_credentials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"nowhere://me:{PASSWORD}@host/ck"
    with pytest.raises(UserError) as mistake:
        Trainer(tiny_config(tmp_path / "run", f"checkpoint.dir={url}"))
    assert PASSWORD not in str(mistake.value)
    assert PASSWORD not in str(setting_error("train.init_from", url, "is not there", url))
    say(f"Traceback\n  open({url!r})")
    folder = RunFolder(tiny_config(tmp_path / "run"), is_main=True)
    folder.own()
    folder.write_status("failed", 1, 3, f"OSError: {url} is away")
    assert "is away" in (tmp_path / "run" / "status.json").read_text()
    folder.release()
    assert PASSWORD not in (tmp_path / "run" / "status.json").read_text() + "".join(capsys.readouterr())


def test_a_resume_compares_what_is_kept() -> None:
    """A new password is no change; a checkpoint that still holds one does not show it."""
    base = "data.source=tokens", "optim.lr=0.1"
    config = load_config("llama_small", [*base, f"data.path=s3://me:{PASSWORD}@host/a.bin"])
    other = load_config("llama_small", [*base, "data.path=s3://me:another@host/a.bin"])
    assert compare_configs(config, other.to_yaml()) == ([], [])
    of_before = config.to_yaml().replace("me:***@host/a.bin", f"me:{PASSWORD}@host/b.bin")
    assert PASSWORD in of_before
    refused, _ = compare_configs(config, of_before)
    assert refused == ["data.path: s3://me:***@host/b.bin in the checkpoint, s3://me:***@host/a.bin now"]


@pytest.mark.slow
def test_the_command_again_goes_on_from_another_run(name: str, tmp_path: Path) -> None:
    """`checkpoint.resume=<URL>` is compared with what is kept, too: the same command goes on where it was."""
    url = url_of(name)
    fit(tmp_path / "one", "train.steps=2", f"checkpoint.dir={url}")
    resume = f"checkpoint.resume={url}"
    fit(tmp_path / "two", "train.steps=4", resume)
    fit(tmp_path / "two", "train.steps=6", resume)
    assert [line["resumed_step"] for line in lines(tmp_path / "two") if line["kind"] == "start"] == [2, 4]


@pytest.mark.slow
def test_wandb_is_told_no_credentials(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url_of(name)
    overrides = [f"checkpoint.dir={url}", "log.wandb=offline", "train.steps=2"]
    monkeypatch.setattr(sys, "argv", ["trainer/run.py", *overrides])
    fit(tmp_path / "run", *overrides)
    kept = everything_kept(tmp_path / "run")
    assert name.encode() in kept, "its configuration is there"
    assert PASSWORD.encode() not in kept


# ---------------------------------------------------------------------------------------------------------------
# Terminals

ATTACKS = {
    "title": ("\x1b]0;PWNED\x07", ""),
    "title, ended otherwise": ("\x1b]2;PWNED\x1b\\", ""),
    "title without an end": ("\x1b]0;PWNED", "]0;PWNED"),
    "clear": ("\x1b[2J\x1b[H", ""),
    "colour": ("\x1b[31mred\x1b[0m", "red"),
    "reset": ("\x1bc", ""),
    "device control": ("\x1bP1$r\x1b\\", ""),
    "C1 title": ("\x9d0;PWNED\x9c", ""),
    "C1 clear": ("\x9b2J", ""),
    "C1 alone": ("a\x85\x9bb", "a"),
    "nested": ("\x1b\x1b[0m[2J", "[2J"),
    "overwriting": ("error\rfine\b\b\v\f\x7f", "errorfine"),
    "bells": ("\x1b\x07\x00", ""),
    "half a character": ("\udc9b2J", "\ufffd2J"),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_what_a_terminal_obeys_is_stripped(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, left = ATTACKS[attack]
    cleaned = f"before {left} after\n\tnext line: ü, 日本"
    whole = f"before {text} after\n\tnext line: ü, 日本"
    assert printable(whole) == cleaned
    say(whole)
    tell(whole)
    assert capsys.readouterr() == (cleaned + "\n", cleaned + "\n")


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_strips_samples_and_names(attack: str, is_terminal: bool) -> None:
    text, left = ATTACKS[attack]
    seen = StringIO()
    console = Console(file=seen, force_terminal=True, width=200, color_system=None, legacy_windows=False)
    sink = ConsoleSink(10, Terminal(console) if is_terminal else PlainScreen(seen))
    sink.start({"run": f"<{text}>", f"<{text}>": "x"})
    sink.say(f"[{text}]", "bold")
    sink.close()
    written = seen.getvalue()
    assert "PWNED" not in written or "PWNED" in left
    assert f"<{left}>" in written
    assert f"[{left}]" in written
    assert not any(
        control in written for control in ("\x9b", "\x9d", "\x1b]", "\x1b[2J", "\x1bc", "\x1bP", "\x07", "\b")
    )


@pytest.mark.parametrize("name", ["a\x9bb", "a\x7fb", "a\x85", "a\x1b[2Jb", "a\udc9bb"])
def test_a_runs_name_holds_no_control_character(name: str) -> None:
    with pytest.raises(UserError, match=r"without slashes or control characters\n  nearest legal value: '?run\.name=a"):
        check_config(load_config("llama_small", [f"run.name={name}"]), 1, 1)


def test_the_listing_of_checkpoints_shows_names_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder from elsewhere: its names are neither commands to the terminal nor markup."""
    folder = tmp_path / "[/red]\x1b]0;PWNED\x07"
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    (folder / "checkpoints" / "damaged-\x9b2Jstep_00000002").mkdir(parents=True)
    monkeypatch.setenv("COLUMNS", "300")
    assert checkpoints.command_line([str(folder)]) == 1
    said = capsys.readouterr().out
    assert "[/red]" in said
    assert "manifest.json: is missing" in said
    assert printable(said) == said
    assert "PWNED" not in said
