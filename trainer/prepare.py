"""Text to token shards: `python -m trainer.prepare INPUT... --out DIR/NAME`.

Reads .txt (a file is a document) and .jsonl (a line is a document), gzipped or not, and writes shards that
`data.source=tokens` trains on (their format: `trainer.data.source`).  Memory stays constant.  Nothing stands under
the shards' names before everything is written.  Imports no torch.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
import typing
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from trainer.config import DataSection, declared_keys
from trainer.data.chat.show import first_chats
from trainer.data.shards import ShardWriter
from trainer.data.tokenizer import Tokenizer, find_tokenizer
from trainer.errors import EXIT_FINISHED, nearest, run_command, setting_error, tell
from trainer.printable import printable

SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")

PIECE = 1 << 24
"""Characters of a .txt file that are tokenized at a time; a piece ends with a line, so that few tokens notice."""


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for a mistake of the user's, 1 for a failure."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.out is None and not options.show:
        parser.error("one of the arguments --out --show is required")
    return run_command(lambda: _show(options) if options.show else _prepare(options))


def _show(options: argparse.Namespace) -> int:
    """Print conversations, what is trained on in green; between angle brackets where there are no colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    before, behind = ("", "") if console.color_system else ("\u27ea", "\u27eb")
    data = DataSection(
        source="chat",
        tokenizer=options.tokenizer,
        format=options.format,
        chat_template=options.chat_template,
        train_on=options.train_on,
    )
    for shown in first_chats(data, options.inputs, options.show, "INPUT"):
        text = Text()
        for piece, is_trained in shown.pieces:
            piece = printable(piece)
            text.append(f"{before}{piece}{behind}" if is_trained else piece, "bold green" if is_trained else "dim")
        console.rule(printable(shown.place), align="left")
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
    )
    tell(report)
    return EXIT_FINISHED


def prepare(
    inputs: Sequence[str],
    out: str,
    tokenizer: str = "bytes",
    text_key: str = "text",
    holdout: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
) -> str:
    """Write token shards and return a report that ends with the settings to train on them.

    The arguments are those of the command line.  A document is held out by a hash of its running number, so that the
    same input is split in the same way.  Raises UserError; then nothing has been written or replaced.
    """
    if not 0 <= holdout < 1:
        raise setting_error("--holdout", holdout, "is a share of the documents, from 0 to below 1", 0.01)
    if shard_tokens < 1:
        raise setting_error("--shard-tokens", shard_tokens, "must be at least 1", 1)
    encoder = find_tokenizer(tokenizer, key="--tokenizer")
    files = _find_inputs(inputs)
    stem = _find_stem(out)
    existing = _find_outputs(stem)
    if existing and not overwrite:
        rule = f"{existing[0]} is there already; choose another name, or add --overwrite"
        raise setting_error("--out", out, rule, f"{out}-2")

    train = _Shards(stem, encoder, shard_tokens)
    held_out = _Shards(stem.with_name(f"{stem.name}-eval"), encoder, shard_tokens)
    try:
        lowest = _tokenize(files, text_key, holdout, train, held_out)
        if train.num_documents + held_out.num_documents == 0:
            raise setting_error("INPUT", list(inputs), "there is no text in it")
        if holdout and held_out.num_documents == 0:
            rule = f"holds out none of {train.num_documents} documents"
            raise setting_error("--holdout", holdout, rule, _round_up(lowest) if train.num_documents > 1 else 0)
        if train.num_documents == 0:
            rule = f"holds out all of {held_out.num_documents} documents"
            raise setting_error("--holdout", holdout, rule, 0)
        for shards in (train, held_out):
            shards.close()
        for path in existing:
            path.unlink()
        for shards in (train, held_out):
            shards.publish()
    except OSError as error:  # of writing: those of reading have been worded where they happened
        raise setting_error("--out", out, f"cannot be written ({error.strerror})") from error
    finally:
        train.discard()
        held_out.discard()
    return _describe(train, held_out, tokenizer, encoder)


