"""The file of answers to a file of prompts: a JSON line for each prompt, in order.  A later command can continue it.

A second file beside it, FILE.made_by, says which model and which settings made the answers: their lines do not tell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import setting_error
from trainer.files import append_and_sync, write_atomically, writing_to

_FIX = "name a file that does not exist"


class AnswerFile:
    """A file of answers to `records`.

    num_done: the number of prompts that it has answers to.
    """

    def __init__(self, path: Path, key: str, prompts: str, records: Sequence[Mapping[str, Any]]) -> None:
        """`key`: the option that names the file, for errors.  `prompts`: the file of the prompts.

        Raises UserError if the file has a line that is not the answer to the prompt in its place.
        """
        if not path.parent.is_dir():
            raise setting_error(key, path, f"there is no folder {path.parent}", fix="create it, or name another one")
        if path.is_dir():
            raise setting_error(key, path, "is a folder", fix="name a file")
        self._path, self._key = path, key
        content = path.read_bytes() if path.exists() else b""
        *lines, unfinished = content.split(b"\n")
        for number, line in enumerate([*lines, unfinished] if unfinished else lines):
            is_whole = number < len(lines)
            if number >= len(records) or not (_answers if is_whole else _begins_to_answer)(line, records[number]):
                rule = f"line {number + 1} is not the answer to prompt {number + 1} of {prompts}"
                raise setting_error(key, path, rule, fix=_FIX)
        self.num_done, self._num_bytes, self._is_new = len(lines), len(content) - len(unfinished), not content

    def begin(self, model: str, made_by: Mapping[str, Any]) -> None:
        """Record what makes the answers, or check that it is what has made those in the file; remove a line cut short.

        model: where the model is, for messages.  made_by: the checksum of its weights as `weights`, and the settings.

        Raises UserError if the answers in the file were made by something else.
        """
        place = self._path.with_name(f"{self._path.name}.made_by")
        if self._is_new:
            with writing_to(self._key, place):
                write_atomically(place, json.dumps({"model": model, **made_by}, indent=1) + "\n")
            return
        try:
            earlier = json.loads(place.read_text())
        except (OSError, ValueError) as error:
            rule = f"has answers, but {place.name}, which says what made them, cannot be read"
            raise setting_error(self._key, self._path, rule, fix=_FIX) from error
        if earlier.get("weights") != made_by["weights"]:
            rule = f"has answers of other weights: those of {earlier.get('model')} when it was begun"
            raise setting_error(self._key, self._path, rule, fix=_FIX)
        changed = [
            f"{name} {earlier.get(name)}, now {now}" for name, now in made_by.items() if earlier.get(name) != now
        ]
        if changed:
            rule = f"was begun with other settings: {'; '.join(changed)}"
            raise setting_error(self._key, self._path, rule, fix=f"give the same options, or {_FIX}")
        os.truncate(self._path, self._num_bytes)

    def append(self, lines: str) -> None:
        """Append lines, which are on disk when this returns."""
        with writing_to(self._key, self._path):
            append_and_sync(self._path, lines)


def answer_line(record: Mapping[str, Any], completion: str, finish: str) -> str:
    """Return the line that answers a prompt."""
    return json.dumps({**record, **_answer(completion, finish)}) + "\n"


def _answers(line: bytes, record: Mapping[str, Any]) -> bool:
    """Return whether a line is an answer to the prompt `record`."""
    try:
        answer = json.loads(line)
    except ValueError:
        return False
    return isinstance(answer, dict) and {**record, **_answer(answer.get("completion"), answer.get("finish"))} == answer


def _begins_to_answer(line: bytes, record: Mapping[str, Any]) -> bool:
    """Return whether a line that was cut off, by a kill or a full disk, is part of an answer to `record`."""
    start = answer_line(record, "", "").partition('"completion": "')[0].encode()
    return line.startswith(start) or start.startswith(line)


def _answer(completion: Any, finish: Any) -> dict[str, Any]:
    return {"completion": completion, "finish": finish}
