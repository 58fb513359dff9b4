"""Evaluate a model on held-out data, without training or writing files.

    python -m trainer.evaluate <run, checkpoint or Hugging Face folder> [section.key=value ...] [nproc=N] [--json]

    python -m trainer.evaluate <the same> --lm-eval TASK,... [--tasks FOLDER] [--json]     with lm-evaluation-harness

A run is evaluated with its own settings, on one rank by default.  Any key can be overridden: data.eval_path sets other
data, eval.steps=0 uses all of it.  --lm-eval exports the run, merges adapters, and runs tasks from the lm_eval library
or from a folder of YAML files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import run
from trainer.config import RunConfig, check_config, load_config, stored_value
from trainer.config.arguments import parse, take_allowed
from trainer.config.load import check_imports, read_stored
from trainer.config.needs import check_needs, likely_device
from trainer.config.pretrained import find_native, is_folder_of_weights
from trainer.distributed.environment import Environment, find_environment, follow_parent, limit_spinning
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    TrainingFailed,
    UserError,
    choice_error,
    run_command,
    setting_error,
    tell,
)
from trainer.lifecycle.launch import spawn
from trainer.metrics.record import Record
from trainer.recipe import look_in_working_folder

if TYPE_CHECKING:
    from trainer.checkpoint.source import StoredWeights
    from trainer.trainer import Trainer

_OWN = {
    "run.dir": str(Path(tempfile.gettempdir()) / "meshtrainer-evaluate"),  # is never made
    "mesh.replicate": "1",
    "mesh.shard": "-1",
    "mesh.context": "1",
    "run.on_end": "null",
    "checkpoint.resume": "none",
    "checkpoint.dir": "null",
    "log.wandb": "off",
    "log.tensorboard": "false",
    "log.profile_steps": "null",
}
"""Settings that an evaluation does not share with its run: it may be on other ranks, and keeps nothing."""


@dataclass(frozen=True)
class Subject:
    """The model that is evaluated: where its weights are, the step of the run that they are of, and on what."""

    config: RunConfig
    weights: str
    step: int | None


def find_subject(path: str, overrides: Sequence[str], allow_import: Collection[str] = ()) -> Subject:
    """Return what is to be evaluated: a run's newest checkpoint, a checkpoint, or a Hugging Face folder.

    A folder has no settings of its own: there they are the defaults, and the overrides; data to train on need not be
    named.  Raises UserError, TrainingFailed for a damaged checkpoint.
    """
    from trainer.checkpoint.source import StoredWeights, find_checkpoint, is_checkpoint

    if is_folder_of_weights(path) and not is_checkpoint(path):
        native = find_native(path)
        model = {"name": native[0].name} if native else {"name": "hf", "path": path}
        data = {"tokenizer": path} if (Path(path) / "tokenizer.json").is_file() else {}
        text, weights, step = json.dumps({"model": model, "data": data}), path, None
        first = {"train.init_from": weights if native else "null"}
        held_out = dict(override.split("=", 1) for override in overrides if "=" in override).get("data.eval_path")
        first |= {} if held_out is None else {"data.path": held_out}  # never opened
    else:
        source = StoredWeights(find_checkpoint(path))
        text, weights, step = source.config_yaml, str(source.place), source.manifest.step
        first = {"train.init_from": _first_weights(source)}
    given = {override.partition("=")[0] for override in overrides}
    check_imports(read_stored(text), given, allow_import)
    own = [f"{key}={value}" for key, value in (_OWN | first).items() if key not in given]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "evaluation.yaml"
        file.write_text(text, encoding="utf-8")
        config = load_config(str(file), [*own, *overrides])
        if not config.eval.every:  # a run that does not evaluate itself
            config = load_config(str(file), [*own, *overrides, "eval.every=1"])
    return Subject(config, weights, step)


def _first_weights(source: StoredWeights) -> str:
    """Return `train.init_from` for an evaluation of a checkpoint.

    Where that names weights beside its own, those under its adapters or of its reference model, they are these; null if
    they come with the model, or are drawn.
    """
    from trainer.weights.adapters import BASE, REFERENCE

    beside = next((source.parts[name] for name in (BASE, REFERENCE) if name in source.parts), None)
    if beside is None:
        return str(source.place)
    return str(beside["path"] or "null") if stored_value(source.config_yaml, "train.init_from") else "null"


def looking(kind: type[Trainer]) -> type[Trainer]:
    """Return a kind of Trainer that opens no data to train on, and keeps nothing for an optimizer."""
    import torch

    def build_loader(self: Trainer) -> tuple[()]:
        return ()

    def build_optimizer(self: Trainer) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.0)

    return type(kind.__name__, (kind,), {"build_loader": build_loader, "build_optimizer": build_optimizer})


def evaluate(trainer: Trainer, subject: Subject) -> Record | None:
    """Return the record of an evaluation of `subject`; None if it was asked to stop.

    Writes nothing of a run.  Raises UserError where nothing is held out, or if the weights under adapters or of a
    reference model are not those that the run had.  Collective.
    """
    from trainer.checkpoint.source import StoredWeights, find_checkpoint
    from trainer.weights.inference import begin_from

    if trainer.eval_loader is None:
        data = trainer.config.data
        rule = f"data.source={data.source} has no held-out data"
        raise setting_error("data.eval_path", data.eval_path, rule, fix="set the data to evaluate on")
    with trainer.lifecycle.looking():
        if subject.step is None:
            begin_from(trainer.model, trainer.origin, trainer.config, trainer.world)
        else:
            averaged = trainer.config.train.ema > 0 and trainer.config.eval.ema
            place = trainer.world.agreed(lambda: find_checkpoint(subject.weights))
            trainer.world.agreed(lambda: _fill(trainer, StoredWeights(place, averaged)))
        return trainer.evaluate()


def _fill(trainer: Trainer, stored: StoredWeights) -> None:
    """Fill the model with what a checkpoint holds; what it only names, the Trainer has filled already."""
    from trainer.model.lora import is_of_the_base
    from trainer.weights.access import fill
    from trainer.weights.adapters import BASE, Base

    for name, part in trainer.state.parts.items():
        if isinstance(part, Base) and name in stored.parts:
            for mistake in part.changes_outside(stored.parts[name], ())[0]:
                raise UserError(f"{stored.description}: {mistake}")
    names_base = stored.parts.get(BASE, {}).get("path")
    only = (lambda name: not is_of_the_base(name)) if names_base else None
    fill(trainer.model, stored, stored.description, only=only)


# ---------------------------------------------------------------------------------------------------------------
# What is shown


def table(subject: Subject, record: Record) -> str:
    """Return the evaluation for people: a line for each source, if there are several, and one for all."""
    bits = record.get("bits_per_byte")
    rows = [("", "loss", "" if bits is None else "bits per byte")]
    of_sources = {name.removeprefix("loss_"): value for name, value in record.items() if name.startswith("loss_")}
    rows += [(name, _number(value), "") for name, value in of_sources.items()]
    rows.append(("all" if of_sources else "", _number(record["loss"]), "" if bits is None else _number(bits)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    step = "" if subject.step is None else f" (step {subject.step})"
    return "\n".join([f"{subject.weights}{step}", *lines])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def as_json(subject: Subject, record: Record) -> str:
    """Return the evaluation as one JSON object: the fields of the run's `eval` lines, and where the weights are."""
    content: dict[str, Any] = {key: value for key, value in record.items() if key != "kind"}
    return json.dumps({"weights": subject.weights, **content, "step": subject.step})


