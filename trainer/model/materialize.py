"""Initializes models built on the meta device, with identical weights on any mesh.

A model is initialized one module at a time.  A module's own parameters are temporarily replaced by full tensors on the
CPU.  The model's ordinary code initializes these, with the generator seeded from (seed, module name), and each rank
keeps its shard.  For a large tensor of random numbers, a rank usually draws only the rows in its shard, and advances
the generator past all other rows (`_should_defer`).  Several threads can share this work.  No rank holds more than its
shards plus one module, there is no communication, and the weights depend only on the seed, not on the mesh or the
device.  (A GPU's generator would give different values.)  This module does not depend on particular models.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError
from trainer.model.lora import FACTORS, name_without_adapters
from trainer.model.parameters import local, local_box, num_writes, seed_of, tied_names


def materialize(
    model: nn.Module,
    seed: int,
    device: torch.device,
    init: Callable[..., None] | None = None,
    cpu_offload: bool = False,
    is_loaded_later: Callable[[str], bool] | None = None,
) -> None:
    """Allocate and initialize every parameter and buffer of `model` that is on the meta device, in place.

    `init(module)`, or `init(module, name, model)`, initializes the tensors that one module owns directly; by default,
    and for adapters, this is `module.reset_parameters()` or, as some of torch's modules call it, `_reset_parameters()`.
    Tied parameters are initialized once, by the first module that owns them.  Values are computed on the CPU and moved
    to `device`; with `cpu_offload`, parameters stay on the CPU.

    Parameters for which `is_loaded_later(name)` is true are not initialized: until they are loaded, floating-point ones
    are NaN and quantized ones undefined.  Buffers are always initialized.

    Raises UserError naming every parameter and buffer that was not initialized.  All ranks raise it, since they run the
    initialization code of the same modules.
    """
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    on_meta = {name for name, tensor in named if tensor.is_meta}
    if not on_meta:
        return
    ties = tied_names(model)

    # Allocate all meta tensors, buffers on the CPU; tensors that already have values do not change.
    parameter_device = torch.device("cpu") if cpu_offload else device
    model._apply(lambda tensor: torch.empty_like(tensor, device=parameter_device) if tensor.is_meta else tensor)
    for module_name, module in model.named_modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if (f"{module_name}.{name}" if module_name else name) in on_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))

    # Moving tensors off the meta device untied them.
    for first, *aliases in ties:
        parameter = model.get_parameter(first)
        for alias in aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner).register_parameter(name, parameter)

    fill = _default_init
    if init is not None:
        spec_init = init
        takes_names = len(inspect.signature(init).parameters) > 1
        fill = lambda module, name: spec_init(module, name, model) if takes_names else spec_init(module)  # noqa: E731
    canonical = {alias: group[0] for group in ties for alias in group}
    unfilled: list[str] = []
    scratch = _ScratchMemory()
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        own_names = {name for name, _ in _direct_tensors(module) if prefix + name in on_meta}
        to_fill = {prefix + name for name in own_names if canonical.get(prefix + name, prefix + name) == prefix + name}
        if is_loaded_later is not None:
            to_fill -= _skip_loaded_later(module, module_name, to_fill, is_loaded_later)
        if to_fill:
            fill_module = _default_init if isinstance(module, FACTORS) else fill
            unfilled += _fill(
                module, module_name, to_fill, seed_of(seed, name_without_adapters(module_name)), scratch, fill_module
            )
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                if name in own_names:
                    setattr(module, name, buffer.to(device))
    if unfilled:
        raise UserError(
            f"uninitialized: {', '.join(unfilled)}: after a model is built on the meta device, each module that owns a "
            "parameter or buffer must fill all of it in `reset_parameters()` (or in `ModelSpec.init`)"
        )


@torch.no_grad()
def _skip_loaded_later(
    module: nn.Module, module_name: str, to_fill: set[str], is_loaded_later: Callable[[str], bool]
) -> set[str]:
    """Return the names of the parameters in `to_fill` that will be loaded later, after filling them with NaN."""
    prefix = f"{module_name}." if module_name else ""
    own_parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    skipped = {name for name in own_parameters if prefix + name in to_fill and is_loaded_later(prefix + name)}
    for name in skipped:
        _poison(local(own_parameters[name].detach()))
    return {prefix + name for name in skipped}


def _default_init(module: nn.Module, name: str) -> None:
    # torch's MultiheadAttention and Transformer use a private name.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


@torch.no_grad()
def _fill(
    module: nn.Module,
    module_name: str,
    to_fill: set[str],
    seed: int,
    scratch: _ScratchMemory,
    init: Callable[[nn.Module, str], None],
) -> list[str]:
    """Fill the tensors in `to_fill`, which `module` owns directly; return the names of those that were not written.

    The module's other parameters are replaced by meta tensors, so that writing to them has no effect and no cost.
    """
    prefix = f"{module_name}." if module_name else ""
    originals = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    full_tensors = scratch.full_tensors({name: p for name, p in originals.items() if prefix + name in to_fill})
    deferred = {name: full for name, full in full_tensors.items() if _should_defer(originals[name], full)}
    deferred_fills = DeferredFills(deferred)
    for name, parameter in originals.items():
        unused = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        full = full_tensors.get(name, unused)
        if name in full_tensors and name not in deferred:
            _poison(full)
        module.register_parameter(name, nn.Parameter(full, requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if prefix + name in to_fill:
            _poison(buffer)
    versions = {name: num_writes(tensor) for name, tensor in _direct_tensors(module)}
    ids_before = {name: id(tensor) for name, tensor in _direct_tensors(module)}

    with torch.random.fork_rng(devices=[]), deferred_fills.observe():
        torch.default_generator.manual_seed(seed)
        init(module, module_name)

    unfilled = []
    for name, tensor in _direct_tensors(module):
        was_written = num_writes(tensor) != versions[name] or id(tensor) != ids_before[name]
        if prefix + name not in to_fill or deferred_fills.get(name, tensor):
            continue
        # The sum is NaN if any element is, and needs no temporary.
        has_nan = (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.sum().isnan())
        if has_nan or not (was_written or tensor.is_floating_point()):
            unfilled.append(prefix + name)
    for name, parameter in originals.items():
        if prefix + name in to_fill:
            full = module.get_parameter(name).detach()
            _copy_shard(parameter, full, deferred_fills.get(name, full))
        module.register_parameter(name, parameter)
    return unfilled


def _should_defer(parameter: torch.Tensor, full: torch.Tensor) -> bool:
    """Return whether to defer filling a tensor until its shard is copied, and then draw only the shard's rows.

    This pays off for a large tensor, if this rank keeps at most half of the rows or has several threads to draw them.
    """
    box = local_box(parameter)
    pays_off = box is not None and (2 * (box[0][1] - box[0][0]) <= full.shape[0] or torch.get_num_threads() > 1)
    # Large enough to save time, and consisting of complete groups.
    is_large = full.numel() >= MIN_ELEMENTS and full.numel() % _GROUP_SIZE == 0
    return pays_off and is_large and full.dtype == torch.float32 and full.is_contiguous()


class _ScratchMemory:
    """Memory for the full tensors of one module at a time.

    It is reused for every module, since each page of newly allocated memory causes a page fault.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def full_tensors(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return uninitialized tensors with the (global) shapes of `like`, in memory that the next call reuses.

        Their dtypes are those of `like`, except float32 for bfloat16: weights are drawn in full precision, then
        rounded.
        """
        dtypes = {n: torch.float32 if t.dtype == torch.bfloat16 else t.dtype for n, t in like.items()}
        sizes = {name: -(-tensor.numel() * dtypes[name].itemsize // 64) * 64 for name, tensor in like.items()}
        if sum(sizes.values()) > self._bytes.numel():
            self._bytes = torch.empty(sum(sizes.values()), dtype=torch.uint8, device="cpu")
        tensors, start = {}, 0
        for name, tensor in like.items():
            part = self._bytes[start : start + tensor.numel() * dtypes[name].itemsize]
            tensors[name] = part.view(dtypes[name]).view(tensor.shape)
            start += sizes[name]
        return tensors


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from [*module.named_parameters(recurse=False, remove_duplicate=False)]
    yield from [*module.named_buffers(recurse=False, remove_duplicate=False)]


def _copy_shard(parameter: torch.Tensor, full: torch.Tensor, deferred: DeferredFill | None = None) -> None:
    """Fill this rank's shard of `parameter`: copy it from `full`, or draw it if the fill was deferred.

    No communication: every rank has the full tensor, or can draw any part of it.
    """
    box, shard = local_box(parameter), local(parameter.detach())
    if box is not None and full.ndim:
        rows = slice(box[0][0], box[0][1])
        other_dims = (slice(None), *(slice(start, stop) for start, stop in box[1:]))
        if deferred is not None:
            width = math.prod(full.shape[1:])
            drawn = deferred.draw(rows.start * width, rows.stop * width).view(-1, *full.shape[1:])
        else:
            drawn = full[rows]
        shard.copy_(drawn[other_dims])  # copies only this part to the device
    elif isinstance(parameter, DTensor):
        part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        shard.copy_(local(part))
    else:
        shard.copy_(full)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a floating-point or complex tensor with NaN, to find elements that initialization never writes; return it.

    Tensors of other dtypes are returned unchanged: for these, only whether anything is written is checked.
    """
    return tensor.fill_(torch.nan) if tensor.is_floating_point() or tensor.is_complex() else tensor


# ---------------------------------------------------------------------------------------------------------------
# Drawing part of a tensor, bit-identical to the same part of the full tensor

MIN_ELEMENTS = 2**23
"""Minimum number of elements for a fill to be deferred; skipping ahead takes as long as drawing about two million."""
_PIECE_ELEMENTS = 2**24
"""Number of elements that a thread draws in one call."""
_GROUP_SIZE = 16
"""torch draws normally distributed numbers in groups of this size, using one word of the generator per number."""

_RANDOM_FILLS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.normal_.default: torch.Tensor.normal_,
    torch.ops.aten.uniform_.default: torch.Tensor.uniform_,
}
_MEMORY_FUNCTIONS = (
    *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist),
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__),
)
"""Functions that give access to a tensor's memory without dispatching a torch operator."""


