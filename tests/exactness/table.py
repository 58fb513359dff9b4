"""One table of configurations: kinds of models, features, and the rows that must train alike on any mesh.

`test_table.py` trains each row on one rank and on the row's mesh, and resumes it on the other mesh. The page of what
works with what (`tests/compatibility.py`) tries the same kinds and features in pairs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.launch import merged
from trainer import RunConfig, load_config


@dataclass(frozen=True)
class Kind:
    """A kind of model in a tiny shape."""

    fields: tuple[str, ...] = ()
    """For a native recipe: overrides."""
    transformers_model: str = ""
    """For `model.name=hf`: the name of the model in tests/helpers/hf_models.py."""
    changes: tuple[tuple[str, Any], ...] = ()
    """For `model.name=hf`: changes to that model's settings."""


_HEADS = ("model.num_layers=2", "model.num_heads=4", "model.dim=64", "model.init_std=0.1", "model.vocab_size=257")
_GROUPED = (*_HEADS, "model.num_kv_heads=2")
_EXPERTS = ("model.expert_dim=64", "model.num_experts=4", "model.num_chosen=2")
_WIDE = (("hidden_size", 64), ("intermediate_size", 128))
KINDS = {
    "llama": Kind((*_GROUPED, "model.dim=128", "model.ffn_dim=128")),
    "gpt2": Kind((*_HEADS, "model.max_seq_len=64")),
    "qwen3": Kind((*_GROUPED, "model.head_dim=16", "model.ffn_dim=128")),
    "qwen3_moe": Kind((*_GROUPED, *_EXPERTS, "model.head_dim=16")),
    "qwen3_next": Kind(
        (
            *(*_GROUPED, *_EXPERTS, "model.head_dim=16", "model.rotary_dim=8", "model.shared_dim=64"),
            *("model.attention_every=2", "model.delta_heads=4", "model.delta_key_heads=2"),
            *("model.delta_key_dim=16", "model.delta_value_dim=16"),
        ),
    ),
    "gpt_oss": Kind((*_GROUPED, *_EXPERTS, "model.head_dim=16", "model.window=16")),
    "deepseek_v3": Kind(
        (
            *(*_HEADS, *_EXPERTS, "model.num_dense_layers=1", "model.ffn_dim=128", "model.num_groups=2"),
            *("model.num_chosen_groups=1", "model.q_rank=64", "model.kv_rank=64", "model.nope_dim=8"),
            *("model.rope_dim=8", "model.value_dim=16", "model.balance_rate=0"),
        ),
    ),
    "hf_dense": Kind(transformers_model="llama", changes=_WIDE),
    "hf_mixture": Kind(transformers_model="qwen3_moe", changes=(*_WIDE, ("moe_intermediate_size", 64))),
    "hf_hybrid": Kind(
        transformers_model="qwen3_next",
        changes=(
            *(*_WIDE, ("num_hidden_layers", 4), ("moe_intermediate_size", 64)),
            *(("shared_expert_intermediate_size", 64), ("linear_key_head_dim", 16), ("linear_value_head_dim", 16)),
        ),
    ),
}
"""Widths are multiples of 64, so that base weights can be packed.  The vocabulary is divided unevenly.  The models of
transformers are a Llama, a Qwen3-MoE and a Qwen3-Next."""


ALL_KINDS = {
    **KINDS,
    "hf_windows": Kind(transformers_model="gemma2", changes=_WIDE),
    "hf_norms": Kind(transformers_model="qwen3", changes=_WIDE),
}
"""With more models of transformers, which only rows of the table train: a Gemma 2 and a Qwen3."""


@dataclass(frozen=True)
class Feature:
    """The overrides that enable a feature."""

    overrides: tuple[str, ...]
    """`{folder}` is the folder of the data, `{weights}` that of the kind's weights in Hugging Face's format."""
    needs_weights: bool = False
    concerns_experts: bool = False


def _objective(name: str, file: str, *more: str) -> Feature:
    data = ("data.source=chat", f"data.path={{folder}}/{file}.jsonl", "data.tokenizer={folder}/tokenizer")
    return Feature((f"train.objective={name}", *data, *more), needs_weights=True)


