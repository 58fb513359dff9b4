"""The GPT-2 model.

Shape suffixes: B batch, T time, D model width, N heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer import sequence
from trainer.sequence import Documents

from .._layers import Embedding, Head, Linear, merge_heads, split_heads
from .config import GPT2Config


class GPT2Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        _, self.attention_dropout, _ = config.dropouts
        self.qkv = Linear(config.dim, 3 * config.dim, std=config.init_std, bias=True)
        self.out = Linear(config.dim, config.dim, std=config.init_std / math.sqrt(2 * config.num_layers), bias=True)

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        q_BNTH, k_BNTH, v_BNTH = (split_heads(part, self.head_dim) for part in self.qkv(x_BTD).chunk(3, dim=-1))
        dropout = self.attention_dropout if self.training else 0.0
        return self.out(merge_heads(sequence.attend(q_BNTH, k_BNTH, v_BNTH, documents, dropout)))


class GPT2Block(nn.Module):
    """One transformer block."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.up = Linear(config.dim, 4 * config.dim, std=config.init_std, bias=True)
        down_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.down = Linear(4 * config.dim, config.dim, std=down_std, bias=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.ln_1(x_BTD), documents))
        return x_BTD + self.dropout(self.down(F.gelu(self.up(self.ln_2(x_BTD)), approximate="tanh")))


class GPT2(nn.Module):
    """GPT-2: maps `tokens` (B, T) to logits (B, T, V), or with `targets` (B, T) to the loss summed over the targets.

    If `documents` (B, T) is given, each token attends only to its own document, and `positions` and `cu_seqlens` are
    derived from `documents` unless they are given.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.dim, std=config.init_std)
        self.wpe = Embedding(config.max_seq_len, config.dim, std=config.init_std)
        embedding_rate, _, _ = config.dropouts
        self.dropout = nn.Dropout(embedding_rate)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.num_layers))
        norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head = Head(norm, config.dim, config.vocab_size, std=config.init_std)
        self.head.output.weight = self.wte.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        packed = Documents.of(documents, cu_seqlens)
        x_BTD = self.dropout(self.wte(tokens) + self.wpe(sequence.positions(tokens, positions, packed)))
        for block in self.blocks:
            x_BTD = block(x_BTD, packed)
        return self.head(x_BTD, targets)
