"""Records a run on fake tensors: bytes that operators allocate, and marks where FSDP would gather and reduce."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.parameters import storage_id
from trainer.plan.kernels import Work, work_of
from trainer.plan.trace import Event, Mark, Segment


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until they are freed."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._live = self._start = self._peak = 0
        self._gradients = self._start_gradients = self._peak_accumulating = 0
        self._work: Counter[Work] = Counter()
        self._not_counted = {
            storage_id(tensor.untyped_storage())
            for tensor in (*model.parameters(), *model.buffers(), *inputs)
            if not tensor.is_meta
        }
        self._with_gradient: set[int] = set()
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return result
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        work = work_of(func, args, kwargs or {}, result)
        if work.num_bytes:
            self._work[work] += 1
        self._peak = max(self._peak, self._live)
        self._peak_accumulating = max(self._peak_accumulating, self._live - self._gradients)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key not in self._known and key not in self._not_counted:
            size = storage.nbytes()
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self._live += size

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self._live -= size

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._with_gradient and parameter.grad is not None:
            self._with_gradient.add(id(parameter))
            self._gradients += parameter.grad.numel() * parameter.grad.element_size()

    def unused(self, model: nn.Module) -> set[str]:
        """Return the names of the trainable parameters that have got no gradient."""
        return {
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not parameter.is_meta and id(parameter) not in self._with_gradient
        }

    def cut(self) -> Segment:
        """Return what has happened since the last cut, and begin anew."""
        gradients = self._gradients - self._start_gradients
        segment = Segment(
            peak=self._peak - self._start,
            peak_accumulating=self._peak_accumulating - (self._start - self._start_gradients),
            net=self._live - self._start - gradients,
            gradients=gradients,
            work=tuple(self._work.items()),
        )
        self._begin()
        return segment

    def _begin(self) -> None:
        self._start = self._peak = self._live
        self._start_gradients = self._gradients
        self._peak_accumulating = self._live - self._gradients
        self._work = Counter()


class Recorder:
    """Notes where FSDP would gather and reduce, and where repeated blocks begin: as FSDP does, with hooks."""

    def __init__(self, meter: MemoryMeter, compute_dtype: torch.dtype) -> None:
        self.meter = meter
        self.cast_dtype = None if compute_dtype == torch.float32 else compute_dtype
        self.events: list[Event] = []

    def mark(self, mark: Mark, unit: int) -> None:
        self.events.append(Event(self.meter.cut(), mark, unit))

    def watch_block(self, block: nn.Module, position: int) -> None:
        """Note where the block begins, in both passes."""
        block.register_forward_pre_hook(lambda *_: self.mark("block_forward", position))

        def after(block: nn.Module, args: Any, output: Any) -> None:
            self._when_gradient("block_backward", position, output)
            self.mark("block_return", position)

        block.register_forward_hook(after)

    def watch_unit(self, modules: Sequence[nn.Module], unit: int, is_root: bool = False) -> None:
        """Note what FSDP's hooks on `modules`, gathered together, do.

        The unit is gathered before the first of them runs and reshards after the last; its gradients are reduced once
        those of the first one's inputs are known, or, where these need none, when the whole backward pass is over.
        """
        waiting = set(modules)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            is_first = waiting == set(modules)
            if self.cast_dtype is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
            self.mark("pre_forward", unit)
            if is_first and torch.is_grad_enabled() and not is_root:
                args, kwargs = self._note_inputs(unit, args, kwargs)
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            waiting.discard(module)
            if not waiting:
                waiting.update(modules)
                self.mark("post_forward", unit)
                self._when_gradient("pre_backward", unit, output)

        for module in modules:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.cast_dtype) if tensor.is_floating_point() else tensor

    def _when_gradient(self, mark: Mark, unit: int, output: Any) -> None:
        """Make the mark when the first gradient of `output` is there."""
        is_done = False

        def note(gradient: torch.Tensor) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                self.mark(mark, unit)

        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(note)

    def _note_inputs(self, unit: int, args: Any, kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        with_gradient = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if with_gradient:
            passed = _AfterBackward.apply(lambda: self.mark("post_backward", unit), *(leaves[n] for n in with_gradient))  # type: ignore[no-untyped-call]
            for n, tensor in zip(with_gradient, passed, strict=True):
                leaves[n] = tensor
        return pytree.tree_unflatten(leaves, structure)


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on, and calls back once the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.callback = callback
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback()
        return (None, *gradients)
