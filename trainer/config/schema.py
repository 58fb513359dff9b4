"""The configuration as one typed, frozen tree: every key with its type, default and meaning."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from omegaconf import OmegaConf

from trainer.errors import masked
from trainer.recipe import Recipe, TrainerType, declare, find_recipe, resolve

WEEK_S = 7 * 24 * 3600.0
"""The longest time limit: what waits for ranks counts milliseconds in 32 bits, and three of these."""

MAX_SIZE = 2**31 - 1
"""The largest count of what becomes a size of a tensor."""

_DTYPES = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "torch.float32"), "float32"),
}
"""What dtypes are called elsewhere."""

OBJECTIVES = {"dpo": "trainer.recipes.dpo.trainer:PreferenceTrainer"}
"""The Trainer classes of what is trained for, where that is another than the default."""

AUTO = "auto"
"""The value of the keys that the planner settles, before anything is built."""


@dataclass(frozen=True)
class RunSection:
    """Identity and environment of the run."""

    name: str = declare("", "name of the run; empty: the recipe's name")
    dir: str = declare("", "folder of the run; empty: runs/<name>")
    seed: int = declare(0, "seed of the initial weights and of everything random in training", at_least=0)
    device: Literal["auto", "cpu", "cuda"] = declare(
        "auto",
        "where to train; auto: cuda where there is a GPU",
        aliases=dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "cuda:0"), "cuda"),
    )
    deterministic: bool = declare(
        False, "the same bits in every run on a GPU, too, where some kernels add in any order: slower ones are used"
    )
    threads: int = declare(
        0, "CPU threads of each rank; 0: an equal share of this process's cores", at_least=0, at_most=1024
    )
    timeout_s: float = declare(600.0, "seconds after which a collective counts as failed", above=0, at_most=WEEK_S)
    step_timeout_s: float = declare(
        0.0,
        "seconds without progress in a step: the run ends, naming the rank; 0: timeout_s / 2",
        at_least=0,
        at_most=WEEK_S,
    )
    first_step_timeout_s: float = declare(
        0.0,
        "the same for the first step, and a batch of an evaluation; 0: 3 x timeout_s",
        at_least=0,
        at_most=WEEK_S,
    )
    memory_gib: float | None = declare(
        None, "memory of a device, which the planner's auto may use; null: what it has", above=0
    )
    selfcheck: bool = declare(
        True, "before the first step, see on all ranks that sharding, replicas, data and code are as they should be"
    )
    deadline: str | None = declare(
        None, "when to be through with stopping, as 2026-01-31T18:00 (local) or with +01:00; null: the Slurm job's end"
    )

    @property
    def first_step_limit_s(self) -> float:
        return self.first_step_timeout_s or 3 * self.timeout_s

    @property
    def step_limit_s(self) -> float:
        return self.step_timeout_s or self.timeout_s / 2


@dataclass(frozen=True)
class MeshSection:
    """The device mesh: `replicate` x `shard` (HSDP), or only `shard` where replicate is 1."""

    replicate: int = declare(1, "number of replicas of the sharded model; -1: all remaining ranks")
    shard: int | str = declare(-1, "ranks that share one copy; -1: all remaining ranks; node: the ranks of one node")


@dataclass(frozen=True)
class FsdpSection:
    """Sharding of the model (torch.distributed.fsdp.fully_shard)."""

    wrap: str = declare("block", "units: block (the recipe's), size:<parameters>, or package.module:function")
    reshard_after_forward: int | str | list[int | str] = declare(
        "default",
        "default (units reshard, root does not), always, never, a number of ranks to reshard to, a list with one of "
        "always, never, a number for each unit in the order of the forward pass, or auto (the planner's choice)",
        aliases={"true": "always", "false": "never"},
    )
    param_dtype: Literal["float32", "bfloat16", "auto"] = declare(
        "float32",
        "dtype of unsharded parameters and of compute; auto: bfloat16 on a GPU, else float32",
        aliases=_DTYPES,
    )
    reduce_dtype: Literal["float32", "bfloat16"] = declare(
        "float32", "dtype in which gradients are reduced", aliases=_DTYPES
    )
    output_dtype: Literal["float32", "bfloat16"] | None = declare(
        None, "dtype of the outputs; null: as computed", aliases=_DTYPES
    )
    accumulate: Literal["unsharded", "sharded"] = declare(
        "unsharded",
        "gradients between micro-batches: unsharded are reduced once a step; sharded after each micro-batch, which "
        "takes no memory for a whole model's gradients",
    )
    reshard_after_backward: bool = declare(
        True, "free gathered parameters after each micro-batch's backward; false: keep them until the step's last"
    )
    cpu_offload: bool = declare(False, "keep parameters, gradients and optimizer state in host memory")
    prefetch_forward: int = declare(0, "units gathered ahead in forward; 0: FSDP's own overlap", at_least=0)
    prefetch_backward: int = declare(0, "units gathered ahead in backward; 0: FSDP's own overlap (one)", at_least=0)


@dataclass(frozen=True)
class DataSection:
    """The training data."""

    source: Literal["stdlib", "synthetic", "tokens", "chat"] = declare(
        "stdlib",
        "stdlib: this Python's own source text; synthetic: generated; tokens: what data.path names; chat: "
        "conversations in JSONL or parquet files",
    )
    path: str | dict[str, str] | None = declare(
        None,
        "source=tokens, which it implies: a file, folder, glob or manifest of token shards, or of text (.txt, .md, "
        "code, .jsonl, .parquet, .gz, .zst), which is tokenized on first use; source=chat: a file, folder or glob; or "
        "{name: path, ...} for several sources",
    )
    eval_path: str | dict[str, str] | None = declare(
        None, "source=tokens: the same, to evaluate on; {name: path, ...} for each source its own"
    )
    text_key: str = declare("text", "of JSONL and parquet: the key or column that holds the text")
    bad: str = declare(
        "error", "documents that cannot be read: error, skip (left out and counted), or the share that may be left out"
    )
    weights: dict[str, float] | None = declare(
        None, "shares of the sources of data.path, as {web: 0.7, code: 0.3}; null: by size"
    )
    phases: tuple[dict[str, Any], ...] = declare(
        (),
        "other weights later, as [{from: 80%, weights: {code: 1}}]; from: a step (the first that has them), "
        "tokens:<n>, or a share of the run",
    )
    holdout: float | None = declare(
        None,
        "without eval_path: share that is kept for evaluation: of text the documents, by a hash; of shards the last "
        "samples; with source=chat the conversations; null: 0.01 with eval.every, else 0",
        at_least=0,
        below=1,
    )
    max_epochs: float | None = declare(
        None, "a run that would go through a source more often is refused; null: any number of times", above=0
    )
    seq_len: int = declare(256, "tokens of one sequence", at_least=1, at_most=MAX_SIZE)
    tokenizer: str = declare(
        "bytes", "bytes; a Hugging Face tokenizer.json, or its folder; or model, that of model.path or train.init_from"
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference"] = declare(
        "auto", "source=chat: what a record is like; auto: as its keys say"
    )
    columns: dict[str, str] | None = declare(
        None, "source=chat: what the files call a format's keys, as {messages: dialog}; null: as the format does"
    )
    chat_template: str = declare("model", "source=chat: model, the template beside the tokenizer, or a file of Jinja")
    train_on: Literal["assistant", "last", "all", "completion"] = declare(
        "assistant",
        "source=chat: what counts as a target: all that the assistant writes, its last turn, every token, or what it "
        "writes after the user's last message",
    )
    too_long: Literal["drop", "truncate", "error"] = declare(
        "drop", "source=chat: what is done with a conversation that is longer than a sequence"
    )
    documents: Literal["joined", "masked", "apart"] = declare(
        "joined",
        "documents in a sequence: joined (it runs across them), masked (none sees another, each is counted from "
        "position 0), apart (one a sequence, the rest ignored); chats are masked in place of joined",
    )
    fit: Literal["cut", "best"] = declare(
        "cut", "documents where a sequence ends: cut, or best (best-fit packing: none is cut that is not longer)"
    )
    pack: bool = declare(True, "false: the same as documents=apart")
    num_workers: int = declare(
        0,
        "processes that prepare batches on each rank, where that is work; token shards are read by a thread",
        at_least=0,
        at_most=256,
    )
    seed: int = declare(0, "seed of the order of the samples", at_least=0)
    cache_dir: str | None = declare(None, "where tokenized text is kept; null: the user's cache folder")

    def generated(self) -> DataSection:
        """Return the section with generated data of the same shape in place of files."""
        return DataSection(source="synthetic", seq_len=self.seq_len, pack=self.pack, num_workers=self.num_workers)

    @property
    def arrangement(self) -> Literal["joined", "masked", "apart"]:
        """The treatment of documents, by either of the two keys."""
        return self.documents if self.pack else "apart"

    @property
    def fills_rows(self) -> bool:
        """True if sequences are cut from one stream, and every token but its first is a target."""
        return self.arrangement == "joined" and self.fit == "cut"


@dataclass(frozen=True)
class OptimSection:
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = declare("adamw", "muon: torch's, for matrices; AdamW for the rest")
    lr: float = declare(3e-4, "peak learning rate", at_least=0)
    betas: tuple[float, float] = declare((0.9, 0.95), "decay rates of AdamW's two averages", at_least=0, below=1)
    eps: float = declare(1e-8, "AdamW's epsilon", above=0)
    momentum: float = declare(0.95, "momentum of sgd and muon", at_least=0, below=1)
    weight_decay: float = declare(0.1, "decoupled weight decay", at_least=0)
    decay_all: bool = declare(False, "decay norms, biases and embeddings too")
    state_dtype: Literal["float32", "bfloat16"] = declare("float32", "dtype of AdamW's two averages", aliases=_DTYPES)
    rounding: Literal["stochastic", "nearest"] = declare(
        "stochastic", "how AdamW rounds bfloat16 weights and averages; nearest loses small steps"
    )
    max_grad_norm: float | None = declare(1.0, "gradients are scaled down to this global norm; null: never", above=0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run: a linear warmup, then the named shape."""

    name: Literal["cosine", "linear", "wsd", "constant"] = declare("cosine", "shape after warmup")
    warmup_steps: int = declare(0, "steps of linear warmup", at_least=0)
    warmup_ratio: float = declare(
        0.0, "share of the run that is linear warmup, where that is more steps than warmup_steps", at_least=0, below=1
    )
    min_lr_ratio: float = declare(0.1, "learning rate at the end, as a share of the peak", at_least=0, at_most=1)
    decay_ratio: float = declare(0.2, "wsd: share of the run that decays, at its end", at_least=0, at_most=1)

    def warmup(self, num_steps: int) -> int:
        """Return the steps of warmup in a run of `num_steps`."""
        return max(self.warmup_steps, round(self.warmup_ratio * num_steps))


