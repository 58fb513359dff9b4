"""The context axis: which tokens of its sequences a rank holds, and the rules for that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from trainer.config.mesh import MeshShape, divisor
from trainer.config.schema import RunConfig
from trainer.errors import setting_error


@dataclass(frozen=True)
class Slices:
    """The slices that a group of ranks cuts each of its sequences into, seen from one of the ranks.

    With `gather` a slice is two pieces, as far from the middle on both sides, so that all have as much causal attention
    to compute; with `heads` it is one.
    """

    number: int
    """Of this rank's slice, from 0."""
    count: int
    method: str
    """gather or heads."""
    seq_len: int
    """Tokens of a whole sequence."""
    group: str = ""
    """The name of the ranks' process group; empty where nothing is to be sent."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a slice."""
        return self.seq_len // self.count

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where in the sequence this rank's tokens are: the first of each piece, and the first after it."""
        if self.method == "heads":
            return [(self.number * self.num_tokens, (self.number + 1) * self.num_tokens)]
        length = self.num_tokens // 2
        return [(number * length, (number + 1) * length) for number in (self.number, 2 * self.count - 1 - self.number)]


def find_slices(config: RunConfig, rank: int) -> Slices | None:
    """Return what a rank holds of its sequences, None for all of it.  The method is settled (`with_method`)."""
    context = config.mesh.context
    if context == 1:
        return None
    return Slices(rank % context, context, config.mesh.context_method, config.data.seq_len)


def with_method(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """Return the configuration with gather or heads for `mesh.context_method=auto`, where there is a context axis."""
    mesh = config.mesh
    if mesh.context == 1 or mesh.context_method != "auto":
        return config
    _, num_kv_heads = _heads(config)
    goes_evenly = num_kv_heads is not None and num_kv_heads % mesh.context == 0
    in_a_node = ranks_per_node % mesh.context == 0
    method: Literal["gather", "heads"] = "heads" if goes_evenly and in_a_node else "gather"
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, context_method=method))


def check_context(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> None:
    """Raise UserError for a context axis that does not fit the mesh, the sequences or the model."""
    context, method = config.mesh.context, with_method(config, ranks_per_node).mesh.context_method
    if context == 1:
        return
    if shape.shard % context:
        rule = f"must divide the shard axis, {shape.shard}: its consecutive ranks hold slices of the same sequences"
        raise setting_error("mesh.context", context, rule, divisor(context, shape.shard))
    if not config.recipe.context:
        rule = (
            f"recipe {config.recipe.name!r} does not say that nothing but trainer.sequence mixes or counts its tokens "
            "(Recipe(context=True))"
        )
        raise setting_error("mesh.context", context, rule, 1)
    if config.train.objective != "tokens":
        rule = f"train.objective={config.train.objective} compares whole answers, of which a rank would see slices"
        raise setting_error("mesh.context", context, rule, 1)
    num_heads, _ = _heads(config)
    if method == "heads" and num_heads is not None and num_heads % context:
        rule = f"mesh.context={context} does not divide model.num_heads={num_heads}"
        raise setting_error("mesh.context_method", method, rule, "gather")
    parts, halves = (2 * context, "2 x ") if method == "gather" else (context, "")
    length = config.data.seq_len
    if length % parts:
        rule = f"must be a multiple of {parts}: {halves}mesh.context={context} with {method}"
        raise setting_error("data.seq_len", length, rule, max(1, round(length / parts)) * parts)


def _heads(config: RunConfig) -> tuple[int | None, int | None]:
    """Return the numbers of query heads and of key heads, None for a model whose configuration does not have them."""
    num_heads = getattr(config.model, "num_heads", None)
    return num_heads, getattr(config.model, "num_kv_heads", num_heads)
