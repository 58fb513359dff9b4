"""Prints samples as the model sees them: text, document boundaries, and which tokens are targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import RunConfig
from trainer.data.mixed_source import SOURCE, MixedSource
from trainer.data.sample_order import SampleOrder, epochs
from trainer.data.shards import ShardError
from trainer.data.source import IGNORE, Source, as_mapping
from trainer.data.tokenizer import Tokenizer, tokenizer_of
from trainer.errors import TrainingFailed

_EDGE_CHARS = 60
"""Characters shown of the start and of the end of a long piece."""


def show_samples(
    source: Source,
    order: SampleOrder,
    config: RunConfig,
    step: int,
    count: int,
    is_full: bool,
    tell: Callable[[str], None],
) -> None:
    """Print the first `count` samples of a step through `tell`, each as a block of lines.

    Each line is a run of tokens of one document that are either all targets or all ignored.  Raises TrainingFailed if
    the data are corrupt.
    """
    batch = config.train.global_batch_size
    first, tokenizer = (step - 1) * batch, _tokenizer_of(source, config)
    positions = first + np.arange(min(count, batch))
    indices = order.at(positions)
    try:
        found = as_mapping(source.batch(indices))
    except ShardError as error:
        raise TrainingFailed(str(error)) from error
    names = list(source.sources) if isinstance(source, MixedSource) else [""]
    is_chat, many = config.data.source == "chat", source.rows_per_sample
    for number, (position, index) in enumerate(zip(positions.tolist(), indices.tolist(), strict=True)):
        name = names[int(found[SOURCE][number * many])] if SOURCE in found else ""
        rows = range(number * many, (number + 1) * many)
        lines = [line for row in rows for line in _lines(found, row, tokenizer, is_chat, is_full)]
        tell("\n".join([_header(step, position, index, name, order), *lines, ""]))


def _header(step: int, position: int, index: int, name: str, order: SampleOrder) -> str:
    of = f", source {name}" if name else ""
    return f"step {step}, position {position}: sample {index}{of}, epoch {epochs(order, position)[name]:.4f}"


def _tokenizer_of(source: Source, config: RunConfig) -> Tokenizer | None:
    """Return the tokenizer that made the tokens if it is data.tokenizer, otherwise None: ids are shown then."""
    tokenizer = tokenizer_of(config.data)
    return tokenizer if tokenizer.name == source.tokenizer else None


def _lines(
    found: dict[str, NDArray[Any]], row: int, tokenizer: Tokenizer | None, is_chat: bool, is_full: bool
) -> Iterator[str]:
    tokens, counts = found["tokens"][row], found["targets"][row] != IGNORE
    if "documents" in found:
        documents = found["documents"][row]
    else:
        documents = _conversation_of(tokens, counts) if is_chat else _documents_of(tokens, tokenizer)
    # Each conversation has targets, so everything after the last conversation with targets is padding.
    padded = documents > documents[counts].max(initial=-1) if is_chat else np.zeros(len(tokens), bool)
    borders = np.flatnonzero((np.diff(documents) != 0) | (np.diff(counts) != 0)) + 1
    width = len(str(len(tokens)))
    for start, end in zip([0, *borders.tolist()], [*borders.tolist(), len(tokens)], strict=True):
        if padded[start]:
            yield f"  {start:>{width}}-{end - 1:<{width}}  padding"
            continue
        kind = "trained on" if counts[start] else "ignored   "
        text = _text(tokens[start:end], tokenizer, is_full)
        yield f"  {start:>{width}}-{end - 1:<{width}}  document {int(documents[start]) + 1}  {kind}  {text}"


def _conversation_of(tokens: NDArray[Any], counts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return 0 for the tokens of a row's only conversation, and 1 for the padding, which repeats the last token."""
    end = int(np.flatnonzero(counts | (tokens != tokens[-1])).max(initial=-1)) + 1
    return (np.arange(len(tokens)) >= end).astype(np.int64)


def _documents_of(tokens: NDArray[Any], tokenizer: Tokenizer | None) -> NDArray[np.int64]:
    """Return each token's document number in its row, judged by end tokens; padding counts as the last document."""
    if tokenizer is None:
        return np.zeros(len(tokens), dtype=np.int64)
    is_end = tokens == tokenizer.end_id
    return np.cumsum(np.concatenate([[False], is_end[:-1] & ~is_end[1:]]))


def _text(tokens: NDArray[Any], tokenizer: Tokenizer | None, is_full: bool) -> str:
    if tokenizer is None:
        shown = (
            tokens.tolist() if is_full or len(tokens) <= 16 else [*tokens[:8].tolist(), "...", *tokens[-8:].tolist()]
        )
        return " ".join(map(str, shown))
    text = tokenizer.decode(tokens)
    start = len(tokenizer.start_ids)
    begins = "[begin] " if start and tuple(tokens[:start].tolist()) == tokenizer.start_ids else ""
    ends = " [end]" if tokens[-1] == tokenizer.end_id else ""
    if is_full or len(text) <= 2 * _EDGE_CHARS + 5:
        return begins + repr(text) + ends
    return f"{begins}{text[:_EDGE_CHARS]!r} ... {text[-_EDGE_CHARS:]!r}{ends}"
