"""Keys that a configuration leaves to the machine, to files or to other keys: settled, so that they are on record.

What is trained on, and in which dtype, must not change when a run is resumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from trainer.config.auto_model import MODEL
from trainer.config.pretrained import is_folder_of_weights, stored_dtype
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
"""Width under which a model counts as small, such as one of a few million weights."""


def _resolve_train(config: RunConfig, given: Collection[str]) -> TrainSection:
    """Leave `train.small_model_steps` to small models, unless the number of epochs is the user's own."""
    train, width = config.train, _width(config)
    by_recipe = "train.epochs" not in given or "train.small_model_steps" in given
    if train.epochs is not None and by_recipe and width is not None and width < _SMALL:
        return train
    return dataclasses.replace(train, small_model_steps=0)


def _width(config: RunConfig) -> int | None:
    """Return the width of the residual stream, or None of a model that does not say."""
    return getattr(config.model, "dim", None)


def _resolve_optim(config: RunConfig, given: Collection[str]) -> OptimSection:
    """Settle the learning rate of a recipe that tunes models of any width.

    The exponent is the one found for Llama models; for Qwen models the source has a rate that hardly falls with width.
    Source: Thinking Machines Lab, Tinker documentation, "Hyperparameters of supervised learning"; ten times as much for
    adapters after Schulman et al. 2025, "LoRA Without Regret".
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
    """Make a range test that is asked for on the command line a short run, begun anew each time."""
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
        log = dataclasses.replace(log, sample_tokens=0)  # of a model that has diverged
    if "checkpoint.resume" not in given:
        checkpoint = dataclasses.replace(checkpoint, resume="none")
    parts = {"train": train, "eval": evaluation, "checkpoint": checkpoint, "log": log}
    return dataclasses.replace(config, **parts)  # type: ignore[arg-type]


def isolate_range_test(config: RunConfig, read_run_config: Callable[[Path], Mapping[str, Any]]) -> RunConfig:
    """Return the configuration with a folder of its own for a range test, and a place for its checkpoints.

    A range test is named after the run that it is for, and leaves what that run has there alone.
    read_run_config: returns the configuration that a run has written to a folder, empty if there is none.
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
    """Return the length of a recipe's rows of chats, which is no longer than the model has positions for."""
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
    if data.source == "chat" and data.arrangement != "apart":  # no conversation sees another, and none is cut
        data = dataclasses.replace(data, documents="masked", fit="best")
    elif data.source == "chat" and "data.fit" not in given:  # the one of a run whose conversations share rows
        data = dataclasses.replace(data, fit="cut")
    return dataclasses.replace(data, holdout=holdout, tokenizer=tokenizer)


def _folder_of(config: RunConfig) -> str | None:
    """Return the folder that the model's first weights are in, if they are in one that may have a tokenizer."""
    start = config.train.init_from
    return config.model_path or (start if start is not None and is_folder_of_weights(start) else None)


def _resolve_fsdp(config: RunConfig) -> FsdpSection:
    if config.fsdp.param_dtype != AUTO:
        return config.fsdp
    on_gpu = likely_device(config.run.device) == "cuda"
    return dataclasses.replace(config.fsdp, param_dtype="bfloat16" if on_gpu else "float32")


def _resolve_lora(config: RunConfig) -> LoraSection:
    """Settle the dtype of what is frozen: weights that come in bfloat16 lose nothing by staying so."""
    lora, source = config.lora, config.train.init_from or config.model_path
    if not lora.rank or lora.base_dtype is not None:
        return lora
    comes_half = source is not None and stored_dtype(source) == "bfloat16"
    return dataclasses.replace(lora, base_dtype="bfloat16" if comes_half else config.train.weights_dtype)


def steps_or_epochs(values: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a recipe file without the one of `train.steps` and `train.epochs` that yields.

    What is given on the command line goes before what the file says.  Raises UserError where one place says both.
    """
    steps, epochs = "train.steps", "train.epochs"
    if steps in given and given.get(epochs, "null") != "null":
        raise setting_error(epochs, given[epochs], f"{steps}={given[steps]} is also given; use only one of them")
    if steps in given or epochs in given:
        yields = epochs if steps in given else steps
        return {key: value for key, value in values.items() if key != yields or given.get(epochs) == "null"}
    if steps in values and values.get(epochs) is not None:
        raise setting_error(epochs, values[epochs], f"{steps}={values[steps]} is also set there; use only one of them")
    return dict(values)
