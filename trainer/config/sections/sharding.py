"""The `mesh` and `fsdp` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections.limits import AUTO, DTYPES, NUMBER_OR
from trainer.recipe import declare


@dataclass(frozen=True)
class MeshSection:
    """The device mesh: `replicate` x `shard` (HSDP), or only `shard` if replicate is 1."""

    replicate: int = declare(1, "number of replicas of the sharded model; -1: all remaining ranks")
    shard: int | str = declare(
        -1,
        "ranks that share one replica; -1: all remaining ranks; node: the ranks of one node",
        form=NUMBER_OR + "node",
    )
    context: int | str = declare(
        1,
        "context parallelism: number of consecutive ranks on the shard axis that split each sequence; auto: "
        "let the planner choose",
        at_least=1,
        form=NUMBER_OR + AUTO,
    )
    context_method: Literal["auto", "gather", "heads"] = declare(
        "auto",
        "how slices attend to the full sequence: gather (each rank gathers keys and values), heads (ranks "
        "exchange slices for heads), or auto (heads if they divide evenly within one node, else gather)",
    )


@dataclass(frozen=True)
class FsdpSection:
    """Sharding with torch.distributed.fsdp.fully_shard, which is skipped with one shard and one dtype."""

    wrap: str = declare(
        "block",
        "FSDP units: block (those that the recipe lists), size:<parameters>, or package.module:function",
    )
    reshard_after_forward: int | str | list[int | str] = declare(
        "default",
        "default (units reshard, except the root and a final head), always, never, a number of ranks to "
        "reshard to, a list with always, never or a number for each unit in forward order, or auto (let the "
        "planner choose)",
        aliases={"true": "always", "false": "never"},
        form="default, always, never, a number of ranks, or a list of these",
    )
    param_dtype: Literal["float32", "bfloat16", "auto"] = declare(
        "float32",
        "dtype of unsharded parameters and compute; auto: bfloat16 on a GPU, else float32",
        aliases=DTYPES,
    )
    reduce_dtype: Literal["float32", "bfloat16"] = declare(
        "float32", "dtype in which gradients are reduced", aliases=DTYPES
    )
    output_dtype: Literal["float32", "bfloat16"] | None = declare(
        None, "dtype of the model's outputs; null: as computed", aliases=DTYPES
    )
    accumulate: Literal["unsharded", "sharded"] = declare(
        "unsharded",
        "gradient accumulation: unsharded (reduce once per step) or sharded (reduce after each micro-batch, "
        "which saves the memory of a full set of gradients)",
    )
    reshard_after_backward: bool = declare(
        True,
        "free gathered parameters after each micro-batch's backward pass; false: only after the last one of the step",
    )
    cpu_offload: bool = declare(False, "keep parameters, gradients and optimizer state in host memory")
    prefetch_forward: int = declare(
        0, "units to gather ahead in the forward pass; 0: FSDP's default overlap", at_least=0
    )
    separate_reduce: bool = declare(
        False,
        "reduce gradients on a separate communicator, concurrently with the gathers of the backward pass; "
        "needs torch 2.13",
    )
    prefetch_backward: int = declare(
        0, "units to gather ahead in the backward pass; 0: FSDP's default overlap (one)", at_least=0
    )
