"""The mapping between gpt-oss and its Hugging Face counterpart.

Published folders contain the experts in MXFP4; they are dequantized as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace, Transposed

from .._huggingface import check_quantization, parse_rope, yarn_entries, yarn_fields
from ..qwen3.huggingface import ATTENTION

if TYPE_CHECKING:
    from .config import GptOssConfig

NAMES = {
    **{ours: theirs for ours, theirs in ATTENTION.items() if not ours.endswith(("q_norm.weight", "k_norm.weight"))},
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.wo.bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.moe.router.weight": "model.layers.*.mlp.router.weight",
    "layers.*.moe.router.bias": "model.layers.*.mlp.router.bias",
    "layers.*.moe.experts.gate_up": Transposed("model.layers.*.mlp.experts.gate_up_proj"),
    "layers.*.moe.experts.gate_up_bias": "model.layers.*.mlp.experts.gate_up_proj_bias",
    "layers.*.moe.experts.down": Transposed("model.layers.*.mlp.experts.down_proj"),
    "layers.*.moe.experts.down_bias": "model.layers.*.mlp.experts.down_proj_bias",
}

FIELDS = {
    "vocab_size": ("vocab_size", 201088),
    "dim": ("hidden_size", 2880),
    "num_layers": ("num_hidden_layers", 36),
    "num_heads": ("num_attention_heads", 64),
    "num_kv_heads": ("num_key_value_heads", 8),
    "head_dim": ("head_dim", 64),
    "window": ("sliding_window", 128),
    "expert_dim": ("intermediate_size", 2880),
    "num_experts": ("num_local_experts", 128),
    "num_chosen": ("num_experts_per_tok", 4),
    "swiglu_alpha": ("swiglu_alpha", 1.702),
    "swiglu_limit": ("swiglu_limit", 7.0),
    "max_seq_len": ("max_position_embeddings", 131072),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
"""For each of our fields: its name in config.json, and the default if it is missing there."""

BALANCE = 0.001
"""Load-balancing coefficient if config.json has none, and the one written if `model.balance` is 0."""

YARN = {
    "rope_factor": ("factor", 32.0),
    "rope_original_len": ("original_max_position_embeddings", 4096),
    "rope_beta_fast": ("beta_fast", 32.0),
    "rope_beta_slow": ("beta_slow", 1.0),
    "rope_truncate": ("truncate", True),
}
"""The same, for the entries of `rope_scaling` that YaRN uses."""


def config(config: GptOssConfig) -> dict[str, Any]:
    """Return the entries of config.json."""
    kinds = ("sliding_attention", "full_attention")
    return {
        **{entry: getattr(config, field) for field, (entry, _) in FIELDS.items()},
        "layer_types": [kinds[layer % 2] for layer in range(config.num_layers)],
        "router_aux_loss_coef": config.balance or BALANCE,
        **yarn_entries(config, YARN),
    }


def model_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `GptOssConfig` for the contents of config.json, as written by transformers 4 or 5.

    Raises UserError unless every other layer has a window, and for weights quantized in a format other than MXFP4.
    """
    check_quantization(content, "mxfp4")
    fields = {field: content.get(entry, default) for field, (entry, default) in FIELDS.items()}
    is_balanced = content.get("output_router_logits", False)
    fields["balance"] = content.get("router_aux_loss_coef", BALANCE) if is_balanced else 0.0
    for layer, kind in enumerate(content.get("layer_types") or ()):
        if kind != (expected := "full_attention" if layer % 2 else "sliding_attention"):
            raise UserError(f"layer_types: layer {layer} has {kind}; in this recipe it has {expected}")
    if "rope_scaling" not in content and "rope_parameters" not in content:
        content = {**content, "rope_scaling": {"rope_type": "yarn", "truncate": False}}
    return fields | yarn_fields(parse_rope({"rope_theta": 150000.0, **content}, ("default", "yarn")), YARN)


HUGGINGFACE = HuggingFace(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names=NAMES,
    config=config,
    model_fields=model_fields,
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0},
    prefix="model.",
    dropped=("quantization_config",),
)
