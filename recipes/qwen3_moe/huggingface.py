"""The mapping of weights and config.json between our Qwen3 mixture-of-experts models and Hugging Face's.

Hugging Face checkpoints store each expert's matrices separately; here, the matrices of all experts are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.model_spec import HuggingFace, Stacked

from .._huggingface import ROPE_ENTRIES, Entry, check_padding, parse_rope, read_fields, types_of, write_fields
from ..qwen3.huggingface import FIXED, SHARED_NAMES, WINDOW_ENTRIES, export_rope

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
    "vocab_size": Entry("vocab_size", int, 151936),
    "dim": Entry("hidden_size", int, 2048),
    "num_layers": Entry("num_hidden_layers", int, 24),
    "num_heads": Entry("num_attention_heads", int, 32),
    "num_kv_heads": Entry("num_key_value_heads", int, 4),
    "expert_dim": Entry("moe_intermediate_size", int, 768),
    "num_chosen": Entry("num_experts_per_tok", int, 8),
    "normalize_chosen": Entry("norm_topk_prob", bool, False),
    "max_seq_len": Entry("max_position_embeddings", int, 32768),
    "norm_eps": Entry("rms_norm_eps", float, 1e-6),
    "tie_embeddings": Entry("tie_word_embeddings", bool, False),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for fields of `Qwen3MoeConfig`."""

AUX_LOSS_COEF = 0.001
"""The load-balancing coefficient written to config.json if `model.balance` is 0.

It is also assumed for a config.json that sets `output_router_logits` but has no coefficient.
"""

BALANCE_ENTRIES = {"output_router_logits": bool, "router_aux_loss_coef": float}
"""The types of the entries for the router's loss, which `read_balance` reads."""

MOE_ENTRIES = {**BALANCE_ENTRIES, "mlp_only_layers": list[int] | None, "intermediate_size": int}
"""The types of the entries about experts.  `intermediate_size` is that of layers without experts."""


def export_config(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Return the entries of config.json for `config`.

    `output_router_logits` is left out, since it would make generation return the router's logits with every token.
    """
    return {
        **write_fields(config, FIELDS),
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
    fields = read_fields(config_json, FIELDS)
    fields["head_dim"] = config_json.get("head_dim", fields["dim"] // fields["num_heads"])
    if config_json.get("mlp_only_layers"):
        raise UserError(f"mlp_only_layers={config_json['mlp_only_layers']}: in this model all layers have experts")
    counts = [config_json[key] for key in ("num_experts", "num_local_experts") if key in config_json]
    if any(number != counts[0] for number in counts):
        raise UserError(f"num_local_experts={counts[1]}: is another name for num_experts, which is {counts[0]}")
    fields["num_experts"] = counts[0] if counts else 128
    fields["balance"] = read_balance(config_json)
    check_padding(config_json, fields["vocab_size"])
    return fields | {"rope_theta": parse_rope(config_json, {"default": ()}, fields["max_seq_len"])["rope_theta"]}


def read_balance(config_json: Mapping[str, Any]) -> float:
    """Return the load-balancing coefficient: that of config.json if it asks for the router's loss, else 0."""
    is_balanced = config_json.get("output_router_logits", False)
    return float(config_json.get("router_aux_loss_coef", AUX_LOSS_COEF)) if is_balanced else 0.0


HUGGINGFACE = HuggingFace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    entries={
        **types_of(FIELDS),
        **ROPE_ENTRIES,
        **WINDOW_ENTRIES,
        **MOE_ENTRIES,
        **{"head_dim": int, "num_experts": int, "num_local_experts": int},
    },
    fixed=FIXED | {"decoder_sparse_step": 1},
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
)
