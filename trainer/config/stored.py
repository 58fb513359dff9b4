"""Recognizes the configurations that runs store in their folders and checkpoints, and reads them as untrusted data.

If a stored configuration names a module outside this package, that module is imported only with the user's permission.
Values with masked secrets are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config.model_folder import DeclaredModel
from trainer.errors import MASK, UserError, setting_error
from trainer.registry import check_import

CONFIG = "config.yaml"
"""File name of the stored configuration in a run folder or a checkpoint."""

_RUN_FILES = ("status.json", "metrics.jsonl")


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run folder: it has the status or the metrics of a run."""
    return any((folder / name).is_file() for name in _RUN_FILES)


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` has the manifest of a checkpoint."""
    return (folder / "manifest.json").is_file()


def is_written_by_run(path: Path) -> bool:
    """Return whether `path` is a `config.yaml` that a run wrote into its folder or into a checkpoint."""
    return path.name == CONFIG and (is_run(path.parent) or is_checkpoint(path.parent))


def run_from_best_path(path: str) -> str | None:
    """Return RUN if `path` has the form RUN/best, which means the run's best checkpoint; otherwise None.

    RUN is a folder or URL.  A path that exists is taken literally: the result is then None.
    """
    run, slash, name = path.rstrip("/").rpartition("/")
    is_best = name == "best" and slash and run and not Path(path).exists()
    return run if is_best else None


def check_imports(values: Mapping[str, Any], assignments: Collection[str], allow_import: Collection[str]) -> None:
    """Raise UserError if a configuration written by a run names a module whose import the user has not allowed.

    A key that is also given on the command line (`assignments`) is trusted.
    """
    for section, name in (("model", "name"), ("fsdp", "wrap"), ("train", "objective")):
        key, settings = f"{section}.{name}", values.get(section)
        value = settings.get(name) if isinstance(settings, Mapping) else None
        if isinstance(value, str) and ":" in value and not value.startswith("size:") and key not in assignments:
            check_import(key, value, allow_import)


def reject_masked(key: str, value: Any, path: Path) -> None:
    """Raise UserError for a command that was masked in a run's stored configuration, as it may contain a secret."""
    if key == "run.on_end" and value == MASK:
        rule = f"is not stored (in {path}), as it may hold secrets; give the command on the command line again"
        raise setting_error(key, value, rule, fix="run.on_end=COMMAND, or run.on_end=null for none")


def read_stored(text: str, origin: str = "config.yaml") -> dict[str, Any]:
    """Return a stored configuration by section, without resolving references or importing anything.

    Raises UserError, which names `origin`, if the text is not a configuration.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{origin}: not a configuration ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: not a configuration")
    return {str(key): value for key, value in tree.items()}


def read_run_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration stored in a run folder, or an empty mapping if it cannot be read."""
    try:
        return read_stored((folder / CONFIG).read_text())
    except (OSError, ValueError, UserError):
        return {}


def section_of(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a parsed configuration; empty if it is missing or has no keys."""
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def declared_model(text: str, name: str, where: str) -> DeclaredModel | None:
    """Return the model fields in a configuration written by `to_yaml`; None if its model's recipe is not `name`.

    Imports nothing that the text names.  Raises UserError, which names `where`, if the text is not a configuration.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"train.init_from: {where}: not a configuration ({error})") from error
    fields = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(fields, dict) or str(fields.pop("name", None)).rpartition(":")[2] != name:
        return None
    if "${" in str(fields):
        raise UserError(f"train.init_from: {where}: its model section refers to values outside of it")
    return DeclaredModel(where, {str(field): value for field, value in fields.items()})
