"""Credentials in URLs are used but never stored, and no terminal escape sequence reaches a terminal."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from rich.console import Console

from tests.data.test_data import write_shards
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.forked import popen
from tests.helpers.ranks import tiny_overrides
from tests.helpers.tiny import fit, lines, tiny_config
from trainer import Trainer, UserError, checkpoints, export, load_config, run
from trainer.config import DataSection, check_config, compare_configs
from trainer.data.opening import open_source
from trainer.errors import is_masked, mask_credentials, masked, print_stderr, print_stdout, printable, setting_error
from trainer.lifecycle.folder import RunFolder
from trainer.metrics.console import ConsoleWriter, PlainScreen
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
def test_text_without_credentials_is_unchanged(text: str) -> None:
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
def test_masking_time_is_linear_in_the_length(text: str) -> None:
    """With a time that is quadratic in the length it would take hours."""
    assert len(printable(text)) <= len(text)
    assert not is_masked(text)
    assert len(masked(text)) <= len(text) + 3


def url_of(name: str) -> str:
    return f"memory://me:{PASSWORD}@{name}/ck"


def everything_kept(folder: Path) -> bytes:
    """Return everything that a run has left in its folder and in memory, including names."""
    parts = [str(path.relative_to(folder)).encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    memory = fsspec.filesystem("memory")
    return b"\n".join([*parts, *(memory.cat_file(path) for path in memory.find("/"))])


@pytest.fixture
def name() -> str:
    return f"host-{uuid.uuid4().hex}"


@pytest.mark.slow
def test_credentials_are_used_and_not_stored(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_tools_report_that_a_stored_configuration_lacks_credentials(
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


def test_print_config_masks_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"checkpoint.dir={url_of('host')}", f"train.init_from=https://host/w.pt?token={TOKEN}"]
    assert run.main(["recipe=llama_small", *asked, "--print-config"]) == 0
    said = "".join(capsys.readouterr())
    assert "me:***@host/ck" in said
    assert "?token=***" in said
    assert PASSWORD not in said
    assert TOKEN not in said


def test_user_errors_show_no_credentials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"nowhere://me:{PASSWORD}@host/ck"
    with pytest.raises(UserError) as mistake:
        Trainer(tiny_config(tmp_path / "run", f"checkpoint.dir={url}"))
    assert PASSWORD not in str(mistake.value)
    assert PASSWORD not in str(setting_error("train.init_from", url, "is not there", url))
    print_stderr(f"Traceback\n  open({url!r})")
    folder = RunFolder(tiny_config(tmp_path / "run"), is_main=True)
    folder.acquire()
    folder.write_status("failed", 1, 3, f"OSError: {url} is away")
    assert "is away" in (tmp_path / "run" / "status.json").read_text()
    folder.release()
    assert PASSWORD not in (tmp_path / "run" / "status.json").read_text() + "".join(capsys.readouterr())


def test_new_password_does_not_prevent_a_resume() -> None:
    """A checkpoint that still contains a password does not show it."""
    base = "data.source=tokens", "optim.lr=0.1"
    config = load_config("llama_small", [*base, f"data.path=s3://me:{PASSWORD}@host/a.bin"])
    other = load_config("llama_small", [*base, "data.path=s3://me:another@host/a.bin"])
    assert compare_configs(config, other.to_yaml()) == ([], [])
    of_before = config.to_yaml().replace("me:***@host/a.bin", f"me:{PASSWORD}@host/b.bin")
    assert PASSWORD in of_before
    refused, _ = compare_configs(config, of_before)
    assert refused == ["data.path: s3://me:***@host/b.bin in the checkpoint, s3://me:***@host/a.bin now"]


@pytest.mark.slow
def test_same_command_with_a_resume_url_continues_the_run(name: str, tmp_path: Path) -> None:
    """`checkpoint.resume=<URL>` is compared in its masked form, too."""
    url = url_of(name)
    fit(tmp_path / "one", "train.steps=2", f"checkpoint.dir={url}")
    resume = f"checkpoint.resume={url}"
    fit(tmp_path / "two", "train.steps=4", resume)
    fit(tmp_path / "two", "train.steps=6", resume)
    assert [line["resumed_step"] for line in lines(tmp_path / "two") if line["kind"] == "start"] == [2, 4]


@pytest.mark.slow
def test_wandb_gets_no_credentials(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_escape_sequences_are_stripped(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, left = ATTACKS[attack]
    cleaned = f"before {left} after\n\tnext line: ü, 日本"
    whole = f"before {text} after\n\tnext line: ü, 日本"
    assert printable(whole) == cleaned
    print_stderr(whole)
    print_stdout(whole)
    assert capsys.readouterr() == (cleaned + "\n", cleaned + "\n")


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_strips_samples_and_names(attack: str, is_terminal: bool) -> None:
    text, left = ATTACKS[attack]
    seen = StringIO()
    console = Console(file=seen, force_terminal=True, width=200, color_system=None, legacy_windows=False)
    sink = ConsoleWriter(10, Terminal(console) if is_terminal else PlainScreen(seen))
    sink.start({"run": f"<{text}>", f"<{text}>": "x"})
    sink.print(f"[{text}]", "bold")
    sink.close()
    written = seen.getvalue()
    assert "PWNED" not in written or "PWNED" in left
    assert f"<{left}>" in written
    assert f"[{left}]" in written
    assert not any(
        control in written for control in ("\x9b", "\x9d", "\x1b]", "\x1b[2J", "\x1bc", "\x1bP", "\x07", "\b")
    )


@pytest.mark.parametrize("name", ["a\x9bb", "a\x7fb", "a\x85", "a\x1b[2Jb", "a\udc9bb"])
def test_run_names_with_control_characters_are_rejected(name: str) -> None:
    with pytest.raises(UserError, match=r"without slashes or control characters\n  nearest legal value: '?run\.name=a"):
        check_config(load_config("llama_small", [f"run.name={name}"]), 1, 1)


def test_the_listing_of_checkpoints_shows_names_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in an untrusted folder are neither escape sequences nor markup."""
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


