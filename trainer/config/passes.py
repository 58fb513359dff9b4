"""The passes: the steps that resolve a configuration by setting or checking values that depend on others.

A value may depend on other settings, on files, on the data or on the device.  A pass maps the input of its
stage (see `Stage`) and the `Resolution` to a new version of that input.  `Resolution.origins` records where the value
of each key came from, for `--print-config --why`.

`PASSES`, at the end, lists the passes in order.  `load_config` runs those in the first four stages, some of them before
the recipe files and the command line are merged.  The others run when the run starts, once its data can be read, or
once its device is known.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainer import gguf_model, hub
from trainer.config.changes import compare_configs
from trainer.config.keys import assign, declared_keys
from trainer.config.model_folder import (
    DeclaredModel,
    find_native,
    free_fields,
    has_config_only,
    read_declared_model,
    stored_dtype,
)
from trainer.config.parallel import MeshShape, resolve_context_method, resolve_expert_method
from trainer.config.recipe_files import find_recipe_file, read_yaml, recipe_files
from trainer.config.rules import likely_device
from trainer.config.schema import AUTO, MODEL, MODEL_KEYS, SUBSECTIONS, RunConfig
from trainer.config.stored import (
    CONFIG,
    check_imports,
    declared_model,
    is_checkpoint,
    is_run,
    is_written_by_run,
    read_run_config,
    section_of,
)
from trainer.config.weights import (
    allows_other_tokenizer,
    check_initial_weights,
    check_readable_tokenizer,
    check_same_tokenizer,
    find_weights_tokenizer,
    is_fine_tuning,
    locate,
    parse_bool,
    will_resume,
)
from trainer.errors import UserError, setting_error
from trainer.registry import find_model, import_object

if TYPE_CHECKING:
    from trainer.distributed.world import World
    from trainer.plan.search import PlannedChoice

ConfigType = TypeVar("ConfigType")
Stage = Literal["files", "keys", "tree", "config", "start", "data", "device"]
"""The stages, each of which determines when a pass runs and what its input is:

files: the parsed sections of the recipe file.
keys: `Keys`, with the values from files, and those from the command line as text.
tree: OmegaConf's typed tree, in which references such as ${run.seed} are not resolved yet.
config: the RunConfig.
start, data, device: also the RunConfig, but later: when a run starts, once its data can be read, and once its device
    is known.
"""


@dataclass
class Keys:
    """The keys that files and the command line set, before their values are converted to the declared types."""

    values: dict[str, Any]
    """Values from the recipe file and its parents."""
    assignments: dict[str, str]
    """Values from the command line, as text."""


@dataclass
class Resolution:
    """The context of the passes: the user's input, and results other than the configuration."""

    path: Path = Path(CONFIG)
    """The recipe file."""
    assignments: Mapping[str, str] = field(default_factory=dict)
    """Values from the command line by key, as text."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values from the recipe file and its parents, by key."""
    allow_import: Collection[str] = ()
    """The modules that an untrusted configuration may import."""
    needs_weights: bool = True
    """Whether initial weights that cannot be read are an error."""
    is_stored: bool = False
    """Whether the configuration comes from a checkpoint and so must not depend on the files that exist now."""
    shape: MeshShape | None = None
    """The shape of the mesh, for the passes of the stage `device`."""
    world: World | None = None
    """The ranks, for the passes of the stage `device`."""

    origins: dict[str, str] = field(default_factory=dict)
    """Where each value that is not a default came from, by key."""
    untyped: Keys = field(default_factory=lambda: Keys({}, {}))
    """The result of the passes of the stage `keys`."""
    declared: DeclaredModel | None = None
    """The model fields that come with the initial weights."""
    choice: PlannedChoice | None = None
    """The planner's choice for the `auto` settings, on rank 0."""
    notes: list[str] = field(default_factory=list)
    """Messages to show to the user."""

    @property
    def keys(self) -> dict[str, Any]:
        """All values that the user set, in a recipe file or on the command line, by key."""
        return {**self.values, **self.assignments}


# ---------------------------------------------------------------------------------------------------------------
# Recipe files: their parents, and the folders of a run that was moved

PARENT = "recipe"
_NOT_INHERITED = {"run": ("name", "dir"), "checkpoint": ("dir", "resume")}
"""Keys of a run's stored configuration that only apply to that run, by section."""


