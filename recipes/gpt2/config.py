"""The configuration of a GPT-2 model, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.declare import declare
from trainer.errors import setting_error


@dataclass(frozen=True)
class GPT2Config:
    """Architecture, initialization and dropout settings of a GPT-2 model."""

    vocab_size: int = declare(50257, "size of the vocabulary", at_least=1, at_most=2**31 - 1)
    dim: int = declare(768, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = declare(12, "transformer blocks", at_least=1, at_most=2**16)
    num_heads: int = declare(12, "attention heads", at_least=1)
    max_seq_len: int = declare(1024, "number of learned positions", at_least=1, at_most=2**31 - 1)
    dropout: float = declare(
        0.0,
        "dropout on both residual branches; also the default for embedding_dropout and attention_dropout",
        at_least=0,
        below=1,
        training_only=True,
    )
    embedding_dropout: float | None = declare(
        None, "dropout on embeddings; null: model.dropout", at_least=0, below=1, training_only=True
    )
    attention_dropout: float | None = declare(
        None, "dropout on attention weights; null: model.dropout", at_least=0, below=1, training_only=True
    )
    norm_eps: float = declare(1e-5, "epsilon of LayerNorm", above=0)
    init_std: float = declare(
        0.02,
        "standard deviation of the initial weights; divided by sqrt(2 * num_layers) in projections back into the "
        "residual stream",
        above=0,
    )

    @property
    def dropouts(self) -> tuple[float, float, float]:
        """The dropout rates for the embeddings, the attention weights, and both residual branches."""
        rates = (self.embedding_dropout, self.attention_dropout)
        embedding_rate, attention_rate = (self.dropout if rate is None else rate for rate in rates)
        return embedding_rate, attention_rate, self.dropout


def check(config: GPT2Config) -> None:
    """Raise UserError if `num_heads` does not divide `dim`."""
    if config.dim % config.num_heads:
        legal = [n for n in range(1, config.dim + 1) if config.dim % n == 0]
        best = min(legal, key=lambda n: abs(n - config.num_heads))
        raise setting_error("model.num_heads", config.num_heads, f"must divide model.dim={config.dim}", best)
