"""The pages and the examples: generated parts match the code, links lead somewhere, and what a reader types works."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.launch import REPOSITORY, Run, command, fork, merged, run_script, tiny
from tests.helpers.launch import run as train
from tests.helpers.metrics_page import DOCS, check_fields, documented
from tests.helpers.runs import SharedRun
from trainer import Trainer, load_config, run

PAGES = [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands_of(page: Path) -> list[str]:
    text = page.read_text().replace("\\\n", " ")
    return [line.strip() for line in re.findall(r"^ {4}(?! )(.*)", text, re.MULTILINE)]


def snippets(page: str) -> list[str]:
    """Return the Python code that a page of docs/ shows."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------
# Every page


def test_settings_pages_match_the_code() -> None:
    for name, text in generator().pages().items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is stale: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target, section in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", text):
        if "://" in target or "{" in target:
            continue
        assert not target or (page.parent / target).exists(), target
        if section:
            titles = re.findall(r"^#+ (.*)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert section in slugs, f"{target}#{section}"
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (REPOSITORY / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes and keys of runs exist, and options of other commands. Model folders of the reader are not opened."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    helps: dict[str, str] = {}
    for line in commands_of(page):
        found = re.match(r"(?:python -m trainer\.|.*-m trainer\.(?=run)|meshtrainer )(\w+)\b(.*)", line)
        if found is None or found[1] not in {*run.COMMANDS, "run"}:
            assert found is None or found[1] in ("slurm", "init"), line
            continue
        words = shlex.split(found[2].partition(" | ")[0], comments=True)
        if found[1] != "run":
            helps.setdefault(found[1], meshtrainer(found[1], "--help").out)
            options = [word.partition("=")[0] for word in words if word.startswith("--")]
            assert all(option in helps[found[1]] for option in options), line
        elif not re.search(r"model\.(path|name=my_)|init_from|--help|recipe=(mine|runs/)", line):
            words = [word.replace("$lr", "1e-3") for word in words]  # the variable of a loop
            settings = [word for word in words if "=" in word and not word.startswith(("nproc=", "recipe=", "--"))]
            (recipe,) = (word.removeprefix("recipe=") for word in words if word.startswith("recipe="))
            load_config(recipe, settings)


@pytest.mark.parametrize("page", ["llama_8b.md", "performance.md"])
def test_runs_that_need_gpus_are_valid(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As far as possible without the data and models that they name."""
    shown = [line for line in commands_of(DOCS / page) if "-m trainer.run" in line]
    assert shown
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
    assert messages
    for message in set(messages) - {"Address already in use"}:
        parts = [part.strip(" :,") for part in re.split(r"\.\.\.|=\S*|\bC\+\+ |\d+", message)]
        assert max(parts, key=len) in source, message


def test_names_in_the_architecture_page_are_where_it_says() -> None:
    """Where the page says "`name` in `file`", that file, in the repository or in `trainer`, defines the name."""
    found = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", (DOCS / "architecture.md").read_text())
    assert found
    for name, file in found:
        last = name.rpartition(".")[2]
        definition = rf"^\s*(?:def {last}\(|class {last}\b|{last}(?:: [^=\n]+)? = )"
        path = next(folder / file for folder in (REPOSITORY, REPOSITORY / "trainer") if (folder / file).exists())
        assert re.search(definition, path.read_text(), re.MULTILINE), f"{name} is not in {file}"


@pytest.mark.campaign
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'meshtrainer[docs]'")
    program = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {page.stem for page in DOCS.glob("*.md")} <= {path.stem for path in (tmp_path / "site").glob("*.html")}


# ---------------------------------------------------------------------------------------------------------------
# Single pages and examples


@pytest.mark.slow
def test_documented_fields_match_a_run(one: SharedRun) -> None:
    for kind in ("start", "train", "eval", "checkpoint", "sample", "norms", "end"):
        check_fields(one, kind)
    shares = {"matmul", "attention", "other_kernels", "exposed_communication", "data", "host"}
    assert documented("profile")[0] == {"kind", "time", "step", "first_step", "update_s", *shares, "trace", "memory"}


@pytest.mark.slow
def test_quickstart_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command as it is typed, in one folder, with a smaller model and fewer steps."""
    monkeypatch.chdir(tmp_path)
    for line in commands_of(DOCS / "quickstart.md"):
        program, dash, module, *words = shlex.split(line)
        assert (program, dash) == ("python", "-m"), line
        if module == "trainer.run":
            steps = ["train.steps=4"] if any(word.startswith("train.steps=") for word in words) else ["train.steps=2"]
            given = [word for word in words if not word.startswith("train.steps=")]
            words = merged(tiny(*steps), given)
        if "nproc=4" in words:  # the workers are forked here, and two of them are enough
            words[words.index("nproc=4")] = "nproc=2"
            printed = train(tmp_path / "runs" / "several", *words).out
        elif module == "trainer.run" and "--print-config" not in words:
            printed = command(module, *words, cwd=tmp_path).out
        else:
            ended = meshtrainer(module.removeprefix("trainer."), *words)
            assert ended.code == 0, ended.err
            printed = ended.out
        assert "nothing to do" not in printed, line
    assert (tmp_path / "exported" / "config.json").is_file()
    assert (tmp_path / "comparison.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_distillation_example(ranks: int, tmp_path: Path) -> None:
    """On two ranks the second model is sharded, too; a mistake is one message."""
    example = "examples/distill.py"
    overrides = tiny("train.steps=6", "optim.lr=0.02", f"run.dir={tmp_path / 'run'}")
    ended = fork(run_script, [example, ["recipe=llama_small", *overrides]], tmp_path / "run", ranks).wait()
    assert ended.codes == [0] * ranks, ended.err
    assert ended.train("loss")[-1] < ended.train("loss")[0]
    refused = fork(run_script, [example, ["recipe=llama_small", "train.stepz=5"]], tmp_path).wait()
    assert refused.code == 2
    assert "train.steps=5" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.slow
def test_example_of_own_loop(tmp_path: Path) -> None:
    """It resumes on another number of ranks, repeats the same losses, and refuses a damaged checkpoint."""

    def start(ranks: int) -> Run:
        return fork(run_script, [str(REPOSITORY / "examples/own_loop.py"), []], tmp_path, ranks, cwd=tmp_path).wait()

    def mean_losses(out: str) -> dict[int, float]:
        """Return the loss of each step, averaged over the ranks."""
        found: dict[int, list[float]] = {}
        for step, loss in re.findall(r"^step (\d+), rank \d: loss (.*)$", out, re.MULTILINE):
            found.setdefault(int(step), []).append(float(loss))
        return {step: sum(losses) / len(losses) for step, losses in found.items()}

    first = start(2)
    assert first.codes == [0, 0], first.err
    newest = tmp_path / "runs/own_loop/step_00000020"
    file = newest / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused = start(2)
    assert 1 in refused.codes  # the first rank that exits; the other may be stopped before it does
    assert f"DamagedCheckpoint: {file}: the checksum of bytes" in refused.err
    shutil.rmtree(newest)
    resumed = start(1)
    assert resumed.codes == [0], resumed.err
    before, after = mean_losses(first.out), mean_losses(resumed.out)
    assert [*before] == [*range(1, 21)]
    assert [*after] == [*range(16, 36)]
    for step in range(16, 21):
        assert after[step] == pytest.approx(before[step], abs=2e-6)  # they are printed with six digits


def test_custom_loop_on_the_page_runs() -> None:
    for code in snippets("loops.md"):
        compile(code, "loops.md", "exec")
    (subclass,) = [code for code in snippets("loops.md") if "return super().loss(batch)" in code]
    scope: dict[str, Any] = {}
    exec(subclass.rpartition("MyTrainer(")[0], scope)
    assert issubclass(scope["MyTrainer"], Trainer)


@pytest.mark.slow
def test_custom_model_on_the_page_trains(tmp_path: Path) -> None:
    """The code on the page runs unchanged, and warns of nothing."""
    (code,) = [code for code in snippets("models.md") if "# my_models.py" in code]
    (tmp_path / "my_models.py").write_text(code)
    settings = ["model.name=my_models:tiny", "model.width=96", "train.steps=2", "eval.every=0", "log.sample_tokens=0"]
    assert command("trainer.run", "recipe=llama_small", *settings, f"run.dir={tmp_path}", cwd=tmp_path).err == ""
