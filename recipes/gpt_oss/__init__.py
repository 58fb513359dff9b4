"""gpt-oss: mixture-of-experts models with biases, attention sinks, and a sliding window in every other layer.

Sources: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925; the published config.json files.
"""

from __future__ import annotations

from trainer.model_spec import ModelSpec
from trainer.registry import register

from .._flops import mean_num_keys
from .._tensor import EXPERTS
from ..qwen3 import units
from .config import GptOssConfig, check
from .huggingface import HUGGINGFACE


def flops(config: GptOssConfig, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per active matmul parameter, plus attention.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.
    """
    attention_params = 2 * config.dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    moe_params = config.num_experts * config.dim + 3 * config.num_chosen * config.dim * config.expert_dim
    matmul_params = config.num_layers * (attention_params + moe_params) + config.dim * config.vocab_size
    keys = sum(mean_num_keys(seq_len, config.window_of(layer)) for layer in range(config.num_layers))
    # Two matmuls: QK^T, and the attention probabilities times V.
    return 6.0 * (matmul_params + 2 * config.num_heads * config.head_dim * keys)


register(
    ModelSpec(
        name="gpt_oss",
        config=GptOssConfig,
        build="trainer.recipes.gpt_oss.model:GptOss",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        tensor=EXPERTS,
        experts="layers.*.moe.experts",
    )
)
