"""The mapping of weights and config.json between our DeepSeek-V3 and Hugging Face's.

Published checkpoints store most matrices in fp8; these are dequantized as they are read.  The additional last block in
these checkpoints, for multi-token prediction, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.model_spec import HuggingFace, Stacked

from .._huggingface import (
    ROPE_ENTRIES,
    YARN_ENTRIES,
    Entry,
    check_padding,
    check_quantization,
    export_yarn,
    parse_rope,
    parse_yarn,
    read_fields,
    types_of,
    write_fields,
)

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
    "vocab_size": Entry("vocab_size", int, 129280),
    "dim": Entry("hidden_size", int, 7168),
    "num_layers": Entry("num_hidden_layers", int, 61),
    "num_dense_layers": Entry("first_k_dense_replace", int, 3),
    "num_heads": Entry("num_attention_heads", int, 128),
    "q_rank": Entry("q_lora_rank", int | None, 1536),
    "kv_rank": Entry("kv_lora_rank", int, 512),
    "nope_dim": Entry("qk_nope_head_dim", int, 128),
    "rope_dim": Entry("qk_rope_head_dim", int, 64),
    "value_dim": Entry("v_head_dim", int, 128),
    "ffn_dim": Entry("intermediate_size", int, 18432),
    "expert_dim": Entry("moe_intermediate_size", int, 2048),
    "num_experts": Entry("n_routed_experts", int, 256),
    "num_chosen": Entry("num_experts_per_tok", int, 8),
    "num_shared": Entry("n_shared_experts", int, 1),
    "num_groups": Entry("n_group", int, 8),
    "num_chosen_groups": Entry("topk_group", int, 4),
    "normalize_chosen": Entry("norm_topk_prob", bool, True),
    "route_scale": Entry("routed_scaling_factor", float, 2.5),
    "max_seq_len": Entry("max_position_embeddings", int, 4096),
    "rope_neighbours": Entry("rope_interleave", bool, True),
    "norm_eps": Entry("rms_norm_eps", float, 1e-6),
    "tie_embeddings": Entry("tie_word_embeddings", bool, False),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for fields of `DeepseekV3Config`."""

YARN = {
    "rope_factor": "factor",
    "rope_original_len": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
}
"""Maps each field for YaRN to the name of its entry in `rope_scaling` or `rope_parameters`."""


def export_config(config: DeepseekV3Config) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    return {
        **write_fields(config, FIELDS),
        "num_key_value_heads": config.num_heads,
        **export_yarn(config, YARN),
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `DeepseekV3Config` for a config.json written by transformers 4 or 5.

    Raises UserError if the numbers of key and query heads differ, if there is more than one block for multi-token
    prediction, if another entry contradicts the sizes of the heads or the number of experts, for RoPE that
    `parse_rope` refuses, such as scaling other than YaRN, and for weights quantized in a format other than fp8.
    """
    check_quantization(config_json, "fp8")
    fields = read_fields(config_json, FIELDS)
    num_kv_heads = config_json.get("num_key_value_heads", 128)
    if num_kv_heads not in (None, fields["num_heads"]):
        raise UserError(f"num_key_value_heads={num_kv_heads}: must be num_attention_heads={fields['num_heads']}")
    for name, value in {
        "head_dim": fields["rope_dim"],
        "qk_head_dim": fields["nope_dim"] + fields["rope_dim"],
        "num_local_experts": fields["num_experts"],
    }.items():
        if config_json.get(name, value) != value:
            raise UserError(f"{name}={config_json[name]}: must be {value}, as other entries say")
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config_json.get(name, 0) > 1:
            rule = "this model can leave out only one block for multi-token prediction"
            raise UserError(f"{name}={config_json[name]}: {rule}")
    check_padding(config_json, fields["vocab_size"])
    supported = {"default": (), "yarn": (*YARN_ENTRIES, "mscale", "mscale_all_dim")}
    return fields | parse_yarn(parse_rope(config_json, supported, fields["max_seq_len"]), YARN)


UNUSED = {"ep_size": int, "aux_loss_alpha": float, "seq_aux": bool, "output_router_logits": bool}
"""Entries of published files that do not change the logits."""


def left_out(config: DeepseekV3Config) -> dict[str, str]:
    """Return the name prefix of the multi-token prediction tensors, and what messages call that part."""
    return {f"model.layers.{config.num_layers}.": "its multi-token prediction"}


HUGGINGFACE = HuggingFace(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    entries={
        **types_of(FIELDS),
        **ROPE_ENTRIES,
        **{"num_key_value_heads": int | None, "head_dim": int, "qk_head_dim": int, "num_local_experts": int},
        **{"num_nextn_predict_layers": int, "num_mtp_layers": int},
        **UNUSED,
    },
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
