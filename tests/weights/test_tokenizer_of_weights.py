"""Weights are trained with the tokenizer of their earlier training, unless a different one is allowed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")

from tests.data.test_data import write_shards
from tests.helpers.chats import CHATML, write_tokenizer
from tests.weights.test_pretrained import folder_of, tokenizer_json
from trainer import Trainer, UserError, evaluate, load_config, run
from trainer.config import RunConfig
from trainer.data.tokenizer import find_tokenizer
from trainer.export import export_checkpoint
from trainer.generate import command_line as generate

ALLOWED = "checkpoint.allow_changes=[data.tokenizer]"
ANOTHER = r"^data\.tokenizer=\S+: differs from the tokenizer that the weights were trained with, "


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model with its tokenizer; next to it are a text and a second tokenizer."""
    (tmp_path / "text.txt").write_text("Hi two four. " * 200)
    (tmp_path / "other.json").write_bytes(tokenizer_json("?", "one", "Hi"))
    return write_tokenizer(folder_of(tmp_path / "model"), CHATML)


def config_of(model: Path, *overrides: str, start: str = "train.init_from=", name: str = "run") -> RunConfig:
    base = model.parent
    own = [f"{start}{model}", f"data.path={base / 'text.txt'}", f"data.cache_dir={base / 'cache'}", "data.seq_len=16"]
    quick = ["train.steps=1", "train.global_batch_size=2", "run.threads=1", "eval.every=0", "log.sample_tokens=0"]
    return load_config("llama_small", [*own, *quick, f"run.dir={base / name}", *overrides])


def fitted(config: RunConfig) -> Trainer:
    trainer = Trainer(config)
    assert trainer.fit() == 0
    trainer.close()
    return trainer


def test_tokenizer_of_the_folder_is_the_default(model: Path) -> None:
    assert config_of(model).data.tokenizer == str(model / "tokenizer.json")
    hf = config_of(model, "model.name=hf", start="model.path=")
    assert hf.data.tokenizer == str(model / "tokenizer.json")
    assert config_of(model, "data.source=synthetic", "data.path=null").data.tokenizer == "bytes", "it is not used"


def test_random_weights_have_no_tokenizer(model: Path) -> None:
    hf = config_of(model, "model.name=hf", "model.fresh=true", start="model.path=")
    assert hf.data.tokenizer == "bytes"


@pytest.mark.parametrize("other", ["bytes", "other.json"])
def test_different_tokenizer_is_rejected_unless_allowed(other: str, model: Path) -> None:
    other = other if other == "bytes" else str(model.parent / other)
    for more in ([], ["model.name=auto"]):
        with pytest.raises(UserError, match=ANOTHER):
            config_of(model, f"data.tokenizer={other}", *more)
    with pytest.raises(UserError, match=ANOTHER):
        config_of(model, f"data.tokenizer={other}", "model.name=hf", start="model.path=")
    assert config_of(model, f"data.tokenizer={other}", ALLOWED).data.tokenizer == other


def test_moved_tokenizer_counts_as_the_same(model: Path) -> None:
    elsewhere = shutil.copytree(model, model.parent / "elsewhere") / "tokenizer.json"
    content = json.loads(elsewhere.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    elsewhere.write_text(json.dumps(content, indent=1))
    assert config_of(model, f"data.tokenizer={elsewhere}").data.tokenizer == str(elsewhere)


def test_tokenizer_in_an_unsupported_format_is_not_ignored(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    with pytest.raises(
        UserError, match=r"^data\.tokenizer=bytes: the weights in \S+ have their own tokenizer \(tok"
    ) as e:
        config_of(model)
    assert f"save_pretrained(sys.argv[1])' {model}`; for training, also set data.tokenizer=FILE" in str(e.value)
    assert config_of(model, "data.tokenizer=bytes").data.tokenizer == "bytes", "it is named"
    assert evaluate.main([str(model), f"data.eval_path={model.parent / 'text.txt'}"]) == 2
    assert generate([str(model), "--prompt", "Hi"]) == 2


def test_shards_of_a_different_tokenizer_are_rejected(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {}
    for name, tokenizer in (("own", model), ("other", model.parent / "other.json")):
        (model.parent / name).mkdir()
        made[name] = write_shards(model.parent / name, [b"Hi"] * 60, tokenizer=find_tokenizer(str(tokenizer)))
    own = [f"train.init_from={model}", "data.seq_len=16", "run.threads=1", f"run.dir={model.parent / 'run'}"]
    for path, code in ((made["own"], 0), (made["other"], 2)):
        assert run.main(["recipe=llama_small", *own, "eval.every=0", f"data.path={path}", "--dry-run"]) == code
        assert evaluate.main([str(model), f"data.eval_path={path}", "data.seq_len=16"]) == code
    said = capsys.readouterr().err
    assert said.count("the shards were made with tokenizer other:") == 2
    with pytest.raises(UserError, match="the shards were made with tokenizer other:"):
        Trainer(config_of(model, f"data.path={made['other']}"))
    fitted(config_of(model, f"data.path={made['other']}", ALLOWED))


def test_tokenizer_of_a_run_is_used_with_its_weights(model: Path) -> None:
    fitted(config_of(model))
    (model / "tokenizer.json").rename(model / "kept.json")
    with pytest.raises(
        UserError, match=r"^data\.tokenizer=bytes: the weights of \S+ were trained with \S+tokenizer.json"
    ):
        config_of(model.parent / "run", name="next")
    (model / "kept.json").rename(model / "tokenizer.json")
    assert config_of(model.parent / "run", name="next").data.tokenizer == str(model / "tokenizer.json")
    with pytest.raises(UserError, match=ANOTHER):
        config_of(model.parent / "run", "data.tokenizer=bytes", name="next")
    assert evaluate.main([str(model.parent / "run"), "data.tokenizer=bytes"]) == 2
    assert evaluate.main([str(model.parent / "run"), f"data.eval_path={model.parent / 'text.txt'}"]) == 0


def test_resume_with_another_file_of_the_tokenizer_stores_it(model: Path) -> None:
    own = model / "tokenizer.json"
    assert fitted(config_of(model)).model_files.tokenizer["tokenizer.json"] == own.read_bytes()
    other = model.parent / "same.json"
    other.write_text(json.dumps(json.loads(own.read_text()), indent=3))
    resumed = fitted(config_of(model, "train.steps=2", f"data.tokenizer={other}", ALLOWED))
    assert resumed.resume.step == 1
    assert resumed.model_files.tokenizer["tokenizer.json"] == other.read_bytes() != own.read_bytes()


def test_a_run_of_bytes_resumes_and_exports_no_tokenizer(model: Path) -> None:
    """A run from a version that used bytes by default, or a run that was allowed to use them."""
    fitted(config_of(model, "data.tokenizer=bytes", ALLOWED))
    assert config_of(model, "train.steps=2").data.tokenizer == "bytes"
    fitted(load_config(str(model.parent / "run"), ["train.steps=2", "checkpoint.allow_changes=[]"]))
    assert evaluate.main([str(model.parent / "run"), f"data.eval_path={model.parent / 'text.txt'}"]) == 0
    fitted(load_config(str(model.parent / "run"), ["train.steps=3", ALLOWED]))
    export_checkpoint(model.parent / "run", model.parent / "out")
    assert {file.name for file in (model.parent / "out").iterdir()} == {"config.json", "model.safetensors"}
