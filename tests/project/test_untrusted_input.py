"""Untrusted input is data: a stored configuration runs no code and reads no environment variables."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError, checkpoints, export, load_config, load_weights, recipe, run
from trainer.checkpoint.manifest import MANIFEST, read_manifest
from trainer.checkpoint.reader import find_checkpoint, find_checkpoints
from trainer.checkpoint.storage import LocalStorage
from trainer.config import compare_configs, stored_value
from trainer.data import __main__ as data_command
from trainer.evaluate import find_subject
from trainer.files import crc32
from trainer.plan import __main__ as plan_command

SECRET = "hunter2-of-the-environment"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    fit(folder, "train.steps=2", "checkpoint.every=1", "checkpoint.mode=sync")
    return folder


def change_config(checkpoint: Path, old: str, new: str) -> None:
    """Change a checkpoint's configuration, and its manifest accordingly, as an attacker would."""
    path = checkpoint / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    data = path.read_bytes()
    manifest = read_manifest(LocalStorage(checkpoint))
    files = {**manifest.files, "config.yaml": (len(data), crc32(data))}
    digest = sha256(data).hexdigest()
    (checkpoint / MANIFEST).write_text(dataclasses.replace(manifest, files=files, config_sha256=digest).to_json())


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a module in the working folder that registers the recipe `x` when it is imported."""
    name = f"evil_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """\
            import dataclasses
            from trainer.recipe import find_recipe, register

            register(dataclasses.replace(find_recipe("llama"), name="x"))

            def wrap(model):
                return []
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield name
    recipe._registry.pop("x", None)  # else other tests find two recipes for a Llama's folder


def name_module(run_dir: Path, name: str) -> Path:
    """Have the newest checkpoint of a run name a module as its model's; returns the checkpoint."""
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    change_config(checkpoint, "model:\n  name: llama", f"model:\n  name: {name}:x")
    return checkpoint


