"""Tokenize text into shards for training: `python -m trainer.prepare FILE... --out DIR/NAME`.

Reads text and source code (one document per file), .jsonl (one per line), .json arrays, .csv, parquet and Arrow (one
per record or row), and token files from other trainers.  Inputs are local files or URLs, except that token files and
uncompressed .json files must be local.  Text, .jsonl, .json and .csv files may be compressed.  The input may be larger
than memory.  The shards get their final names only when all of them are complete.  If the command is killed, run it
again to resume.  Training reads the shards with `data.source=tokens`; `trainer.data.shards` describes their format.

With --show N, prints the conversations in the first N records of chat files instead, with the target tokens marked.
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trainer.data.build import build_in
from trainer.data.records import SUPPORTED_SUFFIXES, InputFile
from trainer.data.shards import MANIFEST, SUFFIXES, Shard, ShardError, ShardManifest, manifest_rows
from trainer.data.text import DocumentCounts, SettingNames, TextBuild, check_token_files, describe_bad_documents
from trainer.data.tokenizer import find_tokenizer
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
from trainer.files import locked, remove, sync_folder, writing_to

_CHAT_KEYS = ("format", "chat_template", "train_on")
"""Keys of the `data` section that are also options of this command; only --show uses them."""

_SETTING_NAMES = SettingNames("INPUT", "--text-key", "--bad", "--holdout", "--tokenizer", "--bos", "--engine")


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

    from trainer.config.schema import DataSection

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
        overwrite=options.overwrite,
        bad=options.bad,
        bos=options.bos,
        engine=options.engine,
    )
    print_stdout(report)
    return EXIT_FINISHED


def prepare(
    inputs: Sequence[str],
    out: str,
    tokenizer: str = "bytes",
    text_key: str = "text",
    holdout: float = 0.0,
    overwrite: bool = False,
    bad: str = "error",
    bos: bool | None = None,
    engine: str = "tokenizers",
) -> str:
    """Write token shards, and return a report that ends with the settings to train on them.

    The parameters are the command's options.  Whether a document is held out depends only on a hash of its text, so
    duplicates are in the same split.  Existing shards are replaced only when all new ones are complete.

    Raises UserError if an option is invalid, the input cannot be read, or the shards cannot be written.
    """
    from trainer.data.remote import find_text_files  # imports the download code

    if not 0 <= holdout < 1:
        raise setting_error("--holdout", holdout, "is a fraction of the documents, from 0 to below 1", 0.01)
    text_tokenizer = find_tokenizer(tokenizer, "--tokenizer", bos)
    files, input_on_disk = find_text_files(inputs, "INPUT")
    check_token_files(files, text_tokenizer, bos, _SETTING_NAMES)
    if holdout and any(file.kind == "tokens" for file in files):
        raise setting_error("--holdout", holdout, "tokens are used unchanged: hold out with data.holdout", 0)
    stem = Path(out).expanduser()  # the part that the shards' paths have in common
    if out.endswith(os.sep) or stem.is_dir():
        raise setting_error("--out", out, "is a folder; add a name for the shards", os.path.join(out, "corpus"))
    build = TextBuild(tuple(files), text_tokenizer, text_key, bad, holdout, engine, _SETTING_NAMES)
    work = stem.with_name(f".{stem.name}.{build.name}.building")
    other = _manifest_path(stem.with_name(f"{stem.name}-eval"))
    if holdout and other.exists():
        rule = f"the held-out shards would replace those of {other}"
        raise setting_error("--out", out, rule, fix="choose another name")
    existing = find_published(stem)
    if existing and not overwrite and not work.exists():
        rule = f"{existing[0]} already exists; choose another name, or add --overwrite"
        raise setting_error("--out", out, rule, f"{out}-2")
    with writing_to("--out", stem, _min_bytes(build, files, work)), _creating_folder(stem, out):
        try:
            with locked(stem):
                # Another process may have published the same shards in the meantime, or before it was killed.
                manifest = _read_published(build, stem) if work.exists() or not overwrite else None
                if manifest is None:
                    if not (work / MANIFEST).exists():
                        with input_on_disk():
                            build_in(build, work)
                    manifest = _publish(build, work, stem)
                remove(work)
        except (OSError, ShardError) as error:
            if is_disk_full(error):
                raise
            raise setting_error("--out", out, f"cannot be written ({getattr(error, 'strerror', error)})") from error
    return _describe(stem, manifest, tokenizer, bos)


def _min_bytes(build: TextBuild, files: Sequence[InputFile], work: Path) -> int:
    """Return a lower bound of the shards' size: two bytes per byte of plain text, or 0 if it is not known."""
    is_plain = all(file.kind == "text" and not file.compression for file in files)
    has_bound = build.tokenizer.name == "bytes" and is_plain and not work.exists()
    return 2 * build.num_bytes if has_bound else 0


# -- publishing: finished shards get the names that the user asked for ------------------------------------------------


def find_published(stem: Path) -> list[Path]:
    """Return the files of all shards published under a stem, the part that the shards' paths have in common.

    Files called STEM-eval-00000.bin are held-out shards, unless there is another corpus with the stem STEM-eval.
    """
    split = "" if _manifest_path(stem.with_name(f"{stem.name}-eval")).exists() else "(-eval)?"
    name = re.compile(rf"{re.escape(stem.name)}({split}-\d{{5,}}\.(bin|idx|crc|json)|\.manifest\.json)")
    return sorted(path for path in stem.parent.iterdir() if name.fullmatch(path.name)) if stem.parent.is_dir() else []


