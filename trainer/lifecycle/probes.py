"""Checks before the first step that run the model: slices of sequences, shared matrices, packed documents, and divided
experts.

Each compares what the model computes on a few tokens with what must come out whatever its weights are.  So they work
for any model, and find errors that no loss curve shows.  They change no values, and none checks a custom loader.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from trainer.config.parallel import Slices
from trainer.config.requirements import compiles_blocks
from trainer.config.schema import RunConfig
from trainer.data.loader import Batch, TrainLoader
from trainer.data.source import as_mapping
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, setting_error
from trainer.experts import find_experts, observe_experts
from trainer.loss import IGNORE, find_loss
from trainer.model.documents import separate_documents
from trainer.model.gradients import evaluation_mode, gradient_sync, reshard
from trainer.model.parameters import local, local_box
from trainer.sequence import context_slices, full_sequences, tensor_slices, use_slices

_MAX_TOKENS = 32
"""Maximum number of test tokens per slice of a sequence, and per row for experts."""


def _first_tokens(loader: TrainLoader, num_tokens: int, world: World, slices: Slices | None = None) -> Batch:
    """Return the first tokens of this rank's next sample, or `slices` of them, on the device.

    Positions without a target, such as those of a prompt, get their own token as the target, so that the loss covers
    all positions.
    """
    batch = loader.first_tokens(num_tokens, slices)
    batch.pop("pair", None)  # which rows form a preference pair: the loss here is over tokens
    targets = torch.where(batch["targets"] == IGNORE, batch["tokens"], batch["targets"])
    return {name: entry.to(world.device) for name, entry in {**batch, "targets": targets}.items()}


def _shortened(slices: Slices) -> Slices:
    """Return slices of the same kind of a short sequence."""
    return replace(slices, seq_len=min(slices.seq_len, _MAX_TOKENS * slices.num_ranks))


def _whole_and_slices(world: World, loader: TrainLoader, slices: Slices) -> tuple[Batch, Batch]:
    """Return the start of this rank's next sample, whole but with no other targets than this rank's; and its slices."""
    full_batch, slice_batch = world.agreed(
        lambda: (
            _first_tokens(loader, slices.seq_len, world),
            _first_tokens(loader, slices.seq_len, world, slices),
        )
    )
    targets = torch.full_like(full_batch["targets"], IGNORE)
    for start, stop in slices.own_pieces:
        targets[:, start:stop] = full_batch["targets"][:, start:stop]
    return {**full_batch, "targets": targets}, slice_batch


# ---------------------------------------------------------------------------------------------------------------
# Context parallelism: the loss must be the same on slices and on complete sequences


_LOSS_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}
"""Relative tolerance of the loss, by dtype, which allows for a different order of summation.  It must be tight: with
fresh weights, attention is so weak that even restarting positions in each slice changes the loss by at most 2e-6."""


def check_context(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if the model's loss on slices differs from that on complete sequences.

    A model that mixes or counts tokens outside `trainer.sequence` computes a wrong loss on slices of sequences, and
    this does not show in its loss curve.

    The test input is the start of this rank's next sample; no gradients are computed.  A no-op without context
    parallelism.  Collectives: two forward passes, and a gather of two numbers.
    """
    slices = context_slices()
    if slices is None or not isinstance(loader, TrainLoader):
        return
    slices = _shortened(slices)
    full_batch, slice_batch = _whole_and_slices(world, loader, slices)
    loss_of = find_loss(model)
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        with use_slices(None):
            expected = float(loss_of(full_batch))
        with use_slices(slices):
            actual = float(loss_of(slice_batch))
    tolerance = _LOSS_TOLERANCE[config.fsdp.param_dtype]
    # Of the loss of a tensor-parallel group, each rank may return an equal share.
    by_group = np.array(world.gather((expected, actual))).reshape(-1, slices.tensor_count, 2).sum(1)
    for number, (full_loss, slice_loss) in enumerate(by_group.tolist()):
        if not abs(full_loss - slice_loss) <= tolerance * abs(full_loss):
            rule = (
                f"model {config.spec.name!r} mixes or counts tokens outside trainer.sequence: the loss of "
                f"rank {number * slices.tensor_count}'s part of {slices.seq_len} tokens is {full_loss:.8g} on full "
                f"sequences and {slice_loss:.8g} on slices"
            )
            raise setting_error("mesh.context", slices.count, rule, 1)


