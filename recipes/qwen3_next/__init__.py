"""Qwen3-Next: a hybrid of gated softmax attention and the gated delta rule, with a mixture of experts in every block.

Sources: the Qwen team 2025, the published configurations and weights of Qwen3-Next; Yang, Kautz and Hatamizadeh 2024,
"Gated Delta Networks", arXiv:2412.06464.
"""

from __future__ import annotations

from trainer.model_spec import ModelSpec
from trainer.registry import register

from ..qwen3 import units
from .config import Qwen3NextConfig, check
from .huggingface import HUGGINGFACE


def flops(config: Qwen3NextConfig, seq_len: float) -> float:
    """Return model FLOPs per token in training: 6 per active matmul parameter, plus attention and the delta rule.

    Since attention is causal, only half of each of its two matmuls is counted.  The delta rule is counted as a
    recurrence: each token reads the state with its key, writes to the state, and reads the state with its query.  The
    additional matmuls of the chunked computation are not counted.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.
    """
    num_attention = config.num_layers // config.attention_every
    num_delta = config.num_layers - num_attention
    attention_params = config.dim * config.head_dim * (3 * config.num_heads + 2 * config.num_kv_heads)
    keys, values = config.delta_key_heads * config.delta_key_dim, config.delta_heads * config.delta_value_dim
    delta_params = config.dim * (2 * keys + 3 * values + 2 * config.delta_heads)
    delta_params += config.conv_width * (2 * keys + values)
    moe_params = config.dim * (config.num_experts + 1)
    moe_params += 3 * config.dim * (config.num_chosen * config.expert_dim + config.shared_dim)
    matmul_params = num_attention * attention_params + num_delta * delta_params + config.num_layers * moe_params
    attention_matmuls = num_attention * config.num_heads * config.head_dim * seq_len
    states = num_delta * 3 * values * config.delta_key_dim
    return 6.0 * (matmul_params + config.dim * config.vocab_size + attention_matmuls + states)


register(
    ModelSpec(
        name="qwen3_next",
        config=Qwen3NextConfig,
        build="trainer.recipes.qwen3_next.model:Qwen3Next",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        experts="layers.*.moe.experts",
    )
)
