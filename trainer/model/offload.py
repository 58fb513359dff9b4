"""Activation offloading: keeps the tensors saved by autograd in host memory until the backward pass needs them.

When the forward pass of an offloaded block ends, the tensors that autograd saved in it are copied to pinned host memory
on a separate stream; when the next block ends, the originals on the device are freed.  A block's tensors are copied
back during the backward pass of the block that follows it in the forward pass.  The host never waits: streams wait for
each other's events.  On a CPU the same code makes plain copies, which saves no memory but lets tests run the code.

Copies are bit-identical, so losses do not change.  Parameters, buffers and a block's arguments after the first
(such as RoPE tables and masks) stay on the device, because other references usually keep them in memory anyway.

Offloading can be combined with activation checkpointing: it then offloads a block's input and, with `selective` and
`budget:`, the saved outputs of operators (see `storing_contexts`).  This module needs no model spec, mesh or
configuration.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from trainer.model.parameters import local, num_writes, storage_id

MIN_BYTES = 4096
"""Minimum size in bytes of an offloaded storage.  Copying a smaller one takes more time than its memory is worth."""


def choose_offloaded_blocks(num_blocks: int, fraction: float, with_last: bool = False) -> list[bool]:
    """Return, for each of `num_blocks` blocks, whether it is offloaded.

    fraction: the fraction of the blocks to offload, from 0 to 1 (`train.offload_activations`).

    Offloaded blocks are spaced evenly, so that the blocks in between hide the copies.  The last block is offloaded only
    if `with_last` is true, since its backward pass immediately follows its forward pass.
    """
    chosen = [int((n + 1) * fraction + 1e-9) > int(n * fraction + 1e-9) for n in range(num_blocks)]
    return [is_chosen and (with_last or n < num_blocks - 1) for n, is_chosen in enumerate(chosen)]


@dataclass(eq=False)
class _Storage:
    """One storage that autograd saved in a block, shared by all saved tensors that are views of it."""

    on_device: torch.Tensor | None
    """The entire storage, (N,), in the dtype of the first tensor saved; None while it is only on the host."""
    version: int
    """The tensor's version counter (the number of in-place writes) when it was saved."""
    on_host: torch.Tensor | None = None
    num_unread: int = 0
    """Number of saved tensors in this storage that the backward pass has not read yet."""

    @property
    def num_bytes(self) -> int:
        data = self.on_device if self.on_host is None else self.on_host
        assert data is not None
        return data.nbytes


