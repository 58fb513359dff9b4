"""The start block shows where weights, tokenizer and chat template come from, and which data is trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.test_data import write_shards
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.tiny import tiny_config
from tests.weights.test_pretrained import folder_of
from trainer import Trainer, load_config
from trainer.config import RunConfig
from trainer.data.loader import Batch
from trainer.data.tokenizer import find_tokenizer

FACTS = ("weights", "tokenizer", "template", "data")


def started(config: RunConfig, capsys: pytest.CaptureFixture[str], kind: type[Trainer] = Trainer) -> dict[str, str]:
    """Train to the end; return the lines of the start block by name."""
    trainer = kind(config)
    assert trainer.fit() == 0
    trainer.close()
    facts: dict[str, str] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("step "):
            break
        if found := re.fullmatch(r" *(\w+)  (\S.*)", line):
            name = found[1]
            facts[name] = found[2]
        elif name:
            facts[name] += f"\n{line.strip()}"
    return facts


def test_random_weights_and_synthetic_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = started(tiny_config(tmp_path / "run", "train.steps=1"), capsys)
    assert facts["weights"] == "drawn at random (run.seed=0)"
    assert facts["tokenizer"] == "none: the data are token ids"
    assert facts["template"] == "none: the data are not chats"
    assert facts["data"].startswith("synthetic\nstep 1: 4 samples")


def test_text_and_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 40)
    text = ["data.source=tokens", f"data.path={tmp_path / 'text.txt'}", "data.holdout=0.25", "model.vocab_size=300"]
    config = tiny_config(tmp_path / "run", *text, f"data.cache_dir={tmp_path / 'cache'}", "train.steps=1")
    facts = started(config, capsys)
    assert facts["tokenizer"] == "bytes (257 of the model's 300 ids)"
    assert f"tokens: {tmp_path / 'text.txt'}\n321 tokens, 99.7% of them are targets" in facts["data"]
    assert "; 15 of the 20 samples are trained on, the others held out\n" in facts["data"]
    facts = started(replace(config, train=replace(config.train, steps=2)), capsys)
    assert facts["weights"] == f"checkpoint {tmp_path / 'run/checkpoints/step_00000001'} (step 1)"


def test_shards_name_their_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", None)
    shards = write_shards(tmp_path, [b"Hi two four " * 20], tokenizer=find_tokenizer(str(tokenizer)))
    settings = ["data.source=tokens", f"data.path={shards}", "model.vocab_size=128", "train.steps=1"]
    facts = started(tiny_config(tmp_path / "run", *settings), capsys)
    assert re.match(
        r"tokenizer:\w+ \(\d+ of the model's 128 ids\), as the token shards say; data.tokenizer=bytes is not used",
        facts["tokenizer"],
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_of_a_folder_with_and_without_adapters(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "model")
    own = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=2", "run.threads=1"]
    more = ["train.steps=1", f"train.init_from={folder}", f"run.dir={tmp_path / 'run'}", f"lora.rank={rank}"]
    config = load_config("llama_small", [*own, *more, "log.sample_tokens=0", "eval.every=0"])
    drawn = ", frozen; adapters of rank 2 drawn at random (run.seed=0)" if rank else ""
    assert started(config, capsys)["weights"] == f"{folder}{drawn}"
    saved = f"checkpoint {tmp_path / 'run/checkpoints/step_00000001'} (step 1)"
    resumed = started(replace(config, train=replace(config.train, steps=2)), capsys)["weights"]
    assert resumed == (f"{folder}, frozen; adapters of rank 2 from {saved}" if rank else saved)


def test_adapters_and_their_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=2", "run.threads=1", "train.steps=1"]
    own += ["model.num_layers=1", "lora.rank=2", "log.sample_tokens=0", "eval.every=0", "checkpoint.every=0"]
    for targets, expected in {
        "all-linear": r"wq, wk, wv, wo: 1\.54 k parameters, 100\.0% of them\n"
        r"none on gate_up_proj, down_proj of the experts; lora\.targets can name them",
        "[q_proj,down_proj]": r"wq: 448 parameters, 8\.0% of them\n"
        r"down_proj of the experts: 5\.12 k parameters, 92\.0% of them\n"
        r"none on gate_up_proj of some experts; lora\.targets can name them",
        "[experts]": r"gate_up_proj, down_proj of the experts: 12\.3 k parameters, 100\.0% of them",
    }.items():
        config = load_config("qwen3_moe_small", [*own, f"lora.targets={targets}", f"run.dir={tmp_path / targets}"])
        assert re.fullmatch(expected, started(config, capsys)["adapters"])


@pytest.mark.parametrize("pairs", [False, True])
def test_chats_and_pairs(pairs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tokenizer(tmp_path / "model", CHATML)
    chat, answers = (
        {"messages": conversation("Hi", "Yes")},
        {"prompt": conversation("Hi"), "chosen": conversation("", "Yes")[1:]},
    )
    row = {**answers, "rejected": conversation("", "No")[1:]} if pairs else chat
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    settings = ["data.source=chat", f"data.path={tmp_path / 'chats.jsonl'}", f"data.tokenizer={folder}"]
    more = [f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=64", "model.vocab_size=128", "train.steps=1"]
    config = tiny_config(tmp_path / "run", *settings, *more, f"train.objective={'dpo' if pairs else 'tokens'}")
    facts = started(config, capsys, config.trainer_class(Trainer))
    assert facts["template"] == str(folder / "chat_template.jinja")
    assert facts["tokenizer"].startswith(f"{folder / 'tokenizer.json'} (")
    assert f"chat: {tmp_path / 'chats.jsonl'}\n8 {'pairs' if pairs else 'conversations'}, " in facts["data"]
    assert facts["weights"].endswith("; reference model: the same weights" if pairs else "(run.seed=0)")


def test_custom_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(Trainer):
        def build_loader(self) -> Iterable[Batch]:
            return (batch for batch in super().build_loader())

    facts = started(tiny_config(tmp_path / "run", "train.steps=1"), capsys, Own)
    assert facts["tokenizer"] == "bytes (data.tokenizer; the samples come from a custom loader)"
    assert "the samples come from a custom loader" in facts["data"]
    assert all(facts[name] for name in FACTS)
