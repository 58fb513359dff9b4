"""The command line: options, subcommands, inheritance of recipes, names of runs, dry runs, and custom scripts."""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

import trainer
from tests.helpers.forked import REPOSITORY, fork, run_script
from tests.helpers.ranks import run_command, tiny_overrides
from trainer import load_config, run
from trainer.config import declared_keys
from trainer.config.command_line import completion_script, explained_yaml, full_help
from trainer.config.load import load_with_origins
from trainer.config.passes import PASSES, run_passes
from trainer.errors import UserError
from trainer.recipe import import_object
from trainer.tables import fit_to_width

# ---------------------------------------------------------------------------------------------------------------
# Options


def test_help_is_wrapped_to_the_terminal() -> None:
    text = full_help()
    assert max(map(len, text.split("\n"))) > 140
    for columns in (60, 80, 140):
        folded = fit_to_width(text, columns)
        assert max(map(len, folded.split("\n"))) <= columns
        assert folded.split() == text.split()
    shown = "\n".join(
        [
            "  sft                Fine-tunes a Hugging Face model on chats",
            "                     (1B parameters on 1 x H100); give",
            "                     model.path and data.path.",
        ]
    )
    assert shown in fit_to_width(text, 64)
    assert fit_to_width(text, 0) == text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshtrainer {trainer.__version__}\n"


def test_help_of_a_section_with_a_recipes_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["recipe=llama_small", "--help", "optim"]) == 0
    said = capsys.readouterr().out
    assert "optim.lr  [a number; default 0.0003; here 0.004]" in said
    assert "train.steps" not in said
    assert run.main(["--help", "optimm"]) == 2
    assert "did you mean --help optim?" in capsys.readouterr().err


def test_last_value_of_a_repeated_key_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config("llama_small", ["train.steps=5", "train.steps=6"]).train.steps == 6
    assert run.main(["recipe=gpt2", "--print-config", "recipe=llama_small", "train.steps=5", "train.steps=7"]) == 0
    said = capsys.readouterr().out
    assert "name: llama_small" in said
    assert "steps: 7" in said


# ---------------------------------------------------------------------------------------------------------------
# --print-config --why


def explained(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, str]]:
    """Return what --why prints, and the comment on each key."""
    assert run.main([*words, "--print-config", "--why"]) == 0
    text = capsys.readouterr().out
    comments, section, above = dict[str, str](), "", ""
    for line in text.splitlines():
        content, _, comment = line.partition("# ")
        if found := re.match(r"(  )?(\w+):", content):
            section = section if found[1] else found[2]
            comments[f"{section}.{found[2]}"] = comment or above
        above = "" if content.strip() else comment
    return text, {key: comment for key, comment in comments.items() if comment}


def test_why_shows_the_origin_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("recipe: llama_small\noptim: {lr: 0.1}\nfsdp: {param_dtype: auto}\n")
    Path("book.txt").write_text("Once upon a time.\n" * 200)
    words = ("recipe=mine.yaml", "train.steps=7", "data.path=book.txt", "eval.every=5")
    text, comments = explained(*words, capsys=capsys)
    assert comments["train.steps"] == comments["data.path"] == "command line"
    assert comments["optim.lr"] == "mine.yaml"
    assert comments["schedule.warmup_steps"] == "conf/llama_small.yaml"
    assert comments["data.source"] == "data source: data.path is given (was: conf/llama_small.yaml)"
    assert comments["data.holdout"].startswith("holdout: ")
    assert comments["run.name"].startswith("run name: ")
    assert comments.get("fsdp.param_dtype", "environment").startswith("environment")
    config = load_config("mine.yaml", words[1:])
    for key, item in declared_keys(type(config.model)).items():
        is_default = operator.attrgetter(key)(config) == item.default
        assert (key not in comments) == (is_default and key != "model.name"), key
    _, comments = explained("recipe=llama_small", "optim.lr_by_width=true", "lora.rank=2", capsys=capsys)
    formula = "0.004 x (2000 / 96) ** 0.78 x 10 for adapters"
    assert comments["optim.lr"] == f"scaled lr: {formula} (conf/llama_small.yaml)"
    # A rate from a different file than the one that scales it is pointed out.
    Path("scales.yaml").write_text("recipe: llama_small\noptim: {lr: 0.1, lr_by_width: true}\n")
    Path("child.yaml").write_text("recipe: scales.yaml\noptim: {lr: 0.2}\n")
    assert load_with_origins("scales.yaml")[1].notes == []
    (note,) = load_with_origins("child.yaml")[1].notes
    assert note.startswith("optim.lr=0.2 (child.yaml) is scaled by the model's width: 0.2 x (2000 / 96) ** 0.78;")
    # still YAML, of the same values, and a recipe file
    assert yaml.safe_load(text) == yaml.safe_load(config.to_yaml())
    Path("printed.yaml").write_text(text)
    assert load_config("printed.yaml").to_yaml() == config.to_yaml()


