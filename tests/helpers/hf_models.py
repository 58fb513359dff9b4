"""Tiny transformers models, and a plain training loop that `model.name=hf` is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.helpers.launch import merged

TINY = {
    "vocab_size": 257,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**TINY, "num_key_value_heads": 2, "intermediate_size": 96}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GROUPED, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mistral": ("Mistral", {**GROUPED, "head_dim": 12, "sliding_window": 16}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "gpt2": (
        "GPT2",
        {
            **{"vocab_size": 257, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
            **{"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
    ),
    "phi3": ("Phi3", {**GROUPED, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}),
    "olmo2": ("Olmo2", {**GROUPED, "tie_word_embeddings": False}),
    "smollm3": ("SmolLM3", {**GROUPED, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 12, "sliding_window": 16, "query_pre_attn_scalar": 12}),
    "granite": ("Granite", {**GROUPED, "logits_scaling": 3.0}),
    "mamba": ("Mamba", {"vocab_size": 257, "hidden_size": 48, "state_size": 4, "num_hidden_layers": 2}),
}
"""Each model's configuration class, without `Config`, and its settings."""

MAMBA = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_n_heads": 6}
DELTA = {
    **{"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {
            **{**GROUPED, **DELTA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        },
    ),
    "qwen3_5": ("Qwen3_5Text", {**GROUPED, **DELTA, "head_dim": 16}),
    "nemotron_h": (
        "NemotronH",
        {
            **{**GROUPED, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
            **{"n_groups": 2, "chunk_size": 16, "num_hidden_layers": 4},
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "bamba": (
        "Bamba",
        {**GROUPED, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_expand": 2},
    ),
    "falcon_h1": ("FalconH1", {**GROUPED, **MAMBA, "head_dim": 16, "mamba_d_ssm": 96}),
    "lfm2": ("Lfm2", {**GROUPED, "num_hidden_layers": 3, "full_attn_idxs": [1]}),
    "kimi_linear": (
        "KimiLinear",
        {
            **{**TINY, "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 96, "num_experts": 4},
            **{"num_experts_per_token": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
            **{"qk_rope_head_dim": 8, "v_head_dim": 8, "linear_num_heads": 4, "linear_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", {**GROUPED, **DELTA, "linear_num_key_heads": 4}),
    "zamba2": (
        "Zamba2",
        {
            **{**GROUPED, "hidden_size": 64, "num_key_value_heads": 4, "num_hidden_layers": 3, "chunk_size": 16},
            **{"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1},
            **{"hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid", "mamba"]},
        },
    ),
}
"""The same for hybrid models, some of whose layers have a recurrent state."""

PLAIN = {key: value for key, value in TINY.items() if key not in ("num_attention_heads", "max_position_embeddings")}
MORE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATE_SPACE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": KINDS["mamba"],
    "mamba2": ("Mamba2", {**PLAIN, "state_size": 8, "num_heads": 6, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "falcon_mamba": ("FalconMamba", {**PLAIN, "state_size": 4}),
    "jamba": (
        "Jamba",
        {
            **{**GROUPED, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4},
            **{"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            **{**GROUPED, "num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 16, "head_dim": 12},
            "block_types": ["recurrent", "attention", "recurrent"],
        },
    ),
    "rwkv": ("Rwkv", {**PLAIN, "attention_hidden_size": 48, "context_length": 512, "intermediate_size": 96}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **{**GROUPED, **MAMBA, "mamba_expand": 2, "num_hidden_layers": 3, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "shared_intermediate_size": 32, "intermediate_size": 32},
            "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**GROUPED, **MORE_EXPERTS, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    "minimax": (
        "MiniMax",
        {
            **{**GROUPED, "block_size": 16, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {**GROUPED, **DELTA, **MORE_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
}
"""State-space models, and more hybrid ones."""

ALIBI: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"vocab_size": 257, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
}
"""A model whose attention does not learn from positions where documents begin."""


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": KINDS["qwen3_moe"],
    "mixtral": ("Mixtral", {**GROUPED, **EXPERTS, "intermediate_size": 32}),
    "gpt_oss": ("GptOss", {**GROUPED, **EXPERTS, "head_dim": 16, "intermediate_size": 24, "sliding_window": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{**GROUPED, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
            **{"n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "num_hidden_layers": 3},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        },
    ),
}
"""Mixture-of-experts models: plain, with other parameter names, transposed with biases, and with shared experts."""


def settings_of(kind: str, **changes: Any) -> Any:
    import transformers

    name, entries = (KINDS | HYBRIDS | STATE_SPACE | ALIBI | MIXTURES)[kind]
    return getattr(transformers, f"{name}Config")(**entries | changes)


def model_of(kind: str, **changes: Any) -> Any:
    """Return transformers' model of a kind; see `model_from`."""
    return model_from(settings_of(kind, **changes))


def model_from(settings: Any) -> Any:
    """Return transformers' model with weights unlike any initialization: normal noise, scaled by 0.12."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # transformers draws some vectors, such as the decay rates of linear attention
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.12 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
    return model


def folder_of(path: Path, kind: str, **changes: Any) -> Path:
    """Write such a model in transformers' format, with tokenizer files that only an export reads."""
    model = model_of(kind, **changes)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


SETTINGS = [
    *("data.source=synthetic", "data.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=2"),
    *("optim.lr=1e-3", "optim.weight_decay=0", "optim.max_grad_norm=null", "schedule.name=constant"),
    *("schedule.warmup_steps=0", "eval.every=0", "checkpoint.every=0", "log.every=1", "log.sample_tokens=0"),
    *("run.threads=1", "run.device=cpu", "fsdp.param_dtype=float32", "train.compile=false", "train.steps=3"),
]
"""A run that a plain loop can follow."""


def overrides(folder: Path, *more: str, name: str = "hf") -> list[str]:
    """Return the overrides of such a run on the model of a folder; `name` is the recipe."""
    return [f"model.name={name}", f"model.path={folder}", *merged(SETTINGS, more)]


def load_with_transformers(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model that transformers loads from a folder, and its loading report."""
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return model, report


def plain_losses(folder: Path, batches: list[dict[str, torch.Tensor]], lr: float) -> tuple[list[float], Any]:
    """Return the losses of a plain loop over global batches, with AdamW at a fixed rate, and the trained model."""
    model, _ = load_with_transformers(folder)
    model.train()
    model.get_input_embeddings().padding_idx = None  # the padding row is trained, as in the native models
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch in batches:
        found = model(input_ids=batch["tokens"], use_cache=False)
        loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1).float(), batch["targets"].flatten())
        if getattr(found, "aux_loss", None) is not None:  # of experts that are to be used alike
            loss = loss + model.config.router_aux_loss_coef * found.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model
