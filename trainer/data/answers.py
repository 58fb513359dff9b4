"""Writes a file of answers, one line of JSON per prompt, in the order of the prompts.  A later command can add to it.

The lines do not say which model and settings produced them, so FILE.provenance.json, next to FILE, records both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import setting_error
from trainer.files import append_and_sync, write_atomically, writing_to

_FIX = "choose a file name that is not in use"


class AnswerFile:
    """A file of answers: a new one, or an existing one to append to.

    num_done: the number of prompts that were already answered when the file was opened.
    """

    def __init__(self, path: Path, key: str, prompts_path: str, prompts: Sequence[Mapping[str, Any]]) -> None:
        """Read the answers in the file, if any, without changing it.

        key: the option that names the file, for error messages.
        prompts_path: the file of prompts, for error messages.
        prompts: the records of the prompts.

        Raises UserError if `path` is a folder, if its parent folder does not exist, or if a line is not the answer
        to the prompt with the same number.
        """
        if not path.parent.is_dir():
            raise setting_error(key, path, f"there is no folder {path.parent}", fix="create it, or name another one")
        if path.is_dir():
            raise setting_error(key, path, "is a folder", fix="name a file")
        self._path, self._key = path, key
        content = path.read_bytes() if path.exists() else b""
        *lines, unfinished = content.split(b"\n")
        for index, line in enumerate([*lines, unfinished] if unfinished else lines):
            is_complete = index < len(lines)
            matches = _is_answer if is_complete else _is_partial_answer
            if index >= len(prompts) or not matches(line, prompts[index]):
                rule = f"line {index + 1} is not the answer to prompt {index + 1} of {prompts_path}"
                raise setting_error(key, path, rule, fix=_FIX)
        self.num_done, self._num_bytes, self._is_new = len(lines), len(content) - len(unfinished), not content

    def begin(self, model: str, provenance: Mapping[str, Any]) -> None:
        """Record what produces the answers, if the file is new or empty.

        Otherwise, check that the recorded model and settings are the same, and remove a partial last line.

        model: the path of the model, for messages.
        provenance: all settings, and under `weights` the checksum of the model's weights.

        Raises UserError if the answers in the file were produced by another model or with other settings, or if the
        record of what produced them cannot be read.
        """
        provenance_path = self._path.with_name(f"{self._path.name}.provenance.json")
        if self._is_new:
            with writing_to(self._key, provenance_path):
                write_atomically(provenance_path, json.dumps({"model": model, **provenance}, indent=1) + "\n")
            return
        try:
            recorded = {**json.loads(provenance_path.read_text())}
        except (OSError, ValueError, TypeError) as error:
            rule = f"has answers, but {provenance_path.name}, which says what produced them, cannot be read"
            raise setting_error(self._key, self._path, rule, fix=_FIX) from error
        if recorded.get("weights") != provenance["weights"]:
            rule = f"was started with other weights: those of {recorded.get('model')} at the time"
            raise setting_error(self._key, self._path, rule, fix=_FIX)
        changed = [
            f"{name} {recorded.get(name)}, now {now}" for name, now in provenance.items() if recorded.get(name) != now
        ]
        if changed:
            rule = f"was started with other settings: {'; '.join(changed)}"
            raise setting_error(self._key, self._path, rule, fix=f"give the same options, or {_FIX}")
        os.truncate(self._path, self._num_bytes)

    def append(self, lines: str) -> None:
        """Append lines and flush them to disk before returning."""
        with writing_to(self._key, self._path):
            append_and_sync(self._path, lines)


def answer_line(record: Mapping[str, Any], completion: str, finish: str) -> str:
    """Return the line that answers a prompt."""
    return json.dumps({**record, **_answer(completion, finish)}) + "\n"


def _is_answer(line: bytes, prompt: Mapping[str, Any]) -> bool:
    """Return whether a complete line is an answer to `prompt`."""
    try:
        answer = json.loads(line)
    except ValueError:
        return False
    return isinstance(answer, dict) and {**prompt, **_answer(answer.get("completion"), answer.get("finish"))} == answer


def _is_partial_answer(line: bytes, prompt: Mapping[str, Any]) -> bool:
    """Return whether a line cut off by a kill or a full disk is the start of an answer to `prompt`."""
    start = answer_line(prompt, "", "").partition('"completion": "')[0].encode()
    return line.startswith(start) or start.startswith(line)


def _answer(completion: Any, finish: Any) -> dict[str, Any]:
    return {"completion": completion, "finish": finish}
