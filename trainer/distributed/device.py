"""This rank's device: selects its GPU, and checks that no other rank uses it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch
from torch.distributed import Store

from trainer.distributed.environment import EXPANDABLE, Environment
from trainer.errors import UserError, say, setting_error


def find_device(wanted: str, env: Environment) -> torch.device:
    """Return this rank's device, and make it the current one.

    Raises UserError where `run.device` asks for a GPU and there is none, or where there are fewer than ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = choose_gpu(wanted, env, num_gpus)
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    _try_memory(device, env)
    return device


def add_in_order() -> None:
    """Have torch use kernels that give the same bits each time, for the rest of this process.

    Before anything has run on a GPU: cuBLAS reads its workspace's size when it is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _try_memory(device: torch.device, env: Environment) -> None:
    """Allocate a little; where the driver does not let memory grow in place, have it lie in blocks of fixed sizes."""
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != EXPANDABLE:
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # some versions announce a successor, older ones lack it
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.empty(1, device=device)
        if env.rank == 0:
            say(f"warning: {EXPANDABLE} is off, since the driver refuses it: {str(error).splitlines()[0]}")


def choose_gpu(wanted: str, env: Environment, num_gpus: int, variables: Mapping[str, str] = os.environ) -> int | None:
    """Return which of the `num_gpus` that this rank sees is its own; None for the CPU.

    Each rank of a node takes the GPU of its local rank.  Where it sees only one, that is the one that its launcher has
    given it: `srun --gpus-per-task=1`, or a wrapper that sets CUDA_VISIBLE_DEVICES for each rank.  That other ranks do
    not see the same one shows when they meet: `claim_gpu`.  Raises UserError if there is none, or not enough.
    """
    if wanted == "cuda" and not num_gpus:
        raise setting_error("run.device", wanted, "torch finds no usable GPU", "cpu")
    if wanted == "cpu" or not num_gpus:
        return None
    if env.local_rank < env.local_world_size <= num_gpus:
        return env.local_rank
    is_given_its_own = env.launcher == "srun" or (env.launcher != "nproc" and _names_one_gpu(variables))
    if num_gpus == 1 and is_given_its_own:
        return 0
    raise _too_few(env.local_world_size, num_gpus)


def claim_gpu(store: Store, rank: int, env: Environment, device: torch.device) -> str:
    """Take this rank's GPU where others on the node may see the same one; return what is wrong, empty if nothing is.

    Known by its UUID: NCCL would fail on one that is taken twice, later and in words of its own.
    """
    if device.type != "cuda" or env.local_world_size <= torch.cuda.device_count():
        return ""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return claim(store, rank, uuid, env.local_world_size)


def claim(store: Store, rank: int, uuid: str, num_ranks: int) -> str:
    """Take the GPU with that UUID for one of the `num_ranks` of its node; return what is wrong if another has it."""
    owner = store.compare_set(f"meeting/gpu/{uuid}", "", str(rank)).decode()
    return "" if owner == str(rank) else str(_too_few(num_ranks, 1, f"; ranks {owner} and {rank} see the same one"))


def _too_few(ranks: int, num_gpus: int, how: str = "") -> UserError:
    rule = f"this node has {num_gpus} GPU{'s' * (num_gpus != 1)}, one for each rank{how}"
    return setting_error("nproc", ranks, rule, fix=f"nproc={num_gpus}, or run.device=cpu")


def _names_one_gpu(variables: Mapping[str, str]) -> bool:
    visible = variables.get("CUDA_VISIBLE_DEVICES", variables.get("HIP_VISIBLE_DEVICES", ""))
    return len([name for name in visible.split(",") if name.strip()]) == 1
