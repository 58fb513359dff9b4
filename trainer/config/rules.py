"""Checks settings against each other and against the number of ranks.

Rules for a single key are declared beside it in the schema, if a limit, a pattern or `needs` can express them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from trainer.config.files import CONFIG, run_from_best_path
from trainer.config.keys import declared_keys
from trainer.config.parallel import (
    MeshShape,
    batch_divides,
    check_batch,
    check_context,
    check_expert,
    check_tensor,
    group_choices,
    nearest_divisor,
    resolve_mesh_shape,
    with_context,
    with_expert,
    with_tensor,
)
from trainer.config.phases import find_phases
from trainer.config.schema import AUTO, MODEL, LoraSection, RunConfig
from trainer.errors import UserError, choice_error, nearest, setting_error, yaml_scalar
from trainer.urls import has_known_scheme


def check_config(config: RunConfig, world_size: int, local_world_size: int) -> MeshShape:
    """Check the settings against each other and against the number of ranks; return the shape of the mesh.

    Raises a UserError that names one setting, the rule that it breaks, and how to fix it.
    """
    shape = resolve_mesh_shape(config.mesh, world_size, local_world_size)
    if AUTO in (config.mesh.context, config.mesh.tensor):
        config = _with_groups(config, shape, local_world_size)
    if config.mesh.expert == AUTO:
        config = with_expert(config, 1, config.mesh.expert_method)
    check_context(config, shape, local_world_size)
    check_tensor(config, shape)
    check_expert(config, shape, local_world_size)
    fix = "" if batch_divides(config, shape) else _shared_sequences(config, shape, local_world_size)
    check_batch(config, shape, fix)
    _check_reshard(config, shape)
    _check_needs(config)
    _check_activation_checkpoint(config)
    _check_optimizer_dtypes(config)
    _check_float8(config)
    _check_lora(config)
    _check_objective(config)
    _check_evaluation(config)
    _check_lr_range(config)
    if config.train.epochs is None:
        check_schedule(config)
    _check_resume(config)
    _check_deadline(config)
    _check_base_model(config)
    _check_urls(config)
    _check_init_from(config)
    _check_run_name(config)
    _check_allow_changes(config)
    _check_paths(config)
    _check_data(config)
    _check_profile(config, shape)
    if config.spec.check is not None:
        config.spec.check(config.model)
    return shape


def _with_groups(config: RunConfig, shape: MeshShape, local_world_size: int) -> RunConfig:
    """Return the configuration with the first legal choice of `mesh.context` and `mesh.tensor`, if they are auto.

    If there is none, auto becomes 1, so that the checks report why that is not legal.
    """
    choices = group_choices(config, shape, local_world_size)
    if choices:
        return choices[0]
    if config.mesh.context == AUTO:
        config = with_context(config, 1)
    return with_tensor(config, 1) if config.mesh.tensor == AUTO else config


def _shared_sequences(config: RunConfig, shape: MeshShape, local_world_size: int) -> str:
    """Return how the batch would be legal if ranks of a node shared sequences; an empty string if that is no help."""
    fixes = []
    for axis, other in (
        ("context", with_context(config, AUTO)),
        ("tensor", with_tensor(config, AUTO)),
    ):
        for choice in group_choices(other, shape, local_world_size):
            if local_world_size % choice.ranks_per_sample == 0:
                fixes.append(f"mesh.{axis}={getattr(choice, axis)}")
                break
    return f"let ranks share sequences: {' or '.join(fixes)}" if fixes else ""


def _check_reshard(config: RunConfig, shape: MeshShape) -> None:
    key = "fsdp.reshard_after_forward"
    value = config.fsdp.reshard_after_forward
    for size in config.fsdp.reshard_sizes:
        if shape.shard % size:
            nearest_size = nearest_divisor(size, shape.shard)
            proposal: object = nearest_size
            if isinstance(value, list):
                proposal = [nearest_size if entry == size else entry for entry in value]
            raise setting_error(key, value, f"a number of ranks must divide the shard axis, {shape.shard}", proposal)


def _check_needs(config: RunConfig) -> None:
    """Check that settings which only apply with another one (`declare(needs=...)`) are otherwise at their defaults."""
    for key, item in declared_keys(type(config.model), type(config.objective)).items():
        needed, _, choice = item.metadata.get("needs", "").partition("=")
        value = operator.attrgetter(key)(config)
        if not needed or value == item.default:
            continue
        current = operator.attrgetter(needed)(config)
        if choice and current != choice:
            fix = f"leave it out, or set {needed}={choice}"
            raise setting_error(key, value, f"only applies to {needed}={choice}, not {current}", item.default, fix=fix)
        if not current:
            example = declared_keys()[needed].metadata["example"]
            rule = f"has no effect with {needed}={yaml_scalar(current)}"
            fix = f"leave it out, or set {needed}, for example to {example}"
            raise setting_error(key, value, rule, item.default, fix=fix)


def _check_optimizer_dtypes(config: RunConfig) -> None:
    """Check that each optimizer supports the dtypes of the weights and of its state."""
    for key, dtype in (
        ("train.weights_dtype", config.train.weights_dtype),
        ("optim.state_dtype", config.optim.state_dtype),
    ):
        if dtype != "float32" and config.optim.name != "adamw":
            rule = (
                f"only optim.name=adamw supports this (float32 compute, rounded results); {config.optim.name} would "
                "lose small updates"
            )
            raise setting_error(key, dtype, rule, "float32")
    for number, group in enumerate(config.optim.groups):
        optimizer = group.get("optimizer")
        dtype = config.train.weights_dtype
        if dtype != "float32" and optimizer in ("sgd", "muon"):
            rule = f"optim.groups[{number}] has optimizer={optimizer}, which would lose small updates"
            raise setting_error("train.weights_dtype", dtype, rule, "float32")


def _check_objective(config: RunConfig) -> None:
    objective = config.train.objective
    if objective != "tokens" and config.spec.trainer is not None:
        rule = f"model {config.spec.name!r} has its own Trainer, which defines its own objective"
        raise setting_error("train.objective", objective, rule, "tokens")


def _check_lr_range(config: RunConfig) -> None:
    first, last = config.schedule.lr_range
    if not first < last:
        reversed_range = [last, first] if last < first else None
        raise setting_error("schedule.lr_range", [first, last], "must rise", proposal=reversed_range)


def _check_resume(config: RunConfig) -> None:
    resume = config.checkpoint.resume
    if resume in ("auto", "none") or "://" in resume:
        return
    if not Path(run_from_best_path(resume) or resume).is_dir():
        rule = "must be auto, none, or a folder: a checkpoint, a run, or RUN/best"
        raise setting_error("checkpoint.resume", resume, rule, proposal="auto")


def _check_deadline(config: RunConfig) -> None:
    if config.run.deadline is None:
        return
    deadline = find_deadline(config)
    if deadline is not None and deadline <= time.time():
        tomorrow = (datetime.now() + timedelta(days=1)).strftime("%Y-%m-%dT18:00")
        raise setting_error("run.deadline", config.run.deadline, "has already passed", proposal=tomorrow)


def _check_urls(config: RunConfig) -> None:
    for key, value in (
        ("checkpoint.dir", config.checkpoint.dir),
        ("checkpoint.resume", config.checkpoint.resume),
        ("train.init_from", config.train.init_from),
    ):
        if value is not None and "://" in value and not has_known_scheme(value):
            rule = f"{value.partition('://')[0]}:// is no kind of storage that fsspec knows"
            raise setting_error(key, value, rule, fix="use a folder, or a URL such as s3://bucket/path")


def _check_allow_changes(config: RunConfig) -> None:
    legal = [
        *declared_keys(type(config.model), type(config.objective)),
        *(section.name for section in dataclasses.fields(RunConfig)),
    ]
    unknown = [key for key in config.checkpoint.allow_changes if key not in legal and not key.startswith("state.")]
    if unknown:
        suggestion = nearest(unknown[0], legal, 0.8) if "." in unknown[0] else None
        rule = "no such key" if "." in unknown[0] else "no such section"
        fix = "" if suggestion else "name the keys or sections that may change, such as optim.name or data"
        raise setting_error(
            "checkpoint.allow_changes", list(unknown), rule, proposal=suggestion and [suggestion], fix=fix
        )


def check_schedule(config: RunConfig) -> None:
    """Raise UserError if the decay of `schedule.name=wsd` begins before the warmup ends, where the rate would drop.

    A run that ends within its warmup has no decay at all, and is legal: a short trial run needs no other schedule.
    """
    schedule = config.schedule
    num_steps = config.train.steps
    warmup, decay = schedule.warmup(num_steps), schedule.decay_ratio * num_steps
    # Both lengths may be fractions of the run, so they may overlap by the part of a step that rounding adds.
    if schedule.name == "wsd" and warmup < num_steps and warmup + decay >= num_steps + 1:
        rule = (
            f"a decay of {decay:g} steps begins before the end of the warmup, {warmup} steps, in a run of "
            f"{num_steps} steps"
        )
        longest = round((num_steps - warmup) / num_steps, 6)
        fix = "a shorter warmup (schedule.warmup_steps or warmup_ratio), or more steps"
        raise setting_error("schedule.decay_ratio", schedule.decay_ratio, rule, longest, fix=fix)


def _check_activation_checkpoint(config: RunConfig) -> None:
    checkpointing = config.train.activation_checkpoint
    key = "train.activation_checkpoint"
    keywords = ["none", "full", "selective", AUTO]
    if isinstance(checkpointing, str) and checkpointing.startswith("budget:"):
        fraction = budget_of(checkpointing)
        if fraction is None or not 0 <= fraction <= 1:
            rule = "budget:<fraction> needs a number from 0 to 1"
            nearest_legal = 0.5 if fraction is None or math.isnan(fraction) else min(1.0, max(0.0, fraction))
            raise setting_error(key, checkpointing, rule, f"budget:{nearest_legal:g}")
    elif isinstance(checkpointing, str) and checkpointing not in keywords:
        raise choice_error(key, checkpointing, keywords, "a whole number, budget:<fraction>, or one of")
    if isinstance(checkpointing, (int, bool)) and (isinstance(checkpointing, bool) or checkpointing < 1):
        raise setting_error(key, checkpointing, "n (for every n-th block) must be at least 1", "none")


def _check_base_model(config: RunConfig) -> None:
    """Check that `optim.base_model` describes a legal model whose attention heads are as wide as this model's."""
    key = "optim.base_model"
    base = config.optim.base_model
    if base is None:
        return
    widths = {
        field.name: getattr(config.model, field.name)
        for field in dataclasses.fields(config.model)
        if type(getattr(config.model, field.name)) is int
    }
    for name, value in base.items():
        if name not in widths:
            best = nearest(name, widths)
            meant = None if best is None else {str(best) if other == name else other: base[other] for other in base}
            rule = f"model {config.model.name!r} has no such width: {name}"
            fix = "" if best else f"it has {', '.join(widths)}"
            raise setting_error(key, dict(base), rule, proposal=meant, fix=fix)
        if value < 1:
            raise setting_error(f"{key}.{name}", value, "must be at least 1", 1)
    model = dataclasses.replace(config.model, **base)
    try:
        if config.spec.check is not None:
            config.spec.check(model)
    except UserError as error:
        raise setting_error(key, dict(base), f"is not a legal model: {str(error).splitlines()[0]}") from error
    size, base_size = _head_size(config.model), _head_size(model)
    if size != base_size:
        rule = f"its heads have size {base_size:g}, but this model's have {size:g}, which changes the attention scale"
        same = {"num_heads": int(base["dim"] / size)} if "dim" in base and base["dim"] % size == 0 else {}
        raise setting_error(
            key, dict(base), rule, fix="give the base model heads of that size", proposal={**base, **same}
        )


