"""Prepares a model for training: wraps and compiles its blocks, shards its units, and sets up prefetching.

Only this module calls `fully_shard`.  The training step does not depend on how the model was prepared.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard_module
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.config.parallel import find_slices, nearest_divisor
from trainer.config.requirements import compiles_blocks
from trainer.config.rules import budget_of, offloaded_fraction
from trainer.config.schema import AUTO, FsdpSection, Resharding, RunConfig
from trainer.distributed.world import EXPERT, OUTER, REPLICATE, TENSOR, make_copy_mesh, name_of_group
from trainer.errors import UserError, print_stderr, reason_of, setting_error
from trainer.experts import find_experts, shard_experts
from trainer.model.float8 import apply_float8
from trainer.model.gradients import record_resharding
from trainer.model.network import build_network, storage_dtype
from trainer.model.offload import ActivationOffload
from trainer.model.parameters import record_copies, record_split_mesh
from trainer.model.placement import Division, divide, divides_evenly, num_dims_to_divide
from trainer.model.recompute import OperatorId, choose_saved_operators, save_expensive_operators, save_only
from trainer.model.tensor import TensorGroup, check_plan, split_model
from trainer.model.units import ShardUnit, find_blocks, find_units, is_embedding_unit
from trainer.model_spec import ModelSpec
from trainer.sequence import use_slices


def apply_sharding(
    model: nn.Module,
    spec: ModelSpec,
    config: RunConfig,
    mesh: DeviceMesh,
    split_meshes: Mapping[str, DeviceMesh] | None = None,
    copy_mesh: Callable[[DeviceMesh, int], DeviceMesh] = make_copy_mesh,
) -> list[ShardUnit]:
    """Apply the block settings to `model`, then shard it: innermost units first, the root last.  Works in place.

    The block settings are float8, activation checkpointing, activation offloading and compilation.  The mesh is
    (shard,) or (replicate, shard).  Parameters become DTensors, sharded on dimension 0 or, where that would need a lot
    of padding, on another dimension (`placement.divide`).  A stack with fewer matrices than there are ranks is sharded
    on the mesh that `copy_mesh` returns for `mesh` and the number of its matrices.  On the meta device nothing is
    allocated.  If `is_unsharded` returns True, the model keeps plain parameters; call
    `trainer.model.gradients.replicate` once they have values.  `split_meshes` holds the meshes for `mesh.expert` and
    `mesh.tensor` (`World.build_split_meshes`), on which experts and divided matrices are sharded.  Returns the units,
    in the order of `find_units`.

    Raises UserError for settings that the model, the device or the version of torch does not support.  Collective only
    if process groups are created: one set for each number of ranks to reshard to, shared by all units; one set for each
    number of matrices in stacks with fewer of them than there are ranks; and those for `fsdp.separate_reduce`.
    """
    train = config.train
    split_meshes = split_meshes or {}
    slices = find_slices(config, rank=0)
    if slices is not None and slices.tensor_count > 1:
        check_plan(model, spec, replace(slices, seq_len=4 * slices.num_ranks))
    compiles = _compiles(config, mesh.device_type, split_meshes)
    offload_fraction = offloaded_fraction(train.offload_activations)
    changes_blocks = train.activation_checkpoint != "none" or compiles or train.float8 != "none" or offload_fraction > 0
    blocks = find_blocks(model, spec) if changes_blocks else []
    saved_operators = operators_to_save(model, blocks, config, train.activation_checkpoint, train.micro_batch_size)
    apply_float8(blocks, train.float8, mesh.device_type)
    units = find_units(model, spec, config.fsdp.wrap)
    reshard = reshard_of_units(config.fsdp.reshard_after_forward, units, mesh.size(mesh.ndim - 1))
    if changes_blocks:
        _check_blocks(blocks, units, config)
        offload = None
        if offload_fraction:
            offload = ActivationOffload(model, blocks, offload_fraction, torch.device(mesh.device_type))
        apply_activation_checkpointing(
            blocks, train.activation_checkpoint, saved_operators, None if compiles else offload
        )
        if compiles:
            for block in blocks:
                block.compile(fullgraph=True)
        if offload is not None:
            offload.attach()

    forbid_view_outputs((*(module for unit in units for module in unit.modules), model))
    if is_unsharded(config, mesh.size(mesh.ndim - 1)):
        _cast_at_boundaries(model, units, config)
    else:
        # Turns parameters into DTensors on the inner axis of a split mesh; `fully_shard` then shards them further.
        for split_mesh in split_meshes.values():
            record_split_mesh(split_mesh, mesh)
        if EXPERT in split_meshes:
            check_experts(model, spec, units, config, mesh.size(mesh.ndim - 1))
            expert_axis = split_meshes[EXPERT][EXPERT]
            shard_experts([*find_experts(model, spec).values()], expert_axis, config.mesh.expert_method)
        if TENSOR in split_meshes:
            tensor_axis = split_meshes[TENSOR][TENSOR]
            group = TensorGroup(config.tensor, tensor_axis.get_local_rank(), name_of_group(tensor_axis))
            split_model(model, spec, group, tensor_axis)
        _shard(model, units, reshard, config, mesh, split_meshes, copy_mesh)
    return units


def _compiles(config: RunConfig, device_type: str, split_meshes: Mapping[str, DeviceMesh]) -> bool:
    """Return whether to compile the blocks.

    Before torch 2.15, a compiled block that is recomputed as a whole must not have parameters that are already
    DTensors: its forward pass fails.  Then `train.compile=true` is a UserError, and `auto` warns and does not compile.
    """
    train = config.train
    compiles = compiles_blocks(train.compile, device_type)
    recomputes_whole_blocks = train.activation_checkpoint == "full" or isinstance(train.activation_checkpoint, int)
    is_supported = TorchVersion(torch.__version__) >= "2.15" or not recomputes_whole_blocks
    if not compiles or not split_meshes or is_supported:
        return compiles
    axes = " ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in split_meshes)
    rule = (
        f"with {axes} and train.activation_checkpoint={train.activation_checkpoint}, compiled blocks need torch 2.15; "
        f"this is {torch.__version__}"
    )
    if train.compile is True:
        fix = "set train.activation_checkpoint=selective, or train.compile=false"
        raise setting_error("train.compile", True, rule, fix=fix)
    if dist.get_rank() == 0:
        print_stderr(f"warning: blocks are not compiled: {rule}; train.activation_checkpoint=selective works")
    return False


def is_unsharded(config: RunConfig, num_shards: int) -> bool:
    """Return whether every rank holds the full model as a plain module: with a single shard and a single dtype.

    FSDP would copy each parameter for every micro-batch and each gradient for every reduction, and a small model would
    spend a tenth of its step in FSDP's hooks.  With several dtypes FSDP is needed, since it keeps weights and
    accumulated gradients in their own dtypes.
    """
    fsdp, dtype = config.fsdp, storage_dtype(config)
    has_single_dtype = dtype == fsdp.param_dtype == fsdp.reduce_dtype and (dtype == "float32" or not config.lora.rank)
    return num_shards == 1 and has_single_dtype and not fsdp.cpu_offload


def check_experts(
    model: nn.Module, spec: ModelSpec, units: Sequence[ShardUnit], config: RunConfig, num_shards: int
) -> None:
    """Raise UserError if the experts of `model` cannot be divided among `mesh.expert` ranks."""
    size = config.expert
    if size == 1:
        return
    modules = find_experts(model, spec)
    if not modules:
        rule = f"the experts of {type(model).__name__} cannot be divided: it has none, or they are not stacked"
        raise setting_error("mesh.expert", size, rule, 1)
    inside = {id(child) for module in modules.values() for child in module.modules()}
    for unit in units:
        if any(id(module) in inside for module in unit.modules):
            rule = f"makes experts a separate unit ({unit}); with mesh.expert={size} they must be inside a larger unit"
            raise setting_error("fsdp.wrap", config.fsdp.wrap, rule, "block")
    for name, module in modules.items():
        for parameter_name, parameter in module.named_parameters():
            num_experts, num_groups = parameter.shape[0], num_shards // size
            if num_experts % size:
                rule = f"must divide the {num_experts} experts of {name}"
                raise setting_error("mesh.expert", size, rule, nearest_divisor(size, math.gcd(num_experts, num_shards)))
            if not divides_evenly(parameter.shape, num_shards, size, num_dims_to_divide(parameter.shape, config, True)):
                local_shape = (num_experts // size, *parameter.shape[1:])
                rule = (
                    f"leaves {name}.{parameter_name} of shape {local_shape} to be divided among {num_groups} ranks, "
                    f"but {num_groups} divides none of its dimensions"
                )
                raise setting_error("mesh.expert", size, rule, 1)


def _shard(
    model: nn.Module,
    units: Sequence[ShardUnit],
    reshard: Sequence[bool | int],
    config: RunConfig,
    mesh: DeviceMesh,
    split_meshes: Mapping[str, DeviceMesh],
    copy_mesh: Callable[[DeviceMesh, int], DeviceMesh],
) -> None:
    """Call `fully_shard` on the units, innermost first, then on the model itself."""
    if config.lora.packs and TorchVersion(torch.__version__) < "2.13":
        rule = (
            f"needs torch 2.13 to be sharded: earlier versions of FSDP cannot keep bytes; this is {torch.__version__}"
        )
        raise setting_error("lora.base_dtype", config.lora.base_dtype, rule, "bfloat16")
    for axis in split_meshes:
        if TorchVersion(torch.__version__) < "2.12":
            value = getattr(config, axis)
            rule = f"needs torch 2.12: earlier versions of FSDP support one mesh per unit; this is {torch.__version__}"
            raise setting_error(f"mesh.{axis}", value, rule, 1)
    policy = _precision_policies(config)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.fsdp.cpu_offload else OffloadPolicy()
    num_shards = mesh.size(mesh.ndim - 1)

    # FSDP's descriptions of the axes on which it shards divided parameters; those of one kind must share one object.
    split_mesh_infos: dict[str, Any] = {}
    for axis, split_mesh in split_meshes.items():
        if split_mesh.ndim == 2:
            split_mesh_infos[axis] = fsdp_common.FSDPMeshInfo(split_mesh[OUTER], shard_mesh_dim=0)
        else:
            replicated = split_mesh[REPLICATE, OUTER]
            split_mesh_infos[axis] = fsdp_common.HSDPMeshInfo(replicated, shard_mesh_dim=1, replicate_mesh_dim=0)

    def division(after_forward: bool | int, parameter: nn.Parameter) -> Division:
        num_dims = num_dims_to_divide(parameter.shape, config, after_forward)
        if not isinstance(parameter, DTensor):
            return divide(parameter.shape, num_shards, 1, 0, num_dims)
        (placed,) = parameter.placements
        return divide(parameter.shape, num_shards, parameter.device_mesh.size(), placed.dim, num_dims)  # type: ignore[attr-defined]

    @functools.cache
    def copies_info(num_parts: int) -> Any:
        if TorchVersion(torch.__version__) < "2.12":
            rule = f"needs torch 2.12 for stacks of {num_parts} matrices, such as experts; this is {torch.__version__}"
            fix = f"mesh.replicate={mesh.size() // num_parts} mesh.shard={num_parts}"
            raise setting_error("mesh.shard", num_shards, rule, fix=fix)
        copies = copy_mesh(mesh, num_parts)
        record_copies(copies, mesh)
        return fsdp_common.HSDPMeshInfo(copies, shard_mesh_dim=1, replicate_mesh_dim=0)

    def placement(after_forward: bool | int, parameter: nn.Parameter) -> Any:
        chosen = division(after_forward, parameter)
        placed = Shard(chosen.dim)
        if isinstance(parameter, DTensor):  # already divided, on the one axis that its mesh has
            (axis,) = parameter.device_mesh.mesh_dim_names or ()
            return fsdp_common.ShardPlacementResult(placed, split_mesh_infos[axis])
        if chosen.copies > 1:
            mesh_info = copies_info(chosen.parts)
            return fsdp_common.ShardPlacementResult(placed, mesh_info)
        return placed

    def shard(modules: Sequence[nn.Module], after_forward: bool | int, is_root: bool = False) -> None:
        fully_shard(
            modules[0] if len(modules) == 1 else list(modules),
            mesh=mesh,
            reshard_after_forward=after_forward,
            mp_policy=policy(is_root=is_root),
            offload_policy=offload,
            shard_placement_fn=partial(placement, after_forward),
        )
        for module in modules:
            record_resharding(module, after_forward)

    with _shared_reshard_meshes():
        for unit, after_forward in sorted(zip(units, reshard, strict=True), key=lambda pair: -pair[0].depth):
            shard(unit.modules, after_forward)
        # By default, the root stays gathered: its parameters are usually used first and last.
        shard([model], config.fsdp.reshard_after_forward == "always", is_root=True)
    _set_prefetch(units, config.fsdp)
    _set_communication(model, units, config.fsdp)


def _cast_at_boundaries(model: nn.Module, units: Sequence[ShardUnit], config: RunConfig) -> None:
    """Make an unsharded model cast the inputs of its units, and its output, as FSDP would."""
    policy = _precision_policies(config)(is_root=True)

    def cast_tensors(tensors: Any, dtype: torch.dtype | None) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tensors)

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_tensors(args, policy.param_dtype), cast_tensors(kwargs, policy.param_dtype)

    if policy.param_dtype is not None:
        for module in {model, *(unit.modules[0] for unit in units)}:
            module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    if policy.output_dtype is not None:
        model.register_forward_hook(lambda module, inputs, output: cast_tensors(output, policy.output_dtype))


def check_sharding(config: RunConfig, num_shards: int = 1) -> None:
    """Build the model on the meta device, and raise UserError if settings for units, blocks or experts do not fit it.

    num_shards: number of ranks on the shard axis, if known.
    """
    model = build_network(config)
    units = find_units(model, config.spec, config.fsdp.wrap)
    reshard_of_units(config.fsdp.reshard_after_forward, units, num_shards=1)
    if num_shards > 1 and config.mesh.expert != AUTO:
        check_experts(model, config.spec, units, config, num_shards)
    _check_blocks(find_blocks(model, config.spec), units, config)


def _check_blocks(blocks: Sequence[nn.Module], units: Sequence[ShardUnit], config: RunConfig) -> None:
    """Raise UserError for a setting that applies to blocks, if the model has no blocks or its units do not allow it."""
    train = config.train
    for key in ("activation_checkpoint", "compile", "offload_activations"):
        value = getattr(train, key)
        if value not in ("none", AUTO, False) and not blocks:
            rule = f"model {config.spec.name!r} lists no repeated blocks to apply it to"
            raise setting_error(f"train.{key}", value, rule, None)
    if train.activation_checkpoint == "selective" or budget_of(train.activation_checkpoint) is not None:
        _check_no_unit_inside(blocks, units, train.activation_checkpoint)


def reshard_of_units(setting: Resharding, units: Sequence[ShardUnit], num_shards: int) -> list[bool | int]:
    """Return `reshard_after_forward` for each unit: False, True, or the number of ranks to reshard to."""
    if isinstance(setting, list) and len(setting) != len(units):
        names = ", ".join(str(unit) for unit in units)
        best = (setting + ["always"] * len(units))[: len(units)]
        rule = f"a list needs one entry for each of the {len(units)} units ({names})"
        raise setting_error("fsdp.reshard_after_forward", setting, rule, best)
    return resolve_resharding(setting, [str(unit) for unit in units], num_shards)


def resolve_resharding(setting: Resharding, names: Sequence[str], num_shards: int) -> list[bool | int]:
    """Return `reshard_after_forward` for each unit: False, True, or the number of ranks to reshard to.

    By default the last unit does not reshard, since its backward pass comes next and would gather it again.  But if its
    name ends in a number, it is a block (an element of a module list), and reshards like the others.
    """
    if setting == "default":
        return [*(True for _ in names[:-1]), *(name.rpartition(".")[2].isdigit() for name in names[-1:])]
    entries: Sequence[int | str] = setting if isinstance(setting, list) else [setting] * len(names)
    meaning: dict[int | str, bool] = {"always": True, "never": False, 1: False, num_shards: True}
    return [meaning.get(entry, int(entry) if isinstance(entry, int) else True) for entry in entries]


def checkpointing_choices(config: RunConfig) -> list[int | str]:
    """Return the values of `train.activation_checkpoint` that the model's blocks and units support."""
    model = build_network(config)
    blocks = find_blocks(model, config.spec)
    choices: list[int | str] = ["none", *(n for n in (4, 2) if n <= len(blocks)), *(["full"] if blocks else [])]
    try:
        _check_no_unit_inside(blocks, find_units(model, config.spec, config.fsdp.wrap), "selective")
    except UserError:
        return choices
    return [*choices, *(["selective"] if blocks else [])]


