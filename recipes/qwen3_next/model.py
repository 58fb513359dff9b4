"""The Qwen3-Next model.

Shape suffixes: B batch, T time, D model width, N query heads, K key and value heads, H head size; in the delta rule,
N value heads, K query and key heads, H size of queries and keys, E size of values, C channels of the convolution, X any
other size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer import sequence
from trainer.experts import Load
from trainer.sequence import Documents

from .._layers import FeedForward, Linear, MoeDecoder, Rope, merge_heads, rotate, split_heads
from ..qwen3_moe.model import MixtureOfExperts
from .config import Qwen3NextConfig


class ZeroCenteredNorm(nn.Module):
    """RMSNorm, computed in float32 with the scale 1 + `weight`, so that weight decay pulls the scale toward 1."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class GatedAttention(nn.Module):
    """Causal grouped-query attention with normalized queries and keys, RoPE on part of each head, and gated outputs."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.wq = Linear(config.dim, 2 * width, std=config.init_std)
        self.wk = Linear(config.dim, kv_width, std=config.init_std)
        self.wv = Linear(config.dim, kv_width, std=config.init_std)
        self.wo = Linear(width, config.dim, std=config.init_std / math.sqrt(2 * config.num_layers))
        self.q_norm = ZeroCenteredNorm(config.head_dim, config.norm_eps)
        self.k_norm = ZeroCenteredNorm(config.head_dim, config.norm_eps)
        self.rope = Rope(config.rotary_dim, config.rope_theta)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        q_BNTH, gate_BNTH = split_heads(self.wq(x_BTD), 2 * self.head_dim).chunk(2, -1)
        k_BKTH, v_BKTH = (split_heads(project(x_BTD), self.head_dim) for project in (self.wk, self.wv))
        cos, sin = self.rope(positions)
        q_BNTH, k_BKTH = (
            torch.cat((rotate(x[..., : self.rotary_dim], cos, sin), x[..., self.rotary_dim :]), -1)
            for x in (self.q_norm(q_BNTH), self.k_norm(k_BKTH))
        )
        out_BNTH = sequence.attend(q_BNTH, k_BKTH, v_BKTH, documents) * gate_BNTH.sigmoid()
        return self.wo(merge_heads(out_BNTH))


class Decay(nn.Module):
    """The log of the decay factor of each head's state: -exp(log_rate) * softplus(x + bias), in float32."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.bias)
        with torch.no_grad():
            self.log_rate.uniform_(0.01, 16).log_()  # above 0, so that the logarithms are finite

    def forward(self, x_BTN: torch.Tensor) -> torch.Tensor:
        return -self.log_rate.float().exp() * F.softplus(x_BTN.float() + self.bias)


