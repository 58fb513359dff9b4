"""Broken and malicious model folders: each case is a function that damages a valid folder."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.chats import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_valid_folder(folder: Path) -> Path:
    """Write a two-layer Llama with a tokenizer and a chat template."""
    write_tokenizer(folder, TEMPLATE, eos_token="<|im_end|>")
    vocab, width, inner, heads = 160, 32, 48, 4
    entries = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": width},
        **{"intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
    }
    (folder / "config.json").write_text(json.dumps(entries))
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (width, inner)
    save_file({name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, folder / WEIGHTS)
    return folder


def config_with(**changes: Any) -> Callable[[Path], None]:
    """Return a function that sets entries of config.json."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))

    return change


def file_with(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a function that writes a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def config_with_text(more: str) -> Callable[[Path], None]:
    """Return a function that inserts text before the last brace of config.json."""
    return lambda folder: (
        (folder / "config.json").write_text((folder / "config.json").read_text()[:-1] + more + "}") and None
    )


def weights_with(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the tensors."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)

    return write


def header_with(change: Callable[[dict[str, Any]], Any], length: int | None = None) -> Callable[[Path], None]:
    """Return a function that changes the header of the safetensors file and, if given, the length that it declares."""

    def write(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + size])
        change(content)
        new = json.dumps(content).encode()
        (folder / WEIGHTS).write_bytes(
            struct.pack("<Q", len(new) if length is None else length) + new + data[8 + size :]
        )

    return write


def index_with(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Return a function that renames the weight file and adds an index of it, changed by `change`."""

    def write(folder: Path) -> None:
        weight_map = dict.fromkeys(load_file(folder / WEIGHTS), "model-00001-of-00001.safetensors")
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        change(weight_map)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return write


def index_pointing_outside(name: str) -> Callable[[Path], None]:
    """Return a function that moves the weights out of the folder and has the index refer to them there."""

    def write(folder: Path) -> None:
        where = folder.parent / "outside.safetensors"
        weight_map = dict.fromkeys(load_file(folder / WEIGHTS), name.format(where))
        (folder / WEIGHTS).rename(where)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return write


def symlinked(name: str) -> Callable[[Path], None]:
    """Return a function that replaces a small file with a link to a private file outside the folder."""

    def write(folder: Path) -> None:
        private = folder.parent / "private"
        private.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"#version: private")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(private)

    return write


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def weights_truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-999])


def index_is_list(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text("[]")


def adapter_without_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc", "r": -1}')


def weights_pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil()))


def replaced_by_folder(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return write


def tokenizer_with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return write


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _grow(content: dict[str, Any]) -> None:
    content["model"]["vocab"] |= {f"word{number}": 1000 + number for number in range(1000)}


EMBEDDING = "model.embed_tokens.weight"

CASES: dict[str, Callable[[Path], None]] = {
    "config: text for a number": config_with(max_position_embeddings="x"),
    "config: list for a number": config_with(hidden_size=[32]),
    "config: true for a number": config_with(num_attention_heads=True),
    "config: fraction": config_with(num_hidden_layers=1.5),
    "config: negative": config_with(num_hidden_layers=-2),
    "config: zero": config_with(vocab_size=0),
    "config: heads that do not divide": config_with(num_attention_heads=5),
    "config: key heads that do not divide": config_with(num_key_value_heads=3),
    "config: hidden_size 1e9": config_with(hidden_size=10**9),
    "config: vocab_size 1e12": config_with(vocab_size=10**12),
    "config: num_hidden_layers 1e7": config_with(num_hidden_layers=10**7),
    "config: 1000 layers of 1e5 experts": config_with(num_hidden_layers=1000, num_local_experts=10**5),
    "config: positions 1e15": config_with(max_position_embeddings=10**15),
    "config: NaN": config_with(rms_norm_eps=float("nan")),
    "config: Infinity": config_with(rope_theta=float("inf")),
    "config: 5000 digits": config_with_text(', "more": ' + "9" * 5000),
    "config: nested 100,000 deep": config_with_text(', "more": ' + "[" * 100_000 + "]" * 100_000),
    "config: a key twice": config_with_text(', "hidden_size": 64'),
    "config: a list": file_with("config.json", "[1]"),
    "config: a number": file_with("config.json", "7"),
    "config: null": file_with("config.json", "null"),
    "config: empty": file_with("config.json", ""),
    "config: not UTF-8": file_with("config.json", b'{"model_type": "\xff\xfe"}'),
    "config: a folder": replaced_by_folder("config.json"),
    "config: 100 MB": config_with_text(', "more": "' + "x" * 100_000_000 + '"'),
    "config: model_type is a list": config_with(model_type=["llama"]),
    "config: model_type unknown": config_with(model_type="nobody_knows"),
    "config: custom code": config_with(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
    "weights: pickle": weights_pickled,
    "weights: empty": file_with(WEIGHTS, b""),
    "weights: garbage": file_with(WEIGHTS, b"\x00garbage" * 100),
    "weights: truncated": weights_truncated,
    "weights: header too long": header_with(lambda content: None, length=2**62),
    "weights: header longer than declared": header_with(lambda content: None, length=50),
    "weights: offsets overlap": header_with(lambda content: content[EMBEDDING].update(data_offsets=[0, 64])),
    "weights: offsets beyond the end": header_with(lambda content: content[EMBEDDING].update(data_offsets=[0, 2**50])),
    "weights: a shape of 2**62": header_with(lambda content: content[EMBEDDING].update(shape=[2**31, 2**31])),
    "weights: unknown dtype": header_with(lambda content: content[EMBEDDING].update(dtype="F33")),
    "weights: integers": weights_with(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.int32)})),
    "weights: another shape": weights_with(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:, :16]})),
    "weights: one missing": weights_with(lambda tensors: tensors.pop(EMBEDDING)),
    "weights: one too many": weights_with(lambda tensors: tensors.update(more=torch.zeros(3))),
    "weights: NaN": weights_with(lambda tensors: [tensor.fill_(float("nan")) for tensor in tensors.values()]),
    "weights: one infinity": weights_with(
        lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3, 5].fill_(torch.inf)
    ),
    "index: a file outside": index_pointing_outside("../outside.safetensors"),
    "index: an absolute path": index_pointing_outside("{}"),
    "index: shard missing": index_with(lambda names: names.update({EMBEDDING: "model-00002-of-00002.safetensors"})),
    "index: a tensor that is not there": index_with(
        lambda names: names.update(more="model-00001-of-00001.safetensors")
    ),
    "index: a number for a name": index_with(lambda names: names.update({EMBEDDING: 7})),  # type: ignore[dict-item]
    "index: a list": index_is_list,
    "link: merges.txt": symlinked("merges.txt"),
    "link: tokenizer_config.json": symlinked("tokenizer_config.json"),
    "link: config.json": symlinked("config.json"),
    "adapter without a model": adapter_without_model,
    "tokenizer: invalid regex": tokenizer_with(lambda content: content.update(pre_tokenizer=_split("(((("))),
    "tokenizer: catastrophic regex": tokenizer_with(
        lambda content: content.update(pre_tokenizer=_split("(\\w+\\s?)+$!"))
    ),
    "tokenizer: nested": file_with("tokenizer.json", "[" * 100_000 + "]" * 100_000),
    "tokenizer: empty": file_with("tokenizer.json", ""),
    "tokenizer: larger than the model": tokenizer_with(_grow),
    "tokenizer_config: nested": file_with("tokenizer_config.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "tokenizer_config: a list": file_with("tokenizer_config.json", "[]"),
    "tokenizer_config: not UTF-8": file_with("tokenizer_config.json", b'{"eos_token": "\xff"}'),
}
"""Maps a description of the damage to the function that causes it."""
