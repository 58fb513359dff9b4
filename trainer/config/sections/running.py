"""The `run`, `log` and `checkpoint` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.sections.limits import AUTO, NUMBER_OR, WEEK_S
from trainer.recipe import declare


@dataclass(frozen=True)
class RunSection:
    """Identity and environment of the run."""

    name: str = declare("", "name of the run; empty: the recipe's name")
    dir: str = declare("", "run folder; empty: runs/<name>")
    seed: int = declare(0, "seed of the initial weights and of all randomness in training", at_least=0)
    device: Literal["auto", "cpu", "cuda"] = declare(
        "auto",
        "training device; auto: cuda if there is a GPU",
        aliases=dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "cuda:0"), "cuda"),
    )
    deterministic: bool = declare(
        False,
        "bit-identical results on GPUs too: use slower kernels in place of those that sum in arbitrary order",
    )
    threads: int = declare(0, "CPU threads per rank; 0: divide this process's cores evenly", at_least=0, at_most=1024)
    timeout_s: float = declare(600.0, "timeout of a collective, in seconds", above=0, at_most=WEEK_S)
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
        True, "before the first step, check that all ranks agree on sharding, replicas, data and code"
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
    """Logging: to the console, files, TensorBoard and Weights & Biases."""

    every: int = declare(10, "steps between progress lines", at_least=1)
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
    sample_tokens: int = declare(0, "tokens of sample text generated at the end; 0: none", at_least=0)
    prompts: tuple[str, ...] = declare(
        (),
        'prompts that the model continues at each evaluation, for example ["Once upon a time"]; for chats, '
        "user messages that it answers",
    )
    prompt_tokens: int = declare(64, "maximum tokens generated for each prompt", at_least=1)
    norms_every: int = declare(0, "steps between logging gradient and parameter norms by layer; 0: never", at_least=0)
    profile_steps: tuple[int, int] | None = declare(
        None,
        "first and last step to profile, for example [10,13]; writes a trace for Perfetto to run.dir/profile; "
        "null: none",
    )
    profile_ranks: tuple[int, ...] = declare((0,), "ranks that write a profile; rank 0 always does")

    def due(self, step: int) -> bool:
        """Return whether to print a progress line for step `step`."""
        return step % self.every == 0

    def profiles(self, step: int) -> bool:
        """Return whether any rank profiles step `step`."""
        first, last = self.profile_steps or (0, -1)
        return first <= step <= last


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and resuming."""

    every: int | str = declare(
        0,
        "steps between checkpoints; 0: only at the end; auto: the interval that minimises lost time (see node_mtbf_h)",
        at_least=0,
        form=NUMBER_OR + AUTO,
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
        "number of checkpoints with the lowest eval.metric to keep, saved when evaluated; 0: none; RUN/best "
        "refers to the best one",
        at_least=0,
    )
    timeout_s: float = declare(
        3600.0,
        "seconds after which a save counts as stuck; the run then ends and names the rank",
        above=0,
        at_most=WEEK_S,
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
    )
    allow_changes: tuple[str, ...] = declare(
        (),
        "permitted differences from the checkpoint: keys, sections, or state.<name>",
    )
