"""Measures one rank of a large job in isolation: host time per step, memory and start-up at 8, 64 and 512 ranks.

    python -m bench.scale [--recipe llama3_8b] [--ranks 8 64 512] [--device cpu|cuda] [key=value ...]

A fake process group reports the number of ranks; no data is sent.  `host` is the time that Python and the dispatcher
take to issue all operators of one step in the Trainer's own `train_step`.  If the host does not stay ahead of the
device, the device waits.  To isolate host time, the device's work is removed: the model has all of its blocks and
tensors but is narrow, sequences are short, and collectives and FSDP's copies around them return immediately.  The
kernels that remain on a CPU count as host time.

`model alone` is the same narrow model in plain torch, without Trainer, FSDP2 or optimizer: a forward pass through the
same loss, and a backward pass.  The additional time of the other variants is due to sharding, clipping, the optimizer
and the trainer.

`--full` (needs a GPU) measures the model at its real width, for the step time and memory of one rank.  Collectives cost
nothing in this mode either.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from bench.results import emit, show

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer import RunConfig

Batch = dict[str, "torch.Tensor"]
Update = Callable[[Batch], object]
"""One training step; it appends to a list the times at which its forward and its backward pass ended."""

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
"""Overrides for a Llama with all of its blocks but only short kernels."""
PLAIN = ["fsdp.param_dtype=float32", "fsdp.reduce_dtype=float32"]
"""Overrides for a CPU, where bf16 matmuls have a high start-up cost."""
EAGER = ["train.compile=false", "train.activation_checkpoint=none"]
COMPILED = ["train.compile=true", "train.activation_checkpoint=none"]
VARIANTS = {
    "model alone": EAGER,
    "model alone, compiled": COMPILED,
    "eager": EAGER,
    "eager, recomputed": ["train.compile=false", "train.activation_checkpoint=full"],
    "compiled": COMPILED,
}
MODEL_ALONE = ("model alone", "model alone, compiled")
"""Variants that do not depend on the number of ranks; narrow only, since an unsharded full model may not fit."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="llama3_8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--full", action="store_true", help="the model at its real width (a GPU)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--rounds", type=int, default=3, help="processes per row, alternating")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    args.variants = [variant for variant in args.variants if not (args.full and variant in MODEL_ALONE)]
    if not args.variants:
        parser.error(f"--full: nothing to measure, as {' and '.join(MODEL_ALONE)} are narrow only")
    if args.one:
        emit("scale", **measure(args))
        return 0
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Measure each variant and number of ranks in separate processes, alternating, and print the medians."""
    import json

    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for variant, ranks in cells(args.variants, args.ranks):
            command = [sys.executable, "-m", "bench.scale", *args.overrides, "--one", "--recipe", args.recipe]
            command += ["--ranks", str(ranks), "--device", args.device, "--steps", str(args.steps)]
            command += ["--variants", variant, *(["--full"] if args.full else [])]
            completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = completed.stdout.splitlines()[-1]
            print(line, flush=True)
            results.setdefault((variant, ranks), []).append(json.loads(line))
    measures = ["host_ms", "cpu_ms", "forward_ms", "backward_ms", "rest_ms", "build_s", "peak_gib"]
    if args.full:
        measures.insert(0, "step_ms")
    rows = [
        [variant, ranks, *(statistics.median(run[measure] for run in runs) for measure in measures)]
        for (variant, ranks), runs in results.items()
    ]
    scope = "one rank at full width" if args.full else "host time of a step"
    show(f"bench.scale: {args.recipe}, {scope}, median of {args.rounds}", ["blocks", "ranks", *measures], rows)
    return 0


def cells(variants: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Return the measurements: each variant with each number of ranks, and `model alone` with one rank only."""
    return [(variant, number) for variant in variants for number in ([1] if variant in MODEL_ALONE else ranks)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Build one rank of a job, or the model alone, and time its steps."""
    (num_ranks,), (variant,) = args.ranks, args.variants
    import torch

    import trainer.trainer  # noqa: F401 - imported here so as not to count as build time
    from trainer import load_config

    torch.set_num_threads(1)
    narrow = [] if args.full else [*NARROW, *(PLAIN if args.device == "cpu" else [])]
    overrides = [*narrow, *VARIANTS[variant], *args.overrides, "mesh.replicate=1", "mesh.shard=-1"]
    config = load_config(args.recipe, overrides)
    start_time = time.perf_counter()
    if variant in MODEL_ALONE:
        update, marks = build_alone(config, args.device)
    else:
        update, marks = build_rank(config, args.device, num_ranks)
    build_s = time.perf_counter() - start_time

    shape = (int(config.train.micro_batch_size), config.data.seq_len)
    tokens = torch.randint(0, 256, shape, pin_memory=args.device == "cuda")
    batch = {"tokens": tokens, "targets": tokens}
    synchronize: Callable[[], None] = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    first = time.perf_counter()
    for _ in range(3):
        update(batch)
    synchronize()
    first_s = time.perf_counter() - first
    times = take_times(partial(update, batch), marks, args.steps, synchronize)
    medians = {name: 1e3 * statistics.median(each[name] for each in times) for name in times[0]}
    facts = {"ranks": num_ranks, "variant": variant}
    return {**facts, **medians, "build_s": build_s, "first_s": first_s, "peak_gib": peak_gib(args.device)}


def take_times(
    update: Callable[[], None], marks: list[float], steps: int, synchronize: Callable[[], None]
) -> list[dict[str, float]]:
    """Return the seconds of each step and of its parts, with garbage collection turned off.

    The step appends the end times of its forward and backward pass to `marks`.
    """
    gc.collect()
    gc.disable()
    times = []
    for _ in range(steps):
        marks.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        update()
        host, host_cpu = time.perf_counter(), time.process_time()
        synchronize()
        forward, backward = marks
        times.append(
            {
                "step_ms": time.perf_counter() - wall,
                "host_ms": host - wall,
                "cpu_ms": host_cpu - cpu,
                "forward_ms": forward - wall,
                "backward_ms": backward - forward,
                "rest_ms": host - backward,
            }
        )
    return times


def peak_gib(device: str) -> float:
    """Return the peak memory on the GPU or, without one, of this process."""
    import torch

    from trainer.metrics.step_metrics import peak_memory_gib

    return peak_memory_gib(torch.device(device))


def build_alone(config: RunConfig, device: str) -> tuple[Update, list[float]]:
    """Return a step of the plain model, and the list that it appends its times to.

    Blocks are compiled as in the Trainer, and parameters have the dtype that FSDP would gather them in.
    """
    import torch

    from trainer.config.requirements import compiles_blocks
    from trainer.loss import find_loss
    from trainer.model.initial_weights import materialize
    from trainer.model.network import apply_weights_dtype
    from trainer.model.units import find_blocks

    with torch.device("meta"):
        model = config.spec.build_model(config.model)
    apply_weights_dtype(model, config.fsdp.param_dtype)
    materialize(model, config.run.seed, torch.device(device), config.spec.init)
    for block in find_blocks(model, config.spec) if compiles_blocks(config.train.compile, device) else ():
        block.compile(fullgraph=True)
    loss = find_loss(model)
    marks: list[float] = []

    def update(batch: Batch) -> None:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        total = loss(on_device)
        marks.append(time.perf_counter())
        total.backward()
        marks.append(time.perf_counter())
        model.zero_grad(set_to_none=True)

    return update, marks


def build_rank(config: RunConfig, device: str, num_ranks: int) -> tuple[Update, list[float]]:
    """Return the Trainer's `train_step` for one of `num_ranks` ranks, and the list that it appends its times to.

    `train_step` runs on a stand-in that has only the attributes it needs, built by the same functions as in a Trainer.
    A real Trainer cannot be used, since its small messages would need the other ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainer import Trainer
    from trainer.loss import find_loss
    from trainer.model.initial_weights import materialize
    from trainer.model.network import build_network
    from trainer.model.shard import apply_sharding
    from trainer.optim.optimizer import Schedule, build_optimizer

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    mesh = init_device_mesh(device, (num_ranks,), mesh_dim_names=("shard",))
    model = build_network(config)
    apply_sharding(model, config.spec, config, mesh)
    materialize(model, config.run.seed, torch.device(device), config.spec.init)
    skip_collectives(model)
    if device == "cpu":
        skip_copies()
    marks: list[float] = []
    loss = find_loss(model)

    def marked_loss(batch: Batch) -> torch.Tensor:
        total = loss(batch)
        marks.append(time.perf_counter())
        total.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(mark))
        return total

    def mark() -> None:
        marks.append(time.perf_counter())

    rank = SimpleNamespace(
        config=config,
        mesh=mesh,
        model=model,
        loss=marked_loss,
        _batch_loss=loss,
        count=partial(Trainer.count, cast(Trainer, None)),
        optimizer=build_optimizer(model, config.optim),
        schedule=Schedule(config),
        state=SimpleNamespace(step=0),
        world=SimpleNamespace(size=mesh.size(), device=torch.device(device), sum_on_device=lambda value: value),
        agree=(lambda *amounts: [amount * mesh.size() for amount in amounts]),
    )
    rank.global_sums = partial(Trainer.global_sums, cast(Trainer, rank))
    return lambda batch: Trainer.train_step(cast(Trainer, rank), [batch]), marks


def skip_collectives(model: nn.Module) -> None:
    """Make FSDP's collectives return immediately; those of the fake group would copy each rank's part separately."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class NoGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            """Leave the output as it is."""

    class NoReduce(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            """Leave the output as it is."""

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(NoGather())
            module.set_custom_reduce_scatter(NoReduce())


def skip_copies() -> None:
    """Make FSDP's copies between parameters and the buffers of collectives return immediately, on a CPU.

    On a GPU, each copy is one kernel regardless of the number of ranks; a CPU copies each rank's part separately.  The
    time to issue the copies is not measured either, and the parameters contain whatever was in memory before.
    """
    import torch
    from torch.distributed.fsdp import fully_shard  # noqa: F401 - defines the operators

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    torch.set_flush_denormal(True)  # uninitialized memory may contain denormals, which are slow
    library = torch.library.Library("fsdp", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing an operator is intended
        for name in ("chunk_cat", "split_with_sizes_copy"):
            library.impl(name, nothing, "CPU", allow_override=True)
    _libraries.append(library)


_libraries: list[Any] = []
"""Keeps the operator replacements alive; they are undone when their library is garbage-collected."""


if __name__ == "__main__":
    sys.exit(main())
