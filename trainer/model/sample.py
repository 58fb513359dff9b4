"""Generates text, one token at a time, for samples during training and the `generate` command; not a serving engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from trainer.distributed.world import World
from trainer.sequence import Cache, full_sequences

NO_TOKEN = -1
"""Returned instead of a token if the logits are not finite: the text ends there, and training continues."""

_PREFILL_TOKENS = 512
"""Number of prompt tokens to process at once, which bounds the memory for their logits."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    temperature: divides the logits; 0 means greedy decoding.  top_k: sample from this many of the likeliest tokens, 0
    for all.  top_p: sample from the fewest likeliest tokens whose total probability reaches this.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def choose(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """Sample a token from its logits (V,); NO_TOKEN if they are not finite."""
        logits_V = logits_V.float().cpu()
        probs_V = (logits_V / (self.temperature or 1.0)).softmax(0)
        if not probs_V.isfinite().all():
            return NO_TOKEN
        if self.temperature == 0.0:
            return int(logits_V.argmax())
        if self.top_k or self.top_p < 1.0:
            sorted_V, order_V = probs_V.sort(descending=True, stable=True)
            before_V = sorted_V.cumsum(0) - sorted_V
            dropped_V = before_V >= self.top_p
            dropped_V[0] = False
            if self.top_k:
                dropped_V[self.top_k :] = True
            probs_V = probs_V.index_fill(0, order_V[dropped_V], 0.0)
        return int(torch.multinomial(probs_V, 1, generator=generator))


GREEDY = Sampling(temperature=0.0)


Decoder: TypeAlias = Callable[[Sequence[int]], torch.Tensor]
"""Feeds text to a model step by step.

A call with the tokens that follow those of earlier calls returns the logits (V,) of the next token.
"""


class CachedDecoder:
    """Processes each token once, with a KV cache; for models based on `trainer.sequence`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device, self._cache = model, device, Cache()

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        for start in range(0, len(tokens), _PREFILL_TOKENS):
            part = torch.tensor([tokens[start : start + _PREFILL_TOKENS]], device=self._device)
            logits_1TV = self._model(part, documents=self._cache)
            self._cache.advance(part.shape[1])
        return logits_1TV[0, -1]


class WindowDecoder:
    """Works with any causal model: processes the last `context` tokens again at each step.

    Every forward pass has the shape (1, context), so that a compiled model is not recompiled.
    """

    def __init__(self, model: nn.Module, device: torch.device, context: int) -> None:
        self._model, self._device, self._context = model, device, context
        self._tokens: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        self._tokens = [*self._tokens, *tokens][-self._context :]
        padded = self._tokens + [0] * (self._context - len(self._tokens))
        logits: torch.Tensor = self._model(torch.tensor([padded], device=self._device))
        return logits[0, len(self._tokens) - 1]


class TransformersDecoder:
    """Uses a transformers model with its own KV cache."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._past: Any = None

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        input_ids = torch.tensor([list(tokens)], device=self._device)
        output = self._model(input_ids=input_ids, past_key_values=self._past, use_cache=True)
        self._past = output.past_key_values
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def supports_kv_cache(model: nn.Module) -> bool:
    """Return whether the model accepts a `Cache` as its documents; transformers models have their own caches."""
    arguments = inspect.signature(model.forward).parameters
    return {"documents", "borders"} <= arguments.keys() and not is_transformers_model(model)


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether the model's class, or one of its base classes, is from transformers."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


@torch.no_grad()
def generate_tokens(
    decode: Decoder,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    ends: Collection[int] = (),
    agree: Callable[[int], int] = int,
) -> Iterator[int]:
    """Yield up to `num_tokens` tokens that continue `prompt`, ending with the first of `ends`, or before NO_TOKEN.

    agree: maps each sampled token to the one to use, so that ranks agree.
    """
    new_tokens = list(prompt)
    for _ in range(num_tokens):
        token = agree(sampling.choose(decode(new_tokens), generator))
        if token == NO_TOKEN:
            return
        yield token
        if token in ends:
            return
        new_tokens = [token]


@torch.no_grad()
def generate_sample(
    model: nn.Module,
    world: World,
    prompt: list[int],
    num_tokens: int,
    context: int,
    is_compiled: bool = False,
    ends: Collection[int] = (),
) -> list[int]:
    """Return `prompt` followed by up to `num_tokens` generated tokens, ending with the first of `ends`.

    Called by all ranks, since each forward pass gathers a sharded model.  Rank 0 samples and broadcasts each token.
    `context`: the sequence length that the model was trained with.
    """
    fits = len(prompt) + num_tokens <= context
    decode: Decoder = WindowDecoder(model, world.device, context)
    if fits and supports_kv_cache(model) and not is_compiled:
        decode = CachedDecoder(model, world.device)
    generator = torch.Generator().manual_seed(0)
    agree: Callable[[int], int] = lambda token: int(world.broadcast(token))  # noqa: E731
    with full_sequences():
        return [*prompt, *generate_tokens(decode, prompt, num_tokens, Sampling(), generator, ends, agree)]
