"""The wheel, installed: the first commands of a new user, in an empty folder and without a checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

from tests.helpers.installed import Installed, build, install
from tests.helpers.launch import REPOSITORY, tiny
from trainer import __version__

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.getbasetemp()
    return install(base.parent if base.name.startswith("popen-") else base)


def test_contents_of_the_wheel(installed: Installed) -> None:
    """All that the commands need: recipes, launch files, examples, the report's style and the project template."""
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    for folder in ("conf", "recipes", "objectives", "launch", "examples"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"trainer/{path.relative_to(REPOSITORY)}" in names, path
    for path in (REPOSITORY / "trainer").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(REPOSITORY)) in names, path
    assert not [name for name in names if not name.startswith(("trainer/", "meshtrainer-"))]
    assert f"meshtrainer-{__version__}-" in installed.wheel.name
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]


def test_the_first_commands(installed: Installed, tmp_path: Path) -> None:
    run = installed.run
    settings = tiny("train.steps=4", "checkpoint.every=4")
    assert run("meshtrainer", "--version", folder=tmp_path) == f"meshtrainer {__version__}\n"
    where = run("python", "-c", "import trainer; print(trainer.__file__)", folder=tmp_path)
    assert where.startswith(str(installed.environment))
    run("meshtrainer", "run", "recipe=llama_small", *settings, "nproc=2", folder=tmp_path)
    status = json.loads((tmp_path / "runs/llama_small/status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 4)
    output = run(
        "meshtrainer", "generate", "runs/llama_small", "--prompt", "def ", "--max-tokens", "5", folder=tmp_path
    )
    assert output
    run("meshtrainer", "export", "runs/llama_small", "exported", folder=tmp_path)
    assert (tmp_path / "exported/model.safetensors").stat().st_size > 0
    run("meshtrainer", "report", "runs/llama_small", folder=tmp_path)
    assert list((tmp_path / "runs/llama_small").glob("*.html"))
    plan = json.loads(run("meshtrainer", "plan", "recipe=llama3_8b", "nproc=64", "--json", folder=tmp_path))
    assert plan["num_ranks"] == 64


def test_init_writes_a_working_project(installed: Installed, tmp_path: Path) -> None:
    """The project trains without changes, and its tests pass."""
    output = installed.run("meshtrainer", "init", "mine", folder=tmp_path)
    assert "meshtrainer run recipe=mine.yaml" in output
    project = tmp_path / "mine"
    names = sorted(path.name for path in project.iterdir())
    assert names == ["README.md", "mine.py", "mine.yaml", "test_mine.py", "train.sbatch"]
    assert not any("my_model" in path.read_text() for path in project.iterdir())
    small = ["model.width=32", "train.steps=3", "eval.every=0", "data.source=synthetic", "log.sample_tokens=0"]
    installed.run("meshtrainer", "run", "recipe=mine.yaml", *small, folder=project)
    assert json.loads((project / "runs/mine/status.json").read_text())["state"] == "finished"
    output = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=project)
    assert "2 passed" in output


@pytest.mark.parametrize("name", ["my model", "llama", "json", "there"])
def test_invalid_names_are_rejected(name: str, installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    done = installed.try_run("meshtrainer", "init", name, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: NAME={name}: ")
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------------------------------------------------------
# From the package index, to which only the campaign has access


def test_an_empty_environment(tmp_path: Path) -> None:
    """`pip install` of the wheel and its dependencies, then one step; all extras can be installed together."""
    wheel, _ = build(tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    mine = Installed(wheel, wheel, environment)
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    everything = f"{wheel}[{','.join(name for name in extras)}]"
    constraints = ("-c", str(REPOSITORY / "constraints.txt"))
    mine.run("python", "-m", "pip", "install", "-q", "--dry-run", everything, folder=tmp_path)
    mine.run("python", "-m", "pip", "install", "-q", *constraints, str(wheel), folder=tmp_path)
    (tmp_path / "empty").mkdir()
    mine.run("meshtrainer", "run", "recipe=llama_small", *tiny("train.steps=1"), folder=tmp_path / "empty")
    assert json.loads((tmp_path / "empty/runs/llama_small/status.json").read_text())["state"] == "finished"
