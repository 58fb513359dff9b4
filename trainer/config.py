"""The configuration: one typed, frozen tree, and the rules that its values obey.

Defaults < recipe YAML < command line.  OmegaConf stops at this door: the other rooms see plain frozen dataclasses.
Imports no torch, so that `--help` is quick and a mistake is reported before anything is spawned.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.errors import UserError, choice_error, nearest, setting_error
from trainer.pretrained import Told, free_fields, is_folder_of_weights, told_by_folder
from trainer.printable import is_masked, masked
from trainer.recipe import Recipe, check_number, declare, find_recipe, load_recipes
from trainer.relocate import CONFIG, settle

WEEK_S = 7 * 24 * 3600.0
"""The longest time limit: what waits for ranks counts milliseconds in 32 bits, and three of these."""

MAX_SIZE = 2**31 - 1
"""The largest count of what becomes a size of a tensor."""

_DTYPES = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "torch.float32"), "float32"),
}
"""What dtypes are called elsewhere."""

AUTO = "auto"
"""The value of the keys that the planner settles, before anything is built."""


@dataclass(frozen=True)
class RunSection:
    """Which run this is."""

    name: str = declare("", "name of the run; empty: the recipe's name")
    dir: str = declare("", "folder of the run; empty: runs/<name>")
    seed: int = declare(0, "seed of the initial weights and of everything random in training", at_least=0)
    device: Literal["auto", "cpu", "cuda"] = declare(
        "auto",
        "where to train; auto: cuda where there is a GPU",
        aliases=dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "cuda:0"), "cuda"),
    )
    threads: int = declare(
        0, "CPU threads of each rank; 0: an equal share of this process's cores", at_least=0, at_most=1024
    )
    timeout_s: float = declare(600.0, "seconds after which a collective counts as failed", above=0, at_most=WEEK_S)
    step_timeout_s: float = declare(
        0.0,
        "seconds without progress in an update: the run ends, naming the rank; 0: timeout_s / 2",
        at_least=0,
        at_most=WEEK_S,
    )
    first_step_timeout_s: float = declare(
        0.0,
        "the same for the first update, and a batch of an evaluation; 0: 3 x timeout_s",
        at_least=0,
        at_most=WEEK_S,
    )
    memory_gib: float | None = declare(
        None, "memory of a device, which the planner's auto may use; null: what it has", above=0
    )
    selfcheck: bool = declare(
        True, "before the first update, see on all ranks that sharding, replicas, data and code are as they should be"
    )
    deadline: str | None = declare(
        None, "when to be through with stopping, as 2026-01-31T18:00 (local) or with +01:00; null: the Slurm job's end"
    )

    @property
    def first_step_limit_s(self) -> float:
        return self.first_step_timeout_s or 3 * self.timeout_s

    @property
    def step_limit_s(self) -> float:
        return self.step_timeout_s or self.timeout_s / 2


@dataclass(frozen=True)
class MeshSection:
    """How the ranks are arranged: `replicate` x `shard` (HSDP), or only `shard` where replicate is 1."""

    replicate: int = declare(1, "number of replicas of the sharded model; -1: all remaining ranks")
    shard: int | str = declare(-1, "ranks that share one copy; -1: all remaining ranks; node: the ranks of one node")


@dataclass(frozen=True)
class FsdpSection:
    """How the model is sharded (torch.distributed.fsdp.fully_shard)."""

    wrap: str = declare("block", "units: block (the recipe's), size:<parameters>, or package.module:function")
    reshard_after_forward: int | str | list[int | str] = declare(
        "default",
        "default (units reshard, root does not), always, never, a number of ranks to reshard to, a list with one of "
        "always, never, a number for each unit in the order of the forward pass, or auto (the planner's choice)",
        aliases={"true": "always", "false": "never"},
    )
    param_dtype: Literal["float32", "bfloat16"] = declare(
        "float32", "dtype of unsharded parameters and of compute", aliases=_DTYPES
    )
    reduce_dtype: Literal["float32", "bfloat16"] = declare(
        "float32", "dtype in which gradients are reduced", aliases=_DTYPES
    )
    output_dtype: Literal["float32", "bfloat16"] | None = declare(
        None, "dtype of the outputs; null: as computed", aliases=_DTYPES
    )
    accumulate: Literal["unsharded", "sharded"] = declare(
        "unsharded",
        "gradients between micro-batches: unsharded are reduced once an update; sharded after each micro-batch, which "
        "takes no memory for a whole model's gradients",
    )
    reshard_after_backward: bool = declare(
        True, "free gathered parameters after each micro-batch's backward; false: keep them until the update's last"
    )
    cpu_offload: bool = declare(False, "keep parameters, gradients and optimizer state in host memory")
    prefetch_forward: int = declare(0, "units gathered ahead in forward; 0: FSDP's own overlap", at_least=0)
    prefetch_backward: int = declare(0, "units gathered ahead in backward; 0: FSDP's own overlap (one)", at_least=0)


@dataclass(frozen=True)
class DataSection:
    """What the model is trained on."""

    source: Literal["stdlib", "synthetic", "tokens"] = declare(
        "stdlib", "stdlib: this Python's own source text; synthetic: generated; tokens: shards from trainer.prepare"
    )
    path: str | None = declare(None, "source=tokens: a token shard or a glob of several")
    eval_path: str | None = declare(None, "source=tokens: a shard or glob to evaluate on")
    holdout: float | None = declare(
        None,
        "source=tokens without eval_path: share of the samples, the last, kept for evaluation; null: 0.01 with "
        "eval.every, else 0",
        at_least=0,
        below=1,
    )
    seq_len: int = declare(256, "tokens of one sequence", at_least=1, at_most=MAX_SIZE)
    tokenizer: str = declare("bytes", "bytes, or the path of a Hugging Face tokenizer.json")
    pack: bool = declare(True, "true: sequences run across documents; false: one document a sequence, the rest ignored")
    num_workers: int = declare(
        0, "processes that prepare batches on each rank; 0: the rank itself", at_least=0, at_most=256
    )
    seed: int = declare(0, "seed of the order of the samples", at_least=0)
    cache_dir: str | None = declare(None, "where tokenized text is kept; null: the user's cache folder")


@dataclass(frozen=True)
class OptimSection:
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = declare("adamw", "muon: torch's, for matrices; AdamW for the rest")
    lr: float = declare(3e-4, "peak learning rate", at_least=0)
    betas: tuple[float, float] = declare((0.9, 0.95), "decay rates of AdamW's two averages", at_least=0, below=1)
    eps: float = declare(1e-8, "AdamW's epsilon", above=0)
    momentum: float = declare(0.95, "momentum of sgd and muon", at_least=0, below=1)
    weight_decay: float = declare(0.1, "decoupled weight decay", at_least=0)
    decay_all: bool = declare(False, "decay norms, biases and embeddings too")
    state_dtype: Literal["float32", "bfloat16"] = declare("float32", "dtype of AdamW's two averages", aliases=_DTYPES)
    rounding: Literal["stochastic", "nearest"] = declare(
        "stochastic", "how AdamW rounds bfloat16 weights and averages; nearest loses small updates"
    )
    max_grad_norm: float | None = declare(1.0, "gradients are scaled down to this global norm; null: never", above=0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run: a linear warmup, then the named shape."""

    name: Literal["cosine", "linear", "wsd", "constant"] = declare("cosine", "shape after warmup")
    warmup_steps: int = declare(0, "updates of linear warmup", at_least=0)
    min_lr_ratio: float = declare(0.1, "learning rate at the end, as a share of the peak", at_least=0, at_most=1)
    decay_ratio: float = declare(0.2, "wsd: share of the run that decays, at its end", at_least=0, at_most=1)


