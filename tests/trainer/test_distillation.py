"""Distillation: the divergence from a sharded teacher follows the formula, on any mesh, and its memory is planned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trainer.objectives.distill import Distill

from tests.helpers.native_models import SOURCE, folder_of
from tests.helpers.plan_truth import StorageMeter
from tests.helpers.ranks import merged, run_ranks
from tests.model.test_lora import config_of
from trainer import Trainer, UserError, load_weights, teach
from trainer.config import MeshShape
from trainer.config.teacher import teacher_config
from trainer.distillation import DistillationTrainer, write_top_logps
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan
from trainer.weights.adapters import BaseWeights

NUM_STEPS, SEQ_LEN = 4, 32
CASES = {
    "forward": {"beta": 0.0, "temperature": 2.0, "hard": 0.0},
    "mixture": {"beta": 0.3, "temperature": 1.0, "hard": 0.25},
    "reverse": {"beta": 1.0, "temperature": 1.0, "hard": 0.0},
}
MESHES = {
    "two": (2, ["train.micro_batch_size=2"]),
    "context 2": (2, ["mesh.context=2", "train.micro_batch_size=2"]),
    "one": (1, ["train.micro_batch_size=1"]),
    "micro-batch 4": (1, ["train.micro_batch_size=4"]),
    "2 x 2": (4, ["mesh.replicate=2", "mesh.shard=2"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a student, and of a teacher that is twice as wide."""
    folder = tmp_path_factory.mktemp("distill")
    wide = replace(SOURCE, dim=2 * SOURCE.dim, ffn_dim=2 * SOURCE.ffn_dim, init_std=0.3)
    return folder_of(folder / "student"), folder_of(folder / "teacher", config=wide)


def settings_of(case: str, teacher: str) -> list[str]:
    fields = [f"objective.{key}={value}" for key, value in CASES[case].items()]
    lengths = [f"train.steps={NUM_STEPS}", f"data.seq_len={SEQ_LEN}", "train.global_batch_size=4"]
    plain = [
        "optim.name=sgd",
        "optim.lr=0.3",
        "optim.momentum=0",
        "optim.weight_decay=0",
        "lora.rank=0",
        "lora.alpha=16",
    ]
    return ["train.objective=distill", f"objective.teacher={teacher}", *fields, *lengths, *plain]


def train_each(base: str, runs: list[tuple[str, list[str]]]) -> list[list[dict[str, Any]]]:
    found = []
    for folder, overrides in runs:
        trainer = DistillationTrainer(config_of(base, Path(folder), *overrides))
        try:
            assert trainer.fit() == 0
        finally:
            trainer.close()
        found.append([json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()])
    return found


def divergence(case: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the divergence of each token by torch's own, from whole logits: (B, T)."""
    beta, temperature = CASES[case]["beta"], CASES[case]["temperature"]
    own, other = ((logits / temperature).softmax(-1) for logits in (student, teacher))
    mixture = (1 - beta) * own + beta * other
    to_teacher, to_student = (F.kl_div(mixture.log(), p, reduction="none").sum(-1) for p in (other, own))
    if beta in (0, 1):
        return to_teacher if beta == 0 else F.kl_div(other.log(), own, reduction="none").sum(-1)
    return beta * to_teacher + (1 - beta) * to_student


def plain_loop(student: Path, teacher: Path, case: str) -> list[tuple[float, float]]:
    """Train in one process on full batches and whole logits; return loss and divergence of each step."""
    config = config_of(student, Path("unused"), *settings_of(case, str(teacher)))
    trainer = DistillationTrainer(replace(config, run=replace(config.run, dir="/nonexistent")))
    batches, lrs = iter(trainer.loader), [trainer.schedule.lr(step) for step in range(1, NUM_STEPS + 1)]
    per_step = trainer.num_micro_batches
    trainer.close()
    model, fixed = load_weights(student).requires_grad_(), load_weights(teacher)
    optimizer, lines = torch.optim.SGD(model.parameters()), []
    for lr in lrs:
        micro = [next(batches) for _ in range(per_step)]
        tokens, targets = (torch.cat([batch[name] for batch in micro]) for name in ("tokens", "targets"))
        logits = model(tokens)
        distance = divergence(case, logits, fixed(tokens))[targets != -100].mean()
        hard = CASES[case]["hard"]
        loss = (1 - hard) * distance + hard * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        lines.append((loss.item(), distance.item()))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["two", *(pytest.param(mesh, marks=pytest.mark.campaign) for mesh in MESHES if mesh != "two")]
)
def test_distillation_follows_the_formula_on_any_mesh(mesh: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = models
    num_ranks, overrides = MESHES[mesh]
    runs = [(str(tmp_path / case), merged(settings_of(case, str(teacher)), overrides)) for case in CASES]
    for case, lines in zip(CASES, run_ranks(num_ranks, train_each, str(student), runs)[0], strict=True):
        found = [(line["loss"], line["divergence"]) for line in lines if line["kind"] == "train"]
        expected = plain_loop(student, teacher, case)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=f"{case}: {found} {expected}")


