"""Recipes, which describe models to the trainer; their registry; and the declaration of configuration keys.

A recipe consists of data and functions that do not depend on the mesh or the rank.  Importing a built-in recipe does
not import torch: the recipe only names the module that defines the model, and that module is imported when the model is
built.  The YAML files in conf/, called recipe files, are something else: they configure runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import pkgutil
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

from trainer.errors import UserError, choice_error, nearest, setting_error

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.trainer import Trainer

ENTRY_POINTS = "meshtrainer.recipes"
"""The entry-point group in which other distributions list modules that register recipes."""

Unit: TypeAlias = "str | nn.Module | tuple[str | nn.Module, ...] | list[str | nn.Module]"
"""Selects FSDP units: a module, or a dotted name (`*` matches one part, and each match is a separate unit).

A tuple or list of these is one unit, whose modules are gathered together."""


TrainerType = TypeVar("TrainerType", bound="Trainer")


class WeightSource(Protocol):
    """A source of tensors, identified by their names in the recipe's model.  Reading needs no process group.

    description: where the weights are, for messages.
    shapes: the shape of every tensor, by name.  A tied weight may appear under one of its names or under all of them.
    dtypes: the dtype of every tensor, by name.
    """

    @property
    def description(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return rows [start, stop) along dimension 0, on the CPU; a scalar is returned whole.

        stop: None to read to the end.

        The tensor may be a view of the source's memory and must not be modified.
        """
        ...


class StoredTensors:
    """Base class for weight sources.  Implements `shapes` and `dtypes`.

    `_stored` maps the name of each tensor to an object with the attributes `shape` and `dtype`.
    """

    _stored: Mapping[str, Any]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(stored.shape) for name, stored in self._stored.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: stored.dtype for name, stored in self._stored.items()}


class Transposed(str):
    """Hugging Face name of a matrix that has shape (in, out) there, as in GPT-2, and (out, in) in the recipe's model.

    Also the name of a stack of such matrices, one per expert.
    """

    __slots__ = ()


class Stacked(str):
    """Hugging Face name of separate tensors that are stacked in the recipe's model; the last `*` matches the row."""

    __slots__ = ()


@dataclass(frozen=True)
class HuggingFace:
    """The mapping between a recipe's model and its Hugging Face counterpart.

    model_type: the Hugging Face model type, for example "llama".  A recipe that covers several model types gives a
        function of the model configuration.
    architecture: the class name of the Hugging Face model, for example "LlamaForCausalLM", or such a function.
    names: maps the name of each parameter (and persistent buffer) in the recipe's model to the Hugging Face name:
        {"layers.*.wq.weight": "model.layers.*.self_attn.q_proj.weight"}, where `*` matches the same part on both sides.
        If a matrix is stored transposed there, wrap its name in `Transposed`.  If separate tensors there, such as
        experts, are stacked into one tensor here, wrap their name in `Stacked`, with an additional `*` for the row.
        List tied parameters under all their names.  May also be a function of the model configuration that returns the
        mapping.
    stored: if renaming is not enough, `stored(model_config, source) -> WeightSource`, or "package.module:function".
        It computes the tensors in Hugging Face's files from those in `source`, which have the names in the recipe's
        model.
    output: `output(model_config, model) -> name`, returns the name of the output projection, which a new head replaces.
        Only needed if `names` does not map its weight to "lm_head.weight".  Raises UserError if transformers has no
        sequence classifier for such a model.
    config: `config(model_config) -> dict`, returns the entries of config.json.
    model_fields: `model_fields(config_json) -> dict`, the inverse: returns the fields of the model configuration.
        Raises UserError for a model that the recipe cannot build.
    entries: the entries of config.json that the recipe understands, each with the type that it must have, for example
        {"hidden_size": int, "head_dim": int | None}: those that `model_fields` reads, and those that have no effect on
        the model.  A folder with any other entry is refused, unless the entry is null, in `fixed` or `dropped`, or has
        no effect on any model (`trainer.config.pretrained.METADATA`).  None: the entries that `config` returns, of any
        type.
    fixed: entries of config.json for which the model supports only one value, for example {"hidden_act": "silu"}.
        Exports contain them, and a folder with another value is refused.
    prefix: a prefix that only some files add to Hugging Face names, for example "transformer.".
    ignored: Hugging Face names of tensors that old files contain but the model does not need, such as causal masks.
    left_out: `left_out(model_config) -> dict`, the parts of published models that the recipe's model lacks: maps the
        prefix of their tensors' names to a description for the start block, for example {"model.layers.61.":
        "multi-token prediction"}.
    dropped: entries of config.json that are accepted only if a recipe lists them here, and that are not exported:
        "quantization_config", in which case the weights are dequantized as `trainer.weights.quantized` describes, and
        "auto_map", which names code that is not run because the recipe replaces it.
    exported: entries that replace those of the original config.json on export.
    """

    model_type: str | Callable[[Any], str]
    architecture: str | Callable[[Any], str]
    names: Mapping[str, str] | Callable[[Any], Mapping[str, str]]
    config: Callable[[Any], Mapping[str, Any]]
    model_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    entries: Mapping[str, Any] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    ignored: Sequence[str] = ()
    left_out: Callable[[Any], Mapping[str, str]] | None = None
    dropped: Sequence[str] = ()
    exported: Mapping[str, Any] = field(default_factory=dict)
    stored: Callable[[Any, WeightSource], WeightSource] | str | None = None
    output: Callable[[Any, nn.Module], str] | None = None

    def model_type_of(self, model_config: Any) -> str:
        """Return the Hugging Face model type for this model configuration."""
        return self.model_type(model_config) if callable(self.model_type) else self.model_type

    def architecture_of(self, model_config: Any) -> str:
        """Return the Hugging Face class name for this model configuration."""
        return self.architecture(model_config) if callable(self.architecture) else self.architecture


