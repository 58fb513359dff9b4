"""A plan for each run, and the same tiny models again and again: what a plan is made from is kept for the next run.

`make_plan` takes a probe that is there already.  A run makes one of its own; here it takes the one of an earlier run in
this process, or in the one that it was forked from, if the model and all else that a trace depends on are the same.
The planner's own tests, and commands in an interpreter of their own, do without.
"""

from __future__ import annotations

import trainer.plan.forecast
from trainer.config import MeshShape, RunConfig
from trainer.plan.machine import Machine
from trainer.plan.plan import Plan, make_plan
from trainer.plan.probe import Probe

_LENGTHS = ("steps", "epochs", "global_batch_size", "micro_batch_size", "activation_checkpoint")
"""Settings of `train` that a trace does not depend on, or that a probe is asked with."""

_probes: dict[str, Probe] = {}


def planned_again(config: RunConfig, mesh: MeshShape, machine: Machine) -> Plan:
    """Do what `make_plan` does, with the probe of an earlier plan."""
    train = {name: value for name, value in vars(config.train).items() if name not in _LENGTHS}
    data = config.data if config.data.arrangement == "masked" else config.data.seq_len  # how long documents are
    groups = (config.context, config.expert, config.mesh.expert_method)
    shape = (data, config.rows_per_sample, groups, machine.device_type)
    key = repr((config.recipe, config.model, config.lora, config.fsdp, config.optim, train, shape))
    if key not in _probes:
        _probes[key] = Probe(config, machine.device_type)
    return make_plan(config, mesh, machine, _probes[key])


def keep_probes() -> None:
    """From now on, in this process and in those that are forked from it."""
    trainer.plan.forecast.make_plan = planned_again
