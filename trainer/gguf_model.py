"""Converts models in llama.cpp's GGUF format to Hugging Face folders in the cache, once per file.

transformers reads the tokenizer and the weights of the file, which it dequantizes to float32, as quantized ones cannot
be trained.  It ignores some metadata without notice, so this module reads the model's configuration itself, with the
scaling of RoPE in Llama 3.1 and later and the size of the heads, and corrects the rules of the tokenizer.  transformers
would also read files next to the .gguf file, and offer to run their code, so it is given a folder with nothing but a
link to the file.

The converted folder is an ordinary model folder, which is what all other code sees.  The stored configuration of a run
names the .gguf file, not the converted folder.

Needs the extra `gguf`; its libraries are imported only when a file is converted.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import UserError, print_stderr, reason_of, setting_error
from trainer.files import (
    atomic_replace,
    find_cache_folders,
    locked,
    readable_size,
    remove,
    sample_contents,
    write_atomically,
    writing_to,
)

_SUFFIX = ".gguf"
_SOURCE_FILE = "made_from.json"
"""Name of the file in a converted folder that records the path of the .gguf file.  It is written once all other files
except the weights are complete."""
_WEIGHTS_FILE = "model.safetensors"
_LINK_FOLDER = ".source"
"""Name of a folder in a converted folder, with only a link to the .gguf file, that exists during the conversion."""
_VERSION = 4
"""Version of the conversion.  Increment it when the conversion changes, so that folders converted before are not
reused."""
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
_NEAREST_FLOATS = {"F16": "float16", "BF16": "bfloat16"}
"""The dtypes of unquantized matrices, by their names in GGUF; all others become float32."""

_LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_SPLITS = ("qwen2", "deepseek-r1-qwen")
_DIGIT_SPLITS = ("smollm", "starcoder", "refact")
_SPLITS = ("default", "gpt-2", *_DIGIT_SPLITS, *_LLAMA3_SPLITS, *_QWEN2_SPLITS)
"""Rules that split text before encoding, by llama.cpp's names.  transformers would read any other as GPT-2's."""


def is_gguf(path: str) -> bool:
    """Return whether a path is a .gguf file, or a folder with such files and no safetensors files."""
    return "://" not in path and bool(_find_files(Path(path).expanduser()))


def _find_files(path: Path) -> list[Path]:
    if path.suffix.lower() == _SUFFIX and path.is_file():
        return [path]
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return []
    return sorted(file for file in path.iterdir() if file.suffix.lower() == _SUFFIX)


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
    """Convert a .gguf file to a Hugging Face folder in the cache; return that folder.

    A file that was converted before is not converted again, unless it has changed.  If several processes convert the
    same file, one does the work and the others wait.  If `setting` is `data.tokenizer`, returns the path of the
    folder's tokenizer.json instead.

    path: the file, or a folder with only one; `is_gguf(path)` must be true.
    with_weights: whether to convert the weights too; the other files are small.

    Raises UserError, naming `setting`, if a folder has several such files, if the file is damaged, if its model or
    tokenizer is not supported, if a library is missing, if there is not enough space, or if no cache folder is
    writable.
    """
    files = _find_files(Path(path).expanduser())
    if len(files) > 1:
        rule = f"has {len(files)} GGUF files: {', '.join(file.name for file in files)}; name one of them"
        raise setting_error(setting, path, rule, str(files[0]))
    file = Path(os.path.abspath(files[0]))
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
                with locked(folder), _linked_alone(file, folder / _LINK_FOLDER) as link:
                    _convert(file, link, folder, os.fspath(path), setting, with_weights)
            return folder / "tokenizer.json" if setting == "data.tokenizer" else folder
        except OSError as failure:
            error = failure
    raise setting_error(setting, path, f"cannot be converted: no cache folder is writable ({error})")


@contextlib.contextmanager
def _linked_alone(file: Path, folder: Path) -> Iterator[Path]:
    """Yield a link to `file` that is alone in `folder` during the block."""
    remove(folder)  # of a killed process
    folder.mkdir()
    try:
        link = folder / file.name
        link.symlink_to(file)
        yield link
    finally:
        remove(folder)


def _convert(file: Path, link: Path, folder: Path, shown: str, setting: str, with_weights: bool) -> None:
    """Write the files that are missing from `folder`.  The caller holds the lock.

    link: a link to `file`; see `_linked_alone`.
    shown: the value of `setting` to show in messages.
    """
    reader = _Gguf(link, shown, setting)
    if not (folder / _SOURCE_FILE).exists():
        config = reader.config()
        config.save_pretrained(folder)
        tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id")}
        write_atomically(folder / "generation_config.json", json.dumps(tokens))
        reader.tokenizer().save_pretrained(folder)
        # Written last, because it marks the others as complete.
        write_atomically(folder / _SOURCE_FILE, json.dumps({"path": str(file)}))
    if with_weights and not (folder / _WEIGHTS_FILE).exists():
        for leftover in folder.glob(f".{_WEIGHTS_FILE}.*"):  # of a killed process
            leftover.unlink()
        weights = folder / _WEIGHTS_FILE
        print_stderr(
            f"{file}: dequantizing {reader.formats} weights to {readable_size(reader.num_bytes)} of {reader.dtype} in "
            f"{folder}; this is done only once"
        )
        with writing_to(setting, weights, reader.num_bytes), atomic_replace(weights) as partial:
            reader.write_weights(partial, folder)


class _Gguf:
    """A .gguf file, read by transformers.

    Methods raise UserError, naming `setting`, if the content is damaged or not supported.
    """

    def __init__(self, file: Path, shown: str, setting: str) -> None:
        """`file` must be alone in its folder.  `shown`: the value of the setting to show in messages."""
        self._file, self._shown, self._setting = file, shown, setting
        self._source = {
            "pretrained_model_name_or_path": file.parent,
            "gguf_file": file.name,
            "local_files_only": True,
            "trust_remote_code": False,
        }
        try:
            for library in ("gguf", "accelerate", "transformers"):
                importlib.import_module(library)
        except ImportError as error:
            raise self._error(f"needs the library {error.name}", "pip install 'meshtrainer[gguf]'") from error
        import gguf

        try:
            self._reader: Any = gguf.GGUFReader(file)
        except Exception as error:  # if the header's lengths do not match the file, numpy may raise anything
            fix = "download the file again"
            raise self._error(f"is not a complete GGUF file ({str(error).partition(chr(10))[0]})", fix) from error
        self._architecture = str(self._get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            rule = f"has the architecture {self._architecture!r}; supported: {', '.join(_ARCHITECTURES)}"
            raise self._error(rule, "give the Hugging Face folder of this model")
        if int(self._get("split.count") or 1) > 1:
            rule = f"is one of {self._get('split.count')} parts"
            raise self._error(rule, "join them first: llama-gguf-split --merge FIRST_PART OUT.gguf")
        if int(self._of_model("expert_count") or 0) > 0:
            raise self._error("is a mixture of experts, which is not supported", "give the Hugging Face folder of it")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "token_embd.weight" not in self._tensors:
            raise self._error("has no token_embd.weight", "download the file again")

    def _error(self, rule: str, fix: str = "") -> UserError:
        return setting_error(self._setting, self._shown, f"{self._file.name}: {rule}", fix=fix)

    @contextlib.contextmanager
    def _reading(self, part: str) -> Iterator[None]:
        """Raise UserError if transformers cannot read a part of the file in the block."""
        try:
            yield
        except Exception as error:  # of any type, as metadata are missing or do not fit together
            fix = "download the file again, or give the Hugging Face folder of this model"
            raise self._error(f"transformers cannot read its {part} ({reason_of(error)})", fix) from error

    def _get(self, key: str) -> Any:
        """Return a metadata value, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _of_model(self, key: str) -> Any:
        return self._get(f"{self._architecture}.{key}")

    def _required(self, key: str) -> Any:
        value = self._of_model(key)
        if value is None:
            raise self._error(f"its metadata has no {self._architecture}.{key}")
        return value

    # -- the model

    def config(self) -> Any:
        """Return the configuration of the model, with what transformers would not read from the file."""
        import numpy as np
        from transformers import AutoConfig

        # As in llama.cpp, a factor without a type scales linearly; files of earlier llama.cpp name it `scale_linear`.
        scaling = self._of_model("rope.scaling.type") or "linear"
        factor = self._of_model("rope.scaling.factor") or self._of_model("rope.scale_linear") or 1.0
        if scaling != "none" and (scaling != "linear" or factor != 1.0):
            raise self._error(f"its RoPE scaling {scaling!r} is not supported")
        theta = float(self._of_model("rope.freq_base") or 10000.0)
        rope = {"rope_type": "default", "rope_theta": theta}
        if _ROPE_FACTORS in self._tensors:
            rope |= self._llama3_scaling(theta)
        width, num_heads = int(self._required("embedding_length")), int(self._required("attention.head_count"))
        return AutoConfig.for_model(
            self._architecture,
            architectures=[f"{self._architecture.capitalize()}ForCausalLM"],
            hidden_size=width,
            intermediate_size=int(self._required("feed_forward_length")),
            num_hidden_layers=int(self._required("block_count")),
            num_attention_heads=num_heads,
            num_key_value_heads=int(self._of_model("attention.head_count_kv") or num_heads),
            head_dim=int(self._of_model("attention.key_length") or width // num_heads),
            max_position_embeddings=int(self._required("context_length")),
            # GGUF stores float32; write the shortest decimal number that rounds to it, such as 1e-05.
            rms_norm_eps=float(str(np.float32(self._required("attention.layer_norm_rms_epsilon")))),
            rope_parameters=rope,
            tie_word_embeddings="output.weight" not in self._tensors,
            vocab_size=int(self._tensors["token_embd.weight"].shape[-1]),
            bos_token_id=self._get("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._get("tokenizer.ggml.eos_token_id"),
            dtype=self.dtype,
        )

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

    # -- the tokenizer

    def tokenizer(self) -> Any:
        """Return the tokenizer as transformers reads it, with the rules that it does not read."""
        from tokenizers.normalizers import NFC
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
        from transformers import AutoTokenizer

        model, split = self._get("tokenizer.ggml.model"), str(self._get("tokenizer.ggml.pre") or "default")
        if model != "llama" and (model != "gpt2" or split not in _SPLITS):
            name = f"{model}" if model != "gpt2" else f"{model} with the rules of {split!r}"
            rule = f"its tokenizer ({name}) is not supported; supported: llama (SentencePiece), and gpt2 with "
            raise self._error(rule + ", ".join(_SPLITS), "give the Hugging Face folder of this model")
        if model == "llama" and self._get("tokenizer.ggml.add_space_prefix") is False:
            rule = "its tokenizer puts no space before a text, which is not supported"
            raise self._error(rule, "give the Hugging Face folder of this model")
        settings = {}
        if self._get("tokenizer.ggml.add_bos_token") is None:
            settings["add_bos_token"] = model == "llama" or split in _LLAMA3_SPLITS  # as llama.cpp does
        with self._reading("tokenizer"):
            tokenizer: Any = AutoTokenizer.from_pretrained(**self._source, **settings)
        backend = tokenizer.backend_tokenizer
        if model == "gpt2" and split in _DIGIT_SPLITS:
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        elif model == "gpt2" and split in _LLAMA3_SPLITS:
            backend.model.ignore_merges = True
        elif model == "gpt2" and split in _QWEN2_SPLITS:
            backend.normalizer = NFC()
        return tokenizer

    # -- the weights

    @property
    def _format_counts(self) -> Counter[str]:
        return Counter(tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1)

    @property
    def formats(self) -> str:
        """The storage formats of the matrices, most frequent first."""
        return " and ".join(name for name, _ in self._format_counts.most_common())

    @property
    def dtype(self) -> str:
        """The dtype of the converted matrices: the one in which all of them are stored, or float32."""
        (name, *others) = self._format_counts
        return "float32" if others else _NEAREST_FLOATS.get(name, "float32")

    @property
    def num_bytes(self) -> int:
        """The size of the converted weights, if all of them have the dtype of the matrices."""
        bytes_per_value = 4 if self.dtype == "float32" else 2
        return sum(int(tensor.n_elements) * bytes_per_value for tensor in self._tensors.values())

    def write_weights(self, to: Path, folder: Path) -> None:
        """Write the weights as safetensors.

        folder: the converted folder, with its config.json.
        """
        import torch
        import transformers
        from safetensors.torch import save_file

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        options: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        with self._reading("weights"):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(**self._source, **options)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # tied ones once
        absent = sorted({*report["missing_keys"]} & {*weights})
        if absent:
            raise self._error(f"has no weights for {', '.join(absent[:3])}", "download the file again")
        num_stored = len(self._tensors) - (_ROPE_FACTORS in self._tensors)
        if num_stored != len(weights):
            rule = f"has {num_stored} tensors, but {self._architecture} models have {len(weights)} weights"
            raise self._error(rule, "give the Hugging Face folder of this model")
        matrix_dtype = getattr(torch, self.dtype)  # the values were stored in it, so this loses nothing
        stored = {name: value.to(matrix_dtype) if value.ndim > 1 else value for name, value in weights.items()}
        save_file({name: value.contiguous() for name, value in stored.items()}, to, metadata={"format": "pt"})
