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
from dataclasses import dataclass
from unittest import mock

import pytest

from trainer import UserError, load_config
from trainer.config.parallel import MeshShape
from trainer.plan import probe
from trainer.plan.machine import find_machine
from trainer.plan.plan import Plan, make_plan, without_data

H100 = "{like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}"
LLAMA3_8B = ["dim=4096", "num_layers=32", "num_heads=32", "num_kv_heads=8", "ffn_dim=14336", "vocab_size=128256"]
LLAMA3_70B = ["dim=8192", "num_layers=80", "num_heads=64", "num_kv_heads=8", "ffn_dim=28672", "vocab_size=128256"]
LLAMA2_13B = ["dim=5120", "num_layers=40", "num_heads=40", "num_kv_heads=40", "ffn_dim=13824", "vocab_size=32000"]
LLAMA2_70B = [*LLAMA3_70B[:-1], "vocab_size=32000"]
EVERY_SECOND = frozenset({*(("matmul", number) for number in (0, 2, 4, 6)), ("attention", 0)})
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
EVERY_TIME = ("8B, selective", "128, float8")


def of_campaign(rows: dict[str, Row]) -> list[object]:
    return [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.campaign) for name in rows]


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
    found = probe.operators_to_save

    def kept(model: object, blocks: Sequence[object], *others: object) -> list[frozenset[tuple[str, int]]]:
        return [EVERY_SECOND] * len(blocks) if row.recompute == SELECTIVE else found(model, blocks, *others)  # type: ignore[arg-type]

    with mock.patch.object(probe, "operators_to_save", kept):
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
# Devices that are described


def test_described_device() -> None:
    plain, described = find_machine("h100"), find_machine(H100)
    assert described.memory_gib == 96
    assert described.rates.memory / plain.rates.memory == pytest.approx(2.4 / 3.35)
    for size in (1, 2, 4):  # of 700 W 140 are not for computing
        assert described.rates.matmul[size] / plain.rates.matmul[size] == pytest.approx(360 / 560)
    faster = find_machine("{like: h100, bf16_tflops: 1978, link_gb_s: 900}")
    assert faster.rates.matmul[2] == 2 * plain.rates.matmul[2]
    assert faster.rates.link == 2 * plain.rates.link


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("{power_w: 500}", "device={power_w: 500}: "),
        ("{like: h1000, power_w: 500}", "device.like=h1000: "),
        ("{like: h100, power: 500}", "device.power=500: "),
        ("{like: h100, power_w: much}", "device.power_w=much: "),
        ("{like: h100, power_w: 800}", "device.power_w=800"),
        ("{like: h100, memory_gib: 96", "device={like: h100, memory_gib: 96: "),
    ],
)
def test_mistakes_in_a_description(text: str, begins: str) -> None:
    with pytest.raises(UserError) as refused:
        find_machine(text)
    assert str(refused.value).startswith(begins)
