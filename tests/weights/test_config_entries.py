"""Every entry of config.json deleted, changed, nulled and added: transformers' logits, or the recipe declines.

The oracle is the model that transformers builds for the same config.json, with random weights.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cases import campaign_except
from trainer import UserError, load_weights
from trainer.config.pretrained import find_native_recipe, generic_model_of
from trainer.recipe import find_recipe

transformers = pytest.importorskip("transformers")

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SHAPE = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, **_HEADS}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
_DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    **{"shared_expert_intermediate_size": 24},
}
_LATENT = {
    **{"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10},
    **{"num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "intermediate_size": 40},
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_SHAPE, "intermediate_size": 48, "pad_token_id": 3}),
    "llama 3.1": ("llama", {**_SHAPE, "intermediate_size": 48, "rope_parameters": _LLAMA3}),
    "gpt2": ("gpt2", {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "qwen3": ("qwen3", {**_SHAPE, "intermediate_size": 48, "head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", {**_SHAPE, **_EXPERTS, "head_dim": 12}),
    "qwen3_next": ("qwen3_next", {**_SHAPE, **_EXPERTS, **_DELTA, "head_dim": 16, "num_hidden_layers": 4}),
    "gpt_oss": (
        "gpt_oss",
        {
            **{**_SHAPE, "head_dim": 12, "intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
            **{"sliding_window": 9, "swiglu_limit": 0.5, "rope_parameters": {**_YARN, "truncate": False}},
        },
    ),
    "gpt_oss default": (
        "gpt_oss",
        {**_SHAPE, "head_dim": 12, "intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {**_SHAPE, **_LATENT}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {**_SHAPE, **_LATENT, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
}
"""Small models of every family that has a native recipe, with the variants of their rotary embeddings."""

_FOREIGN: dict[str, list[Any]] = {
    **{"sliding_window": [4], "use_sliding_window": [True], "max_window_layers": [1], "attention_bias": [True]},
    **{"mlp_bias": [True], "qkv_bias": [True], "logit_scale": [0.5], "logits_scaling": [2.0], "final_logit_softcapping": [5.0]},
    **{"attn_logit_softcapping": [5.0], "embedding_multiplier": [3.0], "residual_multiplier": [0.5]},
    **{"attention_multiplier": [0.1], "query_pre_attn_scalar": [64], "use_qk_norm": [True], "qk_layernorm": [True]},
    **{"partial_rotary_factor": [0.5, 1.0], "rotary_pct": [0.5], "rope_interleaved": [True], "no_rope_layers": [[1, 0]]},
    **{"layer_types": [["full_attention"] * 2, ["sliding_attention", "full_attention"], ["full_attention"]]},
    **{"attention_chunk_size": [4], "original_max_position_embeddings": [8, 32], "clip_qkv": [0.1]},
    **{"rope_theta": [500.0], "tie_word_embeddings": [True], "head_dim": [4, 8, 16], "parallel_residual": [True]},
    **{"per_layer_config": [{"0": {"num_key_value_heads": 4}}], "is_encoder_decoder": [True], "return_dict": [False]},
    **{"output_attentions": [True], "output_hidden_states": [True], "use_cache": [False], "pad_token_id": [0, 66]},
    **{"dtype": ["float32"], "torch_dtype": ["float32"], "chunk_size_feed_forward": [2], "pruned_heads": [{"0": [1]}]},
    **{"add_cross_attention": [True], "attention_dropout": [0.0, 0.5], "hidden_dropout": [0.5], "a_new_entry": [1]},
    **{"rope_scaling": [_LLAMA3, _YARN, {"type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}]},
    **{"rope_parameters": [{**_YARN, "mscale": 0.5}, {"rope_type": "default", "rope_theta": 300.0, "factor": 3.0}]},
    **{"num_local_experts": [4, 6], "num_mtp_layers": [1], "num_nextn_predict_layers": [1], "hidden_size": [48]},
    **{"full_attention_interval": [2], "decoder_sparse_step": [2], "mlp_only_layers": [[0]], "scoring_func": ["softmax"]},
    **{"topk_method": ["greedy"], "moe_layer_freq": [2], "num_experts": [4, 6], "experts_per_token": [3]},
    **{"initial_context_length": [16], "router_aux_loss_coef": [0.5], "output_router_logits": [True], "n_ctx": [16]},
    **{"pad_token_id ": [], "eos_token_id": [[1, 2]], "temperature": [0.5], "quantization_config": [{"quant_method": "x"}]},
    **{"_attn_implementation": ["eager"], "attn_implementation": ["eager"], "hidden_act": ["gelu"], "swiglu_alpha": [1.0]},
}
"""Entries that other families have, or that change every model, with legal values for them."""

_YARN_VALUES: dict[str, list[Any]] = {
    **{"truncate": [False, True, None], "mscale": [0.5, 0.0, None], "mscale_all_dim": [0.5, 0.0, None]},
    **{"attention_factor": [1.7, None], "beta_fast": [8.0, 0, None], "beta_slow": [2.0, 0, None], "factor": [1.0, 3]},
    **{"original_max_position_embeddings": [8, 32], "partial_rotary_factor": [0.5, 1.0], "low_freq_factor": [2.0]},
    **{"high_freq_factor": [8.0], "rope_theta": [700.0], "short_factor": [[1.0]], "type": ["linear"], "new": [1]},
    **{"full_attention": [{"rope_type": "default", "rope_theta": 700.0}]},
}
"""Entries of `rope_parameters`, of any type of embedding."""

_WRONG_TYPES: dict[str, Any] = {
    **{"pad_token_id": "<pad>", "eos_token_id": "</s>", "bos_token_id": [1], "use_cache": 1, "dtype": "nonsense"},
    **{"id2label": [1], "num_labels": "two", "rms_norm_eps": 1, "tie_word_embeddings": 0, "initializer_range": 2},
    **{"transformers_version": 5, "hidden_act": None, "vocab_size": 67.0, "max_position_embeddings": None},
}


def _others(value: Any) -> list[Any]:
    """Return other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(0, value // 2)]
    if isinstance(value, float):
        return [value * 1.5, value / 8]
    if isinstance(value, list):
        return [value[::-1], value[:-1], []]
    return []


def mutations(content: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each mutation of a config.json, and its result."""
    rope = content.get("rope_parameters")
    for key, value in content.items():
        if key == "model_type":
            continue
        yield f"{key} deleted", {other: content[other] for other in content if other != key}
        yield f"{key} null", content | {key: None}
        for other in _others(value):
            yield f"{key}={other}", content | {key: other}
    defaults = transformers.CONFIG_MAPPING[kind]().to_dict()
    known = {key: _others(value) for key, value in defaults.items() if key not in content}
    for key, values in [*known.items(), *_FOREIGN.items()]:
        for value in values:
            if content.get(key, content) != value:
                yield f"{key}={value} added", content | {key: value}
    for key, value in _WRONG_TYPES.items():
        yield f"{key}={value!r} of a wrong type", content | {key: value}
    if rope:
        for key, value in rope.items():
            yield f"rope: {key} deleted", content | {"rope_parameters": {k: rope[k] for k in rope if k != key}}
            yield f"rope: {key} null", content | {"rope_parameters": rope | {key: None}}
            for other in _others(value):
                yield f"rope: {key}={other}", content | {"rope_parameters": rope | {key: other}}
        for key, values in _YARN_VALUES.items():
            for value in values:
                yield f"rope: {key}={value}", content | {"rope_parameters": rope | {key: value}}
        as_in_4 = {key: value for key, value in content.items() if key != "rope_parameters"}
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        yield "rope as transformers 4 writes it", as_in_4 | {"rope_scaling": scaling, "rope_theta": 900.0}
        yield "rope_scaling beside rope_parameters", content | {"rope_scaling": scaling, "rope_theta": 900.0}
        yield "rope_scaling without a length", as_in_4 | {
            "rope_scaling": {key: value for key, value in scaling.items() if not key.startswith("original")}
        }


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The config.json that transformers writes for each base."""
    found = {}
    for name, (kind, entries) in BASES.items():
        folder = tmp_path_factory.mktemp("config")
        transformers.CONFIG_MAPPING[kind](architectures=[find_recipe(kind).hf.architecture], **entries).save_pretrained(folder)
        found[name] = json.loads((folder / "config.json").read_text())
    return found


MAX_PARAMETERS = 20_000_000
"""Models above this are compared by the shapes of their tensors only: a default width makes them."""


def their_model(folder: Path) -> Any:
    """Return the model that transformers builds for the folder's config.json, with random weights; None if it cannot."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._experts_implementation = "eager"  # the default one needs widths that are multiples of 4
        with torch.device("meta"):
            size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            return size
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception:
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.state_dict(keep_vars=True).items():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if config.model_type == "qwen3_next":  # large weights make the delta rule's norm divide by nearly zero
                weight.add_(noise / 20)
            elif weight.ndim >= 2:
                weight.copy_(noise / weight.shape[-1] ** 0.5 * (4 if "embed" in name or "wte" in name else 1.5))
            else:
                weight.add_(noise / 10)
    return model


@torch.no_grad()
def outcome(content: dict[str, Any], folder: Path, recipe: str = "auto") -> str:
    """Return "equal", "declined", or what is wrong, for a folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").unlink(missing_ok=True)
    try:
        native = find_native_recipe(folder) if recipe == "auto" else generic_model_of(folder)
    except UserError:
        return "declined"
    if native is None:
        return "declined"
    theirs = their_model(folder)
    if theirs is None:
        return "accepted, but transformers refuses it"
    if isinstance(theirs, int):
        return "large"
    theirs.save_pretrained(folder / "saved")
    save = folder / "saved" / "model.safetensors"
    save.replace(folder / "model.safetensors")
    try:
        ours = load_weights(folder)
    except UserError:
        return "declined"
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    try:
        expected = theirs(tokens, return_dict=True).logits
    except Exception:
        return "accepted, but transformers cannot compute it"
    found = ours(tokens)
    error = float((found - expected).abs().max() / expected.abs().max())
    return "equal" if error < 1e-5 else f"differs by {error:.2g}"


def everyday(name: str, mutation: str) -> bool:
    return zlib.crc32(f"{name}: {mutation}".encode()) % 8 == 0


@pytest.mark.parametrize("name", BASES)
def test_each_entry_is_computed_as_by_transformers_or_declined(
    name: str, contents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    wrong = {}
    for mutation, content in [("unchanged", contents[name]), *mutations(contents[name], BASES[name][0])]:
        found = outcome(content, tmp_path / "folder")
        if found not in ("equal", "declined", "large"):
            wrong[mutation] = found
    assert wrong == {}
