"""What training starts from: weights that can be read, or random ones where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.pretrained import check_weights, is_folder_of_weights
from trainer.config.relocate import CONFIG
from trainer.config.schema import RunConfig
from trainer.errors import setting_error


def check_first_weights(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Raise UserError if the run would start from random weights where it should start from those of a folder.

    given: the keys of recipe file and command line.  A run that resumes from a checkpoint needs no first weights.
    """
    if resumes(config):
        return
    start = config.train.init_from
    if start is not None:
        if is_folder_of_weights(start):
            check_weights(start, "model.path" if given.get("model.path") else "train.init_from")
        return
    if not hasattr(config.model, "fresh") or not config.model_path:
        return  # of its own accord it draws its weights
    fresh = given.get("model.fresh")
    if not (is_true(fresh) or (fresh is None and config.model.fresh and not _fine_tunes(config))):
        check_weights(config.model_path, "model.path")


def fine_tunes(values: Mapping[str, Any]) -> bool:
    """Return whether the keys of a configuration ask for what only trained weights are good for."""
    rank = values.get("lora.rank")
    return (
        values.get("data.source") == "chat"
        or values.get("train.objective") not in (None, "tokens")
        or rank not in (None, 0, "0")
    )


def _fine_tunes(config: RunConfig) -> bool:
    return fine_tunes(
        {
            "data.source": config.data.source,
            "train.objective": config.train.objective,
            "lora.rank": config.lora.rank,
        }
    )


def is_true(value: object) -> bool:
    """Return whether a value of a recipe file or of the command line means true."""
    return str(value).lower() == "true"


def refuse_fresh_with_start(given: Mapping[str, Any], start: str) -> None:
    """Raise UserError if random weights are asked for, and also those of `train.init_from`."""
    if is_true(given.get("model.fresh")):
        rule = f"asks for random weights, but train.init_from={start} names the weights to start from"
        raise setting_error("model.fresh", True, rule, fix="leave out one of the two")


def resumes(config: RunConfig) -> bool:
    """Return whether the run will find a checkpoint to resume from, as far as the names of files tell."""
    if config.checkpoint.resume != "auto":
        return config.checkpoint.resume != "none"
    if not (config.run_dir / CONFIG).is_file():
        return False
    place = config.checkpoint.dir or str(config.run_dir / "checkpoints")
    return "://" in place or any(Path(place).glob("step_*"))