_LORA = ("lora.rank=4",)
_EXCHANGE = ("mesh.expert=2", "mesh.expert_method=exchange")
_GATHER = ("mesh.expert=2", "mesh.expert_method=gather")
_TENSOR = ("mesh.tensor=2",)
FEATURES = {
    "masked": Feature(("data.documents=masked",)),
    "replicate": Feature(("mesh.replicate=2",)),
    "context": Feature(("mesh.context=2",)),
    "tensor": Feature(_TENSOR),
    "exchange": Feature(_EXCHANGE, concerns_experts=True),
    "gather": Feature(_GATHER, concerns_experts=True),
    "lora": Feature(_LORA, needs_weights=True),
    "lora_experts": Feature((*_LORA, "lora.targets=[experts]"), needs_weights=True, concerns_experts=True),
    "nf4": Feature((*_LORA, "lora.base_dtype=nf4"), needs_weights=True),
    "fp8": Feature((*_LORA, "lora.base_dtype=fp8"), needs_weights=True),
    "full": Feature(("train.activation_checkpoint=full",)),
    "selective": Feature(("train.activation_checkpoint=selective",)),
    "budget": Feature(("train.activation_checkpoint=budget:0.5",)),
    "compile": Feature(("train.compile=true",)),
    "cpu_offload": Feature(("fsdp.cpu_offload=true",)),
    "activations": Feature(("train.offload_activations=1.0",)),
    "float8": Feature(("train.float8=rowwise", "fsdp.param_dtype=bfloat16")),
    "muon": Feature(("optim.name=muon",)),
    "int8": Feature(("optim.state_dtype=int8",)),
    "ema": Feature(("train.ema=0.9",)),
    "sharded": Feature(("fsdp.accumulate=sharded",)),
    "dpo": _objective("dpo", "pairs"),
    "kto": _objective("kto", "labelled"),
    "reward": _objective("reward", "pairs"),
    "classify": _objective("classify", "classes", "objective.num_labels=2"),
    "distill": Feature(("train.objective=distill", "objective.teacher={weights}"), needs_weights=True),
}

BASE = (
    *("data.source=tokens", "data.path={folder}/documents.jsonl", "data.cache_dir={folder}/cache", "data.seq_len=64"),
    *("train.steps=3", "train.global_batch_size=4", "train.micro_batch_size=1", "train.compile=false"),
    *("eval.every=0", "checkpoint.every=0", "log.sample_tokens=0", "schedule.warmup_steps=0", "run.threads=1"),
    "run.device=cpu",
)
"""The settings of all configurations; features override some of them."""


def configure(kind: str, features: tuple[str, ...], folder: Path, *own: str) -> RunConfig:
    """Return the configuration of a kind of model with features and overrides. Raises UserError if it is refused.

    folder: contains the data and the weights (`inputs.py`).
    """
    weights = folder / "weights" / kind
    of_features = [item for name in features for item in FEATURES[name].overrides]
    if ALL_KINDS[kind].transformers_model:
        model = ["model.name=hf", f"model.path={weights}"]
    elif any(FEATURES[name].needs_weights for name in features):
        model = [f"model.name={kind}", f"train.init_from={weights}"]
    else:
        model = [f"model.name={kind}", *ALL_KINDS[kind].fields]
    items = merged(merged([*BASE], list(dict.fromkeys(of_features))), own)
    return load_config("llama_small", [*model, *(item.format(folder=folder, weights=weights) for item in items)])


# ---------------------------------------------------------------------------------------------------------------
# The rows


@dataclass(frozen=True)
class Row:
    """A configuration that must train alike on one rank and on its mesh."""

    name: str
    kind: str = "llama"
    features: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    mesh: tuple[str, ...] = ()
    """The mesh it is compared on; by default all ranks are shards. Features that only change how a mesh computes belong
    here, since one rank cannot have them."""
    ranks: int = 2
    tolerance: float = 1e-6
    """The largest relative difference of losses, gradient norms and evaluations, and of the weights as a whole."""
    norm_tolerance: float = 0.0
    """That of gradient norms, if it is another one."""
    everyday: bool = True
    """Whether `make test` trains it, not only the campaign."""

    @property
    def weights(self) -> set[str]:
        """The kinds of model whose weights it reads."""
        own = ALL_KINDS[self.kind].transformers_model or any(FEATURES[name].needs_weights for name in self.features)
        others = re.findall(r"{folder}/weights/(\w+)", " ".join(self.overrides))
        return {*others, self.kind} if own else {*others}


