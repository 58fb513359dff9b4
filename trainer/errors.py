"""Exceptions, exit codes, error messages, printing, and a wrapper for commands.

This module imports only `stopping` and `urls`, so nearly every other module may import it.

The error message for a setting (`setting_error`) names the setting, its value and the rule that the value breaks.  It
may suggest a fix: the nearest legal value, the value that was probably meant, an example or an instruction.  A wrong
suggestion is worse than none.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from trainer.stopping import stop
from trainer.urls import without_credentials

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3
"""The planned run needs more memory than a device has.  Only the planner exits with this code."""
EXIT_STOPPED = 75
"""The run was stopped on request; the same command resumes it (`EX_TEMPFAIL` in sysexits.h)."""


class UserError(Exception):
    """A mistake in the user's input.  It is printed as one message without a traceback; the exit code is 2.

    proposal: the argument that the message proposes in place of the mistake, such as `train.steps=5`, as a program
        receives it: a shell may need quotes around it.  Empty if the message proposes nothing that can be typed.
    """

    def __init__(self, message: str, proposal: str = "") -> None:
        super().__init__(message)
        self.proposal = proposal


class TrainingFailed(Exception):
    """Training cannot continue, for a reason that is not a bug.  Printed like a UserError; the exit code is 1."""


class PeerFailed(Exception):
    """Another rank failed first and reports the error, so this rank prints nothing.  The exit code is 1."""


_MAX_SHOWN_CHARS = 500
"""Error messages show values of up to this many characters in full, and truncate longer ones to half this length."""


def reason_of(error: BaseException) -> str:
    """Return all that an error of a library says, on one line; if it says nothing, its type.

    The first line alone is not enough: in many libraries it only announces the reason.  Very long text is truncated.
    """
    said = error.args[0] if isinstance(error, KeyError) and error.args else error  # `str` would add quotes
    text = " ".join(str(said).split()) or type(error).__name__
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters (C0 and C1) except newlines and tabs; what they begin moves the cursor or sets a title."""


def printable(text: str) -> str:
    """Return the text without control characters, and with `?` for bytes that are not text: safe for a terminal."""
    return _CONTROL_CHARACTER.sub("", text.encode(errors="replace").decode())


def print_stderr(text: str) -> None:
    """Print to stderr, without control characters and without credentials in URLs.

    Ignores write errors: the caller must continue even if its parent process has died and stderr is closed.
    """
    with contextlib.suppress(OSError):
        print(printable(without_credentials(text)), file=sys.stderr, flush=True)


def print_stdout(text: str, end: str = "\n") -> None:
    """Print to stdout, without control characters.  Drops the output if its reader has exited (`--help | head`)."""
    try:
        print(printable(text), end=end, flush=True)
    except BrokenPipeError:
        discard_stream(sys.stdout)


