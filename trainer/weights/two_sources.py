"""Says what is used where a model folder has two sources for it, such as two files of weights or two end tokens.

What is used is what transformers uses.  A folder without contradictions gives no remarks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.model_folder import CONFIG_JSON, INDEX, MAX_INDEX_BYTES
from trainer.errors import first_few
from trainer.files import read_json

_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index*.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
    *("consolidated*.pth", "adapter_model.bin", "*.gguf"),
)
"""Patterns of the names of files with weights, and of their indexes."""


def unread_weights(path: str | os.PathLike[str], read_files: Sequence[str]) -> list[str]:
    """Return a remark if a folder has weights, or an index of weights, besides the files that are read.

    read_files: the names of those files, not of their index.
    """
    folder = Path(path).expanduser()
    index = _read(folder / INDEX).get("weight_map")
    is_index_read = isinstance(index, Mapping) and {*index.values()} == {*read_files}
    known = {*read_files, *([INDEX] if is_index_read else [])}
    names = sorted({file.name for pattern in _WEIGHTS for file in folder.glob(pattern)} - known)
    if not names:
        return []
    used = read_files[0] if len(read_files) == 1 else INDEX
    return [f"read from {used}, not from {first_few(names)}"]


def contradictions(path: str | os.PathLike[str]) -> list[str]:
    """Return a remark on each contradiction within config.json, and between it and the small files next to it."""
    folder = Path(path).expanduser()
    config = _read(folder / CONFIG_JSON)
    return [
        *_dtypes(config),
        *_ropes(config),
        *_token_ids(config, _read(folder / "generation_config.json")),
        *_templates(folder),
        *_vocabularies(folder),
    ]


def _dtypes(config: Mapping[str, Any]) -> list[str]:
    first, second = config.get("dtype"), config.get("torch_dtype")
    if first is None or second is None or first == second:
        return []
    return [f"dtype={first} in {CONFIG_JSON} is used, not torch_dtype={second}"]


def _ropes(config: Mapping[str, Any]) -> list[str]:
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    remarks = []
    if isinstance(scaling, Mapping) and isinstance(parameters, Mapping) and scaling and parameters:
        described = [
            {"rope_type": each.get("rope_type", each.get("type"))}
            | {key: each[key] for key in each if key not in ("rope_theta", "type")}
            for each in (scaling, parameters)
        ]
        if described[0] != described[1]:
            remarks.append(f"rope_scaling in {CONFIG_JSON} is used, not rope_parameters")
    name, used = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    outer, inner = config.get("rope_theta"), used.get("rope_theta") if isinstance(used, Mapping) else None
    if None not in (outer, inner) and outer != inner:
        remarks.append(f"rope_theta={inner} of {name} in {CONFIG_JSON} is used, not {outer}")
    return remarks


def _token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[str]:
    remarks = []
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        of_config, of_generation = (
            {str(number) for number in (value if isinstance(value, list) else [value])} - {"None"}
            for value in (config.get(name), generation.get(name))
        )
        if not (of_config <= of_generation or of_generation <= of_config):  # further end tokens are no contradiction
            used, other = ", ".join(sorted(of_generation)), ", ".join(sorted(of_config))
            remarks.append(f"{name}={used} of generation_config.json is used, not {other} of {CONFIG_JSON}")
    return remarks


def _templates(folder: Path) -> list[str]:
    file = folder / "chat_template.jinja"
    inline = _read(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(inline, str) or not file.is_file():
        return []
    with suppress(OSError, ValueError):
        if file.read_text(encoding="utf-8").strip() != inline.strip():
            return [f"{file.name} is used, not the chat template in tokenizer_config.json"]
    return []


def _vocabularies(folder: Path) -> list[str]:
    other = _read(folder / "vocab.json")
    model = _read(folder / "tokenizer.json").get("model") if other else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocabulary, Mapping):
        return []
    if all(vocabulary.get(token, number) == number for token, number in other.items()):
        return []  # added tokens stand in only one of them
    return ["tokenizer.json is used, not vocab.json, which has other ids"]


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object in a file; empty if there is none or it cannot be read, which others report."""
    with suppress(OSError, ValueError):
        content = read_json(path, MAX_INDEX_BYTES)
        return content if isinstance(content, dict) else {}
    return {}
