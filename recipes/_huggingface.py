"""Parsing of config.json entries shared by several recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import UserError


def parse_rope(content: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return config.json's entries for the rotary embedding, including `rope_type` and `rope_theta`.

    If the entries for old and new versions of transformers disagree, the result is what transformers would use.  Raises
    UserError for a type not in `kinds`, and for rotary embeddings that differ between layers or rotate only part of
    each head.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    rope = content.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{key}={rope}: must be the entries of one rotary embedding, the same for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise UserError(f"rope_type={kind}: this recipe supports only {' and '.join(kinds)}")
    rotated_fraction = content.get("partial_rotary_factor")
    if (rope.get("partial_rotary_factor") or (1.0 if rotated_fraction is None else rotated_fraction)) != 1.0:
        raise UserError("partial_rotary_factor: this recipe rotates all dimensions of each head")
    theta = rope.get("rope_theta", content.get("rope_theta", 10000.0))
    return {**rope, "rope_type": kind, "rope_theta": theta}


def yarn_fields(rope: Mapping[str, Any], entries: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return our configuration fields for a rotary embedding with or without YaRN.

    rope: the result of `parse_rope`.  entries: for each field, its name in config.json and its default.  Raises
    UserError for an attention factor other than YaRN's default.
    """
    fields = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return fields | {"rope_factor": 1.0}
    if rope.get("attention_factor") is not None:
        raise UserError(f"attention_factor={rope['attention_factor']}: this recipe supports only YaRN's default")
    given = {field: rope.get(entry) for field, (entry, _) in entries.items()}
    return fields | {field: entries[field][1] if value is None else value for field, value in given.items()}


def yarn_entries(config: Any, entries: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of config.json for the rotary embedding of `config`; the inverse of `yarn_fields`.

    transformers 5 reads `rope_parameters`, 4 reads `rope_theta` and `rope_scaling`; each accepts or ignores the
    other's entries.
    """
    scaling = {"rope_type": "yarn"} | {entry: getattr(config, field) for field, (entry, _) in entries.items()}
    is_scaled = config.rope_factor != 1.0
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if is_scaled else None,
        "rope_parameters": (scaling if is_scaled else {"rope_type": "default"}) | {"rope_theta": config.rope_theta},
    }


def check_quantization(content: Mapping[str, Any], method: str) -> None:
    """Raise UserError if the weights are quantized in a format other than `method`."""
    quantization = content.get("quantization_config") or {}
    stored = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if quantization and stored != method:
        raise UserError(f"quantization_config: quant_method={stored}: this recipe supports only {method}")
