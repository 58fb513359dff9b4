"""Presents a plan as tables, as JSON, or as a plot of memory over one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from trainer.checkpoint.interval import describe_costs
from trainer.errors import print_stdout
from trainer.metrics.console import readable_bytes, readable_duration
from trainer.plan.estimate import memory_curve
from trainer.plan.ledger import Kind
from trainer.plan.machine import GIB
from trainer.plan.plan import Plan
from trainer.plan.search import (
    TIME_TOLERANCE,
    Alternative,
    PlannedChoice,
    chosen_settings,
    format_setting,
    settings_to_show,
)
from trainer.tables import table

_COLORS: dict[Kind, str] = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "unsharded parameters": "#e69f00",
    "unsharded gradients": "#f0e442",
    "all-gather buffers": "#cc79a7",
    "reduction buffers": "#8c6bb1",
    "activations": "#d55e00",
    "temporaries": "#8c8a00",
    "buffers and inputs": "#66707b",
}
"""The color of each kind of memory, mostly from the colorblind-safe palette of Okabe and Ito:
https://jfly.uni-koeln.de/color/."""


def print_plan(plan: Plan, choice: PlannedChoice | None = None) -> None:
    """Print the plan as tables.

    choice: how the `auto` settings were resolved; None if there were none.
    """
    print_stdout("\n".join(_heading(plan)))
    if choice is not None:
        print_stdout(f"\n{choice_text(choice)}")
    fits = "fits" if plan.fits else "DOES NOT FIT"
    _print_table(f"{_peak_text(plan)}, {fits}", ("kind", "GiB"), _memory_rows(plan))
    if (generation := plan.generation) is not None:
        parts = f"{readable_bytes(generation.weights)} gathered weights, {readable_bytes(generation.cache)} KV cache"
        print_stdout(
            f"\ngeneration of {generation.texts}: {parts}, {readable_bytes(generation.temporaries)} temporaries"
        )
    if plan.collectives:
        headers = ("collective", "axis", "ranks", "count", "size", "s")
        _print_table("communication per rank in one step", headers, _communication_cells(plan), text_columns=(0, 1))
    source = "" if plan.machine.is_measured else f" (estimated; rates: {plan.machine.source})"
    _print_table(f"time of one step{source}", ("", ""), _time_rows(plan), text_columns=(0, 1))
    costs = list(describe_costs(plan.costs, plan.save_every_s, plan.num_nodes).items())
    title = "saves and failures (assumed until a run has measured them)"
    _print_table(title, ("", ""), costs, text_columns=(0, 1))
    for line in _omitted_costs(plan):
        print_stdout(line)


def _print_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,)
) -> None:
    print_stdout(f"\n{title}\n{table(headers, rows, text_columns)}")


def _omitted_costs(plan: Plan) -> list[str]:
    """Return a line for each cost or saving that the plan does not include."""
    config = plan.config
    lines = []
    if config.fsdp.cpu_offload:
        lines.append("not counted: time for copies to and from host memory, and for the optimizer there")
    if config.train.compile is True and plan.machine.device_type == "cpu":
        lines.append("not counted: savings from torch.compile on a CPU")
    if config.expert > 1 and config.mesh.expert_method == "exchange":
        lines.append("not counted: the host's wait for the number of rows in each layer")
    return lines


def memory_text(plan: Plan) -> str:
    """Return the planned peak memory of a rank by kind, as plain text, without saying whether it fits."""
    return f"{_peak_text(plan)}, as planned\n{table(('kind', 'GiB'), _memory_rows(plan))}"


def choice_text(choice: PlannedChoice) -> str:
    """Return the resolved `auto` settings as plain text, each with the best plan for every other value."""
    chosen = choice.plan
    every_other = [other.plan for others in choice.alternatives.values() for other in others]
    fastest_s = min(plan.time.total_s for plan in (chosen, *every_other) if plan.fits)
    rows: list[list[str]] = []
    for key, others in choice.alternatives.items():
        rows.append([key, *_value_cells(chosen_settings(chosen.config)[key], chosen), "chosen"])
        rows += [["", *_value_cells(other.value, other.plan), _verdict(other.plan, fastest_s)] for other in others]
    headers = ("setting", "value", "GiB", "s per step", "")
    return f"auto: {choice.num_candidates} candidates\n{table(headers, rows, (0, 1, 4))}"


def _value_cells(value: object, plan: Plan) -> list[str]:
    return [format_setting(value), f"{plan.needed_gib:.4g}", f"{plan.time.total_s:.4g}"]


def _verdict(plan: Plan, fastest_s: float) -> str:
    if not plan.fits:
        return "does not fit"
    slower = plan.time.total_s / fastest_s - 1
    return f"{100 * slower:.1f}% slower" if slower > TIME_TOLERANCE else "as fast"


