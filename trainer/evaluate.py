"""Evaluate a model on held-out data, without training it or writing to its run folder.

    python -m trainer.evaluate <run, checkpoint or Hugging Face folder> [section.key=value ...] [nproc=N] [--json]

    python -m trainer.evaluate <any of these> --lm-eval TASK,... [--tasks FOLDER] [--json]  with lm-evaluation-harness

A run is evaluated with its own settings, by default on one rank.  Any key can be overridden: data.eval_path selects
other data, and eval.steps=0 evaluates on all of it.  --lm-eval evaluates on tasks of the lm_eval library, or on tasks
defined by the YAML files in a folder; a run is first exported to a temporary folder, with its adapters merged.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import run
from trainer.config.changes import stored_value
from trainer.config.command_line import parse, split_allow_import
from trainer.config.files import check_imports, read_stored
from trainer.config.load import load_config
from trainer.config.model_folder import check_weights, find_native
from trainer.config.requirements import check_requirements, likely_device
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig
from trainer.config.weights import local_model_path, locate
from trainer.distributed.environment import Environment, die_with_parent, find_environment, limit_spinning
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    TrainingFailed,
    UserError,
    choice_error,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.files import temporary_folder
from trainer.lifecycle.launch import spawn
from trainer.metrics.record import Record, logged_names
from trainer.registry import add_working_directory_to_sys_path
from trainer.stopping import stop
from trainer.tables import table_lines

if TYPE_CHECKING:
    from trainer.checkpoint.weights import StoredWeights
    from trainer.trainer import Trainer

_EVALUATION_OVERRIDES = {
    "run.dir": str(Path(tempfile.gettempdir()) / "meshtrainer-evaluate"),  # never created
    "mesh.replicate": "1",
    "mesh.shard": "-1",
    "mesh.context": "1",
    "mesh.expert": "1",
    "run.on_end": "null",
    "checkpoint.resume": "none",
    "checkpoint.dir": "null",
    "log.wandb": "off",
    "log.tensorboard": "false",
    "log.trackers": "[]",
    "log.prometheus": "null",
    "log.profile_steps": "null",
}
"""Settings that replace the run's own: an evaluation can run on any number of ranks, and stores no results."""


_DISPLAYED_PATH_OPTION = "--shown-as"
"""Internal option for spawned ranks: the path to display for the weights, instead of the pinned path that they read."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate.

    weights: the path of its weights, to display.
    step: the training step of the weights; None for a Hugging Face folder.
    stored: the open checkpoint; None for a Hugging Face folder.
    """

    config: RunConfig
    weights: str
    step: int | None
    stored: StoredWeights | None = None


def find_subject(
    path: str, overrides: Sequence[str], allow_import: Collection[str] = (), stack: ExitStack | None = None
) -> Subject:
    """Return the model at `path`: a run (its newest checkpoint), a checkpoint, or a Hugging Face folder.

    A Hugging Face folder is evaluated with the default settings and the overrides, and needs no training data.

    allow_import: the modules that a checkpoint's configuration may import.
    stack: if given, the checkpoint stays readable until the stack closes, even if the run prunes the checkpoint.

    Raises UserError for invalid input, and TrainingFailed for a corrupt checkpoint.
    """
    from trainer.checkpoint.storage import PinnedStorage
    from trainer.checkpoint.weights import open_checkpoint

    path = local_model_path(path)
    source, location = None, locate(path)
    override_keys = {override.partition("=")[0] for override in overrides}
    if location.kind == "huggingface":
        folder = location.path
        if "model.fresh" not in override_keys:
            check_weights(folder, "path")
        native = find_native(folder)
        model = {"name": native[0].name} if native else {"name": "hf", "path": folder}
        data = {"tokenizer": folder} if (Path(folder) / "tokenizer.json").is_file() else {}
        config_yaml, weights, step = json.dumps({"model": model, "data": data}), folder, None
        defaults = {"train.init_from": folder if native else "null"}
        eval_path = dict(override.split("=", 1) for override in overrides if "=" in override).get("data.eval_path")
        # Some sources require data.path; an evaluation never opens it.
        defaults |= {} if eval_path is None else {"data.path": eval_path}
    else:
        source = open_checkpoint(location.path)
        config_yaml, weights, step = source.config_yaml, str(source.storage), source.manifest.step
        storage = source.storage
        weights_path = (
            stack.enter_context(storage.linked_folder())
            if stack and isinstance(storage, PinnedStorage)
            else str(storage)
        )
        defaults = {"train.init_from": _init_from_value(source, weights_path)}
        if "data.tokenizer" not in override_keys:
            # Use the run's tokenizer, even if its base weights came with a different one.
            stored_changes = stored_value(config_yaml, "checkpoint.allow_changes")
            allowed = [*(stored_changes if isinstance(stored_changes, list) else []), "data.tokenizer"]
            defaults["checkpoint.allow_changes"] = f"[{','.join(map(str, allowed))}]"
    check_imports(read_stored(config_yaml), override_keys, allow_import)
    evaluation_overrides = [
        f"{key}={value}" for key, value in (_EVALUATION_OVERRIDES | defaults).items() if key not in override_keys
    ]
    with temporary_folder() as scratch:
        file = scratch / "evaluation.yaml"
        file.write_text(config_yaml, encoding="utf-8")
        config = load_config(str(file), [*evaluation_overrides, *overrides])
        if not config.eval.every:  # the run itself does not evaluate
            config = load_config(str(file), [*evaluation_overrides, *overrides, "eval.every=1"])
    return Subject(config, weights, step, source)


