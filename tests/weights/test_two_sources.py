"""Where a folder has two sources for a thing, the one that transformers takes is used and named, or it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.launch import on_ranks
from tests.helpers.native_models import (
    LLAMA,
    SOURCE,
    TINY,
    assert_same_bits,
    build,
    chat_folder,
    difference,
    edit,
    export_model,
    folder_of,
    load_with_transformers,
    tokenizer_json,
)
from trainer import Trainer, UserError, load_config, load_weights
from trainer.weights.two_sources import contradictions

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNCHANGED = [
    *("data.source=synthetic", "data.seq_len=16", "train.steps=1", "train.global_batch_size=4", "optim.lr=0"),
    *("train.micro_batch_size=2", "eval.every=0", "log.sample_tokens=0", "run.threads=1"),
]
"""A step that changes no weight."""


def weights_line(folder: Path, *settings: str) -> str:
    """Start a new run from a folder, and return what its start block says about the weights."""
    shutil.rmtree(folder.parent / "run", ignore_errors=True)
    given = settings or ("model.name=auto", f"model.path={folder}")
    trainer = Trainer(load_config("llama_small", [*given, *UNCHANGED, f"run.dir={folder.parent / 'run'}"]))
    assert trainer.fit() == 0
    trainer.close()
    return trainer.initial_weights_source


def chat_model(folder: Path) -> Path:
    """Write a folder with small files that do not contradict each other."""
    chat_folder(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def in_shards(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Llama in several files."""
    export_model(build(LLAMA, TINY, seed), LLAMA, TINY, folder, max_shard_bytes=40_000)
    return folder


def save_in(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


# ---------------------------------------------------------------------------------------------------------------
# Files of weights


@pytest.mark.parametrize("recipe", ["auto", "hf"])
def test_a_stray_file_beside_shards_is_named(recipe: str, tmp_path: Path) -> None:
    """transformers reads it, so the shards that the index names are not what is trained."""
    folder = in_shards(tmp_path / "model")
    assert weights_line(folder, f"model.name={recipe}", f"model.path={folder}") == str(folder)
    export_model(build(LLAMA, TINY, 1), LLAMA, TINY, tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS, folder / WEIGHTS)
    said = weights_line(folder, f"model.name={recipe}", f"model.path={folder}")
    assert f"read from {WEIGHTS}, not from" in said
    assert INDEX in said
    assert_same_bits(load_weights(folder), build(LLAMA, TINY, 1))
    assert difference(load_weights(folder), load_with_transformers(folder)) < 1e-5


def test_a_tensor_that_the_index_does_not_list_is_read(tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert f"with model.layers.1.mlp.up_proj.weight, which {INDEX} does not list" in weights_line(folder)
    assert_same_bits(load_weights(folder), build(LLAMA, TINY))
    assert difference(load_weights(folder), load_with_transformers(folder)) < 1e-5


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """transformers takes the last file's, whatever the index says."""
    folder = in_shards(tmp_path / "model")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name = "model.norm.weight"
    other = next(file for file in sorted({*weight_map.values()}) if file != weight_map[name])
    save_in(folder, lambda tensors: tensors.update({name: torch.ones(32)}), other)
    with pytest.raises(UserError, match=f"{other}.*{weight_map[name]}|{weight_map[name]}.*{other}") as refused:
        load_weights(folder)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        *("consolidated.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "model.gguf"),
        *("model-00009-of-00009.safetensors", "consolidated.safetensors.index.json", INDEX),
    ],
)
def test_weights_that_are_not_read_are_named(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    if name.endswith(".safetensors"):
        save_file({"x": torch.zeros(1)}, folder / name)
    elif name.endswith(".json"):
        (folder / name).write_text(json.dumps({"weight_map": {"x": "other.safetensors"}}))
    else:
        (folder / name).write_bytes(b"other weights")
    assert weights_line(folder) == f"{folder}; read from {WEIGHTS}, not from {name}"


# ---------------------------------------------------------------------------------------------------------------
# Entries and small files


def test_an_ordinary_folder_has_no_remarks(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    edit(folder, dtype="float32", torch_dtype="float32", eos_token_id=258)  # generation has further end tokens
    (folder / "vocab.json").write_text(json.dumps({"?": 0}))
    assert weights_line(folder) == str(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype=float32 in config.json is used, not torch_dtype=bf"),
        ({"eos_token_id": 3}, "eos_token_id=256, 258 of generation_config.json is used, not 3 of config.json"),
        ({"bos_token_id": 3}, "bos_token_id=258 of generation_config.json is used, not 3 of config.json"),
        ({"rope_theta": 9.0}, "rope_theta=10000.0 of rope_parameters in config.json is used, not 9.0"),
        (
            {"rope_scaling": {"type": "default", "rope_theta": 9.0}, "rope_theta": 9.0},
            "rope_scaling in config.json is used, not rope_parameters",
        ),
    ],
    ids=str,
)
def test_contradictions_in_small_files_are_named(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    edit(folder, rope_scaling=None)
    assert contradictions(folder) == []
    edit(folder, **changes)
    assert any(remark.startswith(said) for remark in contradictions(folder))


def test_templates_and_vocabularies_that_differ_are_named(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    assert weights_line(folder) == str(folder)
    (folder / "chat_template.jinja").write_text("{{ other }}")
    (folder / "tokenizer.json").write_bytes(tokenizer_json("?", "one", "two"))
    (folder / "vocab.json").write_text(json.dumps({"one": 2, "two": 1}))
    said = weights_line(folder)
    assert "chat_template.jinja is used, not the chat template in tokenizer_config.json" in said
    assert "tokenizer.json is used, not vocab.json" in said


# ---------------------------------------------------------------------------------------------------------------
# Tied weights that differ

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
ADDED = 200
"""The row of an added token."""


def with_two_tables(folder: Path) -> Path:
    """Write a Llama whose config.json ties the head, though one row of its weight differs."""
    folder_of(folder, LLAMA, SOURCE, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[TABLE].clone()
        tensors[HEAD][ADDED] += 1

    save_in(folder, change)
    return folder


def refusal(folder: str, recipe: str, rank_folder: str) -> str:
    """Return the message with which a run from a folder ends."""
    settings = [f"model.name={recipe}", f"model.path={folder}", *UNCHANGED, f"run.dir={rank_folder}"]
    trainer = Trainer(load_config("llama_small", settings))
    try:
        trainer.fit()
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.parametrize("recipe", ["auto", "hf"])
def test_a_head_that_differs_in_one_row_is_refused(recipe: str, tmp_path: Path) -> None:
    """And the remedy that the message names works."""
    folder = with_two_tables(tmp_path / "model")
    said = refusal(str(folder), recipe, str(tmp_path / "run"))
    assert f"they differ in row {ADDED}\n" in said
    assert f"set tie_word_embeddings to false in {folder / 'config.json'}" in said
    edit(folder, tie_word_embeddings=False)
    assert weights_line(folder, f"model.name={recipe}", f"model.path={folder}") == str(folder)
    assert difference(load_weights(folder), load_with_transformers(folder)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["auto", "hf"])
def test_all_ranks_learn_of_a_row_that_one_of_them_holds(recipe: str, tmp_path: Path) -> None:
    folder = with_two_tables(tmp_path / "model")
    for said in on_ranks(2, refusal, str(folder), recipe, str(tmp_path / "run")):
        assert f"differ in row {ADDED}" in said
