"""Generates text, one token at a time; not a serving engine.  Independent of files and commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainer.distributed.world import World
from trainer.sequence import Cache, whole

NO_TOKEN = -1
"""What is chosen where the logits are not finite: a text ends there, and training goes on."""

_TOGETHER = 512
"""How many tokens of a prompt a model reads at once: the logits of all of them are there for a moment."""


@dataclass(frozen=True)
class Sampling:
    """The way a token is chosen.

    temperature: what logits are divided by; 0 takes the likeliest token.  top_k: of how many likeliest tokens one is
    drawn, 0 for all; top_p: and of those, of as few as have this share of the probability together.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def choose(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """Return a token by its logits (V,); NO_TOKEN where they tell of none."""
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


class Reader(Protocol):
    """Reads a text by and by: called with the tokens that follow those that it has read, it returns the logits (V,) of
    the next one.
    """

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor: ...


class CachedReader:
    """Reads with a model that goes through `trainer.sequence`: each token once."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device, self._cache = model, device, Cache()

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        for start in range(0, len(tokens), _TOGETHER):
            part = torch.tensor([tokens[start : start + _TOGETHER]], device=self._device)
            logits_1TV = self._model(part, documents=self._cache)
            self._cache.advance(part.shape[1])
        return logits_1TV[0, -1]


class WindowReader:
    """Reads with any causal model: the last `context` tokens anew each time.

    Every forward has the shape (1, context), so that a compiled model is not compiled again.
    """

    def __init__(self, model: nn.Module, device: torch.device, context: int) -> None:
        self._model, self._device, self._context = model, device, context
        self._tokens: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        self._tokens = [*self._tokens, *tokens][-self._context :]
        padded = self._tokens + [0] * (self._context - len(self._tokens))
        logits: torch.Tensor = self._model(torch.tensor([padded], device=self._device))
        return logits[0, len(self._tokens) - 1]


class TransformersReader:
    """Reads with a model of transformers, and its own cache."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._past: Any = None

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        given = torch.tensor([list(tokens)], device=self._device)
        found = self._model(input_ids=given, past_key_values=self._past, use_cache=True)
        self._past = found.past_key_values
        logits: torch.Tensor = found.logits[0, -1]
        return logits


def goes_through_sequence(model: nn.Module) -> bool:
    """Return whether the model takes a `Cache` for its documents: those of transformers have caches of their own."""
    named = inspect.signature(model.forward).parameters
    return {"documents", "borders"} <= named.keys() and not is_of_transformers(model)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether the model's class is transformers', or derived from one."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


@torch.no_grad()
def write(
    read: Reader,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    ends: Collection[int] = (),
    agree: Callable[[int], int] = int,
) -> Iterator[int]:
    """Yield at most `num_tokens` tokens that follow `prompt`, up to and with the first of `ends`, or NO_TOKEN.

    agree: called with each token that was chosen; what it returns is what is taken.
    """
    given = list(prompt)
    for _ in range(num_tokens):
        token = agree(sampling.choose(read(given), generator))
        if token == NO_TOKEN:
            return
        yield token
        if token in ends:
            return
        given = [token]


@torch.no_grad()
def write_sample(
    model: nn.Module,
    world: World,
    prompt: list[int],
    num_tokens: int,
    context: int,
    is_compiled: bool = False,
    ends: Collection[int] = (),
) -> list[int]:
    """Return `prompt` followed by at most `num_tokens` that the model chose, up to and with the first of `ends`.

    All ranks call it: each forward gathers a sharded model.  Rank 0 draws, and the others learn what it drew.
    `context`: how many tokens the model has been trained on at once.
    """
    fits = len(prompt) + num_tokens <= context
    read: Reader = WindowReader(model, world.device, context)
    if fits and goes_through_sequence(model) and not is_compiled:
        read = CachedReader(model, world.device)
    generator = torch.Generator().manual_seed(0)
    agree: Callable[[int], int] = lambda token: int(world.broadcast(token))  # noqa: E731
    with whole():
        return [*prompt, *write(read, prompt, num_tokens, Sampling(), generator, ends, agree)]
