"""The examples and the launch scripts: run, or at least read."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.forked import REPOSITORY, fork, run_script
from tests.ranks import run_python_module, tiny_overrides


@pytest.mark.slow
def test_distillation_from_a_second_sharded_model(tmp_path: Path) -> None:
    overrides = tiny_overrides("train.steps=12", "optim.lr=0.02", f"run.dir={tmp_path / 'run'}")
    started = fork(run_script, ["examples/distill.py", overrides], tmp_path, ranks=2)
    assert started.wait_as_a_launcher(240) == [0, 0], started.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_its_subclass_is_short() -> None:
    tree = ast.parse((REPOSITORY / "examples" / "distill.py").read_text())
    (subclass,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert subclass.end_lineno is not None
    assert subclass.end_lineno - subclass.lineno < 40


@pytest.mark.slow
def test_the_readmes_model_of_ones_own(tmp_path: Path) -> None:
    """What the README shows is run as it stands there."""
    readme = (REPOSITORY / "README.md").read_text()
    (code,) = [part.partition("```")[0] for part in readme.split("```python\n")[1:] if "# my_models.py" in part]
    (tmp_path / "my_models.py").write_text(code)
    command = ["recipe=llama_small", "model.name=my_models:tiny", "model.width=96"]
    settings = ["train.steps=3", "eval.every=0", "log.sample_tokens=0", f"run.dir={tmp_path / 'run'}"]
    done = run_python_module("trainer.run", *command, *settings, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == "", "the first model of one's own warns of nothing"
