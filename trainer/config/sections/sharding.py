"""Sections of the device mesh and of FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections.limits import AUTO, DTYPES, NUMBER_OR
from trainer.recipe import declare


@dataclass(frozen=True)
class MeshSection:
    """The device mesh: `replicate` x `shard` (HSDP), or only `shard` where replicate is 1."""

    replicate: int = declare(1, "number of replicas of the sharded model; -1: all remaining ranks")
    shard: int | str = declare(
        -1, "ranks that share one copy; -1: all remaining ranks; node: the ranks of one node", form=NUMBER_OR + "node"
    )
    context: int | str = declare(
        1,
        "consecutive ranks of the shard axis that hold slices of the same sequences; auto: the planner's choice",
        at_least=1,
        form=NUMBER_OR + AUTO,
    )
    context_method: Literal["auto", "gather", "heads"] = declare(
        "auto",
        "the way slices attend to their whole sequence: gather (each rank gathers its keys and values), heads (slices "
        "are exchanged for heads), or auto (heads where they go evenly and the ranks are of one node, else gather)",
    )


@dataclass(frozen=True)
class FsdpSection:
    """Sharding of the model (torch.distributed.fsdp.fully_shard)."""

    wrap: str = declare("block", "units: block (the recipe's), size:<parameters>, or package.module:function")
    reshard_after_forward: int | str | list[int | str] = declare(
        "default",
        "default (units reshard, but neither the root nor a head that comes last), always, never, a number of ranks to "
        "reshard to, a list with one of always, never, a number for each unit in the order of the forward pass, or "
        "auto (the planner's choice)",
        aliases={"true": "always", "false": "never"},
        form="default, always, never, a number of ranks, or a list of these",
    )
    param_dtype: Literal["float32", "bfloat16", "auto"] = declare(
        "float32",
        "dtype of unsharded parameters and of compute; auto: bfloat16 on a GPU, else float32",
        aliases=DTYPES,
    )
    reduce_dtype: Literal["float32", "bfloat16"] = declare(
        "float32", "dtype in which gradients are reduced", aliases=DTYPES
    )
    output_dtype: Literal["float32", "bfloat16"] | None = declare(
        None, "dtype of the outputs; null: as computed", aliases=DTYPES
    )
    accumulate: Literal["unsharded", "sharded"] = declare(
        "unsharded",
        "gradients between micro-batches: unsharded are reduced once a step; sharded after each micro-batch, which "
        "takes no memory for a whole model's gradients",
    )
    reshard_after_backward: bool = declare(
        True, "free gathered parameters after each micro-batch's backward; false: keep them until the step's last"
    )
    cpu_offload: bool = declare(False, "keep parameters, gradients and optimizer state in host memory")
    prefetch_forward: int = declare(0, "units gathered ahead in forward; 0: FSDP's own overlap", at_least=0)
    separate_reduce: bool = declare(
        False, "reduce gradients on a communicator of their own, beside the gathers of the backward pass; torch 2.13"
    )
    prefetch_backward: int = declare(0, "units gathered ahead in backward; 0: FSDP's own overlap (one)", at_least=0)
