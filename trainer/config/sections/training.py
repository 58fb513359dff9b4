"""Sections of the step: optimizer, schedule, loop, adapters, preferences, evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections.limits import AUTO, DTYPES, MAX_SIZE, NUMBER_OR
from trainer.recipe import declare


@dataclass(frozen=True)
class OptimSection:
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = declare("adamw", "muon: torch's, for matrices; AdamW for the rest")
    lr: float = declare(3e-4, "peak learning rate", at_least=0)
    lr_by_width: bool = declare(
        False,
        "lr is for tuning a model 2000 wide: for another it is multiplied by (2000 / width) ** 0.78, and for adapters "
        "by 10; optim.lr on the command line is taken as it stands",
    )
    betas: tuple[float, float] = declare((0.9, 0.95), "decay rates of AdamW's two averages", at_least=0, below=1)
    eps: float = declare(1e-8, "AdamW's epsilon", above=0)
    momentum: float = declare(0.95, "momentum of sgd and muon", at_least=0, below=1)
    weight_decay: float = declare(0.1, "decoupled weight decay", at_least=0)
    decay_all: bool = declare(False, "decay norms, biases and embeddings too")
    state_dtype: Literal["float32", "bfloat16"] = declare("float32", "dtype of AdamW's two averages", aliases=DTYPES)
    rounding: Literal["stochastic", "nearest"] = declare(
        "stochastic", "how AdamW rounds bfloat16 weights and averages; nearest loses small steps"
    )
    max_grad_norm: float | None = declare(1.0, "gradients are scaled down to this global norm; null: never", above=0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run: a linear warmup, then the named shape."""

    name: Literal["cosine", "linear", "wsd", "constant", "range"] = declare(
        "cosine", "shape after warmup; range: a learning-rate range test, 100 steps in a run of its own"
    )
    lr_range: tuple[float, float] = declare(
        (1e-7, 1.0), "name=range: the learning rate of the first step and of the last", above=0
    )
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
    small_model_steps: int = declare(
        0,
        "least number of steps that epochs come to for a model less than 512 wide, which learns little in few; "
        "train.epochs on the command line is taken as it stands",
        at_least=0,
    )
    global_batch_size: int = declare(8, "sequences of one step, over all ranks", at_least=1, at_most=MAX_SIZE)
    micro_batch_size: int | str = declare(
        1,
        "sequences of one forward on one rank; auto: the planner's",
        at_least=1,
        at_most=MAX_SIZE,
        form=NUMBER_OR + AUTO,
    )
    activation_checkpoint: int | str = declare(
        "none",
        "none, full, selective (keeps matmuls and attention), budget:<share> (keeps of these what costs most, up to "
        "this share of a block's activations), n: every n-th block in full, or auto",
        aliases={"true": "full", "false": "none"},
        form="none, full, selective, auto, budget:<share>, or a whole number",
    )
    compile: bool | str = declare(
        AUTO,
        "torch.compile each block; auto: on a GPU where there is what kernels are made with, and not on a CPU",
        form="true, false or auto",
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
        aliases=DTYPES,
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
    ema: float = declare(
        0.0,
        "decay of an exponential moving average of the weights, as 0.999, kept in float32 beside them; 0: none",
        at_least=0,
        below=1,
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
        aliases=DTYPES,
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
    metric: str = declare("loss", "what tells the best evaluation: the lowest loss, or loss_<source> of one source")
    ema: bool = declare(True, "with train.ema: evaluate the averaged weights; false: those that are trained")
    patience: int = declare(
        0, "evaluations in a row without a new best, after which the run has finished; 0: any number", at_least=0
    )

    def due(self, step: int) -> bool:
        """Return whether to evaluate after step `step`."""
        return self.every > 0 and step % self.every == 0
