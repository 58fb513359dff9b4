"""Divides a model's experts among the ranks of an expert group (expert parallelism), before FSDP shards the model.

The planner simulates this on one rank (`simulate_expert_group`); a self-check observes the experts (`observe_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.world import EXPERT, name_of_group
from trainer.errors import UserError
from trainer.experts.dispatch import GROUP_ATTRIBUTE, Estimate, ExpertGroup
from trainer.model_spec import ModelSpec, matches_pattern


def find_experts(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    """Return the modules of `model` that `spec.experts` names, keyed by name; empty if it is None.

    Raises UserError if the pattern matches no module, if a module has no parameters, or if the parameters of a module
    do not all have the same first dimension.
    """
    if spec.experts is None:
        return {}
    if callable(spec.experts):
        modules = {name: model.get_submodule(name) for name in spec.experts(model)}
    else:
        modules = {name: module for name, module in model.named_modules() if matches_pattern(name, spec.experts)}
    if not modules and not callable(spec.experts):
        raise UserError(f"model {spec.name!r}: experts: the model has no module {spec.experts!r}")
    for name, module in modules.items():
        first_dims = {parameter.shape[:1] for parameter in module.parameters()}
        if len(first_dims) != 1 or first_dims == {torch.Size()}:
            shapes = ", ".join(f"{parameter} {tuple(p.shape)}" for parameter, p in module.named_parameters())
            raise UserError(f"model {spec.name!r}: experts: {name} has parameters that are not stacked: {shapes}")
    return modules


def shard_experts(modules: Sequence[nn.Module], mesh: DeviceMesh, method: str) -> None:
    """Divide the experts in `modules` among the ranks of `mesh`, which has one axis.

    The modules' parameters become DTensors with consecutive experts on each rank.  They must still be on the meta
    device, and the number of experts must be a multiple of the mesh's size.
    """
    size = mesh.size()
    group = ExpertGroup(size, mesh.get_local_rank(), method, name_of_group(mesh))
    for module in modules:
        for owner in module.modules():
            for name, parameter in [*owner.named_parameters(recurse=False)]:
                local = torch.empty_like(parameter[: parameter.shape[0] // size], device="meta")
                sharded = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
                owner.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        setattr(module, GROUP_ATTRIBUTE, group)


@contextmanager
def observe_experts(modules: Mapping[str, nn.Module], observer: Callable[..., None]) -> Iterator[None]:
    """Inside the block, call `observer(name, x, chosen, weights, out)` after each `apply_experts` on one of `modules`.

    Their experts must be divided among ranks (`shard_experts`).
    """
    groups = {name: getattr(module, GROUP_ATTRIBUTE) for name, module in modules.items()}
    for name, module in modules.items():
        setattr(module, GROUP_ATTRIBUTE, replace(groups[name], observer=partial(observer, name)))
    try:
        yield
    finally:
        for name, module in modules.items():
            setattr(module, GROUP_ATTRIBUTE, groups[name])


def simulate_expert_group(modules: Sequence[nn.Module], size: int, method: str, imbalance: float) -> Estimate:
    """For the planner, keep only the experts of one of `size` ranks in `modules`, which are on the meta device.

    Their collectives use a group called `expert`, and must run on fake tensors.  Returns the estimate that replaces the
    router's choices; with `gather`, running the model sets its `fill_fraction`.
    """
    estimate = Estimate(imbalance)
    group = ExpertGroup(size, 0, method, EXPERT, estimate)
    for module in modules:
        for owner in module.modules():
            for name, parameter in [*owner.named_parameters(recurse=False)]:
                local = parameter.detach()[: parameter.shape[0] // size].contiguous()
                owner.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))
        setattr(module, GROUP_ATTRIBUTE, group)
    return estimate
