"""Plans the memory for generation, by `trainer.generate` or inside a training step, as in reinforcement learning.

Inside a step, the training state stays in memory, next to the gathered weights (`trainer.gathered`).  Generation also
needs a KV cache, and temporaries for the forward passes and for sampling tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainer.errors import reason_of, setting_error
from trainer.experts import fake_tensors
from trainer.model.network import build_network
from trainer.model.sample import PREFILL_TOKENS, cache_of, last_logits_option, supports_kv_cache
from trainer.plan.kernels import use_gpu_kernels
from trainer.plan.layout import Layout
from trainer.plan.plan import Generation, Plan
from trainer.plan.probe import make_fake
from trainer.plan.trace import MemoryMeter, UnitInfo
from trainer.sequence import Cache, full_sequences, last_logits_only

SAMPLING_BYTES = 30
"""Bytes per sequence and vocabulary entry while a token is sampled, for log-probabilities and float64 noise."""


@dataclass(frozen=True)
class GenerationWorkload:
    """How many completions each rank generates at once, and the maximum lengths of prompts and completions."""

    num_completions: int
    prompt_len: int
    """Maximum length of a prompt in tokens."""
    completion_len: int
    """Maximum length of a completion in tokens."""

    @staticmethod
    def parse(text: str) -> GenerationWorkload:
        """Parse a workload such as "64x256+768".  Raises UserError for any other format, or if a number is 0."""
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if match is None or not all(int(number) for number in match.groups()):
            rule = "must be NxP+A: N completions of up to A tokens each, for prompts of up to P tokens"
            raise setting_error("generate", text, rule, proposal="64x256+768")
        return GenerationWorkload(*map(int, match.groups()))


def with_generation(plan: Plan, workload: GenerationWorkload) -> Plan:
    """Return the plan of a run that also generates completions inside its steps.

    Raises UserError if the model does not support a KV cache, or if its code cannot run on fake tensors.
    """
    config = plan.config
    try:
        dtype = getattr(torch, config.fsdp.param_dtype)
        cache, temporaries = memory_of_generation(build_network(config), dtype, plan.machine.device_type, workload)
    except Exception as error:  # from the model's own code
        rule = f"cannot be planned: generating on fake tensors fails with {type(error).__name__}: {reason_of(error)}"
        raise setting_error("model.name", config.model.name, rule) from error
    weights = _gathered_bytes(plan.layout, plan.trace.units)
    description = f"{workload.num_completions} texts of {workload.prompt_len} + {workload.completion_len} tokens"
    return replace(plan, generation=Generation(description, weights, cache, temporaries))


def advice_on_workload(plan: Plan, workload: GenerationWorkload | None) -> list[str]:
    """If `plan` does not fit because of generation, return a line with a smaller workload that would fit."""
    budget = plan.machine.budget_bytes
    while (
        workload is not None
        and (generation := plan.generation) is not None
        and (peak := plan.generation_peak) is not None
    ):
        if plan.fits:
            return [f"would fit: generate={workload.num_completions}x{workload.prompt_len}+{workload.completion_len}"]
        generation_bytes = generation.cache + generation.temporaries
        # Not quite proportional: the number of sequences also determines how many prompt tokens are fed at once.
        proportional = int(workload.num_completions * (budget - peak.total + generation_bytes) / generation_bytes)
        number = min(workload.num_completions - 1, proportional)
        if number < 1 or peak.total < plan.memory.peak.total:
            return []
        workload = replace(workload, num_completions=number)
        plan = with_generation(plan, workload)
    return []


def _gathered_bytes(layout: Layout, units: Sequence[UnitInfo]) -> int:
    """Return the bytes that the gathered weights occupy in addition to the shards."""
    if layout.is_unsharded:
        return 0
    total = 0
    for parameter in (parameter for unit in units for parameter in unit.parameters):
        size = parameter.gathered_element_size(layout.param_size)
        if layout.division(parameter).parts > 1 or size != parameter.element_size:
            total += layout.division(parameter).gathered_numel(parameter.shape) * size
    return total


def memory_of_generation(
    model: nn.Module, dtype: torch.dtype, device_type: str, workload: GenerationWorkload
) -> tuple[int, int]:
    """Return the bytes of the KV cache at full sequence length, and the peak bytes of temporary tensors.

    The peak is that of a forward pass over as many tokens as generation feeds at once, or that of sampling after it,
    whichever is higher.

    model: on the meta device; unusable afterwards, since the call makes its tensors fake.  dtype: the compute dtype.
    Propagates any error that the model's code raises on fake tensors.
    """
    model.eval()
    if device_type == "cuda":
        use_gpu_kernels(model)
    length = workload.prompt_len + workload.completion_len
    padding = [workload.prompt_len - 1, *[0] * (workload.num_completions - 1)]
    num_fed, capacity = workload.prompt_len, length
    if supports_kv_cache(model):
        num_fed = min(workload.prompt_len, max(1, PREFILL_TOKENS // workload.num_completions))
        capacity = _capacity(workload, num_fed)
    with fake_tensors(), torch.no_grad(), full_sequences(), last_logits_only():
        make_fake(model, dtype)
        tokens = torch.zeros(workload.num_completions, num_fed, dtype=torch.int64)
        with MemoryMeter(model, [tokens]) as meter:
            if supports_kv_cache(model):
                cache = Cache(padding, capacity - max(padding))
                cache.advance(length - num_fed)
                output = model(tokens, documents=cache)
                growth, vocab_size = 1.0, output.shape[-1]
            else:
                output = model(input_ids=tokens, use_cache=True, **last_logits_option(model))
                cache, vocab_size = cache_of(output), output.logits.shape[-1]
                growth = length / workload.prompt_len
            meter.cut()
            del output
            if isinstance(cache, Cache):
                cache.advance(num_fed)  # this drops the call's masks
            meter.cut()
        called, freed = meter.segments()
        cache_bytes = called.net + freed.net
        del cache
    logits = -freed.net
    sampling = SAMPLING_BYTES * workload.num_completions * vocab_size
    return round(cache_bytes * growth), max(called.peak - cache_bytes, logits + sampling)


def _capacity(workload: GenerationWorkload, num_fed: int) -> int:
    """Return the final capacity of a cache in tokens per sequence, found by filling a cache with heads of size 1."""
    cache = Cache([workload.prompt_len - 1], workload.prompt_len + workload.completion_len)
    keys = torch.empty(0)
    num_calls, rest = divmod(workload.prompt_len, num_fed)
    sizes = [num_fed] * num_calls + [rest] * (rest > 0)
    for size in (*sizes, *[1] * workload.completion_len):
        keys, _ = cache.extend(torch.empty(1, 1, size, 1), torch.empty(1, 1, size, 1))
        cache.advance(size)
    return keys.untyped_storage().nbytes() // keys.element_size()
