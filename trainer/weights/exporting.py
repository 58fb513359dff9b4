"""Exports a model as a folder that transformers can load: safetensors, config.json, tokenizer and related files.

`ModelFiles` keeps the small files that came with a model, so that exports can include them.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.checkpoint.state_parts import StatePart
from trainer.config.model_folder import (
    CONFIG_JSON,
    INDEX,
    WEIGHTS,
    check_links,
    fields_of,
    find_huggingface,
    free_fields,
)
from trainer.config.rules import CHATML, CHATML_TEMPLATE
from trainer.errors import UserError, setting_error
from trainer.files import parse_json, sync_folder, temporary_folder, writing_to
from trainer.model.head import is_score_name
from trainer.model.network import HuggingFaceNames, replace_head
from trainer.model_spec import ModelSpec, Stacked, Transposed
from trainer.weights.sources import DTYPE_NAMES, WeightSource, find_weights, named_weights, row_blocks

# ---------------------------------------------------------------------------------------------------------------
# The small files that came with a model

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"

_TOKENIZER_CONFIG = "tokenizer_config.json"
_OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/*.jinja")

TOKENIZER_FILES = (
    TOKENIZER,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    *_OTHER_TEMPLATES,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Names and glob patterns of the tokenizer files that transformers uses."""


class ModelFiles(StatePart):
    """The small files that came with a model: tokenizer, chat template, generation settings, config.json.

    Part of a run's state, the same on all ranks.  Training does not need these files, but exports include them, even if
    the folder that training started from no longer exists.

    files: the contents, by name, of the files that came with the initial weights or, if there are none, of those in
        `model.path`; may be empty.
    tokenizer: the contents, by name, of the files of the run's own tokenizer (`data.tokenizer`), with the chat template
        (`data.chat_template`) if that is set; empty for `bytes` without a template.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tokenizer: dict[str, bytes] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"files": _pack(self.files), "tokenizer": _pack(self.tokenizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.files, self.tokenizer = _unpack(state["files"]), _unpack(state["tokenizer"])


def _pack(files: Mapping[str, bytes]) -> dict[str, Any]:
    # A checkpoint stores arrays with its tensors, not in the JSON that is read whenever the checkpoint is inspected.
    return {name: np.frombuffer(data, np.uint8) if data else data for name, data in files.items()}


def _unpack(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in state.items()}


@contextmanager
def as_temporary_folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Write files, given as contents by name, to a temporary folder; yield it, and delete it after the block."""
    with temporary_folder() as folder:
        for relative, data in files.items():
            file = folder / relative
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        yield folder


@contextmanager
def tokenizer_settings(model_files: ModelFiles, setting: str) -> Iterator[tuple[str, str]]:
    """Yield values for `data.tokenizer` and `data.chat_template` that refer to a run's tokenizer.

    This is the run's own tokenizer or, if it has none, the one that came with the model.  Its stored files are written
    to a temporary folder, which exists until the block ends.

    setting: the run's `data.tokenizer`, which is used if no tokenizer is stored.
    """
    files = model_files.tokenizer or {
        name: data for name, data in model_files.files.items() if TOKENIZER in model_files.files
    }
    if not files:
        yield setting, "model"
        return
    with as_temporary_folder(files) as folder:
        yield settings_for_folder(folder)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file, given its path in a model folder, belongs to the tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def read_model_files(folder: str | Path) -> dict[str, bytes]:
    """Return the small files of a Hugging Face folder by name.  Raises UserError if one cannot be read."""
    return _read_files(Path(folder), (CONFIG_JSON, GENERATION, *TOKENIZER_FILES), "train.init_from")


def read_tokenizer(setting: str, template: str = "model") -> dict[str, bytes]:
    """Return the files of a tokenizer by name: a tokenizer.json, and the related files next to it; none for `bytes`.

    A file with another name is returned as tokenizer.json, without related files.

    setting: the value of `data.tokenizer`.
    template: the value of `data.chat_template`; a file, or `chatml`, replaces the tokenizer's own templates.

    Raises UserError if a file cannot be read.
    """
    files = _read_tokenizer(setting)
    if template == "model":
        return files
    if template == CHATML:
        return with_template(files, CHATML_TEMPLATE.encode())
    path = Path(template).expanduser()
    try:
        return with_template(files, path.read_bytes())
    except OSError as error:
        raise setting_error("data.chat_template", template, f"cannot be read ({error.strerror})") from error


