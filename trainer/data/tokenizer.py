"""Tokenizers: text to token ids and back.

Every tokenizer has an id that ends a document.  Knows no file of samples and imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data.special_tokens import added_ids, configured_bos, configured_eos
from trainer.errors import UserError, nearest, setting_error

if TYPE_CHECKING:
    import tokenizers

    from trainer.config import DataSection

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
"""Names under which a tokenizer file that stands alone may hold its end-of-document token, in the order in which they
are tried: where nothing says which it is."""

_BEGIN_OF_DOCUMENT = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
"""The same for the token that begins a text."""

_RULES_VERSION = "text is text"
"""Changes with what is made of the same file, so that no tokens of before are taken for those of now."""


class Tokenizer(Protocol):
    """Turns text into ids below `vocab_size`, and back.

    name: the same for two tokenizers exactly if they give the same ids; kept with the tokens that it made.
    end_id: the id that ends a document.
    start_ids, end_ids: all that stands before a document, and behind it.  `encode` adds none of them.
    """

    name: str
    vocab_size: int
    end_id: int

    @property
    def start_ids(self) -> tuple[int, ...]: ...

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str | bytes) -> NDArray[np.integer[Any]]:
        """Return the ids of `text`, one dimension."""
        ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids`; what is no valid UTF-8 becomes U+FFFD, ends of documents become nothing."""
        ...


class ByteTokenizer:
    """The 256 bytes, and id 256 that ends a document."""

    name = "bytes"
    vocab_size = 257
    end_id = 256
    start_ids = ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The one id that ends a document."""
        return (self.end_id,)

    def encode(self, text: str | bytes) -> NDArray[np.integer[Any]]:
        """Return the bytes of `text`, as uint8; of a str, those of its UTF-8 form."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids`; what is no valid UTF-8 becomes U+FFFD, ends of documents become nothing."""
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read with the `tokenizers` library (the extra `hf`).

    Text is text: what spells a special token in it does not become one.  A document begins and ends with what the
    tokenizer's post-processor adds, and ends with its end-of-document token: that of the files beside it (see
    `surroundings`), else the last that the post-processor adds, else one of END_OF_DOCUMENT.

    bos: whether a document begins with the token that begins a text; None for what the post-processor does.

    `key` is the setting that errors name.  Raises UserError if the library or the file is missing, the file is no
    tokenizer, or it has no end-of-document token, or none to begin with.
    """

    def __init__(self, path: str, key: str = "data.tokenizer", bos: bool | None = None) -> None:
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise setting_error(key, path, f"cannot be read ({error.strerror})", "bytes") from error
        try:
            import tokenizers
        except ImportError as error:
            rule = "a tokenizer file needs the library `tokenizers`: pip install 'meshtrainer[hf]'"
            raise setting_error(key, path, rule, "bytes") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except BaseException as error:  # of a file that `tokenizers` does not understand: bare Exception, or a panic
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            rule = f"is not a Hugging Face tokenizer.json ({error})"
            raise setting_error(key, path, rule, "bytes") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # to the length of some model's input, which a file may have been saved with
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # ids may have gaps, so that their number is not enough
        self.start_ids, behind = added_ids(self._tokenizer)
        if bos is not None:
            begin = self._find_begin(Path(path).expanduser(), ids, key)
            others = tuple(number for number in self.start_ids if number != begin)
            if bos and begin is None:
                named = ", ".join(_BEGIN_OF_DOCUMENT)
                raise missing_bos_error(path, f"tokenizer_config.json does not name one, and it has none of {named}")
            self.start_ids = (begin, *others) if bos and begin is not None else others
        self.end_id = self._find_end(Path(path).expanduser(), ids, behind, key)
        self.end_ids = behind if self.end_id in behind else (*behind, self.end_id)
        made = repr((_RULES_VERSION, self.start_ids, self.end_ids, self.end_id)).encode()
        self.name = f"{Path(path).stem}:{hashlib.sha256(content + made).hexdigest()[:16]}"

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library `tokenizers`, set so that text is text; not to be changed."""
        return self._tokenizer

    def _find_begin(self, path: Path, ids: dict[str, int], key: str) -> int | None:
        begin = configured_bos(path, ids, key)
        if begin is None and self.start_ids:
            begin = self.start_ids[0]
        return next((ids[name] for name in _BEGIN_OF_DOCUMENT if name in ids), None) if begin is None else begin

    def _find_end(self, path: Path, ids: dict[str, int], behind: tuple[int, ...], key: str) -> int:
        end = configured_eos(path, ids, key)
        if end is None and behind:
            end = behind[-1]
        if end is None:
            end = next((ids[name] for name in END_OF_DOCUMENT if name in ids), None)
        if end is None:
            named = ", ".join(END_OF_DOCUMENT)
            rule = f"has no end-of-document token: tokenizer_config.json does not name one, and it has none of {named}"
            raise setting_error(key, path, f"{rule} in it", "bytes")
        return end

    def encode(self, text: str | bytes) -> NDArray[np.integer[Any]]:
        """Return the ids of `text`, without special tokens; what is no valid UTF-8 becomes U+FFFD first."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids`; special tokens, ends of documents among them, become nothing."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True))


def missing_bos_error(tokenizer: object, why: str) -> UserError:
    """Return the error for documents that are to begin with a token which their tokenizer does not have."""
    return setting_error("data.bos", True, f"{tokenizer} has no beginning-of-text token: {why}", None)


def tokenizer_of(data: DataSection) -> Tokenizer:
    """Return the tokenizer that the settings name.  Raises UserError if there is none."""
    return find_tokenizer(data.tokenizer, bos=data.bos)


def find_tokenizer(setting: str, key: str = "data.tokenizer", bos: bool | None = None) -> Tokenizer:
    """Return the tokenizer that `setting` names: `bytes`, or the path of a tokenizer.json, or the folder of one.

    bos: see `FileTokenizer`.  Raises UserError that names `key` if there is none.
    """
    if setting == "bytes":
        if bos:
            raise missing_bos_error("bytes", "it has the 256 bytes, and one that ends a document")
        return ByteTokenizer()
    if not tokenizer_file(setting).is_file():
        gone = "; no such file is there" if setting.endswith(".json") or "/" in setting else ""
        rule = f"must be bytes, or the path of a Hugging Face tokenizer.json{gone}"
        fix = "download the tokenizer.json of that model, and give its path"
        meant = nearest(setting, ["bytes"])
        raise setting_error(key, setting, rule, meant=meant, fix="" if meant else fix)
    return FileTokenizer(str(tokenizer_file(setting)), key, bos)


def tokenizer_file(setting: str) -> Path:
    """Return the file that a path means: itself, or of a folder the tokenizer.json in it."""
    path = Path(setting).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path
