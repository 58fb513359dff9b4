"""Loads a configuration by merging the defaults, the recipe files and the command line, and resolving derived values.

The steps that resolve values, called passes, are in `passes.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.keys import assign, check_limits, declared_keys, default_tree, parse_override, split_overrides
from trainer.config.passes import Keys, Resolution, objective_name, run_passes
from trainer.config.recipe_files import find_recipe_file, keys_of_sections, missing_model_error, read_yaml
from trainer.config.schema import RunConfig
from trainer.config.stored import CONFIG, check_imports, is_written_by_run, read_stored, reject_masked
from trainer.errors import reject_credentials, remember_secrets, setting_error
from trainer.objective import find_objective
from trainer.registry import find_model


def load_config(
    recipe: str, overrides: Sequence[str] = (), allow_import: Collection[str] = (), needs_weights: bool = True
) -> RunConfig:
    """Return the configuration of `recipe` with `key=value` overrides.

    `recipe` is a file name in conf/ without `.yaml`, a path ending in .yaml or .yml, or a run folder (for its
    `config.yaml`).  A recipe file may inherit from another with `recipe: PARENT`.  If a key is given twice, the last
    value applies.  Training with the configuration of a run folder continues that run, even if the folder has been
    moved, unless `overrides` give the run another folder or name.  A learning-rate range test (`schedule.name=range`)
    gets a folder next to the run's, so that the run itself is not touched.

    Modules named on the command line or in the user's recipe files are imported.  Files written by a run or stored in
    a checkpoint are untrusted: a module that they name is imported only if it is in `allow_import` or in `overrides`.

    If the weights in `train.init_from` come with a description of their model, the described fields replace those in
    recipe files, and model fields in `overrides` must agree with them.  A field that only affects training, or that
    `checkpoint.allow_changes` permits to differ, keeps a value set in the recipe file or `overrides`.

    `needs_weights=False` skips the check that the initial weights can be read, for commands that need only the model's
    structure or the data.

    Raises UserError for an unknown recipe or key, a wrong type, a value outside its limits, or a file that cannot be
    read.  `check_config` checks the settings against each other and against the number of ranks.
    """
    return load_with_origins(recipe, overrides, allow_import, needs_weights)[0]


def load_with_origins(
    recipe: str, overrides: Sequence[str] = (), allow_import: Collection[str] = (), needs_weights: bool = True
) -> tuple[RunConfig, Resolution]:
    """Return what `load_config` returns, and the `Resolution`, which records where each non-default value came from."""
    path = find_recipe_file(recipe)
    resolution = Resolution(path, split_overrides(overrides), allow_import=allow_import, needs_weights=needs_weights)
    tree = run_passes("files", read_yaml(path), resolution)
    if is_written_by_run(path):
        check_imports(tree, resolution.assignments, allow_import)
    remember_secrets([tree, *resolution.assignments.values()])
    for key, value in keys_of_sections(tree, path):
        if key not in resolution.assignments:
            reject_masked(key, value, path)
        resolution.values[key] = value
    return _build(resolution), resolution


def config_from_yaml(text: str, origin: str = CONFIG, allow_import: Collection[str] = ()) -> RunConfig:
    """Return the configuration stored in a checkpoint by `to_yaml`.

    The text is untrusted: of the modules that it names, only those in `allow_import` and their submodules are imported.
    Raises UserError as `load_config` does.
    """
    values = dict(keys_of_sections(read_stored(text, origin), Path(origin)))
    return _build(Resolution(Path(origin), values=values, allow_import=allow_import, is_stored=True))


def _build(resolution: Resolution) -> RunConfig:
    """Convert the values from files and the command line to their types, run the passes, and return the result."""
    keys = run_passes("keys", Keys(dict(resolution.values), dict(resolution.assignments)), resolution)
    resolution.untyped, values, assignments = keys, keys.values, keys.assignments
    name = assignments.get("model.name", values.get("model.name"))
    if name is None:
        raise missing_model_error(values, resolution.path)
    allowed_modules = resolution.allow_import if resolution.is_stored else None
    model = find_model(str(name), allowed_modules).config
    objective: type = find_objective(objective_name(keys), allowed_modules)
    tree, legal = copy.deepcopy(default_tree(model, objective)), declared_keys(model, objective)
    for key, value in values.items():
        assign(tree, legal, key, value, f" (in {resolution.path})")
    for key, text in assignments.items():
        if key in legal:
            assign(tree, legal, key, parse_override(key, text, legal[key].type), "", text)
        else:
            assign(tree, legal, key, text, "")
        resolution.origins[key] = "command line"
    try:
        config = OmegaConf.to_object(run_passes("tree", tree, resolution))
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        rule = f"cannot be resolved ({str(error).splitlines()[0]})"
        fix = "write the value itself, or refer to an existing key, such as ${run.seed}"
        raise setting_error(key, assignments.get(key, values.get(key)), rule, fix=fix) from error
    assert isinstance(config, RunConfig)
    remember_secrets(dataclasses.asdict(config))
    for section, settings in dataclasses.asdict(config).items():
        for name, value in settings.items():
            if (section, name) != ("run", "on_end"):  # a command may contain a URL with credentials
                reject_credentials(f"{section}.{name}", value)
    check_limits(config)
    if resolution.declared is not None:
        resolution.declared.check(config.model, config.checkpoint.allow_changes)
    return run_passes("config", config, resolution)
