"""What a run says about itself: the start block and notes, the start record, the closing block, and a sample."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.checkpoint.retention import disk_space_warning
from trainer.config.schema import MODEL, RunConfig
from trainer.data.loader import TrainLoader
from trainer.data.mixture import describe_usage
from trainer.data.prompts import chat_prompt_tokens, chat_stop_ids
from trainer.data.source import SourceSubset
from trainer.data.stdlib import StdlibBuild, gzip_bits_per_byte
from trainer.data.tokenizer import tokenizer_of
from trainer.distributed.world import CONTEXT, EXPERT, REPLICATE, SHARD, TENSOR, World
from trainer.errors import UserError
from trainer.experts import ADAPTERS
from trainer.metrics.console import readable_bytes, readable_count, readable_duration
from trainer.metrics.stop_criterion import StopCriterion
from trainer.metrics.writers import Metrics
from trainer.model.lora import expert_matrices, parse_adapter
from trainer.model.parameters import count_parameters, count_trained_parameters
from trainer.model.sample import Sampling, generate_batch
from trainer.objective import OBJECTIVES
from trainer.optim.groups import describe
from trainer.optim.optimizer import training_bytes
from trainer.plan.forecast import describe_choice
from trainer.plan.layout import teacher_of
from trainer.registry import MODELS
from trainer.weights.adapters import BASE, REFERENCE, BaseWeights
from trainer.weights.exporting import buffers_without_name

if TYPE_CHECKING:
    from trainer.trainer import Trainer

NEWEST_TESTED = {
    "torch": "2.13.0",
    "torchdata": "0.11.0",
    "transformers": "5.24.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "omegaconf": "2.4.0",
}
"""The newest versions that the tests have passed with, of the libraries whose behaviour a run depends on; a test keeps
them equal to those in constraints.txt."""


def mesh_sizes(mesh: DeviceMesh, config: RunConfig) -> dict[str, int]:
    """Return the size of each axis of a run's mesh by name.  `replicate` comes first, with size 1 if the mesh lacks it.

    The sizes of context-, tensor- and expert-parallel groups are added as `context`, `tensor` and `expert` if they are
    above 1.
    """
    groups = {CONTEXT: config.context, TENSOR: config.tensor, EXPERT: config.expert}
    in_use = {name: size for name, size in groups.items() if size > 1}
    return {REPLICATE: 1, **dict(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True)), **in_use}


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or `cpu` for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# ---------------------------------------------------------------------------------------------------------------
# The start block


def start_facts(trainer: Trainer) -> Mapping[str, str]:
    """Return the entries of the start block (the summary printed at the start), from `run` to `data`, by name.

    On rank 0, this may compute the plan; other ranks have no entry `plan`.
    """
    config, resumed_step = trainer.config, trainer.resume.step
    # Shown only if the optimizer, its learning rate or its decay differ between parameters.
    parameter_names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer_facts = [
        *describe(trainer.optimizer.parts, parameter_names, bool(config.optim.groups)),
        *trainer.optimizer.notes,
    ]
    facts = {
        "run": f"{config.run.name} in {config.run.dir}"
        + ("" if resumed_step is None else f"  (resumed at step {resumed_step})"),
        "model": _model_facts(trainer),
        "weights": _weights_facts(trainer),
        "adapters": _adapter_facts(trainer.model) if config.lora.rank else "",
        "tokenizer": _tokenizer_facts(config, trainer.loader),
        "template": _template_facts(config),
        "mesh": _mesh_facts(trainer),
        "memory": _memory_facts(trainer),
        "optimizer": "\n".join(optimizer_facts),
        "plan": trainer.forecast.summary() if trainer.world.is_main else "",
        "step": _step_facts(trainer),
        "data": _data_facts(config, trainer.loader),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _model_facts(trainer: Trainer) -> str:
    """Describe the model's size, and how it is divided for sharding."""
    config, model = trainer.config, trainer.model
    num_parameters, num_trained = count_parameters(model), count_trained_parameters(model)
    size = f"{readable_count(num_parameters)} parameters"
    if num_trained != num_parameters:
        size += f", {readable_count(num_trained)} of them trained"
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    units = f"{len(trainer.units)} FSDP units and the root" if is_sharded else "not sharded"
    return ", ".join([config.model.name, *config.spec.notes_on(config.model, model), size, units])


