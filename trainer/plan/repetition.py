"""Speeds up tracing: skips the middle of long runs of identical blocks and copies the events of those that did run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from trainer.model.parameters import tied_names
from trainer.model.units import ShardUnit
from trainer.plan.recorder import Recorder
from trainer.plan.trace import Event, Mark, Segment

_LONGEST_PERIOD = 16


class NotRepeated(Exception):
    """Blocks cannot be skipped: the model treats them differently, or a block changes the form of its input."""


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks that repeat with a period.

    The first two periods are run; the second represents the `num_skipped` blocks after it.  Then the rest are run.
    """

    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]
    period: int
    num_skipped: int

    @property
    def first_skipped(self) -> int:
        return 2 * self.period

    @property
    def first_behind(self) -> int:
        return self.first_skipped + self.num_skipped

    @property
    def skipped(self) -> tuple[nn.Module, ...]:
        return self.blocks[self.first_skipped : self.first_behind]


class Repetition:
    """Skips the middle of long runs of identical blocks and fills in copies of the events of equivalent blocks."""

    def __init__(self, model: nn.Module, units: Sequence[ShardUnit], checkpointed: set[int]) -> None:
        self.runs = _find_runs(model, checkpointed) if units else []
        self.left_out = {id(m) for run in self.runs for block in run.skipped for m in block.modules()}
        self._place: list[tuple[_Run, int]] = []  # watched blocks, indexed by the number in their marks
        self._calls: dict[int, list[tuple[int, Any]]] = {id(run): [] for run in self.runs}
        self._beside: dict[int, tuple[Any, ...] | None] = {}  # by run: the outputs of a block after the first
        self._home: dict[int, tuple[_Run, int, str]] = {}  # by unit: its run, its block, and its name in the block
        self._unit_at: dict[tuple[int, int, str], int] = {}
        for run in self.runs:
            for position, block in enumerate(run.blocks):
                inside = {id(module): name for name, module in block.named_modules()}
                for number, unit in enumerate(units):
                    if all(id(module) in inside for module in unit.modules):
                        name = " ".join(inside[id(module)] for module in unit.modules)
                        self._home[number] = (run, position, name)
                        self._unit_at[id(run), position, name] = number

    def leaves_out(self, modules: Iterable[nn.Module]) -> bool:
        return all(id(module) in self.left_out for module in modules)

    def attach(self, recorder: Recorder) -> None:
        """Mark where blocks begin, and make the skipped ones return their input."""
        for run in self.runs:
            for position, block in enumerate(run.blocks):
                block.register_forward_pre_hook(self._note_call(run, position), with_kwargs=True)
                recorder.watch_block(block, len(self._place))
                self._place.append((run, position))
                if block in run.skipped:
                    block.forward = self._passing_on(run)  # type: ignore[method-assign]
                else:
                    block.register_forward_hook(self._note_output(run))

    def _note_output(self, run: _Run) -> Callable[..., None]:
        """Return a hook that raises NotRepeated unless a block's first output can serve as the next block's input."""

        def note(block: nn.Module, args: Any, output: Any) -> None:
            given = args[0] if args else None
            first, *rest = output if isinstance(output, tuple) else (output,)
            if not (isinstance(first, torch.Tensor) and isinstance(given, torch.Tensor)):
                raise NotRepeated
            if first.shape != given.shape or first.dtype != given.dtype:
                raise NotRepeated
            self._beside[id(run)] = tuple(rest) if isinstance(output, tuple) else None

        return note

    def _passing_on(self, run: _Run) -> Callable[..., Any]:
        """Return the forward function of skipped blocks: it returns its input, and zeros for any further outputs."""

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            if not args:
                raise NotRepeated
            # A separate node in the graph, so that the gradients of the blocks' outputs are computed one after another.
            first = args[0].view_as(args[0]) if isinstance(args[0], torch.Tensor) else args[0]
            beside = self._beside[id(run)]
            return first if beside is None else (first, *pytree.tree_map_only(torch.Tensor, torch.zeros_like, beside))

        return pass_on

    def like(self, names: set[str]) -> set[str]:
        """Return `names` of parameters, plus those of the corresponding parameters in skipped blocks."""
        found = set(names)
        for run in self.runs:
            for position in range(run.first_skipped, run.first_behind):
                template = run.names[run.period + position % run.period]
                inside = f"{template}."
                found |= {f"{run.names[position]}.{n.removeprefix(inside)}" for n in names if n.startswith(inside)}
        return found

    def _note_call(self, run: _Run, position: int) -> Callable[..., None]:
        def note(block: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[id(run)].append((position, _form((args, kwargs))))

        return note

    def _check(self, events: Sequence[Event]) -> None:
        """Raise NotRepeated unless the model treats skipped blocks like the blocks that represent them.

        Blocks must be called one after another, with arguments of the same form and the same plain values, and the
        model must do the same work between them.
        """
        for run in self.runs:
            calls, size = self._calls[id(run)], len(run.blocks)
            if len(calls) % size or [position for position, _ in calls] != [*range(size)] * (len(calls) // size):
                raise NotRepeated
            for number, (position, form) in enumerate(calls):
                if position >= run.period and position % size >= 1 and form != calls[number - run.period][1]:
                    raise NotRepeated
            between: dict[int, set[Any]] = {}
            for event, following in itertools.pairwise(events):
                if event.mark == "block_return" and following.mark == "block_forward":
                    place, position = self._place[event.unit]
                    if place is run and run.period <= position < run.first_behind:
                        between.setdefault(position % run.period, set()).add(frozenset(following.before.work))
            if any(len(kinds) > 1 for kinds in between.values()):
                raise NotRepeated

    def repeated(self, events: Sequence[Event]) -> list[Event]:
        """Return the events with copies of the second period in place of the skipped blocks.

        A period lasts from the mark of its first block to the mark of the next period's first block.  It includes the
        model's own work between blocks; the work recorded around skipped blocks is dropped.
        """
        self._check(events)
        done: list[Event] = []
        number = 0
        while number < len(events):
            event = events[number]
            done.append(event)
            number += 1
            if not event.mark.startswith("block"):
                continue
            run, position = self._place[event.unit]
            if event.mark == "block_forward" and position == run.first_skipped < run.first_behind:
                first = max(n for n, e in enumerate(events[:number]) if self._is_at(e, event.mark, run, run.period))
                done += self._copies(events[first + 1 : number], run, range(0, run.num_skipped, run.period))
                number = self._next(events, number, event.mark, run, run.first_behind) + 1
            elif event.mark == "block_backward" and position == run.first_behind - 1 >= run.first_skipped:
                number = self._next(events, number, event.mark, run, run.first_skipped - 1) + 1
                end = self._next(events, number, event.mark, run, run.period - 1) + 1
                done += self._copies(events[number:end], run, range(run.num_skipped - run.period, -1, -run.period))
        return done

    def _is_at(self, event: Event, mark: Mark, run: _Run, position: int) -> bool:
        return event.mark == mark and self._place[event.unit] == (run, position)

    def _next(self, events: Sequence[Event], start: int, mark: Mark, run: _Run, position: int) -> int:
        for number in range(start, len(events)):
            if self._is_at(events[number], mark, run, position):
                return number
        raise NotRepeated

    def _copies(self, template: Sequence[Event], run: _Run, offsets: Iterable[int]) -> Iterator[Event]:
        for offset in offsets:
            for event in template:
                is_block = event.mark.startswith("block")
                yield event if is_block else replace(event, unit=self._moved(event.unit, run, run.period + offset))

    def _moved(self, unit: int, run: _Run, distance: int) -> int:
        home = self._home.get(unit)
        if home is None or home[0] is not run:
            return unit
        return self._unit_at[id(run), home[1] + distance, home[2]]


def _form(arguments: Any) -> Any:
    """Return what two calls must have in common: structure, shapes and dtypes of tensors, and other values."""
    leaves, structure = pytree.tree_flatten(arguments)
    return str(structure), [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]


def without_block_marks(events: Iterable[Event]) -> Iterator[Event]:
    """Yield FSDP's marks only, merging the segments on both sides of each block mark."""
    held = Segment()
    for event in events:
        if event.mark.startswith("block"):
            held = held.then(event.before)
        else:
            yield replace(event, before=held.then(event.before))
            held = Segment()


def _find_runs(model: nn.Module, checkpointed: set[int]) -> list[_Run]:
    """Return the runs of identical blocks that are worth shortening, in outermost ModuleLists and Sequentials."""
    runs: list[_Run] = []
    inside: set[int] = set()
    shared = {id(model.get_parameter(group[0])) for group in tied_names(model)}
    for parent_name, parent in model.named_modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or id(parent) in inside:
            continue
        blocks = tuple(parent.children())
        if len(blocks) < 4:
            continue
        counted = _counted_settings(blocks)
        kinds = [_kind(block, counted, shared, checkpointed) for block in blocks]
        for period in range(1, min(_LONGEST_PERIOD, len(blocks) // 4) + 1):
            if all(kinds[n] == kinds[n - period] for n in range(period, len(blocks))):
                num_skipped = (len(blocks) - 3 * period) // period * period
                if num_skipped < 2 * period:  # with fewer, there is no second gap between blocks to compare
                    break
                inner = "".join([parent_name, "."] if parent_name else [])
                names = tuple(f"{inner}{name}" for name, _ in parent.named_children())
                runs.append(_Run(blocks, names, period, num_skipped))
                inside |= {id(module) for block in blocks for module in block.modules()}
                break
    return runs


def _kind(block: nn.Module, counted: set[tuple[str, str]], shared: set[int], checkpointed: set[int]) -> Any:
    """Return what two blocks must have in common to count as identical: modules, shapes and plain settings.

    Settings in `counted` are ignored.  A block with a tied parameter is identical to no other.
    """
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in _settings(module) if (name, key) not in counted}
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, id(tensor) in shared and id(tensor))
            for key, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            )
        ]
        parts.append((name, type(module), id(module) in checkpointed, settings, tensors))
    return parts


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the module's own attributes that can be compared between modules; others are represented by their id."""
    for key, value in vars(module).items():
        if key in _OF_EVERY_MODULE or isinstance(value, (torch.Tensor, nn.Module)):
            continue
        is_plain = value is None or isinstance(value, (int, float, str, bool, tuple, list, dict, set, torch.dtype))
        yield key, value if is_plain or dataclasses.is_dataclass(value) else id(value)


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})


def _counted_settings(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the settings (module name, attribute) that only hold a block's index in the list."""
    counted = {(name, key) for name, module in blocks[0].named_modules() for key, _ in _settings(module)}
    for position, block in enumerate(blocks):
        own = {
            (name, key)
            for name, module in block.named_modules()
            for key, value in _settings(module)
            if type(value) is int and value == position
        }
        counted &= own
    return counted