def test_divergences_of_logits_follow_torch() -> None:
    student, teacher = torch.randn(2, 5, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for case, fields in CASES.items():
        found = Distill(teacher="unused", **fields).divergence(student.log_softmax(-1), teacher.log_softmax(-1))
        torch.testing.assert_close(found, divergence(case, student, teacher), rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_plan_includes_the_teacher(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = models
    settings = settings_of("forward", str(teacher))
    config = config_of(student, tmp_path, *settings)
    alone = config_of(student, tmp_path, *(s for s in settings if "objective" not in s))
    machine, shape = find_machine("h100", None, 1), MeshShape(1, 2)
    plan, without = make_plan(config, shape, machine), make_plan(alone, shape, machine)
    weights = list(load_weights(teacher).parameters())
    shards, output = sum(p.numel() for p in weights) * 4 // 2, SOURCE.vocab_size * 2 * SOURCE.dim * 4
    added = plan.memory.peak.by_kind["parameters"] - without.memory.peak.by_kind["parameters"]
    assert added == shards + output
    found = teacher_config(config)
    assert found is not None
    assert plan.flops > without.flops + 2 * sum(p.numel() for p in weights[1:] if p.ndim == 2) * 4 * SEQ_LEN
    assert plan.time.compute_s > without.time.compute_s
    # A token of a short document attends to few tokens, in the teacher too.
    (tmp_path / "short.jsonl").write_text('{"text": "a few words"}\n' * 100)
    packed = ["data.source=tokens", f"data.path={tmp_path / 'short.jsonl'}", "data.documents=masked"]
    masked = make_plan(config_of(student, tmp_path, *settings, *packed), shape, machine)
    assert masked.layout.teacher is not None
    assert plan.layout.teacher is not None
    assert masked.probe.attended_length < SEQ_LEN
    assert masked.layout.teacher.flops < plan.layout.teacher.flops


@pytest.mark.slow
def test_wrong_teachers_are_reported(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, _ = models
    other = folder_of(tmp_path / "other", config=replace(SOURCE, vocab_size=300))
    for path, message in (
        (str(other), f"objective.teacher={other}: has a vocabulary of 300 tokens, but the trained model's has 263"),
        ("", "objective.teacher="),
        ("nowhere", "objective.teacher=nowhere"),
    ):
        config = config_of(student, tmp_path / "run", *settings_of("forward", path or "null"))
        with pytest.raises(UserError, match=re.escape(message)):
            teacher_config(config)
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "unsaved" / "config.yaml").write_text(config_of(student, tmp_path / "unsaved").to_yaml())
    (folder_of(tmp_path / "empty") / "model.safetensors").unlink()
    for name, message in (("unsaved", "has no checkpoints"), ("empty", "has neither model.safetensors nor")):
        config = config_of(student, tmp_path / "run", *settings_of("forward", str(tmp_path / name)))
        with pytest.raises(UserError, match=rf"^objective\.teacher={tmp_path / name}: {message}"):
            DistillationTrainer(config)
    (line,), _ = BaseWeights("new", "1", (), "objective.teacher").changes_from({"path": "old", "checksum": "2"}, ())
    assert line.startswith("objective.teacher=new: is not the model that the run was trained with; that was old")


def peak_of_a_step(kind: type[Trainer], base: Path, folder: Path, overrides: list[str]) -> int:
    """Return the peak of the bytes of all tensors in the forward and backward pass of the second micro-batch."""
    trainer = kind(config_of(base, folder, *overrides))
    try:
        batch = next(iter(trainer.loader))
        trainer.loss(batch).backward()
        trainer.optimizer.zero_grad()
        with StorageMeter() as meter:
            trainer.loss(batch).backward()
        return meter.peak
    finally:
        trainer.close()


@pytest.mark.slow
def test_peak_memory_of_distillation(tmp_path: Path) -> None:
    """At most 1.2 times the peak without, and the shards of the teacher: nobody holds all logits."""
    own = replace(SOURCE, dim=128, num_layers=4, ffn_dim=384, vocab_size=8192)
    student = folder_of(tmp_path / "student", config=own)
    teacher = folder_of(tmp_path / "teacher", config=replace(own, dim=192, ffn_dim=576))
    lengths = ["data.seq_len=512", "train.micro_batch_size=4", "train.global_batch_size=4", "run.threads=1"]
    settings = merged(settings_of("forward", str(teacher)), lengths)
    without = peak_of_a_step(Trainer, student, tmp_path / "without", [s for s in settings if "objective" not in s])
    peak = peak_of_a_step(DistillationTrainer, student, tmp_path / "with", settings)
    of_teacher = sum(p.numel() * p.element_size() for p in load_weights(teacher).parameters())
    print(f"peak {peak}, without {without}, teacher {of_teacher}: {(peak - of_teacher) / without:.3f} of that without")
    assert peak <= 1.2 * without + of_teacher, (peak, without, of_teacher)
    assert 0.2 * without < 4 * 512 * 8192 * 4, "the whole logits of one model would be too much"


def test_arguments_of_the_command_that_writes_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert teach.command_line(["recipe=distill", "--out", "top", "--top", "0"]) == 2
    assert "--top=0: must be at least 1\n  nearest legal value: --top=1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        teach.command_line(["recipe=distill"])
    assert "the following arguments are required: --out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["context 2", pytest.param("two", marks=pytest.mark.campaign)])
def test_distillation_from_files(mesh: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """With all tokens in the files the losses are those of the teacher itself; with some, a lower bound."""
    student, teacher = models
    num_ranks, overrides = MESHES[mesh]
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} squared is {number**2}. " for number in range(60)))
    data = ["data.source=tokens", f"data.path={text}", "data.tokenizer=bytes", f"data.cache_dir={tmp_path / 'cache'}"]
    mixture = [*settings_of("mixture", str(teacher)), *data]
    for num_top in (SOURCE.vocab_size, 8):
        config = config_of(student, tmp_path / "unused", *mixture, "train.micro_batch_size=4")
        num_samples = write_top_logps(config, tmp_path / f"top{num_top}", num_top)
        assert num_samples == np.load(tmp_path / f"top{num_top}" / "ids.npy").shape[0] > 20
    with pytest.raises(UserError, match=r"--top=264: .*\n  nearest legal value: --top=263"):
        write_top_logps(config, tmp_path / "all and more", 264)
    places = {"teacher": str(teacher), "all": str(tmp_path / "top263"), "top 8": str(tmp_path / "top8")}
    runs = [
        (str(tmp_path / name), merged([*settings_of("mixture", place), *data], overrides))
        for name, place in places.items()
    ]
    of_teacher, of_all, of_top = (
        [(line["loss"], line["divergence"]) for line in lines if line["kind"] == "train"]
        for lines in run_ranks(num_ranks, train_each, str(student), runs)[0]
    )
    torch.testing.assert_close(of_all, of_teacher, rtol=2e-6, atol=1e-7)
    assert 0.2 * of_teacher[0][1] < of_top[0][1] < of_teacher[0][1]
    other = config_of(student, tmp_path / "other", *settings_of("mixture", places["all"]), *data, "data.seq_len=16")
    with pytest.raises(UserError, match="was written for other samples"):
        DistillationTrainer(other)
    for changed in ("objective.temperature=2", "eval.every=2"):
        config = config_of(student, tmp_path / "other", *settings_of("mixture", places["all"]), changed)
        with pytest.raises(UserError, match="needs the teacher, but objective.teacher=.* holds only its log-prob"):  # noqa: RUF043
            teacher_config(config)
