"""Stop requests before the first step: their three stages, and the code that reacts to a request in the first stage."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.forked import popen
from tests.helpers.gate import wait_until
from trainer.config import DataSection
from trainer.data.chat.formats import Conversation
from trainer.data.chat.masking import Encoder
from trainer.data.chat.source import open_chats
from trainer.data.remote import transport
from trainer.data.remote.transport import RemoteReadError
from trainer.distributed.stop_request import StopRequest
from trainer.errors import run_command
from trainer.stopping import ImmediateStop, StopRequested, partial_file, raise_if_stop_requested

STUCK = {
    "in Python": "while True: pass",
    "in a wait": "threading.Event().wait()",
    "swallowing": """
        while True:
            try:
                while True: time.sleep(0.01)
            except BaseException:
                pass
    """,
    "wrapping": """
        try:
            while True: time.sleep(0.01)
        except BaseException as error:
            raise RuntimeError("something failed") from error
    """,
    "in a destructor": """
        class Freed:
            def __del__(self):
                time.sleep(0.02)
        while True:
            Freed()
            time.sleep(0.005)
    """,
    # The request is raised again at once, while the interpreter still reports the first one.
    "in a destructor, at once": """
        from trainer import stopping
        stopping._RERAISE_S = 0.0
        class Freed:
            def __del__(self):
                time.sleep(0.02)
        while True:
            Freed()
            time.sleep(0.005)
    """,
    "in the hook of a destructor": """
        start = threading.Thread.start
        def start_late(thread):
            if thread._target.__name__ == "_raise_again":
                time.sleep(2)  # until after the second stage
            start(thread)
        threading.Thread.start = start_late
        class Freed:
            def __del__(self):
                time.sleep(0.5)
        while True:
            Freed()
            time.sleep(0.001)
    """,
    "in C": "hashlib.pbkdf2_hmac('sha512', b'', b'', 2**31 - 1)",
}
"""Work that asks nobody whether it is to stop."""

_COMMAND = """
import hashlib, sys, threading, time
from pathlib import Path
from trainer.errors import run_command
from trainer.stopping import partial_file

def work():
    with partial_file(Path(sys.argv[1])) as half:
        half.touch()
{work}

sys.exit(run_command(work))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.campaign),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.campaign if "destructor" in how else ()) for how in STUCK]
)
def test_command_ends_at_any_stage(how: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    """With one line instead of a traceback, and without the file that it was writing."""
    half = tmp_path / "half"
    script = _COMMAND.format(work=textwrap.indent(textwrap.dedent(STUCK[how]), " " * 8))
    process = popen([sys.executable, "-c", script, str(half)])
    wait_until(half.exists, "the work has begun")
    process.send_signal(number)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, half.exists()) == (code, False), stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert time.monotonic() - began < 15


@pytest.fixture
def asked() -> Iterator[ImmediateStop]:
    """A process that has been asked to stop."""
    prompt = ImmediateStop([], lambda _: 75)
    prompt.start()
    prompt.on_signal("SIGTERM")
    yield prompt
    prompt.cancel()


def test_loop_that_checks_for_a_stop_sees_it_at_once(asked: ImmediateStop) -> None:
    with pytest.raises(StopRequested, match="SIGTERM"):
        raise_if_stop_requested()
    asked.cancel()
    raise_if_stop_requested()


