"""The commands printed at the end of a run work unchanged, in the folder where the run was started."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.launch import TINY, launch, merged, start_command
from tests.helpers.runs import SharedRun

pytestmark = pytest.mark.slow

MODEL = """
import dataclasses
import sys

import trainer
from torch import nn
from trainer import ModelSpec, register


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


register(ModelSpec("tiny", Config, Model, units=["embedding", "head"]))

if __name__ == "__main__":
    sys.exit(trainer.main(trainer.Trainer))
"""

QUICK = merged([item for item in TINY if not item.startswith("model.")], ["train.steps=1"])


def commands_of(out: str) -> list[str]:
    """Return the commands that a run prints below `next:`, without the indent."""
    lines = out.partition("  next: ")[2].splitlines()
    return [lines[0], *(line.strip() for line in lines[1:] if line.startswith("        "))]


def check_each(commands: Sequence[str], cwd: Path) -> None:
    """Run each command in `cwd`; all must end well."""
    for command in commands:
        python, dash_m, module, *arguments = shlex.split(command)
        assert (python, dash_m) == ("python", "-m")
        ended = start_command(module, *arguments, cwd=cwd).wait()
        assert ended.code == 0, (command, ended.err)


@pytest.mark.campaign
def test_commands_work_for_a_custom_model_and_a_folder_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(MODEL)
    own = ["recipe=llama_small", "model.name=my_models:tiny", "run.dir=runs/it's a run"]
    trained = start_command("trainer.run", *own, *QUICK, cwd=tmp_path).wait()
    assert trained.code == 0, trained.err
    commands = commands_of(trained.out)
    assert [command.split()[2] for command in commands] == ["trainer.report", "trainer.generate", "trainer.export"]
    check_each(commands, tmp_path)
    assert (tmp_path / "OUT.safetensors").is_file(), "there is no mapping to Hugging Face's names"


def test_commands_work_for_an_adapter_of_a_chat_model(chat: SharedRun, tmp_path: Path) -> None:
    commands = [command.replace(" TEXT", " Hi") for command in commands_of(chat.out)]
    assert any("--chat" in command for command in commands)
    check_each(commands, tmp_path)
    assert (tmp_path / "OUT" / "adapter_config.json").is_file()
    shutil.rmtree(tmp_path / "OUT")


@pytest.mark.campaign
def test_the_command_works_for_a_script_that_registers_the_model(tmp_path: Path) -> None:
    """Only that of the report: others would import the script, and train again."""
    script = tmp_path / "mine.py"
    script.write_text(MODEL)
    own = ["recipe=llama_small", "model.name=tiny", "run.dir=my run", *QUICK]
    trained = launch([sys.executable, str(script), *own], tmp_path / "my run", cwd=tmp_path).wait()
    assert trained.code == 0, trained.err
    commands = commands_of(trained.out)
    assert [command.split()[2] for command in commands] == ["trainer.report"]
    check_each(commands, tmp_path)
