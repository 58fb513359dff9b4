"""Reads a recipe's model fields from the config.json of a Hugging Face model folder, and checks the folder's files.

The fields are compared with the run's configuration before the model is built, because weights of the same shapes may
belong to another model, for example one with a different `rope_theta` or number of heads.  `ModelSpec.hf` says how
entries of config.json correspond to fields, and which values are supported.  This module reads no tensors and does not
import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import struct
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer import gguf_model, hub
from trainer.config.declare import check_number, union_members
from trainer.errors import UserError, setting_error, yaml_scalar
from trainer.files import parse_json, read_json, symlink_target_outside
from trainer.model_spec import HuggingFace, ModelSpec
from trainer.registry import all_models, find_model

CONFIG_JSON = "config.json"

_REJECTED_ENTRIES = {
    "quantization_config": "quantized weights are not supported; dequantize them first",
    "compression_config": "compressed weights are not supported; decompress them first",
    "auto_map": "needs custom model code, which is never run",
}
"""Entries of config.json for which a folder is rejected, each with the reason, unless the recipe accepts the entry: in
`HuggingFace.dropped`; the generic recipe `hf` accepts `auto_map`."""


_ATTENTION = Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]
_EXPERT_METHODS = Literal["eager", "batched_mm", "grouped_mm"]
_NULLABLE_METADATA: Mapping[str, Any] = {
    # what the folder is, and who wrote it
    **{"architectures": list[str], "transformers_version": str, "tokenizer_class": str, "exported_by": str},
    **{"_name_or_path": str, "name_or_path": str, "_commit_hash": str, "unsloth_version": str, "unsloth_fixed": bool},
    **{"transformers.js_config": dict, "is_llama_config": bool},
    # the files' dtype
    **dict.fromkeys(("dtype", "torch_dtype"), Literal["float64", "float32", "float16", "bfloat16"]),
    # token ids, which the model itself does not use
    **{"bos_token_id": int, "eos_token_id": int | list[int], "pad_token_id": int, "decoder_start_token_id": int},
    **dict.fromkeys(("cls_token_id", "sep_token_id", "mask_token_id", "unk_token_id"), int),
    # classifiers and other heads
    **{"id2label": dict[int, str], "label2id": dict[str, int], "finetuning_task": str, "task_specific_params": dict},
    **{"problem_type": Literal["regression", "multi_label_classification"], "classifier_dropout": int | float},
    **{"summary_activation": str},
    # how a program computes, with the same result
    **{"pretraining_tp": int, "_attn_implementation_autoset": bool, "use_flash_attn": bool},
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), _ATTENTION),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), _EXPERT_METHODS),
    # generation, in files of transformers 4
    **dict.fromkeys(("max_length", "min_length", "max_new_tokens", "max_sequence_length", "num_beams"), int),
    **dict.fromkeys(("num_beam_groups", "num_return_sequences", "top_k"), int),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), int),
    **dict.fromkeys(("temperature", "top_p", "typical_p"), int | float),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "diversity_penalty"), int | float),
    **dict.fromkeys(("do_sample", "early_stopping", "output_scores", "return_dict_in_generate"), bool),
    **{"remove_invalid_values": bool, "prefix": str, "forced_bos_token_id": int},
    **{"forced_eos_token_id": int | list[int], "bad_words_ids": list, "exponential_decay_length_penalty": list},
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), list),
}
METADATA: Mapping[str, Any] = {
    **{key: hint | None for key, hint in _NULLABLE_METADATA.items()},
    **{"model_type": str, "use_cache": bool, "num_labels": int},
    **{"summary_type": str, "summary_use_proj": bool, "summary_proj_to_labels": bool},
    **{"summary_first_dropout": int | float},
}
"""Entries of config.json that have no effect on what any model computes, and the type that each must have.

transformers refuses a folder in which some of them have another type; so would the export of a run that starts there.
"""

_SWITCHED_OFF = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embedding_dropout", "dropout"), 0.0),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "torchscript", "use_bfloat16"), False),
    **dict.fromkeys(("tf_legacy_loss", "rope_interleaved"), False),
    **{"return_dict": True, "chunk_size_feed_forward": 0, "pruned_heads": {}},
}
"""Entries of config.json that have no effect on what any model computes, as long as they have this value."""


def find_huggingface(spec: ModelSpec) -> HuggingFace:
    """Return the recipe's Hugging Face mapping.  Raises UserError if it has none."""
    if spec.hf is None:
        raise UserError(
            f"model {spec.name!r} has no mapping to Hugging Face: give it "
            "hf=HuggingFace(model_type=..., architecture=..., names=..., config=..., model_fields=...), as "
            "trainer.model_spec.HuggingFace describes; recipes/llama/huggingface.py is an example"
        )
    return spec.hf


