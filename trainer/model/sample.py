"""Generates completions for batches of prompts; used for logged samples, the `generate` command and rollouts.

This is not a serving engine: all sequences of a batch start together, and the batch runs until the last one ends.

Shape suffixes: B sequences in the batch, R sequences that remain in it, T tokens per call, S tokens so far, V
vocabulary, K candidates for the next token.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trainer.errors import setting_error
from trainer.model.gradients import evaluation_mode, forward_is_collective
from trainer.sequence import Cache, full_sequences, last_logits_only

NO_TOKEN = -1
"""Sentinel for a token whose log-probability is not finite.  The completion ends there, without an exception."""

PREFILL_TOKENS = 512
"""Maximum number of prompt tokens in one call of `CachedDecoder`, over all sequences (but at least one token of each);
bounds the memory for activations."""

_MIN_CONTEXT = 1024
"""Minimum context length for a model that declares no maximum length."""


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling tokens.

    temperature: the divisor of the logits, which must be at least 0 and finite; 0 means greedy decoding.
    top_k: the number of most likely tokens to sample from, at least 0; 0 means all.
    top_p: a probability, above 0 and at most 1; tokens are sampled from the smallest set of the most likely ones whose
        total probability reaches it.

    Tokens that tie with the last one kept by `top_k` or `top_p` are kept as well.  Raises UserError for a value out of
    range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for key, is_legal, rule in (
            ("temperature", 0.0 <= self.temperature < math.inf, "must be at least 0 and finite"),
            ("top_k", self.top_k >= 0, "must be at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
        ):
            if not is_legal:
                raise setting_error(key, getattr(self, key), rule, proposal=getattr(Sampling, key))

    def choose(self, logprobs_BV: torch.Tensor, noise_BV: torch.Tensor | None = None) -> torch.Tensor:
        """Return one token per sequence, (B,), given log-probabilities and, unless decoding is greedy, Gumbel noise.

        The token with the largest sum of log-probability and Gumbel noise is a sample from the distribution
        (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030).
        """
        if self.temperature == 0.0 or noise_BV is None:
            return logprobs_BV.argmax(1)
        scores_BV = logprobs_BV / self.temperature
        if self.top_k or self.top_p < 1.0:
            scores_BV = scores_BV.masked_fill(scores_BV < self._lowest_score(scores_BV), -math.inf)
        return (scores_BV + noise_BV).argmax(1)

    def _lowest_score(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """Return the score of the least likely token that may be sampled, (B, 1)."""
        if self.top_k:
            sorted_BK = scores_BV.topk(min(self.top_k, scores_BV.shape[1])).values
        elif scores_BV.device.type == "cpu":
            # Torch would also sort the indices, which takes ten times as long: 33 ms for 8 rows of 49,152 tokens, as
            # long as the output projection of a small model.  Both put NaN before all other numbers.
            sorted_BK = torch.from_numpy(np.sort(scores_BV.detach().numpy(), axis=1)).flip(1)
        else:
            sorted_BK = scores_BV.sort(dim=1, descending=True).values
        probs_BK = (sorted_BK - scores_BV.logsumexp(1, keepdim=True)).exp()
        num_kept_B = (probs_BK.cumsum(1) - probs_BK < self.top_p).sum(1).clamp(min=1)
        return sorted_BK.gather(1, num_kept_B.unsqueeze(1) - 1)


GREEDY = Sampling(temperature=0.0)


def gumbel_noise(
    seed: int, indices: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return Gumbel noise (B, V) that depends only on the seed, each sequence's index and the token's position.

    So a sequence gets the same noise on any rank and in any batch.  Every number is a hash of a counter, which starts
    at a hash of seed, index and position; the mixing function is the finalizer of MurmurHash3 (as in SplitMix, Steele
    et al. 2014).
    """
    pairs = list(zip(indices, positions, strict=True))
    keys = [hashlib.blake2b(f"{seed} {index} {position}".encode(), digest_size=8).digest() for index, position in pairs]
    key_B2 = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int32).view(-1, 2).to(device)
    counter_V = torch.arange(vocab_size, dtype=torch.int32, device=device) * _as_int32(0x9E3779B9)
    hash_BV = counter_V + key_B2[:, :1]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hash_BV.bitwise_xor_((hash_BV >> shift) & (2 ** (32 - shift) - 1)).mul_(_as_int32(factor))  # wraps around
    hash_BV.bitwise_xor_(key_B2[:, 1:])
    # Strictly between 0 and 1.  Small values, which give the largest noise, keep full precision.
    uniform_BV = (hash_BV.double() + (2**31 + 0.5)).mul_(2.0**-32).float().clamp_(max=1 - 2.0**-24)
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


