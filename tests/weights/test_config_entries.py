"""Every entry of config.json deleted, changed, nulled and added: transformers' logits, or the recipe declines.

The oracle is the model that transformers builds for the same config.json, with random weights.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cases import in_campaign
from trainer import UserError, load_config
from trainer.config.model_folder import find_native, generic_model_of
from trainer.config.weights import locate
from trainer.model.network import build_network
from trainer.registry import find_model
from trainer.weights.exporting import export
from trainer.weights.loading import build_meta_model, load_unsharded, open_weights
from trainer.weights.model_files import ModelFiles, read_model_files

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
    **{
        "mlp_bias": [True],
        "qkv_bias": [True],
        "logit_scale": [0.5],
        "logits_scaling": [2.0],
        "final_logit_softcapping": [5.0],
    },
    **{"attn_logit_softcapping": [5.0], "embedding_multiplier": [3.0], "residual_multiplier": [0.5]},
    **{"attention_multiplier": [0.1], "query_pre_attn_scalar": [64], "use_qk_norm": [True], "qk_layernorm": [True]},
    **{
        "partial_rotary_factor": [0.5, 1.0, None],
        "rotary_pct": [0.5],
        "rope_interleaved": [True],
        "no_rope_layers": [[1, 0]],
    },
    **{"layer_types": [["full_attention"] * 2, ["sliding_attention", "full_attention"], ["full_attention"]]},
    **{"attention_chunk_size": [4], "original_max_position_embeddings": [8, 32], "clip_qkv": [0.1]},
    **{"rope_theta": [500.0], "tie_word_embeddings": [True], "head_dim": [4, 8, 16], "parallel_residual": [True]},
    **{"per_layer_config": [{"0": {"num_key_value_heads": 4}}], "is_encoder_decoder": [True], "return_dict": [False]},
    **{
        "output_attentions": [True],
        "output_hidden_states": [True],
        "use_cache": [False],
        "pad_token_id": [0, 66, 67, -1, -68],
    },
    **{"dtype": ["float32"], "torch_dtype": ["float32"], "chunk_size_feed_forward": [2], "pruned_heads": [{"0": [1]}]},
    **{"add_cross_attention": [True], "attention_dropout": [0.0, 0.5], "hidden_dropout": [0.5], "a_new_entry": [1]},
    **{"rope_scaling": [_LLAMA3, _YARN, {"type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}]},
    **{"rope_parameters": [{**_YARN, "mscale": 0.5}, {"rope_type": "default", "rope_theta": 300.0, "factor": 3.0}]},
    **{"num_local_experts": [4, 6], "num_mtp_layers": [1], "num_nextn_predict_layers": [1], "hidden_size": [48]},
    **{
        "full_attention_interval": [2],
        "decoder_sparse_step": [2],
        "mlp_only_layers": [[0]],
        "scoring_func": ["softmax"],
    },
    **{"topk_method": ["greedy"], "moe_layer_freq": [2], "num_experts": [4, 6], "experts_per_token": [3]},
    **{"initial_context_length": [16], "router_aux_loss_coef": [0.5], "output_router_logits": [True], "n_ctx": [16]},
    **{
        "eos_token_id": [[1, 2]],
        "temperature": [0.5],
        "quantization_config": [{"quant_method": "x"}, {}],
    },
    **{
        "_attn_implementation": ["eager", "nonsense"],
        "attn_implementation": ["eager", "nonsense"],
        "experts_implementation": ["eager", "nonsense"],
        "hidden_act": ["gelu"],
        "swiglu_alpha": [1.0],
    },
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
    **{
        "id2label": {"one": "x"},
        "num_labels": "two",
        "rms_norm_eps": 1,
        "tie_word_embeddings": 0,
        "initializer_range": 2,
    },
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
        yield "rope: nothing", content | {"rope_parameters": {}}
        as_in_4 = {key: value for key, value in content.items() if key != "rope_parameters"}
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        yield "rope as transformers 4 writes it", as_in_4 | {"rope_scaling": scaling, "rope_theta": 900.0}
        yield "rope_scaling beside rope_parameters", content | {"rope_scaling": scaling, "rope_theta": 900.0}
        shorter = {key: value for key, value in scaling.items() if not key.startswith("original")}
        yield "rope_scaling without a length", as_in_4 | {"rope_scaling": shorter}
        whole = {key: value for key, value in scaling.items() if key != "partial_rotary_factor"}
        for fraction in (0.5, 1.0, None):
            outside = {"rope_scaling": whole, "partial_rotary_factor": fraction}
            yield f"rope_scaling beside partial_rotary_factor={fraction}", as_in_4 | outside
        untyped = {key: value for key, value in content.items() if key != "layer_types"}
        yield "layer_types by interval", untyped | {"full_attention_interval": 2}


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The config.json that transformers writes for each base."""
    found = {}
    for name, (kind, entries) in BASES.items():
        folder = tmp_path_factory.mktemp("config")
        transformers.CONFIG_MAPPING[kind](architectures=[find_model(kind).hf.architecture], **entries).save_pretrained(
            folder
        )
        found[name] = json.loads((folder / "config.json").read_text())
    return found


