"""The schema of the configuration, a frozen tree of sections: the type, default, limits and meaning of each key."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import yaml

from trainer import gguf_model, hub
from trainer.config.declare import declare
from trainer.errors import printable
from trainer.model_spec import ModelSpec, TrainerType
from trainer.objective import Tokens
from trainer.registry import find_model, import_object

# ---------------------------------------------------------------------------------------------------------------
# Limits and values shared by several sections

WEEK_S = 7 * 24 * 3600.0
"""Upper bound on time limits, in seconds.  Timeouts between ranks may be three times as long, and in milliseconds
they must fit in 32 bits."""

MAX_SIZE = 2**31 - 1
"""The largest legal value of keys that set the size of a tensor dimension."""

DTYPE_ALIASES = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "torch.float32"), "float32"),
}
"""Maps other names for dtypes to the names used here, which error messages suggest instead."""

AUTO: Literal["auto"] = "auto"
"""The value that leaves a choice to the trainer.  For some keys, the planner makes that choice before the model
is built."""

MODEL = "model"
"""The value of `data.tokenizer` and `data.chat_template` that selects the model's own."""

TYPED_BY_OTHERS = ("model.", "objective.")
"""Prefixes of the keys whose types depend on `model.name` and `train.objective`."""

MODEL_KEYS = ("model.path", "train.init_from", "data.tokenizer", "objective.teacher")
"""Keys that name a model's files.  For files from the Hugging Face Hub, a run stores the pinned name, not a path."""


# ---------------------------------------------------------------------------------------------------------------
# The run


@dataclass(frozen=True)
class RunSection:
    """Identity and environment of the run."""

    name: str = declare("", "name of the run; empty: the recipe's name", on_resume="ignored")
    dir: str = declare("", "run folder; empty: runs/<name>", on_resume="ignored")
    seed: int = declare(
        0, "seed of the initial weights and of all randomness in training", at_least=0, on_resume="fixed"
    )
    device: Literal["auto", "cpu", "cuda"] = declare(
        "auto",
        "training device; auto: cuda if there is a GPU",
        aliases=dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "cuda:0"), "cuda"),
    )
    deterministic: bool = declare(
        False,
        "make results bit-identical on GPUs too, with slower kernels that sum in a fixed order",
    )
    threads: int = declare(0, "CPU threads per rank; 0: divide this process's cores evenly", at_least=0, at_most=1024)
    timeout_s: float = declare(
        600.0,
        "seconds in which all ranks must join; the timeout of collectives, unless first_step_timeout_s is longer",
        above=0,
        at_most=WEEK_S,
    )
    step_timeout_s: float = declare(
        0.0,
        "seconds without progress in a step after which the run ends and names the stuck rank; 0: timeout_s / 2",
        at_least=0,
        at_most=WEEK_S,
    )
    first_step_timeout_s: float = declare(
        0.0,
        "step_timeout_s for the first step and for each evaluation batch; 0: 3 x timeout_s",
        at_least=0,
        at_most=WEEK_S,
    )
    memory_gib: float | None = declare(
        None, "device memory in GiB that auto settings may plan for; null: all of it", above=0
    )
    selfcheck: bool = declare(
        True,
        "before the first step, check that all ranks agree on sharding, replicas, data and code, and that split "
        "sequences, matrices and experts give right results",
    )
    on_end: str | None = declare(
        None,
        "shell command that rank 0 runs once after the run ends (30 s at most), with RUN_DIR, STATE "
        "(finished, stopped or failed), EXIT_CODE and STEP in its environment; null: none",
    )
    deadline: str | None = declare(
        None,
        "time by which the run must have saved its state and exited, for example 2026-01-31T18:00 (local) or with "
        "+01:00; null: the end of the Slurm job",
    )

    @property
    def first_step_limit_s(self) -> float:
        return self.first_step_timeout_s or 3 * self.timeout_s

    @property
    def step_limit_s(self) -> float:
        return self.step_timeout_s or self.timeout_s / 2


