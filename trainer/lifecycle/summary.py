"""Describes a run: the facts and notes printed at its start, the start record, and the summary printed at its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.checkpoint.retention import disk_space_warning
from trainer.config import RunConfig
from trainer.config.schema import MODEL
from trainer.data.loader import TrainLoader
from trainer.data.mixture import MixedSource, describe_usage
from trainer.data.opening import open_source
from trainer.data.prompts import chat_prompt_tokens, chat_stop_ids
from trainer.data.source import SourceSubset, Split
from trainer.data.stdlib import StdlibBuild, gzip_bits_per_byte
from trainer.data.tokenizer import tokenizer_of
from trainer.distributed.world import CONTEXT, EXPERT, REPLICATE, SHARD, World
from trainer.errors import UserError
from trainer.experts import ADAPTERS
from trainer.lifecycle.resume import Resume
from trainer.lifecycle.versions import newer_libraries
from trainer.metrics.console import readable_bytes, readable_count, readable_duration
from trainer.metrics.stop_criterion import StopCriterion
from trainer.metrics.writers import Metrics
from trainer.model.lora import expert_matrices, parse_adapter
from trainer.model.parameters import count_parameters, count_trained_parameters
from trainer.model.sample import Sampling, generate_batch
from trainer.optim.groups import describe
from trainer.optim.optimizer import training_bytes
from trainer.plan.forecast import describe_choice
from trainer.plan.plan import teacher_of
from trainer.recipe import module_to_allow
from trainer.weights.adapters import BASE, REFERENCE, BaseWeights
from trainer.weights.exporting import buffers_without_name

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def mesh_sizes(mesh: DeviceMesh, config: RunConfig) -> dict[str, int]:
    """Return the size of each axis of a run's mesh by name.  `replicate` comes first, with size 1 if the mesh lacks it.

    The sizes of context-parallel and expert-parallel groups are added as `context` and `expert` if they are above 1.
    """
    groups = {CONTEXT: config.context, EXPERT: config.expert}
    in_use = {name: size for name, size in groups.items() if size > 1}
    return {REPLICATE: 1, **dict(zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True)), **in_use}


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or `cpu` for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def start_facts(trainer: Trainer) -> Mapping[str, str]:
    """Return the entries of the start block (the summary printed at the start), from `run` to `data`, by name.

    On rank 0, this may compute the plan; on other ranks, the entry `plan` is empty.
    """
    config, world, mesh, model, loader = trainer.config, trainer.world, trainer.mesh, trainer.model, trainer.loader
    num_units, num_micro_batches, resumed_step = len(trainer.units), trainer.num_micro_batches, trainer.resume.step
    axes = zip(mesh.mesh_dim_names or (SHARD,), mesh.shape, strict=True)
    groups = (
        (CONTEXT, config.context, config.mesh.context_method),
        (EXPERT, config.expert, config.mesh.expert_method),
    )
    group_facts = "".join(f", {name} {size} ({method}) inside {SHARD}" for name, size, method in groups if size > 1)
    batch, micro_batch = config.train.global_batch_size, int(config.train.micro_batch_size)
    num_sequences = batch * config.rows_per_sample
    num_parameters, num_trained = count_parameters(model), count_trained_parameters(model)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    trained_facts = "" if num_trained == num_parameters else f", {readable_count(num_trained)} of them trained"
    weight_bytes, gradient_bytes, optimizer_bytes = training_bytes(model, config.optim, config.train.ema > 0)
    state_bytes = weight_bytes * (1 + config.has_reference_model) + gradient_bytes + optimizer_bytes
    second_model = ", a reference" if config.has_reference_model else ""
    if (teacher := teacher_of(config, trainer.mesh.size(trainer.mesh.ndim - 1))) is not None:
        state_bytes, second_model = state_bytes + teacher.num_bytes, ", a teacher"
    interface = f", small messages by {world.interface}" if world.interface else ""
    # Shown only if the optimizer, its learning rate or its decay differ between parameters.
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer_facts = [
        *describe(trainer.optimizer.parts, parameter_names, bool(trainer.config.optim.groups)),
        *trainer.optimizer.notes,
    ]
    description = [config.model.name, *config.recipe.notes_on(config.model, model)]
    resume_facts = "" if resumed_step is None else f"  (resumed at step {resumed_step})"
    return {
        "run": f"{config.run.name} in {config.run.dir}{resume_facts}",
        "model": f"{', '.join(description)}, {readable_count(num_parameters)} parameters{trained_facts}, "
        + (f"{num_units} FSDP units and the root" if is_sharded else "not sharded"),
        "weights": _weights_facts(config, trainer.initial_weights_source, trainer.resume, trainer.state.parts),
        **({"adapters": _adapter_facts(model)} if config.lora.rank else {}),
        "tokenizer": _tokenizer_facts(config, loader),
        "template": _template_facts(config),
        "mesh": " x ".join(f"{name} {size}" for name, size in axes)
        + f"{group_facts} on {device_name(world.device)}{interface}",
        "memory": f"{readable_bytes(state_bytes)} per rank for weights{second_model}, gradients and optimizer",
        **({"optimizer": "\n".join(optimizer_facts)} if optimizer_facts else {}),
        "plan": trainer.forecast.summary() if world.is_main else "",
        "step": f"{readable_count(config.step_tokens)} token positions: {num_sequences} x {config.data.seq_len}, "
        f"{num_micro_batches} micro-batch{'es' * (num_micro_batches != 1)} of {micro_batch}"
        + (f" on each of {world.size} ranks" if world.size > 1 else ""),
        "data": _data_facts(config, loader),
    }


def _adapter_facts(model: nn.Module) -> str:
    """Describe which layers have adapters, their fractions of the adapter parameters, and experts without adapters."""
    sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}
    left_out = dict(expert_matrices(model))
    for name, parameter in model.named_parameters():
        if part := parse_adapter(name):
            layer_sizes, layer = sizes[parameter.ndim == 3], part[0].rpartition(".")[2]
            layer_sizes[layer] = layer_sizes.get(layer, 0) + parameter.numel()
            left_out.pop(part[0].replace(f".{ADAPTERS}.", "."), None)
    total = sum(size for layer_sizes in sizes.values() for size in layer_sizes.values())
    facts = [
        f"{', '.join(layer_sizes)}{' of the experts' * is_expert}: {readable_count(sum(layer_sizes.values()))} "
        f"parameters, {sum(layer_sizes.values()) / total:.1%} of them"
        for is_expert, layer_sizes in sizes.items()
        if layer_sizes
    ]
    if left_out:
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in left_out))
        facts.append(f"none on {names} of {'the' if not sizes[True] else 'some'} experts; lora.targets can name them")
    return "\n".join(facts)


def _weights_facts(config: RunConfig, initial_weights_source: str, resume: Resume, parts: Mapping[str, object]) -> str:
    """Describe where the trained weights and any frozen base or reference weights come from.

    initial_weights_source: the result of `load_initial_weights`.
    parts: the parts of the run's state.
    """
    if resume.step is not None:
        initial_weights_source = f"checkpoint {resume.path} (step {resume.step})"
    if config.lora.rank:
        base, rank = parts.get(BASE), config.lora.rank
        base_weights = base.path if isinstance(base, BaseWeights) and base.path else initial_weights_source
        adapters = (
            f"from {initial_weights_source}"
            if resume.step is not None
            else f"drawn at random (run.seed={config.run.seed})"
        )
        packed = f", packed as {config.lora.base_dtype}" if config.lora.packs else ""
        return f"{base_weights}, frozen{packed}; adapters of rank {rank} {adapters}"
    if config.has_reference_model:
        reference = parts.get(REFERENCE)
        path = reference.path if isinstance(reference, BaseWeights) and reference.path else "the same weights"
        return f"{initial_weights_source}; reference model: {path}"
    return initial_weights_source


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


def start_notes(trainer: Trainer, advice: Sequence[str], is_evaluated: bool) -> list[str]:
    """Return the lines to print below the start block.

    These are the settings that the plan chose, `advice`, settings that differ from the checkpoint's, a schedule that
    does not reach its peak, and warnings if evaluations have no data, the model cannot be exported, or future
    checkpoints do not fit on the disk.
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
    if buffers := buffers_without_name(trainer.model, config.recipe, config.model):
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
    last_rate = config.optim.lr * num_steps / warmup
    return (
        f"the run ends within its warmup of {warmup} steps: the learning rate rises to {last_rate:.3g} instead of "
        f"{config.optim.lr:g}"
    )


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


