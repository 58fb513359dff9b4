"""Reads what a Hugging Face model folder declares: its config.json, as fields of a model, and its weight files.

The fields are compared with the run's configuration before the model is built, because weights of the same shapes may
belong to another model, for example one with a different `rope_theta` or number of heads.  `ModelSpec.hf` says how
entries of config.json correspond to fields, and which values are supported.

A folder is untrusted: sizes are bounded, links must not lead out of it, and neither pickles nor code are read.  This
module reads no tensors and does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from trainer import gguf_model, hub
from trainer.config.declare import check_number, union_members
from trainer.config.messages import type_name
from trainer.errors import UserError, setting_error, yaml_scalar
from trainer.files import read_json, symlink_target_outside
from trainer.model_spec import HuggingFace, ModelSpec
from trainer.registry import all_models, find_model

CONFIG_JSON = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_INDEX_BYTES = 256 << 20
"""Maximum size in bytes of an index file, which has one entry per tensor."""


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a model folder, which a setting may name with `file://` or `~`."""
    return Path(os.fspath(folder).removeprefix("file://")).expanduser()


# ---------------------------------------------------------------------------------------------------------------
# config.json

_SMALL_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model", "additional_chat_templates/*")


def read_config(folder: Path, setting: str) -> dict[str, Any]:
    """Return the contents of the folder's config.json.

    Raises a UserError that starts with `setting` if it does not describe a model, if the model's sizes are implausible,
    or if a small file in the folder is a link to a file of another name outside the folder.
    """
    check_links(folder, setting)
    try:
        content = read_json(folder / CONFIG_JSON)
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise ValueError("it has no model_type")
        _check_sizes(content)
        if isinstance(content.get("text_config"), Mapping):
            _check_sizes(content["text_config"])
    except UserError as error:
        raise setting_error(setting, folder, f"{CONFIG_JSON}: {error}") from error
    except OSError as error:
        rule = f"{CONFIG_JSON}: cannot be read ({error.strerror})"
        fix = "give the folder of a model, or its name on the Hugging Face Hub: OWNER/NAME"
        raise setting_error(setting, folder, rule, fix=fix) from error
    except ValueError as error:
        raise setting_error(setting, folder, f"{CONFIG_JSON}: does not describe a model: {error}") from error
    return dict(content)


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


def stored_dtype(path: str | Path) -> str | None:
    """Return the dtype that config.json in the folder `path` declares; None if it declares none or cannot be read."""
    try:
        content = read_json(local_folder(path) / CONFIG_JSON)
        return str(content.get("dtype") or content.get("torch_dtype") or "") or None
    except (OSError, ValueError, AttributeError):
        return None


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_FFN_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads",)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_MINIMUM_SIZES = {
    **dict.fromkeys((*_LAYERS, *_WIDTHS, *_HEADS, *_KV_HEADS, *_POSITIONS, "vocab_size", "head_dim"), 1),
    **dict.fromkeys((*_FFN_WIDTHS, *_EXPERTS), 0),
}
"""The entries that are sizes, and the minimum of each."""
_PER_LAYER = (*_FFN_WIDTHS, *_EXPERTS, *_HEADS, *_KV_HEADS)
"""Sizes that may be a list with one number per layer."""
_MAX_LAYERS = 1_000
_MAX_EXPERTS = 100_000
"""Maximum number of experts in all layers together."""
_MAX_PARAMETERS = 10**13
"""Several times the size of the largest existing models."""


def _check_sizes(content: Mapping[str, Any]) -> None:
    """Raise UserError, naming the entry, for a size that is not a positive whole number, or that no model has.

    A stranger's config.json could otherwise keep a machine busy or fill its memory before the first message.

    content: the contents of config.json, or its entry `text_config`.
    """
    sizes: dict[str, int] = {}
    for name, minimum in _MINIMUM_SIZES.items():
        value = content.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) and name in _PER_LAYER else [value]
        if not all(type(each) is int and each >= minimum for each in values):
            raise UserError(f"{name}={_shorten(value)}: must be a whole number of at least {minimum}")
        sizes[name] = max(values, default=0)
    for name, value in content.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value}: must be finite")

    def largest(*names: str) -> int:
        return max((sizes[name] for name in names if name in sizes), default=1)

    layers = largest(*_LAYERS)
    experts = largest(*_EXPERTS)
    width = largest(*_WIDTHS)
    if layers > _MAX_LAYERS:
        raise UserError(f"{layers:,} layers: no model has more than {_MAX_LAYERS:,}")
    if layers * experts > _MAX_EXPERTS:
        raise UserError(f"{layers:,} layers of {experts:,} experts: no model has more than {_MAX_EXPERTS:,} in all")
    num_heads = largest(*_HEADS)
    num_kv_heads = largest(*_KV_HEADS)
    if "head_dim" not in sizes and width % num_heads and width > 1:
        raise UserError(f"num_attention_heads={num_heads}: must divide the width, {width}, as there is no head_dim")
    if num_heads % num_kv_heads and not any(isinstance(content.get(name), list) for name in sizes):
        raise UserError(f"num_key_value_heads={num_kv_heads} does not divide the {num_heads} heads")
    ffn_width = max(1, experts) * largest(*_FFN_WIDTHS, *_WIDTHS)
    attention_width = max(width, num_heads * largest("head_dim"))
    parameters = layers * 2 * width * (attention_width + ffn_width) + width * largest("vocab_size")
    if max(parameters, largest("vocab_size"), largest(*_POSITIONS)) > _MAX_PARAMETERS:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        rule = f"a model of about {parameters:.2g} parameters, more than any machine can hold"
        raise UserError(f"{listed}: {rule}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# ---------------------------------------------------------------------------------------------------------------
# From entries of config.json to fields of a model

_REJECTED_ENTRIES = {
    "quantization_config": "quantized weights are not supported; dequantize them first",
    "compression_config": "compressed weights are not supported; decompress them first",
    "auto_map": "needs custom model code, which is never run",
}
"""Entries for which a folder is rejected, each with the reason, unless the model spec accepts the entry: in
`HuggingFace.dropped`; the generic model `hf` accepts `auto_map`."""

_NULLABLE_METADATA: Mapping[Any, Sequence[str]] = {
    str: (
        *("transformers_version", "tokenizer_class", "exported_by", "_name_or_path", "name_or_path", "_commit_hash"),
        *("unsloth_version", "finetuning_task", "summary_activation", "prefix"),
    ),
    bool: (
        *("unsloth_fixed", "is_llama_config", "_attn_implementation_autoset", "use_flash_attn"),
        *("do_sample", "early_stopping", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
    ),
    int: (
        *("bos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id", "unk_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "pretraining_tp", "num_beams", "num_beam_groups", "top_k"),
        *("max_length", "min_length", "max_new_tokens", "max_sequence_length", "num_return_sequences"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    ),
    int | float: (
        *("classifier_dropout", "temperature", "top_p", "typical_p"),
        *("repetition_penalty", "length_penalty", "diversity_penalty"),
    ),
    int | list[int]: ("eos_token_id", "forced_eos_token_id"),
    list[str]: ("architectures",),
    list: ("bad_words_ids", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    dict: ("transformers.js_config", "task_specific_params"),
    dict[int, str]: ("id2label",),
    dict[str, int]: ("label2id",),
    Literal["float64", "float32", "float16", "bfloat16"]: ("dtype", "torch_dtype"),
    Literal["regression", "multi_label_classification"]: ("problem_type",),
    Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]: (
        "attn_implementation",
        "_attn_implementation",
    ),
    Literal["eager", "batched_mm", "grouped_mm"]: ("experts_implementation", "_experts_implementation"),
}
METADATA: Mapping[str, Any] = {
    **{name: hint | None for hint, names in _NULLABLE_METADATA.items() for name in names},
    "model_type": str,
    "use_cache": bool,
    "num_labels": int,
    "summary_type": str,
    "summary_use_proj": bool,
    "summary_proj_to_labels": bool,
    "summary_first_dropout": int | float,
}
"""Entries of config.json that have no effect on what any model computes, and the type that each must have.

transformers refuses a folder in which some of them have another type; so would the export of a run that starts there.
"""

_SWITCHED_OFF: Mapping[str, Any] = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embedding_dropout", "dropout"), 0.0),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "torchscript", "use_bfloat16"), False),
    **dict.fromkeys(("tf_legacy_loss", "rope_interleaved"), False),
    "return_dict": True,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Entries of config.json that have no effect on what any model computes, as long as they have this value."""


def find_huggingface(spec: ModelSpec) -> HuggingFace:
    """Return the model spec's mapping to Hugging Face.  Raises UserError if it has none."""
    if spec.hf is None:
        raise UserError(
            f"model {spec.name!r} has no mapping to Hugging Face: give it "
            "hf=HuggingFace(model_type=..., architecture=..., names=..., config=..., model_fields=...), as "
            "trainer.model_spec.HuggingFace describes; recipes/llama/huggingface.py is an example"
        )
    return spec.hf


def fields_of(content: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Convert the contents of config.json to fields of the model's configuration, and check them like user settings.

    Raises a UserError that names the entry if the model spec cannot build the model.
    """
    hf = find_huggingface(spec)
    check_readable({key: value for key, value in content.items() if key not in hf.dropped})
    if not callable(hf.model_type):  # the generic model passes all entries on
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


def check_readable(content: Mapping[str, Any]) -> None:
    """Raise a UserError that names the entry if config.json asks for an unsupported format or for custom code."""
    for key, rule in _REJECTED_ENTRIES.items():
        if (value := content.get(key)) is not None:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            raise UserError(f"{key}{f': quant_method={method}' if method else ''}: {rule}")


_OTHER_MODEL = "\n  to fix: set model.name=auto, so that transformers builds the model; or correct the entry"


def _check_entries(content: Mapping[str, Any], spec: ModelSpec, hf: HuggingFace) -> None:
    """Raise UserError, naming the entry, unless the model spec understands all entries and their types."""
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
                noun = type_name(types[key]).replace("a number", "a number with a decimal point")
                raise UserError(f"{key}={_shorten(value)}: must be {noun}, as in transformers")
        elif value is not None:
            rule = f"model {spec.name!r} does not know this entry, which may change what the model computes"
            raise UserError(f"{key}={_shorten(value)}: {rule}{_OTHER_MODEL}")


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a type as transformers checks it: `true` is not a number, and 1 is not a float."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
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


def _convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a value of config.json to the field's type.  Raises UserError if its type does not match."""
    options = union_members(hint)
    if not set(options) <= {int, float, bool, str, type(None)}:
        return value  # not a scalar type: the model spec checks it
    if type(value) is int and float in options and int not in options:
        return float(value)
    if type(value) not in options:
        raise UserError(f"{key}={value!r}: must be {type_name(hint)}")
    return value


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

        Fields that may differ (see `free_fields`) and fields that `model_config` does not have are ignored.  allowed:
        the keys in `checkpoint.allow_changes`.
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

    These are the fields declared with `training_only`, and the fields whose keys are in `allowed`.
    """
    allowed = set(allowed)
    return {
        f.name for f in dataclasses.fields(model) if f.metadata.get("training_only") or f"model.{f.name}" in allowed
    }


def _as_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_declared_model(folder: str | Path, spec: ModelSpec, setting: str) -> DeclaredModel | None:
    """Return the model that a folder declares, as fields of `spec`; None if it has no config.json.

    Raises a UserError that starts with `setting` if config.json is invalid or describes a model that `spec` cannot
    build, and one that names `model.name` if config.json belongs to another model.
    """
    path = local_folder(folder)
    config_json = path / CONFIG_JSON
    if not config_json.exists():
        return None
    content = read_config(path, setting)
    hf = find_huggingface(spec)
    model_type = content["model_type"]
    if callable(hf.model_type):
        rule = f"model.name={spec.name} takes its weights from model.path"
        raise setting_error(setting, folder, rule, fix=f"model.path={path}, without {setting}")
    if model_type != hf.model_type:
        others = [other.name for other in _specs_for(model_type)]
        rule = f"{config_json}: model_type={model_type}, which does not match"
        raise setting_error("model.name", spec.name, rule, others[0] if others else None)
    try:
        return DeclaredModel(str(config_json), fields_of(content, spec))
    except UserError as error:
        raise setting_error(setting, folder, f"{CONFIG_JSON}: {error}") from error


def find_native(
    folder: str | Path, setting: str = "path", settings: Iterable[str] = ()
) -> tuple[ModelSpec, Any] | None:
    """Return the native model spec that builds the model in `folder`, and the model's configuration.

    settings: names of further fields, as of `model.dropout`, that the model must have.

    Returns None if there is no such spec, or if it does not support some entry of config.json.  Raises a UserError
    that starts with `setting` if config.json is missing or invalid.
    """
    content = read_config(local_folder(folder), setting)
    for spec in _specs_for(content["model_type"]):
        if not {field.name for field in dataclasses.fields(spec.config)}.issuperset(settings):
            continue
        try:
            return spec, spec.config(**fields_of(content, spec))
        except UserError:
            continue
    return None


def why_not_native(content: Mapping[str, Any]) -> str:
    """Return why the native model spec of this type does not build the model; "" if there is none, or if it does.

    content: the contents of config.json.
    """
    for spec in _specs_for(content["model_type"]):
        try:
            fields_of(content, spec)
        except UserError as error:
            return str(error).partition("\n")[0]
    return ""


def _specs_for(model_type: str) -> list[ModelSpec]:
    return [spec for spec in all_models() if spec.hf and spec.hf.model_type == model_type]


def generic_model_of(folder: str | Path) -> tuple[ModelSpec, Any]:
    """Return the generic model spec `hf`, and its configuration for the model in `folder`.

    Raises UserError if config.json is missing or invalid, or if transformers is not installed.
    """
    spec = find_model("hf")
    config = spec.config(path=str(folder))
    config = spec.resolve(config) if spec.resolve else config
    if spec.check:
        spec.check(config)
    return spec, config


# ---------------------------------------------------------------------------------------------------------------
# Weight files

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INTEGERS = ("I64", "I32", "I16", "BOOL")


def has_config_only(folder: str | Path) -> bool:
    """Return whether a folder has neither weights, in any format, nor a partial download of weights."""
    path = local_folder(folder)
    if hub.lacks_weights(path) or gguf_model.lacks_weights(path):
        return False  # the weights exist, but have not been fetched or converted yet
    suffixes = (".safetensors", ".safetensors.index.json", ".gguf", *_PICKLES)
    has_weights = any(file.name.lower().endswith(suffixes) for file in path.iterdir())
    return not has_weights and not any(path.glob(".cache/huggingface/download/**/*.incomplete"))


