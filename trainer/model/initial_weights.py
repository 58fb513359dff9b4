"""Initializes models built on the meta device, with identical weights on any mesh.

A model is initialized one module at a time, and each rank draws only the weights in its shards:

1. The model's ordinary code initializes the module.  The module's own parameters are temporarily replaced by tensors of
   the full shape without memory, which record the in-place operators applied to them (`_Recorder`).
2. Each rank applies these operators to blocks of 65,536 elements, only to those that overlap its shard.  The random
   numbers of a block come from a generator of its own, seeded from (seed, parameter name, number of the block).
   Several threads can share this work (`_Shard`).
3. If the initialization does anything else with a parameter, such as reading it, the module is instead initialized
   again with full tensors on the CPU and the generator seeded from (seed, module name), and each rank copies its shard
   (`_fill_whole`).  This always works, but every rank draws all of the module.

No rank holds more than its shards plus one module, there is no communication, and the weights depend only on the seed,
not on the mesh or the device.  (A GPU's generator would give different values.)  This module does not depend on
particular models.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from trainer.errors import UserError, print_stderr
from trainer.model.lora import FACTORS, name_without_adapters
from trainer.model.parameters import local, local_box, num_writes, seed_of, tied_names
from trainer.model.placement import Box

_BLOCK = 2**16
"""Number of consecutive elements of a parameter that one generator draws: so many that creating it costs little."""
_PIECE = 2**22
"""About how many elements a thread draws before it copies them to the device."""
MANY = 2**28
"""How many numbers a rank may draw without keeping them before that is said: this takes about a second."""

_aten = torch.ops.aten
_DRAWS = {_aten.normal_.default, _aten.uniform_.default}
"""In-place operators that set each element to a random number."""
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}
"""In-place operators that set all elements to one number."""
_CHANGES = {
    _aten.add_.Tensor,
    _aten.sub_.Tensor,
    _aten.mul_.Tensor,
    _aten.div_.Tensor,
    _aten.pow_.Scalar,
    _aten.sqrt_.default,
    _aten.exp_.default,
    _aten.log_.default,
    _aten.erfinv_.default,
    _aten.abs_.default,
    _aten.neg_.default,
    _aten.clamp_.default,
    _aten.clamp_min_.default,
    _aten.clamp_max_.default,
}
"""In-place operators that change each element by itself, if their other arguments are numbers."""
_VIEWS = {_aten.detach.default, _aten.view.default, _aten.select.int, _aten.slice.Tensor}
"""Operators that return a part of a tensor, whose elements are consecutive if it is contiguous."""
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

Init = Callable[[nn.Module, str], None]
"""Initializes what a module owns directly, given the module and its name."""


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
    It is called twice for a module whose initialization cannot be recorded.  Tied parameters are initialized once, by
    the first module that owns them.  Values are computed on the CPU and moved to `device`; with `cpu_offload`,
    parameters stay on the CPU.

    Parameters for which `is_loaded_later(name)` is true are not initialized: until they are loaded, floating-point ones
    are NaN and quantized ones undefined.  Buffers are always initialized.

    Raises UserError naming every parameter and buffer that was not initialized.  All ranks raise it, since they run the
    initialization code of the same modules.  Rank 0 warns if ranks draw many numbers that they do not keep.
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
        for name, buffer in _direct_buffers(module).items():
            if _join(module_name, name) in on_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))

    # Moving tensors off the meta device untied them.
    for first, *aliases in ties:
        parameter = model.get_parameter(first)
        for alias in aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner).register_parameter(name, parameter)

    # Run each module's initialization: afterwards its buffers have values, and its parameters are filled or recorded.
    init_module = _with_names(init, model) if init is not None else _default_init
    canonical = {alias: group[0] for group in ties for alias in group}
    recorded: list[tuple[torch.Tensor, _Recording]] = []
    unfilled: list[str] = []
    surplus = _Surplus()
    for module_name, module in model.named_modules():
        to_fill: set[str] = set()  # names within the module
        for name, tensor in _direct_tensors(module).items():
            full_name = _join(module_name, name)
            if full_name not in on_meta or canonical.get(full_name, full_name) != full_name:
                continue
            if isinstance(tensor, nn.Parameter) and is_loaded_later is not None and is_loaded_later(full_name):
                _poison(local(tensor.detach()))
            else:
                to_fill.add(name)
        if not to_fill:
            continue
        run = partial(_default_init if isinstance(module, FACTORS) else init_module, module, module_name)
        seed_name = name_without_adapters(module_name)
        recordings, obstacle = _record(module, seed_name, to_fill, seed, run)
        if obstacle:
            unfilled += [_join(module_name, name) for name in _fill_whole(module, seed_name, to_fill, seed, run)]
            surplus.add(module, module_name, to_fill, obstacle)
        else:
            recorded += [(getattr(module, name), recording) for name, recording in recordings.items()]
        for name, buffer in _direct_buffers(module).items():
            if name in to_fill:
                setattr(module, name, buffer.to(device))
    if unfilled:
        raise UserError(
            f"uninitialized: {', '.join(unfilled)}: after a model is built on the meta device, each module that owns a "
            "parameter or buffer must fill all of it in `reset_parameters()` (or in `ModelSpec.init`)"
        )
    _draw_shards(recorded)


def _with_names(init: Callable[..., None], model: nn.Module) -> Init:
    takes_names = len(inspect.signature(init).parameters) > 1
    return lambda module, name: init(module, name, model) if takes_names else init(module)


def _default_init(module: nn.Module, name: str) -> None:
    # torch's MultiheadAttention and Transformer use a private name.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


# ---------------------------------------------------------------------------------------------------------------
# Running a module's initialization


@torch.no_grad()
def _record(
    module: nn.Module, seed_name: str, to_fill: set[str], seed: int, run: Callable[[], None]
) -> tuple[dict[str, _Recording], str]:
    """Initialize the buffers in `to_fill`, which `module` owns, and record how its parameters in `to_fill` are.

    Returns the recordings, and what prevents using them, if anything; then the buffers may be half-initialized.
    """
    buffers = _direct_buffers(module)
    parameters = {name: p for name, p in _direct_parameters(module).items() if name in to_fill}
    recordings = {name: _Recording(_join(seed_name, name), seed, p) for name, p in parameters.items()}
    obstacle = ""
    with _parameters_replaced(module, {name: _Recorder.full(recording) for name, recording in recordings.items()}):
        stand_ins = _direct_parameters(module)
        try:
            unfilled = _run(module, seed_name, to_fill, seed, run)
        except Exception as error:  # if it is not due to the stand-ins, it is raised again without them
            obstacle = str(error) or type(error).__name__
        else:
            replaced = [name for name in recordings if getattr(module, name) is not stand_ins[name]]
            if unfilled or replaced:
                obstacle = f"{[*unfilled, *replaced][0]} is not filled in place"
    obstacle = next((r.obstacle for r in recordings.values() if r.obstacle), obstacle)
    if obstacle:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    return recordings, obstacle


@torch.no_grad()
def _fill_whole(module: nn.Module, seed_name: str, to_fill: set[str], seed: int, run: Callable[[], None]) -> list[str]:
    """Initialize the tensors in `to_fill`, which `module` owns, in full on the CPU, and copy this rank's shards.

    Returns the names of those that were not initialized.
    """
    parameters = {name: p for name, p in _direct_parameters(module).items() if name in to_fill}
    full = {name: torch.empty(p.shape, dtype=_drawn_dtype(p), device="cpu") for name, p in parameters.items()}
    with _parameters_replaced(module, full):
        unfilled = _run(module, seed_name, to_fill, seed, run)
        for name, parameter in parameters.items():
            _copy_shard(parameter, getattr(module, name).detach())
    return unfilled


def _run(module: nn.Module, seed_name: str, to_fill: set[str], seed: int, run: Callable[[], None]) -> list[str]:
    """Run an initialization; return the names of the tensors in `to_fill` that it does not fill."""
    before = {}
    for name, tensor in _direct_tensors(module).items():
        if not isinstance(tensor, _Recorder):
            if name in to_fill:
                _poison(tensor)
            before[name] = id(tensor), num_writes(tensor)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, seed_name))
        run()
    unfilled = []
    for name, tensor in _direct_tensors(module).items():
        if name not in to_fill:
            continue
        if isinstance(tensor, _Recorder):
            is_filled = tensor.recording.is_filled
        elif tensor.is_floating_point() or tensor.is_complex():
            is_filled = not tensor.sum().isnan()  # the sum is NaN if any element is, and needs no temporary
        else:
            is_filled = (id(tensor), num_writes(tensor)) != before[name]
        if not is_filled:
            unfilled.append(name)
    return unfilled


@contextlib.contextmanager
def _parameters_replaced(module: nn.Module, replacements: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace the module's own parameters during the block: those not in `replacements` by tensors on the meta device.

    Writing to these has no effect and no cost.
    """
    originals = _direct_parameters(module)
    for name, original in originals.items():
        unused = torch.empty(original.shape, dtype=original.dtype, device="meta")
        parameter = nn.Parameter(replacements.get(name, unused), requires_grad=original.requires_grad)
        module.register_parameter(name, parameter)
    try:
        yield
    finally:
        for name, original in originals.items():
            module.register_parameter(name, original)


