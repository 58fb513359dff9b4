"""Converts models in llama.cpp's GGUF format to Hugging Face folders in the cache, once per file.

GGUF's quantized weights cannot be trained, so they are dequantized to float32; F32, F16 and BF16 tensors keep their
dtype.  The file's metadata becomes `config.json`, `tokenizer.json` and the other files of an ordinary model folder,
which is what all other code sees.  The stored configuration of a run names the .gguf file, not the converted folder.

Needs the `gguf` library (installed by the `gguf` extra), which is imported only when a file is converted.  Does not
import torch.  Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import UserError, print_stderr, setting_error
from trainer.files import (
    atomic_replace,
    find_cache_folders,
    readable_size,
    sample_contents,
    write_atomically,
    writing_to,
)
from trainer.locks import locked
from trainer.stopping import raise_if_stop_requested

_SUFFIX = ".gguf"
_SOURCE_FILE = "made_from.json"
"""Name of the file in a converted folder that records the path of the .gguf file.  It is written once all other files
except the weights are complete."""
_WEIGHTS_FILE = "model.safetensors"
_VERSION = 2
"""Version of the conversion.  Increment it when the conversion changes, so that folders converted by older
versions are not reused."""


def is_gguf(path: str) -> bool:
    """Return whether a path is a .gguf file, or a folder with exactly one such file and no safetensors files."""
    return "://" not in path and _find_file(Path(path).expanduser()) is not None


def _find_file(path: Path) -> Path | None:
    if path.suffix.lower() == _SUFFIX and path.is_file():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    files = [file for file in path.iterdir() if file.suffix.lower() == _SUFFIX]
    return files[0] if len(files) == 1 else None


def original_file(path: str) -> str | None:
    """Return the path of the .gguf file from which a folder in the cache was converted, or None for other folders.

    path: the folder, or a file in it.
    """
    location = Path(path)
    folder = location if location.name.startswith("gguf-") else location.parent
    if not folder.name.startswith("gguf-"):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads((folder / _SOURCE_FILE).read_text())["path"])
    return None


def lacks_weights(folder: Path) -> bool:
    """Return whether a folder was converted from a .gguf file without converting the weights."""
    return original_file(str(folder)) is not None and not (folder / _WEIGHTS_FILE).exists()


def convert(path: str | os.PathLike[str], setting: str, with_weights: bool = True) -> Path:
    """Convert a .gguf file, or the only one in a folder, to a Hugging Face folder in the cache; return that folder.

    `is_gguf(path)` must be true.  A file that was converted before is not converted again, unless it has changed.  If
    several processes convert the same file, one does the work and the others wait.  If `setting` is `data.tokenizer`,
    returns the path of the folder's tokenizer.json instead.

    with_weights: whether to convert the weights too; the other files are small.

    Raises UserError, naming `setting`, if the file is damaged, if its model or tokenizer is not supported, if the
    library is missing, if there is not enough space, or if no cache folder is writable.
    """
    file = _find_file(Path(path).expanduser())
    assert file is not None, path
    file = Path(os.path.abspath(file))
    stat = file.stat()
    (sample,) = sample_contents([str(file)], setting)
    identity = json.dumps([_VERSION, str(file.resolve()), stat.st_size, stat.st_mtime_ns, sample])
    name = f"gguf-{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    error: OSError | None = None
    for cache in find_cache_folders(None):
        folder = cache / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / _SOURCE_FILE).exists() or (with_weights and not (folder / _WEIGHTS_FILE).exists()):
                with locked(cache / f".{name}.lock"):
                    _convert(file, folder, os.fspath(path), setting, with_weights)
            return folder / "tokenizer.json" if setting == "data.tokenizer" else folder
        except OSError as failure:
            error = failure
    raise setting_error(setting, path, f"cannot be converted: no cache folder is writable ({error})")


def _convert(file: Path, folder: Path, shown: str, setting: str, with_weights: bool) -> None:
    """Write the files that are missing from `folder`.  The caller holds the lock.

    shown: the value of `setting` to show in messages.
    """
    reader = _Gguf(file, shown, setting)
    if not (folder / _SOURCE_FILE).exists():
        files = {"config.json": reader.config(), "generation_config.json": reader.generation_config()}
        tokenizer, tokenizer_config = reader.tokenizer()
        files |= {"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config}
        for name, content in files.items():
            write_atomically(folder / name, json.dumps(content, indent=None if name == "tokenizer.json" else 2))
        if (template := reader.get("tokenizer.chat_template")) is not None:
            write_atomically(folder / "chat_template.jinja", str(template))
        # Written last, because it marks the others as complete.
        write_atomically(folder / _SOURCE_FILE, json.dumps({"path": str(file)}))
    if with_weights and not (folder / _WEIGHTS_FILE).exists():
        num_bytes = reader.num_bytes
        print_stderr(
            f"{file}: dequantizing {reader.formats} weights to {readable_size(num_bytes)} of "
            f"{' and '.join(reader.dtypes)} in {folder}; this is done only once"
        )
        weights = folder / _WEIGHTS_FILE
        with writing_to(setting, weights, num_bytes), atomic_replace(weights) as partial, open(partial, "wb") as out:
            reader.write_weights(out)


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensor names in llama.cpp, and the corresponding names in transformers."""

