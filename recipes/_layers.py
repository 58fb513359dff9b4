"""Layers shared by the models.

They include linear and embedding layers with a configurable initialization scale, rotary position embeddings, and the
decoder of mixture-of-experts models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import sequence
from trainer.experts import Balance
from trainer.loss import IGNORE, linear_cross_entropy
from trainer.sequence import Documents


class Linear(nn.Linear):
    """A linear layer whose weights are initialized from N(0, std^2), and whose optional bias is initialized to zero."""

    takes_adapter = True
    """True if LoRA may adapt this layer; False for routers."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Router(Linear):
    """A linear layer that scores all experts for each token in fp32, because rounding could change which are chosen."""

    takes_adapter = False

    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x_SD.float(), self.weight.float(), bias)


_TRANSPOSED_MATMUL_MAX_TOKENS = 8
"""On a CPU, `Output` computes the logits as (W @ x.T).T, not x @ W.T, for at least 2 and at most this many tokens.

Batched generation typically processes this few tokens per step.  For 8 tokens of width 576 and a vocabulary of 49,152
in fp32, MKL takes 21 ms for (W @ x.T).T and 35 ms for x @ W.T.
"""


class Output(Linear):
    """The projection onto the vocabulary.

    With targets, it returns the loss summed over them, without materializing all logits.  Unless the weight is tied,
    only this module's forward pass uses the weight, so the module can be a separate FSDP unit.
    """

    def forward(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        if targets_BT is not None:
            return linear_cross_entropy(hidden_BTD, self.weight, targets_BT)
        if 1 < hidden_BTD.shape[:-1].numel() <= _TRANSPOSED_MATMUL_MAX_TOKENS and hidden_BTD.device.type == "cpu":
            logits_VS = self.weight @ hidden_BTD.flatten(0, -2).t()
            return logits_VS.t().reshape(*hidden_BTD.shape[:-1], -1).contiguous()
        return super().forward(hidden_BTD)


class Head(nn.Module):
    """The final norm and the output projection; with targets, it returns the loss summed over them."""

    def __init__(self, norm: nn.Module, dim: int, vocab_size: int, std: float) -> None:
        super().__init__()
        self.norm = norm
        self.output = Output(dim, vocab_size, std=std)

    def forward(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        if targets_BT is None:
            x_BTD = sequence.needed_for_logits(x_BTD)
        return self.output(self.norm(x_BTD), targets_BT)


class Embedding(nn.Embedding):
    """An embedding table drawn from N(0, std^2)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int, std: float, out_std: float) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, std=std)
        self.w3 = Linear(dim, ffn_dim, std=std)
        self.w2 = Linear(ffn_dim, dim, std=out_std)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Rope(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864); rotates pairs of dimensions half a head apart.

    Each attention layer computes the angles itself, in fp32, because FSDP casts the inputs of a block to param_dtype.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.register_buffer("inv_freq", torch.empty(head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(self.frequencies())

    def frequencies(self) -> torch.Tensor:
        """Return each pair's rotation angle per position, (H/2,)."""
        num_pairs = self.inv_freq.numel()
        exponents = torch.arange(num_pairs, dtype=torch.float32, device=self.inv_freq.device) / num_pairs
        return self.theta**-exponents

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and the sines for `positions`, each (T, 1, H/2) for (T,), or (B, T, 1, H/2) for (B, T)."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


class YarnRope(Rope):
    """Rotary position embedding that extends a context from `original_len` to `factor` times as many tokens.

    The frequencies of slow pairs, with fewer than `beta_slow` rotations in `original_len` tokens, are divided by
    `factor`.  Those of pairs with more than `beta_fast` rotations are unchanged; in between they are interpolated.
    Cosines and sines are multiplied by `mscale`.  Source: Peng et al. 2023, "YaRN", arXiv:2309.00071, section 3.

    truncate: whether to round the range of interpolated pairs outward to whole numbers.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        factor: float,
        original_len: int,
        beta_fast: float,
        beta_slow: float,
        truncate: bool,
        mscale: float,
    ) -> None:
        self.factor, self.original_len, self.truncate = factor, original_len, truncate
        self.beta_fast, self.beta_slow, self.mscale = beta_fast, beta_slow, mscale
        super().__init__(head_dim, theta)

    def frequencies(self) -> torch.Tensor:
        frequencies = super().frequencies()
        if self.factor == 1.0:
            return frequencies
        num_pairs = frequencies.numel()
        first, last = (
            num_pairs * math.log(self.original_len / (turns * 2 * math.pi)) / math.log(self.theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        length = last - first or 0.001  # avoids a division by zero, as in transformers
        stretched = ((torch.arange(num_pairs, device=frequencies.device) - first) / length).clamp(0.0, 1.0)
        return frequencies * (1 - stretched + stretched / self.factor)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(positions)
        return cos * self.mscale, sin * self.mscale


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's scale for cosines and sines (section 3.4) for a context extended to `factor` times its length.

    scale: coefficient of log(`factor`) / 10; 1 in the paper.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rotate(x_BNTH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """Apply RoPE: rotate each pair of dimensions by its angle, in fp32.  The result has the dtype of `x_BNTH`.

    With `is_interleaved`, the pairs in `x_BNTH` are adjacent dimensions; otherwise they are half a head apart, as they
    always are in the result.

    The rotation is computed in the shape (B, T, N, H), which is the memory layout of the split heads, so that kernels
    access contiguous rows.

    cos, sin: the results of `Rope.forward`.
    """
    x_BTNH = x_BNTH.transpose(1, 2).float()
    first, second = (x_BTNH[..., ::2], x_BTNH[..., 1::2]) if is_interleaved else x_BTNH.chunk(2, dim=-1)
    rotated_BTNH = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated_BTNH.to(x_BNTH.dtype).transpose(1, 2)


def split_heads(x_BTD: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return (B, N, T, H) for (B, T, N x H): all heads of `head_dim` dimensions that this rank computes."""
    return x_BTD.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BNTH: torch.Tensor) -> torch.Tensor:
    """Return (B, T, N x H) for (B, N, T, H)."""
    return x_BNTH.transpose(1, 2).flatten(-2)


class MoeDecoder(nn.Module):
    """A decoder with mixture-of-experts layers: the embedding, the loop over blocks, the head and the router losses.

    Maps `tokens` (B, T) to logits (B, T, V), or with `targets` (B, T) to the loss summed over the targets.  In
    training, the loss includes the router losses (`trainer.experts.Balance`).  If `documents` (B, T) is given, each
    token attends only to its own document, and `positions` and `cu_seqlens` are derived from `documents` unless they
    are given.

    config: a `BalanceConfig` with the sizes that `__init__` uses.
    blocks: each is called with the hidden state (B, T, D), positions and documents, and returns the new hidden state.
        In training, each also receives `is_target_BT`, True for each token with a target, and a block with experts then
        returns the hidden state and the `Load` of its experts.
    num_dense_layers: number of blocks without experts.
    """

    def __init__(self, config: Any, blocks: Iterable[nn.Module], norm: nn.Module, num_dense_layers: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim, std=config.init_std)
        self.layers = nn.ModuleList(blocks)
        self.head = Head(norm, config.dim, config.vocab_size, std=config.init_std)
        if config.tie_embeddings:
            self.head.output.weight = self.tok_embeddings.weight
        self.balance = Balance(
            len(self.layers) - num_dense_layers,
            config.num_experts,
            config.num_chosen,
            loss=config.balance,
            shares=config.balance_shares,
            sequence_loss=config.sequence_balance,
            z_loss=config.z_loss,
            rate=config.balance_rate,
        )

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
        if targets is None or not self.training:
            for layer in self.layers:
                x_BTD = layer(x_BTD, positions, packed)
            return self.head(x_BTD, targets)
        loads = []
        for layer in self.layers:
            output = layer(x_BTD, positions, packed, targets != IGNORE)
            if isinstance(output, tuple):
                x_BTD, load = output
                loads.append(load)
            else:
                x_BTD = output
        return self.head(x_BTD, targets) + self.balance(loads)
