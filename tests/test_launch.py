"""What stands in launch/: short files that can at least be parsed, and begin with what to change in them."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.ranks import REPOSITORY

FILES = sorted(path for path in (REPOSITORY / "launch").iterdir() if path.is_file())
BATCH_FILES = [path for path in FILES if path.suffix == ".sbatch"]
NAMES = {
    "local.sh",
    "slurm.sbatch",
    "slurm_torchrun.sbatch",
    "slurm_array.sbatch",
    "container.sbatch",
    "kubernetes.yaml",
    "ray_train.py",
    "skypilot.yaml",
}


def name(path: Path) -> str:
    return path.name


def test_all_are_there() -> None:
    assert {path.name for path in FILES} == NAMES


@pytest.mark.parametrize("path", FILES, ids=name)
def test_short_and_begins_with_what_to_change(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 60
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    assert first.startswith(("# ", '"""'))
    assert "change" in first
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("path", FILES, ids=name)
def test_it_parses(path: Path) -> None:
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)
    elif path.suffix == ".yaml":
        assert {"kind", "spec"} <= set(tree := yaml.safe_load(path.read_text())) or "run" in tree
    else:
        ast.parse(path.read_text())


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".yaml"], ids=name)
def test_commands_in_yaml_parse_too(path: Path) -> None:
    def commands(node: object) -> list[str]:
        if isinstance(node, dict):
            return [found for value in node.values() for found in commands(value)]
        if isinstance(node, list):
            return [found for value in node for found in commands(value)]
        return [node] if isinstance(node, str) and "trainer.run" in node else []

    found = commands(yaml.safe_load(path.read_text()))
    assert found
    for command in found:
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)


@pytest.mark.parametrize("path", BATCH_FILES, ids=name)
def test_batch_files_come_back(path: Path) -> None:
    """Each stands for itself (Slurm copies it away), so they repeat what they have in common; it must not drift."""
    head, _, tail = path.read_text().partition("# ---- The same in every batch file.")
    assert tail == BATCH_FILES[0].read_text().partition("# ---- The same in every batch file.")[2]
    directives = " ".join(re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE))
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@", "--time="):
        assert option in directives


@pytest.mark.parametrize("path", FILES, ids=name)
def test_they_ask_for_recipes_and_keys_that_exist(path: Path) -> None:
    from trainer import load_config

    text = path.read_text()
    recipes = set(re.findall(r"recipe=(\w+)", text)) | set(re.findall(r"RECIPE:=(\w+)", text))
    keys = set(re.findall(r"\b((?:mesh|train|checkpoint|optim|data|run)\.\w+)=", text))
    for recipe in recipes:
        tree = yaml.safe_load(load_config(recipe).to_yaml())
        assert keys <= {f"{section}.{key}" for section in tree for key in tree[section]}
