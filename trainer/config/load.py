"""Loads a configuration: recipe files, what comes with the model's weights, and the command line are layers.

Later layers override earlier ones (`merge`).  The merged values get their types from the schema (`keys.typed_config`),
and `derive` then computes the values that follow from others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer import gguf_model, hub
from trainer.config.derive import Loaded, derive, labels_of, with_section
from trainer.config.files import (
    CONFIG,
    check_command,
    check_imports,
    declared_model,
    find_recipe_file,
    is_checkpoint,
    is_run,
    is_written_by_run,
    keys_of_sections,
    missing_model_error,
    read_run_config,
    read_stored,
    read_yaml,
    recipe_files,
)
from trainer.config.keys import (
    COMMAND_LINE,
    FREE_TEXT,
    declared_keys,
    parse_text,
    split_overrides,
    typed_config,
)
from trainer.config.model_folder import (
    CONFIG_JSON,
    DeclaredModel,
    find_native,
    free_fields,
    has_config_only,
    read_declared_model,
)
from trainer.config.schema import AUTO, MODEL, MODEL_KEYS, TYPED_BY_OTHERS, RunConfig
from trainer.config.weights import is_fine_tuning, locate, parse_bool
from trainer.errors import UserError, reject_credentials, setting_error
from trainer.objective import find_objective
from trainer.registry import find_model


@dataclass(frozen=True)
class Layer:
    """The values that one place sets, by key.

    On the command line, the values of keys in TYPED_BY_OTHERS are text, until the model and the objective are known.

    texts: the values of the command line as they were typed, for messages.
    """

    origin: str
    values: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict)

    def without(self, keys: Collection[str]) -> Layer:
        """Return the layer without these keys."""
        return replace(self, values={key: value for key, value in self.values.items() if key not in keys})


def load_config(
    recipe: str, overrides: Sequence[str] = (), allow_import: Collection[str] = (), needs_weights: bool = True
) -> RunConfig:
    """Return the configuration of `recipe` with `key=value` overrides.

    `recipe` is a file name in conf/ without `.yaml`, a path ending in .yaml or .yml, or a run folder (for its
    `config.yaml`).  A recipe file may inherit from another with `recipe: PARENT`.  If a key is given twice, the last
    value applies.  Training with the configuration of a run folder continues that run, even if the folder has been
    moved, unless `overrides` give the run another folder or name.

    Modules named on the command line or in the user's recipe files are imported.  Files written by a run or stored in
    a checkpoint are untrusted: a module that they name is imported only if it is in `allow_import` or in `overrides`.

    If the weights in `train.init_from` come with a description of their model, the described fields replace those in
    recipe files, and model fields in `overrides` must agree with them.  A field that only affects training, or that
    `checkpoint.allow_changes` permits to differ, keeps a value set in the recipe file or `overrides`.

    `needs_weights=False` skips the check that the initial weights can be read, for commands that need only the model's
    structure or the data.

    Raises UserError for an unknown recipe or key, a wrong type, a value outside its limits, or a file that cannot be
    read.  `check_config` checks the settings against each other and against the number of ranks.
    """
    return load(recipe, overrides, allow_import, needs_weights).config


def load(
    recipe: str, overrides: Sequence[str] = (), allow_import: Collection[str] = (), needs_weights: bool = True
) -> Loaded:
    """Return what `load_config` returns, with the origin of each value and notes for the user."""
    path = find_recipe_file(recipe)
    command_line = command_line_layer(overrides)
    layers = [*file_layers(path, command_line.values, allow_import), command_line]
    name = path.absolute().parent.name if path.name == CONFIG else path.stem
    return load_layers(layers, name, needs_weights)


def load_layers(layers: Sequence[Layer], name: str, needs_weights: bool = True) -> Loaded:
    """Return the configuration of some layers, the last of which is the command line.

    name: the name of the run, if no layer sets it.

    Raises UserError as `load_config` does.
    """
    for layer in layers:
        for key, value in layer.values.items():
            if key not in FREE_TEXT:
                reject_credentials(key, value)
    notes: list[str] = []
    layers, fetched = fetch_models(layers, name, notes, needs_weights)
    given, _ = merge(layers)
    layers = resolve_auto_model(layers)
    layers, declared = add_model_of_weights(layers)
    values, origins = merge(layers)
    if "model.name" not in values:
        raise missing_model_error(values, layers[0].origin)
    config = _typed(values, origins, layers[-1].texts)
    if declared is not None:
        declared.check(config.model, config.checkpoint.allow_changes)
    loaded = Loaded(config, origins, notes)
    derive(loaded, given, name, needs_weights)
    for key, text in fetched.items():
        loaded.origins[key] = f"{loaded.origins.get(key, '')}: {text}"
    return loaded


def load_stored(text: str, origin: str = CONFIG, allow_import: Collection[str] = ()) -> RunConfig:
    """Return the configuration that a run has stored, which needs no derived values: they are stored too.

    The text is untrusted: of the modules that it names, only those in `allow_import` and their submodules are imported.
    The names of models on the Hugging Face Hub become their paths in the cache, if they are there.  `origin` names the
    text in messages.  Raises UserError as `load_config` does.
    """
    values = dict(keys_of_sections(read_stored(text, origin), origin))
    values.pop("checkpoint.dir", None)  # it may refer to the run's folder, which is not stored
    for key in MODEL_KEYS:
        name = hub.parse_name(values[key]) if isinstance(values.get(key), str) else None
        if name is not None:
            values[key] = str(hub.cached_path(name) or values[key])
    if "model.name" not in values:
        raise missing_model_error(values, origin)
    config = _typed(values, dict.fromkeys(values, origin), {}, allow_import)
    return with_section(config, "data", labels=labels_of(config))


def _typed(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    texts: Mapping[str, str],
    allow_import: Collection[str] | None = None,
) -> RunConfig:
    """Return the configuration with these values, for the model and the objective that they name (`typed_config`).

    allow_import: the modules that may be imported to find these two; None for any.
    """
    model = find_model(str(values["model.name"]), allow_import).config
    objective: type = find_objective(str(values.get("train.objective", "tokens")), allow_import)
    return typed_config(values, origins, texts, model, objective)


def stored_layer(text: str, origin: str) -> Layer:
    """Return the layer of a configuration that a run has stored, without what applies only to that run."""
    return Layer(origin, dict(keys_of_sections(read_stored(text, origin), origin))).without(_OWN_KEYS)


# ---------------------------------------------------------------------------------------------------------------
# Layers

PARENT = "recipe"
"""The key of a recipe file that names its parent."""

_OWN_KEYS = ("run.name", "run.dir", "checkpoint.dir", "checkpoint.resume")
"""Keys that apply to one run only: neither a child file nor a branch of a run inherits them."""


def command_line_layer(overrides: Sequence[str]) -> Layer:
    """Return the layer of `key=value` arguments.  Raises UserError for one that cannot be parsed."""
    declared = declared_keys()
    texts = split_overrides(overrides)
    values: dict[str, Any] = dict(texts)
    for key, text in texts.items():
        if key in declared and not key.startswith(TYPED_BY_OTHERS):
            values[key] = parse_text(key, text, declared[key].type)
    return Layer(COMMAND_LINE, values, texts)


def file_layers(path: Path, command_line: Mapping[str, Any], allow_import: Collection[str]) -> list[Layer]:
    """Return the layers of a recipe file and of its parents, the oldest first.

    The key `recipe` names a parent as on the command line: by the name of a recipe, a path (relative to the file's
    folder), or a run folder.

    A run that is named as the recipe itself continues where it is, unless the command line gives the run another name
    or folder.  Otherwise, its name, its folder and the locations of its checkpoints are not inherited.

    Raises UserError for a parent that does not exist, for circular inheritance, and for a module that may not be
    imported and that a run's configuration names, or a file from which that inherits.
    """
    layers: list[Layer] = []
    files: list[Path] = []
    is_trusted = True
    while True:
        tree = read_yaml(path)
        parent = tree.pop(PARENT, None)
        if is_written_by_run(path):
            is_trusted = False
        if not is_trusted:
            check_imports(tree, command_line, allow_import)
            check_command(tree, command_line)
        origin = display_path(path)
        layer = Layer(origin, dict(keys_of_sections(tree, origin)))
        if path.name == CONFIG and is_run(path.parent):
            if not files and _continues(path.parent, command_line):
                layers.insert(0, _where_it_is(path.parent, layer.values))
            else:
                layer = layer.without(_OWN_KEYS)
        elif path.name == CONFIG and is_checkpoint(path.parent):
            if not files and not command_line.get("run.name") and not command_line.get("run.dir"):
                raise _checkpoint_as_recipe_error(path)
            layer = layer.without(_OWN_KEYS)
        layers.insert(0, layer)
        files.append(path.resolve())
        if parent is None:
            return layers
        rule = f"must be a recipe, a path ending in .yaml, or a run folder (in {path})"
        if not isinstance(parent, str):
            raise setting_error(PARENT, parent, rule, "llama_small")
        local_parent = path.parent / parent
        path = find_recipe_file(str(local_parent) if local_parent.exists() else parent)
        if path.resolve() in files:
            rule = f"is its own parent, through {', '.join(map(str, files))}"
            raise setting_error(PARENT, parent, rule, fix="start one of them from another recipe, such as llama_small")


def _continues(folder: Path, command_line: Mapping[str, Any]) -> bool:
    """Return whether the command line names no other run than the one in `folder`."""
    target = command_line.get("run.dir")
    if not target and command_line.get("run.name"):
        target = f"runs/{command_line['run.name']}"
    return not target or Path(target).resolve() == folder.resolve()


def _where_it_is(folder: Path, stored: Mapping[str, Any]) -> Layer:
    """Return the layer above a run's stored configuration, to continue that run, which is now in `folder`."""
    values = {"run.dir": str(folder)}
    if stored.get("checkpoint.resume") == "none" or any((folder / "checkpoints").glob("step_*")):
        values["checkpoint.resume"] = AUTO  # the stored value only applied to the first start
    return Layer("where the run is", values)


