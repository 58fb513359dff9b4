"""Export to and import from Hugging Face folders: the same logits, the same bits, into the shards of any mesh."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.ranks import run_ranks
from trainer import Recipe, UserError
from trainer.config.pretrained import model_config_of
from trainer.model.materialize import materialize
from trainer.model.parameters import local_box
from trainer.recipe import HuggingFace, Transposed, all_recipes, find_recipe
from trainer.weights import sources as weights
from trainer.weights.exporting import export
from trainer.weights.sources import SafetensorsFolder, WeightSource, fill, full_state_dict, named_weights

LLAMA, GPT2, QWEN3, QWEN3_MOE = map(find_recipe, ("llama", "gpt2", "qwen3", "qwen3_moe"))
QWEN3_NEXT, GPT_OSS, DEEPSEEK_V3 = map(find_recipe, ("qwen3_next", "gpt_oss", "deepseek_v3"))
TINY = LLAMA.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64)
STRETCHED = {"rope_factor": 8.0, "rope_original_len": 16, "max_seq_len": 512, "rope_theta": 10000.0}
MODELS = {
    "llama": (LLAMA, TINY),
    "llama tied": (LLAMA, replace(TINY, tie_embeddings=True, num_kv_heads=1, norm_eps=1e-6)),
    "llama 3.1": (LLAMA, replace(TINY, **STRETCHED)),
    "gpt2": (GPT2, GPT2.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_seq_len=64)),
    "qwen3": (
        QWEN3,
        QWEN3.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12, ffn_dim=64),
    ),
    "qwen3_moe": (
        QWEN3_MOE,
        QWEN3_MOE.config(
            **{"vocab_size": 263, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12},
            **{"expert_dim": 16, "num_experts": 12, "num_chosen": 3, "normalize_chosen": False},
        ),
    ),
    "qwen3_next": (
        QWEN3_NEXT,
        QWEN3_NEXT.config(
            **{"vocab_size": 263, "dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
            **{"attention_every": 2, "rotary_dim": 4, "delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8},
            **{"delta_value_dim": 12, "expert_dim": 16, "shared_dim": 24, "num_experts": 12, "num_chosen": 3},
        ),
    ),
    "gpt_oss": (
        GPT_OSS,
        GPT_OSS.config(
            **{"vocab_size": 263, "dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12},
            **{"expert_dim": 16, "num_experts": 12, "num_chosen": 3, "window": 9, "swiglu_limit": 0.5},
            **{"rope_factor": 8.0, "rope_original_len": 16, "max_seq_len": 128},
        ),
    ),
    "deepseek_v3": (
        DEEPSEEK_V3,
        DEEPSEEK_V3.config(
            **{"vocab_size": 263, "dim": 32, "num_layers": 3, "num_heads": 4, "q_rank": 20, "kv_rank": 12},
            **{"nope_dim": 8, "rope_dim": 6, "value_dim": 10, "ffn_dim": 40, "expert_dim": 16, "num_experts": 12},
            **{"num_chosen": 3, "num_shared": 2, "num_groups": 3, "num_chosen_groups": 2},
            **{"rope_factor": 8.0, "rope_original_len": 16, "rope_mscale": 0.7, "max_seq_len": 128},
        ),
    ),
    "deepseek_v3 plain": (
        DEEPSEEK_V3,
        DEEPSEEK_V3.config(
            **{"vocab_size": 263, "dim": 32, "num_layers": 2, "num_heads": 4, "q_rank": None, "kv_rank": 12},
            **{"nope_dim": 8, "rope_dim": 6, "value_dim": 10, "ffn_dim": 40, "expert_dim": 16, "num_experts": 12},
            **{"num_chosen": 3, "num_groups": 1, "num_chosen_groups": 1, "normalize_chosen": False},
            **{"rope_neighbours": False, "rope_factor": 1.0},
        ),
    ),
}


@pytest.fixture(params=list(MODELS))
def case(request: pytest.FixtureRequest) -> tuple[Recipe, Any]:
    return MODELS[request.param]


class Memory:
    """Weights in a dictionary."""

    description = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        return tensor[start:stop] if tensor.ndim else tensor


class Counted:
    """Another source, and how many bytes of each tensor were read."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.num_bytes = source, dict.fromkeys(source.shapes, 0)
        self.description, self.shapes, self.dtypes = source.description, source.shapes, source.dtypes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.source.read(name, start, stop)
        self.num_bytes[name] += tensor.nbytes
        return tensor