@dataclass(frozen=True)
class TrainSection:
    """The training loop."""

    steps: int = declare(1000, "optimizer updates", at_least=0)
    global_batch_size: int = declare(8, "sequences of one update, over all ranks", at_least=1, at_most=MAX_SIZE)
    micro_batch_size: int | str = declare(
        1, "sequences of one forward on one rank; auto: the planner's", at_least=1, at_most=MAX_SIZE
    )
    activation_checkpoint: int | str = declare(
        "none",
        "none, full, selective (keeps matmuls and attention), budget:<share> (keeps of these what costs most, up to "
        "this share of a block's activations), n: every n-th block in full, or auto",
    )
    compile: bool = declare(False, "torch.compile each block")
    float8: Literal["none", "tensorwise", "rowwise"] = declare(
        "none",
        "matrix products of the blocks' linear layers in float8, scaled by the tensor or, finer, by the row; needs "
        "torchao and is fast with train.compile",
    )
    weights_dtype: Literal["float32", "bfloat16"] = declare(
        "float32",
        "dtype in which weights and their gradients are kept, sharded: float32 (master weights), or bfloat16, which "
        "takes half the memory (optim.rounding)",
        aliases=_DTYPES,
    )
    init_from: str | None = declare(
        None, "weights to start from, with a fresh optimizer: a checkpoint, a run.dir, a folder of safetensors, a file"
    )
    max_skipped_updates: int = declare(10, "non-finite updates in a row after which the run fails", at_least=1)