def template_of(files: Mapping[str, bytes]) -> bytes | None:
    """Return the chat template among a tokenizer's files: a separate file, else an entry in its settings; or None."""
    if TEMPLATE in files:
        return files[TEMPLATE]
    inline = _settings_of(files).get("chat_template")
    return inline.encode() if isinstance(inline, str) else None


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Return a tokenizer's files with `template` as their only chat template, wherever tools look for one."""
    other_files = {
        name: data for name, data in files.items() if not any(fnmatch(name, pattern) for pattern in _OTHER_TEMPLATES)
    }
    settings = _settings_of(other_files)
    if "chat_template" in settings:
        settings["chat_template"] = template.decode()
        other_files[_TOKENIZER_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return other_files | {TEMPLATE: template}


def _settings_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    with suppress(ValueError):
        content = parse_json(files.get(_TOKENIZER_CONFIG, b"{}"))
        return content if isinstance(content, dict) else {}
    return {}


def settings_for_folder(folder: Path) -> tuple[str, str]:
    """Return values for `data.tokenizer` and `data.chat_template` that refer to the model files in a folder."""
    if (folder / TOKENIZER).exists():
        return str(folder), "model"
    return "bytes", str(folder / TEMPLATE) if (folder / TEMPLATE).exists() else "model"


def _read_tokenizer(setting: str) -> dict[str, bytes]:
    if setting == "bytes":
        return {}
    path = Path(setting).expanduser()
    if not path.is_file():
        rule = "must be bytes, or the path of a Hugging Face tokenizer.json"
        raise setting_error("data.tokenizer", setting, rule, fix="give an existing file")
    if path.name == TOKENIZER:
        return _read_files(path.parent, TOKENIZER_FILES, "data.tokenizer", named_file=TOKENIZER)
    named_file = glob.escape(path.name)
    (data,) = _read_files(path.parent, (named_file,), "data.tokenizer", named_file=named_file).values()
    return {TOKENIZER: data}


def _read_files(folder: Path, patterns: tuple[str, ...], setting: str, named_file: str = "") -> dict[str, bytes]:
    """Return the files of a folder that match any of `patterns`, by name.

    named_file: the pattern of the file that the user named, which may be a link to a file outside the folder.
    """
    check_links(folder, setting, [pattern for pattern in patterns if pattern != named_file])
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise setting_error(setting, folder, f"{error.filename} cannot be read ({error.strerror})") from error


# ---------------------------------------------------------------------------------------------------------------
# The export

PARTIAL = ".partial"
"""Suffix of an unfinished file's name, which also starts with a dot."""

MARK = {"exported_by": "meshtrainer"}
"""Entry in config.json, or in the headers of weight files, that marks an export, so that a later one may replace it."""

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names of an adapter's files in peft."""

_FILES_WITH_MARK = (CONFIG_JSON, ADAPTER_WEIGHTS)
"""Files that may contain `MARK`.  They stay in the folder, as proof of an earlier export, until they are replaced."""


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to write: its name and shape in the source, and its name and dtype in the file."""

    name: str
    exported_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_transposed(self) -> bool:
        return isinstance(self.exported_name, Transposed)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def entries(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors in the file, in order; one for each row of a `Stacked` tensor."""
        if isinstance(self.exported_name, Stacked):
            return {self.exported_name.replace("*", str(row)): self.shape[1:] for row in range(self.shape[0])}
        if self.is_transposed:
            return {self.exported_name: (*self.shape[:-2], self.shape[-1], self.shape[-2])}
        return {self.exported_name: self.shape}


def export(
    source: WeightSource,
    spec: ModelSpec,
    model_config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: str = "bytes",
    end_id: int | None = None,
    turn_ends: Collection[int] = (),
    model_files: ModelFiles | None = None,
    overwrite: bool = False,
    setting: str = "folder",
) -> list[Path]:
    """Write the weights of `source` to `folder` in Hugging Face's format, and return the paths of the files.

    Floating-point parameters are stored as `dtype`, by default unchanged.  A model larger than `max_shard_bytes` is
    split into several files with an index; no file is larger than that unless a single tensor is.  Tied weights are
    stored once.

    tokenizer: "bytes", which has no files, or the path of a tokenizer.json, which is copied together with the related
        files in its folder.
    end_id: the token id that ends a document.
    turn_ends: the token ids with which a chat model learned to end its turns; always added to `eos_token_id`.
    model_files: the files that came with the original model.  They are copied; only end-of-text ids and outdated
        entries of config.json are changed.  If the model was trained with a different tokenizer, that is exported
        instead, and `end_id` is added to `eos_token_id`.

    Memory: a few blocks of `sources.BLOCK_BYTES`, and what `source` needs to read one.  One process, no collectives.

    All files are first written under temporary names.  The weights, or their index, are renamed last, so that a folder
    left by a crash is not mistaken for a model.

    Raises UserError, naming `setting`, if the folder contains anything except an earlier export that may be replaced
    (`overwrite`), or if the disk lacks space; also if the model has no Hugging Face names for the weights, or if the
    weights do not fit the model.
    """
    path = Path(folder).expanduser()
    names = HuggingFaceNames(spec, model_config)
    heads = [shape for name, shape in source.shapes.items() if is_score_name(name)]
    stored = spec.stored_weights(model_config, source)
    if stored is not None:  # already with the exported names and shapes
        source, dtypes = stored, stored.dtypes
        tensors = [
            ExportedTensor(name, name, shape, (dtype if dtypes[name].is_floating_point else None) or dtypes[name])
            for name, shape in stored.shapes.items()
        ]
    else:
        tensors = _list_tensors(source, spec, model_config, names, dtype)
    shards = _split_into_shards(tensors, max_shard_bytes)
    texts = _text_files(spec, model_config, tensors, end_id, turn_ends, tokenizer, model_files or ModelFiles())
    if heads:
        texts[CONFIG_JSON] = _classifier_config(texts[CONFIG_JSON], heads[0][0])
        texts.pop(GENERATION, None)
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        weight_map = {name: file for file, shard in shards.items() for tensor in shard for name in tensor.entries()}
        texts[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    return write_folder(path, texts, shards, source, MARK if stored is not None else {}, overwrite, setting)


def write_folder(
    path: Path,
    texts: Mapping[str, bytes],
    shards: Mapping[str, Sequence[ExportedTensor]],
    source: WeightSource,
    mark: Mapping[str, str],
    overwrite: bool,
    setting: str,
) -> list[Path]:
    """Write text and tensor files into the folder `path`, and return their paths.

    All files have temporary names until the last one is complete.

    texts: the contents of the text files, by name.
    shards: the tensors of each safetensors file, by the file's name.
    mark: an entry to add to the headers of the tensor files.

    Files of an earlier export are removed.

    Raises UserError, naming `setting`, if the folder contains anything except an earlier export that may be replaced,
    or if there is not enough disk space.
    """
    num_bytes = sum(map(len, texts.values())) + sum(tensor.num_bytes for shard in shards.values() for tensor in shard)
    with writing_to(setting, path, num_bytes):
        _prepare_folder(path, overwrite, setting)
        names = (*(name for name in texts if name != INDEX), *shards, *(name for name in texts if name == INDEX))
        partial = {name: path / f".{name.replace('/', '-')}{PARTIAL}" for name in names}
        try:
            for name, text in texts.items():
                with _open_synced(partial[name]) as file:
                    file.write(text)
            for name, shard in shards.items():
                with _open_synced(partial[name]) as file:
                    _write_safetensors(file, shard, source, mark)
        except BaseException:
            for unfinished in partial.values():
                unfinished.unlink(missing_ok=True)
            raise
        old_files = [old_file for old_file in path.glob("**/*") if _is_export_file(str(old_file.relative_to(path)))]
        for old_file in old_files:
            if old_file.name not in _FILES_WITH_MARK:
                old_file.unlink()
        sync_folder(path)
        for name in partial:
            (path / name).parent.mkdir(exist_ok=True)
            os.replace(partial[name], path / name)
        for old_file in old_files:
            if old_file.name in _FILES_WITH_MARK and old_file.name not in partial:
                old_file.unlink()
        sync_folder(path)
    return [path / name for name in partial]


def _list_tensors(
    source: WeightSource, spec: ModelSpec, model_config: Any, names: HuggingFaceNames, dtype: torch.dtype | None
) -> list[ExportedTensor]:
    """Return the tensors to write, in the model's order.  Raises UserError if the source or the names do not fit."""
    with torch.device("meta"):
        model = spec.build_model(model_config)
        if heads := [shape for name, shape in source.shapes.items() if is_score_name(name)]:
            replace_head(model, spec, model_config, heads[0][0])
    shapes = {name: tuple(weight.shape) for name, weight in named_weights(model).items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    dtypes = source.dtypes
    tensors, unnamed = [], []
    for name, stored in find_weights(model, source, f"model {spec.name!r}").items():
        exported_name = names.to_huggingface(name)
        if exported_name is None:
            unnamed.append(name)
            continue
        source_dtype = dtypes[stored]
        # Buffers are not cast: some need their precision, such as the bias with which a router selects experts.
        is_cast = source_dtype.is_floating_point and name in parameters
        stored_dtype = dtype if dtype is not None and is_cast else source_dtype
        tensors.append(ExportedTensor(stored, exported_name, shapes[name], stored_dtype))
    if buffers := buffers_without_name(model, spec, model_config):
        type_name = find_huggingface(spec).model_type_of(model_config)
        raise UserError(f"Hugging Face's {type_name} has no {', '.join(buffers)}, and the model needs it")
    if unnamed:
        raise UserError(f"model {spec.name!r}: hf.names lacks {', '.join(unnamed)}")
    return tensors


def buffers_without_name(model: nn.Module, spec: ModelSpec, model_config: Any) -> list[str]:
    """Return the persistent buffers of `model` that its Hugging Face counterpart lacks.

    An example is the bias with which a router selects experts, if the model type has none.  Empty if `hf.names` is not
    used.
    """
    if spec.hf is None or spec.hf.stored is not None:
        return []
    names = HuggingFaceNames(spec, model_config)
    buffers = [name for name, weight in named_weights(model).items() if not isinstance(weight, nn.Parameter)]
    return [name for name in buffers if names.to_huggingface(name) is None]


def _split_into_shards(tensors: Sequence[ExportedTensor], max_bytes: int) -> dict[str, list[ExportedTensor]]:
    """Distribute the tensors, in the model's order, over files; return the tensors of each file by the file's name."""
    shards: list[list[ExportedTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + tensor.num_bytes > max_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{k:05d}-of-{len(shards):05d}.safetensors": shard for k, shard in enumerate(shards, start=1)}


def _text_files(
    spec: ModelSpec,
    model_config: Any,
    tensors: Sequence[ExportedTensor],
    end_id: int | None,
    turn_ends: Collection[int],
    tokenizer: str,
    model_files: ModelFiles,
) -> dict[str, bytes]:
    """Return the contents of the text files by name; the files that came with the model are reused."""
    tokenizer_files = model_files.tokenizer or read_tokenizer(tokenizer)
    original = model_files.files
    ends = _merge_eos_ids([] if end_id is None else [end_id], turn_ends)
    if not original:
        texts = {CONFIG_JSON: _config_json(spec, model_config, tensors, ends)} | _add_tokenizer_config(
            tokenizer_files, tokenizer, end_id
        )
        return texts if ends is None else texts | {GENERATION: json_bytes({"eos_token_id": ends})}
    has_new_tokenizer = TOKENIZER in tokenizer_files and tokenizer_files[TOKENIZER] != original.get(
        TOKENIZER, tokenizer_files[TOKENIZER]
    )
    texts = {name: data for name, data in original.items() if not (has_new_tokenizer and is_tokenizer_file(name))}
    if TOKENIZER not in texts:
        texts = _add_tokenizer_config(tokenizer_files, tokenizer, end_id) | texts
    template = template_of(tokenizer_files)
    if template not in (None, template_of(texts)):
        texts = with_template(texts, template)
    new_eos_ids = [*([end_id] if has_new_tokenizer and end_id is not None else []), *turn_ends]
    original_eos = json.loads(texts.get(CONFIG_JSON, b"{}")).get("eos_token_id")
    texts |= {
        name: _add_eos_ids(texts[name], original_eos, new_eos_ids)
        for name in (CONFIG_JSON, GENERATION)
        if name in texts
    }
    if CONFIG_JSON not in texts:
        return {CONFIG_JSON: _config_json(spec, model_config, tensors, ends), **texts}
    return texts | {CONFIG_JSON: _update_config(texts[CONFIG_JSON], spec, model_config, tensors)}


def _config_json(
    spec: ModelSpec, model_config: Any, tensors: Sequence[ExportedTensor], ends: int | list[int] | None
) -> bytes:
    hf = find_huggingface(spec)
    dtype = _main_dtype(tensors)
    return json_bytes(
        {
            # Otherwise transformers falls back to its defaults for this model type.
            **{"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None},
            **hf.fixed,
            **hf.config(model_config),
            **hf.exported,
            **{"architectures": [hf.architecture_of(model_config)], "model_type": hf.model_type_of(model_config)},
            **{"dtype": dtype, "torch_dtype": dtype},  # the names in transformers 5 and 4
            **MARK,
        }
    )


def _update_config(original: bytes, spec: ModelSpec, model_config: Any, tensors: Sequence[ExportedTensor]) -> bytes:
    """Return the original config.json with only its outdated entries changed."""
    hf = find_huggingface(spec)
    dtype = _main_dtype(tensors)
    content = {key: value for key, value in json.loads(original).items() if key not in hf.dropped}
    if not _describes(content, spec, model_config):
        new = {**hf.fixed, **hf.config(model_config), "model_type": hf.model_type_of(model_config)}
        content |= new
        if not _describes(content, spec, model_config, free_fields(spec.config, ())):
            # Another original entry goes before a new one, such as a second name or a length that is given twice.
            content = {key: value for key, value in content.items() if key not in (hf.entries or ())} | new
    if hf.architecture_of(model_config) not in (content.get("architectures") or ()):
        content["architectures"] = [hf.architecture_of(model_config)]
    content |= hf.exported
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in content] or ["dtype", "torch_dtype"]
    content |= dict.fromkeys(dtype_keys, dtype) | ({} if hf.stored else MARK)
    return original if content == json.loads(original) else (json.dumps(content, indent=2) + "\n").encode()


def _describes(content: Mapping[str, Any], spec: ModelSpec, model_config: Any, ignored: Collection[str] = ()) -> bool:
    """Return whether the contents of config.json describe this model, apart from fields named in `ignored`."""
    try:
        fields = fields_of(content, spec)
    except UserError:
        return False
    return all(getattr(model_config, name) == value for name, value in fields.items() if name not in ignored)


def _classifier_config(content: bytes, num_labels: int) -> bytes:
    """Return the config.json of a sequence classifier with `num_labels` scores.

    transformers uses the score at the last token that is not padding.  If the padding token is also an end-of-text
    token, at which the score was trained, `pad_token_id` is removed; sequences then cannot be scored in batches.
    """
    entries = json.loads(content)
    kind = re.sub("(ForCausalLM|LMHeadModel)$", "", entries["architectures"][0])
    ends = entries.get("eos_token_id")
    if entries.get("pad_token_id") in (ends if isinstance(ends, list) else [ends]):
        entries["pad_token_id"] = None
    labels = [f"LABEL_{number}" for number in range(num_labels)]
    return json_bytes(
        entries
        | {"architectures": [f"{kind}ForSequenceClassification"], "id2label": dict(enumerate(labels))}
        | {"label2id": {label: number for number, label in enumerate(labels)}}
    )


def _main_dtype(tensors: Sequence[ExportedTensor]) -> str:
    return str(max(tensors, key=lambda tensor: tensor.num_bytes).dtype).removeprefix("torch.")


def _add_eos_ids(settings: bytes, default: int | list[int] | None, new: Collection[int]) -> bytes:
    """Append `new` to the ids in a JSON file's `eos_token_id`, or to `default` if the file has no such entry."""
    content = json.loads(settings)
    ends = content.get("eos_token_id", default)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if set(new) <= set(ends):
        return settings
    return (json.dumps(content | {"eos_token_id": _merge_eos_ids(ends, new)}, indent=2) + "\n").encode()


def _merge_eos_ids(ends: Collection[int], new: Collection[int]) -> int | list[int] | None:
    """Merge token ids into the format of `eos_token_id`: a single id, a list, or None."""
    merged = [*ends, *sorted(set(new) - set(ends))]
    return merged[0] if len(merged) == 1 else merged or None


def _write_safetensors(
    file: BinaryIO, tensors: Sequence[ExportedTensor], source: WeightSource, mark: Mapping[str, str]
) -> None:
    """Write a safetensors file: the header's length in 8 bytes, the header including `mark`, and the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **mark}}
    # Write the widest dtypes first: this aligns each tensor to its element size, on which readers may rely.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    starts, end = [], 0
    for tensor in ordered:
        starts.append(end)
        for name, shape in tensor.entries().items():
            start, end = end, end + torch.Size(shape).numel() * tensor.dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    data = file.tell()
    for tensor, start in zip(ordered, starts, strict=True):
        _write_tensor(file, data + start, tensor, source)


def _write_tensor(file: BinaryIO, position: int, tensor: ExportedTensor, source: WeightSource) -> None:
    num_rows = tensor.shape[0] if tensor.shape else 1
    widest = max(source.dtypes[tensor.name], tensor.dtype, key=lambda dtype: dtype.itemsize)
    for start, stop in row_blocks(tensor.shape, widest, 0, num_rows):
        if tensor.is_transposed and len(tensor.shape) > 2:
            file.write(_as_bytes(_read_block(source, tensor, start, stop).mT))
        elif tensor.is_transposed:
            # A block of source rows covers some columns of every stored row.
            columns = _read_block(source, tensor, start, stop).t().contiguous()
            for row in range(len(columns)):
                file.seek(position + (row * num_rows + start) * tensor.dtype.itemsize)
                file.write(_as_bytes(columns[row]))
            del columns  # before the next block is read, to save memory
        else:
            file.write(_as_bytes(_read_block(source, tensor, start, stop)))
    file.seek(position + tensor.num_bytes)


def _read_block(source: WeightSource, tensor: ExportedTensor, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of a tensor in the dtype of the file."""
    return cast_weight(source.read(tensor.name, start, stop), tensor.dtype, tensor.exported_name)


def cast_weight(weight: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast `weight` to `dtype`.  Raises UserError if a finite value becomes infinite in float16.

    name: the weight's name, for the message.
    """
    cast = weight.to(dtype)
    if (
        dtype is torch.float16
        and weight.dtype is not dtype
        and bool((is_lost := cast.isinf() & weight.isfinite()).any())
    ):
        largest = float(weight[is_lost].abs().max())
        rule = f"{name} has a value of {largest:.4g}, but float16 has none above 65504"
        raise UserError(f"dtype=float16: {rule}\n  to fix: --dtype bfloat16")
    return cast


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    # Not `reshape`: a contiguous tensor with one element may have any stride, and then cannot be viewed as bytes.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _add_tokenizer_config(files: Mapping[str, bytes], tokenizer: str, end_id: int | None) -> dict[str, bytes]:
    """Return a tokenizer's files, with a minimal tokenizer_config.json if it is missing; `bytes` does not get one."""
    if tokenizer == "bytes" and TOKENIZER not in files:
        return dict(files)
    try:
        content = json.loads(files[TOKENIZER])
        vocab = content["model"]["vocab"]
        added = [(token["content"], token["id"]) for token in content.get("added_tokens", ())]
    except (ValueError, KeyError, TypeError) as error:
        raise setting_error("tokenizer", tokenizer, f"is not a Hugging Face tokenizer.json ({error!r})") from error
    tokens = [*(vocab.items() if isinstance(vocab, dict) else ()), *added]
    end_token = next((text for text, token_id in tokens if token_id == end_id), None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"eos_token": end_token} if end_token is not None else {}),
    }
    return {_TOKENIZER_CONFIG: json_bytes(settings), **files}


def _prepare_folder(folder: Path, overwrite: bool, setting: str) -> None:
    """Create `folder`.  Raises UserError if that fails, or if it holds anything but an export that may be replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for entry in folder.iterdir():
            name = entry.name[1:].removesuffix(PARTIAL).replace("_templates-", "_templates/")
            if entry.name.endswith(PARTIAL) and _is_export_file(name):
                entry.unlink()  # left by a killed export
    except OSError as error:
        raise setting_error(setting, folder, f"cannot be created ({error.strerror})") from error
    if not any(folder.iterdir()):
        return
    if not any(MARK.items() <= content.items() for content in _marks(folder)):
        raise setting_error(
            setting, folder, "contains files that are not an earlier export; choose a new or empty folder"
        )
    if not overwrite:
        rule = "contains an earlier export; choose a new folder, or overwrite it with --overwrite"
        raise setting_error(setting, folder, rule)


def _marks(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings that may contain `MARK`: config.json, and the headers of the weight files."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / CONFIG_JSON).read_text())
        yield content if isinstance(content, dict) else {}
    for weights in folder.glob("*.safetensors"):
        with suppress(OSError, SafetensorError), safe_open(weights, framework="pt") as file:
            yield file.metadata() or {}


def _is_export_file(name: str) -> bool:
    """Return whether an export may write a file of this name."""
    is_shard = fnmatch(name, "model-?????-of-?????.safetensors")
    names = (WEIGHTS, INDEX, CONFIG_JSON, GENERATION, ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    return is_shard or name in names or is_tokenizer_file(name)


@contextmanager
def _open_synced(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing, and flush it to disk when the block ends."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Serialize as JSON, in the layout of exported files."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
