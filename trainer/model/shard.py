"""What is done to a model once: activation checkpointing, compilation, `fully_shard` bottom-up, prefetching.

After that the training step needs to know none of it.  Here too is what the step asks of a sharded model: when
gradients are reduced, and their global norm.  `fully_shard` is called nowhere else.

Source: FSDP2, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch._dynamo  # the first hook of FSDP2 would import it otherwise, in the midst of building
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard_module
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from trainer.config import AUTO, FsdpSection, RunConfig, budget_of
from trainer.errors import UserError, nearest, setting_error
from trainer.model.float8 import apply_float8
from trainer.model.parameters import local, tied_names
from trainer.model.recompute import Place, choose_kept, keep_all_costly, keeping
from trainer.recipe import Recipe, Unit, resolve

# ---------------------------------------------------------------------------------------------------------------
# Units


@dataclass(frozen=True)
class ShardUnit:
    """Modules whose parameters FSDP gathers together, with their dotted names."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    def __str__(self) -> str:
        return " + ".join(self.names)

    @property
    def depth(self) -> int:
        return max(name.count(".") for name in self.names)

    @property
    def fsdp_module(self) -> FSDPModule:
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module


def find_units(model: nn.Module, recipe: Recipe, wrap: str = "block") -> list[ShardUnit]:
    """Return the units that `fsdp.wrap` asks for, in the order of the forward pass, the root left out.

    Raises UserError for names that the model does not have, and for units that would part tied parameters.
    """
    if wrap.startswith("size:"):
        return _units_by_size(model, int(wrap.removeprefix("size:").replace("_", "")))
    if wrap == "block":
        listed = recipe.units(model) if callable(recipe.units) else recipe.units
        source = f"recipe {recipe.name!r}: units"
    else:
        listed = _units_by_function(model, resolve(wrap, "fsdp.wrap"))
        source = f"fsdp.wrap={wrap}"
    units = [unit for entry in listed for unit in _resolve_unit(model, entry, source)]
    _check_units(model, units, source)
    return units


