"""Chat templates that are broken or malicious: one message and exit 2, in bounded time and memory."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

import torch

from tests.helpers.chats import CHATML, FAMILIES, conversation, write_tokenizer
from tests.helpers.tiny import fit
from tests.trainer.test_sft import write_chats
from trainer import UserError, generate, run
from trainer.config import DataSection
from trainer.data.chat import limits
from trainer.data.chat.formats import BadChat
from trainer.data.chat.limits import rendering_limits, try_in_child
from trainer.data.chat.template import ChatTemplate, find_template
from trainer.data.opening import open_source
from trainer.data.prompts import chat_prompt_tokens, chat_stop_ids
from trainer.export import export_checkpoint
from trainer.generate import open_generator
from trainer.stopping import StopRequested

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
VALID = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
"""The valid rest of a template."""

BROKEN: dict[str, tuple[str | bytes, str]] = {
    "division by zero": ("{{ 1/0 }}", "ZeroDivisionError"),
    "range too large": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "number too long for text": ("{{ 10**5000 }}", "ValueError"),
    "power": ("{{ 9**(9**9) }}", "too large"),
    "power of a variable": ("{% set n = 9 %}{{ n ** (n ** n) }}" + VALID, "too large"),
    "lone surrogate": (VALID + "{{ '\\ud800' }}", "not valid Unicode"),
    "invalid syntax": ("{% for m in messages %}{{ m.content }}", "not valid Jinja (line 1"),
    "unclosed expression": ("{{ messages", "not valid Jinja (line 1"),
    "unknown tag": (VALID + "\n{% frobnicate %}", "not valid Jinja (line 4"),
    "unknown filter": ("{{ messages | frobnicate }}", "frobnicate"),
    "unknown test": ("{{ messages is frobnicate }}", "frobnicate"),
    "undefined name": ("{{ nothing.at_all.here }}", "'nothing' is undefined"),
    "undefined function": ("{{ open('/etc/passwd') }}", "'open' is undefined"),
    "undefined key": ("{{ messages[0].nothing.at_all }}", "no attribute 'nothing'"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}{{ os.getcwd() }}", "no loader"),
    "extends": ("{% extends 'base' %}", "no loader"),
    "class escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals escape": ("{{ raise_exception.__globals__['os'] }}", "unsafe"),
    "escape by a filter": ("{{ (''|attr('__class__')).__mro__ }}", "unsafe"),
    "escape by format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "change of a message": ("{{ messages.append(1) }}" + VALID, "unsafe"),
    "refusal": ("{{ raise_exception('only on Sundays') }}", "only on Sundays"),
    "wrong types": ("{{ 'a' + 1 }}", "TypeError"),
    "json of what is none": ("{{ cycler | tojson }}", "TypeError"),
    "empty": ("", "is empty"),
    "white space": (" \n\t\n", "is empty"),
    "nothing of the messages": ("{{ 'Hello' }}", "omits this message"),
    "not UTF-8": (b"\xff\xfe{{ messages }}", "not UTF-8"),
    "binary": (bytes(range(256)) * 64, "not UTF-8"),
    "100 MB": (b" " * 100_000_000, "100,000,000 bytes"),
    "nested too deeply": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "nested too deeply"),
    "blocks nested too deeply": ("{% if 1 %}" * 200 + "x" + "{% endif %}" * 200, "cannot be compiled"),
    "macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + VALID, "recurses without end"),
    "loop that calls itself": (
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}" + VALID,
        "recurses without end",
    ),
}
"""A template, and what the message holds."""

EITHER_LIMIT = "own.jinja: the template "
"""The beginning of a message about a limit, of time or memory; which is exceeded first depends on the machine."""

COSTLY = {
    "loops without an end": (LOOP, limits.TOO_MUCH_TIME),
    "loop in a macro": ("{% macro f() %}" + LOOP + "{% endmacro %}{{ f() }}" + VALID, limits.TOO_MUCH_TIME),
    "indentation": ("{{ messages | tojson(indent=100000000) }}", EITHER_LIMIT),
    "huge text": ("{{ 'a' * 10**10 }}", limits.TOO_MUCH_MEMORY),
    "huge list": ("{{ ([1] * 10**9) | length }}", limits.TOO_MUCH_MEMORY),
    "huge text, by a constant filter": ("{{ 'a' | center(10000000000) }}", limits.TOO_MUCH_MEMORY),
    "huge text, by format": ("{{ '%10000000000d' % 1 }}", limits.TOO_MUCH_MEMORY),
    "doubled text": (
        "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        EITHER_LIMIT,
    ),
    "squared numbers": (
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
        "too large",
    ),
    "nested filters": ("{{ range(99999) | map('string') | join('-' * 99999) }}", EITHER_LIMIT),
    "replacements": (
        "{% set ns = namespace(t='a') %}"
        "{% for i in range(9) %}{% set ns.t = ns.t | replace('a', 'a' * 999) %}{% endfor %}",
        EITHER_LIMIT,
    ),
    "lorem ipsum": ("{{ lipsum(n=10000000) }}", EITHER_LIMIT),
}
"""Those that compute or allocate until something ends them."""


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that is not rejected fails at once."""
    monkeypatch.setattr(run, "run_trainer", lambda *given: pytest.fail("nothing was wrong"))