def _heading(plan: Plan) -> list[str]:
    config, mesh, machine = plan.config, plan.mesh, plan.machine
    ranks = f"{mesh.replicate} x {mesh.shard} = {mesh.num_ranks}" if mesh.has_replicas else f"{mesh.num_ranks}"
    size = f"{_format_count(plan.num_parameters)} parameters in {plan.trace.root} units"
    settings = [f"{key.partition('.')[2]} {format_setting(value)}" for key, value in settings_to_show(config).items()]
    batch = f"{plan.num_micro_batches} micro-batches per step, {_format_count(plan.tokens)} token positions"
    return [
        f"{config.run.name}: {config.model.name}, {size}",
        f"{ranks} ranks of {machine.name} ({machine.memory_gib:.0f} GiB each, {machine.rates.ranks_per_node} to a "
        f"node; {machine.source})",
        f"{', '.join(settings)}; {batch}",
    ]


def _peak_text(plan: Plan) -> str:
    return f"peak memory per rank, in the {plan.memory.peak.place}: {plan.needed_gib:.2f} GiB"


def _memory_rows(plan: Plan) -> list[tuple[str, str]]:
    return [
        (kind, f"{gib:.2f}" if gib >= 1 else f"{gib:.4f}")
        for kind, gib in memory_by_kind(plan).items()
        if gib >= 0.001 * plan.needed_gib
    ]


def _communication_cells(plan: Plan) -> list[list[str]]:
    return [
        [
            row["operation"],
            row["axis"],
            str(row["num_ranks"]),
            str(row["count"]),
            readable_bytes(row["bytes"]),
            f"{row['seconds']:.3f}",
        ]
        for row in communication_rows(plan)
    ]


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    time, train = plan.time, plan.config.train
    positions_per_s = plan.tokens / time.total_s
    hidden = 1 - time.exposed_s / time.communication_s if time.communication_s else 1.0
    device_hours = plan.run_s * plan.mesh.num_ranks / 3600
    run = f"{train.steps} steps, {readable_duration(plan.run_s)}, {device_hours:,.1f} device hours"
    per_rank = readable_bytes(plan.checkpoint_bytes / plan.mesh.num_ranks)
    return [
        ("step", f"{time.total_s:.3f} s"),
        ("kernels", f"{time.compute_s:.3f} s"),
        ("communication", f"{time.communication_s:.3f} s, {100 * hidden:.0f}% hidden behind kernels"),
        ("copies into and out of buffers", f"{time.copy_s:.3f} s"),
        *_offload_rows(plan),
        ("optimizer", f"{time.optimizer_s:.3f} s"),
        ("host", f"{time.host_s:.3f} s"),
        ("token positions/s", f"{positions_per_s:,.0f} ({positions_per_s / plan.mesh.num_ranks:,.0f} per rank)"),
        ("model FLOPs per step", f"{plan.flops:.3g}"),
        ("MFU", "unknown" if plan.mfu is None else f"{100 * plan.mfu:.1f}%"),
        ("whole run", "depends on the data" if train.epochs is not None else run),
        ("checkpoint", f"{readable_bytes(plan.checkpoint_bytes)}, {per_rank} per rank"),
    ]


def _offload_rows(plan: Plan) -> list[tuple[str, str]]:
    offloaded, time = plan.memory.offloaded, plan.time
    if not offloaded:
        return []
    hidden = 1 - time.exposed_offload_s / time.offload_s
    text = f"{time.offload_s:.3f} s, {100 * hidden:.0f}% hidden; {readable_bytes(offloaded)} of host memory per rank"
    return [("activations to the host and back", text)]


def memory_by_kind(plan: Plan) -> dict[str, float]:
    """Return peak memory in GiB by kind, plus the allocator's reserve, the driver's memory, and the total."""
    by_kind: dict[str, float] = {kind: plan.memory.peak.by_kind[kind] / GIB for kind in get_args(Kind)}
    by_kind["allocator"] = plan.peak_gib * plan.machine.allocator_share
    by_kind["driver and communicators"] = plan.machine.reserved_gib
    return by_kind | {"total": plan.needed_gib}


def communication_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the total count, bytes and seconds of one step's collectives, by operation, axis and ranks."""
    rows: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for (operation, axis, num_ranks, num_bytes), count in plan.collectives.items():
        row = rows[operation, axis, num_ranks]
        row[0] += count
        row[1] += count * num_bytes
        row[2] += count * plan.machine.rates.collective(operation, plan.layout, axis, num_ranks, num_bytes)
    names = ("count", "bytes", "seconds")
    return [
        {"operation": operation, "axis": axis, "num_ranks": num_ranks, **dict(zip(names, row, strict=True))}
        for (operation, axis, num_ranks), row in sorted(rows.items(), key=lambda item: -item[1][1])
    ]