def find_blocks(model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    """Return the model's repeated blocks: the recipe's units that are elements of a list of modules.

    Activation checkpointing and compilation work on these, whatever FSDP's own units are.
    """
    repeated = {
        id(child)
        for parent in model.modules()
        if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child in parent.children()
    }
    units = find_units(model, recipe)
    return [unit.modules[0] for unit in units if len(unit.modules) == 1 and id(unit.modules[0]) in repeated]


def _resolve_unit(model: nn.Module, entry: Unit, source: str) -> Iterator[ShardUnit]:
    names = {id(module): name for name, module in model.named_modules()}
    by_name = dict(model.named_modules())
    if isinstance(entry, (tuple, list)):
        parts = [part for item in entry for part in _resolve_unit(model, item, source)]
        yield ShardUnit(
            tuple(name for part in parts for name in part.names),
            tuple(module for part in parts for module in part.modules),
        )
    elif isinstance(entry, nn.Module):
        if id(entry) not in names:
            raise UserError(f"{source}: {type(entry).__name__} is not a submodule of the model")
        yield ShardUnit((names[id(entry)],), (entry,))
    elif isinstance(entry, str):
        # `*` stands for one part of a name: "layers.*" means the blocks, not what is inside them.
        found = [n for n in by_name if n.count(".") == entry.count(".") and fnmatch.fnmatchcase(n, entry)]
        if not found:
            wildcards = [f"{name.rpartition('.')[0]}.*" for name in by_name if "." in name]
            best = nearest(entry, [*wildcards, *filter(None, by_name)])
            raise UserError(f"{source}: the model has no module {entry!r}" + (f"; nearest: {best!r}" if best else ""))
        for name in found:
            yield ShardUnit((name,), (by_name[name],))
    else:
        raise UserError(f"{source}: a unit is a module, a name, or a tuple of those, not {type(entry).__name__}")


def _units_by_function(model: nn.Module, function: Callable[[nn.Module], Any]) -> Sequence[Unit]:
    """Return what the user's function lists; or, if it answers true or false, the modules for which it is true.

    The second form is FSDP1's `lambda_auto_wrap_policy`.
    """
    try:
        answer = function(model)
    except Exception as error:
        raise UserError(f"fsdp.wrap: {function.__qualname__} fails: {type(error).__name__}: {error}") from error
    if isinstance(answer, bool):
        return [module for name, module in model.named_modules() if name and function(module)]
    if not isinstance(answer, Iterable):
        rule = f"must return units or a truth value, not {type(answer).__name__}"
        raise UserError(f"fsdp.wrap: {function.__qualname__} {rule}")
    return list(answer)


def _units_by_size(model: nn.Module, min_parameters: int) -> list[ShardUnit]:
    """Return the smallest subtrees with at least `min_parameters` that no smaller unit holds.

    FSDP1's `size_based_auto_wrap_policy`.  A module that shares a parameter with the outside is left to a larger one.
    """
    ties = tied_names(model)
    chosen: list[ShardUnit] = []

    def visit(name: str, module: nn.Module) -> int:
        """Return the parameters below `module` that no unit holds yet."""
        inside = [
            visit(f"{name}.{child_name}" if name else child_name, child)
            for child_name, child in module.named_children()
        ]
        count = sum(inside) + sum(p.numel() for p in module.parameters(recurse=False))
        within = [[n.startswith(f"{name}.") for n in group] for group in ties]
        parts_a_tie = any(any(group) and not all(group) for group in within)
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if name and count >= min_parameters and not parts_a_tie and not is_container:
            chosen.append(ShardUnit((name,), (module,)))
            return 0
        return count

    visit("", model)
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return sorted(chosen, key=lambda unit: order[unit.names[0]])


def _check_units(model: nn.Module, units: list[ShardUnit], source: str) -> None:
    owner: dict[str, ShardUnit] = {}
    for unit in units:
        for name in unit.names:
            if not name:
                raise UserError(f"{source}: the whole model is no unit; the root is sharded in any case")
            if name in owner:
                raise UserError(f"{source}: {name!r} is in two units")
            owner[name] = unit
    for group in tied_names(model):
        homes = {id(_owner_of(name, owner)): _owner_of(name, owner) for name in group}
        if len(homes) > 1:
            where = ", ".join(
                f"{name!r} in {home or 'the root'}" for name, home in zip(group, homes.values(), strict=False)
            )
            together = tuple(name.rpartition(".")[0] for name in group)
            raise UserError(
                f"{source}: {' and '.join(map(repr, group))} are one parameter but would be in different units "
                f"({where}), where FSDP parts them\n  to fix: list one unit of both modules, {together}"
            )


def _owner_of(parameter_name: str, owner: dict[str, ShardUnit]) -> ShardUnit | None:
    """Return the innermost unit that holds the parameter, or None for the root."""
    name = parameter_name
    while name:
        name = name.rpartition(".")[0]
        if name in owner:
            return owner[name]
    return None


# ---------------------------------------------------------------------------------------------------------------
# Applying


def apply_sharding(model: nn.Module, recipe: Recipe, config: RunConfig, mesh: DeviceMesh) -> list[ShardUnit]:
    """Checkpoint, compile and shard `model` in place, bottom-up: inside the units, the units, then the root.

    The mesh is (shard,) or (replicate, shard).  Parameters become DTensors sharded on dim 0; on the meta device
    nothing is allocated.  Returns the units in the order of the forward pass.  Collective only where integer
    resharding makes process groups: one set, shared by all units.
    """
    train = config.train
    apply_weights_dtype(model, train.weights_dtype)
    works_on_blocks = train.activation_checkpoint != "none" or train.compile or train.float8 != "none"
    blocks = find_blocks(model, recipe) if works_on_blocks else []
    kept = kept_by_budget(model, blocks, config, train.activation_checkpoint, train.micro_batch_size)
    apply_float8(blocks, train.float8, mesh.device_type)
    units = find_units(model, recipe, config.fsdp.wrap)
    reshard = reshard_of_units(config.fsdp.reshard_after_forward, units, mesh.size(mesh.ndim - 1))
    if works_on_blocks:
        _check_blocks(blocks, units, config)
        apply_activation_checkpointing(blocks, train.activation_checkpoint, kept)
        if train.compile:
            for block in blocks:
                block.compile(fullgraph=True)

    policy = _precision(config)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.fsdp.cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, offload_policy=offload)
    own_outputs((*(module for unit in units for module in unit.modules), model))
    with _shared_reshard_meshes():
        for unit, after_forward in sorted(zip(units, reshard, strict=True), key=lambda pair: -pair[0].depth):
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            shard(modules, reshard_after_forward=after_forward, mp_policy=policy(is_root=False))
        root_reshards = {"always": True, "never": False}.get(str(config.fsdp.reshard_after_forward))
        shard(model, reshard_after_forward=root_reshards, mp_policy=policy(is_root=True))
    _set_prefetch(units, config.fsdp)
    return units


