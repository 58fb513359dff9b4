"""Decides which settings may change when a run resumes, and looks up values in stored configurations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.declare import OnResume
from trainer.config.files import read_stored
from trainer.config.keys import declared_keys
from trainer.config.schema import SUBSECTIONS, RunConfig, escape_references, plain_lists
from trainer.errors import UserError, setting_error


def on_resume(key: str, item: dataclasses.Field[Any]) -> OnResume:
    """Return whether a key may change when a run resumes: what it declares or, by default, what its section does."""
    sections = {section.name: section.metadata for section in dataclasses.fields(RunConfig)}
    default: OnResume = sections[key.partition(".")[0]].get("on_resume", "free")
    return item.metadata.get("on_resume") or default


def stored_value(stored_yaml: str, key: str) -> object:
    """Return the value of `key` in text that a run stored; None if the key is missing or the text is invalid."""
    try:
        return _flat(read_stored(stored_yaml)).get(key)
    except UserError:
        return None


def compare_configs(config: RunConfig, stored_yaml: str) -> tuple[list[str], list[str]]:
    """Compare `config` with the configuration stored in a checkpoint.

    Returns two lists of lines "key: BEFORE in the checkpoint, AFTER now".  The first has the refused differences, which
    would silently change training and are not in `checkpoint.allow_changes`; the second has the permitted ones.  If
    `model.name` differs and may not change, nothing else is reported.  Raises UserError if exactly one of the two
    configurations is a learning-rate range test, and for a difference that is never permitted.
    """
    stored = _flat(read_stored(stored_yaml))
    _check_same_kind(config, stored)
    allowed = config.checkpoint.allow_changes
    name = config.model.name
    before = stored.get("model.name")
    if before not in (name, None) and {"model", "model.name"}.isdisjoint(allowed):
        return [f"model.name: {before} in the checkpoint, {name} now"], []
    declared = declared_keys(type(config.model), type(config.objective))
    refused: list[str] = []
    permitted: list[str] = []
    for key, before, now in _differences(config, stored):
        rule = on_resume(key, declared[key])
        if rule == "ignored":
            continue
        if rule == "never":
            raise _never_changes_error(config, key, before, now)
        is_allowed = rule == "free" or not {key, key.partition(".")[0]}.isdisjoint(allowed)
        (permitted if is_allowed else refused).append(f"{key}: {before} in the checkpoint, {now} now")
    return refused, permitted


def has_changed(config: RunConfig, stored_yaml: str, *keys: str) -> bool:
    """Return whether `config` differs in any of `keys` from the configuration stored in a checkpoint."""
    return any(key in keys for key, _, _ in _differences(config, _flat(read_stored(stored_yaml))))


def free_run_name(config: RunConfig) -> str:
    """Return the first of NAME-2, NAME-3, ... whose default folder does not exist."""
    names = (f"{config.run.name}-{number}" for number in itertools.count(2))
    return next(name for name in names if not Path("runs", name).exists())


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by key, given its sections."""
    flat: dict[str, Any] = {}

    def add(prefix: str, values: object) -> None:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            key = f"{prefix}.{name}"
            if key in SUBSECTIONS:
                add(key, value)
            else:
                flat[key] = value

    for section, values in sections.items():
        add(section, values)
    return flat


def _differences(config: RunConfig, stored: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose value differs from the stored one, with the stored and the current value.

    A key that is not stored, which a user's own model or objective may have gained, had its default.  `${` in text is
    compared, and yielded, as it is stored: escaped.
    """
    declared = declared_keys(type(config.model), type(config.objective))
    for key, now in _flat(escape_references(config.to_dict())).items():
        item = declared[key]
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        before = stored.get(key, now if default is dataclasses.MISSING else plain_lists(default))
        if before != now:
            yield key, before, now


def _never_changes_error(config: RunConfig, key: str, before: object, now: object) -> UserError:
    rule = f"the checkpoint was written with {before}, which cannot be converted"
    start = config.run_dir if config.checkpoint.resume == "auto" else config.checkpoint.resume
    fix = f"set {key}={before}, or train another run from these weights: run.name={free_run_name(config)} "
    return setting_error(key, now, rule, fix=f"{fix}train.init_from={start}")


def _check_same_kind(config: RunConfig, stored: Mapping[str, Any]) -> None:
    """Raise UserError if exactly one of the two configurations is a learning-rate range test."""
    was_test = stored.get("schedule.name") == "range"
    now = config.schedule.name
    if was_test and now != "range":
        rule = "this checkpoint is from a learning-rate range test, which a training run cannot resume"
        fix = "use another run.name, or start over with checkpoint.resume=none, which moves the range test aside"
        raise setting_error("schedule.name", now, rule, fix=fix)
    if now == "range" and not was_test:
        rule = "this checkpoint is from a training run, which a learning-rate range test cannot resume"
        fix = f"give the range test a run of its own: run.name={config.run.name}-lr"
        raise setting_error("schedule.name", now, rule, fix=fix)
