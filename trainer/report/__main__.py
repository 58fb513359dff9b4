"""Write a one-page report on a run, or compare several runs.

    python -m trainer.report <run folder> [--out report.html]     one run: the page and report.png, in the run folder
    python -m trainer.report <run folder> <run folder> ...        several runs: ./comparison.html and .png
    python -m trainer.report <run folder> --watch                 keep updating the page during training
    python -m trainer.report <run folder> --serve [PORT]          serve the page on localhost, and write no files

While a run is in progress, its page reloads itself.  Reports also work for runs that were killed.  To view a served
page from another machine, forward the port with the ssh command that --serve prints.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import EXIT_FINISHED, CommandParser, print_stdout, run_command, setting_error
from trainer.files import atomic_replace, writing_to
from trainer.report.charts import draw_png
from trainer.report.history import read_run
from trainer.report.live import PORT, serve, watch
from trainer.report.page import render_comparison, render_page, subtitle_of


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the report command and return its exit code."""
    parser = CommandParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument("run_dirs", nargs="+", metavar="run_dir", help="a run folder; several are compared")
    parser.add_argument(
        "--out",
        help="path of the page; the PNG is saved next to it (default: report.html in the run folder, or with several "
        "runs ./comparison.html)",
    )
    parser.add_argument("--watch", action="store_true", help="keep updating the page while a run trains")
    parser.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=PORT,
        metavar="PORT",
        help=f"serve the page on a port of localhost (default: {PORT})",
    )
    options = parser.parse_args(argv)
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folders, out = [Path(folder) for folder in options.run_dirs], options.out and Path(options.out)
    if options.serve is not None:
        serve(folders, options.serve, print_stdout)
        return EXIT_FINISHED
    for path in write_report(folders, out):
        print_stdout(str(path))
    if options.watch:
        with contextlib.suppress(KeyboardInterrupt):
            watch(folders, lambda: write_report(folders, out))
    return EXIT_FINISHED


def write_report(folders: Sequence[Path], out: Path | None = None) -> tuple[Path, Path]:
    """Write the page and the PNG, and return their paths.

    Raises UserError if a run cannot be read, `out` does not end in .html or .htm, or a file cannot be written.
    """
    page = out or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    if page.suffix not in (".html", ".htm"):
        raise setting_error("--out", page, "must end in .html or .htm", page.with_suffix(".html"))
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 1:
        (run,) = runs
        title, subtitle = f"{run.name}: {run.state} at step {run.last_step}", subtitle_of(run)
        html = render_page(run, page.absolute().parent)
    else:
        title, subtitle, html = f"{len(runs)} runs compared", "", render_comparison(runs)
    png = page.with_suffix(".png")
    contents = {page: html.encode(), png: draw_png(runs, title, subtitle)}
    try:
        with writing_to("--out", page, sum(map(len, contents.values()))):
            _write_all(contents)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise setting_error("--out", page, rule, fix="give a writable path") from error
    return page, png


def _write_all(contents: Mapping[Path, bytes]) -> None:
    """Write all files to temporary paths, then rename them into place.  If any write fails, no file is replaced.

    A browser that reloads the page in the meantime sees either the old page or the new one.  If a rename fails, the
    files that were renamed before it stay replaced.
    """
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            stack.enter_context(atomic_replace(path)).write_bytes(content)


if __name__ == "__main__":
    sys.exit(command_line())
