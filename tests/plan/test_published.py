"""The planner's times and memory compared with published measurements, and plans for described devices.

Three rows of torchtitan's tables were used to fit one constant each: the share of a data sheet's FLOP/s (Llama 2 13B
without recomputation), the power that a chip draws regardless of load (Llama 3 8B on 8 H100, compiled), and the share
for products in float8 (the same in float8). All other rows were held out.

Sources: torchtitan, docs/performance.md (64 A100) and benchmarks/llama3_h100_202412_torchtitan.md (H100 at 500 W).
Measurements on 32 and 64 H200 (benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: 10,938 and 10,753 tokens/s) are
not met: the plan is a quarter higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest

import trainer.plan.probe
from tests.plan.test_plan import run_plan
from trainer import UserError, load_config
from trainer.config import MeshShape
from trainer.model.recompute import OperatorId
from trainer.plan.kernels import Operator, Work, fuse
from trainer.plan.machine import find_machine
from trainer.plan.plan import Plan, make_plan, without_data

H100 = "{like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}"
LLAMA3_8B = ["dim=4096", "num_layers=32", "num_heads=32", "num_kv_heads=8", "ffn_dim=14336", "vocab_size=128256"]
LLAMA3_70B = ["dim=8192", "num_layers=80", "num_heads=64", "num_kv_heads=8", "ffn_dim=28672", "vocab_size=128256"]
LLAMA2_13B = ["dim=5120", "num_layers=40", "num_heads=40", "num_kv_heads=40", "ffn_dim=13824", "vocab_size=32000"]
LLAMA2_70B = [*LLAMA3_70B[:-1], "vocab_size=32000"]
EVERY_SECOND: frozenset[OperatorId] = frozenset({*(("matmul", number) for number in (0, 2, 4, 6)), ("attention", 0)})
"""What torchtitan's selective recomputation keeps of a block: every second product, beginning with the first."""
SELECTIVE = "budget:1"
"""Stands for it, in `plan_of`."""


@dataclass(frozen=True)
class Row:
    """Published figures of one run: tokens per second per GPU, and the peak memory of the allocator in GiB."""

    model: Sequence[str]
    num_gpus: int
    micro_batch: int
    seq_len: int
    recompute: int | str
    tokens_per_s: float
    memory_gib: float | None = None
    compiled: bool = False
    float8: str = "none"


A100_ROWS = {
    "8B, every second layer": Row(LLAMA3_8B, 64, 1, 8192, 2, 2904),
    "8B, selective": Row(LLAMA3_8B, 64, 1, 8192, SELECTIVE, 2973),
    "70B, full": Row(LLAMA3_70B, 64, 1, 8192, "full", 331),
    "13B, none": Row(LLAMA2_13B, 64, 2, 4096, "none", 2162),
    "13B, every second layer": Row(LLAMA2_13B, 64, 2, 4096, 2, 1914),
    "13B, selective": Row(LLAMA2_13B, 64, 2, 4096, SELECTIVE, 1904),
    "Llama 2 70B, selective": Row(LLAMA2_70B, 64, 1, 4096, SELECTIVE, 355),
    "Llama 2 70B, full": Row(LLAMA2_70B, 64, 2, 4096, "full", 353),
}
H100_ROWS = {
    "8": Row(LLAMA3_8B, 8, 2, 8192, SELECTIVE, 5762, 82.4),
    "8, compiled": Row(LLAMA3_8B, 8, 2, 8192, SELECTIVE, 6667, 77.0, compiled=True),
    "8, float8": Row(LLAMA3_8B, 8, 2, 8192, SELECTIVE, 8532, 76.8, compiled=True, float8="tensorwise"),
    "128": Row(LLAMA3_8B, 128, 2, 8192, SELECTIVE, 5605, 67.0),
    "128, compiled": Row(LLAMA3_8B, 128, 2, 8192, SELECTIVE, 6514, 62.0, compiled=True),
    "128, float8": Row(LLAMA3_8B, 128, 2, 8192, SELECTIVE, 8380, 61.8, compiled=True, float8="tensorwise"),
}
EVERY_DAY = ("8B, selective", "8", "8, float8")


