"""Tokenize text into shards for training: `python -m trainer.prepare FILE... --out DIR/NAME`.

Reads text and source code (one document per file), .jsonl (one per line), .json arrays, .csv, parquet and Arrow (one
per record or row), and token files from other trainers.  Inputs are local files or URLs, except that token files and
uncompressed .json files must be local.  Text, .jsonl, .json and .csv files may be compressed.  The input may be larger
than memory.  The shards get their final names only when all of them are complete.  If the command is killed, run it
again to resume; run it several times at once to share the work.  Training reads the shards with `data.source=tokens`;
`trainer.data.shards` describes their format.

With --show N, prints the conversations in the first N records of chat files instead, with the target tokens marked.
"""

# This module does not import torch: torch loads slowly, and its threads would not survive the fork of the workers.

from __future__ import annotations

import argparse
import glob
import hashlib
import math
import os
import re
import shlex
import shutil
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise numpy starts threads that busy-wait

from trainer.data.ingest.build import (
    BuildJob,
    build,
    default_num_procs,
    find_published,
    is_in_progress,
    paths_of,
    publish,
    read_published,
    was_published,
)
from trainer.data.ingest.inputs import (
    SUPPORTED_SUFFIXES,
    DocumentCounts,
    InputFile,
    SettingNames,
    check_limit,
    describe_bad_documents,
    parse_limit,
)
from trainer.data.ingest.readers import check_tokens
from trainer.data.shards import ShardError, ShardManifest
from trainer.data.tokenizer import Tokenizer, find_tokenizer
from trainer.errors import (
    EXIT_FINISHED,
    CommandParser,
    importing,
    is_disk_full,
    print_stdout,
    printable,
    run_command,
    setting_error,
)
from trainer.files import writing_to

_CHAT_KEYS = ("format", "chat_template", "train_on")
"""Keys of the `data` section that are also options of this command; only --show uses them."""

_SETTING_NAMES = SettingNames("INPUT", "--text-key", "--bad", "--holdout", "--tokenizer", "--out", "--bos")


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see `run_command`."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.show is not None and options.show < 1:
        parser.error(f"--show {options.show}: must be at least 1 chat")
    if options.out is None and options.show is None:
        parser.error("--out DIR/NAME is missing (or --show N, to print conversations)")
    return run_command(lambda: _show(options) if options.show else _prepare(options))


def _show(options: argparse.Namespace) -> int:
    """Print conversations with the target tokens in green, or in angle brackets if the output has no colors."""
    from rich.console import Console
    from rich.text import Text

    from trainer.config import DataSection

    with importing("--show", options.show):
        from trainer.data.chat.source import first_chats  # imports the template library, which is slow

    console = Console(highlight=False, soft_wrap=True)
    open_mark, close_mark = ("", "") if console.color_system else ("\u27ea", "\u27eb")
    chat_settings = {key: getattr(options, key) for key in _CHAT_KEYS if getattr(options, key) is not None}
    data = DataSection(source="chat", tokenizer=options.tokenizer, **chat_settings)
    for shown in first_chats(data, options.inputs, options.show, "INPUT"):
        text = Text()
        for piece, is_target in shown.pieces:
            piece = printable(piece)
            text.append(f"{open_mark}{piece}{close_mark}" if is_target else piece, "bold green" if is_target else "dim")
        console.rule(printable(shown.location), align="left")
        console.print(text)
    return EXIT_FINISHED


def _prepare(options: argparse.Namespace) -> int:
    report = prepare(
        options.inputs,
        options.out,
        tokenizer=options.tokenizer,
        text_key=options.text_key,
        holdout=options.holdout,
        shard_tokens=options.shard_tokens,
        overwrite=options.overwrite,
        bad=options.bad,
        procs=options.procs,
        bos=options.bos,
    )
    print_stdout(report)
    return EXIT_FINISHED