def stored_dtype(path: str | Path) -> str | None:
    """Return the dtype that config.json in the folder `path` declares; None if it declares none or cannot be read."""
    try:
        content = read_json(Path(str(path).removeprefix("file://")) / CONFIG_JSON)
        return str(content.get("dtype") or content.get("torch_dtype") or "") or None
    except (OSError, ValueError, AttributeError):
        return None


# ---------------------------------------------------------------------------------------------------------------
# The model that a file next to the weights declares


@dataclass(frozen=True)
class DeclaredModel:
    """The model fields declared by a file that is stored with weights."""

    where: str
    """The file that declares the fields, for messages."""
    fields: Mapping[str, Any]

    def check(self, model_config: Any, allowed: Iterable[str]) -> None:
        """Raise a UserError that lists every field whose value in `model_config` is different.

        Free fields (see `free_fields`) and fields that `model_config` does not have are ignored.  allowed: the keys in
        `checkpoint.allow_changes`.
        """
        free = free_fields(type(model_config), allowed)
        compared = {field.name for field in dataclasses.fields(model_config)} - free
        mismatches = {
            f"model.{name}": (getattr(model_config, name), value)
            for name, value in self.fields.items()
            if name in compared and _as_lists(getattr(model_config, name)) != _as_lists(value)
        }
        if mismatches:
            lines = [
                str(setting_error(key, current, f"{self.where} says {yaml_scalar(value)}", value))
                for key, (current, value) in mismatches.items()
            ]
            allow = f"  to allow the difference: checkpoint.allow_changes=[{','.join(mismatches)}]"
            raise UserError("\n".join([*lines, allow]))


def free_fields(model: type, allowed: Iterable[str]) -> set[str]:
    """Return the model fields that may differ from those that come with the weights.

    These are the fields declared `free`, which only affect training, and the fields whose keys are in `allowed`.
    """
    allowed = set(allowed)
    return {
        f.name for f in dataclasses.fields(model) if f.metadata.get("training_only") or f"model.{f.name}" in allowed
    }


def read_declared_model(folder: str | Path, spec: ModelSpec, setting: str) -> DeclaredModel | None:
    """Return the model that a folder declares, as fields of `recipe`; None if it has no config.json.

    Raises a UserError that starts with `setting` if config.json is invalid or describes a model that the recipe cannot
    build, and one that names `model.name` if config.json belongs to another recipe.
    """
    path = Path(str(folder).removeprefix("file://"))
    if not (path / CONFIG_JSON).exists():
        return None
    content = read_config(path, setting)
    hf = find_huggingface(spec)
    if callable(hf.model_type):
        rule = f"model.name={spec.name} takes its weights from model.path"
        raise setting_error(setting, folder, rule, fix=f"model.path={path}, without {setting}")
    if content["model_type"] != hf.model_type:
        matching = [other.name for other in all_models() if other.hf and other.hf.model_type == content["model_type"]]
        rule = f"{path / CONFIG_JSON}: model_type={content['model_type']}, which does not match"
        raise setting_error("model.name", spec.name, rule, matching[0] if matching else None)
    return DeclaredModel(str(path / CONFIG_JSON), _fields_of(content, spec, path, setting))


def model_config_of(folder: str | Path, recipes: Sequence[ModelSpec], setting: str = "path") -> tuple[ModelSpec, Any]:
    """Return the recipe in `recipes` that builds the model in `folder`, and the model's configuration.

    Raises a UserError that starts with `setting` if config.json is missing or invalid, or if no recipe or more than one
    is for this type of model.
    """
    path = Path(folder).expanduser()
    content = read_config(path, setting)
    model_type = content["model_type"]
    matching = [spec for spec in recipes if spec.hf and spec.hf.model_type == model_type]
    if len(matching) != 1:
        types = {spec.hf.model_type for spec in recipes if spec.hf}
        known = sorted(name for name in types if isinstance(name, str))
        rule = (
            f"is for the recipes {', '.join(recipe.name for recipe in matching)}; name one with model.name"
            if matching
            else f"has no recipe; there are recipes for {', '.join(known) or 'nothing'}"
        )
        raise setting_error(setting, folder, f"{CONFIG_JSON}: model_type={model_type} {rule}")
    (spec,) = matching
    return spec, spec.config(**_fields_of(content, spec, path, setting))


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

