"""Resolves `model.name=auto` to the recipe that builds the model in a folder, before the model's keys are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.initial_weights import asks_for_fine_tuning, is_true, refuse_fresh_with_start
from trainer.config.location import locate
from trainer.config.pretrained import find_native, has_config_only
from trainer.errors import setting_error
from trainer.recipe import find_recipe

_AUTO = "auto"
MODEL = "model"
"""Value of `data.tokenizer` and `data.chat_template` for those that come with the model."""
_GENERIC_KEYS = ("model.path", "model.fresh")
"""Keys of the generic recipe `hf` that native recipes do not need."""


def resolve_auto_model(
    values: Mapping[str, Any], assignments: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of the recipe file and of the command line with `model.name=auto` replaced by a recipe's name.

    A native recipe is used if it builds the model that config.json describes and declares every `model.` key that is
    set; otherwise the generic recipe `hf`.  Raises UserError if no folder is given.
    """
    if assignments.get("model.name", values.get("model.name")) != _AUTO:
        return dict(values), dict(assignments)
    # A recipe file that names another model sets that model's fields.
    own_file = values.get("model.name") == _AUTO
    kept = {key: value for key, value in values.items() if own_file or not key.startswith("model.")}
    folder = _folder(kept, assignments)
    found = find_native(folder, "model.path")
    given = {key for key in (*kept, *assignments) if key.startswith("model.") and key != "model.name"}
    fields = {f"model.{f.name}" for f in dataclasses.fields(found[0].config)} if found else set()
    rest = {key: text for key, text in assignments.items() if key != "model.name"}
    if found is None or not given - set(_GENERIC_KEYS) <= fields:
        return kept | {"model.name": find_recipe("hf").name, "model.path": folder}, rest
    recipe, config = found
    start, asked = _start(kept, rest), {**kept, **rest}
    own = {key: value for key, value in kept.items() if key not in _GENERIC_KEYS}
    own |= {f"model.{field.name}": getattr(config, field.name) for field in dataclasses.fields(config)}
    own["model.name"] = recipe.name
    rest = {key: text for key, text in rest.items() if key not in _GENERIC_KEYS}
    if start is not None:
        refuse_fresh_with_start(asked, start)
    elif not is_true(asked.get("model.fresh")):
        # A folder with only config.json can define a model to train from scratch, but not one to fine-tune.
        is_meant = asked.get("model.fresh") is None and has_config_only(folder) and not asks_for_fine_tuning(asked)
        if not is_meant:
            own["train.init_from"] = folder
            rest.pop("train.init_from", None)
    if rest.get("data.tokenizer", own.get("data.tokenizer")) == MODEL:
        own["data.tokenizer"] = folder  # without initial weights, no other key names the model's folder
        rest.pop("data.tokenizer", None)
    return own, rest


def _start(values: Mapping[str, Any], assignments: Mapping[str, str]) -> str | None:
    """Return the value of `train.init_from`, or None if it is unset."""
    start = assignments.get("train.init_from", values.get("train.init_from"))
    return None if start in (None, "null", "~", "") else str(start)


def _folder(values: Mapping[str, Any], assignments: Mapping[str, str]) -> str:
    """Return the absolute path of the model's folder.  Raises UserError if none is given."""
    given = assignments.get("model.path", values.get("model.path"))
    start = _start(values, assignments)
    folder = given or (start if start is not None and locate(start).kind == "huggingface" else None)
    if not folder:
        rule = "model.name=auto needs a Hugging Face model folder"
        raise setting_error("model.path", None, rule, example="models/Qwen3-8B")
    return str(Path(str(folder).removeprefix("file://")).expanduser().absolute())
