"""Resolves settings whose defaults depend on the machine, on files or on other settings.

The resolved values are stored with the run, so that the data and the dtypes cannot change when the run is resumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from trainer.config.auto_model import MODEL
from trainer.config.location import locate
from trainer.config.pretrained import stored_dtype
from trainer.config.requirements import likely_device
from trainer.config.schema import RunConfig
from trainer.config.sections import DataSection, FsdpSection, LoraSection, OptimSection, TrainSection
from trainer.config.sections.limits import AUTO
from trainer.errors import setting_error


def resolve_defaults(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return the configuration with plain values for `data.holdout`, `data.tokenizer` and the dtypes.

    given: the keys on the command line.
    """
    config = _resolve_range(config, given)
    data = _resolve_data(config, given)
    if data.source == "chat" and "data.seq_len" not in given:
        data = dataclasses.replace(data, seq_len=_fitting_length(config))
    if "data.seq_len" in given and "data.trim_rows" not in given:
        data = dataclasses.replace(data, trim_rows=False)
    optim, train = _resolve_optim(config, given), _resolve_train(config, given)
    fsdp, lora = _resolve_fsdp(config), _resolve_lora(config)
    return dataclasses.replace(config, data=data, optim=optim, train=train, fsdp=fsdp, lora=lora)


_SMALL = 512
"""Models narrower than this, typically with a few million parameters, count as small."""


def _resolve_train(config: RunConfig, given: Collection[str]) -> TrainSection:
    """Reset `train.small_model_steps` for all but small models, and if the user has set the number of epochs."""
    train, width = config.train, _width(config)
    by_recipe = "train.epochs" not in given or "train.small_model_steps" in given
    if train.epochs is not None and by_recipe and width is not None and width < _SMALL:
        return train
    return dataclasses.replace(train, small_model_steps=0)


def _width(config: RunConfig) -> int | None:
    """Return the width of the residual stream, or None if the model does not declare it."""
    return getattr(config.model, "dim", None)


def _resolve_optim(config: RunConfig, given: Collection[str]) -> OptimSection:
    """Scale the learning rate of a recipe that fine-tunes models of any width (`optim.lr_by_width`).

    The exponent was fitted to Llama models; for Qwen models the source gives a rate that hardly falls with width.
    Source: Thinking Machines Lab, Tinker documentation, "Hyperparameters of supervised learning"; the factor of ten for
    adapters is from Schulman et al. 2025, "LoRA Without Regret".
    """
    optim, width = config.optim, _width(config)
    if not optim.lr_by_width:
        return optim
    if "optim.lr" in given and "optim.lr_by_width" not in given:
        return dataclasses.replace(optim, lr_by_width=False)
    if not width:
        rule = f"model.name={config.model.name} does not declare its width"
        raise setting_error("optim.lr_by_width", True, rule, fix="give optim.lr")
    scaled = optim.lr * (2000 / width) ** 0.78 * (10 if config.lora.rank else 1)
    return dataclasses.replace(optim, lr=float(f"{scaled:.2e}"), lr_by_width=False)


_RANGE_STEPS = 100


