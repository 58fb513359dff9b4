"""The mapping of weights and config.json between this recipe's Qwen3 and Hugging Face's.

Both apply RoPE to pairs of dimensions half a head apart, so no weights need to be permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace

from .._huggingface import parse_rope

if TYPE_CHECKING:
    from .config import Qwen3Config

SHARED_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
"""Maps each weight name outside the feed-forward layers to Hugging Face's, for dense and mixture-of-experts models."""

NAMES = {
    **SHARED_NAMES,
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
}

FIELDS = {
    "vocab_size": ("vocab_size", 151936),
    "dim": ("hidden_size", 4096),
    "num_layers": ("num_hidden_layers", 32),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", 32),
    "head_dim": ("head_dim", 128),
    "ffn_dim": ("intermediate_size", 22016),
    "max_seq_len": ("max_position_embeddings", 32768),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
"""Maps each field except `rope_theta` to the name of its entry in config.json and the default for a missing entry."""

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
"""Entries of config.json, each with the only value that this recipe and `qwen3_moe` support."""


def export_config(config: Qwen3Config) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    return {entry: getattr(config, field) for field, (entry, _) in FIELDS.items()} | export_rope(config.rope_theta)


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3Config` for a config.json written by transformers 4 or 5.

    Raises UserError for layers without full attention and for RoPE settings that `parse_rope` rejects, such as scaling.
    """
    fields = {field: config_json.get(entry, default) for field, (entry, default) in FIELDS.items()}
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    kinds = config_json.get("layer_types") or []
    if other := next((kind for kind in kinds if kind != "full_attention"), None):
        raise UserError(f"layer_types: has a layer of type {other}; this recipe supports only full_attention")
    return fields | {"rope_theta": parse_rope(config_json, ("default",))["rope_theta"]}


def export_rope(theta: float) -> dict[str, Any]:
    """Return the entries of config.json for the rotary embedding.

    transformers 5 reads `rope_parameters`; transformers 4 reads `rope_theta`.  Both are written.
    """
    parameters = {"rope_type": "default", "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": parameters}


HUGGINGFACE = HuggingFace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    fixed=FIXED,
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
)
