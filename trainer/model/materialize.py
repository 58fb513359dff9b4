"""Initializes models that were built on the meta device, with the same weights on every mesh.

A sharded model is filled module by module.  Each module's own tensors are temporarily full tensors on the CPU,
initialized by the recipe's ordinary code with the generator seeded by (seed, module name); each rank keeps its shard.
Of large tensors only that shard is drawn.  No rank holds more than its shards plus one module, there is no
communication, and the weights depend only on the seed, not on the mesh or the device, whose own generator would give
different values.  Independent of particular recipes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.errors import UserError
from trainer.model.deferred_fill import DeferredFill, DeferredFills, can_fill_partially
from trainer.model.lora import LoraFactor, plain_name
from trainer.model.parameters import local, local_rows, num_writes, seed_of, tied_names


def materialize(
    model: nn.Module,
    seed: int,
    device: torch.device,
    init: Callable[..., None] | None = None,
    cpu_offload: bool = False,
    is_loaded_later: Callable[[str], bool] | None = None,
) -> None:
    """Allocate and initialize every parameter and buffer of `model` that is on the meta device, in place.

    `init(module)`, or `init(module, name, model)`, fills the tensors that one module owns directly; by default, and for
    adapters, this is `module.reset_parameters()`.  Tied parameters are filled once, by the first module that owns them.
    Values are computed on the CPU and moved to `device`; with `cpu_offload`, parameters stay on the CPU.

    Parameters for whose name `is_loaded_later` is true are not drawn; they are NaN until they are loaded.  Buffers are
    always filled.

    Raises UserError that names every parameter and buffer that was not filled, on all ranks alike, since each rank sees
    full tensors.
    """
    on_meta = {name for name, tensor in _tensors(model) if tensor.is_meta}
    if not on_meta:
        return
    ties = tied_names(model)
    _allocate(model, on_meta, torch.device("cpu") if cpu_offload else device)
    _retie(model, ties)

    canonical = {alias: group[0] for group in ties for alias in group}
    unfilled: list[str] = []
    scratch, fill = _ScratchMemory(), _initializer(init, model)
    for module_name, module in model.named_modules():
        own_names = [name for name in _direct_names(module_name, module) if name in on_meta]
        fresh = {name for name in own_names if canonical.get(name, name) == name}
        if is_loaded_later is not None:
            fresh -= _skip_loaded_later(module, module_name, fresh, is_loaded_later)
        if fresh:
            fills = _default_init if isinstance(module, LoraFactor) else fill
            unfilled += _fill(module, module_name, fresh, seed_of(seed, plain_name(module_name)), scratch, fills)
            _move_buffers(module, [name.rpartition(".")[2] for name in own_names], device)
    if unfilled:
        raise UserError(
            f"uninitialized: {', '.join(unfilled)}: after a model is built on the meta device, each module that owns a "
            "parameter or buffer must fill all of it in `reset_parameters()` (or in the recipe's `init`)"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _direct_names(module_name: str, module: nn.Module) -> list[str]:
    return [f"{module_name}.{name}" if module_name else name for name, _ in _direct_tensors(module)]


def _allocate(model: nn.Module, on_meta: set[str], parameter_device: torch.device) -> None:
    """Allocate everything that is on the meta device, buffers on the CPU; tensors that have values are not changed."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=parameter_device) if tensor.is_meta else tensor)
    for module_name, module in model.named_modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if (f"{module_name}.{name}" if module_name else name) in on_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))


def _move_buffers(module: nn.Module, names: Sequence[str], device: torch.device) -> None:
    for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
        if name in names:
            setattr(module, name, buffer.to(device))


def _retie(model: nn.Module, ties: list[list[str]]) -> None:
    """Tie the names of each group again: moving off the meta device has separated them."""
    for first, *aliases in ties:
        parameter = model.get_parameter(first)
        for alias in aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner).register_parameter(name, parameter)


def _initializer(init: Callable[..., None] | None, model: nn.Module) -> Callable[[nn.Module, str], None]:
    """Return the function that fills a module, called with the module and its name."""
    if init is None:
        return _default_init
    if len(inspect.signature(init).parameters) > 1:
        return lambda module, name: init(module, name, model)
    return lambda module, name: init(module)


@torch.no_grad()
def _skip_loaded_later(
    module: nn.Module, module_name: str, fresh: set[str], is_loaded_later: Callable[[str], bool]
) -> set[str]:
    """Fill the parameters in `fresh` that will be loaded later with NaN, and return their names."""
    prefix = f"{module_name}." if module_name else ""
    own_parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    left = {name for name in own_parameters if prefix + name in fresh and is_loaded_later(prefix + name)}
    for name in left:
        _poison(local(own_parameters[name].detach()))
    return {prefix + name for name in left}


