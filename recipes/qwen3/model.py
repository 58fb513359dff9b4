"""The Qwen3 model.

Shape suffixes: B batch, T time, D model width, N query heads, K key and value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer import sequence
from trainer.sequence import Documents

from .._layers import Embedding, FeedForward, Head, Linear, Rope, merge_heads, rotate, split_heads
from .config import Qwen3Config

if TYPE_CHECKING:
    from ..qwen3_moe.config import Qwen3MoeConfig


class Qwen3Attention(nn.Module):
    """Causal grouped-query attention that normalizes queries and keys before RoPE."""

    def __init__(self, config: Qwen3Config | Qwen3MoeConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = Linear(config.dim, config.num_heads * config.head_dim, std=config.init_std)
        self.wk = Linear(config.dim, config.num_kv_heads * config.head_dim, std=config.init_std)
        self.wv = Linear(config.dim, config.num_kv_heads * config.head_dim, std=config.init_std)
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.wo = Linear(config.num_heads * config.head_dim, config.dim, std=out_std)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.rope = Rope(config.head_dim, config.rope_theta)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        cos, sin = self.rope(positions)
        q_BNTH = rotate(self.q_norm(split_heads(self.wq(x_BTD), self.head_dim)), cos, sin)
        k_BKTH = rotate(self.k_norm(split_heads(self.wk(x_BTD), self.head_dim)), cos, sin)
        v_BKTH = split_heads(self.wv(x_BTD), self.head_dim)
        return self.wo(merge_heads(sequence.attend(q_BNTH, k_BKTH, v_BKTH, documents)))


class Qwen3Block(nn.Module):
    """One transformer block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Qwen3Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim, std=config.init_std, out_std=out_std)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, documents)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Qwen3(nn.Module):
    """Qwen3: maps `tokens` (B, T) to logits (B, T, V), or with `targets` (B, T) to the loss summed over the targets.

    If `documents` (B, T) is given, each token attends only to its own document, and `positions` and `cu_seqlens` are
    derived from `documents` unless they are given.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim, std=config.init_std)
        self.layers = nn.ModuleList(Qwen3Block(config) for _ in range(config.num_layers))
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
