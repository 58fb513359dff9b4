"""Exports a model as a folder that transformers can load: safetensors, config.json, tokenizer and related files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from trainer.config.model_folder import CONFIG_JSON, INDEX, WEIGHTS, fields_of, find_huggingface, free_fields
from trainer.errors import UserError, is_disk_full, setting_error
from trainer.files import sync_folder, writing_to
from trainer.model.head import is_score_name
from trainer.model.network import HuggingFaceNames, replace_head
from trainer.model_spec import ModelSpec, Stacked, Transposed
from trainer.stopping import partial_file
from trainer.weights.model_files import (
    GENERATION,
    TOKENIZER,
    ModelFiles,
    is_tokenizer_file,
    json_bytes,
    read_tokenizer,
    template_of,
    with_template,
    with_tokenizer_config,
)
from trainer.weights.sources import MappedSource, Origin, WeightSource, find_weights, named_weights, row_blocks

PARTIAL = ".partial"
"""Suffix of an unfinished file's name, which also starts with a dot."""

MARK = {"exported_by": "meshtrainer"}
"""Entry in config.json, or in the headers of weight files, that marks an export, so that a later one may replace it."""

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names of an adapter's files in peft."""

_FILES_WITH_MARK = (CONFIG_JSON, ADAPTER_WEIGHTS)
"""Files that may contain `MARK`.  They stay in the folder, as proof of an earlier export, until they are replaced."""

MAX_FILE_BYTES = 2 * 10**9
"""Default limit on the size of a file of weights, which is held in memory while it is written."""


