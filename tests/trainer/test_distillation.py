"""Distillation: the divergence from a teacher follows the formula, and the teacher's memory is planned and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="student and teacher are models of transformers")

from tests.helpers import hf_models
from tests.helpers.objectives import PLAIN_SGD, SEQ_LEN, VOCAB, config_of, global_batches, trainer_on
from tests.helpers.plan_truth import StorageMeter
from tests.helpers.tiny import lines
from trainer import RunConfig, Trainer, UserError, load_weights
from trainer.config.parallel import MeshShape
from trainer.data.source import IGNORE
from trainer.objective import TokenObjective, find_objective
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

CASES = {
    "forward": {"beta": 0.0, "temperature": 2.0, "hard": 0.0},
    "mixture": {"beta": 0.3, "temperature": 1.0, "hard": 0.25},
    "reverse": {"beta": 1.0, "temperature": 1.0, "hard": 0.0},
}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.folder_of(tmp_path_factory.mktemp("distill") / "student", "llama")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is twice as wide."""
    folder = tmp_path_factory.mktemp("distill") / "teacher"
    return hf_models.folder_of(folder, "llama", hidden_size=96, intermediate_size=192)


def distilling(student: Path, folder: Path, case: str, teacher: Path | str, *more: str) -> RunConfig:
    fields = [f"objective.{key}={value}" for key, value in CASES[case].items()]
    own = ["train.objective=distill", f"objective.teacher={teacher}", *fields, *PLAIN_SGD, "lora.rank=0"]
    return config_of(student, folder, *own, *more)


def divergence(case: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the divergence of each token by torch's own, from whole logits: (B, T)."""
    beta, temperature = CASES[case]["beta"], CASES[case]["temperature"]
    own, other = ((logits / temperature).softmax(-1) for logits in (student, teacher))
    if beta in (0, 1):
        first, second = (own, other) if beta == 0 else (other, own)
        return F.kl_div(first.log(), second, reduction="none").sum(-1)
    mixture = (1 - beta) * own + beta * other
    to_teacher, to_student = (F.kl_div(mixture.log(), p, reduction="none").sum(-1) for p in (other, own))
    return beta * to_teacher + (1 - beta) * to_student


@pytest.mark.parametrize("case", list(CASES))
def test_divergences_of_logits_follow_torch(case: str) -> None:
    student, teacher = torch.randn(2, 5, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    objective = find_objective("distill")(teacher="unused", **CASES[case])
    assert isinstance(objective, TokenObjective)
    found = objective.divergence(student.log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(found, divergence(case, student, teacher), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("case", list(CASES))
def test_distillation_follows_the_formula(case: str, student: Path, teacher: Path, tmp_path: Path) -> None:
    """Like a plain loop on full batches and whole logits."""
    trainer = trainer_on(None, distilling(student, tmp_path / "run", case, teacher))
    batches = global_batches(trainer)
    trainer.close()
    model, fixed = load_weights(student).requires_grad_(), load_weights(teacher)
    optimizer, expected, hard = torch.optim.SGD(model.parameters()), [], CASES[case]["hard"]
    for lr, batch in batches:
        logits, targets = model(batch["tokens"]), batch["targets"]
        distance = divergence(case, logits, fixed(batch["tokens"]))[targets != IGNORE].mean()
        loss = (1 - hard) * distance + hard * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), distance.item()))
    trainer = trainer_on(None, distilling(student, tmp_path / "run", case, teacher))
    assert trainer.fit() == 0
    trainer.close()
    found = [(line["loss"], line["divergence"]) for line in lines(tmp_path / "run") if line["kind"] == "train"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_plan_includes_the_teacher(student: Path, teacher: Path, tmp_path: Path) -> None:
    config, alone = distilling(student, tmp_path, "forward", teacher), config_of(student, tmp_path, "lora.rank=0")
    machine, shape = find_machine("h100", None, 1), MeshShape(1, 2)
    plan, without = make_plan(config, shape, machine), make_plan(alone, shape, machine)
    weights = list(load_weights(teacher).parameters())
    shards, output = sum(p.numel() for p in weights) * 4 // 2, VOCAB * 96 * 4
    added = plan.memory.peak.by_kind["parameters"] - without.memory.peak.by_kind["parameters"]
    assert added == shards + output
    assert plan.flops > without.flops + 2 * sum(p.numel() for p in weights[1:] if p.ndim == 2) * 4 * SEQ_LEN
    assert plan.time.compute_s > without.time.compute_s


def test_wrong_teachers_are_reported(student: Path, tmp_path: Path) -> None:
    other = hf_models.folder_of(tmp_path / "other", "llama", vocab_size=300)
    empty = hf_models.folder_of(tmp_path / "empty", "llama")
    (empty / "model.safetensors").unlink()
    for path in (other, empty, tmp_path / "nowhere"):
        config = distilling(student, tmp_path / "run", "forward", path)
        with pytest.raises(UserError, match=rf"^objective\.teacher={path}: "):
            trainer_on(None, config)
    with pytest.raises(UserError, match=r"^objective\.teacher="):
        trainer_on(None, distilling(student, tmp_path / "run", "forward", "null"))


def peak_of_a_step(config: RunConfig) -> int:
    """Return the peak of the bytes of all tensors in the forward and backward pass of the second micro-batch."""
    trainer = config.trainer_class(Trainer)(config)
    try:
        batch = next(iter(trainer.loader))
        trainer.loss(batch).backward()
        trainer.optimizer.zero_grad()
        with StorageMeter() as meter:
            trainer.loss(batch).backward()
        return meter.peak
    finally:
        trainer.close()


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else [result]
        self.elements = max([self.elements, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        return result


def test_no_model_computes_all_logits_at_once(tmp_path: Path) -> None:
    vocab, rows = 16384, 4 * 128
    student = hf_models.folder_of(tmp_path / "student", "llama", vocab_size=vocab, num_hidden_layers=1)
    config = distilling(student, tmp_path / "run", "forward", student, "data.seq_len=128", "train.micro_batch_size=4")
    trainer = trainer_on(None, config)
    batch = next(iter(trainer.loader))
    with Largest() as largest:
        trainer.loss(batch).backward()
    trainer.close()
    assert batch["tokens"].numel() == rows
    assert 0 < largest.elements <= rows * vocab / 2


@pytest.mark.campaign
def test_peak_memory_of_distillation(tmp_path: Path) -> None:
    """At most 1.2 times the peak without, and the shards of the teacher: nobody holds all logits."""
    sizes = {"vocab_size": 8192, "num_hidden_layers": 4, "max_position_embeddings": 512}
    student = hf_models.folder_of(tmp_path / "student", "llama", hidden_size=128, intermediate_size=384, **sizes)
    teacher = hf_models.folder_of(tmp_path / "teacher", "llama", hidden_size=192, intermediate_size=576, **sizes)
    lengths = ["data.seq_len=512", "train.micro_batch_size=4", "lora.rank=0"]
    without = peak_of_a_step(config_of(student, tmp_path / "without", *lengths))
    peak = peak_of_a_step(distilling(student, tmp_path / "with", "forward", teacher, *lengths))
    of_teacher = sum(p.numel() * p.element_size() for p in load_weights(teacher).parameters())
    assert peak <= 1.2 * without + of_teacher, (peak, without, of_teacher)
    assert 0.2 * without < 4 * 512 * 8192 * 4, "the whole logits of one model would be too much"
