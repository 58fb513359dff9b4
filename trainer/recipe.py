"""Recipes describe models to the trainer; this module also holds the registry of all recipes.

A recipe is data.  It knows no mesh and no rank, and importing one imports no torch: the module with the network is
named, and loaded when it is built.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from trainer.errors import UserError, choice_error, nearest, setting_error

if TYPE_CHECKING:
    import torch
    from torch import nn

ENTRY_POINTS = "meshtrainer.recipes"
"""Entry-point group in which other distributions name the modules that register their recipes."""

Unit: TypeAlias = "str | nn.Module | tuple[str | nn.Module, ...] | list[str | nn.Module]"
"""One FSDP unit: a module, a module's dotted name (`*` stands for one part), or several to be gathered together."""


class SupportsFit(Protocol):
    """A Trainer, as far as a recipe needs to know it."""

    def fit(self) -> int: ...
    def close(self) -> None: ...


TrainerType = TypeVar("TrainerType", bound=SupportsFit)


class WeightSource(Protocol):
    """A source of weights, under the names that our model has for them; needs no process group.

    description: where it is, for messages.
    shapes, dtypes: of every tensor that it has, by name.  Of names that are tied it may have one or all.
    """

    @property
    def description(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) along dimension 0, on the CPU; of a tensor without dimensions, all of it.

        The tensor may be a view of the source's own memory: it is for reading.
        """
        ...


class Transposed(str):
    """Hugging Face's name of a matrix that is stored (in, out) there, as GPT-2's are, and is (out, in) here."""

    __slots__ = ()


class Stacked(str):
    """Hugging Face's name of the rows of a tensor of ours, each a tensor of its own there: the last `*` is the row."""

    __slots__ = ()


@dataclass(frozen=True)
class HuggingFace:
    """The Hugging Face counterpart of a recipe's model: which of their models it is, and the names of its parts there.

    model_type, architecture: of their model, for example "llama" and "LlamaForCausalLM"; or, for a recipe that builds
        models of several types, functions of the model's configuration.
    names: our name of each parameter (and persistent buffer) and theirs: {"layers.*.wq.weight":
        "model.layers.*.self_attn.q_proj.weight"}, where `*` stands for one part, the same on both sides.  A name
        wrapped in `Transposed` is of a matrix stored the other way round; one in `Stacked` is of the rows of a tensor,
        such as experts, and has one `*` more.  Or a function of the model's configuration that returns those.  Tied
        parameters are listed under all their names.
    stored: `stored(model_config, source) -> WeightSource`, or "package.module:function", where names do not say it all:
        the tensors of their files under their names, made of those of `source`, which has ours.
    config: `config(model_config) -> dict`, what config.json says of the shape.
    model_fields: `model_fields(config_json) -> dict`, the inverse: the fields of our configuration.  Raises UserError
        for a shape that the recipe cannot build.
    fixed: entries of config.json that the network has no choice about, for example {"hidden_act": "silu"}: written on
        export; a folder that says otherwise is refused.
    prefix: what their names begin with in some files and not in others, for example "transformer.".
    ignored: names (theirs) of what old files hold and no model needs, such as causal masks.
    """

    model_type: str | Callable[[Any], str]
    architecture: str | Callable[[Any], str]
    names: Mapping[str, str] | Callable[[Any], Mapping[str, str]]
    config: Callable[[Any], Mapping[str, Any]]
    model_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    ignored: Sequence[str] = ()
    stored: Callable[[Any, WeightSource], WeightSource] | str | None = None

    def model_type_of(self, model_config: Any) -> str:
        """Return what their model is called that this configuration describes."""
        return self.model_type(model_config) if callable(self.model_type) else self.model_type

    def architecture_of(self, model_config: Any) -> str:
        """Return the name of their class for the model that this configuration describes."""
        return self.architecture(model_config) if callable(self.architecture) else self.architecture