def _init_from_value(source: StoredWeights, path: str) -> str:
    """Return the value of `train.init_from` for evaluating the checkpoint at `path`.

    If the checkpoint refers to weights stored elsewhere (those under its adapters, or its reference model), return
    their path, or null if they come with the model or are random.  Otherwise return `path`.
    """
    from trainer.weights.adapters import BASE, REFERENCE

    external = next((source.parts[name] for name in (BASE, REFERENCE) if name in source.parts), None)
    if external is None:
        return path
    return str(external["path"] or "null") if stored_value(source.config_yaml, "train.init_from") else "null"


def for_evaluation(trainer_class: type[Trainer]) -> type[Trainer]:
    """Return a subclass of `trainer_class` that counts targets, and has neither training data nor optimizer state."""
    import torch

    from trainer.loss import count_targets

    def count(self: Trainer, batch: Any) -> float:
        self.num_targets_seen = getattr(self, "num_targets_seen", 0) + count_targets(batch["targets"])  # type: ignore[attr-defined]
        return trainer_class.count(self, batch)

    methods: dict[str, Any] = {
        "build_loader": lambda self: (),
        "build_optimizer": lambda self: torch.optim.SGD(self.model.parameters(), lr=0.0),
        "count": count,
    }
    return type(trainer_class.__name__, (trainer_class,), methods)


def evaluate(trainer: Trainer, subject: Subject) -> Record | None:
    """Evaluate `subject` and return the record.

    Writes no run files.  Raises UserError if there is no held-out data, or if the weights under the adapters or the
    reference model are not the ones that the run used.  Collective.
    """
    from trainer.checkpoint.weights import StoredWeights
    from trainer.weights.loading import load_initial_weights

    if trainer.eval_loader is None:
        data = trainer.config.data
        rule = f"data.source={data.source} has no held-out data"
        raise setting_error("data.eval_path", data.eval_path, rule, fix="set the data to evaluate on")
    trainer.run.write_nothing()
    stored = subject.stored
    if stored is None:
        load_initial_weights(trainer.model, trainer.model_files, trainer.config, trainer.world)
    else:
        averaged = trainer.config.train.ema > 0 and trainer.config.eval.ema
        trainer.world.agreed(lambda: _load_checkpoint(trainer, StoredWeights(stored.storage, averaged)))
    return trainer.evaluate()


def _load_checkpoint(trainer: Trainer, stored: StoredWeights) -> None:
    """Load the checkpoint into the model, except for weights stored elsewhere, which the Trainer has already loaded."""
    from trainer.model.lora import is_base_weight
    from trainer.weights.adapters import BASE, BaseWeights
    from trainer.weights.sources import fill

    for name, part in trainer.state.parts.items():
        if isinstance(part, BaseWeights) and name in stored.parts:
            for mistake in part.changes_from(stored.parts[name], ())[0]:
                raise UserError(f"{stored.description}: {mistake}")
    has_external_base = stored.parts.get(BASE, {}).get("path")
    only = (lambda name: not is_base_weight(name)) if has_external_base else None
    fill(trainer.model, stored, stored.description, only=only)


# ---------------------------------------------------------------------------------------------------------------
# Output


