"""The start block and the closing summary of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.checkpoint.place import Place
from trainer.checkpoint.room import lack_of_room
from trainer.config import RunConfig
from trainer.config.needs import compiles_blocks
from trainer.data.loader import TrainLoader
from trainer.data.portions import sentences
from trainer.data.stdlib import gzip_bits_per_byte, held_out_text
from trainer.data.tokenizer import tokenizer_of
from trainer.distributed.world import CONTEXT, REPLICATE, SHARD, World
from trainer.lifecycle.resume import Resume
from trainer.lifecycle.state import TrainState
from trainer.metrics.console import readable_bytes, readable_count, readable_duration
from trainer.metrics.fanout import Metrics
from trainer.metrics.horizon import Horizon
from trainer.metrics.skips import SkipCounter
from trainer.model.gradients import evaluating
from trainer.model.parameters import count_parameters, count_trained_parameters
from trainer.model.sample import write_sample
from trainer.optim.optimizer import bytes_of_training
from trainer.plan.forecast import describe_choice
from trainer.plan.search import Choice


def mesh_sizes(mesh: DeviceMesh, config: RunConfig) -> dict[str, int]:
    """Return the size of each axis of a run's mesh, `replicate` first, also where it has only one.

    And `context`, the ranks of the shard axis that share sequences, where there is more than one.
    """
    shared = {CONTEXT: config.context} if config.context > 1 else {}
    return {REPLICATE: 1, **dict(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True)), **shared}


def device_name(device: torch.device) -> str:
    """Return what the device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def start_facts(
    config: RunConfig,
    world: World,
    mesh: DeviceMesh,
    model: nn.Module,
    loader: object,
    sizes: tuple[int, int],
    resumed_step: int | None,
    plan: str,
) -> Mapping[str, str]:
    """Return the start block: the run, its model, mesh, memory, plan, step and data, each in one line.

    sizes: FSDP units, and micro-batches per step on each rank.
    """
    num_units, num_micro_batches = sizes
    axes = zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True)
    context, method = config.context, config.mesh.context_method
    shared = f", {CONTEXT} {context} ({method}) inside {SHARD}" if context > 1 else ""
    batch, micro_batch = config.train.global_batch_size, int(config.train.micro_batch_size)
    num_rows = batch * config.rows_per_sample
    num_parameters, num_trained = count_parameters(model), count_trained_parameters(model)
    trained = "" if num_trained == num_parameters else f", {readable_count(num_trained)} of them trained"
    weights, gradients, kept = bytes_of_training(model, config.optim, config.train.ema > 0)
    held = weights * (1 + config.holds_reference) + gradients + kept
    reference = ", a reference" if config.holds_reference else ""
    talks = f", small messages by {world.interface}" if world.interface else ""
    told = [config.model.name, *config.recipe.notes_on(config.model, model)]
    resumed = "" if resumed_step is None else f"  (resumed at step {resumed_step})"
    return {
        "run": f"{config.run.name} in {config.run.dir}{resumed}",
        "model": f"{', '.join(told)}, {readable_count(num_parameters)} parameters{trained}, "
        f"{num_units} FSDP units and the root",
        "mesh": " x ".join(f"{name} {size}" for name, size in axes) + f"{shared} on {device_name(world.device)}{talks}",
        "memory": f"{readable_bytes(held)} per rank for weights{reference}, gradients and optimizer",
        "plan": plan,
        "step": f"{readable_count(config.step_tokens)} tokens: {num_rows} x {config.data.seq_len}, "
        f"{num_micro_batches} micro-batch{'es' * (num_micro_batches != 1)} of {micro_batch}"
        + (f" on each of {world.size} ranks" if world.size > 1 else ""),
        "data": _data_facts(config, loader),
    }


def _data_facts(config: RunConfig, loader: object) -> str:
    """Return what the run reads: of a source of its own all that is known is its kind."""
    if not isinstance(loader, TrainLoader):
        return f"{config.data.source}, {config.train.steps} steps"
    made = loader.source.sentence
    return "\n".join([config.data.source, *([made] if made else []), *sentences(loader.portions(config.train.steps))])


