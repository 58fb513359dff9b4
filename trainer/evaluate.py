"""Evaluate a model on held-out data, without training it or writing to its run folder.

    python -m trainer.evaluate <run, checkpoint or Hugging Face folder> [section.key=value ...] [nproc=N] [--json]

A run is evaluated with its own settings, by default on one rank.  Any key can be overridden: data.eval_path selects
other data, and eval.steps=0 evaluates on all of it.  --allow-import M allows importing module M if the run refers to
it; it may be repeated.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import run
from trainer.config.command_line import SettingsParser, parse_nproc
from trainer.config.files import check_imports, read_stored
from trainer.config.load import Layer, command_line_layer, load_layers, stored_layer
from trainer.config.model_folder import check_weights, find_native
from trainer.config.requirements import check_requirements, likely_device
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig
from trainer.config.weights import local_model_path, locate
from trainer.distributed.environment import Environment
from trainer.errors import EXIT_FINISHED, EXIT_STOPPED, UserError, print_stdout, setting_error
from trainer.metrics.record import Record, logged_names
from trainer.tables import table

if TYPE_CHECKING:
    from trainer.checkpoint.weights import StoredWeights
    from trainer.trainer import Trainer

_EVALUATION: dict[str, Any] = {
    "run.dir": str(Path(tempfile.gettempdir()) / "meshtrainer-evaluate"),  # never created
    "run.on_end": None,
    "mesh.replicate": 1,
    "mesh.shard": -1,
    "mesh.context": 1,
    "mesh.tensor": 1,
    "mesh.expert": 1,
    "eval.every": 1,
    "checkpoint.resume": "none",
    "checkpoint.dir": None,
    "log.wandb": "off",
    "log.tensorboard": False,
    "log.trackers": [],
    "log.prometheus": None,
    "log.profile_steps": None,
}
"""Settings that replace the run's own: an evaluation can run on any number of ranks, and stores no results."""

_PINNED = "MESHTRAINER_PINNED_CHECKPOINT"
"""Environment variable with the folder in which ranks find the files of the checkpoint, which the process that starts
them holds open: a run that is training may delete the checkpoint before they have read it."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate.

    path: where it is, as the user has written it.
    step: the training step of the weights; None for a Hugging Face folder.
    stored: the open checkpoint; None for a Hugging Face folder.
    """

    config: RunConfig
    path: str
    step: int | None = None
    stored: StoredWeights | None = None


def find_subject(
    path: str, overrides: Sequence[str], allow_import: Collection[str] = (), stack: ExitStack | None = None
) -> Subject:
    """Return the model at `path`: a run (its newest checkpoint), a checkpoint, or a Hugging Face folder.

    allow_import: the modules that a checkpoint's configuration may import.
    stack: if given, the checkpoint stays readable until the stack closes, even if the run prunes the checkpoint.

    Raises UserError for invalid input, and TrainingFailed for a corrupt checkpoint.
    """
    command_line = command_line_layer(overrides)
    location = locate(os.environ.get(_PINNED) or local_model_path(path))
    if location.kind == "huggingface":
        return Subject(_config_of_folder(location.path, command_line), path)

    from trainer.checkpoint.storage import PinnedStorage
    from trainer.checkpoint.weights import open_checkpoint

    stored = open_checkpoint(location.path)
    check_imports(read_stored(stored.config_yaml), command_line.values, allow_import)
    weights = str(stored.storage)
    if stack is not None and isinstance(stored.storage, PinnedStorage):
        weights = stack.enter_context(stored.storage.linked_folder())
        os.environ[_PINNED] = weights
        stack.callback(os.environ.pop, _PINNED)
    return Subject(_config_of_checkpoint(stored, weights, command_line), path, stored.manifest.step, stored)


def _config_of_folder(folder: str, command_line: Layer) -> RunConfig:
    """Return the configuration for evaluating a Hugging Face folder: the defaults and the command line."""
    if "model.fresh" not in command_line.values:
        check_weights(folder, "path")
    # Some sources require data.path; an evaluation never opens it.
    values = {**_EVALUATION, "data.path": command_line.values.get("data.eval_path")}
    native = find_native(folder)
    if native is None:
        values |= {"model.name": "hf", "model.path": folder}
    else:
        values |= {"model.name": native[0].name, "train.init_from": folder}
    if (Path(folder) / "tokenizer.json").is_file():
        values["data.tokenizer"] = folder
    return load_layers([Layer("evaluation", values), command_line], "evaluation").config


