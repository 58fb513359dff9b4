"""The configuration of a Qwen3-Next model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.declare import BalanceConfig, declare
from trainer.errors import setting_error

from ..qwen3.config import check_kv_heads


@dataclass(frozen=True)
class Qwen3NextConfig(BalanceConfig):
    """Architecture, initialization and load-balancing settings of a Qwen3-Next model."""

    vocab_size: int = declare(257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(192, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(4, "transformer blocks", at_least=1, at_most=2**16)
    attention_every: int = declare(
        4, "every n-th block uses softmax attention; the others use Gated DeltaNet", at_least=1, at_most=2**16
    )
    num_heads: int = declare(4, "query heads", at_least=1, at_most=2**16)
    num_kv_heads: int = declare(2, "key and value heads (grouped-query attention)", at_least=1)
    head_dim: int = declare(64, "width of each head; need not equal dim / num_heads", at_least=2, at_most=2**16)
    rotary_dim: int = declare(16, "dimensions of each head that RoPE rotates", at_least=2, at_most=2**16)
    delta_heads: int = declare(
        8, "value heads of a Gated DeltaNet layer, each with its own recurrent state", at_least=1, at_most=2**16
    )
    delta_key_heads: int = declare(4, "query and key heads of a Gated DeltaNet layer", at_least=1)
    delta_key_dim: int = declare(
        32, "width of each query and key head of a Gated DeltaNet layer", at_least=1, at_most=2**16
    )
    delta_value_dim: int = declare(32, "width of each value head of a Gated DeltaNet layer", at_least=1, at_most=2**16)
    conv_width: int = declare(
        4, "width of a Gated DeltaNet layer's causal convolution, in tokens", at_least=2, at_most=2**10
    )
    expert_dim: int = declare(128, "hidden width of an expert", at_least=1, at_most=2**24)
    shared_dim: int = declare(
        128, "hidden width of the shared expert, which processes every token", at_least=1, at_most=2**24
    )
    num_experts: int = declare(8, "routed experts per layer", at_least=1, at_most=2**16)
    num_chosen: int = declare(2, "routed experts per token (top-k)", at_least=1)
    normalize_chosen: bool = declare(True, "normalize the top-k routing weights of each token to sum to 1")
    max_seq_len: int = declare(32768, "maximum sequence length", at_least=1)
    rope_theta: float = declare(10000.0, "base of the rotary frequencies", above=0)
    norm_eps: float = declare(1e-6, "epsilon of RMSNorm", above=0)
    tie_embeddings: bool = declare(False, "share weights between the embedding and the output head")
    init_std: float = declare(
        0.02,
        "standard deviation of the initial weights; divided by sqrt(2 * num_layers) in projections back into the "
        "residual stream",
        above=0,
    )


def check(config: Qwen3NextConfig) -> None:
    """Raise UserError if fields contradict each other, or if `rotary_dim` is odd.  `head_dim` may be odd."""
    check_kv_heads(config)
    if config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        best = min(config.head_dim, config.rotary_dim) // 2 * 2
        rule = f"must be even and at most model.head_dim={config.head_dim}"
        raise setting_error("model.rotary_dim", config.rotary_dim, rule, best)
    if config.delta_heads % config.delta_key_heads:
        legal = [n for n in range(1, config.delta_heads + 1) if config.delta_heads % n == 0]
        best = min(legal, key=lambda n: abs(n - config.delta_key_heads))
        rule = (
            f"must divide model.delta_heads={config.delta_heads}: each key head serves the same number of value heads"
        )
        raise setting_error("model.delta_key_heads", config.delta_key_heads, rule, best)
    if config.num_chosen > config.num_experts:
        rule = f"must be at most model.num_experts={config.num_experts}"
        raise setting_error("model.num_chosen", config.num_chosen, rule, config.num_experts)
