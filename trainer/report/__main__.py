"""Write a one-page report on a run, or compare several runs.

    python -m trainer.report <run folder> [--out report.html]     one run: the page and report.png, in the run folder
    python -m trainer.report <run folder> <run folder> ...        several runs: ./comparison.html and .png
    python -m trainer.report <run folder> --watch                 keep updating the page during training

The page has no scripts and needs no other file, so it can be copied or sent as it is.  With --watch, it reloads itself
while a run is in progress.  Reports also work for runs that were killed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import EXIT_FINISHED, CommandParser, local_argument, print_stdout, run_command, setting_error
from trainer.files import atomic_replace, writing_to
from trainer.report.figures import draw_png
from trainer.report.history import RecordedRun, read_run
from trainer.report.page import REFRESH_S, render_comparison, render_page, subtitle_of


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the report command and return its exit code."""
    parser = CommandParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument(
        "run_dirs", nargs="+", metavar="run_dir", type=local_argument, help="a run folder; several are compared"
    )
    parser.add_argument(
        "--out",
        help="path of the page; the PNG is saved next to it (default: report.html in the run folder, or with several "
        "runs ./comparison.html)",
    )
    parser.add_argument("--watch", action="store_true", help="keep updating the page while a run trains")
    options = parser.parse_args(argv)
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in options.run_dirs]
    page = Path(options.out or (folders[0] / "report.html" if len(folders) == 1 else "comparison.html"))
    if page.suffix not in (".html", ".htm"):
        raise setting_error("--out", page, "must end in .html or .htm", page.with_suffix(".html"))
    runs = [read_run(folder) for folder in folders]
    write_report(runs, page, options.watch)
    print_stdout(f"{page}\n{page.with_suffix('.png')}")
    if options.watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(runs, page)
    return EXIT_FINISHED


def _watch(runs: Sequence[RecordedRun], page: Path) -> None:
    """Rewrite the page every few seconds, until no run is in progress; long runs less often."""
    took_s = 0.0
    while any(run.state == "running" for run in runs):
        time.sleep(max(REFRESH_S, 5 * took_s))
        began = time.monotonic()
        runs = [read_run(run.folder) for run in runs]
        write_report(runs, page, reloads=True)
        took_s = time.monotonic() - began


def write_report(runs: Sequence[RecordedRun], page: Path, reloads: bool) -> None:
    """Write the page to `page`, and the PNG next to it.  `reloads`: as in `render_page`.

    Raises UserError if a file cannot be written.
    """
    if len(runs) == 1:
        (run,) = runs
        title, subtitle = f"{run.name}: {run.state} at step {run.last_step}", subtitle_of(run)
        html = render_page(run, page.absolute().parent, reloads)
    else:
        title, subtitle, html = f"{len(runs)} runs compared", "", render_comparison(runs, reloads)
    png = page.with_suffix(".png")
    contents = {page: html.encode(), png: draw_png(runs, title, subtitle)}
    try:
        with writing_to("--out", page, sum(map(len, contents.values()))):
            _write_all(contents)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise setting_error("--out", page, rule, fix="give a writable path") from error


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
