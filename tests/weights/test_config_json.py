"""Variants of config.json, in every place that reads one: computed as by transformers, or rejected by key."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.native_models import build, export_model, load_with_transformers
from trainer import Trainer, UserError, load_config, load_weights
from trainer.export import export_checkpoint
from trainer.registry import find_model

ABSENT = object()
"""Removes an entry from config.json."""

BASE: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{"vocab_size": 263, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"rms_norm_eps": 1e-5, "rope_theta": 20000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
        **{"initializer_range": 0.03, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": [2, 3]},
    },
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": 263, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
        **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5},
        **{"activation_function": "gelu_new", "initializer_range": 0.02, "eos_token_id": 50256},
        "task_specific_params": {"text-generation": {"do_sample": True}},
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **{"vocab_size": 263, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"rms_norm_eps": 1e-6, "rope_theta": 20000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
        **{"attention_bias": False, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2},
        **{"initializer_range": 0.03, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": [2, 3]},
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **{"vocab_size": 263, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"rms_norm_eps": 1e-6, "rope_theta": 20000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
        **{"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False},
        **{"router_aux_loss_coef": 0.001, "use_sliding_window": False, "sliding_window": None},
        **{"initializer_range": 0.03, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": [2, 3]},
    },
}

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_16 = {"original_max_position_embeddings": 16}
STRETCHED = {"rope_factor": 8.0, "rope_original_len": 16}


@dataclass(frozen=True)
class Variant:
    """Changes of a config.json, and the resulting fields, or what the error names."""

    kind: str
    changes: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    weights: dict[str, Any] = field(default_factory=dict)
    """Fields of the model whose weights lie in the folder, where they are not those of the base."""
    by_weights: bool = False
    """True if it is the weights that it does not fit."""

    @property
    def content(self) -> dict[str, Any]:
        content = BASE[self.kind] | self.changes
        return {key: value for key, value in content.items() if value is not ABSENT}


def accepted(kind: str) -> Any:
    def variant(
        fields: dict[str, Any] | None = None, /, *, weights: dict[str, Any] | None = None, **changes: Any
    ) -> Variant:
        return Variant(kind, changes, fields or {}, weights=weights or {})

    return variant


def refused(kind: str) -> Any:
    return lambda named, /, **changes: Variant(kind, changes, refused=named)


llama, gpt2, qwen3, moe = map(accepted, BASE)
not_llama, not_gpt2, not_qwen3, not_moe = map(refused, BASE)

THETA5 = {"rope_type": "default", "rope_theta": 50000.0}
TINY_QUANTISED = {"quant_method": "fp8", "weight_block_size": [128, 128]}
VARIANTS = {
    "plain": llama(),
    "theta as 5 spells it": llama({"rope_theta": 5e4}, rope_theta=ABSENT, rope_parameters=THETA5),
    "theta as 4 spells it": llama({"rope_theta": 5e5}, rope_theta=500000.0, rope_scaling=None),
    "theta as a whole number": llama({"rope_theta": 7e4}, rope_theta=70000),
    "two thetas": llama({"rope_theta": 5e4}, rope_theta=70000.0, rope_parameters=THETA5),
    "theta beside empty parameters": llama({"rope_theta": 7e4}, rope_theta=70000.0, rope_parameters={}),
    "no theta": llama({"rope_theta": 1e4}, rope_theta=ABSENT),
    "no theta in parameters": llama({"rope_theta": 2e4}, rope_parameters={"rope_type": "default"}),
    "llama3 as 5 spells it": llama(
        STRETCHED | {"rope_theta": 5e4},
        rope_theta=ABSENT,
        rope_parameters=THETA5 | LLAMA3 | OF_16 | {"rope_type": "llama3"},
    ),
    "llama3 as 4 spells it": llama(STRETCHED, rope_scaling=LLAMA3 | OF_16 | {"rope_type": "llama3"}),
    "llama3 as the first spelt it": llama(STRETCHED, rope_scaling=LLAMA3 | OF_16 | {"type": "llama3"}),
    "llama3 with both types": llama(
        STRETCHED, rope_scaling=LLAMA3 | OF_16 | {"type": "default", "rope_type": "llama3"}
    ),
    "llama3 of no length": llama(
        {"rope_factor": 8.0, "rope_original_len": 512}, rope_scaling=LLAMA3 | {"rope_type": "llama3"}
    ),
    "llama3 of a length elsewhere": llama(
        STRETCHED, rope_scaling=LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 64}, **OF_16
    ),
    "llama3 by a factor of one": llama(
        {"rope_original_len": 16}, rope_scaling=LLAMA3 | OF_16 | {"rope_type": "llama3", "factor": 1.0}
    ),
    "llama3 in whole numbers": llama(
        STRETCHED,
        rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, **OF_16},
    ),
    "llama3 beside other parameters": llama(
        STRETCHED, rope_scaling=LLAMA3 | OF_16 | {"rope_type": "llama3"}, rope_parameters=THETA5
    ),
    "empty scaling": llama(rope_scaling={}),
    "default scaling": llama(rope_scaling={"type": "default"}),
    "whole heads are turned": llama(partial_rotary_factor=1.0),
    "head_dim null": llama(head_dim=None),
    "head_dim": llama(head_dim=12),
    "no key heads": llama({"num_kv_heads": 4}, weights={"num_kv_heads": 4}, num_key_value_heads=ABSENT),
    "key heads null": llama({"num_kv_heads": 4}, weights={"num_kv_heads": 4}, num_key_value_heads=None),
    "one key head": llama({"num_kv_heads": 1}, weights={"num_kv_heads": 1}, num_key_value_heads=1),
    "other heads, same shapes": llama(
        {"num_heads": 8, "num_kv_heads": 4}, num_attention_heads=8, num_key_value_heads=4
    ),
    "tied": llama({"tie_embeddings": True}, weights={"tie_embeddings": True}, tie_word_embeddings=True),
    "tied or not, unsaid": llama(tie_word_embeddings=ABSENT),
    "bfloat16": llama(torch_dtype="bfloat16"),
    "bfloat16 as 5 spells it": llama(torch_dtype=ABSENT, dtype="bfloat16"),
    "no eps": llama({"norm_eps": 1e-6}, rms_norm_eps=ABSENT),
    "large eps": llama({"norm_eps": 0.3}, rms_norm_eps=0.3),
    "no length": llama({"max_seq_len": 2048}, max_position_embeddings=ABSENT),
    "no initializer": llama({"init_std": 0.02}, initializer_range=ABSENT),
    "no activation": llama(hidden_act=ABSENT),
    "pretraining_tp": llama(pretraining_tp=2),
    "no dropout, as a whole number": llama(attention_dropout=0),
    "entries without effect": llama(use_cache=False, temperature=0.5, _name_or_path="é/ü", sliding_window=None),
    "no architecture": llama(architectures=ABSENT),
    "a headless architecture": llama(architectures=["LlamaModel"]),
    "gpt2": gpt2(),
    "gpt2, large eps": gpt2({"norm_eps": 0.2}, layer_norm_epsilon=0.2),
    "gpt2, defaults": gpt2(resid_pdrop=ABSENT, embd_pdrop=ABSENT, attn_pdrop=ABSENT, layer_norm_epsilon=ABSENT),
    "gpt2, other names": gpt2(
        {"num_heads": 6},
        **{"n_embd": ABSENT, "n_layer": ABSENT, "n_head": ABSENT, "n_positions": ABSENT},
        **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 64},
    ),
    "gpt2, three dropouts": gpt2(
        {"dropout": 0.3, "embedding_dropout": 0.0, "attention_dropout": 0.2},
        **{"resid_pdrop": 0.3, "embd_pdrop": 0.0, "attn_pdrop": 0.2},
    ),
    "gpt2, dropout off": gpt2({"dropout": 0.0}, resid_pdrop=0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt2, width of the feed-forward": gpt2(n_inner=192),
    "gpt2, upcast": gpt2(reorder_and_upcast_attn=True),
    "gpt2, n_ctx": gpt2(n_ctx=32),
    "qwen3, plain": qwen3(),
    "qwen3, theta as 5 spells it": qwen3({"rope_theta": 5e4}, rope_theta=ABSENT, rope_parameters=THETA5),
    "qwen3, no theta": qwen3({"rope_theta": 1e4}, rope_theta=ABSENT),
    "qwen3, a window that is off": qwen3(sliding_window=8, max_window_layers=1),
    "qwen3, kinds of layers": qwen3(layer_types=["full_attention"] * 2),
    "qwen3, key heads null": qwen3({"num_kv_heads": 4}, weights={"num_kv_heads": 4}, num_key_value_heads=None),
    "qwen3, other heads, same shapes": qwen3(
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8},
        weights={"num_heads": 8, "num_kv_heads": 4, "head_dim": 8},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "qwen3, tied": qwen3({"tie_embeddings": True}, weights={"tie_embeddings": True}, tie_word_embeddings=True),
    "qwen3, no head_dim": qwen3({"head_dim": 128}, weights={"head_dim": 128}, head_dim=ABSENT),
    "qwen3, no eps, no initializer": qwen3({"init_std": 0.02}, rms_norm_eps=ABSENT, initializer_range=ABSENT),
    "qwen3, large eps": qwen3({"norm_eps": 0.3}, rms_norm_eps=0.3),
    "moe": moe(),
    "moe, not normalised": moe({"normalize_chosen": False}, norm_topk_prob=False),
    "moe, unsaid": moe({"normalize_chosen": False}, norm_topk_prob=ABSENT, decoder_sparse_step=ABSENT),
    "moe, one expert": moe({"num_chosen": 1}, num_experts_per_tok=1),
    "moe, other name": moe(num_experts=ABSENT, num_local_experts=6),
    "moe, no list of layers": moe(mlp_only_layers=None),
    "moe, no head_dim": moe({"head_dim": 12}, weights={"head_dim": 12}, head_dim=ABSENT),
    "qwen3, biased": not_qwen3("attention_bias=True", attention_bias=True),
    "qwen3, a window": not_qwen3("use_sliding_window=True", use_sliding_window=True, sliding_window=8),
    "qwen3, layers with a window": not_qwen3(
        "layer_types", layer_types=["full_attention", "sliding_attention"], sliding_window=8
    ),
    "qwen3, yarn": not_qwen3("rope_type=yarn", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "qwen3, odd heads": not_qwen3("model.head_dim=15", head_dim=15),
    "qwen3, head_dim null": not_qwen3("head_dim=None", head_dim=None),
    "moe, layers without experts": not_moe("mlp_only_layers=", mlp_only_layers=[0]),
    "moe, every second layer": not_moe("decoder_sparse_step=2", decoder_sparse_step=2),
    "moe, two numbers": not_moe("num_local_experts=8", num_local_experts=8),
    "moe, too many chosen": not_moe("model.num_chosen=7", num_experts_per_tok=7),
    "moe, fewer experts": replace(not_moe("moe.experts.w1", num_experts=5), by_weights=True),
    "mistral": not_llama("model_type=mistral", model_type="mistral"),
    "qwen2": not_llama("model_type=qwen2", model_type="qwen2"),
    "phi3": not_llama("model_type=phi3", model_type="phi3"),
    "attention_bias": not_llama("attention_bias=True", attention_bias=True),
    "mlp_bias": not_llama("mlp_bias=True", mlp_bias=True),
    "attention_dropout": not_llama("attention_dropout=0.1", attention_dropout=0.1),
    "gelu": not_llama("hidden_act='gelu'", hidden_act="gelu"),
    "rope linear": not_llama("rope_type=linear", rope_scaling={"type": "linear", "factor": 2.0}),
    "rope dynamic": not_llama("rope_type=dynamic", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "rope yarn": not_llama("rope_type=yarn", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    "rope longrope": not_llama("rope_type=longrope", rope_parameters=THETA5 | {"rope_type": "longrope"}),
    "partial rotary": not_llama("partial_rotary_factor", partial_rotary_factor=0.5),
    "partial rotary in parameters": not_llama(
        "partial_rotary_factor", rope_parameters=THETA5 | {"partial_rotary_factor": 0.5}
    ),
    "rope by layer": not_llama("rope_parameters=", rope_parameters={"full_attention": THETA5}),
    "rope as text": not_llama("rope_scaling=", rope_scaling="llama3"),
    "llama3 without a factor": not_llama("low_freq_factor", rope_scaling={"type": "llama3", "factor": 8.0}),
    "llama3 the wrong way round": not_llama(
        "model.rope_low_freq=4.0", rope_scaling={"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}
    ),
    "theta null": not_llama("model.rope_theta=None", rope_theta=None),
    "theta as text": not_llama("rope_theta='1e4'", rope_theta="1e4"),
    "theta infinite": not_llama("rope_theta=inf", rope_theta=float("inf")),
    "head_dim of another width": not_llama("head_dim=16", head_dim=16),
    "heads that do not divide": not_llama("num_attention_heads=5", num_attention_heads=5, num_key_value_heads=5),
    "key heads that do not divide": not_llama("num_key_value_heads=3", num_key_value_heads=3),
    "half a layer": not_llama("num_hidden_layers=1.5", num_hidden_layers=1.5),
    "a layer that is true": not_llama("num_hidden_layers=True", num_hidden_layers=True),
    "eps null": not_llama("rms_norm_eps=None", rms_norm_eps=None),
    "eps zero": not_llama("model.norm_eps=0.0", rms_norm_eps=0.0),
    "eps as a whole number": not_llama("rms_norm_eps=1", rms_norm_eps=1),
    "a window": not_llama("sliding_window=4", sliding_window=4),
    "an unknown entry": not_llama("embedding_multiplier=3.0", embedding_multiplier=3.0),
    "quantised": not_llama("quantization_config", quantization_config=TINY_QUANTISED),
    "code of its own": not_llama("auto_map", auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
    "a smaller vocabulary": replace(not_llama("263, 48", vocab_size=200), by_weights=True),
    "a larger vocabulary": replace(not_llama("263, 48", vocab_size=300), by_weights=True),
    "fewer layers": replace(not_llama("layers.1", num_hidden_layers=1), by_weights=True),
    "tied with another head": replace(not_llama("head.output.weight", tie_word_embeddings=True), by_weights=True),
    "gpt2, gelu": not_gpt2("activation_function='gelu'", activation_function="gelu"),
    "gpt2, narrow": not_gpt2("n_inner=100", n_inner=100),
    "gpt2, unscaled": not_gpt2("scale_attn_weights=False", scale_attn_weights=False),
    "gpt2, scaled by layer": not_gpt2("scale_attn_by_inverse_layer_idx", scale_attn_by_inverse_layer_idx=True),
    "gpt2, untied": not_gpt2("tie_word_embeddings=False", tie_word_embeddings=False),
    "gpt2, cross attention": not_gpt2("add_cross_attention=True", add_cross_attention=True),
    "gpt2, two widths": not_gpt2("hidden_size=96", hidden_size=96),
    "gpt2, dropout null": not_gpt2("attn_pdrop=None", attn_pdrop=None),
    "gpt2, all dropped": not_gpt2("model.dropout=1.0", resid_pdrop=1.0),
    "gpt2, width as text": not_gpt2("n_embd='48'", n_embd="48"),
}


FILES = {"llama": "llama_small", "gpt2": "gpt2", "qwen3": "qwen3_small", "qwen3_moe": "qwen3_moe_small"}
"""The recipe file of each kind."""


def write_config(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def config_of(folder: Path, kind: str, *overrides: str) -> Any:
    return load_config(FILES[kind], [f"train.init_from={folder}", *overrides])


def write_folder(folder: Path, kind: str, weights: dict[str, Any]) -> Path:
    """Write the base's folder, with weights unlike any that a model starts with."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes([2, *[0] * 7]) + b"{}")  # no tensor: only the shape is asked
    config = replace(config_of(write_config(folder, BASE[kind]), kind).model, **weights)
    recipe = find_model(kind)
    fields = {name: value for name, value in vars(config).items() if name in recipe.config.__dataclass_fields__}
    shutil.rmtree(folder)
    export_model(build(recipe, recipe.config(**fields)), recipe, recipe.config(**fields), folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder of each kind's base, and its configuration of the model."""
    folders = {kind: write_folder(tmp_path_factory.mktemp("base") / kind, kind, {}) for kind in BASE}
    return {kind: (folder, config_of(write_config(folder, BASE[kind]), kind).model) for kind, folder in folders.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_fields_are_those_of_the_table(name: str, bases: dict[str, tuple[Path, Any]]) -> None:
    """Those of the base configuration plus the variant's changes; or the variant is rejected by key."""
    variant = VARIANTS[name]
    folder, base = bases[variant.kind]
    write_config(folder, variant.content)
    if not variant.refused:
        assert config_of(folder, variant.kind).model == replace(base, **variant.fields)
        return
    with pytest.raises(UserError) as caught:
        load_weights(folder) if variant.by_weights else config_of(folder, variant.kind)
    assert variant.refused in str(caught.value)
    assert str(folder) in str(caught.value)


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 263, (2, 40), generator=torch.Generator().manual_seed(1))
    found = model.eval()(tokens)
    return getattr(found, "logits", found)


UNCHANGED = [
    *("data.source=synthetic", "data.seq_len=16", "train.steps=1", "train.global_batch_size=2", "optim.lr=0"),
    *("train.micro_batch_size=2", "eval.every=0", "log.sample_tokens=0", "run.threads=1"),
]
"""A step that changes no weight."""


def exported(folder: Path, kind: str, base: Path, *overrides: str) -> dict[str, Any]:
    """Export a run that starts from a folder to `out`, and return the config.json."""
    trainer = Trainer(config_of(folder, kind, *UNCHANGED, f"run.dir={base / 'run'}", *overrides))
    assert trainer.fit() == 0
    trainer.close()
    export_checkpoint(base / "run", base / "out")
    return json.loads((base / "out" / "config.json").read_text())


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.refused])
def test_variant_is_computed_like_transformers(name: str, tmp_path: Path) -> None:
    """By `load_weights`, by `train.init_from`, and by transformers from the export of the run."""
    variant = VARIANTS[name]
    folder = write_config(write_folder(tmp_path / "folder", variant.kind, variant.weights), variant.content)
    expected = logits_of(load_with_transformers(folder))
    assert expected.std() > 0.1, "logits that say something"
    ours = logits_of(load_weights(folder))
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    content = exported(folder, variant.kind, tmp_path)
    assert torch.equal(logits_of(load_weights(tmp_path / "out")), ours)
    assert torch.equal(logits_of(load_with_transformers(tmp_path / "out")), expected)
    dtype = {key: "float32" for key in ("dtype", "torch_dtype") if key in content}
    named = {"architectures": [find_model(variant.kind).hf.architecture], "exported_by": "meshtrainer"}
    kept = {key: value for key, value in (variant.content | dtype | named).items() if value is not None}
    assert {key: content.get(key) for key in kept} == kept, "what the folder says stays, whatever is added"


