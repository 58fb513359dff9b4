"""Default run names: a finished run does not block a new one with a different configuration."""

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
    """Return the configuration with a usable run folder, and a note for the user if that is not the default folder.

    The default folder is used unless it holds a finished run that differs in a setting that a resume would refuse; then
    the first suitable one of NAME-2, NAME-3, ... is used.  The configuration is unchanged if the command line or the
    recipe file sets the run's name or folder, or the command line sets its checkpoint.  All ranks, and all restarts,
    get the same result.
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
    """Return the differences for which the finished run in the configuration's folder could not be resumed, if any."""
    folder = Path(config.run.dir)
    try:
        status = json.loads((folder / "status.json").read_text())
        if status.get("state") != "finished":
            return []
        refused, _ = compare_configs(config, (folder / CONFIG).read_text())
    except (OSError, ValueError, AttributeError, UserError):
        return []  # such errors are reported when the run starts
    return [line.replace(" in the checkpoint,", " there,") for line in refused]
