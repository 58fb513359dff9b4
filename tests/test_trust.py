"""What comes from elsewhere is data: a checkpoint's configuration runs no code and reads no environment."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from hashlib import sha256
from pathlib import Path

import pytest

from tests.tiny import fit, tiny_config
from trainer import Trainer, UserError, checkpoints, export, load_config, load_weights, run
from trainer.checkpoint.manifest import COMMIT, read_manifest
from trainer.checkpoint.place import LocalPlace
from trainer.checkpoint.source import find_checkpoint, find_checkpoints
from trainer.config import compare_configs, stored_value
from trainer.files import crc32

SECRET = "hunter2-of-the-environment"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    fit(folder, "train.steps=2", "checkpoint.every=1", "checkpoint.mode=sync")
    return folder


def say_otherwise(checkpoint: Path, old: str, new: str) -> None:
    """Have a checkpoint's configuration say something else, and its manifest agree: as somebody does who means harm."""
    path = checkpoint / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    data = path.read_bytes()
    manifest = read_manifest(LocalPlace(checkpoint))
    files = {**manifest.files, "config.yaml": (len(data), crc32(data))}
    digest = sha256(data).hexdigest()
    (checkpoint / COMMIT).write_text(dataclasses.replace(manifest, files=files, config_sha256=digest).to_json())


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the folder where commands are run, whose import is seen; returns its name."""
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
    return name


def name_module(run_dir: Path, name: str) -> Path:
    """Have the newest checkpoint of a run name a module as its model's; returns the checkpoint."""
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    say_otherwise(checkpoint, "model:\n  name: llama", f"model:\n  name: {name}:x")
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


def test_export_imports_what_it_was_allowed_to(run_dir: Path, evil: str, tmp_path: Path) -> None:
    name_module(run_dir, evil)
    assert export.command_line([str(run_dir), str(tmp_path / "out.pt"), "--allow-import", evil]) == 0
    assert (tmp_path / "out.pt").exists()


def test_another_module_than_the_allowed_one(run_dir: Path, evil: str, tmp_path: Path) -> None:
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


def test_looking_at_checkpoints_imports_nothing(run_dir: Path, evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    name_module(run_dir, evil)
    (run_dir / "config.yaml").write_text(f"model: {{name: '{evil}:x'}}\n")
    assert checkpoints.command_line([str(run_dir)]) == 0
    assert checkpoints.command_line([str(run_dir), "--diff", "1", "2"]) == 0
    assert f"model.name: llama -> {evil}:x" in capsys.readouterr().out
    assert evil not in sys.modules


def test_finding_a_runs_checkpoints_imports_nothing(run_dir: Path, evil: str, tmp_path: Path) -> None:
    """Of a run whose checkpoints lie elsewhere its config.yaml says where: that is all that is taken from it."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text(f"model: {{name: '{evil}:x'}}\ncheckpoint: {{dir: {run_dir / 'checkpoints'}}}\n")
    assert str(find_checkpoint(other)).endswith("step_00000002")
    assert evil not in sys.modules


def test_a_resume_imports_nothing_that_the_checkpoint_names(run_dir: Path, evil: str, tmp_path: Path) -> None:
    checkpoint = name_module(run_dir, evil)
    say_otherwise(checkpoint, "wrap: block", f"wrap: {evil}:wrap")
    trainer = Trainer(tiny_config(tmp_path / "next", f"checkpoint.resume={checkpoint}"))
    with pytest.raises(UserError, match=rf"model.name: {evil}:x in the checkpoint, llama now"):
        trainer.fit()
    trainer = Trainer(tiny_config(tmp_path / "next", f"train.init_from={checkpoint}", "train.steps=0"))
    assert trainer.load_checkpoint() is None
    assert evil not in sys.modules


def test_the_command_line_imports_what_it_names(evil: str) -> None:
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
def test_resolvers_are_off(
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


def test_resolvers_of_a_stored_configuration_are_off(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", SECRET)
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    say_otherwise(checkpoint, "  resume: auto", "  resume: ${oc.env:SECRET_OF_TEST}")
    say_otherwise(checkpoint, "  source: synthetic", "  source: ${oc.env:SECRET_OF_TEST}")
    stored = (checkpoint / "config.yaml").read_text()
    assert stored_value(stored, "checkpoint.resume") == "${oc.env:SECRET_OF_TEST}"
    refused, free = compare_configs(tiny_config(run_dir), stored)
    assert refused == ["data.source: ${oc.env:SECRET_OF_TEST} in the checkpoint, synthetic now"]
    assert SECRET not in "".join(refused + free)
    with pytest.raises(UserError, match=r"\$\{section.key\}"):
        load_weights(checkpoint)


@pytest.mark.parametrize("text", ["checkpoint: {dir: '${oc.env:HOME}'}", "checkpoint: {dir: '${'}", "- 1", "a: [", ""])
def test_a_runs_configuration_that_is_none(text: str, tmp_path: Path) -> None:
    """It is looked into for where checkpoints lie; whatever it holds, there are none here."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="has no checkpoints"):
        find_checkpoints(tmp_path)