def of_campaign(rows: dict[str, Row]) -> list[object]:
    return [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.campaign) for name in rows]


def plan_of(row: Row, device: str) -> Plan:
    """Return the plan of a model that returns full logits and gathers all but its blocks at once, as theirs do."""
    overrides = [
        "model.name=tests.helpers.custom_recipes:llama_whole_logits",
        *(f"model.{field}" for field in row.model),
        f"data.seq_len={row.seq_len}",
        f"train.micro_batch_size={row.micro_batch}",
        f"train.global_batch_size={row.micro_batch * row.num_gpus}",
        f"train.activation_checkpoint={row.recompute}",
        f"train.compile={str(row.compiled).lower()}",
        f"train.float8={row.float8}",
    ]
    config = without_data(load_config("llama3_8b", overrides))
    found = trainer.plan.probe.operators_to_save

    def kept(model: object, blocks: Sequence[object], *others: object) -> list[frozenset[OperatorId]]:
        return [EVERY_SECOND] * len(blocks) if row.recompute == SELECTIVE else found(model, blocks, *others)  # type: ignore[arg-type]

    with mock.patch.object(trainer.plan.probe, "operators_to_save", kept):
        return make_plan(config, MeshShape(1, row.num_gpus), find_machine(device))


def difference(plan: Plan, row: Row) -> float:
    return plan.tokens / plan.time.total_s / row.num_gpus / row.tokens_per_s - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", of_campaign(A100_ROWS))
def test_tokens_per_second_on_64_a100(name: str) -> None:
    row = A100_ROWS[name]
    found = difference(plan_of(row, "a100"), row)
    print(f"{name}: {100 * found:+.1f} %")
    assert abs(found) < 0.10


@pytest.mark.slow
@pytest.mark.parametrize("name", of_campaign(H100_ROWS))
def test_tokens_per_second_and_memory_on_h100_at_500_w(name: str) -> None:
    row = H100_ROWS[name]
    plan = plan_of(row, H100)
    speed = difference(plan, row)
    held_gib = plan.peak_gib * (1 + plan.machine.allocator_share)
    assert row.memory_gib is not None
    memory = held_gib / row.memory_gib - 1
    print(f"{name}: {100 * speed:+.1f} %, {held_gib:.1f} GiB: {100 * memory:+.1f} %")
    assert abs(speed) < 0.15
    assert abs(memory) < 0.05


# ---------------------------------------------------------------------------------------------------------------
# Fusion


def moved(reads: list[int], writes: list[int], is_fused: bool = True, kind: str = "memory") -> Operator:
    """Return an operator on storages of 100 bytes."""
    work = Work(kind, 0, 100 * len([*reads, *writes]), 2)
    return Operator(work, dict.fromkeys(reads, 100), dict.fromkeys(writes, 100), is_fused)


def test_chain_of_elementwise_operators_is_one_kernel() -> None:
    """1 -> 2 -> 3 -> 4, and a product reads 3: the kernel reads 1 and writes 3 and 4; 2 stays in registers."""
    chain = [moved([1], [2]), moved([2], [3]), moved([3], [4]), moved([3], [9], is_fused=False, kind="matmul")]
    work, never_made = fuse(chain, live_after={4, 9})
    assert {kernel.kind: (kernel.num_bytes, count) for kernel, count in work.items()} == {
        "memory": (300, 1),
        "matmul": (200, 1),
    }
    assert never_made == {2}


def test_product_separates_kernels() -> None:
    """A residual, 2, is read by a norm before a product, and added to the product's result."""
    residual = [moved([1], [2]), moved([2], [3]), moved([3], [4], False, "matmul"), moved([2, 4], [5])]
    work, never_made = fuse(residual, live_after={5})
    assert work[Work("memory", 0, 300, 2)] == 2
    assert never_made == set(), "2 and 3 are written: another kernel reads them"