def build(recipe: Recipe, config: Any, seed: int = 0) -> nn.Module:
    """Return the unsharded model with weights that differ from any initial value: no ones, no zeros."""
    with torch.device("meta"):
        model = recipe.build_model(config)
    materialize(model, seed, torch.device("cpu"), recipe.init)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.state_dict(keep_vars=True).values():
            if weight.is_floating_point():
                weight.add_(torch.randn(weight.shape, generator=generator) / 10)
    return model.eval()


def export_model(model: nn.Module, recipe: Recipe, config: Any, folder: Path, **options: Any) -> list[Path]:
    return export(Memory(model.state_dict()), recipe, config, folder, **options)


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    left, right = model.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@torch.no_grad()
def difference(ours: nn.Module, theirs: Any, length: int = 48) -> float:
    """Return the largest difference of any logit, of logits of about one."""
    tokens = torch.randint(0, 263, (2, length), generator=torch.Generator().manual_seed(1))
    expected = theirs.eval()(tokens).logits
    assert expected.dtype == torch.float32
    assert 0.3 < expected.std() < 30
    found = float((ours(tokens) - expected).abs().max())
    print(f"largest difference of a logit: {found:.1e}")
    return found


def load_with_transformers(folder: Path, **options: Any) -> Any:
    """Load the folder with transformers and demand that it finds all it needs and nothing else."""
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a pool of threads for a few kilobytes
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


# ---------------------------------------------------------------------------------------------------------------
# Out, and back


