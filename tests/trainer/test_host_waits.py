"""A step never waits for the device: non-finite steps are skipped there, and results are read one step later."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.ranks import merged, tiny_overrides
from tests.trainer.test_custom_loops import lines, of
from trainer import Trainer, load_config
from trainer.config import OptimSection
from trainer.data.loader import Batch
from trainer.data.transfer import HostScalars, prefetch_to_device
from trainer.errors import TrainingFailed
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import Update
from trainer.optim.optimizer import build_optimizer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


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


def make(folder: Path, *overrides: str, kind: type[Trainer] = Trainer) -> Trainer:
    own = ["model.num_kv_heads=2", "model.dim=16", "model.vocab_size=32", "data.source=synthetic", "run.threads=1"]
    own += ["data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=2", "eval.every=0"]
    return kind(load_config("llama_small", tiny_overrides(*merged(own, overrides), f"run.dir={folder}")))


STEPS = {
    "plain": [],
    "four micro-batches": ["train.micro_batch_size=1"],
    "four micro-batches, reduced one by one": ["train.micro_batch_size=1", "fsdp.accumulate=sharded"],
    "parameters kept in between": ["fsdp.reshard_after_backward=false"],
    "recomputed": ["train.activation_checkpoint=full"],
    "no clipping": ["optim.max_grad_norm=null"],
    "bfloat16 weights and states": ["train.weights_dtype=bfloat16", "optim.state_dtype=bfloat16"],
    "bfloat16 states, to the nearest": ["optim.state_dtype=bfloat16", "optim.rounding=nearest"],
}
"""Ways to do a step in which the host has nothing to wait for.  `fsdp.cpu_offload` is none of them: there the host
does the step, and first needs the gradients and whether they are finite."""


@pytest.mark.parametrize("overrides", STEPS.values(), ids=STEPS)
def test_host_reads_nothing_within_a_step(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, *overrides)
    # Targets are counted on the host, where the batch is, and the message goes from host to host.
    monkeypatch.setattr("trainer.trainer.count_targets", lambda targets: targets.numel())
    monkeypatch.setattr(trainer.step_sync, "all_reduce", lambda *amounts: list(amounts))
    batches = iter(trainer.loader)
    trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
    with Reads() as reads:
        float(torch.ones(()))
    assert len(reads.found) == 1, "it would see it"
    with Reads() as reads:
        update = trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
    assert reads.found == []
    assert 3 < update.loss < 4
    trainer.close()


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("overrides", STEPS.values(), ids=STEPS)
def test_the_host_does_not_wait_for_a_gpu(overrides: list[str], compiled: bool, tmp_path: Path) -> None:
    trainer = make(tmp_path, f"train.compile={str(compiled).lower()}", *overrides)
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

    saves_at = -1

    def on_step(self, record: Record) -> None:
        if record.step == self.saves_at:
            self.save_checkpoint(wait=True)

    def loss(self, batch: Batch) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step in (2, 3) else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("reads_late", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_skipped_steps_are_counted(reads_late: bool, tmp_path: Path) -> None:
    """As on a GPU, where they are read one step later: all are counted, whatever is saved or logged meanwhile."""
    config = load_config(
        "llama_small",
        tiny_overrides(
            "train.steps=6", "log.every=4", "checkpoint.every=3", "checkpoint.keep_last=0", f"run.dir={tmp_path}"
        ),
    )
    trainer = NotFinite(config)
    trainer.saves_at = 3
    trainer.step_metrics.reads_late = reads_late
    assert trainer.fit() == 0
    assert (trainer.skips.total, trainer.skips.in_a_row) == (2, 0)
    trainer.load_checkpoint(tmp_path / "checkpoints" / "step_00000003")
    assert (trainer.skips.total, trainer.skips.in_a_row) == (1, 1), "the step that was pending when it was saved"
    trainer.close()
    found = lines(tmp_path)
    assert of("train", found, "step") == [1, 4, 6]
    assert [loss is None for loss in of("train", found, "loss")] == [False, True, False]
    assert of("train", found, "skipped") == [0, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("reads_late", [False, True])
def test_each_record_counts_its_own_step(reads_late: bool, tmp_path: Path) -> None:
    overrides = tiny_overrides("train.steps=6", "log.every=6", f"run.dir={tmp_path}")
    trainer = NotFinite(load_config("llama_small", overrides))
    trainer.step_metrics.reads_late = reads_late
    assert [record.skipped for record in itertools.islice(trainer.steps(), 4)] == [0, 0, 1, 2]
    trainer.close()
    assert trainer.skips.total == 2, "the last one too, of a loop that was left"


class FailsAfterSkipping(NotFinite):
    def on_step(self, record: Record) -> None:
        if record.step == 4:
            raise ArithmeticError("as if")


@pytest.mark.slow
def test_closing_a_failed_run_reads_nothing(tmp_path: Path) -> None:
    overrides = ["train.steps=6", "log.every=6", "train.max_skipped_updates=2", f"run.dir={tmp_path}"]
    trainer = FailsAfterSkipping(load_config("llama_small", tiny_overrides(*overrides)))
    trainer.step_metrics.reads_late = True
    with pytest.raises(ArithmeticError):
        trainer.fit()
    assert trainer.step_metrics.pending is not None, "a step too many, that nobody has looked at"
    trainer.close()
    assert [line["reason"] for line in lines(tmp_path) if line["kind"] == "end"] == ["failed"]


@pytest.mark.slow
@pytest.mark.parametrize("reads_late", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_too_many_skipped_steps_end_the_run(reads_late: bool, tmp_path: Path) -> None:
    overrides = ["train.steps=6", "log.every=6", "train.max_skipped_updates=2", f"run.dir={tmp_path}"]
    trainer = NotFinite(load_config("llama_small", tiny_overrides(*overrides)))
    trainer.step_metrics.reads_late = reads_late
    with pytest.raises(TrainingFailed, match=r"step 4: .* not finite in 2 steps in a row"):
        trainer.fit()
    assert trainer.state.step == (5 if reads_late else 4)
    trainer.close()


class Slow:
    """The arrival of numbers from a device that takes 50 ms for a step."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("reads_losses", [False, True])