@dataclass(frozen=True)
class LogSection:
    """Logging: to the console, files, trackers such as Weights & Biases, and Prometheus."""

    every: int = declare(10, "steps between progress lines", at_least=1)
    wandb: Literal["off", "offline", "online"] = declare(
        "off",
        "Weights & Biases",
        aliases={
            **dict.fromkeys(("true", "yes", "on", "1", "enabled"), "online"),
            **dict.fromkeys(("false", "no", "0", "disabled", "none"), "off"),
        },
    )
    trackers: tuple[str, ...] = declare(
        (),
        "where metrics are sent: wandb, tensorboard, trackio, mlflow, or an installed tracker of your own, for example "
        "[wandb,mlflow]",
    )
    wandb_project: str = declare("meshtrainer", "project in Weights & Biases and Trackio, experiment in MLflow")
    tensorboard: bool = declare(False, "write TensorBoard events to run.dir/tensorboard")
    prometheus: int | None = declare(
        None,
        "port on which rank 0 serves metrics for Prometheus; 0: any free one; null: none",
        at_least=0,
        at_most=65535,
    )
    sample_tokens: int = declare(0, "tokens of sample text generated at the end; 0: none", at_least=0)
    prompts: tuple[str, ...] = declare(
        (),
        'prompts that the model continues at each evaluation, for example ["Once upon a time"]; for chats, '
        "user messages that it answers",
        needs="eval.every",
    )
    prompt_tokens: int = declare(64, "maximum tokens generated for each prompt", at_least=1)
    norms_every: int = declare(0, "steps between logging gradient and parameter norms by layer; 0: never", at_least=0)
    profile_steps: tuple[int, int] | None = declare(
        None,
        "first and last step to profile, for example [10,13]; writes a trace for Perfetto to run.dir/profile; "
        "null: none",
        example=[10, 13],
    )
    profile_ranks: tuple[int, ...] = declare((0,), "ranks that write a profile; rank 0 always does")

    def without_trackers(self) -> LogSection:
        """Return the section for a run that sends its metrics nowhere."""
        return dataclasses.replace(self, wandb="off", tensorboard=False, trackers=(), prometheus=None)

    def is_due(self, step: int) -> bool:
        """Return whether to print a progress line for step `step`."""
        return step % self.every == 0

    def profiles(self, step: int) -> bool:
        """Return whether any rank profiles step `step`."""
        first, last = self.profile_steps or (0, -1)
        return first <= step <= last


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and resuming."""

    every: int | Literal["auto"] = declare(
        0,
        "steps between checkpoints; 0: only at the end; auto: the interval that minimizes lost time (see node_mtbf_h)",
        at_least=0,
        example=100,
    )
    node_mtbf_h: float = declare(
        6000.0,
        "for every=auto: assumed mean time between failures of a node, in hours; combined with the failures "
        "the run has seen",
        at_least=1e-4,
        at_most=1e9,
    )
    mode: Literal["async", "sync"] = declare(
        "async",
        "async: training waits only for a copy in memory, written in the background; sync: training waits for the disk",
    )
    dir: str | None = declare(
        None, "where checkpoints are stored: a folder or URL (s3://...) used by this run only; null: run.dir"
    )
    keep_last: int = declare(2, "number of newest checkpoints to keep; 0: all", at_least=0)
    keep_every: int = declare(0, "keep the checkpoint of every n-th step permanently; 0: none", at_least=0)
    keep_best: int = declare(
        0,
        "number of checkpoints with the best eval.metric to keep, saved when evaluated; 0: none; RUN/best "
        "refers to the best one",
        at_least=0,
        needs="eval.every",
    )
    timeout_s: float = declare(
        3600.0,
        "seconds after which a save counts as stuck; the run then ends and names the stuck rank",
        above=0,
        at_most=WEEK_S,
    )
    torch_metadata: bool = declare(
        False,
        "also write .metadata, a pickle with which torch's own FileSystemReader reads checkpoints; a child process "
        "builds it",
    )
    when_busy: Literal["wait", "skip"] = declare(
        "wait",
        "if a save is due while the previous one is still running: wait for it, or skip the new one",
    )
    max_failures: int = declare(
        10, "consecutive failed saves after which the run fails; a failed save is retried after a pause", at_least=1
    )
    verify: Literal["full", "sizes"] = declare(
        "full",
        "verification before loading: full (all checksums) or sizes (file sizes only)",
    )
    resume: str = declare(
        "auto",
        "auto: resume from the newest good checkpoint; none: start over; or the path of a checkpoint or run",
        aliases={"true": "auto", "false": "none"},
    )
    allow_changes: tuple[str, ...] = declare(
        (), "permitted differences from the checkpoint: keys, sections, or state.<name>", example=["optim.name"]
    )


# ---------------------------------------------------------------------------------------------------------------
# Sharding

UnitResharding: TypeAlias = int | Literal["always", "never"]
"""Whether a unit reshards after the forward pass, or the number of ranks to which it does."""
Resharding: TypeAlias = UnitResharding | Literal["default", "auto"] | list[UnitResharding]
"""Values of `fsdp.reshard_after_forward`."""


@dataclass(frozen=True)
class MeshSection:
    """The device mesh: `replicate` x `shard` (HSDP), or only `shard` if replicate is 1."""

    replicate: int = declare(1, "number of replicas of the sharded model; -1: all remaining ranks")
    shard: int | Literal["node"] = declare(
        -1,
        "ranks that share one replica; -1: all remaining ranks; node: the ranks of one node",
    )
    context: int | Literal["auto"] = declare(
        1,
        "context parallelism: number of consecutive ranks on the shard axis that split each sequence; auto: "
        "let the planner choose",
        at_least=1,
    )
    context_method: Literal["auto", "gather", "heads"] = declare(
        "auto",
        "how slices attend to the full sequence: gather (each rank gathers keys and values), heads (ranks "
        "exchange slices for heads), or auto (heads if they divide evenly within one node, else gather)",
    )
    tensor: int | Literal["auto"] = declare(
        1,
        "tensor parallelism: number of consecutive ranks on the shard axis that share each layer's matrices; auto: let "
        "the planner choose",
        at_least=1,
    )
    expert: int | Literal["auto"] = declare(
        1,
        "expert parallelism: number of consecutive ranks on the shard axis among which the experts of each layer are "
        "divided; auto: let the planner choose",
        at_least=1,
    )
    expert_method: Literal["auto", "exchange", "gather"] = declare(
        "auto",
        "how tokens reach their experts: exchange (tokens are sent to their experts' ranks), gather (each rank "
        "gathers all tokens of its group), or auto (gather if blocks are compiled, or if the group is within one node "
        "and no larger than the number of experts per token; else exchange)",
    )


@dataclass(frozen=True)
class FsdpSection:
    """Sharding with torch.distributed.fsdp.fully_shard; not used for one shard with one dtype and no CPU offload."""

    wrap: str = declare(
        "block",
        "FSDP units: block (those that the model spec lists), size:<parameters>, or package.module:function",
        pattern=r"block|size:0*[1-9][\d_]*|(?!size:)[\w.]+:\w+",
        form="block, size:<parameters>, or package.module:function",
        example="block",
    )
    reshard_after_forward: Resharding = declare(
        "default",
        "default (units reshard, except the root and a final head), always, never, a number of ranks to "
        "reshard to, a list with always, never or a number for each unit in forward order, or auto (let the "
        "planner choose)",
        at_least=1,
        aliases={"true": "always", "false": "never"},
    )
    param_dtype: Literal["float32", "bfloat16", "auto"] = declare(
        "float32",
        "dtype of unsharded parameters and compute; auto: bfloat16 on a GPU, else float32",
        aliases=DTYPE_ALIASES,
    )
    reduce_dtype: Literal["float32", "bfloat16"] = declare(
        "float32", "dtype in which gradients are reduced", aliases=DTYPE_ALIASES
    )
    output_dtype: Literal["float32", "bfloat16"] | None = declare(
        None, "dtype of the model's outputs; null: as computed", aliases=DTYPE_ALIASES
    )
    accumulate: Literal["unsharded", "sharded"] = declare(
        "unsharded",
        "gradient accumulation: unsharded (reduce once per step) or sharded (reduce after each micro-batch, "
        "which saves the memory of a full set of gradients)",
    )
    reshard_after_backward: bool = declare(
        True,
        "free gathered parameters after each micro-batch's backward pass; false: only after the last one of the step",
    )
    cpu_offload: bool = declare(False, "keep parameters, gradients and optimizer state in host memory")
    prefetch_forward: int = declare(
        0, "units to gather ahead in the forward pass; 0: FSDP's default overlap", at_least=0
    )
    separate_reduce: bool = declare(
        False,
        "reduce gradients on a separate communicator, concurrently with the gathers of the backward pass; "
        "needs torch 2.13",
    )
    prefetch_backward: int = declare(
        0, "units to gather ahead in the backward pass; 0: FSDP's default overlap (one)", at_least=0
    )

    @property
    def reshard_sizes(self) -> list[int]:
        """The numbers of ranks in `reshard_after_forward`; empty if it has only words."""
        setting = self.reshard_after_forward
        entries = setting if isinstance(setting, list) else [setting]
        return [entry for entry in entries if isinstance(entry, int)]


# ---------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class DataSection:
    """The training data."""

    source: Literal["auto", "stdlib", "synthetic", "tokens", "chat"] = declare(
        AUTO,
        "stdlib: the source code of Python's standard library; synthetic: generated data; tokens: the files in "
        "data.path; chat: conversations in JSONL or parquet files; auto: tokens if a path is given, else stdlib",
    )
    path: str | dict[str, str] | None = declare(
        None,
        "with source=tokens: a file, folder, glob or manifest of token shards, or of text (.txt, "
        ".md, code, .jsonl, .json, .csv, .parquet, .gz, .zst), tokenized on first use; or a URL (https, s3, ...); with "
        "source=chat: a file, folder or glob; either may be hf://datasets/org/name, a data set on the Hugging Face "
        "Hub; {name: path, ...} mixes several sources",
        example="corpus/*.jsonl",
    )
    eval_path: str | dict[str, str] | None = declare(
        None, "evaluation data, in the same forms as data.path; {name: path, ...} for several sources"
    )
    text_key: str = declare("text", "JSONL key or parquet column that holds the text")
    bad: str = declare(
        "error",
        "what to do with unreadable documents: error, skip (leave out and count), or the largest fraction of documents "
        "that may be left out",
    )
    weights: dict[str, float] | None = declare(
        None,
        "sampling weights of the sources in data.path, for example {web: 0.7, code: 0.3}; null: proportional to size",
        on_resume="free",
    )
    phases: tuple[dict[str, Any], ...] = declare(
        (),
        "changes to data.weights during training, for example [{from: 80%, weights: {code: 1}}]; from: the first "
        "step with these weights, tokens:<n>, or a percentage of the run",
        on_resume="free",
    )
    holdout: float | None = declare(
        None,
        "without eval_path: fraction held out for evaluation (text documents and conversations chosen by a hash of "
        "their content, or the last samples of token shards); null: 0.01 if eval.every is set, else 0",
        at_least=0,
        below=1,
    )
    max_epochs: float | None = declare(
        None, "maximum passes over any source; a run that needs more is refused; null: no limit", above=0
    )
    seq_len: int = declare(256, "tokens per sequence", at_least=1, at_most=MAX_SIZE)
    tokenizer: str = declare(
        "bytes",
        "bytes; a Hugging Face tokenizer.json or its folder; or model: the tokenizer in model.path or train.init_from, "
        "which is also the default if the initial weights come with one",
    )
    engine: Literal["tokenizers", "gigatoken"] = declare(
        "tokenizers",
        "library that tokenizes text with a tokenizer.json; gigatoken is several times as fast, but does not know all "
        "kinds of tokenizers",
    )
    bos: bool | None = declare(
        None,
        "for text: whether to start each document with the beginning-of-text token; null: as the tokenizer does",
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "text"] = declare(
        "auto",
        "format of the records; auto: detect it from their keys; text: only with labels",
        needs="data.source=chat",
    )
    columns: dict[str, str] | None = declare(
        None,
        "maps a format's keys to the names in your files, for example {messages: dialog}; null: the same names",
        needs="data.source=chat",
        example={"messages": "dialog"},
    )
    chat_template: str = declare(
        "model", "model (the tokenizer's own template), chatml, or a Jinja file", needs="data.source=chat"
    )
    train_on: Literal["assistant", "last", "all", "completion", "end"] = declare(
        "assistant",
        "target tokens: assistant (all assistant turns), last (the last assistant turn), all "
        "(every token), or completion (the assistant turns after the last user message); end: the last position, which "
        "a reward model or classifier scores; set by train.objective",
        needs="data.source=chat",
    )
    special_tokens: tuple[str, ...] = declare(
        (),
        "special tokens that are read as such where a message or completion spells them out; all "
        "others are read as text",
        needs="data.source=chat",
    )
    too_long: Literal["auto", "drop", "truncate", "error"] = declare(
        "auto",
        "how to treat conversations longer than a sequence; auto: drop them, but refuse to start if "
        "most would be dropped",
        needs="data.source=chat",
    )
    trim_rows: bool = declare(
        False,
        "shorten sequences to the longest conversation, rounded up to a multiple of 64 tokens",
        needs="data.source=chat",
    )
    documents: Literal["joined", "masked", "apart"] = declare(
        "joined",
        "how documents share a sequence: joined (attention crosses documents), masked (documents cannot attend to "
        "each other; positions restart at 0), apart (one per sequence; the rest is ignored); for chats, joined "
        "means masked",
    )
    fit: Literal["cut", "best"] = declare(
        "cut",
        "how sequences are filled: cut (documents are cut at the end of a sequence), or best (best-fit packing: "
        "only documents longer than a sequence are cut)",
    )
    num_workers: int = declare(
        0,
        "data loading processes per rank; token shards need none, since a thread reads them",
        at_least=0,
        at_most=256,
        on_resume="free",
    )
    seed: int = declare(0, "seed of the sample order", at_least=0)
    cache_dir: str | None = declare(
        None, "folder for tokenized text and downloaded shards; null: the user's cache folder", on_resume="free"
    )

    labels: Literal["none", "read", "mismatched"] = declare(
        "none",
        "whether each chat record has a label; mismatched: also pair each prompt with the response to another prompt",
        is_computed=True,
    )

    def as_synthetic(self) -> DataSection:
        """Return the section with synthetic data of the same shape in place of files."""
        return DataSection(source="synthetic", seq_len=self.seq_len, num_workers=self.num_workers)

    @property
    def fills_rows(self) -> bool:
        """Whether sequences are cut from one token stream, in which every token except the first is a target."""
        return self.documents == "joined" and self.fit == "cut"


# ---------------------------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True)
class MuonSection:
    """Muon, for `optim.name=muon` and for groups with `optimizer: muon`."""

    variant: Literal["muon", "normuon"] = declare(
        "muon", "normuon: also divides each row of an update by the root of its running mean square", on_resume="fixed"
    )
    lr: float | None = declare(
        None, "peak learning rate of the matrices; null: optim.lr, as for the parameters that AdamW updates", at_least=0
    )
    scale: Literal["match_rms_adamw", "spectral", "jordan"] = declare(
        "match_rms_adamw",
        "how updates scale with a matrix's shape; match_rms_adamw: match the RMS of AdamW's updates; spectral: make "
        "the best learning rate independent of width",
    )
    dtype: Literal["bfloat16", "float32"] = declare(
        "bfloat16",
        "dtype of the iterations and of messages between ranks; float32: losses agree within 1e-6 on any mesh",
        aliases=DTYPE_ALIASES,
    )
    bucket_mib: float = declare(64.0, "MiB that a rank receives for one bucket of matrices", above=0)


@dataclass(frozen=True)
class OptimSection:
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = declare(
        "adamw",
        "muon: Muon for hidden matrices and stacked experts, AdamW for the rest (see optim.muon)",
        on_resume="fixed",
    )
    lr: float | Literal["auto"] = declare(
        3e-4,
        "peak learning rate; auto, for fine-tuning: 5e-5 x (2000 / width) ** 0.78, ten times that for adapters",
        at_least=0,
    )
    betas: tuple[float, float] = declare((0.9, 0.95), "decay rates of AdamW's two moments", at_least=0, below=1)
    eps: float = declare(1e-8, "AdamW's epsilon", above=0)
    momentum: float = declare(0.95, "momentum of sgd and muon", at_least=0, below=1)
    weight_decay: float = declare(0.1, "decoupled weight decay", at_least=0)
    decay_all: bool = declare(False, "apply weight decay to norms, biases and embeddings too")
    state_dtype: Literal["float32", "bfloat16", "int8"] = declare(
        "float32",
        "dtype of AdamW's two moments; int8: one byte per number, with one scale for every 256 numbers of a row",
        aliases={**DTYPE_ALIASES, **dict.fromkeys(("8bit", "uint8", "torch.int8"), "int8")},
        on_resume="never",
    )
    rounding: Literal["stochastic", "nearest"] = declare(
        "stochastic", "how AdamW rounds bfloat16 weights and moments; nearest loses small updates"
    )
    max_grad_norm: float | None = declare(1.0, "clip gradients to this global norm; null: no clipping", above=0)
    muon: MuonSection = field(default_factory=MuonSection)
    groups: tuple[dict[str, Any], ...] = declare(
        (),
        'settings by parameter name: [{match: "*embed*", lr: 0.3}, ...]; lr and lr_decay (by layer) multiply the '
        "learning rate; weight_decay and optimizer replace the general settings; the last match wins",
        on_resume="fixed",
    )
    base_model: dict[str, int] | None = declare(
        None,
        "widths of the smaller model for which lr and the initial weights were chosen: {dim: 256, num_heads: 4, ...}; "
        "both are then scaled to this model's widths (muP); null: no scaling",
        on_resume="fixed",
    )

    @property
    def peak_lr(self) -> float:
        """The learning rate as a number; `lr` must be resolved already."""
        return float(self.lr)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning-rate schedule: a linear warmup, then the shape that `name` selects."""

    name: Literal["cosine", "linear", "wsd", "constant", "range"] = declare(
        "cosine", "shape after warmup; range: a learning-rate range test (see lr_range)"
    )
    lr_range: tuple[float, float] = declare(
        (1e-7, 1.0), "for name=range: learning rates of the first and last step", above=0
    )
    warmup_steps: int = declare(0, "steps of linear warmup", at_least=0, example=100)
    warmup_ratio: float = declare(
        0.0,
        "linear warmup as a fraction of the run, used if it is longer than warmup_steps",
        at_least=0,
        below=1,
        example=0.03,
    )
    min_lr_ratio: float = declare(
        0.1,
        "learning rate of the last step as a fraction of the peak; 0: the rate reaches zero one step after the last, "
        "so that every step trains",
        at_least=0,
        at_most=1,
    )
    decay_ratio: float = declare(
        0.2, "for wsd: fraction of the run, at its end, over which the rate decays", at_least=0, at_most=1
    )

    def warmup(self, num_steps: int) -> int:
        """Return the number of warmup steps in a run of `num_steps` steps."""
        return max(self.warmup_steps, round(self.warmup_ratio * num_steps))


