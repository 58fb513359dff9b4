"""The mapping of weights and config.json between our Llama and Hugging Face's.

Both apply RoPE to pairs of dimensions half a head apart, so no weights need to be permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.model_spec import HuggingFace

from .._huggingface import ROPE_ENTRIES, Entry, check_padding, parse_rope, read_fields, types_of, write_fields

if TYPE_CHECKING:
    from .config import LlamaConfig

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}

FIELDS = {
    "vocab_size": Entry("vocab_size", int, 32000),
    "dim": Entry("hidden_size", int, 4096),
    "num_layers": Entry("num_hidden_layers", int, 32),
    "num_heads": Entry("num_attention_heads", int, 32),
    "num_kv_heads": Entry("num_key_value_heads", int | None, None),
    "ffn_dim": Entry("intermediate_size", int, 11008),
    "max_seq_len": Entry("max_position_embeddings", int, 2048),
    "norm_eps": Entry("rms_norm_eps", float, 1e-6),
    "tie_embeddings": Entry("tie_word_embeddings", bool, False),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for each field of `LlamaConfig`, except those for RoPE."""

SCALING = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}
"""Maps each field of Llama 3.1's RoPE scaling to the name of its entry in `rope_scaling` or `rope_parameters`."""


def export_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the entries of config.json for `config`.

    Transformers 5 reads `rope_parameters`; transformers 4 reads `rope_theta` and `rope_scaling`.  These entries agree,
    so a file with all three works with both versions.
    """
    scaling = {"rope_type": "llama3"} | {entry: getattr(config, field) for field, entry in SCALING.items()}
    is_scaled = config.rope_factor != 1.0
    return {
        **write_fields(config, FIELDS),
        "head_dim": config.dim // config.num_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if is_scaled else None,
        "rope_parameters": (scaling if is_scaled else {"rope_type": "default"}) | {"rope_theta": config.rope_theta},
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `LlamaConfig` for a config.json written by transformers 4 or 5.

    Raises UserError for any RoPE scaling except Llama 3.1's, for other RoPE that `parse_rope` refuses, and if head_dim
    is given but is not hidden_size / num_attention_heads.
    """
    fields = read_fields(config_json, FIELDS)
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    head_dim = config_json.get("head_dim")
    if head_dim is not None and head_dim * fields["num_heads"] != fields["dim"]:
        raise UserError(f"head_dim={head_dim}: must be hidden_size / num_attention_heads in model 'llama'")
    check_padding(config_json, fields["vocab_size"])
    rope = parse_rope(config_json, {"default": (), "llama3": SCALING.values()}, fields["max_seq_len"])
    fields["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] == "llama3":
        fields |= {field: rope[entry] for field, entry in SCALING.items()}
    return fields


HUGGINGFACE = HuggingFace(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    entries=types_of(FIELDS) | ROPE_ENTRIES | {"head_dim": int | None},
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
)
