"""What one rank of a large job does, without the others: host time of a step, memory, start-up, at 8, 64, 512 ranks.

    python -m bench.scale [--recipe llama3_8b] [--ranks 8 64 512] [--device cpu|cuda] [key=value ...]

A fake process group says that there are so many ranks; nothing travels.  `host`: the time that Python and the
dispatcher take to ask for all that one update needs, in the Trainer's own `train_step`.  The host must stay ahead of
the device, or the device waits.  For that the device's work is taken away: the model has all its blocks and tensors but
is narrow, sequences are short, and a collective returns at once.  What is left of kernels on a CPU counts as the
host's.

`full` (a GPU, `--full`): the model at its real width, for the step time and the memory of one rank of so many; the
collectives cost nothing in it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from bench.record import emit, show

NARROW = [
    "model.dim=64",
    "model.ffn_dim=128",
    "model.vocab_size=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "data.source=synthetic",
    "data.tokenizer=bytes",
    "data.seq_len=8",
]
"""A Llama with all its blocks, on which no kernel takes long.  fp32 on a CPU, where a bf16 product is slow to start."""
PLAIN = ["fsdp.param_dtype=float32", "fsdp.reduce_dtype=float32"]
VARIANTS = {
    "eager": ["train.compile=false", "train.activation_checkpoint=none"],
    "eager, recomputed": ["train.compile=false", "train.activation_checkpoint=full"],
    "compiled": ["train.compile=true", "train.activation_checkpoint=none"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="llama3_8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--full", action="store_true", help="the model at its real width (a GPU)")
    parser.add_argument("--steps", type=int, default=20, help="measured updates")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each row, in turns")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    if args.one:
        emit("scale", **measure(args))
        return 0
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Measure each number of ranks and variant in processes of their own, in turns, and show the medians."""
    import json

    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for variant in args.variants:
            for ranks in args.ranks:
                command = [sys.executable, "-m", "bench.scale", *args.overrides, "--one", "--recipe", args.recipe]
                command += ["--ranks", str(ranks), "--device", args.device, "--steps", str(args.steps)]
                command += ["--variants", variant, *(["--full"] if args.full else [])]
                ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                line = ran.stdout.splitlines()[-1]
                print(line, flush=True)
                found.setdefault((variant, ranks), []).append(json.loads(line))
    measures = ["host_ms", "cpu_ms", "forward_ms", "backward_ms", "rest_ms", "build_s", "peak_gib"]
    if args.full:
        measures.insert(0, "step_ms")
    rows = [
        [variant, ranks, *(statistics.median(run[measure] for run in runs) for measure in measures)]
        for (variant, ranks), runs in found.items()
    ]
    what = "one rank at full width" if args.full else "host time of a step"
    show(f"bench.scale: {args.recipe}, {what}, median of {args.rounds}", ["blocks", "ranks", *measures], rows)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Build one rank of a job and let it make updates."""
    (num_ranks,), (variant,) = args.ranks, args.variants
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    from trainer import Trainer

    started = time.perf_counter()
    narrow = [] if args.full else [*NARROW, *(PLAIN if args.device == "cpu" else [])]
    rank = build_rank([*narrow, *VARIANTS[variant], *args.overrides], args.recipe, args.device)
    build_s = time.perf_counter() - started

    shape = (int(rank.config.train.micro_batch_size), rank.config.data.seq_len)
    tokens = torch.randint(0, 256, shape, pin_memory=args.device == "cuda")
    batch = {"tokens": tokens, "targets": tokens}
    synchronize: Callable[[], None] = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    first = time.perf_counter()
    for _ in range(3):
        Trainer.train_step(cast(Trainer, rank), [batch])
    synchronize()
    first_s = time.perf_counter() - first
    gc.collect()
    gc.disable()
    times: list[tuple[float, float, float, float, float, float]] = []
    for _ in range(args.steps):
        rank.marks.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        Trainer.train_step(cast(Trainer, rank), [batch])
        host, host_cpu = time.perf_counter(), time.process_time()
        synchronize()
        done = time.perf_counter()
        forward, backward = rank.marks
        times.append((done - wall, host - wall, host_cpu - cpu, forward - wall, backward - forward, host - backward))
    names = ("step_ms", "host_ms", "cpu_ms", "forward_ms", "backward_ms", "rest_ms")
    medians = {
        name: 1e3 * statistics.median(column) for name, column in zip(names, zip(*times, strict=True), strict=True)
    }
    if args.device == "cuda":
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
    else:
        import resource

        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "ranks": num_ranks,
        "variant": variant,
        **medians,
        "build_s": build_s,
        "first_s": first_s,
        "peak_gib": peak_gib,
    }


def build_rank(overrides: list[str], recipe: str, device: str) -> SimpleNamespace:
    """Return what `Trainer.train_step` needs of a Trainer, built by the functions that build one.

    Not a Trainer: its small messages travel on a group that has other ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    from trainer import load_config
    from trainer.loss import find_loss
    from trainer.materialize import materialize
    from trainer.optim import Schedule, build_optimizer
    from trainer.shard import apply_sharding

    class NoGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            """Leave the output as it is."""

    class NoReduce(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            """Leave the output as it is."""

    config = load_config(recipe, [*overrides, "mesh.replicate=1", "mesh.shard=-1"])
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
    apply_sharding(model, config.recipe, config, mesh)
    materialize(model, config.run.seed, torch.device(device), config.recipe.init, False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the fake group's own copy every rank's part, one by one
            module.set_custom_all_gather(NoGather())
            module.set_custom_reduce_scatter(NoReduce())
    marks: list[float] = []
    loss = find_loss(model)

    def marked_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = loss(batch)
        marks.append(time.perf_counter())
        found.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(mark))
        return found

    def mark() -> None:
        marks.append(time.perf_counter())

    return SimpleNamespace(
        config=config,
        mesh=mesh,
        model=model,
        loss=marked_loss,
        marks=marks,
        optimizer=build_optimizer(model, config.optim),
        schedule=Schedule(config),
        state=SimpleNamespace(step=0),
        world=SimpleNamespace(size=mesh.size(), device=torch.device(device), sum_on_device=lambda value: value),
        _exchange=lambda num_targets: num_targets * mesh.size(),
    )


if __name__ == "__main__":
    sys.exit(main())