def check_weights(folder: str | Path, setting: str) -> None:
    """Raise a UserError that starts with `setting` if no weights can be read from a Hugging Face folder.

    Reads only file names, the index and the headers of files, so it is fast and needs no torch.  Weights that have not
    been downloaded or converted yet count as readable.
    """
    path = local_folder(folder)
    if hub.lacks_weights(path) or gguf_model.lacks_weights(path):
        return
    for file in weight_files(folder, setting):
        try:
            with safe_open(file, framework="np") as header:
                dtypes = {name: header.get_slice(name).get_dtype() for name in header.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            rule = f"{file.name}: is not a complete safetensors file ({error})"
            raise setting_error(setting, folder, rule, fix="download it again") from error
        for name, dtype in dtypes.items():
            if name.endswith(".weight") and dtype in _INTEGERS:
                rule = f"{file.name}: {name} is stored as {dtype}, not as floating-point numbers"
                raise setting_error(setting, folder, rule)


def weight_files(folder: str | os.PathLike[str], setting: str) -> dict[Path, set[str]]:
    """Return the folder's safetensors files, each with the names of its tensors according to the index, if any.

    Raises a UserError that starts with `setting` if there are none, if the index is invalid or names files outside the
    folder, or if a file that it names is missing.
    """
    path = local_folder(folder)
    if not path.is_dir():
        rule = "is a file; give the folder that contains it" if path.exists() else "there is no such folder"
        raise setting_error(setting, folder, rule)
    if (path / WEIGHTS).is_file():
        return {path / WEIGHTS: set()}
    if not (path / INDEX).is_file():
        raise _missing_weights_error(path, folder, setting)
    files: dict[Path, set[str]] = {}
    try:
        for tensor, name in read_json(path / INDEX, MAX_INDEX_BYTES)["weight_map"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts or not name.endswith(".safetensors"):
                rule = f"{INDEX} names {name!r}: an index may only name .safetensors files inside its folder"
                raise setting_error(setting, folder, rule, fix="correct the index, or download the model again")
            files.setdefault(path / name, set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise setting_error(setting, folder, f"{INDEX}: is not an index of safetensors files ({error!r})") from error
    if absent := sorted(file.name for file in files if not file.is_file()):
        raise setting_error(setting, folder, f"{INDEX} names {', '.join(absent)}, which is missing; download it again")
    return dict(sorted(files.items()))


def _missing_weights_error(path: Path, shown: str | os.PathLike[str], setting: str) -> UserError:
    """Return the error for a folder without safetensors: what is missing, and what the folder has instead."""
    names = sorted(file.name for file in path.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    rule = f"has neither {WEIGHTS} nor {INDEX}"
    if pickles:
        rule += f", only {', '.join(pickles)}: pickle files are not read, because loading them can run code"
    elif names:
        rule += f"; it has {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")
    fix = "convert the weights to safetensors" if pickles else "download the weights"
    fresh = "; for random weights: model.fresh=true" if setting == "model.path" else ""
    return setting_error(setting, shown, rule, fix=f"{fix}{fresh}")
