"""Llama 3: a pre-norm transformer with RoPE, grouped-query attention and SwiGLU.

Sources: Grattafiori et al. 2024, arXiv:2407.21783; the published configurations of Llama 3.1 and 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.model_spec import ModelSpec
from trainer.registry import register

from .._tensor import DENSE
from .config import LlamaConfig, check
from .huggingface import HUGGINGFACE

if TYPE_CHECKING:
    from torch import nn


def units(model: nn.Module) -> list[str | tuple[str, ...]]:
    """Return the FSDP units.  If the embedding and the head share a weight, they form one unit."""
    if model.config.tie_embeddings:  # type: ignore[union-attr]
        return [("tok_embeddings", "head"), "layers.*"]
    return ["tok_embeddings", "layers.*", "head"]


def flops(config: LlamaConfig, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per matmul parameter, plus causal attention.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.  The causal mask halves the score matrix.
    """
    head_dim = config.dim // config.num_heads
    attention_params = config.dim * head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer_params = attention_params + 3 * config.dim * config.ffn_dim
    matmul_params = config.num_layers * layer_params + config.dim * config.vocab_size
    attention_matmuls = config.num_layers * 2 * config.dim * seq_len / 2
    return 6.0 * (matmul_params + attention_matmuls)


register(
    ModelSpec(
        name="llama",
        config=LlamaConfig,
        build="trainer.recipes.llama.model:Llama",
        units=units,
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        tensor=DENSE,
    )
)