def _direct_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _direct_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _direct_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**_direct_parameters(module), **_direct_buffers(module)}


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def _drawn_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to compute initial values: bfloat16 ones are drawn in full precision, then rounded."""
    return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype


def _poison(tensor: torch.Tensor) -> None:
    """Fill a floating-point or complex tensor with NaN, to find elements that initialization never writes.

    Tensors of other dtypes are not changed: for these, only whether anything is written is checked.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)


def _copy_shard(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Fill this rank's shard of `parameter` from the full tensor.  No communication: every rank has the full tensor."""
    box, shard = local_box(parameter), local(parameter.detach())
    if box is not None and full.ndim:
        shard.copy_(full[tuple(slice(start, stop) for start, stop in box)])  # copies only this part to the device
    elif isinstance(parameter, DTensor):
        part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        shard.copy_(local(part))
    else:
        shard.copy_(full)


class _Surplus:
    """Counts the elements that this rank draws but does not keep, and warns once if they are many."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, module: nn.Module, module_name: str, to_fill: Collection[str], obstacle: str) -> None:
        parameters = [p for name, p in _direct_parameters(module).items() if name in to_fill]
        before = self.count
        self.count += sum(p.numel() - local(p.detach()).numel() for p in parameters)
        if before <= MANY < self.count and (not dist.is_initialized() or dist.get_rank() == 0):
            print_stderr(
                f"warning: {module_name or 'the model'}: every rank draws all of its initial weights, and all of some "
                f"other modules', since initialization does more than fill and scale them in place ({obstacle}); this "
                'may take minutes\n  to draw only each rank\'s part: see "A model of your own" in docs/models.md'
            )


# ---------------------------------------------------------------------------------------------------------------
# Recording


@dataclass(frozen=True)
class _Operation:
    """An in-place operator that was applied to elements [start, stop) of a flat parameter."""

    operator: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    start: int
    stop: int

    def apply(self, block: torch.Tensor, first: int, generator: torch.Generator) -> None:
        """Apply this operator to a block, which begins at element `first` of the flat parameter."""
        options = {**self.options, "generator": generator} if self.operator in _DRAWS else self.options
        part = block[max(self.start - first, 0) : max(self.stop - first, 0)]
        if part.numel():
            self.operator(part, *self.arguments, **options)


class _Recording:
    """How a parameter is initialized: in-place operators, which can be repeated on any part of it."""

    def __init__(self, name: str, seed: int, parameter: torch.Tensor) -> None:
        self.name, self.seed = name, seed
        self.shape, self.dtype = parameter.shape, _drawn_dtype(parameter)
        self.operations: list[_Operation] = []
        """The first one sets all elements."""
        self.obstacle = ""
        """What else was done to the parameter, if anything."""

    @property
    def is_filled(self) -> bool:
        return bool(self.operations)

    def record(self, operation: _Operation) -> bool:
        """Record an operator; return whether that is possible."""
        arguments = (*operation.arguments, *operation.options.values())
        if operation.operator not in _DRAWS | _FILLS | _CHANGES or not all(isinstance(a, Number) for a in arguments):
            return False
        is_whole = operation.stop - operation.start == self.shape.numel()
        if is_whole and operation.operator in _DRAWS | _FILLS:
            self.operations.clear()  # whatever they did is overwritten
        elif not self.operations or operation.operator in _DRAWS:
            return False
        self.operations.append(operation)
        return True

    def draw(self, start: int, out: torch.Tensor) -> None:
        """Fill `out`, a vector, with the elements of the flat parameter from `start` on."""
        stop = start + len(out)
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            first, last = number * _BLOCK, min((number + 1) * _BLOCK, self.shape.numel())
            is_inside = start <= first and last <= stop
            block = out[first - start : last - start] if is_inside else torch.empty(last - first, dtype=self.dtype)
            generator = torch.Generator().manual_seed(seed_of(self.seed, f"{self.name}/{number}"))
            for operation in self.operations:
                operation.apply(block, first, generator)
            if not is_inside:
                low, high = max(start, first), min(stop, last)
                out[low - start : high - start] = block[low - first : high - first]


class _Recorder(torch.Tensor):
    """A tensor without memory that stands in for a parameter, or for a view of it, and records what is done to it.

    It claims to be on the CPU, since some code treats tensors on the meta device differently: torch's `trunc_normal_`
    leaves these alone.  Whatever can't be recorded raises an error.
    """

    recording: _Recording
    meta: torch.Tensor
    """A tensor on the meta device with the same shape, strides and offset."""

    @classmethod
    def full(cls, recording: _Recording) -> _Recorder:
        return cls(recording, torch.empty(recording.shape, dtype=recording.dtype, device="meta"))

    @staticmethod
    def __new__(cls, recording: _Recording, meta: torch.Tensor) -> _Recorder:
        self = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=torch.device("cpu")
        )
        self.recording, self.meta = recording, meta
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_SET_DATA, torch.Tensor.data_ptr):  # not operators
            raise args[0]._cannot_record(func)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = kwargs or {}
        recorder = next(value for value in tree_leaves((args, options)) if isinstance(value, cls))
        if recorder is args[0]:
            if func in _VIEWS:
                return cls(recorder.recording, func(recorder.meta, *args[1:], **options))
            start = recorder.meta.storage_offset()
            operation = _Operation(func, args[1:], options, start, start + recorder.numel())
            if recorder.meta.is_contiguous() and recorder.recording.record(operation):
                return recorder
        raise recorder._cannot_record(func)

    def _cannot_record(self, func: Any) -> RuntimeError:
        self.recording.obstacle = self.recording.obstacle or f"{self.recording.name}: {func}"
        return RuntimeError(self.recording.obstacle)


# ---------------------------------------------------------------------------------------------------------------
# Drawing


def _draw_shards(recorded: Iterable[tuple[torch.Tensor, _Recording]]) -> None:
    """Fill this rank's shards of the parameters, each with a recording."""
    tasks = chain.from_iterable(_drawing_tasks(parameter, recording) for parameter, recording in recorded)
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(num_threads) as threads:
        deque(threads.map(lambda task: task(), tasks), maxlen=0)  # iterating re-raises errors


def _drawing_tasks(parameter: torch.Tensor, recording: _Recording) -> Iterator[Callable[[], None]]:
    """Yield functions that together fill this rank's shard of `parameter`, each of them some rows."""
    box, shard = local_box(parameter), local(parameter.detach())
    if box is None or not parameter.ndim:
        yield partial(_draw_whole, parameter, recording)
    elif shard.numel():
        (start, stop), *others = box
        width = math.prod(parameter.shape[1:])
        keeps_gaps = width > _BLOCK and others != [(0, size) for size in parameter.shape[1:]]
        num_rows = 1 if keeps_gaps else max(1, _PIECE // width)
        for first in range(start, stop, num_rows):
            last = min(first + num_rows, stop)
            yield partial(_draw_part, shard[first - start : last - start], ((first, last), *others), recording)


def _draw_whole(parameter: torch.Tensor, recording: _Recording) -> None:
    full = torch.empty(recording.shape, dtype=recording.dtype)
    recording.draw(0, full.view(-1))
    _copy_shard(parameter, full)


def _draw_part(part: torch.Tensor, box: Box, recording: _Recording) -> None:
    """Fill `part`, which is the part `box` of the parameter."""
    (first, last), *others = box
    is_all_of_rows = others == [(0, size) for size in recording.shape[1:]]
    if is_all_of_rows and part.device.type == "cpu" and part.dtype == recording.dtype and part.is_contiguous():
        recording.draw(first * math.prod(recording.shape[1:]), part.view(-1))
        return
    rows = torch.empty((last - first, *recording.shape[1:]), dtype=recording.dtype)
    other_dims = (slice(None), *(slice(start, stop) for start, stop in others))
    kept = rows[other_dims]
    low = int(kept.storage_offset())
    high = low + 1 + sum((size - 1) * stride for size, stride in zip(kept.shape, kept.stride(), strict=True))
    recording.draw(first * rows.stride(0) + low, rows.view(-1)[low:high])
    part.copy_(kept)
