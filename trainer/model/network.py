"""Builds the unsharded model of a run from its model spec, in the run's dtypes, with adapters and frozen parameters.

Training, planning and the commands that read a run all build its model here, so that they use the same one.  This
module also translates between our tensor names and Hugging Face's, and counts FLOPs per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.config.model_folder import find_huggingface
from trainer.config.schema import RunConfig
from trainer.config.teacher import teacher_config
from trainer.errors import UserError, nearest, setting_error
from trainer.model.head import SCORE, ScoreHead, is_score_name, replaced_output_name
from trainer.model.lora import add_adapters, name_without_adapters, parse_adapter
from trainer.model.packed import num_weights
from trainer.model.units import find_blocks
from trainer.model_spec import ModelSpec, Stacked, Transposed


def build_network(config: RunConfig) -> nn.Module:
    """Build the model of `config` on the meta device.

    Raises UserError for settings that do not fit the model, such as a layer in `lora.targets` that the model lacks.
    """
    # Settings may use Hugging Face's names as well.
    names = None if config.spec.hf is None else HuggingFaceNames(config.spec, config.model)

    def huggingface_name(name: str) -> str | None:
        return names.to_huggingface(name) if names else None

    def huggingface_layer(layer: str) -> str | None:
        parameter = huggingface_name(f"{layer}.weight") or huggingface_name(layer)
        return parameter.removesuffix(".weight") if parameter else None

    with torch.device("meta"):
        model = config.spec.build_model(config.model)
        apply_weights_dtype(model, storage_dtype(config))
        blocks = find_blocks(model, config.spec) if config.lora.rank else []
        add_adapters(model, blocks, config.lora, huggingface_layer)
        if config.objective.outputs:
            dtype = torch.float32 if config.lora.rank else None  # the dtype of adapters
            replace_head(model, config.spec, config.model, config.objective.outputs, dtype)
    freeze(model, config.train.freeze, huggingface_name)
    return model


def replace_head(
    model: nn.Module, spec: ModelSpec, model_config: Any, num_outputs: int, dtype: torch.dtype | None = None
) -> None:
    """Replace the output projection with a new `ScoreHead` that has `num_outputs` outputs.

    dtype: the dtype of the new weight; by default the dtype of the projection's weight.

    Raises UserError if the model spec does not name the output projection.
    """
    hf = spec.hf
    mapped = None if hf is None else HuggingFaceNames(spec, model_config).from_huggingface(_OUTPUT)
    if mapped is not None:
        projection = mapped.name.removesuffix(".weight")
    elif hf is not None and hf.output is not None:
        projection = hf.output(model_config, model)
    else:
        rule = f"a new head replaces the output projection, which model {spec.name!r} does not name"
        raise setting_error("model.name", spec.name, rule, fix=f"map its weight to {_OUTPUT} in ModelSpec(hf=...)")
    weight = model.get_parameter(f"{projection}.weight")
    model.set_submodule(projection, ScoreHead(weight.shape[1], num_outputs, dtype or weight.dtype))


_OUTPUT, _SCORE = "lm_head.weight", "score.weight"
"""Hugging Face's names for the weights of the output projection and of a classifier's head."""


def storage_dtype(config: RunConfig) -> str:
    """Return the dtype in which a run stores its weights, except those of adapters and packed ones.

    In a model with quantized (packed) weights, the others are frozen and only read in the compute dtype, so they are
    stored in it.
    """
    if config.lora.packs:
        return config.fsdp.param_dtype
    return (config.lora.rank and config.lora.base_dtype) or config.train.weights_dtype


def apply_weights_dtype(model: nn.Module, weights_dtype: str) -> None:
    """Convert the parameters of `model` to bfloat16, if requested; ties are preserved.

    With `float32` the parameters are not changed.  Buffers are never changed.
    """
    for parameter in model.parameters() if weights_dtype == "bfloat16" else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def freeze(model: nn.Module, patterns: Sequence[str], alias: Callable[[str], str | None] = lambda name: None) -> None:
    """Freeze the parameters that `train.freeze` matches.

    A pattern is the name of a parameter or module, with `*` for any text; a tied parameter may be matched by any of its
    names.  `alias` returns a parameter's other name, if any, which may match too.  Raises UserError for a pattern
    that matches nothing, and if no trainable parameter remains.
    """
    names_of: list[tuple[nn.Parameter, list[str]]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        base_name = name_without_adapters(name)
        names_of.append((parameter, list(dict.fromkeys(filter(None, [base_name, name, alias(base_name)])))))
    for pattern in patterns:
        globs = (pattern, f"{pattern}.*")
        matches = [p for p, names in names_of if any(fnmatchcase(name, glob) for name in names for glob in globs)]
        if not matches:
            # The modules that contain a parameter, outermost first, and its own name.
            all_names = dict.fromkeys(
                part for _, names in names_of for name in names for part in accumulate(name.split("."), "{}.{}".format)
            )
            nearest_name = nearest(pattern, all_names)
            meant = [nearest_name if item == pattern else item for item in patterns] if nearest_name else None
            raise setting_error("train.freeze", list(patterns), f"no parameter matches {pattern!r}", proposal=meant)
        for parameter in matches:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise setting_error("train.freeze", list(patterns), "leaves nothing to train", fix="name fewer parameters")


# ---------------------------------------------------------------------------------------------------------------
# Translating tensor names to and from Hugging Face's, as defined in `ModelSpec.hf`


class MappedTensor(NamedTuple):
    """Our counterpart of a Hugging Face tensor.

    name: the name of our tensor.
    is_transposed: whether Hugging Face stores its transpose.
    row: the row of our tensor that the Hugging Face tensor represents; None if it represents all of it.
    """

    name: str
    is_transposed: bool = False
    row: str | None = None


class HuggingFaceNames:
    """Translates the tensor names of one model, in both directions."""

    def __init__(self, spec: ModelSpec, model_config: Any) -> None:
        self._hf = find_huggingface(spec)
        names = self._hf.names(model_config) if callable(self._hf.names) else self._hf.names
        self._pairs = list(names.items())
        self._left_out = self._hf.left_out(model_config) if self._hf.left_out else {}
        outputs = [ours.removesuffix(".weight") for ours, theirs in names.items() if theirs == _OUTPUT]
        self._pairs += [(f"{output}.{SCORE}", _SCORE) for output in outputs]
        for ours, theirs in self._pairs:
            if ours.count("*") + isinstance(theirs, Stacked) != theirs.count("*"):
                raise UserError(f"model {spec.name!r}: hf.names: {ours!r} and {theirs!r} have a different number of *")

    def to_huggingface(self, name: str) -> str | None:
        """Return Hugging Face's name for our tensor `name`, or None if there is none.

        The result is a `Transposed` or a `Stacked` if the model spec's mapping has one.  The name of a stacked tensor
        still has `*` in place of the row number.
        """
        for ours, theirs in self._pairs:
            translated = _translate(name, ours, theirs)
            if translated is not None:
                return type(theirs)(translated[0])
        return _SCORE if is_score_name(name) else None

    def from_huggingface(self, name: str) -> MappedTensor | None:
        """Return the counterpart of Hugging Face's tensor `name`, with or without the prefix, or None."""
        for full_name in (name, self._hf.prefix + name):
            for ours, theirs in self._pairs:
                translated = _translate(full_name, theirs, ours)
                if translated is not None:
                    row = translated[1] if isinstance(theirs, Stacked) else None
                    return MappedTensor(translated[0], isinstance(theirs, Transposed), row)
        return None

    def is_ignored(self, name: str) -> bool:
        """Return whether Hugging Face's tensor `name` can be ignored."""
        full_names = (name, self._hf.prefix + name)
        return any(_translate(n, ignored, ignored) for n in full_names for ignored in self._hf.ignored)

    def left_out(self, name: str) -> str | None:
        """Return the part of the published model that tensor `name` belongs to, if the spec's model leaves it out."""
        full_names = (name, self._hf.prefix + name)
        return next(
            (part for prefix, part in self._left_out.items() if any(n.startswith(prefix) for n in full_names)), None
        )


