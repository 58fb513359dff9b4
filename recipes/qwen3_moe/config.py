"""The configuration of a Qwen3 mixture-of-experts model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.declare import BalanceConfig, declare
from trainer.errors import setting_error

from ..qwen3.config import check_heads


@dataclass(frozen=True)
class Qwen3MoeConfig(BalanceConfig):
    """Architecture, initialization and load-balancing settings of a Qwen3 mixture-of-experts model."""

    vocab_size: int = declare(257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(192, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(4, "transformer blocks", at_least=1, at_most=2**16)
    num_heads: int = declare(6, "query heads", at_least=1, at_most=2**16)
    num_kv_heads: int = declare(2, "key and value heads (grouped-query attention)", at_least=1)
    head_dim: int = declare(32, "width of each head; need not equal dim / num_heads", at_least=2, at_most=2**16)
    expert_dim: int = declare(128, "hidden width of an expert", at_least=1, at_most=2**24)
    num_experts: int = declare(8, "experts per layer", at_least=1, at_most=2**16)
    num_chosen: int = declare(2, "experts per token (top-k)", at_least=1)
    normalize_chosen: bool = declare(True, "normalize the top-k routing weights of each token to sum to 1")
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


def check(config: Qwen3MoeConfig) -> None:
    """Raise UserError if fields contradict each other, or if `head_dim` is odd."""
    check_heads(config)
    if config.num_chosen > config.num_experts:
        rule = f"must be at most model.num_experts={config.num_experts}"
        raise setting_error("model.num_chosen", config.num_chosen, rule, config.num_experts)
