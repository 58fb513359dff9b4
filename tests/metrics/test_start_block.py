"""The start block shows where weights, tokenizer and chat template come from, and which data is trained on."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import REPOSITORY, run
from tests.helpers.runs import SharedRun
from tests.helpers.tiny import tiny_config
from trainer import RunConfig, Trainer, load_config
from trainer.lifecycle.summary import NEWEST_TESTED, newer_libraries


def facts_in(printed: str) -> dict[str, str]:
    """Return the lines of the start block by name."""
    facts: dict[str, str] = {}
    name = ""
    for line in printed.splitlines():
        if line.startswith("step "):
            break
        if found := re.fullmatch(r" *(\w+)  (\S.*)", line):
            name = found[1]
            facts[name] = found[2]
        elif name:
            facts[name] += f"\n{line.strip()}"
    return facts


def started(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Train to the end; return the lines of the start block by name."""
    trainer = Trainer(config)
    assert trainer.fit() == 0
    trainer.close()
    return facts_in(capsys.readouterr().out)


@pytest.mark.slow
def test_text_and_a_resumed_run(one: SharedRun, tmp_path: Path) -> None:
    facts = facts_in(one.out)
    (start,) = one.of_kind("start")
    assert f"{start['parameters'] / 1e3:.1f}".removesuffix(".0") in facts["model"]
    assert "run.seed=0" in facts["weights"]
    assert "bytes" in facts["tokenizer"]
    assert "257" in facts["tokenizer"]
    assert "stdlib" in facts["data"]
    assert "96 samples" in facts["data"], "12 steps of 8"
    again = run(one.copy_to(tmp_path / "run", up_to=8), *one.overrides)
    assert f"{tmp_path / 'run/checkpoints/step_00000008'} " in facts_in(again.out)["weights"]


@pytest.mark.slow
def test_chats_and_adapters_on_a_folder(chat: SharedRun) -> None:
    facts = facts_in(chat.out)
    (model,) = (Path(item.partition("=")[2]) for item in chat.overrides if item.startswith("model.path="))
    assert facts["weights"].startswith(f"{model}, ")
    assert "rank 4" in facts["weights"]
    assert facts["tokenizer"].startswith(f"{model / 'tokenizer.json'} ")
    assert facts["template"] == str(model / "chat_template.jinja")
    assert str(model.parent / "chats.jsonl") in facts["data"]
    assert "40 conversations" in facts["data"]
    share = chat.of_kind("start")[0]["trained_share"]
    assert f"{share:.1%}" in facts["data"]


def test_held_out_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """320 bytes and an end make 20 rows of 16 tokens, of which a quarter is held out."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 40)
    text = ["data.source=tokens", f"data.path={tmp_path / 'text.txt'}", "data.holdout=0.25", "model.vocab_size=300"]
    config = tiny_config(tmp_path / "run", *text, f"data.cache_dir={tmp_path / 'cache'}", "train.steps=1")
    facts = started(config, capsys)
    assert "257" in facts["tokenizer"]
    assert "300" in facts["tokenizer"]
    assert {"321", "15", "20"} <= set(re.findall(r"\d+", facts["data"]))
    facts = started(replace(config, train=replace(config.train, steps=2)), capsys)
    assert str(tmp_path / "run/checkpoints/step_00000001") in facts["weights"]


def test_adapters_and_their_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is adapted, what is not, and the parameters of each, counted by hand."""
    own = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=2", "run.threads=1", "train.steps=1"]
    own += ["model.num_layers=1", "lora.rank=2", "log.sample_tokens=0", "eval.every=0", "checkpoint.every=0"]
    config = load_config("qwen3_moe_small", [*own, "lora.targets=[q_proj,down_proj]", f"run.dir={tmp_path}"])
    model = config.model
    of_query = 2 * (model.dim + model.num_heads * model.head_dim)
    of_experts = 2 * (model.dim + model.expert_dim) * model.num_experts
    found = started(config, capsys)["adapters"].splitlines()
    assert f"wq {100 * of_query / (of_query + of_experts):.1f}%" in found[0]
    assert f"down_proj of the experts {100 * of_experts / (of_query + of_experts):.1f}%" in found[0]
    assert "gate_up_proj" in found[1], "is left out"


def test_run_that_ends_within_its_warmup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that a resume with fewer steps makes so; a warmup that ends is not mentioned."""
    own = ["optim.lr=0.5", "schedule.warmup_steps=3", "checkpoint.every=1", "eval.every=0"]
    printed = {}
    for steps, name in ((1, "short"), (4, "long"), (6, "long")):
        trainer = Trainer(tiny_config(tmp_path / name, *own, f"train.steps={steps}"))
        assert trainer.fit() == 0
        trainer.close()
        printed[steps] = capsys.readouterr().out
    assert "within its warmup of 3 steps" in printed[1]
    assert "0.167 instead of 0.5" in printed[1]
    assert "warmup" not in printed[4]
    trainer = Trainer(tiny_config(tmp_path / "long", *own, "train.steps=8", "schedule.warmup_steps=80"))
    assert trainer.fit() == 0
    trainer.close()
    assert "0.05 instead of 0.5" in capsys.readouterr().out


def test_libraries_that_are_newer_than_tested_are_named() -> None:
    constraints = dict(re.findall(r"^([\w-]+)==([\d.]+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: constraints[name] for name in NEWEST_TESTED} == NEWEST_TESTED

    def installed(versions: dict[str, str]) -> str:
        def version_of(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        return newer_libraries(version_of)

    tested = NEWEST_TESTED["torch"]
    assert (
        installed({"torch": tested}) == installed({"torch": f"{tested}+cu130"}) == installed({"torch": "2.9.1"}) == ""
    )
    named = installed({**NEWEST_TESTED, "torch": "3.0.0a0+git", "omegaconf": "10.0"})
    assert named == f"newer than tested: torch 3.0.0a0+git (tested up to {tested}), omegaconf 10.0 (tested up to 2.4.0)"


@pytest.mark.slow
def test_a_newer_library_is_named_in_the_start_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEWEST_TESTED, "torch", "2.0.0")
    trainer = Trainer(tiny_config(tmp_path))
    assert trainer.fit() == 0
    trainer.close()
    assert f"newer than tested: torch {torch.__version__}" in capsys.readouterr().out.replace("\n", " ")
