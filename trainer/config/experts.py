"""Checks the settings of expert parallelism, lists their legal values, and resolves `mesh.expert_method=auto`.

Also warns if sharding the experts needs padding or an extra copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Literal

from trainer.config.mesh import MeshShape, nearest_divisor
from trainer.config.schema import AUTO, RunConfig
from trainer.errors import UserError, setting_error


def with_expert(config: RunConfig, expert: int, method: Literal["auto", "exchange", "gather"]) -> RunConfig:
    """Return the configuration with `mesh.expert` and `mesh.expert_method` set."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, expert=expert, expert_method=method))


def resolve_expert_method(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """Return the configuration with `mesh.expert_method=auto` resolved; unchanged if `mesh.expert` is 1 or auto.

    With `exchange`, tensor shapes depend on the data, so `train.compile=auto` becomes false.
    """
    mesh, train = config.mesh, config.train
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

    Size 1 comes first; its method does not matter and is left as configured.  If the recipe declares experts, the legal
    sizes among `expert_sizes` follow.
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
    if isinstance(config.mesh.expert, (str, bool)):
        raise setting_error("mesh.expert", config.mesh.expert, "must be a whole number, or auto", AUTO)
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
    _check_reshard(config)


def advice_on_shards(config: RunConfig, shape: MeshShape) -> str:
    """Return a warning if sharding the experts needs padding or an extra copy; otherwise an empty string.

    With more shards than experts, FSDP must divide a dimension other than the first, which needs an additional copy of
    weights and gradients.  If the number of shards is a multiple of the number of experts, each expert is split by rows
    instead (`trainer.model.row_shards`), usually without a copy; but this is not possible with an integer
    `fsdp.reshard_after_forward`.  With `mesh.expert`, each rank gathers only a few experts, which are cheap to copy.
    """
    num_experts = getattr(config.model, "num_experts", None)
    if num_experts is None or not config.spec.declares_experts(config.model):
        return ""
    if config.mesh.expert != 1 or shape.shard <= num_experts:
        return ""
    setting = config.fsdp.reshard_after_forward
    reshards_to_number = any(isinstance(entry, int) for entry in (setting if isinstance(setting, list) else [setting]))
    if shape.shard % num_experts == 0 and not reshards_to_number:
        return ""
    shard = math.gcd(shape.shard, num_experts)
    return (
        f"mesh.shard={shape.shard} is more than the {num_experts} experts of a layer, so FSDP pads them or makes "
        f"another copy of their weights and gradients; mesh.shard={shard} "
        f"mesh.replicate={shape.num_ranks // shard} avoids this, if it fits in memory"
    )


def _check_reshard(config: RunConfig) -> None:
    setting = config.fsdp.reshard_after_forward
    entries = setting if isinstance(setting, list) else [setting]
    if any(isinstance(entry, int) and entry > 1 for entry in entries):
        legal = [entry if isinstance(entry, str) else "always" for entry in entries]
        rule = f"a number of ranks to reshard to cannot be combined with mesh.expert={config.expert}"
        raise setting_error(
            "fsdp.reshard_after_forward", setting, rule, legal if isinstance(setting, list) else "always"
        )
