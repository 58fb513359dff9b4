"""A step never waits for the device, and one that is not finite changes nothing."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tiny import fit, lines, tiny_config
from trainer import Trainer
from trainer.config.schema import OptimSection
from trainer.data.loader import Batch
from trainer.errors import TrainingFailed
from trainer.optim.optimizer import build_optimizer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]

# ---------------------------------------------------------------------------------------------------------------
# Waiting


class Reads(TorchDispatchMode):
    """Records operations that make the host wait for a device: reading a tensor's value."""

    OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.OPERATORS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


STEPS = {
    "plain": [],
    "four micro-batches": ["train.micro_batch_size=1"],
    "four micro-batches, reduced one by one": ["train.micro_batch_size=1", "fsdp.accumulate=sharded"],
    "recomputed": ["train.activation_checkpoint=full"],
    "no clipping": ["optim.max_grad_norm=null"],
    "averaged weights": ["train.ema=0.9"],
    "bfloat16 weights and states": ["train.weights_dtype=bfloat16", "optim.state_dtype=bfloat16"],
    "bfloat16 states, to the nearest": ["optim.state_dtype=bfloat16", "optim.rounding=nearest"],
}
"""Ways to do a step in which the host has nothing to wait for. `fsdp.cpu_offload` is none of them: there the host does
the step, and first needs the gradients and whether they are finite."""


@pytest.mark.parametrize("name", list(STEPS))
def test_host_reads_nothing_within_a_step(name: str, tmp_path: Path) -> None:
    """Except the numbers of targets of each micro-batch, for the loss and for `tokens`: the batch is on the host."""
    trainer = Trainer(tiny_config(tmp_path, *STEPS[name]))
    batches = iter(trainer.loader)
    trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
    with Reads() as reads:
        float(torch.ones(()))
    assert len(reads.found) == 1, "it would see it"
    with Reads() as reads:
        update = trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
    assert len(reads.found) <= 2 * trainer.num_micro_batches
    assert 3 < update.loss < 4
    trainer.close()


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [*STEPS, "muon"])
def test_the_host_does_not_wait_for_a_gpu(name: str, compiled: bool, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "run.device=auto", f"train.compile={str(compiled).lower()}", *STEPS[name]))
    batches = iter(trainer.loader)
    for _ in range(3):
        trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
    micro_batches = list(itertools.islice(batches, trainer.num_micro_batches))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update = trainer.train_step(micro_batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(update.loss)
    trainer.close()


def test_a_record_has_plain_numbers_also_between_written_lines(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "train.steps=3", "log.every=3"))
    losses = [record.loss for record in trainer.steps()]
    trainer.close()
    assert [type(loss) for loss in losses] == [float] * 3
    assert [line["loss"] for line in lines(tmp_path) if line["kind"] == "train"] == [losses[0], losses[2]]


# ---------------------------------------------------------------------------------------------------------------
# Steps that are not finite


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_non_finite_step_changes_nothing(name: str, device: str) -> None:
    """Neither weights nor optimizer state: the next step is unaffected."""
    found = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False)).to(device)
        optimizer = build_optimizer(model, OptimSection(name=name, lr=0.1))  # type: ignore[arg-type]
        for number in range(6):
            values = torch.randn(4, 4, device=device, generator=torch.Generator(device).manual_seed(number))
            optimizer.zero_grad()
            if disturbed and number in (0, 3):  # the very first too
                model(values * math.nan).sum().backward()
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.step(is_finite=torch.tensor(False, device=device))
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                optimizer.zero_grad()
            model(values).square().sum().backward()
            optimizer.step(is_finite=torch.tensor(True, device=device))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class NotFinite(Trainer):
    """Its third and fourth steps are not finite."""

    def loss(self, batch: Batch) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step in (2, 3) else 1.0)


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    """In every record, whether it is written or not, and over the steps between two lines."""
    trainer = NotFinite(tiny_config(tmp_path, "train.steps=6", "log.every=4"))
    assert [record.skipped for record in trainer.steps()] == [0, 0, 1, 2, 2, 2]
    trainer.close()
    found = [
        (line["step"], line["loss"] is None, line["skipped"]) for line in lines(tmp_path) if line["kind"] == "train"
    ]
    assert found == [(1, False, 0), (4, True, 2), (6, False, 2)]


def test_a_step_that_is_not_finite_trains_like_none(tmp_path: Path) -> None:
    """The weights after it are those before it, to the bit."""
    own = ["optim.lr=0.1", "schedule.name=constant", "schedule.warmup_steps=0"]
    trainer = NotFinite(tiny_config(tmp_path, "train.steps=5", *own))
    weights = []
    for _ in trainer.steps():
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    trainer.close()
    for step, changes in ((1, True), (2, False), (3, False), (4, True)):
        changed = not all(map(torch.equal, weights[step], weights[step - 1]))
        assert changed == changes, f"step {step + 1}"


def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"step 4: "):
        fit(tmp_path, "train.steps=6", "log.every=6", "train.max_skipped_updates=2", kind=NotFinite)
    assert [line["reason"] for line in lines(tmp_path) if line["kind"] == "end"] == ["failed"]