MAX_INDEX_BYTES = 256 << 20
"""Maximum size in bytes of an index file, which has one entry per tensor."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_GGUF = ".gguf"


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder has safetensors files or an index of them."""
    path = Path(folder).expanduser()
    return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))


def has_config_only(folder: str | Path) -> bool:
    """Return whether a folder has neither weights, in any format, nor a partial download of weights."""
    path = Path(folder).expanduser()
    if hub.lacks_weights(path) or gguf_model.lacks_weights(path):
        return False  # the weights exist, but have not been fetched or converted yet
    has_others = any(file.suffix.lower() in (*_PICKLES, _GGUF) for file in path.iterdir())
    return not (has_weights(path) or has_others or any(path.glob(".cache/huggingface/download/**/*.incomplete")))


def check_weights(folder: str | Path, setting: str) -> None:
    """Raise a UserError that starts with `setting` if no weights can be read from a Hugging Face folder.

    Reads only file names, the index and the headers of files, so it is fast and needs no torch.  Weights that have not
    been downloaded or converted yet count as readable.
    """
    path = Path(str(folder).removeprefix("file://")).expanduser()
    if hub.lacks_weights(path) or gguf_model.lacks_weights(path):
        return
    if (path / WEIGHTS).is_file():
        check_headers(path, setting)
        return
    fresh = "; for random weights: model.fresh=true" if setting == "model.path" else ""
    if not (path / INDEX).is_file():
        check_single_gguf(path, setting)
        fix = f"download the weights{fresh}"
        if any(file.name.endswith(_PICKLES) for file in path.iterdir()):
            script = "import sys; from transformers import AutoModelForCausalLM as M; "
            script += "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
            fix = f"python -c {shlex.quote(script)} {shlex.quote(str(path))}, if you trust the files{fresh}"
        raise setting_error(setting, folder, missing_weights_rule(path), fix=fix)
    with contextlib.suppress(
        ValueError, LookupError, TypeError, AttributeError, OSError
    ):  # reported when the index is read
        names = sorted(set(read_json(path / INDEX, MAX_INDEX_BYTES)["weight_map"].values()))
        if absent := [name for name in names if not (path / name).is_file()]:
            rule = f"{INDEX} names {', '.join(absent)}, which is missing; download it again"
            raise setting_error(setting, folder, rule)
    check_headers(path, setting)


def missing_weights_rule(folder: Path) -> str:
    """Return the error text for a folder without safetensors: what is missing, and what the folder has instead."""
    files = sorted(file.name for file in folder.iterdir())
    pickles = [name for name in files if name.endswith(_PICKLES)]
    rule = f"has neither {WEIGHTS} nor {INDEX}"
    if pickles:
        return (
            f"{rule}, only {', '.join(pickles)}: pickle files are not read, because loading them can run code; "
            "convert them to safetensors first"
        )
    return f"{rule}; it has {', '.join(files[:8])}" + (", ..." if len(files) > 8 else "") if files else rule


def check_single_gguf(path: str | Path, setting: str) -> None:
    """Raise a UserError that starts with `setting` if a folder has several GGUF files but no safetensors.

    A single GGUF file is no error: it is converted to a Hugging Face folder before it is used (`trainer.gguf_model`).
    """
    folder = Path(str(path).removeprefix("file://")).expanduser()
    if not folder.is_dir() or has_weights(folder):
        return
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == _GGUF)
    if len(files) > 1:
        rule = f"has {len(files)} GGUF files: {', '.join(file.name for file in files)}"
        raise setting_error(setting, path, rule, fix=f"name one of them, such as {files[0]}")


_BYTES_PER_ELEMENT = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100_000_000
"""Maximum size in bytes of a safetensors header, by the definition of the format."""