def _check_no_unit_inside(blocks: Sequence[nn.Module], units: Sequence[ShardUnit], setting: int | str) -> None:
    """Raise UserError if a unit is inside a block.

    Selective checkpointing replays a block operator by operator, but FSDP gathers a unit inside it only once.
    """
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    for unit in units:
        if any(id(module) in inside for module in unit.modules):
            rule = f"cannot partially recompute a block that contains a unit ({unit}); units must be whole blocks"
            raise setting_error("train.activation_checkpoint", setting, rule, "full")


def operators_to_save(
    model: nn.Module, blocks: Sequence[nn.Module], config: RunConfig, setting: int | str, micro_batch_size: int | str
) -> list[frozenset[OperatorId]]:
    """Return the operators whose outputs each block saves with `budget:<fraction>`; an empty list for other settings.

    Raises UserError if the model's own code does not run on fake tensors.
    """
    budget = budget_of(setting)
    if budget is None:
        return []
    shape = (int(micro_batch_size) * config.rows_per_sample, config.data.seq_len // config.ranks_per_sample)
    dtype = getattr(torch, config.fsdp.param_dtype)
    if config.tensor > 1:
        model = copy.deepcopy(model)
        blocks = find_blocks(model, config.spec)
        split_model(model, config.spec, TensorGroup(config.tensor, rank=0, name=""), mesh=None)
    try:
        with use_slices(find_slices(config, rank=0)):
            return choose_saved_operators(model, blocks, shape, dtype, budget)
    except Exception as error:  # raised by the model's code
        rule = f"needs to run the model on fake tensors, which fails with {type(error).__name__}: {reason_of(error)}"
        raise setting_error("train.activation_checkpoint", setting, rule, "selective") from error


def apply_activation_checkpointing(
    blocks: Sequence[nn.Module],
    setting: int | str,
    saved_operators: Sequence[frozenset[OperatorId]] = (),
    offload: ActivationOffload | None = None,
) -> None:
    """Wrap `blocks` so that the backward pass recomputes what they would otherwise save.

    `full` saves only a block's input; a whole number n does so for every n-th block.  `selective` also saves the
    outputs of matmuls and attention, and recomputes the cheap operators.  `budget:<fraction>` saves the outputs of the
    operators that `operators_to_save` chose for each block.

    This wraps the block's `forward`, not the block, so that names do not change and FSDP's hooks stay outside: the
    parameters are already gathered when the block is recomputed.  With `offload`, the saved outputs of operators go to
    host memory.  Compiled blocks need no `offload` here, since hooks outside them see what they save.

    Sources: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198 (selective).
    """
    if setting == "none":
        return
    stride = setting if isinstance(setting, int) else 1
    make_contexts = create_selective_checkpoint_contexts if offload is None else offload.storing_contexts
    contexts: list[dict[str, Any]] = [{}] * len(blocks)
    if setting == "selective":
        context_fn = save_expensive_operators if offload is None else partial(save_expensive_operators, make_contexts)
        contexts = [{"context_fn": context_fn}] * len(blocks)
    elif saved_operators:
        contexts = [{"context_fn": save_only(saved, make_contexts)} if saved else {} for saved in saved_operators]
    for block, context in list(zip(blocks, contexts, strict=True))[stride - 1 :: stride]:
        block.forward = _with_checkpoint(block.forward, context)  # type: ignore[method-assign]


def _with_checkpoint(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    """Return `forward` wrapped in `checkpoint`: a plain function, since torch.compile cannot trace other callables."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return recomputed


def forbid_view_outputs(modules: Iterable[nn.Module]) -> None:
    """Prevent units from returning views.  Call this before sharding, so that these hooks run before FSDP's.

    FSDP registers the hook that gathers a unit for the backward pass on the unit's output.  If the output is a view,
    like that of `nn.Linear` with a bias, an in-place write to it removes the hook.  An unsharded model gets the same
    hooks, so that whatever trains on several ranks also trains on one.
    """
    hook: Callable[..., Any] = torch.compiler.disable(_replace_views)  # like FSDP's own hooks
    for module in modules:
        module.register_forward_hook(hook)


def _replace_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Replace views in `output` with copies; a plain layer's output has no other reference and needs no copy."""
    if not torch.is_grad_enabled():
        return output
    is_plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if tensor._base is None or not tensor.requires_grad:
            return tensor
        return torch.ops.aten._unsafe_view(tensor, tensor.shape) if is_plain else tensor.clone()

    if isinstance(output, torch.Tensor):  # fast path: no tree traversal in every forward pass
        return replace(output)
    return tree_map_only(torch.Tensor, replace, output)


def _precision_policies(config: RunConfig) -> Callable[..., MixedPrecisionPolicy]:
    """Return a function that creates the mixed-precision policy of a unit or, with `is_root`, of the root.

    Only the root casts its output.
    """
    fsdp = config.fsdp
    param_dtype, reduce_dtype = getattr(torch, fsdp.param_dtype), getattr(torch, fsdp.reduce_dtype)
    output_dtype = getattr(torch, fsdp.output_dtype) if fsdp.output_dtype else None
    if fsdp.param_dtype == storage_dtype(config) == "float32":
        param_dtype = None
        if fsdp.reduce_dtype == "float32":
            reduce_dtype = None  # otherwise FSDP looks for gradients to cast in units that took no part in the step

    def policy(is_root: bool) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,  # None is the compute dtype before torch 2.15, and the stored dtype from then on
            output_dtype=output_dtype if is_root else None,
        )

    return policy


_RESHARD_MESH_FUNCTION = "_get_post_forward_mesh_info"
"""FSDP's function that creates the mesh on which a unit reshards after its forward pass."""


@contextmanager
def _shared_reshard_meshes() -> Iterator[None]:
    """Make all units that reshard to n ranks share one mesh.

    `fully_shard` creates a mesh in every call: 80 blocks on 512 ranks would create 5,760 process groups instead of 72
    (pytorch issue 153302).  Caches the results of FSDP's own function by number of ranks.  If a later torch has no such
    function, at worst the start takes longer.
    """
    meshes: dict[bool | int, Any] = {}
    make = getattr(fully_shard_module, _RESHARD_MESH_FUNCTION, None)
    if make is None:
        yield
        return

    def make_once(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        if reshard_after_forward not in meshes:
            meshes[reshard_after_forward] = make(reshard_after_forward, mesh_info)
        return meshes[reshard_after_forward]

    setattr(fully_shard_module, _RESHARD_MESH_FUNCTION, make_once)
    try:
        yield
    finally:
        setattr(fully_shard_module, _RESHARD_MESH_FUNCTION, make)


def _set_communication(model: nn.Module, units: Sequence[ShardUnit], fsdp: FsdpSection) -> None:
    """Skip all-gathers that the backward pass does not need, and give reductions a separate communicator."""
    if fsdp.reshard_after_backward:  # otherwise this all-gather serves the next micro-batch too
        for unit in units:
            if is_embedding_unit(unit.modules, model):
                unit.fsdp_module.set_unshard_in_backward(False)
    if fsdp.separate_reduce:
        set_separate_group = getattr(model, "set_separate_reduce_scatter_group", None)
        if set_separate_group is None:
            raise setting_error("fsdp.separate_reduce", True, f"needs torch 2.13; this is {torch.__version__}", False)
        set_separate_group()


def _set_prefetch(units: Sequence[ShardUnit], fsdp: FsdpSection) -> None:
    """Let each unit prefetch the next few, in forward order and in backward order."""
    modules = [unit.fsdp_module for unit in units]
    for depth, order, name in (
        (fsdp.prefetch_forward, modules, "set_modules_to_forward_prefetch"),
        (fsdp.prefetch_backward, modules[::-1], "set_modules_to_backward_prefetch"),
    ):
        for position, module in enumerate(order if depth else ()):
            getattr(module, name)(order[position + 1 : position + 1 + depth])