# ---------------------------------------------------------------------------------------------------------------
# Tensor parallelism: every gradient must be that of whole layers


_SPLIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.45}
"""The largest difference of a parameter's gradients, as a fraction of their norm, by dtype.  It allows for a different
order of summation, to which the gradients of queries and keys are sensitive while weights are fresh, and for tokens
that choose another expert because of it: 4e-6 in a Llama in float32, 0.05 in bfloat16, 0.2 for routers of 128 experts.
Mistakes are larger: a gradient that is lost, or counted twice, differs by its whole norm, and one that is halved by
half of it."""


def check_tensor(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if the gradients of split layers differ from those of whole layers.

    A wrong plan (`ModelSpec.tensor`) may still run and train, as may a compiled layer that loses a gradient.

    The test input is the start of this rank's next sample, with dropout disabled.  Whole layers run on full sequences,
    with weights gathered from the tensor-parallel group, and are not compiled; split ones are, if the run's are.
    Gradients are deleted afterwards.  A no-op without tensor parallelism.  Collectives: two forward and two backward
    passes, and an all-reduce of two numbers per parameter.
    """
    slices = tensor_slices()
    if slices is None or not isinstance(loader, TrainLoader):
        return
    slices = _shortened(slices)
    full_batch, slice_batch = _whole_and_slices(world, loader, slices)
    with use_slices(None), torch.compiler.set_stance("force_eager"):
        expected = _gradients(model, full_batch, config)
    with use_slices(slices):
        actual = _gradients(model, slice_batch, config)
    if compiles_blocks(config.train.compile, world.device.type):
        torch.compiler.reset()  # otherwise the run's blocks would be compiled for sequences of any length
    squares = [
        ((actual[name] - whole).square().sum(dtype=torch.float64), whole.square().sum(dtype=torch.float64))
        for name, whole in expected.items()
    ]
    totals = world.sum_on_device(torch.tensor(squares, dtype=torch.float64, device=world.device))
    tolerance = max(_SPLIT_TOLERANCE[dtype] for dtype in {config.fsdp.param_dtype, config.fsdp.reduce_dtype})
    ratios = {
        name: math.sqrt(difference / whole) if whole else math.inf
        for name, (difference, whole) in zip(expected, totals.tolist(), strict=True)
        if not difference <= tolerance**2 * whole
    }
    if ratios:
        largest = sorted(ratios, key=lambda name: -ratios[name])[:3]
        described = ", ".join(f"{name} by {ratios[name]:.2g} of its norm" for name in largest)
        more = f", and {len(ratios) - 3} more" if len(ratios) > 3 else ""
        rule = (
            f"model {config.spec.name!r}: gradients of {slices.seq_len} tokens differ from those of whole layers: "
            f"{described}{more}; its plan (ModelSpec.tensor) does not fit its forward pass"
        )
        raise setting_error("mesh.tensor", slices.tensor_count, rule, 1)


def _gradients(model: nn.Module, batch: Batch, config: RunConfig) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the gradients of a loss by parameter name, in host memory; zeros where it has none.

    Collectives: a forward and a backward pass.
    """
    was_training = model.training
    model.eval()
    with gradient_sync(model, True, config.fsdp):
        find_loss(model)(batch).backward()
    model.train(was_training)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = local(gradient.detach()).to("cpu", torch.float32)
            parameter.grad = None
    reshard(model)
    return gradients


# ---------------------------------------------------------------------------------------------------------------
# Packed documents: no document of a row may influence another


def check_documents(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if documents share rows and the model lets them influence each other.

    A model from transformers is first made to keep them apart, where possible (`trainer.model.documents`).  The message
    names up to three modules, if they can be found.  Also raises UserError if compiled blocks would have to separate
    documents in recurrent layers of transformers.  A no-op if documents do not share rows.

    Collectives: those of `separate_documents`, and a gather; only the gather if the model takes no documents.
    """
    if not isinstance(loader, TrainLoader) or "documents" not in as_mapping(loader.source.batch(np.array([-1]))):
        return
    leak: str | None = "its forward pass takes no documents"
    if "documents" in inspect.signature(model.forward).parameters:
        model.are_documents_apart = True  # type: ignore[assignment]  # checked here, so not again in its first call
        leak = separate_documents(model, loader.source.vocab_size, config.data.seq_len, world.device)
    leaks = [name for name in world.gather(leak) if name is not None]
    if leaks:
        rule = f"model.name={config.model.name} lets documents in one row influence each other: {leaks[0]}"
        raise setting_error("data.documents", "masked", rule, "apart")
    if getattr(model, "has_recurrent_layers", False) and compiles_blocks(config.train.compile, world.device.type):
        rule = "compiled blocks cannot separate documents in recurrent layers of transformers"
        raise setting_error("train.compile", config.train.compile, rule, False)


# ---------------------------------------------------------------------------------------------------------------
# Expert parallelism: gradients must be right, and each expert computed by the rank that holds it


_GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
_OUTPUT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative tolerances for the two inner products and for the outputs, by dtype.  They allow for rounding and for a
different order of summation."""


def check_experts(world: World, model: nn.Module, mesh: DeviceMesh, loader: object, config: RunConfig) -> None:
    """Raise TrainingFailed on all ranks if the experts' gradients are wrong or the wrong ranks compute the experts.

    An error in either would go unnoticed.  If gradients are too large by a factor of the number of ranks, the loss is
    still computed correctly, and its curve merely looks like that of a higher learning rate.  If experts are computed
    on the wrong ranks, the model still trains, but its checkpoints hold a different model.

    1. *Gradients.*  A mixture-of-experts layer is linear in its experts' down projections and their biases.  So by
       Euler's theorem on homogeneous functions, the inner product of these parameters with their gradients equals the
       inner product of the outputs with their gradients, over all tokens.  This holds for any output gradients, so the
       check uses the outputs themselves as their gradients: the result is a sum of squares, in which nothing cancels,
       and even in bfloat16 a wrong factor changes it far more than rounding does.  One short pass yields both inner
       products, and no weights need to be gathered to compare them.
    2. *Placement.*  One token's output is compared with the output of its chosen experts, recomputed from weights
       collected from the ranks that should hold them.

    The test input is the start of this rank's next sample; gradients are deleted afterwards.  A no-op without expert
    parallelism.  Collectives: a forward and a backward pass, a gather, an all-reduce, and for each layer four
    all-reduces of one token's data and one for each parameter of its experts.
    """
    if config.expert == 1 or not isinstance(loader, TrainLoader):
        return
    modules = find_experts(model, config.spec)
    observed = _Observations()
    batch = _first_tokens(loader, min(_MAX_TOKENS, config.data.seq_len), world)
    if config.objective.outputs:  # the new head's outputs are not tokens
        batch["targets"] %= config.objective.outputs
    devices = [world.device] if world.device.type == "cuda" else []
    handle = next(iter(modules.values())).register_forward_hook(observed.find_linear)
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with (
        observe_experts(modules, observed.add),
        full_sequences(),
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices=devices),
        gradient_sync(model, True, config.fsdp),
    ):
        find_loss(model)(batch).backward()
    handle.remove()
    reshard(model)
    lines = [
        *_wrong_gradients(world, modules, observed, mesh, config),
        *_wrong_placement(world, modules, observed, mesh, config),
    ]
    for parameter in model.parameters():
        parameter.grad = None
    if lines:
        advice = "to skip the check: run.selfcheck=false"
        raise TrainingFailed("self-check of mesh.expert: " + "\n  ".join([*lines[:10], advice]))


@dataclass
class _Observations:
    """What one forward and backward pass shows of each module of experts, by name.

    Recomputed forward passes are ignored.
    """

    first_token: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The first token's input (D,), its chosen experts (A,), their weights (A,), and its output (D,)."""
    sum_of_squares: dict[str, torch.Tensor] = field(default_factory=dict)
    """The sum of the squared outputs of this rank's tokens, a scalar; zero until the backward pass."""
    linear: list[tuple[str, ...]] | None = None
    """The parameters, or pairs of them, in which the first module is linear; empty if it had no rows on this rank."""

    def add(
        self, name: str, x_SD: torch.Tensor, chosen_SA: torch.Tensor, weights_SA: torch.Tensor, out_SD: torch.Tensor
    ) -> None:
        """Record a forward pass, and replace the gradient of its outputs in the backward pass.  For observe_experts."""
        if name in self.first_token:
            return
        self.first_token[name] = [tensor[0].detach().clone() for tensor in (x_SD, chosen_SA, weights_SA, out_SD)]
        self.sum_of_squares[name] = torch.zeros((), dtype=torch.float64, device=x_SD.device)

        def replace_gradient(gradient_SD: torch.Tensor) -> torch.Tensor:
            self.sum_of_squares[name] += out_SD.detach().double().square().sum()
            return out_SD.detach().to(gradient_SD.dtype)

        if out_SD.requires_grad:
            out_SD.register_hook(replace_gradient)

    @torch.no_grad()  # inside a block that is recomputed, autograd must save as many tensors in both passes
    def find_linear(self, module: nn.Module, args: Any, out_RD: torch.Tensor) -> None:
        """Find what doubles the outputs if it is doubled.  A forward hook."""
        if self.linear is not None:
            return
        self.linear = []
        if not out_RD.any():  # no rows on this rank, or fresh adapters
            return
        trained = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
        inputs = tuple(arg.detach() for arg in args)
        for names in itertools.chain(itertools.combinations(trained, 1), itertools.combinations(trained, 2)):
            doubled_RD = functional_call(module, {name: 2 * trained[name] for name in names}, inputs)
            if (doubled_RD - 2 * out_RD).abs().max() <= 1e-2 * out_RD.abs().max():
                self.linear.append(names)


def _wrong_gradients(
    world: World, modules: Mapping[str, nn.Module], observed: _Observations, mesh: DeviceMesh, config: RunConfig
) -> Iterator[str]:
    """Yield a line for each module that violates Euler's theorem.

    A gather, and an all-reduce if the outputs are linear in the same parameters on all ranks.
    """
    found = [linear for linear in world.gather(observed.linear) if linear]
    linear = next((names for names in itertools.chain(*found) if all(names in others for others in found)), ())
    names = [
        name
        for name, module in modules.items()
        if all(module.get_parameter(parameter).grad is not None for parameter in linear)
    ]
    if not names or not linear:
        return
    weight_products = torch.stack([_inner_product(modules[name], linear) for name in names]).to(world.device)
    output_products = torch.stack([observed.sum_of_squares[name] for name in names])
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
    products = []
    for parameter in map(module.get_parameter, names):
        assert parameter.grad is not None
        products.append((local(parameter.detach()).double() * local(parameter.grad).double()).sum())
    return torch.stack(products).sum()


def _wrong_placement(
    world: World, modules: Mapping[str, nn.Module], observed: _Observations, mesh: DeviceMesh, config: RunConfig
) -> Iterator[str]:
    """Yield a line for each module whose output for rank 0's first token is not that of the experts chosen for it.

    For each module, four all-reduces, and one for each parameter.
    """
    tolerance, dtype = _OUTPUT_TOLERANCE[config.fsdp.param_dtype], getattr(torch, config.fsdp.param_dtype)
    for name, module in modules.items():
        x_D, chosen_A, weights_A, out_D = (
            world.sum_on_device(tensor.double() * (world.rank == 0)) for tensor in observed.first_token[name]
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