def _head_size(model: Any) -> float:
    """Return the width of an attention head; 0 if the model's configuration does not determine it."""
    if hasattr(model, "head_dim"):
        return float(model.head_dim)
    heads = getattr(model, "num_heads", None)
    dim = getattr(model, "dim", None)
    return dim / heads if heads and dim else 0.0


def _check_init_from(config: RunConfig) -> None:
    start = config.train.init_from
    if start is not None and "://" not in start and not Path(run_from_best_path(start) or start).exists():
        rule = "must be a checkpoint, a run folder, a folder of safetensors, a file (.pt, .safetensors, .gguf), "
        rule += "or a model on the Hugging Face Hub (org/name)"
        own_config = config.run_dir / CONFIG
        advice = f"recipe={own_config} train.init_from=null resumes the run, which no longer needs it"
        if config.lora.rank:
            advice = "the run's adapters belong to these weights: give their new path"
        is_saved = own_config.is_file() and any((config.run_dir / "checkpoints").glob("step_*"))
        raise setting_error("train.init_from", start, f"{rule}; {advice}" if is_saved else rule)


_MAX_NAME_BYTES = 255
"""Maximum length of a file name in bytes on common file systems."""


def _check_run_name(config: RunConfig) -> None:
    name = config.run.name
    if name in (".", "..") or not re.fullmatch(r"[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+", name):
        legal_name = re.sub(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+", "-", name).strip(".-") or "run"
        rule = "must be a folder name without slashes or control characters"
        raise setting_error("run.name", name, rule, legal_name)
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        rule = f"is {len(os.fsencode(name))} bytes long; a folder's name has at most {_MAX_NAME_BYTES}"
        raise setting_error("run.name", name, rule, fix="use a shorter name")


_FILES = ("config.yaml", "status.json", "metrics.jsonl", "notice")
_FOLDERS = ("checkpoints", "tensorboard", "wandb", "profile")
"""The files and folders that a run creates or reads in its folder."""


def _check_paths(config: RunConfig) -> None:
    if "://" in config.run.dir:
        rule = "must be a local folder; to store checkpoints elsewhere, set checkpoint.dir"
        raise setting_error("run.dir", config.run.dir, rule, proposal=f"runs/{config.run.name}")
    _check_folder("run.dir", config.run.dir, f"runs/{config.run.name}")
    conflicts = [f"{config.run_dir / name} is a folder" for name in _FILES if (config.run_dir / name).is_dir()]
    conflicts += [f"{config.run_dir / name} is not a folder" for name in _FOLDERS if (config.run_dir / name).is_file()]
    if conflicts:
        rule = f"{conflicts[0]}, but a run needs that path: move it away, or use another run.dir"
        raise setting_error("run.dir", config.run.dir, rule)
    if config.checkpoint.dir is not None:
        _check_folder("checkpoint.dir", config.checkpoint.dir, None)


def _check_float8(config: RunConfig) -> None:
    train = config.train
    key = "train.float8"
    if train.float8 == "none":
        return
    if config.fsdp.param_dtype != "bfloat16":
        rule = f"needs layers that compute in bfloat16, not fsdp.param_dtype={config.fsdp.param_dtype}"
        raise setting_error(key, train.float8, rule, "none")
    if config.lora.packs:
        rule = f"weights packed as lora.base_dtype={config.lora.base_dtype} cannot be multiplied in float8"
        raise setting_error(key, train.float8, rule, "none")
    if budget_of(train.activation_checkpoint) is not None:
        rule = f"selection by budget does not support float8 (train.float8={train.float8})"
        raise setting_error("train.activation_checkpoint", train.activation_checkpoint, rule, "selective")
    if isinstance(train.micro_batch_size, int) and train.micro_batch_size * config.data.seq_len % 16:
        tokens = f"train.micro_batch_size={train.micro_batch_size} x data.seq_len={config.data.seq_len} tokens"
        raise setting_error(key, train.float8, f"{tokens} per forward pass must be a multiple of 16", "none")


def _check_lora(config: RunConfig) -> None:
    if not config.lora.rank:
        return
    if not config.lora.targets:
        raise setting_error("lora.targets", config.lora.targets, "must name at least one layer", LoraSection().targets)
    if rate := getattr(config.model, "balance_rate", None):
        rule = "would change the biases that select experts, which an adapter does not contain"
        raise setting_error("model.balance_rate", rate, rule, 0)


def _check_evaluation(config: RunConfig) -> None:
    prompts = config.log.prompts
    if prompts and config.data.source == "synthetic":
        raise setting_error(
            "log.prompts", prompts, "data.source=synthetic generates numbers, not text", fix="leave it out"
        )
    sources = config.data.path if isinstance(config.data.path, dict) else {}
    metrics = ["loss", *(f"loss_{name}" for name in sources), *config.objective.better]
    if config.eval.metric not in metrics:
        raise choice_error("eval.metric", config.eval.metric, metrics)


def offloaded_fraction(value: float | str) -> float:
    """Return the fraction of blocks whose activations are offloaded, given the value of `train.offload_activations`.

    Returns 0 for `none` and for an unresolved `auto`.
    """
    return 0.0 if isinstance(value, str) else float(value)


def budget_of(checkpointing: int | str) -> float | None:
    """Return the fraction in `train.activation_checkpoint=budget:<fraction>`; None for any other value."""
    if not isinstance(checkpointing, str) or not checkpointing.startswith("budget:"):
        return None
    try:
        return float(checkpointing.removeprefix("budget:"))
    except ValueError:
        return None


def find_deadline(config: RunConfig, env: Mapping[str, str] = os.environ) -> float | None:
    """Return the time by which the run must have stopped, in seconds since the Unix epoch; None if there is no limit.

    This is `run.deadline` or, if that is null, the end of the Slurm job.  Raises UserError if `run.deadline` is not a
    valid time.
    """
    text = config.run.deadline
    if text is None:
        end = env.get("SLURM_JOB_END_TIME", "")
        return float(end) if end.isdecimal() else None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        today = datetime.now().strftime("%Y-%m-%dT18:00")
        raise setting_error("run.deadline", text, "must be a time in ISO 8601", proposal=today) from error


def _check_folder(key: str, value: str, legal: str | None) -> None:
    if "://" in value.removeprefix("file://"):
        return
    folder = Path(value.removeprefix("file://")).absolute()
    fix = "use another folder" if legal is None else ""
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:
        raise setting_error(key, value, f"cannot be used ({error.strerror})", proposal=legal, fix=fix) from error
    if not existing.is_dir():
        raise setting_error(key, value, f"{existing} is not a folder", proposal=legal, fix=fix)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise setting_error(key, value, f"{existing} is not writable", proposal=legal, fix=fix)


def _check_data(config: RunConfig) -> None:
    data = config.data
    longest = getattr(config.model, "max_seq_len", None)
    if longest is not None and data.seq_len > longest:
        raise setting_error("data.seq_len", data.seq_len, f"is longer than model.max_seq_len={longest}", longest)
    if data.source == "tokens" and not data.path:
        rule = "data.source=tokens needs a path: token shards, or text"
        raise setting_error("data.path", data.path, rule, proposal="corpus/*.jsonl")
    if data.source not in ("tokens", "chat"):
        for key in ("path", "eval_path"):
            if getattr(data, key):
                rule = f"data.source={data.source} does not read files"
                fix = "set data.source=auto for text or token shards, or data.source=chat"
                raise setting_error(f"data.{key}", getattr(data, key), rule, fix=fix)
    if data.source in ("tokens", "chat") and config.eval.every and not data.eval_path and not data.holdout:
        rule = "there is no data to evaluate on: data.holdout=0, and data.eval_path is not set"
        fix = "set data.eval_path or data.holdout, or turn evaluation off with eval.every=0"
        raise setting_error("eval.every", config.eval.every, rule, fix=fix)
    if data.bos is not None and data.source in ("synthetic", "chat"):
        rule = "is for text" if data.source == "synthetic" else "only applies to text; for chats the template decides"
        raise setting_error("data.bos", data.bos, rule, None)
    check_chats(config)
    if data.fit == "best" and data.documents == "apart":
        raise setting_error("data.fit", data.fit, "with one document per sequence there is nothing to pack", "cut")
    check_sources(config)


def _check_profile(config: RunConfig, shape: MeshShape) -> None:
    steps = config.log.profile_steps
    ranks = config.log.profile_ranks
    num_ranks = shape.num_ranks
    if steps is not None and not 1 <= steps[0] <= steps[1]:
        rule = "must be the first and last step to profile, counted from 1"
        raise setting_error("log.profile_steps", steps, rule, sorted(max(1, step) for step in steps))
    if any(not 0 <= rank < num_ranks for rank in ranks):
        rule = f"must be ranks of this run, 0 to {num_ranks - 1}"
        legal = sorted({min(max(0, rank), num_ranks - 1) for rank in ranks})
        raise setting_error("log.profile_ranks", ranks, rule, legal)


# ---------------------------------------------------------------------------------------------------------------
# Chats

CHATML = "chatml"
CHATML_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""The built-in chat template, for base models that have none."""


def check_chats(config: RunConfig) -> None:
    """Raise UserError for invalid chat settings."""
    data = config.data
    if data.source != "chat":
        return
    if data.format == "text" and data.labels == "none":
        rule = "each plain text needs a label, which only train.objective=classify uses"
        raise setting_error("data.format", data.format, rule, fix="for plain text, use data.source=tokens")
    if not data.path:
        rule = "data.source=chat needs a file of conversations"
        raise setting_error("data.path", data.path, rule, proposal="chats.jsonl")
    if data.tokenizer == MODEL:
        rule = "neither model.path nor train.init_from is a folder"
        raise setting_error("data.tokenizer", MODEL, rule, fix="give model.path=<Hugging Face folder>")
    setting = data.chat_template
    path = Path(setting).expanduser()
    if setting in (MODEL, CHATML) or path.is_file():
        return
    if path.is_dir():
        problem = "is a folder"
    elif path.suffix or "/" in setting:
        problem = "no such file"
    else:
        problem = "unknown name"
    meant = MODEL if setting in ("auto", "tokenizer", "default") else nearest(setting, (CHATML, MODEL))
    rule = f"{problem}; must be model, chatml, or a Jinja file"
    raise setting_error("data.chat_template", setting, rule, meant or "chat_template.jinja")


# ---------------------------------------------------------------------------------------------------------------
# Data sources

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


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
        if not _NAME_PATTERN.fullmatch(name) or not path:
            rule = "a source needs a path and a name of letters, digits, _, - and ."
            raise setting_error("data.path", data.path, rule, proposal={"web": path or "web/*.bin"})
    if not data.path:
        raise setting_error("data.path", data.path, "names no source", proposal={"web": "web/*.bin"})
    if isinstance(data.eval_path, Mapping) and (unknown := [name for name in data.eval_path if name not in data.path]):
        rule = f"data.path has no source {unknown[0]}; it has {', '.join(data.path)}"
        raise setting_error("data.eval_path", data.eval_path, rule)
    if isinstance(data.eval_path, str):
        rule = "data.path has several sources: give a path for each by name"
        raise setting_error("data.eval_path", data.eval_path, rule, proposal={next(iter(data.path)): data.eval_path})
    find_phases(config)
