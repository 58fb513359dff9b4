"""The configuration of a DeepSeek-V3 model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.declare import BalanceConfig, declare
from trainer.errors import setting_error


@dataclass(frozen=True)
class DeepseekV3Config(BalanceConfig):
    """Architecture, initialization and load-balancing settings of a DeepSeek-V3 model."""

    balance_rate: float = declare(
        0.0,
        "amount by which each expert's bias changes after a step, to even out the experts' load; 0: constant biases",
        at_least=0,
        training_only=True,
    )
    vocab_size: int = declare(257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(192, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(4, "transformer blocks", at_least=1, at_most=2**16)
    num_dense_layers: int = declare(1, "number of initial blocks without experts", at_least=0)
    num_heads: int = declare(6, "attention heads", at_least=1, at_most=2**16)
    q_rank: int | None = declare(96, "width of the query latents; null: queries are not compressed", at_least=1)
    kv_rank: int = declare(64, "width of the key and value latents", at_least=1)
    nope_dim: int = declare(32, "dimensions of each query and key head that RoPE does not rotate", at_least=1)
    rope_dim: int = declare(16, "dimensions of each query and key head that RoPE rotates", at_least=2)
    value_dim: int = declare(32, "width of each head's values", at_least=1)
    ffn_dim: int = declare(512, "hidden width of the feed-forward layer of blocks without experts", at_least=1)
    expert_dim: int = declare(96, "hidden width of an expert", at_least=1, at_most=2**24)
    num_experts: int = declare(16, "routed experts per layer", at_least=1, at_most=2**16)
    num_chosen: int = declare(4, "routed experts per token (top-k)", at_least=1)
    num_shared: int = declare(1, "shared experts, which process every token", at_least=1)
    num_groups: int = declare(
        4, "groups of experts; each token chooses groups, then experts in them; 1: no groups", at_least=1
    )
    num_chosen_groups: int = declare(2, "groups per token, from which its experts are chosen", at_least=1)
    normalize_chosen: bool = declare(True, "normalize the top-k routing weights of each token to sum to 1")
    route_scale: float = declare(2.5, "factor applied to each token's routing weights", above=0)
    max_seq_len: int = declare(163840, "maximum sequence length", at_least=1)
    rope_theta: float = declare(10000.0, "base of the rotary frequencies", above=1)
    rope_neighbours: bool = declare(True, "RoPE pairs adjacent dimensions, rather than dimensions rope_dim / 2 apart")
    rope_factor: float = declare(40.0, "YaRN: factor by which the context is extended; 1: no scaling", at_least=1)
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
    rope_truncate: bool = declare(True, "YaRN: round the range of interpolated pairs outward to whole numbers")
    rope_mscale: float = declare(
        1.0,
        "YaRN: RoPE's cosines and sines are scaled by m(rope_mscale) / m(rope_mscale_all_dim), where m(x) is "
        "0.1 x ln(rope_factor) + 1; if either is 0, by m(1)",
        at_least=0,
    )
    rope_mscale_all_dim: float = declare(
        1.0, "YaRN: coefficient for scaling all attention scores; 0: no scaling", at_least=0
    )
    norm_eps: float = declare(1e-6, "epsilon of RMSNorm, except for the latents, where it is always 1e-6", above=0)
    tie_embeddings: bool = declare(False, "share weights between the embedding and the output head")
    init_std: float = declare(
        0.02,
        "standard deviation of the initial weights; divided by sqrt(2 * num_layers) in projections back into the "
        "residual stream",
        above=0,
    )

    @property
    def head_dim(self) -> int:
        """Width of each query and key head."""
        return self.nope_dim + self.rope_dim


def check(config: DeepseekV3Config) -> None:
    """Raise UserError if fields contradict each other, or if `rope_dim` is odd."""
    if config.rope_dim % 2:
        raise setting_error("model.rope_dim", config.rope_dim, "must be even (RoPE rotates pairs)", config.rope_dim + 1)
    if config.num_dense_layers >= config.num_layers:
        rule = f"must be less than model.num_layers={config.num_layers}: some blocks must have experts"
        raise setting_error("model.num_dense_layers", config.num_dense_layers, rule, config.num_layers - 1)
    if config.num_chosen_groups > config.num_groups:
        rule = f"must be at most model.num_groups={config.num_groups}"
        raise setting_error("model.num_chosen_groups", config.num_chosen_groups, rule, config.num_groups)
    size = config.num_experts // config.num_groups
    if config.num_experts % config.num_groups or (config.num_groups > 1 and size < 2):
        rule = f"must divide model.num_experts={config.num_experts} into groups of at least 2"
        legal = [n for n in range(2, config.num_experts // 2 + 1) if config.num_experts % n == 0]
        raise setting_error("model.num_groups", config.num_groups, rule, max(legal, default=1))
    if config.num_chosen > (available := size * config.num_chosen_groups):
        rule = f"must be at most {available}, the experts in model.num_chosen_groups={config.num_chosen_groups} groups"
        raise setting_error("model.num_chosen", config.num_chosen, rule, available)
