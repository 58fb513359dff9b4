"""Draws random numbers for part of a tensor, bit-identical to drawing the full tensor.

Recipes initialize full tensors, of which a rank keeps only some rows.  For a large tensor only those rows are drawn, by
advancing the generator past the others.  For the same reason, several threads can share the work.  Any other operation
on such a tensor first fills in all of its values.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.mt19937 import skip_words

MIN_ELEMENTS = 2**23
"""Minimum number of elements for which this pays off: skipping takes as long as drawing about two million."""
_PIECE_ELEMENTS = 2**24
"""Number of elements that a thread draws at a time."""
_GROUP_SIZE = 16
"""Torch generates normal numbers in groups of this size, from the same number of words."""

_RANDOM_FILLS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.normal_.default: torch.Tensor.normal_,
    torch.ops.aten.uniform_.default: torch.Tensor.uniform_,
}
_MEMORY_FUNCTIONS = (
    *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist),
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__),
)
"""Functions that read a tensor's memory without dispatching a torch operator."""


def can_fill_partially(full: torch.Tensor) -> bool:
    """Return whether part of this tensor can be drawn alone, and the tensor is large enough for it to pay off."""
    is_large = full.numel() >= MIN_ELEMENTS and full.numel() % _GROUP_SIZE == 0
    return is_large and full.dtype == torch.float32 and full.is_contiguous()


@dataclass(frozen=True)
class DeferredFill:
    """A deferred random initialization of a tensor."""

    fill: Callable[..., torch.Tensor]
    numbers: tuple[float, ...]
    """Mean and standard deviation, or the bounds."""
    state: torch.Tensor
    """The generator's state before the draw."""

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flat tensor."""
        first, last = start // _GROUP_SIZE * _GROUP_SIZE, -(-stop // _GROUP_SIZE) * _GROUP_SIZE
        drawn = torch.empty(max(0, last - first), dtype=torch.float32)
        pieces = drawn.split(_PIECE_ELEMENTS) if drawn.numel() else ()
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            deque(threads.map(self._fill, pieces, self._generators(first)), maxlen=0)  # re-raises errors of threads
        return drawn[start - first : stop - first]

    def _fill(self, piece: torch.Tensor, generator: torch.Generator) -> None:
        self.fill(piece, *self.numbers, generator=generator)

    def _generators(self, first: int) -> Iterator[torch.Generator]:
        """Yield a generator for each successive piece, starting at element `first`."""
        state, distance = self.state, first
        while True:
            generator = torch.Generator()
            generator.set_state(state)
            skip_words(generator, distance)
            state, distance = generator.get_state(), _PIECE_ELEMENTS
            yield generator


class DeferredFills:
    """Defers the random initialization of some full tensors, given by name.

    It observes all operations from before the tensors are filled.  The memory of a tensor is not touched until another
    operation uses it.
    """

    def __init__(self, full_tensors: Mapping[str, torch.Tensor]) -> None:
        self._full_tensors = {full.data_ptr(): full.detach() for full in full_tensors.values()}
        self._addresses = {name: full.data_ptr() for name, full in full_tensors.items()}
        self._pending: dict[int, DeferredFill | None] = dict.fromkeys(self._full_tensors)
        """Deferred draws by address.  None before the first draw: the tensor is then filled with NaN on first use."""
        self._num_words_to_skip = 0

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Observe operations inside the block.  Afterwards all tensors have values, except those that `get` returns a
        drawing for.
        """
        with _OperatorMode(self), _MemoryAccessMode(self):
            yield
        for address in [address for address, deferred in self._pending.items() if deferred is None]:
            self._fill_now(address)

    def get(self, name: str, tensor: torch.Tensor) -> DeferredFill | None:
        """Return the deferred draw of the named tensor; None if its values exist, or if `tensor` is not the observed
        one.
        """
        address = self._addresses.get(name, -1)
        return self._pending.get(address) if tensor.data_ptr() == address else None

    def record_fill(self, operator: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Record an operator that fills an observed tensor with random numbers; returns whether it was deferred."""
        if operator not in _RANDOM_FILLS or options.get("generator") is not None:
            return False
        address = arguments[0].data_ptr()
        full = self._full_tensors.get(address)
        if full is None or arguments[0].shape != full.shape or not arguments[0].is_contiguous():
            return False
        self.advance_generator()
        self._pending[address] = DeferredFill(
            _RANDOM_FILLS[operator], arguments[1:], torch.default_generator.get_state()
        )
        self._num_words_to_skip = full.numel()
        return True

    def advance_generator(self) -> None:
        """Advance the generator as if all recorded draws had been made."""
        num_words, self._num_words_to_skip = self._num_words_to_skip, 0
        skip_words(torch.default_generator, num_words)

    def fill_overlapping(self, values: Any) -> None:
        """Fill the observed tensors that share memory with a tensor in `values`."""
        for tensor in _tensors_in(values) if self._pending else ():
            if tensor.device.type == "cpu" and tensor.numel():
                first, last = _memory_range(tensor)
                for address in [
                    a for a in self._pending if first < _memory_range(self._full_tensors[a])[1] and a < last
                ]:
                    self._fill_now(address)

    def _fill_now(self, address: int) -> None:
        deferred, full = self._pending.pop(address), self._full_tensors[address]
        if deferred is None:
            full.fill_(torch.nan)
        else:
            full.view(-1).copy_(deferred.part(0, full.numel()))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments, including nested containers."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors_in(value)


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and last address of a tensor's memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


class _OperatorMode(TorchDispatchMode):
    """Intercepts torch operators, whoever calls them."""

    def __init__(self, deferred_fills: DeferredFills) -> None:
        super().__init__()
        self._fills = deferred_fills

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self._fills.record_fill(func, args, options):
            return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._fills.advance_generator()
        self._fills.fill_overlapping((args, options))
        return func(*args, **options)


class _MemoryAccessMode(TorchFunctionMode):
    """Intercepts functions that read a tensor's memory without an operator."""

    def __init__(self, deferred_fills: DeferredFills) -> None:
        super().__init__()
        self._fills = deferred_fills

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MEMORY_FUNCTIONS:
            self._fills.fill_overlapping(args)
        return func(*args, **(kwargs or {}))