def inherit(tree: Mapping[str, Any], resolution: Resolution) -> dict[str, Any]:
    """Merge the sections of the recipe file over those of its parents.

    This is the first pass, because all others need the values that files set.  The key `recipe` names a parent as on
    the command line: by the name of a recipe, a path (relative to the file's folder), or a run folder.  From a run
    folder, all settings are inherited except for the run's name and folder and the locations of checkpoints.  A file
    that names a different model than its parent inherits none of the parent's model fields.

    Raises UserError for a parent that does not exist, and for circular inheritance.
    """
    merged, ancestors = dict(tree), [resolution.path.resolve()]
    file = display_path(resolution.path)
    resolution.origins.update((key, file) for key, _ in _flat(merged))
    while (parent := merged.pop(PARENT, None)) is not None:
        rule = f"must be a recipe, a path ending in .yaml, or a run folder (in {ancestors[-1]})"
        if not isinstance(parent, str):
            raise setting_error(PARENT, parent, rule, proposal="llama_small")
        local_parent = ancestors[-1].parent / parent
        parent_file = find_recipe_file(str(local_parent) if local_parent.exists() else parent).resolve()
        if parent_file in ancestors:
            rule = f"is its own parent, through {', '.join(map(str, ancestors))}"
            raise setting_error(PARENT, parent, rule, fix="start one of them from another recipe, such as llama_small")
        inherited = read_yaml(parent_file)
        if is_written_by_run(parent_file):
            check_imports(inherited, resolution.assignments, resolution.allow_import)
        if parent_file.name == CONFIG and is_run(parent_file.parent):
            for section, names in _NOT_INHERITED.items():
                if isinstance(inherited.get(section), Mapping):
                    inherited[section] = {k: value for k, value in inherited[section].items() if k not in names}
        merged, file = _merge(inherited, merged), display_path(parent_file)
        for key, _ in _flat(merged):
            resolution.origins.setdefault(key, file)
        ancestors.append(parent_file)
    return merged


def _merge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for section, values in child.items():
        parent_values = merged.get(section)
        if not isinstance(values, Mapping) or not isinstance(parent_values, Mapping):
            merged[section] = parent_values if values is None else values
        elif section == "model" and values.get("name", parent_values.get("name")) != parent_values.get("name"):
            merged[section] = dict(values)
        else:
            merged[section] = {**parent_values, **values}
    return merged


def display_path(path: Path) -> str:
    """Return a file's path for `--why`: conf/NAME for a built-in recipe, else relative to the working folder."""
    if path.resolve() == recipe_files().get(path.stem, Path()).resolve():
        return f"conf/{path.name}"
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def run_paths(tree: Mapping[str, Any], resolution: Resolution) -> dict[str, Any]:
    """Update the folders in a configuration that a run has stored, in case its run folder was moved or copied.

    A run whose folder was moved continues at the new path; a copy of a run folder continues as a separate run.  This
    pass runs before the command line, which may name another folder, is applied.  Files that no run has written are
    unchanged.  Folders in a parent need no update, since they are not inherited.

    Raises UserError if training would use a folder or checkpoints of another run that the command line does not name.
    """
    path, assignments = resolution.path, resolution.assignments
    run, checkpoint = dict(section_of(tree, "run")), dict(section_of(tree, "checkpoint"))
    stored_dir, folder = run.get("dir"), path.parent
    is_in_checkpoint = is_checkpoint(folder)
    if path.name != CONFIG or not isinstance(stored_dir, str) or not (is_in_checkpoint or is_run(folder)):
        return dict(tree)
    target = Path("runs") / assignments["run.name"] if assignments.get("run.name") else None
    if assignments.get("run.dir"):
        target = Path(assignments["run.dir"])
    if target is None and is_in_checkpoint:
        raise UserError(
            f"recipe={path}: is the configuration of a checkpoint, written by the run in {stored_dir}\n"
            f"  to start a new run: add run.name=NAME, and checkpoint.resume={folder} to continue from that "
            f"checkpoint\n  to resume that run: recipe={stored_dir}"
        )
    continues_same_run = target is None or (not is_in_checkpoint and _is_same_folder(target, folder))
    target = target or folder
    if "checkpoint.dir" not in assignments and isinstance(checkpoint.get("dir"), str):
        checkpoint_dir = current_checkpoint_dir(checkpoint["dir"], stored_dir, str(target))
        shares_checkpoints = checkpoint_dir == checkpoint["dir"] and not _is_same_folder(target, Path(stored_dir))
        if shares_checkpoints and (not continues_same_run or is_another_run(stored_dir, folder)):
            owner = stored_dir if is_in_checkpoint or is_another_run(stored_dir, folder) else folder
            raise setting_error(
                "checkpoint.dir", checkpoint_dir, shared_checkpoints_rule(owner, checkpoint_dir, str(target))
            )
        checkpoint["dir"] = checkpoint_dir
    if continues_same_run and (checkpoint.get("resume") == "none" or any((folder / "checkpoints").glob("step_*"))):
        checkpoint["resume"] = "auto"  # `none` only applied to the first start
    if target is folder and run.get("name") == Path(stored_dir).name:
        run["name"] = folder.absolute().name
    run["dir"] = str(target)
    return {**tree, "run": run, "checkpoint": checkpoint}


def is_another_run(stored: str, here: Path) -> bool:
    """Return whether the run folder `stored`, named in the configuration in `here`, holds a run and is another folder.

    If so, `here` is a copy of that run.  If `stored` no longer holds a run, the run was moved to `here`.
    """
    return is_run(Path(stored)) and not _is_same_folder(Path(stored), here)


def current_checkpoint_dir(checkpoint_dir: str, stored_dir: str, run_dir: str) -> str:
    """Return the current path of `checkpoint_dir`, which was stored when the run folder was `stored_dir`.

    A folder inside the run folder has moved with it to `run_dir`; a URL, or a folder elsewhere, is unchanged.
    """
    if "://" in checkpoint_dir:
        return checkpoint_dir
    relative = os.path.relpath(os.path.abspath(checkpoint_dir), os.path.abspath(stored_dir))
    return (
        checkpoint_dir if relative.split(os.sep)[0] == os.pardir else os.path.normpath(os.path.join(run_dir, relative))
    )