def start_notes(choice: Choice | None, advice: str, changed: Sequence[str]) -> list[str]:
    """Return what else there is to say at the start: the plan's choice, the profile's advice, changed settings."""
    lines = ["configuration changed since:", *(f"  {line}" for line in changed)]
    return [note for note in (describe_choice(choice), advice, "\n".join(lines) if changed else "") if note]


def room_notes(
    config: RunConfig, world: World, mesh: DeviceMesh, model: nn.Module, state: TrainState, place: Place
) -> list[str]:
    """Return a warning if the checkpoints to come do not fit on the disk of `place`, nothing if they do."""
    stored = state.parts["model"].state_dict()
    weights = sum(t.numel() * t.element_size() for t in stored.values() if isinstance(t, torch.Tensor))
    _, _, kept = bytes_of_training(model, config.optim, config.train.ema > 0)
    num_shards = world.size // mesh_sizes(mesh, config)[REPLICATE]
    steps_left = config.train.steps - state.step
    lack = lack_of_room(place, config.checkpoint, weights + kept * num_shards, steps_left)
    return [lack] if lack else []


def start_record(
    config: RunConfig,
    world: World,
    mesh: DeviceMesh,
    model: nn.Module,
    resume: Resume,
    skips: SkipCounter,
    loader: object,
) -> Mapping[str, Any]:
    """Return the fields of the start record.  A loader of a user's own says nothing of how its samples were made."""
    return {
        "world_size": world.size,
        "mesh": mesh_sizes(mesh, config),
        "parameters": count_parameters(model),
        "trainable_parameters": count_trained_parameters(model),
        "torch": torch.__version__,
        "device": device_name(world.device),
        "resumed_step": resume.step,
        "load_s": resume.seconds,
        "skipped": skips.total,
        **(loader.source.facts if isinstance(loader, TrainLoader) else {}),
    }


def closing(
    config: RunConfig, metrics: Metrics, horizon: Horizon, best: tuple[float, int] | None, seconds: float
) -> list[str]:
    """Return the closing block of a run that has finished: how long, how well, where things are, what next.

    best: loss and step of the best checkpoint.  Empty on all ranks but the first.
    """
    trained, evaluated = metrics.latest.get("train"), metrics.latest.get("eval")
    if trained is None:
        return []
    folder, is_early = config.run.dir, trained.step < config.train.steps
    text = "--chat" if config.data.source == "chat" else "--prompt"
    shown = shlex.quote(folder)
    uses = [f"python -m trainer.generate {shown} {text} TEXT", f"python -m trainer.export {shown} OUT"]
    names = ("metrics.jsonl", "console.log", "checkpoints")
    kept = [name for name in names if (config.run_dir / name).exists()]  # checkpoint.dir may be elsewhere
    is_test = config.schedule.name == "range"  # whose weights have diverged
    held_out = "" if evaluated is None else f", {evaluated.loss:.4f} on held-out data"
    return [
        f"finished {trained.step} steps in {readable_duration(seconds)}: loss {trained.loss:.4f}{held_out}",
        *([f"  earlier than train.steps={config.train.steps}: {horizon.reason(trained.step)}"] if is_early else []),
        *([] if best is None else [f"  best: step {best[1]}, {best[0]:.4f}: {folder}/best"]),
        *([f"  in {folder}: {', '.join(kept)}"] if kept else []),
        f"  next: python -m trainer.report {shown}",
        *(f"        {use}" for use in uses if not is_test),
    ]


def show_result(config: RunConfig, world: World, model: nn.Module, metrics: Metrics) -> None:
    """Show what the model has learnt, if `log.sample_tokens` asks for it: bits per byte of gzip, and a sample.

    Collectives: those of one forward pass per token.
    """
    if not config.log.sample_tokens:
        return
    text = held_out_text(config.data) if world.is_main else None
    if text:
        metrics.say(f"gzip -9 on the same held-out text: {gzip_bits_per_byte(text):.4f} bits/byte", "green")
    tokenizer = tokenizer_of(config.data)
    prompt = [*tokenizer.start_ids, *tokenizer.encode("def ").tolist()]
    sizes = config.log.sample_tokens, config.data.seq_len
    compiles = compiles_blocks(config.train.compile, world.device.type)
    with evaluating(model):
        tokens = write_sample(model, world, prompt, *sizes, compiles)
    metrics.say("\nsample text from the model:\n", "bold")
    metrics.say(tokenizer.decode(tokens))