def _default_init(module: nn.Module, name: str) -> None:
    # torch's MultiheadAttention and Transformer use a private name.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


@torch.no_grad()
def _fill(
    module: nn.Module,
    module_name: str,
    fresh: set[str],
    seed: int,
    scratch: _ScratchMemory,
    init: Callable[[nn.Module, str], None],
) -> list[str]:
    """Fill the tensors that `module` owns directly.  Returns the names that were left unfilled; only `fresh` ones are
    kept.

    Other parameters are replaced by meta tensors, so that writing to them has no effect and no cost.
    """
    prefix = f"{module_name}." if module_name else ""
    sharded = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    drawn = scratch.full_tensors({name: parameter for name, parameter in sharded.items() if prefix + name in fresh})
    partial = {name: full for name, full in drawn.items() if _is_filled_partially(sharded[name], full)}
    deferred_fills = DeferredFills(partial)
    for name, parameter in sharded.items():
        nowhere = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        full = _poison(drawn[name]) if name in drawn.keys() - partial.keys() else partial.get(name, nowhere)
        module.register_parameter(name, nn.Parameter(full, requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if prefix + name in fresh:
            _poison(buffer)
    versions = {name: num_writes(tensor) for name, tensor in _direct_tensors(module)}
    before = {name: id(tensor) for name, tensor in _direct_tensors(module)}

    with torch.random.fork_rng(devices=[]), deferred_fills.observe():
        torch.default_generator.manual_seed(seed)
        init(module, module_name)

    unfilled = []
    for name, tensor in _direct_tensors(module):
        written = num_writes(tensor) != versions[name] or id(tensor) != before[name]
        if prefix + name not in fresh or deferred_fills.get(name, tensor):
            continue
        if _is_poisoned(tensor) or not (written or tensor.is_floating_point()):
            unfilled.append(prefix + name)
    for name, parameter in sharded.items():
        if prefix + name in fresh:
            full = module.get_parameter(name).detach()
            _copy_shard(parameter, full, deferred_fills.get(name, full))
        module.register_parameter(name, parameter)
    return unfilled


def _is_filled_partially(parameter: torch.Tensor, full: torch.Tensor) -> bool:
    """Return whether to draw only part of a large tensor: this rank keeps few rows, or several threads can share the
    work.
    """
    rows = local_rows(parameter)
    is_less = rows is not None and (2 * (rows[1] - rows[0]) <= full.shape[0] or torch.get_num_threads() > 1)
    return is_less and can_fill_partially(full)


class _ScratchMemory:
    """Memory for the full tensors of one module at a time.

    It is reused for every module, since new memory would be page-faulted in each time.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def full_tensors(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return uninitialized tensors with the (global) shapes of `like`; earlier ones are overwritten.

        Their dtypes are those of `like`, except float32 for bfloat16: weights are drawn in full precision, then
        rounded.
        """
        dtypes = {n: torch.float32 if t.dtype == torch.bfloat16 else t.dtype for n, t in like.items()}
        sizes = {name: -(-tensor.numel() * dtypes[name].itemsize // 64) * 64 for name, tensor in like.items()}
        if sum(sizes.values()) > self._bytes.numel():
            self._bytes = torch.empty(sum(sizes.values()), dtype=torch.uint8, device="cpu")
        taken, start = {}, 0
        for name, tensor in like.items():
            part = self._bytes[start : start + tensor.numel() * dtypes[name].itemsize]
            taken[name] = part.view(dtypes[name]).view(tensor.shape)
            start += sizes[name]
        return taken


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from [*module.named_parameters(recurse=False, remove_duplicate=False)]
    yield from [*module.named_buffers(recurse=False, remove_duplicate=False)]


def _copy_shard(parameter: torch.Tensor, full: torch.Tensor, deferred: DeferredFill | None = None) -> None:
    """Copy this rank's shard of `full` into `parameter`, or draw it.  No communication: every rank has the full
    tensor.
    """
    rows = local_rows(parameter)
    if rows is not None and deferred is not None:
        columns, kept = math.prod(full.shape[1:]), local(parameter.detach())
        kept.copy_(deferred.part(rows[0] * columns, rows[1] * columns).view(kept.shape))
    elif rows is not None and full.ndim:
        local(parameter.detach()).copy_(full[slice(*rows)])  # copies only these rows to the device
    elif isinstance(parameter, DTensor):
        part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local(parameter.detach()).copy_(local(part))
    else:
        parameter.detach().copy_(full)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, to detect values that initialization never writes.  Integers: the write itself is detected."""
    return tensor.fill_(torch.nan) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _is_poisoned(tensor: torch.Tensor) -> bool:
    # The sum is NaN if any element is, and needs no temporary.
    return bool(tensor.sum().isnan()) if tensor.is_floating_point() or tensor.is_complex() else False