def _resolve_range(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Make a range test requested on the command line a short run that always starts over."""
    if config.schedule.name != "range" or "schedule.name" not in given:
        return config
    train, evaluation, checkpoint, log = config.train, config.eval, config.checkpoint, config.log
    if not {"train.steps", "train.epochs"} & set(given):
        train = dataclasses.replace(train, steps=_RANGE_STEPS, epochs=None)
    if "eval.every" not in given:
        evaluation = dataclasses.replace(evaluation, every=0, patience=0)
        checkpoint = dataclasses.replace(checkpoint, keep_best=0)
        log = dataclasses.replace(log, prompts=())
    if "log.sample_tokens" not in given:
        log = dataclasses.replace(log, sample_tokens=0)  # the model has diverged by then
    if "checkpoint.resume" not in given:
        checkpoint = dataclasses.replace(checkpoint, resume="none")
    parts = {"train": train, "eval": evaluation, "checkpoint": checkpoint, "log": log}
    return dataclasses.replace(config, **parts)  # type: ignore[arg-type]


def isolate_range_test(config: RunConfig, read_run_config: Callable[[Path], Mapping[str, Any]]) -> RunConfig:
    """Give a range test a separate folder, and a separate place for its checkpoints; return the configuration.

    The folder is that of the run it is for, with `-lr` appended, so that the run's own files are untouched.
    read_run_config: returns the configuration stored in a run folder, or an empty mapping if there is none.
    """
    if config.schedule.name != "range":
        return config
    run, checkpoint = config.run, config.checkpoint
    while (before := read_run_config(Path(run.dir))) or run is config.run:
        schedule = before.get("schedule")
        if isinstance(schedule, Mapping) and schedule.get("name") == "range":
            break
        run = dataclasses.replace(run, name=f"{run.name}-lr", dir=f"{run.dir.rstrip('/')}-lr")
    kept = before.get("checkpoint")
    own = kept.get("dir") if isinstance(kept, Mapping) else None
    if checkpoint.dir is not None and own not in (checkpoint.dir, str(Path(checkpoint.dir).absolute())):
        checkpoint = dataclasses.replace(checkpoint, dir=f"{checkpoint.dir.rstrip('/')}-lr")
    return dataclasses.replace(config, run=run, checkpoint=checkpoint)


def _fitting_length(config: RunConfig) -> int:
    """Return the sequence length for chats: the recipe's, limited to the model's `max_seq_len`."""
    longest = getattr(config.model, "max_seq_len", None)
    return config.data.seq_len if longest is None else min(config.data.seq_len, longest)


def _resolve_data(config: RunConfig, given: Collection[str]) -> DataSection:
    data, holdout, tokenizer = config.data, config.data.holdout, config.data.tokenizer
    if holdout is None:
        evaluates = data.source in ("tokens", "chat") and config.eval.every > 0 and data.eval_path is None
        holdout = 0.01 if evaluates else 0.0
    if tokenizer == MODEL:
        tokenizer = _folder_of(config) or MODEL
    if tokenizer != MODEL and (Path(tokenizer).expanduser() / "tokenizer.json").is_file():
        tokenizer = str((Path(tokenizer).expanduser() / "tokenizer.json").absolute())
    if data.source == "chat" and data.arrangement != "apart":  # no conversation attends to another, and none is cut
        data = dataclasses.replace(data, documents="masked", fit="best")
    elif data.source == "chat" and "data.fit" not in given:  # reset the value of a run whose conversations were packed
        data = dataclasses.replace(data, fit="cut")
    return dataclasses.replace(data, holdout=holdout, tokenizer=tokenizer)


def _folder_of(config: RunConfig) -> str | None:
    """Return the Hugging Face folder of the model or of its initial weights, or None."""
    start = config.train.init_from
    return config.model_path or (start if start is not None and locate(start).kind == "huggingface" else None)


def _resolve_fsdp(config: RunConfig) -> FsdpSection:
    if config.fsdp.param_dtype != AUTO:
        return config.fsdp
    on_gpu = likely_device(config.run.device) == "cuda"
    return dataclasses.replace(config.fsdp, param_dtype="bfloat16" if on_gpu else "float32")


def _resolve_lora(config: RunConfig) -> LoraSection:
    """Resolve the dtype of the frozen weights: those stored in bfloat16 lose nothing by staying in it."""
    lora, source = config.lora, config.train.init_from or config.model_path
    if not lora.rank or lora.base_dtype is not None:
        return lora
    is_bfloat16 = source is not None and stored_dtype(source) == "bfloat16"
    return dataclasses.replace(lora, base_dtype="bfloat16" if is_bfloat16 else config.train.weights_dtype)


def steps_or_epochs(values: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a recipe file without `train.steps` or `train.epochs`, if the command line sets the other.

    Raises UserError if the command line, or the file, sets both.
    """
    steps, epochs = "train.steps", "train.epochs"
    if steps in given and given.get(epochs, "null") != "null":
        raise setting_error(epochs, given[epochs], f"{steps}={given[steps]} is also given; use only one of them")
    if steps in given or epochs in given:
        dropped = epochs if steps in given else steps
        return {key: value for key, value in values.items() if key != dropped or given.get(epochs) == "null"}
    if steps in values and values.get(epochs) is not None:
        raise setting_error(epochs, values[epochs], f"{steps}={values[steps]} is also set there; use only one of them")
    return dict(values)
