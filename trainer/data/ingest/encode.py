"""Tokenizes batches of texts with the fastest engine that gives the correct ids, and splits long documents.

The reference engine is the library that a tokenizer file was written for, or the byte tokenizer itself.  For a
tokenizer file, a faster engine is used only if it gives the same ids.  Before any document is read, the two are
compared on texts designed to expose differences.  Later, they are compared on samples from each unit of the build
(`build.py`); if a single id differs, the whole unit is tokenized again with the reference.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.ingest.readers import dump_json, load_json
from trainer.data.shards import find_dtype
from trainer.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

IdsAndCounts: TypeAlias = "tuple[NDArray[np.integer[Any]], NDArray[np.int64]]"
"""The concatenated ids of several texts, and the number of ids of each text."""

_MAX_SAMPLES, _SAMPLE_BYTES = 8, 1024
"""Maximum number of texts that `check_sample` compares, and of bytes that it uses from the start of each."""


class TokenizationMismatch(Exception):
    """An engine gives different ids from the reference, or cannot encode with this tokenizer at all."""


class Engine(ABC):
    """Tokenizes texts, without adding start or end tokens."""

    name = ""

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> IdsAndCounts:
        """Return the ids of UTF-8 texts, and how many each text has."""


def find_engine(tokenizer: Tokenizer) -> Engine:
    """Return the fastest installed engine that agrees with the reference on texts designed to expose differences."""
    reference = find_reference(tokenizer)
    if isinstance(tokenizer, FileTokenizer):
        for make in (_Gigatoken, _Tiktoken):
            with contextlib.suppress(ImportError, TokenizationMismatch, ValueError, KeyError, RuntimeError, TypeError):
                engine = make(tokenizer, reference)
                _compare(engine, reference, _probe_texts(tokenizer))
                return engine
    return reference


def find_reference(tokenizer: Tokenizer) -> Engine:
    """Return the reference engine for a tokenizer."""
    return _TokenizersEngine(tokenizer) if isinstance(tokenizer, FileTokenizer) else _ByteEngine(tokenizer)


def check_sample(engine: Engine, reference: Engine, texts: Sequence[bytes]) -> None:
    """Raise TokenizationMismatch if an engine differs from the reference on the beginnings of some of the `texts`."""
    if engine is not reference and texts:
        sample = texts[:: -(-len(texts) // _MAX_SAMPLES)]
        starts = [text[:_SAMPLE_BYTES].decode(errors="ignore").encode() for text in sample]
        _compare(engine, reference, starts)


def _compare(engine: Engine, reference: Engine, texts: Sequence[bytes]) -> None:
    (ids, counts), (expected_ids, expected_counts) = engine.encode(texts), reference.encode(texts)
    if not np.array_equal(counts, expected_counts) or not np.array_equal(ids, expected_ids):
        raise TokenizationMismatch(f"{engine.name} gives different ids from {reference.name}")


class _ByteEngine(Engine):
    """Uses the byte tokenizer, which encodes all texts at once, concatenated."""

    name = "bytes"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> IdsAndCounts:
        return self._tokenizer.encode(b"".join(texts)), np.fromiter(map(len, texts), np.int64, len(texts))


class _TokenizersEngine(Engine):
    """Hugging Face's `tokenizers` library."""

    name = "tokenizers"

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._library = tokenizer.library
        self._dtype = find_dtype(tokenizer.vocab_size)

    def encode(self, texts: Sequence[bytes]) -> IdsAndCounts:
        with _single_threaded():
            encodings = self._library.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
            return _concatenate([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings], self._dtype)


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Disable the threads of `tokenizers`: they do not survive a fork, and processes split the work anyway."""
    name = "TOKENIZERS_PARALLELISM"
    old_value = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if old_value is None:
            del os.environ[name]
        else:
            os.environ[name] = old_value


def _concatenate(ids: Sequence[NDArray[Any]], dtype: str) -> IdsAndCounts:
    """Concatenate ids into one array of `dtype`; a narrow dtype is faster, since the array is copied again later."""
    counts = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.concatenate([np.empty(0, dtype), *ids], dtype=dtype, casting="unsafe"), counts


class _FastEngine(Engine):
    """Base class of fast engines.  They do not handle added tokens, so the reference encodes texts with such tokens."""

    _encode_text: Callable[[bytes], NDArray[np.uint32]]
    """Returns the ids of one text."""

    def __init__(self, tokenizer: FileTokenizer, reference: Engine) -> None:
        self._reference = reference
        self._dtype = find_dtype(tokenizer.vocab_size)
        self._added_ids = np.array(sorted(tokenizer.library.get_added_tokens_decoder()), np.uint32)

    def encode(self, texts: Sequence[bytes]) -> IdsAndCounts:
        try:
            ids = list(map(self._encode_text, texts))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is a BaseException
            raise TokenizationMismatch(f"{self.name} gives up ({error})") from error
        joined, counts = _concatenate(ids, self._dtype)
        if self._contains_added_token(joined):
            for number, text_ids in enumerate(ids):
                if self._contains_added_token(text_ids):
                    ids[number] = self._reference.encode([texts[number]])[0].astype(np.uint32)
            return _concatenate(ids, self._dtype)
        return joined, counts

    def _contains_added_token(self, ids: NDArray[np.integer[Any]]) -> bool:
        """Return whether `ids` contains an added token.

        Cheap if the added tokens are at one end of the vocabulary, as they usually are.
        """
        if (
            not len(self._added_ids)
            or not len(ids)
            or ids.max() < self._added_ids[0]
            or ids.min() > self._added_ids[-1]
        ):
            return False
        return bool(np.isin(ids, self._added_ids).any())


class _Gigatoken(_FastEngine):
    """The `gigatoken` library."""

    name = "gigatoken"

    def __init__(self, tokenizer: FileTokenizer, reference: Engine) -> None:
        import gigatoken

        super().__init__(tokenizer, reference)
        content = load_json(tokenizer.library.to_str().encode())
        content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
        content["post_processor"] = None
        self._encode_text = gigatoken.Tokenizer.from_json(dump_json(content)).backend.encode


class _Tiktoken(_FastEngine):
    """The `tiktoken` library, for byte-level BPE: the rank of a token is the position of its merge."""

    name = "tiktoken"

    def __init__(self, tokenizer: FileTokenizer, reference: Engine) -> None:
        import tiktoken

        super().__init__(tokenizer, reference)
        content = load_json(tokenizer.library.to_str().encode())
        if content["model"]["type"] != "BPE" or content["normalizer"] is not None:
            raise TokenizationMismatch("is not a plain byte-level BPE")
        ranks, id_of_rank = _bpe_ranks(content["model"])
        pattern = _split_pattern(content["pre_tokenizer"])
        encoding = tiktoken.Encoding("tokenizer", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

        self._encode_text = lambda text: id_of_rank[np.array(encoding.encode_ordinary(text.decode()), dtype=np.int64)]


_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the regular expression with which a pre-tokenizer splits text.

    Raises TokenizationMismatch if the pre-tokenizer does more than that.
    """
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    last = steps[-1] or {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(steps) > 2:
        raise TokenizationMismatch("its text is not split by a single regular expression")
    if len(steps) == 1 and last.get("use_regex", True):
        return _GPT2_PATTERN
    first = steps[0]
    is_split = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if len(steps) != 2 or last.get("use_regex", True) or not is_split or "Regex" not in first["pattern"]:
        raise TokenizationMismatch("its text is not split by a single regular expression")
    return str(first["pattern"]["Regex"])


def _bpe_ranks(model: dict[str, Any]) -> tuple[dict[bytes, int], NDArray[np.uint32]]:
    """Return the rank of each mergeable token, keyed by the token's bytes, and the id of each rank."""
    # In the vocabulary each byte is one character: printable bytes are themselves, the others count up from 256.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    byte_of_character = {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(unprintable)},
    }
    vocabulary: dict[str, int] = model["vocab"]
    tokens = [*byte_of_character]
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        tokens.append(left + right)
    ranks: dict[bytes, int] = {}
    ids: list[int] = []
    for token in dict.fromkeys(tokens):
        ranks[bytes(byte_of_character[character] for character in token)] = len(ids)
        ids.append(vocabulary[token])
    return ranks, np.array(ids, dtype=np.uint32)


