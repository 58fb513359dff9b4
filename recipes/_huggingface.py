"""Parsing of config.json entries shared by several recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import UserError


def rope_of(content: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the entries of the rotary embedding, including `rope_type` and `rope_theta`.

    If old and new spellings disagree, the result is what transformers would use.  Raises UserError for a type that is
    not in `kinds`, for rotary embeddings that differ between layers or rotate only part of each head.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    rope = content.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{key}={rope}: must be the entries of one rotary embedding, the same for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise UserError(f"rope_type={kind}: this recipe supports only {' and '.join(kinds)}")
    share = content.get("partial_rotary_factor")
    if (rope.get("partial_rotary_factor") or (1.0 if share is None else share)) != 1.0:
        raise UserError("partial_rotary_factor: this recipe rotates full heads")
    theta = rope.get("rope_theta", content.get("rope_theta", 10000.0))
    return {**rope, "rope_type": kind, "rope_theta": theta}