@pytest.mark.slow
def test_transformers_computes_the_same_logits(
    case: tuple[Recipe, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, config = case
    model = build(recipe, config)
    with caplog.at_level(logging.WARNING):
        export_model(model, recipe, config, tmp_path, end_id=256)
        theirs = load_with_transformers(tmp_path)
    assert not caplog.records, "transformers has something to say of config.json"
    assert difference(model, theirs) < 1e-5
    assert type(theirs).__name__ == recipe.hf.architecture
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert theirs.config.bos_token_id is None, "and not that of the published model"
    if config.max_seq_len == 512:
        assert theirs.config.rope_parameters["rope_type"] == "llama3"


def test_export_can_be_loaded_bit_for_bit(case: tuple[Recipe, Any], tmp_path: Path) -> None:
    recipe, config = case
    model, other = build(recipe, config), build(recipe, config, seed=1)
    export_model(model, recipe, config, tmp_path)
    found, found_config = model_config_of(tmp_path, all_recipes())
    assert (found, found_config) == (recipe, config)
    fill(other, SafetensorsFolder(tmp_path, found, found_config), "train.init_from")
    assert_same_bits(other, model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_large_model_is_split_into_files_with_an_index(name: str, tmp_path: Path) -> None:
    recipe, config = MODELS[name]
    model, other = build(recipe, config), build(recipe, config, seed=1)
    files = export_model(model, recipe, config, tmp_path, max_shard_bytes=40_000)
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert len(shards) > 2
    assert [file.name for file in shards] == [
        f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {key: file.name for file in shards for key in load_file(file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    for file in shards:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 40_000 or len(tensors) == 1
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    fill(other, SafetensorsFolder(tmp_path, recipe, config), "train.init_from")
    assert_same_bits(other, model)
    assert difference(model, load_with_transformers(tmp_path)) < 1e-5


def test_exported_file_does_not_depend_on_the_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed matrices are written in groups of rows."""
    recipe, config = MODELS["gpt2"]
    model, other = build(recipe, config), build(recipe, config, seed=1)
    export_model(model, recipe, config, tmp_path / "whole")
    monkeypatch.setattr(weights, "BLOCK_BYTES", 1000)
    export_model(model, recipe, config, tmp_path / "pieces")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()
    fill(other, SafetensorsFolder(tmp_path / "pieces", recipe, config), "train.init_from")
    assert_same_bits(other, model)


def test_export_in_a_different_dtype(tmp_path: Path) -> None:
    model, other = build(LLAMA, TINY), build(LLAMA, TINY, seed=1)
    export_model(model, LLAMA, TINY, tmp_path, dtype=torch.bfloat16)
    source = SafetensorsFolder(tmp_path, LLAMA, TINY)
    assert set(source.dtypes.values()) == {torch.bfloat16}
    fill(other, source, "train.init_from")
    for name, parameter in other.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, model.get_parameter(name).bfloat16().float())
    assert load_with_transformers(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_weights_that_float16_cannot_hold_are_not_exported_as_infinity(tmp_path: Path) -> None:
    model = build(LLAMA, TINY)
    export_model(model, LLAMA, TINY, tmp_path / "fits", dtype=torch.float16)
    with torch.no_grad():
        model.get_parameter("layers.1.feed_forward.w2.weight")[3, 5] = -1e5
    with pytest.raises(UserError, match=r"float16: model\.layers\.1\.mlp\.down_proj\.weight has a value of 1e\+05"):
        export_model(model, LLAMA, TINY, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("beside", [False, True])
def test_export_includes_the_tokenizer(beside: bool, tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {"one": 0, "two": 1, "<|endoftext|>": 2, "?": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "source").mkdir()
    tokenizer.save(str(tmp_path / "source" / "tokenizer.json"))
    if beside:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "two"}
        (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    path = str(tmp_path / "source" / "tokenizer.json")
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path / "out", tokenizer=path, end_id=2)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("two one <|endoftext|>")["input_ids"] == [1, 0, 2]
    assert loaded.decode([0, 1]) == "one two"
    assert loaded.eos_token_id == (1 if beside else 2)


# ---------------------------------------------------------------------------------------------------------------
# What transformers wrote


def their_llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.2}
    return transformers.LlamaConfig(**(shape | changes))


def their_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Config(
        vocab_size=263, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    )


def their_qwen3(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.2}
    return transformers.Qwen3Config(**(shape | changes))


def their_qwen3_moe(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12}
    shape |= {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 3}
    return transformers.Qwen3MoeConfig(**(shape | {"norm_topk_prob": True, "initializer_range": 0.2} | changes))


def their_qwen3_next(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
    shape |= {"num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    shape |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "moe_intermediate_size": 16}
    shape |= {"shared_expert_intermediate_size": 24, "num_experts": 12, "num_experts_per_tok": 3}
    # The norm after the delta rule divides by the length of what a query reads, which is a sum that may cancel: with
    # large weights, both libraries differ from float64 by a thousand times float32's rounding.
    return transformers.Qwen3NextConfig(**(shape | {"initializer_range": 0.06} | changes))


def their_gpt_oss(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 12, "num_experts_per_tok": 3}
    shape |= {"sliding_window": 9, "swiglu_limit": 0.5, "initializer_range": 0.2}
    return transformers.GptOssConfig(**(shape | changes))


def their_deepseek_v3(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 10}
    shape |= {"qk_rope_head_dim": 6, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 12}
    shape |= {"num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
    shape |= {"num_nextn_predict_layers": 0, "initializer_range": 0.2}
    yarn = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
    return transformers.DeepseekV3Config(**(shape | {"rope_parameters": yarn} | changes))


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        their_llama,
        lambda: their_llama(tie_word_embeddings=True),
        lambda: their_llama(rope_theta=5e4, rope_scaling=SCALING | {"original_max_position_embeddings": 16}),
        their_gpt2,
        their_qwen3,
        their_qwen3_moe,
        their_qwen3_next,
        their_gpt_oss,
        their_deepseek_v3,
        lambda: their_deepseek_v3(q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=None),
        lambda: their_qwen3_next(head_dim=17),
    ],
    ids=[*MODELS, "qwen3_next, odd heads"],
)
def test_folder_from_transformers_gives_the_same_logits(config: Callable[[], Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config())
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = load_here(tmp_path)
    assert difference(ours, theirs) < 1e-5


def load_here(folder: Path) -> nn.Module:
    recipe, model_config = model_config_of(folder, all_recipes())
    model = build(recipe, model_config, seed=1)
    fill(model, SafetensorsFolder(folder, recipe, model_config), "train.init_from")
    return model


def test_part_of_a_head_of_any_width_may_be_rotated() -> None:
    """Also if it is odd; config.json gives the number of rotated dimensions back, although it has only a quotient."""
    assert QWEN3_NEXT.check is not None
    _, config = MODELS["qwen3_next"]
    for width in range(2, 130):
        for rotary_dim in range(2, width + 1, 2):
            expected = replace(config, head_dim=width, rotary_dim=rotary_dim)
            QWEN3_NEXT.check(expected)
            found = QWEN3_NEXT.hf.model_fields(QWEN3_NEXT.hf.config(expected))
            assert (found["head_dim"], found["rotary_dim"]) == (width, rotary_dim)
    with pytest.raises(UserError, match=r"model\.rotary_dim=18: must be even and at most model\.head_dim=17"):
        QWEN3_NEXT.check(replace(config, head_dim=17, rotary_dim=18))
    with pytest.raises(UserError, match=r"model\.num_kv_heads=3: must divide model\.num_heads=4"):
        QWEN3_NEXT.check(replace(config, head_dim=17, num_kv_heads=3))


@pytest.mark.parametrize("without", [("rope_parameters",), ("rope_scaling", "rope_theta")], ids=["4", "5"])
@pytest.mark.parametrize("name", ["llama", "llama 3.1"])
def test_config_json_of_transformers_4_and_5(name: str, without: tuple[str, ...]) -> None:
    _, config = MODELS[name]
    content = {key: value for key, value in LLAMA.hf.config(config).items() if key not in without}
    assert LLAMA.config(**LLAMA.hf.model_fields(content)) == config


@pytest.mark.parametrize(
    "config", [their_gpt2, lambda: their_llama(tie_word_embeddings=True)], ids=["gpt2", "llama tied"]
)
def test_files_without_the_prefix(config: Callable[[], Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config())
    theirs.base_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as handle:
        assert not any(name.startswith(("transformer.", "model.")) for name in handle.keys())  # noqa: SIM118
    assert difference(load_here(tmp_path), theirs) < 1e-5


def test_obsolete_tensors_of_old_files_are_ignored(tmp_path: Path) -> None:
    recipe, config = MODELS["gpt2"]
    model, other = build(recipe, config), build(recipe, config, seed=1)
    export_model(model, recipe, config, tmp_path)
    file = tmp_path / "model.safetensors"
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(load_file(file) | mask, file)
    fill(other, SafetensorsFolder(tmp_path, recipe, config), "train.init_from")
    assert_same_bits(other, model)


def test_a_file_with_a_tied_weight_twice(tmp_path: Path) -> None:
    """Copies are one weight; an untied model has two different ones, which are rejected."""
    recipe, tied = MODELS["llama tied"]
    untied = replace(tied, tie_embeddings=False)
    model = build(recipe, tied)
    export_model(model, recipe, tied, tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    shutil.copytree(tmp_path / "one", tmp_path / "both")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    for config in (tied, untied):
        other = build(recipe, config, seed=1)
        fill(other, SafetensorsFolder(tmp_path / "both", recipe, config), "train.init_from")
        assert_same_bits(other, model)

    export_model(build(recipe, untied), recipe, untied, tmp_path / "two")
    with pytest.raises(
        UserError, match=r"tok_embeddings.weight and head.output.weight are one tensor here, but two there"
    ):
        fill(model, SafetensorsFolder(tmp_path / "two", recipe, tied), "train.init_from")
    with pytest.raises(UserError, match=r"missing there: head.output.weight \(263, 32\)"):
        fill(build(recipe, untied), SafetensorsFolder(tmp_path / "one", recipe, untied), "train.init_from")


# ---------------------------------------------------------------------------------------------------------------
# Straight into shards


@dataclass(frozen=True)
class OddConfig:
    """Tables of fewer rows than ranks, and of rows that no number of ranks divides."""

    vocab_size: int = 5
    width: int = 7


class Odd(nn.Module):
    """A custom model: biases, a persistent buffer and a non-persistent one."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(3))
        self.norm = nn.BatchNorm1d(config.width)
        self.out = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2))


ODD = Recipe(
    "odd",
    OddConfig,
    Odd,
    units=["table", "blocks.*", "out"],
    hf=HuggingFace(
        model_type="odd",
        architecture="OddForCausalLM",
        names={
            "table.weight": "odd.wte.weight",
            "blocks.*.weight": Transposed("odd.h.*.w"),
            "blocks.*.bias": "odd.h.*.b",
            "norm.*": "odd.norm.*",
            "out.*": "score.*",
        },
        config=lambda config: {"vocab_size": config.vocab_size, "n": config.width},
        model_fields=lambda content: {"vocab_size": content["vocab_size"], "width": content["n"]},
        prefix="odd.",
    ),
)
SHARDED = {name: MODELS[name] for name in ("llama", "llama tied", "gpt2", "qwen3_moe")} | {"odd": (ODD, ODD.config())}


def sharded(recipe: Recipe, model_config: Any, mesh: Any) -> nn.Module:
    """Return the model as the trainer shards it, with weights of another seed."""
    from trainer import load_config
    from trainer.model.shard import apply_sharding

    config = load_config("llama_small", ["fsdp.param_dtype=float32"])
    with torch.device("meta"):
        model = recipe.build_model(model_config)
    apply_sharding(model, recipe, config, mesh)
    materialize(model, 1, torch.device("cpu"), recipe.init)
    return model


def fill_each(folder: Path, meshes: list[tuple[int, ...]]) -> list[str]:
    """Load every model on every mesh; return all errors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    wrong = []
    for shape in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for case, (recipe, config) in SHARDED.items():
            plain, model = build(recipe, config), sharded(recipe, config, mesh)
            source = Counted(SafetensorsFolder(folder / case, recipe, config))
            fill(model, source, "train.init_from")
            expected, read = plain.state_dict(), sum(source.num_bytes.values())
            held = 0
            for name, weight in named_weights(model).items():
                (start, stop), *other_dims = local_box(weight) or ()
                assert other_dims == [(0, size) for size in weight.shape[1:]], name
                local = weight.to_local() if hasattr(weight, "to_local") else weight
                part = expected[name][start:stop] if weight.ndim else expected[name]
                held += local.nbytes if name in source.shapes else 0
                if not torch.equal(local, part):
                    wrong.append(f"{shape} {case} {name}: rows {start} to {stop}")
            if read != held:
                wrong.append(f"{shape} {case}: {read} bytes read, {held} held")
            whole = full_state_dict(model)
            if dist.get_rank():
                wrong += list(whole)
                continue
            build(recipe, config, seed=1).load_state_dict(whole)
            wrong += [f"{shape} {case} {n}: gathered" for n in expected if not torch.equal(whole[n], expected[n])]
            if len({id(tensor) for tensor in whole.values()}) != len({id(w) for w in named_weights(plain).values()}):
                wrong.append(f"{shape} {case}: a tied weight was gathered twice")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "meshes"), [(4, [(4,), (2, 2)]), pytest.param(2, [(2,)], marks=pytest.mark.campaign)]
)
def test_each_rank_reads_only_its_own_rows(ranks: int, meshes: Any, tmp_path: Path) -> None:
    """Odd vocabularies give uneven shards, five rows on four ranks an empty one; gathered, all is unchanged."""
    for name, (recipe, config) in SHARDED.items():
        export_model(build(recipe, config), recipe, config, tmp_path / name)
    assert run_ranks(ranks, fill_each, tmp_path, meshes) == [[]] * ranks


def fill_columns(folder: Path) -> list[str]:
    """Fill a model that is split along its columns."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    recipe, config = SHARDED["llama"]
    with torch.device("meta"):
        model = recipe.build_model(config)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    materialize(model, 1, torch.device("cpu"))
    fill(model, SafetensorsFolder(folder, recipe, config), "train.init_from")
    expected, whole = build(recipe, config).state_dict(), full_state_dict(model)
    return [name for name in whole if not torch.equal(whole[name], expected[name])] + [str(len(whole))]


@pytest.mark.slow
def test_model_sharded_along_columns(tmp_path: Path) -> None:
    recipe, config = SHARDED["llama"]
    export_model(build(recipe, config), recipe, config, tmp_path)
    assert run_ranks(2, fill_columns, tmp_path) == [["21"], ["0"]]


def test_custom_recipe(tmp_path: Path) -> None:
    recipe, config = SHARDED["odd"]
    model, other = build(recipe, config), build(recipe, config, seed=1)
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(17)
    export_model(model, recipe, config, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["odd.h.2.w"].t(), model.blocks[2].weight)
    assert "score.bias" in stored
    assert stored["odd.norm.num_batches_tracked"].shape == ()
    assert model_config_of(tmp_path, [LLAMA, ODD]) == (ODD, config)
    fill(other, SafetensorsFolder(tmp_path, recipe, config), "train.init_from")
    assert_same_bits(other, model)


def test_buffers_missing_in_the_source_are_kept() -> None:
    recipe, config = SHARDED["odd"]
    model, other = build(recipe, config), build(recipe, config, seed=1)
    other.norm.num_batches_tracked.fill_(17)
    fill(other, Memory(dict(model.named_parameters())), "train.init_from")
    assert other.norm.num_batches_tracked == 17
    assert torch.equal(other.out.weight, model.out.weight)


def test_full_state_dict_of_a_plain_model_is_a_copy() -> None:
    recipe, config = MODELS["gpt2"]
    model = build(recipe, config)
    whole = full_state_dict(model)
    assert whole.keys() == model.state_dict().keys()
    assert whole["wte.weight"] is whole["head.output.weight"]
    model.wte.weight.data.zero_()
    assert whole["wte.weight"].any()


# ---------------------------------------------------------------------------------------------------------------
# What does not fit


def test_every_difference_is_listed_and_nothing_is_written() -> None:
    model, before = build(LLAMA, TINY), build(LLAMA, TINY)
    tensors = build(LLAMA, TINY, seed=1).state_dict()
    del tensors["layers.0.attention.wq.weight"], tensors["head.norm.weight"]
    tensors |= {"lm_head.bias": torch.ones(263), "layers.1.feed_forward.w1.weight": torch.ones(64, 31)}
    with pytest.raises(UserError) as caught:
        fill(model, Memory(tensors), "train.init_from")
    assert str(caught.value).splitlines()[:-1] == [
        "train.init_from: the weights in memory do not fit the model:",
        "  missing there: layers.0.attention.wq.weight (32, 32)",
        "  missing there: head.norm.weight (32,)",
        "  missing here: lm_head.bias (263,)",
        "  layers.1.feed_forward.w1.weight: (64, 31) there, (64, 32) here",
    ]
    assert_same_bits(model, before)


def test_unknown_tensors_are_listed_by_their_own_name(tmp_path: Path) -> None:
    model = build(LLAMA, TINY)
    export_model(model, LLAMA, TINY, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, file)
    with pytest.raises(UserError, match=r"missing here: model.layers.0.self_attn.q_proj.bias \(32,\)\n  to fix: "):
        fill(model, SafetensorsFolder(tmp_path, LLAMA, TINY), "train.init_from")


def damage(folder: Path, how: str) -> Path:
    """Damage an export of several files; return the folder to read."""
    index, first = folder / "model.safetensors.index.json", sorted(folder.glob("model-00001-*"))[0]
    if how == "no folder":
        return folder / "none"
    if how == "a file":
        return index
    if how in ("empty", "pickles"):
        for file in folder.iterdir():
            file.unlink()
        if how == "pickles":
            (folder / "pytorch_model.bin").write_bytes(b"")
    elif how == "no index":
        index.unlink()
    elif how == "index broken":
        index.write_text("{")
    elif how == "shard absent":
        first.unlink()
    elif how == "truncated":
        first.write_bytes(first.read_bytes()[:-5])
    elif how == "no header":
        first.write_bytes(b"\xff" * 1000)
    elif how == "other tensors":
        save_file({"model.norm.weight": torch.ones(32)}, first)
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", "there is no such folder"),
        ("a file", "is a file; give the folder that contains it"),
        ("empty", "has neither model.safetensors nor model.safetensors.index.json"),
        (
            "pickles",
            "only pytorch_model.bin: pickle files are not read, because loading them can run code; convert them",
        ),
        ("no index", "has neither .*; it has config.json, model-00001"),
        ("index broken", "model.safetensors.index.json: is not an index of safetensors files"),
        ("shard absent", r"index.json names model-00001-of-\d+.safetensors, which is missing"),
        ("truncated", r"model-00001-of-\d+.safetensors: is not a complete safetensors file \(.*not fully covered\)"),
        ("no header", r"model-00001-of-\d+.safetensors: is not a complete safetensors file"),
        ("other tensors", r"model-00001-of-\d+.safetensors: has no model.embed_tokens.weight, .*, which model"),
    ],
)
def test_unreadable_folders(how: str, message: str, tmp_path: Path) -> None:
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path, max_shard_bytes=40_000)
    folder = damage(tmp_path, how)
    with pytest.raises(UserError, match=f"(?s)^train.init_from={re.escape(str(folder))}: .*{message}"):
        SafetensorsFolder(folder, LLAMA, TINY, "train.init_from")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        ("nonsense", r"does not describe a model: Expecting value"),
        ({"model_type": None}, "model_type=None has no recipe; there are recipes for gpt2, llama"),
        ({"model_type": "mamba"}, "model_type=mamba has no recipe; there are recipes for gpt2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': recipe 'llama' only supports 'silu'"),
        ({"attention_bias": True}, "attention_bias=True: recipe 'llama' only supports False"),
        ({"head_dim": 16}, "head_dim=16: must be hidden_size / num_attention_heads"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type=yarn: this recipe supports only default and llama3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: must be 1: this recipe rotates all dimensions"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads=3: must divide the width, 32"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
    ],
)
def test_configurations_without_recipe(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if isinstance(change, dict):
        export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif change:
        path.write_text(change)
    with pytest.raises(UserError, match=f"(?s)^train.init_from={tmp_path}: config.json: .*{message}"):
        model_config_of(tmp_path, [LLAMA, GPT2], "train.init_from")


def test_two_recipes_for_one_model(tmp_path: Path) -> None:
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path)
    with pytest.raises(UserError, match=r"is for the recipes llama, mine; name one with model.name"):
        model_config_of(tmp_path, [LLAMA, replace(LLAMA, name="mine")])


