"""The mapping of weights and config.json between this recipe's Llama and Hugging Face's.

Both apply RoPE to pairs of dimensions half a head apart, so no weights need to be permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace

from .._huggingface import parse_rope

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
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Maps each field of `LlamaConfig`, except those for RoPE, to the name of its entry in config.json."""

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
        **{entry: getattr(config, field) for field, entry in FIELDS.items()},
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
    # The config.json of the first Llama models lacks these entries; their defaults are those of transformers.
    defaults = {
        "num_key_value_heads": config_json["num_attention_heads"],
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    entries = defaults | {key: value for key, value in config_json.items() if value is not None or key in _NEVER_NULL}
    fields = {field: entries[entry] for field, entry in FIELDS.items()}
    if "head_dim" in entries and entries["head_dim"] * fields["num_heads"] != fields["dim"]:
        raise UserError(f"head_dim={entries['head_dim']}: must be hidden_size / num_attention_heads in this recipe")
    return fields | _rope_fields(entries, fields["max_seq_len"])


def _rope_fields(entries: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    rope = parse_rope(entries, ("default", "llama3"))
    fields = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "llama3":
        original = "original_max_position_embeddings"
        scaling = {original: max_seq_len, **rope, **({original: entries[original]} if original in entries else {})}
        fields |= {field: scaling[entry] for field, entry in SCALING.items()}
    return fields


_NEVER_NULL = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "rope_theta")
"""Entries of config.json that have a default if missing, but may not be null."""


HUGGINGFACE = HuggingFace(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    prefix="model.",
    ignored=["model.layers.*.self_attn.rotary_emb.inv_freq"],
)
