"""The mapping of weights and config.json between our GPT-2 and Hugging Face's.

Hugging Face files store the matrices of the blocks as (in, out); here they are (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.model_spec import HuggingFace, Transposed

from .._huggingface import NUMBER, Entry, types_of, write_fields

if TYPE_CHECKING:
    from .config import GPT2Config

NAMES = {
    "wte.weight": "transformer.wte.weight",
    "wpe.weight": "transformer.wpe.weight",
    "blocks.*.ln_1.weight": "transformer.h.*.ln_1.weight",
    "blocks.*.ln_1.bias": "transformer.h.*.ln_1.bias",
    "blocks.*.attention.qkv.weight": Transposed("transformer.h.*.attn.c_attn.weight"),
    "blocks.*.attention.qkv.bias": "transformer.h.*.attn.c_attn.bias",
    "blocks.*.attention.out.weight": Transposed("transformer.h.*.attn.c_proj.weight"),
    "blocks.*.attention.out.bias": "transformer.h.*.attn.c_proj.bias",
    "blocks.*.ln_2.weight": "transformer.h.*.ln_2.weight",
    "blocks.*.ln_2.bias": "transformer.h.*.ln_2.bias",
    "blocks.*.up.weight": Transposed("transformer.h.*.mlp.c_fc.weight"),
    "blocks.*.up.bias": "transformer.h.*.mlp.c_fc.bias",
    "blocks.*.down.weight": Transposed("transformer.h.*.mlp.c_proj.weight"),
    "blocks.*.down.bias": "transformer.h.*.mlp.c_proj.bias",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": "lm_head.weight",
}

FIELDS = {
    "vocab_size": Entry("vocab_size", int, 50257),
    "dim": Entry("n_embd", int, 768),
    "num_layers": Entry("n_layer", int, 12),
    "num_heads": Entry("n_head", int, 12),
    "max_seq_len": Entry("n_positions", int, 1024),
    "dropout": Entry("resid_pdrop", NUMBER, 0.1),
    "norm_eps": Entry("layer_norm_epsilon", float, 1e-5),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for fields of `GPT2Config`."""


ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Maps names of entries in config.json to the alternative names that transformers accepts."""


def export_config(config: GPT2Config) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    embedding_rate, attention_rate, _ = config.dropouts
    return write_fields(config, FIELDS) | {"embd_pdrop": embedding_rate, "attn_pdrop": attention_rate}


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `GPT2Config` for a config.json.

    Raises UserError if the feed-forward layer is not four times as wide as the model, or if two names for one entry
    have different values.
    """
    fields = {field: _value_of(config_json, entry) for field, entry in FIELDS.items()}
    if config_json.get("n_inner") not in (None, 4 * fields["dim"]):
        raise UserError(f"n_inner={config_json['n_inner']}: must be 4 x n_embd, or null, in model 'gpt2'")
    for field, name in (("embedding_dropout", "embd_pdrop"), ("attention_dropout", "attn_pdrop")):
        rate = config_json.get(name, 0.1)
        fields[field] = rate if rate != fields["dropout"] else None
    return fields


def _value_of(config_json: Mapping[str, Any], entry: Entry) -> Any:
    """Return an entry's value, under either of two names.  Raises UserError if both are given and differ."""
    alias = ALIASES.get(entry.name, entry.name)
    values = [config_json[name] for name in (entry.name, alias) if name in config_json]
    if any(other != values[0] for other in values[1:]):
        raise UserError(f"{alias}={values[1]}: is another name for {entry.name}, which is {values[0]}")
    return values[0] if values else entry.default


UNUSED = {
    **{"n_ctx": int | None, "reorder_and_upcast_attn": bool, "output_past": bool},
    **{"gradient_checkpointing": bool, "n_special": int, "predict_special_tokens": bool},
}
"""Entries of published files that do not change the logits."""


HUGGINGFACE = HuggingFace(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    entries={
        **types_of(FIELDS),
        **dict.fromkeys(ALIASES.values(), int),
        **{"n_inner": int | None, "embd_pdrop": NUMBER, "attn_pdrop": NUMBER},
        **UNUSED,
    },
    fixed={
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    prefix="transformer.",
    ignored=["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"],
)