def test_why_names_the_files_that_models_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = load_config("llama_small", ["model.dim=48", "run.name=earlier"])
    leave("runs/earlier", ran, "stopped")
    _, comments = explained("recipe=llama_small", "train.init_from=runs/earlier", capsys=capsys)
    assert comments["model.dim"] == "runs/earlier/config.yaml"
    _, comments = explained("recipe=runs/earlier", "optim.lr=0.2", capsys=capsys)
    assert (comments["model.dim"], comments["optim.lr"]) == ("runs/earlier/config.yaml", "command line")
    sizes = {"vocab_size": 257, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = {"model_type": "llama", **sizes, "intermediate_size": 96, "max_position_embeddings": 128}
    Path("folder").mkdir()
    Path("folder/config.json").write_text(json.dumps({**folder, "rms_norm_eps": 1e-5, "num_key_value_heads": 2}))
    words = ("recipe=llama_small", "model.name=auto", "model.path=folder", "data.seq_len=64", "model.fresh=true")
    _, comments = explained(*words, capsys=capsys)
    assert comments["model.dim"] == "folder/config.json"


def test_why_is_aligned_and_narrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    long = "a folder: #1 with 'quotes' and spaces/" * 4
    command = "true && " * 30 + "true"
    folder = Path("deeply") / ("nested" * 12) / ("folders" * 6)
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("recipe: llama_small\noptim: {lr: 0.1}\nlog: {prompts: ['def ', 'a\\nb']}\n")
    words = [f"recipe={folder}/mine.yaml", f"data.cache_dir={long}", f"run.on_end={command}"]
    words += ["data.path={web: web.bin, code: code.bin}", "data.weights={web: 1, code: 2}"]
    config, given = load_with_origins(words[0].removeprefix("recipe="), words[1:])
    text = explained_yaml(config, given.origins)
    assert yaml.safe_load(text) == yaml.safe_load(config.to_yaml())
    plain = config.to_yaml().splitlines()
    assert [line for line in text.splitlines() if len(line) > 100 and line not in plain] == []
    columns = [line.index("  # ") for line in text.splitlines() if "  # " in line and not line.startswith("  # ")]
    assert len(columns) > 10
    assert sorted(columns)[len(columns) // 2] == min(columns)
    assert re.search(r"\n  # deeply/nestednested.*\.\.\..*mine.yaml\n  lr: 0.1\n", text), (
        "above what it is too long for"
    )
    assert re.search(r"\n  weights:  +# command line\n", text)


def test_why_needs_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["recipe=llama_small", "--why"], ["recipe=llama_small", "--dry-run", "--why"]):
        assert run.main(words) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: --why: explains the output of --print-config\n  to fix: add --print-config")
        assert not said.out
    assert run.main(["--help", "--why"]) == 0
    assert "--why " in capsys.readouterr().out


def test_each_pass_documents_its_decision() -> None:
    stages = [each.stage for each in PASSES]
    order = ("files", "keys", "tree", "config", "start", "data", "device")
    assert stages == sorted(stages, key=order.index)
    for each in PASSES:
        decide = import_object(each.function, each.name) if isinstance(each.function, str) else each.function
        assert len(decide.__doc__) > 40, each.name
        assert len(f"{each.name}: {each.reason}") <= 64, each.name


def test_passes_of_the_data_are_recorded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, given = load_with_origins("llama_small", ["data.source=synthetic", "train.epochs=2"])
    assert "train.steps" not in given.origins
    config = run_passes("data", config, given)
    assert config.train.epochs is None
    assert given.origins["train.steps"] == "epochs: train.epochs passes over the data"


def meshtrainer(*words: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["meshtrainer", *words])
    monkeypatch.setattr(run, "exit_process", sys.exit)  # which would end this process
    with pytest.raises(SystemExit) as left:
        run.meshtrainer()
    return left.value.code


@pytest.mark.parametrize("command", sorted(set(run.COMMANDS) - {"run"}))
def test_each_subcommand(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert meshtrainer(command, "--help", monkeypatch=monkeypatch) in (0, None)
    shown = capsys.readouterr().out
    assert f"trainer.{command}" in shown or f"meshtrainer {command}" in shown


def test_unknown_subcommand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert meshtrainer("plam", monkeypatch=monkeypatch) == 2
    assert "did you mean meshtrainer plan?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("meshtrainer recipe = llama_sm", 3, "llama_small"),
        ("meshtrainer recipe =", 2, "llama_small"),
        ("meshtrainer optim.l", 1, "optim.lr="),
        ("meshtrainer optim.lr = ll", 3, ""),
    ],
)
def test_bash_completions(words: str, place: int, offered: str) -> None:
    """Readline splits words at `=`, so the name of a recipe is a separate word."""
    script = completion_script("bash", run.COMMANDS)
    ask = f"compopt() {{ :; }}; COMP_WORDS=({words}) COMP_CWORD={place}; _meshtrainer; echo ${{COMPREPLY[*]}}"
    found = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True).stdout
    assert offered in found.split() if offered else not found.split()


