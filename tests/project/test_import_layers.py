"""Layers of the code: a file imports only from lower floors, and each third-party library is used in one place."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.forked import REPOSITORY

ALLOWED_PLACES = {
    "safetensors": ["trainer/weights/", "trainer/checkpoint/", "trainer/export.py"],
    "omegaconf": ["trainer/config/"],
    "fully_shard": ["trainer/model/shard.py"],
    "torch.distributed.checkpoint": ["trainer/checkpoint/"],
    "init_process_group": ["trainer/distributed/world.py"],
    "init_device_mesh": ["trainer/distributed/world.py"],
    "wandb": ["trainer/metrics/"],
    "rich": ["trainer/metrics/", "trainer/checkpoints.py", "trainer/plan/show.py", "trainer/prepare.py"],
    "torchdata": ["trainer/data/"],
    "transformers": ["recipes/hf/", "trainer/generate.py"],
    "tokenizers": ["trainer/data/", "trainer/prepare.py"],
    "jinja2": ["trainer/data/chat/template.py"],
    "pyarrow": ["trainer/data/"],
    "fsspec": ["trainer/urls.py"],
    "urllib.request": ["trainer/data/remote/transport.py"],
}
"""Maps a module or function of a library to the places that may use it."""

FILES = sorted(path for folder in ("trainer", "recipes", "objectives") for path in (REPOSITORY / folder).rglob("*.py"))


@functools.cache
def names_used(source: str) -> frozenset[str]:
    """Return every module that is imported, every name that is imported from one, and every name and attribute used."""
    return frozenset(_names_used(source))


def _names_used(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (alias.name for alias in node.names if not alias.name.islower() or "_" in alias.name)
        elif isinstance(node, ast.Attribute):
            yield node.attr
            yield ast.unparse(node)


def uses(library: str, source: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in names_used(source))


@pytest.mark.parametrize(
    ("library", "source"),
    [
        ("omegaconf", "from omegaconf.errors import OmegaConfBaseException"),
        ("omegaconf", "def late():\n    import omegaconf as oc"),
        ("fully_shard", "from torch.distributed.fsdp import fully_shard as shard_it"),
        ("fully_shard", "import torch\ntorch.distributed.fsdp.fully_shard(model)"),
        ("torch.distributed.checkpoint", "import torch.distributed.checkpoint as dcp"),
        ("torch.distributed.checkpoint", "from torch.distributed import checkpoint"),
        ("torch.distributed.checkpoint", "from torch.distributed.checkpoint.state_dict import StateDictOptions"),
        ("torch.distributed.checkpoint", "import torch\ntorch.distributed.checkpoint.save(state)"),
        ("init_process_group", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("wandb", "if late:\n    import wandb"),
    ],
)
def test_uses_of_a_library_are_recognized(library: str, source: str) -> None:
    assert uses(library, source)
    assert not uses(library, "import torch\nfrom torch.utils.checkpoint import checkpoint\nx.rich_text = 'wandb'")


@pytest.mark.parametrize("library", list(ALLOWED_PLACES))
def test_library_is_used_only_where_allowed(library: str) -> None:
    inside = [path.relative_to(REPOSITORY).as_posix() for path in FILES if uses(library, path.read_text())]
    assert inside, "nothing uses it: has the name changed?"
    assert [path for path in inside if not any(path.startswith(place) for place in ALLOWED_PLACES[library])] == []


def test_recipes_do_not_use_torch_distributed() -> None:
    for path in FILES:
        if path.is_relative_to(REPOSITORY / "recipes"):
            assert not uses("torch.distributed", path.read_text()), path


def test_trainer_does_not_import_recipes() -> None:
    for path in FILES:
        if path.is_relative_to(REPOSITORY / "trainer"):
            imported = list(names_used(path.read_text()))
            assert not any(name.startswith(("recipes", "trainer.recipes")) for name in imported), path


def test_no_module_is_called_utils_or_helpers() -> None:
    assert [path for path in FILES if path.stem in ("utils", "common", "helpers", "misc")] == []


@pytest.mark.slow
def test_import_linter_contract() -> None:
    """The contract is in pyproject.toml."""
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--no-cache"], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_an_installation_has_every_package() -> None:
    """pyproject.toml lists each folder with code; an editable installation would not notice a missing one."""
    block = re.search(r"^packages = \[(.*?)\]", (REPOSITORY / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert block
    listed = set(re.findall(r'"([\w.]+)"', block[1]))
    there = {path.parent.relative_to(REPOSITORY) for path in FILES}
    names = {".".join(folder.parts if folder.parts[0] == "trainer" else ("trainer", *folder.parts)) for folder in there}
    assert names == listed - {"trainer.conf", "trainer.examples", "trainer.launch"}
