"""The network of Llama 3.

Shape suffixes: B batch, T time, D model width, N query heads, K key and value heads, H head size, F feed-forward
width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from trainer.recipes._layers import Embedding, Head, Linear, merge_heads, split_heads
from trainer.recipes.llama.config import LlamaConfig

from trainer import sequence
from trainer.sequence import Documents


class Rope(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), pairs half a head apart.

    Angles are computed in fp32 where they are used: as a block's inputs they would be cast to FSDP's param_dtype.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(config.dim // config.num_heads // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        config, size = self.config, self.inv_freq.numel()
        exponents = torch.arange(size, dtype=torch.float32, device=self.inv_freq.device) / size
        frequencies = config.rope_theta**-exponents
        if config.rope_factor != 1.0:
            # Long wavelengths are stretched by the factor, short ones kept, those between blended.
            wavelength = 2 * math.pi / frequencies
            low, high = config.rope_low_freq, config.rope_high_freq
            keep = ((config.rope_original_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
            frequencies = frequencies * (keep + (1 - keep) / config.rope_factor)
        self.inv_freq.copy_(frequencies)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for `positions` (T,) or (B, T): (1, T, H/2) each, or (B, 1, T, H/2)."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        return angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)


def rotate(x_BNTH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of a head by its angle; in fp32, returned in the dtype of `x_BNTH`."""
    first, second = x_BNTH.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BNTH.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        head_dim = config.dim // config.num_heads
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.wq = Linear(config.dim, config.num_heads * head_dim, std=config.init_std)
        self.wk = Linear(config.dim, config.num_kv_heads * head_dim, std=config.init_std)
        self.wv = Linear(config.dim, config.num_kv_heads * head_dim, std=config.init_std)
        self.wo = Linear(config.num_heads * head_dim, config.dim, std=out_std)
        self.rope = Rope(config)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        cos, sin = self.rope(positions)
        q_BNTH = rotate(split_heads(self.wq(x_BTD), self.num_heads), cos, sin)
        k_BKTH = rotate(split_heads(self.wk(x_BTD), self.num_kv_heads), cos, sin)
        v_BKTH = split_heads(self.wv(x_BTD), self.num_kv_heads)
        return self.wo(merge_heads(sequence.attend(q_BNTH, k_BKTH, v_BKTH, documents)))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_dim, std=config.init_std)
        self.w3 = Linear(config.dim, config.ffn_dim, std=config.init_std)
        self.w2 = Linear(config.ffn_dim, config.dim, std=config.init_std / math.sqrt(2 * config.num_layers))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, documents)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama(nn.Module):
    """A Llama: `tokens` (B, T) to logits (B, T, V), or with `targets` (B, T) to their summed loss.

    `documents` (B, T) keeps documents that share a row to themselves; `positions` and `borders` follow from it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim, std=config.init_std)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
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
        borders: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kept_apart = Documents.of(documents, borders)
        positions = sequence.positions(tokens, positions, kept_apart)
        x_BTD = self.tok_embeddings(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD, positions, kept_apart)
        return self.head(x_BTD, targets)