@dataclass(frozen=True)
class TrainSection:
    """The training loop."""

    steps: int = declare(1000, "optimizer steps", at_least=0)
    epochs: float | None = declare(
        None, "passes over the data; sets the number of steps; null: use train.steps", above=0
    )
    global_batch_size: int = declare(
        8, "sequences per step, over all ranks", at_least=1, at_most=MAX_SIZE, on_resume="fixed"
    )
    micro_batch_size: int | Literal["auto"] = declare(
        1,
        "sequences per forward pass on one rank; auto: let the planner choose",
        at_least=1,
        at_most=MAX_SIZE,
    )
    activation_checkpoint: int | str = declare(
        "none",
        "none, full, selective (store matmuls and attention), budget:<fraction> (of these, store the most "
        "expensive to recompute, up to this fraction of a block's activations), n: every n-th block in full, or "
        "auto",
        aliases={"true": "full", "false": "none"},
        form="none, full, selective, auto, budget:<fraction>, or a whole number",
    )
    offload_activations: float | Literal["none", "auto"] = declare(
        "none",
        "fraction of the blocks, spread evenly, whose activations are kept in host memory until the backward pass; "
        "none, or auto: let the planner choose between this and recomputation",
        at_least=0,
        at_most=1,
    )
    compile: bool | Literal["auto"] = declare(
        AUTO,
        "torch.compile each block; auto: on a GPU with a working compiler, not on a CPU",
    )
    float8: Literal["none", "tensorwise", "rowwise"] = declare(
        "none",
        "run the linear layers of the blocks in float8, with one scale per tensor or, finer, per row; needs "
        "torchao, and is fast only with train.compile",
    )
    weights_dtype: Literal["float32", "bfloat16"] = declare(
        "float32",
        "dtype of the sharded weights and gradients: float32 (master weights), or bfloat16 for half the memory "
        "(see optim.rounding)",
        aliases=DTYPE_ALIASES,
        on_resume="fixed",
    )
    init_from: str | None = declare(
        None,
        "initial weights, with a fresh optimizer: a checkpoint, a run folder, a folder of safetensors, or a file",
    )
    objective: str = declare(
        "tokens",
        "training objective; tokens: predict the next token; dpo, ipo, kto, simpo, orpo: preferences; reward: a "
        "reward model; classify: text classification; distill: imitate a teacher; module:class: your own",
        form="an objective's name, or module:class",
        on_resume="fixed",
    )
    freeze: tuple[str, ...] = declare(
        (),
        "parameters that are not trained: names of parameters or modules, or patterns such as layers.0.*",
        on_resume="fixed",
    )
    ema: float = declare(
        0.0,
        "decay of an exponential moving average of the weights, for example 0.999, kept in float32; 0: none",
        at_least=0,
        below=1,
        example=0.999,
    )
    max_skipped_updates: int = declare(10, "consecutive non-finite steps after which the run fails", at_least=1)


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters: the model is frozen, and low-rank matrices added to its linear layers are trained."""

    rank: int = declare(0, "rank of the adapters; 0: no adapters", at_least=0, at_most=2**16, example=16)
    alpha: float = declare(16.0, "adapter outputs are scaled by alpha / rank", above=0, needs="lora.rank")
    dropout: float = declare(0.0, "dropout on adapter inputs", at_least=0, below=1, needs="lora.rank")
    targets: str | list[str] = declare(
        "all-linear",
        "layers that get an adapter: all-linear (every linear layer of the blocks; routers and stacked experts get "
        "none), or a list of names or name endings of modules and stacked matrices: [q_proj,gate_up_proj,down_proj]",
        needs="lora.rank",
    )
    base_dtype: Literal["float32", "bfloat16", "nf4", "fp8"] | None = declare(
        None,
        "dtype of the frozen weights; null: bfloat16 if they are stored as bfloat16, else train.weights_dtype; nf4 or "
        "fp8: 4.5 or 8.5 bits per weight for linear layers and experts of the blocks, fsdp.param_dtype for all others",
        aliases=DTYPE_ALIASES,
        needs="lora.rank",
    )

    @property
    def packs(self) -> bool:
        """Whether frozen weights are quantized to 4 or 8 bits."""
        return self.rank > 0 and self.base_dtype in ("nf4", "fp8")


@dataclass(frozen=True)
class EvalSection:
    """Evaluation on held-out data."""

    every: int = declare(0, "steps between evaluations; the run also ends with one; 0: never", at_least=0, example=100)
    steps: int = declare(0, "batches per evaluation, each the size of a global batch; 0: all held-out data", at_least=0)
    metric: str = declare(
        "loss",
        "metric that selects the best evaluation: loss, loss_<source> for one source, or a metric of train.objective; "
        "lower is better, except for metrics such as accuracy",
    )
    ema: bool = declare(True, "with train.ema: evaluate the averaged weights; false: the trained weights")
    patience: int = declare(
        0,
        "consecutive evaluations without a new best after which the run finishes; 0: never stop early",
        at_least=0,
        needs="eval.every",
    )

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after step `step`."""
        return self.every > 0 and step % self.every == 0


