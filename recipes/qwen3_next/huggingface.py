"""The mapping of weights and config.json between this recipe's Qwen3-Next and Hugging Face's.

Hugging Face checkpoints store each expert's matrices separately; here, the matrices of all experts are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace

from .._huggingface import parse_rope
from ..qwen3.huggingface import export_rope
from ..qwen3_moe.huggingface import AUX_LOSS_COEF
from ..qwen3_moe.huggingface import NAMES as MOE_NAMES

if TYPE_CHECKING:
    from .config import Qwen3NextConfig

_DELTA_PREFIX = "model.layers.*.linear_attn"

NAMES = {
    **MOE_NAMES,
    "layers.*.delta.qkvz.weight": f"{_DELTA_PREFIX}.in_proj_qkvz.weight",
    "layers.*.delta.rates.weight": f"{_DELTA_PREFIX}.in_proj_ba.weight",
    "layers.*.delta.conv.weight": f"{_DELTA_PREFIX}.conv1d.weight",
    "layers.*.delta.decay.bias": f"{_DELTA_PREFIX}.dt_bias",
    "layers.*.delta.decay.log_rate": f"{_DELTA_PREFIX}.A_log",
    "layers.*.delta.norm.weight": f"{_DELTA_PREFIX}.norm.weight",
    "layers.*.delta.out.weight": f"{_DELTA_PREFIX}.out_proj.weight",
    "layers.*.shared.feed_forward.w1.weight": "model.layers.*.mlp.shared_expert.gate_proj.weight",
    "layers.*.shared.feed_forward.w3.weight": "model.layers.*.mlp.shared_expert.up_proj.weight",
    "layers.*.shared.feed_forward.w2.weight": "model.layers.*.mlp.shared_expert.down_proj.weight",
    "layers.*.shared.gate.weight": "model.layers.*.mlp.shared_expert_gate.weight",
}

FIELDS = {
    "vocab_size": ("vocab_size", 151936),
    "dim": ("hidden_size", 2048),
    "num_layers": ("num_hidden_layers", 48),
    "num_heads": ("num_attention_heads", 16),
    "num_kv_heads": ("num_key_value_heads", 2),
    "head_dim": ("head_dim", 256),
    "delta_heads": ("linear_num_value_heads", 32),
    "delta_key_heads": ("linear_num_key_heads", 16),
    "delta_key_dim": ("linear_key_head_dim", 128),
    "delta_value_dim": ("linear_value_head_dim", 128),
    "conv_width": ("linear_conv_kernel_dim", 4),
    "expert_dim": ("moe_intermediate_size", 512),
    "shared_dim": ("shared_expert_intermediate_size", 512),
    "num_experts": ("num_experts", 512),
    "num_chosen": ("num_experts_per_tok", 10),
    "normalize_chosen": ("norm_topk_prob", True),
    "max_seq_len": ("max_position_embeddings", 32768),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
"""Maps each field that corresponds to one config.json entry to the entry's name and the default for a missing entry."""

_ROTARY_FRACTION_ENTRY = "partial_rotary_factor"


def _layer_types(num_layers: int, attention_every: int) -> list[str]:
    """Return the value of `layer_types` in config.json: the kind of attention in each layer."""
    return ["linear_attention" if number % attention_every else "full_attention" for number in range(1, num_layers + 1)]


def export_config(config: Qwen3NextConfig) -> dict[str, Any]:
    """Return the entries of config.json for `config`.

    `output_router_logits` is left out, since it would make generation return the router's logits with every token.
    """
    rope, fraction = export_rope(config.rope_theta), config.rotary_dim / config.head_dim
    if int(config.head_dim * fraction) != config.rotary_dim:  # the quotient was rounded down: 98 * (2 / 98) < 2
        fraction = math.nextafter(fraction, 1.0)
    return {
        **{entry: getattr(config, field) for field, (entry, _) in FIELDS.items()},
        "layer_types": _layer_types(config.num_layers, config.attention_every),
        "full_attention_interval": config.attention_every,
        "mlp_only_layers": [],
        "router_aux_loss_coef": config.balance or AUX_LOSS_COEF,
        **rope,
        _ROTARY_FRACTION_ENTRY: fraction,
        "rope_parameters": {**rope["rope_parameters"], _ROTARY_FRACTION_ENTRY: fraction},
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3NextConfig` for a config.json.

    Raises UserError for layers without experts, for scaled RoPE frequencies, and if the layers with softmax attention
    are not exactly every n-th one.
    """
    fields = {field: config_json.get(entry, default) for field, (entry, default) in FIELDS.items()}
    if config_json.get("mlp_only_layers"):
        raise UserError(f"mlp_only_layers={config_json['mlp_only_layers']}: in this recipe all layers have experts")
    interval = config_json.get("full_attention_interval", 4)
    layer_types = config_json.get("layer_types") or _layer_types(fields["num_layers"], interval)
    every = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1
    if layer_types != _layer_types(fields["num_layers"], every):
        raise UserError("layer_types: in this recipe every n-th layer is full_attention, the others linear_attention")
    rope = config_json.get("rope_parameters") or {}
    fraction = rope.get(_ROTARY_FRACTION_ENTRY, config_json.get(_ROTARY_FRACTION_ENTRY, 0.25))
    rope_content = {
        **config_json,
        _ROTARY_FRACTION_ENTRY: None,
        "rope_parameters": {key: rope[key] for key in rope if key != _ROTARY_FRACTION_ENTRY},
    }
    fields |= {"attention_every": every, "rotary_dim": int(fields["head_dim"] * fraction)}
    is_balanced = config_json.get("output_router_logits", False)
    fields["balance"] = config_json.get("router_aux_loss_coef", AUX_LOSS_COEF) if is_balanced else 0.0
    return fields | {"rope_theta": parse_rope(rope_content, ("default",))["rope_theta"]}


HUGGINGFACE = HuggingFace(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1},
    prefix="model.",
    ignored=["mtp.*"],
)