@dataclass(frozen=True)
class Recipe:
    """A model that the trainer can build, shard and initialize.

    name: the value of `model.name` that selects this recipe.
    config: dataclass of the model's fields, with defaults.  A field `vocab_size`, if any, is checked against the data.
    build: `build(config) -> nn.Module`, or "package.module:function".  It is called on the meta device.  The module
        maps `tokens` (B, T) to logits (B, T, V).  If its `forward` also takes `targets`, it returns the loss summed
        over the targets, and need not materialize all logits.
    units: the FSDP units in forward order: names such as "layers.*", tuples of names for a unit of several modules, or
        a function of the model that returns these.  All other parameters belong to the root unit.
    trainer: the `Trainer` subclass to use, or "package.module:class"; None for `Trainer` itself.
    init: `init(module)` or `init(module, name, model)`, initializes the parameters and buffers that a submodule
        directly owns; the default calls the submodule's `reset_parameters()`.
    resolve: `resolve(config) -> config`, fills in fields that follow from others, such as the sizes of the model in a
        folder.  It is called when the recipe file and the command line are loaded; config.yaml stores the result.
    weights: `weights(config) -> WeightSource | None`, returns the source of the initial weights, or None to initialize
        them with `init`; or "package.module:function".  `train.init_from` takes precedence.  The source must open its
        files lazily, because a resumed run does not need them.
    notes: `notes(config, model)`, returns remarks about the model to print when a run starts; or
        "package.module:function".
    check: `check(config)`, raises `UserError` for inconsistent fields (see `setting_error`).
    flops: `flops(config, seq_len)`, returns the model's FLOPs per token in a forward and backward pass, with attention
        over `seq_len` tokens (the mean length if documents are masked); the default is 6 x the number of parameters
        outside embeddings (Kaplan et al. 2020, arXiv:2001.08361).
    hf: the mapping to Hugging Face's format, which imports and exports need.
    context: declares that the model mixes or counts tokens only with functions of `trainer.sequence` other than
        `apply_by_document`, so that ranks may hold slices of sequences (`mesh.context`).
    experts: the name of the expert modules, such as "layers.*.moe.experts".  This declares that all their parameters
        are stacked by expert along dimension 0, and that only `trainer.experts.apply_experts` calls these modules, so
        that the experts may be divided among ranks (`mesh.expert`).  If only some of the recipe's models have
        experts, this is a function of the model that returns the modules' names, and in the configurations of the other
        models `num_experts` is None.
    blocks: fused weights, which Muon orthogonalizes block by block: maps patterns of parameter names to the number of
        equal blocks, or to the number of rows of each block: {"*.attention.qkv.weight": 3}.
    """

    name: str
    config: type
    build: Callable[[Any], nn.Module] | str
    units: Sequence[Unit] | Callable[[nn.Module], Sequence[Unit]] = ()
    trainer: type[Trainer] | str | None = None
    init: Callable[..., None] | None = None
    resolve: Callable[[Any], Any] | None = None
    weights: Callable[[Any], WeightSource | None] | str | None = None
    notes: Callable[[Any, nn.Module], Sequence[str]] | str | None = None
    check: Callable[[Any], None] | None = None
    flops: Callable[[Any, float], float] | None = None
    hf: HuggingFace | None = None
    context: bool = False
    experts: str | Callable[[nn.Module], Sequence[str]] | None = None
    blocks: Mapping[str, int | Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.config):
            raise UserError(f"recipe {self.name!r}: config must be a dataclass, not {self.config!r}")
        object.__setattr__(self, "config", _with_name(self.config, self.name))

    def declares_experts(self, config: Any) -> bool:
        """Return whether the model that `config` describes has experts that may be divided among ranks."""
        return self.experts is not None and getattr(config, "num_experts", 1) is not None

    def build_model(self, config: Any) -> nn.Module:
        """Return the model that `config` describes, on the current default device."""
        return self._function("build")(config)

    def initial_weights(self, config: Any) -> WeightSource | None:
        """Return the source of the initial weights, or None if they are random."""
        return self._function("weights")(config) if self.weights is not None else None

    def stored_weights(self, config: Any, source: WeightSource) -> WeightSource | None:
        """Return the tensors for Hugging Face's files, computed from `source`; None if renaming is enough."""
        if self.hf is None or self.hf.stored is None:
            return None
        path = self.hf.stored
        function = import_object(path, f"recipe {self.name!r}: hf.stored") if isinstance(path, str) else path
        return cast("WeightSource", function(config, source))

    def notes_on(self, config: Any, model: nn.Module) -> Sequence[str]:
        """Return the remarks about the model to print when a run starts."""
        return self._function("notes")(config, model) if self.notes is not None else ()

    def _function(self, name: str) -> Callable[..., Any]:
        """Return the function in the field `name`, which may contain its import path."""
        function = getattr(self, name)
        return import_object(function, f"recipe {self.name!r}: {name}") if isinstance(function, str) else function

    def trainer_class(self, default: type[TrainerType]) -> type[TrainerType]:
        """Return the Trainer class of this recipe, or `default` if the recipe names none."""
        if isinstance(self.trainer, str):
            return cast("type[TrainerType]", import_object(self.trainer, f"recipe {self.name!r}: trainer"))
        return cast("type[TrainerType]", self.trainer or default)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern of a recipe, in which `*` stays within one part of the name.

    "layers.*" matches the blocks, not the modules inside them.
    """
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def declare(default: Any, meaning: str, **limits: Any) -> Any:
    """Return the dataclass field of one configuration key, with its default, its help text and its limits.

    limits: `at_least`, `above`, `at_most` and `below` for numbers.  `aliases` maps other names of values to the values
        that messages suggest: {"gpu": "cuda"}.  `form` describes valid values if the type alone does not.
        `training_only=True` marks a model field that only affects training, such as dropout: it may differ from the
        value that the model in `train.init_from` was trained with.
    """
    if "free" in limits:
        limits["training_only"] = limits.pop("free")  # the old name; remove in the next release
    return field(default=default, metadata={"meaning": meaning, **limits})


@dataclass(frozen=True)
class BalanceConfig:
    """Base class for configurations of mixture-of-experts models: the settings that balance the experts' load.

    See `trainer.experts.Balance` and `trainer.experts.TopKExperts`.
    """

    balance: float = declare(
        0.0, "coefficient of the load-balancing loss over the global batch; 0: none", at_least=0, training_only=True
    )
    balance_shares: Literal["exact", "last"] = declare(
        "exact",
        "fractions of tokens routed to each expert, as used in that loss: `exact`, those of this step, which takes one "
        "more forward pass per micro-batch if there are several; `last`, those of the previous step, at no cost",
        training_only=True,
    )
    balance_rate: float | None = declare(
        None,
        "amount by which each expert's bias changes after a step, to even out the experts' load; 0: constant biases; "
        "null: no biases",
        at_least=0,
        training_only=True,
    )
    sequence_balance: float = declare(
        0.0, "coefficient of the load-balancing loss within each sequence; 0: none", at_least=0, training_only=True
    )
    z_loss: float = declare(
        0.0, "coefficient of the squared log-sum-exp of the router's logits; 0: none", at_least=0, training_only=True
    )

    @property
    def needs_probs(self) -> bool:
        """Whether a loss needs the router's probabilities."""
        return self.balance > 0 or self.sequence_balance > 0


