"""DeepSeek-V3: multi-head latent attention, and a mixture of shared and routed experts with group-limited routing.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437; the published config.json.  Multi-token
prediction (section 2.2) is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.model_spec import ModelSpec
from trainer.registry import register

from .._tensor import FEED_FORWARD, MOE
from ..qwen3 import units
from .config import DeepseekV3Config, check
from .huggingface import HUGGINGFACE

if TYPE_CHECKING:
    from trainer.model_spec import TensorPlan, TensorStyle


def flops(config: DeepseekV3Config, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per active matmul parameter, plus causal attention.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.
    """
    dim, num_heads, value_dim = config.dim, config.num_heads, config.value_dim
    q_dim = num_heads * config.head_dim
    kv_up_params = config.kv_rank * num_heads * (config.nope_dim + value_dim)
    attention_params = dim * (config.kv_rank + config.rope_dim) + kv_up_params + num_heads * value_dim * dim
    attention_params += dim * q_dim if config.q_rank is None else config.q_rank * (dim + q_dim)
    moe_params = config.num_experts * dim + 3 * (config.num_chosen + config.num_shared) * dim * config.expert_dim
    num_dense = config.num_dense_layers
    matmul_params = config.num_layers * attention_params + num_dense * 3 * dim * config.ffn_dim
    matmul_params += (config.num_layers - num_dense) * moe_params + dim * config.vocab_size
    # Two matmuls: QK^T, and the attention probabilities times V.  The causal mask halves both.
    attention_matmuls = config.num_layers * num_heads * (config.head_dim + value_dim) * seq_len / 2
    return 6.0 * (matmul_params + attention_matmuls)


def tensor_plan(model: Any) -> TensorPlan:
    """Return the plan for tensor parallelism: the projections from latent vectors to heads are divided.

    The latent vectors themselves, which all heads need, are computed by every rank.
    """
    config = model.config
    queries: dict[str, TensorStyle] = {"layers.*.attention.wq": "columns"}
    if config.q_rank is not None:
        queries = {"layers.*.attention.wq_a": "sequence", "layers.*.attention.wq_b": "columns"}
    return {
        "tok_embeddings": "vocabulary",
        "layers.*.attention": "input",
        **queries,
        "layers.*.attention.wkv_a": "sequence",
        "layers.*.attention.wkv_b": "columns",
        "layers.*.attention.wo": "rows",
        **(FEED_FORWARD if config.num_dense_layers else {}),
        **(MOE if config.num_dense_layers < config.num_layers else {}),
        "head.output": "vocabulary",
    }


register(
    ModelSpec(
        name="deepseek_v3",
        config=DeepseekV3Config,
        build="trainer.recipes.deepseek_v3.model:DeepseekV3",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        tensor=tensor_plan,
        experts="layers.*.moe.experts",
    )
)
