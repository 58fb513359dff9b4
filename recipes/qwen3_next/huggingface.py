"""The mapping between Qwen3-Next models and their Hugging Face counterparts.

Hugging Face files store the matrices of each expert separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace

from .._huggingface import parse_rope
from ..qwen3.huggingface import ATTENTION, rope_entries
from ..qwen3_moe.huggingface import BALANCE
from ..qwen3_moe.huggingface import NAMES as MIXTURE

if TYPE_CHECKING:
    from .config import Qwen3NextConfig

_DELTA = "model.layers.*.linear_attn"

NAMES = {
    **ATTENTION,
    **MIXTURE,
    "layers.*.delta.qkvz.weight": f"{_DELTA}.in_proj_qkvz.weight",
    "layers.*.delta.rates.weight": f"{_DELTA}.in_proj_ba.weight",
    "layers.*.delta.conv.weight": f"{_DELTA}.conv1d.weight",
    "layers.*.delta.decay.bias": f"{_DELTA}.dt_bias",
    "layers.*.delta.decay.log_rate": f"{_DELTA}.A_log",
    "layers.*.delta.norm.weight": f"{_DELTA}.norm.weight",
    "layers.*.delta.out.weight": f"{_DELTA}.out_proj.weight",
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
"""For each of our fields: its name in config.json, and the default if it is missing there."""

_ROTARY_FRACTION = "partial_rotary_factor"


def _layer_types(num_layers: int, attention_every: int) -> list[str]:
    """Return the entry `layer_types` of config.json."""
    return ["linear_attention" if number % attention_every else "full_attention" for number in range(1, num_layers + 1)]


def config(config: Qwen3NextConfig) -> dict[str, Any]:
    """Return the entries of config.json.

    `output_router_logits` is left out, since it would make generation return the router's logits with every token.
    """
    fraction, rope = config.rotary_dim / config.head_dim, rope_entries(config.rope_theta)
    return {
        **{entry: getattr(config, field) for field, (entry, _) in FIELDS.items()},
        "layer_types": _layer_types(config.num_layers, config.attention_every),
        "full_attention_interval": config.attention_every,
        "mlp_only_layers": [],
        "router_aux_loss_coef": config.balance or BALANCE,
        **rope,
        _ROTARY_FRACTION: fraction,
        "rope_parameters": {**rope["rope_parameters"], _ROTARY_FRACTION: fraction},
    }


def model_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3NextConfig` for the contents of config.json.

    Raises UserError for layers without experts, and unless every n-th layer, and no other, has softmax attention.
    """
    fields = {field: content.get(entry, default) for field, (entry, default) in FIELDS.items()}
    if content.get("mlp_only_layers"):
        raise UserError(f"mlp_only_layers={content['mlp_only_layers']}: in this recipe all layers have experts")
    kinds = content.get("layer_types") or _layer_types(fields["num_layers"], content.get("full_attention_interval", 4))
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if kinds != _layer_types(fields["num_layers"], every):
        raise UserError("layer_types: in this recipe every n-th layer is full_attention, the others linear_attention")
    rope = content.get("rope_parameters") or {}
    fraction = rope.get(_ROTARY_FRACTION, content.get(_ROTARY_FRACTION, 0.25))
    rope_content = {
        **content,
        _ROTARY_FRACTION: None,
        "rope_parameters": {key: rope[key] for key in rope if key != _ROTARY_FRACTION},
    }
    fields |= {"attention_every": every, "rotary_dim": int(fields["head_dim"] * fraction)}
    fields["balance"] = content.get("router_aux_loss_coef", BALANCE) if content.get("output_router_logits") else 0.0
    return fields | {"rope_theta": parse_rope(rope_content, ("default",))["rope_theta"]}


HUGGINGFACE = HuggingFace(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=NAMES,
    config=config,
    model_fields=model_fields,
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1},
    prefix="model.",
    ignored=["mtp.*"],
)
