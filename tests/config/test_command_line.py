"""The command line: options, subcommands, inheritance of recipes, names of runs, dry runs, and custom scripts."""

from __future__ import annotations

import dataclasses
import importlib.util
import operator
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

import trainer
from tests.helpers.commands import Ended
from tests.helpers.commands import meshtrainer as command
from tests.helpers.launch import REPOSITORY, Run, fork, launch, run_script, tiny
from tests.helpers.launch import run as train
from tests.helpers.runs import SharedRun
from trainer import load_config, run
from trainer.config.files import recipe_description, recipe_files
from trainer.config.keys import declared_keys
from trainer.config.messages import type_name
from trainer.registry import find_model

# ---------------------------------------------------------------------------------------------------------------
# Options and subcommands


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["meshtrainer", trainer.__version__]


def test_help_lists_every_recipe_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, path in recipe_files().items():
        assert len(recipe_description(path)) > 20
        assert re.search(rf"^  {name} +{re.escape(recipe_description(path))}$", text, re.MULTILINE)
    listed = re.findall(r"^  (\S+)  \[(.+); default (.+)\]\n      (.+)$", text, re.MULTILINE)
    for model in ("llama", "gpt2"):
        for key, item in declared_keys(find_model(model).config).items():
            meaning = item.metadata.get("meaning", "")
            (row, *_) = [row for row in listed if row[0] == key and row[3].startswith(meaning)]
            assert type_name(item.type) in row[1]
            assert len(row[3]) > 10
            assert item.default is dataclasses.MISSING or row[2]


def test_help_of_a_section_shows_the_values_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["recipe=llama_small", "--help", "optim"]) == 0
    said = capsys.readouterr().out
    (lr,) = (line for line in said.splitlines() if line.startswith("  optim.lr "))
    assert "0.0003" in lr, "the default"
    assert "0.004" in lr, "of the recipe"
    assert "train.steps" not in said