@dataclass(eq=False)
class _View:
    """The object that autograd keeps instead of a saved tensor."""

    call: _Call
    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """Return the tensor on the device, whose current stream waits for the copy."""
        self.call.wait()
        data = self.storage.on_device
        if data is None:  # read a second time: custom functions may read their saved tensors more than once
            assert self.storage.on_host is not None
            data = self.storage.on_host.to(self.call.offload.device, copy=True)
        self.storage.num_unread -= 1
        if self.storage.num_unread <= 0:
            self.storage.on_device = None  # the caller now holds the last reference
        if data.dtype != self.dtype:
            data = data.view(torch.uint8)
            data = data[: data.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return data.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class _Call:
    """One forward pass of a block and, if the block is offloaded, the storages saved in it."""

    offload: ActivationOffload
    storages: dict[int, _Storage] = field(default_factory=dict)
    """By the storage's address on the device."""
    skipped_storages: set[int] = field(default_factory=set)
    """Addresses of storages that are not offloaded, because they stay on the device anyway."""
    previous: weakref.ref[_Call] | None = None
    """The call before this one in the forward pass, whose backward pass comes next."""
    event: Any = None
    """Marks the end of the latest copies, until a stream has waited for it."""

    # -- forward -------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Return the object to keep for a saved tensor: a view, or the tensor itself if it stays on the device."""
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if not self.offload.is_movable(tensor) or storage.nbytes() < MIN_BYTES or address in self.skipped_storages:
            return tensor
        saved = self.storages.get(address)
        if saved is None:
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            saved = self.storages[address] = _Storage(flat, num_writes(tensor))
        saved.num_unread += 1
        return _View(self, saved, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def copy_to_host(self) -> None:
        """Start copying the saved storages to the host."""
        offload = self.offload
        for storage in self.storages.values():
            data = storage.on_device
            assert data is not None
            if num_writes(data) != storage.version:
                raise RuntimeError(
                    "train.offload_activations: a tensor that the backward pass needs has been modified by an inplace "
                    f"operation: {data.numel()} numbers of {data.dtype}, version {num_writes(data)} instead of "
                    f"{storage.version}"
                )
            storage.on_host = offload.allocate_on_host(data)
        with offload.copying():
            for storage in self.storages.values():
                assert storage.on_host is not None
                assert storage.on_device is not None
                storage.on_host.copy_(storage.on_device, non_blocking=True)
        self.event = offload.record()
        offload.note_copied([*self.storages.values()])

    def drop_from_device(self) -> None:
        """Free the device's memory once the copies are done."""
        if self.event is not None:
            self.offload.wait_for(self.event)
        for storage in self.storages.values():
            storage.on_device = None
        self.event = None

    # -- backward ------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start copying back to the device, unless the copy has started or nothing was copied to the host."""
        to_fetch = [s for s in self.storages.values() if s.on_device is None and s.num_unread > 0]
        if not to_fetch or self.event is not None:
            return
        for storage in to_fetch:
            assert storage.on_host is not None
            # Allocated on the stream that frees it, so that the allocator need not track the other stream.
            storage.on_device = torch.empty_like(storage.on_host, device=self.offload.device)
        with self.offload.copying():
            for storage in to_fetch:
                assert storage.on_host is not None
                assert storage.on_device is not None
                storage.on_device.copy_(storage.on_host, non_blocking=True)
        self.event = self.offload.record()
        self.offload.note_fetched(to_fetch)

    def wait(self) -> None:
        """Start the copy back to the device if necessary, and make the device wait for it."""
        self.prefetch()
        if self.event is not None:
            self.offload.wait_for_fetch(self.event)
            self.event = None


_DONE = object()
"""Sentinel in place of an event on a CPU, where copies are synchronous."""

_COMPILED_CALL = "_compiled_call_impl"
"""Attribute that `Module.compile` sets to the compiled call; a wrapper inside that would be compiled too."""


class ActivationOffload:
    """Offloads the activations of one model's blocks, once `attach` has been called.

    `copied_bytes` (to the host) and `fetched_bytes` (back to the device) are totals since the start.  `host_bytes` is
    the number of bytes on the host now, and `peak_host_bytes` its maximum.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], fraction: float, device: torch.device) -> None:
        self.device = device
        self.copied_bytes = self.fetched_bytes = self.host_bytes = self.peak_host_bytes = 0
        self._model, self._blocks = model, blocks
        self._is_offloaded = choose_offloaded_blocks(len(blocks), fraction)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._call: _Call | None = None
        """The forward pass in progress, if its block is offloaded."""
        self._copying: _Call | None = None
        """The last call whose copies to the host may still be running."""
        self._last_call: weakref.ref[_Call] | None = None

    def attach(self, blocks: Sequence[nn.Module] | None = None) -> None:
        """Wrap the forward pass of each of `blocks`, by default of all blocks.

        Call this after checkpointing and compilation, since the wrapper must be outside both.
        """
        wrapped = {id(block) for block in (self._blocks if blocks is None else blocks)}
        for block, is_offloaded in zip(self._blocks, self._is_offloaded, strict=True):
            if id(block) not in wrapped:
                continue
            compiled = getattr(block, _COMPILED_CALL)
            if compiled is not None:
                setattr(block, _COMPILED_CALL, self._wrap(block, compiled, is_offloaded))
            else:
                block.forward = self._wrap(block, block.forward, is_offloaded)  # type: ignore[method-assign]

    def _wrap(self, block: nn.Module, forward: Callable[..., Any], is_offloaded: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            call = _Call(self, previous=self._last_call)
            if is_offloaded:
                # Buffers, and the block's arguments after the first, stay on the device.
                leaves = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
                call.skipped_storages = {storage_id(t.untyped_storage()) for t in (*leaves, *self._model.buffers())}
                with self._in_call(call), torch.autograd.graph.saved_tensors_hooks(self._packer(block, call), _unpack):
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
            self.end_forward(call)
            self.prefetch_before(block, call, output)
            return output

        return run

    def _packer(self, block: nn.Module, call: _Call) -> Callable[[torch.Tensor], Any]:
        has_noted_parameters = False

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal has_noted_parameters
            if not has_noted_parameters:  # not earlier: FSDP gathers them only once a compiled block has been called
                parameters = (local(parameter) for parameter in block.parameters())
                call.skipped_storages |= {storage_id(parameter.untyped_storage()) for parameter in parameters}
                has_noted_parameters = True
            return call.pack(tensor)

        return pack

    @contextmanager
    def _in_call(self, call: _Call) -> Iterator[None]:
        previous, self._call = self._call, call
        try:
            yield
        finally:
            self._call = previous

    def end_forward(self, call: _Call) -> None:
        """Free the previous block's tensors on the device, and start copying this block's tensors to the host."""
        if self._copying is not None:
            self._copying.drop_from_device()
            self._copying = None
        if call.storages:
            call.copy_to_host()
            self._copying = call
        self._last_call = weakref.ref(call)

    def prefetch_before(self, block: nn.Module, call: _Call, output: Any) -> None:
        """When the backward pass of the block starts, prefetch the tensors of the block whose backward pass is next."""
        previous = call.previous() if call.previous is not None else None
        if previous is not None and previous.storages:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(_prefetch_hook(previous))
                    break

    # -- the device: the planner overrides some of these to record copies ----------------------------------------

    def is_movable(self, tensor: torch.Tensor) -> bool:
        """Return whether a saved tensor may be moved: it must be a plain tensor on the device, not a parameter."""
        return type(tensor) is torch.Tensor and tensor.device.type == self.device.type

    def allocate_on_host(self, data: torch.Tensor) -> torch.Tensor:
        """Allocate host memory for `data`, pinned if `data` is on a GPU; torch reuses it when freed."""
        buffer = torch.empty_like(data, device="cpu", pin_memory=self._stream is not None)
        self.host_bytes += data.nbytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        weakref.finalize(buffer, self._note_freed, data.nbytes)
        return buffer

    def _note_freed(self, num_bytes: int) -> None:
        self.host_bytes -= num_bytes

    def note_copied(self, storages: Sequence[_Storage]) -> None:
        self.copied_bytes += sum(storage.num_bytes for storage in storages)

    def note_fetched(self, storages: Sequence[_Storage]) -> None:
        self.fetched_bytes += sum(storage.num_bytes for storage in storages)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run copies in the block on a separate stream, after all work queued on the device so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> Any:
        """Return an event that marks the end of the copies so far; on a CPU `_DONE`."""
        return _DONE if self._stream is None else self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Make the device's current stream wait for an event, without blocking the host."""
        if event is not _DONE:
            torch.cuda.current_stream(self.device).wait_event(event)

    def wait_for_fetch(self, event: Any) -> None:
        """Make the device wait for the copies that a backward pass needs."""
        self.wait_for(event)

    # -- with selective checkpointing ----------------------------------------------------------------------------

    def storing_contexts(self, policy: Callable[..., CheckpointPolicy]) -> tuple[Any, Any]:
        """Return contexts for `torch.utils.checkpoint` that save and offload the outputs selected by `policy`.

        torch's own selective checkpointing hides these outputs from saved-tensor hooks.
        """
        saved: dict[tuple[Any, int], Any] = {}
        return _SaveOutputs(policy, saved, self._call), _RestoreOutputs(saved)


def _unpack(saved: torch.Tensor | _View) -> torch.Tensor:
    return saved.tensor() if isinstance(saved, _View) else saved


def _prefetch_hook(call: _Call) -> Callable[[torch.Tensor], None]:
    """Return a hook that prefetches the tensors of `call`, unless its graph has been freed."""
    reference = weakref.ref(call)

    def prefetch(gradient: torch.Tensor) -> None:
        target = reference()
        if target is not None:
            target.prefetch()

    return prefetch


_IGNORED = {torch.ops.aten.detach.default, torch.ops.prim.device.default}
"""Operators that autograd and checkpointing also call themselves, perhaps not equally often in both passes."""


class _SaveOutputs(TorchDispatchMode):
    """Saves the outputs of the operators that a policy selects, packed for offloading."""

    def __init__(self, policy: Callable[..., CheckpointPolicy], saved: dict[tuple[Any, int], Any], call: Any) -> None:
        super().__init__()
        self._policy, self._saved, self._call = policy, saved, call
        self._seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _IGNORED:
            return result
        number = self._seen[func]
        self._seen[func] += 1
        if self._policy(_ForwardContext, func, *args, **(kwargs or {})) == CheckpointPolicy.MUST_SAVE:
            pack = self._call.pack if self._call is not None else lambda tensor: tensor
            self._saved[func, number] = tree_map_only(torch.Tensor, lambda tensor: pack(tensor.detach()), result)
        return result


class _ForwardContext:
    """Context argument of a checkpointing policy, for an operator of the forward pass."""

    is_recompute = False


class _RestoreOutputs(TorchDispatchMode):
    """Returns saved outputs instead of running their operators again."""

    def __init__(self, saved: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self._saved = saved
        self._seen: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._seen.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IGNORED:
            return func(*args, **(kwargs or {}))
        key = func, self._seen[func]
        self._seen[func] += 1
        if key not in self._saved:
            return func(*args, **(kwargs or {}))
        return tree_map_only((torch.Tensor, _View), _unpack, self._saved.pop(key))
