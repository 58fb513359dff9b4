"""Untrusted input is data: a run of somebody else's imports no module, and no configuration reads the environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.launch import command
from tests.helpers.launch import run as train
from tests.helpers.tiny import tiny_config
from trainer import Trainer, UserError, load_config, load_weights, run

EVIL = "evil_module_of_tests"
CODE = """
import dataclasses
from trainer.registry import find_model, register

register(dataclasses.replace(find_model("llama"), name="x"))

def wrap(model):
    return ["layers.*"]
"""
NAMED = [f"model.name={EVIL}:x", "model.num_kv_heads=2", f"fsdp.wrap={EVIL}:wrap"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module, and `run`: a run of it, trained in another process, which this one must not import."""
    folder = tmp_path_factory.mktemp("untrusted")
    (folder / f"{EVIL}.py").write_text(CODE)
    train(folder / "run", *NAMED, "train.steps=2", "checkpoint.every=1", cwd=folder)
    return folder


@pytest.fixture
def there(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the working directory, from which the module could be imported."""
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    return work


COMMANDS = {
    "export": ["export", "run", "out"],
    "export of a checkpoint": ["export", "run/checkpoints/step_00000002", "out"],
    "another module is allowed": ["export", "run", "out", "--allow-import", EVIL[:-1]],
    "generate": ["generate", "run", "--prompt", "a"],
    "evaluate": ["evaluate", "run"],
    "data": ["data", "show", "recipe=run"],
    "plan": ["plan", "recipe=run"],
    "run": ["run", "recipe=run", "--print-config"],
    "recipe that inherits": ["run", "recipe=inheriting.yaml", "--print-config"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_import_nothing_that_a_run_names(name: str, there: Path) -> None:
    (there / "inheriting.yaml").write_text("recipe: run\ntrain:\n  steps: 3\n")
    ended = meshtrainer(*COMMANDS[name])
    assert ended.code == 2, ended.err
    assert EVIL not in sys.modules
    assert f"--allow-import {EVIL}" in ended.err
    assert not (there / "out").exists()


@pytest.mark.parametrize(
    ("config", "parent"),
    [
        ("recipe: parent.yaml\n", f"recipe: llama_small\nmodel: {{name: '{EVIL}:x'}}\n"),
        ("recipe: parent.yaml\n", f"recipe: llama_small\nfsdp: {{wrap: '{EVIL}:wrap'}}\n"),
        (f"recipe: llama_small\nrun: {{on_end: '{EVIL}:wrap'}}\nfsdp: {{wrap: '${{run.on_end}}'}}\n", ""),
    ],
    ids=["model of a parent", "wrap of a parent", "reference"],
)
def test_a_folder_that_looks_like_a_run_names_no_module_indirectly(
    config: str, parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{EVIL}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in (("status.json", "{}"), ("config.yaml", config), ("parent.yaml", parent)):
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=r"^(model\.name|fsdp\.wrap)="):
        load_config(str(folder), ["run.name=mine"])
    assert EVIL not in sys.modules


@pytest.mark.slow
def test_nothing_else_imports_it_either(there: Path, tmp_path: Path) -> None:
    """Lists of checkpoints, Python, a resume, and initial weights."""
    assert meshtrainer("checkpoints", "run").code == 0
    checkpoint = there / "run" / "checkpoints" / "step_00000002"
    for load in (lambda: load_weights(there / "run"), lambda: load_weights(checkpoint), lambda: load_config("run")):
        with pytest.raises(UserError):
            load()
    for setting in (f"checkpoint.resume={checkpoint}", f"train.init_from={checkpoint}"):
        trainer = Trainer(tiny_config(tmp_path / "next", setting, "train.steps=0"))
        with pytest.raises(UserError):
            trainer.fit()
        trainer.close()
    assert EVIL not in sys.modules


@pytest.mark.slow
def test_a_module_is_imported_if_the_user_names_it(there: Path) -> None:
    """Where the run names it, by `--allow-import`; in a recipe file or on the command line by its name alone."""
    command("trainer.export", "run", "allowed", "--allow-import", EVIL, cwd=there)
    assert (there / "allowed" / "model.safetensors").exists()
    (there / "mine.yaml").write_text(f"recipe: llama_small\nmodel:\n  name: {EVIL}:x\n")
    for arguments in (["recipe=mine.yaml"], ["recipe=llama_small", *NAMED]):
        command("trainer.run", *arguments, "--print-config", cwd=there)


# ---------------------------------------------------------------------------------------------------------------
# Resolvers

SECRET = "hunter2-of-the-environment"
RESOLVERS = [
    "before ${oc.env:SECRET_OF_TEST} after",
    "${oc.decode:'${oc.env:SECRET_OF_TEST}'}",
    "${${log.wandb_project}:SECRET_OF_TEST}",
    r"\\${oc.env:SECRET_OF_TEST}",
]


@pytest.mark.parametrize("text", RESOLVERS)
def test_configurations_do_not_read_the_environment(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In recipe files, on the command line, and in the configuration of a run's folder."""
    monkeypatch.setenv("SECRET_OF_TEST", SECRET)
    quoted = text.replace("'", "''")
    content = f"model: {{name: llama}}\nlog: {{wandb_project: oc.env}}\nrun: {{name: '{quoted}'}}\n"
    (tmp_path / "mine.yaml").write_text(content)
    (tmp_path / "config.yaml").write_text(content)
    for arguments in (
        [f"recipe={tmp_path / 'mine.yaml'}"],
        [f"recipe={tmp_path}"],
        ["recipe=llama_small", "log.wandb_project=oc.env", f"run.name={text}"],
        ["recipe=llama_small", f"checkpoint.allow_changes=['{quoted}']"],
    ):
        assert run.main([*arguments, "--print-config"]) == 2, arguments
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        assert SECRET not in stderr
        assert stderr.startswith("error: ")


@pytest.mark.parametrize("text", ["checkpoint: {dir: '${oc.env:HOME}'}", "- 1", "a: ["])
def test_invalid_configuration_of_a_run_means_no_checkpoints(text: str, tmp_path: Path) -> None:
    """config.yaml says where a run's checkpoints are."""
    (tmp_path / "config.yaml").write_text(text)
    ended = meshtrainer("checkpoints", tmp_path)
    assert ended.code == 2
    assert ended.err.count("error: ") == 1


def test_command_of_a_stored_configuration_is_run_only_if_it_is_given_again(tmp_path: Path) -> None:
    run = tmp_path / "theirs"
    run.mkdir()
    (run / "status.json").write_text("{}")
    (run / "config.yaml").write_text(load_config("llama_small", ["run.on_end=touch PWNED"]).stored_yaml())
    (tmp_path / "child.yaml").write_text(f"recipe: {run}\n")
    for recipe, overrides in ((str(run), []), (str(run), ["run.name=mine"]), (str(tmp_path / "child.yaml"), [])):
        with pytest.raises(UserError, match=r"^run\.on_end=touch PWNED: (.|\n)*run\.on_end=null"):
            load_config(recipe, overrides)
        assert load_config(recipe, [*overrides, "run.on_end=null"]).run.on_end is None
        assert load_config(recipe, [*overrides, "run.on_end=true"]).run.on_end == "true"


def test_folder_is_a_recipe_only_if_it_is_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    """The files of a run are untrusted, but a recipe file that is given by its path is not."""
    (tmp_path / "config.yaml").write_text("recipe: llama_small\n")
    with pytest.raises(UserError, match=rf"^recipe={tmp_path}: ") as refused:
        load_config(str(tmp_path))
    assert refused.value.proposal == f"recipe={tmp_path}/config.yaml"
    (tmp_path / "status.json").write_text("{}")
    assert load_config(str(tmp_path)).run.dir == str(tmp_path)