_RAGGED = ("data.documents=apart",)
"""One document a row, so that ranks have different numbers of targets."""
_SLOWLY = ("optim.lr=1e-4",)
"""At the default rate rounding grows: after three steps, the norm of qwen3_next differs by 1e-7 to 1e-5."""
_TWO_SOURCES = (
    "data.path={{a: {folder}/documents.jsonl, b: {folder}/others.jsonl}}",
    "data.weights={{a: 3, b: 1}}",
    "data.phases=[{{from: 2, weights: {{b: 1}}}}]",
)
_CHATS = ("data.source=chat", "data.path={folder}/chats.jsonl", "data.tokenizer={folder}/tokenizer")
_BALANCE = (
    "model.balance_rate=0.01",
    "model.balance=0.1",
    "model.balance_shares=last",
    "model.sequence_balance=0.1",
    "model.z_loss=0.01",
)
_EXACT = ("model.balance=0.1", "model.balance_shares=exact", "model.sequence_balance=0.1")
_MUON = ("optim.muon.dtype=float32",)
"""The iteration in bfloat16, the default, makes weights that differ by rounding differ by 4e-5 three steps later."""
_NORMUON = ("optim.muon.variant=normuon",)
_FEW_EXPERTS = ("model.num_experts=2", "model.num_chosen=1")
"""Fewer than ranks, so that each expert has copies."""
_GROUPS = (
    "optim.groups=[{{match: '*norm*', lr: 1e-3, weight_decay: 0.3}}, {{match: 'head.output*', weight_decay: 0.0}}]",
)