def check_number(
    key: str, value: Any, number: float, limits: Mapping[str, Any], example: Callable[[], object] = lambda: None
) -> None:
    """Raise UserError unless `number` is finite and within the key's limits (see `declare`).

    value: the entire value of the key, which is `number` or contains it.
    example: returns a value to suggest if there is no nearest legal value.
    """
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise setting_error(key, "(a number of more than 63 bits)", "must be a number that fits in 64 bits")
    if not math.isfinite(number):
        raise setting_error(key, value, "must be finite", example=example())
    for limit, is_violated in (
        ("at_least", lambda bound: number < bound),
        ("at_most", lambda bound: number > bound),
        ("above", lambda bound: number <= bound),
        ("below", lambda bound: number >= bound),
    ):
        if limit in limits and is_violated(limits[limit]):
            nearest_legal = limits[limit] if limit in ("at_least", "at_most") and value == number else None
            rule = f"must be {limit.replace('_', ' ')} {limits[limit]}"
            null = re.search(r"null: ([^;]+)", str(limits.get("meaning", "")))
            fix = f"{key}=null means {null[1]}" if null and nearest_legal is None else ""
            suggestion = example() if nearest_legal is None and not fix else None
            raise setting_error(key, value, rule, nearest_legal, example=suggestion, fix=fix)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


