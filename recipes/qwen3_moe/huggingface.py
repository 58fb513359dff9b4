"""The mapping of weights and config.json between this recipe's Qwen3 mixture-of-experts models and Hugging Face's.

Hugging Face checkpoints store each expert's matrices separately; here, the matrices of all experts are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace, Stacked

from .._huggingface import parse_rope
from ..qwen3.huggingface import FIXED, SHARED_NAMES, export_rope

if TYPE_CHECKING:
    from .config import Qwen3MoeConfig

NAMES = {
    **SHARED_NAMES,
    "layers.*.moe.router.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.experts.w1": Stacked("model.layers.*.mlp.experts.*.gate_proj.weight"),
    "layers.*.moe.experts.w3": Stacked("model.layers.*.mlp.experts.*.up_proj.weight"),
    "layers.*.moe.experts.w2": Stacked("model.layers.*.mlp.experts.*.down_proj.weight"),
}

FIELDS = {
    "vocab_size": ("vocab_size", 151936),
    "dim": ("hidden_size", 2048),
    "num_layers": ("num_hidden_layers", 24),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", 4),
    "expert_dim": ("moe_intermediate_size", 768),
    "num_chosen": ("num_experts_per_tok", 8),
    "normalize_chosen": ("norm_topk_prob", False),
    "max_seq_len": ("max_position_embeddings", 32768),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
"""Maps fields of `Qwen3MoeConfig` to the names of their entries in config.json and the defaults for missing entries."""

AUX_LOSS_COEF = 0.001
"""The load-balancing coefficient written to config.json if `model.balance` is 0.

It is also assumed for a config.json that sets `output_router_logits` but has no coefficient.
"""


def export_config(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Return the entries of config.json for `config`.

    `output_router_logits` is left out, since it would make generation return the router's logits with every token.
    """
    return {
        **{entry: getattr(config, field) for field, (entry, _) in FIELDS.items()},
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "mlp_only_layers": [],
        "router_aux_loss_coef": config.balance or AUX_LOSS_COEF,
        **export_rope(config.rope_theta),
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3MoeConfig` for a config.json written by transformers 4 or 5.

    Raises UserError for layers without experts, for contradictory numbers of experts, and for RoPE settings that
    `parse_rope` refuses, such as any scaling.
    """
    fields = {field: config_json.get(entry, default) for field, (entry, default) in FIELDS.items()}
    fields["head_dim"] = config_json.get("head_dim", fields["dim"] // fields["num_heads"])
    if config_json.get("mlp_only_layers"):
        raise UserError(f"mlp_only_layers={config_json['mlp_only_layers']}: in this recipe all layers have experts")
    counts = [config_json[key] for key in ("num_experts", "num_local_experts") if key in config_json]
    if any(number != counts[0] for number in counts):
        raise UserError(f"num_local_experts={counts[1]}: is another name for num_experts, which is {counts[0]}")
    fields["num_experts"] = counts[0] if counts else 128
    is_balanced = config_json.get("output_router_logits", False)
    fields["balance"] = config_json.get("router_aux_loss_coef", AUX_LOSS_COEF) if is_balanced else 0.0
    return fields | {"rope_theta": parse_rope(config_json, ("default",))["rope_theta"]}


HUGGINGFACE = HuggingFace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    fixed=FIXED | {"decoder_sparse_step": 1},
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
)