def _translate(name: str, pattern: str, other: str) -> tuple[str, str | None] | None:
    """Return `name` in the form of `other`, and the first unused match, if any; None if `pattern` does not match.

    The text matched by each * in `pattern` replaces the corresponding * in `other`; any further * in `other` stay.
    """
    match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    if match is None:
        return None
    parts = iter(match.groups())
    return re.sub(r"\*", lambda _: next(parts, "*"), other), next(parts, None)


# ---------------------------------------------------------------------------------------------------------------
# Model FLOPs per token, without recomputation


def training_flops_per_token(config: RunConfig, model: nn.Module, seq_len: float) -> float:
    """Return the model FLOPs per token of a training step, including the objective's extra forward passes."""
    total = flops_per_token(config.spec, config.model, model, seq_len)
    total += num_extra_forward_passes(config) * _flops_if_all_trained(config.spec, config.model, model, seq_len) / 3
    if (teacher := teacher_config(config)) is not None:
        total += training_flops_per_token(teacher, build_network(teacher), seq_len) / 3
    if replaced_output_name(model) is not None and config.spec.flops:  # `flops` counts the replaced projection
        width = next(p.shape[1] for name, p in model.named_parameters() if is_score_name(name))
        total -= 6.0 * width * (config.vocab_size or 0)
    return total


