"""A leaderboard of optimizers on small real tasks, by the number of steps that each needs to reach a given loss.

    python -m bench.optim                              # all optimizers on both tasks: about 40 minutes of CPU time
    python -m bench.optim --task dense --only adamw,muon,normuon
    python -m bench.optim --steps 600 --seeds 5        # longer runs and more seeds, for less noise

All optimizers train the same model on the same samples of the standard library's text, in the same order, at a constant
learning rate after a warmup.  No sample is seen twice, so the training loss is measured on new text.  First, the
learning rate of each optimizer is tuned with a separate seed.  For Muon this is `optim.muon.lr`; the parameters that it
leaves to AdamW use AdamW's best rate.  Then each optimizer trains with every seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.results import emit, show
from trainer.errors import nearest, run_command, setting_error

COMMON = [
    "data.source=stdlib",
    "data.seq_len=64",
    "train.global_batch_size=8",
    "train.micro_batch_size=8",
    "schedule.name=constant",
    "schedule.warmup_steps=10",
    "eval.every=0",
    "checkpoint.every=0",
    "log.sample_tokens=0",
    "log.every=1000000",
    "run.threads=1",
    "run.device=cpu",
]
TASKS = {
    "dense": ("llama_small", ["model.dim=64", "model.num_layers=2", "model.ffn_dim=172"]),
    "experts": (
        "qwen3_moe_small",
        ["model.dim=48", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=12"],
    ),
}
"""The recipe of each task, and overrides that make its model smaller."""
MUON = ["optim.name=muon"]
HEAD = 'optim.groups=[{match: "head.output.weight", optimizer: muon}]'
EXPERTS = 'optim.groups=[{match: "*.experts.*", optimizer: adamw}]'
OPTIMIZERS: dict[str, list[str]] = {
    "adamw": [],
    "adamw-int8": ["optim.state_dtype=int8"],
    "muon": MUON,
    "muon-float32": [*MUON, "optim.muon.dtype=float32"],
    "muon-head": [*MUON, HEAD],
    "muon-without-experts": [*MUON, EXPERTS],
    "normuon": [*MUON, "optim.muon.variant=normuon"],
}
"""Settings of each entry.  Muon trains the experts but not the output projection, unless the name says otherwise."""
BASELINE = "adamw"
TUNING_SEED = 100
RATES = (0.004, 0.008, 0.016)
"""Learning rates to try first."""
MAX_RATES = 12
WINDOW = 20
"""Steps over which the loss is averaged."""


@dataclass(frozen=True)
class Score:
    """The losses and the step time of an optimizer at its best rate, for every seed."""

    name: str
    rate: float
    losses: list[list[float]]
    """By seed and step, averaged over `WINDOW` steps."""
    step_s: float

    def final(self) -> float:
        return statistics.mean(losses[-1] for losses in self.losses)

    def steps_to(self, target: float) -> list[int | None]:
        """Return the first step at which each seed's loss is at most `target`; None if it never is."""
        first_steps = (next((i for i, loss in enumerate(losses) if loss <= target), None) for losses in self.losses)
        return [None if step is None else step + WINDOW for step in first_steps]


def train(task: str, settings: Sequence[str], steps: int, seed: int) -> tuple[list[float], float]:
    """Return the loss at each step, averaged over the `WINDOW` steps up to it, and the CPU time of a step."""
    from trainer import Trainer, load_config

    recipe, model = TASKS[task]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run_overrides = [f"train.steps={steps}", f"run.seed={seed}", f"data.seed={seed}", f"run.dir={folder}/run"]
        trainer = Trainer(load_config(recipe, [*COMMON, *model, *settings, *run_overrides]))
        start_time = time.process_time()
        losses = [record.loss for record in trainer.steps()]
        step_s = (time.process_time() - start_time) / steps
        trainer.close()
    finite_losses = [loss if loss is not None and math.isfinite(loss) else math.inf for loss in losses]
    sums = [0.0, *itertools.accumulate(finite_losses)]
    return [(sums[i + WINDOW] - sums[i]) / WINDOW for i in range(len(finite_losses) - WINDOW + 1)], step_s


