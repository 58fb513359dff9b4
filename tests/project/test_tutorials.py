"""The tutorials and notebooks, each in order from an installed wheel; the images, as far as a shell can build them."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.fake_hub import FakeHub
from tests.helpers.installed import Installed, install
from tests.helpers.launch import REPOSITORY

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]

DOCS = REPOSITORY / "docs"
TUTORIALS = sorted(path.name for path in DOCS.glob("tutorial_*.md"))
ELSEWHERE = ("pip install", "torchrun", "sbatch")
"""Commands that need GPUs, a cluster or the package index, by how they begin."""

SMALL = {
    "llama_small": ["model.dim=32", "model.num_layers=2", "model.ffn_dim=64"],
    "mine.yaml": ["model.width=32"],
}
SHORT = [
    *("run.threads=1", "run.device=cpu", "data.seq_len=64", "schedule.warmup_steps=2", "eval.steps=1"),
    *("log.sample_tokens=8", "train.global_batch_size=8", "train.micro_batch_size=2"),
]
STEPS = {"1600": "8", "300": "4", "100": "4", "60": "6", "90": "9"}
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def commands_of(page: str) -> list[str]:
    return re.findall(r"^ {4}((?:pip|meshtrainer|python|torchrun|cd|sbatch)\b.*)$", (DOCS / page).read_text(), re.M)


def made_small(command: str) -> list[str]:
    """Return the words of a command, with a tiny model and few steps if it trains."""
    words = shlex.split(command)
    if words[:2] == ["meshtrainer", "run"]:
        recipe = words[2].partition("=")[2]
        words = [re.sub(r"(?<=train\.steps=)(\d+)", lambda found: STEPS[found[1]], word) for word in words]
        given = {word.partition("=")[0] for word in words}
        more = [*SMALL.get(recipe, []), *SHORT, "train.steps=4", "checkpoint.every=2", "eval.every=4"]
        if recipe == "sft":
            more = [each for each in more if not each.startswith(("train.", "eval.every"))]
            more += ["train.epochs=null", "train.steps=2", "train.global_batch_size=4"]
        words += [each for each in more if each.partition("=")[0] not in given]
    return words


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.getbasetemp()
    return install(base.parent if base.name.startswith("popen-") else base)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has a tiny chat model under the name of the one in the tutorials."""
    from tests.helpers.hf_models import folder_of

    with FakeHub() as found:
        found.add_folder(MODEL, write_tokenizer(folder_of(tmp_path / "model", "llama"), CHATML))
        yield found


def write_inputs(folder: Path) -> None:
    (folder / "book.txt").write_text((REPOSITORY / "trainer" / "trainer.py").read_text() * 2)
    record = json.dumps({"messages": conversation("Hi", "Yes")})
    (folder / "chats.jsonl").write_text(f"{record}\n" * 8)


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_from_its_beginning(page: str, installed: Installed, fake: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    write_inputs(folder)
    variables = {**fake.environment(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    for command in commands_of(page):
        if command.startswith(ELSEWHERE):
            continue
        if command.startswith("cd "):
            folder = folder / command.removeprefix("cd ")
            continue
        done = installed.try_run(*made_small(command), folder=folder, **variables)
        allowed = (0, 3) if " plan " in command else (0,)
        assert done.returncode in allowed, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", sorted(path.name for path in (DOCS / "notebooks").glob("*.ipynb")))
def test_a_notebook(name: str, installed: Installed, fake: FakeHub, tmp_path: Path) -> None:
    """Executed in a kernel, with the same small settings."""
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    write_inputs(tmp_path)
    book = nbformat.read(DOCS / "notebooks" / name, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            lines = [line for line in cell.source.splitlines() if not line.startswith("%pip")]
            lines = [
                f"!{shlex.join(made_small(line[1:]))} || echo FAILED" if line[:1] == "!" else line for line in lines
            ]
            cell.source = "\n".join(lines)
    paths = f"import os; os.environ.update({ {**fake.environment(tmp_path / 'home'), 'OMP_NUM_THREADS': '1'}!r})\n"
    paths += f"os.environ['PATH'] = {str(installed.environment / 'bin')!r} + os.pathsep + os.environ['PATH']"
    book.cells.insert(0, nbformat.v4.new_code_cell(paths))
    nbclient.NotebookClient(book, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said_by = [str(output.get("text", "")) for cell in book.cells for output in cell.get("outputs", [])]
    assert not any("FAILED" in text for text in said_by), "".join(said_by)


# ---------------------------------------------------------------------------------------------------------------
# Images

IMAGES = sorted(path.name for path in (REPOSITORY / "docker").glob("*.Dockerfile"))


def instructions_of(name: str) -> list[tuple[str, str]]:
    text = (REPOSITORY / "docker" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_not_roots(name: str) -> None:
    steps = instructions_of(name)
    assert [word for word, _ in steps].index("FROM") == 0
    assert "slim" in steps[0][1]
    users = [value for word, value in steps if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    for word, value in steps:
        if word == "RUN" and "pip install" in value:
            assert "--no-cache-dir" in value
        if word == "RUN" and "apt-get install" in value:
            assert "--no-install-recommends" in value
            assert "rm -rf /var/lib/apt/lists/*" in value
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(value), list)
    assert (REPOSITORY / ".dockerignore").read_text().split() == ["*", "!dist"]


@pytest.mark.parametrize("name", IMAGES)
def test_the_steps_of_an_image(name: str, installed: Installed, tmp_path: Path) -> None:
    """Each RUN line in a shell: pip finds everything that it would install; what changes the system is recorded."""
    own = tmp_path / "bin"
    own.mkdir()
    for program in ("apt-get", "useradd", "rm"):
        (own / program).write_text(f'#!/bin/sh\necho "{program} $*" >> {tmp_path / "calls"}\n')
        (own / program).chmod(own.stat().st_mode | stat.S_IXUSR)
    (own / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        (own / "pip").write_text(f'#!/bin/sh\nexec {installed.environment}/bin/python -m pip "$@"\n')
    (own / "pip").chmod(0o755)
    (tmp_path / installed.wheel.name).write_bytes(installed.wheel.read_bytes())
    environment = {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}", "PIP_DRY_RUN": "1"}
    for word, value in instructions_of(name):
        if word == "RUN":
            line = value.replace("/tmp/", f"{tmp_path}/")
            done = subprocess.run(["sh", "-ec", line], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "useradd --create-home --uid 1000 trainer" in (tmp_path / "calls").read_text()
