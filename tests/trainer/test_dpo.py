"""Preference training: the loss of pairs follows the formula, on any mesh, with or without adapters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.func import functional_call
from trainer.recipes.dpo.trainer import PreferenceTrainer

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.ranks import merged, run_command, run_python_module, run_ranks
from tests.model.test_lora import config_of
from tests.project.test_docs import check_fields
from tests.weights.test_pretrained import SOURCE, edit, folder_of
from trainer import Trainer, UserError, load_weights
from trainer.config import MeshShape
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.source import IGNORE, Fingerprint, Source
from trainer.model.lora import parse_adapter
from trainer.model.parameters import local
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

SEQ_LEN, NUM_STEPS = 16, 8
OWN = ["train.objective=dpo", "dpo.beta=0.5", f"train.steps={NUM_STEPS}", f"data.seq_len={SEQ_LEN}"]
ASSISTANT = {"role": "assistant"}
WITH = {"adapters": ["lora.rank=4", "lora.alpha=8"], "a second model": ["lora.rank=0", "lora.alpha=16"]}


class Pairs(Source):
    """Pairs of answers of different lengths to one prompt; row 2i is the chosen answer of sample i."""

    seq_len, vocab_size, checks_ids, rows_per_sample = SEQ_LEN, 263, True, 2

    def __len__(self) -> int:
        return 10

    def batch(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        tokens = np.zeros((2 * len(indices), SEQ_LEN), np.int64)
        targets = np.full_like(tokens, IGNORE)
        for row, index in enumerate(np.repeat(indices, 2)):
            if index < 0:
                continue
            draw = np.random.default_rng([index])
            prompt = draw.integers(0, 263, 1 + index % 5)
            answer = np.random.default_rng([index, row % 2]).integers(0, 263, 2 + (3 * index + row % 2) % 7)
            text = np.concatenate([prompt, answer])
            tokens[row, : len(text) - 1] = text[:-1]
            targets[row, len(prompt) - 1 : len(text) - 1] = answer
        return {"tokens": tokens, "targets": targets}

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(len(self), 1, 0, "pairs")


class OnPairs(PreferenceTrainer):
    def build_loader(self) -> Iterable[Batch]:
        return TrainLoader.from_config(Pairs(), self.config, self.world.rank, self.world.size, self.world.device)

    def build_eval_loader(self) -> Iterable[Batch] | None:
        return (
            EvalLoader.from_config(Pairs(), self.config, self.world.rank, self.world.size)
            if self.config.eval.every
            else None
        )


def train(base: str, folder: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train to the end, and return the lines of metrics; on every rank."""
    trainer = OnPairs(config_of(base, Path(folder), *merged(OWN, overrides)))
    try:
        assert trainer.fit() == 0
    finally:
        trainer.close()
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def train_each(base: str, runs: list[tuple[str, list[str]]]) -> list[list[dict[str, Any]]]:
    return [train(base, folder, overrides) for folder, overrides in runs]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("dpo") / "base")


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counts = targets != IGNORE
    index = targets.where(counts, torch.zeros(()).long()).unsqueeze(-1)
    return (logits.log_softmax(-1).gather(-1, index).squeeze(-1) * counts).sum(-1)


