"""Caches the planner's probes, because many runs plan the same tiny models.

`make_plan` accepts an existing probe. A run usually creates one; here it reuses the probe of an earlier run in this
process, or in the process that it was forked from, if everything that a trace depends on is the same.
The planner's own tests, and commands in a fresh interpreter, do not use this cache.
"""

from __future__ import annotations

import trainer.plan.forecast
from trainer.config import MeshShape, RunConfig
from trainer.plan.machine import Machine
from trainer.plan.plan import Plan, make_plan
from trainer.plan.probe import Probe

_LENGTHS = ("steps", "epochs", "global_batch_size", "micro_batch_size", "activation_checkpoint")
"""Settings of `train` that a trace does not depend on, or that are arguments of a probe."""

_probes: dict[str, Probe] = {}


def plan_with_cached_probe(config: RunConfig, mesh: MeshShape, machine: Machine) -> Plan:
    """Do what `make_plan` does, with the probe of an earlier plan if there is one."""
    train = {name: value for name, value in vars(config.train).items() if name not in _LENGTHS}
    data = config.data if config.data.arrangement == "masked" else config.data.seq_len  # how long documents are
    groups = (config.context, config.expert, config.mesh.expert_method)
    shape = (data, config.rows_per_sample, groups, machine.device_type)
    key = repr((config.recipe, config.model, config.lora, config.fsdp, config.optim, train, shape))
    if key not in _probes:
        _probes[key] = Probe(config, machine.device_type)
    return make_plan(config, mesh, machine, _probes[key])


def cache_probes() -> None:
    """Cache probes from now on, in this process and in processes forked from it."""
    trainer.plan.forecast.make_plan = plan_with_cached_probe
