"""The `optim`, `schedule`, `train`, `lora`, `dpo` and `eval` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections.limits import AUTO, DTYPES, MAX_SIZE, NUMBER_OR
from trainer.recipe import declare


@dataclass(frozen=True)
class OptimSection:
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = declare(
        "adamw",
        "muon: torch's Muon for matrices, AdamW for the rest",
    )
    lr: float = declare(3e-4, "peak learning rate", at_least=0)
    lr_by_width: bool = declare(
        False,
        "lr is meant for fine-tuning a model of width 2000: scale it by (2000 / width) ** 0.78, and for adapters "
        "by another 10; an optim.lr on the command line is not scaled",
    )
    betas: tuple[float, float] = declare((0.9, 0.95), "decay rates of AdamW's two moments", at_least=0, below=1)
    eps: float = declare(1e-8, "AdamW's epsilon", above=0)
    momentum: float = declare(0.95, "momentum of sgd and muon", at_least=0, below=1)
    weight_decay: float = declare(0.1, "decoupled weight decay", at_least=0)
    decay_all: bool = declare(False, "apply weight decay to norms, biases and embeddings too")
    state_dtype: Literal["float32", "bfloat16"] = declare("float32", "dtype of AdamW's two moments", aliases=DTYPES)
    rounding: Literal["stochastic", "nearest"] = declare(
        "stochastic", "how AdamW rounds bfloat16 weights and moments; nearest loses small updates"
    )
    max_grad_norm: float | None = declare(1.0, "clip gradients to this global norm; null: no clipping", above=0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning-rate schedule: a linear warmup, then the shape that `name` selects."""

    name: Literal["cosine", "linear", "wsd", "constant", "range"] = declare(
        "cosine", "shape after warmup; range: a learning-rate range test, 100 steps in a separate run"
    )
    lr_range: tuple[float, float] = declare(
        (1e-7, 1.0), "for name=range: learning rates of the first and last step", above=0
    )
    warmup_steps: int = declare(0, "steps of linear warmup", at_least=0)
    warmup_ratio: float = declare(
        0.0, "linear warmup as a share of the run, used if it is longer than warmup_steps", at_least=0, below=1
    )
    min_lr_ratio: float = declare(
        0.1,
        "learning rate of the last step as a share of the peak; 0: the rate reaches zero one step after the last, so "
        "that every step trains",
        at_least=0,
        at_most=1,
    )
    decay_ratio: float = declare(
        0.2, "for wsd: share of the run, at its end, in which the rate decays", at_least=0, at_most=1
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
    small_model_steps: int = declare(
        0,
        "with train.epochs: minimum number of steps for a model narrower than 512, which needs more; ignored if "
        "train.epochs is on the command line",
        at_least=0,
    )
    global_batch_size: int = declare(8, "sequences per step, over all ranks", at_least=1, at_most=MAX_SIZE)
    micro_batch_size: int | str = declare(
        1,
        "sequences per forward pass on one rank; auto: let the planner choose",
        at_least=1,
        at_most=MAX_SIZE,
        form=NUMBER_OR + AUTO,
    )
    activation_checkpoint: int | str = declare(
        "none",
        "none, full, selective (store matmuls and attention), budget:<share> (of these, store the most "
        "expensive to recompute, up to this share of a block's activations), n: every n-th block in full, or "
        "auto",
        aliases={"true": "full", "false": "none"},
        form="none, full, selective, auto, budget:<share>, or a whole number",
    )
    compile: bool | str = declare(
        AUTO,
        "torch.compile each block; auto: on a GPU with a working compiler, not on a CPU",
        form="true, false or auto",
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
        aliases=DTYPES,
    )
    init_from: str | None = declare(
        None,
        "initial weights, with a fresh optimizer: a checkpoint, a run folder, a folder of safetensors, or a file",
    )
    objective: Literal["tokens", "dpo"] = declare(
        "tokens",
        "tokens: predict the next token; dpo: prefer one of two answers, relative to a reference model (direct "
        "preference optimisation)",
    )
    freeze: tuple[str, ...] = declare(
        (), "parameters that are not trained: names of parameters or modules, or patterns such as layers.0.*"
    )
    ema: float = declare(
        0.0,
        "decay of an exponential moving average of the weights, for example 0.999, kept in float32; 0: none",
        at_least=0,
        below=1,
    )
    max_skipped_updates: int = declare(10, "consecutive non-finite steps after which the run fails", at_least=1)


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters: the model is frozen, and low-rank matrices added to its linear layers are trained."""

    rank: int = declare(0, "rank of the adapters; 0: no adapters", at_least=0, at_most=2**16)
    alpha: float = declare(16.0, "adapter outputs are scaled by alpha / rank", above=0)
    dropout: float = declare(0.0, "dropout on adapter inputs", at_least=0, below=1)
    targets: str | list[str] = declare(
        "all-linear",
        "layers that get an adapter: all-linear (every linear layer of the blocks; routers and stacked experts get "
        "none), or a list of module names or name endings",
    )
    base_dtype: Literal["float32", "bfloat16"] | None = declare(
        None,
        "dtype of the frozen weights; null: bfloat16 if they are stored in it, else train.weights_dtype",
        aliases=DTYPES,
    )


@dataclass(frozen=True)
class DpoSection:
    """Direct preference optimisation (train.objective=dpo)."""

    beta: float = declare(
        0.1, "strength of the penalty for moving away from the reference model; scales the log-probabilities", above=0
    )


@dataclass(frozen=True)
class EvalSection:
    """Evaluation on held-out data."""

    every: int = declare(0, "steps between evaluations; the run also ends with one; 0: never", at_least=0)
    steps: int = declare(0, "batches per evaluation, each the size of a global batch; 0: all held-out data", at_least=0)
    metric: str = declare(
        "loss",
        "metric that selects the best evaluation: loss, or loss_<source> for one source; lowest is best",
    )
    ema: bool = declare(True, "with train.ema: evaluate the averaged weights; false: the trained weights")
    patience: int = declare(
        0, "consecutive evaluations without a new best after which the run finishes; 0: never stop early", at_least=0
    )

    def due(self, step: int) -> bool:
        """Return whether to evaluate after step `step`."""
        return self.every > 0 and step % self.every == 0
