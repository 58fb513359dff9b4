"""Qwen3 mixture-of-experts models: Qwen3 with the feed-forward layers replaced by routed experts.

Sources: Yang et al. 2025, "Qwen3 Technical Report", arXiv:2505.09388, and the published model configurations.
"""

from __future__ import annotations

from trainer.recipe import Recipe, register

from ..qwen3 import units
from .config import Qwen3MoeConfig, check
from .huggingface import HUGGINGFACE


def flops(config: Qwen3MoeConfig, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per active matrix weight, plus causal attention.

    seq_len: the number of tokens that attention spans; with document masking, the mean length of a token's document.
    """
    attention = 2 * config.dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    experts = config.num_experts * config.dim + 3 * config.num_chosen * config.dim * config.expert_dim
    matrices = config.num_layers * (attention + experts) + config.dim * config.vocab_size
    # Two matmuls, queries by keys and weights by values; the causal mask halves both.
    scores = config.num_layers * config.num_heads * config.head_dim * seq_len
    return 6.0 * (matrices + scores)


register(
    Recipe(
        name="qwen3_moe",
        config=Qwen3MoeConfig,
        build="trainer.recipes.qwen3_moe.model:Qwen3Moe",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        experts="layers.*.moe.experts",
    )
)
