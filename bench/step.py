"""Compares the trainer with a hand-written loop for the same model: step time, memory, and time to the first step.

    python -m bench.step --nproc 2 --pairs 5 --model small  # with FSDP2
    python -m bench.step --nproc 2 --against ddp            # mesh.shard=1 with DistributedDataParallel
    python -m bench.step --against plain --model tiny       # one rank, with a loop without a process group
    python -m bench.step --against loss-whole               # with a variant of itself, to measure a default's gain
    python -m bench.step --against train.compile=true

The two sides alternate, and each run has its own processes.  Both sides start from the same weights and see the same
batches.  If their first losses do not agree, the benchmark compares nothing and exits with 1.  Only a side that
is a configuration setting (key=value) may have different losses; the difference is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bench.results import emit, show
from trainer.distributed.environment import limit_spinning
from trainer.errors import nearest, run_command, setting_error

TRAINER, HANDWRITTEN = "trainer", "handwritten"
HANDWRITTEN_LOOPS = {HANDWRITTEN: "fsdp", "ddp": "ddp", "plain": "none"}
"""Maps each hand-written loop to its value of `Settings.parallel`."""
TRAINER_SETTINGS = {"ddp": ["mesh.shard=1", "mesh.replicate=-1", "run.threads=1"], "plain": ["run.threads=1"]}
"""Settings of the trainer for each hand-written loop.  One thread, since threads waiting for a core would add noise."""
VARIANTS = {
    "loss-whole": "WholeLoss",
    "adamw-foreach": "ForeachAdamW",
    "clip-torch": "TorchClip",
    "gc": "AutomaticGarbageCollection",
}
"""Maps each variant of the trainer to its class in bench.variants."""

FIXED = ("run.dir", "run.name", "train.steps")
"""Settings that the benchmark itself sets."""
WORK = ("model.", "data.seq_len", "train.global_batch_size")
"""Settings that determine the amount of work in a step."""

TOLERANCE = 1e-4
"""Largest relative difference allowed between the losses of the two sides."""
NUM_COMPARED = 10
"""Number of losses, from the first step on, that must agree."""
MAX_RATIOS = {"cpu_s": 1.02, "peak_mib": 1.03}
"""Target for each ratio of the trainer to a hand-written loop."""
ROWS = {
    "cpu_s": "CPU s per step, mean of ranks",
    "cpu_s_rank0": "CPU s per step, rank 0",
    "wall_s": "wall s per step",
    "peak_mib": "peak MiB, largest rank",
    "start_s": "s from start to first step",
}
"""Maps the readings in the table to their labels."""

COMMON = [
    "checkpoint.resume=none",
    "checkpoint.every=0",
    "eval.every=0",
    "log.every=10",
    "log.sample_tokens=0",
]
RECIPES = {"tiny": "gpt2", "small": "llama_small", "30m": "llama_small"}
MODELS = {
    "tiny": [
        "model.vocab_size=257",
        "model.dim=128",
        "model.num_layers=4",
        "model.num_heads=4",
        "model.max_seq_len=64",
        "data.source=stdlib",
        "data.seq_len=64",
        "fsdp.param_dtype=float32",
        "schedule.warmup_steps=10",
        "train.micro_batch_size=12",
    ],
    "small": [],
    "30m": [
        "model.dim=512",
        "model.num_layers=8",
        "model.num_heads=8",
        "model.num_kv_heads=8",
        "model.ffn_dim=1792",
        "model.init_std=0.02",
        "data.seq_len=256",
        "optim.lr=3e-4",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    ],
}
"""Overrides of the recipe in RECIPES."""

RANK_BATCH_SIZE = {"tiny": 12}
"""Samples per rank and step, for models whose global batch grows with the number of ranks."""

WINDOWS = {"tiny": (20, 300), "small": (10, 60), "30m": (3, 10)}
"""Warmup steps and measured steps, by model."""


@dataclass
class StepTimer:
    """Measures `steps` steps of this process, after `warmup` unmeasured ones."""

    warmup: int
    steps: int
    launched: float
    readings: dict[str, float] = field(default_factory=dict)

    def after_step(self, step: int) -> None:
        """Record the end of step `step`."""
        if step == 1:
            self.readings["start_s"] = time.time() - self.launched
        if step == self.warmup:
            self._cpu, self._wall = time.process_time(), time.perf_counter()
        if step == self.warmup + self.steps:
            self.readings["cpu_s"] = (time.process_time() - self._cpu) / self.steps
            self.readings["wall_s"] = (time.perf_counter() - self._wall) / self.steps
            self.readings["peak_mib"] = _peak_mib()


def _peak_mib() -> float:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# ---------------------------------------------------------------------------------------------------------------
# One rank of one run


def run_rank(job: dict[str, Any], side: str, folder: Path) -> None:
    """Train one side and write this rank's readings and losses to `folder`; ends the process."""
    timer = StepTimer(job["warmup"], job["steps"], launched=float(os.environ["BENCH_LAUNCHED"]))
    train = partial(_train_by_hand if side in HANDWRITTEN_LOOPS else _train_with_trainer, side)
    losses = train(job, timer, folder)
    result = json.dumps({**timer.readings, "losses": losses[:NUM_COMPARED]})
    (folder / f"rank{os.environ['RANK']}.json").write_text(result)
    sys.stdout.flush()
    os._exit(0)  # a device mesh that is still alive may abort the interpreter's exit


