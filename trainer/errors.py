"""Exceptions, exit codes, error messages, a wrapper for commands, and redaction of secrets in printed or stored text.

This module imports only `stopping`, so nearly every other module may import it.  Text for a terminal, a
log or a shared file passes through `printable` or `redact`, which mask credentials; `printable` also removes terminal
control sequences.

The error message for a setting (`setting_error`) names the setting, its value and the rule that the value breaks.  It
may suggest a fix: the nearest legal value, the value that was probably meant, an example or an instruction.  A wrong
suggestion is worse than none.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import logging
import os
import re
import shlex
import shutil
import sys
import threading
import traceback
import urllib.parse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from trainer.stopping import stop

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
    text = " ".join(str(said).split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..." if text else type(error).__name__


def print_stderr(text: str) -> None:
    """Print to stderr, without credentials or terminal control sequences.

    Ignores write errors: the caller must continue even if its parent process has died and stderr is closed.
    """
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def print_stdout(text: str, end: str = "\n") -> None:
    """Print to stdout, redacted as in `print_stderr`.  Drops the output if its reader has exited (`--help | head`)."""
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

    def __init__(self, prog: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with `EXIT_USER_ERROR`."""
        print_stderr(f"error: {message}\n  to fix: see {self.prog} --help")
        raise SystemExit(EXIT_USER_ERROR)

    def add_allow_import(self) -> None:
        """Add `--allow-import`, which permits importing, and so running, a module that a checkpoint names."""
        help_text = "allow importing this module if the checkpoint names it; may be repeated"
        self.add_argument("--allow-import", metavar="MODULE", action="append", default=[], help=help_text)


def run_command(work: Callable[[], int], hears_signals: bool = True) -> int:
    """Run a command and return its exit code.  Expected errors are printed as one message, without a traceback.

    hears_signals: whether a signal ends the process at once, with 128 plus its number, as a shell reports it; otherwise
        `work` handles signals itself.
    """
    install_redaction()
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
    return f"{key}={_formatted_value(key, value)}"


def as_typed(key: str, value: object) -> str:
    """Return `key=value` as it is typed in a shell, quoted if necessary."""
    shown, argument = _formatted_value(key, value), as_argument(key, value)
    return argument if shlex.quote(shown) in (shown, "''") else shlex.quote(argument)


def _formatted_value(key: str, value: object) -> str:
    """Format a value for a message; mask it if the name of its setting suggests a secret."""
    return MASK if _SECRET_NAME.search(key) else _format(value)


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
    rule = f"must be {noun} {', '.join(_format(choice) for choice in choices)}"
    return setting_error(key, value, rule, proposal=nearest(value, choices) if meant is None else meant)


def yaml_scalar(value: object) -> str:
    """Return a scalar as YAML spells it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _format(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_format(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format(key)}: {_format(item)}" for key, item in value.items()) + "}"
    text = str(masked(yaml_scalar(value)))
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]}..."


# ---------------------------------------------------------------------------------------------------------------
# Text that is safe to show

MASK = "***"
"""The text that replaces credentials."""


def printable(text: str) -> str:
    """Return the text without control sequences or secrets, safe for a terminal or a log."""
    return redact(_CONTROL_CHARACTER.sub("", _SURROGATES.sub("\ufffd", _CONTROL_SEQUENCE.sub("", text))))


_CONTROL_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)"
_CONTROL_SEQUENCE = re.compile(
    rf"{_CONTROL_STRING}|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b(?:[!-/][0-~]|[0-OQ-WYZ\\`-~])"
)
"""Control sequences of ECMA-48, 7-bit and 8-bit (C1): those that hold text (such as a title), CSI, and short ones."""
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All other control characters except newlines and tabs; some move the cursor."""
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Lone surrogates: undecodable bytes, which printing would turn back into raw bytes."""


# ---------------------------------------------------------------------------------------------------------------
# Secrets

_known_secrets: set[str] = set()
"""Secrets in this process's settings and environment, from `remember_secrets` and `install_redaction`."""

_MIN_SECRET_CHARS = 6
"""Shorter secrets are not searched for, because they would match inside ordinary words."""


