"""The mapping of weights and config.json between this recipe's DeepSeek-V3 and Hugging Face's.

Published checkpoints store most matrices in fp8; these are dequantized as they are read.  The additional last block in
these checkpoints, for multi-token prediction, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace, Stacked

from .._huggingface import check_quantization, export_yarn, parse_rope, parse_yarn

if TYPE_CHECKING:
    from .config import DeepseekV3Config

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
    "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
    "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.moe.router.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.choice.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.moe.shared.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.moe.shared.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "layers.*.moe.shared.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
    "layers.*.moe.experts.w1": Stacked("model.layers.*.mlp.experts.*.gate_proj.weight"),
    "layers.*.moe.experts.w3": Stacked("model.layers.*.mlp.experts.*.up_proj.weight"),
    "layers.*.moe.experts.w2": Stacked("model.layers.*.mlp.experts.*.down_proj.weight"),
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}

FIELDS = {
    "vocab_size": ("vocab_size", 129280),
    "dim": ("hidden_size", 7168),
    "num_layers": ("num_hidden_layers", 61),
    "num_dense_layers": ("first_k_dense_replace", 3),
    "num_heads": ("num_attention_heads", 128),
    "q_rank": ("q_lora_rank", 1536),
    "kv_rank": ("kv_lora_rank", 512),
    "nope_dim": ("qk_nope_head_dim", 128),
    "rope_dim": ("qk_rope_head_dim", 64),
    "value_dim": ("v_head_dim", 128),
    "ffn_dim": ("intermediate_size", 18432),
    "expert_dim": ("moe_intermediate_size", 2048),
    "num_experts": ("n_routed_experts", 256),
    "num_chosen": ("num_experts_per_tok", 8),
    "num_shared": ("n_shared_experts", 1),
    "num_groups": ("n_group", 8),
    "num_chosen_groups": ("topk_group", 4),
    "normalize_chosen": ("norm_topk_prob", True),
    "route_scale": ("routed_scaling_factor", 2.5),
    "max_seq_len": ("max_position_embeddings", 4096),
    "rope_neighbours": ("rope_interleave", True),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
"""Maps fields of `DeepseekV3Config` to the names of their entries in config.json and the defaults for missing ones."""

YARN = {
    "rope_factor": ("factor", 40.0),
    "rope_original_len": ("original_max_position_embeddings", 4096),
    "rope_beta_fast": ("beta_fast", 32.0),
    "rope_beta_slow": ("beta_slow", 1.0),
    "rope_mscale": ("mscale", 0.0),
    "rope_mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Like `FIELDS`, but for YaRN's entries in `rope_scaling` or `rope_parameters`; null counts as missing."""


def export_config(config: DeepseekV3Config) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    return {
        **{entry: getattr(config, field) for field, (entry, _) in FIELDS.items()},
        "num_key_value_heads": config.num_heads,
        **export_yarn(config, YARN),
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `DeepseekV3Config` for a config.json written by transformers 4 or 5.

    Raises UserError if the numbers of key and query heads differ, if there is more than one block for multi-token
    prediction, for RoPE that `parse_rope` or `parse_yarn` refuses, such as scaling other than YaRN, and for weights
    quantized in a format other than fp8.
    """
    check_quantization(config_json, "fp8")
    fields = {field: config_json.get(entry, default) for field, (entry, default) in FIELDS.items()}
    if config_json.get("num_key_value_heads") not in (None, fields["num_heads"]):
        rule = f"must be num_attention_heads={fields['num_heads']}"
        raise UserError(f"num_key_value_heads={config_json['num_key_value_heads']}: {rule}")
    if (config_json.get("num_nextn_predict_layers") or 0) > 1:
        rule = "this recipe can leave out only one block for multi-token prediction"
        raise UserError(f"num_nextn_predict_layers={config_json['num_nextn_predict_layers']}: {rule}")
    return fields | parse_yarn(parse_rope(config_json, ("default", "yarn")), YARN)


def left_out(config: DeepseekV3Config) -> dict[str, str]:
    """Return the name prefix of the multi-token prediction tensors, and what messages call that part."""
    return {f"model.layers.{config.num_layers}.": "its multi-token prediction"}


HUGGINGFACE = HuggingFace(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    fixed={
        **{"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    },
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
    left_out=left_out,
    dropped=("quantization_config", "auto_map"),
    exported={"num_nextn_predict_layers": 0},
)
