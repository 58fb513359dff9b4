"""`checkpoint.every=auto`: the run finds the interval that loses the least time, and all ranks save the same steps."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.test_faults import RUN, last_step, lines_of, of, steps_in, with_
from tests.helpers.faults import StartedRun, start
from tests.helpers.gate import wait_until
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import fit, tiny_config
from tests.plan.test_plan import run_plan
from trainer import Trainer
from trainer.checkpoint.interval import Costs, costs_of
from trainer.checkpoint.saver import AdaptiveInterval
from trainer.config import CheckpointSection, RunConfig
from trainer.distributed.channel import Channel, StepSync
from trainer.metrics.goodput import RunHistory, TimeLedger
from trainer.report.history import read_run
from trainer.report.page import save_costs_of

YEAR_S = 365.25 * 24 * 3600.0
BLOCKED_S, TOTAL_S, RESTART_S, STEP_S = 3.0, 60.0, 480.0, 10.0
CONFIG = RunConfig(checkpoint=CheckpointSection(every="auto"))
"""It assumes one failure per node in 6000 hours."""
SHARD_BYTES = 6e9
"""Bytes per rank.  The estimate before the first save, 6 s and 30 s, is deliberately wrong."""


def test_chosen_interval_loses_the_least() -> None:
    for mtbf_s in (3600.0, 9000.0, 74_000.0):
        costs = Costs(BLOCKED_S, 10.0, RESTART_S, mtbf_s)
        best = max(np.geomspace(20.0, 7200.0, 2000), key=lambda every_s: costs.goodput(float(every_s)))
        assert costs.best_interval_s == pytest.approx(best, rel=0.01)
        assert costs.best_interval_s == pytest.approx(math.sqrt(2 * BLOCKED_S * mtbf_s), rel=0.1)


def test_an_interval_is_no_shorter_than_a_save_and_no_longer_than_two_hours() -> None:
    assert Costs(0.01, 100.0, RESTART_S, 1000.0).best_interval_s == pytest.approx(120.0)
    assert Costs(60.0, 100.0, RESTART_S, 1e9).best_interval_s == 7200.0
    free = Costs(0.0, 0.0, RESTART_S, 1000.0)
    assert 0 < free.goodput(free.best_interval_s) < 1, "saves that took no time, by a clock that is coarse"


def test_configured_failure_rate_counts_as_one_failure() -> None:
    def hours(failures: int, node_h: float) -> float:
        found = RunHistory(num_failures=failures, node_seconds=3600 * node_h)
        return costs_of(CONFIG, 10, SHARD_BYTES, found).mtbf_s / 3600

    assert hours(0, 0.0) == pytest.approx(600.0)
    assert hours(0, 60_000.0) == pytest.approx(6600.0), "as long as nothing fails it is thought to be rarer"
    assert hours(3, 0.5) == pytest.approx(600.0 / 4, rel=1e-3), "three crashes in minutes are no node's mean time"
    assert hours(99, 100_000.0) == pytest.approx(100.0, rel=0.1), "many failures count alone"


@pytest.mark.parametrize("mtbf_s", [1e-3, 60.0, 3600.0, 1e9])
def test_losses_and_goodput_add_up_to_one(mtbf_s: float) -> None:
    """Also if most of the time is lost: no share exceeds 1."""
    costs = Costs(BLOCKED_S, TOTAL_S, RESTART_S, mtbf_s)
    lost = sum(costs.lost_time_fractions(costs.best_interval_s).values())
    assert 0 < lost < 1
    assert lost + costs.goodput(costs.best_interval_s) == pytest.approx(1, abs=0.12)


# ---------------------------------------------------------------------------------------------------------------
# Simulated years


class Simulated:
    """A run on nodes that fail at random, with the pace and the ledger of real ones and a clock that is turned."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes, self.now, self.kept_s, self.step = num_nodes, 0.0, 0.0, 0
        self.ledger = TimeLedger()

    def attempt(self, lasts_s: float) -> None:
        """Train from the newest checkpoint until a node fails, `lasts_s` seconds later, and until it was replaced."""
        self._note("start", started=self.now, nodes=self.num_nodes, resumed_step=self.step)
        ends, worked_s, saved = self.now + lasts_s, 0.0, 0
        policy = AdaptiveInterval(
            CONFIG.checkpoint,
            self._costs,
            self.num_nodes,
            step_s=lambda: STEP_S,
            step_sync=StepSync(Channel(0, 1, timedelta())),
            is_main=True,
            clock=lambda: self.now,
        )
        policy.update(self.ledger.history())
        policy.is_time()
        while self.now < ends:
            num_steps = max(1, math.ceil((policy.every_s - self.now + self._since(policy)) / STEP_S - 0.5))
            self.now += (num_steps - 1) * STEP_S
            assert policy.is_time()
            self.now += STEP_S
            worked_s += num_steps * STEP_S
            policy.record_start()
            if self.now + TOTAL_S < ends:
                saved = round(worked_s / STEP_S)
                self._note("checkpoint", at=self.now + TOTAL_S, blocked_s=BLOCKED_S, total_s=TOTAL_S)
                policy.update(self.ledger.history())
            self.now += BLOCKED_S
        self.now = ends
        self._note("train", step=self.step + saved + 1, step_s=STEP_S)
        self.kept_s, self.step = self.kept_s + saved * STEP_S, self.step + saved
        self.now += RESTART_S

    def _since(self, policy: AdaptiveInterval) -> float:
        assert policy._last_save is not None
        return policy._last_save

    def _costs(self, found: RunHistory | None) -> Costs:
        return costs_of(CONFIG, self.num_nodes, SHARD_BYTES, found)

    def _note(self, kind: str, at: float | None = None, **fields: Any) -> None:
        self.ledger.add({"kind": kind, "time": 1.0 + (self.now if at is None else at), **fields})


