"""The plan of a run: what its configuration means for memory, communication and time."""

from __future__ import annotations

from trainer.config import RunConfig
from trainer.plan.probe import Trace
from trainer.plan.step import Layout

_SIZES = {"float32": 4, "bfloat16": 2}


def layout_of(config: RunConfig, trace: Trace, replicate: int, shard: int) -> Layout:
    """Return how `config` lays the units of `trace` on a mesh of `replicate` x `shard` ranks."""
    fsdp = config.fsdp
    setting = fsdp.reshard_after_forward
    entries = setting if isinstance(setting, list) else [setting] * (len(trace.units) - 1)
    meaning: dict[int | str, bool] = {"default": True, "always": True, "never": False, 1: False, shard: True}
    reshard = [meaning.get(entry, int(entry) if isinstance(entry, int) else True) for entry in entries]
    root = setting == "always"
    stored = max((p.element_size for unit in trace.units for p in unit.parameters), default=4)
    return Layout(
        replicate,
        shard,
        (*reshard, root),
        param_size=_SIZES[fsdp.param_dtype],
        reduce_size=_SIZES[fsdp.reduce_dtype],
        casts=_SIZES[fsdp.param_dtype] != stored,
        cpu_offload=fsdp.cpu_offload,
        prefetch_forward=fsdp.prefetch_forward,
        prefetch_backward=fsdp.prefetch_backward,
    )
