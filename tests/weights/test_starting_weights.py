"""Training starts from the requested weights or not at all: a folder must contain them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cases import campaign_except
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.commands import meshtrainer
from tests.helpers.native_models import folder_of
from trainer import UserError, load_config, run

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

WITHOUT = {
    "pickle": "pytorch_model.bin",
    "nothing": "model.safetensors",
    "shard": "model-2.safetensors",
    "adapter": "model.safetensors",
    "partial download": "model.safetensors",
}
"""What a folder has instead of weights, and the file that the message names."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a chat model with its weights; beside it are chats, pairs and a text."""
    monkeypatch.chdir(tmp_path)  # runs/ may exist in the repository, and a run that resumes needs no such weights
    folder = write_tokenizer(folder_of(tmp_path / "model"), CHATML)
    chat = {"messages": conversation("Hi", "Yes")}
    pair = {"prompt": "Hi", "chosen": conversation("", "Yes")[1:], "rejected": conversation("", "No")[1:]}
    for name, record in (("sft", chat), ("dpo", pair)):
        (tmp_path / f"{name}.jsonl").write_text(8 * f"{json.dumps(record)}\n")
    (tmp_path / "text.txt").write_text("Hi two four. " * 200)
    return folder


def without_weights(folder: Path, how: str = "nothing") -> Path:
    (folder / "model.safetensors").unlink()
    if how == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif how == "shard":
        index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "adapter":
        (folder / "adapter_model.safetensors").write_bytes(b"")
    elif how == "partial download":
        cache = folder / ".cache" / "huggingface" / "download"
        cache.mkdir(parents=True)
        (cache / "abc.def.incomplete").write_bytes(b"")
    return folder


def words(folder: Path, recipe: str, *more: str) -> list[str]:
    data = [f"data.path={folder.parent / recipe}.jsonl", f"data.cache_dir={folder.parent / 'cache'}"]
    quick = ["train.steps=1", "data.seq_len=64", "run.threads=1", f"run.dir={folder.parent / 'run'}"]
    quick += ["eval.every=0", "log.sample_tokens=0", "train.global_batch_size=4", "train.micro_batch_size=2"]
    return [f"recipe={recipe}", f"model.path={folder}", *data, *quick, *more]


@pytest.mark.parametrize("how", campaign_except(WITHOUT, ["pickle", "partial download"]))
def test_fine_tuning_needs_the_folders_weights(how: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_weights(model, how)
    for name in ("auto", "hf"):
        for more in (["sft", "lora.rank=2"], ["dpo"], ["sft", "--dry-run"], ["sft", "--print-config"]):
            assert run.main(words(model, *more, f"model.name={name}")) == 2
            said = capsys.readouterr()
            assert said.err.startswith(f"error: model.path={model}: ")
            assert WITHOUT[how] in said.err
            assert said.out == ""
    assert not (model.parent / "run").exists()


@pytest.mark.parametrize("name", ["auto", "hf"])
def test_random_weights_on_request(name: str, model: Path) -> None:
    recipe, *asked = words(without_weights(model), "sft", f"model.name={name}", "model.fresh=true")
    assert load_config(recipe.removeprefix("recipe="), asked).train.init_from is None


def test_new_model_is_built_from_config_json_alone(model: Path) -> None:
    """To be trained on text, unless it has adapters, or the folder has weights that cannot be read."""
    own = ["model.name=auto", f"model.path={without_weights(model)}", f"data.path={model.parent / 'text.txt'}"]
    assert load_config("llama_small", own).train.init_from is None
    for more in ("model.fresh=false", "lora.rank=2"):
        with pytest.raises(UserError, match=f"^model.path={model}: "):
            load_config("llama_small", [*own, more])
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        load_config("llama_small", own)


def test_fresh_excludes_init_from(model: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.fresh=true: .*train\.init_from={model}"):
        load_config("llama_small", ["model.name=auto", f"train.init_from={model}", "model.fresh=true"])


def test_a_plan_needs_no_weights_but_evaluations_and_texts_do(model: Path) -> None:
    without_weights(model)
    assert meshtrainer("plan", *words(model, "sft"), "device=cpu", "ranks=1").code == 0
    for arguments in (["evaluate", model, "data.eval_path=text.txt"], ["generate", model, "--prompt", "Hi"]):
        refused = meshtrainer(*arguments)
        assert refused.code == 2
        assert refused.err.startswith(f"error: path={model}: ")
