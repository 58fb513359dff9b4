"""Finds a model's FSDP units, which are listed by the model spec, or chosen by size or by a user-defined function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.errors import UserError, nearest, setting_error
from trainer.model.packed import num_weights
from trainer.model.parameters import tied_names
from trainer.model_spec import ModelSpec, Unit, matches_pattern
from trainer.registry import import_object


@dataclass(frozen=True)
class ShardUnit:
    """Modules whose parameters FSDP gathers together, and their dotted names."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    def __str__(self) -> str:
        return " + ".join(self.names)

    @property
    def depth(self) -> int:
        return max(name.count(".") for name in self.names)

    @property
    def fsdp_module(self) -> FSDPModule:
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module


def find_units(model: nn.Module, spec: ModelSpec, wrap: str = "block") -> list[ShardUnit]:
    """Return the FSDP units that `wrap` selects, without the root.

    wrap: the setting `fsdp.wrap`: `block` for the units that the model spec lists, `size:N`, or
    `package.module:function`.

    Units that the model spec or a function lists keep their order, which should be the order of the forward pass.  All
    others are in the order of `named_modules`.

    Raises UserError for an entry that is not a module inside the model, for a module in two units, for units that would
    separate tied parameters, and for a parameter that FSDP cannot divide or reduce; also if a user-defined function
    fails, or returns neither a list of units nor a boolean for each module.
    """
    units = _list_units(model, spec, wrap)
    _check_parameters(model, units, spec)
    return units


def _list_units(model: nn.Module, spec: ModelSpec, wrap: str) -> list[ShardUnit]:
    if wrap.startswith("size:"):
        return _units_by_size(model, int(wrap.removeprefix("size:").replace("_", "")))
    if wrap == "block":
        listed = spec.units(model) if callable(spec.units) else spec.units
        source = f"model {spec.name!r}: units"
    else:
        listed = _units_by_function(model, wrap)
        source = f"fsdp.wrap={wrap}"
    units = [unit for entry in listed for unit in _resolve_unit(model, entry, source)]
    _check_units(model, units, source)
    return units


ROOT = "root"
"""Key for the parameters outside all units, in the result of `parameters_by_unit`."""


def parameters_by_unit(model: nn.Module, units: Sequence[ShardUnit]) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters of each unit (without those of nested units) and of the root.

    Entries are in the order of the units, then the root; units without such parameters are omitted.
    """
    by_unit: dict[str, list[nn.Parameter]] = {name: [] for name in (*map(str, units), ROOT)}
    assigned: set[int] = set()
    innermost_first = sorted(units, key=lambda unit: -unit.depth)
    for name, modules in [*((str(unit), unit.modules) for unit in innermost_first), (ROOT, (model,))]:
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            if parameter.requires_grad and id(parameter) not in assigned:
                assigned.add(id(parameter))
                by_unit[name].append(parameter)
    return {name: parameters for name, parameters in by_unit.items() if parameters}


def is_embedding_unit(modules: Iterable[nn.Module], model: nn.Module) -> bool:
    """Return whether a unit consists only of embedding tables, which are not read in the backward pass.

    A table shared with a head, or one that overrides `forward`, may be read in the backward pass.
    """
    modules = list(modules)
    if not all(isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward for module in modules):
        return False
    tied = {name for group in tied_names(model) for name in group}
    shared = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in tied}
    return not any(id(parameter) in shared for module in modules for parameter in module.parameters())


def find_blocks(model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """Return the model's repeated blocks: the model spec's units that are in a ModuleList, ModuleDict or Sequential.

    Activation checkpointing and compilation apply to these, whatever units FSDP uses.
    """
    repeated = {
        id(child)
        for parent in model.modules()
        if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child in parent.children()
    }
    units = find_units(model, spec)
    return [unit.modules[0] for unit in units if len(unit.modules) == 1 and id(unit.modules[0]) in repeated]


def _resolve_unit(model: nn.Module, entry: Unit, source: str) -> Iterator[ShardUnit]:
    names = {id(module): name for name, module in model.named_modules()}
    by_name = dict(model.named_modules())
    if isinstance(entry, (tuple, list)):
        members = [member for item in entry for member in _resolve_unit(model, item, source)]
        yield ShardUnit(
            tuple(name for member in members for name in member.names),
            tuple(module for member in members for module in member.modules),
        )
    elif isinstance(entry, nn.Module):
        if id(entry) not in names:
            raise UserError(f"{source}: {type(entry).__name__} is not a submodule of the model")
        yield ShardUnit((names[id(entry)],), (entry,))
    elif isinstance(entry, str):
        matches = [n for n in by_name if matches_pattern(n, entry)]
        if not matches:
            wildcards = [f"{name.rpartition('.')[0]}.*" for name in by_name if "." in name]
            best = nearest(entry, [*wildcards, *filter(None, by_name)])
            raise UserError(f"{source}: the model has no module {entry!r}" + (f"; nearest: {best!r}" if best else ""))
        for name in matches:
            yield ShardUnit((name,), (by_name[name],))
    else:
        raise UserError(f"{source}: a unit is a module, a name, or a tuple of those, not {type(entry).__name__}")


def _units_by_function(model: nn.Module, path: str) -> Sequence[Unit]:
    """Return the units that a user-defined function lists, or the modules for which it returns True.

    A function that returns booleans works as in FSDP1's `lambda_auto_wrap_policy`: it is called for the model, and then
    for each module inside it.
    """
    function = import_object(path, "fsdp.wrap")
    if not callable(function):
        raise setting_error("fsdp.wrap", path, f"must be a function, not {_with_article(function)}")
    with _reporting_failure(path):
        result = function(model)
    if isinstance(result, bool):
        return [module for name, module in model.named_modules() if name and _is_unit(function, path, name, module)]
    if not isinstance(result, Iterable) or isinstance(result, str):
        rule = f"must return a list of units, or a boolean, but returns {_with_article(result)}"
        raise setting_error("fsdp.wrap", path, rule)
    with _reporting_failure(path):  # a generator runs only now
        return list(result)


def _is_unit(function: Callable[[nn.Module], Any], path: str, name: str, module: nn.Module) -> bool:
    place = f"{name}, of type {type(module).__name__}"
    with _reporting_failure(path, f" for {place}"):
        result = function(module)
    if not isinstance(result, bool):
        returned = f"returns {_with_article(result)} for {place}"
        rule = f"must return a boolean for each module, as it does for the model, but {returned}"
        raise setting_error("fsdp.wrap", path, rule)
    return result


@contextlib.contextmanager
def _reporting_failure(path: str, place: str = "") -> Iterator[None]:
    """Context manager that turns an exception of the user-defined function at `path` into a UserError."""
    try:
        yield
    except Exception as error:
        raise setting_error("fsdp.wrap", path, f"fails{place}: {type(error).__name__}: {error}") from error


def _with_article(value: object) -> str:
    """Return the name of a value's type with its article, as in "an int"; "None" for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _units_by_size(model: nn.Module, min_parameters: int) -> list[ShardUnit]:
    """Return the smallest subtrees with at least `min_parameters` parameters that are not in a smaller unit.

    This is FSDP1's `size_based_auto_wrap_policy`.  A module that shares a parameter with modules outside it becomes
    part of a larger unit.
    """
    ties = tied_names(model)
    chosen: list[ShardUnit] = []
    numel = num_weights(model)

    def visit(name: str, module: nn.Module) -> int:
        """Return the number of parameters in `module` that are not yet in a unit."""
        child_counts = [
            visit(f"{name}.{child_name}" if name else child_name, child)
            for child_name, child in module.named_children()
        ]
        count = sum(child_counts) + sum(numel[id(p)] for p in module.parameters(recurse=False))
        is_inside = [[n.startswith(f"{name}.") for n in group] for group in ties]
        splits_a_tie = any(any(group) and not all(group) for group in is_inside)
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if name and count >= min_parameters and not splits_a_tie and not is_container:
            chosen.append(ShardUnit((name,), (module,)))
            return 0
        return count

    visit("", model)
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return sorted(chosen, key=lambda unit: order[unit.names[0]])


