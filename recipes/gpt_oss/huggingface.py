"""The mapping of weights and config.json between this recipe's gpt-oss and Hugging Face's.

Published checkpoints store the experts' matrices in MXFP4; these are dequantized as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace, Transposed

from .._huggingface import check_quantization, export_yarn, parse_rope, parse_yarn
from ..qwen3.huggingface import SHARED_NAMES

if TYPE_CHECKING:
    from .config import GptOssConfig

NAMES = {
    **{ours: theirs for ours, theirs in SHARED_NAMES.items() if not ours.endswith(("q_norm.weight", "k_norm.weight"))},
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
"""Maps fields of `GptOssConfig` to the names of their entries in config.json and the defaults for missing entries."""

AUX_LOSS_COEF = 0.001
"""The load-balancing coefficient written to config.json if `model.balance` is 0.

It is also assumed for a config.json that sets `output_router_logits` but has no coefficient.
"""

YARN = {
    "rope_factor": ("factor", 32.0),
    "rope_original_len": ("original_max_position_embeddings", 4096),
    "rope_beta_fast": ("beta_fast", 32.0),
    "rope_beta_slow": ("beta_slow", 1.0),
    "rope_truncate": ("truncate", True),
}
"""Like `FIELDS`, but for YaRN's entries in `rope_scaling` or `rope_parameters`; null counts as missing."""


def export_config(config: GptOssConfig) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    layer_types = ("sliding_attention", "full_attention")
    return {
        **{entry: getattr(config, field) for field, (entry, _) in FIELDS.items()},
        "layer_types": [layer_types[layer % 2] for layer in range(config.num_layers)],
        "router_aux_loss_coef": config.balance or AUX_LOSS_COEF,
        **export_yarn(config, YARN),
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `GptOssConfig` for a config.json written by transformers 4 or 5.

    Raises UserError if `layer_types` is given but does not alternate between a window (layers 0, 2, 4, ...) and full
    attention, for RoPE that `parse_rope` or `parse_yarn` refuses, such as scaling other than YaRN, and for weights
    quantized in a format other than MXFP4.
    """
    check_quantization(config_json, "mxfp4")
    fields = {field: config_json.get(entry, default) for field, (entry, default) in FIELDS.items()}
    is_balanced = config_json.get("output_router_logits", False)
    fields["balance"] = config_json.get("router_aux_loss_coef", AUX_LOSS_COEF) if is_balanced else 0.0
    for layer, layer_type in enumerate(config_json.get("layer_types") or ()):
        if layer_type != (expected := "full_attention" if layer % 2 else "sliding_attention"):
            raise UserError(f"layer_types: layer {layer} has {layer_type}; in this recipe it has {expected}")
    if "rope_scaling" not in config_json and "rope_parameters" not in config_json:
        config_json = {**config_json, "rope_scaling": {"rope_type": "yarn", "truncate": False}}
    return fields | parse_yarn(parse_rope({"rope_theta": 150000.0, **config_json}, ("default", "yarn")), YARN)


HUGGINGFACE = HuggingFace(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0},
    prefix="model.",
    dropped=("quantization_config",),
)