def _as_int32(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


# ---------------------------------------------------------------------------------------------------------------
# Decoders


class Decoder(ABC):
    """Feeds the sequences of a batch to a model, and returns the logits (B, V) for their next tokens."""

    @abstractmethod
    def begin(self, prompts: Sequence[Sequence[int]], length: int, max_tokens: int) -> torch.Tensor:
        """Feed the prompts, of at most `length` tokens each.

        max_tokens: the maximum length of a sequence, including its prompt.
        """

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed the next token of each sequence."""

    def keep(self, rows: Sequence[int]) -> bool:
        """Drop all sequences except `rows` and return True, or return False if this is not supported."""
        return False


class CachedDecoder(Decoder):
    """Processes each token once, with a KV cache; for models based on `trainer.sequence`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device, self._cache = model, device, Cache()

    def begin(self, prompts: Sequence[Sequence[int]], length: int, max_tokens: int) -> torch.Tensor:
        tokens_BT, padding = _pad_left(prompts, length)
        self._cache = Cache(padding, max_tokens)
        logits_BV = torch.empty(0)
        for part_BT in tokens_BT.split(max(1, PREFILL_TOKENS // len(prompts)), 1):
            logits_BV = self._call(part_BT)
        return logits_BV

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._call(torch.tensor(tokens).unsqueeze(1))

    def keep(self, rows: Sequence[int]) -> bool:
        self._cache.keep_rows(rows)
        return True

    def _call(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with last_logits_only():
            logits_BTV: torch.Tensor = self._model(tokens_BT.to(self._device), documents=self._cache)
        self._cache.advance(tokens_BT.shape[1])
        return logits_BTV[:, -1]


class WindowDecoder(Decoder):
    """Works with any causal model: reprocesses the last `context` tokens of each sequence at every step.

    Every forward pass has the shape (1, context), so that a compiled model is not recompiled.
    """

    def __init__(self, model: nn.Module, device: torch.device, context: int) -> None:
        self._model, self._device, self._context = model, device, context
        self._sequences: list[list[int]] = []

    def begin(self, prompts: Sequence[Sequence[int]], length: int, max_tokens: int) -> torch.Tensor:
        self._sequences = [list(prompt) for prompt in prompts]
        return torch.stack([self._call(sequence) for sequence in self._sequences])

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.append(token)
        return torch.stack([self._call(sequence) for sequence in self._sequences])

    def _call(self, sequence: list[int]) -> torch.Tensor:
        window = sequence[-self._context :]
        padded = window + [0] * (self._context - len(window))
        output = self._model(torch.tensor([padded], device=self._device))
        logits_1TV: torch.Tensor = getattr(output, "logits", output)
        return logits_1TV[0, len(window) - 1]


class TransformersDecoder(Decoder):
    """Uses a transformers model with its own KV cache; like `WindowDecoder` if the model returns none."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._options = last_logits_option(model)
        self._cache_name = cache_argument(model) or ""
        self._cache: Any = None
        self._num_tokens = self._max_tokens = 0
        self._mask_BS: torch.Tensor | None = None
        """True for tokens other than padding; None if there is no padding."""
        self._without_cache: WindowDecoder | None = None

    def begin(self, prompts: Sequence[Sequence[int]], length: int, max_tokens: int) -> torch.Tensor:
        tokens_BT, padding = _pad_left(prompts, length)
        self._cache = self._mask_BS = None
        self._num_tokens = 0
        self._max_tokens = max_tokens
        if any(padding):
            self._mask_BS = (torch.arange(length) >= torch.tensor(padding).unsqueeze(1)).to(self._device)
        logits_BV = self._call(tokens_BT)
        self._without_cache = None
        if self._cache is None:
            self._without_cache = WindowDecoder(self._model, self._device, max_tokens)
            logits_BV = self._without_cache.begin(prompts, length, max_tokens)
        return logits_BV

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        if self._without_cache is not None:
            return self._without_cache.extend(tokens)
        if self._mask_BS is not None:
            self._mask_BS = nn.functional.pad(self._mask_BS, (0, 1), value=True)
        return self._call(torch.tensor(tokens).unsqueeze(1))

    def keep(self, rows: Sequence[int]) -> bool:
        if not hasattr(self._cache, "batch_select_indices"):
            return False
        index_R = torch.tensor(rows, device=self._device)
        self._cache.batch_select_indices(index_R)
        if self._mask_BS is not None:
            self._mask_BS = self._mask_BS[index_R]
        return True

    def _call(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens_BT.to(self._device)}
        num_new, self._num_tokens = tokens_BT.shape[1], self._num_tokens + tokens_BT.shape[1]
        if self._mask_BS is not None:
            inputs["attention_mask"] = self._mask_BS.long()
        if self._takes_positions:  # without them, some hybrid models would count from 0 in every call
            if self._mask_BS is None:
                positions_BS = torch.arange(self._num_tokens, device=self._device).expand(tokens_BT.shape[0], -1)
            else:
                positions_BS = (self._mask_BS.long().cumsum(1) - 1).clamp(min=0, max=self._max_tokens - 1)
            inputs["position_ids"] = positions_BS[:, -num_new:]
        if self._cache is not None:
            inputs[self._cache_name] = self._cache
        output = self._model(**inputs, **self._options, use_cache=True)
        self._cache = cache_of(output)
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


def _pad_left(prompts: Sequence[Sequence[int]], length: int) -> tuple[torch.Tensor, list[int]]:
    """Return the prompts padded to `length` on the left, (B, T), and the number of padding tokens of each."""
    padding = [length - len(prompt) for prompt in prompts]
    rows = [[0] * number + list(prompt) for number, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows), padding


def build_decoder(model: nn.Module, device: torch.device, num_tokens: int, context: int | None = None) -> Decoder:
    """Return the fastest decoder for sequences of up to `num_tokens` tokens, prompts included.

    context: the maximum number of tokens in a forward pass; by default the model's maximum length.  Longer sequences
    use a sliding window of this length.
    """
    context = context or max_seq_len(model) or max(num_tokens, _MIN_CONTEXT)
    if num_tokens <= context and supports_kv_cache(model):
        return CachedDecoder(model, device)
    if num_tokens <= context and is_transformers_model(model) and cache_argument(model) is not None:
        return TransformersDecoder(model, device)
    return WindowDecoder(model, device, context)


def supports_kv_cache(model: nn.Module) -> bool:
    """Return whether the model can use a `Cache`, passed as its `documents` argument.

    Transformers models have their own caches.  A compiled model uses none: it would be recompiled for every length.
    """
    arguments = inspect.signature(model.forward).parameters
    takes_documents = "documents" in arguments and "cu_seqlens" in arguments
    if not takes_documents or is_transformers_model(model):
        return False
    return not any(module._compiled_call_impl is not None for module in model.modules())


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether the model's class, or one of its base classes, is from transformers."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument through which a transformers model takes its cache, or None if it takes none.

    The argument is found by its type, because its name differs between models and between versions of the library.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    return next((parameter.name for parameter in parameters if _is_cache_type(parameter.annotation)), None)


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return the cache in the output of a transformers model, or None if it has none."""
    return next((value for value in output.values() if _is_cache_type(type(value))), None)


def _is_cache_type(annotation: Any) -> bool:
    """Return whether a type, or one of the types in a union, is transformers' `Cache` or a similar class of a model."""
    if isinstance(annotation, str):
        return re.search(r"Cache\b", annotation) is not None
    if isinstance(annotation, type):
        bases = annotation.__mro__
        return any(base.__module__.startswith("transformers.") and base.__name__.endswith("Cache") for base in bases)
    return any(map(_is_cache_type, get_args(annotation)))


def last_logits_option(model: nn.Module) -> dict[str, int]:
    """Return the argument that makes a transformers model compute only the last token's logits, if it has one."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def max_seq_len(model: nn.Module) -> int | None:
    """Return the maximum sequence length of the model in tokens, or None if it does not declare one."""
    config = getattr(model, "config", None)
    lengths = (getattr(config, name, None) for name in ("max_seq_len", "max_position_embeddings"))
    return next((int(length) for length in lengths if length), None)


# ---------------------------------------------------------------------------------------------------------------
# Generating


class Token(NamedTuple):
    """A generated token."""

    row: int
    """Index of the prompt that it continues."""
    token: int
    """The token, or NO_TOKEN."""
    logprob: float
    """Its log-probability under the model, independent of the temperature."""


@dataclass(frozen=True)
class Generated:
    """The completion of one prompt.

    tokens: the generated tokens, including the end token if there is one.
    logprobs: their log-probabilities under the model, independent of temperature, top-k and top-p.
    finish: why the completion ended: with an end token, at its maximum length, or because the logits were not finite,
        so that no token could be drawn.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["end", "length", "not finite"]


def generate_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    sampling: Sampling = GREEDY,
    *,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    ends: Collection[int] = (),
    context: int | None = None,
    device: torch.device | None = None,
) -> list[Generated]:
    """Continue each prompt by up to `max_tokens` tokens, until one of `ends`; return the completions in order.

    max_tokens: one number, or one for each prompt.
    seed, indices: the noise for a token depends only on the seed, the index of its prompt (by default its place in
        `prompts`) and the token's position in the sequence.  So, except for rounding, a completion does not depend on
        the rest of the batch or on the ranks.
    context: see `build_decoder`; by default the maximum length of the model.
    device: the device that the model computes on; by default that of its parameters.

    The KV cache takes 2 x layers x key and value heads x head size elements per token of a sequence.

    Puts the model in evaluation mode during generation.  Collective if a forward pass is: for a sharded model outside
    `gathered`, and with experts on other ranks.  The ranks may then have different prompts, or none.  All of them run
    until the last sequence on any rank has ended, with one all-reduce of an integer per token.
    """
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    device = device or next(model.parameters()).device
    completions = [Generated([], [], "length") for _ in prompts]
    finishes: dict[int, Literal["end", "not finite"]] = {}
    with evaluation_mode(model), full_sequences():
        rank_sync = RankSync(device) if forward_is_collective(model) else None
        longest = longest_sequence(prompts, limits, rank_sync)
        decoder = build_decoder(model, device, longest, context)
        for row, token, logprob in generate_tokens(decoder, prompts, limits, sampling, seed, indices, ends, rank_sync):
            if token == NO_TOKEN:
                finishes[row] = "not finite"
                continue
            completions[row].tokens.append(token)
            completions[row].logprobs.append(logprob)
            if token in ends:
                finishes[row] = "end"
    return [Generated(c.tokens, c.logprobs, finishes.get(row, "length")) for row, c in enumerate(completions)]


def longest_sequence(
    prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], rank_sync: RankSync | None = None
) -> int:
    """Return the maximum length of a sequence, prompt included; with `rank_sync`, the maximum over all ranks."""
    longest = max((len(prompt) + limit for prompt, limit in zip(prompts, max_tokens, strict=True)), default=1)
    return longest if rank_sync is None else rank_sync.max(longest)


class RankSync:
    """Lets ranks that call the same sharded model agree on sizes, so that they call it equally often."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def max(self, number: int) -> int:
        """Return the maximum of `number` over all ranks.  One all-reduce, and a host sync."""
        numbers = torch.tensor(number, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)


@torch.no_grad()
def generate_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    sampling: Sampling,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    ends: Collection[int] = (),
    rank_sync: RankSync | None = None,
) -> Iterator[Token]:
    """Yield one token of each unfinished sequence, step by step, until all have ended.  See `generate_batch`.

    Finished sequences are dropped once they make up half of the batch, unless ranks must call the model together.
    """
    indices = range(len(prompts)) if indices is None else indices
    longest = longest_sequence(prompts, max_tokens, rank_sync)
    length, num_rows = max(map(len, prompts), default=1), len(prompts)
    if rank_sync is not None:  # calls must have the same shape on all ranks
        length, num_rows = rank_sync.max(length), rank_sync.max(num_rows)
    padded_prompts = [*prompts, *([0] for _ in range(num_rows - len(prompts)))]
    active = {row for row in range(len(prompts)) if max_tokens[row] > 0}
    lengths = [len(prompt) for prompt in padded_prompts]
    """Number of tokens of each sequence so far, including its prompt."""
    rows = list(range(num_rows))
    """The sequences still fed to the decoder, in the order of its batch."""
    logits_BV: torch.Tensor | None = None
    last: list[int] = []
    while rank_sync.max(len(active)) if rank_sync is not None else active:
        logits_BV = decoder.begin(padded_prompts, length, longest) if logits_BV is None else decoder.extend(last)
        logprobs_BV = logits_BV.float().log_softmax(1)
        noise_BV = None
        if sampling.temperature > 0.0:
            row_indices = [indices[row] if row < len(prompts) else 0 for row in rows]
            positions = [lengths[row] for row in rows]
            noise_BV = gumbel_noise(seed, row_indices, positions, logits_BV.shape[1], logits_BV.device)
        chosen_B = sampling.choose(logprobs_BV, noise_BV)
        logprobs = logprobs_BV.gather(1, chosen_B.unsqueeze(1)).squeeze(1).tolist()
        last = chosen_B.tolist()
        for row, chosen, logprob in zip(rows, last, logprobs, strict=True):
            if row not in active:
                continue
            lengths[row] += 1
            token = chosen if math.isfinite(logprob) else NO_TOKEN
            if token == NO_TOKEN or token in ends or lengths[row] - len(prompts[row]) == max_tokens[row]:
                active.remove(row)
            yield Token(row, token, logprob)
        if rank_sync is None and 0 < 2 * len(active) <= len(rows):
            kept = [slot for slot, row in enumerate(rows) if row in active]
            if decoder.keep(kept):
                rows, last = [rows[slot] for slot in kept], [last[slot] for slot in kept]
