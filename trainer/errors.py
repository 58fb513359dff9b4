"""User errors and their wording, how a command reports them, and what makes any text safe to show and to store.

Knows nothing of the rest: every other room may raise from here.  Text for a terminal, a log or a file that others read
comes through `printable`, without credentials and terminal control sequences.  A message names the setting and its
value, the rule that it breaks, and what a person needs to mend it: the nearest legal value where there is one, what was
meant where the spelling says so, an example of a form, or else what to do.  A wrong suggestion is worse than none.
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
import signal
import sys
import threading
import traceback
import urllib.parse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from trainer.stopping import PromptStop, StopRequested, leave_at_once, stopped
from trainer.tables import fit_to_width

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3
"""Of the planner: what was planned needs more memory than there is."""
EXIT_STOPPED = 75
"""Stopped on request after saving: "run me again" (`EX_TEMPFAIL` of sysexits.h)."""


EXIT_INTERRUPTED = 130
"""What a shell gives a command that Ctrl-C has ended."""


class UserError(Exception):
    """A mistake of the user's, found before training: shown as one message, exit code 2."""


class TrainingFailed(Exception):
    """Training cannot go on for a reason that is no bug: shown as one message, exit code 1."""


class PeerFailed(Exception):
    """Another rank failed first; its error is the one to show, this rank only leaves.  Exit code 1."""


_LONGEST = 500
"""Characters of a value that are shown."""


def print_stderr(text: str) -> None:
    """Print on stderr, without credentials and what a terminal would obey, whatever reads it: where nothing does any
    more, because who started this process has died, what follows must still be done.
    """
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def print_stdout(text: str, end: str = "\n") -> None:
    """Print on standard output, as `say` does.  Where its reader has gone (`--help | head`), the rest is dropped."""
    try:
        print(printable(text), end=end, flush=True)
    except BrokenPipeError:
        discard_stream(sys.stdout)


def discard_stream(stream: TextIO) -> None:
    """Let what is buffered, and all that follows, go nowhere: flushed when the process ends it would fail once more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class CommandParser(argparse.ArgumentParser):
    """A parser of options that reports a mistake in one message, without the whole usage.

    The description is printed as it is laid out: it holds examples.
    """

    def __init__(self, prog: str, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with the exit code of a user's mistake."""
        print_stderr(f"error: {message}\n  to fix: see {self.prog} --help")
        raise SystemExit(EXIT_USER_ERROR)

    def format_help(self) -> str:
        """Return the help; on a terminal its lines fit that."""
        return fit_to_width(super().format_help(), shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)

    def add_allow_import(self) -> None:
        """Add the option that lets a checkpoint's own module be imported, which runs its code."""
        meaning = "allow importing this module if the checkpoint names it; may be repeated"
        self.add_argument("--allow-import", metavar="MODULE", action="append", default=[], help=meaning)


def run_command(work: Callable[[], int]) -> int:
    """Return the exit code of what a command line asks for; what a user should know is printed without a traceback."""
    redact_everything()
    try:
        with _unwinding():
            code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard_stream(sys.stdout)
        return EXIT_FINISHED
    except KeyboardInterrupt:
        print_stderr("interrupted")
        return EXIT_INTERRUPTED
    except StopRequested as request:
        print_stderr(stopped(request.name, request.kept))
        return code_of_signal(request.name)
    except UserError as error:
        print_stderr(f"error: {error}")
        return EXIT_USER_ERROR
    except (TrainingFailed, OSError) as error:
        if not is_disk_full(error):
            print_stderr(f"error: {error}")
            return EXIT_FAILED
        discard_stream(sys.stdout)  # where that goes to the full disk, it cannot be flushed when the process ends
        where = getattr(error, "filename", None) or "standard output"
        print_stderr(f"error: {where}: cannot be written: the disk is full\n  to fix: free some space there")
        return EXIT_USER_ERROR


TORCH_SAVE_ERRORS = ("failed writing file", "unexpected pos")
"""What torch.save says, without a reason, when it cannot write."""


