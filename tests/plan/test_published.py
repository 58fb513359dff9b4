"""The planner's speed and memory compared with published figures, and plans for described devices.

The rows, their sources, and which of them the planner's constants are fitted to: `bench.published`.
"""

from __future__ import annotations

import pytest

from bench.published import ALLOWED_SPEED, TABLES, Row, Table, compare
from trainer import UserError
from trainer.plan.machine import find_machine

H100 = "{like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}"
EVERY_TIME = ("Llama 2 70B, selective", "128, float8", "8B, 4", "1,048,576, context 8")


def rows() -> list[object]:
    """Return a test case for each row; those that are not in `EVERY_TIME` run in the campaign."""
    return [
        pytest.param(table, row, id=f"{table.title}: {name}", marks=[] if name in EVERY_TIME else pytest.mark.campaign)
        for table in TABLES
        for name, row in table.rows.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "row"), rows())
def test_published_figures(table: Table, row: Row) -> None:
    found = compare(table, row)
    is_met = abs(found.speed) < ALLOWED_SPEED
    assert is_met != bool(row.cause), f"{100 * found.speed:+.1f} %, with the cause {row.cause!r}"
    assert found.memory is None or abs(found.memory) < table.allowed_memory


# ---------------------------------------------------------------------------------------------------------------
# Devices that are described


def test_described_device() -> None:
    plain, described = find_machine("h100"), find_machine(H100)
    assert described.memory_gib == 96
    assert described.peak_flops == plain.peak_flops
    assert described.rates.memory / plain.rates.memory == pytest.approx(2.4 / 3.35)
    for size in (1, 2, 4):
        assert described.rates.matmul[size] / plain.rates.matmul[size] == pytest.approx(500 / 700)
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
