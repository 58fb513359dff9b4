"""Private torch names: a table of all that are used, and checks that the installed torch still has them.

A use that is missing in the table fails, and so does a row without a use. If torch has changed one of them, its check
fails here within seconds, rather than a run later.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
import torch.utils._python_dispatch
from torch.distributed.fsdp._fully_shard import _fully_shard

from tests.helpers.launch import REPOSITORY

SDPA = "torch:ops.aten._scaled_dot_product"
FSDP = "torch.distributed.fsdp._fully_shard"

PRIVATE: dict[str, str] = {
    # tensors, storages, operators
    "_cdata": "torch:UntypedStorage._cdata",
    "_version": "torch:Tensor._version",
    "_base": "torch:Tensor._base",
    "_foreach_add_": "torch:_foreach_add_",
    "_foreach_copy_": "torch:_foreach_copy_",
    "_foreach_mul_": "torch:_foreach_mul_",
    "_foreach_norm": "torch:_foreach_norm",
    "_foreach_sub_": "torch:_foreach_sub_",
    "_scaled_dot_product_flash_attention": f"{SDPA}_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu": f"{SDPA}_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention": f"{SDPA}_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention": f"{SDPA}_cudnn_attention_backward",
    "_varlen_attn": "torch:ops.torch_attn._varlen_attn.default",
    "_scaled_mm": "torch:ops.aten._scaled_mm.default",
    "_grouped_mm": "torch:ops.aten._grouped_mm.default",
    "_unsafe_view": "torch:ops.aten._unsafe_view.default",
    # modules
    "_apply": "torch.nn:Module._apply",
    "_extra_state": "torch.nn.modules.module:_EXTRA_STATE_KEY_SUFFIX",
    "_reset_parameters": "torch.nn:MultiheadAttention._reset_parameters",
    "_compiled_call_impl": "torch.nn:Module._compiled_call_impl",
    # autograd, compilation, profiling
    "_dynamo": "torch:_dynamo",
    "torch._dynamo": "torch:_dynamo",
    "_execution_engine": "torch.autograd:Variable._execution_engine.queue_callback",
    "_is_profiler_enabled": "torch.autograd.profiler:_is_profiler_enabled",
    "_dump_snapshot": "torch.cuda.memory:_dump_snapshot",
    "_set_allocator_settings": "torch.cuda.memory:_set_allocator_settings",
    "_record_memory_history": "torch.cuda.memory:_record_memory_history",
    # distributed
    "torch._C._distributed_c10d": "torch._C:_distributed_c10d",
    "_dump_nccl_trace": "torch._C:_distributed_c10d",  # itself only in builds with NCCL
    "_dump_nccl_trace_json": "torch._C:_distributed_c10d",
    "_set_pg_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    "_get_post_forward_mesh_info": f"{FSDP}._fully_shard:_get_post_forward_mesh_info",
    "_op_dispatcher": "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
    "_clear_DTensor_sharding_propagator_cache": "torch._C:_clear_DTensor_sharding_propagator_cache",
    f"{FSDP}._fully_shard": f"{FSDP}:_fully_shard",
    f"{FSDP}._fsdp_common": f"{FSDP}._fsdp_common:HSDPMeshInfo",
    # tensors without values, trees
    "torch._subclasses.fake_tensor.FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "torch.utils._python_dispatch:"
    "is_traceable_wrapper_subclass",
    "torch.utils._pytree": "torch.utils:_pytree.tree_unflatten",
    "torch.utils._pytree.tree_leaves": "torch.utils._pytree:tree_leaves",
    "torch.utils._pytree.tree_map_only": "torch.utils._pytree:tree_map_only",
    # torchdata
    "_workers": "torchdata.stateful_dataloader.stateful_dataloader self._workers",
}
"""Each private name, and where it is defined: an object, or an object whose source has the text after the space."""

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
            yield from (name for name in names if re.search(r"\._[a-z]", name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if re.match(r"torch.*\._[a-z]", alias.name))
        elif isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
            yield from re.findall(r"^_[a-z]\w+$", node.value)


def test_table_lists_all_private_torch_names_in_use() -> None:
    trees = [ast.parse(path.read_text()) for path in FILES]
    own = own_names(trees)
    found = {name for tree in trees for name in uses(tree, own)} - OTHER
    assert not found - set(PRIVATE), "is there a public name for it? if not, add it with a check"
    assert not set(PRIVATE) - found, "no longer used: take it out"


def test_installed_torch_has_the_private_names() -> None:
    missing = {}
    for name, place in PRIVATE.items():
        where, _, text = place.partition(" ")
        try:
            found: Any = pkgutil.resolve_name(where)
        except (AttributeError, ImportError) as error:
            missing[name] = str(error)
        else:
            if text and text not in inspect.getsource(found):
                missing[name] = f"{text} is not in the source of {where}"
    assert not missing


def test_private_names_do_what_is_relied_upon() -> None:
    ones = [torch.ones(1)]
    torch._foreach_add_(ones, 1)
    assert ones[0].item() == 2, "in place"
    assert torch._foreach_norm([torch.ones(4)], 2.0, torch.float32)[0] == 2
    assert torch.ones(4).view(2, 2)._base is not None
    assert {"self", "mat2", "offs"} <= {each.name for each in torch.ops.aten._grouped_mm.default._schema.arguments}
    arguments = inspect.signature(_fully_shard._get_post_forward_mesh_info).parameters
    assert [*arguments][:2] == ["reshard_after_forward", "mesh_info"]