def write_template(path: Path, template: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(template if isinstance(template, bytes) else template.encode("utf-8", "surrogatepass"))
    return path


def settings_with(folder: Path, template: str) -> list[str]:
    chats = folder / "chats.jsonl"
    chats.write_text(json.dumps({"messages": conversation("Hi", "Yes")}) + "\n")
    model = folder / "model"
    if not model.exists():
        write_tokenizer(model, None)
    named = [f"data.tokenizer={model}", f"data.path={chats}", f"data.chat_template={template}"]
    own = [f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'run'}", "model.vocab_size=512"]
    return ["recipe=llama_small", "data.source=chat", "data.seq_len=32", *named, *own]


def cpu_s() -> float:
    """Return the CPU time of this process and its children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def check_refusal(folder: Path, template: str | bytes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_template(folder / "own.jinja", template)
    began = cpu_s()
    assert run.main(settings_with(folder, str(path))) == 2
    seconds = cpu_s() - began
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("error:")) == ("", 1)
    assert says in stderr
    assert "data.chat_template=" in stderr or "data.path=" in stderr
    assert "Traceback" not in stderr
    assert seconds < 5, "within 10 s, on a machine with other things to do"
    assert not (folder / "run").exists()


@pytest.mark.parametrize("kind", list(BROKEN))
def test_broken_template_is_one_message(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refusal(tmp_path, *BROKEN[kind], capsys)


EVERY_DAY = ("loops without an end", "doubled text")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in EVERY_DAY else pytest.param(kind, marks=pytest.mark.campaign) for kind in COSTLY]
)
def test_expensive_template_is_one_message(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The child process that tries it never has more than 2 GiB."""
    check_refusal(tmp_path, *COSTLY[kind], capsys)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20


@pytest.mark.parametrize("kind", ["a folder", "no file", "a name", "a model's list", "a model's number"])
def test_template_that_is_not_a_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, says = {
        "a folder": (str(tmp_path), "is a folder; must be model, chatml, or a Jinja file"),
        "no file": (str(tmp_path / "none.jinja"), "no such file; must be model, chatml, or a Jinja file"),
        "a name": ("chat-ml", "did you mean data.chat_template=chatml?"),
        "a model's list": ("model", "must be text, or a list of names and templates"),
        "a model's number": ("model", "must be text, or a list of names and templates"),
    }[kind]
    stated = {"a model's list": [{"name": "default"}], "a model's number": 5}.get(kind)
    write_tokenizer(tmp_path / "model", None, **({} if stated is None else {"chat_template": stated}))
    assert run.main(settings_with(tmp_path, given)) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("error:") == 1
    assert says in stderr
    assert "for example: data.chat_template=chat_template.jinja" in stderr or kind != "no file"


# ---------------------------------------------------------------------------------------------------------------
# Templates that behave in the trial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (LOOP, limits.TOO_MUCH_TIME),
        ("{{ ('a' * 10**10) | length }}", limits.TOO_MUCH_MEMORY),
        ("{{ 10 ** (10 ** 9) }}", "too large"),
    ],
)
def test_template_is_stopped_at_the_conversation_that_is_expensive(body: str, says: str, tmp_path: Path) -> None:
    """The process then continues normally: the next rendering works, and limits are restored."""
    write_tokenizer(tmp_path, "{% if messages[0].content == 'Bye' %}" + body + "{% endif %}" + VALID)
    template = find_template("model", str(tmp_path))
    assert template is not None
    before = resource.getrlimit(resource.RLIMIT_AS)
    rendered = template.render(conversation("Hi", "Yes")).text
    for _ in range(2):
        with pytest.raises(BadChat, match=says):
            template.render(conversation("Bye", "Yes"))
    assert template.render(conversation("Hi", "Yes")).text == rendered
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    time.sleep(0)  # a bytecode at which an exception that was left behind would be raised


