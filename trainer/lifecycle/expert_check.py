"""Checks, for expert parallelism, that the experts' gradients are correct and that the right ranks compute each expert.

An error in either would go unnoticed.  If gradients are too large by a factor of the number of ranks, the loss is still
computed correctly, and its curve merely looks like that of a higher learning rate.  If experts are computed on the
wrong ranks, the model still trains, but its checkpoints hold a different model.

1. *Gradients.*  A mixture-of-experts layer is linear in its experts' down projections and their biases.  So by
   Euler's theorem on homogeneous functions, the inner product of these parameters with their gradients equals the inner
   product of the outputs with their gradients, over all tokens.  This holds for any output gradients, so the check uses
   the outputs themselves as their gradients: the result is a sum of squares, in which nothing cancels, and even in
   bfloat16 a wrong factor changes it far more than rounding does.  One short pass yields both inner products, and no
   weights need to be gathered to compare them.
2. *Placement.*  One token's output is compared with the output of its chosen experts, recomputed from weights collected
   from the ranks that should hold them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from trainer.config import RunConfig
from trainer.data.loader import TrainLoader
from trainer.distributed.world import World
from trainer.errors import TrainingFailed
from trainer.experts import find_experts, observe_experts
from trainer.loss import IGNORE, find_loss
from trainer.model.gradients import gradient_sync, reshard
from trainer.model.parameters import local, local_box
from trainer.sequence import full_sequences

_MAX_TOKENS_PER_ROW = 32
"""Maximum number of test tokens per row.  On each rank, the test input is one row, or two if samples are pairs."""

_GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
_OUTPUT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative tolerances for the two inner products and for the outputs, by dtype.  They allow for rounding and for a
different order of summation."""


@dataclass
class _Observation:
    """Measurements of one expert module in one pass, on this rank."""

    sum_of_squares: torch.Tensor
    """The sum of the squared outputs of this rank's tokens, a scalar; zero until the backward pass."""
    first_token: list[torch.Tensor]
    """The first token's input (D,), its chosen experts (A,), their weights (A,), and its output (D,)."""


@dataclass
class _Observer:
    """Records one forward pass, and in its backward pass replaces the gradients of the experts' outputs.

    Recomputed forward passes are ignored.
    """

    seen: dict[str, _Observation] = field(default_factory=dict)
    """The observation of each expert module, by name."""

    def watch(
        self, name: str, x_SD: torch.Tensor, chosen_SA: torch.Tensor, weights_SA: torch.Tensor, out_SD: torch.Tensor
    ) -> None:
        if name in self.seen:
            return
        first_token = [tensor[0].detach().clone() for tensor in (x_SD, chosen_SA, weights_SA, out_SD)]
        observation = self.seen[name] = _Observation(
            torch.zeros((), dtype=torch.float64, device=x_SD.device), first_token
        )

        def replace_gradient(gradient_SD: torch.Tensor) -> torch.Tensor:
            observation.sum_of_squares += out_SD.detach().double().square().sum()
            return out_SD.detach().to(gradient_SD.dtype)

        if out_SD.requires_grad:
            out_SD.register_hook(replace_gradient)


def check_experts(world: World, model: nn.Module, mesh: DeviceMesh, loader: object, config: RunConfig) -> None:
    """Raise TrainingFailed on all ranks if the experts' gradients are wrong or the wrong ranks compute the experts.

    The test input is the start of this rank's next sample; gradients are deleted afterwards.  A no-op without expert
    parallelism, or with a custom loader.  Collectives: a forward and a backward pass, a gather, an all-reduce, and for
    each layer four all-reduces of one token's data and one for each parameter of its experts.
    """
    if config.expert == 1 or not isinstance(loader, TrainLoader):
        return
    modules, observer = find_experts(model, config.recipe), _Observer()
    probe = _LinearityProbe()
    handle = next(iter(modules.values())).register_forward_hook(probe.run)
    batch = loader.first_tokens(min(_MAX_TOKENS_PER_ROW, config.data.seq_len))
    targets = torch.where(batch["targets"] == IGNORE, batch["tokens"], batch["targets"])
    if config.objective.outputs:  # the new head's outputs are not tokens
        targets = targets % config.objective.outputs
    # Without the entry that says which rows form a preference pair: the loss here is over tokens.
    batch = {name: entry.to(world.device) for name, entry in {**batch, "targets": targets}.items() if name != "pair"}
    devices = [world.device] if world.device.type == "cuda" else []
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with (
        observe_experts(modules, observer.watch),
        full_sequences(),
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices=devices),
        gradient_sync(model, True, config.fsdp),
    ):
        find_loss(model)(batch).backward()
    handle.remove()
    reshard(model)
    found = [names for names in world.gather(probe.linear) if names]  # one per rank whose experts received rows
    linear = next((names for names in itertools.chain(*found) if all(names in others for others in found)), ())
    lines = [
        *_wrong_gradients(world, modules, observer.seen, linear, mesh, config),
        *_wrong_placement(world, modules, observer.seen, mesh, config),
    ]
    for parameter in model.parameters():
        parameter.grad = None
    if lines:
        advice = "to skip the check: run.selfcheck=false"
        raise TrainingFailed("self-check of mesh.expert: " + "\n  ".join([*lines[:10], advice]))


# ---------------------------------------------------------------------------------------------------------------
# Gradients