_PROBES = (
    "I'm we'll they'VE can't'S  x''s\n\n\n  indented\n\ttabs\t\t \r\n\r\nmixed \n \n  end   ",
    "0 12 123 1234 12345678901234567890 1,234.56 3.14e-10 0x1F \u00bd \u0663\u0664 \u2167 x2y2 \uff12\uff10",
    "foo_bar fooBar FOOBar __init__(self, *args) -> None: # ...!!! <<>>= {}[]();; \\n \\\\ /* */ a/b/c.d?e=f&g",
    "naïve café cafe\u0301 Å A\u030a \ufb01 \ufb00 \uff46\uff55 ß \u1e9e \u0130i \u0131I \u01c5 \u03a9\u03c2",
    "中文字符。日本語のテキスト、カタカナ한국어 조합 ไทยไม่มีช่องว่าง हिन्दी में عربي נִקּוּד",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1e9 \ufe0f\u200b\u00a0\u2028\u2029\u3000x\u0085y",
    "\x00\x01\x7f\x80\ufeffbom\ufffd \ue000 \U0010fffd \U000e0041 a\u00adb \u202eabc\u202c",
    *("   leading", "trailing   ", " ", "\n", "a", "", "a" * 200, "=" * 300 + "\n" + " " * 300 + "x"),
)
"""Texts on which tokenizers tend to differ: contractions, white space, digits, code, various scripts, punctuation and
invisible characters."""