def is_disk_full(error: BaseException, path: Path | None = None, num_bytes: int = 0) -> bool:
    """Return whether an error says that a disk, or a quota, is full.  Libraries wrap that in errors of their own.

    torch.save gives no reason when it cannot write: then the disk of `path`, where `num_bytes` were to be written, is
    looked at.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "No space left on device" in str(error):  # safetensors
        return True
    if path is None or not any(words in str(error) for words in TORCH_SAVE_ERRORS):
        return False
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free < max(num_bytes, _NO_ROOM)


_NO_ROOM = 1 << 20
"""A disk with fewer free bytes is full."""


def code_of_signal(name: str) -> int:
    """Return the exit code of a command that a signal has ended, as a shell has it: 143 for SIGTERM."""
    return 128 + signal.Signals[name]


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """Have SIGTERM and a closed terminal end a command as Ctrl-C does: temporary files and folders are removed.

    If it does not end within seconds, because it is in a long call or something has swallowed the exception, the
    process is ended (see `trainer.stopping`).
    """
    defaults = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    is_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in defaults} if is_main else {}
    caught = {number: before for number, before in found.items() if before in (defaults[number], leave_at_once)}
    prompt = PromptStop(caught, code_of_signal)

    def end(number: int, frame: object) -> NoReturn:
        name = signal.Signals(number).name
        prompt.hear(name)
        raise KeyboardInterrupt if number == signal.SIGINT else StopRequested(name)

    for number in caught:
        signal.signal(number, end)
    if caught:
        prompt.start()
    try:
        yield
    finally:
        prompt.cancel()
        for number, before in caught.items():
            signal.signal(number, before)


def nearest(value: object, legal: Iterable[object], cutoff: float = 0.6) -> object | None:
    """Return the legal value whose spelling is nearest to `value`, or None if none is near.

    `cutoff`: what share of their letters must be the same; more where all are short and end alike.
    """
    by_text = {str(candidate): candidate for candidate in legal}
    found = difflib.get_close_matches(str(value), by_text, n=1, cutoff=cutoff)
    if not found:
        text = str(value).lower()
        found = [known for known in by_text if text and (known.lower().startswith(text) or text in known.lower())]
    return by_text[found[0]] if found else None


def setting_error(
    key: str,
    value: object,
    rule: str,
    legal: object = None,
    *,
    meant: object = None,
    example: object = None,
    fix: str = "",
) -> UserError:
    """Return the error for one setting.

    `rule` completes the sentence "<key>=<value> ...", for example "must be at least 1".  What follows it is one of:
    `legal`, the legal value that is nearest, of those that have an order; `meant`, a legal value that is spelled, or
    called elsewhere, much like this one; `example`, a value that shows the form; `fix`, what to do, in words.
    """
    advice = [
        *([] if legal is None else [f"nearest legal value: {typed(key, legal)}"]),
        *([] if meant is None else [f"did you mean {typed(key, meant)}?"]),
        *([] if example is None else [f"for example: {typed(key, example)}"]),
        *([f"to fix: {fix}"] if fix else []),
    ]
    return UserError("\n  ".join([f"{key}={_shown_value(key, value)}: {rule}", *advice]))


def typed(key: str, value: object) -> str:
    """Return `key=value` as it is typed in a shell: in quotes where that would read something else into the value."""
    shown = _shown_value(key, value)
    text = f"{key}={shown}"
    return text if shlex.quote(shown) in (shown, "''") else shlex.quote(text)


def _shown_value(key: str, value: object) -> str:
    """Return a setting's value as messages show it: not of a setting whose name says that it is a secret."""
    return MASK if _SECRET_NAME.search(key) else _show(value)


def choice_error(
    key: str,
    value: object,
    legal: Iterable[object],
    noun: str = "one of",
    aliases: Mapping[str, object] | None = None,
) -> UserError:
    """Return the error for a setting whose value is none of the `legal` ones.

    `aliases` are names that these go by elsewhere: {"gpu": "cuda"}.
    """
    choices = list(legal)
    meant = (aliases or {}).get(_show(value).lower())
    rule = f"must be {noun} {', '.join(_show(choice) for choice in choices)}"
    return setting_error(key, value, rule, meant=nearest(value, choices) if meant is None else meant)


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_show(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_show(key)}: {_show(item)}" for key, item in value.items()) + "}"
    text = str(masked(str(value)))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}..."


# ---------------------------------------------------------------------------------------------------------------
# Text that is safe to show

MASK = "***"
"""What stands where credentials were."""


def printable(text: str) -> str:
    """Return the text as it may reach a terminal or a log: without control sequences and without secrets."""
    return redact(_CONTROL.sub("", _LONE.sub("\ufffd", _SEQUENCE.sub("", text))))


_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)"
_SEQUENCE = re.compile(rf"{_STRING}|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b(?:[!-/][0-~]|[0-OQ-WYZ\\`-~])")
"""Control sequences of ECMA-48, 7-bit and 8-bit (C1): commands with a text (a title, say), CSI, and short ones."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What is left of them, and of everything else that moves the cursor; lines and tabs stay."""
_LONE = re.compile("[\ud800-\udfff]")
"""Bytes that were no character; printed they would be bytes again."""


