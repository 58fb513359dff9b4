"""The mapping of weights and config.json between our Qwen3 and Hugging Face's.

Both apply RoPE to pairs of dimensions half a head apart, so no weights need to be permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.model_spec import HuggingFace

from .._huggingface import (
    ROPE_ENTRIES,
    Entry,
    check_layer_types,
    check_padding,
    parse_rope,
    read_fields,
    types_of,
    write_fields,
)

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
    "vocab_size": Entry("vocab_size", int, 151936),
    "dim": Entry("hidden_size", int, 4096),
    "num_layers": Entry("num_hidden_layers", int, 32),
    "num_heads": Entry("num_attention_heads", int, 32),
    "num_kv_heads": Entry("num_key_value_heads", int | None, 32),
    "head_dim": Entry("head_dim", int, 128),
    "ffn_dim": Entry("intermediate_size", int, 22016),
    "max_seq_len": Entry("max_position_embeddings", int, 32768),
    "norm_eps": Entry("rms_norm_eps", float, 1e-6),
    "tie_embeddings": Entry("tie_word_embeddings", bool, False),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for each field of `Qwen3Config` except `rope_theta`."""

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
"""Entries of config.json, each with the only value that this model and `qwen3_moe` support."""

WINDOW_ENTRIES = {"sliding_window": int | None, "max_window_layers": int}
"""The types of entries that do nothing as long as `use_sliding_window` is false."""


def export_config(config: Qwen3Config) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    return write_fields(config, FIELDS) | export_rope(config.rope_theta)


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Qwen3Config` for a config.json written by transformers 4 or 5.

    Raises UserError for layers without full attention and for RoPE that `parse_rope` refuses, such as scaling.
    """
    fields = read_fields(config_json, FIELDS)
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    check_layer_types(config_json, ["full_attention"] * fields["num_layers"])
    check_padding(config_json, fields["vocab_size"])
    return fields | {"rope_theta": parse_rope(config_json, {"default": ()}, fields["max_seq_len"])["rope_theta"]}


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
    entries=types_of(FIELDS) | ROPE_ENTRIES | WINDOW_ENTRIES | {"layer_types": list[str] | None},
    fixed=FIXED,
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
)