# ---------------------------------------------------------------------------------------------------------------
# Keys of an object store, tokens of a web server

KEY, SECRET = "K3YID", "S3KRET/777+x"
LINES = "".join(f'{{"text": "document number {number} with some words"}}\n' for number in range(300))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    pytest.importorskip("s3fs")
    with FakeS3(KEY, SECRET) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        yield server


def without(secret: str, *folders: Path) -> bool:
    """Return whether a secret is in no file of some folders, and no file's name."""
    return not any(
        secret in str(path) or (path.is_file() and secret.encode() in path.read_bytes())
        for folder in folders
        for path in folder.rglob("*")
    )


@pytest.mark.slow
def test_keys_in_a_url_are_used_and_stored_nowhere(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In checkpoint.dir, checkpoint.resume, train.init_from and data.path."""
    bucket = f"s3://{KEY}:{SECRET}@bucket"
    s3.objects["bucket/text.jsonl"] = LINES.encode()
    one = f"checkpoint.dir={bucket}/ck"
    fit(tmp_path / "one", "train.steps=2", one)
    first = f"{bucket}/ck/step_00000002"
    fit(tmp_path / "two", "train.steps=3", f"checkpoint.resume={first}")
    assert [line["resumed_step"] for line in lines(tmp_path / "two") if line["kind"] == "start"] == [2]
    fit(tmp_path / "three", "train.steps=1", f"train.init_from={first}")
    data = [
        "data.source=tokens",
        "data.tokenizer=bytes",
        "model.vocab_size=257",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    fit(tmp_path / "four", "train.steps=1", f"data.path={{a: '{bucket}/text.jsonl', b: '{bucket}/*.jsonl'}}", *data)
    wrong = bucket.replace(SECRET, "WR0NGS3KRET")
    for setting in ("checkpoint.dir={}/ck", "train.init_from={}/ck/step_00000003", "data.path={}/x.txt"):
        with pytest.raises(UserError, match=r"SignatureDoesNotMatch|Forbidden|403") as refused:
            fit(
                tmp_path / "six", "train.steps=1", setting.format(wrong), *(data if setting.startswith("data.") else ())
            )
        print_stderr(str(refused.value))
        assert "WR0NGS3KRET" not in str(refused.value)
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    for secret in (SECRET, "WR0NGS3KRET"):
        assert secret not in said
        assert without(secret, tmp_path)
        assert not any(secret.encode() in content for content in s3.objects.values())


class Guarded(SimpleHTTPRequestHandler):
    """A web server that asks for a token, or for user and password."""

    accepted: list[str]

    def do_GET(self) -> None:
        login = base64.b64encode(b"me:pw-0f-the-web").decode()
        if self.headers.get("Authorization") != f"Basic {login}" and not any(
            f"{t}" in self.path for t in self.accepted
        ):
            return self.send_error(403, f"no such right: {self.path}")
        return super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "a.jsonl").write_text(LINES)
    write_shards(folder, [b"some text of a shard " * 40] * 3)
    handler = partial(type("Handler", (Guarded,), {"accepted": Guarded.accepted}), directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


Guarded.accepted = ["token=t0ken-0ne", "token=t0ken-tw0", "Signature=s1gn-0ne", "Signature=s1gn-tw0"]
SIGNED = "?X-Amz-Date={0}&X-Amz-Expires={1}&X-Amz-Credential=AK/{0}&X-Amz-Signature={2}"


@pytest.mark.parametrize("path", ["a.jsonl", "*.jsonl", "text-00000.bin", "*.bin", ""])
def test_token_in_a_query_is_used_and_not_stored(path: str, guarded: str, tmp_path: Path) -> None:
    """The same for a signature; with a renewed one the cache is still valid, and the data counts as unchanged."""
    cache = tmp_path / "cache"
    sources, configs, cached = [], [], []
    for query in (
        "?token=t0ken-0ne",
        "?token=t0ken-tw0",
        SIGNED.format(1, 2, "s1gn-0ne"),
        SIGNED.format(3, 4, "s1gn-tw0"),
    ):
        url = f"http://{guarded}/{path}{query}"
        data = DataSection(source="tokens", path=url, seq_len=16, cache_dir=str(cache), tokenizer="bytes")
        source = open_source(data, None, "train")
        assert source is not None
        source.batch(np.arange(2))  # type: ignore[attr-defined]
        sources.append(source.fingerprint)
        configs.append(load_config("llama_small", [f"data.path={url}"]))
        kept = sorted(path.name for path in cache.rglob("*") if path.is_file() and ".lock" not in path.name)
        cached.append(kept)
    assert cached == cached[:1] * 4, "the same files, not fetched again"
    assert sources == sources[:1] * 4
    assert compare_configs(configs[1], configs[0].to_yaml())[0] == []
    assert compare_configs(configs[3], configs[2].to_yaml())[0] == []
    assert compare_configs(configs[0], configs[0].to_yaml().replace("http://", "http://other."))[0] != []
    for secret in ("t0ken", "s1gn"):
        assert without(secret, cache)
        assert secret not in configs[0].to_yaml() + configs[2].to_yaml()


def test_user_and_password_in_a_web_url_are_sent(guarded: str, tmp_path: Path) -> None:
    def opened(user: str) -> object:
        url = f"http://{user}@{guarded}/a.jsonl"
        data = DataSection(source="tokens", path=url, seq_len=16, cache_dir=str(tmp_path / "cache"), tokenizer="bytes")
        return open_source(data, None, "train")

    assert opened("me:pw-0f-the-web") is not None
    for wrong in ("me:wr0ng-passw0rd", "wr0ng-passw0rd"):
        with pytest.raises(UserError) as refused:
            opened(wrong)
        assert "403" in str(refused.value)
        assert "wr0ng-passw0rd" not in str(refused.value)
    assert without("pw-0f-the-web", tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# Commands and messages

COMMANDS = [
    ("curl -H 'Authorization: Bearer B34r3r-t0ken' https://host", True),
    ("curl -u me:B34r3r https://host", True),
    ("curl -d done https://hooks.example.com/services/T00/B00/xyz", True),
    ("notify --token B34r3r", True),
    ("API_KEY=B34r3r notify", True),
    ("notify a1b2c3d4e5f6a7b8c9d0", True),
    ('curl -s -d password=hunter2xyz -d \'{"token":"abcdef77"}\' 127.0.0.1:8765/', True),
    ("echo pass hunter2", True),
    ("notify SUPERSEKRET777xyzQ", True),
    ("mail -p Tr0ub4dor+3", True),
    ("curl -F token=abcd1234", True),
    ("psql 'host=h password=hunter2x'", True),
    ("export KEY=hunter2x", True),
    ("AUTH=hunter2xyz", True),
    ("notify --key hunter2", True),
    ("notify --auth bob:hunter2", True),
    ("redis-cli -a hunter2", True),
    ("mosquitto_pub -u bob -P hunter2", True),
    ("curl -H 'X-Auth: hunter2'", True),
    ("openssl enc -passin pass:hunter2", True),
    ("smbclient -U bob%hunter2", True),
    ("curl hooks.slack.com/services/T00/B00/abcdefghijkl", True),
    ("touch /some/folder/llama3_70b_ended", False),
    ("mkdir -p done.d/$STATE", False),
    ("sbatch launch/slurm.sbatch recipe=llama3_8b", False),
    ("psql -c 'insert into runs values (1)'", False),
    ('notify --token "$TOKEN"', False),
    ("python notify.py llama3b-8k-v2-chat", False),
    ("cp -r runs/exp2b_lr3e4_bs64k /some/folder", False),
    ("notify 550e8400-e29b-41d4-a716-446655440000", True),
    ('echo "$RUN_DIR: $STATE at step $STEP" >> ended.txt', False),
    ('curl -H "Authorization: Bearer $TOKEN" "$HOOK"', False),
]


@pytest.mark.parametrize(("command", "is_secret"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_that_may_contain_secrets_are_not_stored(command: str, is_secret: bool, tmp_path: Path) -> None:
    config = load_config("llama_small", [f"run.on_end={command}"])
    assert config.run.on_end == command, "it is run as it was given"
    stored = config.to_yaml()
    assert (command.split()[-1] not in stored) == is_secret
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(stored)
    (folder / "status.json").write_text("{}")
    if not is_secret:
        assert load_config(str(folder)).run.on_end == command
        return
    with pytest.raises(UserError, match=r"run.on_end=\*\*\*: is not stored .*command line again"):
        load_config(str(folder))
    assert load_config(str(folder), [f"run.on_end={command}"]).run.on_end == command
    assert load_config(str(folder), ["run.on_end=null"]).run.on_end is None


SAID = [
    "Authorization: Bearer {}",
    "{{'authorization': 'Basic {}'}}",
    "x-api-key: {}",
    "curl --password {} -x",
    "--hf-token={}",
    "WANDB_API_KEY={}",
    '{{"password": "{}"}}',
    "http://user:{}@proxy:3128",
]


@pytest.mark.parametrize("text", SAID)
def test_secrets_in_messages_are_masked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_stderr(text.format("B34r3r-t0ken"))
    assert "B34r3r" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "unexpected token: '}' in the template",
        "eos_token: <|im_end|>, pad_token_id=151643",
        "tokenizer: models/Qwen3-8B",
        "python -m trainer.run --token-limit 5 data.tokenizer=bytes",
        "Basic information about a bearer of news",
    ],
)
def test_messages_without_secrets_are_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.slow
def test_output_of_libraries_is_redacted(tmp_path: Path) -> None:
    """Uncaught exceptions, also in threads, warnings and log records with secrets from settings and the environment."""
    program = f"""
import logging, os, sys, threading, warnings
from trainer.errors import install_redaction, remember_secrets
install_redaction()
remember_secrets({{"path": "s3://key:{SECRET}@bucket/x"}})
def fail():
    raise ValueError("the key {SECRET} of " + os.environ["MY_API_KEY"])
thread = threading.Thread(target=fail); thread.start(); thread.join()
warnings.warn("{SECRET}")
logging.getLogger("x").error("of %s", "{SECRET}")
try:
    fail()
except ValueError:
    logging.getLogger("x").exception("failed")
fail()
"""
    env = os.environ | {"MY_API_KEY": "env-S3KRET-key", "HTTPS_PROXY": "http://me:pr0xy-pw@host:1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the key *** of ***") == 3, done.stderr
    assert SECRET not in done.stderr
    assert "env-S3KRET-key" not in done.stderr


# ---------------------------------------------------------------------------------------------------------------
# Twenty secrets at once

IN_THE_ENVIRONMENT = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DB_PASSWORD"]


class Open(SimpleHTTPRequestHandler):
    """A web server that lets everyone in."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.campaign  # fifteen commands
def test_twenty_secrets_in_twenty_places_are_stored_and_printed_nowhere(tmp_path: Path) -> None:
    """A run that trains, runs that are rejected, and the commands that read the run's folder."""
    secrets = [f"s{number:02}{uuid.uuid4().hex}" for number in range(20)]
    unused = iter(secrets)
    web, folder = tmp_path / "web", tmp_path / "runs"
    web.mkdir()
    (web / "a.jsonl").write_text(LINES)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Open, directory=str(web)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    host = f"127.0.0.1:{server.server_address[1]}"
    url = f"http://{host}/a.jsonl"
    sources = [
        f"{url}?token={next(unused)}",
        f"http://me:{next(unused)}@{host}/a.jsonl",
        f"{url}?sig={next(unused)}",
        f"{url}?X-Amz-Signature={next(unused)}&X-Amz-Security-Token={next(unused)}",
        f"{url}?api_key={next(unused)}",
    ]
    token = next(unused)
    path = ", ".join(f"s{number}: '{source}'" for number, source in enumerate(sources))
    evaluated = ", ".join(f"s{number}: '{url}?access_token={token}'" for number in range(5))
    run = folder / "run"
    data = ["data.source=tokens", "data.tokenizer=bytes", "model.vocab_size=257", f"data.cache_dir={folder / 'cache'}"]
    common = ["recipe=llama_small", *tiny_overrides(*data, "train.steps=2", "data.seq_len=32")]
    trained = [
        *common,
        f"run.dir={run}",
        f"data.path={{{path}}}",
        f"data.eval_path={{{evaluated}}}",
        "eval.every=1",
        f"run.on_end=curl -s -H 'Authorization: Bearer {next(unused)}' http://127.0.0.1:9/ended; true",
    ]
    environment = {name: next(unused) for name in IN_THE_ENVIRONMENT}
    environment |= {"HTTPS_PROXY": f"http://me:{next(unused)}@127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    refused = [
        f"checkpoint.resume=https://me:{next(unused)}@127.0.0.1:9/none",
        f"train.init_from=http://127.0.0.1:9/model?token={next(unused)}",
        f"data.path=http://127.0.0.1:9/x.bin?password={next(unused)}",
        f"data.tokenizer=http://127.0.0.1:9/tokenizer?sig={next(unused)}",
        f"checkpoint.dir=nosuchscheme://key:{next(unused)}@bucket/ck",
        f"optim.api_key={next(unused)}",
    ]
    assert next(unused, None) is None

    said = []

    def command(module: str, *arguments: str, expected: int) -> None:
        process = popen([sys.executable, "-m", f"trainer.{module}", *arguments], env=os.environ | environment)
        stdout, stderr = process.communicate(timeout=120)
        said.append(stdout + stderr)
        assert process.returncode == expected, f"{module} {arguments}: {stdout}{stderr}"
        assert "Traceback" not in stdout + stderr

    try:
        command("run", *trained, "--print-config", expected=0)
        command("run", *trained, "--dry-run", expected=0)
        command("run", *trained, expected=0)
        command("run", *[each.replace("train.steps=2", "train.steps=3") for each in trained], expected=0)
        command("plan", *trained, expected=0)
        command("report", str(run), expected=0)
        command("checkpoints", str(run), expected=0)
        command(
            "evaluate", str(run), *(each for each in trained if "_path=" in each or "data.path=" in each), expected=0
        )
        command("export", str(run), str(folder / "exported"), expected=0)
        for number, setting in enumerate(refused):
            command("run", *common, f"run.dir={folder / str(number)}", setting, expected=2)
    finally:
        server.shutdown()
        server.server_close()
    for number, secret in enumerate(secrets):
        assert not [text for text in said if secret in text], f"secret {number} is printed"
        assert without(secret, folder), f"secret {number} is stored"
