"""User errors: exit code 2, and one message that names the setting, its value and the nearest legal value."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import FRESH, run_command
from tests.helpers.runs import SharedRun
from trainer import Trainer, UserError, load_config, run
from trainer.config.rules import check_requirements

SMALL = "recipe=llama_small"

# Arguments, and what the message must have: the setting with its value, and a legal value.
MISTAKES = {
    "unknown recipe": (["recipe=llama_smal"], ["recipe=llama_smal", "recipe=llama_small"]),
    "recipe file that is not there": (["recipe=conf/llama_smal.yaml"], ["conf/llama_smal.yaml", "no such file"]),
    "unknown key": ([SMALL, "train.step=5"], ["train.step=5", "train.steps=5"]),
    "unknown section": ([SMALL, "trian.steps=5"], ["trian.steps=5", "train.steps=5"]),
    "key of another section": ([SMALL, "train.lr=0.1"], ["train.lr=0.1", "optim.lr=0.1"]),
    "key of another model": ([SMALL, "model.dropout=0.1"], ["model.dropout=0.1"]),
    "unknown option": ([SMALL, "--print-confg"], ["--print-confg", "--print-config"]),
    "no equals sign": ([SMALL, "train.steps"], ["train.steps", "section.key=value"]),
    "text for a whole number": ([SMALL, "train.steps=many"], ["train.steps=many", "whole number"]),
    "fraction for a whole number": ([SMALL, "train.steps=1.5"], ["train.steps=1.5", "train.steps=2"]),
    "null where nothing may be empty": ([SMALL, "train.steps=null"], ["train.steps=null", "whole number"]),
    "text for a number": ([SMALL, "optim.lr=3e-4x"], ["optim.lr=3e-4x", "optim.lr=0.0003"]),
    "number for true or false": ([SMALL, "fsdp.cpu_offload=maybe"], ["fsdp.cpu_offload=maybe", "true or false"]),
    "infinite": ([SMALL, "optim.lr=.inf"], ["optim.lr=inf", "finite"]),
    "negative": ([SMALL, "train.steps=-1"], ["train.steps=-1", "train.steps=0"]),
    "out of range": ([SMALL, "schedule.min_lr_ratio=2"], ["schedule.min_lr_ratio=2", "schedule.min_lr_ratio=1"]),
    "beta of one": ([SMALL, "optim.betas=[0.9,1.0]"], ["optim.betas=[0.9,1.0]", "below 1"]),
    "one beta": ([SMALL, "optim.betas=[0.9]"], ["optim.betas=[0.9]", "optim.betas=[0.9,0.95]"]),
    "unknown choice": ([SMALL, "optim.name=adamm"], ["optim.name=adamm", "optim.name=adamw"]),
    "unknown dtype": ([SMALL, "fsdp.param_dtype=float16"], ["fsdp.param_dtype=float16", "=bfloat16"]),
    "unknown model": ([SMALL, "model.name=lama"], ["model.name=lama", "model.name=llama"]),
    "model module that is not there": ([SMALL, "model.name=nowhere:mine"], ["model.name=nowhere:mine", "import"]),
    "heads do not divide the width": ([SMALL, "model.num_heads=5"], ["model.num_heads=5", "nearest legal value"]),
    "key heads do not divide the heads": ([SMALL, "model.num_kv_heads=5"], ["model.num_kv_heads=5", "nearest legal"]),
    "vocabulary too small": ([SMALL, "model.vocab_size=100"], ["model.vocab_size=100", "model.vocab_size=257"]),
    "mesh does not divide": ([SMALL, "nproc=4", "mesh.shard=3"], ["mesh.shard=3", "mesh.shard=4"]),
    "mesh too large": ([SMALL, "nproc=4", "mesh.replicate=3"], ["mesh.replicate=3", "mesh.replicate="]),
    "two open axes": ([SMALL, "mesh.shard=-1", "mesh.replicate=-1"], ["mesh.replicate=-1", "mesh.replicate=1"]),
    "axis of zero": ([SMALL, "mesh.shard=0"], ["mesh.shard=0", "mesh.shard=1"]),
    "axis in words": ([SMALL, "mesh.shard=nod"], ["mesh.shard=nod", "node"]),
    "batch does not divide": ([SMALL, "train.global_batch_size=30", "train.micro_batch_size=4"],
                              ["train.global_batch_size=30", "train.global_batch_size=32"]),
    "reshard in words": ([SMALL, "fsdp.reshard_after_forward=allways"], ["=allways", "=always"]),
    "reshard as true": ([SMALL, "fsdp.reshard_after_forward=true"], ["=true", "=always"]),
    "reshard does not divide": ([SMALL, "nproc=4", "fsdp.reshard_after_forward=3"], ["=3", "forward=2"]),
    "reshard list too short": ([SMALL, "nproc=4", "fsdp.reshard_after_forward=[always,never]"],
                               ["=[always,never]", "one entry for each", "nearest legal value"]),
    "wrap in words": ([SMALL, "fsdp.wrap=blocks"], ["fsdp.wrap=blocks", "fsdp.wrap=block"]),
    "wrap size": ([SMALL, "fsdp.wrap=size:big"], ["fsdp.wrap=size:big", "size:"]),
    "wrap function that is not there": ([SMALL, "nproc=4", "fsdp.wrap=tests.helpers.custom_recipes:every_liner"],
                                        ["fsdp.wrap=tests.helpers.custom_recipes:every_liner", "every_linear"]),
    "activation checkpointing in words": ([SMALL, "train.activation_checkpoint=ful"], ["=ful", "=full"]),
    "saving in words": ([SMALL, "checkpoint.every=often"], ["checkpoint.every=often", "=auto"]),
    "nodes that last no time": ([SMALL, "checkpoint.node_mtbf_h=0"], ["checkpoint.node_mtbf_h=0", "at least 0.0001"]),
    "nodes that outlast the sun": ([SMALL, "checkpoint.node_mtbf_h=1e306"], ["checkpoint.node_mtbf_h=", "at most"]),
    "tokens without a path": ([SMALL, "data.source=tokens"], ["data.path=null", "token shards"]),
    "path without tokens": ([SMALL, "data.path=a.bin", "data.source=stdlib"], ["data.path=a.bin", "data.source"]),
    "shard that is not there": ([SMALL, "data.source=tokens", "data.path=/nowhere/a.bin"], ["/nowhere/a.bin"]),
    "unknown tokenizer": ([SMALL, "data.tokenizer=byte"], ["data.tokenizer=byte", "bytes"]),
    "checkpoint that is not there": ([SMALL, "checkpoint.resume=nowhere"], ["checkpoint.resume=nowhere", "=auto"]),
    "a run's name that is a path": ([SMALL, "run.name=../a"], ["run.name=../a", "nearest legal value: run.name=a"]),
    "run.dir below a file": ([SMALL, "run.dir=pyproject.toml/run"], ["run.dir=pyproject.toml/run", "not a folder"]),
    "nproc in words": ([SMALL, "nproc=two"], ["nproc=two", "nproc=1"]),
    "longer than the positions": (["recipe=gpt2", "data.source=synthetic", "data.seq_len=2048"],
                                  ["data.seq_len=2048", "data.seq_len=1024"]),
}  # fmt: skip


def arguments_of(mistake: str, folder: Path) -> list[str]:
    arguments, _ = MISTAKES[mistake]
    has_dir = any(argument.startswith("run.dir=") for argument in arguments)
    return arguments if has_dir else [*arguments, f"run.dir={folder / 'run'}"]


def check_message(mistake: str, stdout: str, stderr: str) -> None:
    assert stdout == ""
    assert "Traceback" not in stderr
    for text in MISTAKES[mistake][1]:
        assert text in stderr, stderr
    assert stderr.count("error:") == 1, "said once"


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistake(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert run.main(arguments_of(mistake, tmp_path)) == 2
    check_message(mistake, *capsys.readouterr())
    assert not (tmp_path / "run").exists(), "a mistake leaves nothing behind"


# What is typed, and the last line of the message: what was meant, or how the form looks, or nothing.
ADVICE = {
    "run.device=gpu": "did you mean run.device=cuda?",
    "log.wandb=true": "did you mean log.wandb=online?",
    "log.wandb=ofline": "did you mean log.wandb=offline?",
    "log.wandb=never": "must be one of off, offline, online",
    "fsdp.param_dtype=bf16": "did you mean fsdp.param_dtype=bfloat16?",
    "fsdp.cpu_offload=maybe": "must be true or false",
    "fsdp.cpu_offload=enabled": "did you mean fsdp.cpu_offload=true?",
    "train.steps=ten": "for example: train.steps=1000",
    "train.steps=10x": "did you mean train.steps=10?",
    "train.steps=-1": "nearest legal value: train.steps=0",
    "optim.eps=0": "for example: optim.eps=1e-08",
    "run.deadline=2020-01-01T00:00": "for example: run.deadline=20",
    "run.deadline=tomorrow": "for example: run.deadline=20",
    "fsdp.wrap=layers": "must be block, size:<parameters>, or package.module:function",
    "data.tokenizer=gpt2": "to fix: download the tokenizer.json of that model, and give its path",
    "data.path={a: a.jsonl, b: }": "for example: 'data.path={a: a.jsonl, b: b/*.bin}'",
    "data.path=[a.jsonl, b.jsonl]": "to fix: give several files as a folder or a glob, several sources as a mapping",
    "model.dim=97": "nearest legal value: model.dim=98",
    "model.name=tests.helpers.custom_recipes:mpl": "did you mean model.name=tests.helpers.custom_recipes:mlp?",
    "model.name=tests.helpers.ranks:mlp2": "to fix: call trainer.register(Recipe(...)) in that module",
    "--train.steps=10": "to fix: keys are written without dashes, as train.steps=10",
    "--recipe": "did you mean recipe=...?",
    "eval.path=foo": "did you mean data.eval_path=foo?",
    "eval.dataset=foo": "did you mean data.eval_path=foo?",
    "eval.interval=5": "did you mean eval.every=5?",
    "eval.batch_size=4": "to fix: leave it out: evaluation uses train.micro_batch_size",
    "checkpoint.steps=5": "did you mean checkpoint.every=5?",
    "checkpoint.path=a": "did you mean checkpoint.dir=a?",
    "log.dir=a": "did you mean run.dir=a?",
    "log.steps=5": "did you mean log.every=5?",
    "log.path=a": "to fix: see python -m trainer.run --help log",
    "model.dropout=0.1": "to fix: see python -m trainer.run --help model",
    "optim.steps=5": "to fix: see python -m trainer.run --help optim",
    "training.steps=5": "did you mean train.steps=5?",
    "train.seed=5": "did you mean run.seed=5?",
    "train.warmup_steps=5": "did you mean schedule.warmup_steps=5?",
    "dry-run": "did you mean --dry-run?",
    "print_config": "did you mean --print-config?",
    "train.steps=010": "did you mean train.steps=10?",
    "train.steps=1:30": "to fix: write one number",
    "run.timeout_s=1:30": "to fix: write one number",
    "checkpoint.every=010": "did you mean checkpoint.every=10?",
    "train.steps=": "to fix: leave it out, or give a value",
    "recipe=": "for example: recipe=llama_small",
    "checkpoint.allow_changes=all": "for example: 'checkpoint.allow_changes=[optim.name]'",
    "checkpoint.allow_changes=[all]": "to fix: name the keys or sections that may change, such as optim.name or data",
    "checkpoint.allow_changes=[train.step]": "did you mean 'checkpoint.allow_changes=[train.steps]'?",
    "train.ema=1": "for example: train.ema=0.999",
    "--verson": "did you mean --version?",
    "--hepl": "did you mean --help?",
}


@pytest.mark.parametrize("argument", list(ADVICE))
def test_advice_is_right_or_omitted(
    argument: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert run.main([SMALL, argument]) == 2
    said = capsys.readouterr().err.rstrip("\n").splitlines()[-1]
    assert ADVICE[argument] in said, said
    suggests = ADVICE[argument].startswith(("did you", "nearest", "for example", "to fix"))
    assert suggests or not any(words in said for words in ("did you mean", "nearest", "for example", "to fix"))


_CODE = {"backward", "checkpoint_wrapper", "model.clip_grad_norm_", "compute_loss", "set_epoch", "training_step"}
"""What the page on migrating names that is no setting, but a function."""


def test_settings_of_other_trainers_get_their_equivalent() -> None:
    page = (REPOSITORY / "docs" / "migrating.md").read_text()
    cells = [cell for line in page.splitlines() for cell in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    found = [re.fullmatch(r'(?:--)?([a-z_]+(?:\.[a-z_]+)?)(?:[=:] ?"?([^"]*)"?)?', cell) for cell in cells]
    names = {match[1]: match[2] or "1" for match in found if match} | {"early_stopping_patience": "3"}
    names |= dict.fromkeys(("save_strategy", "eval_strategy", "model_name", "fsdp_transformer_layer_cls_to_wrap"), "x")
    assert len(names.keys() - _CODE) > 50
    for name in names.keys() - _CODE:
        with pytest.raises(UserError, match=r"did you mean|to fix: (?!see)"):
            load_config("llama_small", [f"{name}={names[name]}"])
    with pytest.raises(UserError, match=r"train\.activation_checkpoint=full\?"):
        load_config("llama_small", ["gradient_checkpointing=True"])


def test_help_for_a_key_shows_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    for name, section in (("lr", "optim"), ("optim.lr", "optim"), ("seq_len", "data"), ("optims", "optim")):
        assert run.main(["--help", name]) == 2
        assert f"did you mean --help {section}?" in capsys.readouterr().err


def test_folder_of_a_run_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    assert run.main([f"recipe={folder}"]) == 2
    said = capsys.readouterr().err
    assert "is a folder, but not a run folder" in said
    assert "did you mean" not in said
    (folder / "config.yaml").write_text("model: {name: llama}\n")
    assert run.main([f"recipe={folder}", "--print-config"]) == 0
    assert run.main([f"recipe={folder}/nothing"]) == 2
    assert f"recipe={folder}/nothing: no such file or folder\n  to fix: give a run folder" in capsys.readouterr().err


def test_failing_module_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_models.py").write_text("import math\n\nmath.sqrt(1) / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run.main([SMALL, "model.name=failing_models:mine"]) == 2
    said = capsys.readouterr().err
    where = f"ZeroDivisionError: float division by zero, in {tmp_path}/failing_models.py, line 3"
    assert f"cannot import 'failing_models' ({where})" in said


ABSURD = [
    "run.threads=1000000",
    "run.timeout_s=1e308",
    "run.step_timeout_s=1e300",
    "run.first_step_timeout_s=1e12",
    "checkpoint.timeout_s=1e300",
    "run.seed=99999999999999999999",
    "data.seq_len=1000000000000",
    "data.num_workers=1000000",
    "train.global_batch_size=100000000000000",
    "train.micro_batch_size=100000000000000",
    "model.dim=100000000000",
    "model.vocab_size=1000000000000000",
    "nproc=1000000",
    f"train.steps=1{'0' * 400}",
    f"optim.lr=1{'0' * 400}",
    f"optim.betas=[1{'0' * 400},0.9]",
    f"schedule.warmup_steps=1{'0' * 5000}",
    "run.deadline=0001-01-01T00:00",
]


@pytest.mark.parametrize("argument", ABSURD, ids=lambda argument: argument[:40])
def test_absurd_numbers_are_rejected_in_one_message(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([SMALL, argument]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {argument.partition('=')[0]}=")
    assert len(said) < 1000
    assert len(said.splitlines()) <= 2


@pytest.mark.parametrize("script", ["run", "plan", "export"])
def test_console_scripts_look_for_recipes_in_the_working_folder(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `meshtrainer-plan`, sys.path begins with the folder of the script, not with the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    name = f"recipes_of_{script}"
    (tmp_path / f"{name}.py").write_text("from tests.helpers.custom_recipes import Mlp, MlpConfig\n")
    if script == "run":
        assert run.main([SMALL, f"model.name={name}:none"]) == 2
    else:
        from trainer import export
        from trainer.plan import __main__ as plan

        commands = {"plan": plan.command_line, "export": export.command_line}
        arguments = {"plan": [SMALL, f"model.name={name}:none"], "export": ["nowhere", "x"]}
        assert commands[script](arguments[script]) == 2
    assert "cannot import" not in capsys.readouterr().err
    assert importlib.util.find_spec(name) is not None


NEEDS_TORCH = {"reshard list too short", "wrap function that is not there"}


@pytest.mark.parametrize("mistake", sorted(MISTAKES.keys() - NEEDS_TORCH - {"tokens without a path"}))
def test_printed_configuration_can_be_run(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert run.main([*arguments_of(mistake, tmp_path), "--print-config"]) == 2
    check_message(mistake, *capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipe=llama3_70b", "mesh.replicate=8", "mesh.shard=64"],
        ["recipe=llama3_8b", "mesh.shard=node", "fsdp.reshard_after_forward=8"],
        ["recipe=llama3_8b", "mesh.shard=node", "mesh.replicate=2", "log.profile_ranks=[8]"],
        [SMALL, "fsdp.reshard_after_forward=4", "nproc=4", "train.micro_batch_size=1"],
    ],
)
def test_print_config_works_without_the_ranks_and_data(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*arguments, "--print-config"]) == 0
    assert capsys.readouterr().err == ""


NO_COMPILER = "needs a C++ compiler, but g++ is not on PATH"
MISSING = {
    "tensorboard": ("log.tensorboard=true", "TensorBoard is not installed", "pip install 'meshtrainer[tensorboard]'"),
    "torchao": ("train.float8=rowwise", "float8 needs the torchao library", "pip install 'meshtrainer[float8]'"),
    "g++": ("train.compile=true", NO_COMPILER, "train.compile=false"),
}


def take_away(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "g++":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(folder))
    else:
        monkeypatch.setitem(sys.modules, what, None)


@pytest.mark.parametrize("option", [[], ["--print-config"]])
@pytest.mark.parametrize("what", list(MISSING))
def test_missing_requirement_is_reported_before_anything_is_built(
    what: str, option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(what, tmp_path, monkeypatch)
    setting, rule, fix = MISSING[what]
    own = ["fsdp.param_dtype=bfloat16", "run.device=cpu", f"run.dir={tmp_path / 'run'}"]
    assert run.main([SMALL, setting, *own, *option]) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert f"{setting}: " in said
    assert rule in said
    assert fix in said
    assert len(said.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["tensorboard", "g++"])
def test_missing_requirement_is_reported_to_a_custom_script(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(what, tmp_path, monkeypatch)
    monkeypatch.setattr(Trainer, "build_model", lambda self: pytest.fail("the model was built before"))
    setting, rule, _ = MISSING[what]
    with pytest.raises(UserError, match=re.escape(rule)):
        Trainer(load_config("llama_small", [setting, f"run.dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "has_triton", "must_say"),
    [
        (["train.compile=true"], False, "train.compile=true: needs Triton"),
        (["train.compile=true"], True, "train.compile=true: needs a C compiler, but gcc and clang are not on PATH"),
        (["optim.state_dtype=bfloat16"], False, "optim.state_dtype=bfloat16: needs Triton"),
        (["train.weights_dtype=bfloat16"], True, "train.weights_dtype=bfloat16: needs a C compiler"),
    ],
)
def test_requirements_of_compilation_on_a_gpu(
    overrides: list[str], has_triton: bool, must_say: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton") if has_triton else None)
    config = load_config("llama_small", overrides)
    with pytest.raises(UserError, match=re.escape(must_say)):
        check_requirements(config, "cuda")
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    if has_triton:
        check_requirements(config, "cuda")


@pytest.mark.slow
def test_user_error_from_a_shell(tmp_path: Path) -> None:
    """In a separate process, which ends with 2."""
    arguments = arguments_of("unknown key", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "trainer.run", *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert done.returncode == 2
    check_message("unknown key", done.stdout, done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_user_error_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from trainer import run; code = run.main(sys.argv[1:]); sys.exit(code + ('torch' in sys.modules))"
    )
    arguments = arguments_of("batch does not divide", tmp_path)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2, done.stderr


def test_no_recipe_shows_usage_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("usage:")
    assert "llama3_405b" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["nproc", pytest.param("torchrun", marks=pytest.mark.campaign)])
def test_user_error_is_printed_once_on_four_ranks(launcher: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    own = ["nproc=4"] if launcher == "nproc" else []
    ran = run_command(
        tmp_path / "run", SMALL, "optim.name=adamm", *own, launcher=torchrun if launcher == "torchrun" else FRESH
    )
    assert ran.exit_code == (2 if launcher == "nproc" else 1), "torchrun makes 1 of every code"
    assert ran.stderr.count("optim.name=adamm") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "must_say"),
    [
        ("mlp_unfilled", ["table.forgotten", "out.extra", "reset_parameters"]),
        pytest.param("mlp_wrong_units", ["'hiden.*'", "'hidden.*'"], marks=pytest.mark.campaign),
        pytest.param(
            "mlp_parted_tie",
            ["'table.weight' and 'out.weight' are one parameter", "('table', 'out')"],
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_model_that_cannot_be_built_is_named_once(model: str, must_say: list[str], tmp_path: Path) -> None:
    ran = run_command(
        tmp_path / "run", SMALL, f"model.name=tests.helpers.custom_recipes:{model}", "data.source=synthetic", "nproc=2"
    )
    assert ran.exit_code == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    for text in must_say:
        assert ran.stderr.count(text) == 1, ran.stderr


@pytest.mark.slow
def test_user_error_does_not_change_an_existing_run(one: SharedRun, tmp_path: Path) -> None:
    folder = one.copy_to(tmp_path / "run")

    def contents() -> dict[str, tuple[int, bytes]]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = contents()
    changed = run_command(folder, SMALL, "train.steps=24")
    assert changed.exit_code == 2
    for text in ("model.dim: 32 in the checkpoint, 96 now", "checkpoint.allow_changes=["):
        assert text in changed.stderr
    assert contents() == before
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl", "notice"])
def test_folder_in_place_of_a_run_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / name / "mine").mkdir(parents=True)
    monkeypatch.setattr(run, "run_trainer", lambda *given: 0)
    assert run.main([SMALL, f"run.dir={tmp_path / 'run'}"]) == 2
    check_said_once(capsys, f"error: run.dir={tmp_path / 'run'}: {tmp_path / 'run' / name} is a folder")
    assert [path.name for path in (tmp_path / "run").rglob("*")] == [name, "mine"]


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "wandb", "profile"])
def test_file_in_place_of_a_run_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    monkeypatch.setattr(run, "run_trainer", lambda *given: 0)
    assert run.main([SMALL, f"run.dir={tmp_path / 'run'}"]) == 2
    check_said_once(capsys, f"error: run.dir={tmp_path / 'run'}: {tmp_path / 'run' / name} is not a folder")
    assert (tmp_path / "run" / name).read_text() == "mine"


def check_said_once(capsys: pytest.CaptureFixture[str], beginning: str) -> None:
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith(beginning), stderr
    assert stderr.count("error:") == 1
