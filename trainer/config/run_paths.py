"""Paths in a configuration written by a run: resolved against the folder that the configuration is in now.

A run folder that was moved continues at its new path; a copy of a run folder continues as a separate run.  Works on
parsed YAML, that is, on plain dictionaries, and recognises run folders by the files in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError, setting_error

CONFIG = "config.yaml"
BEST = "best"
"""Last part of the path RUN/best, which refers to a run's best checkpoint."""
_RUN_FILES = ("status.json", "metrics.jsonl")
_MANIFEST = "manifest.json"


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder: a run has written its status or metrics there."""
    return any((folder / name).is_file() for name in _RUN_FILES)


def is_written_by_run(path: Path) -> bool:
    """Return whether a recipe file was written by a run, into its folder or a checkpoint, rather than by a person."""
    return path.name == CONFIG and (is_run(path.parent) or (path.parent / _MANIFEST).is_file())


def run_of_best(path: str) -> str | None:
    """Return the folder or URL of the run if `path` has the form RUN/best, else None.

    A path that exists is taken literally, and the result is None.
    """
    run, slash, name = path.rstrip("/").rpartition("/")
    is_meant = name == BEST and slash and run and not Path(path).exists()
    return run if is_meant else None


def is_another_run(stored: str, here: Path) -> bool:
    """Return whether the stored folder `stored` still holds a run, and is not the same folder as `here`.

    If so, `here` is a copy of that run.  If `stored` holds no run any more, `here` is that run after a move.
    """
    return is_run(Path(stored)) and not _is_same(Path(stored), here)


def relocated(place: str, stored_dir: str, run_dir: str) -> str:
    """Return the current location of checkpoints that were stored in `place` when the run's folder was `stored_dir`.

    Checkpoints inside the run folder moved with it to `run_dir`; a URL, or a folder elsewhere, is unchanged.
    """
    if "://" in place:
        return place
    within = os.path.relpath(os.path.abspath(place), os.path.abspath(stored_dir))
    return place if within.split(os.sep)[0] == os.pardir else os.path.normpath(os.path.join(run_dir, within))


def resolve_paths(tree: Mapping[str, Any], path: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the sections of the recipe file at `path` with the run's folders resolved to where they are now.

    given: the settings on the command line.  A file that was not written by a run is returned unchanged.  Raises
    UserError if training would use a folder or checkpoints of another run that the command line does not name.
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
        keep["resume"] = "auto"  # `none` applied to the first start; later progress is kept
    if target is folder and run.get("name") == Path(stored_dir).name:
        run["name"] = folder.absolute().name
    run["dir"] = str(target)
    return {**tree, "run": run, "checkpoint": keep}


def shared_checkpoints_rule(owner: str | Path, place: str, run_dir: str) -> str:
    """Return the error text for a run in `run_dir` that would use the checkpoint folder of the run in `owner`."""
    return (
        f"holds the checkpoints of the run in {owner}; the one in {run_dir} needs its own place\n"
        "  on the command line: checkpoint.dir=WHERE (null: in run.dir), and to continue from the newest there "
        f"checkpoint.resume={place}\n  to resume that run: run.dir={owner}"
    )


def _named(given: Mapping[str, str]) -> Path | None:
    """Return the run folder given on the command line, or None."""
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
