"""Tiny models of the native recipes, their folders in Hugging Face's format, and the models that transformers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer import ModelSpec
from trainer.model.initial_weights import materialize
from trainer.registry import find_model
from trainer.weights.exporting import export

LLAMA, GPT2 = find_model("llama"), find_model("gpt2")
TINY = LLAMA.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64)
STRETCHED = {"rope_factor": 8.0, "rope_original_len": 16, "max_seq_len": 512, "rope_theta": 10000.0}
SOURCE = replace(TINY, **STRETCHED, norm_eps=1e-6, init_std=0.05)
"""A Llama 3.1 whose fields are neither the defaults nor those of llama_small."""

_SIZES = {"vocab_size": 263, "dim": 32, "num_layers": 3, "num_heads": 4}
_EXPERTS = {"expert_dim": 16, "num_experts": 12, "num_chosen": 3}
_LATENT = {"kv_rank": 12, "nope_dim": 8, "rope_dim": 6, "value_dim": 10, "ffn_dim": 40}
_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"max_seq_len": 64}),
    "qwen3": ("qwen3", {"num_kv_heads": 2, "head_dim": 12, "ffn_dim": 64}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_kv_heads": 2, "head_dim": 12, "normalize_chosen": False}),
    "qwen3_next": (
        "qwen3_next",
        {
            **{**_EXPERTS, "num_kv_heads": 2, "head_dim": 16, "attention_every": 2, "rotary_dim": 4},
            **{"delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 12, "shared_dim": 24},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **{**_EXPERTS, "num_kv_heads": 2, "head_dim": 12, "window": 9, "swiglu_limit": 0.5},
            **{"rope_factor": 8.0, "rope_original_len": 16, "max_seq_len": 128},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **{**_EXPERTS, **_LATENT, "q_rank": 20, "num_shared": 2, "num_groups": 3, "num_chosen_groups": 2},
            **{"rope_factor": 8.0, "rope_original_len": 16, "rope_mscale": 0.7, "max_seq_len": 128},
        },
    ),
    "deepseek_v3 plain": (
        "deepseek_v3",
        {
            **{**_EXPERTS, **_LATENT, "q_rank": None, "num_groups": 1, "num_chosen_groups": 1},
            **{"normalize_chosen": False, "rope_neighbours": False, "rope_factor": 1.0},
        },
    ),
}
MODELS: dict[str, tuple[ModelSpec, Any]] = {
    "llama": (LLAMA, TINY),
    "llama tied": (LLAMA, replace(TINY, tie_embeddings=True, num_kv_heads=1, norm_eps=1e-6)),
    "llama 3.1": (LLAMA, replace(TINY, **STRETCHED)),
    **{
        name: (find_model(spec), find_model(spec).config(**_SIZES | fields)) for name, (spec, fields) in _FIELDS.items()
    },
}
"""Every native recipe, with fields that its variants of config.json have."""


class Memory:
    """Weights in a dictionary, as a source of weights."""

    description = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        return tensor[start:stop] if tensor.ndim else tensor


def build(spec: ModelSpec, config: Any, seed: int = 0) -> nn.Module:
    """Return the unsharded model with weights that differ from any initial value: no ones, no zeros."""
    with torch.device("meta"):
        model = spec.build_model(config)
    materialize(model, seed, torch.device("cpu"), spec.init)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.state_dict(keep_vars=True).values():
            if weight.is_floating_point():
                weight.add_(torch.randn(weight.shape, generator=generator) / 10)
    return model.eval()


def export_model(model: nn.Module, spec: ModelSpec, config: Any, folder: Path, **options: Any) -> list[Path]:
    return export(Memory(model.state_dict()), spec, config, folder, **options)


def folder_of(path: Path, spec: ModelSpec = LLAMA, config: Any = SOURCE, **changes: Any) -> Path:
    """Write a model in Hugging Face's format; `changes` of config.json, where None removes a key."""
    export_model(build(spec, config), spec, config, path)
    edit(path, **changes)
    return path


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    file = folder / "config.json"
    removed = {key for key, value in changes.items() if value is None}
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if key not in removed}, indent=2))


# ---------------------------------------------------------------------------------------------------------------
# The small files of a chat model

TOKENS = {"eos_token_id": [256, 258], "bos_token_id": 258, "pad_token_id": 257, "summary_type": "cls_index"}
BESIDE = {
    "generation_config.json": b'{"eos_token_id": [256, 258],\n "temperature":0.6, "bos_token_id": 258}',
    "tokenizer_config.json": b'{"eos_token": "<|im_end|>",  "chat_template": "{{ messages }}"}\n',
    "special_tokens_map.json": b'{"eos_token": "<|im_end|>"}',
    "chat_template.jinja": b"{% for m in messages %}\xc3\xa9{% endfor %}\r\n",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "merges.txt": b"#version: 0.2\n",
    "added_tokens.json": b"",
}
"""What no training changes: bytes that no program would write again."""


def tokenizer_json(*words: str) -> bytes:
    """Return a tokenizer.json that knows these words."""
    vocab = {word: number for number, word in enumerate([*words, "<|im_end|>", "<|endoftext|>"])}
    added = [{"id": vocab[name], "content": name, "special": True} for name in ("<|im_end|>", "<|endoftext|>")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    keys = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    content = {"version": "1.0", **dict.fromkeys(keys), "added_tokens": [{**t, **flags} for t in added], "model": model}
    return json.dumps(content).encode()


def chat_folder(path: Path, spec: ModelSpec = LLAMA, config: Any = SOURCE) -> Path:
    """Write the folder of a chat model, with every small file that such a folder may have."""
    folder_of(path, spec, config, exported_by=None, **TOKENS)
    for name, content in (BESIDE | {"tokenizer.json": tokenizer_json("?", "one", "two")}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


# ---------------------------------------------------------------------------------------------------------------
# Comparing


def load_with_transformers(folder: Path, **options: Any) -> Any:
    """Load the folder with transformers and demand that it finds all it needs and nothing else."""
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a pool of threads for a few kilobytes
    transformers = pytest.importorskip("transformers")
    options = {"dtype": torch.float32, **options}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    left, right = model.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@torch.no_grad()
def difference(ours: nn.Module, theirs: Any, length: int = 48) -> float:
    """Return the largest difference of any logit, of logits of about one."""
    vocab_size = theirs.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    expected = theirs.eval()(tokens).logits
    assert expected.dtype == torch.float32
    assert 0.3 < expected.std() < 30
    return float((ours(tokens) - expected).abs().max())


# ---------------------------------------------------------------------------------------------------------------
# The same kinds as transformers has them


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


KINDS: dict[str, Callable[[], Any]] = {
    "llama": their_llama,
    "gpt2": their_gpt2,
    "qwen3": their_qwen3,
    "qwen3_moe": their_qwen3_moe,
    "qwen3_next": their_qwen3_next,
    "gpt_oss": their_gpt_oss,
    "deepseek_v3": their_deepseek_v3,
}


def write_theirs(kind: str, folder: Path, **changes: Any) -> Path:
    """Write a transformers model with random weights, including its biases and norms."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = KINDS[kind]()
    for name, value in ({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}).items():
        setattr(config, name, value)
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) / 20)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape) / 20)
    model.save_pretrained(folder)
    return folder