@dataclass(frozen=True)
class EvalSection:
    """Evaluation on held-out data."""

    every: int = declare(0, "updates between evaluations (one more at the end); 0: never", at_least=0)
    steps: int = declare(
        0, "batches of one evaluation, each the size of a global batch; 0: all that is held out", at_least=0
    )

    def due(self, step: int) -> bool:
        """Return whether to evaluate after step `step`."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and resuming."""

    every: int = declare(0, "updates between checkpoints; 0: only at the end", at_least=0)
    mode: Literal["async", "sync"] = declare(
        "async", "async: training waits for a copy in memory, which is written meanwhile; sync: until all is on disk"
    )
    dir: str | None = declare(
        None, "where checkpoints lie: a folder, or a URL (s3://...) of this run alone; null: run.dir"
    )
    keep_last: int = declare(2, "newest checkpoints that are kept; 0: all", at_least=0)
    keep_every: int = declare(0, "checkpoints of every n-th update are kept for good; 0: none", at_least=0)
    timeout_s: float = declare(
        3600.0, "seconds after which a save is stuck: the run ends, naming the rank", above=0, at_most=WEEK_S
    )
    when_busy: Literal["wait", "skip"] = declare("wait", "a save is due while one is in flight: wait for it, or skip")
    max_failures: int = declare(
        10, "failed saves in a row after which the run fails; each is tried again after a pause", at_least=1
    )
    verify: Literal["full", "sizes"] = declare("full", "what is checked before loading: all checksums, or sizes only")
    resume: str = declare("auto", "auto: the newest good checkpoint; none: start anew; or where one is, or a run")
    allow_changes: tuple[str, ...] = declare((), "what may differ from the checkpoint: keys, sections, state.<name>")

    def due(self, step: int) -> bool:
        """Return whether to save after step `step`."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class LogSection:
    """What is reported, and where."""

    every: int = declare(10, "updates between lines", at_least=1)
    wandb: Literal["off", "offline", "online"] = declare(
        "off",
        "Weights & Biases",
        aliases={
            **dict.fromkeys(("true", "yes", "on", "1", "enabled"), "online"),
            **dict.fromkeys(("false", "no", "0", "disabled", "none"), "off"),
        },
    )
    wandb_project: str = declare("meshtrainer", "project in Weights & Biases")
    tensorboard: bool = declare(False, "write TensorBoard events to run.dir/tensorboard")
    sample_tokens: int = declare(0, "tokens of the sample that the model writes at the end; 0: none", at_least=0)
    profile_steps: tuple[int, int] | None = declare(
        None, "first and last update to profile, as [10,13]: a trace for Perfetto in run.dir/profile; null: none"
    )
    profile_ranks: tuple[int, ...] = declare((0,), "ranks that write a profile; rank 0 always does")

    def due(self, step: int) -> bool:
        """Return whether step `step` is written as a line."""
        return step % self.every == 0

    def profiles(self, step: int) -> bool:
        """Return whether step `step` is profiled, on whatever ranks."""
        first, last = self.profile_steps or (0, -1)
        return first <= step <= last


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run is told.  `model` is the recipe's own dataclass, with a `name` beside its fields."""

    run: RunSection = field(default_factory=RunSection)
    model: Any = None
    mesh: MeshSection = field(default_factory=MeshSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.model.name)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir).absolute()

    @property
    def vocab_size(self) -> int | None:
        """Size of the model's vocabulary, or None for a model whose configuration has no such field."""
        return getattr(self.model, "vocab_size", None)

    def on_record(self) -> RunConfig:
        """Return it as a run writes it down: its folders mean the same from wherever it is read."""
        kept = self.checkpoint.dir
        if kept is not None and "://" not in kept:
            kept = str(Path(kept).absolute())
        run = dataclasses.replace(self.run, dir=str(self.run_dir))
        return dataclasses.replace(self, run=run, checkpoint=dataclasses.replace(self.checkpoint, dir=kept))

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain dictionaries, lists and scalars, to be kept: credentials in URLs are masked."""
        plain = OmegaConf.to_container(OmegaConf.create(masked(_lists(dataclasses.asdict(self)))))
        assert isinstance(plain, dict)
        return {str(section): values for section, values in plain.items()}

    def to_yaml(self) -> str:
        """Return the tree as YAML: a valid recipe file, but for credentials in URLs, which are masked."""
        plain = self.to_dict()
        plain["model"] = {"name": self.model.name, **plain["model"]}
        return OmegaConf.to_yaml(OmegaConf.create(plain))


def _lists(tree: Any) -> Any:
    """Return the tree with lists for tuples: YAML has one kind of sequence."""
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


# ---------------------------------------------------------------------------------------------------------------
# Loading


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of `recipe` with `key=value` overrides.

    `recipe` is a name in conf/, a path ending in .yaml, or the folder of a run: its `config.yaml`.  What a run has
    written means that run, where its folder is now, unless `run.dir` or `run.name` is among the overrides.

    The model's fields are those of what `train.init_from` names, where that says what its model is: those of the recipe
    yield to it, and those of `overrides` must agree with it.

    Raises UserError for an unknown recipe or key, a key given twice, a wrong type, or a value outside its limits.
    Rules that need the number of ranks are those of `check_config`.
    """
    path, assignments = find_recipe_file(recipe), _split_overrides(overrides)
    values = read_yaml(path)
    for key, value in _leaves(values, path):
        if key not in assignments and any(is_masked(item) for item in (value if isinstance(value, list) else [value])):
            rule = f"its credentials are not kept (in {path}); give it whole, on the command line"
            raise setting_error(key, value, rule)
    return _build(settle(values, path, assignments), assignments, path, follows=True)


def config_from_yaml(text: str, origin: str = "config.yaml", allow_import: Collection[str] = ()) -> RunConfig:
    """Return the configuration that a checkpoint holds, as `to_yaml` has written it.

    Nothing that it names is imported, but for the modules (and what is in them) of `allow_import`: it may come from
    anywhere.  Raises UserError, as `load_config` does.
    """
    return _build(_read_stored(text, origin), {}, Path(origin), may_import=allow_import)