def export(
    source: WeightSource,
    spec: ModelSpec,
    model_config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_FILE_BYTES,
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

    Memory: one file, at most `max_shard_bytes` or a larger tensor, and what `source` needs to read a block of
    `sources.BLOCK_BYTES`.  One process, no collectives.

    All files are first written under temporary names.  The weights, or their index, are renamed last, so that a folder
    left by a crash is not mistaken for a model.

    Raises UserError, naming `setting`, if the folder contains anything except an earlier export that may be replaced
    (`overwrite`), or if the disk lacks space; also if the model has no Hugging Face names for the weights, or if the
    weights do not fit the model.
    """
    path = Path(folder).expanduser()
    heads = [shape for name, shape in source.shapes.items() if is_score_name(name)]
    stored = spec.stored_weights(model_config, source)
    exported: WeightSource
    exported, buffers = (stored, set()) if stored is not None else _under_exported_names(source, spec, model_config)
    # Buffers are not cast: some need their precision, such as the bias with which a router selects experts.
    dtypes = {
        name: dtype if dtype is not None and before.is_floating_point and name not in buffers else before
        for name, before in exported.dtypes.items()
    }
    sizes = _sizes(exported, dtypes)
    files = _split_into_files(sizes, max_shard_bytes)
    main_dtype = str(dtypes[max(sizes, key=lambda name: sizes[name])]).removeprefix("torch.")
    texts = _text_files(spec, model_config, main_dtype, end_id, turn_ends, tokenizer, model_files or ModelFiles())
    if heads:
        texts[CONFIG_JSON] = _classifier_config(texts[CONFIG_JSON], heads[0][0])
        texts.pop(GENERATION, None)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        texts[INDEX] = json_bytes({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    mark = MARK if stored is not None else {}
    return write_folder(path, texts, files, exported, dtypes, mark, overwrite, setting)


def write_folder(
    path: Path,
    texts: Mapping[str, bytes],
    files: Mapping[str, Collection[str]],
    source: WeightSource,
    dtypes: Mapping[str, torch.dtype],
    mark: Mapping[str, str],
    overwrite: bool,
    setting: str,
) -> list[Path]:
    """Write text and tensor files into the folder `path`, and return their paths.

    All files have temporary names until the last one is complete.

    texts: the contents of the text files, by name.
    files: the names of the tensors in each safetensors file, by the file's name.
    dtypes: the dtypes in the files, by the tensor's name.
    mark: an entry to add to the headers of the tensor files.

    Files of an earlier export are removed.

    Raises UserError, naming `setting`, if the folder contains anything except an earlier export that may be replaced,
    or if there is not enough disk space.
    """
    num_bytes = sum(map(len, texts.values())) + sum(_sizes(source, dtypes).values())
    with writing_to(setting, path, num_bytes), ExitStack() as stack:
        _prepare_folder(path, overwrite, setting)
        names = (*(name for name in texts if name != INDEX), *files, *(name for name in texts if name == INDEX))
        partial = {
            name: stack.enter_context(partial_file(path / f".{name.replace('/', '-')}{PARTIAL}")) for name in names
        }
        for name, text in texts.items():
            partial[name].write_bytes(text)
            _sync_file(partial[name])
        for name, tensors in files.items():
            weights = {tensor: _read(source, tensor, dtypes[tensor]) for tensor in tensors}
            with writing_safetensors(partial[name]):
                save_file(weights, partial[name], {"format": "pt", **mark})
            del weights  # before the next file's are read
            _sync_file(partial[name])
        old_files = [old_file for old_file in path.glob("**/*") if _is_export_file(str(old_file.relative_to(path)))]
        for old_file in old_files:
            if old_file.name not in _FILES_WITH_MARK:
                old_file.unlink()
        sync_folder(path)
        for name in names:
            (path / name).parent.mkdir(exist_ok=True)
            os.replace(partial[name], path / name)
        for old_file in old_files:
            if old_file.name in _FILES_WITH_MARK and old_file.name not in partial:
                old_file.unlink()
        sync_folder(path)
    return [path / name for name in partial]


@contextmanager
def writing_safetensors(path: Path) -> Iterator[None]:
    """Wrap a call of safetensors that writes the file `path`.

    The file gets the permissions of any new file; safetensors alone lets nobody else read it.  Raises UserError if it
    cannot be written, but leaves the error of a full disk as it is.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        yield
    except SafetensorError as error:
        if is_disk_full(error):
            raise
        raise setting_error("target", path, f"cannot be written ({error})", fix="give another path") from error
    path.chmod(mode)


def _sizes(source: WeightSource, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Return the number of bytes of each tensor in `dtypes`."""
    shapes = source.shapes
    return {name: torch.Size(shapes[name]).numel() * dtype.itemsize for name, dtype in dtypes.items()}


def _read(source: WeightSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as it is written, contiguous and in memory of its own.  Reads one block of rows at a time."""
    shape = source.shapes[name]
    if not shape:
        return cast_weight(source.read(name), dtype, name).clone()
    tensor = torch.empty(shape, dtype=dtype)
    for start, stop in row_blocks(shape, source.dtypes[name], 0, shape[0]):
        tensor[start:stop].copy_(cast_weight(source.read(name, start, stop), dtype, name))
    return tensor


def _under_exported_names(source: WeightSource, spec: ModelSpec, model_config: Any) -> tuple[MappedSource, set[str]]:
    """Return the tensors of `source` as Hugging Face stores them, in the model's order, and the names of buffers there.

    Raises UserError if the source or the names do not fit.
    """
    names = HuggingFaceNames(spec, model_config)
    with torch.device("meta"):
        model = spec.build_model(model_config)
        if heads := [shape for name, shape in source.shapes.items() if is_score_name(name)]:
            replace_head(model, spec, model_config, heads[0][0])
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    shapes, origins, buffers, unnamed = source.shapes, dict[str, Origin](), set[str](), list[str]()
    for name, stored in find_weights(model, source, f"model {spec.name!r}").items():
        exported = names.to_huggingface(name)
        if exported is None:
            unnamed.append(name)
            continue
        if isinstance(exported, Stacked):
            rows = range(shapes[stored][0])
            parts = {exported.replace("*", str(row)): Origin(source, stored, row=row) for row in rows}
        elif isinstance(exported, Transposed):
            parts = {str(exported): Origin(source, stored, transform=lambda matrix: matrix.mT)}
        else:
            parts = {exported: Origin(source, stored)}
        origins |= parts
        buffers |= parts.keys() if name not in parameters else set()
    if missing := buffers_without_name(model, spec, model_config):
        type_name = find_huggingface(spec).model_type_of(model_config)
        raise UserError(f"Hugging Face's {type_name} has no {', '.join(missing)}, and the model needs it")
    if unnamed:
        raise UserError(f"model {spec.name!r}: hf.names lacks {', '.join(unnamed)}")
    return MappedSource(source.description, origins), buffers


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


def _split_into_files(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order; return the names of each file's tensors by the file's name."""
    files: list[list[str]] = [[]]
    num_bytes = 0
    for name, size in sizes.items():
        if files[-1] and num_bytes + size > max_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(name)
        num_bytes += size
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{k:05d}-of-{len(files):05d}.safetensors": names for k, names in enumerate(files, start=1)}


def _text_files(
    spec: ModelSpec,
    model_config: Any,
    dtype: str,
    end_id: int | None,
    turn_ends: Collection[int],
    tokenizer: str,
    model_files: ModelFiles,
) -> dict[str, bytes]:
    """Return the contents of the text files by name; the files that came with the model are reused.

    dtype: the dtype that config.json names.
    """
    tokenizer_files = model_files.tokenizer or read_tokenizer(tokenizer)
    original = model_files.files
    ends = _merge_eos_ids([] if end_id is None else [end_id], turn_ends)
    if not original:
        texts = {CONFIG_JSON: _config_json(spec, model_config, dtype, ends)} | with_tokenizer_config(
            tokenizer_files, tokenizer, end_id
        )
        return texts if ends is None else texts | {GENERATION: json_bytes({"eos_token_id": ends})}
    has_new_tokenizer = TOKENIZER in tokenizer_files and tokenizer_files[TOKENIZER] != original.get(
        TOKENIZER, tokenizer_files[TOKENIZER]
    )
    texts = {name: data for name, data in original.items() if not (has_new_tokenizer and is_tokenizer_file(name))}
    if TOKENIZER not in texts:
        texts = with_tokenizer_config(tokenizer_files, tokenizer, end_id) | texts
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
        return {CONFIG_JSON: _config_json(spec, model_config, dtype, ends), **texts}
    return texts | {CONFIG_JSON: _update_config(texts[CONFIG_JSON], spec, model_config, dtype)}


def _config_json(spec: ModelSpec, model_config: Any, dtype: str, ends: int | list[int] | None) -> bytes:
    hf = find_huggingface(spec)
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


def _update_config(original: bytes, spec: ModelSpec, model_config: Any, dtype: str) -> bytes:
    """Return the original config.json with only its outdated entries changed."""
    hf = find_huggingface(spec)
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


def _sync_file(path: Path) -> None:
    """Flush a file to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