@dataclass(frozen=True)
class Recipe:
    """A model that the trainer can build, shard and fill.

    name: what `model.name` selects.
    config: dataclass of the model's fields, with defaults; a `vocab_size` field, if any, is checked against the data.
    build: `build(config) -> nn.Module`, or "package.module:function".  It is called on the meta device.  The module
        maps `tokens` (B, T) to logits (B, T, V); or, called with `targets` too, to the loss summed over the targets
        (which lets it avoid ever holding all logits).
    units: the FSDP units, in the order of the forward pass: names such as "layers.*", tuples of names for a unit of
        several modules, or a function of the model that returns these.  All other parameters belong to the root.
    trainer: the `Trainer` subclass to use, or "package.module:class"; None for `Trainer` itself.
    init: `init(module)` or `init(module, name, model)`, called for each submodule that owns parameters or buffers, to
        fill them; by default the module's own `reset_parameters()`.
    resolve: `resolve(config) -> config`, fields that others name: the shape of the model in a folder.  Called once,
        when a configuration is read from a recipe file and the command line; what it returns is kept in config.yaml.
    weights: `weights(config) -> WeightSource`, the source of the initial weights, or None to initialise them; or
        "package.module:function".  `train.init_from` takes precedence.  The source must open its files lazily: a
        resumed run does not need them.
    notes: `notes(config, model)`, phrases for the start block's line on the model; or "package.module:function".
    check: `check(config)`, raises `UserError` for fields that do not fit together (see `setting_error`).
    flops: `flops(config, seq_len)`, model FLOPs of forward and backward for one token, where attention spans
        `seq_len` tokens (with masked documents, their mean); by default
        6 x parameters outside embeddings (Kaplan et al. 2020, arXiv:2001.08361).
    hf: the mapping to Hugging Face's names; needed to export to and import from that format.
    context: declares that only `trainer.sequence.attend` and `trainer.sequence.positions` mix or count tokens, so
        ranks may hold slices of sequences (`mesh.context`).
    """

    name: str
    config: type
    build: Callable[[Any], nn.Module] | str
    units: Sequence[Unit] | Callable[[nn.Module], Sequence[Unit]] = ()
    trainer: type[SupportsFit] | str | None = None
    init: Callable[..., None] | None = None
    resolve: Callable[[Any], Any] | None = None
    weights: Callable[[Any], WeightSource | None] | str | None = None
    notes: Callable[[Any, nn.Module], Sequence[str]] | str | None = None
    check: Callable[[Any], None] | None = None
    flops: Callable[[Any, float], float] | None = None
    hf: HuggingFace | None = None
    context: bool = False

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.config):
            raise UserError(f"recipe {self.name!r}: config must be a dataclass, not {self.config!r}")
        object.__setattr__(self, "config", _with_name(self.config, self.name))

    def build_model(self, config: Any) -> nn.Module:
        """Return the network that `config` describes, on the current default device."""
        return self._function("build")(config)

    def first_weights(self, config: Any) -> WeightSource | None:
        """Return where the first weights of the model that `config` describes are; None if they are drawn."""
        return self._function("weights")(config) if self.weights is not None else None

    def stored_weights(self, config: Any, source: WeightSource) -> WeightSource | None:
        """Return the tensors of Hugging Face's files, made of our `source`; None where names say which is which."""
        if self.hf is None or self.hf.stored is None:
            return None
        path = self.hf.stored
        function = resolve(path, f"recipe {self.name!r}: hf.stored") if isinstance(path, str) else path
        return cast("WeightSource", function(config, source))

    def notes_on(self, config: Any, model: nn.Module) -> Sequence[str]:
        """Return what the start block says of the model besides its size."""
        return self._function("notes")(config, model) if self.notes is not None else ()

    def _function(self, name: str) -> Callable[..., Any]:
        function = getattr(self, name)
        return resolve(function, f"recipe {self.name!r}: {name}") if isinstance(function, str) else function

    def trainer_class(self, default: type[TrainerType]) -> type[TrainerType]:
        """Return the Trainer class of this recipe, or `default` if it has none of its own."""
        if isinstance(self.trainer, str):
            return cast("type[TrainerType]", resolve(self.trainer, f"recipe {self.name!r}: trainer"))
        return cast("type[TrainerType]", self.trainer or default)