def _train_by_hand(side: str, job: dict[str, Any], timer: StepTimer, folder: Path) -> list[float]:
    import torch.distributed as dist

    from bench.handwritten import Settings, train

    settings = Settings(**job["settings"], parallel=HANDWRITTEN_LOOPS[side], log=folder / "log.jsonl")
    losses = train(settings, timer.after_step)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return losses


def _train_with_trainer(side: str, job: dict[str, Any], timer: StepTimer, folder: Path) -> list[float]:
    from bench import variants
    from trainer import Trainer, load_config
    from trainer.metrics.record import Record

    base: type[Trainer] = getattr(variants, VARIANTS[side]) if side in VARIANTS else Trainer
    records: list[Record] = []
    """One record per step.  Losses are read after the last step only, because reading one waits for the device."""

    class TimedTrainer(base):
        """A Trainer whose steps are measured."""

        def on_step(self, record: Record) -> None:
            records.append(record)
            timer.after_step(record["step"])

    overrides = overrides_of(side, [*job["overrides"], f"run.dir={folder / 'run'}"])
    trainer = TimedTrainer(load_config(job["recipe"], overrides))
    # A final save would compete for the disk with the first steps of the other side.
    with mock.patch.object(trainer.saver, "save_final"):
        trainer.fit()
    losses = [float(record.loss) for record in records]
    trainer.close()
    return losses


# ---------------------------------------------------------------------------------------------------------------
# All runs


def overrides_of(side: str, common: Sequence[str]) -> list[str]:
    """Return the settings of a side: `common`, overridden by the side's own setting if it is one."""
    return list({item.partition("=")[0]: item for item in (*common, *([side] if "=" in side else []))}.values())


def overrides_of_model(model: str, nproc: int) -> list[str]:
    """Return the settings of a model, including its global batch size on `nproc` ranks."""
    rank_batch_size = RANK_BATCH_SIZE.get(model)
    return [*MODELS[model], *([f"train.global_batch_size={rank_batch_size * nproc}"] if rank_batch_size else [])]


def check_side(side: str, model: str, nproc: int) -> None:
    """Raise UserError if the trainer cannot be compared with `side` on `nproc` ranks."""
    from trainer.config.load import load_config
    from trainer.config.rules import check_config

    key, is_setting, _ = side.partition("=")
    sides = (*HANDWRITTEN_LOOPS, *VARIANTS)
    if not is_setting and side not in sides:
        rule = f"must be {', '.join(sides)}, or key=value of the configuration"
        raise setting_error("--against", side, rule, proposal=nearest(side, sides))
    if side == "plain" and nproc > 1:
        raise setting_error("--against", side, f"is one process, not --nproc {nproc}", HANDWRITTEN)
    if side == HANDWRITTEN and RECIPES[model] != "llama_small":
        raise setting_error("--against", side, f"shards a llama, and --model {model} is not a llama", "ddp")
    if key in FIXED:
        raise setting_error("--against", side, f"{key} is set by the benchmark itself")
    if key.startswith(WORK):
        raise setting_error("--against", side, "changes the amount of work: the two sides could not be compared")
    overrides = overrides_of(side, [*COMMON, *overrides_of_model(model, nproc)])
    check_config(load_config(RECIPES[model], overrides), nproc, nproc)


def prepare(folder: Path, recipe: str, overrides: Sequence[str], warmup: int, steps: int) -> dict[str, Any]:
    """Return the job description for both sides; write the initial weights and the sample order to `folder`."""
    import numpy as np
    import torch

    from trainer import load_config
    from trainer.data.mixture import sample_at
    from trainer.data.opening import open_source
    from trainer.model.initial_weights import materialize

    overrides = [*COMMON, *overrides, f"train.steps={warmup + steps}", "run.name=bench"]
    config = load_config(recipe, overrides)
    with torch.device("meta"):
        model = config.spec.build_model(config.model)
    materialize(model, config.run.seed, torch.device("cpu"))
    torch.save({name: p.detach() for name, p in model.named_parameters()}, folder / "weights.pt")

    source = open_source(config.data, config.vocab_size, "train")
    (shard,), num_samples = source.shards, len(source)
    positions = np.arange(config.train.steps * config.train.global_batch_size)
    np.save(folder / "order.npy", sample_at(positions, num_samples, config.data.seed))

    settings = {
        "recipe": recipe,
        "overrides": overrides,
        "weights": str(folder / "weights.pt"),
        "tokens": str(shard.path),
        "tokens_dtype": shard.info.dtype,
        "order": str(folder / "order.npy"),
        "threads": config.run.threads or 0,
        "seq_len": config.data.seq_len,
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "steps": config.train.steps,
        "warmup_steps": config.schedule.warmup_steps,
        "lr": config.optim.lr,
        "min_lr_ratio": config.schedule.min_lr_ratio,
        "weight_decay": config.optim.weight_decay,
        "betas": config.optim.betas,
        "max_grad_norm": config.optim.max_grad_norm,
        "log_every": config.log.every,
    }
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "recipe": recipe,
        "overrides": overrides,
        "settings": settings,
        "warmup": warmup,
        "steps": steps,
        "parameters": parameters,
    }