def _weights_facts(trainer: Trainer) -> str:
    """Describe where the trained weights and any frozen base or reference weights come from."""
    config, resume, parts = trainer.config, trainer.resume, trainer.state.parts
    is_resumed = resume.step is not None
    source = f"checkpoint {resume.path} (step {resume.step})" if is_resumed else trainer.initial_weights_source
    if config.lora.rank:
        base = parts.get(BASE)
        base_weights = base.path if isinstance(base, BaseWeights) and base.path else source
        adapters = f"from {source}" if is_resumed else f"drawn at random (run.seed={config.run.seed})"
        packed = f", packed as {config.lora.base_dtype}" if config.lora.packs else ""
        return f"{base_weights}, frozen{packed}; adapters of rank {config.lora.rank} {adapters}"
    if config.has_reference_model:
        reference = parts.get(REFERENCE)
        path = reference.path if isinstance(reference, BaseWeights) and reference.path else "the same weights"
        return f"{source}; reference model: {path}"
    return source


def _adapter_facts(model: nn.Module) -> str:
    """Describe which layers have adapters, their fractions of the adapter parameters, and experts without adapters."""
    sizes: dict[str, int] = {}
    left_out = dict(expert_matrices(model))
    for name, parameter in model.named_parameters():
        if part := parse_adapter(name):
            layer = part[0].rpartition(".")[2] + (" of the experts" if parameter.ndim == 3 else "")
            sizes[layer] = sizes.get(layer, 0) + parameter.numel()
            left_out.pop(part[0].replace(f".{ADAPTERS}.", "."), None)
    total = sum(sizes.values())
    facts = f"{readable_count(total)} parameters: "
    facts += ", ".join(f"{layer} {size / total:.1%}" for layer, size in sizes.items())
    if left_out:
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in left_out))
        facts += f"\nnone on {names} of the experts; lora.targets can name them"
    return facts


def _tokenizer_facts(config: RunConfig, loader: object) -> str:
    """Describe the data's tokenizer and its vocabulary size."""
    data = config.data
    if not isinstance(loader, TrainLoader):
        return f"{data.tokenizer} (data.tokenizer; the samples come from a custom loader)"
    name, num_ids = loader.source.tokenizer, loader.source.vocab_size
    if name is None:
        return "none: the data are token ids"
    model_vocab = config.vocab_size
    ids = (
        f"{num_ids:,} ids"
        if model_vocab is None or model_vocab == num_ids
        else f"{num_ids:,} of the model's {model_vocab:,} ids"
    )
    if name == tokenizer_of(data).name:
        return f"{data.tokenizer} ({ids})"
    return f"{name} ({ids}), as the token shards say; data.tokenizer={data.tokenizer} is not used for them"


def _template_facts(config: RunConfig) -> str:
    """Describe where the chat template comes from."""
    data = config.data
    if data.source != "chat":
        return "none: the data are not chats"
    if data.chat_template != MODEL:
        return f"{data.chat_template} (data.chat_template)"
    from trainer.data.chat.template import template_path  # imports jinja2, which only chats need

    template = template_path(data.tokenizer)
    return f"none in {data.tokenizer}" if template is None else str(template)


def _mesh_facts(trainer: Trainer) -> str:
    """Describe the mesh, groups inside its last axis, and the devices."""
    config, world, mesh = trainer.config, trainer.world, trainer.mesh
    axes = zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True)
    facts = " x ".join(f"{name} {size}" for name, size in axes)
    for name, size, method in (
        (CONTEXT, config.context, f" ({config.mesh.context_method})"),
        (TENSOR, config.tensor, ""),
        (EXPERT, config.expert, f" ({config.mesh.expert_method})"),
    ):
        if size > 1:
            facts += f", {name} {size}{method} inside {SHARD}"
    interface = f", small messages by {world.interface}" if world.interface else ""
    return f"{facts} on {device_name(world.device)}{interface}"


def _memory_facts(trainer: Trainer) -> str:
    """Return what a rank holds during the whole run."""
    config, num_shards = trainer.config, trainer.mesh.size(trainer.mesh.ndim - 1)
    weights, gradients, optimizer = training_bytes(trainer.model, config.optim, config.train.ema > 0)
    total, second_model = weights + gradients + optimizer, ""
    if config.has_reference_model:
        total, second_model = total + weights, ", a reference"
    if (teacher := teacher_of(config, num_shards)) is not None:
        total, second_model = total + teacher.num_bytes, ", a teacher"
    return f"{readable_bytes(total)} per rank for weights{second_model}, gradients and optimizer"


def _step_facts(trainer: Trainer) -> str:
    """Describe the batch, and how it is divided."""
    config, world, num_micro_batches = trainer.config, trainer.world, trainer.num_micro_batches
    num_rows = config.train.global_batch_size * config.rows_per_sample
    facts = f"{readable_count(config.step_tokens)} token positions: {num_rows} x {config.data.seq_len}"
    facts += f", {num_micro_batches} micro-batch{'es' * (num_micro_batches != 1)} of {config.train.micro_batch_size}"
    return f"{facts} on each of {world.size} ranks" if world.size > 1 else facts


