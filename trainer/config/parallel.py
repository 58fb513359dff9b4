"""Determines and checks how a run is divided among ranks: the mesh, its context, tensor and expert axes, and the batch.

Context parallelism splits each sequence among several ranks, tensor parallelism the matrices of each layer, and expert
parallelism the experts of a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from trainer.config.schema import AUTO, MeshSection, RunConfig
from trainer.errors import UserError, setting_error


@dataclass(frozen=True)
class MeshShape:
    """The resolved shape of the mesh: `replicate` copies of the model, each sharded over `shard` ranks."""

    replicate: int
    shard: int

    @property
    def has_replicas(self) -> bool:
        """True if there are several replicas, even if each is unsharded."""
        return self.replicate > 1

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def straddling_warning(self, local_world_size: int) -> str:
        """Return a warning if neither `shard` nor `local_world_size` divides the other; otherwise an empty string.

        Some shard groups then straddle nodes, and links between nodes are many times slower than those within a node.
        """
        if self.num_ranks == local_world_size or not (self.shard % local_world_size and local_world_size % self.shard):
            return ""
        first_ranks = range(0, self.num_ranks, self.shard)
        spans = {(rank + self.shard - 1) // local_world_size - rank // local_world_size + 1 for rank in first_ranks}
        groups = "some shard groups span" if len(spans) > 1 else "each shard group spans"
        suggestion = "; mesh.shard=node shards within each node" if self.num_ranks % local_world_size == 0 else ""
        return (
            f"mesh.shard={self.shard} does not divide evenly into nodes of {local_world_size} ranks: {groups} "
            f"{max(spans)} nodes, so all ranks wait for the slower links between nodes{suggestion}"
        )


def resolve_mesh_shape(mesh: MeshSection, world_size: int, local_world_size: int) -> MeshShape:
    """Return the mesh shape for `world_size` ranks.

    Raises UserError if a size is invalid, or if the sizes do not multiply to `world_size`.
    """
    replicate = mesh.replicate
    shard = mesh.shard
    if shard == "node":
        if world_size % local_world_size:
            rule = f"{world_size} ranks do not divide evenly into nodes of {local_world_size}"
            raise setting_error("mesh.shard", "node", rule, -1)
        shard = local_world_size
        replicate = -1 if replicate == 1 else replicate
    for key, size, other in (("mesh.replicate", replicate, shard), ("mesh.shard", shard, replicate)):
        if size == 0 or size < -1:
            legal = world_size // other if other > 0 and world_size % other == 0 else 1
            raise setting_error(key, size, "must be at least 1, or -1 for all remaining ranks", legal)
    if replicate == -1 and shard == -1:
        raise setting_error("mesh.replicate", -1, "only one axis can take all remaining ranks (mesh.shard=-1)", 1)
    if shard == -1:
        check_divides("mesh.replicate", replicate, world_size)
        shard = world_size // replicate
    elif replicate == -1:
        check_divides("mesh.shard", shard, world_size)
        replicate = world_size // shard
    if replicate * shard != world_size:
        key = "mesh.shard" if replicate == 1 or world_size % replicate == 0 else "mesh.replicate"
        value, other = (shard, replicate) if key == "mesh.shard" else (replicate, shard)
        legal = world_size // other if world_size % other == 0 else -1
        rule = f"mesh.replicate x mesh.shard = {replicate} x {shard} is not the number of ranks, {world_size}"
        raise setting_error(key, value, rule, legal)
    return MeshShape(replicate, shard)


def smallest_mesh(config: RunConfig) -> MeshShape:
    """Return the smallest mesh that a configuration allows, to check settings before the number of ranks is known."""
    mesh = config.mesh
    context, tensor = (size if isinstance(size, int) else 1 for size in (mesh.context, mesh.tensor))
    sizes = [*config.fsdp.reshard_sizes, context * tensor, *([mesh.expert] if isinstance(mesh.expert, int) else [])]
    shard = mesh.shard if isinstance(mesh.shard, int) and mesh.shard > 0 else math.lcm(*(max(1, n) for n in sizes))
    return MeshShape(max(1, mesh.replicate), shard)


def check_divides(key: str, value: int, world_size: int) -> None:
    """Raise UserError unless `value` divides the number of ranks."""
    if world_size % value:
        rule = f"must divide the number of ranks, {world_size}"
        raise setting_error(key, value, rule, nearest_divisor(value, world_size))


def nearest_divisor(value: int, total: int) -> int:
    """Return the divisor of `total` nearest to `value`."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - value), d))


# ---------------------------------------------------------------------------------------------------------------
# Splitting sequences: context and tensor parallelism


