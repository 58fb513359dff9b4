"""Private torch names: a table of all that are used, and checks that the installed torch still has them.

A use that is missing in the table fails, and so does a row without a use. If torch has changed one of them, its check
fails here within seconds, rather than a run later.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._subclasses.fake_tensor
import torch.distributed as dist
import torch.nn.attention.varlen  # registers its operator
import torch.utils._python_dispatch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_state, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torchdata.stateful_dataloader import stateful_dataloader

from tests.helpers.forked import REPOSITORY

MOST_USES = 75

PRIVATE: dict[str, Callable[[], object]] = {
    # tensors, storages, operators
    "_cdata": lambda: isinstance(torch.ones(1).untyped_storage()._cdata, int),
    "_version": lambda: torch.ones(1)._version == 0,
    "_base": lambda: torch.ones(4).view(2, 2)._base is not None,
    "_foreach_add_": lambda: _is_in_place(lambda ones: torch._foreach_add_(ones, 1), 2),
    "_foreach_copy_": lambda: _is_in_place(lambda ones: torch._foreach_copy_(ones, [torch.zeros(())]), 0),
    "_foreach_mul_": lambda: _is_in_place(lambda ones: torch._foreach_mul_(ones, torch.full((), 3.0)), 3),
    "_foreach_norm": lambda: torch._foreach_norm([torch.ones(4)], 2.0, torch.float32)[0] == 2,
    "_foreach_sub_": lambda: _is_in_place(lambda ones: torch._foreach_sub_(ones, [torch.ones(())]), 0),
    "_scaled_dot_product_flash_attention": lambda: _has_backward("flash_attention"),
    "_scaled_dot_product_flash_attention_for_cpu": lambda: _has_backward("flash_attention_for_cpu"),
    "_scaled_dot_product_efficient_attention": lambda: _has_backward("efficient_attention"),
    "_scaled_dot_product_cudnn_attention": lambda: _has_backward("cudnn_attention"),
    "_varlen_attn": lambda: torch.ops.torch_attn._varlen_attn.default,
    "_scaled_mm": lambda: torch.ops.aten._scaled_mm.default,
    "_grouped_mm": lambda: _takes_operator(torch.ops.aten._grouped_mm.default, "self", "mat2", "offs"),
    "_unsafe_view": lambda: torch.ops.aten._unsafe_view.default,
    # modules
    "_apply": lambda: _takes(nn.Module._apply, "fn"),
    "_extra_state": lambda: (
        "_extra_state" in inspect.getsource(nn.Module.state_dict) + inspect.getsource(nn.modules.module)
    ),
    "_reset_parameters": lambda: callable(nn.MultiheadAttention(2, 1)._reset_parameters),
    # autograd, compilation, profiling
    "_dynamo": lambda: torch._dynamo,
    "torch._dynamo": lambda: torch._dynamo,
    "_execution_engine": lambda: callable(torch.autograd.Variable._execution_engine.queue_callback),
    "_is_profiler_enabled": lambda: torch.autograd.profiler._is_profiler_enabled is False,
    "_dump_snapshot": lambda: _takes(torch.cuda.memory._dump_snapshot, "filename"),
    "_set_allocator_settings": lambda: _takes(torch.cuda.memory._set_allocator_settings, "env"),
    "_record_memory_history": lambda: _takes(torch.cuda.memory._record_memory_history, "enabled"),
    # distributed
    "torch._C._distributed_c10d": lambda: torch._C._distributed_c10d,
    "_dump_nccl_trace": lambda: not dist.is_nccl_available() or callable(torch._C._distributed_c10d._dump_nccl_trace),
    "_dump_nccl_trace_json": lambda: (
        not dist.is_nccl_available() or callable(torch._C._distributed_c10d._dump_nccl_trace_json)
    ),
    "_get_backend": lambda: callable(dist.ProcessGroup._get_backend),
    "_set_pg_timeout": lambda: (
        hasattr(dist, "set_timeout") or _takes(dist.distributed_c10d._set_pg_timeout, "timeout", "group")
    ),
    "_timeout": lambda: "_timeout" in dir(dist.ProcessGroupGloo._Options),
    "_get_fsdp_state": lambda: callable(FSDPModule._get_fsdp_state),
    "_fsdp_param_groups": lambda: "self._fsdp_param_group" in inspect.getsource(_fsdp_state.FSDPState),
    "_fsdp_param_group": lambda: "self._fsdp_param_group" in inspect.getsource(_fsdp_state.FSDPState),
    "_auto_reshard_after_forward": lambda: all(
        line in inspect.getsource(_fsdp_state.FSDPState)
        for line in ("self._auto_reshard_after_forward:\n", "param_group.post_forward_mesh_info = None\n")
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": lambda: (
        _takes(FSDPParam._get_grad_inner_tensor, "grad")
        and _takes(FSDPParam._setattr_on_modules, "param")
        and "self._sharding_spec = self.sharded_param._spec" in inspect.getsource(FSDPParam.reset_sharded_param)
        and {"sharded_size", "padded_sharded_param_size", "contiguous_sharded_stride", "_sharded_param_data"}
        <= set(re.findall(r"self\.(\w+)", inspect.getsource(FSDPParam)))
    ),
    "_module_info": lambda: "self._module_info.param_name" in inspect.getsource(FSDPParam),
    "_setattr_on_modules": lambda: _takes(FSDPParam._setattr_on_modules, "param"),
    "_get_post_forward_mesh_info": lambda: _takes(
        _fully_shard._get_post_forward_mesh_info, "reshard_after_forward", "mesh_info"
    ),
    "_op_dispatcher": lambda: callable(
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear  # type: ignore[attr-defined]
    ),
    "_clear_DTensor_sharding_propagator_cache": lambda: callable(torch._C._clear_DTensor_sharding_propagator_cache),
    "torch.distributed.fsdp._fully_shard._fully_shard": lambda: _fully_shard,
    "torch.distributed.fsdp._fully_shard._fsdp_common": lambda: (
        (
            TorchVersion(torch.__version__) < "2.12"
            or _takes(_fsdp_common.ShardPlacementResult, "placement", "mesh_info")
        )
        and _takes(_fsdp_common.HSDPMeshInfo, "mesh", "shard_mesh_dim", "replicate_mesh_dim")
    ),
    # tensors without values, trees
    "torch._subclasses.fake_tensor.FakeTensorMode": lambda: torch._subclasses.fake_tensor.FakeTensorMode(),
    "torch.utils._python_dispatch.TorchDispatchMode": lambda: torch.utils._python_dispatch.TorchDispatchMode,
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": lambda: (
        not torch.utils._python_dispatch.is_traceable_wrapper_subclass(torch.ones(1))
    ),
    "torch.utils._pytree": lambda: pytree.tree_unflatten([3], pytree.tree_flatten([1])[1]) == [3],
    "torch.utils._pytree.tree_leaves": lambda: pytree.tree_leaves({"a": [1, 2]}) == [1, 2],
    "torch.utils._pytree.tree_map_only": lambda: pytree.tree_map_only(int, str, [1, "a"]) == ["1", "a"],
    "_compiled_call_impl": lambda: nn.Module()._compiled_call_impl is None,
    # torchdata
    "_workers": lambda: "self._workers" in inspect.getsource(stateful_dataloader),
}
"""Each private name, and a check of what is relied upon."""

NOT_TORCH = {
    "_exit",
    "_scales",
    "_scale_inv",
    "_getframe",
    "_current_frames",
    "_replace",
    "_means",
    "_worker",
    "_backward",
    "_low",
    "_high",
    "_share",
    "_time_seconds",
    "_next_step",
}
"""Of Python itself or of trackio, or ends of names that stand in texts."""

OF_TRANSFORMERS = {
    "_apply_gate",
    "_bias",
    "_init_weights",
    "_is_hf_initialized",
    "_keys_to_ignore_on_load_unexpected",
    "_no_split_modules",
}
"""Of the library that `recipes/hf` trains: its models define them, and the tests of that recipe run on them."""


def _takes(function: Callable[..., object], *parameters: str) -> bool:
    return list(inspect.signature(function).parameters)[: len(parameters)] == list(parameters) or (
        inspect.signature(function).parameters.keys() >= set(parameters)
    )


def _takes_operator(operator: torch._ops.OpOverload, *arguments: str) -> bool:
    return [argument.name for argument in operator._schema.arguments][: len(arguments)] == list(arguments)


def _is_in_place(work: Callable[[list[torch.Tensor]], object], value: float) -> bool:
    ones = [torch.ones(1)]
    work(ones)
    return ones[0].item() == value


def _has_backward(name: str) -> bool:
    return all(hasattr(torch.ops.aten, f"_scaled_dot_product_{name}{way}") for way in ("", "_backward"))


FILES = sorted(path for folder in ("trainer", "recipes", "objectives") for path in (REPOSITORY / folder).rglob("*.py"))


def own_names() -> set[str]:
    """Return the names that the project itself defines: those with an underscore are its own private parts."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def uses(path: Path, own: set[str]) -> Iterator[str]:
    """Yield every private name of another library in a file: imported, an attribute, or in a text by itself."""
    for node in ast.walk(ast.parse(path.read_text())):
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
    own = own_names()
    found = Counter(name for path in FILES for name in uses(path, own) if name not in NOT_TORCH | OF_TRANSFORMERS)
    assert not set(found) - set(PRIVATE), "is there a public name for it? if not, add it with a check"
    assert not set(PRIVATE) - set(found), "no longer used: take it out"
    assert found.total() <= MOST_USES, found


@pytest.mark.parametrize("name", PRIVATE)
def test_installed_torch_has_the_private_name(name: str) -> None:
    assert PRIVATE[name]() is not False