_ROPE_FACTORS = "rope_freqs.weight"

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2_SPLIT = [{**_BYTE_LEVEL, "use_regex": True}]
_DIGIT_SPLIT = [{"type": "Digits", "individual_digits": True}, *_GPT2_SPLIT]


def _regex_split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


_PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGIT_SPLIT),
    **dict.fromkeys(("llama-bpe", "llama3"), _regex_split(_LLAMA3_PATTERN)),
    "qwen2": _regex_split(_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")),
}
"""Pre-tokenizers: rules that split text before encoding, by llama.cpp's names."""

_LLAMA3_SPLITS = ("llama-bpe", "llama3")

_METASPACE = "▁"
"""The character that SentencePiece uses for a space."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Token types of GGUF; there are also 5 (unused) and 6 (byte)."""

_SPECIAL_TOKENS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
"""Keys of GGUF metadata, and the corresponding keys of tokenizer_config.json."""


class _Gguf:
    """Reads a .gguf file, and returns its content in Hugging Face's formats.

    Methods raise UserError, naming `setting`, if the content is damaged or not supported.
    """

    def __init__(self, file: Path, shown: str, setting: str) -> None:
        """`shown`: the value of the setting to show in messages."""
        self._file, self._shown, self._setting = file, shown, setting
        try:
            self._library: Any = importlib.import_module("gguf")
            importlib.import_module("gguf.quants")
        except ImportError as error:
            raise self._error("needs the library gguf", "pip install 'meshtrainer[gguf]'") from error
        try:
            self._reader = self._library.GGUFReader(file)
        except Exception as error:  # if the header's lengths do not match the file, numpy may raise anything
            fix = "download the file again"
            raise self._error(f"is not a complete GGUF file ({str(error).partition(chr(10))[0]})", fix) from error
        self._architecture = str(self.get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            rule = f"has the architecture {self._architecture!r}; supported: {supported}"
            raise self._error(rule, "give the Hugging Face folder of this model")
        if int(self.get("split.count") or 1) > 1:
            rule = f"is one of {self.get('split.count')} parts"
            raise self._error(rule, "join them first: llama-gguf-split --merge FIRST_PART OUT.gguf")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        absent = [name for name in ("token_embd.weight", "output_norm.weight") if name not in self._tensors]
        if absent:
            raise self._error(f"has no {', '.join(absent)}", "download the file again")

    def _error(self, rule: str, fix: str = "") -> UserError:
        return setting_error(self._setting, self._shown, f"{self._file.name}: {rule}", fix=fix)

    def get(self, key: str) -> Any:
        """Return a metadata value, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _required(self, key: str) -> Any:
        value = self.get(f"{self._architecture}.{key}")
        if value is None:
            raise self._error(f"its metadata has no {self._architecture}.{key}")
        return value

    # -- the model

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        import numpy as np

        num_heads, width = int(self._required("attention.head_count")), int(self._required("embedding_length"))
        key_length = self.get(f"{self._architecture}.attention.key_length")
        theta = float(self.get(f"{self._architecture}.rope.freq_base") or 10000.0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        scaling = self.get(f"{self._architecture}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise self._error(f"its RoPE scaling {scaling!r} is not supported")
        if _ROPE_FACTORS in self._tensors:
            rope |= self._llama3_scaling(theta)
        content: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": int(self._required("feed_forward_length")),
            "num_hidden_layers": int(self._required("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self.get(f"{self._architecture}.attention.head_count_kv") or num_heads),
            "head_dim": int(key_length or width // num_heads),
            "max_position_embeddings": int(self._required("context_length")),
            # GGUF stores float32; write the shortest decimal number that rounds to it, such as 1e-05.
            "rms_norm_eps": float(str(np.float32(self._required("attention.layer_norm_rms_epsilon")))),
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[-1]),
            "attention_bias": False,
            "dtype": self.dtypes[0],
        }
        if self._architecture == "llama":
            content["mlp_bias"] = False
        return content | self.generation_config()

    def _llama3_scaling(self, theta: float) -> dict[str, Any]:
        """Return the parameters of Llama 3.1's RoPE scaling; llama.cpp stores one factor per frequency instead."""
        import numpy as np

        stored = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float64)
        original, low, high, factor = 8192, 1.0, 4.0, float(stored.max())
        wavelengths = 2 * np.pi * theta ** (np.arange(len(stored)) / len(stored))
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if not np.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-3):
            raise self._error("its RoPE scaling is not that of Llama 3.1, and no other is supported")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def generation_config(self) -> dict[str, Any]:
        """Return generation_config.json."""
        tokens = {name: self.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
        return {name: int(token) for name, token in tokens.items() if token is not None}

    # -- the weights

    @property
    def formats(self) -> str:
        """The storage formats of the matrices, most frequent first."""
        counts = Counter(tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1)
        return " and ".join(name for name, _ in counts.most_common())

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the converted matrices, by their names in transformers, most frequent first."""
        names = {"F16": "float16", "BF16": "bfloat16"}
        matrices = [tensor for tensor in self._tensors.values() if len(tensor.shape) > 1]
        counts = Counter(names.get(tensor.tensor_type.name, "float32") for tensor in matrices)
        return [name for name, _ in counts.most_common()]

    @property
    def num_bytes(self) -> int:
        """The size of the converted weights."""
        return sum(int(tensor.n_elements) * _bytes_per_value(tensor) for tensor in self._tensors.values())

    def write_weights(self, out: BinaryIO) -> None:
        """Write the weights as safetensors, with only one tensor in memory at a time.

        Format: https://github.com/huggingface/safetensors#format.
        """
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "made_from": self._file.name}}
        named, end = {}, 0
        for tensor in self._tensors.values():
            if tensor.name == _ROPE_FACTORS:
                continue
            new_name = self._huggingface_name(tensor.name)
            stop = end + int(tensor.n_elements) * _bytes_per_value(tensor)
            shape = [int(size) for size in reversed(tensor.shape.tolist())]
            dtype = {2: tensor.tensor_type.name, 4: "F32"}[_bytes_per_value(tensor)]
            header[new_name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, stop]}
            named[new_name], end = tensor, stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        out.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in named.items():
            raise_if_stop_requested()
            out.write(self._values(name, tensor).tobytes())

    def _huggingface_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TENSOR_NAMES:
            return f"{_TENSOR_NAMES[stem]}.{suffix}"
        layer, _, part = stem.removeprefix("blk.").partition(".")
        if not stem.startswith("blk.") or part not in _LAYER_TENSOR_NAMES or suffix not in ("weight", "bias"):
            raise self._error(f"has a tensor {name} that {self._architecture} models do not have")
        return f"model.layers.{layer}.{_LAYER_TENSOR_NAMES[part]}.{suffix}"

    def _values(self, name: str, tensor: Any) -> Any:
        """Return a tensor's values as an array, with the rows in transformers' order.

        name: the tensor's name in transformers.
        """
        import numpy as np

        shape = tuple(reversed(tensor.shape.tolist()))
        if _bytes_per_value(tensor) == 2:
            values = np.ascontiguousarray(tensor.data).view(np.uint16).reshape(shape)
        else:
            try:
                values = self._library.quants.dequantize(tensor.data, tensor.tensor_type)
            except (NotImplementedError, ValueError) as error:
                rule = f"{tensor.name} is stored as {tensor.tensor_type.name}, which is not supported"
                raise self._error(rule) from error
            values = np.asarray(values, np.float32).reshape(shape)
        part = name.rpartition(".")[0].rpartition(".")[2]
        if self._architecture == "llama" and part in ("q_proj", "k_proj"):
            # RoPE rotates pairs of dimensions: adjacent ones in llama.cpp, half a head apart in transformers.
            heads = int(self._required("attention.head_count"))
            if part == "k_proj":
                heads = int(self.get("llama.attention.head_count_kv") or heads)
            paired = values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
            values = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(shape)
        return values

    # -- the tokenizer

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tokenizer.json and tokenizer_config.json."""
        model, split = self.get("tokenizer.ggml.model"), str(self.get("tokenizer.ggml.pre") or "default")
        if model != "llama" and (model != "gpt2" or split not in _PRE_TOKENIZERS):
            name = f"{model}" if model != "gpt2" else f"{model} with the rules of {split!r}"
            rule = (
                f"its tokenizer ({name}) is not supported; supported: llama (SentencePiece), and gpt2 with "
                f"{', '.join(_PRE_TOKENIZERS)}"
            )
            raise self._error(rule, "give the Hugging Face folder of this model")
        tokens = [str(token) for token in self._token_list("tokens")]
        types = [int(kind) for kind in self._token_list("token_type")] or [_NORMAL] * len(tokens)
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    **{"id": number, "content": tokens[number], "single_word": False, "lstrip": False},
                    **{"rstrip": False, "normalized": False, "special": kind != _USER_DEFINED},
                }
                for number, kind in enumerate(types)
                if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ],
            **(self._sentencepiece(tokens, types) if model == "llama" else self._byte_level(tokens, split)),
        }
        has_bos = model == "llama" or split in _LLAMA3_SPLITS
        if (post_processor := self._special_tokens_around_text(tokens, has_bos)) is not None:
            content["post_processor"] = post_processor
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for gguf_key, hf_key in _SPECIAL_TOKENS.items():
            if (token := self._special_token(gguf_key, tokens)) is not None:
                settings[hf_key] = token
        return content, settings

    def _token_list(self, key: str) -> list[Any]:
        """Return a metadata list of the tokenizer, with one entry per token; empty if the file lacks it."""
        values = self.get(f"tokenizer.ggml.{key}") or []
        num_tokens = len(self.get("tokenizer.ggml.tokens") or [])
        if len(values) not in (0, num_tokens) or num_tokens == 0:
            rule = f"its tokenizer has {num_tokens} tokens, but {len(values)} {key}"
            raise self._error(rule, "download the file again")
        return list(values)

    def _special_token(self, key: str, tokens: Sequence[str]) -> str | None:
        number = self.get(f"tokenizer.ggml.{key}")
        return tokens[int(number)] if number is not None and int(number) < len(tokens) else None

    def _merges(self) -> list[Sequence[str]]:
        return [merge.split(" ", 1) for merge in self.get("tokenizer.ggml.merges") or []]

    def _byte_level(self, tokens: Sequence[str], split: str) -> dict[str, Any]:
        """Return the parts of tokenizer.json for a byte-level vocabulary, such as GPT-2's."""
        steps = _PRE_TOKENIZERS[split]
        return {
            "normalizer": {"type": "NFC"} if split == "qwen2" else None,
            "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
            "post_processor": {**_BYTE_LEVEL, "use_regex": True},
            "decoder": {**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
            "model": _bpe(tokens, self._merges(), ignore_merges=split in _LLAMA3_SPLITS),
        }

    def _sentencepiece(self, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
        """Return the parts of tokenizer.json for a SentencePiece BPE vocabulary, such as Llama 2's.

        Characters outside the vocabulary are encoded as byte tokens.
        """
        merges = self._merges()
        if not merges:
            scores = self._token_list("scores")
            if not scores:
                raise self._error("its metadata has no tokenizer.ggml.scores")
            merges = [*_merges_by_score(tokens, scores, types)]
        # transformers adds a space before the text even if the file disables that; llama.cpp does not.
        has_prefix = self.get("tokenizer.ggml.add_space_prefix") is not False
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _METASPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._special_token("unknown_token_id", tokens)
        return {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": _METASPACE,
                "prepend_scheme": "first" if has_prefix else "never",
                "split": False,
            },
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        }

    def _special_tokens_around_text(self, tokens: Sequence[str], has_bos: bool) -> dict[str, Any] | None:
        """Return the post-processor that adds special tokens before or after a text, or None if none are added.

        has_bos: whether to add the beginning-of-text token if the file does not specify this.
        """
        specified = self.get("tokenizer.ggml.add_bos_token")
        first = self._special_token("bos_token_id", tokens) if (has_bos if specified is None else specified) else None
        last = self._special_token("eos_token_id", tokens) if self.get("tokenizer.ggml.add_eos_token") else None
        if first is None and last is None:
            return None
        used = [token for token in (first, last) if token is not None]

        def surrounded(sequence: str, type_id: int) -> list[dict[str, Any]]:
            before, after = (
                [{"SpecialToken": {"id": token, "type_id": type_id}}] if token is not None else []
                for token in (first, last)
            )
            return [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]

        return {
            "type": "TemplateProcessing",
            "single": surrounded("A", 0),
            "pair": [*surrounded("A", 0), *surrounded("B", 1)],
            "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in used},
        }


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **settings: Any) -> dict[str, Any]:
    """Return the entry `model` of tokenizer.json."""
    return {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
        **settings,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return BPE merges equivalent to SentencePiece's scores, in descending order of the merged tokens' scores.

    Each way to split a token into two other tokens gives one merge.  Control tokens and byte tokens are excluded, so
    that no text is merged into them.
    """
    ids = {token: number for number, token in enumerate(tokens) if types[number] in (_NORMAL, _USER_DEFINED)}
    merges = [
        (left, right, number)
        for token, number in ids.items()
        for split in range(1, len(token))
        if (left := token[:split]) in ids and (right := token[split:]) in ids
    ]
    # Among pairs for the same token, the one with the longest left part comes first, as in transformers' converter.
    merges.sort(key=lambda merge: (-scores[merge[2]], -len(merge[0]), -len(merge[1]), merge[2]))
    return [(left, right) for left, right, _ in merges]


def _bytes_per_value(tensor: Any) -> int:
    """Return the number of bytes per value of a tensor after conversion."""
    return 2 if tensor.tensor_type.name in ("F16", "BF16") else 4