def apply_weights_dtype(model: nn.Module, weights_dtype: str) -> None:
    """Have the parameters of `model` kept in bfloat16, if that is asked for; what is tied stays so.

    With `float32` they are as the model has made them.  Buffers are left alone.
    """
    for parameter in model.parameters() if weights_dtype == "bfloat16" else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def check_sharding(config: RunConfig) -> None:
    """Raise UserError if units or their resharding do not fit the model, which is built on the meta device."""
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
    units = find_units(model, config.recipe, config.fsdp.wrap)
    reshard_of_units(config.fsdp.reshard_after_forward, units, num_shards=1)
    _check_blocks(find_blocks(model, config.recipe), units, config)


def _check_blocks(blocks: Sequence[nn.Module], units: Sequence[ShardUnit], config: RunConfig) -> None:
    """Raise UserError for what is to be done to blocks, and cannot be."""
    train = config.train
    for key, value in (("activation_checkpoint", train.activation_checkpoint), ("compile", train.compile)):
        if value not in ("none", AUTO, False) and not blocks:
            rule = f"recipe {config.recipe.name!r} lists no repeated block to apply it to"
            raise setting_error(f"train.{key}", value, rule, None)
    if train.activation_checkpoint == "selective" or budget_of(train.activation_checkpoint) is not None:
        _check_no_unit_inside(blocks, units, train.activation_checkpoint)


def reshard_of_units(
    setting: int | str | list[int | str], units: Sequence[ShardUnit], num_shards: int
) -> list[bool | int]:
    """Return `reshard_after_forward` of each unit: False, True, or the number of ranks to reshard to."""
    if isinstance(setting, list) and len(setting) != len(units):
        names = ", ".join(str(unit) for unit in units)
        best = (setting + ["always"] * len(units))[: len(units)]
        rule = f"a list needs one entry for each of the {len(units)} units ({names})"
        raise setting_error("fsdp.reshard_after_forward", setting, rule, best)
    entries = setting if isinstance(setting, list) else [setting] * len(units)
    meaning: dict[int | str, bool] = {"default": True, "always": True, "never": False, 1: False, num_shards: True}
    return [meaning.get(entry, int(entry) if isinstance(entry, int) else True) for entry in entries]


def checkpointing_choices(config: RunConfig) -> list[int | str]:
    """Return the settings of `train.activation_checkpoint` that the model's blocks and units allow."""
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
    blocks = find_blocks(model, config.recipe)
    choices: list[int | str] = ["none", *(n for n in (4, 2) if n <= len(blocks)), *(["full"] if blocks else [])]
    try:
        _check_no_unit_inside(blocks, find_units(model, config.recipe, config.fsdp.wrap), "selective")
    except UserError:
        return choices
    return [*choices, *(["selective"] if blocks else [])]


