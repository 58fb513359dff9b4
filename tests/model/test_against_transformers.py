"""Models train like transformers: from the same folder, step by step, and back to an export."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.helpers import hf_models, native_models
from tests.helpers.cases import campaign_except
from tests.helpers.hf_models import MIXTURES, load_with_transformers, overrides, plain_losses
from trainer import Trainer, TrainLoader, load_config, load_weights
from trainer.data.opening import open_source
from trainer.export import command_line as export

NUM_STEPS = 3
NATIVE = [*native_models.KINDS]
OF_TRANSFORMERS = [kind for kind in hf_models.KINDS | MIXTURES if kind != "mamba"]  # its own loop keeps a state
EVERYDAY = [*(kind for kind in NATIVE if kind != "qwen3"), "hf gemma3"]
"""All native ones, but qwen3, which a mixture of its family represents; of transformers': one that is tied, with two
rotary embeddings and a window."""


def source_of(model: str, folder: Path, **changes: Any) -> tuple[Path, list[str]]:
    """Write transformers' model; return its folder, and the settings that train it."""
    if model.startswith("hf "):
        source = hf_models.folder_of(folder, model.removeprefix("hf "), **changes)
        return source, overrides(source)
    source = native_models.write_theirs(model, folder, **changes)
    return source, [f"model.name={model}", f"train.init_from={source}", *hf_models.SETTINGS]


def global_batches(config: Any) -> list[dict[str, torch.Tensor]]:
    """Return what each step trains on, as a loader on one rank reads it in a single micro-batch."""
    whole = replace(config, train=replace(config.train, micro_batch_size=config.train.global_batch_size))
    source = open_source(config.data, config.vocab_size, "train")
    return list(islice(iter(TrainLoader.from_config(source, whole, 0, 1, torch.device("cpu"))), NUM_STEPS))


def train(config: Any) -> list[float]:
    trainer = Trainer(config)
    losses = [record.loss for record in trainer.steps()]
    trainer.save_checkpoint(wait=True)
    trainer.close()
    return losses


@pytest.mark.parametrize("model", campaign_except([*NATIVE, *(f"hf {kind}" for kind in OF_TRANSFORMERS)], EVERYDAY))
def test_steps_and_the_export_equal_those_of_transformers(model: str, tmp_path: Path) -> None:
    """With two micro-batches a step. The loop knows nothing of them, nor of this project."""
    source, settings = source_of(model, tmp_path / "source")
    config = load_config("llama_small", [*settings, f"run.dir={tmp_path / 'run'}"])
    losses = train(config)
    expected, trained = plain_losses(source, global_batches(config), config.optim.lr)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)

    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    loaded, report = load_with_transformers(tmp_path / "out")
    assert not any(report.values()), report
    assert type(loaded) is type(trained)
    tokens = global_batches(config)[0]["tokens"]
    with torch.no_grad():
        logits, expected_logits = (each.eval()(tokens).logits for each in (loaded, trained))
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4 * float(expected_logits.abs().max()))
    here, again = load_weights(tmp_path / "run").state_dict(), load_weights(tmp_path / "out").state_dict()
    if model.startswith("hf "):
        again = loaded.state_dict()
    assert here.keys() == again.keys()
    assert [name for name, weight in here.items() if not torch.equal(weight, again[name])] == []


@pytest.mark.parametrize("model", campaign_except(["qwen3_moe", "gpt_oss"], ["qwen3_moe"]))
def test_experts_are_balanced_over_the_global_batch(model: str, tmp_path: Path) -> None:
    """As transformers balances them with the whole batch at once, although each micro-batch has a quarter of it."""
    source, settings = source_of(model, tmp_path / "source", output_router_logits=True, router_aux_loss_coef=0.5)
    exact = ["model.balance_shares=exact", f"run.dir={tmp_path / 'run'}"]
    config = load_config("llama_small", [*settings, *exact])
    assert config.train.micro_batch_size == config.train.global_batch_size // 4
    expected, _ = plain_losses(source, global_batches(config), config.optim.lr)
    torch.testing.assert_close(train(config), expected, rtol=1e-5, atol=0)