def test_device_time_counts_for_its_step(reads_losses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the host waits for it: in rates, goodput, and the comparison with the plan."""
    monkeypatch.setattr("trainer.data.transfer._copy_to_host", lambda values: (values, Slow()))
    trainer = make(tmp_path, "train.steps=9", "log.every=4")
    trainer.step_metrics.reads_late = True
    for record in trainer.steps():
        if reads_losses:
            assert record.loss > 0
    trainer.close()
    assert trainer.step_metrics.productive_s > (0.0 if reads_losses else 8 * 0.05)
    found = lines(tmp_path)
    assert all(step_s > 0.05 for step_s in of("train", found, "step_s"))


@pytest.mark.slow
def test_custom_step_that_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns plain numbers; work after it does not count for the step."""
    device = Device(0.0)
    for module in ("trainer.data.transfer", "trainer.metrics.step_metrics"):
        monkeypatch.setattr(f"{module}.time", device)

    class Waits(Pausing):
        def train_step(self, micro_batches: Any) -> Update:
            self.device.now += 0.25
            return Update(1.0, 2.0, 64)

    trainer = make(tmp_path, "train.steps=6", "log.every=1", kind=Waits)
    assert isinstance(trainer, Waits)
    trainer.device, trainer.step_metrics.reads_late = device, True
    assert trainer.fit() == 0
    assert of("train", lines(tmp_path), "step_s") == pytest.approx([0.25] * 6)


@pytest.mark.slow
def test_loading_an_older_checkpoint_drops_the_pending_step(tmp_path: Path) -> None:
    overrides = tiny_overrides("train.steps=6", "log.every=6", "checkpoint.every=2", f"run.dir={tmp_path}")
    trainer = NotFinite(load_config("llama_small", overrides))
    trainer.step_metrics.reads_late = True
    for record in trainer.steps():
        if record.step == 2:
            trainer.save_checkpoint(wait=True)
        if record.step == 3:  # not finite, and not read yet
            trainer.load_checkpoint(tmp_path / "checkpoints" / "step_00000002")
            break
    assert (trainer.skips.total, trainer.skips.in_a_row, trainer.step_metrics.pending) == (0, 0, None)
    trainer.close()


def test_record_waits_only_for_the_fields_that_are_read(tmp_path: Path) -> None:
    trainer = make(tmp_path, "train.steps=3", "log.every=3")
    losses = [record.loss for record in trainer.steps()]
    trainer.close()
    assert [type(loss) for loss in losses] == [float] * 3
    assert of("train", lines(tmp_path), "loss") == [losses[0], losses[2]]


@pytest.mark.parametrize("device", DEVICES)
def test_batches_and_results_are_transferred(device: str) -> None:
    one = torch.tensor(1.5, device=device)
    assert HostScalars(one, one.double() * 2).read() == [1.5, 3.0]
    assert HostScalars(0.1, 2).read() == [0.1, 2.0]
    assert HostScalars(one.reshape(1), 2).read() == [1.5, 2.0]
    batches = [{"tokens": torch.arange(4) + number} for number in range(5)]
    arrived = [batch["tokens"] * 2 for batch in prefetch_to_device(batches, torch.device(device))]
    assert [tokens.device.type for tokens in arrived] == [device] * 5
    assert [tokens.tolist() for tokens in arrived] == [[2 * (k + n) for k in range(4)] for n in range(5)]
    assert list(prefetch_to_device([], torch.device(device))) == []


class Device:
    """A device with a clock, which the host shares: a step keeps it busy for `STEP_S` once it is queued, which takes
    the host `launch_s`, and the step before has ended.
    """

    STEP_S = 0.05

    def __init__(self, launch_s: float) -> None:
        self.now, self.launch_s = 100.0, launch_s
        self.arrivals: list[Arrival] = []
        self.waits: list[tuple[int, int]] = []
        """The steps that the host has waited for, and how many were queued then."""

    def perf_counter(self) -> float:
        return self.now

    def send(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        before = self.arrivals[-1].at if self.arrivals else 0.0
        if len(values) != 2:  # what was logged is known with its step
            return values, Arrival(self, len(self.arrivals), max(self.now, before))
        self.now += self.launch_s
        self.arrivals.append(Arrival(self, len(self.arrivals) + 1, max(self.now, before) + self.STEP_S))
        return values, self.arrivals[-1]


class Arrival:
    """The event of a step's end, as torch's."""

    def __init__(self, device: Device, step: int, at: float) -> None:
        self.device, self.step, self.at = device, step, at

    def query(self) -> bool:
        return self.device.now >= self.at

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits.append((self.step, len(self.device.arrivals)))
            self.device.now = self.at

    def elapsed_time(self, later: Arrival) -> float:
        return 1000 * (later.at - self.at)


class Pausing(Trainer):
    """Logs values on the device, and works after each step, for a long time after the fourth."""

    OWN_S = 0.002
    device: Device

    def loss(self, batch: Batch) -> torch.Tensor:
        loss = super().loss(batch)
        self.log("own", loss, over=batch["targets"].numel())
        return loss

    def on_step(self, record: Record) -> None:
        self.device.now += 7.0 if record.step == 4 else self.OWN_S


DRAINED = {1, 5, 8}
"""Steps after which the device has nothing to do: the first, one that is saved, the last."""


@pytest.mark.parametrize("launch_s", [0.01, pytest.param(0.08, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("every", [1, 3])
def test_record_is_written_after_the_next_step_is_queued(
    every: int, launch_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for a step only after queueing the next; times are the device's, whatever happens meanwhile."""
    own = ("train.steps=8", f"log.every={every}", "eval.every=0", "checkpoint.every=5", "checkpoint.mode=sync")
    assert make(tmp_path / "at once", *own).fit() == 0
    device = Device(launch_s)
    monkeypatch.setattr("trainer.data.transfer._copy_to_host", device.send)
    for module in ("trainer.data.transfer", "trainer.metrics.step_metrics"):
        monkeypatch.setattr(f"{module}.time", device)
    trainer = make(tmp_path / "late", *own, kind=Pausing)
    assert isinstance(trainer, Pausing)
    trainer.device, trainer.step_metrics.reads_late = device, True
    assert trainer.fit() == 0
    assert all(queued > step or step in DRAINED for step, queued in device.waits)
    if launch_s < Device.STEP_S:
        assert {step for step, _ in device.waits} == set(range(1, 9)) - {4}, "it would have seen them"

    # One that finds the device idle takes as long as queueing it, too; what the host does counts if that is for it.
    alone, behind = launch_s + Device.STEP_S, max(launch_s + Pausing.OWN_S, Device.STEP_S)
    seconds = [alone if step - 1 in {0, *DRAINED, 4} else behind for step in range(1, 9)]
    late, at_once = (
        [line for line in lines(tmp_path / name) if line["kind"] == "train"] for name in ("late", "at once")
    )
    ends = [0, *(line["step"] for line in late)]
    expected = [sum(seconds[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    assert [line["step_s"] for line in late] == pytest.approx(expected)
    assert [line["tokens_per_s"] for line in late] == pytest.approx([64 / step_s for step_s in expected])
    assert trainer.step_metrics.productive_s == pytest.approx(sum(seconds))
    assert [line["own"] for line in late] == pytest.approx([line["mean_loss"] for line in late], rel=1e-5)
    same = ("step", "loss", "mean_loss", "grad_norm", "lr", "skipped", "tokens")
    assert [[line[k] for k in same] for line in late] == [[line[k] for k in same] for line in at_once]
