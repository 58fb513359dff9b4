"""Plans the memory for generating texts, by `trainer.generate` or inside a training step, as in reinforcement learning.

In a step, the training state stays in memory, and so do the gathered weights (`trainer.gathered`).  In addition, the
texts need a cache, and calls of the model and the sampling of tokens allocate temporaries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainer.errors import setting_error
from trainer.experts import fake_tensors
from trainer.model.network import build_network
from trainer.model.sample import PREFILL_TOKENS, last_logits_option, supports_kv_cache
from trainer.plan.kernels import use_gpu_kernels
from trainer.plan.plan import Generation, Plan
from trainer.plan.probe import make_fake
from trainer.plan.step import Layout
from trainer.plan.trace import MemoryMeter, UnitInfo
from trainer.sequence import Cache, full_sequences, last_logits_only

SAMPLING_BYTES = 30
"""Bytes per text and vocabulary entry while a token is sampled: log-probabilities, and noise in float64."""


@dataclass(frozen=True)
class GenerationWorkload:
    """The number of texts that a rank generates at once, and the maximum lengths of prompts and answers in tokens."""

    number: int
    prompt: int
    answer: int

    @staticmethod
    def parse(text: str) -> GenerationWorkload:
        """Parse "64x256+768".  Raises UserError."""
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if match is None or not all(int(number) for number in match.groups()):
            rule = "must be the number of texts, x, the maximum prompt length, +, the maximum answer length"
            raise setting_error("generate", text, rule, example="64x256+768")
        return GenerationWorkload(*map(int, match.groups()))


def with_generation(plan: Plan, texts: GenerationWorkload) -> Plan:
    """Return the plan of a run that also generates texts inside its steps.

    Raises UserError if the model has no KV cache, or if its code cannot run on fake tensors.
    """
    config = plan.config
    try:
        dtype = getattr(torch, config.fsdp.param_dtype)
        cache, temporaries = memory_of_texts(build_network(config), dtype, plan.machine.device_type, texts)
    except Exception as error:  # from the model's own code
        text = str(error).splitlines()[0] if str(error) else ""
        rule = f"cannot be planned: generating on meta tensors fails with {type(error).__name__}: {text}"
        raise setting_error("model.name", config.model.name, rule) from error
    weights = _gathered_bytes(plan.layout, plan.trace.units)
    description = f"{texts.number} texts of {texts.prompt} + {texts.answer} tokens"
    return replace(plan, generation=Generation(description, weights, cache, temporaries))


def advice_on_fewer_texts(plan: Plan, texts: GenerationWorkload | None) -> list[str]:
    """Return a line with the number of texts that would fit, if `plan` does not fit because of generation."""
    budget = plan.machine.budget_bytes
    while (
        texts is not None
        and (generation := plan.generation) is not None
        and (moment := plan.generation_moment) is not None
    ):
        if plan.fits:
            return [f"would fit: generate={texts.number}x{texts.prompt}+{texts.answer}"]
        bytes_of_texts = generation.cache + generation.temporaries
        # Memory is not quite proportional to the number of texts, which also determines how prompts are fed.
        number = min(texts.number - 1, int(texts.number * (budget - moment.total + bytes_of_texts) / bytes_of_texts))
        if number < 1 or moment.total < plan.memory.peak.total:
            return []
        texts = replace(texts, number=number)
        plan = with_generation(plan, texts)
    return []


def _gathered_bytes(layout: Layout, units: Sequence[UnitInfo]) -> int:
    """Return the bytes of the gathered weights, which are in memory in addition to the shards."""
    if layout.is_unsharded:
        return 0
    total = 0
    for parameter in (parameter for unit in units for parameter in unit.parameters):
        size = parameter.gathered_size(layout.param_size)
        if layout.division(parameter).parts > 1 or size != parameter.element_size:
            total += layout.division(parameter).gathered_numel(parameter.shape) * size
    return total


def memory_of_texts(
    model: nn.Module, dtype: torch.dtype, device_type: str, texts: GenerationWorkload
) -> tuple[int, int]:
    """Return the bytes of the KV cache at the texts' full length, and those of temporary tensors.

    Temporary tensors are the larger of two: those of a forward pass with as many tokens as a decoder feeds at once, and
    those of sampling after it.

    model: on the meta device; unusable afterwards, since the call runs on fake tensors.  dtype: of the computation.
    Raises any error of the model's code if it cannot run on fake tensors.
    """
    model.eval()
    if device_type == "cuda":
        use_gpu_kernels(model)
    length, padding = texts.prompt + texts.answer, [texts.prompt - 1, *[0] * (texts.number - 1)]
    num_fed, capacity = texts.prompt, length
    if supports_kv_cache(model):
        num_fed = min(texts.prompt, max(1, PREFILL_TOKENS // texts.number))
        capacity = _capacity(texts, num_fed)
    with fake_tensors(), torch.no_grad(), full_sequences(), last_logits_only():
        make_fake(model, dtype, set())
        tokens = torch.zeros(texts.number, num_fed, dtype=torch.int64)
        with MemoryMeter(model, [tokens]) as meter:
            if supports_kv_cache(model):
                cache = Cache(padding, capacity - max(padding))
                cache.advance(length - num_fed)
                output = model(tokens, documents=cache)
                share, vocab_size = 1.0, output.shape[-1]
            else:
                output = model(input_ids=tokens, use_cache=True, **last_logits_option(model))
                cache, share, vocab_size = output.past_key_values, length / texts.prompt, output.logits.shape[-1]
            meter.cut()
            del output
            if isinstance(cache, Cache):
                cache.advance(num_fed)  # this drops the call's masks
            meter.cut()
        called, freed = meter.segments()
        cache_bytes = called.net + freed.net
        del cache
    logits = -freed.net
    sampling = SAMPLING_BYTES * texts.number * vocab_size
    return round(cache_bytes * share), max(called.peak - cache_bytes, logits + sampling)


def _capacity(texts: GenerationWorkload, num_fed: int) -> int:
    """Return the final capacity of a cache in tokens per text, found by filling a cache with heads of size 1."""
    cache, keys = Cache([texts.prompt - 1], texts.prompt + texts.answer), torch.empty(0)
    sizes = [num_fed] * (texts.prompt // num_fed) + [texts.prompt % num_fed] * (texts.prompt % num_fed > 0)
    for size in (*sizes, *[1] * texts.answer):
        keys, _ = cache.extend(torch.empty(1, 1, size, 1), torch.empty(1, 1, size, 1))
        cache.advance(size)
    return keys.untyped_storage().nbytes() // keys.element_size()
