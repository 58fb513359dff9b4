"""Data for tests: files of text and records, token shards, tokenizers, and what is in shards and samples."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config.schema import DataSection
from trainer.data.source import IGNORE, Source, as_mapping
from trainer.prepare import prepare

END = "<|endoftext|>"
BYTES_END = 256
"""The token that ends a document of the tokenizer `bytes`."""


def write_records(path: Path, records: Iterable[Any]) -> Path:
    """Write one record a line; text is written as it is."""
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path


def write_texts(path: Path, texts: Iterable[str], key: str = "text") -> Path:
    """Write a .jsonl file of documents."""
    return write_records(path, [{"id": 1, key: text} for text in texts])


def write_shards(
    folder: Path, *shards: Sequence[str | bytes], name: str = "text", tokenizer: str | Path = "bytes"
) -> str:
    """Write shards of these documents with `trainer.prepare`, and return the glob that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, documents in enumerate(shards):
        with tempfile.TemporaryDirectory() as made:
            texts = [text if isinstance(text, str) else text.decode() for text in documents]
            lines = write_texts(Path(made) / "in.jsonl", texts)
            prepare([str(lines)], f"{made}/out", tokenizer=str(tokenizer))
            for path in Path(made).glob("out-00000.*"):
                (folder / f"{name}-{number:05d}{path.suffix}").write_bytes(path.read_bytes())
    return str(folder / f"{name}-?????.bin")


def write_bpe(path: Path, end: str = END) -> Path:
    """Write a tokenizer.json: byte-level BPE, trained on a few words."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the cat and the hat and the bat"] * 20, learner)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path


def documents_in(*shards: Path) -> list[list[int]]:
    """Return the tokens of each document in shards, with the token that ends it, read as the files are documented."""
    found = []
    for path in shards:
        metadata = json.loads(path.with_suffix(".json").read_text())
        ids = np.fromfile(path, np.dtype(metadata["dtype"]).newbyteorder("<"))
        ends = np.flatnonzero(ids == metadata["end_id"]) + 1
        found += [ids[start:end].tolist() for start, end in itertools.pairwise([0, *ends.tolist()])]
    return found


def texts_in(*shards: Path) -> list[str]:
    """Return the documents in shards of the tokenizer `bytes`."""
    return [bytes(document[:-1]).decode() for document in documents_in(*shards)]


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by their path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip_bit(path: Path, bit: int | None = None) -> None:
    """Turn over one bit, the middle one by default, as a disk does: the times of the file stay."""
    content, times = bytearray(path.read_bytes()), path.stat()
    bit = len(content) * 4 if bit is None else bit % (len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def tokens_section(path: object, **more: Any) -> DataSection:
    """Return the data settings for shards or text at a path, or at several by name."""
    return DataSection(
        **{"source": "tokens", "path": path if isinstance(path, dict) else str(path), "seq_len": 4, **more}
    )


def read_all(source: Source) -> dict[str, NDArray[Any]]:
    """Return all samples of a source."""
    return as_mapping(source.batch(np.arange(len(source))))


def stream_of(documents: Iterable[str]) -> list[int]:
    """Return the tokens of documents one after another, by the tokenizer `bytes`."""
    return [token for text in documents for token in (*text.encode(), BYTES_END)]


def text_of(source: Source) -> str:
    """Return the text of all samples of the tokenizer `bytes`, one after another, without ends of documents."""
    batch = read_all(source)
    tokens, targets = batch["tokens"], batch["targets"]
    ids = [int(tokens[0, 0]), *targets[targets != IGNORE].tolist()]
    return bytes(token for token in ids if token < BYTES_END).decode()


class Numbered(Source):
    """Sample i contains the number i, and the number of threads of the process that made it."""

    seq_len, vocab_size = 2, 10**6

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.stack([indices, indices * 0 + torch.get_num_threads()], axis=1)
        return tokens, np.where(indices[:, None] < 0, IGNORE, tokens)