# ---------------------------------------------------------------------------------------------------------------
# The tree


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run.

    `model` is an instance of the model spec's dataclass with an added `name` field; `objective` is an instance of the
    class that `train.objective` names.  The metadata `on_resume` of a section applies to all of its keys that do not
    declare it themselves (see `declare`); without it, they are free to change.
    """

    run: RunSection = field(default_factory=RunSection)
    model: Any = field(default=None, metadata={"on_resume": "fixed"})
    mesh: MeshSection = field(default_factory=MeshSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    data: DataSection = field(default_factory=DataSection, metadata={"on_resume": "fixed"})
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    lora: LoraSection = field(default_factory=LoraSection, metadata={"on_resume": "fixed"})
    objective: Any = field(default_factory=Tokens, metadata={"on_resume": "fixed"})
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection, metadata={"on_resume": "ignored"})
    log: LogSection = field(default_factory=LogSection, metadata={"on_resume": "ignored"})

    @property
    def spec(self) -> ModelSpec:
        return find_model(self.model.name)

    def trainer_class(self, default: type[TrainerType]) -> type[TrainerType]:
        """Return the Trainer class of the objective, else of the model spec, else `default`."""
        if self.objective.trainer is not None:
            return cast("type[TrainerType]", import_object(self.objective.trainer, "train.objective"))
        return self.spec.trainer_class(default)

    @property
    def rows_per_sample(self) -> int:
        """Sequences per sample, for example two for a preference pair."""
        return int(self.objective.rows_per_sample)

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher `eval.metric` is better, as for accuracy."""
        return self.objective.better.get(self.eval.metric) == "higher"

    @property
    def step_tokens(self) -> int:
        """Tokens per step over all ranks, including those that are not targets."""
        return self.train.global_batch_size * self.rows_per_sample * self.data.seq_len

    @property
    def context(self) -> int:
        """Number of ranks that split each sequence; `mesh.context` must be resolved already."""
        return int(self.mesh.context)

    @property
    def tensor(self) -> int:
        """Number of ranks that share each layer's matrices; `mesh.tensor` must be resolved already."""
        return int(self.mesh.tensor)

    @property
    def ranks_per_sample(self) -> int:
        """Number of consecutive ranks that read the same samples, and split the tokens of each."""
        return self.context * self.tensor

    @property
    def expert(self) -> int:
        """Number of ranks among which the experts are divided; `mesh.expert` must be resolved already."""
        return int(self.mesh.expert)

    def num_groups(self, num_ranks: int) -> int:
        """Return the number of data-parallel groups, each of which has `ranks_per_sample` ranks."""
        return num_ranks // self.ranks_per_sample

    def num_micro_batches(self, num_ranks: int) -> int:
        """Return the number of micro-batches per step on each of `num_ranks` ranks."""
        return self.train.global_batch_size // (self.num_groups(num_ranks) * int(self.train.micro_batch_size))

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference is a second model in memory.  With adapters, it is the trained model without them."""
        return "reference" in self.objective.needs and not self.lora.rank

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir).absolute()

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the model, or None if its configuration has no such field."""
        return getattr(self.model, "vocab_size", None)

    @property
    def model_path(self) -> str | None:
        """The Hugging Face folder in `model.path`, or None if that is empty or the model has no such field."""
        return getattr(self.model, "path", None) or None

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain dictionaries, lists and scalars, by section."""
        plain: dict[str, Any] = plain_lists(dataclasses.asdict(self))
        plain["model"] = {"name": self.model.name, **plain["model"]}
        for section, values in plain.items():
            for item in dataclasses.fields(getattr(self, section)):
                if item.metadata.get("is_computed"):
                    del values[item.name]
        for key in MODEL_KEYS:
            section, _, name = key.partition(".")
            if isinstance(path := plain[section].get(name), str):  # a name is valid on any machine
                plain[section][name] = name_of_source(path)
        if self.train.epochs is not None:  # the number of steps follows from the epochs
            del plain["train"]["steps"]
        return plain

    def to_yaml(self, origins: Mapping[str, str] | None = None) -> str:
        """Return the configuration as YAML: a valid recipe file.

        origins: where each value came from, by key, to add as comments.
        """
        return _yaml_of(escape_references(self.to_dict()), origins or {})

    def stored_yaml(self) -> str:
        """Return the YAML that a run stores.

        It has no `run.dir`, and a `checkpoint.dir` inside the run's folder refers to `run.dir`, so that a run folder
        can be moved or copied.  A `checkpoint.dir` elsewhere is an absolute path.
        """
        plain = escape_references(self.to_dict())
        del plain["run"]["dir"]
        if self.checkpoint.dir is not None and "://" not in self.checkpoint.dir:
            folder = Path(self.checkpoint.dir).absolute()
            is_inside = folder.is_relative_to(self.run_dir)
            plain["checkpoint"]["dir"] = (
                f"{RUN_DIR_REFERENCE}/{folder.relative_to(self.run_dir)}" if is_inside else str(folder)
            )
        return _yaml_of(plain, {})


RUN_DIR_REFERENCE = "${run.dir}"
"""How a stored `checkpoint.dir` inside the run's folder begins."""