def tune(task: str, settings: Sequence[str], key: str, rates: Sequence[float], steps: int) -> float:
    """Return the rate with the lowest loss after `steps` steps.

    While the best rate is the lowest or the highest one tried, half or twice that rate is tried as well.
    """
    loss_by_rate: dict[float, float] = {}
    pending = sorted(rates)
    while pending:
        for rate in pending:
            losses, _ = train(task, [*settings, f"{key}={rate}"], steps, TUNING_SEED)
            loss_by_rate[rate] = losses[-1]
            emit("optim", task=task, settings=list(settings), key=key, rate=rate, loss=losses[-1], tunes=True)
        best = min(loss_by_rate, key=lambda rate: (loss_by_rate[rate], rate))
        pending = [best / 2] if best == min(loss_by_rate) else [2 * best] if best == max(loss_by_rate) else []
        if len(loss_by_rate) >= MAX_RATES:
            break
    return best


def compare(arguments: argparse.Namespace) -> int:
    steps, rates = arguments.steps, [float(rate) for rate in arguments.rates.split(",")]
    if steps <= WINDOW:
        raise setting_error(
            "--steps", steps, f"must be above {WINDOW}, the number of steps over which losses are averaged", WINDOW + 1
        )
    chosen = arguments.only.split(",") if arguments.only else list(OPTIMIZERS)
    for name in chosen:
        if name not in OPTIMIZERS:
            rule = f"must be one of {', '.join(OPTIMIZERS)}"
            raise setting_error("--only", name, rule, proposal=nearest(name, OPTIMIZERS))
    for task in TASKS if arguments.task == "all" else [arguments.task]:
        scores: dict[str, Score] = {}
        for name in dict.fromkeys((BASELINE, *chosen)):
            if "experts" in name and task != "experts":
                continue
            settings, key = OPTIMIZERS[name], "optim.lr"
            if settings[:1] == MUON:
                settings, key = [*settings, f"optim.lr={scores[BASELINE].rate}"], "optim.muon.lr"
            rate = tune(task, settings, key, rates, steps)
            runs = [train(task, [*settings, f"{key}={rate}"], steps, seed) for seed in range(arguments.seeds)]
            score = Score(name, rate, [losses for losses, _ in runs], statistics.median(s for _, s in runs))
            scores[name] = score
            emit("optim", task=task, optimizer=name, rate=rate, final=score.final(), step_s=score.step_s)
        show_leaderboard(task, list(scores.values()), steps)
    return 0


def show_leaderboard(task: str, scores: Sequence[Score], steps: int) -> None:
    """Print the table, fewest steps first.  The loss to reach is the baseline's final loss with its worst seed."""
    baseline = next(score for score in scores if score.name == BASELINE)
    target = max(losses[-1] for losses in baseline.losses)

    def mean_steps(score: Score) -> float:
        return statistics.mean(steps + 1 if step is None else step for step in score.steps_to(target))

    rows = []
    for score in sorted(scores, key=lambda score: (mean_steps(score), score.final())):
        reached = [f"> {steps}" if step is None else str(step) for step in score.steps_to(target)]
        share = mean_steps(score) / mean_steps(baseline)
        ends = " ".join(f"{losses[-1]:.3f}" for losses in score.losses)
        rows.append([score.name, f"{score.rate:g}", " ".join(reached), f"{share:.2f}", ends, 1e3 * score.step_s])
    title = f"bench.optim: {task}, steps to a loss of {target:.3f}"
    show(title, ["optimizer", "rate", "steps, by seed", "relative to adamw", "final loss", "CPU ms per step"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.optim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all", help="the model (default: all)")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"some of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each optimizer (default: 3)")
    parser.add_argument(
        "--rates", default=",".join(map(str, RATES)), help="learning rates to try first (default: %(default)s)"
    )
    arguments = parser.parse_args()
    return run_command(lambda: compare(arguments))


if __name__ == "__main__":
    sys.exit(main())