@dataclass(frozen=True)
class EvaluationStats:
    """The size of an evaluation.

    seq_len: tokens per sequence.
    tokens: number of target tokens over all ranks.
    data_note: statistics of chat data, such as how many conversations were dropped; "" for other data.
    """

    seq_len: int
    tokens: int
    data_note: str = ""

    @classmethod
    def of(cls, trainer: Trainer) -> EvaluationStats:
        """Return the size of the evaluation that `trainer` has run.  Collective."""
        (tokens,) = trainer.world.sum([float(getattr(trainer, "num_targets_seen", 0))])
        source = getattr(trainer.eval_loader, "source", None)
        is_chat = trainer.config.data.source == "chat" and source is not None
        return cls(trainer.config.data.seq_len, round(tokens), source.summary if is_chat and source else "")

    def summary(self, config: RunConfig) -> str:
        """Return lines for the console, with the model's maximum sequence length if it is longer than the sequences."""
        max_len = getattr(config.model, "max_seq_len", None)
        limit = f"; the model supports {max_len:,}" if max_len and max_len > self.seq_len else ""
        line = f"sequences of {self.seq_len:,} tokens (data.seq_len{limit}), {self.tokens:,} tokens evaluated"
        return f"{line}\n{self.data_note}" if self.data_note else line


def as_table(subject: Subject, record: Record, stats: EvaluationStats | None = None) -> str:
    """Return the evaluation as a table: a line for each source of a mixture, one for all data, and other metrics."""
    bits_per_byte = record.get("bits_per_byte")
    headers = ("", "loss", *(["bits per byte"] if bits_per_byte is not None else []))
    source_losses = {name.removeprefix("loss_"): value for name, value in record.items() if name.startswith("loss_")}
    rows = [
        (name, _number(value), *([""] if bits_per_byte is not None else [])) for name, value in source_losses.items()
    ]
    total = (
        "all" if source_losses else "",
        _number(record["loss"]),
        *([_number(bits_per_byte)] if bits_per_byte is not None else []),
    )
    lines = table_lines(headers, [*rows, total])
    path = subject.config.data.path
    logged = logged_names(record, path if isinstance(path, Mapping) else ())
    other_metrics = [(name, _number(record[name])) for name in logged if not name.startswith("loss_")]
    lines += table_lines(("", ""), other_metrics) if other_metrics else []
    step = "" if subject.step is None else f" (step {subject.step})"
    notes = [] if stats is None else [stats.summary(subject.config)]
    return "\n".join([f"{subject.weights}{step}", *notes, *lines])


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.6f}"


def as_json(subject: Subject, record: Record, stats: EvaluationStats) -> str:
    """Return the evaluation as one JSON object.

    It has the path of the weights, the evaluation's size, and the fields of the run's `eval` records except `kind`.  A
    loss over no targets is null.
    """
    metrics: dict[str, Any] = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
        if key != "kind"
    }
    sizes = {"seq_len": stats.seq_len, "tokens": stats.tokens}
    return json.dumps({"weights": subject.weights, **metrics, "step": subject.step, **sizes})


def _show(subject: Subject, prints_json: bool, trainer: Trainer) -> int:
    record = evaluate(trainer, subject)
    if record is None:
        return EXIT_STOPPED
    stats = EvaluationStats.of(trainer)
    if trainer.world.is_main:
        print_stdout(as_json(subject, record, stats) if prints_json else as_table(subject, record, stats))
    return EXIT_FINISHED


# ---------------------------------------------------------------------------------------------------------------
# lm-evaluation-harness


def lm_eval(path: str, tasks: Sequence[str], task_folder: str | None = None) -> dict[str, Any]:
    """Evaluate a run, a checkpoint or a Hugging Face folder with the lm_eval library, and return its results.

    A checkpoint is first exported to a temporary folder, with its adapters merged.

    task_folder: a folder of YAML files that define further tasks.

    Raises UserError if the library is missing or does not know a task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        fix = "pip install 'meshtrainer[lm-eval]'"
        raise setting_error("--lm-eval", ",".join(tasks), "needs the lm_eval library", fix=fix)
    from trainer.export import export_checkpoint

    harness, task_module = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.tasks")
    manager = task_module.TaskManager(include_path=task_folder)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise choice_error("--lm-eval", task, manager.all_tasks, "a task of lm_eval;")
    with temporary_folder() as exported:
        location = locate(local_model_path(path))
        model_folder = location.path
        if location.kind != "huggingface":
            model_folder = str(exported / "model")
            export_checkpoint(path, model_folder, merge=True)
        settings = {"pretrained": model_folder, "dtype": "float32"}
        device = likely_device("auto")  # lm_eval defaults to a GPU, even on a machine without one
        results = harness.simple_evaluate("hf", settings, tasks=[*tasks], device=device, task_manager=manager)
    return dict(results)


def _show_lm_eval(argv: Sequence[str], tasks: Sequence[str], task_folder: str | None) -> int:
    path, extra = _split_path(argv)
    if extra:
        raise UserError(f"{extra[0]}: cannot be combined with --lm-eval, whose tasks define their own settings")
    results = lm_eval(path, tasks, task_folder)
    if "--json" in argv:
        print_stdout(json.dumps({"weights": path, "results": results["results"]}, default=str))
    else:
        print_stdout(importlib.import_module("lm_eval.utils").make_table(results))
    return EXIT_FINISHED


# ---------------------------------------------------------------------------------------------------------------
# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.  User errors are printed once, without a traceback."""
    remaining = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(remaining):
        print_stdout(__doc__.rstrip())
        return EXIT_FINISHED
    add_working_directory_to_sys_path()
    tasks, remaining = _pop_option(remaining, "--lm-eval")
    task_folder, remaining = _pop_option(remaining, "--tasks")
    if tasks is not None:
        return run_command(lambda: _show_lm_eval(remaining, tasks.split(","), task_folder))
    displayed_path, remaining = _pop_option(remaining, _DISPLAYED_PATH_OPTION)
    with stop.hearing_signals(run.stopped_exit_code, note=run.STOPPED_NOTE), ExitStack() as stack:
        return _evaluate(remaining, displayed_path, stack)


