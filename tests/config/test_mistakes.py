"""Common mistakes of new users and of users of other trainers: one short message each, and no files left behind.

The message has at most six lines, names the setting and its value, and says what to do; the exit code is 2.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.forked import REPOSITORY
from tests.promises import path_of
from trainer import run

SMALL = "recipe=llama_small"


@dataclass(frozen=True)
class Mistake:
    """Arguments (`@` is the test's folder), the subcommand, files in the folder, and the expected message."""

    arguments: str | list[str]
    says: str | list[str]
    command: str = "run"
    files: dict[str, str | bytes | Callable[[Path], object]] | None = None

    def typed(self, folder: Path) -> list[str]:
        words = self.arguments.split() if isinstance(self.arguments, str) else self.arguments
        if self.command == "run" and not any(word.startswith("recipe") or "llama_small" in word for word in words):
            words = [SMALL, *words]
        return [word.replace("@", str(folder)) for word in words]


def recipe(text: str) -> dict[str, str | bytes | Callable[[Path], object]]:
    return {"r.yaml": text}


def ids(path: Path) -> None:
    np.arange(3000, dtype=np.uint16).tofile(path)


MISTAKES = {
    "1 a recipe misspelled": Mistake("recipe=lama_small", "did you mean recipe=llama_small?"),
    "2 a key misspelled": Mistake("train.step=5", "did you mean train.steps=5?"),
    "2 a key without its section": Mistake("steps=5", "did you mean train.steps=5?"),
    "2 a key in capitals": Mistake("Train.Steps=5", "did you mean train.steps=5?"),
    "3 keys with dashes": Mistake("--train.steps=10", "to fix: keys are written without dashes, as train.steps=10"),
    "3 a recipe with dashes": Mistake("--recipe llama_small", "did you mean recipe=...?"),
    "4 a recipe alone": Mistake("llama_small", "did you mean recipe=llama_small?"),
    "4 spaces around =": Mistake(f"{SMALL} train.steps = 10", "to fix: write it without spaces: train.steps=10"),
    "5 a number in words": Mistake("train.steps=ten", "for example: train.steps=1000"),
    "5 a number in powers": Mistake("train.steps=1e3", ["train.steps=1e3: ", "nearest legal value: train.steps=1000"]),
    "5 thousands": Mistake("train.steps=10k", "did you mean train.steps=10000?"),
    "6 a device by another name": Mistake("run.device=gpu", "did you mean run.device=cuda?"),
    "6 a switch for a choice": Mistake("log.wandb=true", "did you mean log.wandb=online?"),
    "7 a list without brackets": Mistake("optim.betas=0.9,0.95", "for example: 'optim.betas=[0.9,0.95]'"),
    "7 a list that is empty by default": Mistake("log.profile_steps=10,13", "'log.profile_steps=[10,13]'"),
    "8 a switch for a policy": Mistake("fsdp.reshard_after_forward=true", "fsdp.reshard_after_forward=always?"),
    "10 ranks that do not divide the batch": Mistake("nproc=3", "nearest legal value: train.global_batch_size=6"),
    "11 an odd width": Mistake("model.dim=97", "nearest legal value: model.dim=98"),
    "12 tabs in YAML": Mistake(
        "recipe=@/r.yaml", ["line 2: it contains a tab", "to fix: indent"], files=recipe("model:\n\tname: x\n")
    ),
    "14 part of a recipe": Mistake(
        "recipe=@/r.yaml", "to fix: start the file with `recipe: llama_small`", files=recipe("train: {steps: 3}\n")
    ),
    "14 an empty recipe": Mistake("recipe=@/r.yaml", "to fix: start the file", files=recipe("")),
    "14 a key misspelled in a file": Mistake(
        "recipe=@/r.yaml", "did you mean train.steps=3?", files=recipe("train: {stepz: 3}\n")
    ),
    "14 a dotted key in a file": Mistake(
        "recipe=@/r.yaml", "to fix: write `train:` with `steps: 3` below", files=recipe("train.steps: 3\n")
    ),
    "15 a folder that is no run": Mistake("recipe=@", "it has no config.yaml"),
    "16 what a shell would expand": Mistake("optim.betas=[0.9]", "nearest legal value: 'optim.betas=[0.9,0.95]'"),
    "18 a path with a space": Mistake(
        [SMALL, "data.path=@/my", "books/a.txt"], "to fix: quote a value with spaces in it: 'data.path="
    ),
    "20 no data": Mistake("data.source=tokens", "for example: 'data.path=corpus/*.jsonl'"),
    "20 data that are not there": Mistake("data.path=@/none.txt", "to fix: give an existing file, folder or"),
    "20 a variable that is not set": Mistake("data.path=", "data.path=: is empty"),
    "22 a tokenizer by its name": Mistake("data.tokenizer=gpt2", "to fix: download the tokenizer.json of that model"),
    "22 a tokenizer that is not there": Mistake("data.tokenizer=@/tokenizer.json", "there is no such file"),
    "23 a vocabulary that is too small": Mistake("model.vocab_size=100", "nearest legal value: model.vocab_size=257"),
    "24 ids without metadata": Mistake("data.path=@/a.bin", "for example: data.tokenizer=", files={"a.bin": ids}),
    "25 metadata that are none": Mistake(
        "data.path=@/a-00000.bin", "is not the metadata", files={"a-00000.bin": b"ab" * 9, "a-00000.json": "{}"}
    ),
    "26 a sequence longer than the data": Mistake(
        "data.path=@/a.txt data.seq_len=4096",
        "nearest legal value: data.seq_len=1000",
        files={"a.txt": "hi there. " * 100},
    ),
    "26 a sequence longer than the model": Mistake(
        "recipe=gpt2 data.source=synthetic data.seq_len=2048", "nearest legal value: data.seq_len=1024"
    ),
    "27 text in another encoding": Mistake(
        "@/a.txt --out @/p", "to fix: convert it to UTF-8", "prepare", {"a.txt": "caf\xe9 ".encode("latin-1")}
    ),
    "27 another text key": Mistake(
        "@/a.jsonl --out @/p", "nearest legal value: --text-key=content", "prepare", {"a.jsonl": '{"content": "x"}\n'}
    ),
    "27 a folder for shards": Mistake("@/a.txt --out @", "legal value: --out=@/corpus", "prepare", {"a.txt": "x"}),
    "28 a module that is not there": Mistake("model.name=nowhere_at:mine", "start from the folder of nowhere_at.py"),
    "29 a model misspelled in a module": Mistake(
        "model.name=tests.helpers.custom_recipes:mpl", "did you mean model.name=tests.helpers.custom_recipes:mlp?"
    ),
    "45 a folder that cannot be": Mistake("run.dir=@/a.txt/run", "@/a.txt is not a folder", files={"a.txt": "x"}),
    "47 accelerate: processes": Mistake("--num_processes=2", "did you mean nproc=2?"),
    "48 accelerate: precision": Mistake("--mixed_precision bf16", "to fix: set fsdp.param_dtype=bfloat16"),
    "49 HF: learning rate": Mistake("train.learning_rate=1e-4", "did you mean optim.lr=1e-4?"),
    "50 HF: batch size": Mistake("train.per_device_train_batch_size=4", "did you mean train.micro_batch_size=4?"),
    "51 HF: accumulation": Mistake("train.gradient_accumulation_steps=4", "fix: it is computed from train.global"),
    "52 HF: precision": Mistake("train.bf16=true", "to fix: set fsdp.param_dtype=bfloat16"),
    "53 HF: saving": Mistake("train.save_steps=100", "did you mean checkpoint.every=100?"),
    "54 HF: where to": Mistake("train.output_dir=out", "did you mean run.dir=out?"),
    "55 HF: a model by its name": Mistake("model.name=Qwen/Qwen3-0.6B", "name it as model.name=auto model.path=Qwen/"),
    "56 HF: a model that was not fetched": Mistake(
        "recipe=sft model.path=Qwen/Qwen3-0.6B data.path=x.jsonl",
        ["is not in the cache", "and HF_HUB_OFFLINE is set", "to fix: unset it once to download"],
    ),
    "56 HF: a model without its owner": Mistake(
        "recipe=sft model.path=Qwen3-0.6B data.path=x.jsonl", "or its name on the Hugging Face Hub: OWNER/Qwen3-0.6B"
    ),
    "56 HF: a model in a folder of models": Mistake(
        "recipe=sft model.path=recipes/Qwen3-0.6B data.path=x.jsonl",
        "or its name on the Hugging Face Hub: OWNER/Qwen3-0.6B",
    ),
    "57 HF: a data set by its name": Mistake("data.path=wikitext", "to fix: give an existing file, folder or"),
    "57 TRL: what is trained on": Mistake(
        "data.assistant_only_loss=true", "to fix: set data.train_on=assistant, or completion"
    ),
    "57 axolotl: what is held out": Mistake("val_set_size=0.01", "did you mean data.holdout=0.01?"),
    "57 axolotl: slices": Mistake("context_parallel_size=2", "did you mean mesh.context=2?"),
    "58 Lightning: devices": Mistake("trainer.devices=2", "did you mean nproc=2?"),
    "59 Lightning: epochs": Mistake("trainer.max_epochs=2", "did you mean train.epochs=2?"),
    "60 Lightning: clipping": Mistake("trainer.gradient_clip_val=1", "did you mean optim.max_grad_norm=1?"),
    "61 Lightning: no clipping": Mistake("optim.max_grad_norm=0", "to fix: optim.max_grad_norm=null means no clipping"),
    "62 torchtitan: sharding": Mistake("parallelism.data_parallel_shard_degree=8", "did you mean mesh.shard=8?"),
    "63 torchtitan: other axes": Mistake("parallelism.tensor_parallel_degree=2", "to fix: only sharding and"),
    "64 torchtitan: a file": Mistake("recipe=@/r.toml", "recipe files are YAML", files={"r.toml": "[training]"}),
    "65 a section for a key": Mistake("model=llama", "did you mean model.name=llama?"),
    "66 another command's name": Mistake("launch", "did you mean meshtrainer run?", "meshtrainer"),
    "a plan of no recipe": Mistake("llama3_70b", "did you mean recipe=llama3_70b?", "plan"),
    "a plan's option": Mistake("--model llama3_70b", "--model: no such option", "plan"),
    "an export to nowhere": Mistake("@", "to fix: give a folder, or --push ORG/NAME", "export"),
    "an export of nothing": Mistake("@ @/out", "to fix: give a run folder", "export"),
    "no prompt": Mistake("@", "--prompt", "generate"),
    "a report of nothing": Mistake("@/no_such_run_at_all", "to fix: give a run folder", "report"),
    "checkpoints of nothing": Mistake("@", "to fix: give a run folder", "checkpoints"),
    "an evaluation of nothing": Mistake("@", "to fix: give a run folder", "evaluate"),
    "a unit of time": Mistake("run.timeout_s=30m", "did you mean run.timeout_s=1800?"),
    "a unit of memory": Mistake("data.cache_gib=50GB", "did you mean data.cache_gib=50?"),
    "a comma for a point": Mistake("optim.lr=0,001", "did you mean optim.lr=0.001?"),
    "no number at all": Mistake("optim.lr=inf", ["must be finite", "for example: optim.lr=0.0003"]),
    "a share for a count": Mistake("schedule.warmup_steps=10%", "for example: schedule.warmup_steps=100"),
    "minutes for steps": Mistake("eval.every=10min", "for example: eval.every=100"),
    "one of two numbers too large": Mistake("optim.betas=[0.9,1.1]", "for example: 'optim.betas=[0.9,0.95]'"),
    "an optimizer that is not here": Mistake("optim.name=lion", "must be one of adamw, sgd, muon"),
    "a name without brackets": Mistake(
        "checkpoint.allow_changes=model.dim", "nearest legal value: 'checkpoint.allow_changes=[model.dim]'"
    ),
    "two equals signs": Mistake("train.steps==5", "did you mean train.steps=5?"),
    "a colon": Mistake([SMALL, "train.steps:5"], "did you mean train.steps=5?"),
    "a recipe behind a recipe": Mistake([SMALL, "gpt2"], "did you mean recipe=gpt2?"),
    "a dash of a text program": Mistake([SMALL, "\u2013\u2013dry-run"], "did you mean --dry-run?"),
    "quotes of a text program": Mistake(["\u201ctrain.steps=5\u201d"], "to fix: use plain quotes, or none: train.st"),
    "an empty name": Mistake("run.name=", "run.name=: is empty, perhaps from an unset"),
    "a model's setting that it has none of": Mistake("model.dropout=0.1", "model.name=llama has no such setting"),
    "a mapping without quotes": Mistake(
        [SMALL, "data.path={web:", "/nope,", "code:", "/x}", "train.steps=5"],
        "to fix: quote a value with spaces in it: 'data.path={web: /nope, code: /x}'\n",
    ),
    "a word behind a number": Mistake([SMALL, "train.steps=5", "now"], "for example: train.steps=100"),
    "a word behind a recipe": Mistake([SMALL, "now"], "for example: train.steps=100"),
    "a recipe of a variable that is not set": Mistake(["recipe="], "recipe=: is empty, perhaps from an unset shell"),
    "a number of a variable that is not set": Mistake("train.steps=", "train.steps=: is empty, perhaps from an unset"),
    "a name that is too long": Mistake(f"run.name={300 * 'x'}", "is 300 bytes long; a folder's name has at most 255"),
    "a folder that is too long": Mistake(f"run.dir=@/{300 * 'x'}/a", "cannot be used (File name too long)"),
    "checkpoints in a folder that is too long": Mistake(f"checkpoint.dir=@/{300 * 'x'}", "(File name too long)"),
    "a checkpoint whose name is too long": Mistake(f"checkpoint.resume=@/{300 * 'x'}", "(File name too long)"),
    "weights whose name is too long": Mistake(f"train.init_from=@/{300 * 'x'}", "(File name too long)"),
    "data whose name is too long": Mistake(f"data.path=@/{300 * 'x'}.txt", "data.path="),
    "a model whose name is too long": Mistake(f"model.path=@/{300 * 'x'}", "model.path="),
    "a recipe whose name is too long": Mistake(f"recipe=@/{300 * 'x'}", "(File name too long)"),
    "a run whose name is too long": Mistake(f"@/{300 * 'x'}", "File name too long", "evaluate"),
    "a GPU that is not there": Mistake("@ --prompt x --device cuda", "usable GPU\n  nearest", "generate"),
    "another trainer's key": Mistake("model.attention.heads=5", "to fix: see python -m trainer.run --help m"),
    "a recipe in another encoding": Mistake(
        "recipe=@/r.yaml", "to fix: save it as UTF-8", files={"r.yaml": "run: {name: caf\xe9}".encode("latin-1")}
    ),
    "a recipe as on the command line": Mistake(
        "recipe=@/r.yaml", "to fix: write each key as `key: value`", files=recipe("recipe=llama_small\ntrain.steps=3\n")
    ),
    "a line without a colon": Mistake(
        "recipe=@/r.yaml", "below `train:`, indented", files=recipe("recipe: llama_small\ntrain:\n  steps 3\n")
    ),
    "a key twice in a file": Mistake(
        "recipe=@/r.yaml", ["line 3: found duplicate key steps", "to fix: correct line 3"],
        files=recipe("train:\n  steps: 3\n  steps: 4\n"),
    ),
    "a recipe that is its own parent": Mistake(
        "recipe=@/r.yaml", "to fix: start one of them from another", files=recipe("recipe: r.yaml\n")
    ),
    "another key that is not there": Mistake(
        "recipe=@/r.yaml", "to fix: write the value itself, or refer to an existing",
        files=recipe("recipe: llama_small\nrun: {name: '${run.nam}'}\n"),
    ),
    "a variable in a file": Mistake(
        "recipe=@/r.yaml", "to fix: write the value itself, or set it on the command line: run.name=...",
        files=recipe("recipe: llama_small\nrun: {name: '${oc.env:HOME}'}\n"),
    ),
    "a recipe file that is not there": Mistake("recipe=@/none/zzz.yaml", "no such file"),
    "a model's file": Mistake("model.name=@/mine.py", "to fix: start from the folder of mine.py, and give the module"),
    "a model in a file": Mistake("model.name=mine.py:tiny", "did you mean model.name=mine:tiny?"),

    "an empty file": Mistake("data.path=@/a.txt", "to fix: give a file that contains text", files={"a.txt": ""}),
    "a document and no more": Mistake("data.path=@/a.txt", "one sample needs 257 tokens", files={"a.txt": "hello"}),
    "an empty folder": Mistake("data.path=@", "has no file that ends in"),
    "strings for objects": Mistake(
        "data.path=@/a.jsonl", "a.jsonl:1: must be a JSON object", files={"a.jsonl": '"abc"\n"def"\n'}
    ),
    "a phase with a misspelled part": Mistake(
        [SMALL, "data.path={a: @/a.txt}", "data.phases=[{form: 0, weights: {a: 1}}]"],
        "must contain only `from` and `weights`", files={"a.txt": "hi there. " * 100},
    ),
    "weights of a source that is not there": Mistake(
        [SMALL, "data.path={a: @/a.txt}", "data.weights={b: 1}"], "data.path has no source b", files={"a.txt": "x"}
    ),
    "evaluating nothing": Mistake("", "none was given\n  for example: python -m trainer.evaluate", "evaluate"),
    "looking at data without a word": Mistake("", "missing command: show, check, plan", "data"),
    "an export into the run": Mistake("@/none @/none", "@/none: no such folder", "export"),
    "a port that is a word": Mistake("@ --serve http", "--serve: invalid int value", "report"),
    "text of a model, twice": Mistake("@ --prompt x --chat y", "--chat: not allowed with argument", "generate"),
    "completion of no shell": Mistake("completion", "for example: meshtrainer completion bash", "meshtrainer"),
    "help as a word": Mistake("help", "did you mean meshtrainer --help?", "meshtrainer"),
    "resuming as a word": Mistake("resume", "did you mean meshtrainer run?", "meshtrainer"),
    "a spreadsheet": Mistake("data.path=@/a.xls", "to fix: write each document as", files={"a.xls": "a,b"}),
}  # fmt: skip

HELD_ELSEWHERE = {
    21: "test_data.py::test_held_out_shards_must_differ_and_have_the_same_tokenizer",
    30: "test_faults.py::test_folder_belongs_to_one_run",
    31: "test_bad_input.py::test_user_error_does_not_change_an_existing_run",
    32: "test_config.py::test_what_a_resume_may_change",
    33: "test_processes.py::test_a_finished_run_started_again_does_nothing",
    34: "test_checkpoints.py::test_a_changed_learning_rate_takes_effect",
    35: "test_run_folders.py::test_config_yaml_refers_to_its_own_folder",
    36: "test_run_folders.py::test_changed_folder_loses_no_line_and_touches_no_other",
    37: "test_run_folders.py::test_changed_folder_loses_no_line_and_touches_no_other",
    38: "test_faults.py::test_all_checkpoints_are_damaged",
    39: "test_stopping.py::test_closed_terminal_and_quit_signal_stop_the_run",
    40: "test_stopping.py::test_a_pipe_that_is_closed_early_breaks_no_command",
    41: "test_stopping.py::test_second_interrupt_ends_a_stuck_run_cleanly",
    42: "test_stopping.py::test_the_ranks_end_when_their_launcher_is_killed",
    44: "test_plan.py::test_out_of_memory_is_explained",
    46: "test_bad_input.py::test_missing_requirement_is_reported_before_anything_is_built",
}
"""What happens to a run that has begun, or in one that exists: by number, the tests that hold it."""

WORKS = {
    9: "train.steps=10 train.steps=20",
    13: "recipe=@/crlf.yml",
    17: "data.path=@/*.txt",
    19: "data.path=@/my books/a.txt",
    43: "nproc=2",
}
"""What people fear to be a mistake, and is none."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def answer(mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    words = mistake.typed(folder)
    if mistake.command == "run":
        own = [] if any(word.startswith("run.dir=") for word in words) else [f"run.dir={folder / 'run'}"]
        return run.main([*words, *own])
    monkeypatch.setattr(run, "exit_process", pytest.fail)
    monkeypatch.setattr("sys.argv", ["meshtrainer", *words])
    try:
        if mistake.command == "meshtrainer":
            run.meshtrainer()
        module = importlib.import_module(run.COMMANDS[mistake.command])
        return module.main(words) if mistake.command == "evaluate" else module.command_line(words)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistake_is_one_short_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name("cache")))
    monkeypatch.setattr(run, "run_trainer", lambda *given: pytest.fail("it would train"))
    for file, content in (mistake.files or {}).items():
        if callable(content):
            content(tmp_path / file)
        else:
            (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = contents(tmp_path)
    assert answer(mistake, tmp_path, monkeypatch) == 2
    printed, said = capsys.readouterr()
    assert (printed, said.count("error:"), "Traceback" in said) == ("", 1, False), said
    assert len(said.splitlines()) <= 6, said
    for text in [mistake.says] if isinstance(mistake.says, str) else mistake.says:
        assert text.replace("@", str(tmp_path)) in said, said
    assert re.search(r"did you mean|nearest legal|for example|to fix|must be|there is no|required", said), "what to do"
    assert contents(tmp_path) == before, "nothing is left behind"


def test_a_command_line_without_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["train.steps=10"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: recipe=NAME is missing\n  for example: recipe=llama_small\nusage: ")
    assert "llama3_405b" in said
    assert len(said.splitlines()) == 4
    assert run.main(["model.name=gpt2"]) == 2
    assert "did you mean recipe=gpt2?" in capsys.readouterr().err


@pytest.mark.parametrize("number", WORKS)
def test_unusual_but_legal_input_works(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my books").mkdir()
    for name in ("a.txt", "my books/a.txt"):
        (tmp_path / name).write_text("some text to train on. " * 999)
    (tmp_path / "crlf.yml").write_bytes(b"recipe: llama_small\r\ntrain:\r\n  steps: 7\r\n")
    words = [word.replace("@", str(tmp_path)) for word in re.split(r" (?=\w+\.\w+=)", WORKS[number])]
    begun = [] if words[0].startswith("recipe=") else [SMALL]
    assert run.main([*begun, *words, "--print-config"]) == 0, capsys.readouterr().err


def test_tilde_that_the_shell_did_not_expand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([SMALL, "run.dir=~/runs/mine", "--print-config"]) == 0
    assert f"dir: {os.path.expanduser('~')}/runs/mine" in capsys.readouterr().out


def test_all_66_mistakes_are_tested() -> None:
    numbers = {int(name.split()[0]) for name in MISTAKES if name[0].isdigit()} | HELD_ELSEWHERE.keys() | WORKS.keys()
    assert numbers == set(range(1, 67))
    for test in HELD_ELSEWHERE.values():
        file, _, function = path_of(test).partition("::")
        assert f"def {function}(" in (REPOSITORY / file).read_text(), test