def check_headers(folder: str | Path, setting: str) -> None:
    """Raise a UserError that starts with `setting` for a safetensors file whose header does not match its size.

    Needs no torch, so that an incomplete download is reported within a second.
    """
    for path in sorted(Path(str(folder).removeprefix("file://")).expanduser().glob("*.safetensors")):
        if path.name.startswith("adapter"):  # a PEFT adapter, which is not loaded
            continue
        try:
            _check_header(path)
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            rule = f"{path.name}: is not a complete safetensors file ({error}); download it again"
            raise setting_error(setting, folder, rule) from error


def _check_header(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("it is empty, or its header is longer than the file")
        header = parse_json(file.read(length))
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        width = _BYTES_PER_ELEMENT.get(entry["dtype"])
        if start != end or stop < start or (width and math.prod(entry["shape"]) * width != stop - start):
            raise ValueError(f"the offsets of {name} do not fit its shape or the tensor before it")
        end = stop
        if math.prod(entry["shape"]) and name.endswith(".weight") and entry["dtype"] in ("I64", "I32", "I16", "BOOL"):
            raise ValueError(f"{name} is stored as {entry['dtype']}, not as floating-point numbers")
    if end != size - 8 - length:
        raise ValueError(f"its header describes {end} bytes, but it has {size - 8 - length}")


def find_native(folder: str | Path, setting: str = "path") -> tuple[ModelSpec, Any] | None:
    """Return the native recipe that builds the model in `folder`, and the model's configuration.

    Returns None if there is no such recipe, or if it does not support some entry of config.json.  Raises a UserError
    that starts with `setting` if config.json is missing or invalid.
    """
    content = read_config(Path(folder).expanduser(), setting)
    for spec in all_models():
        if spec.hf and spec.hf.model_type == content["model_type"]:
            try:
                return spec, spec.config(**fields_of(content, spec))
            except UserError:
                continue
    return None


def why_not_native(content: Mapping[str, Any]) -> str:
    """Return why the native recipe for this type of model does not build it; "" if there is none, or if it does.

    content: the contents of config.json.
    """
    for spec in all_models():
        if spec.hf and spec.hf.model_type == content["model_type"]:
            try:
                fields_of(content, spec)
            except UserError as error:
                return str(error).partition("\n")[0]
    return ""


def generic_model_of(folder: str | Path) -> tuple[ModelSpec, Any]:
    """Return the generic recipe `hf`, and its configuration for the model in `folder`.

    Raises UserError if config.json is missing or invalid, or if transformers is not installed.
    """
    spec = find_model("hf")
    config = spec.config(path=str(folder))
    config = spec.resolve(config) if spec.resolve else config
    if spec.check:
        spec.check(config)
    return spec, config


def _advice_on_missing(folder: Path) -> str:
    """Return advice for a folder that is not a model folder."""
    if (folder / "adapter_config.json").exists():
        return "it contains an adapter: give the run folder, or the output of trainer.export --merged"
    if folder.exists():
        return "give a model folder"
    if folder.suffix.lower() == ".gguf":
        return "there is no such file: give its path, or OWNER/NAME/FILE.gguf on the Hugging Face Hub"
    return f"give the folder of a model, or its name on the Hugging Face Hub: OWNER/{folder.name}"


def read_config(folder: Path, setting: str) -> dict[str, Any]:
    """Return the contents of the folder's config.json.

    Raises a UserError that starts with `setting` if it does not describe a model, if the model's sizes are implausible,
    or if a small file in the folder is a link to a file of another name outside the folder.
    """
    if not (folder / CONFIG_JSON).is_file():
        check_single_gguf(folder, setting)
    check_links(folder, setting)
    try:
        content = read_json(folder / CONFIG_JSON)
        if not isinstance(content, dict):
            raise ValueError(f"it must be a JSON object, not {type(content).__name__}")
        if not isinstance(content["model_type"], str | None):
            raise ValueError(f"model_type={content['model_type']!r} must be text")
        _check_sizes(content)
        if isinstance(content.get("text_config"), Mapping):
            _check_sizes(content["text_config"])
    except UserError as error:
        raise setting_error(setting, folder, f"{CONFIG_JSON}: {error}") from error
    except KeyError as error:
        raise setting_error(
            setting, folder, f"{CONFIG_JSON}: does not describe a model: it has no model_type"
        ) from error
    except OSError as error:
        rule = f"{CONFIG_JSON}: cannot be read ({error.strerror})"
        fix = "give the folder that contains it" if folder.is_file() else _advice_on_missing(folder)
        raise setting_error(setting, folder, rule, fix=fix) from error
    except ValueError as error:
        raise setting_error(setting, folder, f"{CONFIG_JSON}: does not describe a model: {error}") from error
    return dict(content)


_SMALL_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model", "additional_chat_templates/*")


def check_links(folder: Path, setting: str, patterns: Sequence[str] = _SMALL_FILES) -> None:
    """Raise UserError if a small file in a model folder is a link that points outside the folder.

    These files are copied into checkpoints and exports, so a link to a private file would publish its contents.  A link
    to a file of the same name is permitted, since `ln -s`, `cp -s` and git-annex create such model folders.
    """
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            outside = symlink_target_outside(folder, str(path.relative_to(folder)))
            if outside is not None and outside.name != path.name:
                rule = f"{path.relative_to(folder)} is a link to {outside}, outside the folder, and is not read"
                raise setting_error(setting, folder, rule, fix="put the file itself there, or remove the link")


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_FFN_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_OTHERS = ("vocab_size", "num_key_value_heads", "head_dim")
_MAX_LAYERS, _MAX_EXPERTS = 1_000, 100_000
_MAX_PARAMETERS = 1e13
"""Several times the size of the largest existing models."""


def _check_sizes(content: Mapping[str, Any]) -> None:
    """Raise a UserError that names the entry if a size in config.json is not a positive whole number or is implausible.

    The total number of parameters is estimated too, so that a model too large for any machine is refused before
    anything is allocated.

    content: the contents of config.json, or its entry `text_config`.
    """
    names = (*_LAYERS, *_WIDTHS, *_FFN_WIDTHS, *_EXPERTS, *_HEADS, *_POSITIONS, *_OTHERS)
    sizes = {name: content[name] for name in names if content.get(name) is not None}
    for name, value in sizes.items():
        is_per_layer = isinstance(value, list) and name in (*_FFN_WIDTHS, *_EXPERTS, *_HEADS, "num_key_value_heads")
        per_layer = value if is_per_layer else [value]  # some models have one value per layer
        minimum = 0 if name in _EXPERTS or name in _FFN_WIDTHS else 1
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= minimum for each in per_layer):
            raise UserError(f"{name}={_shorten(value)}: must be a whole number of at least {minimum}")

    def largest(group: Iterable[str], default: int) -> int:
        values = [sizes[name] for name in group if name in sizes]
        return max([max(each, default=0) if isinstance(each, list) else each for each in values], default=default)

    layers, experts, width = largest(_LAYERS, 1), largest(_EXPERTS, 1), largest(_WIDTHS, 1)
    for noun, number, limit in (("layers", layers, _MAX_LAYERS), ("experts", experts, _MAX_EXPERTS)):
        if number > limit:
            raise UserError(f"{number:,} {noun}: no model has more than {limit:,}")
    for name, value in content.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value}: must be finite")
    num_heads, num_kv_heads = largest(_HEADS, 1), largest(("num_key_value_heads",), 1)
    if "head_dim" not in sizes and width % num_heads and width > 1:
        raise UserError(f"num_attention_heads={num_heads}: must divide the width, {width}, as there is no head_dim")
    if num_heads % num_kv_heads and not any(isinstance(value, list) for value in sizes.values()):
        raise UserError(f"num_key_value_heads={num_kv_heads} does not divide the {num_heads} heads")
    heads = num_heads * largest(("head_dim",), 1)
    layer_parameters = 2 * width * max(width, heads) + 2 * width * largest(_FFN_WIDTHS, width) * max(1, experts)
    parameters = layers * layer_parameters + largest(("vocab_size",), 1) * width
    if max(parameters, *(largest((name,), 1) for name in _POSITIONS)) > _MAX_PARAMETERS:
        listed_sizes = ", ".join(f"{name}={_shorten(value)}" for name, value in sizes.items() if name not in _POSITIONS)
        listed_sizes = listed_sizes or ", ".join(f"{name}={_shorten(value)}" for name, value in sizes.items())
        needed = f"about {parameters:.2g} parameters, {parameters * 4 / 2**40:,.0f} TiB in float32"
        raise UserError(
            f"{listed_sizes}: that is a model of {needed}, more than any machine can hold; correct config.json"
        )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _fields_of(content: Mapping[str, Any], spec: ModelSpec, folder: Path, setting: str) -> dict[str, Any]:
    try:
        return fields_of(content, spec)
    except UserError as error:
        raise setting_error(setting, folder, f"{CONFIG_JSON}: {error}") from error


def fields_of(content: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Convert the contents of config.json to fields of the recipe's configuration, and check them like user settings.

    Raises a UserError that names the entry if the recipe cannot build the model.
    """
    hf = find_huggingface(spec)
    check_readable({key: value for key, value in content.items() if key not in hf.dropped})
    if not callable(hf.model_type):  # the generic recipe passes all entries on
        _check_entries(content, spec, hf)
    try:
        fields = dict(hf.model_fields(content))
    except KeyError as error:
        raise UserError(f"has no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"cannot be read as model {spec.name!r} ({error})") from error
    hints = typing.get_type_hints(spec.config)
    declared = {field.name: field for field in dataclasses.fields(spec.config)}
    for name, value in fields.items():
        fields[name] = value = _convert(f"model.{name}", value, hints[name])
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            check_number(f"model.{name}", value, value, declared[name].metadata)
    if spec.check:
        spec.check(spec.config(**fields))
    return fields


_OTHER_MODEL = "\n  to fix: set model.name=auto, so that transformers builds the model; or correct the entry"


def _check_entries(content: Mapping[str, Any], spec: ModelSpec, hf: HuggingFace) -> None:
    """Raise UserError, naming the entry, unless the recipe understands all of config.json's entries and their types."""
    entries = dict.fromkeys(hf.config(spec.config()), Any) if hf.entries is None else hf.entries
    types = {**METADATA, **entries}
    fixed = {**_SWITCHED_OFF, **hf.fixed}
    for key, value in content.items():
        if key in hf.dropped:
            continue
        if key in fixed and key not in entries:
            if value != fixed[key] or isinstance(value, bool) != isinstance(fixed[key], bool):
                rule = f"model {spec.name!r} only supports {fixed[key]!r}"
                raise UserError(f"{key}={_shorten(value)}: {rule}{_OTHER_MODEL}")
        elif key in types:
            if not _has_type(value, types[key]):
                raise UserError(f"{key}={_shorten(value)}: must be {_type_text(types[key])}, as in transformers")
        elif value is not None:
            rule = f"model {spec.name!r} does not know this entry, which may change what the model computes"
            raise UserError(f"{key}={_shorten(value)}: {rule}{_OTHER_MODEL}")


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a type as transformers checks it: `true` is not a number, and 1 is not a float."""
    if hint is Any:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:  # in JSON, keys are text, also those that transformers reads as numbers
        has_keys = isinstance(value, dict) and (arguments[0] is str or all(key.isdecimal() for key in value))
        return has_keys and all(_has_type(item, arguments[1]) for item in value.values())
    if origin is not None:
        return any(_has_type(value, member) for member in arguments)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


_TYPE_TEXTS: dict[Any, str] = {
    **{int: "a whole number", float: "a number with a decimal point", bool: "true or false", str: "text"},
    **{type(None): "null", list: "a list", dict: "an object"},
}


def _type_text(hint: Any) -> str:
    """Return the description of a type for messages."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(arguments)
    if origin is list:
        return f"a list, each item {_type_text(arguments[0])}"
    if origin is dict:
        return f"an object, each value {_type_text(arguments[1])}"
    if origin is not None:
        return " or ".join(_type_text(member) for member in arguments)
    return _TYPE_TEXTS[hint]


def check_readable(content: Mapping[str, Any]) -> None:
    """Raise a UserError that names the entry if config.json asks for an unsupported format or for custom code."""
    for key, rule in _REJECTED_ENTRIES.items():
        if (value := content.get(key)) is not None:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            raise UserError(f"{key}{f': quant_method={method}' if method else ''}: {rule}")


def _convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a value of config.json to the field's type.  Raises UserError if its type does not match."""
    options = union_members(hint)
    if not set(options) <= {int, float, bool, str, type(None)}:
        return value  # not a scalar type: the recipe checks it
    if isinstance(value, int) and not isinstance(value, bool) and float in options and int not in options:
        return float(value)
    if type(value) not in options:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
        raise UserError(f"{key}={value!r}: must be {' or '.join(names[option] for option in options)}")
    return value


def _as_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
