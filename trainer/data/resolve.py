"""Settings that the data decide: how long a row needs to be, and how many steps some epochs are."""

from __future__ import annotations

import dataclasses
import math

from trainer.config import RunConfig
from trainer.data.source_factory import open_source
from trainer.data.stdlib import Split

_ROW_MULTIPLE = 64
"""Rows that are trimmed have a multiple of so many tokens, which kernels like."""


def resolve_from_data(config: RunConfig) -> RunConfig:
    """Return the configuration with rows as `data.trim_rows` wants them, and `train.epochs` as `train.steps`.

    Opens the data, where they are what decides.  Raises UserError as `open_source` does.
    """
    return _with_steps(_with_trimmed_rows(config))


def _with_trimmed_rows(config: RunConfig) -> RunConfig:
    """Return it with rows as long as the longest conversation, of training and evaluation, at most as they are."""
    data = config.data
    if not data.trim_rows:
        return config
    from trainer.data.chat.source import ChatSource, PairSource  # with the library that renders templates

    splits: tuple[Split, ...] = ("train", "eval") if config.eval.every else ("train",)
    opened = (open_source(data, config.vocab_size, split) for split in splits)
    longest = max(source.longest for source in opened if isinstance(source, (ChatSource, PairSource)))
    seq_len = min(data.seq_len, math.ceil(longest / _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return dataclasses.replace(config, data=dataclasses.replace(data, seq_len=seq_len))


def _with_steps(config: RunConfig) -> RunConfig:
    """Return it with the steps that `train.epochs` comes to, or those that a small model needs where they are more."""
    train = config.train
    if train.epochs is None:
        return config
    samples = train.epochs * len(open_source(config.data, config.vocab_size, "train"))
    steps = max(1, train.small_model_steps, math.ceil(samples / train.global_batch_size))
    return dataclasses.replace(config, train=dataclasses.replace(train, epochs=None, small_model_steps=0, steps=steps))
