"""The DeepSeek-V3 model.

Shape suffixes: B batch, T time, D model width, N heads, H head size of queries and keys (P dimensions without RoPE and
R with RoPE), C rank of the key and value latents, V value head size; E experts, A experts per token, G groups of
experts, S tokens in the batch (B x T); X any other size.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer import experts, sequence
from trainer.experts import Load, TopKExperts, expert_load
from trainer.sequence import Documents

from .._layers import (
    FeedForward,
    Linear,
    MoeDecoder,
    Router,
    YarnRope,
    merge_heads,
    rotate,
    split_heads,
    yarn_mscale,
)
from ..qwen3_moe.model import Experts
from .config import DeepseekV3Config

_LATENT_EPS = 1e-6
"""Epsilon of the latents' RMSNorm; the published code has no setting for it."""


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values are projected from low-rank latents.

    RoPE rotates only a part of each query and key head.  All heads share this part of the keys, which is projected
    directly from the layer's input.  With `q_rank=None`, the queries are also projected directly.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config, std = config, config.init_std
        num_heads, dim = config.num_heads, config.dim
        if config.q_rank is None:
            self.wq = Linear(dim, num_heads * config.head_dim, std=std)
        else:
            self.wq_a = Linear(dim, config.q_rank, std=std)
            self.q_norm = nn.RMSNorm(config.q_rank, eps=_LATENT_EPS)
            self.wq_b = Linear(config.q_rank, num_heads * config.head_dim, std=std)
        self.wkv_a = Linear(dim, config.kv_rank + config.rope_dim, std=std)
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps=_LATENT_EPS)
        self.wkv_b = Linear(config.kv_rank, num_heads * (config.nope_dim + config.value_dim), std=std)
        self.wo = Linear(num_heads * config.value_dim, dim, std=std / math.sqrt(2 * config.num_layers))
        # YaRN increases the scores through RoPE's cosines and sines, through the softmax scale, or through both.
        all_dim_mscale = yarn_mscale(config.rope_factor, config.rope_mscale_all_dim)
        self.scale = config.head_dim**-0.5 * all_dim_mscale**2
        pair_mscale = yarn_mscale(config.rope_factor)
        if config.rope_mscale and config.rope_mscale_all_dim:
            pair_mscale = yarn_mscale(config.rope_factor, config.rope_mscale) / all_dim_mscale
        self.rope = YarnRope(
            config.rope_dim,
            config.rope_theta,
            factor=config.rope_factor,
            original_len=config.rope_original_len,
            beta_fast=config.rope_beta_fast,
            beta_slow=config.rope_beta_slow,
            truncate=config.rope_truncate,
            mscale=pair_mscale,
        )

    def forward(self, x_BTD: torch.Tensor, positions: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        config = self.config
        q_BTX = self.wq(x_BTD) if config.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x_BTD)))
        q_BNTP, q_BNTR = split_heads(q_BTX, config.head_dim).split([config.nope_dim, config.rope_dim], -1)
        latents_BTC, k_BTR = self.wkv_a(x_BTD).split([config.kv_rank, config.rope_dim], -1)
        kv_BNTX = split_heads(self.wkv_b(self.kv_norm(latents_BTC)), config.nope_dim + config.value_dim)
        k_BNTP, v_BNTV = kv_BNTX.split([config.nope_dim, config.value_dim], -1)
        cos, sin = self.rope(positions)
        q_BNTR = rotate(q_BNTR, cos, sin, config.rope_neighbours)
        k_B1TR = rotate(k_BTR.unsqueeze(1), cos, sin, config.rope_neighbours)
        q_BNTH = torch.cat((q_BNTP, q_BNTR), -1)
        k_BNTH = torch.cat((k_BNTP, k_B1TR.expand_as(q_BNTR)), -1)
        return self.wo(merge_heads(sequence.attend(q_BNTH, k_BNTH, v_BNTV, documents, scale=self.scale)))


