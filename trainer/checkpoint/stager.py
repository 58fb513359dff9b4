"""Copies the state into host memory, so that training can continue while a save writes the copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from trainer.checkpoint.data_files import padded_bytes, views_of
from trainer.checkpoint.layout import TensorBox, Tensors
from trainer.checkpoint.planner import ColumnSavePlanner
from trainer.checkpoint.storage import describe
from trainer.errors import print_stderr
from trainer.model.parameters import local


class LiveStager(AsyncStager):
    """Copies nothing: the state must not change until the save has ended."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


class CopyStager(AsyncStager):
    """Copies what this rank writes.  Raises nothing, since the other ranks would wait: the planner reports errors."""

    def __init__(self, planner: ColumnSavePlanner, device: torch.device) -> None:
        self._planner, self._staging = planner, Staging(device)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._planner.snapshot.mistake or self._planner.snapshot.error:
            return {"state": {}}
        try:
            return {"state": self._staging.copy(state_dict["state"], self._planner.boxes)}
        except Exception as error:  # any error
            self._planner.snapshot.error = f"cannot copy the state: {describe(error)}"
            return {"state": {}}

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns once the copy is complete."""

    def close(self) -> None: ...


class Staging:
    """Host memory for a copy of the data that this rank writes, reused by every save.

    It is one buffer, allocated by the first save, and page-locked if the device is a GPU, so that copies run at full
    speed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer, self._is_locked = np.empty(0, dtype=np.uint8), False

    def copy(self, tensors: Tensors, boxes: Iterable[TensorBox]) -> dict[str, torch.Tensor]:
        """Return CPU copies of this rank's shards of the tensors in `boxes`.  Earlier copies are overwritten."""
        shards = {box.key: local(tensors[box.key]) for box in boxes}
        with torch.no_grad():
            copies = views_of(self._buffer_for(shards), shards)
            for key, shard in shards.items():
                copies[key].copy_(shard, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _buffer_for(self, shards: Tensors) -> np.ndarray[Any, Any]:
        needed = sum(padded_bytes(shard) for shard in shards.values())
        if needed > self._buffer.nbytes:
            self._unlock()
            self._buffer = np.empty(0, dtype=np.uint8)  # free it before the larger one is allocated
            self._buffer = np.zeros(needed, dtype=np.uint8)
            if self._device.type == "cuda":
                self._is_locked = self._lock()
        return self._buffer

    def _lock(self) -> bool:
        """Page-lock the buffer.  torch's own pinned allocator would round its size up to a power of two."""
        cudart: Any = torch.cuda.cudart()
        try:
            torch.cuda.check_error(cudart.cudaHostRegister(self._buffer.ctypes.data, self._buffer.nbytes, 0))
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # clears CUDA's last error, which the next kernel would report
            print_stderr(
                f"warning: {self._buffer.nbytes / 2**30:.2f} GiB of host memory cannot be page-locked "
                f"({str(error).splitlines()[0]}): training pauses for longer while a save is copied"
            )
            return False
        return True

    def _unlock(self) -> None:
        if self._is_locked:
            self._is_locked = False
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostUnregister(self._buffer.ctypes.data))