MAX_PARAMETERS = 400_000
"""Models above this are compared by the shapes of their tensors only: a default width makes them."""


def their_model(folder: Path) -> Any:
    """Return transformers' model for the folder's config.json, with random weights; None if it cannot build one.

    Above `MAX_PARAMETERS` it is on the meta device.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._experts_implementation = "eager"  # the default one needs widths that are multiples of 4
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
            return model
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
def outcome(content: dict[str, Any], folder: Path, uses_library: bool = False) -> str:
    """Return "equal", "declined", or what is wrong, for a folder with this config.json.

    uses_library: whether the generic recipe `hf` builds the model, rather than a native one.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").unlink(missing_ok=True)
    try:
        found = generic_model_of(folder) if uses_library else find_native(folder)
        if found is None:
            return "declined"
        recipe, config = found
        model = build_meta_model(recipe, config)
    except UserError:
        return "declined"
    theirs = their_model(folder)
    if theirs is None:
        return "accepted, but transformers refuses it"
    if next(theirs.parameters()).is_meta:
        sizes = [sum(p.numel() for p in each.parameters()) for each in (model, theirs)]
        return "equal" if sizes[0] == sizes[1] else f"{sizes[0]} parameters, not {sizes[1]}"
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    try:
        expected = theirs(tokens).logits
    except Exception:
        return "declined" if uses_library else "accepted, but transformers cannot compute it"
    theirs.config.output_attentions = False  # else it cannot be saved
    theirs.save_pretrained(folder / "saved")
    (folder / "saved" / "model.safetensors").replace(folder / "model.safetensors")
    if uses_library:
        config = replace(config, fresh=False)
    source = open_weights(locate(str(folder)), recipe, config, "path")
    ours = load_unsharded(model, recipe, source, torch.device("cpu"))(tokens)
    error = float((ours - expected).abs().max() / expected.abs().max())
    if error >= 1e-5:
        return f"differs by {error:.2g}"
    files = ModelFiles()
    files.files = read_model_files(folder)
    export(source, recipe, config, folder / "out", model_files=files, overwrite=True)
    try:
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
        again.set_experts_implementation("eager")
        found = again(tokens).logits
    except Exception as problem:
        return f"the export cannot be loaded: {problem}"
    return "equal" if torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max())) else "the export differs"


def wrong_mutations(
    name: str, contents: dict[str, dict[str, Any]], folder: Path, share: int, uses_library: bool = False
) -> dict[str, str]:
    """Return what is wrong with one in `share` of the mutations of a base, by name, and with the base itself."""
    all_mutations = dict(mutations(contents[name], BASES[name][0]))
    chosen = {key: all_mutations[key] for key in all_mutations if zlib.crc32(f"{name} {key}".encode()) % share == 0}
    chosen |= {key: all_mutations[key] for key in _FOUND if key in all_mutations}
    found = {key: outcome(content, folder, uses_library) for key, content in chosen.items()}
    found["unchanged"] = outcome(contents[name], folder, uses_library).replace("declined", "declined unchanged")
    return {key: said for key, said in found.items() if said not in ("equal", "declined")}


_FOUND = (
    *("rope: truncate=False", "rope: truncate=None", "rope: factor deleted", "rope: factor null"),
    *("rope: original_max_position_embeddings deleted", "rope_scaling without a length", "rope: mscale=0.5"),
    *("rope_parameters null", "original_max_position_embeddings=8 added", "v_head_dim=20", "head_dim=12"),
    *("num_hidden_layers=3", "pad_token_id='<pad>' of a wrong type"),
)
"""Mutations that were once computed otherwise, or accepted though transformers refuses them: tried on every change."""