def _read_published(build: TextBuild, stem: Path) -> ShardManifest | None:
    """Return the manifest that is published under a stem, or None unless it lists the shards of this very build."""
    try:
        manifest = ShardManifest.read(_manifest_path(stem))
    except ShardError:
        return None
    return manifest if manifest.notes.get("build") == build.name else None


def _publish(build: TextBuild, work: Path, stem: Path) -> ShardManifest:
    """Rename the shards in the folder `work`, replacing existing ones, and write their manifest.

    The caller holds the lock of the stem.  If the process is killed, another call finishes the work.  Raises UserError
    if the splits are not as asked for.
    """
    built = ShardManifest.read(work / MANIFEST)
    build.check(built.notes)  # it may have been built under another --bad
    _check_splits(built, build.holdout, work)
    train = [stem.with_name(f"{stem.name}-{number:05d}.bin") for number in range(len(built.train))]
    held_out = [stem.with_name(f"{stem.name}-eval-{number:05d}.bin") for number in range(len(built.held_out))]
    for leftover in stem.parent.glob(f".{glob.escape(_manifest_path(stem).name)}.*"):  # of a killed process
        remove(leftover)
    for other in stem.parent.glob(f".{glob.escape(stem.name)}.tokens-*.building"):
        if other != work:  # of a killed process, whose shards these replace: it must not go on publishing them
            remove(other)
    _manifest_path(stem).unlink(missing_ok=True)  # from here on, it would describe a mixture of old and new shards
    for suffix in SUFFIXES:  # metadata files come last: a shard without metadata is rejected
        for (name, *_), path in zip([*built.train, *built.held_out], [*train, *held_out], strict=True):
            source = (work / name).with_suffix(suffix)
            if source.exists():
                os.replace(source, path.with_suffix(suffix))
    targets = {path.with_suffix(suffix) for path in (*train, *held_out) for suffix in SUFFIXES}
    for path in find_published(stem):
        if path not in targets:
            path.unlink()
    manifest = replace(
        built,
        train=manifest_rows([Shard(path) for path in train], stem.parent),
        held_out=manifest_rows([Shard(path) for path in held_out], stem.parent),
        notes={**built.notes, "build": build.name},
    )
    manifest.write(_manifest_path(stem))
    sync_folder(stem.parent)
    return manifest


def _manifest_path(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.manifest.json")


def _check_splits(manifest: ShardManifest, holdout: float, work_folder: Path) -> None:
    """Raise UserError if all documents are held out, or none is although `holdout` is above 0."""
    num_documents = sum(row[2] for row in (*manifest.train, *manifest.held_out))
    if manifest.train and (manifest.held_out or not holdout):
        return
    remove(work_folder)
    if manifest.train:
        legal = _round_up(manifest.notes["lowest_hash"]) if num_documents > 1 else 0
        raise setting_error("--holdout", holdout, f"holds out none of {num_documents} documents", legal)
    raise setting_error("--holdout", holdout, f"holds out all of {num_documents} documents", 0)


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
    lines = []
    for label, rows in (("train", manifest.train), ("held out", manifest.held_out)):
        if rows:
            num_tokens = sum(row[1] for row in rows)
            num_documents = sum(row[2] for row in rows)
            num_bytes = sum(row[3] for row in rows)
            text_stats = f", {num_bytes:,} bytes, {num_tokens / num_bytes:.3f} tokens/byte" if num_bytes else ""
            lines.append(f"{label}: {num_documents:,} documents, {num_tokens:,} tokens{text_stats}")
            first_and_last = dict.fromkeys([str(stem.with_name(rows[0][0])), str(stem.with_name(rows[-1][0]))])
            lines.append(f"  {' ... '.join(first_and_last)}, each with its .idx, .crc and .json file")
    counts = DocumentCounts.from_notes(manifest.notes)
    if counts.empty:
        label = "document without text was" if counts.empty == 1 else "documents without text were"
        lines.append(f"{counts.empty:,} {label} left out")
    lines += describe_bad_documents(counts).splitlines()
    absolute = stem.absolute()
    settings = ["data.source=tokens", f"data.path={_manifest_path(absolute)}"]
    if manifest.held_out:
        pattern = f"{glob.escape(str(absolute))}-eval-?????.bin"
        settings.append(f"data.eval_path={pattern}")
    if tokenizer != "bytes":
        settings.append(f"data.tokenizer={Path(tokenizer).expanduser().absolute()}")
    if bos is not None:
        settings.append(f"data.bos={str(bos).lower()}")
    settings.append(f"model.vocab_size={manifest.vocab_size}")
    return "\n".join([*lines, "to train on them:", "  " + " ".join(map(shlex.quote, settings))])


def _argparse_type_of(key: str) -> Callable[[str], str]:
    """Return an argparse type that accepts the values of the setting `data.KEY`."""

    def check(value: str) -> str:
        from trainer.config.keys import declared_keys

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
    parser.add_argument(
        "--bad", default="error", metavar="HOW", help="unreadable documents: error, skip, or the fraction allowed"
    )
    parser.add_argument(
        "--engine", type=_argparse_type_of("engine"), default="tokenizers", help="tokenizers, or gigatoken (faster)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace shards of the same name")
    return parser


if __name__ == "__main__":
    raise SystemExit(command_line())
