"""The configuration of a Llama model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.declare import declare
from trainer.errors import setting_error


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture and initialization settings of a Llama model."""

    vocab_size: int = declare(257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(192, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(4, "transformer blocks", at_least=1, at_most=2**16)
    num_heads: int = declare(6, "query heads", at_least=1)
    num_kv_heads: int = declare(2, "key and value heads (grouped-query attention)", at_least=1)
    ffn_dim: int = declare(512, "hidden width of the feed-forward layer", at_least=1, at_most=2**24)
    max_seq_len: int = declare(131072, "maximum sequence length", at_least=1)
    rope_theta: float = declare(500000.0, "base of the rotary frequencies", above=0)
    rope_factor: float = declare(
        1.0, "Llama 3.1 RoPE scaling: factor by which the context is extended; 1: no scaling", at_least=1
    )
    rope_low_freq: float = declare(
        1.0, "wavelengths longer than rope_original_len / rope_low_freq are scaled by the full factor", above=0
    )
    rope_high_freq: float = declare(
        4.0, "wavelengths shorter than rope_original_len / rope_high_freq are left unscaled", above=0
    )
    rope_original_len: int = declare(8192, "context length before scaling", at_least=1)
    norm_eps: float = declare(1e-5, "epsilon of RMSNorm", above=0)
    tie_embeddings: bool = declare(False, "share weights between the embedding and the output head")
    init_std: float = declare(
        0.02,
        "standard deviation of the initial weights; divided by sqrt(2 * num_layers) in projections back into the "
        "residual stream",
        above=0,
        at_most=1,
    )


def check(config: LlamaConfig) -> None:
    """Raise UserError if fields contradict each other, or if `dim` or the head size is odd."""
    if config.dim % config.num_heads or config.dim // config.num_heads % 2:
        legal = [n for n in range(1, config.dim + 1) if config.dim % n == 0 and config.dim // n % 2 == 0]
        closest = min(legal, key=lambda n: abs(n - config.num_heads)) if legal else None
        rule = f"must divide model.dim={config.dim} into heads of even size (RoPE rotates dimensions in pairs)"
        if closest is None:
            unit = 2 * config.num_heads
            rule = f"must be a multiple of 2 x model.num_heads={config.num_heads} (RoPE rotates dimensions in pairs)"
            raise setting_error("model.dim", config.dim, rule, max(1, round(config.dim / unit)) * unit)
        raise setting_error("model.num_heads", config.num_heads, rule, closest)
    if config.num_heads % config.num_kv_heads:
        legal = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        closest = min(legal, key=lambda n: abs(n - config.num_kv_heads))
        rule = (
            f"must divide model.num_heads={config.num_heads}: every key/value head must serve the same number of "
            "query heads"
        )
        raise setting_error("model.num_kv_heads", config.num_kv_heads, rule, closest)
    if config.rope_factor != 1.0 and config.rope_low_freq >= config.rope_high_freq:
        rule = (
            f"must be below model.rope_high_freq={config.rope_high_freq}: wavelengths between the two cutoffs are "
            "interpolated"
        )
        raise setting_error("model.rope_low_freq", config.rope_low_freq, rule, config.rope_high_freq / 4)
