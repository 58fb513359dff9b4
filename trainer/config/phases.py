"""The phases of a run with several data sources: their sampling weights, and where each phase starts.

A phase starts with a step, even if its start is given in tokens, and lasts until the next phase starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainer.config.schema import RunConfig
from trainer.errors import nearest, setting_error

MIXTURE_BLOCK = 1024
"""Number of samples in a block.  Within a phase, every complete block has the same number of samples from a given
source: at least one, unless the source's weight is 0."""

_PERCENT_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_TOKENS_PATTERN = re.compile(r"tokens:(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)")
_PHASE_START_RULE = "must be a step, tokens:<n>, or a percentage of the run such as 80%"


@dataclass(frozen=True)
class Phase:
    """A phase of training: the sampling weights of the sources from sample `start` on.

    weights: the weights by the sources' names; None for weights proportional to the sources' sizes.
    """

    start: int
    weights: Mapping[str, float] | None


def find_phases(config: RunConfig) -> list[Phase]:
    """Return the phases of a run with several sources, in order; the first starts at sample 0.

    Raises a UserError that names the phase and the rule that it breaks.  The order of the phases is only checked once
    `train.epochs` has been resolved to a number of steps.
    """
    path = config.data.path
    weights = config.data.weights
    names = sorted(path) if isinstance(path, Mapping) else []
    has_num_steps = config.train.epochs is None
    if weights is not None:
        _check_weights("data.weights", weights, names)
    phases = [Phase(0, weights)]
    for number, entry in enumerate(config.data.phases):
        key = f"data.phases[{number}]"
        if {"from", "weights"} != {*entry}:
            example = {"from": "80%", "weights": dict.fromkeys(names, 1)}
            raise setting_error(key, entry, "must contain only `from` and `weights`", proposal=example)
        _check_weights(f"{key}.weights", entry["weights"], names)
        phase = Phase(_first_sample(f"{key}.from", entry["from"], config), entry["weights"])
        is_after_previous = phase.start > phases[-1].start or not (phase.start or number or weights is not None)
        if has_num_steps and not is_after_previous:
            previous_start = phases[-1].start // config.train.global_batch_size + 1
            rule = f"must start after the previous phase, which starts at step {previous_start}"
            raise setting_error(f"{key}.from", entry["from"], rule, previous_start + 1)
        if phase.start == 0:  # it is the first, in place of the one with `data.weights`
            phases.clear()
        phases.append(phase)
    return phases


def _first_sample(key: str, when: object, config: RunConfig) -> int:
    """Return the number of samples before the first step of a phase."""
    batch = config.train.global_batch_size
    if isinstance(when, int) and not isinstance(when, bool):
        if when < 1:
            raise setting_error(key, when, "the first step is 1", 1)
        return (when - 1) * batch
    if isinstance(when, str) and (percentage := _PERCENT_PATTERN.fullmatch(when.strip())):
        part = Fraction(percentage[1]) / 100
        if part > 1:
            raise setting_error(key, when, "is beyond the end of the run", "100%")
        return math.ceil(part * config.train.steps) * batch
    if isinstance(when, str) and (tokens := _TOKENS_PATTERN.fullmatch(when.strip())):
        return math.ceil(Fraction(tokens[1].replace("_", "")) / (batch * config.data.seq_len)) * batch
    raise setting_error(key, when, _PHASE_START_RULE, proposal="80%")


def _check_weights(key: str, weights: Any, names: list[str]) -> None:
    if not isinstance(weights, Mapping) or not weights:
        raise setting_error(key, weights, "must map sources to weights", proposal=dict.fromkeys(names, 1))
    for name, weight in weights.items():
        if name not in names:
            rule = f"data.path has no source {name}; it has {', '.join(names)}"
            suggestion = nearest(name, names)
            meant: dict[Any, Any] = dict.fromkeys(names, 1)
            if suggestion:
                meant = {suggestion if other == name else other: value for other, value in weights.items()}
            raise setting_error(key, weights, rule, meant)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
            without = {**weights, name: 0}
            is_legal = all(isinstance(other, (int, float)) for other in without.values()) and sum(without.values()) > 0
            legal = without if is_legal else dict.fromkeys(names, 1)
            raise setting_error(key, weights, f"{name}={weight} must be a number of at least 0", legal)
    total = sum(weights.values())
    if not total:
        raise setting_error(key, weights, "at least one weight must be above 0", proposal=dict.fromkeys(names, 1))
    too_small = [name for name, weight in weights.items() if 0 < weight * MIXTURE_BLOCK < total]
    if too_small:
        others = sum(weight for name, weight in weights.items() if name not in too_small)
        min_weight = others / (MIXTURE_BLOCK - len(too_small))
        legal = {**weights, **dict.fromkeys(too_small, float(f"{min_weight * 1.001:.3g}"))}
        raise setting_error(key, weights, f"the share of {too_small[0]} is below one sample in {MIXTURE_BLOCK}", legal)
