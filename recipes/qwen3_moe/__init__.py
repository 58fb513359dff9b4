"""Qwen3 mixture-of-experts models: Qwen3 with the feed-forward layers replaced by routed experts.

Sources: Yang et al. 2025, "Qwen3 Technical Report", arXiv:2505.09388, and the published model configurations.
"""

from __future__ import annotations

from trainer.model_spec import ModelSpec
from trainer.registry import register

from .._tensor import EXPERTS
from ..qwen3 import units
from .config import Qwen3MoeConfig, check
from .huggingface import HUGGINGFACE


def flops(config: Qwen3MoeConfig, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per active matmul parameter, plus causal attention.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.
    """
    attention_params = 2 * config.dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    moe_params = config.num_experts * config.dim + 3 * config.num_chosen * config.dim * config.expert_dim
    matmul_params = config.num_layers * (attention_params + moe_params) + config.dim * config.vocab_size
    # Two matmuls: QK^T, and the attention probabilities times V.  The causal mask halves both.
    attention_matmuls = config.num_layers * config.num_heads * config.head_dim * seq_len
    return 6.0 * (matmul_params + attention_matmuls)


register(
    ModelSpec(
        name="qwen3_moe",
        config=Qwen3MoeConfig,
        build="trainer.recipes.qwen3_moe.model:Qwen3Moe",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        tensor=EXPERTS,
        experts="layers.*.moe.experts",
    )
)