# ---------------------------------------------------------------------------------------------------------------
# Secrets

_known: set[str] = set()
"""Secrets that this process was given.  See `remember_secrets`."""

_SHORTEST = 6
"""A shorter secret is not looked for by itself: it would be found inside of ordinary words."""


def redact(text: str) -> str:
    """Return a text that is about to be printed or stored, with every secret in it masked.

    Beside what looks like a secret this finds those that the process was given, wherever a library quotes them.
    """
    text = mask_credentials(text)
    for secret in sorted(_known, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def remember_secrets(tree: Any) -> None:
    """Have `redact` mask the secrets in a configuration's values (or in one text) wherever they occur by themselves."""
    if isinstance(tree, dict):
        for value in tree.values():
            remember_secrets(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            remember_secrets(value)
    elif isinstance(tree, str):
        found: list[str] = []
        _masked_text(tree, found)
        for secret in found:
            for spelled in (secret, urllib.parse.unquote(secret), urllib.parse.quote(secret, safe="")):
                if len(spelled) >= _SHORTEST:
                    _known.add(spelled)


def redact_everything() -> None:
    """Redact what this process prints without `say` and `tell`: uncaught exceptions, warnings, log records.

    Secrets in environment variables, such as WANDB_API_KEY or the password of a proxy, are masked from here on, too.
    """
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8 and not os.path.exists(value):
            _known.add(value)
        elif "://" in value:
            remember_secrets(value)
    if sys.excepthook is not _say_exception:
        sys.excepthook = _say_exception
        threading.excepthook = _say_exception_of_thread
        warnings.formatwarning = _redacted(warnings.formatwarning)
        logging.setLogRecordFactory(_RedactedRecord)


def _say_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print_stderr("".join(traceback.format_exception(kind, error, trace)).rstrip())


def _say_exception_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        text = "".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback))
        print_stderr(f"Exception in thread {failed.thread.name if failed.thread else '?'}:\n{text.rstrip()}")


def _redacted(function: Callable[..., str]) -> Callable[..., str]:
    return lambda *args, **kwargs: redact(function(*args, **kwargs))


class _RedactedRecord(logging.LogRecord):
    """A log record whose message and traceback are redacted, whichever handler formats it."""

    def getMessage(self) -> str:  # noqa: N802 - the library's name
        return redact(super().getMessage())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:  # a formatter uses the text that it finds here
            self.exc_text = redact("".join(traceback.format_exception(*self.exc_info)).rstrip())


def mask_credentials(text: str) -> str:
    """Return the text with what looks like a secret masked: passwords and keys in URLs
    (scheme://user:***@host/path?token=***), headers (`Authorization: Bearer ***`), command options (--password ***),
    and tokens that common services issue (hf_...).
    """
    return _masked_text(text, [])


