"""Broken or malicious model folders are rejected in one message, with bounded memory; links do not lead out."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from tests.helpers.broken_folders import CASES, CHAT, weights_with, write_valid_folder
from tests.helpers.cases import campaign_except
from tests.helpers.launch import fork, run_module
from tests.helpers.native_models import MODELS, build, export_model
from trainer import UserError, load_config, load_weights
from trainer.weights.model_files import read_model_files

pytest.importorskip("tokenizers")

AT_ONCE = [
    *("config: text for a number", "config: negative", "config: heads that do not divide", "config: hidden_size 1e9"),
    *("config: num_hidden_layers 1e7", "config: 1000 layers of 1e5 experts", "config: Infinity"),
    *("config: nested 100,000 deep", "config: a list", "config: empty", "config: not UTF-8", "config: 100 MB"),
    *("link: config.json", "link: tokenizer_config.json", "index: a file outside", "index: a list"),
    *("weights: empty", "weights: truncated", "weights: header too long", "weights: offsets overlap"),
    *("weights: a shape of 2**62", "weights: integers"),
]
"""Found before torch is imported, from configuration files and headers; one of each kind."""
ACCEPTED = ("tokenizer: catastrophic regex",)
"""Not rejected: the tokenizers library gives up on such a match, and the run trains."""
UP = "model.layers.1.mlp.up_proj.weight"


def broken(tmp_path: Path, name: str) -> Path:
    folder = write_valid_folder(tmp_path / "model")
    CASES[name](folder)
    return folder


@pytest.mark.parametrize("name", campaign_except(AT_ONCE, [name for name in AT_ONCE if name != "config: 100 MB"]))
def test_broken_folder_is_rejected_at_once(name: str, tmp_path: Path) -> None:
    """From metadata alone: no model is built, and no weights are read."""
    folder = broken(tmp_path, name)
    for model in ("auto", "hf"):
        with pytest.raises(UserError) as refused:
            load_config("sft", [f"model.name={model}", f"model.path={folder}", "data.path=chats.jsonl"])
        said = str(refused.value)
        assert said.startswith((f"model.path={folder}", f"train.init_from={folder}")), said
        assert len(said) < 1000


@pytest.mark.parametrize("name", ["weights: NaN", "weights: one infinity", "index: a file outside", "index: a list"])
def test_broken_weights_are_rejected_when_they_are_read(name: str, tmp_path: Path) -> None:
    folder = broken(tmp_path, name)
    with pytest.raises(UserError, match=str(folder)):
        load_weights(folder)


def test_integer_weight_is_rejected_by_name(tmp_path: Path) -> None:
    """Such as in a quantized folder: converted to floating point, the codes would be trained as weights."""
    folder = write_valid_folder(tmp_path / "model")
    weights_with(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))(folder)
    with pytest.raises(UserError, match=r"layers\.1\.feed_forward\.w3\.weight: int8"):
        load_weights(folder)


def test_matrices_of_zeros_get_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted download leaves them if the file was allocated in advance; biases often are zero."""
    folder = write_valid_folder(tmp_path / "model")
    weights_with(lambda tensors: tensors[UP].zero_())(folder)
    load_weights(folder)
    said = capsys.readouterr().err
    assert "layers.1.feed_forward.w3.weight" in said
    assert str(folder) in said

    recipe, config = MODELS["gpt_oss"]
    model = build(recipe, config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # those of stacked experts have two dimensions too
            torch.nn.init.zeros_(weight)
    export_model(model, recipe, config, tmp_path / "biased")
    load_weights(tmp_path / "biased")
    assert "warning" not in capsys.readouterr().err


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    """Those within it, and those that `cp -s` makes, are."""
    folder, name = write_valid_folder(tmp_path / "model"), "merges.txt"
    (tmp_path / "private").write_text("{}")
    (folder / name).symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=f"{name}.*{tmp_path}/private"):
        read_model_files(folder)
    (folder / "own").write_text("{}")
    (tmp_path / name).write_text("{}")
    for target in ("own", tmp_path / name):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        assert read_model_files(folder)[name] == b"{}"


def test_links_within_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """models--a--b/snapshots/<revision>/file -> ../../blobs/<hash>, also if the folder is reached through a link."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    write_valid_folder(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        assert "tokenizer.json" in read_model_files(folder)
        assert load_config("sft", [f"model.path={folder}", "data.path=x.jsonl"]).model.num_layers == 2


def run_in_little_memory(settings: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    return run_module("trainer.run", settings)


@pytest.mark.campaign
@pytest.mark.parametrize("model", ["auto", "hf"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ACCEPTED])
def test_broken_folder_gives_one_message_and_costs_little_memory(name: str, model: str, tmp_path: Path) -> None:
    folder = broken(tmp_path, name)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 16)
    settings = [
        *("recipe=sft", f"model.path={folder}", f"model.name={model}", f"data.path={tmp_path / 'chats.jsonl'}"),
        *("data.seq_len=64", "train.epochs=1", "train.global_batch_size=2", "train.micro_batch_size=1"),
        *(f"run.dir={tmp_path / 'run'}", "run.threads=1", f"data.cache_dir={tmp_path / 'cache'}"),
    ]
    ended = fork(run_in_little_memory, [settings], tmp_path, cwd=tmp_path).wait()
    assert ended.code == 2, ended.err
    assert [line.startswith("error: ") for line in ended.err.splitlines()].count(True) == 1, ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "ran").exists(), "a pickle was loaded"