def _probe_texts(tokenizer: FileTokenizer) -> list[bytes]:
    """Return texts on which engines may differ: _PROBES, characters of many scripts, and texts with added tokens."""
    characters = [chr(code) for code in range(0x20, 0x2FFFF, 37) if not 0xD800 <= code < 0xE000]
    added_tokens = [str(token.content) for token in tokenizer.library.get_added_tokens_decoder().values()][:64]
    texts = [
        *_PROBES,
        *("".join(characters[start : start + 256]) for start in range(0, len(characters), 256)),
        *(f"a{text}b {text} \n{text}\n {text[:-1]}" for text in added_tokens),
    ]
    return [text.encode() for text in texts]


# ---------------------------------------------------------------------------------------------------------------
# Splitting long documents into pieces whose concatenated ids are those of the complete document
#
# Tokens do not cross the boundaries of the pre-tokenizer.  Candidates for a boundary are the position after a newline
# between two non-space characters, and the position before a space between two lowercase letters.  Whether a tokenizer
# always splits there can depend on the adjacent characters, so this is tested on pairs of characters: all of ASCII (all
# lowercase letters for the space), and some of each other script.  If neither candidate passes the test, documents are
# tokenized in one piece, however much memory that takes.


MAX_PIECE_BYTES = 1 << 20
"""Maximum bytes in a piece that has a boundary.  Tokenizing takes about 200 bytes of memory per byte of text."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_CHARACTER_RANGES = [
    (0x21, 0x7E), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x410, 0x42F),
    (0x430, 0x44F), (0x391, 0x3A1), (0x3B1, 0x3C9), (0x627, 0x64A), (0x5D0, 0x5EA), (0xE01, 0xE2E),
    (0x905, 0x939), (0x985, 0x9A8), (0xE0, 0xF6), (0xF8, 0xFF), (0xC0, 0xD6),
]  # fmt: skip
"""Ranges (first, last) of similar characters.  Outside ASCII, tokenizers treat all characters of a range alike."""

_PUNCTUATION = "".join(
    map(chr, (0x3002, 0x3001, 0xFF0C, 0xFF01, 0xFF1F, 0xFF1A, 0xFF1B, 0x300D, 0x300F, 0xFF09, 0x201D))
)
"""Punctuation that ends lines in other scripts."""

_WORD_CHARACTERS = "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in _CHARACTER_RANGES)

_AFTER_NEWLINE = re.compile(f"[{_WORD_CHARACTERS}{_PUNCTUATION}]\n(?=[{_WORD_CHARACTERS}])")

_BEFORE_SPACE = re.compile("[a-z](?= [a-z])")

_SEARCH_BYTES = 1 << 14
"""Number of bytes at the end of a piece that are searched for a boundary first."""


class DocumentSplitter:
    """Splits long documents at boundaries that one tokenizer's tokens never cross."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def is_long(self, text: bytes) -> bool:
        """Return whether a document is long enough to be split."""
        return len(text) > MAX_PIECE_BYTES

    def cut(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield a document in pieces of at most `MAX_PIECE_BYTES`, or longer ones where there is no boundary.

        pieces: the document, divided anywhere.
        """
        text, searched_to = b"", 0
        for piece in pieces:
            text += piece
            while len(text) > MAX_PIECE_BYTES:
                end = self._find_boundary(text, searched_to)
                if not end:
                    # A boundary may span the end of the text read so far.
                    searched_to = max(MAX_PIECE_BYTES, len(text) - _SEARCH_BYTES)
                    break
                yield text[:end]
                text, searched_to = text[end:], 0
        if text:
            yield text

    def _find_boundary(self, text: bytes, searched_to: int) -> int:
        """Return the position of a boundary, or 0 if there is none.

        Prefers one near the end of the first `MAX_PIECE_BYTES`; if these have none, returns the first one after them.

        searched_to: the position up to which `text` is known to have no boundary.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            return MAX_PIECE_BYTES
        if not searched_to:
            for start in (max(0, MAX_PIECE_BYTES - _SEARCH_BYTES), 0):
                for pattern in self._boundary_patterns:
                    if end := _last_match_end(pattern, text[start:MAX_PIECE_BYTES]):
                        return start + end
        start = max(MAX_PIECE_BYTES, searched_to) - 8
        remainder = text[start:].decode(errors="surrogateescape")  # may start or end within a character
        matches = (pattern.search(remainder) for pattern in self._boundary_patterns)
        ends = [match.end() for match in matches if match]
        return start + len(remainder[: min(ends)].encode(errors="surrogateescape")) if ends else 0

    @cached_property
    def _boundary_patterns(self) -> list[re.Pattern[str]]:
        """Patterns whose matches end at boundaries that this tokenizer's tokens never cross."""
        if not isinstance(self._tokenizer, FileTokenizer):
            return []
        library = self._tokenizer.library
        added = [token for token in library.get_added_tokens_decoder().values() if not token.special]
        if library.pre_tokenizer is None or any(
            token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in added
        ):
            return []  # an added token with white space may cross the pre-tokenizer's boundaries
        patterns = []
        left, right = _example_characters(_PUNCTUATION), _example_characters("")
        if _always_splits(library, ((f"{first}\n", second) for first in left for second in right)):
            patterns.append(_AFTER_NEWLINE)
        if _always_splits(library, ((left, f" {right}") for left, right in itertools.product(_LETTERS, _LETTERS))):
            patterns.append(_BEFORE_SPACE)
        return patterns


def _last_match_end(pattern: re.Pattern[str], text: bytes) -> int:
    """Return the byte offset at which the last match ends, or 0.  `text` may start or end within a character."""
    decoded = text.decode(errors="surrogateescape")
    last_end = max((match.end() for match in pattern.finditer(decoded)), default=0)
    return len(decoded[:last_end].encode(errors="surrogateescape"))


def _example_characters(extra_characters: str) -> list[str]:
    """Return all characters of the first range (ASCII), three of each other range, and `extra_characters`."""
    (first, last), *other_ranges = _CHARACTER_RANGES
    codes = [*range(first, last + 1), *(code for a, b in other_ranges for code in (a, (a + b) // 2, b))]
    return [*map(chr, codes), *extra_characters]


_CONTEXTS = (("", ""), ("x", "x"), ("1", "1"), (".", "."), (" ", " "), ("X", "X"), ("the ", " end"))
"""Texts to put before and after a pair of texts."""


def _always_splits(library: Any, pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether the pre-tokenizer splits between the two texts of every pair, in varying contexts."""
    normalize: Callable[[str], str] = library.normalizer.normalize_str if library.normalizer else str
    split = library.pre_tokenizer.pre_tokenize_str

    def words(text: str) -> list[str]:
        return [word for word, _ in split(normalize(text))]

    cached_words = cache(words)  # each half occurs in hundreds of pairs
    contexts = itertools.cycle(_CONTEXTS)
    for left, right in pairs:
        prefix, suffix = next(contexts)
        first, second = prefix + left, right + suffix
        if words(first + second) != cached_words(first) + cached_words(second):
            return False
    return True
