"""Registries of models and objectives, and the import of modules that settings and other distributions name.

A stored configuration is untrusted: of the modules that it names, only those that the user allows are imported.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Collection, Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from trainer.errors import UserError, choice_error, nearest, setting_error

if TYPE_CHECKING:
    from trainer.model_spec import ModelSpec

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name, which modules register: built-in ones, those of installed distributions, and the user's own.

    kind: what the entries are, for messages.
    key: the setting that names an entry.
    package: the package whose modules register the built-in entries; modules whose names start with `_` are skipped.
    entry_points: the entry-point group in which other distributions list modules that register more.
    """

    def __init__(self, kind: str, key: str, package: str, entry_points: str) -> None:
        self.kind = kind
        self.key = key
        self.package = package
        self.entry_points = entry_points
        self._entries: dict[str, Entry] = {}
        self._modules: dict[str, str] = {}
        """The module that registered each entry, by the name of the entry."""

    def add(self, name: str, entry: Entry, module: str) -> None:
        """Register an entry, replacing any earlier one of that name.  `module` is the module that registers it."""
        self._entries[name] = entry
        self._modules[name] = module

    def load(self) -> None:
        """Import the modules that register entries: the built-in ones, then those of installed distributions."""
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{self.package}.{module.name}")
        for point in entry_points(group=self.entry_points):
            point.load()

    def all(self) -> dict[str, Entry]:
        """Return all entries in the order of their names, after importing the modules that register them."""
        self.load()
        return {name: self._entries[name] for name in sorted(self._entries)}

    def find(self, name: str, allowed_modules: Collection[str] | None = None) -> Entry:
        """Return the entry of this name: a registered name, or "package.module:name", which imports the module first.

        allowed_modules: the modules that may be imported, with their submodules, if the name is untrusted; None, for a
            name that the user gave, allows any.  Modules that are already imported may always be used.

        Raises UserError if there is no such entry, or if its module may not or cannot be imported.
        """
        module, colon, registered_name = name.rpartition(":")
        if colon:
            if allowed_modules is not None:
                check_import(self.key, name, allowed_modules)
            import_module(module, self.key, name)
        if registered_name not in self._entries:
            self.load()
        if registered_name not in self._entries:
            for allowed in allowed_modules or ():  # one of them may register it
                import_module(allowed, "--allow-import", allowed)
        if registered_name not in self._entries:
            raise self._unknown_error(name, module)
        return self._entries[registered_name]

    def _unknown_error(self, name: str, module: str) -> UserError:
        if not module:
            return choice_error(self.key, name, sorted(self._entries), f"module:NAME, or a registered {self.kind}:")
        names = [f"{module}:{entry}" for entry in sorted(self._modules) if _is_inside(self._modules[entry], [module])]
        if not names:
            return setting_error(
                self.key, name, f"{module!r} registers no {self.kind}", fix="register it in that module"
            )
        return choice_error(self.key, name, names, f"a {self.kind} that {module!r} registers:")

    def module_to_allow(self, name: str) -> str | None:
        """Return the module that another process may only import with `--allow-import` to find this entry.

        None for built-in entries and those of installed distributions, which every process finds.
        """
        module, colon, registered_name = name.rpartition(":")
        if colon:
            return module
        module = self._modules[registered_name]
        installed = ["trainer", *(point.module for point in entry_points(group=self.entry_points))]
        return None if _is_inside(module, installed) else module


# ---------------------------------------------------------------------------------------------------------------
# Models

MODELS: Registry[ModelSpec] = Registry("model", "model.name", "trainer.recipes", "meshtrainer.models")


def register(spec: ModelSpec) -> ModelSpec:
    """Register a model spec under its name, replacing any earlier one of that name; return it."""
    MODELS.add(spec.name, spec, module=sys._getframe(1).f_globals.get("__name__", ""))
    return spec


def find_model(name: str, allowed_modules: Collection[str] | None = None) -> ModelSpec:
    """Return the model spec that `model.name` names; see `Registry.find`."""
    if "/" in name:
        rule = "must be a registered model, or module:NAME, not a model id or a path"
        raise setting_error("model.name", name, rule, fix=f"name it as model.name=auto model.path={name}")
    return MODELS.find(name, allowed_modules)


def all_models() -> list[ModelSpec]:
    """Return all model specs: built-in ones, those of installed distributions, and any others registered so far."""
    return list(MODELS.all().values())


# ---------------------------------------------------------------------------------------------------------------
# Imports


def check_import(key: str, name: str, allowed_modules: Collection[str]) -> None:
    """Raise UserError unless the module in `name` (package.module:name), an untrusted setting, may be imported.

    The modules of this package, modules that are already imported, and those in `allowed_modules` with their submodules
    may be imported.
    """
    module = name.partition(":")[0]
    if module in sys.modules or _is_inside(module, ["trainer", *allowed_modules]):
        return
    rule = (
        f"a run or checkpoint names it, and importing {module!r} runs its code, which needs your permission\n"
        f"  if you trust it: --allow-import {module}, or in Python allow_import=[{module!r}]"
    )
    raise setting_error(key, name, rule)


def import_object(path: str, setting: str) -> Any:
    """Return the object at "package.module:name".  Raises UserError, naming `setting`."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise setting_error(setting, path, "must have the form package.module:name")
    module = import_module(module_name, setting, path)
    if not hasattr(module, attribute):
        suggestion = nearest(attribute, [name for name in vars(module) if not name.startswith("_")])
        rule = f"{module_name!r} has no {attribute!r}"
        raise setting_error(setting, path, rule, proposal=f"{module_name}:{suggestion}" if suggestion else None)
    return getattr(module, attribute)


def import_module(module_name: str, setting: str, value: str) -> Any:
    """Import a module.  If that fails, raises UserError with the line of the user's code where it failed."""
    if module_name.endswith(".py"):
        rule = "must name a module, not a file"
        raise setting_error(setting, value, rule, proposal=value.replace(".py", "").rpartition("/")[2])
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


def _is_inside(module: str, packages: Iterable[str]) -> bool:
    """Return whether a module is one of `packages` or a submodule of one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def add_working_directory_to_sys_path() -> None:
    """Make modules in the working directory importable.  `python -m` does this by itself; console scripts do not."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of installed distributions in a group."""
    return _all_entry_points().select(group=group)


@functools.cache
def _all_entry_points() -> metadata.EntryPoints:
    # Reads a file of each installed distribution, which takes some 30 ms for a hundred.
    return cast("metadata.EntryPoints", metadata.entry_points())
