"""Finds the output projection that a new head replaces, and checks that transformers can load the exported model.

A model with a new head is exported as a sequence classifier.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from trainer.errors import setting_error

from .config import HfConfig
from .model import build, library_config


def output_projection(config: HfConfig, model: Any) -> str:
    """Return the name of the projection onto the vocabulary, which a new head replaces.

    Raises UserError if transformers has no sequence classifier that can load the weights of this model with a new head.
    """
    if problem := _export_problem(json.dumps(config.config, sort_keys=True)):
        kind, version = config.config["model_type"], transformers.__version__
        rule = f"a new head needs a sequence classifier in transformers {version} for model_type={kind}; {problem}"
        raise setting_error("model.path", config.path, rule)
    return _output_name(model)


def _output_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


@functools.lru_cache(maxsize=8)
def _export_problem(content: str) -> str:
    """Return why transformers' classifier cannot load the weights of an exported model, or "" if it can.

    content: config.json as text, which `lru_cache` can hash.
    """
    config = HfConfig(config=json.loads(content))
    if config.config["model_type"] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return "there is none"
    with torch.device("meta"):
        ours = build(config)
        theirs = transformers.AutoModelForSequenceClassification.from_config(
            library_config(config), dtype=torch.float32
        )
    output_name = _output_name(ours)
    expected = {name: value.shape[1:] for name, value in ours.state_dict().items()}
    expected["score.weight"] = expected.pop(f"{output_name}.weight")
    expected.pop(f"{output_name}.bias", None)
    actual = {name: value.shape[1:] for name, value in theirs.state_dict().items()}
    different = sorted(name for name in {**expected, **actual} if expected.get(name) != actual.get(name))
    return f"{type(theirs).__name__} has different weights: {', '.join(different[:5])}" if different else ""
