"""Private torch names: a table of all that are used, each with its reason, and checks that torch still has them.

A use that is missing in the table fails, and so does a row without a use. If torch has changed one of them, its check
fails here within seconds, rather than a run later, and says what it breaks.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
import torch.utils._python_dispatch
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fully_shard
from torch.torch_version import TorchVersion

from tests.helpers.launch import REPOSITORY

SDPA = "torch:ops.aten._scaled_dot_product"
FSDP = "torch.distributed.fsdp._fully_shard"


@dataclass(frozen=True)
class Private:
    """A private name of torch."""

    place: str
    """Where it is defined: an object, or an object whose source has the text after the space."""
    reason: str
    """What it is for, and why a public name does not do."""
    without: str
    """What a torch without it breaks."""


_IN_PLACE = "one kernel for many tensors; torch lists these functions in its documentation, but only under this name"
_SLOWER = "no optimizer step; a loop over tensors would do, at a launch for each"
_ATTENTION = "recomputation and the planner must know the kernels of attention, which have no public operator"
_NOT_SAVED = "recomputes attention that it should save, and plans the wrong memory and time, with this kernel"
_NCCL = "NCCL's flight recorder, which says what ranks were waiting for; only a debugging server of torch reads it"
_NO_RECORDER = "a run that hangs ends without the list of unfinished collectives"
_HISTORY = "the history of allocations, which torch documents under this name only"
_NO_HISTORY = "log.profile_steps writes no history of memory"
_TREES = "tensors in arguments and outputs of any form; torch.utils has no public module for trees"
_NO_TREES = "activations on the host, recomputation, casts, and plans: everything that looks into what modules return"
_PROPAGATION = "clears what DTensor remembers of meshes; torch's function for this is private too, and slow to import"
_STALE = "a second Trainer in a process may communicate in groups of the first, which are closed"

PRIVATE: dict[str, Private] = {
    # tensors, storages, operators
    "_cdata": Private(
        "torch:UntypedStorage._cdata",
        "identifies a storage, also of fake tensors, which have no address",
        "activations on the host and train.activation_checkpoint=budget count shared storages twice",
    ),
    "_version": Private(
        "torch:Tensor._version",
        "tells whether a tensor was written to, which autograd does not say before its own error",
        "offloaded activations that were modified give wrong gradients; a frozen module that changes is not found",
    ),
    "_make_wrapper_subclass": Private(
        "torch:Tensor._make_wrapper_subclass",
        "makes the tensor without memory that records an initialization; tensor subclasses have no other way",
        "no model can be initialized",
    ),
    "_base": Private(
        "torch:Tensor._base",
        "tells whether a unit's output is a view, whose hook FSDP loses after an in-place write",
        "each output of a unit must be copied",
    ),
    "_unsafe_view": Private(
        "torch:ops.aten._unsafe_view.default",
        "makes a tensor of the output of a linear layer that is no view, without a copy",
        "each output of a linear unit must be copied",
    ),
    "_foreach_add_": Private("torch:_foreach_add_", _IN_PLACE, _SLOWER),
    "_foreach_copy_": Private("torch:_foreach_copy_", _IN_PLACE, _SLOWER),
    "_foreach_mul_": Private("torch:_foreach_mul_", _IN_PLACE, _SLOWER),
    "_foreach_norm": Private(
        "torch:_foreach_norm",
        "norms of all gradients at once, in float32; torch.nn.utils.get_total_norm has no dtype",
        _SLOWER,
    ),
    "_foreach_sub_": Private("torch:_foreach_sub_", _IN_PLACE, _SLOWER),
    "_scaled_dot_product_flash_attention": Private(f"{SDPA}_flash_attention_backward", _ATTENTION, _NOT_SAVED),
    "_scaled_dot_product_flash_attention_for_cpu": Private(
        f"{SDPA}_flash_attention_for_cpu_backward", _ATTENTION, _NOT_SAVED
    ),
    "_scaled_dot_product_efficient_attention": Private(f"{SDPA}_efficient_attention_backward", _ATTENTION, _NOT_SAVED),
    "_scaled_dot_product_cudnn_attention": Private(f"{SDPA}_cudnn_attention_backward", _ATTENTION, _NOT_SAVED),
    "_varlen_attn": Private("torch:ops.torch_attn._varlen_attn.default", _ATTENTION, _NOT_SAVED),
    "_scaled_mm": Private(
        "torch:ops.aten._scaled_mm.default",
        "the operator of float8 matmuls, which selective recomputation saves",
        "float8 matmuls are recomputed",
    ),
    "_grouped_mm": Private(
        "torch:ops.aten._grouped_mm.default",
        "the operator of torch.nn.functional.grouped_mm, which selective recomputation saves",
        "the matmuls of experts of models from transformers are recomputed",
    ),
    # modules
    "_apply": Private(
        "torch.nn:Module._apply",
        "replaces tensors on the meta device in parameters and buffers",
        "no start",
    ),
    "_extra_state": Private(
        "torch.nn.modules.module:_EXTRA_STATE_KEY_SUFFIX",
        "the documented key of a module's extra state in its state dict",
        "extra states of modules are not restored",
    ),
    "_reset_parameters": Private(
        "torch.nn:MultiheadAttention._reset_parameters",
        "draws the initial weights of torch's own attention, which has no public reset_parameters",
        "torch.nn.MultiheadAttention must be given initial weights by the model",
    ),
    "_compiled_call_impl": Private(
        "torch.nn:Module._compiled_call_impl",
        "tells whether a module is compiled, and lets copies to the host run outside compiled code",
        "train.offload_activations with train.compile; compiled recurrent layers of transformers are not refused",
    ),
    # autograd, compilation, profiling
    "_dynamo": Private(
        "torch:_dynamo",
        "raises the limit of graphs for one function only; torch.compiler.config is for all",
        "optimizers of several dtypes in one process fall back to slow eager code",
    ),
    "_execution_engine": Private(
        "torch.autograd:Variable._execution_engine.queue_callback",
        "runs when a backward pass has ended, whichever parameter was last; autograd has no public hook for this",
        "replicas do not average gradients; a hang is reported in the wrong phase",
    ),
    "_is_profiler_enabled": Private(
        "torch.autograd.profiler:_is_profiler_enabled",
        "tells whether another profiler is running, beside which torch starts none",
        "log.profile_steps under another profiler ends the run with an error",
    ),
    "_dump_snapshot": Private("torch.cuda.memory:_dump_snapshot", _HISTORY, _NO_HISTORY),
    "_record_memory_history": Private("torch.cuda.memory:_record_memory_history", _HISTORY, _NO_HISTORY),
    "_set_allocator_settings": Private(
        "torch.cuda.memory:_set_allocator_settings",
        "turns expandable segments off where the driver refuses them; the public variable is read before that is known",
        "no start on such a driver, unless PYTORCH_CUDA_ALLOC_CONF is set",
    ),
    # distributed
    "torch._C._distributed_c10d": Private("torch._C:_distributed_c10d", _NCCL, _NO_RECORDER),
    "_dump_nccl_trace": Private("torch._C:_distributed_c10d", _NCCL, _NO_RECORDER),  # only in builds with NCCL
    "_dump_nccl_trace_json": Private("torch._C:_distributed_c10d", _NCCL, _NO_RECORDER),
    "_set_pg_timeout": Private(
        "torch.distributed.distributed_c10d:_set_pg_timeout",
        "gives the groups of a mesh the run's timeout; init_process_group's does not reach them",
        "with torch that has no public set_timeout either, lost ranks are waited for for 30 minutes",
    ),
    "_C": Private("torch:_C", _PROPAGATION, _STALE),  # the module of the last of these
    "_op_dispatcher": Private(
        "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
        _PROPAGATION,
        _STALE,
    ),
    "_clear_DTensor_sharding_propagator_cache": Private(
        "torch._C:_clear_DTensor_sharding_propagator_cache", _PROPAGATION, _STALE
    ),
    f"{FSDP}._fsdp_common": Private(
        f"{FSDP}._fsdp_common:HSDPMeshInfo",
        "what shard_placement_fn returns for a parameter on a mesh of its own; documented, but exported nowhere",
        "no mesh.expert, and no fewer experts than ranks",
    ),
    f"{FSDP}._fully_shard": Private(
        f"{FSDP}:_fully_shard", "the module of the function below", "no start: it is imported"
    ),
    "_get_post_forward_mesh_info": Private(
        f"{FSDP}._fully_shard:_get_post_forward_mesh_info",
        "lets units share the mesh on which they reshard to n ranks (pytorch issue 153302)",
        "nothing but time: 80 blocks on 512 ranks open 5,760 process groups at the start instead of 72",
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Private(
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "where a tensor lies in a file, as torch's own metadata of a checkpoint say it",
        "no checkpoint that other tools read with torch.distributed.checkpoint",
    ),
    # tensors without values, trees
    "torch._subclasses.fake_tensor.FakeTensorMode": Private(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "runs a model without memory or time; exported nowhere, though torch's documentation describes it",
        "no plans, and no train.activation_checkpoint=budget",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Private(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "sees each operator that runs; exported nowhere, though torch's documentation describes it",
        "no plans, no activations on the host with recomputation, and full instead of sharded initial weights",
    ),
    "torch.utils._pytree": Private("torch.utils:_pytree.tree_unflatten", _TREES, _NO_TREES),
    "torch.utils._pytree.tree_leaves": Private("torch.utils._pytree:tree_leaves", _TREES, _NO_TREES),
    "torch.utils._pytree.tree_map_only": Private("torch.utils._pytree:tree_map_only", _TREES, _NO_TREES),
    # torchdata
    "_workers": Private(
        "torchdata.stateful_dataloader.stateful_dataloader self._workers",
        "the processes of a loader, to end those that do not end themselves",
        "a worker that hangs outlives its run",
    ),
}

MOST_USES = 60
"""How many uses there are at most: a reading of what a release of torch may break, and no rule of style. If a use is
worth its reason and its check above, raise it."""

OTHER = {
    *("_exit", "_scales", "_scale_inv", "_getframe", "_current_frames", "_replace", "_means", "_worker", "_backward"),
    *("_low", "_high", "_share", "_time_seconds", "_next_step"),
    *("_apply_gate", "_bias", "_init_weights", "_is_hf_initialized", "_keys_to_ignore_on_load_unexpected"),
    *("_no_split_modules", "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation"),
    *("_name_or_path", "_commit_hash"),
}
"""Of Python itself, trackio or transformers, or ends of names that stand in texts."""

FILES = sorted(path for folder in ("trainer", "recipes", "objectives") for path in (REPOSITORY / folder).rglob("*.py"))


def own_names(trees: Sequence[ast.Module]) -> set[str]:
    """Return the names that the project itself defines: those with an underscore are its own private parts."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield every private name of another library in a file: imported, an attribute, or in a text by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if re.search(r"\._[A-Za-z]", name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if re.match(r"torch.*\._[A-Za-z]", alias.name))
        elif isinstance(node, ast.Attribute) and re.match(r"_[A-Za-z]", node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
            yield from re.findall(r"^_[a-z]\w+$", node.value)


def all_uses() -> list[str]:
    """Return the uses of private names in the project, except those in `OTHER`."""
    trees = [ast.parse(path.read_text()) for path in FILES]
    own = own_names(trees)
    return [name for tree in trees for name in uses(tree, own) if name not in OTHER]


def test_table_lists_all_private_torch_names_in_use() -> None:
    found = set(all_uses())
    assert not found - set(PRIVATE), "is there a public name for it? if not, add it with a reason and a check"
    assert not set(PRIVATE) - found, "no longer used: take it out"


def test_uses_of_private_torch_names_are_few() -> None:
    assert len(all_uses()) <= MOST_USES, sorted(all_uses())


def test_installed_torch_has_the_private_names() -> None:
    missing = []
    for name, private in PRIVATE.items():
        where, _, text = private.place.partition(" ")
        try:
            found: Any = pkgutil.resolve_name(where)
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {error}; without it: {private.without}")
        else:
            if text and text not in inspect.getsource(found):
                missing.append(f"{name}: {text} is not in the source of {where}; without it: {private.without}")
    assert not missing, f"torch {torch.__version__}"


def test_private_names_do_what_is_relied_upon() -> None:
    ones = [torch.ones(1)]
    torch._foreach_add_(ones, 1)
    assert ones[0].item() == 2, "in place"
    assert torch._foreach_norm([torch.ones(4)], 2.0, torch.float32)[0] == 2
    assert torch.ones(4).view(2, 2)._base is not None
    assert {"self", "mat2", "offs"} <= {each.name for each in torch.ops.aten._grouped_mm.default._schema.arguments}
    if TorchVersion(torch.__version__) >= "2.12":
        arguments = inspect.signature(_fsdp_common.ShardPlacementResult).parameters
        assert [*arguments] == ["placement", "mesh_info"]
    arguments = inspect.signature(_fsdp_common.HSDPMeshInfo).parameters
    assert {"mesh", "shard_mesh_dim", "replicate_mesh_dim"} <= {*arguments}
    arguments = inspect.signature(_fully_shard._get_post_forward_mesh_info).parameters
    assert [*arguments][:2] == ["reshard_after_forward", "mesh_info"]