def test_operators_with_a_common_input_share_a_kernel() -> None:
    assert sum(fuse([moved([1], [2]), moved([1], [3])], live_after={2, 3})[0].values()) == 1
    assert fuse([moved([1], [2]), moved([4], [3])], live_after={2, 3})[0] == {Work("memory", 0, 200, 2): 2}


@pytest.mark.slow
def test_a_compiled_block_runs_fewer_kernels_and_keeps_less() -> None:
    """For Llama 3 8B, Inductor's block has about 6 kernels forward and 13 backward, besides products."""
    plans = {}
    for compiled in (False, True):
        row = replace(
            H100_ROWS["8"],
            model=[field.replace("=32", "=6") if "layers" in field else field for field in LLAMA3_8B],
            recompute="none",
            compiled=compiled,
        )
        plans[compiled] = plan_of(row, H100)
    kernels = {}
    for compiled, plan in plans.items():
        marks = {(event.kind, event.unit): event.segment for event in plan.trace.events}
        for mark in ("post_forward", "post_backward"):
            segment = marks[mark, 3]  # type: ignore[index]
            kernels[compiled, mark] = sum(count for kernel, count in segment.work if kernel.kind == "memory")
    assert 4 <= kernels[True, "post_forward"] <= 8 < kernels[False, "post_forward"]
    assert 8 <= kernels[True, "post_backward"] <= 18 < kernels[False, "post_backward"]
    assert plans[True].time.total_s < 0.95 * plans[False].time.total_s
    assert plans[True].memory.peak.total < 0.9 * plans[False].memory.peak.total


# ---------------------------------------------------------------------------------------------------------------
# Devices that are described


def test_described_device() -> None:
    plain, described = find_machine("h100"), find_machine(H100)
    assert described.name == "h100, 500 W, 96 GiB, 2.4 TB/s"
    assert described.memory_gib == 96
    assert described.rates.memory / plain.rates.memory == pytest.approx(2.4 / 3.35)
    for size in (1, 2, 4):  # of 700 W 140 are not for computing
        assert described.rates.matmul[size] / plain.rates.matmul[size] == pytest.approx(360 / 560)
    faster = find_machine("{like: h100, bf16_tflops: 1978, link_gb_s: 900}")
    assert faster.rates.matmul[2] == 2 * plain.rates.matmul[2]
    assert faster.rates.link == 2 * plain.rates.link


def test_a_device_without_float8_computes_in_bfloat16() -> None:
    rates = find_machine("a100").rates
    assert rates.kernel(Work("matmul", 10**12, 0, 1)) == rates.kernel(Work("matmul", 10**12, 0, 2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{power_w: 500}", ["says which one it is like", "for example"]),
        ("{like: h1000, power_w: 500}", ["device.like=h1000", "one of a100", "h100"]),
        ("{like: h100, power: 500}", ["device.power=500", "there is no such property", "did you mean device.power_w?"]),
        ("{like: h100, power_w: much}", ["device.power_w=much", "a number above 0, in W"]),
        ("{like: h100, power_w: 800}", ["device.power_w=800", "up to 700 W", "for example: device.power_w=700"]),
        ("{like: h100, memory_gib: 96", ["device={like: h100, memory_gib: 96", "is not a valid YAML value"]),
    ],
)
def test_mistakes_in_a_description(text: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as caught:
        find_machine(text)
    assert all(part in str(caught.value) for part in said), caught.value


@pytest.mark.slow
def test_command_line_accepts_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run_plan(capsys, "recipe=llama3_1b", "model.num_layers=4", "ranks=8", f"device={H100}")
    assert "8 ranks of h100, 500 W, 96 GiB, 2.4 TB/s (96 GiB each" in " ".join(out.split())
