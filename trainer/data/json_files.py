"""Advice for .json files whose documents or chats are not stored as one object per line."""

from __future__ import annotations

import shlex
from pathlib import Path

_HEAD_BYTES = 4096
"""How many bytes from the start of a file are inspected."""


def json_advice(path: str | Path) -> tuple[str, str] | None:
    """Return what is wrong with a .json file and a command that converts it to JSONL, or None for any other file.

    Most public instruction datasets are JSON arrays.  A file with one object per line only needs to be renamed.
    """
    file = Path(path)
    if file.suffix.lower() != ".json" or not file.is_file():
        return None
    try:
        with open(file, "rb") as opened:
            begin = opened.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return None
    target = shlex.quote(str(file.with_suffix(".jsonl")))
    if begin.startswith(b"["):
        script = 'import json, sys; [print(json.dumps(record)) for record in json.load(open(sys.argv[1], "rb"))]'
        command = f"python -c {shlex.quote(script)} {shlex.quote(str(file))} > {target}"
        return "is a JSON array; what is read is JSONL, one object per line", command
    if begin.startswith(b"{") and b"}\n{" in begin:
        return "has one object per line, but its name must end in .jsonl", f"mv {shlex.quote(str(file))} {target}"
    return None