def _config_of_checkpoint(stored: StoredWeights, weights: str, command_line: Layer) -> RunConfig:
    """Return the configuration for evaluating a checkpoint: what its run has stored, but for `_EVALUATION`.

    weights: the path of the checkpoint's files.
    """
    of_run = stored_layer(stored.config_yaml, stored.description)
    values = {**_EVALUATION, "train.init_from": _init_from(stored, of_run, weights)}
    if of_run.values.get("data.source") in ("stdlib", "synthetic") and command_line.values.get("data.eval_path"):
        values["data.source"] = "tokens"
        values["data.path"] = command_line.values["data.eval_path"]  # never opened
    if "data.tokenizer" not in command_line.values:
        # Use the run's tokenizer, even if its base weights came with a different one.
        allowed = of_run.values.get("checkpoint.allow_changes") or []
        values["checkpoint.allow_changes"] = [*allowed, "data.tokenizer"]
    return load_layers([of_run, Layer("evaluation", values), command_line], "evaluation").config


def _init_from(stored: StoredWeights, of_run: Layer, weights: str) -> str | None:
    """Return the value of `train.init_from` for evaluating a checkpoint whose files are at `weights`.

    If the checkpoint refers to weights stored elsewhere (those under its adapters, or its reference model), return
    their path, or None if they come with the model or are random.  Otherwise return `weights`.
    """
    from trainer.weights.adapters import BASE, REFERENCE

    external = next((stored.parts[name] for name in (BASE, REFERENCE) if name in stored.parts), None)
    if external is None:
        return weights
    return (external["path"] or None) if of_run.values.get("train.init_from") else None


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


def as_table(subject: Subject, record: Record, stats: EvaluationStats) -> str:
    """Return the evaluation as text: a line for each source of a mixture, one for all data, and other metrics."""
    has_bytes = record.get("bits_per_byte") is not None
    source_losses = {name.removeprefix("loss_"): value for name, value in record.items() if name.startswith("loss_")}
    rows = [[name, _number(value), ""] for name, value in source_losses.items()]
    rows.append(["all" if source_losses else "", _number(record["loss"]), _number(record.get("bits_per_byte"))])
    headers = ["", "loss", "bits per byte"]
    if not has_bytes:
        headers = headers[:2]
        rows = [row[:2] for row in rows]
    step = "" if subject.step is None else f" (step {subject.step})"
    parts = [f"{subject.path}{step}", stats.summary(subject.config), table(headers, rows)]
    path = subject.config.data.path
    logged = logged_names(record, path if isinstance(path, Mapping) else ())
    other_metrics = [(name, _number(record[name])) for name in logged if not name.startswith("loss_")]
    if other_metrics:
        parts.append(table(("", ""), other_metrics))
    return "\n".join(parts)


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
    return json.dumps({"weights": subject.path, **metrics, "step": subject.step, **sizes})


def _show(subject: Subject, prints_json: bool, trainer: Trainer) -> int:
    record = evaluate(trainer, subject)
    if record is None:
        return EXIT_STOPPED
    stats = EvaluationStats.of(trainer)
    if trainer.world.is_main:
        print_stdout(as_json(subject, record, stats) if prints_json else as_table(subject, record, stats))
    return EXIT_FINISHED


# ---------------------------------------------------------------------------------------------------------------
# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.  User errors are printed once, without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print_stdout(__doc__.rstrip())
        return EXIT_FINISHED
    return run.start(words, lambda env, stack: _prepare(words, env, stack))


def _prepare(argv: Sequence[str], env: Environment, stack: ExitStack) -> run.Task:
    """Find the model, and check the configuration of its evaluation."""
    parser = SettingsParser("python -m trainer.evaluate", __doc__)
    parser.add_argument("--json", action="store_true")
    options, named, overrides = parser.parse_settings(argv)
    path = _only_path(options.words)
    nproc = run.ranks_to_start(parse_nproc(named.get("nproc")), env)
    # Only the process that the user has started pins a checkpoint: the ranks of a launcher must all use the same path.
    subject = find_subject(path, overrides, options.allow_import, None if env.is_distributed else stack)
    config = subject.config
    num_ranks, num_local_ranks = (nproc, nproc) if nproc else (env.world_size, env.local_world_size)
    check_config(config, num_ranks, num_local_ranks)
    check_requirements(config, likely_device(config.run.device))
    return run.Task(
        config,
        trainer_class=lambda default: for_evaluation(config.trainer_class(default)),
        action=partial(_show, subject, options.json),
        nproc=nproc,
        program=["-m", "trainer.evaluate", *argv],
    )


def _only_path(paths: Sequence[str]) -> str:
    """Return the only path on the command line.  Raises UserError if there are none or several."""
    if len(paths) != 1:
        problem = f"{len(paths)} were given: {' '.join(paths)}" if paths else "none was given"
        example = "python -m trainer.evaluate runs/llama_small"
        raise UserError(f"give one run, checkpoint or Hugging Face folder; {problem}\n  for example: {example}")
    return paths[0]


def command_line() -> NoReturn:
    """Run the command line and exit with its exit code."""
    run.exit_process(main())


if __name__ == "__main__":
    command_line()
