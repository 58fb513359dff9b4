"""The mapping of weights and config.json between our gpt-oss and Hugging Face's.

Published checkpoints store the experts' matrices in MXFP4; these are dequantized as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.model_spec import HuggingFace, Transposed

from .._huggingface import (
    ROPE_ENTRIES,
    YARN_ENTRIES,
    Entry,
    check_layer_types,
    check_padding,
    check_quantization,
    export_yarn,
    parse_rope,
    parse_yarn,
    read_fields,
    types_of,
    write_fields,
)
from ..qwen3.huggingface import SHARED_NAMES
from ..qwen3_moe.huggingface import AUX_LOSS_COEF, BALANCE_ENTRIES, read_balance

if TYPE_CHECKING:
    from .config import GptOssConfig

NAMES = {
    **{ours: theirs for ours, theirs in SHARED_NAMES.items() if not ours.endswith(("q_norm.weight", "k_norm.weight"))},
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.wo.bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.moe.router.weight": "model.layers.*.mlp.router.weight",
    "layers.*.moe.router.bias": "model.layers.*.mlp.router.bias",
    "layers.*.moe.experts.gate_up": Transposed("model.layers.*.mlp.experts.gate_up_proj"),
    "layers.*.moe.experts.gate_up_bias": "model.layers.*.mlp.experts.gate_up_proj_bias",
    "layers.*.moe.experts.down": Transposed("model.layers.*.mlp.experts.down_proj"),
    "layers.*.moe.experts.down_bias": "model.layers.*.mlp.experts.down_proj_bias",
}

FIELDS = {
    "vocab_size": Entry("vocab_size", int, 201088),
    "dim": Entry("hidden_size", int, 2880),
    "num_layers": Entry("num_hidden_layers", int, 36),
    "num_heads": Entry("num_attention_heads", int, 64),
    "num_kv_heads": Entry("num_key_value_heads", int, 8),
    "head_dim": Entry("head_dim", int, 64),
    "window": Entry("sliding_window", int, 128),
    "expert_dim": Entry("intermediate_size", int, 2880),
    "num_experts": Entry("num_local_experts", int, 128),
    "num_chosen": Entry("num_experts_per_tok", int, 4),
    "swiglu_alpha": Entry("swiglu_alpha", float, 1.702),
    "swiglu_limit": Entry("swiglu_limit", float, 7.0),
    "max_seq_len": Entry("max_position_embeddings", int, 131072),
    "norm_eps": Entry("rms_norm_eps", float, 1e-5),
    "tie_embeddings": Entry("tie_word_embeddings", bool, False),
    "init_std": Entry("initializer_range", float, 0.02),
}
"""The entry of config.json for fields of `GptOssConfig`."""

YARN = {
    "rope_factor": "factor",
    "rope_original_len": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
}
"""Maps each field for YaRN to the name of its entry in `rope_scaling` or `rope_parameters`."""

DEFAULT_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
"""The rotary embedding of a config.json that does not describe one."""


def _layer_types(num_layers: int) -> list[str]:
    """Return the value of `layer_types` in config.json: the kind of attention in each layer."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]


def export_config(config: GptOssConfig) -> dict[str, Any]:
    """Return the entries of config.json for `config`."""
    return {
        **write_fields(config, FIELDS),
        "layer_types": _layer_types(config.num_layers),
        "router_aux_loss_coef": config.balance or AUX_LOSS_COEF,
        **export_yarn(config, YARN),
    }


def parse_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `GptOssConfig` for a config.json written by transformers 4 or 5.

    Raises UserError if `layer_types` is given but does not alternate between a window (layers 0, 2, 4, ...) and full
    attention, for RoPE that `parse_rope` refuses, such as scaling other than YaRN, if two names for one entry have
    different values, and for weights quantized in a format other than MXFP4.
    """
    check_quantization(config_json, "mxfp4")
    fields = read_fields(config_json, FIELDS) | {"balance": read_balance(config_json)}
    for alias, name, field in (
        ("num_experts", "num_local_experts", "num_experts"),
        ("experts_per_token", "num_experts_per_tok", "num_chosen"),
    ):
        if config_json.get(alias, fields[field]) != fields[field]:
            raise UserError(f"{alias}={config_json[alias]}: is another name for {name}, which is {fields[field]}")
    check_layer_types(config_json, _layer_types(fields["num_layers"]))
    check_padding(config_json, fields["vocab_size"])
    supported = {"default": (), "yarn": YARN_ENTRIES}
    rope = parse_rope(config_json, supported, fields["max_seq_len"], theta=150000.0, missing=DEFAULT_ROPE)
    return fields | parse_yarn(rope, YARN)


HUGGINGFACE = HuggingFace(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names=NAMES,
    config=export_config,
    model_fields=parse_config,
    entries={
        **types_of(FIELDS),
        **ROPE_ENTRIES,
        **BALANCE_ENTRIES,
        **{"layer_types": list[str] | None, "num_experts": int, "experts_per_token": int},
        "initial_context_length": int,  # of published files; says what `original_max_position_embeddings` says
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0},
    prefix="model.",
    dropped=("quantization_config",),
)
