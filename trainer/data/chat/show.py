"""Splits the first conversations of chat files into trained and ignored text, for display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from trainer.config import DataSection
from trainer.data.chat.conversation import BadChat, Pair
from trainer.data.chat.formats import Format, check_columns
from trainer.data.chat.records import find_files, read_records
from trainer.data.chat.source import encoder_of
from trainer.errors import setting_error


@dataclass(frozen=True)
class DisplayedChat:
    """A conversation for display.

    place: its file and line, with `chosen` or `rejected` for an answer of a pair.
    pieces: its text, cut into pieces, each with whether it is trained on.
    """

    place: str
    pieces: Sequence[tuple[str, bool]]


def first_chats(data: DataSection, inputs: Sequence[str], number: int, key: str) -> Iterator[DisplayedChat]:
    """Yield the first `number` conversations of some files, both answers of each pair.

    Raises UserError that names the setting `key`.
    """
    check_columns(data.columns or {}, data.format)
    encoder = encoder_of(data)
    records = (found for given in inputs for path in find_files(key, given) for found in read_records(path, key))
    detected: Format | None = None
    for place, record in islice(records, number):
        try:
            detected = detected or Format.detect(record, data.format, data.columns)
            sample = detected.read(record)
            if isinstance(sample, Pair):
                yield DisplayedChat(f"{place}, chosen", encoder.pieces(sample.chosen))
                yield DisplayedChat(f"{place}, rejected", encoder.pieces(sample.rejected))
            else:
                yield DisplayedChat(place, encoder.pieces(sample))
        except BadChat as error:
            raise setting_error(key, ", ".join(inputs), f"{place}: {error}", fix=error.fix) from error