class GroupLimitedTopK(TopKExperts):
    """Chooses each token's experts from a few groups: those whose two highest scores have the highest sum.

    Scores are compared after adding each expert's bias (DeepSeek-V3, section 2.1.2).
    """

    bias: torch.Tensor

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config.num_experts, config.num_chosen, has_bias=True)
        self.num_groups, self.num_chosen_groups = config.num_groups, config.num_chosen_groups

    def forward(self, scores_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of each token's experts, both (S, A)."""
        biased_SE = scores_SE + self.bias
        if self.num_groups > 1:
            biased_SGX = biased_SE.unflatten(-1, (self.num_groups, -1))
            group_scores_SG = biased_SGX.topk(2, -1).values.sum(-1)
            groups_SX = group_scores_SG.topk(self.num_chosen_groups).indices
            is_chosen_SG = torch.zeros_like(group_scores_SG, dtype=torch.bool).scatter(1, groups_SX, True)
            biased_SE = biased_SGX.masked_fill(~is_chosen_SG.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen_SA = biased_SE.topk(self.num_chosen).indices
        return scores_SE.gather(1, chosen_SA), chosen_SA


class DeepseekMoe(nn.Module):
    """A mixture-of-experts layer with routed experts, and with shared experts that process every token."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.router = Router(config.dim, config.num_experts, std=config.init_std)
        self.choice = GroupLimitedTopK(config)
        self.shared = FeedForward(config.dim, config.num_shared * config.expert_dim, config.init_std, out_std)
        self.experts = Experts(config)

    def forward(self, x_BTD: torch.Tensor, is_target_BT: torch.Tensor | None) -> tuple[torch.Tensor, Load | None]:
        """Return the output and, if `is_target_BT` is given, the experts' load over the tokens where it is True."""
        config, x_SD = self.config, x_BTD.flatten(0, 1)
        logits_SE = self.router(x_SD)
        scores_SE = logits_SE.sigmoid()
        weights_SA, chosen_SA = self.choice(scores_SE)
        if config.normalize_chosen:
            weights_SA = weights_SA / (weights_SA.sum(-1, keepdim=True) + 1e-20)
        weights_SA = (config.route_scale * weights_SA).to(x_SD.dtype)
        out_BTD = experts.apply_experts(self.experts, x_SD, chosen_SA, weights_SA).view_as(x_BTD) + self.shared(x_BTD)
        if is_target_BT is None:
            return out_BTD, None
        load = expert_load(
            chosen_SA,
            is_target_BT,
            config.num_experts,
            scores_SE / scores_SE.sum(-1, keepdim=True) if config.needs_probs else None,
            logits_SE if config.z_loss else None,
        )
        return out_BTD, load


class DeepseekV3Block(nn.Module):
    """One transformer block; the first blocks have a dense feed-forward layer instead of experts."""

    def __init__(self, config: DeepseekV3Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = LatentAttention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.has_experts = layer >= config.num_dense_layers
        if self.has_experts:
            self.moe = DeepseekMoe(config)
        else:
            out_std = config.init_std / math.sqrt(2 * config.num_layers)
            self.feed_forward = FeedForward(config.dim, config.ffn_dim, config.init_std, out_std)

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | None,
        is_target_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Load]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, documents)
        if not self.has_experts:
            return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        out_BTD, load = self.moe(self.ffn_norm(x_BTD), is_target_BT)
        return x_BTD + out_BTD if load is None else (x_BTD + out_BTD, load)


class DeepseekV3(MoeDecoder):
    """DeepSeek-V3; see `MoeDecoder` for inputs and outputs."""

    def __init__(self, config: DeepseekV3Config) -> None:
        blocks = (DeepseekV3Block(config, layer) for layer in range(config.num_layers))
        norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        super().__init__(config, blocks, norm, num_dense_layers=config.num_dense_layers)
