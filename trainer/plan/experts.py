"""Estimates whether expert parallelism (`mesh.expert`) would pay off, and what balancing the experts' load costs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from trainer.config.parallel import (
    MeshShape,
    expert_parallel_choices,
    resolve_expert_method,
    with_expert,
)
from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.model.network import build_network
from trainer.model.shard import check_experts
from trainer.model.units import find_units
from trainer.plan.estimate import estimate_step
from trainer.plan.plan import Plan, make_plan

_MIN_GAIN = 0.02
"""Smallest relative reduction in step time that makes a change worth recommending."""


def advice_on_experts(plan: Plan) -> Iterator[str]:
    """Yield lines on what `mesh.expert` would change, for a sharded model with experts and `mesh.expert=1`.

    The first lines warn if padding enlarges the experts by more than half, and suggest a smaller `mesh.shard` if it
    fits and makes steps shorter.
    """
    config, shard = plan.config, plan.mesh.shard
    if not config.spec.declares_experts(config.model) or config.expert > 1 or shard == 1:
        return
    if (line := _padding_warning(plan)) is not None:
        yield line
    if (replicated := _more_replicas(plan)) is not None:
        yield (
            f"experts: mesh.shard={replicated.mesh.shard} mesh.replicate={replicated.mesh.replicate} would take "
            f"{_compared(replicated, plan)}: the number of experts is not a multiple of {shard}, so FSDP shards other "
            "dimensions, which takes an extra copy of the weights and gradients"
        )
    alternatives = list(_alternatives(plan))
    fitting = [other for other in alternatives if other.fits]
    if not alternatives:
        yield "experts: none of the sizes of mesh.expert can divide them among these ranks"
    elif plan.fits and not fitting:
        least = min(alternatives, key=lambda other: other.needed_gib)
        yield (
            "experts: dividing them among ranks (mesh.expert) would not fit in memory: at least "
            f"{least.needed_gib:.4g} GiB, with mesh.expert={least.config.expert}, instead of {plan.needed_gib:.4g}"
        )
    else:
        best = min(fitting or alternatives, key=lambda other: other.time.total_s)
        if plan.fits and best.time.total_s > (1 - _MIN_GAIN) * plan.time.total_s:
            yield "experts: dividing them among ranks (mesh.expert) would not make the step shorter"
        else:
            mesh = best.config.mesh
            yield (
                f"experts: mesh.expert={mesh.expert} mesh.expert_method={mesh.expert_method} would take "
                f"{_compared(best, plan)}"
            )


def _compared(other: Plan, plan: Plan) -> str:
    return (
        f"{other.time.total_s:.3g} s per step instead of {plan.time.total_s:.3g}, and {other.needed_gib:.4g} GiB "
        f"instead of {plan.needed_gib:.4g}"
    )


def advice_on_balance(plan: Plan) -> Iterator[str]:
    """Yield a line on the cost of the extra forward passes that count the tokens per expert, if there are any."""
    if not plan.trace.counting_pass or plan.num_micro_batches == 1:
        return
    trace = replace(plan.trace, counting_pass=())
    without = estimate_step(trace, plan.layout, plan.num_micro_batches, plan.machine.rates).time
    yield (
        f"experts: model.balance takes an extra forward pass for each of {plan.num_micro_batches} micro-batches: "
        f"{plan.time.total_s:.3g} s per step instead of {without.total_s:.3g} with model.balance_shares=last"
    )


def possible_choices(config: RunConfig, mesh: MeshShape, ranks_per_node: int) -> list[RunConfig]:
    """Return those of `expert_parallel_choices` whose `mesh.expert` can divide the model's experts among ranks."""
    model, possible = build_network(config), []
    units = find_units(model, config.spec, config.fsdp.wrap)
    for choice in expert_parallel_choices(config, mesh, ranks_per_node):
        with contextlib.suppress(UserError):
            check_experts(model, config.spec, units, choice, mesh.shard)
            possible.append(choice)
    return possible


def _alternatives(plan: Plan) -> Iterator[Plan]:
    """Yield plans with the experts divided among as many ranks of a node as possible, and among several nodes."""
    per_node = plan.machine.rates.ranks_per_node
    automatic = with_expert(plan.config, 1, "auto")
    sizes = {choice.expert for choice in possible_choices(automatic, plan.mesh, per_node)}
    inside = max((size for size in sizes if 1 < size <= per_node), default=1)
    for size in sorted({inside, *(size for size in sizes if size > per_node)} - {1}):
        config = resolve_expert_method(with_expert(plan.config, size, "auto"), per_node)
        yield make_plan(config, plan.mesh, plan.machine, plan.probe.with_config(config))


def _more_replicas(plan: Plan) -> Plan | None:
    """Return a plan with only as many shards as divide the experts evenly, if that fits and is faster."""
    config, mesh = plan.config, plan.mesh
    experts = [p for unit in plan.trace.units for p in unit.parameters if p.is_expert]
    if not any(plan.layout.division(parameter).dim for parameter in experts):
        return None
    shard = math.gcd(mesh.shard, *(parameter.shape[0] for parameter in experts))
    other = MeshShape(mesh.num_ranks // shard, shard)
    section = replace(config.mesh, replicate=other.replicate, shard=shard)
    if shard % config.ranks_per_sample:
        return None
    candidate = make_plan(replace(config, mesh=section), other, plan.machine, plan.probe)
    is_shorter = candidate.time.total_s <= (1 - _MIN_GAIN) * plan.time.total_s
    return candidate if candidate.fits and is_shorter else None


def _padding_warning(plan: Plan) -> str | None:
    """Return a warning if padding enlarges the experts by more than half."""
    experts = [p for unit in plan.trace.units for p in unit.parameters if p.is_expert]
    gathered = sum(plan.layout.division(p).gathered_numel(p.shape) for p in experts)
    ratio = gathered / max(1, sum(p.numel for p in experts))
    if ratio <= 1.5:
        return None
    return (
        f"warning: {plan.mesh.shard} ranks divide neither the experts nor their dimensions: with padding, {ratio:.2f} "
        "times their bytes are gathered and reduced"
    )