def redact(text: str) -> str:
    """Return the text for printing or storing, without secrets.

    Masks what looks like a secret (see `mask_credentials`), and known secrets (see `remember_secrets`), which a library
    may quote anywhere.
    """
    text = mask_credentials(text)
    for secret in sorted(_known_secrets, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def remember_secrets(tree: Any) -> None:
    """Register the secrets in a configuration's values, or in one text, so that `redact` masks them everywhere."""
    if isinstance(tree, dict):
        for value in tree.values():
            remember_secrets(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            remember_secrets(value)
    elif isinstance(tree, str):
        secrets: list[str] = []
        _mask_text(tree, secrets)
        for secret in secrets:
            for spelling in (secret, urllib.parse.unquote(secret), urllib.parse.quote(secret, safe="")):
                if len(spelling) >= _MIN_SECRET_CHARS:
                    _known_secrets.add(spelling)


def install_redaction() -> None:
    """From now on, redact the uncaught exceptions, warnings and log records of this process.

    Also registers the secrets in environment variables, such as WANDB_API_KEY or the password of a proxy, for `redact`.
    """
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8 and not os.path.exists(value):
            _known_secrets.add(value)
        elif "://" in value:
            remember_secrets(value)
    if sys.excepthook is not _print_exception:
        sys.excepthook = _print_exception
        threading.excepthook = _print_thread_exception
        format_warning = warnings.formatwarning
        warnings.formatwarning = lambda *args, **kwargs: redact(format_warning(*args, **kwargs))
        logging.setLogRecordFactory(_RedactedRecord)


def _print_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print_stderr("".join(traceback.format_exception(kind, error, trace)).rstrip())


def _print_thread_exception(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        text = "".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback))
        print_stderr(f"Exception in thread {failed.thread.name if failed.thread else '?'}:\n{text.rstrip()}")


class _RedactedRecord(logging.LogRecord):
    """A log record whose message and traceback are redacted for every handler."""

    def getMessage(self) -> str:  # noqa: N802 - the library's name
        return redact(super().getMessage())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:  # formatters reuse this cached text
            self.exc_text = redact("".join(traceback.format_exception(*self.exc_info)).rstrip())


def mask_credentials(text: str) -> str:
    """Mask everything in the text that looks like a secret.

    This covers passwords and keys in URLs (scheme://user:***@host/path?token=***), in headers
    (`Authorization: Bearer ***`), in command options (--password ***), and tokens of common services (hf_...).
    """
    return _mask_text(text, [])


def masked(tree: Any) -> Any:
    """Return a configuration tree with its credentials masked."""
    if isinstance(tree, dict):
        return {key: masked(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(masked(item) for item in tree)
    if not isinstance(tree, str):
        return tree
    # If the value is a URL, it extends to the end of the value, whatever characters the password contains.
    return _ENTIRE_URL.sub(lambda match: _mask_url(match[0], []), mask_credentials(tree))


def reject_credentials(key: str, value: object) -> None:
    """Raise UserError if a setting's value is or contains a URL with a password, key, token or signature.

    It would end up in stored configurations, logs and process lists.
    """
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(item, str) and _ENTIRE_URL.match(item) and _mask_url(item, []) != item for item in items):
        rule = "contains credentials (a password, key, token or signature), which a URL must not"
        fix = "put them into the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, FSSPEC_HTTP, or ~/.netrc"
        raise setting_error(key, value, rule, fix=fix)


def masked_command(command: str) -> str:
    """Return a shell command if it is safe to store, or `***` if it may contain a secret.

    A secret can be anywhere in a command, so the command is masked entirely or not at all.  It is safe if it contains
    no credentials, no URL with a path (the path of a webhook is its secret), and no long random word.
    """
    words = re.split(r"[\s'\"=:/,;|&<>()]+", command)
    is_suspicious = mask_credentials(command) != command or _SUSPICIOUS.search(command) is not None
    return MASK if is_suspicious or any(map(_looks_random, words)) else command


def masked_argument(word: str) -> str:
    """Return one argument of the trainer's command line with its secrets masked, for storing."""
    key, _, value = word.partition("=")
    return f"{key}={masked_command(value)}" if key == "run.on_end" else redact(str(masked(word)))


def _looks_random(word: str) -> bool:
    """Return whether a word may be a key: it is long and mixes letters and digits.

    Names made of short parts, such as llama3b-8k-v2-chat or exp2b_lr3e4_bs64k, do not count.
    """
    longest = max(map(len, re.split(r"[-_.]", word)))
    return len(word) >= 16 and longest >= 12 and word[0] != "$" and len(_LETTER_DIGIT_BOUNDARY.findall(word)) >= 2


# Limiting the length of the scheme avoids quadratic matching time on long words.
_URL = re.compile(r"[A-Za-z][\w+.-]{0,30}://(?:[^\s/?#<>]*@)?[^\s'\"<>]*")
_ENTIRE_URL = re.compile(r"[A-Za-z][\w+.-]{0,30}://.*", re.DOTALL)

_PASSWORD_IN_URL = re.compile(r"(://[^\s/:@?#\[]*:)(?!\d*(?:[/?#]|$))((?:[^/?#]*(?=@)|[^@]*(?=@)))@")
"""Matches scheme://user:password@host.  Digits alone are a port; a password may contain an unencoded slash."""
_TOKEN_AS_USER = re.compile(r"(https?://)([^\s/:@?#]+)@", re.IGNORECASE)
"""In an HTTP URL, a user name without a password is a token."""
_SECRET_WORD = r"token|secret|signature|passw(?:or)?d|passphrase|credential|api[-_]?key|access[-_]?key(?:[-_]?id)?"
_SECRET_PARAMETER = re.compile(
    rf"([?&;#](?:[\w.-]*(?:{_SECRET_WORD})"
    r"|(?:[\w.-]*[-_.])?(?:key|sig|pwd|pass|auth|authorization|jwt|sas|code|hmac|session|sessionid))=)([^&;#]*)",
    re.IGNORECASE,
)
_SECRETS_IN_TEXT = tuple(
    re.compile(pattern)
    for pattern in (
        # a header, on a command line or in a library's message
        r"(?i)(\b(?:(?:proxy-)?authorization|cookie|api-?key|[\w-]{1,40}-(?:key|token|secret))['\"]?[ \t]*:[ \t]*"
        r"['\"]?(?:(?:bearer|basic|token|digest|apikey)[ \t]+)?)(?!(?:bearer|basic|token|digest|apikey)[ \t])"
        r"([^\s'\",}*$][^\s'\",}*]{3,})",
        r"(?i)(\bbearer[ \t]+)([\w.~+/=-]{8,})",
        # an entry of JSON, or of a mapping quoted in a message
        r"(?i)(['\"][\w-]{0,40}(?:password|passwd|secret|api_?key|access_?key|access_token)['\"]: ?['\"])([^'\"*]{4,})",
        # a command option, or a variable set for a command
        rf"(?i)((?:^|[\s'\"])--?[\w-]{{0,40}}(?:{_SECRET_WORD})(?:=|[ \t]+))([^\s'\"$*]+)",
        r"(\b\w{0,40}(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)=)([^\s'\"$*&;]{4,})",
        r"((?:^|[\s'\"])(?:-u|--user|--proxy-user)[ \t]*['\"]?[^\s:'\"]+:)([^\s'\"$*]+)",
        # a token of Hugging Face, GitHub, GitLab, OpenAI, AWS or Slack, or a JSON web token, without a name before it
        r"()\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}"
        r"|AKIA[0-9A-Z]{12,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)",
    )
)
_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|secret)[-_]?key)$", re.IGNORECASE
)
"""Names of settings and environment variables whose values are secrets."""
_SUSPICIOUS = re.compile(
    r"://[^\s/'\"]+/[^\s'\"]"  # a URL with a path
    r"|(?<![\w./$-])(?:[\w-]+\.)+[a-z]{2,}/[^\s'\"]"  # the same without a scheme
    # anything called password, key or the like, unless its value is a variable
    r"|(?<![a-z])(?:pass(?:w(?:or)?d|phrase|in|out)?|pwd|token|secret|credentials?|auth|authorization|key|signature|jwt)"
    r"['\"]?[=:\s]\s*['\"]?(?!(?:(?:bearer|basic|token)\s+)?['\"]?\$)[^\s'\"]"
    # programs that take passwords in options of one letter
    r"|\b(?:mysql\w*|mariadb\S*|psql|redis-cli|mongo\w*|mosquitto_\w+|smbclient|l?ftp|ldap\w+|mail\w*|swaks)\s.*-[apuw]\b"
    r"|\b(?:mysql|mariadb)\S*\s.*-p\S|sshpass",
    re.IGNORECASE,
)
"""Commands that may contain a secret."""
_LETTER_DIGIT_BOUNDARY = re.compile(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])")


def _mask_text(text: str, secrets: list[str]) -> str:
    """Mask everything that looks like a secret, and append the secrets found to `secrets`."""

    def mask(match: re.Match[str]) -> str:
        secrets.append(match[2])
        return f"{match[1]}{MASK}"

    text = _URL.sub(lambda match: _mask_url(match[0], secrets), text)
    for pattern in _SECRETS_IN_TEXT:
        text = pattern.sub(mask, text)
    return text


def _mask_url(url: str, secrets: list[str]) -> str:
    def mask(match: re.Match[str]) -> str:
        if match[2] != MASK:
            secrets.append(match[2])
        return f"{match[1]}{MASK}{'@' if match[0].endswith('@') else ''}"

    url = _PASSWORD_IN_URL.sub(mask, url, count=1)
    url = _TOKEN_AS_USER.sub(mask, url, count=1)
    return _SECRET_PARAMETER.sub(mask, url)
