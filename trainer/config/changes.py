"""Compares configurations: the settings that may change when a run is resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer.config.load import (
    read_stored,
)
from trainer.config.schema import RunConfig, plain_lists
from trainer.errors import UserError, setting_error
from trainer.urls import without_credentials

_FIXED_ON_RESUME = (
    "model.",
    "data.",
    "optim.name",
    "optim.state_dtype",
    "train.global_batch_size",
    "train.weights_dtype",
    "train.freeze",
    "train.objective",
    "dpo.",
    "lora.",
    "run.seed",
)
_FREE_ON_RESUME = (
    *("model.path", "model.attention", "model.fresh"),
    *("data.num_workers", "data.cache_dir", "data.cache_gib", "data.weights", "data.phases"),
)
"""Of the fixed ones.  What weights and phases were for the samples so far is compared with the position in the data."""
_OF_THE_ATTEMPT = ("run.name", "run.dir", "checkpoint.", "log.")
"""Keys that do not affect training; not reported when they differ."""


def stored_value(stored_yaml: str, key: str) -> object:
    """Return one value of a configuration that `to_yaml` has written, None if it lacks the key, or is none."""
    section, _, name = key.partition(".")
    try:
        return _stored_section(read_stored(stored_yaml), section).get(name)
    except UserError:
        return None


def _stored_section(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = stored.get(name)
    return section if isinstance(section, dict) else {}


def compare_stored(before_yaml: str, after_yaml: str) -> list[str]:
    """Return a line "section.key: before -> after" for each difference of two stored configurations.

    A key that one of them lacks had its default there.  Nothing is imported: of a model whose fields one of them lacks
    there is nothing to compare.
    """
    before, after = read_stored(before_yaml, "the first"), read_stored(after_yaml, "the second")
    defaults, lines = RunConfig(), []
    for section in dataclasses.fields(RunConfig):
        old, new = (_stored_section(stored, section.name) for stored in (before, after))
        for name in dict.fromkeys([*new, *old]):
            other = new.get(name, old.get(name))
            default = _default_of(getattr(defaults, section.name), name, other)
            was, now = old.get(name, default), new.get(name, default)
            if not _means_the_same(f"{section.name}.{name}", was, now):
                lines.append(f"{section.name}.{name}: {was} -> {now}")
    return lines


def _default_of(section: Any, name: str, otherwise: Any) -> Any:
    """Return what a key of a section is if it is not set; `otherwise` where that is nothing, or found out later."""
    fields = dataclasses.fields(section) if section is not None else ()
    declared = next((each for each in fields if each.name == name), None)
    if declared is None:
        return otherwise
    if declared.default_factory is not dataclasses.MISSING:
        return plain_lists(declared.default_factory())
    return otherwise if declared.default in (dataclasses.MISSING, None) else plain_lists(declared.default)


def compare_configs(config: RunConfig, stored_yaml: str) -> tuple[list[str], list[str]]:
    """Compare with the configuration that a checkpoint was written with.

    Returns two lists of lines "key: before in the checkpoint, now now": what would silently change the training and is
    not named in `checkpoint.allow_changes`, and what may change.  Of another model that alone is told: it has other
    settings.  Raises UserError if one of them is a learning-rate range test, and the other is not.
    """
    stored = read_stored(stored_yaml)
    _check_kind(config, stored)
    name, before = config.to_dict()["model"]["name"], _stored_section(stored, "model").get("name")
    if before not in (name, None) and {"model", "model.name"}.isdisjoint(config.checkpoint.allow_changes):
        return [f"model.name: {before} in the checkpoint, {name} now"], []
    refused: list[str] = []
    free: list[str] = []
    for section, values in config.to_dict().items():
        for name, value in values.items():
            key = f"{section}.{name}"
            # A checkpoint of before there was such a key: it meant what is the default now.
            before = _stored_section(stored, section).get(name, _default_of(getattr(config, section), name, value))
            if _means_the_same(key, before, value) or key.startswith(_OF_THE_ATTEMPT):
                continue
            fixed = key.startswith(_FIXED_ON_RESUME) and key not in _FREE_ON_RESUME
            line = f"{key}: {before} in the checkpoint, {value} now"
            is_allowed = not {key, section}.isdisjoint(config.checkpoint.allow_changes)
            (refused if fixed and not is_allowed else free).append(line)
    return refused, free


def _means_the_same(key: str, before: Any, now: Any) -> bool:
    """Return whether two values of a key train alike: `data.too_long=auto` drops what `drop` does, or refuses."""
    is_same = bool(_same_data(before) == _same_data(now))
    return is_same or (key == "data.too_long" and {before, now} == {"auto", "drop"})


def _same_data(value: Any) -> Any:
    """Return a value with URLs for what they name: with a renewed token or signature it is still the same data."""
    if isinstance(value, dict):
        return {name: _same_data(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_same_data(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def _check_kind(config: RunConfig, stored: Mapping[str, Any]) -> None:
    is_test, now = _stored_section(stored, "schedule").get("name") == "range", config.schedule.name
    if is_test and now != "range":
        rule = "this checkpoint is from a learning-rate range test, which a training run cannot resume"
        fix = "use another run.name, or start over with checkpoint.resume=none, which moves the range test aside"
        raise setting_error("schedule.name", now, rule, fix=fix)
    if now == "range" and not is_test:
        rule = "this checkpoint is from a training run, which a learning-rate range test cannot resume"
        raise setting_error("schedule.name", now, rule, fix="leave out checkpoint.resume: a range test starts anew")