def test_a_changed_model_is_exported_without_contradictions(tmp_path: Path) -> None:
    """A length beside `rope_scaling` goes before the one within it, so it may not survive a change of the model's."""
    folder = write_folder(tmp_path / "folder", "llama", {})
    write_config(folder, BASE["llama"] | {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}} | OF_16)
    changes = ["model.rope_original_len=32", "checkpoint.allow_changes=[model.rope_original_len]"]
    exported(folder, "llama", tmp_path, *changes)
    ours = logits_of(load_weights(tmp_path / "run"))
    assert (logits_of(load_with_transformers(tmp_path / "out")) - ours).abs().max() < 1e-5 * ours.abs().max()
    assert not torch.allclose(logits_of(load_weights(folder)), ours, atol=1e-3)


def test_the_balance_of_experts_belongs_to_training(tmp_path: Path) -> None:
    """A folder does not set it, and an export does not make transformers add it to a loss."""
    folder = write_folder(tmp_path / "folder", "qwen3_moe", {})
    write_config(folder, BASE["qwen3_moe"] | {"router_aux_loss_coef": 0.5})
    assert config_of(folder, "qwen3_moe").model.balance != 0.5
    content = exported(folder, "qwen3_moe", tmp_path, "model.balance=0.02")
    assert (content["output_router_logits"], content["router_aux_loss_coef"]) == (False, 0.02)


def test_a_kind_without_native_recipe_is_built_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    content = BASE["llama"] | {"model_type": "mistral", "pad_token_id": 0}
    config = load_config("llama_small", ["model.name=auto", f"model.path={write_config(tmp_path, content)}"])
    assert (config.model.name, config.model.vocab_size) == ("hf", 263)


@pytest.mark.campaign
def test_dropouts_of_gpt2_are_in_the_same_places_as_in_transformers(tmp_path: Path) -> None:
    """With the same random numbers, drawn in the same order, training gives the same logits."""
    pytest.importorskip("transformers")
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    folder = write_config(write_folder(tmp_path / "folder", "gpt2", {}), BASE["gpt2"] | rates)
    tokens = torch.randint(0, 263, (2, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (load_weights(folder), load_with_transformers(folder)):
        torch.manual_seed(5)
        with torch.no_grad():
            logits = model.train()(tokens)
        found.append(getattr(logits, "logits", logits))
    assert torch.allclose(*found, atol=1e-5)
    assert not torch.allclose(found[0], logits_of(load_weights(folder)), atol=1e-2), "something was dropped"
