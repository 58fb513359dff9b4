"""The passes of the configuration that need the data: the row length and the number of steps in `train.epochs`."""

from __future__ import annotations

import dataclasses
import math

from trainer.config import RunConfig
from trainer.config.resolve import Given, run_passes
from trainer.data.source_factory import open_source
from trainer.data.stdlib import Split

_ROW_MULTIPLE = 64
"""Trimmed rows have a multiple of this many tokens, which kernels handle efficiently."""


def resolve_from_data(config: RunConfig, given: Given | None = None) -> RunConfig:
    """Return the configuration with `data.trim_rows` applied to `data.seq_len` and `train.epochs` turned into steps.

    Opens the data only if one of these settings needs it.  Raises UserError as `open_source` does.
    """
    return run_passes("data", config, given or Given())


def trim_rows(config: RunConfig, given: Given) -> RunConfig:
    """Shrink `data.seq_len` to the longest conversation in the training and evaluation data.

    Before `epochs_to_steps`, which counts the rows.
    """
    data = config.data
    if not data.trim_rows:
        return config
    from trainer.data.chat.source import ChatSource, PairSource  # imports jinja2, so only when needed

    splits: tuple[Split, ...] = ("train", "eval") if config.eval.every else ("train",)
    opened = (open_source(data, config.vocab_size, split) for split in splits)
    longest = max(source.longest for source in opened if isinstance(source, (ChatSource, PairSource)))
    seq_len = min(data.seq_len, math.ceil(longest / _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return dataclasses.replace(config, data=dataclasses.replace(data, seq_len=seq_len))


def epochs_to_steps(config: RunConfig, given: Given) -> RunConfig:
    """Replace `train.epochs` by the equivalent `train.steps`, at least `train.small_model_steps`."""
    train = config.train
    if train.epochs is None:
        return config
    samples = train.epochs * len(open_source(config.data, config.vocab_size, "train"))
    steps = max(1, train.small_model_steps, math.ceil(samples / train.global_batch_size))
    return dataclasses.replace(config, train=dataclasses.replace(train, epochs=None, small_model_steps=0, steps=steps))