def discard_stream(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that flushing its buffer at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one message, without printing the full usage.

    Keeps the line breaks of the description, because it contains examples.
    """

    def __init__(self, prog: str, description: str | None, add_help: bool = True) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=prog, description=description, formatter_class=formatter, add_help=add_help, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with `EXIT_USER_ERROR`."""
        print_stderr(f"error: {message}\n  to fix: see {self.prog} --help")
        raise SystemExit(EXIT_USER_ERROR)

    def add_allow_import(self) -> None:
        """Add `--allow-import`, which permits importing, and so running, a module that a checkpoint names."""
        help_text = "allow importing this module if the checkpoint names it; may be repeated"
        self.add_argument("--allow-import", metavar="MODULE", type=_module, action="append", default=[], help=help_text)


def local_argument(text: str) -> str:
    """Return an argument that must be a local path: the `type` of such an argument of a `CommandParser`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: must be a local path, not a URL")
    return text


def _module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{name!r} is not the name of a module, such as my_models")
    return name


def run_command(work: Callable[[], int], hears_signals: bool = True) -> int:
    """Run a command and return its exit code.  Expected errors are printed as one message, without a traceback.

    hears_signals: whether a signal ends the process at once, with 128 plus its number, as a shell reports it; otherwise
        `work` handles signals itself.
    """
    try:
        hearing = stop.hearing_signals(exit_code=lambda number: 128 + number)
        with hearing if hears_signals else contextlib.nullcontext():
            code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard_stream(sys.stdout)
        return EXIT_FINISHED
    except UserError as error:
        print_stderr(f"error: {error}")
        return EXIT_USER_ERROR
    except (TrainingFailed, OSError) as error:
        if not is_disk_full(error):
            print_stderr(f"error: {error}")
            return EXIT_FAILED
        discard_stream(sys.stdout)  # if stdout goes to the full disk, flushing it at exit would fail
        where = getattr(error, "filename", None) or "standard output"
        print_stderr(f"error: {where}: cannot be written: the disk is full\n  to fix: free some space there")
        return EXIT_USER_ERROR


TORCH_SAVE_ERRORS = ("failed writing file", "unexpected pos")
"""Parts of torch.save's error messages when it cannot write, whatever the cause."""


def is_disk_full(error: BaseException, path: Path | None = None, num_bytes: int = 0) -> bool:
    """Return whether an error means that a disk is full or a quota is used up, even if a library has wrapped the error.

    torch.save does not say why a write failed.  Its errors count as a full disk if less than `num_bytes`, or hardly
    anything, is free at `path`.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "No space left on device" in str(error):  # safetensors
        return True
    if path is None or not any(words in str(error) for words in TORCH_SAVE_ERRORS):
        return False
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free < max(num_bytes, _MIN_FREE_BYTES)


_MIN_FREE_BYTES = 1 << 20
"""A disk with fewer free bytes than this counts as full."""


def first_few(names: Iterable[str], most: int = 5) -> str:
    """Return the first `most` names as text, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(value: object, legal: Iterable[object], cutoff: float = 0.6) -> object | None:
    """Return the legal value whose spelling is closest to `value`, or else one that contains it, or None.

    cutoff: minimum similarity, as in difflib.  Use a higher cutoff for short values and for values that end alike.
    """
    by_text = {str(candidate): candidate for candidate in legal}
    matches = difflib.get_close_matches(str(value), by_text, n=1, cutoff=cutoff)
    if not matches:
        text = str(value).lower()
        matches = [name for name in by_text if text and text in name.lower()]
    return by_text[matches[0]] if matches else None


def setting_error(key: str, value: object, rule: str, proposal: object = None, *, fix: str = "") -> UserError:
    """Return the error for one setting.

    rule: completes the text "KEY=VALUE: ...", for example "must be at least 1".
    proposal: a legal value to try: the nearest one, the one that was probably meant, or an example.
    fix: what to do, in words.
    """
    lines = [f"{as_argument(key, value)}: {rule}"]
    if proposal is not None:
        lines.append(f"try {as_typed(key, proposal)}")
    if fix:
        lines.append(f"to fix: {fix}")
    can_be_typed = proposal is not None and "[" not in key  # unlike an entry of a list, such as data.phases[0].from
    return UserError("\n  ".join(lines), as_argument(key, proposal) if can_be_typed else "")


def as_argument(key: str, value: object) -> str:
    """Return `key=value` as one argument of the command line."""
    return f"{key}={_format(value)}"


def as_typed(key: str, value: object) -> str:
    """Return `key=value` as it is typed in a shell, quoted if necessary."""
    shown = _format(value)
    argument = as_argument(key, value)
    return argument if shlex.quote(shown) in (shown, "''") else shlex.quote(argument)


@contextlib.contextmanager
def importing(key: str, value: object) -> Iterator[None]:
    """Imports inside the block raise UserError if a library is missing; it names the setting that needs the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library == __name__.partition(".")[0]:
            raise
        raise setting_error(key, value, f"needs the library {library}", fix=f"pip install {library}") from error


def choice_error(
    key: str,
    value: object,
    legal: Iterable[object],
    noun: str = "one of",
    aliases: Mapping[str, object] | None = None,
) -> UserError:
    """Return the error for a setting whose value is not one of the `legal` ones.

    noun: the words after "must be" and before the list of legal values.
    aliases: maps other names for legal values to the values to suggest: {"gpu": "cuda"}.
    """
    choices = list(legal)
    meant = (aliases or {}).get(_format(value).lower())
    if meant is None and not isinstance(value, bool):
        meant = nearest(value, choices)
    rule = f"must be {noun} {', '.join(_format(choice) for choice in choices)}"
    return setting_error(key, value, rule, meant)


def reject_credentials(key: str, value: object) -> None:
    """Raise UserError if a value holds credentials in a URL, since settings are stored, logged and printed."""
    if isinstance(value, Mapping):
        for item in (*value, *value.values()):
            reject_credentials(key, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            reject_credentials(key, item)
    elif isinstance(value, str) and without_credentials(value) != value:
        fix = "leave them out and use the environment (FSSPEC_HTTP, AWS_..., HF_TOKEN)"
        raise setting_error(key, value, "holds credentials, and settings are stored", fix=fix)


def yaml_scalar(value: object) -> str:
    """Return a scalar as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_format(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format(key)}: {_format(item)}" for key, item in value.items()) + "}"
    text = without_credentials(yaml_scalar(value))
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]}..."