def run_side(side: str, job: Path, folder: Path, nproc: int) -> dict[str, Any]:
    """Run one side in `nproc` new processes and return its readings; exits if a rank fails."""
    folder.mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    group = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(nproc):
        env = os.environ | {name: str(value) for name, value in group.items()}
        limit_spinning(env)  # on both sides, as the trainer's command line does
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "BENCH_LAUNCHED": str(time.time())}
        command = [sys.executable, "-m", "bench.step", "--job", str(job), "--side", side, "--folder", str(folder)]
        with open(folder / f"rank{rank}.txt", "w") as output:
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
    for rank, process in enumerate(ranks):
        if process.wait() != 0:
            for other in ranks:
                other.kill()
            sys.exit((folder / f"rank{rank}.txt").read_text())
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(nproc)]
    return {
        "cpu_s": statistics.mean(result["cpu_s"] for result in results),
        "cpu_s_rank0": results[0]["cpu_s"],
        "wall_s": results[0]["wall_s"],
        "peak_mib": max(result["peak_mib"] for result in results),
        "start_s": max(result["start_s"] for result in results),
        "losses": results[0]["losses"],
        "first_loss": results[0]["losses"][0],
    }


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest relative difference between two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def compare(model: str, against: str, nproc: int, num_pairs: int, steps: int | None, warmup: int | None) -> int:
    """Run all pairs; print a JSON line per run, then the table.  Return the exit code.

    Raises UserError if the two sides cannot be compared.
    """
    check_side(against, model, nproc)
    default_warmup, default_steps = WINDOWS[model]
    warmup = warmup or default_warmup
    tolerance = math.inf if "=" in against else TOLERANCE
    runs: dict[str, list[dict[str, Any]]] = {TRAINER: [], against: []}
    differences: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        overrides = [*overrides_of_model(model, nproc), *TRAINER_SETTINGS.get(against, [])]
        job = prepare(folder, RECIPES[model], overrides, warmup, steps or default_steps)
        (folder / "job.json").write_text(json.dumps(job))
        for pair in range(num_pairs):
            order = [*enumerate(runs)]
            for number, side in order if pair % 2 == 0 else order[::-1]:
                run = run_side(side, folder / "job.json", folder / f"{pair}-{number}", nproc)
                figures = {name: run[name] for name in (*ROWS, "first_loss")}
                emit("step", model=model, pair=pair, side=side, **figures)
                runs[side].append(run)
            differences.append(largest_difference(*(side_runs[-1]["losses"] for side_runs in runs.values())))
            if not differences[-1] < tolerance:
                print(f"the first losses differ by {differences[-1]:.1e}: the two sides do not train the same thing")
                return 1
    facts = f"{job['parameters'] / 1e6:.1f}M parameters, {nproc} ranks, {num_pairs} pairs"
    report(runs, f"{model}: {facts}, first losses within {max(differences):.1e}")
    return 0


def report(runs: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Print the medians of both sides and the ratios of the trainer to the other side.

    The ratio of the two minima is the figure least disturbed by other work on the machine.
    """
    import torch

    rows: list[list[object]] = []
    for name, meaning in ROWS.items():
        medians = [statistics.median(run[name] for run in side_runs) for side_runs in runs.values()]
        ratios = [trainer_run[name] / other_run[name] for trainer_run, other_run in zip(*runs.values(), strict=True)]
        spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
        minima = [min(run[name] for run in side_runs) for side_runs in runs.values()]
        max_ratio = f"{MAX_RATIOS[name]:.2f}" if name in MAX_RATIOS and HANDWRITTEN_LOOPS.keys() & runs else ""
        figures = (f"{statistics.median(ratios):.3f}", f"{minima[0] / minima[1]:.3f}", spread)
        rows.append([meaning, *(f"{m:.4g}" for m in medians), *figures, max_ratio])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    show(f"bench.step: {title}", ["measure", *runs, "ratio", "min/min", "from - to", "maximum"], rows, device)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, help="ranks of each run; 2, or 1 with --against plain")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, help="unmeasured steps before them")
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    sides = ", ".join((*HANDWRITTEN_LOOPS, *VARIANTS))
    parser.add_argument(
        "--against", default=HANDWRITTEN, metavar="SIDE", help=f"{sides}, or key=value; by default the first"
    )
    for option in ("--job", "--side", "--folder"):  # internal: runs one rank
        parser.add_argument(option, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_rank(json.loads(Path(options.job).read_text()), options.side, Path(options.folder))
    nproc = options.nproc or (1 if options.against == "plain" else 2)
    arguments = (options.model, options.against, nproc, options.pairs, options.steps, options.warmup)
    return run_command(lambda: compare(*arguments))


if __name__ == "__main__":
    sys.exit(main())
