"""Mixtures of data sources: their weights, and the phases in which the weights change.

A phase starts at a step boundary, however its start is given, and lasts until the next phase starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainer.config.schema import RunConfig
from trainer.config.sections import DataSection
from trainer.errors import UserError, nearest, setting_error

BLOCK = 1024
"""Number of samples within which the mixture is exact; no source's share may be below one sample per block."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_TOKENS = re.compile(r"tokens:(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)")
_FORMS = "must be a step, tokens:<n>, or a share of the run such as 80%"


@dataclass(frozen=True)
class Phase:
    """The weights of the sources from sample `start` on; None: proportional to the sizes of the sources."""

    start: int
    weights: Mapping[str, float] | None


def source_names(data: DataSection) -> list[str]:
    """Return the sorted names of the sources; an empty list if data.path is a single path."""
    return sorted(data.path) if isinstance(data.path, Mapping) else []


def find_phases(config: RunConfig) -> list[Phase]:
    """Return the phases of a run with several sources, first to last; the first begins at sample 0.

    Raises UserError that names the phase and the rule that it breaks.  The order of the phases is only checked once
    `train.epochs` has been resolved to a number of steps.
    """
    names, weights = source_names(config.data), config.data.weights
    has_num_steps = config.train.epochs is None
    if weights is not None:
        _check_weights("data.weights", weights, names)
    phases = [Phase(0, weights)]
    for number, stated in enumerate(config.data.phases):
        key = f"data.phases[{number}]"
        if {"from", "weights"} != {*stated}:
            example = {"from": "80%", "weights": dict.fromkeys(names, 1)}
            raise setting_error(key, stated, "must contain only `from` and `weights`", example=example)
        _check_weights(f"{key}.weights", stated["weights"], names)
        phase = Phase(_first_sample(f"{key}.from", stated["from"], config), stated["weights"])
        is_late = phase.start > phases[-1].start or not (phase.start or number or weights is not None)
        if has_num_steps and not is_late:
            raise _out_of_order(f"{key}.from", stated["from"], phases[-1].start, config)
        phases = [*phases[: len(phases) if phase.start else 0], phase]
    return phases


def _out_of_order(key: str, when: object, previous: int, config: RunConfig) -> UserError:
    before = previous // config.train.global_batch_size + 1
    rule = f"must begin after the previous phase, which begins with step {before}"
    return setting_error(key, when, rule, before + 1)


def _first_sample(key: str, when: object, config: RunConfig) -> int:
    """Return the number of samples before the first step of a phase."""
    batch = config.train.global_batch_size
    if isinstance(when, int) and not isinstance(when, bool):
        if when < 1:
            raise setting_error(key, when, "the first step is 1", 1)
        return (when - 1) * batch
    if isinstance(when, str) and (share := _SHARE.fullmatch(when.strip())):
        part = Fraction(share[1]) / 100
        if part > 1:
            raise setting_error(key, when, "is beyond the end of the run", "100%")
        return math.ceil(part * config.train.steps) * batch
    if isinstance(when, str) and (tokens := _TOKENS.fullmatch(when.strip())):
        return math.ceil(Fraction(tokens[1].replace("_", "")) / (batch * config.data.seq_len)) * batch
    raise setting_error(key, when, _FORMS, example="80%")


def _check_weights(key: str, weights: Any, names: list[str]) -> None:
    if not isinstance(weights, Mapping) or not weights:
        raise setting_error(key, weights, "must map sources to weights", example=dict.fromkeys(names, 1))
    for name, weight in weights.items():
        if name not in names:
            rule = f"data.path has no source {name}, it has {', '.join(names)}"
            best = nearest(name, names)
            meant = {best if other == name else other: value for other, value in weights.items()} if best else None
            shown = None if best else dict.fromkeys(names, 1)
            raise setting_error(key, weights, rule, meant=meant, example=shown)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
            raise setting_error(f"{key}.{name}", weight, "must be a number of at least 0", 0)
    whole = sum(weights.values())
    if not whole:
        raise setting_error(key, weights, "at least one weight must be above 0", example=dict.fromkeys(names, 1))
    small = [name for name, weight in weights.items() if 0 < weight * BLOCK < whole]
    if small:
        least = sum(weight for name, weight in weights.items() if name not in small) / (BLOCK - len(small))
        legal = {name: float(f"{least * 1.001:.3g}") if name in small else weight for name, weight in weights.items()}
        raise setting_error(key, weights, f"the share of {small[0]} is below one sample in {BLOCK}", legal)


def check_sources(config: RunConfig) -> None:
    """Check the sources' names, paths, weights and phases.  Raises UserError."""
    data = config.data
    if not isinstance(data.path, Mapping):
        for key in ("weights", "phases"):
            if value := getattr(data, key):
                rule = "needs several sources, but data.path names one"
                raise setting_error(f"data.{key}", value, rule, fix="data.path={web: PATH, code: PATH}")
        if isinstance(data.eval_path, Mapping):
            raise setting_error("data.eval_path", data.eval_path, "names sources, but data.path does not")
        return
    for name, path in data.path.items():
        if not _NAME.fullmatch(name) or not path:
            rule = "a source needs a path and a name of letters, digits, _, - and ."
            raise setting_error("data.path", data.path, rule, example={"web": path or "web/*.bin"})
    if not data.path:
        raise setting_error("data.path", data.path, "names no source", example={"web": "web/*.bin"})
    _check_eval_path(data.eval_path, data.path)
    find_phases(config)


def _check_eval_path(eval_path: object, path: Mapping[str, str]) -> None:
    if isinstance(eval_path, Mapping) and (unknown := [name for name in eval_path if name not in path]):
        rule = f"data.path has no source {unknown[0]}, it has {', '.join(path)}"
        raise setting_error("data.eval_path", eval_path, rule)
    if isinstance(eval_path, str):
        rule = "data.path has several sources: give a path for each by name"
        raise setting_error("data.eval_path", eval_path, rule, example={next(iter(path)): eval_path})
