"""Context parallelism: which tokens of its sequences a rank holds, and the rules for `mesh.context`."""

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
    """How a context-parallel group splits its sequences, as seen from one of its ranks.

    With `gather` a slice consists of two pieces at equal distance from the middle of the sequence, so that causal
    attention costs the same on every rank; with `heads` a slice is contiguous.
    """

    number: int
    """Index of this rank's slice, from 0."""
    count: int
    """Number of slices per sequence."""
    method: str
    """`gather` or `heads`."""
    seq_len: int
    """Tokens of the full sequence."""
    group: str = ""
    """Name of the process group of these ranks; empty if no communication is needed."""
    regathers_in_backward: bool = False
    """Whether the backward pass gathers each block's keys and values again, instead of storing them since forward."""

    @property
    def num_tokens(self) -> int:
        """Tokens per slice."""
        return self.seq_len // self.count

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The [start, stop) positions of each piece of this rank's slice in the sequence."""
        if self.method == "heads":
            return [(self.number * self.num_tokens, (self.number + 1) * self.num_tokens)]
        length = self.num_tokens // 2
        return [(number * length, (number + 1) * length) for number in (self.number, 2 * self.count - 1 - self.number)]


def find_slices(config: RunConfig, rank: int) -> Slices | None:
    """Return the slices of a rank's sequences, or None without context parallelism.

    `mesh.context_method` must be resolved already (`resolve_context_method`).
    """
    context = config.context
    if context == 1:
        return None
    again = config.train.activation_checkpoint == "none"  # recomputed blocks gather again anyway
    return Slices(rank % context, context, config.mesh.context_method, config.data.seq_len, regathers_in_backward=again)


def resolve_context_method(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """Resolve `mesh.context_method=auto` to gather or heads if sequences are split; return the configuration."""
    mesh = config.mesh
    if mesh.context in (1, AUTO) or mesh.context_method != "auto":
        return config
    _, num_kv_heads = _heads(config)
    divides_evenly = num_kv_heads is not None and num_kv_heads % config.context == 0
    in_a_node = ranks_per_node % config.context == 0
    method: Literal["gather", "heads"] = "heads" if divides_evenly and in_a_node else "gather"
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, context_method=method))


def with_context(config: RunConfig, context: int) -> RunConfig:
    """Return the configuration with `mesh.context` set to `context`."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, context=context))


def context_choices(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> list[RunConfig]:
    """Return one configuration for each `mesh.context` that the mesh, batch, sequence length and model allow.

    Sizes ascend, and `mesh.context_method` is resolved for each.
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
    """Return the numbers of query heads and of key/value heads; None if the model's configuration lacks them."""
    num_heads = getattr(config.model, "num_heads", None)
    return num_heads, getattr(config.model, "num_kv_heads", num_heads)


def check_batch(config: RunConfig, shape: MeshShape) -> None:
    """Raise UserError if the global batch does not divide evenly among the ranks."""
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
