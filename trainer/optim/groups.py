"""Assigns an optimizer, a learning rate and a weight decay to each parameter, and describes the resulting groups.

The defaults follow common practice.  Weight decay applies to matrices, but not to embedding tables, vectors or biases.
Muon updates the hidden matrices and stacked experts; embeddings, the output projection, score heads, routers,
convolutions and vectors stay with AdamW.  `optim.groups` can change this, by parameter name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from trainer.config.schema import OptimSection
from trainer.errors import nearest, setting_error
from trainer.model.head import is_score_name
from trainer.model.mup import Growth
from trainer.model.network import embedding_tables
from trainer.model.parameters import CONVOLUTIONS, is_vector, tied_names
from trainer.optim.muon import relative_update
from trainer.tables import table

OPTIMIZERS = ("adamw", "sgd", "muon")
"""The optimizers that an entry of `optim.groups` can choose."""


@dataclass(frozen=True)
class Assignment:
    """The optimizer and settings of one parameter.  `lr_scale` multiplies the scheduled learning rate."""

    name: str
    parameter: nn.Parameter
    optimizer: str
    weight_decay: float
    lr_scale: float = 1.0
    matching_groups: tuple[int, ...] = ()
    """Indices of the entries of `optim.groups` that match the parameter."""


def assign(model: nn.Module, config: OptimSection, growth: Mapping[str, Growth] | None = None) -> list[Assignment]:
    """Return the assignments of all trainable parameters, in the model's order.

    growth: by name, how much larger each parameter is than in `optim.base_model` (see `find_growth`); empty or None
        without a base model.  Learning rates are scaled accordingly, and weight decays inversely, so that their
        product, the relative decay per step, does not change.

    Raises UserError for an entry of `optim.groups` that is malformed or does not fit the model, for example because it
    matches no parameter, and for `optim.muon.lr` with a zero `optim.lr`.
    """
    muon = matrices_for_muon(model)
    embeddings = embedding_tables(model)
    assignments = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = config.decay_all or not (is_vector(name, parameter) or id(parameter) in embeddings)
        optimizer = config.name
        if optimizer == "muon" and id(parameter) not in muon:
            optimizer = "adamw"
        assignments.append(Assignment(name, parameter, optimizer, config.weight_decay if decays else 0.0))
    assignments = [_with_muon_rate(each, config) for each in _with_groups(assignments, model, config)]
    return [_with_growth(each, growth[each.name], config) for each in assignments] if growth else assignments


def _with_growth(assignment: Assignment, growth: Growth, config: OptimSection) -> Assignment:
    """Scale the learning rate and weight decay of a parameter according to its growth.

    Their product does not change (Wang and Aitchison 2024, arXiv:2405.13698).
    """
    if assignment.optimizer == "muon":
        scale = relative_update(config.muon.scale, growth.base_outputs, growth.base_inputs)
        scale /= relative_update(config.muon.scale, growth.outputs, growth.inputs)
    else:
        scale = growth.lr_scale(assignment.optimizer)
    return dataclasses.replace(
        assignment, lr_scale=assignment.lr_scale * scale, weight_decay=assignment.weight_decay / scale
    )


def _with_muon_rate(assignment: Assignment, config: OptimSection) -> Assignment:
    if assignment.optimizer != "muon" or config.muon.lr is None:
        return assignment
    if not config.peak_lr:
        raise setting_error(
            "optim.muon.lr", config.muon.lr, "is a multiple of optim.lr, which is 0", fix="set optim.lr"
        )
    return dataclasses.replace(assignment, lr_scale=assignment.lr_scale * config.muon.lr / config.peak_lr)


# ---------------------------------------------------------------------------------------------------------------
# Kinds of parameters


def matrices_for_muon(model: nn.Module) -> set[int]:
    """Return the ids of the hidden matrices and stacked experts of a model.

    Embedding tables, convolutions, parameters whose matrices have a single row or column, output projections, score
    heads and routers are excluded.  An output projection is a matrix outside the numbered layers with as many rows as
    an embedding table has.  A router has as many rows as there are experts stacked next to it.
    """
    embeddings = embedding_tables(model)
    tables = [m.weight.shape[0] for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    convolutions = {id(p) for m in model.modules() if isinstance(m, CONVOLUTIONS) for p in m.parameters(recurse=False)}
    stacks = {(name, p.shape[0]) for name, p in model.named_parameters() if p.ndim == 3 and id(p) not in convolutions}
    matrix_ids = set()
    for name, parameter in model.named_parameters():
        if parameter.ndim not in (2, 3) or min(parameter.shape[-2:]) < 2 or id(parameter) in embeddings | convolutions:
            continue
        is_output = parameter.ndim == 2 and _layer_of(name) is None and parameter.shape[0] in tables
        parent = name.rpartition(".")[0].rpartition(".")[0]
        is_router = parameter.ndim == 2 and any(
            stack.startswith(f"{parent}.") and experts == parameter.shape[0] for stack, experts in stacks
        )
        if not (is_output or is_router or is_score_name(name)):
            matrix_ids.add(id(parameter))
    return matrix_ids


def _layer_of(name: str) -> int | None:
    """Return the layer number, the first number in a parameter's name; None for a name without numbers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def block_rows(model: nn.Module, blocks: Mapping[str, int | Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return the number of rows in each block of the model's fused parameters, by the parameter's id.

    blocks: see `ModelSpec.blocks`.  Raises UserError if the blocks do not add up to a parameter's rows.
    """
    rows_by_id: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        for pattern, split in blocks.items():
            if not fnmatchcase(name, pattern):
                continue
            rows = parameter.shape[-2] if parameter.ndim > 1 else 0
            sizes = (rows // split,) * split if isinstance(split, int) else tuple(split)
            if sum(sizes) != rows or 0 in sizes:
                rule = f"the model spec's blocks of {name}, which has {rows} rows, are {split}"
                raise setting_error("model.name", type(model).__name__, rule, fix="correct ModelSpec.blocks")
            rows_by_id[id(parameter)] = sizes
    return rows_by_id


# ---------------------------------------------------------------------------------------------------------------
# optim.groups

_KEYS = ("match", "lr", "lr_decay", "weight_decay", "optimizer")


def check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for an entry of `optim.groups` with unknown or missing keys, or values out of range."""
    for number, group in enumerate(groups):
        key = f"optim.groups[{number}]"
        for field in group:
            if field not in _KEYS:
                rule = f"has no key {field!r}; the keys are {', '.join(_KEYS)}"
                best = nearest(field, _KEYS)
                raise setting_error(key, dict(group), rule, fix=f"write {best} for {field}" if best else "")
        if not isinstance(group.get("match"), str) or not group["match"]:
            example = '{match: "*embed*", lr: 0.3}'
            raise setting_error(key, dict(group), "needs `match`, a pattern of parameter names", proposal=example)
        if len(group) == 1:
            raise setting_error(key, dict(group), f"sets nothing; besides match it may have {', '.join(_KEYS[1:])}")
        for field in ("lr", "lr_decay", "weight_decay"):
            value = group.get(field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise setting_error(f"{key}.{field}", value, "must be a number of at least 0", proposal=0.3)
        if group.get("optimizer") not in (None, *OPTIMIZERS):
            rule = f"must be one of {', '.join(OPTIMIZERS)}"
            meant = nearest(group["optimizer"], OPTIMIZERS)
            raise setting_error(f"{key}.optimizer", group["optimizer"], rule, proposal=meant)


def _with_groups(assignments: Iterable[Assignment], model: nn.Module, config: OptimSection) -> list[Assignment]:
    """Apply `optim.groups` to the assignments.  For each field, the last matching entry that sets it takes effect."""
    assignments = list(assignments)
    check_groups(config.groups)
    for number, group in enumerate(config.groups):
        key = f"optim.groups[{number}]"
        matched = [i for i, each in enumerate(assignments) if fnmatchcase(each.name, group["match"])]
        if not matched:
            names = [each.name for each in assignments]
            best = nearest(group["match"].strip("*."), [*names, *{re.sub(r"\.\d+\.", ".*.", name) for name in names}])
            rule = "matches no trainable parameter"
            for first, *others in tied_names(model):
                if first in names and any(fnmatchcase(other, group["match"]) for other in others):
                    rule, best = f"{rule}: this weight is tied to {first}", first
            fix = "" if best else f"the names look like {names[0]} and {names[-1]}"
            raise setting_error(f"{key}.match", group["match"], rule, proposal=best, fix=fix)
        layers = [layer for i in matched if (layer := _layer_of(assignments[i].name)) is not None]
        for i in matched:
            each = assignments[i]
            optimizer = group.get("optimizer") or each.optimizer
            if optimizer == "muon" and (each.parameter.ndim not in (2, 3) or min(each.parameter.shape[-2:]) < 2):
                rule = f"gives muon {each.name}, of shape {tuple(each.parameter.shape)}, which is not a matrix"
                raise setting_error(f"{key}.optimizer", "muon", rule, "adamw")
            scale = each.lr_scale if group.get("lr") is None else float(group["lr"])
            if group.get("lr_decay") is not None:
                layer = _layer_of(each.name)
                if layer is None:
                    rule = f"matches {each.name}, which is in no numbered layer"
                    raise setting_error(f"{key}.match", group["match"], rule, proposal="layers.*")
                scale *= float(group["lr_decay"]) ** (max(layers) - layer)
            decay = each.weight_decay if group.get("weight_decay") is None else float(group["weight_decay"])
            assignments[i] = dataclasses.replace(
                each,
                optimizer=optimizer,
                lr_scale=scale,
                weight_decay=decay,
                matching_groups=(*each.matching_groups, number),
            )
    return assignments


# ---------------------------------------------------------------------------------------------------------------
# Descriptions for the start block


def describe(
    parts: Sequence[torch.optim.Optimizer], names: Mapping[int, str], are_configured: bool = False
) -> list[str]:
    """Return the lines of a table of the parameter groups: optimizer, weight decay, learning rate, size and names.

    The list is empty if there is a single optimizer, no group scales the learning rate, and none is configured.

    names: parameter names by id.
    are_configured: whether there are `optim.groups`.
    """
    groups = [(part, group) for part in parts for group in part.param_groups if group["params"]]
    if len(parts) == 1 and not are_configured and not any("lr_scale" in group for _, group in groups):
        return []
    rows = []
    for part, group in groups:
        group_names = [
            re.sub(r"\.\d+(?=\.)", ".*", names.get(id(p), "a parameter outside the model")).removesuffix(".weight")
            for p in group["params"]
        ]
        patterns = list(dict.fromkeys(group_names))
        rows.append(
            (
                getattr(part, "algorithm", type(part).__name__).lower(),
                f"{group.get('weight_decay', 0.0):.4g}",
                f"x {group.get('lr_scale', 1.0):.4g}",
                f"{sum(p.numel() for p in group['params']):,}",
                str(len(group["params"])),
                patterns[0] + (f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""),
            )
        )
    return table(("algorithm", "decay", "lr", "parameters", "tensors", "names"), rows, text_columns=(0, 5)).splitlines()
