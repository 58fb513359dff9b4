"""Prepares a model once: activation checkpointing, compilation, `fully_shard` bottom-up, prefetching.

After that the training step needs to know none of it.  `fully_shard` is called nowhere else.

Source: FSDP2, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo  # the first hook of FSDP2 would import it otherwise, in the midst of building
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard_module
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from trainer.config import AUTO, FsdpSection, RunConfig, budget_of, find_slices
from trainer.config.requirements import compiles_blocks
from trainer.errors import UserError, setting_error
from trainer.model.float8 import apply_float8
from trainer.model.network import build_network, kept_dtype
from trainer.model.recompute import Place, choose_kept, keep_all_costly, keeping
from trainer.model.units import ShardUnit, find_blocks, find_units, is_looked_up
from trainer.recipe import Recipe
from trainer.sequence import sliced


def apply_sharding(model: nn.Module, recipe: Recipe, config: RunConfig, mesh: DeviceMesh) -> list[ShardUnit]:
    """Checkpoint, compile and shard `model` in place, bottom-up: inside the units, the units, then the root.

    The mesh is (shard,) or (replicate, shard).  Parameters become DTensors sharded on dim 0; on the meta device nothing
    is allocated.  A model that `stays_whole` keeps plain ones: once they have values, call `replicate`.  Returns the
    units in the order of the forward pass.
    Collective only where integer resharding makes process groups: one set, shared by all units.
    """
    train = config.train
    compiles = compiles_blocks(train.compile, mesh.device_type)
    works_on_blocks = train.activation_checkpoint != "none" or compiles or train.float8 != "none"
    blocks = find_blocks(model, recipe) if works_on_blocks else []
    kept = kept_by_budget(model, blocks, config, train.activation_checkpoint, train.micro_batch_size)
    apply_float8(blocks, train.float8, mesh.device_type)
    units = find_units(model, recipe, config.fsdp.wrap)
    reshard = reshard_of_units(config.fsdp.reshard_after_forward, units, mesh.size(mesh.ndim - 1))
    if works_on_blocks:
        _check_blocks(blocks, units, config)
        apply_activation_checkpointing(blocks, train.activation_checkpoint, kept)
        if compiles:
            for block in blocks:
                block.compile(fullgraph=True)

    own_outputs((*(module for unit in units for module in unit.modules), model))
    if stays_whole(config, mesh.size(mesh.ndim - 1)):
        _cast_at_borders(model, units, config)
    else:
        _shard(model, units, reshard, config, mesh)
    return units


def stays_whole(config: RunConfig, num_shards: int) -> bool:
    """Return whether every rank has the model whole, as a plain module: it keeps one dtype, and there is one shard.

    FSDP would copy each parameter for every micro-batch and each gradient for every reduction, and a small model's step
    would spend a tenth of its time in FSDP's hooks.  With several dtypes FSDP keeps those in which weights are stored
    and gradients add up.
    """
    fsdp, dtype = config.fsdp, kept_dtype(config)
    is_one_dtype = dtype == fsdp.param_dtype == fsdp.reduce_dtype and (dtype == "float32" or not config.lora.rank)
    return num_shards == 1 and is_one_dtype and not fsdp.cpu_offload


def _shard(
    model: nn.Module, units: Sequence[ShardUnit], reshard: Sequence[bool | int], config: RunConfig, mesh: DeviceMesh
) -> None:
    """Call `fully_shard` on the units, the innermost first, and on the model."""
    policy = _precision(config)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.fsdp.cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, offload_policy=offload)
    with _shared_reshard_meshes():
        for unit, after_forward in sorted(zip(units, reshard, strict=True), key=lambda pair: -pair[0].depth):
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            shard(modules, reshard_after_forward=after_forward, mp_policy=policy(is_root=False))
        root_reshards = {"always": True, "never": False}.get(str(config.fsdp.reshard_after_forward))
        shard(model, reshard_after_forward=root_reshards, mp_policy=policy(is_root=True))
    _set_prefetch(units, config.fsdp)
    _set_communication(model, units, config.fsdp)


def _cast_at_borders(model: nn.Module, units: Sequence[ShardUnit], config: RunConfig) -> None:
    """Cast what comes into a unit of an unsharded model, and what leaves the model, as FSDP does."""
    policy = _precision(config)(is_root=True)
    if policy.param_dtype is not None:
        for module in {model, *(unit.modules[0] for unit in units)}:
            module.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), with_kwargs=True)
    if policy.output_dtype is not None:
        model.register_forward_hook(partial(_cast_output, policy.output_dtype))


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(tensors: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tensors)


def check_sharding(config: RunConfig) -> None:
    """Raise UserError if units or their resharding do not fit the model, which is built on the meta device."""
    model = build_network(config)
    units = find_units(model, config.recipe, config.fsdp.wrap)
    reshard_of_units(config.fsdp.reshard_after_forward, units, num_shards=1)
    _check_blocks(find_blocks(model, config.recipe), units, config)


def _check_blocks(blocks: Sequence[nn.Module], units: Sequence[ShardUnit], config: RunConfig) -> None:
    """Raise UserError for what is to be done to blocks, and cannot be."""
    train = config.train
    for key, value in (("activation_checkpoint", train.activation_checkpoint), ("compile", train.compile)):
        if value not in ("none", AUTO, False) and not blocks:
            rule = f"recipe {config.recipe.name!r} lists no repeated blocks to apply it to"
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
    return resharding(setting, [str(unit) for unit in units], num_shards)


def resharding(setting: int | str | list[int | str], names: Sequence[str], num_shards: int) -> list[bool | int]:
    """Return what each unit does after its forward pass: stay as it is, reshard, or reshard to a number of ranks.

    By default the last one stays where it is no block: its backward pass, which comes next, would gather it again.
    """
    if setting == "default":
        return [*(True for _ in names[:-1]), *(_is_block(name) for name in names[-1:])]
    entries: Sequence[int | str] = setting if isinstance(setting, list) else [setting] * len(names)
    meaning: dict[int | str, bool] = {"always": True, "never": False, 1: False, num_shards: True}
    return [meaning.get(entry, int(entry) if isinstance(entry, int) else True) for entry in entries]


def _is_block(name: str) -> bool:
    """Return whether a unit is one of a list of modules, by its name."""
    return name.rpartition(".")[2].isdigit()


def checkpointing_choices(config: RunConfig) -> list[int | str]:
    """Return the settings of `train.activation_checkpoint` that the model's blocks and units allow."""
    model = build_network(config)
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
    shape = (int(micro_batch_size) * config.rows_per_sample, config.data.seq_len // config.context)
    dtype = getattr(torch, config.fsdp.param_dtype)
    try:
        with sliced(find_slices(config, rank=0)):
            return choose_kept(model, blocks, shape, dtype, share)
    except Exception as error:  # the model's own
        text = str(error).splitlines()[0] if str(error) else ""
        rule = (
            f"traced on meta tensors, which shows the memory of a block, it fails with {type(error).__name__}: {text}"
        )
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

    FSDP hangs the gather of the backward pass on a unit's output.  Code that writes into that output in place would
    take the hook off it if it is a view, as the output of `nn.Linear` with a bias is.  A model that is not sharded has
    its outputs treated alike, so that whatever trains on several ranks trains on one.
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

    if isinstance(output, torch.Tensor):  # without a walk over a tree, in every forward pass of every unit
        return own(output)
    return tree_map_only(torch.Tensor, own, output)


def _precision(config: RunConfig) -> Callable[..., MixedPrecisionPolicy]:
    """Return the precision policy of a unit or of the root; only the root casts the output."""
    fsdp = config.fsdp
    param_dtype, reduce_dtype = getattr(torch, fsdp.param_dtype), getattr(torch, fsdp.reduce_dtype)
    output_dtype = getattr(torch, fsdp.output_dtype) if fsdp.output_dtype else None

    def policy(is_root: bool) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=None if fsdp.param_dtype == kept_dtype(config) == "float32" else param_dtype,
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


def _set_communication(model: nn.Module, units: Sequence[ShardUnit], fsdp: FsdpSection) -> None:
    """Leave out gathers that the backward pass has no use for, and give reductions a communicator of their own."""
    if fsdp.reshard_after_backward:  # else what is gathered then saves the next micro-batch's
        for unit in units:
            if is_looked_up(unit.modules, model):
                unit.fsdp_module.set_unshard_in_backward(False)
    if fsdp.separate_reduce:
        separate = getattr(model, "set_separate_reduce_scatter_group", None)
        if separate is None:
            raise setting_error("fsdp.separate_reduce", True, f"needs torch 2.13, this is {torch.__version__}", False)
        separate()


def _set_prefetch(units: Sequence[ShardUnit], fsdp: FsdpSection) -> None:
    modules = [unit.fsdp_module for unit in units]
    for depth, order, name in (
        (fsdp.prefetch_forward, modules, "set_modules_to_forward_prefetch"),
        (fsdp.prefetch_backward, modules[::-1], "set_modules_to_backward_prefetch"),
    ):
        for position, module in enumerate(order if depth else ()):
            getattr(module, name)(order[position + 1 : position + 1 + depth])
