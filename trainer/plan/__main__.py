"""Predict the memory, communication and time of a run on any number of ranks, without GPUs or weights.

    python -m trainer.plan recipe=llama3_70b mesh.replicate=8 mesh.shard=64 device=h100
    python -m trainer.plan recipe=llama3_8b ranks=64 fsdp.reshard_after_forward=auto train.micro_batch_size=auto

  ranks=N            number of ranks (default: mesh.replicate x mesh.shard; if one of them is -1, the largest number
                     on one node that suits the other one, the global batch, mesh.context, mesh.tensor and mesh.expert)
  device=NAME        a100, h100, h100-pcie, h200, b200, l40s, mi300x, rtx4090, cpu (default: the GPU here, or h100);
                     or a variant of one: "{like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}", also with
                     link_gb_s, bf16_tflops and fp8_tflops
  memory_gib=X       device memory, if it differs from the data sheet
  ranks_per_node=N   default 8 (cpu: 1)
  network_gbps=X     network bandwidth per rank to other nodes, in Gbit/s (default 400)
  imbalance=X        with expert parallelism, token rows on the busiest rank relative to the mean over ranks
                     (default 1, for a perfectly balanced router; trained routers are above 1)
  generate=NxP+A     inside each step, every rank also generates N completions at once (`trainer.gathered`), of up to
                     A tokens each, for prompts of up to P tokens
  --json             print the plan as JSON
  --picture FILE     draw memory over one step, as .png or .svg
  --calibrate        measure this machine first, and use the result for this device from now on; under torchrun or
                     srun, also measure the links between ranks
  --allow-import M   allow importing module M, which the run in recipe= names; may be repeated

All configuration keys of trainer.run can be set.  Exit codes: 2 for a mistake in the input; 3 if the run does not fit,
or if no choice of the `auto` settings does.  With exit code 3, a plan is still printed: for `auto` settings, the one
that needs the least memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.command_line import SettingsParser, missing_recipe_error
from trainer.config.load import load_config
from trainer.config.parallel import (
    MeshShape,
    advice_on_shards,
    resolve_context_method,
    resolve_expert_method,
    resolve_mesh_shape,
    smallest_mesh,
)
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig
from trainer.data.opening import resolve_from_data
from trainer.distributed.environment import find_environment
from trainer.errors import (
    EXIT_DOES_NOT_FIT,
    EXIT_FINISHED,
    UserError,
    print_stderr,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.model.shard import check_sharding
from trainer.plan.calibrate import calibrate
from trainer.plan.experts import advice_on_balance, advice_on_experts
from trainer.plan.generation import GenerationWorkload, advice_on_workload, with_generation
from trainer.plan.machine import Machine, find_machine
from trainer.plan.plan import Plan, make_plan, without_data
from trainer.plan.search import NothingFits, PlannedChoice, auto_settings, fastest_choice, remedies
from trainer.plan.show import draw, print_plan, to_json
from trainer.registry import add_working_directory_to_sys_path

_USAGE = "usage: python -m trainer.plan recipe=NAME [section.key=value ...] [ranks=N] [device=NAME]"


_NUMBERS: dict[str, type[int] | type[float]] = {
    "ranks": int,
    "ranks_per_node": int,
    "memory_gib": float,
    "network_gbps": float,
    "imbalance": float,
}
"""The planner's own settings that are numbers."""

_MOST_RANKS_PER_NODE = 1024


