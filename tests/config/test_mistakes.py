"""A mistake is a command line: it gives one short message and leaves nothing behind, and what it proposes works."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.chats import write_tokenizer
from tests.helpers.launch import REPOSITORY, launch
from tests.helpers.launch import run as train
from tests.helpers.runs import SharedRun
from trainer import Trainer, UserError, evaluate, load_config, run

# Typed in a folder with the files of INPUT. A line that does not begin with a subcommand of `meshtrainer` continues
# `meshtrainer run`, of llama_small unless it names a recipe.
LONG_NAME = 300 * "x"
PROPOSING = """
# a recipe
recipe=llama_smal
recipe=conf/llama_smal.yaml
recipe=
recipe=misspelled.yaml
llama_small
recipe=llama_small gpt2
--recipe=llama_small
# a key
train.step=5
steps=5
Train.Steps=5
train.lr=0.1
train.seed=5
model=llama
eval.interval=5
data.path=text.txt eval.path=long.txt
log.dir=here
--train.steps=10
--model.dim=64
--nproc=2
# an option
--print-confg
dry-run
\N{EN DASH}\N{EN DASH}dry-run
# the form
train.steps==5
train.steps:5
# a type
train.steps=many
train.steps=1.5
train.steps=1e3
train.steps=10k
train.steps=010
optim.lr=3e-4x
optim.lr=0,001
optim.betas=0.9,0.95
schedule.warmup_steps=10%
run.timeout_s=30m
fsdp.cpu_offload=enabled
'data.path={a: text.txt, b: }'
checkpoint.allow_changes=model.dim
checkpoint.allow_changes=all
# what another setting must allow
eval.every=0 eval.patience=3
lora.alpha=2
# a limit
train.steps=-1
optim.lr=inf
optim.eps=0
optim.betas=[0.9,1.1]
train.ema=1
schedule.min_lr_ratio=2
schedule.lr_range=[1,0.1]
schedule.decay_ratio=0.5 schedule.name=wsd schedule.warmup_steps=60 train.steps=100
schedule.decay_ratio=0.9 schedule.name=wsd schedule.warmup_ratio=0.5
run.threads=1000000
run.deadline=2020-01-01T00:00
run.deadline=tomorrow
# a choice
optim.name=adamm
optim.lr=autom
mesh.shard=nodes
'mesh.shard=\\${x}'
run.device=gpu
log.wandb=true
fsdp.param_dtype=bf16
fsdp.reshard_after_forward=true
fsdp.wrap=blocks
fsdp.wrap=size:big
fsdp.wrap=size:1e5
train.activation_checkpoint=budget:2
train.micro_batch_size=all
mesh.shard=nod
checkpoint.every=often
checkpoint.resume=nowhere
checkpoint.allow_changes=[train.step]
log.trackers=[wandbb]
# a name
run.name=../a
run.dir=text.txt/run
model.name=lama
model.name=tests.helpers.custom_recipes:mpl
nproc=4 fsdp.wrap=tests.helpers.custom_recipes:every_liner
# numbers that must fit each other
nproc=two
nproc=2000 train.global_batch_size=2048
nproc=3
nproc=4 mesh.shard=3
nproc=4 mesh.replicate=3
mesh.shard=-1 mesh.replicate=-1
nproc=2 mesh.context=3
nproc=2 mesh.expert=2
train.global_batch_size=30 train.micro_batch_size=4
nproc=4 fsdp.reshard_after_forward=3
nproc=4 fsdp.reshard_after_forward=[always,never]
log.profile_ranks=[7]
model.num_heads=5
model.num_kv_heads=5
model.dim=97 model.num_heads=1 model.num_kv_heads=1
model.dim=97
model.vocab_size=100
recipe=gpt2 data.source=synthetic data.seq_len=2048
# data
data.source=tokens
data.path=
data.path=texx.txt
data.path=raw.bin
data.path=text.txt data.seq_len=4096
data.path=short.txt
data.path=b/*.bin data.eval_path=b/held_out-00000.bin
'data.path={a: text.txt}' 'data.weights={b: 1}'
'data.path={a: text.txt, b: long.txt}' 'data.weights={a: -1, b: 1}'
data.tokenizer=byte
data.train_on=all
# other trainers
--num_processes=2
train.learning_rate=1e-4
train.per_device_train_batch_size=4
gradient_checkpointing=True
sharding_strategy=FULL_SHARD
resume_from_checkpoint=true
val_set_size=0.01
trainer.devices=2
"""
PROPOSING_NOTHING = f"""
# a recipe
recipe=none/zzz.yaml
recipe=settings.toml
recipe=tab.yaml
recipe=part.yaml
recipe=dotted.yaml
recipe=latin.yaml
recipe=arguments.yaml
recipe=no_colon.yaml
recipe=twice.yaml
recipe=itself.yaml
recipe=reference.yaml
recipe=variable.yaml
--recipe llama_small
# a key or an option
model.dropout=0.1
optim.steps=5
eval.batch_size=4
--foo.bar=1
--allow-import
\N{LEFT DOUBLE QUOTATION MARK}train.steps=5\N{RIGHT DOUBLE QUOTATION MARK}
# the form
train.steps
train.steps = 10
train.steps=5 now
data.path=my books/a.txt
data.path={{web: text.txt, code: long.txt}} train.steps=5
# a value
train.steps=
train.steps=1:30
run.name=
optim.name=lion
optim.max_grad_norm=0
'optim.muon={{'
'optim.muon=a: b: c'
optim.muon=5
'optim.muon={{lr: 010}}'
optim.betas=[010,0.9]
fsdp.cpu_offload=maybe
checkpoint.allow_changes=[all]
run.name={LONG_NAME}
run.dir={LONG_NAME}/a
run.dir=files_for_folders
run.dir=folders_for_files
checkpoint.resume={LONG_NAME}
train.init_from=missing
# a model
model.name=nowhere:mine
model.name=:llama
model.name=failing_models:mine
model.name=/mine.py
model.name=Qwen/Qwen3-0.6B
recipe=sft model.path=Qwen/Qwen3-0.6B data.path=x.jsonl
recipe=sft model.path=Qwen3-0.6B data.path=x.jsonl
# data
data.path=text.txt data.source=stdlib
data.path=nowhere
data.path={LONG_NAME}.txt
data.path=[text.txt,long.txt]
'data.path={{a: text.txt, b: long.txt}}' data.weights.a=0
data.path=nowhere://x
checkpoint.dir=nowhere://x
train.init_from=nowhere://x
model.path=null
data.path=part-00000.bin
data.path=empty.txt
data.path=empty
data.path=strings.jsonl
data.path=table.xls
'data.path={{a: text.txt}}' 'data.phases=[{{form: 0, weights: {{a: 1}}}}]'
data.tokenizer=qwen3
# other trainers
--mixed_precision bf16
train.gradient_accumulation_steps=4
parallelism.tensor_parallel_degree=2
# other commands
meshtrainer plam
meshtrainer help
prepare latin.txt --out p
plan --model llama3_70b
checkpoints empty
evaluate empty
evaluate {LONG_NAME}
export none none
generate empty
generate empty --prompt x --chat y
report none
data
"""
"""Mistakes whose message proposes no argument that could be typed instead. Think twice before you add one."""
VARIATIONS = """
# a recipe, a key or the form
recipe=conf/llama_smal.yaml
Train.Steps=5
train.lr=0.1
eval.interval=5
--model.dim=64
train.steps==5
train.steps:5
recipe=tab.yaml
recipe=dotted.yaml
recipe=no_colon.yaml
recipe=variable.yaml
eval.batch_size=4
recipe=part.yaml
recipe=arguments.yaml
recipe=reference.yaml
train.seed=5
log.dir=here
# a type, a limit or a choice
train.steps=1.5
train.steps=10k
optim.lr=inf
optim.betas=0.9,0.95
fsdp.reshard_after_forward=true
checkpoint.resume=nowhere
run.name=../a
optim.max_grad_norm=0
train.steps=1e3
train.steps=010
optim.lr=0,001
run.timeout_s=30m
checkpoint.allow_changes=all
fsdp.cpu_offload=maybe
optim.eps=0
optim.betas=[0.9,1.1]
train.ema=1
schedule.min_lr_ratio=2
run.deadline=tomorrow
run.device=gpu
fsdp.param_dtype=bf16
fsdp.wrap=size:big
train.micro_batch_size=all
checkpoint.every=often
# numbers that must fit each other
nproc=4 mesh.replicate=3
nproc=2 mesh.expert=2
mesh.shard=-1 mesh.replicate=-1
nproc=2000 train.global_batch_size=2048
nproc=4 fsdp.reshard_after_forward=[always,never]
model.num_kv_heads=5
model.dim=97 model.num_heads=1 model.num_kv_heads=1
recipe=gpt2 data.source=synthetic data.seq_len=2048
# data, a model or other trainers
data.path=short.txt
data.path=empty
data.path=part-00000.bin
data.path=strings.jsonl
model.name=:llama
recipe=sft model.path=Qwen3-0.6B data.path=x.jsonl
train.learning_rate=1e-4
train.per_device_train_batch_size=4
sharding_strategy=FULL_SHARD
val_set_size=0.01
trainer.devices=2
parallelism.tensor_parallel_degree=2
"""
"""Those of the mistakes above that only the campaign makes: another one has the same cause."""
INPUT = {
    "text.txt": "hi there. " * 100,
    "long.txt": "some text to train on. " * 200,
    "my books/a.txt": "some text to train on. " * 200,
    "a.jsonl": '{"text": "some text to train on"}\n' * 100,
    "corpus/a.jsonl": '{"text": "some text to train on"}\n' * 100,
    "short.txt": "hello",
    "empty.txt": "",
    "empty/nothing": "",
    "latin.txt": b"caf\xe9",
    "strings.jsonl": '"abc"\n',
    "table.xls": "a,b",
    "raw.bin": bytes(9000),
    "part-00000.bin": bytes(18),
    "part-00000.json": "{}",
    "settings.toml": "[training]",
    "tab.yaml": "model:\n\tname: x\n",
    "part.yaml": "train: {steps: 3}\n",
    "misspelled.yaml": "train: {stepz: 3}\n",
    "dotted.yaml": "train.steps: 3\n",
    "latin.yaml": b"run: {name: caf\xe9}",
    "arguments.yaml": "recipe=llama_small\ntrain.steps=3\n",
    "no_colon.yaml": "recipe: llama_small\ntrain:\n  steps 3\n",
    "twice.yaml": "train:\n  steps: 3\n  steps: 4\n",
    "itself.yaml": "recipe: itself.yaml\n",
    "reference.yaml": "recipe: llama_small\nrun: {name: '${run.nam}'}\n",
    "variable.yaml": "recipe: llama_small\nrun: {name: '${oc.env:HOME}'}\n",
    "crlf.yml": "recipe: llama_small\r\ntrain:\r\n  steps: 7\r\n",
    "failing_models.py": "import math\n\nmath.sqrt(1) / 0\n",
    "files_for_folders/checkpoints": "mine",
    "folders_for_files/metrics.jsonl/mine": "",
}
LEGAL = """
train.steps=10 train.steps=20
recipe=crlf.yml
'data.path=my books/a.txt'
data.path=corpus/*.jsonl
run.dir=~/runs/mine
schedule.name=wsd schedule.warmup_steps=50 train.steps=5
schedule.name=wsd schedule.decay_ratio=1 schedule.warmup_steps=0 train.steps=1
schedule.name=wsd schedule.decay_ratio=0.67 schedule.warmup_ratio=0.33 schedule.warmup_steps=0 train.steps=150
"""
"""What users fear to be a mistake, and is none."""
EXPLAINED = """
nproc=3
nproc=4 mesh.shard=3
model.vocab_size=100
data.path=raw.bin
data.path=text.txt data.seq_len=4096
data.path=b/*.bin data.eval_path=b/held_out-00000.bin
evaluate empty
"""
"""Mistakes whose message docs/troubleshooting.md quotes and explains."""


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def words_of(line: str) -> list[str]:
    """Return the words after `meshtrainer`."""
    words = shlex.split(line)
    if words[0] == "meshtrainer":
        return words[1:]
    if words[0] in run.COMMANDS:
        return words
    has_recipe = any(word.startswith(("recipe", "--recipe")) or word == "llama_small" for word in words)
    return ["run", *([] if has_recipe else ["recipe=llama_small"]), *words]


@dataclass(frozen=True)
class Answer:
    """What a command did and printed, and what its error proposes."""

    code: object
    out: str
    err: str
    proposal: str

    @property
    def message(self) -> str:
        """The only error, which is short."""
        assert (self.code, self.out, self.err.count("error:")) == (2, "", 1), self.err
        assert self.err.startswith("error: ")
        assert "Traceback" not in self.err
        assert len(self.err.splitlines()) <= 6, self.err
        return self.err.removeprefix("error: ")


class _Stderr(io.StringIO):
    """Keeps the proposal of the error whose message is printed, which is being handled at that moment."""

    proposal = ""

    def write(self, text: str) -> int:
        error = sys.exc_info()[1]
        self.proposal = error.proposal if isinstance(error, UserError) else self.proposal
        return super().write(text)


def answer(words: Sequence[str]) -> Answer:
    """Run `meshtrainer WORDS` in this process."""
    out, err = io.StringIO(), _Stderr()
    code: object
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if words[0] == "run":
                code = run.main(words[1:])
            elif words[0] == "evaluate":
                code = evaluate.main(words[1:])
            else:
                sys.argv = ["meshtrainer", *words]
                run.meshtrainer()
        except SystemExit as ended:
            code = ended.code
    return Answer(code, out.getvalue(), err.getvalue(), err.proposal)


@functools.cache
def refusal(*words: str) -> str:
    """Return why `meshtrainer run WORDS` is not accepted; empty if it is."""
    checked = answer(["run", *words, "--print-config"])
    return checked.err if checked.code else ""


@pytest.fixture(scope="module")
def input_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input")
    for name, content in INPUT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    write_tokenizer(folder / "gpt2", template=None)
    for name in ("trained", "held_out"):
        assert answer(["prepare", str(folder / "long.txt"), "--out", str(folder / "b" / name)]).code == 0
    return folder


@pytest.fixture
def folder(input_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the input, in which the command lines are typed."""
    monkeypatch.chdir(input_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(input_folder.with_name("cache")))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(run, "run_trainer", lambda *arguments: pytest.fail("it would train"))
    return input_folder


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return all files and folders in a folder, with their sizes and modification times; without bytecode."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def mistake_in(words: Sequence[str], message: str) -> str:
    """Return the argument that the message begins with; empty if it begins with a setting that was not typed."""
    first_line = re.sub(r"(?<=\d)\.0\b", "", message.partition("\n")[0])  # 2.0 is a fine way to repeat 2
    for word in words:
        key, equals, value = word.partition("=")
        if first_line.startswith((f"{word}:", f"{word!r}:")):
            return word
        if equals and first_line.startswith(f"{key}="):
            assert value in first_line, "a path may be shown in full"
            return word
    assert re.match(r"[\w.]+(\[\d+\])?=|--", message), message
    return ""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.campaign) if line in lines(VARIATIONS) else line
        for line in lines(PROPOSING) + lines(PROPOSING_NOTHING)
    ],
    ids=lambda line: line[:60],
)
def test_mistake_is_one_message_and_its_advice_works(line: str, folder: Path) -> None:
    words, before = words_of(line), contents(folder)
    answered = answer(words)
    message, proposal = answered.message, answered.proposal
    assert contents(folder) == before, "nothing is left behind"
    assert bool(proposal) == (line in lines(PROPOSING)), proposal
    if words[0] != "run":
        return
    mistake = mistake_in(words, message)
    if not proposal:
        return
    # The proposal replaces the mistake, the words that it joins, or a recipe file with a mistake in it.
    kept = [word for word in words[1:] if word != mistake and word not in proposal and not word.endswith(".yaml")]
    if not any(word.startswith("recipe=") for word in (*kept, proposal)):
        kept.insert(0, "recipe=llama_small")
    assert proposal in message
    assert refusal(*kept, proposal) == ""
    key, _, value = proposal.partition("=")
    given = re.match(rf"{re.escape(key)}=(-?\d+): ", message)
    if given and re.fullmatch(r"-?\d+", value):
        for nearer in numbers_between(int(given[1]), int(value)):
            assert refusal(*kept, f"{key}={nearer}") != "", f"{nearer} is legal, and nearer"


def numbers_between(given: int, proposed: int) -> set[int]:
    """Return a few numbers that are nearer to the given one than the proposed one: next to each of them."""
    candidates = {proposed - 1, proposed + 1, *range(given - 2, given + 3)} - {given}
    return {number for number in candidates if abs(number - given) < abs(proposed - given)}


@pytest.mark.parametrize("line", lines(LEGAL))
def test_unusual_input_is_accepted(line: str, folder: Path) -> None:
    assert refusal(*words_of(line)[1:]) == ""


def is_explained(message: str) -> bool:
    """Return whether docs/troubleshooting.md explains a message: it quotes it, with `...` for what varies."""
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text().partition("\n## ")[0]
    quotes = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    return any(re.search(".*".join(map(re.escape, quote.split("..."))), message) for quote in quotes)


@pytest.mark.parametrize("line", lines(EXPLAINED))
def test_message_reads_as_the_page_quotes_it(line: str, folder: Path) -> None:
    assert is_explained(answer(words_of(line)).message)


@pytest.mark.parametrize(
    "line",
    [
        "recipe=llama_smal",
        "train.step=5",
        "train.steps=many",
        "train.steps=-1",
        "nproc=3",
        "nproc=4 mesh.shard=3",
        "model.num_heads=5",
        "model.vocab_size=100",
        "run.dir=text.txt/run",
        "data.path=nowhere",
    ],
)
def test_print_config_finds_the_same_mistakes(line: str, folder: Path) -> None:
    """So what it prints can be run."""
    words = words_of(line)
    assert answer([*words, "--print-config"]) == answer(words)


@pytest.mark.parametrize(
    "line",
    [
        f"train.steps=1{400 * '0'}",
        f"optim.lr=1{400 * '0'}",
        f"optim.betas=[1{400 * '0'},0.9]",
        f"schedule.warmup_steps=1{5000 * '0'}",
    ],
    ids=lambda line: line.partition("=")[0],
)
def test_absurd_number_is_not_repeated_at_length(line: str, folder: Path) -> None:
    message = answer(words_of(line)).message
    assert message.startswith(line.partition("=")[0])
    assert len(message) < 1000


def test_no_recipe_shows_usage_and_recipes(folder: Path) -> None:
    nothing = answer(["run"])
    assert (nothing.code, nothing.out) == (2, "")
    assert nothing.err.startswith("usage:")
    assert "llama3_405b" in nothing.err
    assert answer(["run", "train.steps=10"]).proposal == "recipe=llama_small"
    assert answer(["run", "model.name=gpt2"]).proposal == "recipe=gpt2"


# ---------------------------------------------------------------------------------------------------------------
# Missing libraries and compilers


def take_away(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what in ("gcc", "g++"):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    else:
        monkeypatch.setitem(sys.modules, what, None)


MISSING = [
    ("log.tensorboard=true", "tensorboard"),
    ("fsdp.param_dtype=bfloat16 train.float8=rowwise", "torchao"),
    ("run.device=cpu train.compile=true", "g++"),
    ("run.device=cuda train.compile=true", "triton"),
    ("run.device=cuda optim.state_dtype=bfloat16", "triton"),
    ("run.device=cuda train.weights_dtype=bfloat16", "gcc"),
]


@pytest.mark.parametrize(("line", "what"), MISSING)
def test_missing_requirement_is_one_message(
    line: str, what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(what, tmp_path, monkeypatch)
    words, before = words_of(line), contents(folder)
    answered = answer(words)
    assert answered.message.startswith(f"{words[-1]}: ")
    assert what in answered.err.lower()
    assert answer([*words, "--print-config"]).err == answered.err
    assert contents(folder) == before
    if what in ("gcc", "g++"):
        compiler = tmp_path / what
        compiler.touch(mode=0o755)
        assert answer([*words, "--print-config"]).code == 0


def test_missing_compiler_is_reported_to_a_custom_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unbuilt(Trainer):
        def build_model(self) -> None:
            pytest.fail("the model was built before")

    take_away("g++", tmp_path, monkeypatch)
    with pytest.raises(UserError) as raised:
        Unbuilt(load_config("llama_small", ["train.compile=true", f"run.dir={tmp_path / 'run'}", "run.device=cpu"]))
    assert str(raised.value).startswith("train.compile=true: ")
    assert is_explained(str(raised.value))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------
# In processes of their own


@pytest.mark.slow
def test_mistake_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trainer.run", "recipe=llama_small", "nproc=3"]
    ended = launch([*command, f"run.dir={tmp_path / 'run'}"], tmp_path).wait()
    assert ended.code == 2
    imported = re.findall(r"^import time: .*\| +(\S+)$", ended.err, re.MULTILINE)
    assert "trainer.config" in imported
    assert "torch" not in imported
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        ("optim.name=adamm", ["optim.name=adamm"]),
        ("model.name=tests.helpers.custom_recipes:mlp_unfilled", ["table.forgotten", "out.extra"]),
        pytest.param(
            "model.name=tests.helpers.custom_recipes:mlp_parted_tie",
            ["table.weight", "out.weight"],
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_mistake_is_printed_once_on_two_ranks(mistake: str, names: list[str], tmp_path: Path) -> None:
    """Whether it is found before the ranks meet, or only when they build the model."""
    ended = train(tmp_path / "run", "recipe=llama_small", "data.source=synthetic", mistake, "nproc=2", code=2)
    assert (ended.err.count("error:"), ended.err_of(1)) == (1, ""), ended.err
    assert "Traceback" not in ended.err
    for name in names:
        assert name in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_mistake_does_not_change_an_existing_run(one: SharedRun, tmp_path: Path) -> None:
    folder = one.copy_to(tmp_path / "run")
    before = contents(folder), [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    changed = train(folder, *one.overrides, "model.dim=48", "train.steps=24", code=2)
    assert is_explained(changed.err)
    for text in ("model.dim", "32", "48", "checkpoint.allow_changes=["):
        assert text in changed.err
    train(folder, *one.overrides, "optim.name=adamm", code=2)
    after = contents(folder), [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    assert after == before