def _check_no_unit_inside(blocks: Sequence[nn.Module], units: Sequence[ShardUnit], setting: int | str) -> None:
    """Selective recomputation replays a block operator by operator, and a unit inside it gathers only once."""
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    for unit in units:
        if any(id(module) in inside for module in unit.modules):
            rule = f"cannot recompute a block in part when a unit ({unit}) lies inside it; units must be whole blocks"
            raise setting_error("train.activation_checkpoint", setting, rule, "full")


def kept_by_budget(
    model: nn.Module, blocks: Sequence[nn.Module], config: RunConfig, setting: int | str, micro_batch_size: int | str
) -> list[frozenset[Place]]:
    """Return which operators each block keeps under the setting `budget:<share>`; nothing for other settings.

    Raises UserError for a model whose own code cannot be run on tensors without values.
    """
    share = budget_of(setting)
    if share is None:
        return []
    shape, dtype = (int(micro_batch_size), config.data.seq_len), getattr(torch, config.fsdp.param_dtype)
    try:
        return choose_kept(model, blocks, shape, dtype, share)
    except Exception as error:  # the model's own
        text = str(error).splitlines()[0] if str(error) else ""
        rule = f"on tensors without values, which show what a block keeps, it fails with {type(error).__name__}: {text}"
        raise setting_error("train.activation_checkpoint", setting, rule, "selective") from error


def apply_activation_checkpointing(
    blocks: Sequence[nn.Module], setting: int | str, kept: Sequence[frozenset[Place]] = ()
) -> None:
    """Make each block (or every n-th) recompute its activations in the backward pass.

    `full` keeps a block's input alone; `selective` keeps the outputs of matrix products and attention too, and
    recomputes what is cheap; `budget:<share>` keeps what `kept_by_budget` has found for each block.  The block's
    `forward` is wrapped, not the block: names stay, and FSDP's hooks are outside, so that recomputation finds the
    parameters gathered.  Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198
    (selective).
    """
    if setting == "none":
        return
    every = setting if isinstance(setting, int) else 1
    contexts: list[dict[str, Any]] = [{}] * len(blocks)
    if setting == "selective":
        contexts = [{"context_fn": keep_all_costly}] * len(blocks)
    elif kept:
        contexts = [{"context_fn": keeping(places)} if places else {} for places in kept]
    for block, context in list(zip(blocks, contexts, strict=True))[every - 1 :: every]:
        block.forward = _recomputed(block.forward, context)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    """Return `forward` under `checkpoint`, as a function of Python's own: torch.compile enters no other."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return recomputed


def own_outputs(modules: Iterable[nn.Module]) -> None:
    """Have units hand on no view.  To be called before they are sharded, so that these hooks run before FSDP's.

    FSDP hangs the gather of the backward pass on a unit's output.  Whoever writes into that output in place would take
    the hook off it if it is a view, as the output of `nn.Linear` with a bias is.
    """
    hook: Callable[..., Any] = torch._dynamo.disable(_own_output)  # as FSDP's own are
    for module in modules:
        module.register_forward_hook(hook)


def _own_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return `output` with tensors of their own for views: copies, but for a plain layer, which keeps no other name."""
    if not torch.is_grad_enabled():
        return output
    is_plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if tensor._base is None or not tensor.requires_grad:
            return tensor
        return torch.ops.aten._unsafe_view(tensor, tensor.shape) if is_plain else tensor.clone()

    return tree_map_only(torch.Tensor, own, output)


def _precision(config: RunConfig) -> Callable[..., MixedPrecisionPolicy]:
    """Return the precision policy of a unit or of the root; only the root casts the output."""
    fsdp = config.fsdp
    param_dtype, reduce_dtype = getattr(torch, fsdp.param_dtype), getattr(torch, fsdp.reduce_dtype)
    output_dtype = getattr(torch, fsdp.output_dtype) if fsdp.output_dtype else None

    def policy(is_root: bool) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=None if fsdp.param_dtype == config.train.weights_dtype == "float32" else param_dtype,
            reduce_dtype=None if reduce_dtype == param_dtype else reduce_dtype,
            output_dtype=output_dtype if is_root else None,
        )

    return policy


