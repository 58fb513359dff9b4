"""Chat templates that are broken, forbidden or no file: one message and exit code 2. `chatml` is built in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

from tests.helpers.chats import CHATML, FAMILIES, conversation, write_tokenizer
from tests.helpers.commands import Ended, meshtrainer
from tests.helpers.data import read_all, write_records
from trainer.config.schema import DataSection
from trainer.data.opening import open_source

VALID = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
"""The valid rest of a template."""

EVERYDAY = (
    *("division by zero", "invalid syntax", "refusal", "not UTF-8", "white space"),
    *("a file of the machine", "an escape from the sandbox", "an escape by format", "a change of the messages"),
    *("a private name in a namespace", "recursion without end"),
)
"""A template for each way to break; the campaign tries them all."""

BROKEN: dict[str, str | bytes] = {
    "division by zero": "{{ 1/0 }}",
    "invalid syntax": "{% for m in messages %}{{ m.content }}",
    "unknown filter": "{{ messages | frobnicate }}",
    "undefined name": "{{ nothing.at_all.here }}",
    "wrong types": "{{ 'a' + 1 }}",
    "refusal": "{{ raise_exception('only on Sundays') }}",
    "lone surrogate": VALID + "{{ '\\ud800' }}",
    "not UTF-8": b"\xff\xfe{{ messages }}",
    "white space": " \n\t\n",
    "nothing of the messages": "{{ 'Hello' }}",
    "a file of the machine": "{% include '/etc/passwd' %}",
    "a library": "{% import 'os' as os %}{{ os.getcwd() }}",
    "a function of Python": "{{ open('/etc/passwd') }}",
    "an escape from the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}" + VALID,
    "an escape by a function's globals": "{{ raise_exception.__globals__['os'] }}" + VALID,
    "an escape by a filter": "{{ (''|attr('__class__')).__mro__ }}" + VALID,
    "an escape by format": "{{ '{0.__class__.__mro__}'.format('') }}" + VALID,
    "a change of the messages": "{{ messages.append(1) }}" + VALID,
    "a private name in a namespace": "{% set own = namespace() %}{% set own._name = 1 %}" + VALID,
    "recursion without end": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}


def run_with(folder: Path, template: str, tokenizer: Path | None = None) -> Ended:
    """Check a run on a chat with a template."""
    chats = write_records(folder / "chats.jsonl", [{"messages": conversation("Hi", "Yes")}])
    model = tokenizer or write_tokenizer(folder / "model", None)
    own = [f"data.tokenizer={model}", f"data.path={chats}", f"data.chat_template={template}", "data.source=chat"]
    more = [f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'run'}", "model.vocab_size=512"]
    return meshtrainer("run", "recipe=llama_small", "data.seq_len=32", *own, *more, "--dry-run")


def is_one_message(ended: Ended) -> bool:
    return (ended.code, ended.out, ended.err.count("error: ")) == (2, "", 1) and "Traceback" not in ended.err


@pytest.mark.parametrize(
    "kind", [kind if kind in EVERYDAY else pytest.param(kind, marks=pytest.mark.campaign) for kind in BROKEN]
)
def test_a_broken_or_forbidden_template_is_one_message(kind: str, tmp_path: Path) -> None:
    template, path = BROKEN[kind], tmp_path / "own.jinja"
    path.write_bytes(template if isinstance(template, bytes) else template.encode("utf-8", "surrogatepass"))
    ended = run_with(tmp_path, str(path))
    assert is_one_message(ended), ended
    assert f"data.chat_template={path}" in ended.err or "chats.jsonl:1" in ended.err
    assert "passwd" not in ended.err or "root:" not in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "stated"),
    [("{folder}", None), ("{folder}/none.jinja", None), ("chat-ml", None), ("model", [{"name": "x"}]), ("model", 5)],
)
def test_a_template_that_is_no_file(given: str, stated: object, tmp_path: Path) -> None:
    given = given.format(folder=tmp_path)
    model = write_tokenizer(tmp_path / "model", None, **({} if stated is None else {"chat_template": stated}))
    ended = run_with(tmp_path, given, model)
    assert is_one_message(ended), ended
    assert f"data.chat_template={given}" in ended.err
    if given in ("chat-ml", "model"):
        assert "data.chat_template=chatml" in ended.err or stated is not None


def test_a_model_without_a_template_may_take_chatml(tmp_path: Path) -> None:
    """It is built in, for tokenizers that have its tokens; the message proposes it."""
    ended = run_with(tmp_path, "model")
    assert is_one_message(ended), ended
    assert "data.chat_template=chatml" in ended.err

    messages = {"messages": FAMILIES["chatml"].messages}
    path = str(write_records(tmp_path / "chats.jsonl", [messages]))
    found = []
    for name, template, setting in (("bare", None, "chatml"), ("own", CHATML, "model")):
        tokenizer = str(write_tokenizer(tmp_path / name, template))
        data = DataSection(source="chat", path=path, tokenizer=tokenizer, chat_template=setting, seq_len=64)
        found.append(read_all(open_source(data, None, "train")))
    assert all((found[0][name] == found[1][name]).all() for name in found[1])

    lacking = write_tokenizer(tmp_path / "lacking", None) / "tokenizer.json"
    lacking.write_text(lacking.read_text().replace("<|im_end|>", "<|other|>"))
    ended = run_with(tmp_path, "chatml", lacking.parent)
    assert is_one_message(ended), ended
    assert "data.chat_template=chatml: " in ended.err
    assert "<|im_end|>" in ended.err


def test_a_missing_template_library_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("trainer.data.chat.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ended = run_with(tmp_path, "chatml")
    assert is_one_message(ended), ended
    assert "pip install jinja2" in ended.err
