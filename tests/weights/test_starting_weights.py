"""Training starts from the requested weights or not at all: a folder must contain them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.weights.test_pretrained import folder_of
from trainer import UserError, evaluate, load_config, run
from trainer.data.__main__ import command_line as data_command
from trainer.generate import command_line as generate
from trainer.plan.__main__ import command_line as plan

PICKLES = r"has neither model.safetensors nor model.safetensors.index.json, only pytorch_model.bin: pickle files are"
NOTHING = r"has neither model.safetensors nor model.safetensors.index.json; it has "
PART = r"model.safetensors.index.json names model-2.safetensors, which is missing"
GGUF = "m.gguf: is not a complete GGUF file"
WITHOUT = {"pickles": PICKLES, "config": NOTHING, "shard": PART, "gguf": GGUF, "adapter": NOTHING, "partial": NOTHING}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that would resume needs no initial weights, and runs/llama_small may exist in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a chat model with its weights and a file of chats."""
    folder = write_tokenizer(folder_of(tmp_path / "model"), CHATML)
    chat = json.dumps({"messages": conversation("Hi", "Yes")})
    pair = json.dumps(
        {"prompt": conversation("Hi"), "chosen": conversation("", "Yes")[1:], "rejected": conversation("", "No")[1:]}
    )
    (tmp_path / "chats.jsonl").write_text(f"{chat}\n" * 8)
    (tmp_path / "pairs.jsonl").write_text(f"{pair}\n" * 8)
    (tmp_path / "text.txt").write_text("Hi two four. " * 200)
    return folder


def without_weights(folder: Path, how: str) -> Path:
    (folder / "model.safetensors").unlink()
    if how == "pickles":
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif how == "shard":
        index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "gguf":
        (folder / "m.gguf").write_bytes(b"GGUF")
    elif how == "adapter":
        (folder / "adapter_model.safetensors").write_bytes(b"")
    elif how == "partial":
        cache = folder / ".cache" / "huggingface" / "download"
        cache.mkdir(parents=True)
        (cache / "abc.def.incomplete").write_bytes(b"")
    return folder


def words(folder: Path, recipe: str, *more: str) -> list[str]:
    data = folder.parent / ("pairs.jsonl" if recipe == "dpo" else "chats.jsonl")
    own = [f"model.path={folder}", f"data.path={data}", f"data.cache_dir={folder.parent / 'cache'}"]
    quick = ["train.steps=1", "data.seq_len=64", "run.threads=1", f"run.dir={folder.parent / 'run'}"]
    return [f"recipe={recipe}", *own, *quick, *more]


@pytest.mark.parametrize("how", WITHOUT)
@pytest.mark.parametrize("name", ["auto", "hf"])
def test_fine_tuning_needs_the_folders_weights(
    name: str, how: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_weights(model, how)
    for more in (["sft"], ["sft", "lora.rank=2"], ["dpo"], ["sft", "--dry-run"], ["sft", "--print-config"]):
        assert run.main(words(model, *more, f"model.name={name}")) == 2
        said = capsys.readouterr()
        assert f"error: model.path={model}: {WITHOUT[how]}" in said.err
        assert said.out == ""
    assert not (model.parent / "run").exists()


def test_adapters_on_text_need_them_too(model: Path) -> None:
    own = [f"model.path={without_weights(model, 'config')}", f"data.path={model.parent / 'text.txt'}"]
    with pytest.raises(UserError, match=NOTHING):
        load_config("llama_small", ["model.name=auto", *own, "lora.rank=2"])


@pytest.mark.parametrize("name", ["auto", "hf"])
def test_random_weights_on_request(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(without_weights(model, "config"), "sft", f"model.name={name}", "model.fresh=true")
    assert run.main([*asked, "--dry-run"]) == 0
    assert "weights  drawn at random (run.seed=0)" in capsys.readouterr().out


def test_new_model_is_built_from_config_json_alone(model: Path) -> None:
    own = [f"model.path={without_weights(model, 'config')}", f"data.path={model.parent / 'text.txt'}"]
    assert load_config("llama_small", ["model.name=auto", *own]).train.init_from is None
    with pytest.raises(UserError, match=NOTHING):
        load_config("llama_small", ["model.name=auto", *own, "model.fresh=false"])
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickle files are not read"):
        load_config("llama_small", ["model.name=auto", *own])


def test_fresh_excludes_init_from(model: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.fresh=true: asks for random weights, but train\.init_from="):
        load_config("llama_small", ["model.name=auto", f"train.init_from={model}", "model.fresh=true"])


@pytest.mark.slow
def test_run_resumes_without_its_initial_weights(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words(model, "sft")) == 0
    without_weights(model, "config")
    assert run.main(words(model, "sft", "train.steps=2")) == 0
    assert "weights  checkpoint" in capsys.readouterr().out


def test_plan_and_data_commands_need_no_weights(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = words(without_weights(model, "config"), "sft")
    assert plan([*own, "device=cpu", "ranks=1"]) == 0
    assert data_command(["show", *own]) == 0


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_random_weights_are_neither_evaluated_nor_used_to_generate(
    kind: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"model_type": kind}))
    without_weights(model, "config")
    assert evaluate.main([str(model), f"data.eval_path={model.parent / 'text.txt'}"]) == 2
    assert generate([str(model), "--prompt", "Hi"]) == 2
    said = capsys.readouterr().err
    assert said.count(f"error: path={model}: {NOTHING}") == 2


def test_a_damaged_gguf_file_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(model, model.parent / "gguf")
    for file in folder.iterdir():
        file.unlink()
    file = folder / "m.gguf"
    file.write_bytes(b"GGUF")
    text = f"data.path={model.parent / 'text.txt'}"
    for path in (folder, file):
        assert run.main(["recipe=sft", f"model.path={path}", text]) == 2
        assert run.main(["recipe=llama_small", f"train.init_from={path}", text]) == 2
        assert evaluate.main([str(path), text.replace("path", "eval_path")]) == 2
        assert generate([str(path), "--prompt", "Hi"]) == 2
    found = capsys.readouterr().err
    assert found.count(GGUF) == 8
    assert found.count("to fix: download the file again") == 8
