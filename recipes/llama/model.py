"""The Llama 3 model.

Shape suffixes: B batch, T time, D model width, N query heads, K key and value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer import sequence
from trainer.sequence import Documents

from .._layers import Embedding, FeedForward, Head, Linear, Rope, merge_heads, rotate, split_heads
from .config import LlamaConfig


class ScaledRope(Rope):
    """Rotary position embedding with Llama 3.1's frequency scaling."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        super().__init__(config.dim // config.num_heads, config.rope_theta)

    def frequencies(self) -> torch.Tensor:
        config, frequencies = self.config, super().frequencies()
        if config.rope_factor == 1.0:
            return frequencies
        # Long wavelengths are stretched by the factor, short ones are unchanged, and those in between are interpolated.
        wavelength = 2 * math.pi / frequencies
        low, high = config.rope_low_freq, config.rope_high_freq
        keep = ((config.rope_original_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (keep + (1 - keep) / config.rope_factor)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = head_dim = config.dim // config.num_heads
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.wq = Linear(config.dim, config.num_heads * head_dim, std=config.init_std)
        self.wk = Linear(config.dim, config.num_kv_heads * head_dim, std=config.init_std)
        self.wv = Linear(config.dim, config.num_kv_heads * head_dim, std=config.init_std)
        self.wo = Linear(config.num_heads * head_dim, config.dim, std=out_std)
        self.rope = ScaledRope(config)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        cos, sin = self.rope(positions)
        q_BNTH = rotate(split_heads(self.wq(x_BTD), self.head_dim), cos, sin)
        k_BKTH = rotate(split_heads(self.wk(x_BTD), self.head_dim), cos, sin)
        v_BKTH = split_heads(self.wv(x_BTD), self.head_dim)
        return self.wo(merge_heads(sequence.attend(q_BNTH, k_BKTH, v_BKTH, documents)))


class LlamaBlock(nn.Module):
    """One transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = LlamaAttention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim, std=config.init_std, out_std=out_std)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, documents)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama(nn.Module):
    """Llama: maps `tokens` (B, T) to logits (B, T, V), or with `targets` (B, T) to the loss summed over the targets.

    If `documents` (B, T) is given, each token attends only to its own document, and `positions` and `cu_seqlens` are
    derived from `documents` unless they are given.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim, std=config.init_std)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Head(norm, config.dim, config.vocab_size, std=config.init_std)
        if config.tie_embeddings:
            self.head.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        packed = Documents.of(documents, cu_seqlens)
        positions = sequence.attention_positions(tokens, positions, packed)
        x_BTD = self.tok_embeddings(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD, positions, packed)
        return self.head(x_BTD, targets)