@pytest.mark.parametrize("where", ["setrlimit", "lock", "begin"])
def test_interrupted_start_of_a_limit_leaves_no_limit(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request may arrive between any two instructions."""
    before, real = resource.getrlimit(resource.RLIMIT_AS), resource.setrlimit
    watch, lock = limits._Watchdog(), limits._RENDER_LOCK

    def set_and_raise(*arguments: Any) -> None:
        real(*arguments)
        monkeypatch.setattr(resource, "setrlimit", real)
        raise StopRequested("SIGTERM")

    def acquire_and_raise() -> None:
        lock.acquire()
        raise StopRequested("SIGTERM")

    def begin_and_raise() -> None:
        limits._Watchdog.begin(watch)
        raise StopRequested("SIGTERM")

    monkeypatch.setattr(limits, "_WATCHDOG", watch)
    if where == "setrlimit":
        monkeypatch.setattr(resource, "setrlimit", set_and_raise)
    elif where == "lock":
        monkeypatch.setattr(limits, "_RENDER_LOCK", SimpleNamespace(acquire=acquire_and_raise, release=lock.release))
    else:
        monkeypatch.setattr(watch, "begin", begin_and_raise)
    with pytest.raises(StopRequested), rendering_limits():
        pytest.fail("not entered")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert watch.renderer is None
    monkeypatch.undo()
    assert is_free(lock)


def test_timeout_at_the_very_end_of_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception that ends a rendering may be raised just before the watchdog thread is stopped."""
    watch = limits._Watchdog()
    monkeypatch.setattr(limits, "_WATCHDOG", watch)
    with pytest.raises(limits.TemplateTimeout), rendering_limits():
        watch._lock = LateLock()  # type: ignore[assignment]
    assert watch.renderer is None
    assert is_free(limits._RENDER_LOCK)


class LateLock:
    """Raises TooSlow where it is taken for the first time."""

    def __init__(self) -> None:
        self._lock, self._is_first = threading.Lock(), True

    def __enter__(self) -> None:
        if self._is_first:
            self._is_first = False
            raise limits.TemplateTimeout
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def is_free(lock: Any) -> bool:
    """Return whether another thread can take a lock."""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.slow
def test_trial_reports_how_the_child_ended() -> None:
    def crash() -> str:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    assert try_in_child(lambda: "all right") == "all right"
    assert try_in_child(crash) == "crashes (signal 11)"
    assert try_in_child(lambda: str(9**9**9)) == limits.TOO_MUCH_TIME, (
        "one call into C that nothing in a process interrupts"
    )
    assert try_in_child(lambda: str(bytearray(1 << 40))) == limits.TOO_MUCH_MEMORY


def test_template_that_fails_on_a_prompt_is_one_message(tmp_path: Path) -> None:
    """For `trainer.generate` and `log.prompts`, as for training."""
    write_tokenizer(tmp_path, "{{ 1/0 }}")
    with pytest.raises(UserError, match=r"--chat=Hi: the chat template fails on it \(ZeroDivisionError"):
        chat_prompt_tokens("Hi", str(tmp_path), "--chat")
    assert len(chat_stop_ids(str(tmp_path))) == 1


def test_a_missing_template_library_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, "{{ messages }}")
    for name in ("template", "masking", "source"):
        monkeypatch.delitem(sys.modules, f"trainer.data.chat.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    data = DataSection(source="chat", path=str(tmp_path / "chats.jsonl"), tokenizer=str(tmp_path))
    for setting, use in {
        "data.chat_template=model": lambda: chat_stop_ids(str(tmp_path)),
        "--chat=Hi": lambda: chat_prompt_tokens("Hi", str(tmp_path), "--chat"),
        "data.source=chat": lambda: open_source(data, None, "train"),
    }.items():
        with pytest.raises(UserError, match=f"^{setting}: needs the library jinja2\n  to fix: pip install jinja2$"):
            use()


@pytest.mark.slow
def test_generate_and_export_reject_an_expensive_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "run", *write_chats(tmp_path), "train.steps=1")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    (tmp_path / "out" / "chat_template.jinja").write_text(LOOP)
    assert generate.command_line([str(tmp_path / "out"), "--chat", "Hi"]) == 2
    assert limits.TOO_MUCH_TIME in capsys.readouterr().err


def test_ordinary_templates_render_the_same_with_limits(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        write_tokenizer(tmp_path / name, family.template, **family.config)
        template = find_template("model", str(tmp_path / name))
        assert isinstance(template, ChatTemplate)
        unlimited = template.render_unlimited(family.messages, family.tools, False)
        assert template.render(family.messages, family.tools) == unlimited


# ---------------------------------------------------------------------------------------------------------------
# Built in


def test_built_in_chatml_is_used_kept_and_exported(tmp_path: Path) -> None:
    """For a base model with a tokenizer that has no template."""
    settings = write_chats(tmp_path)
    bare = write_tokenizer(tmp_path / "bare", None)
    fit(tmp_path / "run", *settings, f"data.tokenizer={bare}", "data.chat_template=chatml", "train.steps=1")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert "<|im_start|>" in (tmp_path / "out" / "chat_template.jinja").read_text()
    for path in (tmp_path / "run", tmp_path / "out"):
        with ExitStack() as stack:
            writer = open_generator(str(path), torch.device("cpu"), stack)
            told = chat_prompt_tokens("Hi", writer.tokenizer, "--chat", writer.template)
        assert told == chat_prompt_tokens("Hi", str(write_tokenizer(tmp_path / "other", CHATML)), "--chat")


def test_chatml_needs_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", None) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|other|>"))
    assert run.main(settings_with(tmp_path, "chatml")) == 2
    assert "data.chat_template=chatml: the tokenizer has no token <|im_end|>" in capsys.readouterr().err


def test_message_for_a_model_without_template_suggests_chatml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(settings_with(tmp_path, "model")) == 2
    assert "data.chat_template=chatml" in capsys.readouterr().err