def declare(default: Any, meaning: str, **limits: Any) -> Any:
    """Return the dataclass field of one configuration key: its default, what `--help` says, and its limits.

    Limits of numbers: `at_least`, `above`, `at_most`, `below`.  `aliases` are other names of values, which an error
    takes for what was meant: {"gpu": "cuda"}.  `form` says what a value is like where its type does not.
    With `free=True` a model's field is of training alone, as dropout is: it may be set to another value than the one
    that the weights of `train.init_from` come with.
    """
    return field(default=default, metadata={"meaning": meaning, **limits})


def check_number(key: str, value: Any, number: float, limits: Mapping[str, Any], example: object = None) -> None:
    """Raise UserError unless `number`, which is `value` or in it, is finite and within the limits of `declare`.

    `example` is a value to show where none is nearest.
    """
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise setting_error(key, "(a number of more than 63 bits)", "must be a number that fits in 64 bits")
    if not math.isfinite(number):
        raise setting_error(key, value, "must be finite", example=example)
    for word, broken in (
        ("at_least", lambda bound: number < bound),
        ("at_most", lambda bound: number > bound),
        ("above", lambda bound: number <= bound),
        ("below", lambda bound: number >= bound),
    ):
        if word in limits and broken(limits[word]):
            inside = limits[word] if word in ("at_least", "at_most") and value == number else None
            rule = f"must be {word.replace('_', ' ')} {limits[word]}"
            null = re.search(r"null: ([^;]+)", str(limits.get("meaning", "")))
            fix = f"{key}=null means {null[1]}" if null and inside is None else ""
            shown = example if inside is None and not fix else None
            raise setting_error(key, value, rule, inside, example=shown, fix=fix)


_registry: dict[str, Recipe] = {}
_registered_by: dict[str, str] = {}
"""The module that registered each recipe."""


def register(recipe: Recipe) -> Recipe:
    """Make `recipe` known under its name; a later one of the same name replaces it."""
    _registry[recipe.name] = recipe
    _registered_by[recipe.name] = sys._getframe(1).f_globals.get("__name__", "")
    return recipe


def module_to_allow(name: str) -> str | None:
    """Return the module that another process has to import before it can find this recipe; None for recipes that every
    process finds.
    """
    module, colon, _ = name.partition(":")
    if colon:
        return module
    module = _registered_by.get(name, "")
    found_by_all = ["trainer.recipes", *(entry.module for entry in entry_points(group=ENTRY_POINTS))]
    return None if any(f"{module}.".startswith(f"{known}.") for known in found_by_all) else module


def find_recipe(name: str, may_import: Collection[str] | None = None) -> Recipe:
    """Return the recipe that `model.name` asks for: a registered name, or "package.module:name".

    The second form imports the module first, which is how a model from outside this package is used from the
    command line.  `may_import`: the modules, with all that is in them, that may be imported for it; None for any, where
    the name is the user's own.  What has been imported already may be used.  Raises UserError if there is none.
    """
    module_name, colon, registered = name.partition(":")
    if colon:
        if may_import is not None:
            check_import("model.name", name, may_import)
        return _find_in_module(name, module_name, registered)
    if name not in _registry:
        load_recipes()
    for module in may_import or () if name not in _registry else ():  # one of them may register it
        _import_module(module, "--allow-import", module)
    if name not in _registry:
        if name.endswith(".py"):
            module = name.rpartition("/")[2].removesuffix(".py")
            fix = f"start from the folder of {module}.py, and give the module: model.name={module}:NAME"
            raise setting_error("model.name", name, "must be a registered model, or module:NAME, not a file", fix=fix)
        if "/" in name:
            rule = f"must be a registered model ({', '.join(sorted(_registry))}), not a model id"
            fix = f"download that model, then set model.name=auto model.path={name.rpartition('/')[2]}"
            raise setting_error("model.name", name, rule, fix=fix)
        raise choice_error("model.name", name, sorted(_registry), "a registered model:")
    return _registry[name]


