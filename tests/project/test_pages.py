"""Every command and every Python block of the README and of docs/, page after page, run in one folder per page.

Commands run as typed. Inputs that no page creates (a book, chats, a Hugging Face folder) are provided and tiny; models
are made small by settings appended to those of the page.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import yaml

from tests import first_hour
from tests.helpers.chats import CHATML, WORDS, conversation
from tests.helpers.gate import wait_until
from tests.helpers.launch import REPOSITORY, Run, command, launch

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

_ON_EIGHT = "torchrun --nproc-per-node 8 -m trainer.run recipe=llama3_8b 'data.path=shards/*.bin'"

ELSEWHERE = {
    "python3 -m venv": "a fresh clone and environment: .ci/run",
    "pip install": "an environment of its own: .ci/run",
    "hf download": "the folders lie here",
    "srun": "tests/launch/test_slurm.py",
    "sbatch launch/": "tests/launch/test_slurm.py",
    "python launch/ray_train.py": "tests/launch/test_ray.py",
    f"{_ON_EIGHT} data.seq_len=": "tests/sequence/test_context.py",
    "vllm serve": "loaded by transformers instead: tests/weights/test_huggingface.py",
    "python -m trainer.run recipe=llama_small data.path=https://": "tests/data/test_remote.py",
}
"""Beginnings of commands that cannot run in a test, and where they are tested instead."""

SMALL = ["run.device=cpu", "run.threads=1", "data.seq_len=32", "eval.steps=2"]
NATIVE = ["model.dim=32", "model.num_layers=2", "model.ffn_dim=64"]
SHORT = ["train.steps=12", "schedule.warmup_steps=2", "train.global_batch_size=8"]
OF_A_CLUSTER = [*SMALL, *SHORT, *NATIVE, "model.num_heads=4", "model.num_kv_heads=2", "data.seq_len=64"]


def docs() -> list[Path]:
    """Return the pages in the order of the site."""

    def names(tree: Any) -> Iterator[str]:
        for each in tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else [tree]:
            yield from [each] if isinstance(each, str) else names(each)

    text = re.sub(r"\{[^{}\n]*\}", "{}", (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:")[2])
    found = list(names(yaml.safe_load(text)))
    assert sorted(found) == sorted(page.name for page in (REPOSITORY / "docs").glob("*.md"))
    return [REPOSITORY / "docs" / name for name in found]


README, DOCS = REPOSITORY / "README.md", docs()[1:]
"""The first page of the site begins as the second one does."""


def commands_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield ("python", CODE) and ("command", LINE) as they come."""
    text = page.read_text().replace("\\\n", " ")
    for match in re.finditer(r"```(\w*)\n([\s\S]*?)```|^ {4}(?! )(\S[^\n]*)", text, re.MULTILINE):
        if match[1] == "python":
            yield "python", match[2]
        elif match[3] and re.match(r"(python|torchrun|srun|sbatch|pip|hf|vllm)", match[3]):
            yield "command", match[3].rpartition("install -c constraints.txt -e . && ")[2]


def write_inputs(folder: Path) -> None:
    """Write the files that pages name but do not create."""
    import zstandard
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [path.read_text() for path in sorted((REPOSITORY / "trainer").rglob("*.py"))[:60]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    learn = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=byte_level.alphabet())
    tokenizer.train_from_iterator(texts, learn)
    for name, kind in {
        **dict.fromkeys(("Qwen3-0.6B", "Qwen3-8B", "models/Qwen3-8B"), "qwen3"),
        **dict.fromkeys(("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.1-8B-sft"), "llama"),
    }.items():
        write_model(folder / name, kind, tokenizer)
    (folder / "gpt2").mkdir()
    tokenizer.save(str(folder / "gpt2" / "tokenizer.json"))

    (folder / "book.txt").write_text("\n".join(texts))
    (folder / "corpus").mkdir()
    (folder / "text" / "web").mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / "corpus" / f"{number}.md").write_text(text)
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text" / "web" / "a.jsonl.zst").write_bytes(zstandard.compress(records.encode()))
    for name, own in (("web", records.splitlines(True)[::2]), ("code", records.splitlines(True)[1::2])):
        (folder / f"{name}.jsonl").write_text("".join(own))
    for name in ("shards/early", "held_out/some", "other/more"):
        options = ["--out", name, "--tokenizer", "Llama-3.1-8B/tokenizer.json"]
        command("trainer.prepare", "web.jsonl", *options, cwd=folder)
    chats = [conversation(*(" ".join(WORDS[(number + turn) % 30 :][:5]) for turn in range(4))) for number in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"messages": chat[:1]}) + "\n" for chat in chats[:20]))
    pairs = [{"prompt": chat[:1], "chosen": chat[1:2], "rejected": chat[3:4]} for chat in chats]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    labelled = [{"prompt": p["prompt"], "completion": p["chosen"], "label": n % 2 == 0} for n, p in enumerate(pairs)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(record) + "\n" for record in labelled))
    classes = [{"text": chat[0]["content"], "label": number % 3} for number, chat in enumerate(chats)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in classes))


