"""The commands printed at the end of a run work unchanged, in the folder where the run was started."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.ranks import TINY, CommandResult, merged, run_python_module
from tests.weights.test_pretrained import SOURCE, folder_of
from trainer import Recipe, load_config, register
from trainer.lifecycle.summary import next_commands

MODEL = """
import dataclasses
import sys

import trainer
from torch import nn
from trainer import Recipe, register


@dataclasses.dataclass
class Config:
    vocab_size: int = 257
    width: int = 16


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


register(Recipe("tiny", Config, Model, units=["embedding", "head"]))

if __name__ == "__main__":
    sys.exit(trainer.main(trainer.Trainer))
"""

QUICK = merged([item for item in TINY if not item.startswith("model.")], ["train.steps=1"])


def commands_of(stdout: str) -> list[str]:
    """Return the commands that a run prints below `next:`, without the indent."""
    lines = stdout.partition("  next: ")[2].splitlines()
    return [lines[0], *(line.strip() for line in lines[1:] if line.startswith("        "))]


def check_each(commands: Sequence[str], cwd: Path) -> list[CommandResult]:
    """Run each command in `cwd`, in a fork where it needs no environment; all must end well."""
    ran = []
    for command in commands:
        python, dash_m, module, *arguments = shlex.split(command)
        assert (python, dash_m) == ("python", "-m")
        ran.append(run_python_module(module, *arguments, cwd=cwd))
        assert ran[-1].exit_code == 0, (command, ran[-1].stderr)
    return ran


@pytest.mark.slow
def test_commands_work_for_a_custom_model_and_a_folder_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(MODEL)
    own = ["recipe=llama_small", "model.name=my_models:tiny", "run.dir=runs/it's a run"]
    trained = run_python_module("trainer.run", *own, *QUICK, cwd=tmp_path)
    assert trained.exit_code == 0, trained.stderr
    commands = commands_of(trained.stdout)
    assert [command.split()[2] for command in commands] == ["trainer.report", "trainer.generate", "trainer.export"]
    assert all(command.endswith(" --allow-import my_models") for command in commands[1:])
    check_each(commands, tmp_path)
    assert (tmp_path / "OUT.safetensors").is_file(), "there is no mapping to Hugging Face's names"


@pytest.mark.campaign
@pytest.mark.parametrize("place", [".", "scripts"])
def test_commands_work_for_a_custom_script(place: str, tmp_path: Path) -> None:
    """The script itself registers the model."""
    script = tmp_path / place / "mine.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(MODEL)
    command = [sys.executable, str(script), "recipe=llama_small", "model.name=tiny", "run.dir=my run", *QUICK]
    trained = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert trained.returncode == 0, trained.stderr
    commands = commands_of(trained.stdout)
    assert len(commands) == 3
    for command in commands:
        shown = command.replace("python -m", f"{shlex.quote(sys.executable)} -m")
        done = subprocess.run(shown, shell=True, capture_output=True, text=True, cwd=tmp_path, timeout=200)
        assert done.returncode == 0, (command, done.stderr)


KINDS = {
    "lora": ("sft", ["lora.rank=2"], "--chat"),
    "hf": ("sft", ["model.name=hf"], "--chat"),
    "dpo": ("dpo", ["lora.rank=2"], "--chat"),
    "pairs of plain text": ("dpo", [], "--prompt"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_commands_work_for_fine_tuned_models(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")
    recipe, own, option = KINDS[kind]
    folder = folder_of(tmp_path / "a base", config=replace(SOURCE, vocab_size=128))
    write_tokenizer(folder, None if option == "--prompt" else CHATML, eos_token="<|im_end|>")
    sample: dict[str, object] = {"messages": conversation("Hi", "Yes")}
    if recipe == "dpo":
        sample = {"prompt": "Hi", "chosen": "Yes", "rejected": "No"}
    (tmp_path / "data.jsonl").write_text(8 * (json.dumps(sample) + "\n"))
    arguments = [f"recipe={recipe}", "model.path=a base", "data.path=data.jsonl", "run.dir=my run", *own]
    quick = ["data.seq_len=64", "train.epochs=1", "train.global_batch_size=4", "run.threads=1"]
    trained = run_python_module("trainer.run", *arguments, *quick, f"data.cache_dir={tmp_path}/cache", cwd=tmp_path)
    assert trained.exit_code == 0, trained.stderr
    commands = commands_of(trained.stdout)
    assert f"trainer.generate 'my run' {option} TEXT" in commands[1]
    check_each([command.replace(" TEXT", " Hi") for command in commands], tmp_path)
    assert (tmp_path / "OUT").is_dir()


def test_script_that_trains_on_import_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_in_main = {"__name__": "__main__", "register": register, "Recipe": Recipe, "load": load_config}
    exec(  # a recipe that a script registers
        "import dataclasses\n"
        "from torch import nn\n"
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    vocab_size: int = 257\n"
        "register(Recipe('of_a_script', Config, lambda config: nn.Identity()))\n",
        register_in_main,
    )
    config = load_config("llama_small", ["model.name=of_a_script", "run.dir=r"])
    script = tmp_path / "mine.py"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script), __spec__=None))
    script.write_text("import trainer\ntrainer.main()\n")
    assert next_commands(config) == ["python -m trainer.report r"]
    script.write_text("import trainer\nif __name__ == '__main__':\n    trainer.main()\n")
    assert next_commands(config)[1] == (
        f"PYTHONPATH={tmp_path} python -m trainer.generate r --prompt TEXT --allow-import mine"
    )
