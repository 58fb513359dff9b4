"""The mapping of weights and config.json between our Qwen3-Next and Hugging Face's.

Hugging Face checkpoints store each expert's matrices separately; here, the matrices of all experts are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.model_spec import HuggingFace

from .._huggingface import ROPE_ENTRIES, Entry, check_padding, parse_rope, read_fields, types_of, write_fields
from ..qwen3.huggingface import export_rope
from ..qwen3_moe.huggingface import AUX_LOSS_COEF, MOE_ENTRIES, read_balance
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
    "vocab_size": Entry("vocab_size", int, 151936),
    "dim": Entry("hidden_size", int, 2048),
    "num_layers": Entry("num_hidden_layers", int, 48),
    "num_heads": Entry("num_attention_heads", int, 16),
    "num_kv_heads": Entry("num_key_value_heads", int, 2),
    "head_dim": Entry("head_dim", int, 256),
    "delta_heads": Entry("linear_num_value_heads", int, 32),
    "delta_key_heads": Entry("linear_num_key_heads", int, 16),
    "delta_key_dim": Entry("linear_key_head_dim", int, 128),
    "delta_value_dim": Entry("linear_value_head_dim", int, 128),
    "conv_width": Entry("linear_conv_kernel_dim", int, 4),
    "expert_dim": Entry("moe_intermediate_size", int, 512),
    "shared_dim": Entry("shared_expert_intermediate_size", int, 512),
    "num_experts": Entry("num_experts", int, 512),
    "num_chosen": Entry("num_experts_per_tok", int, 10),
    "normalize_chosen": Entry("norm_topk_prob", bool, True),
    "max_seq_len": Entry("max_position_embeddings", int, 32768),
    "norm_eps": Entry("rms_norm_eps", float, 1e-6),
    "tie_embeddings": Entry("tie_word_embeddings", bool, False),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for each field that corresponds to a single one."""

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
        **write_fields(config, FIELDS),
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
    fields = read_fields(config_json, FIELDS)
    if config_json.get("mlp_only_layers"):
        raise UserError(f"mlp_only_layers={config_json['mlp_only_layers']}: in this model all layers have experts")
    layer_types = config_json.get("layer_types")
    if layer_types is None:
        layer_types = _layer_types(fields["num_layers"], config_json.get("full_attention_interval", 4))
    every = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1
    if layer_types != _layer_types(fields["num_layers"], every):
        raise UserError(
            "layer_types: in this model every n-th of the num_hidden_layers layers is full_attention, the others "
            "linear_attention"
        )
    check_padding(config_json, fields["vocab_size"])
    rope = parse_rope(config_json, {"default": ()}, fields["max_seq_len"], fraction=0.25)
    rotary_dim = int(fields["head_dim"] * rope[_ROTARY_FRACTION_ENTRY])
    fields |= {"attention_every": every, "rotary_dim": rotary_dim, "balance": read_balance(config_json)}
    return fields | {"rope_theta": rope["rope_theta"]}


HUGGINGFACE = HuggingFace(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    entries={
        **types_of(FIELDS),
        **ROPE_ENTRIES,
        **MOE_ENTRIES,
        **{"layer_types": list[str] | None, "full_attention_interval": int},
    },
    fixed={
        **{"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1},
        "use_sliding_window": False,
    },
    prefix="model.",
    ignored=["mtp.*"],
)