def prepare(
    inputs: Sequence[str],
    out: str,
    tokenizer: str = "bytes",
    text_key: str = "text",
    holdout: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
    bad: str = "error",
    procs: int = 0,
    bos: bool | None = None,
) -> str:
    """Write token shards, and return a report that ends with the settings to train on them.

    The parameters are the command's options.  Whether a document is held out depends only on a hash of its text, so
    duplicates are in the same split.  Existing shards are replaced only when all new ones are complete.

    Raises UserError if an option is invalid, the input cannot be read, or the shards cannot be written.
    """
    if procs < 0:
        raise setting_error("--procs", procs, "must be at least 1, or 0 to use all cores", 0)
    from trainer.data.remote.text import text_files  # imports the download code

    text_tokenizer = find_tokenizer(tokenizer, "--tokenizer", bos)
    with text_files(inputs, "INPUT") as (files, fetch):
        job = _make_job(files, text_tokenizer, text_key, holdout, shard_tokens, bad, bos)
        stem = Path(out).expanduser()  # the part that the shards' paths have in common
        if out.endswith(os.sep) or stem.is_dir():
            raise setting_error("--out", out, "is a folder; add a name for the shards", os.path.join(out, "corpus"))
        # A lower bound: two bytes per byte of plain text, or 0 for other input and if an earlier build is continued.
        is_plain = all(file.kind == "text" and not file.compression for file in files)
        has_bound = text_tokenizer.name == "bytes" and is_plain and not is_in_progress(_work_folder(job, stem))
        min_bytes = 2 * sum(file.size for file in files) if has_bound else 0
        with writing_to("--out", stem, min_bytes), _creating_folder(stem, out):
            manifest = _build(job, stem, out, overwrite, procs or default_num_procs(), fetch)
    return _describe(stem, manifest, tokenizer, bos)


def _build(
    job: BuildJob, stem: Path, out: str, overwrite: bool, procs: int, fetch: Callable[[], None]
) -> ShardManifest:
    """Build and publish a job's shards, whose paths start with `stem`, and return their manifest."""
    work_folder = _work_folder(job, stem)
    is_resumed = is_in_progress(work_folder)  # checked first, because another process may publish in between
    existing = find_published(stem)
    if existing and not overwrite and not is_resumed:
        rule = f"{existing[0]} already exists; choose another name, or add --overwrite"
        raise setting_error("--out", out, rule, f"{out}-2")
    try:
        if overwrite or not was_published(work_folder, stem):
            fetch()
            manifest = build(job, work_folder, procs)
            check_limit(DocumentCounts.from_manifest(manifest), job.bad, job.keys)  # built under another --bad?
            _check_splits(manifest, job.holdout, work_folder)
            publish(manifest, work_folder, stem)
            return manifest
    except (OSError, ShardError) as error:
        if is_disk_full(error):
            raise
        is_missing = isinstance(error, (FileNotFoundError, FileExistsError, ShardError))
        if not (is_missing and was_published(work_folder, stem)):  # another process has published the shards
            raise setting_error("--out", out, f"cannot be written ({getattr(error, 'strerror', error)})") from error
    return read_published(stem)


def _make_job(
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    text_key: str,
    holdout: float,
    shard_tokens: int,
    bad: str,
    bos: bool | None,
) -> BuildJob:
    if not 0 <= holdout < 1:
        raise setting_error("--holdout", holdout, "is a fraction of the documents, from 0 to below 1", 0.01)
    if shard_tokens < 1:
        raise setting_error("--shard-tokens", shard_tokens, "must be at least 1", 1)
    parse_limit(bad, "--bad")
    check_tokens(files, tokenizer, bos, _SETTING_NAMES)
    if holdout and any(file.kind == "tokens" for file in files):
        raise setting_error("--holdout", holdout, "tokens are used unchanged: hold out with data.holdout", 0)
    return BuildJob(tuple(files), tokenizer, text_key, bad, holdout, shard_tokens, _SETTING_NAMES)


def _work_folder(job: BuildJob, stem: Path) -> Path:
    """Return the folder for unfinished work.  Its name contains a hash of inputs and settings, to find it again.

    `job.bad` is no part of it: whoever adds --bad=skip after an error goes on with what has been read.
    """
    files = [(os.path.realpath(file.path), file.size, file.mtime_ns) for file in job.inputs]
    content = repr([job.tokenizer.name, job.text_key, job.holdout, job.shard_tokens, files])
    return stem.with_name(f".{stem.name}.{hashlib.sha256(content.encode()).hexdigest()[:12]}.building")


def _check_splits(manifest: ShardManifest, holdout: float, work_folder: Path) -> None:
    """Raise UserError if all documents are held out, or none is although `holdout` is above 0."""
    num_documents = sum(row[2] for row in (*manifest.train, *manifest.held_out))
    if manifest.train and (manifest.held_out or not holdout):
        return
    shutil.rmtree(work_folder, ignore_errors=True)
    if manifest.train:
        legal = _round_up(manifest.notes["lowest"]) if num_documents > 1 else 0
        raise setting_error("--holdout", holdout, f"holds out none of {num_documents} documents", legal)
    raise setting_error("--holdout", holdout, f"holds out all of {num_documents} documents", 0)