@dataclass(frozen=True)
class DeferredFill:
    """The random initialization of one tensor, deferred."""

    fill: Callable[..., torch.Tensor]
    arguments: tuple[float, ...]
    """Mean and standard deviation, or the bounds."""
    generator_state: torch.Tensor
    """The generator's state before the draw."""

    def draw(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flat tensor."""
        first, last = start // _GROUP_SIZE * _GROUP_SIZE, -(-stop // _GROUP_SIZE) * _GROUP_SIZE
        drawn = torch.empty(max(0, last - first), dtype=torch.float32)
        pieces = drawn.split(_PIECE_ELEMENTS) if drawn.numel() else ()
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            deque(threads.map(self._fill, pieces, self._generators(first)), maxlen=0)  # iterating re-raises errors
        return drawn[start - first : stop - first]

    def _fill(self, piece: torch.Tensor, generator: torch.Generator) -> None:
        self.fill(piece, *self.arguments, generator=generator)

    def _generators(self, first: int) -> Iterator[torch.Generator]:
        """Yield a generator for each successive piece, starting at element `first`."""
        state, distance = self.generator_state, first
        while True:
            generator = torch.Generator()
            generator.set_state(state)
            skip_words(generator, distance)
            state, distance = generator.get_state(), _PIECE_ELEMENTS
            yield generator


class DeferredFills:
    """Defers the random initialization of some full tensors, given by name.

    Random fills are only recorded; a tensor's memory is not touched until another operation uses it.
    """

    def __init__(self, full_tensors: Mapping[str, torch.Tensor]) -> None:
        self._full_tensors = {full.data_ptr(): full.detach() for full in full_tensors.values()}
        self._addresses = {name: full.data_ptr() for name, full in full_tensors.items()}
        self._pending: dict[int, DeferredFill | None] = dict.fromkeys(self._full_tensors)
        """Deferred draws by address.  None before the first draw: the tensor is then filled with NaN on first use."""
        self._num_words_to_skip = 0

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Observe all operations inside the block.  Afterwards each tensor has either values or a deferred draw."""
        with _OperatorMode(self), _MemoryAccessMode(self):
            yield
        for address in [address for address, deferred in self._pending.items() if deferred is None]:
            self._fill_now(address)

    def get(self, name: str, tensor: torch.Tensor) -> DeferredFill | None:
        """Return the deferred draw of the named tensor; None if it already has values, or if `tensor` is not the
        observed one.
        """
        address = self._addresses.get(name, -1)
        return self._pending.get(address) if tensor.data_ptr() == address else None

    def record_fill(self, operator: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Record an operator that fills an observed tensor with random numbers; return whether it was deferred."""
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
            full.view(-1).copy_(deferred.draw(0, full.numel()))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments, including nested containers."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors_in(value)


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's range of memory addresses, [start, stop)."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


class _OperatorMode(TorchDispatchMode):
    """Intercepts all torch operators."""

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


# ---------------------------------------------------------------------------------------------------------------
# Skipping ahead in the generator
#
# The state after n words is a polynomial in the recurrence's shift operator, t^n modulo its characteristic polynomial
# over GF(2), applied to the initial state: Haramoto et al. 2008, "Efficient Jump Ahead for F2-Linear Random Number
# Generators".

_WORDS, _MIDDLE, _LOW_BITS, _TWIST = 624, 397, 31, 0x9908B0DF
"""Parameters of the Mersenne Twister MT19937, torch's generator on a CPU (Matsumoto and Nishimura 1998)."""
_DEGREE = 32 * _WORDS - _LOW_BITS
"""Degree of the characteristic polynomial of the generator's recurrence."""
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)
"""Slices of torch's `Generator.get_state()`: number of words left plus one, index of the next word, the words."""

Words = npt.NDArray[np.uint32]


def skip_words(generator: torch.Generator, count: int) -> None:
    """Advance `generator` by `count` words: one for each uniform or normal float32."""
    if not count:
        return
    state = generator.get_state().numpy().copy()
    num_used = _WORDS + 1 - int(state[_LEFT].view(np.int32)[0])
    distance = num_used + count - _WORDS
    if distance < 0:
        torch.empty(count, dtype=torch.float32).uniform_(generator=generator)
        return
    words = state[_STATE].view(np.uint64)
    words[:] = _skip_ahead(words.astype(np.uint32), distance)
    state[_LEFT].view(np.int32)[0], state[_NEXT].view(np.uint64)[0] = 1, 0
    generator.set_state(torch.from_numpy(state))


def _skip_ahead(words: Words, distance: int) -> Words:
    """Return the 624-word state that is `distance` words after `words`."""
    needed = np.flatnonzero(_power(distance))
    sequence = _extend_sequence(words, _DEGREE + _WORDS)
    windows = np.lib.stride_tricks.sliding_window_view(sequence, _WORDS)
    result = np.zeros(_WORDS, dtype=np.uint32)
    for start in range(0, len(needed), 256):  # in chunks that fit the CPU cache
        result ^= np.bitwise_xor.reduce(windows[needed[start : start + 256]], axis=0)
    return result


def _extend_sequence(words: Words, count: int) -> Words:
    """Return the first `count` words of the sequence that starts with `words`."""
    sequence = np.concatenate((words, np.zeros(count - _WORDS, dtype=np.uint32)))
    step = _WORDS - _MIDDLE  # this many words depend only on earlier ones
    for start in range(0, count - _WORDS, step):
        size = min(step, count - _WORDS - start)
        first, second = sequence[start : start + size], sequence[start + 1 : start + 1 + size]
        mixed = (first & 0x80000000) | (second & 0x7FFFFFFF)
        twisted = (mixed >> 1) ^ np.where(mixed & 1, np.uint32(_TWIST), np.uint32(0))
        sequence[start + _WORDS : start + _WORDS + size] = sequence[start + _MIDDLE : start + _MIDDLE + size] ^ twisted
    return sequence


@cache
def _power(exponent: int) -> npt.NDArray[np.uint8]:
    """Return the coefficients of t^exponent modulo the characteristic polynomial, lowest degree first."""
    power = 1
    for bit in bin(exponent)[2:]:
        power = _reduce(_square(power) << (bit == "1"))
    data = np.frombuffer(power.to_bytes(_DEGREE // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(data, bitorder="little")


def _square(polynomial: int) -> int:
    """Return the square of a polynomial; over GF(2) this inserts a zero between adjacent coefficients."""
    data = np.frombuffer(polynomial.to_bytes(polynomial.bit_length() // 8 + 1, "little"), dtype=np.uint8)
    bits = np.unpackbits(data, bitorder="little")
    spread = np.zeros(2 * len(bits), dtype=np.uint8)
    spread[::2] = bits
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _reduce(polynomial: int) -> int:
    """Return the remainder modulo the characteristic polynomial."""
    while (high := polynomial >> _DEGREE) != 0:
        polynomial &= (1 << _DEGREE) - 1
        for exponent in _lower_terms():
            polynomial ^= high << exponent
    return polynomial


@cache
def _lower_terms() -> tuple[int, ...]:
    """Return the exponents of the characteristic polynomial's terms, except the leading one."""
    first, second = (1 << _WORDS) | (1 << _MIDDLE), (1 << (_WORDS - 1)) | (1 << (_MIDDLE - 1))
    powers = [1]
    for _ in range(_LOW_BITS):
        powers.append(_product(powers[-1], second))
    total = _product(first, powers[_LOW_BITS])
    for bit in range(_LOW_BITS):
        if _TWIST >> bit & 1:
            total ^= _product(first, powers[_LOW_BITS - 1 - bit])
    total ^= _TWIST >> _LOW_BITS & 1
    return tuple(exponent for exponent in range(_DEGREE) if total >> exponent & 1)


def _product(polynomial: int, sparse: int) -> int:
    """Return the product of two polynomials over GF(2); `sparse` should have few terms."""
    product = 0
    while sparse:
        lowest = sparse & -sparse
        product ^= polynomial * lowest
        sparse ^= lowest
    return product