def to_json(plan: Plan, choice: PlannedChoice | None = None) -> dict[str, Any]:
    """Return the plan as JSON-serializable values, in bytes, seconds and counts."""
    time = plan.time
    auto: dict[str, Any] = {}
    if choice is not None:
        alternatives = {key: [_brief(other) for other in others] for key, others in choice.alternatives.items()}
        auto = {"auto": {"num_candidates": choice.num_candidates, "alternatives": alternatives}}
    return {
        "recipe": plan.config.run.name,
        "model": plan.config.model.name,
        "parameters": plan.num_parameters,
        "units": plan.trace.root,
        "parameters_by_unit": {unit.name: unit.numel for unit in plan.trace.units},
        "mesh": {
            "replicate": plan.mesh.replicate,
            "shard": plan.mesh.shard,
            "context": plan.config.context,
            "tensor": plan.config.tensor,
            "expert": plan.config.expert,
        },
        "num_ranks": plan.mesh.num_ranks,
        "num_micro_batches": plan.num_micro_batches,
        "device": plan.machine.name,
        "memory_gib": plan.machine.memory_gib,
        "is_measured": plan.machine.is_measured,
        "source": plan.machine.source,
        "settings": chosen_settings(plan.config),
        "accumulate": plan.config.fsdp.accumulate,
        "fits": plan.fits,
        "memory": {
            "peak_bytes": plan.memory.peak.total,
            "peak_gib": plan.peak_gib,
            "needed_gib": plan.needed_gib,
            "place": plan.memory.peak.place,
            "offloaded_bytes": plan.memory.offloaded,
            "generation": None if plan.generation is None else asdict(plan.generation),
            "gib": memory_by_kind(plan),
        },
        "communication": communication_rows(plan),
        "time": {
            "step_s": time.total_s,
            "compute_s": time.compute_s,
            "communication_s": time.communication_s,
            "exposed_s": time.exposed_s,
            "copy_s": time.copy_s,
            "optimizer_s": time.optimizer_s,
            "host_s": time.host_s,
            "offload_s": time.offload_s,
            "exposed_offload_s": time.exposed_offload_s,
            "tokens_per_s": plan.tokens / time.total_s,
            "mfu": plan.mfu,
            "run_hours": plan.run_s / 3600,
            "device_hours": plan.run_s * plan.mesh.num_ranks / 3600,
        },
        "flops": plan.flops,
        "tokens": plan.tokens,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "saving": {
            "every_s": plan.save_every_s,
            "best_s": plan.costs.best_interval_s,
            "mtbf_s": plan.costs.mtbf_s,
            "expected_goodput": plan.costs.goodput(plan.save_every_s),
            "losses": plan.costs.lost_time_fractions(plan.save_every_s),
        },
    } | auto


def _brief(other: Alternative) -> dict[str, Any]:
    plan = other.plan
    estimates = {"fits": plan.fits, "needed_gib": plan.needed_gib, "step_s": plan.time.total_s}
    return {"value": other.value, **estimates, "settings": chosen_settings(plan.config)}


def draw(plan: Plan, path: Path) -> None:
    """Plot memory by kind over one step to a .png or .svg file.  The x axis counts the segments of the step."""
    from matplotlib.figure import Figure  # imported here because it takes a second

    curve = memory_curve(plan.trace, plan.layout, plan.num_micro_batches, plan.machine.rates)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot()
    kinds = [kind for kind in get_args(Kind) if any(moment.by_kind[kind] for moment in curve)]
    steps = range(len(curve))
    series = [[moment.by_kind[kind] / GIB for moment in curve] for kind in kinds]
    axes.stackplot(steps, series, labels=kinds, colors=[_COLORS[kind] for kind in kinds], step="post", linewidth=0)
    peak_at = max(steps, key=lambda number: curve[number].total)
    _mark_peak(axes, plan, peak_at)
    axes.axhline(plan.machine.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, max(1, len(curve) - 1))
    axes.set_ylabel("GiB of live tensors")
    axes.set_xlabel("one step, from the first forward pass to the end of the last backward pass")
    places = [moment.place.partition(" of ")[0] for moment in curve]
    starts = [number for number, place in enumerate(places) if number == 0 or places[number - 1] != place]
    axes.set_xticks(starts, [places[number] for number in starts])
    axes.set_title(f"{plan.config.run.name} on {plan.mesh.replicate} x {plan.mesh.shard} {plan.machine.name}: memory")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True)
    figure.savefig(path, dpi=120)


def _mark_peak(axes: Any, plan: Plan, position: int) -> None:
    peak = plan.memory.peak
    text = f"peak {peak.total / GIB:.1f} GiB\n{peak.place}"
    axes.annotate(
        text,
        (position, peak.total / GIB),
        xytext=(12, 12),
        textcoords="offset points",
        fontsize=9,
        arrowprops={"arrowstyle": "->"},
    )
    axes.set_ylim(0, max(peak.total, plan.machine.budget_bytes if plan.fits else 0) / GIB * 1.18)


def _format_count(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.0f}"
