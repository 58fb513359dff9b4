"""Write a teacher's top log-probabilities to files, so that distillation needs no teacher in memory.

    python -m trainer.teach recipe=distill objective.teacher=MODEL [section.key=value ...] --out FOLDER [--top K]

Give the same data settings as for the training run, including data.seq_len.  Then train with objective.teacher=FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import load_config
from trainer.errors import EXIT_FINISHED, CommandParser, print_stdout, run_command, setting_error
from trainer.recipe import add_working_directory_to_sys_path


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.teach", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the run's settings (default: recipe=distill)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder for the files")
    parser.add_argument(
        "--top",
        type=int,
        default=64,
        metavar="K",
        help="number of most likely tokens to store per position, 8 bytes each (default: 64)",
    )
    parser.add_allow_import()
    options = parser.parse_intermixed_args(argv)
    add_working_directory_to_sys_path()
    return run_command(lambda: _teach(options))


def _teach(options: argparse.Namespace) -> int:
    if options.top < 1:
        raise setting_error("--top", options.top, "must be at least 1", 1)
    recipes = [item.partition("=")[2] for item in options.settings if item.startswith("recipe=")]
    overrides = [item for item in options.settings if not item.startswith("recipe=")]
    config = load_config(recipes[-1] if recipes else "distill", overrides, options.allow_import)

    from trainer.distillation import write_top_logps  # imports torch

    num_samples = write_top_logps(config, Path(options.out), options.top)
    print_stdout(f"{options.out}: {num_samples:,} samples; train with objective.teacher={options.out}")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(command_line())
