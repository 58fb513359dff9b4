"""Model specs, which describe models to the trainer.  Recipe modules, in recipes/ or of the user's own, register them.

A model spec consists of data and functions that do not depend on the mesh or the rank.  Importing a built-in recipe
module does not import torch: its spec only names the module that defines the model, and that module is imported when
the model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

from trainer.errors import UserError
from trainer.registry import import_object

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.trainer import Trainer

Unit: TypeAlias = "str | nn.Module | tuple[str | nn.Module, ...] | list[str | nn.Module]"
"""Selects FSDP units: a module, or a dotted name (`*` matches one part, and each match is a separate unit).

A tuple or list of these is one unit, whose modules are gathered together."""

TensorStyle: TypeAlias = 'Literal["columns", "rows", "rows_gathered", "vocabulary", "input", "sequence"]'
"""How the ranks of a tensor-parallel group share a module's work; see `trainer.model.tensor`."""
TensorPlan: TypeAlias = "Mapping[str, TensorStyle | tuple[TensorStyle, ...]]"
"""The styles of modules, by patterns of their names."""

TrainerType = TypeVar("TrainerType", bound="Trainer")


class WeightSource(Protocol):
    """A source of tensors, identified by their names in the spec's model.  Reading needs no process group.

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
    """Hugging Face name of a matrix that has shape (in, out) there, as in GPT-2, and (out, in) in the spec's model.

    Also the name of a stack of such matrices, one per expert.
    """

    __slots__ = ()


class Stacked(str):
    """Hugging Face name of separate tensors that are stacked in the spec's model; the last `*` matches the row."""

    __slots__ = ()


@dataclass(frozen=True)
class HuggingFace:
    """The mapping between the model of a spec and its Hugging Face counterpart.

    model_type: the Hugging Face model type, for example "llama".  A spec that covers several model types gives a
        function of the model configuration.
    architecture: the class name of the Hugging Face model, for example "LlamaForCausalLM", or such a function.
    names: maps the name of each parameter (and persistent buffer) in the spec's model to the Hugging Face name:
        {"layers.*.wq.weight": "model.layers.*.self_attn.q_proj.weight"}, where `*` matches the same part on both sides.
        If a matrix is stored transposed there, wrap its name in `Transposed`.  If separate tensors there, such as
        experts, are stacked into one tensor here, wrap their name in `Stacked`, with an additional `*` for the row.
        List tied parameters under all their names.  May also be a function of the model configuration that returns the
        mapping.
    stored: if renaming is not enough, `stored(model_config, source) -> WeightSource`, or "package.module:function".
        It computes the tensors in Hugging Face's files from those in `source`, which have the names in the spec's
        model.
    output: `output(model_config, model) -> name`, returns the name of the output projection, which a new head replaces.
        Only needed if `names` does not map its weight to "lm_head.weight".  Raises UserError if transformers has no
        sequence classifier for such a model.
    config: `config(model_config) -> dict`, returns the entries of config.json.
    model_fields: `model_fields(config_json) -> dict`, the inverse: returns the fields of the model configuration.
        Raises UserError for a model that the spec cannot build.
    entries: the entries of config.json that the spec understands, each with the type that it must have, for
        example {"hidden_size": int, "head_dim": int | None}: those that `model_fields` reads, and those that have no
        effect on the model.  A folder with any other entry is refused, unless the entry is null, in `fixed` or
        `dropped`, or has no effect on any model (`trainer.config.model_folder.METADATA`).  None: the entries that
        `config` returns, of any type.
    fixed: entries of config.json for which the model supports only one value, for example {"hidden_act": "silu"}.
        Exports contain them, and a folder with another value is refused.
    prefix: a prefix that only some files add to Hugging Face names, for example "transformer.".
    ignored: Hugging Face names of tensors that old files contain but the model does not need, such as causal masks.
    left_out: `left_out(model_config) -> dict`, the parts of published models that the spec's model lacks: maps the
        prefix of their tensors' names to a description for the start block, for example {"model.layers.61.":
        "multi-token prediction"}.
    dropped: entries of config.json that are accepted only if a spec lists them here, and that are not exported:
        "quantization_config", in which case the weights are dequantized as `trainer.weights.quantized` describes, and
        "auto_map", which names code that is not run because the spec's model replaces it.
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
class ModelSpec:
    """A model that the trainer can build, shard and initialize.

    name: the value of `model.name` that selects this spec.
    config: dataclass of the model's fields, with defaults.  A field `vocab_size`, if any, is checked against the data.
    build: `build(config) -> nn.Module`, or "package.module:function".  It is called on the meta device.  The module
        maps `tokens` (B, T) to logits (B, T, V).  If its `forward` also takes `targets`, it returns the loss summed
        over the targets, and need not materialize all logits.
    units: the FSDP units in forward order: names such as "layers.*", tuples of names for a unit of several modules, or
        a function of the model that returns these.  All other parameters belong to the root unit.
    trainer: the `Trainer` subclass to use, or "package.module:class"; None for `Trainer` itself.
    init: `init(module)` or `init(module, name, model)`, initializes the parameters and buffers that a submodule
        directly owns; the default calls the submodule's `reset_parameters()`.  It is called twice for a submodule of
        which a rank cannot draw its part alone (docs/models.md).
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
    tensor: how ranks share the model's matrices (`mesh.tensor`): maps patterns of module names, such as
        "layers.*.attention.wq", to the styles of `trainer.model.tensor`, or is a function of the model that returns
        these.  Attention inside must be `trainer.sequence.attend`, with positions from
        `trainer.sequence.attention_positions`.
    experts: the name of the expert modules, such as "layers.*.moe.experts".  This declares that all their parameters
        are stacked by expert along dimension 0, and that only `trainer.experts.apply_experts` calls these modules, so
        that the experts may be divided among ranks (`mesh.expert`).  If only some of the spec's models have
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
    tensor: TensorPlan | Callable[[nn.Module], TensorPlan] | None = None
    experts: str | Callable[[nn.Module], Sequence[str]] | None = None
    blocks: Mapping[str, int | Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.config):
            raise UserError(f"model {self.name!r}: config must be a dataclass, not {self.config!r}")
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
        function = import_object(path, f"model {self.name!r}: hf.stored") if isinstance(path, str) else path
        return cast("WeightSource", function(config, source))

    def notes_on(self, config: Any, model: nn.Module) -> Sequence[str]:
        """Return the remarks about the model to print when a run starts."""
        return self._function("notes")(config, model) if self.notes is not None else ()

    def _function(self, name: str) -> Callable[..., Any]:
        """Return the function in the field `name`, which may contain its import path."""
        function = getattr(self, name)
        return import_object(function, f"model {self.name!r}: {name}") if isinstance(function, str) else function

    def trainer_class(self, default: type[TrainerType]) -> type[TrainerType]:
        """Return the Trainer class of this model spec, or `default` if it names none."""
        if isinstance(self.trainer, str):
            return cast("type[TrainerType]", import_object(self.trainer, f"model {self.name!r}: trainer"))
        return cast("type[TrainerType]", self.trainer or default)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern of a spec, in which `*` stays within one part of the name.

    "layers.*" matches the blocks, not the modules inside them.
    """
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


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