def shared_checkpoints_rule(owner: str | Path, checkpoint_dir: str, run_dir: str) -> str:
    """Return the error text for a run in `run_dir` that would use the checkpoint folder of the run in `owner`."""
    return (
        f"holds the checkpoints of the run in {owner}; the run in {run_dir} needs its own place\n"
        "  on the command line: checkpoint.dir=WHERE (null: in run.dir) and, to continue from the newest one there, "
        f"checkpoint.resume={checkpoint_dir}\n  to resume that run: run.dir={owner}"
    )


def _is_same_folder(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()


# ---------------------------------------------------------------------------------------------------------------
# Keys, before they have types

_PARTS_OF_MODEL_PATH = ("train.init_from", "data.tokenizer")
"""Keys whose values follow from `model.path`, which a run of a native recipe does not store."""


def fetched_models(keys: Keys, resolution: Resolution) -> Keys:
    """Replace the names of Hub models with their folders in the cache, and .gguf files with their converted folders.

    Runs before the passes that read these folders.  The run stores the models' names, pinned to a commit: a resumed run
    keeps the commit that it started with, even if the branch has moved on.  For a configuration stored in a checkpoint,
    models are only looked up in the cache.

    Raises UserError if a model cannot be fetched or converted.
    """
    requested = {**keys.values, **keys.assignments}
    texts = {key: requested[key] for key in MODEL_KEYS if isinstance(requested.get(key), str)}
    to_fetch = {
        key: text for key, text in texts.items() if hub.parse_name(text) is not None or gguf_model.is_gguf(text)
    }
    if not to_fetch:
        return keys
    names = {key: name for key, text in texts.items() if (name := hub.parse_name(text)) is not None}
    stored = {} if resolution.is_stored else _stored_config(keys, resolution)
    kept_commits = hub.commits_of_run(stored, names, {"model.path": _PARTS_OF_MODEL_PATH})
    values, assignments = dict(keys.values), dict(keys.assignments)
    for key, text in to_fetch.items():
        fetched = _fetched(key, text, kept_commits.get(key), resolution)
        (assignments if key in assignments else values)[key] = fetched
        resolution.origins[key] = (
            f"{resolution.origins.get(key) or ('command line' if key in assignments else '')}: {text}"
        )
    return Keys(values, assignments)


def _fetched(key: str, text: str, kept_commit: str | None, resolution: Resolution) -> str:
    """Return the local path of the model files that `text`, the value of `key`, names.

    kept_commit: the commit with which the resumed run began, if any.
    """
    name, path = hub.parse_name(text), Path(text)
    if name is not None:
        if name.kind == "dataset":
            rule = "names a data set, not a model"
            raise setting_error(key, text, rule, fix=f"give it as data.path={text}")
        # All small files of a repository are fetched together; the tokenizer's path in it is appended below.
        to_fetch = replace(name, path="") if key == "data.tokenizer" and not name.path.endswith(".gguf") else name
        if resolution.is_stored:
            return str(hub.cached_path(name) or text)
        if kept_commit is not None:
            resolution.notes.append(f"{key}={text}: this run stays with commit {kept_commit[:12]}, which it began with")
        with_weights = resolution.needs_weights and key != "data.tokenizer"
        path = hub.fetch_model(to_fetch, key, kept_commit, with_weights)
        path = path / name.path if to_fetch != name else path
    if resolution.is_stored or not gguf_model.is_gguf(str(path)):
        return str(path)
    return str(gguf_model.convert(path, key, with_weights=resolution.needs_weights and key != "data.tokenizer"))


def _stored_config(keys: Keys, resolution: Resolution) -> Mapping[str, Any]:
    """Return the configuration of the run that this one resumes; empty for a new run."""
    requested = {**keys.values, **keys.assignments}
    start = str(requested.get("checkpoint.resume", "auto"))
    if start == "none":
        return {}
    if start != "auto":
        return read_run_config(locate(start).folder)
    name = str(requested.get("run.name") or resolution.path.stem)
    starts_another_run = bool(resolution.assignments.get("run.name")) and not resolution.assignments.get("run.dir")
    folder = "" if starts_another_run else str(requested.get("run.dir") or "")
    return read_run_config(Path(folder or default_folder(name)))


def steps_or_epochs(keys: Keys, resolution: Resolution) -> Keys:
    """Drop the file's `train.steps` or `train.epochs` if the command line sets the other.

    Runs before the files and the command line are merged, because both keys would then be set.  Raises UserError if the
    command line sets both, or if the files do.
    """
    steps, epochs, values, assignments = "train.steps", "train.epochs", keys.values, keys.assignments
    if steps in assignments and assignments.get(epochs, "null") != "null":
        rule = f"{steps}={assignments[steps]} is also given; use only one of them"
        raise setting_error(epochs, assignments[epochs], rule)
    if steps in assignments or epochs in assignments:
        dropped = epochs if steps in assignments else steps
        remaining = {key: value for key, value in values.items() if key != dropped or assignments.get(epochs) == "null"}
        return Keys(remaining, assignments)
    if steps in values and values.get(epochs) is not None:
        raise setting_error(epochs, values[epochs], f"{steps}={values[steps]} is also set there; use only one of them")
    return keys


def objective_name(keys: Keys) -> str:
    """Return the value of `train.objective`, which determines the keys of the section `objective`."""
    return str(keys.assignments.get("train.objective", keys.values.get("train.objective", "tokens")))


def objective_section(keys: Keys, resolution: Resolution) -> Keys:
    """Drop the file's objective settings if the command line selects another objective than the file."""
    if objective_name(keys) == objective_name(Keys(keys.values, {})):
        return keys
    values = {key: value for key, value in keys.values.items() if not key.startswith("objective.")}
    return Keys(values, keys.assignments)


_GENERIC_KEYS = ("model.path", "model.fresh")
"""Keys of the generic recipe `hf` that native recipes do not need."""


def auto_model(keys: Keys, resolution: Resolution) -> Keys:
    """Replace `model.name=auto` with the name of the recipe that builds the model in a Hugging Face folder.

    Runs before values get their types, because the recipe declares the types of the model keys.  A native recipe is
    used if it builds the model that config.json describes and declares every `model.` key that is set; otherwise the
    generic recipe `hf` is used.  Raises UserError if no folder is given.
    """
    values, assignments = keys.values, keys.assignments
    if assignments.get("model.name", values.get("model.name")) != AUTO:
        return keys
    # A recipe file that names another model sets that model's fields.
    file_has_auto = values.get("model.name") == AUTO
    file_keys = {key: value for key, value in values.items() if file_has_auto or not key.startswith("model.")}
    requested = {**file_keys, **assignments}
    init_from = requested.get("train.init_from")
    init_from_path = None if init_from in (None, "null", "~", "") else str(init_from)
    folder = requested.get("model.path") or (
        init_from_path if init_from_path is not None and locate(init_from_path).kind == "huggingface" else None
    )
    if not folder:
        rule = "model.name=auto needs a Hugging Face model folder"
        raise setting_error("model.path", None, rule, proposal="models/Qwen3-8B")
    folder = str(Path(str(folder).removeprefix("file://")).expanduser().absolute())
    native = find_native(folder, "model.path")
    model_keys = {key for key in requested if key.startswith("model.") and key != "model.name"}
    fields = {f"model.{f.name}" for f in dataclasses.fields(native[0].config)} if native else set()
    command_keys = {key: text for key, text in assignments.items() if key != "model.name"}
    if native is None or not model_keys - set(_GENERIC_KEYS) <= fields:
        return Keys(file_keys | {"model.name": find_model("hf").name, "model.path": folder}, command_keys)
    recipe, config = native
    resolved = {key: value for key, value in file_keys.items() if key not in _GENERIC_KEYS}
    declared = {f"model.{field.name}": getattr(config, field.name) for field in dataclasses.fields(config)}
    resolved |= declared | {"model.name": recipe.name}
    resolution.origins.update(
        dict.fromkeys(declared.keys() - {"model.name"}, display_path(Path(folder) / "config.json"))
    )
    command_keys = {key: text for key, text in command_keys.items() if key not in _GENERIC_KEYS}
    fresh = requested.get("model.fresh")
    if init_from_path is not None:
        if parse_bool(fresh):
            rule = f"asks for random weights, but train.init_from={init_from_path} names the weights to start from"
            raise setting_error("model.fresh", True, rule, fix="leave out one of the two")
    elif not parse_bool(fresh):
        # A folder with only config.json can define a model to train from scratch, but not one to fine-tune.
        is_new_model = fresh is None and has_config_only(folder) and not is_fine_tuning(requested)
        if not is_new_model:
            resolved["train.init_from"] = folder
            resolution.origins["train.init_from"] = "auto model: the weights in its folder"
            command_keys.pop("train.init_from", None)
    if command_keys.get("data.tokenizer", resolved.get("data.tokenizer")) == MODEL:
        resolved["data.tokenizer"] = folder  # without initial weights, no other key names the model's folder
        command_keys.pop("data.tokenizer", None)
    return Keys(resolved, command_keys)


def another_model(keys: Keys, resolution: Resolution) -> Keys:
    """Drop the files' model fields if the command line names a different model, which may not have these fields.

    Runs after `auto_model`, which may set the model's name.
    """
    file_model = keys.values.get("model.name")
    if keys.assignments.get("model.name", file_model) == file_model:
        return keys
    return Keys({key: value for key, value in keys.values.items() if not key.startswith("model.")}, keys.assignments)


def model_of_weights(tree: Any, resolution: Resolution) -> Any:
    """Set the model fields that come with the initial weights, and record them in `resolution.declared`.

    Fields set on the command line keep their values, and so do free fields set in a file.  Runs before references such
    as ${model.dim} are resolved, so that they refer to the new values.
    """
    source, recipe = tree.train.init_from, find_model(str(tree.model.name))
    if source is None:
        return tree
    location = locate(source)
    if location.kind == "huggingface":
        resolution.declared = read_declared_model(source, recipe, "train.init_from")
    else:
        stored = location.folder / CONFIG  # of a run or of a checkpoint
        try:
            if stored.is_file():
                resolution.declared = declared_model(stored.read_text(), recipe.name, str(stored))
        except OSError as error:
            rule = f"{stored.name} cannot be read ({error.strerror})"
            raise setting_error("train.init_from", source, rule) from error
    if resolution.declared is not None:
        legal, free = declared_keys(recipe.config), free_fields(recipe.config, tree.checkpoint.allow_changes)
        for name, value in resolution.declared.fields.items():
            key, where = f"model.{name}", resolution.declared.where
            is_set = key in resolution.untyped.assignments or (name in free and key in resolution.untyped.values)
            if key in legal and not is_set:
                assign(tree, legal, key, value, f" (in {where})")
                resolution.origins[key] = display_path(Path(where))
    return tree


# ---------------------------------------------------------------------------------------------------------------
# The typed configuration: values that follow from other settings and from files.  The run stores these values, so that
# its data and dtypes cannot change when it is resumed.


def recipe_fields(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Let the recipe compute the model fields that follow from others (`ModelSpec.resolve`).

    The first pass over the RunConfig, because other passes depend on these fields, for example on the model's width.
    """
    model = config.model if config.spec.resolve is None else config.spec.resolve(config.model)
    return replace(config, model=model)


def run_name(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Fill in the default name and folder of the run, on which all other folders depend.

    A name on the command line starts another run, and the folder in the recipe file is then ignored.
    """
    name = config.run.name or resolution.path.stem
    starts_another_run = bool(resolution.assignments.get("run.name")) and not resolution.assignments.get("run.dir")
    folder = "" if starts_another_run else config.run.dir
    return replace(config, run=replace(config.run, name=name, dir=folder or default_folder(name)))


def default_folder(name: str) -> str:
    """Return the default folder of a run with this name."""
    return f"runs/{name}"


def data_source(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Set `data.source=tokens` if the command line, or else the file, gives `data.path` without a source.

    Runs before all passes that depend on the source.
    """
    data = config.data
    has_source = "data.source" in (resolution.assignments if "data.path" in resolution.assignments else resolution.keys)
    if not data.path or has_source or data.source not in ("stdlib", "synthetic"):
        return config
    return replace(config, data=replace(data, source="tokens"))


_RANGE_STEPS = 100
"""Steps of a learning-rate range test, unless the command line sets their number."""


def range_test(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Shorten a learning-rate range test that the command line requests, and make it always start over.

    Runs before `holdout`, which depends on whether there are evaluations.
    """
    if config.schedule.name != "range" or "schedule.name" not in resolution.assignments:
        return config
    if resolution.assignments.keys().isdisjoint(("train.steps", "train.epochs")):
        config = replace(config, train=replace(config.train, steps=_RANGE_STEPS, epochs=None))
    log, checkpoint = config.log, config.checkpoint
    if "eval.every" not in resolution.assignments:
        config = replace(config, eval=replace(config.eval, every=0, patience=0))
        checkpoint = replace(checkpoint, keep_best=0)
        log = replace(log, prompts=())
    if "log.sample_tokens" not in resolution.assignments:
        log = replace(log, sample_tokens=0)  # the model has diverged by then
    if "checkpoint.resume" not in resolution.assignments:
        checkpoint = replace(checkpoint, resume="none")
    return replace(config, log=log, checkpoint=checkpoint)


def holdout(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Hold out 1% of the data for evaluation if `data.holdout` is unset and there is nothing else to evaluate on."""
    data = config.data
    if data.holdout is not None:
        return config
    evaluates = data.source in ("tokens", "chat") and config.eval.every > 0 and data.eval_path is None
    if not evaluates:
        resolution.origins["data.holdout"] = "holdout: no evaluation needs it"
    return replace(config, data=replace(data, holdout=0.01 if evaluates else 0.0))


def tokenizer_file(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Replace `data.tokenizer=model`, or a folder, with the absolute path of the tokenizer.json.

    A resumed run thus finds the same file from any working directory.
    """
    tokenizer, source = config.data.tokenizer, config.train.init_from
    if tokenizer == MODEL:  # the Hugging Face folder of the model, or of its initial weights
        tokenizer = config.model_path or (
            source if source is not None and locate(source).kind == "huggingface" else MODEL
        )
    if tokenizer != MODEL and (Path(tokenizer).expanduser() / "tokenizer.json").is_file():
        tokenizer = str((Path(tokenizer).expanduser() / "tokenizer.json").absolute())
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def chat_packing(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Pack conversations without cutting them or letting them attend to each other.  Runs after `data_source`."""
    data = config.data
    if data.source == "chat" and data.arrangement != "apart":
        data = replace(data, documents="masked", fit="best")
    elif data.source == "chat" and "data.fit" not in resolution.assignments:
        data = replace(data, fit="cut")  # reset the value of a run whose conversations were packed
    return replace(config, data=data)


def objective_data(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Select what the objective needs from chat records: their labels, and the position to score.

    Runs after `data_source`.  For an objective with labels and two rows per sample (KTO), each prompt is also paired
    with the response to another prompt.
    """
    data, objective = config.data, config.objective
    if data.source != "chat":
        return config
    labels: Literal["none", "read", "mismatched"] = "none"
    if "labels" in objective.needs:
        labels = "mismatched" if objective.rows_per_sample == 2 else "read"
    train_on = data.train_on
    if "scores" in objective.needs:
        train_on = "end"
    elif train_on == "end":
        train_on = "assistant"
    if train_on != data.train_on and "data.train_on" in resolution.assignments:
        trained = "scores the end of a text" if train_on == "end" else "does not score texts at their end"
        rule = f"train.objective={config.train.objective} {trained}"
        raise setting_error("data.train_on", data.train_on, rule, train_on)
    return replace(config, data=replace(data, labels=labels, train_on=train_on))


def chat_length(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Limit the sequence length for chats to the maximum that the model supports.

    A length on the command line is used unchanged.  It also turns off `data.trim_rows`, which would shorten sequences,
    unless the command line sets that too.
    """
    data, max_len = config.data, getattr(config.model, "max_seq_len", None)
    if "data.seq_len" not in resolution.assignments:
        if data.source == "chat" and max_len is not None:
            data = replace(data, seq_len=min(data.seq_len, max_len))
    elif "data.trim_rows" not in resolution.assignments:
        data = replace(data, trim_rows=False)
    return replace(config, data=data)


def scaled_lr(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Scale the learning rate of a recipe that fine-tunes models of any width (`optim.lr_by_width`).

    Runs after `recipe_fields`, which sets the width.  The exponent was fitted to Llama models; for Qwen models the
    source gives a rate that hardly falls with width.

    Source: Thinking Machines Lab, Tinker documentation, "Hyperparameters of supervised learning"; the factor of ten for
    adapters is from Schulman et al. 2025, "LoRA Without Regret".
    """
    optim, width = config.optim, getattr(config.model, "dim", None)
    if not optim.lr_by_width:
        return config
    if "optim.lr" in resolution.assignments and "optim.lr_by_width" not in resolution.assignments:
        return replace(config, optim=replace(optim, lr_by_width=False))
    if not width:
        rule = f"model.name={config.model.name} does not declare its width"
        raise setting_error("optim.lr_by_width", True, rule, fix="give optim.lr")
    scaled = optim.lr * (2000 / width) ** 0.78 * (10 if config.lora.rank else 1)
    formula = f"{optim.lr:g} x (2000 / {width}) ** 0.78" + (" x 10 for adapters" if config.lora.rank else "")
    origin = resolution.origins.get("optim.lr", "default")
    if origin != resolution.origins.get("optim.lr_by_width") and "optim.lr_by_width" not in resolution.assignments:
        # The rate and the setting that scales it come from different files.
        fix = "set optim.lr_by_width=false to use it unscaled"
        resolution.notes.append(f"optim.lr={optim.lr:g} ({origin}) is scaled by the model's width: {formula}; {fix}")
    resolution.origins["optim.lr"] = f"scaled lr: {formula} ({origin})"
    return replace(config, optim=replace(optim, lr=float(f"{scaled:.2e}"), lr_by_width=False))


def explain_base_model(config: RunConfig, resolution: Resolution) -> RunConfig:
    """For `--why`, explain how much wider the model is than `optim.base_model`.  Changes no setting."""
    base = config.optim.base_model or {}
    growth = {name: getattr(config.model, name, 0) / value for name, value in base.items() if value}
    if growth and "optim.base_model" in resolution.origins:
        factors = ", ".join(f"{factor:.4g} x {name}" for name, factor in growth.items())
        resolution.origins["optim.base_model"] += f"; this model has {factors}"
    return config


_SMALL_WIDTH = 512
"""Models narrower than this count as small; they typically have a few million parameters."""


def small_model_steps(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Reset `train.small_model_steps` unless the model is small and the number of epochs comes from the recipe."""
    train, width = config.train, getattr(config.model, "dim", None)
    keeps_steps = "train.epochs" not in resolution.assignments or "train.small_model_steps" in resolution.assignments
    if train.epochs is not None and keeps_steps and width is not None and width < _SMALL_WIDTH:
        return config
    return replace(config, train=replace(train, small_model_steps=0))


def compute_dtype(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Resolve `fsdp.param_dtype=auto`: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slow."""
    if config.fsdp.param_dtype != AUTO:
        return config
    has_gpu = likely_device(config.run.device) == "cuda"
    if config.run.device == AUTO:
        resolution.origins["fsdp.param_dtype"] = f"environment: {'a' if has_gpu else 'no'} GPU is visible here"
    return replace(config, fsdp=replace(config.fsdp, param_dtype="bfloat16" if has_gpu else "float32"))


def adapter_base_dtype(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Resolve `lora.base_dtype`: bfloat16 if the frozen weights are stored as bfloat16, else `train.weights_dtype`."""
    lora, source = config.lora, config.train.init_from or config.model_path
    if not lora.rank or lora.base_dtype is not None:
        return config
    is_bfloat16 = source is not None and stored_dtype(source) == "bfloat16"
    return replace(config, lora=replace(lora, base_dtype="bfloat16" if is_bfloat16 else config.train.weights_dtype))


def readable_weights(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Refuse initial weights that cannot be read.  Changes no setting.

    Runs before `tokenizer_of_weights`, which would only report that their tokenizer is missing.
    """
    if resolution.needs_weights:
        check_initial_weights(config, resolution.keys)
    return config


def tokenizer_of_weights(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Use the tokenizer of the initial weights, unless `data.tokenizer` is given.  A run that resumes keeps its own.

    Runs after `tokenizer_file`, which makes `data.tokenizer` a path.  Raises UserError if the given tokenizer differs
    from the weights' own, or if none is given and the weights' own cannot be read: token ids would then not mean what
    they meant when the weights were trained.  `checkpoint.allow_changes=[data.tokenizer]` permits another tokenizer.
    """
    key, data, is_given = "data.tokenizer", config.data, "data.tokenizer" in resolution.keys
    if data.source == "synthetic":
        return config
    weights_tokenizer = find_weights_tokenizer(config)
    if is_given and data.tokenizer != MODEL:
        if weights_tokenizer is not None and not allows_other_tokenizer(config) and not will_resume(config):
            check_same_tokenizer(data.tokenizer, weights_tokenizer)
        return config
    if weights_tokenizer is None:
        if not is_given and not will_resume(config):
            check_readable_tokenizer(config)
        return config
    previous = section_of(read_run_config(config.run_dir), "data").get("tokenizer") if will_resume(config) else None
    if previous == "bytes" and not is_given:
        weights_tokenizer = "bytes"
        resolution.origins[key] = display_path(config.run_dir / CONFIG)
    return replace(config, data=replace(data, tokenizer=weights_tokenizer))


def range_test_folder(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Give a range test its own run folder and checkpoint folder.

    Both have the names of the tested run's folders with `-lr` appended, so that the files of that run are untouched.
    This is the last pass of `load_config`, because earlier passes read the run's folder.
    """
    if config.schedule.name != "range":
        return config
    run, checkpoint = config.run, config.checkpoint
    while (stored := read_run_config(Path(run.dir))) or run is config.run:
        if section_of(stored, "schedule").get("name") == "range":
            break
        run = replace(run, name=f"{run.name}-lr", dir=f"{run.dir.rstrip('/')}-lr")
    stored_dir = section_of(stored, "checkpoint").get("dir")
    if checkpoint.dir is not None and stored_dir not in (checkpoint.dir, str(Path(checkpoint.dir).absolute())):
        checkpoint = replace(checkpoint, dir=f"{checkpoint.dir.rstrip('/')}-lr")
    return replace(config, run=run, checkpoint=checkpoint)


# ---------------------------------------------------------------------------------------------------------------
# When a run starts


def free_name(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Choose a folder in which the run can start, and add a note for the user if it is not the default folder.

    The default folder is used unless it holds a finished run that cannot be resumed with these settings.  In that case,
    the first suitable folder of NAME-2, NAME-3, ... is used.  Nothing is changed if the command line or the recipe file
    sets the run's name or folder, or if the command line sets `checkpoint.resume` or `checkpoint.dir`.  All ranks and
    all restarts get the same result.  A printed configuration is not affected, so it does not depend on earlier runs.
    """
    default_name = resolution.path.stem
    is_unnamed = config.run.name == default_name and config.run.dir == default_folder(default_name)
    if not is_unnamed or resolution.assignments.keys() & {"run.name", "run.dir", "checkpoint.resume", "checkpoint.dir"}:
        return config
    differences = _differences_from_finished_run(config)
    if not differences:
        return config
    for number in itertools.count(2):
        name = f"{config.run.name}-{number}"
        candidate = replace(config, run=replace(config.run, name=name, dir=default_folder(name)))
        if not _differences_from_finished_run(candidate):
            break
    more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
    reason = f"{config.run.dir} is finished, with another configuration ({'; '.join(differences[:2])}{more})"
    resolution.notes.append(f"{reason}, so this run uses {candidate.run.dir}")
    return candidate


def _differences_from_finished_run(config: RunConfig) -> list[str]:
    """Return the differences that keep `config` from resuming a finished run in its folder, or an empty list."""
    folder = Path(config.run.dir)
    try:
        status = json.loads((folder / "status.json").read_text())
        if status.get("state") != "finished":
            return []
        refused, _ = compare_configs(config, (folder / CONFIG).read_text())
    except (OSError, ValueError, AttributeError, UserError):
        return []  # reported when the run starts
    return [line.replace(" in the checkpoint,", " there,") for line in refused]


def context_method(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Resolve `mesh.context_method=auto`, given the number of ranks on a node.

    Runs before the pass `auto`, whose plans need the method, and again after it, since it may choose `mesh.context`.
    """
    assert resolution.world is not None
    return resolve_context_method(config, resolution.world.env.local_world_size)


def expert_method(config: RunConfig, resolution: Resolution) -> RunConfig:
    """Resolve `mesh.expert_method=auto`, given the number of ranks on a node.  Runs when `context_method` does."""
    assert resolution.world is not None
    return resolve_expert_method(config, resolution.world.env.local_world_size)


# ---------------------------------------------------------------------------------------------------------------
# The list of passes, and how they are run


@dataclass(frozen=True)
class Pass:
    """One pass: its name, its function, the stage at which it runs, and the reason that `--why` gives for a change."""

    name: str
    function: Any
    """`function(config, resolution) -> config`; or "package.module:function" if imported only when needed."""
    stage: Stage
    reason: str
    for_stored: bool = False
    """Whether the pass also applies to a configuration that is stored in a checkpoint."""


PASSES = (
    Pass("inherit", inherit, "files", "a parent of the recipe file"),
    Pass("run paths", run_paths, "files", "where the run is now"),
    Pass("steps or epochs", steps_or_epochs, "keys", "the command line sets the other", for_stored=True),
    Pass("objective section", objective_section, "keys", "the objective that is trained for", for_stored=True),
    Pass("fetched models", fetched_models, "keys", "where the files are on this machine", for_stored=True),
    Pass("auto model", auto_model, "keys", "builds the model in the folder"),
    Pass("another model", another_model, "keys", "the command line names another", for_stored=True),
    Pass("model of weights", model_of_weights, "tree", "the initial weights belong to it"),
    Pass("recipe fields", recipe_fields, "config", "follows from other model fields"),
    Pass("run name", run_name, "config", "the recipe's, in the folder runs/NAME", for_stored=True),
    Pass("data source", data_source, "config", "data.path is given", for_stored=True),
    Pass("pinned data", "trainer.data.hub_data:pin_data", "config", "what the name means today"),
    Pass("range test", range_test, "config", "schedule.name=range is a short test", for_stored=True),
    Pass("holdout", holdout, "config", "for eval.every, as data.eval_path is not set", for_stored=True),
    Pass("tokenizer file", tokenizer_file, "config", "the file in the folder that is named", for_stored=True),
    Pass("chat packing", chat_packing, "config", "conversations do not attend to each other", for_stored=True),
    Pass("objective data", objective_data, "config", "train.objective needs it", for_stored=True),
    Pass("chat length", chat_length, "config", "the model's longest sequence", for_stored=True),
    Pass("scaled lr", scaled_lr, "config", "suits the width of the model", for_stored=True),
    Pass("base model", explain_base_model, "config", "explains how much wider this model is"),
    Pass("small model steps", small_model_steps, "config", "only for small models", for_stored=True),
    Pass("compute dtype", compute_dtype, "config", "suits run.device", for_stored=True),
    Pass("adapter base dtype", adapter_base_dtype, "config", "as the weights are stored", for_stored=True),
    Pass("readable weights", readable_weights, "config", "checks the initial weights"),
    Pass("tokenizer of weights", tokenizer_of_weights, "config", "comes with the initial weights"),
    Pass("range test folder", range_test_folder, "config", "separate from the run that it tests"),
    Pass("free name", free_name, "start", "the folder holds another finished run"),
    Pass("trim rows", "trainer.data.opening:trim_rows", "data", "the longest conversation"),
    Pass("epochs", "trainer.data.opening:epochs_to_steps", "data", "train.epochs passes over the data"),
    Pass("context method", context_method, "device", "suits the heads and nodes"),
    Pass("expert method", expert_method, "device", "suits the experts and nodes"),
    Pass("auto", "trainer.plan.forecast:choose_auto", "device", "the planner's choice for this memory"),
    Pass("context method", context_method, "device", "suits the mesh.context that the planner chose"),
    Pass("expert method", expert_method, "device", "suits the mesh.expert that the planner chose"),
)
"""All passes, in order.  The passes that need the data or the device come last, and run once these are available."""


def run_passes(stage: Stage, config: ConfigType, resolution: Resolution) -> ConfigType:
    """Run the passes of one stage in their order, and return the configuration.

    A pass that changes the value of a key becomes the key's origin, unless it records a more precise origin itself.
    """
    before = dict(_flat(config))
    for each_pass in PASSES:
        if each_pass.stage != stage or (resolution.is_stored and not each_pass.for_stored):
            continue
        previous_origins = dict(resolution.origins)
        function = each_pass.function
        if isinstance(function, str):
            function = import_object(function, each_pass.name)
        config = function(config, resolution)
        after = dict(_flat(config))
        for key in before.keys() | after.keys():
            if key not in after:
                resolution.origins.pop(key, None)
            elif (key not in before or before[key] != after[key]) and resolution.origins.get(
                key
            ) == previous_origins.get(key):
                user_origin = previous_origins.get(key, "")  # the origins that passes record contain ": "
                previous_origin = f" (was: {user_origin})" if user_origin and ": " not in user_origin else ""
                resolution.origins[key] = f"{each_pass.name}: {each_pass.reason}{previous_origin}"
        before = after
    return config


def _flat(config: object) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration in the form of any stage; nothing for `tree`."""
    if isinstance(config, Keys):
        yield from config.values.items()
    elif isinstance(config, RunConfig):
        for section in dataclasses.fields(config):
            owner = getattr(config, section.name)
            for item in dataclasses.fields(owner):
                yield from _leaves(f"{section.name}.{item.name}", getattr(owner, item.name))
    elif isinstance(config, dict):
        for name, values in config.items():
            if isinstance(values, Mapping):
                for key, value in values.items():
                    yield from _leaves(f"{name}.{key}", value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in SUBSECTIONS:
        items = value if isinstance(value, Mapping) else vars(value)
        yield from ((f"{key}.{name}", item) for name, item in items.items())
    else:
        yield key, value
