"""The plan of generating texts inside a step, compared with what a generation allocates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import meshtrainer
from tests.helpers.launch import tiny
from tests.helpers.plan_truth import StorageMeter, planned
from trainer import Sampling, generate_batch, load_config
from trainer.model.initial_weights import materialize
from trainer.model.network import build_network

SHAPE = ["model.dim=64", "model.vocab_size=4096", "model.num_layers=3", "data.seq_len=64", "device=cpu"]
TEXTS, PROMPT, COMPLETION = 4, 24, 60
"""Longer than the cache's first allocation, 64 tokens, so that the padding counts."""
GENERATE = f"generate={TEXTS}x{PROMPT}+{COMPLETION}"
KV_BYTES = 3 * 2 * 2 * 16 * 4
"""Of each token: keys and values of 3 layers with 2 heads of 16 numbers."""


def test_cache_and_temporaries_are_those_of_a_generation() -> None:
    own = tiny(*SHAPE[:-1], "model.num_kv_heads=2", "fsdp.param_dtype=float32", "train.micro_batch_size=1")
    whole, sharded = (planned("recipe=llama_small", *own, "device=cpu", f"ranks={n}", GENERATE) for n in (1, 4))
    found = whole["memory"]["generation"]
    assert found["weights"] == 0, "they are not sharded"
    assert sharded["memory"]["generation"]["weights"] == 4 * sharded["parameters"]
    assert found["cache"] >= TEXTS * (PROMPT + COMPLETION) * KV_BYTES
    config = load_config("llama_small", own)
    model = build_network(config)
    materialize(model, 0, torch.device("cpu"), config.spec.init)
    meter = StorageMeter()
    with meter.running():
        for tensor in (*model.parameters(), *model.buffers()):
            meter.note(tensor)
        before = meter.live
        prompts = [[1] * PROMPT, *[[1] for _ in range(TEXTS - 1)]]
        generate_batch(model, prompts, COMPLETION, Sampling(1.0))
    peak, plan = meter.peak - before, found["cache"] + found["temporaries"]
    print(f"planned {plan}, measured {peak}")
    assert peak <= 1.02 * plan
    assert plan <= 1.3 * peak


@pytest.mark.campaign
def test_a_generation_that_does_not_fit_is_reported() -> None:
    """The weights are gathered in the dtype of the computation; what the message proposes just fits."""
    own = ["recipe=llama3_8b", "model.num_layers=2", "ranks=8", "data.seq_len=2048", "train.compile=false"]
    own += ["train.micro_batch_size=1", "train.activation_checkpoint=full", "device=h100", "memory_gib=20"]
    code, out, _ = meshtrainer("plan", *own, "generate=4096x1024+7168")
    assert code == 3
    (number,) = re.findall(r"would fit: generate=(\d+)x1024\+7168", out)
    found = planned(*own, f"generate={number}x1024+7168")
    assert found["memory"]["needed_gib"] > 19, "and hardly more would fit"
    assert found["memory"]["generation"]["weights"] == pytest.approx(2 * found["parameters"], rel=0.01)


@pytest.mark.campaign
def test_models_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from tests.helpers.hf_models import folder_of

    model = ["model.name=hf", f"model.path={folder_of(tmp_path / 'base', 'llama')}", "data.seq_len=64"]
    shape = load_config("llama_small", model).model.config
    head = shape["hidden_size"] // shape["num_attention_heads"]
    of_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * 4
    found = planned("recipe=llama_small", *model, "device=cpu", "ranks=1", "fsdp.param_dtype=float32", GENERATE)
    num_tokens = TEXTS * (PROMPT + COMPLETION)
    assert found["memory"]["generation"]["cache"] == pytest.approx(num_tokens * of_token, rel=0.05)
