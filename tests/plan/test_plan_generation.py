"""The plan of generating texts inside a step, compared with what a generation allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.ranks import tiny_overrides
from trainer import RunConfig, Sampling, UserError, generate_batch, load_config
from trainer.config import MeshShape
from trainer.model.materialize import materialize
from trainer.model.network import build_network
from trainer.plan.__main__ import command_line as plan_command
from trainer.plan.generation import SAMPLING_BYTES, GenerationWorkload, with_generation
from trainer.plan.machine import find_machine
from trainer.plan.plan import Generation, make_plan
from trainer.plan.trace import MemoryMeter
from trainer.sequence import Cache

SHAPE = ["model.dim=64", "model.vocab_size=4096", "model.num_layers=3", "data.seq_len=64"]
TEXTS = GenerationWorkload(4, 24, 60)
"""Longer than the cache's first allocation, 64 tokens, so that the padding counts."""


def planned(config: RunConfig, ranks: int, texts: GenerationWorkload = TEXTS) -> Generation:
    plan = with_generation(make_plan(config, MeshShape(1, ranks), find_machine("cpu")), texts)
    assert plan.generation is not None
    return plan.generation


def generated(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes of the cache of texts, and the peak of everything that a generation allocates."""
    largest = 0
    advance = Cache.advance

    def watch(cache: Cache, num_tokens: int) -> None:
        nonlocal largest
        largest = max(largest, sum(tensor.nbytes for layer in cache._layers for tensor in layer))
        advance(cache, num_tokens)

    monkeypatch.setattr(Cache, "advance", watch)
    prompts = [[1] * TEXTS.prompt_len, *[[1] for _ in range(TEXTS.num_completions - 1)]]
    with MemoryMeter(model, []) as meter:
        generate_batch(model, prompts, TEXTS.completion_len, Sampling(1.0))
    meter.cut()
    return largest, meter.segments()[0].peak


@pytest.mark.parametrize("recipe", ["llama_small", pytest.param("deepseek_v3_small", marks=pytest.mark.campaign)])
def test_cache_and_temporaries_are_those_of_a_generation(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tiny_overrides(*SHAPE) if recipe == "llama_small" else ["model.num_layers=2", "data.seq_len=64"]
    config = load_config(recipe, [*own, "fsdp.param_dtype=float32", "train.micro_batch_size=1"])
    model = build_network(config)
    materialize(model, 0, torch.device("cpu"), config.recipe.init)
    cache, peak = generated(model, monkeypatch)
    found = planned(config, 1)
    assert found.weights == 0, "they are not sharded"
    print(f"cache {found.cache} of {cache}, peak {found.cache + found.temporaries} of {peak}")
    assert found.cache == pytest.approx(cache, rel=0.05)
    assert peak <= 1.02 * (found.cache + found.temporaries)
    assert found.cache + found.temporaries <= 1.3 * peak


def test_all_weights_are_gathered_in_the_dtype_of_computation() -> None:
    config = load_config("llama_small", tiny_overrides(*SHAPE, "fsdp.param_dtype=bfloat16"))
    numel = sum(parameter.numel() for parameter in build_network(config).parameters())
    assert planned(config, 4).weights == pytest.approx(2 * numel, rel=0.01)


def test_choosing_a_token_needs_the_bytes_that_are_planned() -> None:
    from trainer.model.sample import gumbel_noise

    logits = torch.randn(4, 20_000)
    with MemoryMeter(nn.Module(), [logits]) as meter:
        logprobs = logits.float().log_softmax(1)
        noise = gumbel_noise(0, range(4), [5] * 4, 20_000, logits.device)
        Sampling(1.0).choose(logprobs, noise)
        Sampling(1.0, top_p=0.9).choose(logprobs, noise)
    meter.cut()
    found = meter.segments()[0].peak / logits.numel()
    print(f"{found:.1f} bytes for each entry of the vocabulary")
    assert 0.7 * SAMPLING_BYTES <= found <= SAMPLING_BYTES


def test_a_generation_that_does_not_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["recipe=llama3_8b", "model.num_layers=2", "ranks=8", "data.seq_len=2048", "train.compile=false"]
    own += ["train.micro_batch_size=1", "train.activation_checkpoint=full", "device=h100", "memory_gib=20"]
    assert plan_command([*own, "generate=4096x1024+7168"]) == 3
    said = capsys.readouterr().out
    assert "in the generation of 4096 texts of 1024 + 7168 tokens" in said.replace("\n", " ")
    number = said.partition("would fit: generate=")[2].partition("x")[0]
    assert plan_command([*own, f"generate={number}x1024+7168", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["needed_gib"] > 19, "and hardly more would fit"
    with pytest.raises(UserError, match=r"generate=64: must be NxP\+A: N completions"):
        GenerationWorkload.parse("64")


@pytest.mark.campaign
def test_models_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from tests.helpers.hf_models import folder_of

    folder = folder_of(tmp_path / "base", "llama")
    config = load_config("llama_small", ["model.name=hf", f"model.path={folder}", *tiny_overrides()[-3:]])
    shape = config.model.config
    head = shape["hidden_size"] // shape["num_attention_heads"]
    of_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * 4
    found = planned(config, 1)
    num_tokens = TEXTS.num_completions * (TEXTS.prompt_len + TEXTS.completion_len)
    assert found.cache == pytest.approx(num_tokens * of_token, rel=0.05)