def test_signal_after_the_first_step_only_sets_a_request() -> None:
    request = StopRequest()
    before = signal.getsignal(signal.SIGTERM)
    request.install()
    try:
        request.enable_immediate_stop()
        request.disable_immediate_stop()
        signal.raise_signal(signal.SIGTERM)
        raise_if_stop_requested()
        assert request.reason() == "SIGTERM"
    finally:
        request.uninstall()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_forked_process_does_not_handle_its_parents_stop(asked: ImmediateStop) -> None:
    if (pid := os.fork()) == 0:
        raise_if_stop_requested()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_file_that_was_renamed_is_kept(tmp_path: Path) -> None:
    with partial_file(tmp_path / "half") as half:
        half.touch()
        half.rename(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    assert run_command(lambda: 0) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


# ---------------------------------------------------------------------------------------------------------------
# Chats


def chats(folder: Path, count: int) -> DataSection:
    path = folder / "chats.jsonl"
    lines = [
        conversation("Hi", "Yes" + " No" * (number % 4), "Bye", "No" + " two" * (number % 9)) for number in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    model = write_tokenizer(folder / "model", CHATML)
    return DataSection(
        source="chat", path=str(path), tokenizer=str(model), seq_len=64, cache_dir=str(folder / "cache"), holdout=0.2
    )


def all_tokens(data: DataSection) -> tuple[Any, ...]:
    source = open_chats(data, None, "train")
    assert source is not None
    rows = source.batch(np.arange(len(source)))
    return source.report, *(rows[name].tobytes() for name in ("tokens", "targets"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", ["none", "first", "second"])
def test_tokenized_chats_are_continued(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after 20 of 60, with a part file after each; the result is the same as without a stop."""
    (tmp_path / "whole").mkdir()
    whole = all_tokens(chats(tmp_path / "whole", 60))
    data, encode, encoded = chats(tmp_path, 60), Encoder.encode, [0]

    def counted(*arguments: Any) -> Any:
        encoded[0] += 1
        if encoded[0] == 21:
            raise StopRequested("SIGTERM")
        return encode(*arguments)

    monkeypatch.setattr(Encoder, "encode", counted)
    monkeypatch.setattr("trainer.data.chat.store._PART_S", 0.0)
    with pytest.raises(StopRequested) as raised:
        open_chats(data, None, "train")
    assert "20 conversations are tokenized" in raised.value.note
    parts = sorted((tmp_path / "cache").glob("*.part-*"))
    assert len(parts) == 20
    if damage != "none":
        part = parts[damage == "second"]
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    if damage == "first":  # stopped again, with one longer part: the old parts after the damaged one must not follow it
        monkeypatch.setattr("trainer.data.chat.store._PART_S", 60.0)
        encoded[0] = 15
        with pytest.raises(StopRequested) as raised:
            open_chats(data, None, "train")
        assert "5 conversations are tokenized" in raised.value.note
    encoded[0] = 100
    assert all_tokens(data) == whole
    assert encoded[0] - 100 == {"none": 40, "first": 55, "second": 59}[damage]
    assert not list((tmp_path / "cache").glob("*.part-*"))


def test_abandoned_parts_of_tokenized_chats_are_removed(tmp_path: Path) -> None:
    """After a change of the file or a setting, no start uses them again."""
    cache = tmp_path / "cache"
    cache.mkdir()
    old, recent = cache / "chat-0123.part-00000", cache / "chat-4567.part-00000"
    for path, days in ((old, 31), (recent, 29)):
        path.touch()
        os.utime(path, (time.time() - days * 86400,) * 2)
    open_chats(chats(tmp_path, 3), None, "train")
    assert list(cache.glob("*.part-*")) == [recent]


def test_turns_past_the_end_of_a_sequence_are_not_rendered(tmp_path: Path) -> None:
    """A conversation of 4,000 turns is truncated to 24 tokens in a second; it used to take minutes."""
    data = chats(tmp_path, 1)
    from trainer.data.chat.source import make_encoder

    encoder = make_encoder(data)
    template = encoder._template
    assert template is not None
    render, rendered = template.render, [0]

    def counted(messages: Any, *more: Any, **named: Any) -> Any:
        rendered[0] += len(messages)
        return render(messages, *more, **named)

    template.render = counted  # type: ignore[method-assign]
    chat = Conversation(conversation(*["Hi", "Yes"] * 2000))
    found, some = encoder.encode(chat, 24), encoder.encode(Conversation(chat.messages[:40]))
    assert (found.loss_mask[:24] == some.loss_mask[:24]).all()
    assert found.loss_mask[:24].any()
    assert rendered[0] < 6000, "the whole once, and the beginnings of a few turns"


# ---------------------------------------------------------------------------------------------------------------
# From elsewhere


@pytest.fixture
def dripping(tmp_path: Path) -> Iterator[str]:
    from tests.lifecycle.test_prompt_stops import SlowHandler, slow_server

    class Dripping(SlowHandler):
        def copyfile(self, source: Any, outputfile: Any) -> None:
            while block := source.read(1):
                outputfile.write(block)
                outputfile.flush()
                time.sleep(0.02)

    (tmp_path / "text.txt").write_bytes(bytes(100_000))
    with slow_server(tmp_path, Dripping) as url:
        yield f"{url}/text.txt"


def test_download_from_a_very_slow_server_is_abandoned(dripping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "STALL_S", 0.3)
    monkeypatch.setattr(transport, "MAX_PAUSE_S", 0.0)
    with pytest.raises(RemoteReadError, match=r"sends only \d+ bytes/s"):
        transport.read_url(dripping, transport.MANY_TRIES)


@pytest.mark.slow
def test_command_exits_while_a_server_hangs(tmp_path: Path) -> None:
    """A server accepts and never answers: threads that wait for it are not joined at exit."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = [f"data.path=http://127.0.0.1:{server.getsockname()[1]}/a.jsonl", f"data.cache_dir={tmp_path}"]
        process = popen([sys.executable, "-m", "trainer.data", "show", "recipe=llama_small", *settings])
        server.settimeout(60)
        connection, _ = server.accept()
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        try:
            _, stderr = process.communicate(timeout=20)  # transport.STALL_S is 60
        finally:
            process.kill()
            connection.close()
    assert process.returncode == 143, stderr
    assert stderr.splitlines()[-1] == "stopped (SIGTERM)"
    assert time.monotonic() - began < 15


def test_failing_url_does_not_wait_for_a_hanging_one() -> None:
    hang = threading.Event()

    def look(url: str) -> str:
        if url == "fails":
            raise RemoteReadError(url)
        assert hang.wait(60), "waited for the URL that hangs"
        return url

    try:
        with pytest.raises(RemoteReadError, match="fails"):
            transport.map_urls(look, ["hangs", "fails"])
        assert not hang.is_set()
    finally:
        hang.set()
    assert transport.map_urls(str.upper, list("abc") * 20) == list("ABC") * 20
    assert transport.map_urls(str.upper, []) == []


def test_stop_request_ends_a_lookup(asked: ImmediateStop) -> None:
    hang = threading.Event()
    try:
        with pytest.raises(StopRequested):
            transport.map_urls(lambda _: hang.wait(60), ["hangs"])
    finally:
        hang.set()


def test_stop_request_is_handled_between_retries(asked: ImmediateStop, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StopRequested):
        transport._sleep(60)
    with pytest.raises(StopRequested):
        transport.read_url("http://127.0.0.1:1/text.txt")
