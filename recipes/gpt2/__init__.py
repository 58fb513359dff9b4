"""GPT-2: learned position embeddings, tied token embeddings, LayerNorm and GELU.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the code published with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.model_spec import ModelSpec
from trainer.registry import register

from .config import GPT2Config, check
from .huggingface import HUGGINGFACE

if TYPE_CHECKING:
    from trainer.model_spec import TensorPlan


def flops(config: GPT2Config, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per matmul parameter, plus causal attention.

    seq_len: sequence length; with document masking, the average length of the document that a token belongs to.
    """
    matmul_params = config.num_layers * 12 * config.dim**2 + config.dim * config.vocab_size
    return 6.0 * (matmul_params + config.num_layers * config.dim * seq_len)


TENSOR: TensorPlan = {
    "wte": "vocabulary",
    "wpe": "sequence",
    "blocks.*.attention": "input",
    "blocks.*.attention.qkv": "columns",
    "blocks.*.attention.out": "rows",
    "blocks.*.up": ("input", "columns"),
    "blocks.*.down": "rows",
    "head.output": "vocabulary",
}

register(
    ModelSpec(
        name="gpt2",
        config=GPT2Config,
        build="trainer.recipes.gpt2.model:GPT2",
        units=[("wte", "wpe", "head"), "blocks.*"],
        check=check,
        flops=flops,
        hf=HUGGINGFACE,
        context=True,
        tensor=TENSOR,
        blocks={"blocks.*.attention.qkv.weight": 3},
    )
)