def write_model(folder: Path, kind: str, tokenizer: Any) -> None:
    from tests.helpers.hf_models import model_of

    end = tokenizer.token_to_id("<|im_end|>")
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    model = model_of(kind, eos_token_id=end, bos_token_id=0, pad_token_id=0, **sizes)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHATML)


def smaller(words: list[str], folder: Path) -> list[str]:
    """Return settings that make the run of a command small."""
    recipe = next((word[7:] for word in words if word.startswith("recipe=")), "")
    given = {word.partition("=")[0] for word in words}
    if {"--help", "--print-config"} & given or words[1:3] != ["-m", "trainer.run"]:
        return []
    if recipe.startswith("llama3"):
        return OF_A_CLUSTER if "train.init_from" not in given else [*SMALL, *SHORT]
    if recipe in ("sft", "distill", "classify", "reward", "dpo", "ipo", "simpo", "orpo", "kto"):
        return ["run.device=cpu", "run.threads=1", "data.seq_len=128", "train.steps=6"]
    if "model.vocab_size" in given:  # a real tokenizer's: each step takes its time
        return [*SMALL, *NATIVE, *SHORT]
    ranks = next((int(word[6:]) for word in words if re.fullmatch(r"nproc=\d", word)), 1)
    at_once = [f"train.micro_batch_size={8 // ranks}"]
    at_once += ["train.steps=100"] if ranks > 2 else []  # with more ranks than cores each step takes its time
    if recipe == "llama_small" and not {"train.init_from", "model.name"} & given:
        return [*SMALL, *NATIVE, *at_once]
    return [*SMALL, *at_once]


def run(line: str, folder: Path) -> Run:
    """Run a command of a page as it is typed, but smaller. One that runs until Ctrl-C gets it after its first line."""
    words = shlex.split(line, comments=True)
    program = [sys.executable, "-u"]
    if words[0] == "torchrun":
        program += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        words = ["python", *words[3:]]
    environment = {"COLUMNS": "100", "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    started = launch([*program, *words[1:], *smaller(words, folder)], folder, environment, cwd=folder)
    if "--watch" in words:
        wait_until(lambda: started.out or not started.is_running, f"the first line of {line}")
        started.signal(signal.SIGINT)
    return started.wait()


def run_python(code: str, folder: Path) -> None:
    """Run the Python code of a page: as the file that it names, or as a script; or at least compile it."""
    named = re.match(r"# (\w+\.py)\n", code)
    if named:
        (folder / named[1]).write_text(code)
        return
    if "sys.exit(trainer.main(MyTrainer))" in code:
        (folder / "mine.py").write_text(code)
        words = ["mine.py", "recipe=llama_small", "nproc=2", "train.steps=100", "run.name=script", *SMALL, *NATIVE]
    elif any(part in code for part in ("def forward(self", "self.model", "MyConfig, MyModel")):
        is_module = code.startswith(("def", "from", "import", "class"))
        compile(code if is_module else "def body(self):\n" + indent(dedent(code), "    "), "page", "exec")
        return
    else:
        code = code.replace('"run.name=mine"]', '"run.name=loop", ' + ", ".join(map(repr, [*SMALL, *NATIVE])) + "]")
        (folder / "shown.py").write_text(code)
        words = ["shown.py"]
    done = launch([sys.executable, *words], folder, cwd=folder).wait()
    assert done.code == 0, (code, done.out, done.err)


@pytest.mark.parametrize("pages", [[README], DOCS], ids=["README", "docs"])
def test_every_command_of_every_page_in_order(pages: list[Path], tmp_path: Path) -> None:
    for library in ("transformers", "tokenizers", "zstandard"):
        pytest.importorskip(library)
    write_inputs(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    wrong = []
    for page in pages:
        for kind, text in commands_of(page):
            if kind == "python":
                run_python(text, tmp_path)
                continue
            if text.startswith(tuple(ELSEWHERE)):
                continue
            done = run(text, tmp_path)
            print(f"{done.code}  {page.name}: {text}", flush=True)
            printed = done.out + done.err
            if done.code != 0 or "nothing to do" in printed or "Traceback" in printed:
                wrong.append(f"{page.name}: {text}\n{printed[-1500:]}")
    assert not wrong, "\n\n".join(wrong)


def test_the_first_hour_of_a_newcomer(tmp_path: Path) -> None:
    """In a fresh clone, one command per step; nothing is deleted or edited by hand."""
    clone = tmp_path / "clone"
    for result in first_hour.run_steps(clone, first_hour.SMALL):
        assert not result.problem, (result.problem, result.step.command, result.screen)
        if result.step.ctrl_c_after:
            assert result.text_seen_s is not None
            assert "resume" in result.screen
        if result.step.aim.startswith("resume"):
            assert "(resumed at step " in result.screen
    assert all((clone / name).is_file() for name in first_hour.EXPECTED_FILES)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert changed.stdout == "", "what runs leave is ignored by git"