_registry: dict[str, Recipe] = {}
"""The registered recipes, by name."""
_registered_by: dict[str, str] = {}
"""The module that registered each recipe, by the name of the recipe."""


def register(recipe: Recipe) -> Recipe:
    """Register `recipe` under its name, replacing any earlier recipe of that name."""
    _registry[recipe.name] = recipe
    _registered_by[recipe.name] = sys._getframe(1).f_globals.get("__name__", "")
    return recipe


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


def find_recipe(name: str, allowed_modules: Collection[str] | None = None) -> Recipe:
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
        load_recipes()
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


def _find_in_module(name: str, module_name: str, registered_name: str) -> Recipe:
    """Import a module, and return the recipe of this name, which another module may have registered."""
    if module_name.endswith(".py"):
        module = module_name.rpartition("/")[2].removesuffix(".py")
        raise setting_error("model.name", name, "must name a module, not a file", meant=f"{module}:{registered_name}")
    earlier = set(_registry)
    _import_module(module_name, "model.name", name)
    if registered_name not in _registry:
        defined_there = [
            recipe_name for recipe_name, recipe in _registry.items() if recipe.config.__module__ == module_name
        ]
        names = sorted({*defined_there, *(set(_registry) - earlier)})
        load_recipes()
    if registered_name not in _registry:
        if not names:
            rule = f"{module_name!r} registers no model of that name"
            raise setting_error("model.name", name, rule, fix="call trainer.register(Recipe(...)) in that module")
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


def all_recipes() -> list[Recipe]:
    """Return all recipes: built-in ones, those of installed distributions, and any others registered so far."""
    load_recipes()
    return [_registry[name] for name in sorted(_registry)]


def load_recipes() -> None:
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
        raise setting_error(setting, path, rule, meant=f"{module_name}:{suggestion}" if suggestion else None)
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


def _with_name(config: type, name: str) -> type:
    """Return the dataclass `config` with an added `name` field, which holds `model.name`."""
    if any(f.name == "name" for f in dataclasses.fields(config)):
        return config
    frozen = config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    named = dataclasses.make_dataclass(
        config.__name__, [("name", str, field(default=name))], bases=(config,), frozen=frozen
    )
    named.__module__, named.__doc__ = config.__module__, config.__doc__
    return named