@pytest.mark.parametrize(
    ("name", "share"), [*((name, 12) for name in BASES), *in_campaign(*((name, 1) for name in BASES))]
)
def test_entries_are_computed_as_by_transformers_or_declined(
    name: str, share: int, contents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert wrong_mutations(name, contents, tmp_path / "folder", share) == {}


@pytest.mark.parametrize(
    ("name", "share"), [("llama", 20), ("gpt_oss", 20), *in_campaign(*((name, 1) for name in BASES))]
)
def test_entries_reach_the_generic_recipe(
    name: str, share: int, contents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert wrong_mutations(name, contents, tmp_path / "folder", share, uses_library=True) == {}


# ---------------------------------------------------------------------------------------------------------------
# What is declined is named, and what is published is not declined


def test_an_entry_that_a_recipe_does_not_know_is_named(contents: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """With `auto`, transformers builds the model instead."""
    (tmp_path / "config.json").write_text(json.dumps(contents["llama"] | {"sliding_window": 4}))
    with pytest.raises(UserError) as refused:
        load_config("llama_small", [f"train.init_from={tmp_path}"])
    assert str(refused.value).startswith(f"train.init_from={tmp_path}: config.json: sliding_window=4")
    config = load_config("llama_small", ["model.name=auto", f"model.path={tmp_path}"])
    assert config.model.name == "hf"
    assert any("sliding_window=4" in note for note in config.spec.notes_on(config.model, build_network(config)))


@pytest.mark.parametrize("model", ["auto", "hf"])
def test_a_folder_that_transformers_refuses_is_refused_with_its_reason(
    model: str, contents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """The reason stands in the second line of what the library says."""
    (tmp_path / "config.json").write_text(json.dumps(contents["llama"] | {"pad_token_id": "<pad>"}))
    config = load_config("llama_small", [f"model.name={model}", f"model.path={tmp_path}"])
    with pytest.raises(UserError) as refused:
        build_network(config)
    said = str(refused.value)
    assert said.startswith(f"model.path={tmp_path}: config.json: ")
    assert "pad_token_id" in said
    assert "expected int, got str" in said


_OLD = {"torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True, "initializer_range": 0.02}
_META = {**_OLD, "bos_token_id": 1, "eos_token_id": [2, 3], "tie_word_embeddings": False}
_DENSE = {**_META, "hidden_act": "silu", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 300}
_DENSE |= {"num_attention_heads": 4, "max_position_embeddings": 1024, "attention_dropout": 0.0, "rms_norm_eps": 1e-06}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        **_DENSE,
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "intermediate_size": 96, "mlp_bias": False},
        **{"num_key_value_heads": 2, "pretraining_tp": 1, "rope_theta": 500000.0, "head_dim": 16},
        "rope_scaling": {
            **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 256,
        },
        **{"_name_or_path": "x/y", "pad_token_id": 4, "unsloth_fixed": True, "rope_interleaved": False},
        **{"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}},
        **dict.fromkeys(("sep_token_id", "prefix", "finetuning_task", "bad_words_ids", "suppress_tokens", "id2label")),
        **dict.fromkeys(("decoder_start_token_id", "forced_bos_token_id", "tokenizer_class", "problem_type")),
        **{"pruned_heads": {}, "torchscript": False, "return_dict": True, "min_length": 0, "num_beams": 1},
    },
    "gpt2": {
        **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
        **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02},
        **{"layer_norm_epsilon": 1e-05, "n_ctx": 64, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64},
        **{"n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1, "summary_activation": None},
        **{"summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index"},
        **{"summary_use_proj": True, "vocab_size": 50257, "gradient_checkpointing": False},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "qwen3": {
        **_DENSE,
        **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 16, "intermediate_size": 96},
        **{"max_window_layers": 4, "num_key_value_heads": 2, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": None, "use_sliding_window": False},
    },
    "qwen3_moe": {
        **_DENSE,
        **{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1},
        **{"head_dim": 16, "intermediate_size": 96, "max_window_layers": 4, "mlp_only_layers": []},
        **{"moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2},
        **{"num_key_value_heads": 2, "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0},
        **{"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
    },
    "qwen3_next": {
        **_DENSE,
        **{"architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1},
        **{"full_attention_interval": 4, "head_dim": 16, "intermediate_size": 96, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_value_head_dim": 8, "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True},
        **{"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2, "output_router_logits": False},
        **{"partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000},
        **{"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 32, "use_sliding_window": False},
    },
    "gpt_oss": {
        **_DENSE,
        **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 2, "head_dim": 16},
        **{"initial_context_length": 256, "intermediate_size": 32, "num_experts_per_tok": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"num_key_value_heads": 2, "num_local_experts": 8, "output_router_logits": False, "pad_token_id": 299},
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 256},
            **{"rope_type": "yarn", "truncate": False},
        },
        **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
    },
    "deepseek_v3": {
        **_DENSE,
        **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        **{"first_k_dense_replace": 1, "intermediate_size": 96, "kv_lora_rank": 16, "moe_intermediate_size": 32},
        **{"moe_layer_freq": 1, "n_group": 2, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True},
        **{"num_experts_per_tok": 2, "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "q_lora_rank": 24},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "aux_loss_alpha": 0.001, "seq_aux": True},
        "quantization_config": {
            **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
        },
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
            "original_max_position_embeddings": 256,
        },
        **{"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1},
        **{"topk_method": "noaux_tc", "v_head_dim": 16, "pretraining_tp": 1},
    },
}
"""The entries of published models' config.json, with small sizes."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_models_are_native(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | PUBLISHED[kind]))
    found = find_native(tmp_path)
    assert found is not None
    assert found[0].name == kind
