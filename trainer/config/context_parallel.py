"""The context axis: which tokens of its sequences a rank holds, and the rules for that."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Literal

from trainer.config.mesh import MeshShape, divisor
from trainer.config.schema import RunConfig
from trainer.config.sections.limits import AUTO
from trainer.errors import UserError, setting_error


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
    regathers_in_backward: bool = False
    """Whether backward gathers a block's keys and values once more, instead of every block keeping all of its own."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a slice."""
        return self.seq_len // self.count

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The places of this rank's tokens in the sequence: the first of each piece, and the first after it."""
        if self.method == "heads":
            return [(self.number * self.num_tokens, (self.number + 1) * self.num_tokens)]
        length = self.num_tokens // 2
        return [(number * length, (number + 1) * length) for number in (self.number, 2 * self.count - 1 - self.number)]


def find_slices(config: RunConfig, rank: int) -> Slices | None:
    """Return what a rank holds of its sequences, None for all of it.  The method is settled (`with_method`)."""
    context = config.context
    if context == 1:
        return None
    again = config.train.activation_checkpoint == "none"  # blocks that are recomputed gather again in any case
    return Slices(rank % context, context, config.mesh.context_method, config.data.seq_len, regathers_in_backward=again)


def resolve_context_method(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """Return the configuration with gather or heads for `mesh.context_method=auto`, where there is a context axis."""
    mesh = config.mesh
    if mesh.context in (1, AUTO) or mesh.context_method != "auto":
        return config
    _, num_kv_heads = _heads(config)
    goes_evenly = num_kv_heads is not None and num_kv_heads % config.context == 0
    in_a_node = ranks_per_node % config.context == 0
    method: Literal["gather", "heads"] = "heads" if goes_evenly and in_a_node else "gather"
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, context_method=method))


def with_context(config: RunConfig, context: int) -> RunConfig:
    """Return the configuration with that many ranks to a sequence."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, context=context))


def context_choices(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> list[RunConfig]:
    """Return the configuration with every size of the context axis that mesh, batch, lengths and model allow.

    In the order of sizes, each with its method.
    """
    found = []
    for size in (size for size in range(1, shape.shard + 1) if shape.shard % size == 0):
        tried = resolve_context_method(with_context(config, size), ranks_per_node)
        with contextlib.suppress(UserError):
            check_context(tried, shape, ranks_per_node)
            check_batch(tried, shape)
            found.append(tried)
    return found


def check_context(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> None:
    """Raise UserError for a context axis that does not fit the mesh, the sequences or the model."""
    if isinstance(config.mesh.context, str):
        raise setting_error("mesh.context", config.mesh.context, "must be a whole number, or auto", AUTO)
    context, method = config.context, resolve_context_method(config, ranks_per_node).mesh.context_method
    if context == 1:
        return
    if shape.shard % context:
        rule = f"must divide the shard axis, {shape.shard}: consecutive ranks of it hold slices of the same sequences"
        raise setting_error("mesh.context", context, rule, divisor(context, shape.shard))
    if not config.recipe.context:
        rule = (
            f"recipe {config.recipe.name!r} does not declare that only trainer.sequence mixes or counts its tokens "
            "(Recipe(context=True))"
        )
        raise setting_error("mesh.context", context, rule, 1)
    if config.train.objective != "tokens":
        rule = f"train.objective={config.train.objective} compares whole answers, but each rank would see only slices"
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


def check_batch(config: RunConfig, shape: MeshShape) -> None:
    """Raise UserError for a global batch that the ranks cannot share."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if isinstance(micro, (str, bool)) and micro != AUTO:
        raise setting_error("train.micro_batch_size", micro, "must be a whole number, or auto", AUTO)
    micro = 1 if micro == AUTO else int(micro)
    num_groups, context = config.num_groups(shape.num_ranks), config.context
    if batch % (num_groups * micro) == 0:
        return
    ranks = f"{num_groups} data-parallel ranks" if num_groups > 1 else "1 data-parallel rank"
    if context > 1:
        ranks = f"{shape.num_ranks} ranks / mesh.context={context}"
    rule = (
        f"must be {ranks} x train.micro_batch_size={micro} x a whole number of accumulation steps, "
        f"so a multiple of {num_groups * micro}"
    )
    legal = max(1, round(batch / (num_groups * micro))) * num_groups * micro
    raise setting_error("train.global_batch_size", batch, rule, legal)