def masked(tree: Any) -> Any:
    """Return a configuration's tree with the credentials in it masked."""
    if isinstance(tree, dict):
        return {key: masked(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(masked(item) for item in tree)
    if not isinstance(tree, str):
        return tree
    # A value is one URL up to its end, whatever the password has in it.
    return _WHOLE.sub(lambda found: _mask_url(found[0], []), mask_credentials(tree))


def is_masked(value: object) -> bool:
    """Return whether a value lacks secrets that were masked when it was stored: it cannot be used."""
    return isinstance(value, str) and (value == MASK or _MASKED.search(value) is not None)


def is_masked_query(part: str) -> bool:
    """Return whether a part of a query, `name=value`, is one that is masked, or would be."""
    return _NAMED.match(f"?{part}") is not None


def masked_command(command: str) -> str:
    """Return a shell command as it may be stored: whole, or `***` if it may hold a secret.

    In a command a secret can be anywhere, so not a part is masked but all of it.  Harmless are commands without
    anything that looks like one: credentials, a URL with a path (a webhook's path is its secret), a long random word.
    """
    words = re.split(r"[\s'\"=:/,;|&<>()]+", command)
    is_suspicious = mask_credentials(command) != command or _SUSPICIOUS.search(command) is not None
    return MASK if is_suspicious or any(map(_looks_random, words)) else command


def masked_argument(word: str) -> str:
    """Return one word of a command line of ours as it may be stored."""
    key, _, value = word.partition("=")
    return f"{key}={masked_command(value)}" if key == "run.on_end" else redact(str(masked(word)))


def _looks_random(word: str) -> bool:
    """Return whether a word may be a key: long, with letters and digits mixed.

    Names made of short parts, such as llama3b-8k-v2-chat or exp2b_lr3e4_bs64k, are not.
    """
    longest = max(map(len, re.split(r"[-_.]", word)))
    return len(word) >= 16 and longest >= 12 and word[0] != "$" and len(_LETTER_BY_DIGIT.findall(word)) >= 3


# The name of a scheme is short: a long word is not looked through again from each of its letters.
_URL = re.compile(r"[A-Za-z][\w+.-]{0,30}://(?:[^\s/?#<>]*@)?[^\s'\"<>]*")
_WHOLE = re.compile(r"[A-Za-z][\w+.-]{0,30}://.*", re.DOTALL)

PASSWORD_IN_URL = re.compile(r"(://[^\s/:@?#\[]*:)(?!\d*(?:[/?#]|$))((?:[^/?#]*(?=@)|[^@]*(?=@)))@")
"""In scheme://user:password@host; what is a port has digits alone.  A password may hold a slash that is not encoded."""
_USER = re.compile(r"(https?://)([^\s/:@?#]+)@", re.IGNORECASE)
"""Of the web, a user without a password is a token."""
_SECRET_WORD = r"token|secret|signature|passw(?:or)?d|passphrase|credential|api[-_]?key|access[-_]?key(?:[-_]?id)?"
_NAMED = re.compile(
    rf"([?&;#](?:[\w.-]*(?:{_SECRET_WORD})"
    r"|(?:[\w.-]*[-_.])?(?:key|sig|pwd|pass|auth|authorization|jwt|sas|code|hmac|session|sessionid))=)([^&;#]*)",
    re.IGNORECASE,
)
_MASKED = re.compile(r"://[^/\s]*\*\*\*@|://\S*[?&;#][\w.-]+=\*\*\*(?:[&;#]|$)")
_IN_TEXT = tuple(
    re.compile(pattern)
    for pattern in (
        # a header, on a command line or in a library's message
        r"(?i)(\b(?:(?:proxy-)?authorization|cookie|api-?key|[\w-]{1,40}-(?:key|token|secret))['\"]?[ \t]*:[ \t]*"
        r"['\"]?(?:(?:bearer|basic|token|digest|apikey)[ \t]+)?)(?!(?:bearer|basic|token|digest|apikey)[ \t])"
        r"([^\s'\",}*$][^\s'\",}*]{3,})",
        r"(?i)(\bbearer[ \t]+)([\w.~+/=-]{8,})",
        # an entry of JSON, or of a mapping that a message quotes
        r"(?i)(['\"][\w-]{0,40}(?:password|passwd|secret|api_?key|access_?key|access_token)['\"]: ?['\"])([^'\"*]{4,})",
        # an option of a command, or a variable that is set for it
        rf"(?i)((?:^|[\s'\"])--?[\w-]{{0,40}}(?:{_SECRET_WORD})(?:=|[ \t]+))([^\s'\"$*]+)",
        r"(\b\w{0,40}(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)=)([^\s'\"$*&;]{4,})",
        r"((?:^|[\s'\"])(?:-u|--user|--proxy-user)[ \t]*['\"]?[^\s:'\"]+:)([^\s'\"$*]+)",
    )
)
_ISSUED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}"
    r"|AKIA[0-9A-Z]{12,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI, AWS, Slack; signed JSON tokens."""
_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|secret)[-_]?key)$", re.IGNORECASE
)
"""Names of settings and environment variables whose values are secrets."""
_SUSPICIOUS = re.compile(r"://[^\s/'\"]+/[^\s'\"]|sshpass|\b(?:mysql|mariadb)\S*\s.*-p\S", re.IGNORECASE)
_LETTER_BY_DIGIT = re.compile(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])")


def _masked_text(text: str, found: list[str]) -> str:
    """Return the text with what looks like a secret masked; the secrets are appended to `found`."""

    def mask(match: re.Match[str]) -> str:
        found.append(match[2])
        return f"{match[1]}{MASK}"

    def mask_all(match: re.Match[str]) -> str:
        found.append(match[0])
        return MASK

    text = _URL.sub(lambda match: _mask_url(match[0], found), text)
    for pattern in _IN_TEXT:
        text = pattern.sub(mask, text)
    return _ISSUED.sub(mask_all, text)


def _mask_url(url: str, found: list[str]) -> str:
    def mask(match: re.Match[str]) -> str:
        if match[2] != MASK:
            found.append(match[2])
        return f"{match[1]}{MASK}{'@' if match[0].endswith('@') else ''}"

    url = PASSWORD_IN_URL.sub(mask, url, count=1)
    url = _USER.sub(mask, url, count=1)
    return _NAMED.sub(mask, url)