class _Shards:
    """The shards of one split: a new one is begun where a document ends beyond `shard_tokens`."""

    def __init__(self, stem: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._stem, self._tokenizer, self._shard_tokens = stem, tokenizer, shard_tokens
        self._is_full = True
        self.writers: list[ShardWriter] = []

    def write(self, text: str) -> None:
        if self._is_full:
            path = self._stem.with_name(f"{self._stem.name}-{len(self.writers):05d}.bin")
            if self.writers:
                self.writers[-1].close()
            self.writers.append(ShardWriter(path, self._tokenizer))
            self._is_full = False
        content = text.encode()
        self.writers[-1].write(self._tokenizer.encode(content), len(content))

    def end_document(self) -> None:
        self.writers[-1].end_document()
        self._is_full = self.writers[-1].num_tokens >= self._shard_tokens

    def close(self) -> None:
        for writer in self.writers[-1:]:
            writer.close()

    def publish(self) -> None:
        for writer in self.writers:
            writer.publish()

    def discard(self) -> None:
        for writer in self.writers:
            writer.discard()

    @property
    def num_documents(self) -> int:
        return sum(writer.num_documents for writer in self.writers)

    @property
    def num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self.writers)

    @property
    def num_bytes(self) -> int:
        return sum(writer.num_bytes for writer in self.writers)

    @property
    def pattern(self) -> str:
        """The path or glob that names these shards, and no others: five characters, where `eval-` brings more."""
        if len(self.writers) == 1:
            return str(self.writers[0].path.absolute())
        return glob.escape(str(self._stem.absolute())) + "-?????.bin"


def _tokenize(files: Sequence[Path], text_key: str, holdout: float, train: _Shards, held_out: _Shards) -> float:
    """Write every document to one of the two; return the smallest share that would hold one out."""
    lowest, number, shown_at = 1.0, 0, time.monotonic()
    chance = _draw(0)
    is_empty = True
    for path in files:
        for text, ends_document in _read_pieces(path, text_key):
            shards = held_out if chance < holdout else train
            if text:
                shards.write(text)
                is_empty = False
            if ends_document and not is_empty:  # an empty document is none
                shards.end_document()
                lowest = min(lowest, chance)
                number, is_empty = number + 1, True
                chance = _draw(number)
            if sys.stderr.isatty() and time.monotonic() > shown_at + 1:
                shown_at = time.monotonic()
                num_bytes = train.num_bytes + held_out.num_bytes
                shown = f"{number:,} documents, {num_bytes / 1e6:,.0f} MB  {printable(str(path))}"
                print(f"\r{shown}", end="\x1b[K", file=sys.stderr)
    if sys.stderr.isatty():
        print(end="\r\x1b[K", file=sys.stderr)
    return lowest


def _draw(number: int) -> float:
    """Return a number from 0 to below 1 that depends on `number` alone."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / (1 << 48)


def _round_up(share: float) -> float:
    """Return a short decimal just above `share`."""
    for digits in range(1, 17):
        rounded = math.ceil(share * 10.0**digits + 1) / 10.0**digits
        if rounded < min(1.0, 2 * share):
            return rounded
    return share


# ---------------------------------------------------------------------------------------------------------------
# Reading


def _find_inputs(inputs: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and globs name, each once, in the order of the arguments."""
    found: dict[Path, None] = {}
    for given in inputs:
        matches = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))
        if not matches:
            there = [str(path) for path in Path(given).parent.glob("*")]
            raise setting_error(
                "INPUT", given, "no such file or folder, and no glob that matches", nearest(given, there)
            )
        for match in map(Path, matches):
            inside = sorted(path for path in match.rglob("*") if path.is_file()) if match.is_dir() else [match]
            texts = [path for path in inside if path.name.endswith(SUFFIXES)]
            if not texts:
                rule = "has no file whose name ends in" if match.is_dir() else "its name must end in"
                raise setting_error("INPUT", match, f"{rule} {', '.join(SUFFIXES)}")
            found.update(dict.fromkeys(path.resolve() for path in texts))
    return list(found)


