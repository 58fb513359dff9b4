"""Helpers for reading and writing Hugging Face's config.json, shared by several recipe modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError

NUMBER = int | float
"""The type of entries that transformers reads as whole numbers too; for most it requires a decimal point."""


@dataclass(frozen=True)
class Entry:
    """An entry of config.json that holds one field of the model's configuration.

    name: the entry's name.
    type: the type that transformers requires, for example `int | None`.
    default: the value that transformers uses if the entry is missing.
    """

    name: str
    type: Any
    default: Any


def read_fields(config_json: Mapping[str, Any], fields: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the value of each field: that of its entry in config.json, or its default."""
    return {field: config_json.get(entry.name, entry.default) for field, entry in fields.items()}


def write_fields(config: Any, fields: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the entries of config.json for the fields of `config`."""
    return {entry.name: getattr(config, field) for field, entry in fields.items()}


def types_of(fields: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the type of each entry, by its name, for `HuggingFace.entries`."""
    return {entry.name: entry.type for entry in fields.values()}


def check_padding(config_json: Mapping[str, Any], vocab_size: int) -> None:
    """Raise UserError if the padding token is not in the vocabulary: transformers cannot build such an embedding."""
    padding = config_json.get("pad_token_id")
    if padding is not None and not -vocab_size <= padding < vocab_size:
        raise UserError(f"pad_token_id={padding}: must be below vocab_size={vocab_size}, or null")


def check_layer_types(config_json: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Raise UserError if `layer_types` is given and is not `expected`: one type for each layer of the model."""
    given = config_json.get("layer_types")
    if given is None:
        return
    if len(given) != len(expected):
        raise UserError(f"layer_types: has {len(given)} layers, but num_hidden_layers is {len(expected)}")
    for layer, (kind, only) in enumerate(zip(given, expected, strict=True)):
        if kind != only:
            raise UserError(f"layer_types: layer {layer} has {kind}; this model supports only {only} there")


# ---------------------------------------------------------------------------------------------------------------
# Rotary embeddings

ROPE_ENTRIES = {
    **{"rope_theta": NUMBER | None, "rope_scaling": dict | None, "rope_parameters": dict | None},
    **{"partial_rotary_factor": NUMBER | None, "original_max_position_embeddings": int},
}
"""The types of config.json's entries for the rotary embedding, which `parse_rope` reads."""

_ORIGINAL_LENGTH, _FRACTION = "original_max_position_embeddings", "partial_rotary_factor"
YARN_ENTRIES = ("factor", _ORIGINAL_LENGTH, "beta_fast", "beta_slow", "truncate")
"""The entries of `rope_parameters` for YaRN that all models with YaRN understand."""


def parse_rope(
    config_json: Mapping[str, Any],
    supported: Mapping[str, Collection[str]],
    max_len: int,
    *,
    theta: float = 10000.0,
    missing: Mapping[str, Any] | None = None,
    fraction: float | None = None,
) -> dict[str, Any]:
    """Return config.json's entries for the rotary embedding, with transformers' values for missing ones.

    The result includes `rope_type`, `rope_theta`, `partial_rotary_factor` and, if the frequencies are scaled,
    `original_max_position_embeddings`.  If `rope_scaling` is not empty, `rope_parameters` is ignored, as in
    transformers 5.

    supported: maps each supported `rope_type` to the entries for it that the model understands, besides `rope_theta`.
    max_len: the value of `max_position_embeddings`.
    theta: the default `rope_theta`.
    missing: the entries if config.json has neither `rope_scaling` nor `rope_parameters`.
    fraction: the default `partial_rotary_factor` of a model that may rotate only part of each head; None for a model
        that rotates all of it.

    Raises UserError for an unsupported `rope_type`, for entries that the model does not understand or that differ
    between layer types, if a required entry is missing, and for a fraction that the model does not support.
    """
    key = "rope_scaling" if config_json.get("rope_scaling") else "rope_parameters"
    given = config_json.get(key)
    rope = dict((missing or {}) if given is None else given)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{key}={rope}: must be a single set of RoPE parameters, used by all layers")
    rope_type: Any = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in supported:
        raise UserError(f"rope_type={rope_type}: this model supports only {' and '.join(supported)}")
    known = {"rope_type", "type", "rope_theta", _FRACTION, *supported[rope_type]}
    for name, value in rope.items():
        if name not in known and value is not None:
            rule = f"this model does not know this entry for rope_type={rope_type}"
            raise UserError(f"{key}.{name}={value}: {rule}, and it may change what the model computes")
    if rope_type != "default":
        if "factor" not in rope:
            raise UserError(f"{key}: has no factor, which rope_type={rope_type} needs")
        if _ORIGINAL_LENGTH in rope and rope[_ORIGINAL_LENGTH] is None:
            raise UserError(f"{key}.{_ORIGINAL_LENGTH}=null: must be a number, or missing")
        rope[_ORIGINAL_LENGTH] = config_json.get(_ORIGINAL_LENGTH, rope.get(_ORIGINAL_LENGTH, max_len))
    outer_fraction = config_json.get(_FRACTION, fraction)
    found_fraction = rope.get(_FRACTION, 1.0 if outer_fraction is None else outer_fraction)
    if not isinstance(found_fraction, NUMBER) or (fraction is None and found_fraction != 1):
        rule = "this model rotates all dimensions of each head" if fraction is None else "must be a number"
        raise UserError(f"{_FRACTION}={found_fraction}: {rule}")
    found_theta = rope.get("rope_theta", config_json.get("rope_theta", theta))
    return {**rope, "rope_type": rope_type, "rope_theta": found_theta, _FRACTION: found_fraction}


def parse_yarn(rope: Mapping[str, Any], entries: Mapping[str, str]) -> dict[str, Any]:
    """Return the model's configuration fields for a rotary embedding with or without YaRN.

    Missing, null and zero entries mean what they mean in transformers; in particular, `truncate` is true if it is
    missing, but false if it is null.

    rope: the result of `parse_rope`.
    entries: maps each YaRN field to the name of its entry in `rope`.
    """
    fields = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return fields | {"rope_factor": 1.0}
    truncate = rope.get("truncate", True)
    values = {
        "factor": rope["factor"],
        _ORIGINAL_LENGTH: rope[_ORIGINAL_LENGTH],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "truncate": False if truncate is None else truncate,
        "mscale": rope.get("mscale") or 0.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }
    return fields | {field: values[entry] for field, entry in entries.items()}


def export_yarn(config: Any, entries: Mapping[str, str]) -> dict[str, Any]:
    """Return config.json's entries for the rotary embedding of the model that `config` describes.

    `rope_parameters` is in transformers 5's format; `rope_theta` and `rope_scaling` are in transformers 4's format.
    These entries agree, so a file with all three works with both versions.

    entries: as in `parse_yarn`.
    """
    scaling = {"rope_type": "yarn"} | {entry: getattr(config, field) for field, entry in entries.items()}
    is_scaled = config.rope_factor != 1.0
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if is_scaled else None,
        "rope_parameters": (scaling if is_scaled else {"rope_type": "default"}) | {"rope_theta": config.rope_theta},
    }


# ---------------------------------------------------------------------------------------------------------------
# Quantized weights


def check_quantization(config_json: Mapping[str, Any], method: str) -> None:
    """Raise UserError if the weights are quantized in a format other than `method`."""
    quantization = config_json.get("quantization_config") or {}
    stored_method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if quantization and stored_method != method:
        raise UserError(f"quantization_config: quant_method={stored_method}: this model supports only {method}")