@pytest.mark.slow
def test_completion_in_a_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert meshtrainer("completion", "fish", monkeypatch=monkeypatch) == 2
    capsys.readouterr()
    assert meshtrainer("completion", "bash", monkeypatch=monkeypatch) == 0
    script = capsys.readouterr().out + "COMP_WORDS=(meshtrainer train.st) COMP_CWORD=1; _meshtrainer 2>/dev/null\n"
    done = subprocess.run(["bash", "-c", script + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True)
    assert done.stdout == "train.steps=\n", done.stderr


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: child.yaml\n", "its own parent"),
        ("recipe: llama_smal\n", "did you mean recipe=llama_small"),
        ("recipe: [1]\n", "must be a recipe"),
    ],
)
def test_invalid_parents(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(written(tmp_path, "child.yaml", text))


# ---------------------------------------------------------------------------------------------------------------
# Names of runs


def leave(folder: str, config: trainer.RunConfig, state: str) -> None:
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.yaml").write_text(config.to_yaml())
    (Path(folder) / "status.json").write_text(json.dumps({"state": state}))


def test_finished_run_does_not_block_a_different_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def folder_of(*overrides: str) -> tuple[str, str]:
        config, given = load_with_origins("llama_small", overrides)
        return run_passes("start", config, given).run.dir, "".join(given.notes)

    leave("runs/llama_small", load_config("llama_small"), "finished")
    assert folder_of("train.steps=9") == ("runs/llama_small", ""), "what a resume may change goes on"
    found, note = folder_of("model.dim=48", "run.seed=3")
    assert found == "runs/llama_small-2"
    assert "model.dim: 96 there, 48 now" in note
    leave("runs/llama_small-2", load_config("llama_small", ["model.dim=48", "run.seed=3"]), "finished")
    assert folder_of("model.dim=48", "run.seed=3")[0] == "runs/llama_small-2", "the same command means the same run"
    assert folder_of("model.dim=24")[0] == "runs/llama_small-3"
    for named in ("run.name=llama_small", "run.dir=runs/llama_small", "checkpoint.resume=none"):
        assert folder_of("model.dim=48", named) == ("runs/llama_small", ""), "what is named is meant"


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_unfinished_run_keeps_its_name(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave("runs/llama_small", load_config("llama_small"), state)
    config, given = load_with_origins("llama_small", ["model.dim=48"])
    assert run_passes("start", config, given) == config
    assert not given.notes


# ---------------------------------------------------------------------------------------------------------------
# Dry runs and custom scripts


def dry_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("meshtrainer-dry-run-*")}


@pytest.mark.slow
def test_dry_run_leaves_no_files(tmp_path: Path) -> None:
    before = dry_folders()
    ran = run_command(tmp_path / "run", "recipe=llama_small", *tiny_overrides(), "nproc=2", "--dry-run")
    assert ran.exit_code == 0, ran.stderr
    assert "dry run: would train steps 1 to" in ran.stdout
    assert "peak memory per rank" in ran.stdout
    assert list(tmp_path.iterdir()) == []
    assert dry_folders() == before


@pytest.mark.slow
def test_dry_run_resumes_like_the_run(tmp_path: Path) -> None:
    tiny = ["recipe=llama_small", *tiny_overrides("train.steps=4")]
    run_command(tmp_path / "run", *tiny)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    on = run_command(tmp_path / "run", *tiny, "train.steps=6", "--dry-run")
    assert "would train steps 5 to 6" in on.stdout, on.stderr
    other = run_command(tmp_path / "run", *tiny, "optim.name=sgd", "--dry-run")
    assert other.exit_code == 2
    assert "optim.name" in other.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.slow
def test_custom_script_has_the_whole_command_line(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys, trainer\n"
        "class Doubled(trainer.Trainer):\n"
        "    def loss(self, batch):\n"
        "        return 2 * super().loss(batch)\n"
        "sys.exit(trainer.main(Doubled))\n"
    )
    arguments = ["recipe=llama_small", *tiny_overrides("train.steps=2")]
    command = [sys.executable, str(script), *arguments, f"run.dir={tmp_path / 'run'}", "nproc=2"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(record["world_size"] for record in records if record["kind"] == "start") == 2
    assert next(record["loss"] for record in records if record["kind"] == "train") > 10, "twice a fresh model's 5.5"
    wrong = fork(run_script, [str(script), [*arguments, "train.stepz=2"]], tmp_path)
    assert (wrong.wait(60), wrong.stderr.count("error:"), "Traceback" in wrong.stderr) == ([2], 1, False)
