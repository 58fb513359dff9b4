"""Compares configurations, looks up values in stored ones, and decides which settings may change on resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.schema import SUBSECTIONS, RunConfig, plain_lists
from trainer.config.stored import read_stored
from trainer.errors import UserError, setting_error

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
    "objective.",
    "lora.",
    "run.seed",
)
"""Prefixes of the keys that must not change when a run resumes, unless `checkpoint.allow_changes` permits it."""
_FREE_ON_RESUME = (
    *("model.path", "model.attention", "model.fresh"),
    *("data.num_workers", "data.cache_dir", "data.weights", "data.phases"),
)
"""Exceptions to `_FIXED_ON_RESUME`.  The loader checks that `data.weights` and `data.phases` have not changed for past
steps."""
_NOT_REPORTED = ("run.name", "run.dir", "checkpoint.", "log.")
"""Prefixes of keys that do not affect training.  When a run resumes, differences in them are not reported."""


def stored_value(stored_yaml: str, key: str) -> object:
    """Return the value of `key` in text written by `to_yaml`; None if the key is missing or the text is invalid."""
    section, _, name = key.partition(".")
    try:
        return _flat_section(read_stored(stored_yaml), section).get(name)
    except UserError:
        return None


def _flat_section(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of a section with their values.  Keys of a subsection have the form `muon.variant`."""
    section = stored.get(name)
    flat: dict[str, Any] = {}
    for key, value in section.items() if isinstance(section, dict) else ():
        if f"{name}.{key}" in SUBSECTIONS and isinstance(value, dict):
            flat |= {f"{key}.{subkey}": item for subkey, item in value.items()}
        else:
            flat[key] = value
    return flat


def compare_stored(before_yaml: str, after_yaml: str) -> list[str]:
    """Return a line "section.key: before -> after" for each difference between two stored configurations.

    A missing key is taken to have its default value.  A key that only one configuration has is not reported if its
    default is null or unknown.  Defaults of model and objective keys are unknown, since their classes are not imported.
    """
    before, after = read_stored(before_yaml, "the first"), read_stored(after_yaml, "the second")
    defaults, lines = RunConfig(), []
    for section in dataclasses.fields(RunConfig):
        old, new = (_flat_section(stored, section.name) for stored in (before, after))
        for name in dict.fromkeys([*new, *old]):
            fallback = new.get(name, old.get(name))
            default = _default_of(getattr(defaults, section.name), name, fallback)
            old_value, new_value = old.get(name, default), new.get(name, default)
            if not _are_equivalent(f"{section.name}.{name}", old_value, new_value):
                lines.append(f"{section.name}.{name}: {old_value} -> {new_value}")
    return lines


def _default_of(section: Any, name: str, fallback: Any) -> Any:
    """Return the default of a section's key, or `fallback` if it has none or its default is None."""
    subsection, _, name = name.rpartition(".")
    section = getattr(section, subsection) if subsection else section
    fields = dataclasses.fields(section) if section is not None else ()
    declared = next((item for item in fields if item.name == name), None)
    if declared is None:
        return fallback
    if declared.default_factory is not dataclasses.MISSING:
        return plain_lists(declared.default_factory())
    return fallback if declared.default in (dataclasses.MISSING, None) else plain_lists(declared.default)


def compare_configs(config: RunConfig, stored_yaml: str) -> tuple[list[str], list[str]]:
    """Compare `config` with the configuration stored in a checkpoint.

    Returns two lists of lines "key: BEFORE in the checkpoint, AFTER now".  The first has the refused differences, which
    would silently change training and are not in `checkpoint.allow_changes`; the second has the permitted ones.  If
    `model.name` differs and may not change, nothing else is reported.  Raises UserError if exactly one of the two
    configurations is a learning-rate range test.
    """
    stored = read_stored(stored_yaml)
    _check_same_kind(config, stored)
    name, before = config.to_dict()["model"]["name"], _flat_section(stored, "model").get("name")
    if before not in (name, None) and {"model", "model.name"}.isdisjoint(config.checkpoint.allow_changes):
        return [f"model.name: {before} in the checkpoint, {name} now"], []
    refused: list[str] = []
    permitted: list[str] = []
    for key, before, now in _differences(config, stored):
        if key.startswith(_NOT_REPORTED):
            continue
        is_fixed = key.startswith(_FIXED_ON_RESUME) and key not in _FREE_ON_RESUME
        is_allowed = not {key, key.partition(".")[0]}.isdisjoint(config.checkpoint.allow_changes)
        line = f"{key}: {before} in the checkpoint, {now} now"
        (refused if is_fixed and not is_allowed else permitted).append(line)
    return refused, permitted


def has_changed(config: RunConfig, stored_yaml: str, *keys: str) -> bool:
    """Return whether `config` differs in any of `keys` from the configuration stored in a checkpoint."""
    return any(key in keys for key, _, _ in _differences(config, read_stored(stored_yaml)))


def _differences(config: RunConfig, stored: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values are not equivalent, with the stored and the current value."""
    current = config.to_dict()
    for section in current:
        for name, now in _flat_section(current, section).items():
            # A user's own model or objective may have gained this key since then: the run behaved as with its default.
            before = _flat_section(stored, section).get(name, _default_of(getattr(config, section), name, now))
            if not _are_equivalent(f"{section}.{name}", before, now):
                yield f"{section}.{name}", before, now


def _are_equivalent(key: str, before: Any, now: Any) -> bool:
    """Return whether two values of a key are equivalent.

    With `data.too_long=auto`, a run either refuses to start or drops the same conversations as with `drop`.
    """
    return bool(before == now) or (key == "data.too_long" and {before, now} == {"auto", "drop"})


def _check_same_kind(config: RunConfig, stored: Mapping[str, Any]) -> None:
    """Raise UserError if exactly one of the two configurations is a learning-rate range test."""
    was_test, now = _flat_section(stored, "schedule").get("name") == "range", config.schedule.name
    if was_test and now != "range":
        rule = "this checkpoint is from a learning-rate range test, which a training run cannot resume"
        fix = "use another run.name, or start over with checkpoint.resume=none, which moves the range test aside"
        raise setting_error("schedule.name", now, rule, fix=fix)
    if now == "range" and not was_test:
        rule = "this checkpoint is from a training run, which a learning-rate range test cannot resume"
        raise setting_error(
            "schedule.name", now, rule, fix="leave out checkpoint.resume: a range test always starts over"
        )
