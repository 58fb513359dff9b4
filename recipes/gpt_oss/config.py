"""The configuration of a gpt-oss model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.declare import BalanceConfig, declare
from trainer.errors import setting_error

from ..qwen3.config import check_heads


@dataclass(frozen=True)
class GptOssConfig(BalanceConfig):
    """Architecture, initialization and load-balancing settings of a gpt-oss model."""

    vocab_size: int = declare(257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(192, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(4, "transformer blocks", at_least=1, at_most=2**16)
    num_heads: int = declare(6, "query heads", at_least=1, at_most=2**16)
    num_kv_heads: int = declare(2, "key and value heads (grouped-query attention)", at_least=1)
    head_dim: int = declare(32, "width of each head; need not equal dim / num_heads", at_least=2, at_most=2**16)
    window: int = declare(
        128,
        "size of the sliding window in tokens, including the current one; used in layers 0, 2, 4, ..., while the other "
        "layers attend to all earlier tokens",
        at_least=1,
    )
    expert_dim: int = declare(192, "hidden width of an expert", at_least=1, at_most=2**24)
    num_experts: int = declare(8, "experts per layer", at_least=1, at_most=2**16)
    num_chosen: int = declare(2, "experts per token (top-k)", at_least=1)
    swiglu_alpha: float = declare(1.702, "factor applied to the gate projection inside the sigmoid", above=0)
    swiglu_limit: float = declare(
        7.0,
        "an expert's gate projection is clamped to at most this value, and its up projection to +- this value",
        above=0,
    )
    max_seq_len: int = declare(131072, "maximum sequence length", at_least=1)
    rope_theta: float = declare(150000.0, "base of the rotary frequencies", above=1)
    rope_factor: float = declare(32.0, "YaRN: factor by which the context is extended; 1: no scaling", at_least=1)
    rope_original_len: int = declare(4096, "YaRN: context length before the extension", at_least=1)
    rope_beta_fast: float = declare(
        32.0,
        "YaRN: pairs of dimensions that rotate more than this many times in rope_original_len tokens are not scaled",
        above=0,
    )
    rope_beta_slow: float = declare(
        1.0,
        "YaRN: pairs of dimensions that rotate fewer than this many times in rope_original_len tokens are fully scaled",
        above=0,
    )
    rope_truncate: bool = declare(False, "YaRN: round the range of interpolated pairs outward to whole numbers")
    norm_eps: float = declare(1e-5, "epsilon of RMSNorm", above=0)
    tie_embeddings: bool = declare(False, "share weights between the embedding and the output head")
    init_std: float = declare(
        0.02,
        "standard deviation of the initial weights; divided by sqrt(2 * num_layers) in projections back into the "
        "residual stream",
        above=0,
    )

    def window_of(self, layer: int) -> int | None:
        """Return a layer's attention window in tokens, or None if the layer attends to all earlier tokens."""
        return self.window if layer % 2 == 0 else None


def check(config: GptOssConfig) -> None:
    """Raise UserError if fields contradict each other, or if `head_dim` is odd."""
    check_heads(config)
    if config.num_chosen > config.num_experts:
        rule = f"must be at most model.num_experts={config.num_experts}"
        raise setting_error("model.num_chosen", config.num_chosen, rule, config.num_experts)
