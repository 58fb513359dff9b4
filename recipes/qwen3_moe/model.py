"""The Qwen3 mixture-of-experts model.

Shape suffixes: B batch, T time, D model width, F hidden width of an expert, E experts, A experts per token, S tokens
in the batch (B x T), M token-expert pairs (S x A).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from trainer import experts
from trainer.experts import Load, TopKExperts, expert_load, expert_matmuls
from trainer.sequence import Documents

from .._layers import Linear, MoeDecoder
from ..qwen3.model import Qwen3Attention
from .config import Qwen3MoeConfig

if TYPE_CHECKING:
    from ..deepseek_v3.config import DeepseekV3Config
    from ..qwen3_next.config import Qwen3NextConfig


class Experts(nn.Module):
    """SwiGLU feed-forward experts with stacked weights."""

    matrices = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    """Maps the name of each LoRA adapter to the parameters that share the adapter; see `trainer.experts.adapters`."""

    def __init__(self, config: Qwen3MoeConfig | Qwen3NextConfig | DeepseekV3Config) -> None:
        super().__init__()
        self.std, self.out_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        self.w1 = nn.Parameter(torch.empty(config.num_experts, config.expert_dim, config.dim))
        self.w3 = nn.Parameter(torch.empty(config.num_experts, config.expert_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, config.dim, config.expert_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w1, std=self.std)
        nn.init.normal_(self.w3, std=self.std)
        nn.init.normal_(self.w2, std=self.out_std)

    def forward(self, x_MD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs (M, D) for rows `x_MD`, which are sorted by expert; see `grouped_mm` for `ends_E`."""
        gate_MF, up_MF = expert_matmuls(self, "gate_up_proj", x_MD, ends_E)
        (out_MD,) = expert_matmuls(self, "down_proj", F.silu(gate_MF) * up_MF, ends_E)
        return out_MD


class MixtureOfExperts(nn.Module):
    """A mixture-of-experts layer: a router chooses a few experts for each token (Shazeer et al. 2017)."""

    def __init__(self, config: Qwen3MoeConfig | Qwen3NextConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(config.dim, config.num_experts, std=config.init_std)
        self.router.takes_adapter = False
        self.choice = TopKExperts(config.num_experts, config.num_chosen, has_bias=config.balance_rate is not None)
        self.experts = Experts(config)

    def forward(self, x_BTD: torch.Tensor, is_target_BT: torch.Tensor | None) -> tuple[torch.Tensor, Load | None]:
        """Return the output and, if `is_target_BT` is given, the experts' load over the tokens where it is True."""
        config, x_SD = self.config, x_BTD.flatten(0, 1)
        logits_SE = self.router(x_SD)
        probs_SE = logits_SE.softmax(-1, dtype=torch.float32)
        weights_SA, chosen_SA = self.choice(probs_SE)
        if config.normalize_chosen:
            weights_SA = weights_SA / weights_SA.sum(-1, keepdim=True)
        out_BTD = experts.apply_experts(self.experts, x_SD, chosen_SA, weights_SA.to(x_SD.dtype)).view_as(x_BTD)
        if is_target_BT is None:
            return out_BTD, None
        load = expert_load(
            chosen_SA,
            is_target_BT,
            config.num_experts,
            probs_SE if config.needs_probs else None,
            logits_SE if config.z_loss else None,
        )
        return out_BTD, load


class Qwen3MoeBlock(nn.Module):
    """One transformer block."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Qwen3Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = MixtureOfExperts(config)

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


class Qwen3Moe(MoeDecoder):
    """Qwen3 MoE; see `MoeDecoder` for inputs and outputs."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        blocks = (Qwen3MoeBlock(config) for _ in range(config.num_layers))
        super().__init__(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))