def best_fixed(uptimes_s: Sequence[float], wall_s: float) -> float:
    """Return the goodput of the best fixed interval: of each uptime there are the saves that were published in it."""
    uptimes = np.asarray(uptimes_s)
    intervals = np.geomspace(1.2 * TOTAL_S, 40_000.0, 300)
    kept = (np.maximum(0.0, uptimes - TOTAL_S) // intervals[:, None]).sum(1) * (intervals - BLOCKED_S)
    return float(kept.max()) / wall_s


@pytest.mark.slow
@pytest.mark.parametrize("node_mtbf_years", [0.15, pytest.param(0.7, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("num_gpus", [512, *(pytest.param(gpus, marks=pytest.mark.campaign) for gpus in (64, 4096))])
def test_a_simulated_year(num_gpus: int, node_mtbf_years: float) -> None:
    """It starts with an estimate of 6000 hours, whatever the true rate is, and learns."""
    run, draw = Simulated(num_gpus // 8), random.Random(num_gpus)
    uptimes = []
    while run.now < YEAR_S:
        uptimes.append(draw.expovariate(num_gpus / 8 / (node_mtbf_years * YEAR_S)))
        run.attempt(uptimes[-1])
    goodput = run.kept_s / run.now
    assert goodput >= best_fixed(uptimes, run.now) - 0.003
    history = run.ledger.history()
    assert history.num_failures == len(uptimes) - 1
    assert history.mean_restart_s == pytest.approx(RESTART_S)
    if len(uptimes) > 100:
        costs = run._costs(history)
        assert goodput == pytest.approx(costs.goodput(costs.best_interval_s), abs=0.01), "what is expected comes true"


# ---------------------------------------------------------------------------------------------------------------
# The run's own record


def records() -> Iterator[dict[str, Any]]:
    """Three attempts on two nodes: one is killed, one stopped, one fails before its first step."""
    yield {"kind": "start", "time": 110.0, "started": 100.0, "nodes": 2, "resumed_step": None}
    yield {"kind": "train", "step": 5, "time": 150.0, "step_s": 8.0}
    yield {"kind": "checkpoint", "step": 5, "time": 152.0, "blocked_s": 1.0, "total_s": 2.0}
    yield {"kind": "train", "step": 6, "time": 160.0, "step_s": 8.0}
    yield {"kind": "start", "time": 215.0, "started": 200.0, "nodes": 2, "resumed_step": 5}
    yield {"kind": "train", "step": 9, "time": 250.0, "step_s": 8.0}
    yield {"kind": "end", "step": 9, "time": 251.0, "reason": "stopped"}
    yield {"kind": "start", "time": 915.0, "started": 900.0, "nodes": 2, "resumed_step": 9}
    yield {"kind": "end", "step": 9, "time": 916.0, "reason": "failed"}
    yield {"kind": "start", "time": 1015.0, "started": 1000.0, "nodes": 2, "resumed_step": 9}


def test_attempts_that_ended_unrequested_after_a_step_are_failures() -> None:
    ledger = TimeLedger()
    for record in records():
        ledger.add(record)
    found = ledger.history()
    assert found.num_failures == 1
    assert found.mean_restart_s == 55.0, "from the last line before to the next attempt's first step"
    assert found.node_seconds == 2 * (60 + 51 + 16 + 15)
    assert (found.saves, found.longest_save_s) == (((1.0, 2.0),), 2.0)


def test_start_records_keep_the_history_of_dropped_lines() -> None:
    """A resume drops lines after its checkpoint, and with them the evidence of how far the previous attempt came."""
    whole, kept, before = TimeLedger(), list[dict[str, Any]](), TimeLedger(5)
    for number, record in enumerate(records()):
        if number == 4:
            kept = [line for line in kept if line.get("step") != 6]
            record = {**record, "before": before.total().to_state()}
        before.add(record)
        whole.add(record)
        kept.append(record)
    again = TimeLedger()
    for record in kept:
        again.add(record)
    assert again.history() == whole.history()
    assert again.history().num_failures == 1


def test_plan_and_report_show_the_expected_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recipe=llama_small", "ranks=64", "device=h100", "train.global_batch_size=128"]
    planned = json.loads(run_plan(capsys, "--json", *arguments, "checkpoint.every=auto")[0])["saving"]
    assert planned["mtbf_s"] == pytest.approx(6000 * 3600 / 8)
    assert planned["every_s"] == planned["best_s"]
    often = json.loads(run_plan(capsys, "--json", *arguments, "checkpoint.every=1")[0])["saving"]
    assert often["expected_goodput"] < planned["expected_goodput"] < 1

    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records())
    (tmp_path / "config.yaml").write_text("checkpoint:\n  every: auto\n  node_mtbf_h: 1.0\n")
    said = save_costs_of(read_run(tmp_path))
    # Of two failures, one of them what is set, in 284 seconds of a node and an hour; there are two nodes.
    assert said["failures"] == "one every 16 min on 2 nodes, 55 s to resume"
    assert said["saves"].startswith("every 44 s, pausing for 1 s")
    assert said["expected goodput"].startswith("9")


# ---------------------------------------------------------------------------------------------------------------
# Real runs


def _steps_saved(folder: str) -> list[int]:
    """Train on this rank, where a step takes a second by the clock of rank 0 and none by the others'; return the steps
    that it saved."""
    trainer = Trainer(tiny_config(Path(folder), "checkpoint.every=auto", "train.steps=20"))
    policy: Any = trainer.saver.schedule.policy
    policy._costs_of = lambda found: Costs(0.5, 1.0, 0.0, 29.0)
    policy._step_s = lambda: 0.0
    policy._clock = lambda: float(trainer.state.step) if trainer.world.is_main else 1e9
    saved: list[int] = []
    begin = trainer.saver.schedule.begin
    trainer.saver.schedule.begin = lambda step: (saved.append(step), begin(step))[1]  # type: ignore[method-assign]
    assert trainer.fit() == 0
    trainer.close()
    return saved


@pytest.mark.slow
def test_all_ranks_save_the_same_steps(tmp_path: Path) -> None:
    first, second = run_ranks(2, _steps_saved, str(tmp_path))
    assert first == second == [7, 14, 20], "every 5.6 s, and at the end"
    saves = of("checkpoint", tmp_path, "every_s")
    assert saves == [pytest.approx(5.56, rel=0.01)] * 3


@pytest.mark.slow
def test_steps_of_keep_every_are_saved_too(tmp_path: Path) -> None:
    lines = fit(tmp_path, "checkpoint.every=auto", "checkpoint.keep_every=3", "train.steps=7", "checkpoint.keep_last=1")
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [3, 6, 7]


_OFTEN = with_("checkpoint.every=auto", "checkpoint.node_mtbf_h=1e-4", "train.steps=1000000", base=tuple(RUN))
"""A node lasts a third of a second: intervals are as short as saves let them be."""


def begun_in(folder: Path) -> list[int]:
    """Return the steps of checkpoints that were begun and are not there."""
    names = (re.search(r"step_(\d{8})", path.name) for path in (folder / "checkpoints").iterdir())
    return sorted({int(name[1]) for name in names if name} - set(steps_in(folder)))


def lost_too_much(folder: Path, started: StartedRun, num_steps: int) -> str:
    """Kill a run after a number of steps; return the time lost in excess of an interval and a save."""
    began = last_step(folder)
    wait_until(lambda: last_step(folder) >= began + num_steps, f"{num_steps} steps: {started.stderr}")
    started.processes[0].kill()
    started.wait()
    saved, begun = max(steps_in(folder), default=0), begun_in(folder)
    times = {line["step"]: line["time"] for line in lines_of(folder) if line["kind"] == "train"}
    longest_step_s = max(b - a for a, b in zip(list(times.values()), list(times.values())[1:], strict=False))
    # Past the step that was being saved, all that is lost is what was done while it was.
    until = begun[-1] if begun and begun[-1] in times else max(times)
    if saved not in times:
        return ""  # of this attempt nothing was saved: what it resumed from was
    interval_s = max(of("checkpoint", folder, "every_s"), default=0.0)
    lost_s = times[until] - times[saved]
    allowed_s = interval_s + 3 * longest_step_s
    return f"lost {lost_s:.3f} s, at most {allowed_s:.3f} s" if lost_s > allowed_s or len(begun) > 1 else ""


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_fifty_kills_lose_at_most_an_interval_and_a_save(tmp_path: Path) -> None:
    draw, folder = random.Random(5), tmp_path / "run"
    for number in range(50):
        started = start(folder, *_OFTEN)
        wrong = lost_too_much(folder, started, draw.randrange(5, 120))
        assert not wrong, f"kill {number}: {wrong}"
    assert max(steps_in(folder)) > 500
    starts = [line for line in lines_of(folder) if line["kind"] == "start"]
    assert starts[-1]["before"]["failures"] >= 45