def _show(subject: Subject, as_object: bool, trainer: Trainer) -> int:
    record = evaluate(trainer, subject)
    if record is None:
        return EXIT_STOPPED
    if trainer.world.is_main:
        tell(as_json(subject, record) if as_object else table(subject, record))
    return EXIT_FINISHED


# ---------------------------------------------------------------------------------------------------------------
# By lm-evaluation-harness


def lm_eval(path: str, tasks: Sequence[str], more_tasks: str | None = None) -> dict[str, Any]:
    """Return what the library lm_eval finds of a run, a checkpoint or a Hugging Face folder, as the library does.

    A checkpoint is exported into a temporary folder first, adapters merged.  `more_tasks`: a folder of YAML files that
    describe tasks.  Raises UserError without the library, and for tasks that it does not know.
    """
    if importlib.util.find_spec("lm_eval") is None:
        fix = "pip install 'meshtrainer[lm-eval]'"
        raise setting_error("--lm-eval", ",".join(tasks), "needs the library lm_eval", fix=fix)
    from trainer.checkpoint.source import is_checkpoint
    from trainer.export import export_checkpoint

    harness, known = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.tasks")
    manager = known.TaskManager(include_path=more_tasks)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise choice_error("--lm-eval", task, manager.all_tasks, "a task of lm_eval;")
    with tempfile.TemporaryDirectory() as exported:
        folder = path
        if is_checkpoint(path) or not is_folder_of_weights(path):
            folder = str(Path(exported) / "model")
            export_checkpoint(path, folder, merges=True)
        settings = {"pretrained": folder, "dtype": "float32"}
        device = likely_device("auto")  # the library would take a GPU that is not there
        found = harness.simple_evaluate("hf", settings, tasks=[*tasks], device=device, task_manager=manager)
    return dict(found)


