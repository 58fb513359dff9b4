"""The pages of docs/: generated parts match the code, and everything that a reader types works."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import walks
from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import CommandResult, merged, run_command, run_python_module, run_tiny, tiny_overrides
from tests.helpers.runs import SharedRun
from trainer import run
from trainer.metrics.time_breakdown import KINDS

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_pages_match_the_code() -> None:
    for name, text in generator().pages().items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is stale: python docs/generate.py"


def test_names_in_the_architecture_page_are_where_it_says() -> None:
    """Where the page says "`name` in `file`", that file, in the repository or in `trainer`, defines the name."""
    found = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", (DOCS / "architecture.md").read_text())
    assert len(found) > 20
    for name, file in found:
        last = name.rpartition(".")[2]
        definition = rf"^\s*(?:def {last}\(|class {last}\b|{last}(?:: [^=\n]+)? = )"
        path = next(folder / file for folder in (REPOSITORY, REPOSITORY / "trainer") if (folder / file).exists())
        assert re.search(definition, path.read_text(), re.MULTILINE), f"{name} is not in {file}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    for target, section in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert section in slugs, f"{target}#{section}"


def commands_of(page: Path) -> list[str]:
    text = page.read_text().replace("\\\n", " ")
    return [line.strip() for line in re.findall(r"^ {4}(?! )(.*)", text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_options_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands_of(page):
        found = re.match(r"python -m trainer\.(\w+)\b(.*)", line)
        if found is None or found[1] == "run":
            continue
        assert found[1] in run.COMMANDS, line
        module = importlib.import_module(run.COMMANDS[found[1]])
        answer = module.main if found[1] == "evaluate" else module.command_line
        with contextlib.suppress(SystemExit):
            answer(["--help"])
        helped = capsys.readouterr().out
        for option in re.findall(r"(?<!\S)--[a-z-]+", found[2].partition("#")[0]):
            assert option in helped, line


GPU_PAGES = ("llama_8b.md", "performance.md", "fine_tuning.md")


@pytest.mark.parametrize("page", GPU_PAGES)
def test_documented_runs_that_need_gpus_are_valid(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As far as possible without the data and models that they name."""
    shown = [line for line in commands_of(DOCS / page) if "-m trainer.run" in line and "recipe=sft" not in line]
    assert shown or page == "fine_tuning.md"
    for line in shown:
        words = shlex.split(line.partition("-m trainer.run ")[2], comments=True)
        words = [word for word in words if not re.match(r"data\.(path|tokenizer)|train\.init_from", word)]
        ranks = ["nproc=8"] if line.startswith("torchrun --nproc-per-node 8") else []
        assert run.main([*words, *ranks, "--print-config"]) == 0, line
        assert capsys.readouterr().err == ""


def test_explained_messages_exist() -> None:
    source = "\n".join(path.read_text() for path in (REPOSITORY / "trainer").rglob("*.py"))
    table = (DOCS / "troubleshooting.md").read_text().partition("## Loss")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    of_others = {"Address already in use"}
    for message in set(messages) - of_others:
        parts = [part.strip(" :,") for part in re.split(r"\.\.\.|=\S*|\bC\+\+ |\d+", message)]
        assert max(parts, key=len) in source, message


def documented(section: str) -> tuple[set[str], set[str]]:
    """Return the fields on the page for a kind of record: all, and the conditional ones."""
    text = (DOCS / "metrics.md").read_text().partition(f"## `{section}`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE)
    conditional = {"profiled", "bits_per_byte", "every_s", "trained_share", "dropped_share", "truncated_share"}
    conditional |= {"accuracy", "margin", "reward_chosen", "reward_rejected"}
    conditional |= {"reward_good", "reward_bad", "kl", "divergence", "busiest_expert", "dead_experts"}
    fields = {name for names, _ in rows for name in re.findall(r"`([^`]+)`", names)}
    return fields | {"kind", "time"}, conditional | {name for name in fields if "<" in name}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "train", "checkpoint", "end"])
def test_documented_fields_match_a_run(kind: str, one: SharedRun) -> None:
    check_fields(one.ran, kind)


@pytest.mark.slow
def test_documented_optional_fields_match_a_run(tmp_path: Path) -> None:
    asked = ["eval.every=2", "eval.steps=1", 'log.prompts=["def "]', "log.norms_every=1"]
    ran = run_tiny(tmp_path / "run", "train.steps=2", *asked)
    for kind in ("eval", "sample", "norms"):
        check_fields(ran, kind)


def check_fields(ran: CommandResult, kind: str) -> None:
    fields, conditional = documented(kind)
    written = {name for record in ran.metrics if record["kind"] == kind for name in record}
    assert written <= fields, "a field without its meaning in docs/metrics.md"
    assert fields - conditional <= written, "docs/metrics.md speaks of what is not written"


def test_documented_profile_fields_match_a_run() -> None:
    fields, _ = documented("profile")
    assert fields == {"kind", "time", "step", "first_step", "update_s", *KINDS, "trace", "memory"}


@pytest.mark.slow
def test_quickstart_commands_run_in_order(tmp_path: Path) -> None:
    """Each command runs unchanged in one folder, except for a smaller model and fewer steps."""
    small = merged(tiny_overrides("train.steps=4", "log.sample_tokens=0"), [])
    for line in commands_of(DOCS / "quickstart.md"):
        words = shlex.split(line)
        assert words[:2] == ["python", "-m"], line
        module, given = words[2], words[3:]
        if module == "trainer.run":
            steps = ["train.steps=6"] if any(word.startswith("train.steps=") for word in given) else []
            given = [*(word for word in given if not word.startswith("train.steps=")), *merged(small, steps)]
        if "nproc=4" in given:
            ran = run_command(tmp_path / "runs" / "pairs", *given)
        else:
            ran = run_python_module(module, *given, cwd=tmp_path)
        assert ran.exit_code == 0, (line, ran.stderr)
        assert "nothing to do" not in ran.stdout, line
    records = (tmp_path / "runs" / "llama_small" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("step", 0) for line in records) == 6
    assert (tmp_path / "exported" / "config.json").is_file()
    assert (tmp_path / "comparison.html").is_file()


def sentences(text: str) -> list[str]:
    text = re.sub(r"^(?: {4}|\||<!--|#|!\[|```).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"(?<=[.:;?!])\s+|\n\n", re.sub(r"(?<!\n)\n(?!\n)", " ", text))
    return [part for part in parts if len(part.split()) > 2]


def test_the_readme_is_easy_to_read() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert statistics.median(len(sentence.split()) for sentence in sentences(text)) <= 16
    for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text):
        assert (REPOSITORY / picture).is_file()


@pytest.mark.campaign
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'meshtrainer[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {page.stem for page in DOCS.glob("*.md")} <= built


@pytest.mark.campaign
def test_file_counts_of_code_paths_match_the_page() -> None:
    page = walks.PAGE.read_text()
    assert walks.with_table(page, walks.count_files()) == page, (
        "docs/architecture.md is stale: python -m tests.walks --write"
    )