def closing_summary(
    config: RunConfig, metrics: Metrics, stop_criterion: StopCriterion, best: tuple[float, int] | None, seconds: float
) -> list[str]:
    """Return the lines of a finished run's closing block: duration, losses, files and next commands.

    best: metric and step of the best checkpoint.
    seconds: the run's duration.

    The result is empty without a train record, as on all ranks except rank 0.
    """
    last_train, last_eval = metrics.latest.get("train"), metrics.latest.get("eval")
    if last_train is None:
        return []
    folder, is_early = config.run.dir, last_train.step < config.train.steps
    first, *others = next_commands(config)
    names = ("metrics.jsonl", "console.log", "checkpoints")
    files = [name for name in names if (config.run_dir / name).exists()]  # checkpoint.dir may be elsewhere
    held_out = "" if last_eval is None else f", {last_eval.loss:.4f} on held-out data"
    return [
        f"finished {last_train.step} steps in {readable_duration(seconds)}: loss {last_train.loss:.4f}{held_out}",
        *(
            [f"  earlier than train.steps={config.train.steps}: {stop_criterion.reason(last_train.step)}"]
            if is_early
            else []
        ),
        *([] if best is None else [f"  best: step {best[1]}, {best[0]:.4f}: {folder}/best"]),
        *([f"  in {folder}: {', '.join(files)}"] if files else []),
        f"  next: {first}",
        *(f"        {command}" for command in others),
    ]