_MAKES_RESHARD_MESH = "_get_post_forward_mesh_info"


@contextmanager
def _shared_reshard_meshes() -> Iterator[None]:
    """Let all units that reshard to n ranks share one mesh.

    `fully_shard` makes a mesh in every call: 80 blocks on 512 ranks made 5,760 process groups, this makes 72
    (pytorch issue 153302).  Remembers what the function that makes it returned for each n.
    """
    made: dict[bool | int, Any] = {}
    make = getattr(fully_shard_module, _MAKES_RESHARD_MESH)

    def make_once(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        if reshard_after_forward not in made:
            made[reshard_after_forward] = make(reshard_after_forward, mesh_info)
        return made[reshard_after_forward]

    setattr(fully_shard_module, _MAKES_RESHARD_MESH, make_once)
    try:
        yield
    finally:
        setattr(fully_shard_module, _MAKES_RESHARD_MESH, make)


def _set_prefetch(units: Sequence[ShardUnit], fsdp: FsdpSection) -> None:
    modules = [unit.fsdp_module for unit in units]
    for depth, order, name in (
        (fsdp.prefetch_forward, modules, "set_modules_to_forward_prefetch"),
        (fsdp.prefetch_backward, modules[::-1], "set_modules_to_backward_prefetch"),
    ):
        for position, module in enumerate(order if depth else ()):
            getattr(module, name)(order[position + 1 : position + 1 + depth])


# ---------------------------------------------------------------------------------------------------------------
# In the step


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool, fsdp: FsdpSection | None = None) -> Iterator[None]:
    """Reduce gradients in this backward pass, or let them accumulate until the one that does.

    The reduce-scatter over `shard` and the all-reduce over `replicate` both run in the enabled pass alone, and all
    gradients of the model lie unsharded on each rank in between; with `fsdp.accumulate=sharded` the reduce-scatter runs
    in every pass, and only shards lie there.
    """
    assert isinstance(model, FSDPModule)
    fsdp = fsdp or FsdpSection()
    # Not `set_is_last_backward` as well: it keeps FSDP from forgetting the order of the forward pass, and each further
    # micro-batch then gathers the last unit of the one before, for nothing.
    for module in _fsdp_modules(model):
        module.set_requires_gradient_sync(enabled or fsdp.accumulate == "sharded", recurse=False)
        module.set_requires_all_reduce(enabled, recurse=False)
        module.set_reshard_after_backward(enabled or fsdp.reshard_after_backward, recurse=False)
    yield


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered."""
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run forward passes alone inside the block: no gradients, evaluation mode; then free what they left gathered."""
    model.eval()
    with torch.no_grad():
        yield
    reshard(model)
    model.train()


_found: WeakKeyDictionary[nn.Module, list[ReferenceType[FSDPModule]]] = WeakKeyDictionary()


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on; looked for once, as a walk of a large model takes long."""
    if model not in _found:
        _found[model] = [ref(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return [module for reference in _found[model] if (module := reference()) is not None]


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Return the 2-norm of all gradients over all ranks: a scalar, the same on every rank.

    `gradients` are this rank's shards.  One all-reduce of a scalar over the `shard` axis; replicas hold equal shards.
    A value that is not finite on any rank makes the norm so on every rank of its replica group, and, the gradients
    having been reduced, on all.
    """
    device = torch.device(mesh.device_type)
    dtype = functools.reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    squares = torch.stack(torch._foreach_norm(gradients, 2.0, dtype)).to(device).square().sum()
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return squares.sqrt()


@torch.no_grad()
def clip_grad_norm(model: nn.Module, mesh: DeviceMesh, max_norm: float | None) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before that.

    One all-reduce of a scalar over the `shard` axis, and no host synchronisation.  Works on the local shards: going
    through DTensor costs a dispatch for every parameter.
    """
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise UserError("loss: no parameter received a gradient; the loss must depend on a trainable parameter")
    norm = gradient_norm(gradients, mesh)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm
