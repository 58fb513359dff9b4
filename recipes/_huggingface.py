"""Helpers for reading and writing Hugging Face's config.json, shared by several recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import UserError


def parse_rope(config_json: Mapping[str, Any], supported_types: Sequence[str]) -> dict[str, Any]:
    """Return config.json's entries for the rotary embedding, including `rope_type` and `rope_theta`.

    If `rope_scaling` is not empty, `rope_parameters` is ignored, as in transformers 5.

    Raises UserError for a `rope_type` not in `supported_types`, for separate entries per layer type, and for embeddings
    that rotate only part of each head.
    """
    key = "rope_scaling" if config_json.get("rope_scaling") else "rope_parameters"
    rope = config_json.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{key}={rope}: must be a single set of RoPE parameters, used by all layers")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in supported_types:
        raise UserError(f"rope_type={rope_type}: this recipe supports only {' and '.join(supported_types)}")
    outer_fraction = config_json.get("partial_rotary_factor")
    fraction = rope.get("partial_rotary_factor") or (1.0 if outer_fraction is None else outer_fraction)
    if fraction != 1.0:
        raise UserError(f"partial_rotary_factor={fraction}: must be 1: this recipe rotates all dimensions of each head")
    theta = rope.get("rope_theta", config_json.get("rope_theta", 10000.0))
    return {**rope, "rope_type": rope_type, "rope_theta": theta}


def parse_yarn(rope: Mapping[str, Any], entries: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the recipe's configuration fields for a rotary embedding with or without YaRN.

    rope: the result of `parse_rope`.
    entries: maps each YaRN field to the name of its entry in `rope` and the default for a missing or null entry.

    Raises UserError if YaRN's `attention_factor` is set, since the recipes compute it from other entries.
    """
    fields = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return fields | {"rope_factor": 1.0}
    if rope.get("attention_factor") is not None:
        rule = "must be null: this recipe computes it as YaRN does by default"
        raise UserError(f"attention_factor={rope['attention_factor']}: {rule}")
    values = {field: rope.get(entry) for field, (entry, _) in entries.items()}
    return fields | {field: entries[field][1] if value is None else value for field, value in values.items()}


def export_yarn(config: Any, entries: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return config.json's entries for the rotary embedding of the model that `config` describes.

    `rope_parameters` is in transformers 5's format; `rope_theta` and `rope_scaling` are in transformers 4's format.
    These entries agree, so a file with all three works with both versions.

    entries: as in `parse_yarn`; the defaults are not used.
    """
    scaling = {"rope_type": "yarn"} | {entry: getattr(config, field) for field, (entry, _) in entries.items()}
    is_scaled = config.rope_factor != 1.0
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if is_scaled else None,
        "rope_parameters": (scaling if is_scaled else {"rope_type": "default"}) | {"rope_theta": config.rope_theta},
    }


def check_quantization(config_json: Mapping[str, Any], method: str) -> None:
    """Raise UserError if the weights are quantized in a format other than `method`."""
    quantization = config_json.get("quantization_config") or {}
    stored_method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if quantization and stored_method != method:
        raise UserError(f"quantization_config: quant_method={stored_method}: this recipe supports only {method}")
