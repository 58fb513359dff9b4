"""Configurations written by a run: they refer to the run in their current folder, even if it has moved.

A folder that was moved goes on where it is now; a copy of one goes on as a run of its own.  Knows YAML as plain
dictionaries, and folders by what lies in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError, setting_error

CONFIG = "config.yaml"
BEST = "best"
"""What comes after a run's folder where its best checkpoint is meant."""
_RECORD = ("status.json", "metrics.jsonl")
_MANIFEST = "manifest.json"


def is_run(folder: Path) -> bool:
    """Return whether a run has left its record in `folder`."""
    return any((folder / name).is_file() for name in _RECORD)


def is_written_by_run(path: Path) -> bool:
    """Return whether a recipe file is the configuration of a run or of a checkpoint, not one that a person has made."""
    return path.name == CONFIG and (is_run(path.parent) or (path.parent / _MANIFEST).is_file())


def run_of_best(path: str) -> str | None:
    """Return the folder or URL of the run of which `path` means the best checkpoint: RUN of RUN/best; None for others.

    A folder that has this name is itself.
    """
    run, slash, name = path.rstrip("/").rpartition("/")
    is_meant = name == BEST and slash and run and not Path(path).exists()
    return run if is_meant else None


def is_another_run(stored: str, here: Path) -> bool:
    """Return whether the folder that something was written for is still a run's, and not the one at `here`.

    Then `here` is a copy; if there is no such run any more, `here` was moved, and is that run.
    """
    return is_run(Path(stored)) and not _is_same(Path(stored), here)


def relocated(place: str, stored_dir: str, run_dir: str) -> str:
    """Return where checkpoints lie now that were kept in `place` when the run's folder was `stored_dir`.

    Inside of the folder they go where it goes; a URL, and what lies elsewhere, stays.
    """
    if "://" in place:
        return place
    within = os.path.relpath(os.path.abspath(place), os.path.abspath(stored_dir))
    return place if within.split(os.sep)[0] == os.pardir else os.path.normpath(os.path.join(run_dir, within))


def resolve_paths(tree: Mapping[str, Any], path: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Return what the recipe file at `path` holds, with the folders that it means; `given` is on the command line.

    Of any file but those that a run has written, that is what stands in it.  Raises UserError where going on would
    train in a folder, or with checkpoints, that belong to another run and were not named.
    """
    run, keep = _section(tree, "run"), _section(tree, "checkpoint")
    stored_dir, folder = run.get("dir"), path.parent
    is_of_checkpoint = (folder / _MANIFEST).is_file()
    if path.name != CONFIG or not isinstance(stored_dir, str) or not (is_of_checkpoint or is_run(folder)):
        return dict(tree)
    target = _named(given)
    if target is None and is_of_checkpoint:
        raise UserError(
            f"recipe={path}: is the configuration of a checkpoint, written by the run in {stored_dir}\n"
            f"  to start a new run: add run.name=NAME, and checkpoint.resume={folder} to continue from that "
            f"checkpoint\n  to resume that run: recipe={stored_dir}"
        )
    is_itself = target is None or (not is_of_checkpoint and _is_same(target, folder))
    target = target or folder
    if "checkpoint.dir" not in given and isinstance(keep.get("dir"), str):
        place = relocated(keep["dir"], stored_dir, str(target))
        stays_apart = place == keep["dir"] and not _is_same(target, Path(stored_dir))
        if stays_apart and (not is_itself or is_another_run(stored_dir, folder)):
            owner = stored_dir if is_of_checkpoint or is_another_run(stored_dir, folder) else folder
            raise setting_error("checkpoint.dir", place, shared_checkpoints_rule(owner, place, str(target)))
        keep["dir"] = place
    if is_itself and (keep.get("resume") == "none" or _holds_checkpoints(folder)):
        keep["resume"] = "auto"  # how it began; what it has achieved since is not thrown away
    if target is folder and run.get("name") == Path(stored_dir).name:
        run["name"] = folder.absolute().name
    run["dir"] = str(target)
    return {**tree, "run": run, "checkpoint": keep}


def shared_checkpoints_rule(owner: str | Path, place: str, run_dir: str) -> str:
    """Return the rule, and what to do, where a run in `run_dir` would take the checkpoints of the one in `owner`."""
    return (
        f"holds the checkpoints of the run in {owner}; the one in {run_dir} needs its own place\n"
        "  on the command line: checkpoint.dir=WHERE (null: in run.dir), and to go on from the newest there "
        f"checkpoint.resume={place}\n  to resume that run: run.dir={owner}"
    )


def _named(given: Mapping[str, str]) -> Path | None:
    """Return the folder that the command line names, if it does."""
    if given.get("run.dir"):
        return Path(given["run.dir"])
    return Path("runs") / given["run.name"] if given.get("run.name") else None


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = tree.get(name)
    return dict(values) if isinstance(values, Mapping) else {}


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()


def _holds_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*"))