@dataclass
class _Options:
    """The planner's own command-line options, besides the configuration keys of the run."""

    recipe: str | None = None
    device: str = "auto"
    memory_gib: float | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    network_gbps: float = 400.0
    imbalance: float = 1.0
    workload: GenerationWorkload | None = None
    as_json: bool = False
    picture: Path | None = None
    calibrates: bool = False


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the planner for a command line; return the exit code."""
    add_working_directory_to_sys_path()
    parser = SettingsParser("python -m trainer.plan", __doc__, names=("device", "generate", *_NUMBERS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", metavar="FILE")
    parser.add_argument("--calibrate", action="store_true")
    return run_command(lambda: _plan(parser, sys.argv[1:] if argv is None else argv))


def _plan(parser: SettingsParser, argv: Sequence[str]) -> int:
    options, overrides, allow_import = _parse(parser, argv)
    if options.recipe is None and not options.calibrates:
        raise missing_recipe_error(_USAGE, overrides)
    config = load_config(options.recipe or "llama_small", overrides, allow_import, needs_weights=False)
    if config.data.path is not None:
        config = resolve_from_data(config)
    if options.calibrates:
        calibrate(config, None if options.device == "auto" else options.device)
        if options.recipe is None or find_environment().rank > 0:
            return EXIT_FINISHED
    memory_gib = options.memory_gib or config.run.memory_gib
    machine = find_machine(options.device, memory_gib, options.ranks_per_node, options.network_gbps)
    machine = replace(machine, imbalance=options.imbalance)
    config, mesh = _on_mesh(without_data(config), options.ranks, machine)
    try:
        choice = fastest_choice(config, mesh, machine) if auto_settings(config) else None
    except NothingFits as error:
        _show(error.plan, None, options)
        print_stderr(f"error: {error}")
        return EXIT_DOES_NOT_FIT
    plan = choice.plan if choice else make_plan(config, mesh, machine)
    if options.workload is not None:
        plan = with_generation(plan, options.workload)
    _show(plan, choice, options)
    if not options.as_json:
        for line in _advice(plan, choice, options):
            print_stdout(line)
    return EXIT_FINISHED if plan.fits else EXIT_DOES_NOT_FIT


def _on_mesh(config: RunConfig, num_ranks: int | None, machine: Machine) -> tuple[RunConfig, MeshShape]:
    """Return the configuration with the methods of its axes resolved, and its mesh; print warnings about the mesh."""
    num_ranks = num_ranks or default_num_ranks(config, machine)
    ranks_per_node = min(num_ranks, machine.rates.ranks_per_node)
    mesh = check_config(config, num_ranks, ranks_per_node)
    config = resolve_expert_method(resolve_context_method(config, ranks_per_node), ranks_per_node)
    check_sharding(config, mesh.shard)
    for warning in (mesh.straddling_warning(ranks_per_node), advice_on_shards(config, mesh)):
        if warning:
            print_stderr(f"warning: {warning}")
    return config, mesh


def _advice(plan: Plan, choice: PlannedChoice | None, options: _Options) -> Iterator[str]:
    """Yield lines on what other settings would change."""
    yield from advice_on_balance(plan)
    if choice is None:
        yield from advice_on_experts(plan)
    if not plan.fits:
        found = remedies(plan) if plan.generation is None else advice_on_workload(plan, options.workload)
        yield from found or ["no single change of settings would make it fit"]


def _show(plan: Plan, choice: PlannedChoice | None, options: _Options) -> None:
    if options.as_json:
        print_stdout(json.dumps(to_json(plan, choice)))
    else:
        print_plan(plan, choice)
    if options.picture is not None:
        draw(plan, options.picture)


def default_num_ranks(config: RunConfig, machine: Machine) -> int:
    """Return the number of ranks that the mesh sets.

    If the mesh leaves it open, this is the largest number of ranks on one node with which the settings are valid, such
    as the global batch, `mesh.context`, `mesh.tensor` and `mesh.expert`.  If there is none, this is the smallest number
    that the mesh allows, so that the message about the invalid setting is not about the number of ranks.
    """
    per_node = machine.rates.ranks_per_node
    replicate, shard = config.mesh.replicate, per_node if config.mesh.shard == "node" else config.mesh.shard
    if not isinstance(shard, int) or replicate == 0 or shard == 0:
        return resolve_mesh_shape(config.mesh, per_node, per_node).num_ranks
    if replicate > 0 and shard > 0:
        return replicate * shard
    smallest = smallest_mesh(replace(config, mesh=replace(config.mesh, shard=shard))).num_ranks
    for num_ranks in range(per_node // smallest * smallest, 0, -smallest):
        with contextlib.suppress(UserError):
            check_config(config, num_ranks, num_ranks)
            return num_ranks
    return smallest


def _parse(parser: SettingsParser, argv: Sequence[str]) -> tuple[_Options, list[str], list[str]]:
    """Return the planner's options, the overrides of configuration keys, and the modules that may be imported."""
    found, named, overrides = parser.parse_settings(argv)
    parser.refuse_words(found.words, "recipe" in named)
    options = _Options(named.get("recipe"), as_json=found.json, calibrates=found.calibrate)
    options.device = named.get("device", options.device)
    if found.picture is not None:
        options.picture = _parse_picture(found.picture)
    if "generate" in named:
        options.workload = GenerationWorkload.parse(named["generate"])
    if "nproc" in named:
        options.ranks = int(_parse_number("nproc", named["nproc"], int))
    for key, kind in _NUMBERS.items():
        if key in named:
            setattr(options, key, _parse_number(key, named[key], kind))
    return options, overrides, found.allow_import


def _parse_picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise setting_error("--picture", text, "must be a file that ends in .png or .svg", f"{path.stem or 'plan'}.png")
    if not path.absolute().parent.is_dir():
        raise setting_error("--picture", text, f"there is no folder {path.absolute().parent}", path.name)
    return path


def _parse_number(key: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if key == "imbalance" and value < 1:
        raise setting_error(key, text, "must be at least 1, since the busiest rank has at least the mean", 1)
    if key == "ranks_per_node" and value > _MOST_RANKS_PER_NODE:
        raise setting_error(key, text, f"must be at most {_MOST_RANKS_PER_NODE}", 8)
    if not 0 < value < float("inf"):
        rule = "must be a whole number above 0" if kind is int else "must be a number above 0"
        raise setting_error(
            key, text, rule, proposal={"memory_gib": 80, "network_gbps": 400, "imbalance": 1.5}.get(key, 8)
        )
    return value


if __name__ == "__main__":
    sys.exit(command_line())