def _show_lm_eval(path: str, tasks: Sequence[str], more_tasks: str | None, as_object: bool) -> int:
    found = lm_eval(path, tasks, more_tasks)
    if as_object:
        tell(json.dumps({"weights": path, "results": found["results"]}, default=str))
    else:
        tell(importlib.import_module("lm_eval.utils").make_table(found))
    return EXIT_FINISHED


# ---------------------------------------------------------------------------------------------------------------
# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.  Returns the exit code; prints a user's mistake once, without traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(words):
        tell(__doc__.rstrip())
        return EXIT_FINISHED
    look_in_working_folder()
    tasks, words = _option(words, "--lm-eval")
    more_tasks, words = _option(words, "--tasks")
    if tasks is not None:
        return run_command(lambda: _show_lm_eval(_only_path(words), tasks.split(","), more_tasks, "--json" in words))
    limit_spinning()
    env = Environment()
    try:
        env = find_environment()
        if env.launcher in ("nproc", "torchrun") and env.has_a_parent:
            follow_parent(True)
        own, allow_import = take_allowed(words)
        path, rest = _split(own)
        arguments = parse(rest)
        subject = find_subject(path, arguments.overrides, allow_import)
        is_spawning = run.spawns(arguments.nproc, env)
        sizes = (arguments.nproc,) * 2 if is_spawning else (env.world_size, env.local_world_size)
        check_config(subject.config, *(size or 1 for size in sizes))
        check_needs(subject.config, likely_device(subject.config.run.device))
    except UserError as error:
        return run.report(error, env)
    except OSError as error:
        return run.report(run.unusable(error, words), env)
    except TrainingFailed as error:
        return run.report(error, env, EXIT_FAILED)
    if is_spawning:
        return spawn(arguments.nproc or 1, ["-m", "trainer.evaluate", *words], subject.config)
    from trainer.trainer import Trainer

    kind = looking(subject.config.trainer_class(Trainer))
    return run.with_trainer(subject.config, kind, partial(_show, subject, "--json" in words))


def _option(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the value of an option, None if it is not given, and the other words."""
    for number, word in enumerate(words):
        if word == name and number + 1 < len(words):
            return words[number + 1], [*words[:number], *words[number + 2 :]]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}="), [*words[:number], *words[number + 1 :]]
    return None, list(words)


def _only_path(words: Sequence[str]) -> str:
    """Return the path.  Raises UserError for settings, which a task has none of."""
    path, rest = _split(words)
    if rest:
        raise UserError(f"{rest[0]}: cannot be combined with --lm-eval, whose tasks define their own settings")
    return path


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the path, which is what is no option and no setting, and the rest.  Raises UserError."""
    rest = [word for word in words if word != "--json"]
    paths = [word for word in rest if not word.startswith("-") and not _is_setting(word)]
    if len(paths) != 1:
        named = f"{len(paths)} are named: {' '.join(paths)}" if paths else "none is named"
        example = "python -m trainer.evaluate runs/llama_small"
        raise UserError(f"one run, checkpoint or Hugging Face folder is evaluated; {named}\n  for example: {example}")
    return paths[0], [word for word in rest if word not in paths]


def _is_setting(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key


def command_line() -> NoReturn:
    """Run the command line and leave with its exit code."""
    run.leave(main())


if __name__ == "__main__":
    command_line()