@pytest.mark.parametrize("name", ["lr", "optim.lr", "optims"])
def test_help_for_a_key_names_its_section(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help", name]) == 2
    assert "--help optim?" in capsys.readouterr().err


@pytest.mark.slow
def test_help_imports_no_torch() -> None:
    ended = launch([sys.executable, "-X", "importtime", "-m", "trainer.run", "--help"], REPOSITORY).wait()
    imported = re.findall(r"^import time: .*\| +(\S+)$", ended.err, re.MULTILINE)
    assert ended.code == 0
    assert "trainer.config" in imported
    assert "torch" not in imported


def test_last_value_of_a_repeated_key_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["recipe=gpt2", "--print-config", "recipe=llama_small", "train.steps=5", "train.steps=7"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["run"]["name"], printed["train"]["steps"]) == ("llama_small", 7)


def meshtrainer(*words: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the exit code of `meshtrainer WORDS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["meshtrainer", *words])
    monkeypatch.setattr(os, "_exit", sys.exit)  # which would end the tests
    with pytest.raises(SystemExit) as ended:
        run.meshtrainer()
    return ended.value.code


@pytest.mark.parametrize("name", sorted(set(run.COMMANDS) - {"run"}))
def test_each_subcommand_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meshtrainer(name, "--help", monkeypatch=monkeypatch) in (0, None)
    printed = capsys.readouterr()
    assert re.search(rf"(trainer\.|meshtrainer ){name}\b", printed.out)
    assert printed.err == ""


@pytest.mark.parametrize(
    "words", [["plan", "recipe=llama_small", "model.name=MODULE:none"], ["export", "nowhere", "out"]]
)
def test_console_script_finds_modules_in_the_working_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sys.path begins with the folder of the script, not with the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    module = f"models_for_{words[0]}"
    (tmp_path / f"{module}.py").touch()
    words = [word.replace("MODULE", module) for word in words]
    assert meshtrainer(*words, monkeypatch=monkeypatch) == 2
    assert importlib.util.find_spec(module) is not None


# ---------------------------------------------------------------------------------------------------------------
# --print-config --why


def comments_in(text: str) -> dict[str, str]:
    """Return the comment on each key, which is behind its value or on the line above."""
    comments, section, above = dict[str, str](), "", ""
    for line in text.splitlines():
        content, _, comment = line.partition("# ")
        if found := re.match(r"(  )?(\w+):", content):
            section = section if found[1] else found[2]
            comments[f"{section}.{found[2]}"] = comment or above
        above = "" if content.strip() else comment
    return {key: comment for key, comment in comments.items() if comment}


def test_why_says_where_each_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("recipe: llama_small\noptim: {lr: 0.1}\nlog: {prompts: ['def ', 'a\\nb']}\n")
    Path("book.txt").write_text("Once upon a time.\n" * 200)
    words = ["train.steps=7", "data.path=book.txt", "data.cache_dir=a folder: #1"]
    assert run.main(["recipe=mine.yaml", *words, "--print-config", "--why"]) == 0
    text = capsys.readouterr().out
    comments = comments_in(text)
    assert comments["train.steps"] == comments["data.path"]
    assert "mine.yaml" in comments["optim.lr"]
    assert "llama_small.yaml" in comments["schedule.warmup_steps"]
    assert "data.path" in comments["data.source"]
    config = load_config("mine.yaml", words)
    for key, item in declared_keys(type(config.model)).items():
        assert key in comments or operator.attrgetter(key)(config) == item.default, key
    assert "optim.eps" not in comments
    # It is still a recipe file of the same configuration.
    Path("printed.yaml").write_text(text)
    assert load_config("printed.yaml") == config


# ---------------------------------------------------------------------------------------------------------------
# Recipes that inherit


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_recipe_inherits(tmp_path: Path) -> None:
    parent = load_config("llama_small")
    written(tmp_path, "middle.yaml", "recipe: llama_small\nmodel: {dim: 64}\ntrain: {steps: 3}\n")
    child = load_config(written(tmp_path, "child.yaml", "recipe: middle.yaml\ntrain: {steps: 4}\n"), ["optim.lr=1"])
    assert (child.model.dim, child.train.steps, child.optim.lr) == (64, 4, 1)  # type: ignore[attr-defined]
    assert child.schedule == parent.schedule
    assert child.run.dir == "runs/child"


def test_another_model_inherits_no_fields(tmp_path: Path) -> None:
    child = load_config(written(tmp_path, "child.yaml", "recipe: llama_small\nmodel: {name: gpt2}\n"))
    assert child.model == load_config("llama_small", ["model.name=gpt2"]).model
    assert child.train == load_config("llama_small").train


def test_inheriting_from_a_run_takes_neither_its_name_nor_its_folders(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ran.mkdir()
    config = load_config("llama_small", ["train.steps=77", f"run.dir={ran}", "checkpoint.dir=elsewhere"])
    written(ran, "config.yaml", config.to_yaml())
    written(ran, "status.json", "{}")
    child = load_config(written(tmp_path, "child.yaml", f"recipe: {ran}\noptim: {{lr: 1.0}}\n"))
    assert (child.train.steps, child.optim.lr, child.checkpoint.dir) == (77, 1.0, None)
    assert (child.run.name, child.run.dir) == ("child", "runs/child")


# ---------------------------------------------------------------------------------------------------------------
# Runs: their names, dry runs, and custom scripts


def test_a_finished_run_with_other_settings_is_refused_with_a_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def train_unnamed(*overrides: str) -> Ended:
        return command("run", "recipe=llama_small", *tiny("train.steps=1", *overrides))

    assert train_unnamed().code == 0
    (tmp_path / "runs" / "llama_small-2").mkdir()
    refused = train_unnamed("model.dim=48")
    assert refused.code == 2
    for text in ("model.dim", "32", "48", "run.name=llama_small-3"):
        assert text in refused.err
    assert train_unnamed("model.dim=48", "run.name=llama_small-3").code == 0
    assert not list((tmp_path / "runs" / "llama_small-2").iterdir())


DRY_RUN = """
import sys, tempfile
from trainer import run

tempfile.tempdir = sys.argv.pop()
run.exit_process(run.main())
"""


@pytest.mark.slow
def test_dry_run_leaves_no_files(tmp_path: Path) -> None:
    script, temporary = tmp_path / "dry.py", tmp_path / "temporary"
    script.write_text(DRY_RUN)
    temporary.mkdir()
    words = ["recipe=llama_small", *tiny("train.steps=5"), f"run.dir={tmp_path / 'run'}", "--dry-run", str(temporary)]
    launcher = {"TORCHELASTIC_RUN_ID": "dry"}  # one that starts all ranks sets it for all
    ran = fork(run_script, [str(script), words], tmp_path / "run", ranks=2, variables=launcher).wait()
    assert ran.code == 0, ran.err
    assert re.search(r"\b1 to 5\b", ran.out)
    assert sorted(tmp_path.iterdir()) == [script, temporary]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_dry_run_resumes_like_the_run(one: SharedRun, tmp_path: Path) -> None:
    folder = one.copy_to(tmp_path / "run")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    ran = train(folder, *one.overrides, "train.steps=14", "--dry-run")
    assert re.search(r"\b13 to 14\b", ran.out)
    refused = train(folder, *one.overrides, "optim.name=sgd", "--dry-run", code=2)
    assert "optim.name" in refused.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files


SCRIPT = """
import sys, trainer

class Doubled(trainer.Trainer):
    def loss(self, batch):
        return 2 * super().loss(batch)

sys.exit(trainer.main(Doubled))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_custom_script_has_the_whole_command_line(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)

    def run_mine(*overrides: str) -> Run:
        words = ["recipe=llama_small", *tiny("train.steps=2", *overrides), f"run.dir={tmp_path / 'run'}"]
        return fork(run_script, [str(tmp_path / "mine.py"), words], tmp_path / "run").wait()

    wrong = run_mine("train.stepz=2")
    assert (wrong.code, wrong.err.count("error:"), wrong.out) == (2, 1, "")
    ran = run_mine(f"nproc={ranks}")
    assert ran.code == 0, ran.err
    assert ran.of_kind("start")[0]["world_size"] == ranks
    assert ran.train("loss")[0] > 10, "twice that of a fresh model, 5.5"
