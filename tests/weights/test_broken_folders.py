"""Broken or malicious model folders are rejected in one message, with bounded time and memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.broken_folders import CASES, CHAT, weights_with, write_valid_folder
from tests.weights.test_huggingface import MODELS, build, export_model
from trainer import UserError, load_config, load_weights
from trainer.files import symlink_target_outside
from trainer.report.live import PageCache
from trainer.weights.exporting import read_model_files
from trainer.weights.sources import SafetensorsFolder

pytest.importorskip("tokenizers")

LIMIT_S, LIMIT_GIB = 10.0, 2.0
NOT_FINITE = ("weights: NaN", "weights: one infinity")
AT_ONCE = [name for name in CASES if name.startswith(("config: ", "link: "))]
"""Defects of config.json and of file names, which are found before torch is imported."""
FOUND_LATER = ("config: NaN", "config: model_type unknown", "config: custom code", "weights: pickle", *NOT_FINITE)
"""Defects that are not in configuration files or headers."""
ACCEPTED = ("tokenizer: catastrophic regex",)
"""Not rejected: the tokenizers library gives up on such a match, and the run trains."""
HEADERS = [
    "weights: empty",
    "weights: garbage",
    "weights: truncated",
    "weights: header too long",
    "weights: header longer than declared",
    "weights: offsets overlap",
    "weights: offsets beyond the end",
    "weights: a shape of 2**62",
    "weights: integers",
]
TOKENIZERS = [name for name in CASES if name.startswith("tokenizer")]


def broken(tmp_path: Path, name: str) -> Path:
    folder = write_valid_folder(tmp_path / "model")
    CASES[name](folder)
    return folder


@pytest.mark.parametrize("model", ["auto", "hf"])
@pytest.mark.parametrize("name", [name for name in AT_ONCE if name not in FOUND_LATER] + HEADERS)
def test_broken_folder_is_rejected_at_once(name: str, model: str, tmp_path: Path) -> None:
    """From metadata alone: no model is built, and no weights are read."""
    folder = broken(tmp_path, name)
    with pytest.raises(UserError) as refused:
        load_config("sft", [f"model.name={model}", f"model.path={folder}", "data.path=chats.jsonl"])
    said = str(refused.value)
    assert said.startswith((f"model.path={folder}", f"train.init_from={folder}")), said
    assert len(said) < 1000


@pytest.mark.parametrize("name", NOT_FINITE)
def test_non_finite_weights_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not all finite: NaN or infinity in .*(norm|layers)"):
        load_weights(broken(tmp_path, name))


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integer_weight_is_rejected(dtype: torch.dtype, tmp_path: Path) -> None:
    """Such as in a quantized folder: converted to floating point, the codes would be trained as weights."""
    folder = write_valid_folder(tmp_path / "model")
    weights_with(lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))(folder)
    with pytest.raises(UserError, match=r"layers.1.feed_forward.w3.weight: u?int8 there, as in a quantized folder"):
        load_weights(folder)


def test_matrices_of_zeros_get_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted download leaves them if the file was allocated in advance."""
    folder = write_valid_folder(tmp_path / "model")
    weights_with(lambda tensors: tensors[UP].zero_())(folder)
    load_weights(folder)
    assert f"matrices in {folder} are all zero, as after an interrupted download: layers.1" in capsys.readouterr().err


def test_biases_of_zeros_get_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of stacked experts have two dimensions too."""
    recipe, config = MODELS["gpt_oss"]
    model = build(recipe, config)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert {bias.ndim for bias in biases} == {1, 2}
    for bias in biases:
        nn.init.zeros_(bias)
    export_model(model, recipe, config, tmp_path)
    load_weights(tmp_path)
    assert "zero" not in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("index: ")])
def test_an_index_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = broken(tmp_path, name)
    with pytest.raises(UserError, match=r"model.safetensors.index.json"):
        SafetensorsFolder(folder, setting="model.path")


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer_config.json", "generation_config.json"])
def test_links_out_of_a_folder_are_not_copied(name: str, tmp_path: Path) -> None:
    folder = write_valid_folder(tmp_path / "model")
    (tmp_path / "private").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=rf"{name} is a link to .*private, outside the folder"):
        read_model_files(folder)
    (folder / name).unlink()
    (folder / "own").write_text("{}")
    (folder / name).symlink_to("own")
    assert read_model_files(folder)[name] == b"{}"
    (folder / name).unlink()
    (tmp_path / name).write_text("{}")
    (folder / name).symlink_to(tmp_path / name)  # as `cp -s` and `ln -s` make a copy of a model's folder
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
    assert symlink_target_outside(snapshot, "../../../elsewhere") is not None


def test_report_serves_no_file_outside_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    (tmp_path / "private.json").write_text("private")
    (run / "profile" / "own.json").write_text("own")
    (run / "profile" / "link.json").symlink_to(tmp_path / "private.json")
    pages = PageCache([run])
    assert pages.file("/profile/own.json") == run / "profile" / "own.json"
    assert pages.file("/profile/link.json") is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "profile").symlink_to(run / "profile")
    assert PageCache([other]).file("/profile/own.json") is None


@pytest.mark.campaign
@pytest.mark.parametrize("model", ["auto", "hf"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ACCEPTED])
def test_broken_folder_costs_little_time_and_memory(name: str, model: str, tmp_path: Path) -> None:
    """The whole command in a separate process: one message, exit code 2, bounded time and memory."""
    if model == "hf":
        pytest.importorskip("transformers")
    folder = broken(tmp_path, name)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 16)
    settings = [
        *("recipe=sft", f"model.path={folder}", f"model.name={model}", f"data.path={tmp_path / 'chats.jsonl'}"),
        *("data.seq_len=64", "train.epochs=1", "train.global_batch_size=2", "train.micro_batch_size=1"),
        *(f"run.dir={tmp_path / 'run'}", "run.threads=1", f"data.cache_dir={tmp_path / 'cache'}"),
    ]
    began = time.monotonic()
    with open(tmp_path / "said", "w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.run", *settings], cwd=tmp_path, stdout=said, stderr=said
        )
        timer = threading.Timer(120, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        said.seek(0)
        text = said.read()
    assert os.waitstatus_to_exitcode(status) == 2, text
    assert len(re.findall(r"^error:", text, re.MULTILINE)) == 1, text
    assert "Traceback" not in text
    assert used.ru_utime + used.ru_stime < LIMIT_S, time.monotonic() - began
    assert used.ru_maxrss / 2**20 < LIMIT_GIB
    assert not (tmp_path / "ran").exists()
