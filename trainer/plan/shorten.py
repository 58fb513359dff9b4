"""Shortens a model before it is traced: most of a long series of identical blocks is deleted from it.

Afterwards, copies of the events of the blocks that were traced stand for the deleted ones.  So tracing 126 layers takes
about as long as tracing a few.  Whole periods of a repeating pattern are deleted, so that a model that looks up its
layers' settings by number still finds the right ones.  What it does once for all blocks, such as to stack a number from
each, is done for fewer of them; these are small tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.parameters import tied_names
from trainer.model.units import ShardUnit
from trainer.plan.trace import Event

_MAX_PERIOD = 16
"""Largest number of blocks in a repeating pattern."""
_MAX_LEADING_BLOCKS = 4
"""Maximum number of blocks at the start of a model that may differ from the repeated ones."""


class CannotShorten(Exception):
    """Raised if the events of a shortened model cannot stand for those of the whole model."""


@dataclass(frozen=True)
class Series:
    """The blocks of a ModuleList or Sequential, which repeat with a period from block number `first` on.

    The first two periods stay in the model, and the second one stands for the deleted blocks that follow it.
    """

    parent: str
    """The name of the list."""
    blocks: tuple[nn.Module, ...]
    first: int
    period: int

    @property
    def representatives(self) -> range:
        """The numbers of the blocks whose events are copied."""
        return range(self.first + self.period, self.first + 2 * self.period)

    @property
    def deleted(self) -> range:
        """The numbers of the blocks that are deleted: all whole periods but three."""
        start = self.representatives.stop
        num_periods = (len(self.blocks) - self.first) // self.period
        return range(start, start + max(0, num_periods - 3) * self.period)

    def representative_of(self, number: int) -> int:
        """Return the number of the representative that corresponds to a later block."""
        start = self.representatives.start
        return start + (number - start) % self.period

    def original_numbers(self, number: int) -> list[int]:
        """Return the number that a block of the shortened model had, and those of the deleted ones it stands for."""
        if number >= self.deleted.start:
            return [number + len(self.deleted)]
        if number in self.representatives:
            return [number, *self.deleted[number - self.representatives.start :: self.period]]
        return [number]


def find_series(model: nn.Module, recomputed: Collection[int] = (), offloaded: Collection[int] = ()) -> list[Series]:
    """Return the series of blocks that are worth shortening, in outermost ModuleLists and Sequentials.

    recomputed, offloaded: the ids of the blocks whose activations are recomputed or offloaded.
    """
    found: list[Series] = []
    inside: set[int] = set()
    shared = {id(model.get_parameter(group[0])) for group in tied_names(model)}
    for parent_name, parent in model.named_modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or id(parent) in inside:
            continue
        blocks = tuple(parent)
        if [name for name, _ in parent.named_children()] != [str(number) for number in range(len(blocks))]:
            continue  # named otherwise, or with a block that appears twice
        ignored = _index_settings(blocks)
        kinds = [(id(b) in offloaded, id(b) in recomputed, _kind(b, ignored, shared)) for b in blocks]
        repetition = _longest_repetition(kinds)
        if repetition is not None:
            series = Series(parent_name, blocks, *repetition)
            if series.deleted:
                found.append(series)
                inside |= {id(module) for block in blocks for module in block.modules()}
    return found


def _longest_repetition(kinds: Sequence[Any]) -> tuple[int, int] | None:
    """Return the number of the block from which the kinds of blocks repeat to the end, and the period; or None."""
    for first in range(min(_MAX_LEADING_BLOCKS, len(kinds) - 4) + 1):
        for period in range(1, min(_MAX_PERIOD, (len(kinds) - first) // 4) + 1):
            if all(kinds[n] == kinds[n - period] for n in range(first + period, len(kinds))):
                return first, period
    return None


def _kind(block: nn.Module, ignored: set[tuple[str, str]], shared: set[int]) -> Any:
    """Return a value that is equal for two blocks with the same modules, tensor shapes and dtypes, and plain settings.

    Settings in `ignored` are left out.  Blocks with tied parameters are equal only if they share these parameters.
    """
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in _settings(module) if (name, key) not in ignored}
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, id(tensor) in shared and id(tensor))
            for key, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            )
        ]
        parts.append((name, type(module), settings, tensors))
    return parts


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the module's own attributes that can be compared between modules; others are represented by their id."""
    for key, value in vars(module).items():
        if key in _MODULE_ATTRIBUTES or isinstance(value, (torch.Tensor, nn.Module)):
            continue
        is_plain = value is None or isinstance(value, (int, float, str, bool, tuple, list, dict, set, torch.dtype))
        yield key, value if is_plain or dataclasses.is_dataclass(value) else id(value)


_MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "forward"})


def _index_settings(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the settings (module name, attribute) that merely hold the number of a block in the list."""
    found: set[tuple[str, str]] = set()
    for position, block in enumerate(blocks):
        numbers = {
            (name, key)
            for name, module in block.named_modules()
            for key, value in _settings(module)
            if type(value) is int and value == position
        }
        found = numbers if position == 0 else found & numbers
    return found


# ---------------------------------------------------------------------------------------------------------------
# Does the model treat its blocks alike?


@dataclass(frozen=True)
class _Call:
    """One call of a block."""

    number: int
    form: Any
    """The structure, shapes, dtypes and plain values of the arguments."""
    follows_directly: bool
    """Whether the first tensor argument is the first tensor that the previous block has returned."""
    operators_before: list[Any]
    """The operators since the previous block returned."""


class _OperatorLog(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self._operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operators.append(func)
        return func(*args, **(kwargs or {}))

    def take(self) -> list[Any]:
        """Return the operators since the last call."""
        taken, self._operators = self._operators, []
        return taken


def treats_blocks_alike(model: nn.Module, run_forward: Callable[[nn.Module], object]) -> bool:
    """Return whether the model treats the blocks of each series alike, judged by one forward pass.

    It does if it calls them one after another, with arguments of the same form, and if it runs the same operators
    between them, from one period to the next.  Blocks after the representatives only return what these have returned.

    model: on the meta device; the call uses a copy of it.
    """
    model = copy.deepcopy(model)
    series = find_series(model)
    log = _OperatorLog()
    calls: dict[str, list[_Call]] = defaultdict(list)
    outputs: dict[tuple[str, int], Any] = {}
    last_output: torch.Tensor | None = None

    def before(parent: str, number: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        first = next(_tensors((args, kwargs)), None)
        calls[parent].append(_Call(number, _form_of((args, kwargs)), first is last_output, log.take()))

    def after(parent: str, number: int, block: nn.Module, args: Any, output: Any) -> None:
        nonlocal last_output
        last_output = next(_tensors(output), None)
        outputs[parent, number] = output
        log.take()

    def stand_in(parent: str, representative: int, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.empty_like, outputs[parent, representative])

    for each in series:
        for number, block in enumerate(each.blocks):
            block.register_forward_pre_hook(partial(before, each.parent, number), with_kwargs=True)
            block.register_forward_hook(partial(after, each.parent, number))
            if number >= each.representatives.stop:
                block.forward = partial(stand_in, each.parent, each.representative_of(number))  # type: ignore[method-assign]
    if series:
        with torch.no_grad(), log:
            run_forward(model)
    return all(_are_alike(each, calls[each.parent]) for each in series)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _form_of(arguments: Any) -> Any:
    leaves, structure = pytree.tree_flatten(arguments)
    forms = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return str(structure), forms


def _are_alike(series: Series, calls: Sequence[_Call]) -> bool:
    """Return whether all calls from the second period on are like those one period before."""
    size = len(series.blocks)
    if len(calls) % size or [call.number for call in calls] != [*range(size)] * (len(calls) // size):
        return False
    for index, call in enumerate(calls):
        if call.number < series.representatives.start:
            continue
        earlier = calls[index - series.period]
        if call.form != earlier.form:
            return False
        if call.number == series.representatives.start:  # what precedes it is not copied
            continue
        if (call.follows_directly, call.operators_before) != (earlier.follows_directly, earlier.operators_before):
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------
# Deleting blocks, and inserting events in their place


class Shortening:
    """Deletes blocks from a model, and puts events in their place."""

    def __init__(self, model: nn.Module, units: Sequence[ShardUnit], series: Sequence[Series]) -> None:
        """Delete the blocks.  `units`: those of the whole model, whose numbers the events have.

        Raises CannotShorten if a unit consists of parts of several blocks.
        """
        self._series = series
        self._root = len(units)
        self._units_in_blocks: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        """The numbers of the units in each block, by their names within the block."""
        for each in series:
            for number, block in enumerate(each.blocks):
                self._find_units(each, number, block, units)
        for each in series:
            blocks = model.get_submodule(each.parent)
            assert isinstance(blocks, (nn.ModuleList, nn.Sequential))
            del blocks[each.deleted.start : each.deleted.stop]

    def _find_units(self, series: Series, number: int, block: nn.Module, units: Sequence[ShardUnit]) -> None:
        names = {id(module): name for name, module in block.named_modules()}
        for unit_number, unit in enumerate(units):
            inside = [names[id(module)] for module in unit.modules if id(module) in names]
            if inside and len(inside) < len(unit.modules):
                raise CannotShorten
            if inside:
                self._units_in_blocks[series.parent, number][" ".join(inside)] = unit_number

    def restored(self, events: Sequence[Event]) -> list[Event]:
        """Return the events of the whole model.  Raises CannotShorten if those of a block are not in one piece."""
        restored = [*events]
        for series in self._series:
            restored = self._with_copies(restored, series)
        # What a block leaves behind, such as its experts' counts, is freed at the end of the backward pass.
        left_behind = _net_bytes(restored) - _net_bytes(events)
        end = _index_of_end(restored)
        segment = restored[end].segment
        restored[end] = replace(restored[end], segment=replace(segment, net=segment.net - left_behind))
        return restored

    def _with_copies(self, events: Sequence[Event], series: Series) -> list[Event]:
        """Insert copies of the representatives' events: after them in a forward pass, before them in a backward pass.

        A block's events begin with that of its first unit, which includes the model's work between two blocks.
        """
        periods = [self._renumbering(series, start) for start in series.deleted[:: series.period]]
        representatives = {*periods[0]}
        result: list[Event] = []
        num_pieces = 0
        is_backward = False
        for is_representative, piece in itertools.groupby(events, lambda event: event.unit in representatives):
            originals = [*piece]
            if not is_representative:
                kinds = {event.kind for event in originals}
                is_backward = (is_backward or "pre_backward" in kinds) and "end" not in kinds
                result += originals
                continue
            num_pieces += 1
            copies = [
                replace(event, unit=renumbering[event.unit])
                for renumbering in (reversed(periods) if is_backward else periods)
                for event in originals
            ]
            result += [*copies, *originals] if is_backward else [*originals, *copies]
        num_passes = sum(event.unit == self._root and event.kind in ("pre_forward", "end") for event in events)
        if num_pieces != num_passes:
            raise CannotShorten
        return result

    def _renumbering(self, series: Series, start: int) -> dict[int, int]:
        """Return, for each unit of the representatives, the unit that corresponds to it in the period from `start`."""
        renumbering: dict[int, int] = {}
        for number, deleted in zip(series.representatives, itertools.count(start)):
            units = self._units_in_blocks[series.parent, number]
            others = self._units_in_blocks[series.parent, deleted]
            renumbering |= {units[name]: others[name] for name in units}
        return renumbering

    def original_names(self, names: set[str]) -> set[str]:
        """Return the names that parameters of the shortened model have in the whole model.

        A name in a representative block yields those of the corresponding parameters in deleted blocks, too.
        """
        return {original for name in names for original in self._original_names(name)}

    def _original_names(self, name: str) -> Iterator[str]:
        for series in self._series:
            prefix = f"{series.parent}." if series.parent else ""
            number, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and number.isdecimal():
                for original in series.original_numbers(int(number)):
                    yield f"{prefix}{original}.{rest}"
                return
        yield name


def _index_of_end(events: Sequence[Event]) -> int:
    return next(number for number, event in enumerate(events) if event.kind == "end")


def _net_bytes(events: Sequence[Event]) -> int:
    """Return the bytes that are left when the backward pass has ended."""
    return sum(event.segment.net for event in events[: _index_of_end(events) + 1])
