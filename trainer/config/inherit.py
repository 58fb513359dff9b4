"""Recipe files that inherit with `recipe: PARENT`: their values override those of the parent.

Works on parsed YAML, that is, on plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.run_paths import CONFIG, is_run
from trainer.errors import setting_error

PARENT = "recipe"
_NOT_INHERITED = {"run": ("name", "dir"), "checkpoint": ("dir", "resume")}
"""Keys of a run's stored configuration that only apply to that run, by section."""


def merge_parents(
    tree: Mapping[str, Any], path: Path, find: Callable[[str], Path], read: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the sections of the recipe file at `path`, merged over those of its parents.

    A parent is written as on the command line: the name of a recipe, a path (relative to the file's folder), or a run
    folder, whose settings are inherited except for its name, folder and checkpoints.  A file that names a different
    model than its parent inherits none of the parent's model fields.  `find` returns the path of a recipe's file, and
    `read` parses the file.

    Raises UserError for a parent that does not exist, and for circular inheritance.
    """
    found, seen = dict(tree), [path.resolve()]
    while (parent := found.pop(PARENT, None)) is not None:
        rule = f"must be a recipe, a path ending in .yaml, or a run folder (in {seen[-1]})"
        if not isinstance(parent, str):
            raise setting_error(PARENT, parent, rule, example="llama_small")
        beside = seen[-1].parent / parent
        above = find(str(beside) if beside.exists() else parent).resolve()
        if above in seen:
            rule = f"is its own parent, through {', '.join(map(str, seen))}"
            raise setting_error(PARENT, parent, rule, fix="start one of them from another recipe, such as llama_small")
        found = _over(_settings(read(above), above), found)
        seen.append(above)
    return found


def _settings(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if path.name != CONFIG or not is_run(path.parent):
        return dict(tree)
    return {
        section: {key: value for key, value in values.items() if key not in _NOT_INHERITED.get(section, ())}
        if isinstance(values, Mapping)
        else values
        for section, values in tree.items()
    }


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for section, values in above.items():
        under = merged.get(section)
        if not isinstance(values, Mapping) or not isinstance(under, Mapping):
            merged[section] = under if values is None else values
        elif section == "model" and values.get("name", under.get("name")) != under.get("name"):
            merged[section] = dict(values)
        else:
            merged[section] = {**under, **values}
    return merged