def _check_parameters(model: nn.Module, units: list[ShardUnit], spec: ModelSpec) -> None:
    """Raise UserError for a parameter that FSDP cannot divide or reduce, on any number of ranks.

    On one rank it might be trained, but a configuration must run on any number of ranks.
    """

    def error(name: str, problem: str, fix: str) -> UserError:
        return setting_error("model.name", spec.name, f"its parameter {name} {problem}", fix=fix)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.ndim == 0:
            fix = "give it one, as in nn.Parameter(torch.ones(1)); a constant can be a buffer"
            raise error(names[id(parameter)], "has no dimensions, so it cannot be divided among ranks", fix)
        if parameter.shape[0] > 0 and parameter.numel() == 0:
            raise error(names[id(parameter)], "has rows without elements, which cannot be divided", "leave it out")
        if not parameter.is_contiguous():
            fix = "nn.Parameter(tensor.contiguous())"
            raise error(names[id(parameter)], "is not contiguous in memory, so it cannot be divided among ranks", fix)
    for parameters in parameters_by_unit(model, units).values():
        for parameter in parameters:
            first = parameters[0]
            if parameter.dtype != first.dtype:
                dtypes = [str(each.dtype).removeprefix("torch.") for each in (parameter, first)]
                problem = f"is {dtypes[0]}, but {names[id(first)]} in the same FSDP unit is {dtypes[1]}"
                fix = "create all of them in float32; fsdp.param_dtype sets the dtype that they are computed in"
                raise error(names[id(parameter)], problem, fix)


def _check_units(model: nn.Module, units: list[ShardUnit], source: str) -> None:
    unit_of: dict[str, ShardUnit] = {}
    for unit in units:
        for name in unit.names:
            if not name:
                raise UserError(f"{source}: the whole model cannot be a unit; the root is always sharded")
            if name in unit_of:
                raise UserError(f"{source}: {name!r} is in two units")
            unit_of[name] = unit
    for group in tied_names(model):
        innermost = [_innermost_unit(name, unit_of) for name in group]
        if any(unit is not innermost[0] for unit in innermost):
            where = ", ".join(f"{name!r} in {unit or 'the root'}" for name, unit in zip(group, innermost, strict=True))
            together = tuple(name.rpartition(".")[0] for name in group)
            raise UserError(
                f"{source}: {' and '.join(map(repr, group))} are one parameter but would be in different units "
                f"({where}), so FSDP would separate them\n  to fix: list these modules as one unit, {together}"
            )


def _innermost_unit(parameter_name: str, unit_of: dict[str, ShardUnit]) -> ShardUnit | None:
    """Return the innermost unit that contains the parameter, or None for the root."""
    name = parameter_name
    while name:
        name = name.rpartition(".")[0]
        if name in unit_of:
            return unit_of[name]
    return None