@dataclass(frozen=True)
class Slices:
    """Which tokens of its sequences a rank holds.

    A context-parallel group splits its sequences into `count` slices.  With `gather`, a slice consists of two pieces
    that are symmetric about the middle of the sequence, so that causal attention costs the same on every rank.  With
    `heads`, a slice is contiguous.

    A tensor-parallel group shares one such slice.  Inside the layers that it splits, each of its ranks sees all tokens
    of the slice; elsewhere, each holds one of `tensor_count` equal parts, in order.
    """

    number: int
    """Index of this rank's slice, from 0."""
    count: int
    """Number of slices per sequence; 1 without context parallelism."""
    method: str
    """`gather` or `heads`."""
    seq_len: int
    """Number of tokens in the full sequence."""
    group: str = ""
    """Name of the context-parallel process group; empty if no communication is needed."""
    regathers_in_backward: bool = False
    """Whether the backward pass gathers each block's keys and values again, so that the forward pass need not keep
    them."""
    tensor_number: int = 0
    """Index of this rank in its tensor-parallel group."""
    tensor_count: int = 1
    """Number of ranks in it."""
    tensor_group: str = ""
    """Name of the tensor-parallel process group; empty if no communication is needed."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.count * self.tensor_count

    @property
    def num_tokens(self) -> int:
        """Number of tokens per slice."""
        return self.seq_len // self.count

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The positions [start, stop), in the full sequence, of each piece of the slice."""
        if self.method == "heads" or self.count == 1:
            return [(self.number * self.num_tokens, (self.number + 1) * self.num_tokens)]
        length = self.num_tokens // 2
        return [(number * length, (number + 1) * length) for number in (self.number, 2 * self.count - 1 - self.number)]

    @property
    def own_pieces(self) -> list[tuple[int, int]]:
        """The positions [start, stop), in the full sequence, of the tokens that this rank holds between layers."""
        num_own = self.num_tokens // self.tensor_count
        first, last = self.tensor_number * num_own, (self.tensor_number + 1) * num_own
        own = []
        offset = 0  # index in the slice of a piece's first token
        for start, stop in self.pieces:
            own_start, own_stop = max(first, offset), min(last, offset + stop - start)
            if own_start < own_stop:
                own.append((start + own_start - offset, start + own_stop - offset))
            offset += stop - start
        return own


def find_slices(config: RunConfig, rank: int) -> Slices | None:
    """Return which tokens a rank holds; None if it holds whole sequences.

    `mesh.context_method` must be resolved already (`resolve_context_method`).
    """
    if config.ranks_per_sample == 1:
        return None
    return Slices(
        number=rank // config.tensor % config.context,
        count=config.context,
        method=config.mesh.context_method,
        seq_len=config.data.seq_len,
        # Recomputed blocks gather again in any case.
        regathers_in_backward=config.train.activation_checkpoint == "none",
        tensor_number=rank % config.tensor,
        tensor_count=config.tensor,
    )


def resolve_context_method(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """Return the configuration, with `mesh.context_method=auto` resolved to gather or heads if sequences are split.

    Unchanged if `mesh.context` or `mesh.tensor` is auto.
    """
    mesh = config.mesh
    if mesh.context in (1, AUTO) or mesh.tensor == AUTO or mesh.context_method != "auto":
        return config
    _, num_kv_heads = _num_heads(config)
    divides_evenly = num_kv_heads is not None and num_kv_heads % config.ranks_per_sample == 0
    fits_in_node = ranks_per_node % config.ranks_per_sample == 0
    method: Literal["gather", "heads"] = "heads" if divides_evenly and fits_in_node else "gather"
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, context_method=method))


def with_context(config: RunConfig, context: int | Literal["auto"]) -> RunConfig:
    """Return the configuration with `mesh.context` set to `context`."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, context=context))


def with_tensor(config: RunConfig, tensor: int | Literal["auto"]) -> RunConfig:
    """Return the configuration with `mesh.tensor` set to `tensor`."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tensor=tensor))


