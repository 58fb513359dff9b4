"""DeepSeek-V3: multi-head latent attention, and a mixture of shared and routed experts with group-limited routing.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437; the published configuration.  Multi-token
prediction (section 2.2) is left out.
"""

from __future__ import annotations

from trainer.recipe import Recipe, register

from ..qwen3 import units
from .config import DeepseekV3Config, check
from .huggingface import HUGGINGFACE


def flops(config: DeepseekV3Config, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per active matrix weight, plus causal attention.

    seq_len: the number of tokens that attention spans; with document masking, the mean length of a token's document.
    """
    dim, num_heads, value_dim = config.dim, config.num_heads, config.value_dim
    queries = num_heads * config.head_dim
    from_latents = config.kv_rank * num_heads * (config.nope_dim + value_dim)
    attention = dim * (config.kv_rank + config.rope_dim) + from_latents + num_heads * value_dim * dim
    attention += dim * queries if config.q_rank is None else config.q_rank * (dim + queries)
    experts = config.num_experts * dim + 3 * (config.num_chosen + config.num_shared) * dim * config.expert_dim
    num_dense = config.num_dense_layers
    matrices = config.num_layers * attention + num_dense * 3 * dim * config.ffn_dim
    matrices += (config.num_layers - num_dense) * experts + dim * config.vocab_size
    # Two matmuls, queries by keys and weights by values; the causal mask halves both.
    scores = config.num_layers * num_heads * (config.head_dim + value_dim) * seq_len / 2
    return 6.0 * (matrices + scores)


register(
    Recipe(
        name="deepseek_v3",
        config=DeepseekV3Config,
        build="trainer.recipes.deepseek_v3.model:DeepseekV3",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        experts="layers.*.moe.experts",
    )
)