def plain_loop(base: Path, kind: str) -> list[dict[str, float]]:
    """Train by the formula in one process on full batches; adapters are added to the weights that they change."""
    config = config_of(base, Path("unused"), *OWN, *WITH[kind])
    trainer = OnPairs(replace(config, run=replace(config.run, dir="/nonexistent")))
    batches, lrs = iter(trainer.loader), [trainer.schedule.lr(step) for step in range(1, NUM_STEPS + 1)]
    adapters = {
        name: local(p.detach()).clone().requires_grad_()
        for name, p in trainer.model.named_parameters()
        if p.requires_grad
    }
    per_step = trainer.num_micro_batches
    trainer.close()
    model = load_weights(base)
    own = {name: weight.clone().requires_grad_() for name, weight in model.named_parameters()}
    parameters = list(adapters.values()) if kind == "adapters" else list(own.values())

    def weights() -> dict[str, torch.Tensor]:
        if kind != "adapters":
            return own
        layers = {part[0] for name in adapters if (part := parse_adapter(name))}
        changed = {
            f"{layer}.weight": own[f"{layer}.weight"].detach()
            + 2.0 * adapters[f"{layer}.lora_B.default.weight"] @ adapters[f"{layer}.lora_A.default.weight"]
            for layer in layers
        }
        return {name: weight.detach() for name, weight in own.items()} | changed

    matrices = [p for p in parameters if p.ndim == 2 and p is not own["tok_embeddings.weight"]]
    rest = [p for p in parameters if all(p is not m for m in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, *([{"params": rest, "weight_decay": 0.0}] if rest else [])]
    optimizer = torch.optim.AdamW(groups, betas=config.optim.betas, eps=config.optim.eps)
    lines = []
    for lr in lrs:
        micro = [next(batches) for _ in range(per_step)]
        tokens, targets = (torch.cat([batch[name] for batch in micro]) for name in ("tokens", "targets"))
        found = log_probabilities(functional_call(model, weights(), (tokens,)), targets)
        expected = log_probabilities(model(tokens), targets)
        rewards = 0.5 * (found - expected)
        chosen, rejected = rewards[0::2], rewards[1::2]
        loss = -F.logsigmoid(chosen - rejected).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        accuracy = (chosen > rejected).float().mean()
        lines.append(
            {"loss": loss.item(), "grad_norm": float(norm), "accuracy": float(accuracy)}
            | {"margin": float((chosen - rejected).mean()), "reward_chosen": float(chosen.mean())}
        )
    return lines


def assert_close(lines: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    steps = [line for line in lines if line["kind"] == "train"]
    for field in expected[0]:
        found, wanted = [line[field] for line in steps], [line[field] for line in expected]
        torch.testing.assert_close(found, wanted, rtol=1e-6 if field == "loss" else 2e-5, atol=2e-6, msg=field)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", pytest.param("a second model", marks=pytest.mark.campaign)])
def test_loss_follows_the_formula_on_any_mesh_and_resumes_bit_for_bit(kind: str, base: Path, tmp_path: Path) -> None:
    expected = plain_loop(base, kind)
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"], "it learns"
    assert expected[0]["loss"] == pytest.approx(float(np.log(2)))
    saves = ["checkpoint.every=4", "checkpoint.keep_last=0", *WITH[kind]]
    assert_close(train(str(base), str(tmp_path / "one"), saves), expected)
    (two,) = run_ranks(2, train_each, str(base), [(str(tmp_path / "two"), saves)])[0]
    assert_close(two, expected)
    copy = tmp_path / "again"
    shutil.copytree(tmp_path / "two", copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000008")
    (again,) = run_ranks(2, train_each, str(base), [(str(copy), saves)])[0]
    fields = ("step", "loss", "grad_norm", "margin", "accuracy")
    straight, resumed = (
        [[line[field] for field in fields] for line in lines if line["kind"] == "train"] for lines in (two, again)
    )
    assert resumed == straight
    assert [line["resumed_step"] for line in again if line["kind"] == "start"] == [None, 4]


@pytest.mark.slow
def test_evaluation_of_pairs(base: Path, tmp_path: Path) -> None:
    """Padding of the last batch does not count, and the memory of the reference pass is freed."""
    evaluates = ["eval.every=8", "eval.steps=0", "train.global_batch_size=4", *WITH["a second model"]]
    lines = train(str(base), str(tmp_path / "run"), evaluates)
    (line,) = [line for line in lines if line["kind"] == "eval"]
    trained = load_weights(tmp_path / "run")
    batch = {name: torch.from_numpy(rows) for name, rows in Pairs().batch(np.arange(10)).items()}
    found, expected = (log_probabilities(m(batch["tokens"]), batch["targets"]) for m in (trained, load_weights(base)))
    rewards = 0.5 * (found - expected)
    margins = rewards[0::2] - rewards[1::2]
    assert line["loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-5)
    assert line["margin"] == pytest.approx(float(margins.mean()), rel=1e-5)
    assert line["accuracy"] == pytest.approx(float((margins > 0).float().mean()))


@pytest.mark.slow
def test_plan_and_start_block_include_the_reference(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(str(base), str(tmp_path / "run"), [*WITH["a second model"], "train.steps=1"])
    said = capsys.readouterr().out
    assert "per rank for weights, a reference, gradients and optimizer" in said
    machine, shape = find_machine("h100", None, 1), MeshShape(1, 1)
    config = config_of(base, tmp_path / "plan", *OWN, *WITH["a second model"])
    plan = make_plan(config, shape, machine)
    alone = make_plan(config_of(base, tmp_path / "plan", *OWN[2:], *WITH["a second model"]), shape, machine)
    weights = 4 * plan.num_parameters
    assert plan.memory.peak.by_kind["parameters"] == 2 * weights == 2 * alone.memory.peak.by_kind["parameters"]
    assert plan.tokens == 2 * alone.tokens, "of a pair both"
    assert plan.flops == pytest.approx(2 * 4 / 3 * alone.flops)
    adapted = make_plan(config_of(base, tmp_path / "plan", *OWN, *WITH["adapters"]), shape, machine)
    assert adapted.memory.peak.by_kind["parameters"] < 1.2 * weights


@pytest.mark.slow
def test_different_reference_is_rejected(base: Path, tmp_path: Path) -> None:
    saves = [*WITH["a second model"], "train.steps=1"]
    train(str(base), str(tmp_path / "run"), saves)
    other = folder_of(tmp_path / "other", config=replace(SOURCE, init_std=0.06))
    edit(other, initializer_range=0.05)
    with pytest.raises(
        UserError, match=re.escape(f"train.init_from={other}: is not the base model that the run was trained with")
    ):
        train(str(other), str(tmp_path / "run"), [*saves[:-1], "train.steps=2", "model.init_std=0.05"])


@pytest.mark.slow
def test_one_command_trains_a_model_folder_on_a_file_of_pairs(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")
    model = replace(SOURCE, vocab_size=128)
    folder = write_tokenizer(folder_of(tmp_path / "model", config=model), CHATML, eos_token="<|im_end|>")
    pairs = tmp_path / "pairs.jsonl"
    lines = [
        {
            "prompt": conversation(asked),
            "chosen": [ASSISTANT | {"content": a}],
            "rejected": [ASSISTANT | {"content": b}],
        }
        for asked, a, b in (("Hi", "Yes", "No"), ("Bye", "No", "Yes"), ("two and two", "four", "two"))
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines * 4))
    settings = ["recipe=dpo", f"model.path={folder}", f"data.path={pairs}", f"data.cache_dir={tmp_path / 'cache'}"]
    quick = ["data.seq_len=64", "train.epochs=6", "train.global_batch_size=4", "optim.lr=1e-2", "run.threads=1"]
    ran = run_command(tmp_path / "run", *settings, *quick, "lora.rank=4")
    assert ran.exit_code == 0, ran.stderr
    for kind in ("start", "train"):
        check_fields(ran, kind)
    assert ran.train("accuracy")[-1] == 1.0 > ran.train("accuracy")[0]
    assert ran.train("loss")[-1] < 0.5 * ran.train("loss")[0] == pytest.approx(0.5 * float(np.log(2)))
    lines_of_steps = [line for line in ran.stdout.splitlines() if line.startswith("step ")]
    for name in ("accuracy", "margin", "reward_chosen", "reward_rejected"):
        assert all(f"  {name} " in line for line in lines_of_steps)
    evaluated = run_python_module("trainer.evaluate", tmp_path / "run", f"data.eval_path={pairs}", "--json")
    assert evaluated.exit_code == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["accuracy"] == 1.0
    wrong = run_command(tmp_path / "other", *settings, *quick, "train.objective=tokens")
    assert wrong.exit_code == 2
    assert "rejected responses would be trained on" in wrong.stderr


def test_only_the_preference_trainer_accepts_pairs(base: Path, tmp_path: Path) -> None:
    config = config_of(base, tmp_path / "run", *OWN, *WITH["adapters"])
    assert config.trainer_class(Trainer) is PreferenceTrainer
    with pytest.raises(
        UserError, match=r"^train\.objective=dpo: must be trained by ObjectiveTrainer, but this is Trainer"
    ):
        Trainer(config)
    with pytest.raises(UserError, match=r"^train\.objective=tokens: ObjectiveTrainer trains for objectives other"):
        PreferenceTrainer(config_of(base, tmp_path / "run", *WITH["adapters"]))