def num_extra_forward_passes(config: RunConfig) -> int:
    """Return the number of forward passes without gradients per micro-batch, through models of the same size.

    A reference model adds one; a statistic over the global batch adds one for each of the models.
    """
    reference = "reference" in config.objective.needs
    return reference + (1 + reference) * config.objective.has_statistic


def _flops_if_all_trained(spec: ModelSpec, model_config: Any, model: nn.Module, seq_len: float) -> float:
    """Return the FLOPs per token of forward and backward passes if every weight is trained, without adapters."""
    if spec.flops:
        return spec.flops(model_config, seq_len)
    # Each token is multiplied by all parameters except embedding tables.
    numel, tables = num_weights(model), embedding_tables(model)
    used = [p for name, p in model.named_parameters() if id(p) not in tables and not parse_adapter(name)]
    return 6.0 * sum(numel[id(p)] for p in used)


def embedding_tables(model: nn.Module) -> set[int]:
    """Return the ids of embedding weights, including those tied to the output projection."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}


def _flops_of_adapters(model: nn.Module, model_config: Any) -> float:
    """Return the FLOPs per token of adapters; a token uses only those of its chosen experts."""
    total = 0.0
    for parameter in (p for name, p in model.named_parameters() if parse_adapter(name)):
        num_experts = parameter.shape[0] if parameter.ndim == 3 else 1
        num_chosen = getattr(model_config, "num_chosen", None) or num_experts
        total += 6.0 * parameter.numel() * min(1.0, num_chosen / num_experts)
    return total


def flops_per_token(spec: ModelSpec, model_config: Any, model: nn.Module, seq_len: float) -> float:
    """Return the model FLOPs per token of forward and backward passes: 6 per weight in a matrix, plus attention.

    `ModelSpec.flops` covers the model itself; adapters are added.  seq_len: the number of tokens that attention
    spans; if documents are masked, the mean over tokens of their document's length, usually not an integer.

    A frozen weight costs 4 instead of 6, since it has no gradient.  The backward pass stops at the first trained
    parameter: weights before it cost 2, and attention before it a third.  "Before" refers to the order of
    `model.parameters()`.  Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    base_flops = _flops_if_all_trained(spec, model_config, model, seq_len)
    total = base_flops + _flops_of_adapters(model, model_config)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return total
    numel, matrices = num_weights(model), _matmul_weights(model, with_tied_tables=spec.flops is not None)
    # In a mixture of experts, a token uses only a fraction of the weights.
    used_fraction = min(1.0, base_flops / (6.0 * sum(numel[id(p)] for p in matrices)))
    before_first_trained = {id(p) for p in takewhile(lambda parameter: not parameter.requires_grad, model.parameters())}
    frozen = sum(numel[id(p)] for p in matrices if not p.requires_grad)
    without_backward = sum(numel[id(p)] for p in matrices if id(p) in before_first_trained)
    attention = max(0.0, base_flops - 6.0 * sum(numel[id(p)] for p in matrices))
    blocks = find_blocks(model, spec)
    blocks_before = [block for block in blocks if all(id(p) in before_first_trained for p in block.parameters())]
    attention_before = attention * len(blocks_before) / max(1, len(blocks))
    return total - 2.0 * used_fraction * (frozen + without_backward) - 2.0 / 3.0 * attention_before


def _matmul_weights(model: nn.Module, with_tied_tables: bool) -> list[nn.Parameter]:
    """Return the matrices that tokens are multiplied by, without adapters.

    An embedding table counts only if a head shares it.
    """
    others = {id(p) for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    ids = others if with_tied_tables else others - embedding_tables(model)
    return [p for name, p in model.named_parameters() if id(p) in ids and p.ndim >= 2 and not parse_adapter(name)]