@dataclass(frozen=True)
class TrainSection:
    """The training loop."""

    steps: int = declare(1000, "optimizer steps", at_least=0)
    epochs: float | None = declare(
        None, "passes over the data instead of steps, which it settles; null: steps", above=0
    )
    global_batch_size: int = declare(8, "sequences of one step, over all ranks", at_least=1, at_most=MAX_SIZE)
    micro_batch_size: int | str = declare(
        1, "sequences of one forward on one rank; auto: the planner's", at_least=1, at_most=MAX_SIZE
    )
    activation_checkpoint: int | str = declare(
        "none",
        "none, full, selective (keeps matmuls and attention), budget:<share> (keeps of these what costs most, up to "
        "this share of a block's activations), n: every n-th block in full, or auto",
    )
    compile: bool | str = declare(
        AUTO, "torch.compile each block; auto: on a GPU where there is what kernels are made with, and not on a CPU"
    )
    float8: Literal["none", "tensorwise", "rowwise"] = declare(
        "none",
        "matrix products of the blocks' linear layers in float8, scaled by the tensor or, finer, by the row; needs "
        "torchao and is fast with train.compile",
    )
    weights_dtype: Literal["float32", "bfloat16"] = declare(
        "float32",
        "dtype in which weights and their gradients are kept, sharded: float32 (master weights), or bfloat16, which "
        "takes half the memory (optim.rounding)",
        aliases=_DTYPES,
    )
    init_from: str | None = declare(
        None, "weights to start from, with a fresh optimizer: a checkpoint, a run.dir, a folder of safetensors, a file"
    )
    objective: Literal["tokens", "dpo"] = declare(
        "tokens",
        "tokens: the next token; dpo: of two answers the preferred one, beside a reference model (direct preference "
        "optimisation)",
    )
    freeze: tuple[str, ...] = declare(
        (), "parameters that are not trained: their names, those of modules, or patterns as layers.0.*"
    )
    max_skipped_updates: int = declare(10, "non-finite steps in a row after which the run fails", at_least=1)