def _checkpoint_as_recipe_error(path: Path) -> UserError:
    run = path.parent.parent.parent
    resumed = f"\n  to resume its run: recipe={run}" if is_run(run) else ""
    return UserError(
        f"recipe={path}: is the configuration of a checkpoint\n"
        f"  to start a new run: add run.name=NAME, and checkpoint.resume={path.parent} to continue from that checkpoint"
        f"{resumed}"
    )


def display_path(path: Path) -> str:
    """Return a file's path for the user: conf/NAME for a built-in recipe, else relative to the working folder."""
    if path.resolve() == recipe_files().get(path.stem, Path()).resolve():
        return f"conf/{path.name}"
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


_EXCLUSIVE = {"train.steps": "train.epochs", "train.epochs": "train.steps"}


def merge(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of all layers by key, and the origin of each.

    A layer that names another model or objective drops the fields of the earlier one, which need not exist in it.  One
    that names a run drops the folder of the earlier one.  `train.steps` and `train.epochs` replace each other.  Raises
    UserError if one layer sets both.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, section in (("model.name", "model."), ("train.objective", "objective.")):
            if key in layer.values and layer.values[key] != values.get(key, layer.values[key]):
                values = {name: value for name, value in values.items() if not name.startswith(section)}
        for key, rival in _EXCLUSIVE.items():
            if layer.values.get(key) is not None:
                if layer.values.get(rival) is not None:
                    rule = f"{key}={layer.values[key]} is also set there; use only one of them"
                    raise setting_error(rival, layer.values[rival], rule)
                values.pop(rival, None)
        if "run.name" in layer.values:
            values.pop("run.dir", None)
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
    return values, {key: origins[key] for key in values}


# ---------------------------------------------------------------------------------------------------------------
# The model and its weights

_PARTS_OF_MODEL_PATH = ("train.init_from", "data.tokenizer")
"""Keys whose values follow from `model.path`, which a run of a native model does not store."""


def fetch_models(
    layers: Sequence[Layer], name: str, notes: list[str], needs_weights: bool
) -> tuple[list[Layer], dict[str, str]]:
    """Replace the names of Hub models with their folders in the cache, and .gguf files with their converted folders.

    The run stores the models' names, pinned to a commit: a resumed run keeps the commit that it started with, even if
    the branch has moved on.  Returns the layers, and the replaced names by key.  Appends to `notes` what the user
    should know.  Raises UserError if a model cannot be fetched or converted.
    """
    values, _ = merge(layers)
    texts = {key: values[key] for key in MODEL_KEYS if isinstance(values.get(key), str)}
    parsed = {key: hub.parse_name(text) for key, text in texts.items()}
    names = {key: hub_name for key, hub_name in parsed.items() if hub_name is not None}
    stored = _stored_config(values, name) if names else {}
    kept_commits = hub.commits_of_run(stored, names, {"model.path": _PARTS_OF_MODEL_PATH})
    paths: dict[str, str] = {}
    for key, text in texts.items():
        if key not in names and not gguf_model.is_gguf(text):
            continue
        commit = kept_commits.get(key)
        if commit is not None:
            notes.append(f"{key}={text}: this run stays with commit {commit[:12]}, which it began with")
        paths[key] = _fetch(key, text, commit, needs_weights and key != "data.tokenizer")
    replaced = []
    for layer in layers:
        own_paths = {key: path for key, path in paths.items() if key in layer.values}
        replaced.append(replace(layer, values={**layer.values, **own_paths}))
    return replaced, {key: texts[key] for key in paths}


def _fetch(key: str, text: str, commit: str | None, with_weights: bool) -> str:
    """Return the local path of the model files that `text`, the value of `key`, names.

    commit: the commit with which the resumed run began, if any.
    """
    name = hub.parse_name(text)
    path = Path(text)
    if name is not None:
        if name.kind == "dataset":
            rule = "names a data set, not a model"
            raise setting_error(key, text, rule, fix=f"give it as data.path={text}")
        if key == "data.tokenizer" and not name.path.endswith(".gguf"):  # all small files are fetched together
            path = hub.fetch_model(replace(name, path=""), key, commit, with_weights) / name.path
        else:
            path = hub.fetch_model(name, key, commit, with_weights)
    if not gguf_model.is_gguf(str(path)):
        return str(path)
    return str(gguf_model.convert(path, key, with_weights=with_weights))


def _stored_config(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the configuration of the run that this one resumes, by section; empty for a new run."""
    start = str(values.get("checkpoint.resume", AUTO))
    if start == "none":
        return {}
    if start != AUTO:
        return read_run_config(locate(start).folder)
    return read_run_config(Path(values.get("run.dir") or f"runs/{values.get('run.name') or name}"))


_FOLDER_KEYS = ("model.name", "model.path", "model.fresh")
"""What `model.name=auto` is told.  The native model that is found replaces it."""


def resolve_auto_model(layers: Sequence[Layer]) -> list[Layer]:
    """Replace `model.name=auto` with the name of the model spec that builds the model in a Hugging Face folder.

    A native model is used if it is the one that config.json describes and declares every `model.` key that is set;
    otherwise `hf` is used.  Raises UserError if no folder is given.
    """
    values, _ = merge(layers)
    if values.get("model.name") != AUTO:
        return [*layers]
    remaining = [layer.without(layer.values.keys() - values.keys()) for layer in layers]  # without other models' fields
    init_from = values.get("train.init_from")
    folder = values.get("model.path")
    if not folder and init_from is not None and locate(init_from).kind == "huggingface":
        folder = init_from
    if not folder:
        raise setting_error("model.path", None, "model.name=auto needs a Hugging Face model folder", "models/Qwen3-8B")
    folder = str(Path(str(folder).removeprefix("file://")).expanduser().absolute())
    keys = [key for key in values if key.startswith("model.") and key not in _FOLDER_KEYS]
    native = find_native(folder, "model.path", [key.removeprefix("model.") for key in keys])
    if native is None:
        found = {"model.name": find_model("hf").name, "model.path": folder}
        return _below_command_line([layer.without(("model.name",)) for layer in remaining], Layer(folder, found))
    spec, config = native
    fields = {f"model.{item.name}": item for item in dataclasses.fields(spec.config)}
    found = {key: getattr(config, item.name) for key, item in fields.items()} | {"model.name": spec.name}
    found = {key: value for key, value in found.items() if not (key in values and _is_training_only(fields[key]))}
    if init_from is not None and parse_bool(values.get("model.fresh")):
        rule = f"asks for random weights, but train.init_from={init_from} names the weights to start from"
        raise setting_error("model.fresh", True, rule, fix="leave out one of the two")
    if "model.fresh" in values:
        is_fresh = parse_bool(values["model.fresh"])
    else:  # a folder with only config.json defines a new model, but not one to fine-tune
        is_fresh = has_config_only(folder) and not is_fine_tuning(values)
    dropped = list(_FOLDER_KEYS)
    if init_from is None and not is_fresh:
        found["train.init_from"] = folder
        dropped.append("train.init_from")
    if values.get("data.tokenizer") == MODEL:
        found["data.tokenizer"] = folder  # without initial weights, no other key names the model's folder
        dropped.append("data.tokenizer")
    of_folder = Layer(display_path(Path(folder) / CONFIG_JSON), found)
    return _below_command_line([layer.without(dropped) for layer in remaining], of_folder)


def _below_command_line(layers: Sequence[Layer], layer: Layer) -> list[Layer]:
    """Return the layers with one more, which overrides all of them but the last, the command line."""
    return [*layers[:-1], layer, layers[-1]]


def _is_training_only(item: dataclasses.Field[Any]) -> bool:
    return bool(item.metadata.get("training_only"))


def add_model_of_weights(layers: Sequence[Layer]) -> tuple[list[Layer], DeclaredModel | None]:
    """Add a layer with the model fields that come with the initial weights, just below the command line.

    Free fields that a recipe file sets are left out.  Also returns the declared model, or None if there is none.
    """
    values, _ = merge(layers)
    source = values.get("train.init_from")
    name = values.get("model.name")
    if source is None or name is None:
        return [*layers], None
    spec = find_model(str(name))
    declared = _find_declared(source, spec)
    if declared is None:
        return [*layers], None
    legal = {item.name for item in dataclasses.fields(spec.config)}
    free = free_fields(spec.config, values.get("checkpoint.allow_changes") or ())
    found = {
        f"model.{field}": value
        for field, value in declared.fields.items()
        if field in legal and not (field in free and f"model.{field}" in values)
    }
    if "model.name" in layers[-1].values:
        found["model.name"] = name  # else the command line would drop the fields as those of another model
    return _below_command_line(layers, Layer(display_path(Path(declared.where)), found)), declared


def _find_declared(source: str, spec: Any) -> DeclaredModel | None:
    """Return the model that the files at `source` declare; None if they declare none, or one of another model spec."""
    location = locate(source)
    if location.kind == "huggingface":
        return read_declared_model(source, spec, "train.init_from")
    stored = location.folder / CONFIG  # of a run or of a checkpoint
    try:
        return declared_model(stored.read_text(), spec.name, str(stored)) if stored.is_file() else None
    except OSError as error:
        rule = f"{stored.name} cannot be read ({error.strerror})"
        raise setting_error("train.init_from", source, rule) from error
