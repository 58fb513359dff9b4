"""Compares configurations, and decides which settings may change when a run is resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer.config.load import read_stored
from trainer.config.schema import SUBSECTIONS, RunConfig, plain_lists
from trainer.errors import UserError, setting_error
from trainer.urls import without_credentials

_FIXED_ON_RESUME = (
    "model.",
    "data.",
    "optim.name",
    "optim.state_dtype",
    "optim.muon.variant",
    "optim.groups",
    "optim.base_model",
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
"""Exceptions to `_FIXED_ON_RESUME`.  The loader itself checks the past weights and phases against its position."""
_NOT_REPORTED = ("run.name", "run.dir", "checkpoint.", "log.")
"""Keys that do not affect training; not reported when they differ."""


def stored_value(stored_yaml: str, key: str) -> object:
    """Return one value of a configuration written by `to_yaml`; None if the key is missing or the text is invalid."""
    section, _, name = key.partition(".")
    try:
        return _stored_section(read_stored(stored_yaml), section).get(name)
    except UserError:
        return None


def _stored_section(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of a section; those of a subsection as `muon.variant`."""
    section = stored.get(name)
    flat: dict[str, Any] = {}
    for key, value in section.items() if isinstance(section, dict) else ():
        if f"{name}.{key}" in SUBSECTIONS and isinstance(value, dict):
            flat |= {f"{key}.{below}": item for below, item in value.items()}
        else:
            flat[key] = value
    return flat


def compare_stored(before_yaml: str, after_yaml: str) -> list[str]:
    """Return a line "section.key: before -> after" for each difference between two stored configurations.

    A missing key counts as its default.  No recipe is imported, so the defaults of model fields are unknown: a model
    field that only one of the configurations has is not reported.
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
    """Return the default of a section's key, or `otherwise` if it has none or its default is None."""
    subsection, _, name = name.rpartition(".")
    section = getattr(section, subsection) if subsection else section
    fields = dataclasses.fields(section) if section is not None else ()
    declared = next((each for each in fields if each.name == name), None)
    if declared is None:
        return otherwise
    if declared.default_factory is not dataclasses.MISSING:
        return plain_lists(declared.default_factory())
    return otherwise if declared.default in (dataclasses.MISSING, None) else plain_lists(declared.default)


def compare_configs(config: RunConfig, stored_yaml: str) -> tuple[list[str], list[str]]:
    """Compare `config` with the configuration stored in a checkpoint.

    Returns two lists of lines "key: BEFORE in the checkpoint, AFTER now": the differences that would silently change
    training and are not in `checkpoint.allow_changes`, and the permitted ones.  If the model differs, only its name is
    reported.  Raises UserError if exactly one of the two configurations is a learning-rate range test.
    """
    stored = read_stored(stored_yaml)
    _check_kind(config, stored)
    name, before = config.to_dict()["model"]["name"], _stored_section(stored, "model").get("name")
    if before not in (name, None) and {"model", "model.name"}.isdisjoint(config.checkpoint.allow_changes):
        return [f"model.name: {before} in the checkpoint, {name} now"], []
    refused: list[str] = []
    free: list[str] = []
    now = config.to_dict()
    for section in now:
        for name, value in _stored_section(now, section).items():
            key = f"{section}.{name}"
            # A checkpoint older than the key: the default is the behaviour it was written with.
            before = _stored_section(stored, section).get(name, _default_of(getattr(config, section), name, value))
            if _means_the_same(key, before, value) or key.startswith(_NOT_REPORTED):
                continue
            fixed = key.startswith(_FIXED_ON_RESUME) and key not in _FREE_ON_RESUME
            line = f"{key}: {before} in the checkpoint, {value} now"
            is_allowed = not {key, section}.isdisjoint(config.checkpoint.allow_changes)
            (refused if fixed and not is_allowed else free).append(line)
    return refused, free


def _means_the_same(key: str, before: Any, now: Any) -> bool:
    """Return whether two values of a key are equivalent: `data.too_long=auto` drops what `drop` does, or refuses."""
    is_same = bool(_same_data(before) == _same_data(now))
    return is_same or (key == "data.too_long" and {before, now} == {"auto", "drop"})


def _same_data(value: Any) -> Any:
    """Return a value with its URLs stripped of credentials: a renewed token or signature still names the same data."""
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