def _data_facts(config: RunConfig, loader: object) -> str:
    """Describe the run's data and how much of the data is used; with a custom loader, only the settings."""
    if not isinstance(loader, TrainLoader):
        return f"{config.data.source} (data.source), {config.train.steps} steps; the samples come from a custom loader"
    path = config.data.path
    paths = path if isinstance(path, Mapping) else {"": path} if path else {}
    path_list = ", ".join(f"{name}={file}" if name else file for name, file in paths.items())
    remarks = loader.source.summary
    if config.data.holdout and not isinstance(loader.source, SourceSubset):
        unit = "conversations" if config.data.source == "chat" else "documents"
        first_line, newline, warnings = remarks.partition("\n")
        held_out = f"{config.data.holdout:.1%} of the {unit} are held out (data.holdout)"
        remarks = f"{first_line}{', ' * bool(first_line)}{held_out}{newline}{warnings}"
    source = f"{config.data.source}: {path_list}" if path_list else config.data.source
    return "\n".join(
        [source, *([remarks] if remarks else []), *describe_usage(loader.usage_by_phase(config.train.steps))]
    )


# ---------------------------------------------------------------------------------------------------------------
# Notes and the start record


def start_notes(trainer: Trainer, advice: Sequence[str], is_evaluated: bool) -> list[str]:
    """Return the lines to print below the start block.

    These are the settings that the plan chose, `advice`, settings that differ from the checkpoint's, libraries that are
    newer than tested, a schedule that does not reach its peak, and warnings if evaluations have no data, the model
    cannot be exported, or future checkpoints do not fit on the disk.
    """
    config, changed = trainer.config, trainer.resume.changed
    lines = ["configuration changed since:", *(f"  {line}" for line in changed)]
    notes = [describe_choice(trainer.plan_choice), *advice, "\n".join(lines) if changed else "", newer_libraries()]
    if config.eval.every and not is_evaluated:
        reason = "data.holdout=0" if config.data.holdout == 0 else "there is too little data to divide"
        notes.append(
            f"warning: eval.every={config.eval.every}, but nothing is held out for evaluation ({reason}), so no "
            "evaluation will run; give data.eval_path, or set eval.every=0"
        )
    notes.append(_schedule_note(config))
    if buffers := buffers_without_name(trainer.model, config.spec, config.model):
        notes.append(
            f"warning: this model cannot be exported: Hugging Face's {config.model.name} has no {buffers[0]}"
            + (f" (and {len(buffers) - 1} more)" if len(buffers) > 1 else "")
        )
    if trainer.world.is_main:
        model_state = trainer.state.parts["model"].state_dict()
        weights = sum(t.numel() * t.element_size() for t in model_state.values() if isinstance(t, torch.Tensor))
        _, _, optimizer_bytes = training_bytes(trainer.model, config.optim, config.train.ema > 0)
        num_shards = trainer.world.size // mesh_sizes(trainer.mesh, config)[REPLICATE]
        num_bytes, steps_left = weights + optimizer_bytes * num_shards, config.train.steps - trainer.state.step
        notes.append(disk_space_warning(trainer.storage_to_check, config.checkpoint, num_bytes, steps_left))
    return [note for note in notes if note]


def _schedule_note(config: RunConfig) -> str:
    """Return a line about a run that ends within its warmup; empty if it does not, or has no warmup."""
    schedule, num_steps = config.schedule, config.train.steps
    warmup = schedule.warmup(num_steps)
    if schedule.name == "range" or not 0 < num_steps <= warmup:
        return ""
    if warmup == num_steps:
        return (
            "" if schedule.name == "constant" else f"the warmup takes all {num_steps} steps, so the rate never decays"
        )
    last_rate = config.optim.peak_lr * num_steps / warmup
    return (
        f"the run ends within its warmup of {warmup} steps: the learning rate rises to {last_rate:.3g} instead of "
        f"{config.optim.peak_lr:g}"
    )


def newer_libraries(version_of: Callable[[str], str] = importlib.metadata.version) -> str:
    """Return a line that names the installed libraries which are newer than the newest tested ones; empty without any.

    version_of: returns the installed version of a library, or raises PackageNotFoundError.
    """
    found = []
    for name, tested in NEWEST_TESTED.items():
        try:
            installed = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _release(installed) > _release(tested):
            found.append(f"{name} {installed} (tested up to {tested})")
    return f"newer than tested: {', '.join(found)}" if found else ""


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) for "2.13.0+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return () if numbers is None else tuple(map(int, numbers[0].split(".")))


def start_record(trainer: Trainer) -> Mapping[str, Any]:
    """Return the fields of the start record; with a custom loader, without facts about the data."""
    return {
        "world_size": trainer.world.size,
        "mesh": mesh_sizes(trainer.mesh, trainer.config),
        "parameters": count_parameters(trainer.model),
        "trainable_parameters": count_trained_parameters(trainer.model),
        "torch": torch.__version__,
        "device": device_name(trainer.world.device),
        "resumed_step": trainer.resume.step,
        "load_s": trainer.resume.seconds,
        "skipped": trainer.state.skips.total,
        **(trainer.loader.source.facts if isinstance(trainer.loader, TrainLoader) else {}),
    }


