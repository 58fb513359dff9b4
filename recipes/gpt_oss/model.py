"""The gpt-oss model.

Shape suffixes: B batch, T time, D model width, N query heads, K key and value heads, H head size, F hidden width of an
expert, G gate and up projections (2 x F), E experts, A experts per token, S tokens in the batch (B x T), M token-expert
pairs (S x A).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer import experts, sequence
from trainer.experts import Load, TopKExperts, expert_load, expert_matmuls, grouped_bias
from trainer.sequence import Documents

from .._layers import (
    Linear,
    MoeDecoder,
    Router,
    YarnRope,
    merge_heads,
    rotate,
    split_heads,
    yarn_mscale,
)
from .config import GptOssConfig


class Attention(nn.Module):
    """Causal grouped-query attention with attention sinks, and a sliding window in every other layer."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.std = config.head_dim, config.init_std
        self.window = config.window_of(layer)
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.wq = Linear(config.dim, config.num_heads * config.head_dim, std=config.init_std, bias=True)
        self.wk = Linear(config.dim, config.num_kv_heads * config.head_dim, std=config.init_std, bias=True)
        self.wv = Linear(config.dim, config.num_kv_heads * config.head_dim, std=config.init_std, bias=True)
        self.wo = Linear(config.num_heads * config.head_dim, config.dim, std=out_std, bias=True)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))
        self.rope = YarnRope(
            config.head_dim,
            config.rope_theta,
            factor=config.rope_factor,
            original_len=config.rope_original_len,
            beta_fast=config.rope_beta_fast,
            beta_slow=config.rope_beta_slow,
            truncate=config.rope_truncate,
            mscale=yarn_mscale(config.rope_factor),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.sinks, std=self.std)

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        cos, sin = self.rope(positions)
        q_BNTH = rotate(split_heads(self.wq(x_BTD), self.head_dim), cos, sin)
        k_BKTH = rotate(split_heads(self.wk(x_BTD), self.head_dim), cos, sin)
        v_BKTH = split_heads(self.wv(x_BTD), self.head_dim)
        out_BNTH = sequence.attend(q_BNTH, k_BKTH, v_BKTH, documents, window=self.window, sinks_N=self.sinks)
        return self.wo(merge_heads(out_BNTH))


class GptOssExperts(nn.Module):
    """Feed-forward experts with stacked weights: SwiGLU with biases and clamped values.

    The rows of the gate and up projections alternate in `gate_up`, as in the published files.
    """

    matrices = {"gate_up_proj": ("gate_up",), "down_proj": ("down",)}
    """Maps the name of each LoRA adapter to the parameters that share the adapter; see `trainer.experts.adapters`."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        num_experts, dim, expert_dim = config.num_experts, config.dim, config.expert_dim
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.std, self.out_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * expert_dim, dim))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * expert_dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up, std=self.std)
        nn.init.normal_(self.down, std=self.out_std)
        nn.init.zeros_(self.gate_up_bias)
        nn.init.zeros_(self.down_bias)

    def forward(self, x_MD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs for rows sorted by expert, (M, D); see `grouped_mm` for `ends_E`."""
        num_rows = x_MD.shape[0]
        (gate_up_MG,) = expert_matmuls(self, "gate_up_proj", x_MD, ends_E)
        gate_up_MG = gate_up_MG + grouped_bias(self.gate_up_bias, ends_E, num_rows)
        gate_MF = gate_up_MG[:, ::2].clamp(max=self.limit)
        up_MF = gate_up_MG[:, 1::2].clamp(-self.limit, self.limit)
        hidden_MF = gate_MF * torch.sigmoid(self.alpha * gate_MF) * (up_MF + 1)
        (out_MD,) = expert_matmuls(self, "down_proj", hidden_MF, ends_E)
        return out_MD + grouped_bias(self.down_bias, ends_E, num_rows)


class GptOssMoe(nn.Module):
    """A mixture-of-experts layer; a token's expert weights are the softmax over its chosen experts' scores."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.dim, config.num_experts, std=config.init_std, bias=True)
        self.choice = TopKExperts(config.num_experts, config.num_chosen, has_bias=config.balance_rate is not None)
        self.experts = GptOssExperts(config)

    def forward(self, x_BTD: torch.Tensor, is_target_BT: torch.Tensor | None) -> tuple[torch.Tensor, Load | None]:
        """Return the output and, if `is_target_BT` is given, the experts' load over the tokens where it is True."""
        config, x_SD = self.config, x_BTD.flatten(0, 1)
        logits_SE = self.router(x_SD)
        logits_SA, chosen_SA = self.choice(logits_SE)
        weights_SA = logits_SA.softmax(-1).to(x_SD.dtype)
        out_BTD = experts.apply_experts(self.experts, x_SD, chosen_SA, weights_SA).view_as(x_BTD)
        if is_target_BT is None:
            return out_BTD, None
        load = expert_load(
            chosen_SA,
            is_target_BT,
            config.num_experts,
            logits_SE.softmax(-1) if config.needs_probs else None,
            logits_SE if config.z_loss else None,
        )
        return out_BTD, load


class GptOssBlock(nn.Module):
    """One transformer block."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = GptOssMoe(config)

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | None,
        is_target_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Load]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, documents)
        out_BTD, load = self.moe(self.ffn_norm(x_BTD), is_target_BT)
        return x_BTD + out_BTD if load is None else (x_BTD + out_BTD, load)


class GptOss(MoeDecoder):
    """gpt-oss; see `MoeDecoder` for inputs and outputs."""

    def __init__(self, config: GptOssConfig) -> None:
        blocks = (GptOssBlock(config, layer) for layer in range(config.num_layers))
        super().__init__(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))
