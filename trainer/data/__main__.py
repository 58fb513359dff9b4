"""Inspect the data that a run would train on, without training it.

    python -m trainer.data show [recipe=NAME] [section.key=value ...] [--step N] [--samples N] [--full]
    python -m trainer.data check [recipe=NAME] [section.key=value ...]
    python -m trainer.data plan [recipe=NAME] [section.key=value ...]

  show    samples as the model sees them: text, document boundaries, targets, source and epoch
            --step N      samples of this step (default 1)
            --samples N   number of samples (default 2)
            --full        print the whole text, not only the beginning and end of each piece
  check   broken shards, duplicate documents, held-out text in the training data; exits with code 1 if it finds any
  plan    tokens, share and epochs of each source, by phase

recipe=NAME is a recipe or a run folder.  The default is llama_small, with any vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.config import RunConfig, check_config, declared_keys, load_config, recipe_files, smallest_mesh
from trainer.config.arguments import split_allow_import
from trainer.config.suggestions import unexpected_argument, unknown_option
from trainer.data.check import check_data
from trainer.data.mixed_source import find_order
from trainer.data.opening import open_source, resolve_from_data
from trainer.data.show import show_samples
from trainer.data.usage import SourceUsage, describe_usage, usage_by_phase
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    UserError,
    choice_error,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.recipe import add_working_folder_to_path
from trainer.tables import table_lines

_COMMANDS = ("show", "check", "plan")


@dataclass
class _Arguments:
    """Parsed command-line arguments."""

    command: str = ""
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=lambda: {"--step": 1, "--samples": 2})
    """Options that take an integer, with their defaults."""
    is_full: bool = False
    allow_import: list[str] = field(default_factory=list)


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command given on the command line and return the exit code."""
    add_working_folder_to_path()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print_stdout(__doc__ or "")
        return EXIT_FINISHED
    return run_command(lambda: _run(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> _Arguments:
    arguments, allow_import = split_allow_import(arguments)
    parsed, rest = _Arguments(allow_import=allow_import), iter(arguments)
    for argument in rest:
        key, _, value = argument.partition("=")
        if key in parsed.numbers:
            parsed.numbers[key] = _number(key, value or next(rest, ""))
        elif argument == "--full":
            parsed.is_full = True
        elif argument.startswith("-"):
            raise unknown_option(argument, [*parsed.numbers, "--full"], declared_keys())
        elif key == "recipe":
            parsed.recipe = value
        elif "=" in argument:
            parsed.overrides.append(argument)
        elif parsed.command:
            raise unexpected_argument(
                arguments, list(arguments).index(argument), recipe_files(), parsed.recipe is not None
            )
        else:
            parsed.command = argument
    if parsed.command not in _COMMANDS:
        if not parsed.command:
            example = "for example: python -m trainer.data show recipe=llama_small"
            raise UserError(f"missing command: {', '.join(_COMMANDS)}\n  {example}")
        raise choice_error("command", parsed.command, _COMMANDS)
    return parsed


def _number(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise setting_error(option, text or None, "must be a whole number of at least 1", example=1)
    return int(text)


def _run(parsed: _Arguments) -> int:
    config = load_config(parsed.recipe or "llama_small", parsed.overrides, parsed.allow_import, needs_weights=False)
    mesh = smallest_mesh(config)
    check_config(config, mesh.num_ranks, mesh.shard)
    vocab_size = config.vocab_size if parsed.recipe else None
    if parsed.command == "check":
        return EXIT_FAILED if check_data(config.data, vocab_size, print_stdout) else EXIT_FINISHED
    config = resolve_from_data(config)
    source = open_source(config.data, vocab_size, "train")
    order = find_order(source, config)
    if parsed.command == "show":
        which = (parsed.numbers["--step"], parsed.numbers["--samples"], parsed.is_full)
        show_samples(source, order, config, *which, print_stdout)
        return EXIT_FINISHED
    usages = usage_by_phase(order, config.train.global_batch_size, config.train.steps, source.seq_len)
    print_stdout("\n".join(_table(config, usages)))
    return EXIT_FINISHED


def _table(config: RunConfig, usages: Sequence[SourceUsage]) -> list[str]:
    header = ("steps", "source", "tokens", "share", "samples", "epochs")
    rows = [
        (
            f"{usage.first_step}-{usage.last_step}",
            usage.source or config.data.source,
            f"{usage.tokens:,}",
            f"{100 * usage.share:.2f} %",
            f"{usage.samples:,}",
            f"{usage.epochs:.3f}",
        )
        for usage in usages
    ]
    return [
        *table_lines(header, rows),
        "epochs: passes over the source by the end of the phase",
        *_repeat_lines(usages),
    ]


def _repeat_lines(usages: Sequence[SourceUsage]) -> list[str]:
    return [line for line in describe_usage(usages) if line.startswith("repeats")]


if __name__ == "__main__":
    sys.exit(command_line())
