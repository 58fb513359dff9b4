"""Checks rules that involve several settings, or settings and the number of ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from trainer.config.chats import check_chats
from trainer.config.context_parallel import check_batch, check_context, context_choices, with_context
from trainer.config.load import (
    declared_keys,
)
from trainer.config.mesh import MeshShape, divisor, find_mesh_shape
from trainer.config.mixture import check_sources
from trainer.config.pretrained import check_no_gguf
from trainer.config.run_paths import CONFIG, run_of_best
from trainer.config.schema import RunConfig
from trainer.config.sections import LoraSection
from trainer.config.sections.limits import AUTO
from trainer.errors import choice_error, nearest, setting_error


def check_config(config: RunConfig, world_size: int, local_world_size: int) -> MeshShape:
    """Check all rules, before anything is built, and return the shape of the mesh.

    Raises UserError that names one setting, the rule that it breaks, and how to fix it.
    """
    shape = find_mesh_shape(config.mesh, world_size, local_world_size)
    if config.mesh.context == AUTO:  # without a valid choice, check context=1 to report why
        config = next(iter(context_choices(config, shape, local_world_size)), with_context(config, 1))
    check_context(config, shape, local_world_size)
    check_batch(config, shape)
    _check_compile(config.train.compile)
    _check_reshard(config, shape)
    _check_forms(config)
    _check_data(config)
    _check_profile(config, shape)
    if config.recipe.check is not None:
        config.recipe.check(config.model)
    return shape


def _check_compile(setting: object) -> None:
    if not isinstance(setting, bool) and setting != AUTO:
        raise choice_error("train.compile", setting, [True, False, AUTO])


def _check_reshard(config: RunConfig, shape: MeshShape) -> None:
    key, value = "fsdp.reshard_after_forward", config.fsdp.reshard_after_forward
    entries = value if isinstance(value, list) else [value]
    words = ["always", "never"] if isinstance(value, list) else ["default", "always", "never", AUTO]
    for entry in entries:
        if isinstance(entry, bool):
            rule = "must be always or never, not true or false"
            raise setting_error(key, value, rule, meant="always" if entry else "never")
        if isinstance(entry, str) and entry not in words:
            best = nearest(entry, words)
            fixed = [best if item == entry else item for item in entries] if isinstance(value, list) else best
            rule = f"must be {', '.join(words)} or a number of ranks"
            raise setting_error(key, value, rule, meant=fixed if best else None)
        if isinstance(entry, int) and (entry < 1 or shape.shard % entry):
            best = divisor(entry, shape.shard)
            fixed = [best if item == entry else item for item in entries] if isinstance(value, list) else best
            raise setting_error(key, value, f"a number of ranks must divide the shard axis, {shape.shard}", fixed)


def _check_forms(config: RunConfig) -> None:
    """Check the form of individual keys, and rules that do not depend on the number of ranks."""
    for check in (
        _check_activation_checkpoint,
        _check_dtypes,
        _check_float8,
        _check_lora,
        _check_objective,
        _check_evaluation,
        _check_lr_range,
        _check_wrap,
        _check_resume,
        _check_every,
        _check_deadline,
        _check_init_from,
        _check_name,
        _check_allowed_changes,
        _check_paths,
    ):
        check(config)


def _check_activation_checkpoint(config: RunConfig) -> None:
    checkpointing, key = config.train.activation_checkpoint, "train.activation_checkpoint"
    words = ["none", "full", "selective", AUTO]
    if isinstance(checkpointing, str) and checkpointing.startswith("budget:"):
        share = budget_of(checkpointing)
        if share is None or not 0 <= share <= 1:
            rule = "budget:<share> needs a number from 0 to 1"
            closest = 0.5 if share is None or math.isnan(share) else min(1.0, max(0.0, share))
            raise setting_error(key, checkpointing, rule, f"budget:{closest:g}")
    elif isinstance(checkpointing, str) and checkpointing not in words:
        raise choice_error(key, checkpointing, words, "a whole number, budget:<share>, or one of")
    if isinstance(checkpointing, (int, bool)) and (isinstance(checkpointing, bool) or checkpointing < 1):
        raise setting_error(key, checkpointing, "n (for every n-th block) must be at least 1", "none")


def _check_dtypes(config: RunConfig) -> None:
    optim = config.optim
    for key, dtype in (("train.weights_dtype", config.train.weights_dtype), ("optim.state_dtype", optim.state_dtype)):
        if dtype == "bfloat16" and optim.name != "adamw":
            rule = (
                f"only optim.name=adamw supports this (float32 compute, rounded results); {optim.name} would lose "
                "small updates"
            )
            raise setting_error(key, dtype, rule, "float32")


def _check_every(config: RunConfig) -> None:
    every = config.checkpoint.every
    if isinstance(every, (str, bool)) and every != AUTO:
        raise setting_error("checkpoint.every", every, "must be a whole number of steps, or auto", AUTO)


def _check_wrap(config: RunConfig) -> None:
    wrap = config.fsdp.wrap
    if wrap.startswith("size:"):
        size = wrap.removeprefix("size:").replace("_", "")
        if not size.isdecimal() or int(size) < 1:
            rule = "size:<parameters> needs a whole number above 0"
            raise setting_error("fsdp.wrap", wrap, rule, example="size:100000000")
    elif wrap != "block" and ":" not in wrap:
        rule = "must be block, size:<parameters>, or package.module:function"
        raise setting_error("fsdp.wrap", wrap, rule, meant=nearest(wrap, ["block"]))


def _check_resume(config: RunConfig) -> None:
    resume = config.checkpoint.resume
    if resume not in ("auto", "none") and "://" not in resume and not Path(run_of_best(resume) or resume).is_dir():
        rule = "must be auto, none, or a folder: a checkpoint, a run, or RUN/best"
        raise setting_error("checkpoint.resume", resume, rule, example="auto")


def _check_deadline(config: RunConfig) -> None:
    if config.run.deadline is not None and (deadline := find_deadline(config)) is not None and deadline <= time.time():
        tomorrow = (datetime.now() + timedelta(days=1)).strftime("%Y-%m-%dT18:00")
        raise setting_error("run.deadline", config.run.deadline, "has already passed", example=tomorrow)


def _check_init_from(config: RunConfig) -> None:
    start = config.train.init_from
    if start is not None:
        check_no_gguf(start, "train.init_from")
    if start is not None and "://" not in start and not Path(run_of_best(start) or start).exists():
        rule = "must be a checkpoint, a run folder, a folder of safetensors, or a weights file (.pt, .safetensors)"
        own = config.run_dir / CONFIG
        advice = f"recipe={own} train.init_from=null resumes the run, which no longer needs it"
        if config.lora.rank:
            advice = "the run's adapters belong to these weights: give their new path"
        if not Path(start).is_absolute() and start.count("/") == 1 and not Path(start).parent.is_dir():
            rule = f"{rule}; to download a model: hf download {start} --local-dir {start.rpartition('/')[2]}"
        is_saved = own.is_file() and any((config.run_dir / "checkpoints").glob("step_*"))
        raise setting_error("train.init_from", start, f"{rule}; {advice}" if is_saved else rule)


_MAX_NAME_BYTES = 255
"""Maximum length of a file name in bytes on common file systems."""


def _check_name(config: RunConfig) -> None:
    name = config.run.name
    if name in (".", "..") or not re.fullmatch(r"[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+", name):
        legal_name = re.sub(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+", "-", name).strip(".-") or "run"
        rule = "must be a folder name without slashes or control characters"
        raise setting_error("run.name", name, rule, legal_name)
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        rule = f"is {len(os.fsencode(name))} bytes long; a folder's name has at most {_MAX_NAME_BYTES}"
        raise setting_error("run.name", name, rule, fix="use a shorter name")


def _check_allowed_changes(config: RunConfig) -> None:
    legal = [*declared_keys(type(config.model)), *(section.name for section in dataclasses.fields(RunConfig))]
    unknown = [key for key in config.checkpoint.allow_changes if key not in legal and not key.startswith("state.")]
    if unknown:
        best = nearest(unknown[0], legal, 0.8) if "." in unknown[0] else None
        rule = "no such key" if "." in unknown[0] else "no such section"
        fix = "" if best else "name the keys or sections that may change, such as optim.name or data"
        raise setting_error("checkpoint.allow_changes", list(unknown), rule, meant=best and [best], fix=fix)


def _check_paths(config: RunConfig) -> None:
    if "://" in config.run.dir:
        rule = "must be a local folder; to store checkpoints elsewhere, set checkpoint.dir"
        raise setting_error("run.dir", config.run.dir, rule, example=f"runs/{config.run.name}")
    _check_folder("run.dir", config.run.dir, f"runs/{config.run.name}")
    _check_kinds(config)
    if config.checkpoint.dir is not None:
        _check_folder("checkpoint.dir", config.checkpoint.dir, None)


def _check_float8(config: RunConfig) -> None:
    train, key = config.train, "train.float8"
    if train.float8 == "none":
        return
    if config.fsdp.param_dtype != "bfloat16":
        rule = f"needs layers that compute in bfloat16, not fsdp.param_dtype={config.fsdp.param_dtype}"
        raise setting_error(key, train.float8, rule, "none")
    if budget_of(train.activation_checkpoint) is not None:
        rule = f"a budget does not support float8 (train.float8={train.float8})"
        raise setting_error("train.activation_checkpoint", train.activation_checkpoint, rule, "selective")
    if isinstance(train.micro_batch_size, int) and train.micro_batch_size * config.data.seq_len % 16:
        tokens = f"train.micro_batch_size={train.micro_batch_size} x data.seq_len={config.data.seq_len} tokens"
        raise setting_error(key, train.float8, f"{tokens} of a forward pass must be a multiple of 16", "none")


def _check_lora(config: RunConfig) -> None:
    lora, defaults = config.lora, LoraSection()
    if lora.rank:
        if not lora.targets:
            raise setting_error("lora.targets", lora.targets, "must name at least one layer", defaults.targets)
        return
    for key in ("alpha", "dropout", "targets", "base_dtype"):
        if getattr(lora, key) != getattr(defaults, key):
            rule = "only applies to adapters, and lora.rank=0 means no adapters"
            raise setting_error(f"lora.{key}", getattr(lora, key), rule, fix="set lora.rank, for example to 16")


def _check_objective(config: RunConfig) -> None:
    objective = config.train.objective
    if objective == "tokens":
        return
    if config.recipe.trainer is not None:
        rule = f"recipe {config.recipe.name!r} has its own Trainer, which defines its own objective"
        raise setting_error("train.objective", objective, rule, "tokens")


def _check_lr_range(config: RunConfig) -> None:
    first, last = config.schedule.lr_range
    if not first < last:
        raise setting_error(
            "schedule.lr_range", [first, last], "must rise", meant=[last, first] if last < first else None
        )


def _check_evaluation(config: RunConfig) -> None:
    """Check settings that need evaluations."""
    for key, value in (("checkpoint.keep_best", config.checkpoint.keep_best), ("eval.patience", config.eval.patience)):
        if value and not config.eval.every:
            rule = "needs evaluations, but eval.every=0 disables them"
            raise setting_error(key, value, rule, fix="set eval.every, for example to 100")
    prompts = config.log.prompts
    if prompts and not config.eval.every:
        rule = "need evaluations, but eval.every=0 disables them"
        raise setting_error("log.prompts", prompts, rule, fix="set eval.every, for example to 100")
    if prompts and config.data.source == "synthetic":
        raise setting_error(
            "log.prompts", prompts, "data.source=synthetic generates numbers, not text", fix="leave it out"
        )
    sources = config.data.path if isinstance(config.data.path, dict) else {}
    known = ["loss", *(f"loss_{name}" for name in sources)]
    if config.eval.metric not in known:
        raise choice_error("eval.metric", config.eval.metric, known)


def budget_of(checkpointing: int | str) -> float | None:
    """Return the share in `train.activation_checkpoint=budget:<share>`, or None for other values."""
    if not isinstance(checkpointing, str) or not checkpointing.startswith("budget:"):
        return None
    try:
        return float(checkpointing.removeprefix("budget:"))
    except ValueError:
        return None


def find_deadline(config: RunConfig, env: Mapping[str, str] = os.environ) -> float | None:
    """Return the time by which the run must have stopped, in seconds since 1970, or None.

    This is `run.deadline`, or else the end of the Slurm job.  Raises UserError if `run.deadline` is not a valid time.
    """
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
"""The files and folders that a run creates in its folder."""


def _check_kinds(config: RunConfig) -> None:
    """Raise UserError if a path that the run needs as a file is a folder, or the reverse."""
    wrong = [f"{config.run_dir / name} is a folder" for name in _FILES if (config.run_dir / name).is_dir()]
    wrong += [f"{config.run_dir / name} is not a folder" for name in _FOLDERS if (config.run_dir / name).is_file()]
    if wrong:
        rule = f"{wrong[0]}, but a run needs that path: move it away, or use another run.dir"
        raise setting_error("run.dir", config.run.dir, rule)


def _check_folder(key: str, value: str, legal: str | None) -> None:
    if "://" in value.removeprefix("file://"):
        return
    folder = Path(value.removeprefix("file://")).absolute()
    fix = "use another folder" if legal is None else ""
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:
        raise setting_error(key, value, f"cannot be used ({error.strerror})", example=legal, fix=fix) from error
    if not existing.is_dir():
        raise setting_error(key, value, f"{existing} is not a folder", example=legal, fix=fix)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise setting_error(key, value, f"{existing} is not writable", example=legal, fix=fix)


def _check_data(config: RunConfig) -> None:
    data = config.data
    longest = getattr(config.model, "max_seq_len", None)
    if longest is not None and data.seq_len > longest:
        raise setting_error("data.seq_len", data.seq_len, f"is longer than model.max_seq_len={longest}", longest)
    if data.source == "tokens" and not data.path:
        rule = "data.source=tokens needs a path: token shards, or text"
        raise setting_error("data.path", data.path, rule, example="corpus/*.jsonl")
    if data.source not in ("tokens", "chat"):
        for key in ("path", "eval_path"):
            if getattr(data, key):
                rule = f"data.source={data.source} does not read files; a path needs data.source=tokens or chat"
                raise setting_error(f"data.{key}", getattr(data, key), rule, None)
    if data.source in ("tokens", "chat") and config.eval.every and not data.eval_path and not data.holdout:
        rule = "there is no data to evaluate on: data.holdout=0, and data.eval_path is not set"
        fix = "set data.eval_path or data.holdout, or turn evaluation off with eval.every=0"
        raise setting_error("eval.every", config.eval.every, rule, fix=fix)
    if data.bos is not None and data.source in ("synthetic", "chat"):
        rule = "is for text" if data.source == "synthetic" else "only applies to text; for chats the template decides"
        raise setting_error("data.bos", data.bos, rule, None)
    check_chats(config)
    if not data.pack and data.documents == "masked":
        rule = "data.pack=false puts one document in each sequence"
        raise setting_error("data.documents", data.documents, rule, "apart")
    if data.fit == "best" and data.arrangement == "apart":
        raise setting_error("data.fit", data.fit, "with one document per sequence there is nothing to pack", "cut")
    check_sources(config)


def _check_profile(config: RunConfig, shape: MeshShape) -> None:
    steps, ranks, num_ranks = config.log.profile_steps, config.log.profile_ranks, shape.num_ranks
    if steps is not None and not 1 <= steps[0] <= steps[1]:
        rule = "must be the first and last step to profile, counted from 1"
        raise setting_error("log.profile_steps", steps, rule, sorted(max(1, step) for step in steps))
    if any(not 0 <= rank < num_ranks for rank in ranks):
        rule = f"must be ranks of this run, 0 to {num_ranks - 1}"
        legal = sorted({min(max(0, rank), num_ranks - 1) for rank in ranks})
        raise setting_error("log.profile_ranks", ranks, rule, legal)