class Convolution(nn.Module):
    """A causal convolution of each channel, followed by SiLU.  The weight is (C, 1, W), for W tokens."""

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -1 / math.sqrt(self.weight.shape[-1]), 1 / math.sqrt(self.weight.shape[-1]))

    def forward(self, x_BTC: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        return F.silu(sequence.causal_convolution(x_BTC, self.weight.squeeze(1), documents))


class GatedNorm(nn.Module):
    """RMSNorm of each head, computed in float32, times the SiLU of a gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x_BTNE: torch.Tensor, gate_BTNE: torch.Tensor) -> torch.Tensor:
        normed_BTNE = F.rms_norm(x_BTNE.float(), self.weight.shape, eps=self.eps).to(x_BTNE.dtype)
        return (self.weight * normed_BTNE * F.silu(gate_BTNE.float())).to(x_BTNE.dtype)


class GatedDelta(nn.Module):
    """The gated delta rule: linear attention whose state decays, and where a new value replaces its key's old value."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = config.delta_heads, config.delta_key_heads
        self.key_dim, self.value_dim = config.delta_key_dim, config.delta_value_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        self.qkvz = Linear(config.dim, 2 * keys + 2 * values, std=config.init_std)
        self.rates = Linear(config.dim, 2 * self.num_heads, std=config.init_std)
        self.conv = Convolution(2 * keys + values, config.conv_width)
        self.decay = Decay(self.num_heads)
        self.norm = GatedNorm(self.value_dim, config.norm_eps)
        self.out = Linear(values, config.dim, std=config.init_std / math.sqrt(2 * config.num_layers))

    def forward(self, x_BTD: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        heads_per_key = self.num_heads // self.num_key_heads
        # The outputs of both projections are grouped by key head, each together with its value heads.
        widths = [self.key_dim, self.key_dim, heads_per_key * self.value_dim, heads_per_key * self.value_dim]
        *qkv_BTKX, gate_BTKX = self.qkvz(x_BTD).unflatten(-1, (self.num_key_heads, -1)).split(widths, -1)
        beta_BTKX, step_BTKX = self.rates(x_BTD).unflatten(-1, (self.num_key_heads, -1)).chunk(2, -1)
        mixed_BTC = self.conv(torch.cat([part.flatten(2) for part in qkv_BTKX], -1), documents)
        keys = self.num_key_heads * self.key_dim
        q_BTC, k_BTC, v_BTC = mixed_BTC.split([keys, keys, self.num_heads * self.value_dim], -1)
        q_BTNH, k_BTNH = (
            _l2_normalized(part.unflatten(-1, (self.num_key_heads, -1)).float()).repeat_interleave(heads_per_key, 2)
            for part in (q_BTC, k_BTC)
        )
        out_BTNE = sequence.gated_delta_rule(
            q_BTNH / math.sqrt(self.key_dim),
            k_BTNH,
            v_BTC.unflatten(-1, (self.num_heads, -1)),
            self.decay(step_BTKX.flatten(2)),
            beta_BTKX.flatten(2).sigmoid(),
            documents,
        )
        return self.out(self.norm(out_BTNE, gate_BTKX.reshape(out_BTNE.shape)).flatten(2))


def _l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """Return the vectors along the last dimension scaled to length 1, or to less if they are tiny."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class SharedExpert(nn.Module):
    """An expert that processes every token; its output is scaled by one gate per token."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__()
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.feed_forward = FeedForward(config.dim, config.shared_dim, std=config.init_std, out_std=out_std)
        self.gate = Linear(config.dim, 1, std=config.init_std)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.gate(x_BTD).sigmoid() * self.feed_forward(x_BTD)


class Qwen3NextBlock(nn.Module):
    """One block, with softmax attention or the gated delta rule."""

    def __init__(self, config: Qwen3NextConfig, has_attention: bool) -> None:
        super().__init__()
        self.attention_norm = ZeroCenteredNorm(config.dim, config.norm_eps)
        if has_attention:
            self.attention = GatedAttention(config)
        else:
            self.delta = GatedDelta(config)
        self.has_attention = has_attention
        self.ffn_norm = ZeroCenteredNorm(config.dim, config.norm_eps)
        self.moe = MixtureOfExperts(config)
        self.shared = SharedExpert(config)

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | None,
        is_target_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Load]:
        normed_BTD = self.attention_norm(x_BTD)
        if self.has_attention:
            x_BTD = x_BTD + self.attention(normed_BTD, positions, documents)
        else:
            x_BTD = x_BTD + self.delta(normed_BTD, documents)
        normed_BTD = self.ffn_norm(x_BTD)
        out_BTD, load = self.moe(normed_BTD, is_target_BT)
        x_BTD = x_BTD + self.shared(normed_BTD)
        return x_BTD + out_BTD if load is None else (x_BTD + out_BTD, load)


class Qwen3Next(MoeDecoder):
    """Qwen3-Next; see `MoeDecoder` for inputs and outputs."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        blocks = (
            Qwen3NextBlock(config, has_attention=number % config.attention_every == 0)
            for number in range(1, config.num_layers + 1)
        )
        super().__init__(config, blocks, ZeroCenteredNorm(config.dim, config.norm_eps))