def next_commands(config: RunConfig) -> list[str]:
    """Return commands that use a finished run, ready to paste into the same shell.

    Commands that load the weights must import the model; for a custom model they include `--allow-import`.  They are
    omitted if the model is defined in a script that would train again when imported.
    """
    folder = shlex.quote(config.run.dir)
    report = f"python -m trainer.report {folder}"
    if config.schedule.name == "range":  # a range test leaves diverged weights
        return [report]
    module, python = module_to_allow(config.model.name), "python"
    if module == "__main__":
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is None and (not script.is_file() or "__name__" not in script.read_text(errors="replace")):
            return [report]
        module = script.stem if spec is None else spec.name.removesuffix(".__main__")
        if spec is None and script.resolve().parent != Path.cwd():
            python = f"PYTHONPATH={shlex.quote(str(script.resolve().parent))} python"
    allow = f" --allow-import {shlex.quote(module)}" if module else ""
    exports_folder = config.recipe.hf is not None or config.lora.rank > 0
    target = "OUT" if exports_folder else "OUT.safetensors"  # this format needs no mapping to Hugging Face names
    commands = [report, f"{python} -m trainer.generate {folder} {_text_option(config)} TEXT{allow}"]
    if config.data.source == "synthetic":  # its tokens are not text
        commands.pop()
    return [*commands, f"{python} -m trainer.export {folder} {target}{allow}"]


def _text_option(config: RunConfig) -> str:
    """Return the `trainer.generate` option for this data: `--chat` for chats with a template, otherwise `--prompt`."""
    if config.data.source != "chat":
        return "--prompt"
    try:
        chat_prompt_tokens("Hi", config.data.tokenizer, "--chat", config.data.chat_template)
    except UserError:
        return "--prompt"
    return "--chat"


def show_result(config: RunConfig, world: World, model: nn.Module, metrics: Metrics) -> None:
    """If `log.sample_tokens` is set, print a sample from the model; for `stdlib` data, also gzip's bits per byte.

    The latter can be compared with the loss.  Collectives: those of `generate_batch`.
    """
    if not config.log.sample_tokens:
        return
    if world.is_main and config.data.source == "stdlib":
        by_gzip = gzip_bits_per_byte(b"".join(StdlibBuild(tokenizer_of(config.data)).documents("eval")))
        metrics.print(f"gzip -9 on the same held-out text: {by_gzip:.4f} bits/byte", "green")
    tokenizer, is_chat = tokenizer_of(config.data), config.data.source == "chat"
    prompt = _find_chat_prompt(config) if is_chat else [*tokenizer.start_ids, *tokenizer.encode("def ").tolist()]
    end_ids = chat_stop_ids(config.data.tokenizer, config.data.chat_template) if is_chat else set()
    (generated,) = generate_batch(
        model,
        [prompt],
        config.log.sample_tokens,
        Sampling(),
        ends=end_ids,
        context=config.data.seq_len,
        device=world.device,
    )
    if is_chat:
        metrics.print("\nsample answer from the model, to:\n", "bold")
        metrics.print(tokenizer.decode(prompt))
        metrics.print("\nits answer:\n", "bold")
        metrics.print(tokenizer.decode(generated.tokens))
    else:
        metrics.print("\nsample text from the model:\n", "bold")
        metrics.print(tokenizer.decode([*prompt, *generated.tokens]))


def _find_chat_prompt(config: RunConfig) -> list[int]:
    """Return a conversation's tokens up to the assistant's turn, preferably from a held-out conversation."""
    from trainer.data.chat.source import ChatSource, PairSource  # imports jinja2

    splits: tuple[Split, ...] = ("eval", "train")
    for split in splits:
        source = open_source(config.data, config.vocab_size, split)
        for chat_source in source.sources.values() if isinstance(source, MixedSource) else [source]:
            chats = chat_source.base if isinstance(chat_source, SourceSubset) else chat_source
            if isinstance(chats, (ChatSource, PairSource)) and (prompt := chats.first_prompt()):
                return prompt
    data = config.data  # all conversations start with a target, as with data.train_on=all
    return chat_prompt_tokens("Hi", data.tokenizer, "log.sample_tokens", data.chat_template)
