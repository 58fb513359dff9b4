"""The registry of model specs, and the import of modules that recipes, settings and other packages name."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Collection
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

from trainer.errors import choice_error, nearest, setting_error

if TYPE_CHECKING:
    from trainer.model_spec import ModelSpec

ENTRY_POINTS = "meshtrainer.models"
"""The entry-point group in which other distributions list modules that register recipes."""


_registry: dict[str, ModelSpec] = {}
"""The registered recipes, by name."""
_registered_by: dict[str, str] = {}
"""The module that registered each recipe, by the name of the recipe."""


def register(spec: ModelSpec) -> ModelSpec:
    """Register `recipe` under its name, replacing any earlier recipe of that name."""
    _registry[spec.name] = spec
    _registered_by[spec.name] = sys._getframe(1).f_globals.get("__name__", "")
    return spec


def module_to_allow(name: str) -> str | None:
    """Return the module that another process must import to find this recipe.

    None for built-in recipes and those of installed distributions, which every process finds.
    """
    module, colon, _ = name.partition(":")
    if colon:
        return module
    module = _registered_by.get(name, "")
    known_modules = ["trainer.recipes", *(entry.module for entry in entry_points(group=ENTRY_POINTS))]
    return None if any(f"{module}.".startswith(f"{known}.") for known in known_modules) else module


def find_model(name: str, allowed_modules: Collection[str] | None = None) -> ModelSpec:
    """Return the recipe with this `model.name`: a registered name, or "package.module:name".

    The second form first imports the module, so that models outside this package can be used from the command line.

    allowed_modules: the modules that may be imported, with their submodules; None, for a name that the user gave,
        allows any.  Modules that are already imported may always be used.

    Raises UserError if there is no such recipe.
    """
    module_name, colon, registered_name = name.partition(":")
    if colon:
        if allowed_modules is not None:
            check_import("model.name", name, allowed_modules)
        return _find_in_module(name, module_name, registered_name)
    if name not in _registry:
        load_models()
    for module in allowed_modules or () if name not in _registry else ():  # one of them may register it
        _import_module(module, "--allow-import", module)
    if name not in _registry:
        if name.endswith(".py"):
            module = name.rpartition("/")[2].removesuffix(".py")
            fix = f"start from the folder of {module}.py, and give the module: model.name={module}:NAME"
            raise setting_error("model.name", name, "must be a registered model, or module:NAME, not a file", fix=fix)
        if "/" in name:
            rule = f"must be a registered model ({', '.join(sorted(_registry))}), not a model id"
            fix = f"name it as model.name=auto model.path={name}"
            raise setting_error("model.name", name, rule, fix=fix)
        raise choice_error("model.name", name, sorted(_registry), "a registered model:")
    return _registry[name]


def _find_in_module(name: str, module_name: str, registered_name: str) -> ModelSpec:
    """Import a module, and return the recipe of this name, which another module may have registered."""
    if module_name.endswith(".py"):
        module = module_name.rpartition("/")[2].removesuffix(".py")
        raise setting_error(
            "model.name", name, "must name a module, not a file", proposal=f"{module}:{registered_name}"
        )
    earlier = set(_registry)
    _import_module(module_name, "model.name", name)
    if registered_name not in _registry:
        defined_there = [
            recipe_name for recipe_name, spec in _registry.items() if spec.config.__module__ == module_name
        ]
        names = sorted({*defined_there, *(set(_registry) - earlier)})
        load_models()
    if registered_name not in _registry:
        if not names:
            rule = f"{module_name!r} registers no model of that name"
            raise setting_error("model.name", name, rule, fix="call trainer.register(ModelSpec(...)) in that module")
        raise choice_error(
            "model.name",
            name,
            [f"{module_name}:{recipe_name}" for recipe_name in names],
            f"one that {module_name!r} registers:",
        )
    return _registry[registered_name]


def check_import(key: str, name: str, allowed_modules: Collection[str]) -> None:
    """Raise UserError unless the module in `name` (package.module:name), an untrusted setting, may be imported.

    The modules of this package, modules that are already imported, and those in `allowed_modules` with their submodules
    may be imported.
    """
    module = name.partition(":")[0]
    if module in sys.modules or module.startswith("trainer."):
        return
    if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in allowed_modules):
        rule = (
            f"a run or checkpoint names it, and importing {module!r} runs its code, which needs your permission\n"
            f"  if you trust it: --allow-import {module}, or in Python allow_import=[{module!r}]"
        )
        raise setting_error(key, name, rule)


def all_models() -> list[ModelSpec]:
    """Return all recipes: built-in ones, those of installed distributions, and any others registered so far."""
    load_models()
    return [_registry[name] for name in sorted(_registry)]


def load_models() -> None:
    """Import the modules that register recipes: the built-in ones, then those of installed distributions."""
    package = importlib.import_module("trainer.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("_"):
            continue  # code shared by recipes
        importlib.import_module(f"trainer.recipes.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def import_object(path: str, setting: str) -> Any:
    """Return the object at "package.module:name".  Raises UserError, naming `setting`."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise setting_error(setting, path, "must have the form package.module:name")
    module = _import_module(module_name, setting, path)
    if not hasattr(module, attribute):
        suggestion = nearest(attribute, [name for name in vars(module) if not name.startswith("_")])
        rule = f"{module_name!r} has no {attribute!r}"
        raise setting_error(setting, path, rule, proposal=f"{module_name}:{suggestion}" if suggestion else None)
    return getattr(module, attribute)


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of installed distributions in a group."""
    return _all_entry_points().select(group=group)


@functools.cache
def _all_entry_points() -> metadata.EntryPoints:
    # Reads a file of each installed distribution, which takes some 30 ms for a hundred.
    return cast("metadata.EntryPoints", metadata.entry_points())


def add_working_directory_to_sys_path() -> None:
    """Make modules in the working directory importable.  `python -m` does this by itself; console scripts do not."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _import_module(module_name: str, setting: str, value: str) -> Any:
    """Import a module.  If that fails, raises UserError with the line of the user's code where it failed."""
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        machinery = (__file__, importlib.__file__)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in machinery]
        user_frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        where = f", in {user_frames[-1].filename}, line {user_frames[-1].lineno}" if user_frames else ""
        rule = f"cannot import {module_name!r} ({type(error).__name__}: {error}{where})"
        first = module_name.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == first
        fix = f"start from the folder of {first}.py, or install it" if is_missing else "correct it there"
        raise setting_error(setting, value, rule, fix=fix) from error
