"""The examples and the pages: examples run, links lead somewhere, and the commands and code shown are valid."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import REPOSITORY, fork, run_script
from tests.helpers.ranks import run_python_module, tiny_overrides
from trainer import Trainer, load_config
from trainer.config.command_line import parse


@pytest.mark.slow
def test_distillation_from_a_second_sharded_model(tmp_path: Path) -> None:
    overrides = tiny_overrides("train.steps=12", "optim.lr=0.02", f"run.dir={tmp_path / 'run'}")
    started = fork(run_script, ["examples/distill.py", ["recipe=llama_small", *overrides]], tmp_path, ranks=2)
    assert started.wait_like_launcher(240) == [0, 0], started.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_distillation_subclass_is_short() -> None:
    tree = ast.parse((REPOSITORY / "examples" / "distill.py").read_text())
    (subclass,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert subclass.end_lineno is not None
    num_lines = subclass.end_lineno - subclass.lineno + 1
    assert num_lines < 40
    assert f"subclass has {num_lines} lines" in (REPOSITORY / "docs" / "loops.md").read_text()


@pytest.mark.slow
def test_wrong_argument_of_the_example_is_one_message(tmp_path: Path) -> None:
    started = fork(run_script, ["examples/distill.py", ["recipe=llama_small", "train.stepz=5"]], tmp_path)
    assert started.wait() == [2]
    assert "did you mean train.steps=5?" in started.stderr
    assert "Traceback" not in started.stderr


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def snippets(page: str) -> list[str]:
    """Return the Python code that a page of docs/ shows."""
    text = (REPOSITORY / "docs" / page).read_text()
    return [part.partition("```")[0] for part in text.split("```python\n")[1:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_pages_work(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    for test in re.findall(r"`(tests/test_\w+\.py)`", text):
        assert (REPOSITORY / test).exists(), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_pages_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes and keys exist; model folders of the reader are not opened."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for line in re.findall(r"^ {4,}.*-m trainer\.run (.*)", page.read_text().replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(line, comments=True)
        if not re.search(r"model\.(path|name=my_)|init_from|--help", line):
            arguments = parse(words)
            assert arguments.recipe, line
            load_config(arguments.recipe, arguments.overrides)


def test_custom_loop_on_the_page_runs() -> None:
    for code in snippets("loops.md"):
        compile(code, "loops.md", "exec")
    (subclass,) = [code for code in snippets("loops.md") if "return super().loss(batch)" in code]
    scope: dict[str, Any] = {}
    exec(subclass.rpartition("MyTrainer(")[0], scope)
    assert issubclass(scope["MyTrainer"], Trainer)


@pytest.mark.slow
def test_custom_model_on_the_page_trains(tmp_path: Path) -> None:
    """The code on the page runs unchanged."""
    (code,) = [code for code in snippets("models.md") if "# my_models.py" in code]
    (tmp_path / "my_models.py").write_text(code)
    command = ["recipe=llama_small", "model.name=my_models:tiny", "model.width=96"]
    settings = ["train.steps=3", "eval.every=0", "log.sample_tokens=0", f"run.dir={tmp_path / 'run'}"]
    done = run_python_module("trainer.run", *command, *settings, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == "", "the first model of one's own warns of nothing"