ROWS = [
    # Each kind of model, most of them with an optimizer or another feature that suits any kind
    Row("llama, base model", overrides=(*_RAGGED, "optim.base_model={{dim: 64, num_heads: 2, num_kv_heads: 1}}")),
    Row("gpt2, sgd", "gpt2", overrides=(*_RAGGED, "optim.name=sgd", "optim.lr=0.1")),
    Row("qwen3, groups", "qwen3", overrides=(*_RAGGED, *_GROUPS)),
    Row("qwen3_next, averaged weights", "qwen3_next", ("ema",), (*_RAGGED, *_SLOWLY)),
    Row("gpt_oss, 8-bit moments", "gpt_oss", ("int8",), _RAGGED),
    Row("hf_dense, bf16 weights", "hf_dense", overrides=(*_RAGGED, "train.weights_dtype=bfloat16")),
    # Its gradients are so steep that weights which differ by 6e-8 have norms that differ by up to 2e-4.
    Row("hf_hybrid", "hf_hybrid", overrides=(*_RAGGED, "optim.lr=1e-4"), norm_tolerance=1e-4),
    Row("replicas", overrides=_RAGGED, mesh=("mesh.replicate=2",), ranks=4),
    Row("whole replicas", overrides=_RAGGED, mesh=("mesh.replicate=2", "mesh.shard=1")),
    # Data
    Row("best fit, sharded accumulation", features=("masked", "sharded"), overrides=("data.fit=best",)),
    Row("two sources, units by size", overrides=_TWO_SOURCES, mesh=("fsdp.wrap=size:5000",)),
    Row("packed chats", overrides=_CHATS),
    # Optimizers
    Row("muon", features=("muon",), overrides=(*_RAGGED, *_MUON)),
    Row("normuon with experts", "qwen3_moe", ("muon",), (*_RAGGED, *_MUON, *_NORMUON), mesh=_EXCHANGE),
    # Adapters
    Row("adapters, selective recomputation", features=("lora", "selective"), overrides=_RAGGED),
    Row("adapters of experts", "qwen3_moe", ("lora_experts",), _RAGGED, mesh=_EXCHANGE),
    Row("4-bit base", features=("nf4",), overrides=_RAGGED, everyday=False),
    Row("8-bit base", features=("fp8",), overrides=_RAGGED),
    Row("4-bit experts", "qwen3_moe", ("nf4", "lora_experts"), _RAGGED),
    # Memory
    Row("parameters on the host", features=("cpu_offload",), overrides=_RAGGED),
    Row("activations on the host", features=("activations",), overrides=_RAGGED),
    Row("recomputation by a budget", features=("budget",), overrides=_RAGGED),
    Row(
        "resharding by unit",
        overrides=_RAGGED,
        mesh=("fsdp.reshard_after_forward=[never,2,always,4]", "fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"),
        ranks=4,
        everyday=False,
    ),
    # Axes
    Row("context by gather", overrides=_RAGGED, mesh=("mesh.context=2", "mesh.context_method=gather")),
    Row("context by heads", features=("masked",), mesh=("mesh.context=2", "mesh.context_method=heads")),
    Row("tensor", overrides=_RAGGED, mesh=_TENSOR),
    Row("tensor of gpt2", "gpt2", overrides=_RAGGED, mesh=_TENSOR),
    Row("tensor of qwen3", "qwen3", ("masked",), mesh=_TENSOR, ranks=4),
    Row("tensor of gpt_oss", "gpt_oss", overrides=_RAGGED, mesh=_TENSOR),
    Row("tensor and context", overrides=_RAGGED, mesh=(*_TENSOR, "mesh.context=2"), ranks=4),
    Row(
        "tensor, replicas and sharded accumulation", features=("sharded",), mesh=(*_TENSOR, "mesh.replicate=2"), ranks=4
    ),
    Row("tensor of four", "gpt_oss", overrides=(*_RAGGED, "model.num_kv_heads=4"), mesh=("mesh.tensor=4",), ranks=4),
    Row("tensor, compiled", features=("compile", "muon", "selective"), overrides=(*_RAGGED, *_MUON), mesh=_TENSOR),
    Row("tensor of transformers", "hf_dense", overrides=_RAGGED, mesh=_TENSOR),
    Row("tensor of transformers, adapters", "hf_windows", ("lora", "masked"), mesh=_TENSOR, ranks=4, everyday=False),
    Row("tensor of transformers, compiled", "hf_norms", ("compile",), _RAGGED, mesh=_TENSOR, everyday=False),
    Row("tensor and muon", features=("muon",), overrides=(*_RAGGED, *_MUON), mesh=_TENSOR, ranks=4),
    Row("tensor with adapters", features=("lora", "selective"), overrides=_RAGGED, mesh=_TENSOR),
    Row("tensor with a 4-bit base", features=("nf4",), overrides=_RAGGED, mesh=_TENSOR),
    Row("tensor with an 8-bit base", features=("fp8",), overrides=_RAGGED, mesh=_TENSOR, everyday=False),
    Row("tensor with few experts", "qwen3_moe", ("ema",), (*_RAGGED, *_EXACT), mesh=(*_TENSOR, *_EXCHANGE), ranks=4),
    Row("tensor of deepseek_v3", "deepseek_v3", ("budget",), _RAGGED, mesh=_TENSOR),
    Row("tensor on the host", features=("cpu_offload", "full"), overrides=_TWO_SOURCES, mesh=_TENSOR, ranks=4),
    Row(
        "tensor, context, replicas",
        overrides=(*_RAGGED, "optim.rounding=stochastic", "train.weights_dtype=bfloat16"),
        mesh=(*_TENSOR, "mesh.context=2", "mesh.replicate=2"),
        ranks=8,
        everyday=False,
    ),
    Row("experts by exchange", "qwen3_moe", overrides=_RAGGED, mesh=_EXCHANGE, ranks=4),
    Row("experts by gather", "deepseek_v3", overrides=(*_RAGGED, "model.balance_rate=0.01"), mesh=_GATHER),
    Row("few experts", "qwen3_moe", ("sharded",), (*_RAGGED, *_FEW_EXPERTS), ranks=4),
    Row("few experts, 8 ranks", "qwen3_moe", ("cpu_offload",), _RAGGED, ranks=8, everyday=False),
    Row(
        "few experts, replicas and muon",
        "qwen3_moe",
        ("muon", "ema"),
        (*_RAGGED, *_FEW_EXPERTS, *_MUON),
        mesh=("mesh.replicate=2",),
        ranks=8,
        everyday=False,
    ),
    Row("experts of transformers", "hf_mixture", overrides=_RAGGED, mesh=_EXCHANGE),
    Row("biases of experts", "qwen3_moe", overrides=(*_RAGGED, *_BALANCE), mesh=_EXCHANGE),
    Row("exact shares of experts", "qwen3_moe", ("full",), (*_RAGGED, *_EXACT), mesh=("mesh.context=2",)),
    # Objectives
    Row("preferences", features=("dpo",)),
    Row("labelled answers", features=("kto",)),
    Row("preferences in slices", features=("dpo", "full"), mesh=("mesh.context=2",), everyday=False),
    Row("preferences and tensor", "qwen3", ("dpo",), mesh=_TENSOR, ranks=4),
    Row("labelled answers and tensor", features=("kto", "lora"), mesh=(*_TENSOR, "mesh.context=2"), ranks=4),
    Row("rewards", features=("reward",), everyday=False),
    Row("distillation", features=("distill",), overrides=("objective.teacher={folder}/weights/qwen3",)),
    Row(
        "distillation and tensor",
        features=("distill",),
        overrides=("objective.teacher={folder}/weights/qwen3",),
        mesh=_TENSOR,
    ),
]