@dataclass(frozen=True)
class LoraSection:
    """Adapters (LoRA): the model is frozen, and small matrices beside its linear layers are trained."""

    rank: int = declare(0, "rank of the adapters; 0: none", at_least=0, at_most=2**16)
    alpha: float = declare(16.0, "what an adapter adds is scaled by alpha / rank", above=0)
    dropout: float = declare(0.0, "dropout on what goes into an adapter", at_least=0, below=1)
    targets: str | list[str] = declare(
        "all-linear",
        "layers with an adapter: all-linear (every linear layer of the blocks), or a list of names of modules or the "
        "last parts of these",
    )
    base_dtype: Literal["float32", "bfloat16"] | None = declare(
        None,
        "dtype in which the frozen weights are kept; null: bfloat16 where they come so or train.weights_dtype says so",
        aliases=_DTYPES,
    )


@dataclass(frozen=True)
class DpoSection:
    """Direct preference optimisation, of train.objective=dpo."""

    beta: float = declare(0.1, "how dear it is to leave the reference: log-probabilities are scaled by it", above=0)


@dataclass(frozen=True)
class EvalSection:
    """Evaluation on held-out data."""

    every: int = declare(0, "steps between evaluations (one more at the end); 0: never", at_least=0)
    steps: int = declare(
        0, "batches of one evaluation, each the size of a global batch; 0: all that is held out", at_least=0
    )

    def due(self, step: int) -> bool:
        """Return whether to evaluate after step `step`."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and resuming."""

    every: int = declare(0, "steps between checkpoints; 0: only at the end", at_least=0)
    mode: Literal["async", "sync"] = declare(
        "async", "async: training waits for a copy in memory, which is written meanwhile; sync: until all is on disk"
    )
    dir: str | None = declare(
        None, "where checkpoints lie: a folder, or a URL (s3://...) of this run alone; null: run.dir"
    )
    keep_last: int = declare(2, "newest checkpoints that are kept; 0: all", at_least=0)
    keep_every: int = declare(0, "checkpoints of every n-th step are kept for good; 0: none", at_least=0)
    timeout_s: float = declare(
        3600.0, "seconds after which a save is stuck: the run ends, naming the rank", above=0, at_most=WEEK_S
    )
    when_busy: Literal["wait", "skip"] = declare("wait", "a save is due while one is in flight: wait for it, or skip")
    max_failures: int = declare(
        10, "failed saves in a row after which the run fails; each is tried again after a pause", at_least=1
    )
    verify: Literal["full", "sizes"] = declare("full", "what is checked before loading: all checksums, or sizes only")
    resume: str = declare("auto", "auto: the newest good checkpoint; none: start anew; or where one is, or a run")
    allow_changes: tuple[str, ...] = declare((), "what may differ from the checkpoint: keys, sections, state.<name>")

    def due(self, step: int) -> bool:
        """Return whether to save after step `step`."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class LogSection:
    """Logging: to the console, files, TensorBoard and Weights & Biases."""

    every: int = declare(10, "steps between lines", at_least=1)
    wandb: Literal["off", "offline", "online"] = declare(
        "off",
        "Weights & Biases",
        aliases={
            **dict.fromkeys(("true", "yes", "on", "1", "enabled"), "online"),
            **dict.fromkeys(("false", "no", "0", "disabled", "none"), "off"),
        },
    )
    wandb_project: str = declare("meshtrainer", "project in Weights & Biases")
    tensorboard: bool = declare(False, "write TensorBoard events to run.dir/tensorboard")
    sample_tokens: int = declare(0, "tokens of the sample that the model writes at the end; 0: none", at_least=0)
    profile_steps: tuple[int, int] | None = declare(
        None, "first and last step to profile, as [10,13]: a trace for Perfetto in run.dir/profile; null: none"
    )
    profile_ranks: tuple[int, ...] = declare((0,), "ranks that write a profile; rank 0 always does")

    def due(self, step: int) -> bool:
        """Return whether step `step` is written as a line."""
        return step % self.every == 0

    def profiles(self, step: int) -> bool:
        """Return whether step `step` is profiled, on whatever ranks."""
        first, last = self.profile_steps or (0, -1)
        return first <= step <= last


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run is told.  `model` is the recipe's own dataclass, with a `name` beside its fields."""

    run: RunSection = field(default_factory=RunSection)
    model: Any = None
    mesh: MeshSection = field(default_factory=MeshSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    lora: LoraSection = field(default_factory=LoraSection)
    dpo: DpoSection = field(default_factory=DpoSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.model.name)

    def trainer_class(self, default: type[TrainerType]) -> type[TrainerType]:
        """Return the Trainer class of the objective, or of the recipe, or `default`."""
        if self.train.objective in OBJECTIVES:
            return cast("type[TrainerType]", resolve(OBJECTIVES[self.train.objective], "train.objective"))
        return self.recipe.trainer_class(default)

    @property
    def rows_per_sample(self) -> int:
        """Sequences of one sample: of a pair, two."""
        return 2 if self.train.objective == "dpo" else 1

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, over all ranks, those that are no targets included."""
        return self.train.global_batch_size * self.rows_per_sample * self.data.seq_len

    @property
    def holds_reference(self) -> bool:
        """Whether a second, frozen model lies beside the one that is trained."""
        return self.train.objective == "dpo" and not self.lora.rank

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir).absolute()

    @property
    def vocab_size(self) -> int | None:
        """Size of the model's vocabulary, or None for a model whose configuration has no such field."""
        return getattr(self.model, "vocab_size", None)

    @property
    def model_path(self) -> str | None:
        """The Hugging Face folder that the model is from, or None for a model whose configuration has no such field."""
        return getattr(self.model, "path", None) or None

    def on_record(self) -> RunConfig:
        """Return it as a run writes it down: its folders mean the same from wherever it is read."""
        kept = self.checkpoint.dir
        if kept is not None and "://" not in kept:
            kept = str(Path(kept).absolute())
        run = dataclasses.replace(self.run, dir=str(self.run_dir))
        return dataclasses.replace(self, run=run, checkpoint=dataclasses.replace(self.checkpoint, dir=kept))

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain dictionaries, lists and scalars, to be kept: credentials in URLs are masked."""
        plain = OmegaConf.to_container(OmegaConf.create(masked(plain_lists(dataclasses.asdict(self)))))
        assert isinstance(plain, dict)
        if self.train.epochs is not None:  # which decides about the steps
            del plain["train"]["steps"]
        return {str(section): values for section, values in plain.items()}

    def to_yaml(self) -> str:
        """Return the tree as YAML: a valid recipe file, but for credentials in URLs, which are masked."""
        plain = self.to_dict()
        plain["model"] = {"name": self.model.name, **plain["model"]}
        return OmegaConf.to_yaml(OmegaConf.create(plain))


def plain_lists(tree: Any) -> Any:
    """Return the tree with lists for tuples: YAML has one kind of sequence."""
    if isinstance(tree, dict):
        return {key: plain_lists(value) for key, value in tree.items()}
    return [plain_lists(item) for item in tree] if isinstance(tree, (list, tuple)) else tree
