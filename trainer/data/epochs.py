"""Epochs: passes over the data, as the steps that they take."""

from __future__ import annotations

import dataclasses
import math

from trainer.config import RunConfig
from trainer.data.opening import open_source


def with_steps(config: RunConfig) -> RunConfig:
    """Return the configuration with `train.epochs` as `train.steps`: enough for every sample to be read as often.

    Opens the data, where they are what decides.  Raises UserError as `open_source` does.
    """
    if config.train.epochs is None:
        return config
    samples = config.train.epochs * len(open_source(config.data, config.vocab_size, "train"))
    steps = max(1, math.ceil(samples / config.train.global_batch_size))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=None, steps=steps))