def escape_references(value: Any) -> Any:
    """Return a plain value or tree with each `${` in its text escaped, so that OmegaConf reads the same text back."""
    if isinstance(value, dict):
        return {name: escape_references(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape_references(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _yaml_of(sections: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    lines: list[str] = []

    def add(prefix: str, values: Mapping[str, Any], indent: str) -> None:
        for name, value in values.items():
            key = f"{prefix}.{name}"
            if key in SUBSECTIONS:
                lines.append(f"{indent}{name}:")
                add(key, value, indent + "  ")
                continue
            text = yaml.dump({name: value}, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=math.inf)
            value_lines = text.splitlines()
            if key in origins:
                comment = f"# {' '.join(printable(origins[key]).split())}"
                if len(value_lines) == 1:
                    value_lines[0] += f"  {comment}"
                else:
                    value_lines.insert(0, comment)
            lines.extend(f"{indent}{line}" for line in value_lines)

    for section, values in sections.items():
        lines.append(f"{section}:" if values else f"{section}: {{}}")
        add(section, values, "  ")
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the library has no types
    """Quotes text that OmegaConf would read as a number where YAML 1.1 does not, such as 1e3.

    Line breaks besides the newline are escaped, because YAML would read them as spaces.
    """

    def represent_text(self, text: str) -> yaml.ScalarNode:
        if any(line_break in text for line_break in ("\x85", "\u2028", "\u2029")):
            return self.represent_scalar("tag:yaml.org,2002:str", text, style='"')
        try:
            float(text)
        except ValueError:
            return self.represent_str(text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _Dumper.represent_text)


def name_of_source(path: str) -> str:
    """Return the name of the model from which the files at `path` were fetched or converted.

    This is a name on the Hugging Face Hub, pinned to a commit, or the path of a .gguf file.  Any other path is returned
    unchanged.
    """
    source = gguf_model.original_file(path) or path
    return hub.pinned_name(source) or source


def plain_lists(tree: Any) -> Any:
    """Return the tree with tuples converted to lists, the only sequence type of YAML."""
    if isinstance(tree, dict):
        return {key: plain_lists(value) for key, value in tree.items()}
    return [plain_lists(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


SUBSECTIONS = frozenset(
    f"{section.name}.{item.name}"
    for section in dataclasses.fields(RunConfig)
    if section.default_factory is not dataclasses.MISSING
    for item in dataclasses.fields(section.default_factory())
    if dataclasses.is_dataclass(item.default_factory)
)
"""The sections within sections, such as optim.muon."""
