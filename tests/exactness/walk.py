"""Trains the rows of the table, many in one process group, and compares what they did."""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.exactness.table import Row, configure
from tests.helpers.launch import on_ranks
from tests.helpers.no_plan import make_no_plan
from tests.helpers.tiny import full
from trainer import Trainer

FIELDS = ("loss", "grad_norm", "tokens")
SETTINGS = (
    "eval.every=1000",
    "eval.steps=1",
    "data.holdout=0.2",
    "checkpoint.keep_last=0",
    "run.selfcheck=false",
    # AdamW divides by gradients: with the default of 1e-8, rounding decides the sign of updates where they are zero.
    "optim.eps=1e-6",
)
"""What all rows have besides their own settings."""


# ---------------------------------------------------------------------------------------------------------------
# Many items on the same ranks


def on_each(ranks: int, function: Callable[[Any], Any], items: Mapping[str, Any], folder: Path) -> Any:
    """Return, by name, what `function(item)` returned on each rank, or the text of the error that ended the ranks.

    Forked ranks take one item after the other. If they die or have had their share, others go on with the rest.
    """
    found: dict[str, list[Any] | str] = {}
    while left := [name for name in items if name not in found]:
        share = {name: items[name] for name in left[:_ITEMS_PER_SHARE]}
        for path in folder.glob("results*.jsonl"):
            path.unlink()
        died = ""
        try:
            on_ranks(ranks, _call_each, function, share, str(folder))
        except AssertionError as error:
            died = str(error)
        by_rank = [_read_results(folder / f"results{rank}.jsonl") for rank in range(ranks)]
        complete = [name for name in share if all(name in results for results in by_rank)]
        found |= {name: [results[name] for results in by_rank] for name in complete}
        if died:
            unfinished = [name for name in share if name not in complete]
            assert unfinished, died
            found[unfinished[0]] = died
    return found


_ITEMS_PER_SHARE = 40
"""So few that ranks with much to do are not taken for hanging after `gate.PATIENCE_S`."""


def _call_each(function: Callable[[Any], Any], items: Mapping[str, Any], folder: str) -> None:
    with open(Path(folder) / f"results{os.environ['RANK']}.jsonl", "a") as file:
        for name, item in items.items():
            file.write(json.dumps([name, function(item)]) + "\n")
            file.flush()


def _read_results(path: Path) -> dict[str, Any]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


# ---------------------------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True)
class Training:
    """What each rank is to train."""

    row: Row
    folder: Path
    """Contains the data and the weights, and receives the run."""
    name: str
    """The name of the run folder."""
    mesh: tuple[str, ...]
    """Overrides in addition to the row's."""
    steps: int
    save_at: int = 0
    """The step whose state is saved; 0 for none."""
    resume: str = ""
    """A checkpoint with which the run starts; empty for none."""
    go_back_to: str = ""
    """A checkpoint that is loaded after the last step; from there it is trained to the end again. Empty for none."""


def train(task: Training) -> dict[str, Any]:
    """Train on this rank, and return what the run reports; its final weights are in a file.

    What is trained again after going back is in `resumed`.
    """
    own = [
        *task.row.overrides,
        *task.mesh,
        *SETTINGS,
        f"train.steps={task.steps}",
        *([f"checkpoint.resume={task.resume}"] if task.resume else []),
        f"run.dir={task.folder / 'runs' / task.name}",
    ]
    make_no_plan()
    config = configure(task.row.kind, task.row.features, task.folder, *own)
    trainer = config.trainer_class(Trainer)(config)
    found = train_to_the_end(trainer, task.save_at, task.folder / f"{task.name}.pt")
    if task.go_back_to:
        trainer.load_checkpoint(task.go_back_to)
        found["resumed"] = train_to_the_end(trainer, 0, task.folder / f"{task.name} resumed.pt")
    trainer.close()
    torch._dynamo.reset()
    return found


def train_to_the_end(trainer: Trainer, save_at: int, weights: Path) -> dict[str, Any]:
    """Train on, and return what `train` returns.

    save_at: the step whose state is saved; 0 for none.
    """
    records, saved = [], ""
    for record in trainer.steps():
        records.append({field: record[field] for field in FIELDS})
        if record.step == save_at:
            saved = str(trainer.save_checkpoint(wait=True))
    evaluated = trainer.evaluate()
    tensors = [*trainer.model.named_parameters(), *trainer.model.named_buffers()]
    torch.save({name: full(tensor).detach() for name, tensor in tensors}, weights)
    return {
        "records": records,
        "evaluation": evaluated and evaluated["loss"],
        "saved": saved,
        "weights": str(weights),
    }


def attempt(task: Training) -> dict[str, Any]:
    """Do what `train` does. A single rank returns an error; several end with it, since the others may wait for one."""
    try:
        return train(task)
    except Exception:
        if os.environ["WORLD_SIZE"] != "1":
            raise
        return {"error": traceback.format_exc()}


def differences(found: dict[str, Any], expected: dict[str, Any], first_step: int = 1) -> dict[str, float]:
    """Return the largest relative difference of each quantity, from `first_step` on."""
    pairs = list(zip(found["records"], expected["records"][first_step - 1 :], strict=True))
    assert pairs
    result = {field: max(_relative(one[field], other[field]) for one, other in pairs) for field in FIELDS}
    if expected["evaluation"] is not None:
        result["evaluation"] = _relative(found["evaluation"], expected["evaluation"])
    one, other = torch.load(found["weights"]), torch.load(expected["weights"])
    assert one.keys() == other.keys()
    squares = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    assert math.isfinite(squares), squares
    result["weights"] = (squares / sum(float(other[name].double().square().sum()) for name in other)) ** 0.5
    return result


def _relative(one: float, other: float) -> float:
    assert math.isfinite(one), one
    return 0.0 if one == other else abs(one - other) / max(abs(other), 1e-30)
