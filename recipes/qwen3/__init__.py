"""Qwen3: a pre-norm transformer with RoPE, grouped-query attention with normalized queries and keys, and SwiGLU.

Sources: Yang et al. 2025, "Qwen3 Technical Report", arXiv:2505.09388; the published configurations.
"""

from __future__ import annotations

from typing import Any

from trainer.model_spec import ModelSpec
from trainer.registry import register

from .._tensor import DENSE
from .config import Qwen3Config, check_heads
from .huggingface import HUGGINGFACE


def units(model: Any) -> list[str | tuple[str, ...]]:
    """Return the FSDP units.  If the embedding and the head share a weight, they form one unit."""
    if model.config.tie_embeddings:
        return [("tok_embeddings", "head"), "layers.*"]
    return ["tok_embeddings", "layers.*", "head"]


def flops(config: Qwen3Config, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per matmul parameter, plus causal attention.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.
    """
    attention_params = 2 * config.dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    layer_params = attention_params + 3 * config.dim * config.ffn_dim
    matmul_params = config.num_layers * layer_params + config.dim * config.vocab_size
    attention_matmuls = config.num_layers * config.num_heads * config.head_dim * seq_len
    return 6.0 * (matmul_params + attention_matmuls)


register(
    ModelSpec(
        name="qwen3",
        config=Qwen3Config,
        build="trainer.recipes.qwen3.model:Qwen3",
        units=units,
        check=check_heads,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        tensor=DENSE,
    )
)
