"""A rank dies or fails in a phase of a save: all others know it soon, and nothing incomplete is published."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.runs import show_checkpoints
from tests.helpers.cases import in_campaign
from tests.helpers.launch import fork, on_ranks, tiny
from trainer import Trainer, load_config
from trainer.checkpoint import planner, stager

pytestmark = pytest.mark.slow


def config_of(folder: str, *overrides: str) -> Any:
    return load_config("llama_small", [*tiny("train.steps=9", "checkpoint.every=0", *overrides), f"run.dir={folder}"])


# ---------------------------------------------------------------------------------------------------------------
# kill -9

PHASES = {"the plan is sent": 0, "the plan is received": 1, "the files are reported": 2, "the end is received": 3}
"""The collectives of a save, in order; a rank is killed when it begins one."""


def save_until_killed(folder: str, victim: int, phase: str) -> int:
    """Save after each step; in the second one, kill the victim and note how soon the others have an error."""
    rank, number = int(os.environ["RANK"]), len(PHASES) + PHASES[phase]
    kill_time, num_collectives = Path(folder) / "killed", 0

    def watch(name: str) -> None:
        original = getattr(dist, name)

        def watching(*args: Any, **named: Any) -> Any:
            nonlocal num_collectives
            if threading.current_thread() is not threading.main_thread():
                num_collectives += 1
                if rank == victim and num_collectives - 1 == number:
                    kill_time.write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **named)

        setattr(dist, name, watching)

    for name in ("gather_object", "scatter_object_list", "broadcast_object_list"):
        watch(name)
    trainer = Trainer(config_of(f"{folder}/run"))
    error = ""
    try:
        for _ in trainer.steps():
            trainer.save_checkpoint(wait=True)
    except Exception as raised:
        error = str(raised)
    seconds = time.time() - float(kill_time.read_text())
    (Path(folder) / f"{rank}.json").write_text(json.dumps([seconds, error]))
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "victim", "phase"),
    [
        (2, 1, "the files are reported"),
        *in_campaign(
            *((2, victim, phase) for victim in (0, 1) for phase in PHASES if (victim, PHASES[phase]) != (1, 2)),
            *((4, victim, phase) for victim, phase in zip((3, 0, 1, 2, 0), (*PHASES, "the plan is sent"), strict=True)),
        ),
    ],
)
def test_survivors_of_a_killed_rank_have_an_error_at_once(ranks: int, victim: int, phase: str, tmp_path: Path) -> None:
    ended = fork(save_until_killed, [str(tmp_path), victim, phase], tmp_path, ranks).wait(together=False)
    assert [code for rank, code in enumerate(ended.codes) if rank != victim] == [0] * (ranks - 1), ended.err
    assert ended.codes[victim] == -9
    for rank in set(range(ranks)) - {victim}:
        seconds, error = json.loads((tmp_path / f"{rank}.json").read_text())
        assert error
        assert seconds < 2, f"rank {rank}: {error}"
    code, listed = show_checkpoints(tmp_path / "run", "--verify", "--json")
    assert code == 0
    steps = [entry["step"] for entry in json.loads(listed)]
    assert steps == ([1, 2] if phase == "the end is received" else [1]), "rank 0 publishes before it sends the end"
    trainer = Trainer(config_of(str(tmp_path / "run")))
    assert trainer.load_checkpoint() == steps[-1]
    next(iter(trainer.steps()))
    trainer.close()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".w")] == []


# ---------------------------------------------------------------------------------------------------------------
# An error


def save_with_an_error(folder: str, where: str, rank: int) -> tuple[str, int]:
    """Train while one rank fails in the first save; return the message, and the newest step that was saved."""
    said: list[str] = []
    trainer = Trainer(config_of(folder, "train.steps=3", "checkpoint.every=1", "checkpoint.when_busy=wait"))
    if trainer.world.rank == rank:
        owner, name = {
            "staging": (stager.Staging, "copy"),
            "choosing what to write": (planner, "boxes_to_write"),
            "planning": (planner, "planned_tensors"),
        }[where]
        original = getattr(owner, name)

        def failing(*args: Any) -> Any:
            setattr(owner, name, original)
            raise MemoryError("no memory on purpose")

        setattr(owner, name, failing)
    collect = trainer.saver._collect
    trainer.saver._collect = lambda *args, **named: noted(collect(*args, **named))  # type: ignore[method-assign]

    def noted(result: Any) -> Any:
        said.append(result.error)
        return result

    assert trainer.fit() == 0
    trainer.close()
    (error,) = filter(None, said)
    return error, max(int(path.name[5:]) for path in Path(folder, "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("where", "rank"),
    [("staging", 1), *in_campaign(("staging", 0), ("choosing what to write", 1), ("planning", 0))],
)
def test_error_on_one_rank_is_one_message_on_all(where: str, rank: int, tmp_path: Path) -> None:
    """Training goes on, and a later save succeeds."""
    (error, step), (other_error, _) = on_ranks(2, save_with_an_error, str(tmp_path / "run"), where, rank)
    assert error == other_error
    assert f"rank {rank}: cannot" in error
    assert "no memory on purpose" in error
    assert step == 3