def _read_stored(text: str, origin: str = "config.yaml") -> dict[str, Any]:
    """Return what a stored configuration holds, by section, as it stands: nothing in it is looked up or imported.

    Credentials that it may still hold, from before they were masked, are masked.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{origin}: is no configuration ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: is no configuration")
    return {str(key): masked(value) for key, value in tree.items()}


def _build(
    tree_of_values: Mapping[str, Any],
    assignments: Mapping[str, str],
    path: Path,
    follows: bool = False,
    may_import: Collection[str] | None = None,
) -> RunConfig:
    """Return the configuration of a tree and assignments; with `follows`, with the model of `train.init_from`.

    Modules that the tree names are imported, or, with `may_import`, those alone.
    """
    values = dict(_leaves(tree_of_values, path))

    name = assignments.get("model.name", values.get("model.name"))
    if name != values.get("model.name"):  # another model: the fields in the recipe file are not its
        values = {key: value for key, value in values.items() if not key.startswith("model.")}
    if name is None:
        load_recipes()
        raise setting_error("model.name", None, f"{path} must name a registered model", example="llama")
    schema = RunConfig(model=find_recipe(str(name), may_import).config)
    tree = OmegaConf.structured(schema)
    for node in (tree, *(tree[f.name] for f in dataclasses.fields(RunConfig))):
        OmegaConf.set_readonly(node, False)

    legal = dict(_declared_keys(schema))
    for key, value in values.items():
        _assign(tree, legal, key, value, f" (in {path})")
    for key, text in assignments.items():
        if key in legal:
            _assign(tree, legal, key, _parse(key, text, legal[key].type), "")
        else:
            _assign(tree, legal, key, text, "")
    try:
        told = _told_by(tree.train.init_from, find_recipe(str(name))) if follows else None
        if told is not None:
            _follow(tree, schema.model, legal, told, values, assignments)
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, RunConfig)
    _check_limits(config)
    if told is not None:
        told.check(config.model, config.checkpoint.allow_changes)
    run_name = config.run.name or path.stem
    # A name on the command line is of another run than the one whose folder the recipe file names.
    is_named = bool(assignments.get("run.name")) and not assignments.get("run.dir")
    folder = "" if is_named else config.run.dir
    run = dataclasses.replace(config.run, name=run_name, dir=folder or f"runs/{run_name}")
    return dataclasses.replace(config, run=run, data=_resolve_holdout(config))


def _told_by(source: str | None, recipe: Recipe) -> Told | None:
    """Return what the source of the first weights says of its model; None if it says nothing, or not yet."""
    if source is None:
        return None
    if is_folder_of_weights(source):
        return told_by_folder(source, recipe, "train.init_from")
    stored = Path(source.removeprefix("file://")) / "config.yaml"  # of a run, or of one checkpoint
    try:
        return told_by_yaml(stored.read_text(), recipe.name, str(stored)) if stored.is_file() else None
    except OSError as error:
        raise setting_error("train.init_from", source, f"{stored.name} cannot be read ({error.strerror})") from error


def told_by_yaml(text: str, name: str, where: str) -> Told | None:
    """Return what a configuration that `to_yaml` has written says of the model; None if it is not of recipe `name`.

    Nothing that it names is imported.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"train.init_from: {where}: is no configuration ({error})") from error
    fields = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(fields, dict) or str(fields.pop("name", None)).rpartition(":")[2] != name:
        return None
    if "${" in str(fields):
        raise UserError(f"train.init_from: {where}: its model section refers to what stands elsewhere")
    return Told(where, {str(field): value for field, value in fields.items()})


def _follow(
    tree: Any,
    model: type,
    legal: Mapping[str, dataclasses.Field[Any]],
    told: Told,
    values: Mapping[str, Any],
    assignments: Mapping[str, str],
) -> None:
    """Let the model's fields be as told, but those given on the command line, and free ones that are given at all."""
    free = free_fields(model, tree.checkpoint.allow_changes)
    for name, value in told.fields.items():
        key = f"model.{name}"
        if key in legal and key not in assignments and not (name in free and key in values):
            _assign(tree, legal, key, value, f" (in {told.where})")


def _resolve_holdout(config: RunConfig) -> DataSection:
    """Settle `data.holdout`, so that it is on record: what is trained on must not change when a run is resumed."""
    data = config.data
    evaluates = data.source == "tokens" and config.eval.every > 0 and data.eval_path is None
    return dataclasses.replace(data, holdout=0.01 if evaluates else 0.0) if data.holdout is None else data


def find_recipe_file(recipe: str) -> Path:
    """Return the YAML file of a recipe, or of a run's folder.  Raises UserError that names the nearest recipe."""
    if recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_dir():
        path = Path(recipe)
        if not path.is_file():
            raise setting_error("recipe", recipe, "no such file", meant=nearest(path.stem, recipe_files()))
        return path
    files = recipe_files()
    if recipe in files:
        return files[recipe]
    if Path(recipe).is_dir() and not (Path(recipe) / CONFIG).is_file():
        raise setting_error("recipe", recipe, f"is a folder, but not of a run: there is no {CONFIG} in it")
    if Path(recipe).is_dir():
        return Path(recipe) / CONFIG
    kinds = "a path ending in .yaml, the folder of a run, or one of"
    if os.sep in recipe:
        raise setting_error("recipe", recipe, f"must be {kinds} {', '.join(sorted(files))}")
    raise choice_error("recipe", recipe, sorted(files), kinds)


