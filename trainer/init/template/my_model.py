"""A small causal transformer in plain PyTorch, without distributed code.  Change the model as you like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ModelSpec, register


@dataclass
class MyConfig:
    """The model's settings.  Each can be set on the command line, for example `model.width=256`."""

    vocab_size: int = 257
    width: int = 96
    num_layers: int = 3
    num_heads: int = 4
    max_len: int = 1024


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, config: MyConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for the input x; both are (B, T, width)."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MyModel(nn.Module):
    """Maps tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, config: MyConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits for the next token at each position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# FSDP gathers the parameters of each unit together; list the units in the order of the forward pass.
register(ModelSpec("my_model", MyConfig, MyModel, units=["tokens", "positions", "blocks.*", "head"]))