@dataclass(frozen=True)
class _Split:
    """The shards of one split: their paths and manifest rows."""

    paths: list[Path]
    rows: list[tuple[str, int, int, int]]

    @property
    def pattern(self) -> str:
        """A path or glob for these shards.  The five `?` match a number but not the `eval-NNNNN` of held-out shards."""
        if len(self.paths) == 1:
            return str(self.paths[0].absolute())
        return glob.escape(re.sub(r"-\d+\.bin$", "", str(self.paths[0].absolute()))) + "-?????.bin"


def _round_up(fraction: float) -> float:
    """Return a short decimal number slightly above `fraction`, or `fraction` itself if no such number is below 1."""
    for digits in range(1, 17):
        rounded = math.ceil(fraction * 10.0**digits + 1) / 10.0**digits
        if rounded < min(1.0, 2 * fraction):
            return rounded
    return fraction


@contextmanager
def _creating_folder(stem: Path, out: str) -> Iterator[None]:
    """Create the shards' folder and its missing parents; if the block raises, remove those that are still empty."""
    missing = [folder for folder in stem.parents if not folder.exists()]
    try:
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise setting_error("--out", out, f"its folder cannot be created ({error.strerror})") from error
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


def _describe(stem: Path, manifest: ShardManifest, tokenizer: str, bos: bool | None) -> str:
    train, held_out = map(_Split, paths_of(manifest, stem), (manifest.train, manifest.held_out))
    lines = []
    for label, split in (("train", train), ("held out", held_out)):
        if split.paths:
            num_tokens = sum(row[1] for row in split.rows)
            num_documents = sum(row[2] for row in split.rows)
            num_bytes = sum(row[3] for row in split.rows)
            text_stats = f", {num_bytes:,} bytes, {num_tokens / num_bytes:.3f} tokens/byte" if num_bytes else ""
            lines.append(f"{label}: {num_documents:,} documents, {num_tokens:,} tokens{text_stats}")
            first_and_last = dict.fromkeys([str(split.paths[0]), str(split.paths[-1])])
            lines.append(f"  {' ... '.join(first_and_last)}, each with its .idx and .json file")
    counts = DocumentCounts.from_manifest(manifest)
    if counts.empty:
        label = "document without text was" if counts.empty == 1 else "documents without text were"
        lines.append(f"{counts.empty:,} {label} left out")
    lines += describe_bad_documents(counts).splitlines()
    settings = ["data.source=tokens", f"data.path={train.pattern}"]
    if held_out.paths:
        settings.append(f"data.eval_path={held_out.pattern}")
    if tokenizer != "bytes":
        settings.append(f"data.tokenizer={Path(tokenizer).expanduser().absolute()}")
    if bos is not None:
        settings.append(f"data.bos={str(bos).lower()}")
    settings.append(f"model.vocab_size={manifest.vocab_size}")
    return "\n".join([*lines, "to train on them:", "  " + " ".join(map(shlex.quote, settings))])


def _argparse_type_of(key: str) -> Callable[[str], str]:
    """Return an argparse type that accepts the values of the setting `data.KEY`."""

    def check(value: str) -> str:
        from trainer.config import declared_keys  # slow to import

        choices = typing.get_args(declared_keys()[f"data.{key}"].type)
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return check


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m trainer.prepare", description=__doc__)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="FILE",
        help=f"file, folder, glob or URL: {SUPPORTED_SUFFIXES}; a .bin or an uncompressed .json must be a local file",
    )
    parser.add_argument("--out", metavar="DIR/NAME", help="shards are DIR/NAME-00000.bin and so on")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a Hugging Face tokenizer.json")
    parser.add_argument("--show", type=int, metavar="N", help="print N chats instead, with targets in color")
    for key in _CHAT_KEYS:
        option, meaning = f"--{key.replace('_', '-')}", f"with --show: as data.{key} (same values and default)"
        parser.add_argument(option, type=_argparse_type_of(key), metavar="HOW", help=meaning)
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="start each document with the tokenizer's beginning-of-text token (default: as the tokenizer does)",
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key or column of the text (text)")
    parser.add_argument(
        "--holdout", type=float, default=0.0, metavar="FRACTION", help="fraction of documents to hold out (0)"
    )
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="size of a shard (1e8)")
    parser.add_argument(
        "--bad", default="error", metavar="HOW", help="unreadable documents: error, skip, or the fraction allowed"
    )
    parser.add_argument("--procs", type=int, default=0, metavar="N", help="processes; 0: one per core")
    parser.add_argument("--overwrite", action="store_true", help="replace shards of the same name")
    return parser


if __name__ == "__main__":
    raise SystemExit(command_line())