def _read_pieces(path: Path, text_key: str) -> Iterator[tuple[str, bool]]:
    """Yield pieces of text, and with each whether its document ends there."""
    try:
        with _open(path) as file:
            if path.name.removesuffix(".gz").endswith(".jsonl"):
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _read_line(line, f"{path}:{number}", text_key), True
            else:
                while text := file.read(PIECE) + file.readline():
                    yield text, False
                yield "", True
    except UnicodeDecodeError as error:
        raise setting_error("INPUT", path, f"is not UTF-8 ({error.reason})", fix="convert it to UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise setting_error("INPUT", path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return open(path, encoding="utf-8", newline="\n")


def _read_line(line: str, place: str, text_key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise setting_error("INPUT", place, f"is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise setting_error("INPUT", place, f"must be a JSON object, not {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(record) or "none"
        raise setting_error(
            "--text-key", text_key, f"{place} has no such key; its keys: {keys}", nearest(text_key, record)
        )
    text = record[text_key]
    if not isinstance(text, str):
        strings = [key for key, value in record.items() if isinstance(value, str)]
        rule = f"at {place} it is no text but {type(text).__name__}"
        raise setting_error("--text-key", text_key, rule, next(iter(strings), None))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise setting_error("INPUT", place, f"is no Unicode text ({error.reason})") from error
    return text


# ---------------------------------------------------------------------------------------------------------------
# Writing


def _find_stem(out: str) -> Path:
    """Return the path that the shards' names begin with, in a folder that exists."""
    stem = Path(out).expanduser()
    if out.endswith(os.sep) or stem.is_dir():
        raise setting_error("--out", out, "is a folder; the shards need a name too", os.path.join(out, "corpus"))
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise setting_error("--out", out, f"its folder cannot be made ({error.strerror})") from error
    return stem


def _find_outputs(stem: Path) -> list[Path]:
    """Return what an earlier run has written under this name."""
    name = re.compile(re.escape(stem.name) + r"(-eval)?-\d{5,}\.(bin|idx|json)")
    return sorted(path for path in stem.parent.iterdir() if name.fullmatch(path.name))


def _describe(train: _Shards, held_out: _Shards, setting: str, tokenizer: Tokenizer) -> str:
    lines = []
    for what, shards in (("train", train), ("held out", held_out)):
        if shards.writers:
            sizes = f"{shards.num_documents:,} documents, {shards.num_tokens:,} tokens, {shards.num_bytes:,} bytes"
            lines.append(f"{what}: {sizes}, {shards.num_tokens / shards.num_bytes:.3f} tokens/byte")
            paths = [str(writer.path) for writer in shards.writers]
            lines.append(f"  {' ... '.join(dict.fromkeys([paths[0], paths[-1]]))}, with .idx and .json beside each")
    settings = ["data.source=tokens", f"data.path={train.pattern}"]
    if held_out.writers:
        settings.append(f"data.eval_path={held_out.pattern}")
    if setting != "bytes":
        settings.append(f"data.tokenizer={Path(setting).expanduser().absolute()}")
    settings.append(f"model.vocab_size={tokenizer.vocab_size}")
    return "\n".join([*lines, "train on them with:", "  " + " ".join(map(shlex.quote, settings))])


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=f"file ({', '.join(SUFFIXES)}), folder or glob")
    parser.add_argument("--out", metavar="DIR/NAME", help="shards are DIR/NAME-00000.bin and so on")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a Hugging Face tokenizer.json")
    parser.add_argument("--show", type=int, metavar="N", help="print N chats instead, what is trained on in colour")
    for key in ("format", "chat_template", "train_on"):
        field = declared_keys()[f"data.{key}"]
        choices = typing.get_args(field.type) or None
        option = f"--{key.replace('_', '-')}"
        parser.add_argument(
            option, default=field.default, choices=choices, help=f"chats: as data.{key} ({field.default})"
        )
    parser.add_argument("--text-key", default="text", metavar="KEY", help=".jsonl: the key of the text (text)")
    parser.add_argument("--holdout", type=float, default=0.0, metavar="SHARE", help="share of documents held out (0)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="size of a shard (1e8)")
    parser.add_argument("--overwrite", action="store_true", help="replace shards of the same name")
    return parser


if __name__ == "__main__":
    sys.exit(command_line())