def _evaluate(argv: Sequence[str], displayed_path: str | None, stack: ExitStack) -> int:
    """Evaluate on the requested number of ranks, and return the exit code.

    displayed_path: the value of `_DISPLAYED_PATH_OPTION`.
    """
    limit_spinning()
    env = Environment()
    try:
        env = find_environment()
        if env.launcher in ("nproc", "torchrun") and env.has_launcher_parent:
            die_with_parent(True)
        arguments_left, allow_import = split_allow_import(argv)
        path, settings = _split_path(arguments_left)
        arguments = parse(settings)
        # Pin the checkpoint only if this process spawns the ranks: a launcher's ranks must all use the same path.
        pinning_stack = None if env.is_distributed else stack
        subject = find_subject(path, arguments.overrides, allow_import, pinning_stack)
        subject = subject if displayed_path is None else replace(subject, weights=displayed_path)
        is_spawning = run.should_spawn(arguments.nproc, env)
        sizes = (arguments.nproc,) * 2 if is_spawning else (env.world_size, env.local_world_size)
        check_config(subject.config, *(size or 1 for size in sizes))
        check_requirements(subject.config, likely_device(subject.config.run.device))
    except UserError as error:
        return run.report_error(error, env)
    except OSError as error:
        return run.report_error(run.unusable_path_error(error, argv), env)
    except TrainingFailed as error:
        return run.report_error(error, env, EXIT_FAILED)
    if is_spawning:
        from trainer.checkpoint.storage import PinnedStorage

        if subject.stored is not None and isinstance(subject.stored.storage, PinnedStorage):
            # All ranks must read the checkpoint that this process has pinned.
            pinned_path = stack.enter_context(subject.stored.storage.linked_folder())
            argv = [pinned_path if word == path else word for word in argv] + [
                f"{_DISPLAYED_PATH_OPTION}={subject.weights}"
            ]
        return spawn(arguments.nproc or 1, ["-m", "trainer.evaluate", *argv], subject.config)
    from trainer.trainer import Trainer

    trainer_class = for_evaluation(subject.config.trainer_class(Trainer))
    return run.run_trainer(subject.config, trainer_class, partial(_show, subject, "--json" in argv))


def _pop_option(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the value of the option `name`, or None if it is absent, and the other arguments."""
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            return argv[index + 1], [*argv[:index], *argv[index + 2 :]]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}="), [*argv[:index], *argv[index + 1 :]]
    return None, list(argv)


def _split_path(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the path (the only argument that is neither an option nor a setting), and the rest without --json."""
    words = [word for word in argv if word != "--json"]
    settings = [word for word in words if "=" in word and "/" not in word.partition("=")[0]]
    paths = [word for word in words if not word.startswith("-") and word not in settings]
    if len(paths) != 1:
        problem = f"{len(paths)} were given: {' '.join(paths)}" if paths else "none was given"
        example = "python -m trainer.evaluate runs/llama_small"
        raise UserError(f"give one run, checkpoint or Hugging Face folder; {problem}\n  for example: {example}")
    return paths[0], [word for word in words if word not in paths]


def command_line() -> NoReturn:
    """Run the command line and exit with its exit code."""
    run.exit_process(main())


if __name__ == "__main__":
    command_line()
