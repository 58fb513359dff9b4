"""Default names of runs: a finished run does not block one with another configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from trainer.config.changes import compare_configs
from trainer.config.load import default_folder, find_recipe_file
from trainer.config.run_paths import CONFIG
from trainer.config.schema import RunConfig
from trainer.errors import UserError


def find_free_name(config: RunConfig, recipe: str, overrides: Sequence[str]) -> tuple[RunConfig, str]:
    """Return the configuration with a folder that it can train in, and a sentence if that is not the usual one.

    The usual one is taken, unless the run in it has finished and differs in a setting that a resume refuses; then the
    first of NAME-2, NAME-3, ... of which that is not so.  Nothing changes for a run whose name, folder or checkpoint is
    given, on the command line or in its recipe file.  All ranks and all restarts find the same.
    """
    given = {override.partition("=")[0] for override in overrides}
    usual = find_recipe_file(recipe).stem
    is_unnamed = config.run.name == usual and config.run.dir == default_folder(usual)
    if not is_unnamed or given & {"run.name", "run.dir", "checkpoint.resume", "checkpoint.dir"}:
        return config, ""
    first = _in_the_way(config)
    if not first:
        return config, ""
    for number in count(2):
        name = f"{config.run.name}-{number}"
        named = replace(config, run=replace(config.run, name=name, dir=default_folder(name)))
        if not _in_the_way(named):
            break
    more = f" and {len(first) - 2} more" if len(first) > 2 else ""
    what = "; ".join(first[:2]) + more
    return named, f"{config.run.dir} is finished, with another configuration ({what}), so this run uses {named.run.dir}"


def _in_the_way(config: RunConfig) -> list[str]:
    """Return what a resume of the run in the configuration's folder would refuse, if that has finished."""
    folder = Path(config.run.dir)
    try:
        status = json.loads((folder / "status.json").read_text())
        if status.get("state") != "finished":
            return []
        refused, _ = compare_configs(config, (folder / CONFIG).read_text())
    except (OSError, ValueError, AttributeError, UserError):
        return []  # what is wrong there is found when the run begins
    return [line.replace(" in the checkpoint,", " there,") for line in refused]