def _find_in_module(name: str, module_name: str, registered: str) -> Recipe:
    if module_name.endswith(".py"):
        module = module_name.rpartition("/")[2].removesuffix(".py")
        raise setting_error("model.name", name, "must name a module, not a file", meant=f"{module}:{registered}")
    before = set(_registry)
    _import_module(module_name, "model.name", name)
    if registered not in _registry:
        made_there = [found for found, recipe in _registry.items() if recipe.config.__module__ == module_name]
        own = sorted({*made_there, *(set(_registry) - before)})
        load_recipes()
    if registered not in _registry:
        if not own:
            rule = f"{module_name!r} registers no model of that name"
            raise setting_error("model.name", name, rule, fix="call trainer.register(Recipe(...)) in that module")
        raise choice_error(
            "model.name", name, [f"{module_name}:{found}" for found in own], f"one that {module_name!r} registers:"
        )
    return _registry[registered]


def check_import(key: str, name: str, may_import: Collection[str]) -> None:
    """Raise UserError if the module in `name`, package.module:name, may not be imported for a setting from elsewhere.

    May be: what has been imported already, this package's own modules, and those of `may_import` with all in them.
    """
    module = name.partition(":")[0]
    if module in sys.modules or module.startswith("trainer."):
        return
    if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in may_import):
        rule = (
            f"a run or checkpoint names it, and importing {module!r} runs its code, which needs your permission\n"
            f"  if you trust it: --allow-import {module}, or in Python allow_import=[{module!r}]"
        )
        raise setting_error(key, name, rule)


def all_recipes() -> list[Recipe]:
    """Return every recipe that can be found: this package's, installed ones, and those registered so far."""
    load_recipes()
    return [_registry[name] for name in sorted(_registry)]


def load_recipes() -> None:
    """Import the modules that register recipes: the package's own, then those of other distributions."""
    package = importlib.import_module("trainer.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("_"):
            continue  # layers that recipes share
        importlib.import_module(f"trainer.recipes.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def resolve(path: str, setting: str) -> Any:
    """Return the object that "package.module:name" names.  Raises UserError that mentions `setting`."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise setting_error(setting, path, "must have the form package.module:name")
    module = _import_module(module_name, setting, path)
    if not hasattr(module, attribute):
        best = nearest(attribute, [name for name in vars(module) if not name.startswith("_")])
        rule = f"{module_name!r} has no {attribute!r}"
        raise setting_error(setting, path, rule, meant=f"{module_name}:{best}" if best else None)
    return getattr(module, attribute)


def add_working_folder_to_path() -> None:
    """Have modules of a user's own found in the working folder, as `python -m` does and console scripts do not."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def _import_module(module_name: str, setting: str, value: str) -> Any:
    """Return the module.  Raises UserError that says where its own code fails, whatever it raises."""
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        machinery = (__file__, importlib.__file__)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in machinery]
        own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        where = f", in {own[-1].filename}, line {own[-1].lineno}" if own else ""
        rule = f"cannot import {module_name!r} ({type(error).__name__}: {error}{where})"
        first = module_name.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == first
        fix = f"start from the folder of {first}.py, or install it" if is_missing else "correct it there"
        raise setting_error(setting, value, rule, fix=fix) from error


def _with_name(config: type, name: str) -> type:
    """Return `config` with a `name` field, so that `model.name` stands beside the model's own fields."""
    if any(f.name == "name" for f in dataclasses.fields(config)):
        return config
    frozen = config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    made = dataclasses.make_dataclass(
        config.__name__, [("name", str, field(default=name))], bases=(config,), frozen=frozen
    )
    made.__module__, made.__doc__ = config.__module__, config.__doc__
    return made
