"""Writes a teacher's log-probabilities to files, so that distillation needs no teacher in memory.

usage: python -m trainer.teach recipe=distill objective.teacher=MODEL [section.key=value ...] --out FOLDER [--top K]

  --out FOLDER   folder for the files; train with objective.teacher=FOLDER
  --top K        number of most likely next tokens to write for each token (default: 64); 8 bytes each

Give the same data and data.seq_len as for the run.  Exit codes: 0, 2 for a user error, 1 for a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import load_config
from trainer.config.command_line import split_allow_import
from trainer.errors import EXIT_FINISHED, UserError, print_stdout, run_command, setting_error
from trainer.recipe import add_working_folder_to_path


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    add_working_folder_to_path()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"--help", "-h"} & set(arguments):
        print_stdout(__doc__ or "")
        return EXIT_FINISHED
    return run_command(lambda: _teach(arguments))


def _teach(arguments: Sequence[str]) -> int:
    words, allow_import = split_allow_import(arguments)
    options, overrides, recipe = {"--out": "", "--top": "64"}, list[str](), "distill"
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in options:
            options[name] = value if equals else next(rest, "")
        elif name == "recipe":
            recipe = value
        else:
            overrides.append(word)
    if not options["--out"]:
        raise UserError("--out FOLDER is missing\n  for example: --out top64")
    if not options["--top"].isdecimal() or not int(options["--top"]):
        raise setting_error("--top", options["--top"], "must be a whole number of at least 1", 64)
    config = load_config(recipe, overrides, allow_import)

    from trainer.distillation import write_top_logps  # imports torch

    num_samples = write_top_logps(config, Path(options["--out"]), int(options["--top"]))
    print_stdout(f"{options['--out']}: {num_samples:,} samples; train with objective.teacher={options['--out']}")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(command_line())