# ---------------------------------------------------------------------------------------------------------------
# The end


def closing_summary(
    config: RunConfig,
    metrics: Metrics,
    stop_criterion: StopCriterion,
    best: tuple[float, int] | None,
    resumed_step: int | None,
    seconds: float,
) -> list[str]:
    """Return the lines of a finished run's closing block: duration, losses, files and next commands.

    best: metric and step of the best checkpoint.
    resumed_step: the step of the checkpoint that this attempt has loaded, if any.
    seconds: the duration of this attempt.

    The result is empty without a train record, as on all ranks except rank 0.
    """
    last_train, last_eval = metrics.latest.get("train"), metrics.latest.get("eval")
    if last_train is None:
        return []
    held_out = "" if last_eval is None else f", {last_eval.loss:.4f} on held-out data"
    steps = f"{last_train.step} steps" + (f", {last_train.step - resumed_step} of them" if resumed_step else "")
    lines = [f"finished {steps} in {readable_duration(seconds)}: loss {last_train.loss:.4f}{held_out}"]
    if last_train.step < config.train.steps:
        lines.append(f"  earlier than train.steps={config.train.steps}: {stop_criterion.reason(last_train.step)}")
    if best is not None:
        lines.append(f"  best: step {best[1]}, {best[0]:.4f}: {config.run.dir}/best")
    names = ("metrics.jsonl", "console.log", "checkpoints")
    if files := [name for name in names if (config.run_dir / name).exists()]:  # checkpoint.dir may be elsewhere
        lines.append(f"  in {config.run.dir}: {', '.join(files)}")
    first, *others = next_commands(config)
    return [*lines, f"  next: {first}", *(f"        {command}" for command in others)]


def next_commands(config: RunConfig) -> list[str]:
    """Return commands that use a finished run, ready to paste into the same shell: its report, text and an export.

    For a custom model or objective they include `--allow-import`.  There is only the report if either is defined in the
    script that was started, which would train again when imported, and after a range test, which leaves diverged
    weights.
    """
    folder = shlex.quote(config.run.dir)
    report = f"python -m trainer.report {folder}"
    custom = (MODELS.module_to_allow(config.model.name), OBJECTIVES.module_to_allow(config.train.objective))
    modules = sorted({module for module in custom if module is not None})
    if "__main__" in modules or config.schedule.name == "range":
        return [report]
    allow = "".join(f" --allow-import {shlex.quote(module)}" for module in modules)
    option = "--prompt" if _chat_prompt(config) is None else "--chat"
    has_text = config.data.source != "synthetic"
    exports_folder = config.spec.hf is not None or config.lora.rank > 0
    target = "OUT" if exports_folder else "OUT.safetensors"  # this format needs no mapping to Hugging Face names
    return [
        report,
        *([f"python -m trainer.generate {folder} {option} TEXT{allow}"] if has_text else []),
        f"python -m trainer.export {folder} {target}{allow}",
    ]


def _chat_prompt(config: RunConfig) -> list[int] | None:
    """Return the tokens of a chat that begins with "Hi"; None if the data are not chats, or without a chat template."""
    data = config.data
    if data.source != "chat":
        return None
    try:
        return chat_prompt_tokens("Hi", data.tokenizer, "log.sample_tokens", data.chat_template, data.special_tokens)
    except UserError:
        return None


def show_result(config: RunConfig, world: World, model: nn.Module, metrics: Metrics) -> None:
    """If `log.sample_tokens` is set, print a sample from the model; for `stdlib` data, also gzip's bits per byte.

    The latter can be compared with the loss.  Collectives: those of `generate_batch`.
    """
    data = config.data
    if not config.log.sample_tokens:
        return
    if world.is_main and data.source == "stdlib":
        by_gzip = gzip_bits_per_byte(b"".join(StdlibBuild(tokenizer_of(data)).documents("eval")))
        metrics.print(f"gzip -9 on the same held-out text: {by_gzip:.4f} bits/byte", "green")
    tokenizer = tokenizer_of(data)
    prompt = _chat_prompt(config) or [*tokenizer.start_ids, *tokenizer.encode("def ").tolist()]
    (generated,) = generate_batch(
        model,
        [prompt],
        config.log.sample_tokens,
        Sampling(),
        ends=chat_stop_ids(data.tokenizer, data.chat_template) if data.source == "chat" else set(),
        context=data.seq_len,
        device=world.device,
    )
    metrics.print("\nsample from the model:\n", "bold")
    metrics.print(tokenizer.decode([*prompt, *generated.tokens]))
