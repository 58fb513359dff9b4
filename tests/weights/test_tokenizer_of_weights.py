"""Weights are trained with the tokenizer of their earlier training, unless a different one is allowed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.chats import CHATML, write_tokenizer
from tests.helpers.commands import meshtrainer
from tests.helpers.data import write_shards
from tests.helpers.native_models import folder_of, tokenizer_json
from trainer import Trainer, UserError, load_config
from trainer.config.schema import RunConfig
from trainer.export import export_checkpoint

pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")

ALLOWED = "checkpoint.allow_changes=[data.tokenizer]"


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


def train(config: RunConfig) -> None:
    trainer = Trainer(config)
    assert trainer.fit() == 0
    trainer.close()


def test_tokenizer_of_the_folder_is_the_default(model: Path) -> None:
    own = str(model / "tokenizer.json")
    assert config_of(model).data.tokenizer == own
    assert config_of(model, "model.name=hf", start="model.path=").data.tokenizer == own
    fresh = config_of(model, "model.name=hf", "model.fresh=true", start="model.path=")
    assert fresh.data.tokenizer == "bytes", "random weights have none"
    assert config_of(model, "data.source=synthetic", "data.path=null").data.tokenizer == "bytes", "it is not used"


@pytest.mark.parametrize("other", ["bytes", "other.json"])
def test_different_tokenizer_is_rejected_unless_allowed(other: str, model: Path) -> None:
    other = other if other == "bytes" else str(model.parent / other)
    for start, more in (
        ("train.init_from=", []),
        ("model.path=", ["model.name=auto"]),
        ("model.path=", ["model.name=hf"]),
    ):
        with pytest.raises(UserError, match=f"^data.tokenizer={other}: "):
            config_of(model, f"data.tokenizer={other}", *more, start=start)
    assert config_of(model, f"data.tokenizer={other}", ALLOWED).data.tokenizer == other


def test_moved_tokenizer_counts_as_the_same(model: Path) -> None:
    elsewhere = shutil.copytree(model, model.parent / "elsewhere") / "tokenizer.json"
    content = json.loads(elsewhere.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    elsewhere.write_text(json.dumps(content, indent=1))
    assert config_of(model, f"data.tokenizer={elsewhere}").data.tokenizer == str(elsewhere)


def test_tokenizer_in_an_unsupported_format_is_not_ignored(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    with pytest.raises(UserError, match=r"^data\.tokenizer=bytes: .*tokenizer\.model"):
        config_of(model)
    assert config_of(model, "data.tokenizer=bytes").data.tokenizer == "bytes", "it is named"
    text = f"data.eval_path={model.parent / 'text.txt'}"
    for arguments in (["evaluate", model, text], ["generate", model, "--prompt", "Hi"]):
        assert meshtrainer(*arguments).code == 2


def test_shards_of_a_different_tokenizer_are_rejected(model: Path) -> None:
    for name, code in (("own", 0), ("other", 2)):
        tokenizer = model if name == "own" else model.parent / "other.json"
        shards = write_shards(model.parent / name, ["Hi"] * 60, tokenizer=tokenizer)
        evaluated = meshtrainer("evaluate", model, f"data.eval_path={shards}", "data.seq_len=16")
        assert evaluated.code == code, evaluated.err
        config = config_of(model, f"data.path={shards}", name=name)
        if code:
            with pytest.raises(UserError, match=r"other\.json|tokenizer other"):
                Trainer(config)
            config = config_of(model, f"data.path={shards}", ALLOWED, name=name)
        train(config)


def test_tokenizer_of_a_run_is_used_with_its_weights(model: Path) -> None:
    """A run that starts from it needs that file; another file of the same tokenizer is stored by a resume."""
    train(config_of(model))
    run, own = model.parent / "run", model / "tokenizer.json"
    other = model.parent / "same.json"
    other.write_text(json.dumps(json.loads(own.read_text()), indent=3))
    train(config_of(model, "train.steps=2", f"data.tokenizer={other}", ALLOWED))
    export_checkpoint(run, model.parent / "out")
    assert (model.parent / "out" / "tokenizer.json").read_bytes() == other.read_bytes() != own.read_bytes()
    assert config_of(run, name="next").data.tokenizer == str(other)
    with pytest.raises(UserError, match=r"^data\.tokenizer=bytes: "):
        config_of(run, "data.tokenizer=bytes", name="next")
    assert meshtrainer("evaluate", run, "data.tokenizer=bytes").code == 2
    assert meshtrainer("evaluate", run, f"data.eval_path={model.parent / 'text.txt'}").code == 0
    other.unlink()
    with pytest.raises(UserError, match=r"^data\.tokenizer=bytes: .*same\.json"):
        config_of(run, name="next")


@pytest.mark.campaign
def test_a_run_of_bytes_resumes_and_exports_no_tokenizer(model: Path) -> None:
    train(config_of(model, "data.tokenizer=bytes", ALLOWED))
    assert config_of(model, "train.steps=2").data.tokenizer == "bytes"
    train(load_config(str(model.parent / "run"), ["train.steps=2", "checkpoint.allow_changes=[]"]))
    export_checkpoint(model.parent / "run", model.parent / "out")
    assert {file.name for file in (model.parent / "out").iterdir()} == {"config.json", "model.safetensors"}
