"""Initializes models built on the meta device, with identical weights on any mesh.

A model is initialized one module at a time, and each rank draws only the weights in its shards:

1. The model's ordinary code initializes the module.  The module's own parameters are temporarily replaced by tensors of
   the full shape without memory, which record the in-place operators applied to them (`_Recorder`).
2. Each rank applies these operators to blocks of 65,536 elements, only to those that overlap its shard.  The random
   numbers of a block come from a generator of its own, seeded from (seed, parameter name, number of the block), so
   they do not depend on how the parameter is divided.  Several threads can share this work (`_draw_shards`).
3. If the initialization does anything else with a parameter, such as reading it, the module is instead initialized
   again with full tensors on the CPU and the default generator seeded from (seed, module name), and each rank copies
   its shard (`_ModuleInit.fill_whole`).  This always works, but every rank draws all of the module.

No rank holds more than its shards plus one module, there is no communication, and the weights depend only on the seed,
not on the mesh or the device.  (A GPU's generator would give different values.)  This module does not depend on
particular models.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.errors import UserError, print_stderr
from trainer.model.lora import FACTORS, name_without_adapters
from trainer.model.parameters import local, local_box, num_writes, seed_of, tied_names
from trainer.model.placement import Box

_BLOCK = 2**16
"""Number of consecutive elements of a parameter that one generator draws: so many that creating it costs little."""
_PIECE = 2**21
"""About how many elements a thread draws before it copies them to the device."""
MANY = 2**28
"""How many numbers a rank may draw without keeping them before that is said: this takes about a second."""

_aten = torch.ops.aten
_trunc_normal = nn.init.trunc_normal_
_DRAWS = {_aten.normal_.default, _aten.uniform_.default, _trunc_normal}
"""In-place operators that set each element to a random number."""
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}
"""In-place operators that set all elements to one number."""
_CHANGES = {
    _aten.add_.Tensor,
    _aten.sub_.Tensor,
    _aten.mul_.Tensor,
    _aten.div_.Tensor,
    _aten.exp_.default,
    _aten.log_.default,
    _aten.erfinv_.default,
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

    # Initialize each module.
    model_init = _with_names(init, model) if init is not None else _default_init
    canonical = {alias: group[0] for group in ties for alias in group}
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
        module_init = _ModuleInit(
            module, module_name, to_fill, seed, _default_init if isinstance(module, FACTORS) else model_init
        )
        if (recordings := module_init.record()) is not None:
            _draw_shards(recordings)
        else:
            unfilled += module_init.fill_whole()
            surplus.add(module_init)
        for name, buffer in _direct_buffers(module).items():
            if name in to_fill:
                setattr(module, name, buffer.to(device))
    if unfilled:
        raise UserError(
            f"uninitialized: {', '.join(unfilled)}: after a model is built on the meta device, each module that owns a "
            "parameter or buffer must fill all of it in `reset_parameters()` (or in `ModelSpec.init`)"
        )


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


class _ModuleInit:
    """The initialization of the tensors in `to_fill`, by their names within the module that owns them."""

    def __init__(self, module: nn.Module, module_name: str, to_fill: set[str], seed: int, init: Init) -> None:
        self.module = module
        self.module_name = module_name
        self.to_fill = to_fill
        self.parameters = {name: p for name, p in _direct_parameters(module).items() if name in to_fill}
        self.seed = seed
        self.seed_name = name_without_adapters(module_name)
        self.init = init
        self.obstacle = ""
        """Why it cannot be recorded."""

    @torch.no_grad()
    def record(self) -> list[tuple[nn.Parameter, _Recording]] | None:
        """Initialize the buffers, and record how the parameters are initialized; return None if that is impossible."""
        buffers = _direct_buffers(self.module)
        recordings = {n: _Recording(_join(self.seed_name, n), self.seed, p) for n, p in self.parameters.items()}
        with _parameters_replaced(self.module, {name: _Recorder.of(r) for name, r in recordings.items()}):
            stand_ins = _direct_parameters(self.module)
            try:
                unfilled = self._run()
            except Exception as error:  # unless the stand-ins cause it, `fill_whole` raises it again
                self.obstacle = str(error) or type(error).__name__
            else:
                unfilled += [n for n in recordings if _direct_parameters(self.module).get(n) is not stand_ins[n]]
                self.obstacle = f"{unfilled[0]} is not filled in place" if unfilled else ""
        for recording in recordings.values():
            self.obstacle = recording.obstacle or self.obstacle
        if not self.obstacle:
            return [(self.parameters[name], recording) for name, recording in recordings.items()]
        for name, buffer in buffers.items():
            setattr(self.module, name, buffer)
        return None

    @torch.no_grad()
    def fill_whole(self) -> list[str]:
        """Initialize full tensors on the CPU, and copy this rank's shards.

        Returns the names, in the model, of the tensors that were not initialized.
        """
        full = {name: torch.empty(p.shape, dtype=_drawn_dtype(p), device="cpu") for name, p in self.parameters.items()}
        with _parameters_replaced(self.module, full):
            unfilled = self._run()
            for name, parameter in self.parameters.items():
                _copy_shard(parameter, self.module.get_parameter(name).detach())
        return [_join(self.module_name, name) for name in unfilled]

    def _run(self) -> list[str]:
        """Run the initialization; return the names of the tensors that it does not fill."""
        before = {}
        for name, tensor in self._tensors():
            if not isinstance(tensor, _Recorder):
                _poison(tensor)
                before[name] = id(tensor), num_writes(tensor)
        with torch.random.fork_rng(devices=[]), _trunc_normal_replaced():
            torch.default_generator.manual_seed(seed_of(self.seed, self.seed_name))
            self.init(self.module, self.module_name)
        unfilled = []
        for name, tensor in self._tensors():
            if isinstance(tensor, _Recorder):
                is_filled = tensor.recording.is_filled
            elif tensor.is_floating_point() or tensor.is_complex():
                is_filled = not tensor.sum().isnan()  # the sum is NaN if any element is, and needs no temporary
            else:
                is_filled = (id(tensor), num_writes(tensor)) != before[name]
            if not is_filled:
                unfilled.append(name)
        return unfilled

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in _direct_tensors(self.module).items() if name in self.to_fill]


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
    box = local_box(parameter)
    assert box is not None
    own = full[tuple(slice(start, stop) for start, stop in box)] if full.ndim else full
    local(parameter.detach()).copy_(own)  # copies only this part to the device


class _Surplus:
    """Counts the elements that this rank draws but does not keep, and warns once if they are many."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, module_init: _ModuleInit) -> None:
        before = self.count
        self.count += sum(p.numel() - local(p.detach()).numel() for p in module_init.parameters.values())
        if before <= MANY < self.count and (not dist.is_initialized() or dist.get_rank() == 0):
            print_stderr(
                f"warning: {module_init.module_name or 'the model'}: every rank draws all of this module's initial "
                f"weights, and all of some others', because they are not only filled and scaled in place "
                f"({module_init.obstacle}); this may take minutes\n"
                '  to draw only a part on each rank: see "Your own model" in docs/models.md'
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
        self.name = name
        self.seed = seed
        self.shape = parameter.shape
        self.dtype = _drawn_dtype(parameter)
        self.operations: list[_Operation] = []
        """The first one sets all elements."""
        self.obstacle = ""
        """What else was done to the parameter, if anything."""

    @property
    def is_filled(self) -> bool:
        return bool(self.operations)

    def record(self, operation: _Operation) -> bool:
        """Add an operation; return whether that is possible."""
        arguments = (*operation.arguments, *operation.options.values())
        are_numbers = all(isinstance(argument, (Number, type(None))) for argument in arguments)
        if operation.operator not in _DRAWS | _FILLS | _CHANGES or not are_numbers:
            return False
        if any(argument != argument for argument in arguments):  # NaN marks what is not initialized
            return False
        is_whole = operation.stop - operation.start == self.shape.numel()
        if is_whole and operation.operator in _DRAWS | _FILLS:
            self.operations.clear()  # whatever they did is overwritten
        elif not self.operations or operation.operator in _DRAWS:
            return False
        self.operations.append(operation)
        return True

    def draw(self, start: int, out: torch.Tensor) -> None:
        """Fill `out`, a vector, with the elements of the flat parameter from `start` on.

        Torch's generator uses 32 bits of a seed: among the million blocks of a 70B model, about 130 pairs are equal.
        """
        stop = start + len(out)
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            first, last = number * _BLOCK, min((number + 1) * _BLOCK, self.shape.numel())
            block = torch.empty(last - first, dtype=self.dtype, device="cpu")
            generator = torch.Generator("cpu").manual_seed(seed_of(self.seed, f"{self.name}/{number}"))
            for operation in self.operations:
                operation.apply(block, first, generator)
            low, high = max(start, first), min(stop, last)
            out[low - start : high - start] = block[low - first : high - first]


class _Recorder(torch.Tensor):
    """A tensor without memory that stands in for a parameter, or for a view of it, and records what is done to it.

    It claims to be on the CPU, since some code treats tensors on the meta device differently: torch's `orthogonal_`
    leaves these alone.  Whatever can't be recorded raises an error.
    """

    recording: _Recording
    meta: torch.Tensor
    """A tensor on the meta device with the same shape, strides and offset."""

    @classmethod
    def of(cls, recording: _Recording) -> _Recorder:
        return cls(recording, torch.empty(recording.shape, dtype=recording.dtype, device="meta"))

    @staticmethod
    def __new__(cls, recording: _Recording, meta: torch.Tensor) -> _Recorder:
        self = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=torch.device("cpu")
        )
        self.recording = recording
        self.meta = meta
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_SET_DATA, torch.Tensor.data_ptr):  # not operators
            raise args[0]._cannot_record(func)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = kwargs or {}
        lists = (value for value in args if isinstance(value, (list, tuple)))
        recorder = next(value for value in chain(args, options.values(), *lists) if isinstance(value, cls))
        if recorder is args[0]:
            if func in _VIEWS:
                return cls(recorder.recording, func(recorder.meta, *args[1:], **options))
            if recorder.record(func, args[1:], options):
                return recorder
        raise recorder._cannot_record(func)

    def record(self, operator: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Record an in-place operator on this tensor; return whether that is possible."""
        start = int(self.meta.storage_offset())
        operation = _Operation(operator, arguments, options, start, start + self.numel())
        return self.meta.is_contiguous() and self.recording.record(operation)

    def _cannot_record(self, func: Any) -> RuntimeError:
        self.recording.obstacle = self.recording.obstacle or f"{self.recording.name}: {func}"
        return RuntimeError(self.recording.obstacle)


@contextlib.contextmanager
def _trunc_normal_replaced() -> Iterator[None]:
    """Let `nn.init.trunc_normal_` be recorded during the block.

    Its operators cannot be: since torch 2.13 it draws again and again until no element lies outside the bounds.
    """

    def trunc_normal(
        tensor: torch.Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        a: float = -2.0,
        b: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if isinstance(tensor, _Recorder) and generator is None and tensor.record(_trunc_normal, (mean, std, a, b), {}):
            return tensor
        return _trunc_normal(tensor, mean, std, a, b, generator)

    nn.init.trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        nn.init.trunc_normal_ = _trunc_normal


# ---------------------------------------------------------------------------------------------------------------
# Drawing


def _draw_shards(recorded: Iterable[tuple[torch.Tensor, _Recording]]) -> None:
    """Fill this rank's shards of the parameters, each with a recording."""
    tasks = [task for parameter, recording in recorded for task in _drawing_tasks(parameter, recording)]
    num_threads = min(torch.get_num_threads(), len(tasks))
    if num_threads <= 1:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(num_threads) as threads:
        deque(threads.map(lambda task: task(), tasks), maxlen=0)  # iterating re-raises errors


def _drawing_tasks(parameter: torch.Tensor, recording: _Recording) -> Iterator[Callable[[], None]]:
    """Yield functions that together fill this rank's shard of `parameter`, each of them some rows."""
    box, shard = local_box(parameter), local(parameter.detach())
    assert box is not None
    if not parameter.ndim:
        yield partial(recording.draw, 0, shard.view(1))
    elif shard.numel():
        (start, stop), *others = box
        num_rows = max(1, _PIECE // math.prod(parameter.shape[1:]))
        for first in range(start, stop, num_rows):
            last = min(first + num_rows, stop)
            yield partial(_draw_part, shard[first - start : last - start], ((first, last), *others), recording)


def _draw_part(part: torch.Tensor, box: Box, recording: _Recording) -> None:
    """Fill `part`, which is the part `box` of the parameter."""
    (first, last), *others = box
    is_all_of_rows = others == [(0, size) for size in recording.shape[1:]]
    if is_all_of_rows and part.is_contiguous() and part.device.type == "cpu":
        recording.draw(first * math.prod(recording.shape[1:]), part.view(-1))
        return
    rows = torch.empty((last - first, *recording.shape[1:]), dtype=recording.dtype, device="cpu")
    other_dims = (slice(None), *(slice(start, stop) for start, stop in others))
    kept = rows[other_dims]
    low = int(kept.storage_offset())
    high = low + 1 + sum((size - 1) * stride for size, stride in zip(kept.shape, kept.stride(), strict=True))
    recording.draw(first * rows.stride(0) + low, rows.view(-1)[low:high])
    part.copy_(kept)
