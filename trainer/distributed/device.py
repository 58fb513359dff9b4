"""Selects this rank's device, and checks that no other rank uses the same GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch
from torch.distributed import Store

from trainer.distributed.environment import EXPANDABLE, Environment
from trainer.errors import UserError, print_stderr, setting_error


def find_device(wanted: str, env: Environment) -> torch.device:
    """Return this rank's device and make it the current device.

    Raises UserError if `run.device` requires a GPU and there is none, or if there are fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = choose_gpu(wanted, env, num_gpus)
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    _try_memory(device, env)
    return device


def use_deterministic_kernels() -> None:
    """Use deterministic kernels for the rest of this process.

    Call this before anything runs on a GPU, because cuBLAS reads its workspace size at its first use.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _try_memory(device: torch.device, env: Environment) -> None:
    """Make a small allocation; if the driver does not support expandable segments, disable them."""
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != EXPANDABLE:
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch deprecates this, older has nothing else
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.empty(1, device=device)
        if env.rank == 0:
            print_stderr(f"warning: {EXPANDABLE} is off, since the driver refuses it: {str(error).splitlines()[0]}")


def choose_gpu(wanted: str, env: Environment, num_gpus: int, variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the index of this rank's GPU among the `num_gpus` visible ones; None for the CPU.

    Each rank takes the GPU of its local rank.  If it sees only one GPU, the launcher has assigned that one to it:
    `srun --gpus-per-task=1`, or a wrapper that sets CUDA_VISIBLE_DEVICES per rank.  `claim_gpu` checks later that ranks
    do not share a GPU.  Raises UserError if there is no GPU or there are too few.
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
    """Claim this rank's GPU if other ranks on the node may see the same one; return an error message or "".

    GPUs are identified by UUID.  Without this check NCCL would fail later, with a less helpful message.
    """
    if device.type != "cuda" or env.local_world_size <= torch.cuda.device_count():
        return ""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return claim(store, rank, uuid, env.local_world_size)


def claim(store: Store, rank: int, uuid: str, num_ranks: int) -> str:
    """Claim a GPU by UUID for one of the node's `num_ranks` ranks; return an error message if it is taken, or ""."""
    owner = store.compare_set(f"meeting/gpu/{uuid}", "", str(rank)).decode()
    return "" if owner == str(rank) else str(_too_few(num_ranks, 1, f"; ranks {owner} and {rank} see the same one"))


def _too_few(ranks: int, num_gpus: int, how: str = "") -> UserError:
    rule = f"this node has {num_gpus} GPU{'s' * (num_gpus != 1)}, one for each rank{how}"
    return setting_error("nproc", ranks, rule, fix=f"nproc={num_gpus}, or run.device=cpu")


def _names_one_gpu(variables: Mapping[str, str]) -> bool:
    visible = variables.get("CUDA_VISIBLE_DEVICES", variables.get("HIP_VISIBLE_DEVICES", ""))
    return len([name for name in visible.split(",") if name.strip()]) == 1