def group_choices(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> list[RunConfig]:
    """Return one configuration for each size of `mesh.tensor` and of `mesh.context`, if they are auto.

    Only sizes that the mesh, batch, sequence length and model allow, and tensor-parallel groups within a node.  Sizes
    are in ascending order, first those of `mesh.context` for the smallest `mesh.tensor`.  `mesh.context_method` is
    resolved for each `mesh.context` above 1.
    """
    choices = []
    contexts = [size for size in range(1, shape.shard + 1) if shape.shard % size == 0]
    tensors = [size for size in contexts if ranks_per_node % size == 0]
    for tensor in tensors if config.mesh.tensor == AUTO else [config.tensor]:
        for context in contexts if config.mesh.context == AUTO else [config.context]:
            candidate = resolve_context_method(with_context(with_tensor(config, tensor), context), ranks_per_node)
            with contextlib.suppress(UserError):
                check_tensor(candidate, shape)
                check_context(candidate, shape, ranks_per_node)
                check_batch(candidate, shape)
                choices.append(candidate)
    return choices


def check_context(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> None:
    """Raise UserError for a context axis that does not fit the mesh, the sequences or the model."""
    context = config.context
    method = resolve_context_method(config, ranks_per_node).mesh.context_method
    if context == 1:
        return
    num_groups = max(1, shape.shard // config.tensor)
    if num_groups % context:
        inside = f" / mesh.tensor={config.tensor}" if config.tensor > 1 else ""
        rule = f"must divide the shard axis, {shape.shard}{inside}: its ranks hold slices of the same sequences"
        raise setting_error("mesh.context", context, rule, nearest_divisor(context, num_groups))
    if not config.spec.context:
        rule = (
            f"model {config.spec.name!r} does not declare that only trainer.sequence mixes or counts its tokens "
            "(ModelSpec(context=True))"
        )
        raise setting_error("mesh.context", context, rule, 1)
    _check_objective_of_slices(config, "mesh.context", context)
    num_heads, _ = _num_heads(config)
    if method == "heads" and num_heads is not None and num_heads % config.ranks_per_sample:
        product = f"mesh.context={context}" + (f" x mesh.tensor={config.tensor}" if config.tensor > 1 else "")
        rule = f"{product} does not divide model.num_heads={num_heads}"
        raise setting_error("mesh.context_method", method, rule, "gather")
    num_parts, factor = (2 * context, "2 x ") if method == "gather" else (context, "")
    length = config.data.seq_len
    if length % num_parts:
        rule = f"must be a multiple of {num_parts}: {factor}mesh.context={context} with {method}"
        raise setting_error("data.seq_len", length, rule, max(1, round(length / num_parts)) * num_parts)


def _check_objective_of_slices(config: RunConfig, key: str, size: int) -> None:
    """Raise UserError if an objective cannot be computed by ranks that hold slices of sequences."""
    if "scores" in config.objective.needs:
        rule = f"train.objective={config.train.objective} scores the last token of a text, which one rank would hold"
        raise setting_error(key, size, rule, 1)


def _num_heads(config: RunConfig) -> tuple[int | None, int | None]:
    """Return the numbers of query heads and of key-value heads, each None if the model's configuration lacks it."""
    num_heads = getattr(config.model, "num_heads", None)
    return num_heads, getattr(config.model, "num_kv_heads", num_heads)


def _num_micro_samples(config: RunConfig, shape: MeshShape) -> int:
    """Return the number of samples in one micro-batch of all ranks; 1 per rank if `train.micro_batch_size` is auto."""
    micro = config.train.micro_batch_size
    return config.num_groups(shape.num_ranks) * (1 if micro == AUTO else int(micro))


def batch_divides(config: RunConfig, shape: MeshShape) -> bool:
    """Return whether the global batch divides evenly among the ranks."""
    return config.train.global_batch_size % _num_micro_samples(config, shape) == 0


def check_batch(config: RunConfig, shape: MeshShape, fix: str = "") -> None:
    """Raise UserError if the global batch does not divide evenly among the ranks.

    fix: what else to do, in words.
    """
    if batch_divides(config, shape):
        return
    batch = config.train.global_batch_size
    num_samples = _num_micro_samples(config, shape)
    num_groups = config.num_groups(shape.num_ranks)
    ranks = f"{num_groups} data-parallel ranks" if num_groups > 1 else "1 data-parallel rank"
    divisors = [
        f"mesh.{key}={size}" for key, size in (("context", config.context), ("tensor", config.tensor)) if size > 1
    ]
    if divisors:
        ranks = " / ".join([f"{shape.num_ranks} ranks", *divisors])
    rule = (
        f"must be {ranks} x train.micro_batch_size={num_samples // num_groups} x a whole number of accumulation steps, "
        f"so a multiple of {num_samples}"
    )
    legal = max(1, round(batch / num_samples)) * num_samples
    raise setting_error("train.global_batch_size", batch, rule, legal, fix=fix)


# ---------------------------------------------------------------------------------------------------------------
# Tensor parallelism


def check_tensor(config: RunConfig, shape: MeshShape) -> None:
    """Raise UserError for a tensor axis that does not fit the mesh, the sequences, the model or the other settings.

    Whether the axis divides the model's matrices is checked once the model is built (`trainer.model.tensor`).
    """
    tensor = config.tensor
    if tensor == 1:
        return
    if shape.shard % tensor:
        rule = f"must divide the shard axis, {shape.shard}: consecutive ranks on it share each layer's matrices"
        raise setting_error("mesh.tensor", tensor, rule, nearest_divisor(tensor, shape.shard))
    if config.spec.tensor is None:
        rule = f"model {config.spec.name!r} does not say how to split its matrices (ModelSpec(tensor=...))"
        raise setting_error("mesh.tensor", tensor, rule, 1)
    _check_objective_of_slices(config, "mesh.tensor", tensor)
    for key, number in uneven_heads(config).items():
        rule = f"must divide {key}={number}: each rank computes whole heads"
        raise setting_error("mesh.tensor", tensor, rule, nearest_divisor(tensor, math.gcd(number, shape.shard)))
    length = config.data.seq_len
    if length % config.ranks_per_sample:
        parts = f"mesh.tensor={tensor}" + (f" x mesh.context={config.context}" if config.context > 1 else "")
        nearest_length = max(1, round(length / config.ranks_per_sample)) * config.ranks_per_sample
        raise setting_error("data.seq_len", length, f"must be a multiple of {parts}", nearest_length)
    _check_works_with_tensor(config)
    _check_no_partial_reshard(config, f"mesh.tensor={tensor}")


def uneven_heads(config: RunConfig) -> dict[str, int]:
    """Return those numbers of the model's heads that `mesh.tensor` does not divide.

    They are keyed by their names: fields of the model's configuration, or entries of config.json.
    """
    fields = {f"model.{name}": getattr(config.model, name, None) for name in ("num_heads", "num_kv_heads")}
    config_json = getattr(config.model, "config", None) or {}
    config_json = config_json.get("text_config", config_json)
    entries = {name: config_json.get(name) for name in ("num_attention_heads", "num_key_value_heads")}
    numbers = {**fields, **entries}
    return {name: number for name, number in numbers.items() if isinstance(number, int) and number % config.tensor}


def _check_works_with_tensor(config: RunConfig) -> None:
    """Raise UserError for what is computed from whole rows of a matrix, which no rank of a tensor group has."""
    tensor = f"mesh.tensor={config.tensor}"
    if config.train.float8 != "none":
        rule = f"scales whole rows of weights and inputs, which {tensor} splits, so results would depend on the mesh"
        raise setting_error("train.float8", config.train.float8, rule, "none")
    if config.optim.state_dtype == "int8":
        rule = f"rounds moments in blocks of a row, and {tensor} splits rows"
        raise setting_error("optim.state_dtype", "int8", rule, "float32")
    if config.optim.name == "muon" and config.optim.muon.variant == "normuon":
        rule = f"keeps a moment for each row, and {tensor} splits rows"
        raise setting_error("optim.muon.variant", "normuon", rule, "muon")


# ---------------------------------------------------------------------------------------------------------------
# Expert parallelism


def with_expert(config: RunConfig, expert: int, method: Literal["auto", "exchange", "gather"]) -> RunConfig:
    """Return the configuration with `mesh.expert` and `mesh.expert_method` set."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, expert=expert, expert_method=method))


def resolve_expert_method(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """Return the configuration with `mesh.expert_method=auto` resolved; unchanged if `mesh.expert` is 1 or auto.

    With `exchange`, tensor shapes depend on the data, so `train.compile=auto` becomes false.
    """
    mesh = config.mesh
    train = config.train
    if mesh.expert in (1, AUTO):
        return config
    method = mesh.expert_method
    if method == "auto":
        experts_per_token = getattr(config.model, "num_chosen", None) or 1
        # In a small group, most ranks need most of the tokens anyway, and within a node, gathering them is fast.
        is_cheap = ranks_per_node % config.expert == 0 and config.expert <= experts_per_token
        method = "gather" if train.compile is True or is_cheap else "exchange"
        config = with_expert(config, config.expert, method)
    if method == "exchange" and train.compile == AUTO:
        config = dataclasses.replace(config, train=dataclasses.replace(train, compile=False))
    return config


def expert_sizes(ranks_per_node: int) -> list[int]:
    """Return the sizes of `mesh.expert` to consider, besides 1: each divisor of `ranks_per_node`, and 16, 32 and 64."""
    return sorted({*(size for size in range(2, ranks_per_node + 1) if ranks_per_node % size == 0), 16, 32, 64})


def expert_parallel_choices(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> list[RunConfig]:
    """Return one configuration for each legal `mesh.expert` and, if `mesh.expert_method` is auto, each legal method.

    Size 1 comes first; its method does not matter and is left as configured.  If the model spec declares experts, the
    legal sizes among `expert_sizes` follow.
    """
    methods: list[Literal["auto", "exchange", "gather"]] = [config.mesh.expert_method]
    if methods == ["auto"]:
        methods = ["gather", "exchange"]
    choices = [with_expert(config, 1, config.mesh.expert_method)]
    for size in expert_sizes(ranks_per_node) if config.spec.declares_experts(config.model) else []:
        for method in methods:
            candidate = resolve_expert_method(with_expert(config, size, method), ranks_per_node)
            with contextlib.suppress(UserError):
                check_expert(candidate, shape, ranks_per_node)
                choices.append(candidate)
    return choices


def check_expert(config: RunConfig, shape: MeshShape, ranks_per_node: int) -> None:
    """Raise UserError for an expert axis that does not fit the mesh, the model or the other settings."""
    expert = config.expert
    if expert == 1:
        return
    if not config.spec.declares_experts(config.model):
        rule = f"model {config.spec.name!r} declares no experts to divide among ranks (ModelSpec(experts=...))"
        raise setting_error("mesh.expert", expert, rule, 1)
    num_experts = getattr(config.model, "num_experts", None)
    if shape.shard % expert:
        rule = f"must divide the shard axis, {shape.shard}: the experts are divided among consecutive ranks on it"
        common = shape.shard if num_experts is None else math.gcd(shape.shard, num_experts)
        raise setting_error("mesh.expert", expert, rule, nearest_divisor(expert, common))
    if num_experts is not None and num_experts % expert:
        rule = f"must divide model.num_experts={num_experts}"
        raise setting_error("mesh.expert", expert, rule, nearest_divisor(expert, math.gcd(shape.shard, num_experts)))
    method = resolve_expert_method(config, ranks_per_node).mesh.expert_method
    if method == "gather" and ranks_per_node % expert:
        rule = (
            f"gathers all tokens of mesh.expert={expert} ranks, but groups of that size do not fit evenly into "
            f"nodes of {ranks_per_node} ranks"
        )
        raise setting_error("mesh.expert_method", method, rule, "exchange")
    if method == "exchange" and config.train.compile is True:
        rule = f"compiled blocks cannot exchange tokens between mesh.expert={expert} ranks: sizes depend on the tokens"
        raise setting_error("train.compile", True, rule, fix="set mesh.expert_method=gather, or train.compile=false")
    _check_no_partial_reshard(config, f"mesh.expert={expert}")


MAX_COPIES = 4
"""A stack of experts that could be divided along another dimension has at most this many copies among the shards, since
its memory grows by this factor."""


def advice_on_shards(config: RunConfig, shape: MeshShape) -> str:
    """Return a warning if sharding the experts needs padding, or copies in each gather; otherwise an empty string.

    With more shards than experts, FSDP must divide a dimension other than the first, which needs an additional copy of
    weights and gradients.  If the number of shards is a small multiple of the number of experts, several ranks hold the
    same expert instead (`trainer.model.placement`); but this is not possible with an integer
    `fsdp.reshard_after_forward`.  With `mesh.expert`, each rank gathers only a few experts, which are cheap to copy.
    """
    num_experts = getattr(config.model, "num_experts", None)
    if num_experts is None or not config.spec.declares_experts(config.model):
        return ""
    if config.mesh.expert != 1 or shape.shard <= num_experts:
        return ""
    copies, rest = divmod(shape.shard, num_experts)
    if rest == 0 and copies <= MAX_COPIES and not config.fsdp.reshard_sizes:
        return ""
    shard = math.gcd(shape.shard, num_experts)
    return (
        f"mesh.shard={shape.shard} is more than the {num_experts} experts of a layer, so FSDP pads them or makes "
        f"another copy of their weights and gradients; mesh.shard={shard} "
        f"mesh.replicate={shape.num_ranks // shard} avoids this, if it fits in memory"
    )


def _check_no_partial_reshard(config: RunConfig, axis: str) -> None:
    """Raise UserError if units reshard to a number of ranks.  axis: the setting that rules this out."""
    if all(size == 1 for size in config.fsdp.reshard_sizes):
        return
    setting = config.fsdp.reshard_after_forward
    legal: object = "always"
    if isinstance(setting, list):
        legal = [entry if isinstance(entry, str) else "always" for entry in setting]
    rule = f"a number of ranks to reshard to cannot be combined with {axis}"
    raise setting_error("fsdp.reshard_after_forward", setting, rule, legal)