def recipe_files() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    folder = Path(str(resources.files("trainer.conf")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def description(path: Path) -> str:
    """Return the first line of a recipe file: what the recipe is for."""
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ").strip()


def declared_keys(model: type | None = None) -> dict[str, dataclasses.Field[Any]]:
    """Return every key that may be set, with its field: type, default, and meaning in `metadata`."""
    return dict(_declared_keys(RunConfig(model=model)))


def _declared_keys(schema: RunConfig) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for section in dataclasses.fields(RunConfig):
        owner = schema.model if section.name == "model" else type(getattr(schema, section.name))
        if owner is None:
            continue
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            item.type = hints[item.name]
            yield f"{section.name}.{item.name}", item


def read_yaml(path: Path) -> dict[str, Any]:
    """Return what a YAML file holds, by section, unchecked.  Raises UserError if it cannot be read."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise setting_error("recipe", path, f"is not valid YAML{line}: {getattr(error, 'problem', error)}") from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise setting_error("recipe", path, f"cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise setting_error("recipe", path, "must hold sections such as `train:` with keys below them")
    return {str(key): value for key, value in tree.items()}


def _leaves(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    sections = [f.name for f in dataclasses.fields(RunConfig)]
    for section, values in tree.items():
        if section not in sections:
            best = nearest(section, sections)
            raise setting_error(section, "...", f"no such section (in {path})", fix=f"write `{best}:`" if best else "")
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise setting_error(section, values, f"a section holds keys, not a value (in {path})")
        for key, value in values.items():
            yield f"{section}.{key}", value


def _split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    assignments: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"{override!r}: an override has the form section.key=value")
        if key in assignments:
            raise setting_error(key, text, f"is given twice (first as {assignments[key]!r}); give it once")
        assignments[key] = text
    return assignments


def _parse(key: str, text: str, hint: Any) -> Any:
    """Return the value of a command-line override: text keys as they stand, all others as in YAML."""
    options = _options(hint)
    if type(None) in options and text in ("null", "~", ""):
        return None
    if all(option is str or typing.get_origin(option) is Literal or option is type(None) for option in options):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index, call-overload]
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise setting_error(key, text, "is not a valid YAML value") from error


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _assign(tree: Any, legal: Mapping[str, dataclasses.Field[Any]], key: str, value: Any, where: str) -> None:
    if key not in legal:
        same_name = [known for known in legal if known.partition(".")[2] == key.rpartition(".")[2]]
        best = same_name[0] if same_name else nearest(key, legal)
        shown = f"{best}={value}" if best else None
        raise UserError(
            f"{key}={value}: no such key{where}" + (f"\n  did you mean {shown}?" if shown else "\n  see --help")
        )
    hint = legal[key].type
    choices = [choice for option in _options(hint) for choice in typing.get_args(option) if isinstance(choice, str)]
    _refuse_resolvers(key, value, where)
    if value is False and "off" in choices:  # YAML 1.1 reads a bare `off` as a boolean
        value = "off"
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        if choices:
            raise choice_error(key, value, choices, aliases=legal[key].metadata.get("aliases")) from error
        rule = f"must be {type_name(hint)}{where}"
        meant = legal[key].metadata.get("aliases", {}).get(str(value).lower())
        if meant is not None:
            raise setting_error(key, value, rule, meant=meant) from error
        raise setting_error(key, value, rule, **_advice_of_type(value, hint, legal[key])) from error


_OTHER_KEY = re.compile(r"(?<!\\)\$\{[\w.\[\]]+\}")
"""The one form of interpolation that there is: the value of another key."""


def _refuse_resolvers(key: str, value: Any, where: str) -> None:
    """Raise UserError for what OmegaConf would compute or read from the environment: a configuration is data."""
    if isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _refuse_resolvers(key, item, where)
    elif isinstance(value, str) and "${" in _OTHER_KEY.sub("", value):
        rule = f"of what begins with ${{ only another key's value, ${{section.key}}, can be used{where}; no resolvers"
        raise setting_error(key, value, rule)


def type_name(hint: Any) -> str:
    """Return the type of a key in words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return f"a list of {'' if Ellipsis in items else f'{len(items)} x '}{type_name(items[0])}"
    options = _options(hint)
    if len(options) > 1:
        return " or ".join(type_name(option) for option in options)
    return names.get(hint, getattr(hint, "__name__", str(hint)))


_SWITCHES = {
    **dict.fromkeys(("y", "t", "1", "enable", "enabled"), True),
    **dict.fromkeys(("n", "f", "0", "disable", "disabled", "none"), False),
}


def _advice_of_type(value: Any, hint: Any, key: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return what `setting_error` is to say of a value that is not of the key's type, by the argument's name."""
    options = _options(hint)
    if int in options and isinstance(value, (float, bool)) and math.isfinite(value):
        return {"legal": max(round(value), key.metadata.get("at_least", -math.inf))}
    if bool in options:
        meant = _SWITCHES.get(str(value).lower(), nearest(value, ("true", "false")))
        return {"meant": bool(value) if isinstance(value, int) else meant}
    default = None if key.default is dataclasses.MISSING else key.default
    for items in (typing.get_args(option) for option in options if typing.get_origin(option) is tuple):
        given = value if isinstance(value, list) else [value]
        numbers = [
            round(n) if items[0] is int else n for n in given if isinstance(n, (int, float)) and abs(n) < math.inf
        ]
        if numbers:
            rest = list(default or numbers[-1:] * len(items))[len(numbers) :]
            return {"legal": numbers if Ellipsis in items else (numbers + rest)[: len(items)]}
    if float in options or int in options:
        digits = "".join(char for char in str(value) if char.isdigit() or char in "+-.e")
        try:
            number = float(digits)
            return {"meant": number if float in options else int(number)}
        except (ValueError, OverflowError):
            return {"example": default}
    return {"example": default}


def _check_limits(config: RunConfig) -> None:
    for key, item in _declared_keys(dataclasses.replace(config, model=type(config.model))):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                check_number(key, value, number, item.metadata)


# ---------------------------------------------------------------------------------------------------------------
# Rules between fields


@dataclass(frozen=True)
class MeshShape:
    """The mesh that a configuration means on a given number of ranks: `replicate` x `shard` data-parallel ranks."""

    replicate: int
    shard: int

    @property
    def is_hybrid(self) -> bool:
        return self.replicate > 1

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def advice(self, local_world_size: int) -> str:
        """Return what is to be said of where the nodes' boundaries are; nothing if they are well placed.

        What is gathered within a node goes over its own links, many times as fast as those between nodes.
        """
        if self.num_ranks == local_world_size or not (self.shard % local_world_size and local_world_size % self.shard):
            return ""
        return (
            f"mesh.shard={self.shard} does not go evenly into nodes of {local_world_size} ranks: some shard groups lie "
            "in one node, some in two, and all wait for the slowest; mesh.shard=node shards within each node"
        )


def find_mesh_shape(mesh: MeshSection, world_size: int, local_world_size: int) -> MeshShape:
    """Return the sizes of the mesh's axes on `world_size` ranks.  Raises UserError for one that cannot be."""
    replicate, shard = mesh.replicate, mesh.shard
    if shard == "node":
        if world_size % local_world_size:
            raise setting_error(
                "mesh.shard", "node", f"{world_size} ranks do not fill nodes of {local_world_size} evenly", -1
            )
        shard = local_world_size
        replicate = -1 if replicate == 1 else replicate
    if not isinstance(shard, int):
        raise setting_error("mesh.shard", shard, "must be a whole number, -1, or node", -1)
    for key, size, other in (("mesh.replicate", replicate, shard), ("mesh.shard", shard, replicate)):
        if size == 0 or size < -1:
            legal = world_size // other if other > 0 and world_size % other == 0 else 1
            raise setting_error(key, size, "must be at least 1, or -1 for all remaining ranks", legal)
    if replicate == -1 and shard == -1:
        raise setting_error("mesh.replicate", -1, "only one axis can take all remaining ranks (mesh.shard=-1)", 1)
    if shard == -1:
        _check_divides("mesh.replicate", replicate, world_size)
        shard = world_size // replicate
    elif replicate == -1:
        _check_divides("mesh.shard", shard, world_size)
        replicate = world_size // shard
    if replicate * shard != world_size:
        key = "mesh.shard" if replicate == 1 or world_size % replicate == 0 else "mesh.replicate"
        value, other = (shard, replicate) if key == "mesh.shard" else (replicate, shard)
        legal = world_size // other if world_size % other == 0 else -1
        rule = f"mesh.replicate x mesh.shard = {replicate} x {shard} is not the number of ranks, {world_size}"
        raise setting_error(key, value, rule, legal)
    return MeshShape(replicate, shard)


def least_mesh(config: RunConfig) -> MeshShape:
    """Return the smallest mesh that a configuration can mean, where the number of ranks is not known."""
    mesh, reshard = config.mesh, config.fsdp.reshard_after_forward
    sizes = [size for size in (reshard if isinstance(reshard, list) else [reshard]) if isinstance(size, int)]
    shard = mesh.shard if isinstance(mesh.shard, int) and mesh.shard > 0 else math.lcm(*(max(1, n) for n in sizes))
    return MeshShape(max(1, mesh.replicate), shard)


def _check_divides(key: str, value: int, world_size: int) -> None:
    if world_size % value:
        raise setting_error(key, value, f"must divide the number of ranks, {world_size}", _divisor(value, world_size))


def _divisor(value: int, total: int) -> int:
    """Return the divisor of `total` that is nearest to `value`."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - value), d))


def check_config(config: RunConfig, world_size: int, local_world_size: int) -> MeshShape:
    """Check every rule between fields, before anything is built.  Returns the mesh's shape.

    Raises UserError that names one setting, the rule that it breaks, and the nearest legal value.
    """
    shape = find_mesh_shape(config.mesh, world_size, local_world_size)
    _check_batch(config, shape)
    _check_reshard(config, shape)
    _check_forms(config)
    _check_data(config)
    _check_profile(config, shape)
    if config.recipe.check is not None:
        config.recipe.check(config.model)
    return shape


def _check_batch(config: RunConfig, shape: MeshShape) -> None:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if isinstance(micro, (str, bool)) and micro != AUTO:
        raise setting_error("train.micro_batch_size", micro, "must be a whole number, or auto", AUTO)
    micro = 1 if micro == AUTO else int(micro)
    if batch % (shape.num_ranks * micro) == 0:
        return
    ranks = f"{shape.num_ranks} data-parallel ranks" if shape.num_ranks > 1 else "1 data-parallel rank"
    rule = (
        f"must be {ranks} x train.micro_batch_size={micro} x a whole number of accumulation steps, "
        f"so a multiple of {shape.num_ranks * micro}"
    )
    legal = max(1, round(batch / (shape.num_ranks * micro))) * shape.num_ranks * micro
    raise setting_error("train.global_batch_size", batch, rule, legal)


def _check_reshard(config: RunConfig, shape: MeshShape) -> None:
    key, value = "fsdp.reshard_after_forward", config.fsdp.reshard_after_forward
    entries = value if isinstance(value, list) else [value]
    words = ["always", "never"] if isinstance(value, list) else ["default", "always", "never", AUTO]
    for entry in entries:
        if isinstance(entry, bool):
            rule = "takes always or never, not true or false"
            raise setting_error(key, value, rule, meant="always" if entry else "never")
        if isinstance(entry, str) and entry not in words:
            best = nearest(entry, words)
            fixed = [best if item == entry else item for item in entries] if isinstance(value, list) else best
            rule = f"must be {', '.join(words)} or a number of ranks"
            raise setting_error(key, value, rule, meant=fixed if best else None)
        if isinstance(entry, int) and (entry < 1 or shape.shard % entry):
            best = _divisor(entry, shape.shard)
            fixed = [best if item == entry else item for item in entries] if isinstance(value, list) else best
            raise setting_error(key, value, f"a number of ranks must divide the shard axis, {shape.shard}", fixed)


def _check_forms(config: RunConfig) -> None:
    optim = config.optim
    checkpointing = config.train.activation_checkpoint
    words = ["none", "full", "selective", AUTO]
    if isinstance(checkpointing, str) and checkpointing.startswith("budget:"):
        share = budget_of(checkpointing)
        if share is None or not 0 <= share <= 1:
            rule = "budget:<share> takes a number from 0 to 1"
            closest = 0.5 if share is None or math.isnan(share) else min(1.0, max(0.0, share))
            raise setting_error("train.activation_checkpoint", checkpointing, rule, f"budget:{closest:g}")
    elif isinstance(checkpointing, str) and checkpointing not in words:
        noun = "a whole number, budget:<share>, or one of"
        raise choice_error("train.activation_checkpoint", checkpointing, words, noun)
    if isinstance(checkpointing, (int, bool)) and (isinstance(checkpointing, bool) or checkpointing < 1):
        raise setting_error("train.activation_checkpoint", checkpointing, "every n-th block: n is at least 1", "none")

    for key, dtype in (("train.weights_dtype", config.train.weights_dtype), ("optim.state_dtype", optim.state_dtype)):
        if dtype == "bfloat16" and optim.name != "adamw":
            rule = f"only optim.name=adamw computes in float32 and rounds; {optim.name} would lose small updates"
            raise setting_error(key, dtype, rule, "float32")

    _check_float8(config)
    wrap = config.fsdp.wrap
    if wrap.startswith("size:"):
        size = wrap.removeprefix("size:").replace("_", "")
        if not size.isdecimal() or int(size) < 1:
            rule = "size:<parameters> takes a whole number above 0"
            raise setting_error("fsdp.wrap", wrap, rule, example="size:100000000")
    elif wrap != "block" and ":" not in wrap:
        rule = "must be block, size:<parameters>, or package.module:function"
        raise setting_error("fsdp.wrap", wrap, rule, meant=nearest(wrap, ["block"]))

    resume = config.checkpoint.resume
    if resume not in ("auto", "none") and "://" not in resume and not Path(resume).is_dir():
        rule = "must be auto, none, or a folder (a checkpoint's, or a run's)"
        raise setting_error("checkpoint.resume", resume, rule, example="auto")
    if config.run.deadline is not None and (deadline := find_deadline(config)) is not None and deadline <= time.time():
        tomorrow = (datetime.now() + timedelta(days=1)).strftime("%Y-%m-%dT18:00")
        raise setting_error("run.deadline", config.run.deadline, "has passed already", example=tomorrow)
    start = config.train.init_from
    if start is not None and "://" not in start and not Path(start).exists():
        rule = "must be a checkpoint, a run.dir, a folder of safetensors, or a file (.pt, .safetensors) of weights"
        own = config.run_dir / "config.yaml"
        advice = f"recipe={own} train.init_from=null goes on with the run, which needs it no more"
        raise setting_error("train.init_from", start, f"{rule}; {advice}" if own.is_file() else rule)
    name = config.run.name
    if name in (".", "..") or not re.fullmatch(r"[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+", name):
        legal_name = re.sub(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+", "-", name).strip(".-") or "run"
        rule = "must be the name of a folder, without slashes and control characters"
        raise setting_error("run.name", name, rule, legal_name)
    if "://" in config.run.dir:
        rule = "must be a folder; for checkpoints elsewhere there is checkpoint.dir"
        raise setting_error("run.dir", config.run.dir, rule, example=f"runs/{config.run.name}")
    legal = [*declared_keys(type(config.model)), *(section.name for section in dataclasses.fields(RunConfig))]
    unknown = [key for key in config.checkpoint.allow_changes if key not in legal and not key.startswith("state.")]
    if unknown:
        best = nearest(unknown[0], legal)
        raise setting_error("checkpoint.allow_changes", list(unknown), "no such key", meant=best and [best])
    _check_folder("run.dir", config.run.dir, f"runs/{config.run.name}")
    _check_kinds(config)
    if config.checkpoint.dir is not None:
        _check_folder("checkpoint.dir", config.checkpoint.dir, None)


def _check_float8(config: RunConfig) -> None:
    train, key = config.train, "train.float8"
    if train.float8 == "none":
        return
    if config.fsdp.param_dtype != "bfloat16":
        rule = f"is for layers that compute in bfloat16, not with fsdp.param_dtype={config.fsdp.param_dtype}"
        raise setting_error(key, train.float8, rule, "none")
    if budget_of(train.activation_checkpoint) is not None:
        rule = f"a budget does not count products in float8 (train.float8={train.float8})"
        raise setting_error("train.activation_checkpoint", train.activation_checkpoint, rule, "selective")
    if isinstance(train.micro_batch_size, int) and train.micro_batch_size * config.data.seq_len % 16:
        tokens = f"train.micro_batch_size={train.micro_batch_size} x data.seq_len={config.data.seq_len} tokens"
        raise setting_error(key, train.float8, f"{tokens} of a forward pass must be a multiple of 16", "none")


def budget_of(checkpointing: int | str) -> float | None:
    """Return the share of `train.activation_checkpoint=budget:<share>`, None for its other forms."""
    if not isinstance(checkpointing, str) or not checkpointing.startswith("budget:"):
        return None
    try:
        return float(checkpointing.removeprefix("budget:"))
    except ValueError:
        return None


def find_deadline(config: RunConfig, env: Mapping[str, str] = os.environ) -> float | None:
    """Return when the run must have stopped, in seconds since 1970, or None: `run.deadline`, or the Slurm job's end."""
    text = config.run.deadline
    if text is None:
        end = env.get("SLURM_JOB_END_TIME", "")
        return float(end) if end.isdecimal() else None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        today = datetime.now().strftime("%Y-%m-%dT18:00")
        raise setting_error("run.deadline", text, "must be a time in ISO 8601", example=today) from error


_FILES = ("config.yaml", "status.json", "metrics.jsonl", "notice")
_FOLDERS = ("checkpoints", "tensorboard", "wandb", "profile")
"""What a run keeps in its folder, by kind."""


def _check_kinds(config: RunConfig) -> None:
    """Raise UserError if a folder lies where the run keeps a file, or a file where it keeps a folder."""
    wrong = [f"{config.run_dir / name} is a folder" for name in _FILES if (config.run_dir / name).is_dir()]
    wrong += [f"{config.run_dir / name} is no folder" for name in _FOLDERS if (config.run_dir / name).is_file()]
    if wrong:
        rule = f"{wrong[0]}, and a run keeps something else there: move it away, or take another run.dir"
        raise setting_error("run.dir", config.run.dir, rule)


def _check_folder(key: str, value: str, legal: str | None) -> None:
    if "://" in value.removeprefix("file://"):
        return
    folder = Path(value.removeprefix("file://")).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise setting_error(key, value, f"{existing} is not a folder", example=legal)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise setting_error(key, value, f"{existing} cannot be written", example=legal)


def _check_data(config: RunConfig) -> None:
    data = config.data
    longest = getattr(config.model, "max_seq_len", None)
    if longest is not None and data.seq_len > longest:
        raise setting_error("data.seq_len", data.seq_len, f"is longer than model.max_seq_len={longest}", longest)
    if data.source == "tokens" and not data.path:
        rule = "data.source=tokens needs the path or glob of token shards"
        raise setting_error("data.path", data.path, rule, fix="python -m trainer.prepare makes them from text")
    if data.source != "tokens":
        for key in ("path", "eval_path"):
            if getattr(data, key):
                rule = f"data.source={data.source} reads no file; a path goes with data.source=tokens"
                raise setting_error(f"data.{key}", getattr(data, key), rule, None)
    if data.source == "tokens" and config.eval.every and not data.eval_path and not data.holdout:
        rule = "with data.holdout=0 and no data.eval_path there is nothing to evaluate on"
        raise setting_error("eval.every", config.eval.every, rule, 0)


def _check_profile(config: RunConfig, shape: MeshShape) -> None:
    steps, ranks, num_ranks = config.log.profile_steps, config.log.profile_ranks, shape.num_ranks
    if steps is not None and not 1 <= steps[0] <= steps[1]:
        rule = "must be the first and the last update to profile, counted from 1"
        raise setting_error("log.profile_steps", steps, rule, sorted(max(1, step) for step in steps))
    if any(not 0 <= rank < num_ranks for rank in ranks):
        rule = f"must be ranks of this run, 0 to {num_ranks - 1}"
        legal = sorted({min(max(0, rank), num_ranks - 1) for rank in ranks})
        raise setting_error("log.profile_ranks", ranks, rule, legal)


# ---------------------------------------------------------------------------------------------------------------
# Resuming

_FIXED_ON_RESUME = (
    "model.",
    "data.",
    "optim.name",
    "optim.state_dtype",
    "train.global_batch_size",
    "train.weights_dtype",
    "run.seed",
)
_FREE_ON_RESUME = ("data.num_workers", "data.cache_dir")
_OF_THE_ATTEMPT = ("run.name", "run.dir", "checkpoint.", "log.")
"""What changes nothing that is trained: nobody is told."""


def stored_value(stored_yaml: str, key: str) -> object:
    """Return one value of a configuration that `to_yaml` has written, None if it lacks the key, or is none."""
    section, _, name = key.partition(".")
    try:
        return _stored_section(_read_stored(stored_yaml), section).get(name)
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
    before, after = _read_stored(before_yaml, "the first"), _read_stored(after_yaml, "the second")
    defaults, lines = RunConfig(), []
    for section in dataclasses.fields(RunConfig):
        old, new = (_stored_section(stored, section.name) for stored in (before, after))
        for name in dict.fromkeys([*new, *old]):
            other = new.get(name, old.get(name))
            default = _default_of(getattr(defaults, section.name), name, other)
            was, now = old.get(name, default), new.get(name, default)
            if was != now:
                lines.append(f"{section.name}.{name}: {was} -> {now}")
    return lines


def _default_of(section: Any, name: str, otherwise: Any) -> Any:
    """Return what a key of a section is if nobody sets it; `otherwise` where that is nothing, or found out later."""
    fields = dataclasses.fields(section) if section is not None else ()
    declared = next((each for each in fields if each.name == name), None)
    if declared is None:
        return otherwise
    if declared.default_factory is not dataclasses.MISSING:
        return _lists(declared.default_factory())
    return otherwise if declared.default in (dataclasses.MISSING, None) else _lists(declared.default)


def compare_configs(config: RunConfig, stored_yaml: str) -> tuple[list[str], list[str]]:
    """Compare with the configuration that a checkpoint was written with.

    Returns two lists of lines "key: before in the checkpoint, now now": what would silently change the training and is
    not named in `checkpoint.allow_changes`, and what may change.
    """
    stored = _read_stored(stored_yaml)
    refused: list[str] = []
    free: list[str] = []
    for section, values in config.to_dict().items():
        for name, value in values.items():
            key = f"{section}.{name}"
            # A checkpoint of before there was such a key: it meant what is the default now.
            before = _stored_section(stored, section).get(name, _default_of(getattr(config, section), name, value))
            if before == value or key.startswith(_OF_THE_ATTEMPT):
                continue
            fixed = key.startswith(_FIXED_ON_RESUME) and key not in _FREE_ON_RESUME
            line = f"{key}: {before} in the checkpoint, {value} now"
            is_allowed = not {key, section}.isdisjoint(config.checkpoint.allow_changes)
            (refused if fixed and not is_allowed else free).append(line)
    return refused, free
