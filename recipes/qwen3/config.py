"""The configuration of a Qwen3 model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.declare import declare
from trainer.errors import setting_error


@dataclass(frozen=True)
class Qwen3Config:
    """Architecture and initialization settings of a Qwen3 model."""

    vocab_size: int = declare(257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(192, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(4, "transformer blocks", at_least=1, at_most=2**16)
    num_heads: int = declare(6, "query heads", at_least=1, at_most=2**16)
    num_kv_heads: int = declare(2, "key and value heads (grouped-query attention)", at_least=1)
    head_dim: int = declare(32, "width of each head; need not equal dim / num_heads", at_least=2, at_most=2**16)
    ffn_dim: int = declare(512, "hidden width of the feed-forward layer", at_least=1, at_most=2**24)
    max_seq_len: int = declare(32768, "maximum sequence length", at_least=1)
    rope_theta: float = declare(1000000.0, "base of the rotary frequencies", above=0)
    norm_eps: float = declare(1e-6, "epsilon of RMSNorm", above=0)
    tie_embeddings: bool = declare(False, "share weights between the embedding and the output head")
    init_std: float = declare(
        0.02,
        "standard deviation of the initial weights; divided by sqrt(2 * num_layers) in projections back into the "
        "residual stream",
        above=0,
    )


def check_heads(config: Any) -> None:
    """Raise UserError if `head_dim` is odd, or if `num_kv_heads` does not divide `num_heads`."""
    if config.head_dim % 2:
        raise setting_error("model.head_dim", config.head_dim, "must be even (RoPE rotates pairs)", config.head_dim + 1)
    check_kv_heads(config)


def check_kv_heads(config: Any) -> None:
    """Raise UserError if `num_kv_heads` does not divide `num_heads`."""
    if config.num_heads % config.num_kv_heads:
        legal = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        best = min(legal, key=lambda n: abs(n - config.num_kv_heads))
        rule = (
            f"must divide model.num_heads={config.num_heads}: every key/value head must serve the same number of "
            "query heads"
        )
        raise setting_error("model.num_kv_heads", config.num_kv_heads, rule, best)