@pytest.mark.slow
def test_export_imports_nothing_that_a_checkpoint_names(
    run_dir: Path, evil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_module(run_dir, evil)
    assert export.command_line([str(run_dir), str(tmp_path / "out.pt")]) == 2
    assert evil not in sys.modules
    said = capsys.readouterr().err
    assert f"model.name={evil}:x" in said
    assert f"--allow-import {evil}" in said
    assert not (tmp_path / "out.pt").exists()


def test_export_imports_an_allowed_module(run_dir: Path, evil: str, tmp_path: Path) -> None:
    name_module(run_dir, evil)
    assert export.command_line([str(run_dir), str(tmp_path / "out.pt"), "--allow-import", evil]) == 0
    assert (tmp_path / "out.pt").exists()


def test_allowing_one_module_allows_no_other(run_dir: Path, evil: str, tmp_path: Path) -> None:
    name_module(run_dir, evil)
    allowed = evil[:-1]  # its name begins like this
    assert export.command_line([str(run_dir), str(tmp_path / "out.pt"), "--allow-import", allowed]) == 2
    assert evil not in sys.modules


def test_load_weights_imports_nothing_that_a_checkpoint_names(run_dir: Path, evil: str) -> None:
    checkpoint = name_module(run_dir, evil)
    for path in (run_dir, checkpoint):
        with pytest.raises(UserError, match="allow_import"):
            load_weights(path)
    assert evil not in sys.modules
    assert sum(p.numel() for p in load_weights(checkpoint, allow_import=[evil]).parameters())
    assert evil in sys.modules
    assert load_weights(run_dir) is not None, "what is registered by now needs no leave"


def test_listing_checkpoints_imports_nothing(run_dir: Path, evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    name_module(run_dir, evil)
    (run_dir / "config.yaml").write_text(f"model: {{name: '{evil}:x'}}\n")
    assert checkpoints.command_line([str(run_dir)]) == 0
    assert checkpoints.command_line([str(run_dir), "--diff", "1", "2"]) == 0
    assert f"model.name: llama -> {evil}:x" in capsys.readouterr().out
    assert evil not in sys.modules


def test_finding_a_runs_checkpoints_imports_nothing(run_dir: Path, evil: str, tmp_path: Path) -> None:
    """If a run's checkpoints are elsewhere, config.yaml says where; nothing else is taken from it."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text(f"model: {{name: '{evil}:x'}}\ncheckpoint: {{dir: {run_dir / 'checkpoints'}}}\n")
    assert str(find_checkpoint(other)).endswith("step_00000002")
    assert evil not in sys.modules


def test_a_resume_imports_nothing_that_the_checkpoint_names(run_dir: Path, evil: str, tmp_path: Path) -> None:
    checkpoint = name_module(run_dir, evil)
    change_config(checkpoint, "wrap: block", f"wrap: {evil}:wrap")
    trainer = Trainer(tiny_config(tmp_path / "next", f"checkpoint.resume={checkpoint}"))
    with pytest.raises(UserError, match=rf"model.name: {evil}:x in the checkpoint, llama now"):
        trainer.fit()
    trainer = Trainer(tiny_config(tmp_path / "next", f"train.init_from={checkpoint}", "train.steps=0"))
    assert trainer.load_checkpoint() is None
    assert evil not in sys.modules


def test_command_line_may_name_a_module(evil: str) -> None:
    assert load_config("llama_small", [f"model.name={evil}:x"]).model.name == f"{evil}:x"
    assert evil in sys.modules


# ---------------------------------------------------------------------------------------------------------------
# Resolvers

RESOLVERS = [
    "${oc.env:SECRET_OF_TEST}",
    "before ${oc.env:SECRET_OF_TEST} after",
    "${oc.env:SECRET_OF_TEST,default}",
    "${oc.decode:'${oc.env:SECRET_OF_TEST}'}",
    "${${log.wandb_project}:SECRET_OF_TEST}",
    "${data.${oc.env:SECRET_OF_TEST}}",
    r"\${oc.env:SECRET_OF_TEST}",
    r"\\${oc.env:SECRET_OF_TEST}",
    "${run.seed}${oc.env:SECRET_OF_TEST}",
]


@pytest.mark.parametrize("text", RESOLVERS)
def test_omegaconf_resolvers_are_disabled(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", SECRET)
    quoted = text.replace("'", "''")
    (tmp_path / "mine.yaml").write_text(
        f"model: {{name: llama}}\nlog: {{wandb_project: oc.env}}\nrun: {{name: '{quoted}'}}\n"
    )
    for arguments in (
        [f"recipe={tmp_path / 'mine.yaml'}"],
        ["recipe=llama_small", "log.wandb_project=oc.env", f"run.name={text}"],
        ["recipe=llama_small", f"data.path={text}"],
        ["recipe=llama_small", f"checkpoint.allow_changes=['{quoted}']"],
    ):
        assert run.main([*arguments, "--print-config"]) == 2, arguments
        stdout, stderr = capsys.readouterr()
        assert SECRET not in stdout + stderr
        assert stderr.count("error:") == 1
        assert "${section.key}" in stderr, stderr


def test_omegaconf_resolvers_in_a_stored_configuration_are_disabled(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", SECRET)
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    change_config(checkpoint, "  resume: auto", "  resume: ${oc.env:SECRET_OF_TEST}")
    change_config(checkpoint, "  source: synthetic", "  source: ${oc.env:SECRET_OF_TEST}")
    stored = (checkpoint / "config.yaml").read_text()
    assert stored_value(stored, "checkpoint.resume") == "${oc.env:SECRET_OF_TEST}"
    refused, free = compare_configs(tiny_config(run_dir), stored)
    assert refused == ["data.source: ${oc.env:SECRET_OF_TEST} in the checkpoint, synthetic now"]
    assert SECRET not in "".join(refused + free)
    with pytest.raises(UserError, match=r"\$\{section.key\}"):
        load_weights(checkpoint)


@pytest.mark.parametrize("text", ["checkpoint: {dir: '${oc.env:HOME}'}", "checkpoint: {dir: '${'}", "- 1", "a: [", ""])
def test_invalid_configuration_of_a_run_means_no_checkpoints(text: str, tmp_path: Path) -> None:
    """config.yaml is searched for the location of checkpoints."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="has no checkpoints"):
        find_checkpoints(tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# Runs as recipes


def names_evil(run_dir: Path, evil: str, key: str) -> None:
    """Make the configuration in a run's folder name a module, as an attacker would."""
    path = run_dir / "config.yaml"
    old, new = {"model": ("name: llama", f"name: {evil}:x"), "wrap": ("wrap: block", f"wrap: {evil}:wrap")}[key]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(f"  {old}\n", f"  {new}\n"))


@pytest.mark.parametrize("key", ["model", "wrap"])
@pytest.mark.parametrize("command", ["print-config", "help", "show", "plan", "load"])
def test_run_as_recipe_imports_only_allowed_modules(
    command: str, key: str, run_dir: Path, evil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command; with permission, which is given in the same words everywhere, the module is imported."""
    names_evil(run_dir, evil, key)
    recipe = f"recipe={run_dir}"

    def ask(*allowed: str) -> int:
        if command == "load":
            return 2 if refused(lambda: load_config(str(run_dir), allow_import=allowed[1:])) else 0
        if command == "show":
            return data_command.command_line(["show", recipe, *allowed])
        if command == "plan":
            return plan_command.command_line([recipe, *allowed])
        return run.main([recipe, f"--{command}", *allowed])

    assert ask() == 2
    assert evil not in sys.modules
    if command != "load":
        assert f"--allow-import {evil}" in capsys.readouterr().err
    if key == "model":
        assert ask("--allow-import", evil) == 0
        assert evil in sys.modules


def refused(act: Callable[[], object]) -> bool:
    try:
        act()
    except UserError:
        return True
    return False


def test_evaluation_imports_only_allowed_modules(run_dir: Path, evil: str) -> None:
    checkpoint = name_module(run_dir, evil)
    with pytest.raises(UserError, match=f"--allow-import {evil}"):
        find_subject(str(checkpoint), [])
    assert evil not in sys.modules
    assert find_subject(str(checkpoint), [], [evil]).config.model.name == f"{evil}:x"


def test_recipe_file_may_name_a_module(evil: str, tmp_path: Path) -> None:
    """The user wrote and named it, like a script; the configuration of a run or a checkpoint is not trusted."""
    (tmp_path / "mine.yaml").write_text(f"recipe: llama_small\nmodel:\n  name: {evil}:x\n")
    assert load_config(str(tmp_path / "mine.yaml")).model.name == f"{evil}:x"


def test_inheriting_from_a_run_does_not_allow_its_module(run_dir: Path, evil: str, tmp_path: Path) -> None:
    names_evil(run_dir, evil, "model")
    (tmp_path / "mine.yaml").write_text(f"recipe: {run_dir}\ntrain:\n  steps: 3\n")
    with pytest.raises(UserError, match=f"--allow-import {evil}"):
        load_config(str(tmp_path / "mine.yaml"))
    assert evil not in sys.modules
    assert load_config(str(tmp_path / "mine.yaml"), ["model.name=llama"]).train.steps == 3
