"""The run that the tests of this folder save, kill and resume."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import torch

from tests.helpers.launch import Run
from trainer import load_weights
from trainer.checkpoints import command_line

EVERY, STEPS = 2, 8
RUN = [
    "recipe=llama_small",
    "model.name=tests.helpers.custom_recipes:mlp_faulty",
    "data.source=synthetic",
    "data.seq_len=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    f"train.steps={STEPS}",
    "eval.every=0",
    "log.every=1",
    "log.sample_tokens=0",
    "run.threads=1",
    "run.device=cpu",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=2",
    "run.timeout_s=100",
    "checkpoint.timeout_s=50",
]
"""A run of a fraction of a second, which saves at steps 2, 4, 6 and 8.

Where a rank dies and no launcher ends the others, gloo overlooks the closed connection once in some hundred times: then
these limits end the wait.
"""


def assert_only_whole(folder: Path) -> None:
    """Assert that a folder has complete checkpoints and nothing else, except the owner's mark."""
    names = [path.name for path in folder.iterdir() if path.name != ".owner.json"]
    assert [name for name in names if not name.startswith("step_")] == []
    code, listed = show_checkpoints(folder, "--verify", "--json")
    assert code == 0
    assert [entry["state"] for entry in json.loads(listed)] == ["verified"] * len(names)


def show_checkpoints(*arguments: object) -> tuple[int, str]:
    """Return the exit code and the output of the command `checkpoints`, which runs in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command_line([str(argument) for argument in arguments])
    return code, printed.getvalue()


def resumed_steps(ran: Run) -> list[int | None]:
    """Return the step from which each attempt of a run went on; None for one that began anew."""
    return [line["resumed_step"] for line in ran.of_kind("start")]


def weights_of(checkpoint: Path | str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint by name."""
    return load_weights(checkpoint, allow_import=["tests.helpers.custom_recipes"]).state_dict()


def assert_same_weights(one: Path | str, other: Path | str) -> None:
    """Assert that two checkpoints have the same weights, bit for bit."""
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def step_folder(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step in a run's folder."""
    return folder / "checkpoints" / f"step_{step:08d}"