def test_a_recipe_without_names(tmp_path: Path) -> None:
    recipe = replace(ODD, hf=None)
    model = build(recipe, recipe.config())
    for attempt in (
        lambda: export_model(model, recipe, recipe.config(), tmp_path),
        lambda: SafetensorsFolder(tmp_path, recipe, recipe.config()),
    ):
        with pytest.raises(
            UserError, match=r"recipe 'odd' has no mapping to Hugging Face: give it hf=HuggingFace\(model_type="
        ):
            attempt()
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_with_too_few_names(tmp_path: Path) -> None:
    names = {"blocks.*.weight": "h.*.w", "table.weight": "wte", "norm.*": "norm.*"}
    recipe = replace(ODD, hf=replace(ODD.hf, names=lambda config: names))
    with pytest.raises(UserError, match=r"hf.names lacks blocks.0.bias, .*, out.weight, out.bias$"):
        export_model(build(recipe, recipe.config()), recipe, recipe.config(), tmp_path / "out")
    names["blocks.*.bias"] = "h.b"
    with pytest.raises(UserError, match=r"hf.names: 'blocks.\*.bias' and 'h.b' have a different number of \*"):
        export_model(build(recipe, recipe.config()), recipe, recipe.config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------
# Where an export may go, and what it leaves


def test_only_an_earlier_export_is_overwritten(tmp_path: Path) -> None:
    model = build(LLAMA, TINY)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        UserError, match=f"^folder={theirs}: contains files that are not an earlier export; choose a new"
    ):
        export_model(model, LLAMA, TINY, theirs, overwrite=True)
    assert [file.name for file in theirs.iterdir()] == ["config.json"]

    ours = tmp_path / "deep" / "ours"
    export_model(model, LLAMA, TINY, ours, max_shard_bytes=40_000, end_id=256)
    (ours / "README.md").write_text("mine")
    with pytest.raises(
        UserError, match=f"^export.to={ours}: contains an earlier export; choose a new folder, or overwrite"
    ):
        export_model(model, LLAMA, TINY, ours, setting="export.to")
    written = export_model(model, LLAMA, TINY, ours, overwrite=True)
    assert {file.name for file in written} == {"config.json", "model.safetensors"}
    assert {file.name for file in ours.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    with pytest.raises(UserError, match=r"cannot be created \(File exists\)"):
        export_model(model, LLAMA, TINY, ours / "README.md")


class Failing(Memory):
    """Fails in the middle."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name == "layers.1.attention.wq.weight":
            raise OSError("the disk is gone")
        return super().read(name, start, stop)


def test_failed_export_keeps_the_previous_one(tmp_path: Path) -> None:
    old, new = build(LLAMA, TINY), Failing(build(LLAMA, TINY, seed=1).state_dict())
    with pytest.raises(OSError, match="the disk is gone"):
        export(new, LLAMA, TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []
    export_model(old, LLAMA, TINY, tmp_path)
    with pytest.raises(OSError, match="the disk is gone"):
        export(new, LLAMA, TINY, tmp_path, overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same_bits(load_here(tmp_path), old)


@pytest.mark.slow
def test_leftovers_of_a_killed_export_are_no_model_and_do_no_harm(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from tests.weights.test_huggingface import *\n"
        "class Killed(Memory):\n"
        "    def read(self, name, *rows):\n"
        "        if name == 'head.output.weight': os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().read(name, *rows)\n"
        "export(Killed(build(LLAMA, TINY).state_dict()), LLAMA, TINY, sys.argv[1], max_shard_bytes=40_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=100)
    assert done.returncode == -9
    left = [file.name for file in tmp_path.iterdir()]
    assert len(left) > 2
    assert all(name.endswith(".partial") for name in left)
    with pytest.raises(UserError, match=r"has neither model.safetensors nor"):
        SafetensorsFolder(tmp_path, LLAMA, TINY)
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_crash_between_the_renames_leaves_no_model(tmp_path: Path) -> None:
    """Neither old weights with the new configuration, nor only some of the new files."""
    options = {"max_shard_bytes": 40_000, "overwrite": True}
    names = [file.name for file in export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path, **options)]
    for number in range(len(names)):
        left = iter(range(number))

        def replace_some(source: Path, target: Path, left: Iterator[int] = left, rename: Any = os.rename) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            rename(source, target)

        with mock.patch.object(os, "replace", replace_some), pytest.raises(KeyboardInterrupt):
            export_model(build(LLAMA, TINY, seed=1), LLAMA, TINY, tmp_path, **options)
        with pytest.raises(UserError, match=r"has neither model.safetensors nor"):
            SafetensorsFolder(tmp_path, LLAMA, TINY)
    export_model(build(LLAMA, TINY, seed=2), LLAMA, TINY, tmp_path, **options)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)
    assert_same_bits(load_here(tmp_path), build(LLAMA, TINY, seed=2))


MEASURED = """
import sys
from tests.weights.test_huggingface import *

class Made(Memory):
    def read(self, name, start=0, stop=None):
        rows, *rest = self.shapes[name]
        return torch.full((len(range(rows)[start:stop]), *rest), 0.5)

def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def peak_mib(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = kib("VmRSS")
    work()
    return (kib("VmHWM") - before) / 1024

name, folder = sys.argv[1:]
recipe = LLAMA if name == "llama" else GPT2
config = recipe.config(vocab_size=30000, dim=768, num_layers=4, num_heads=12)
with torch.device("meta"):
    model = recipe.build_model(config)
source = Made(model.state_dict())
weights.BLOCK_BYTES = 8 * 2**20
out = peak_mib(lambda: export(source, recipe, config, folder, dtype=torch.bfloat16 if name == "llama" else None))
print(sum(p.nbytes for p in model.parameters()) / 2**20, out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.campaign)])
def test_export_needs_memory_for_a_few_blocks_only(name: str, tmp_path: Path) -> None:
    """About 200 MiB in blocks of 8 MiB: in a different dtype, and transposed."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, name, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    size, peak = map(float, done.stdout.split())
    print(f"{size:.0f} MiB exported, peak {peak:.1f} MiB more")
    assert size > 180
    assert peak < 40, "an 8 MiB block as read, converted and turned, and what Python needs"
