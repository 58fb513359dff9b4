"""Sections of a run, its logging and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections.limits import AUTO, NUMBER_OR, WEEK_S
from trainer.recipe import declare


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
    on_end: str | None = declare(
        None,
        "shell command that rank 0 runs once, when the run has ended (30 s at most), with RUN_DIR, STATE (finished, "
        "stopped or failed), EXIT_CODE and STEP in its environment; null: none",
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
    prompts: tuple[str, ...] = declare(
        (), 'texts that the model continues at each evaluation, as ["Once upon a time"]; with chats, messages to answer'
    )
    prompt_tokens: int = declare(64, "tokens that it writes at most after each of them", at_least=1)
    norms_every: int = declare(0, "steps between lines of gradient and parameter norms by layer; 0: none", at_least=0)
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
class CheckpointSection:
    """Saving and resuming."""

    every: int | str = declare(
        0,
        "steps between checkpoints; 0: only at the end; auto: as often as it pays (node_mtbf_h)",
        at_least=0,
        form=NUMBER_OR + AUTO,
    )
    node_mtbf_h: float = declare(
        6000.0,
        "mean hours until a node fails, for every=auto: what the run has seen itself counts beside it",
        at_least=1e-4,
        at_most=1e9,
    )
    mode: Literal["async", "sync"] = declare(
        "async", "async: training waits for a copy in memory, which is written meanwhile; sync: until all is on disk"
    )
    dir: str | None = declare(
        None, "where checkpoints lie: a folder, or a URL (s3://...) of this run alone; null: run.dir"
    )
    keep_last: int = declare(2, "newest checkpoints that are kept; 0: all", at_least=0)
    keep_every: int = declare(0, "checkpoints of every n-th step are kept for good; 0: none", at_least=0)
    keep_best: int = declare(
        0,
        "checkpoints with the lowest eval.metric that are kept, saved when they are evaluated; 0: none; RUN/best is "
        "the best one",
        at_least=0,
    )
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
