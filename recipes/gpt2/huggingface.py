"""The mapping of weights and config.json between this recipe's GPT-2 and Hugging Face's.

Hugging Face files store the matrices of the blocks as (in, out); here they are (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.recipe import HuggingFace, Transposed

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
    "vocab_size": ("vocab_size", 50257),
    "dim": ("n_embd", 768),
    "num_layers": ("n_layer", 12),
    "num_heads": ("n_head", 12),
    "max_seq_len": ("n_positions", 1024),
    "dropout": ("resid_pdrop", 0.1),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "init_std": ("initializer_range", 0.02),
}
"""Maps fields of `GPT2Config` to the names of their entries in config.json and the defaults for missing entries."""


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
    entries = {entry: getattr(config, field) for field, (entry, _) in FIELDS.items()}
    return entries | {"embd_pdrop": embedding_rate, "attn_pdrop": attention_rate}


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `GPT2Config` for a config.json.

    Raises UserError if the feed-forward layer is not four times as wide as the model, if two names for one entry have
    different values, or if `embd_pdrop` or `attn_pdrop` is null.
    """
    fields = {field: _entry(config_json, entry, default) for field, (entry, default) in FIELDS.items()}
    if config_json.get("n_inner") not in (None, 4 * fields["dim"]):
        raise UserError(f"n_inner={config_json['n_inner']}: must be 4 x n_embd, or null, in this recipe")
    for field, entry in (("embedding_dropout", "embd_pdrop"), ("attention_dropout", "attn_pdrop")):
        rate = config_json.get(entry, 0.1)
        if rate is None:
            raise UserError(f"{entry}=null: must be a number")
        fields[field] = rate if rate != fields["dropout"] else None
    return fields


def _entry(config_json: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return an entry, which may have either of two names.  Raises UserError if both are given and differ."""
    values = [config_json[key] for key in (name, ALIASES.get(name, name)) if key in config_json]
    if any(other != values[0] for other in values[1:]):
        raise UserError(f"{ALIASES[name]}={values[1]}: is another name for {name}, which is {values[0]}")
    return values[0] if values else default


HUGGINGFACE = HuggingFace(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
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