class _LinearityProbe:
    """Finds the trained parameters, or pairs of them, in which a module is linear.  `run` is a forward hook for it."""

    def __init__(self) -> None:
        self.linear: list[tuple[str, ...]] = []
        """The parameters found in the first call on this rank; empty if that call had no rows."""
        self._has_run = False

    def run(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if self._has_run:
            return
        self._has_run = True
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        inputs, out = tuple(arg.detach() for arg in args), out.detach()
        if not out.numel() or not out.any():
            return
        for names in itertools.chain(*(itertools.combinations(trained, size) for size in (1, 2))):
            doubled = {name: 2 * value if name in names else value for name, value in parameters.items()}
            with torch.no_grad():
                doubled_out = functional_call(module, doubled, inputs)
            if (doubled_out - 2 * out).abs().max() <= 1e-2 * out.abs().max():
                self.linear.append(names)


def _wrong_gradients(
    world: World,
    modules: Mapping[str, nn.Module],
    seen: Mapping[str, _Observation],
    linear: tuple[str, ...],
    mesh: DeviceMesh,
    config: RunConfig,
) -> Iterator[str]:
    """Yield a line for each module that violates Euler's theorem.

    linear: the parameters in which the modules' outputs are linear.  One all-reduce, or none if `linear` is empty.
    """
    names = [
        name
        for name, module in modules.items()
        if all(module.get_parameter(parameter).grad is not None for parameter in linear)
    ]
    if not names or not linear:
        return
    weight_products = torch.stack([_inner_product(modules[name], linear) for name in names]).to(world.device)
    output_products = torch.stack([seen[name].sum_of_squares for name in names])
    totals = world.sum_on_device(torch.stack((weight_products, output_products)))
    replicas = world.size // mesh.size(mesh.ndim - 1)
    fsdp = config.fsdp
    dtypes = {fsdp.param_dtype, fsdp.reduce_dtype, config.train.weights_dtype}  # each of them rounds gradients
    tolerance = max(_GRADIENT_TOLERANCE[dtype] for dtype in dtypes)
    # Gradients are means over all ranks, and the sum over ranks has counted each replica.
    totals[0] *= world.size / replicas
    for name, actual, expected in zip(names, *totals.tolist(), strict=True):
        if not abs(actual - expected) <= tolerance * expected:
            ratio = actual / expected if expected else float("inf")
            yield f"{name}: the gradient of {' and '.join(linear)} is {ratio:.6g} times what its outputs imply"


def _inner_product(module: nn.Module, names: tuple[str, ...]) -> torch.Tensor:
    """Return the inner product of this rank's parts of the parameters with their gradients: a scalar in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for name in names:
        parameter = module.get_parameter(name)
        assert parameter.grad is not None
        total = total.to(local(parameter).device)
        total = total + (local(parameter.detach()).double() * local(parameter.grad).double()).sum()
    return total


# ---------------------------------------------------------------------------------------------------------------
# Placement


def _wrong_placement(
    world: World,
    modules: Mapping[str, nn.Module],
    seen: Mapping[str, _Observation],
    mesh: DeviceMesh,
    config: RunConfig,
) -> Iterator[str]:
    """Yield a line for each module whose output for rank 0's first token is not that of the experts chosen for it.

    For each module, four all-reduces, and one for each parameter.
    """
    tolerance, dtype = _OUTPUT_TOLERANCE[config.fsdp.param_dtype], getattr(torch, config.fsdp.param_dtype)
    for name, module in modules.items():
        x_D, chosen_A, weights_A, out_D = (
            world.sum_on_device(tensor.double() * (world.rank == 0)) for tensor in seen[name].first_token
        )
        ends_A = torch.arange(1, len(chosen_A) + 1, dtype=torch.int32, device=x_D.device)
        chosen_experts = {
            key: _rows_of(parameter, chosen_A.long(), mesh, world.device).to(
                dtype if parameter.is_floating_point() else parameter.dtype  # the bytes of quantized weights
            )
            for key, parameter in module.named_parameters()
        }
        with torch.no_grad():
            rows_AD = x_D.to(dtype).expand(len(chosen_A), -1).contiguous()
            out_AD = functional_call(module, chosen_experts, (rows_AD, ends_A))
        expected_D = (out_AD.double() * weights_A[:, None]).sum(0)
        difference, largest = torch.stack(((out_D - expected_D).abs().max(), expected_D.abs().max())).tolist()
        if not difference <= tolerance * largest:
            experts = ", ".join(map(str, chosen_A.long().tolist()))
            yield f"{name}: the output of a token is not that of its experts {experts}: their ranks hold other experts"


def _rows_of(parameter: torch.Tensor, rows_A: torch.Tensor, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """Return the given rows of a parameter, (A, ...), from the ranks that hold them.  One all-reduce over `shard`."""
    box, shard = local_box(parameter), local(parameter.detach())
    assert box is not None
    selected = torch.zeros((len(rows_A), *parameter.shape[1:]), device=device)
    columns = tuple(slice(start, stop) for start, stop in box[1:])
    for number, row in enumerate(rows_A.tolist()):
        if box[0][0] <= row < box[0][1] and shard.numel():
            selected[number][columns] = shard[row - box[0][0]].to(device, torch.float32)
    dist.all_reduce(selected, group=mesh.get_group(mesh.ndim - 1))
    return selected
