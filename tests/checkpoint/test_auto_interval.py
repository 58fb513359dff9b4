"""`checkpoint.every=auto`: the run finds the interval that loses the least time, and all ranks save the same steps."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
from pathlib import Path

import pytest

from tests.checkpoint.runs import RUN
from tests.helpers.commands import meshtrainer
from tests.helpers.faults import Fault
from tests.helpers.gate import wait_until
from tests.helpers.launch import Run, merged, run, start
from tests.helpers.tiny import fit
from trainer.metrics.goodput import TimeLedger

pytestmark = pytest.mark.slow

PLAN = ["recipe=llama_small", "ranks=64", "device=h100", "train.global_batch_size=128", "--json"]
OFTEN = merged(RUN, ["checkpoint.every=auto", "checkpoint.node_mtbf_h=1e-4", "train.steps=1000000"])
"""A node lasts a third of a second: intervals are as short as saves let them be."""


@pytest.mark.parametrize("node_mtbf_h", [6000.0, *(pytest.param(h, marks=pytest.mark.campaign) for h in (1.0, 1e6))])
def test_the_plan_expects_no_more_of_any_other_interval(node_mtbf_h: float) -> None:
    def expected(every: str) -> dict[str, float]:
        planned = meshtrainer("plan", *PLAN, f"checkpoint.every={every}", f"checkpoint.node_mtbf_h={node_mtbf_h}")
        return json.loads(planned.out)["saving"]

    auto = expected("auto")
    assert auto["mtbf_s"] == pytest.approx(node_mtbf_h * 3600 / 8), "eight nodes"
    others = [expected(every) for every in ("1", "100000000")]
    assert max(other["expected_goodput"] for other in others) < auto["expected_goodput"] < 1
    assert others[0]["every_s"] < auto["every_s"] < others[-1]["every_s"]
    assert {other["best_s"] for other in others} == {auto["every_s"]}


def steps_of(files: list[str]) -> list[int]:
    """Return the steps of the checkpoints that a rank has opened files of, in order."""
    return list(dict.fromkeys(int(found[1]) for line in files if (found := re.search(r"step_(\d{8})", line))))


def test_all_ranks_save_the_same_steps(tmp_path: Path) -> None:
    pauses = {f"step {step}": "sleep 0.1" for step in range(1, 1000)}  # so that it need not train while it waits
    fault = Fault(tmp_path / "notes", pauses, below=tmp_path / "run" / "checkpoints")
    own = merged(OFTEN, ["nproc=2", "checkpoint.keep_last=0"])
    ran = start(tmp_path / "run", *own, variables=fault.variables)
    wait_until(lambda: len(ran.of_kind("checkpoint")) >= 2 or not ran.is_running, "two saves")
    ran.signal(signal.SIGTERM)
    assert ran.wait().code == 75, ran.err
    assert steps_of(fault.files(0)) == steps_of(fault.files(1)) == ran.steps_saved
    assert len(ran.steps_saved) > 2
    assert all(line["every_s"] > 0 for line in ran.of_kind("checkpoint"))


def test_steps_of_keep_every_are_saved_too(tmp_path: Path) -> None:
    lines = fit(tmp_path, "checkpoint.every=auto", "checkpoint.keep_every=3", "train.steps=7", "checkpoint.keep_last=1")
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [3, 6, 7]


def num_failures(ran: Run) -> int:
    """Return the number of failures from which the interval of a run with these records is computed."""
    ledger = TimeLedger()
    for record in ran.metrics:
        ledger.add(record)
    return ledger.history().num_failures


def test_crashes_are_counted_and_stops_are_not(tmp_path: Path) -> None:
    ends = ["SIGKILL", "SIGTERM"]
    for number, how in enumerate(ends):
        fault = Fault(tmp_path / f"notes-{number}", {f"step {8 + 4 * number}": how})
        ran = start(tmp_path / "run", *OFTEN, variables=fault.variables).wait()
        assert ran.code == {"SIGKILL": -9, "SIGTERM": 75}[how], ran.err
    step = ran.train("step")[-1] + 1
    ran = run(tmp_path / "run", *merged(OFTEN, [f"train.steps={step}"]))
    assert num_failures(ran) == 1


def lost(ran: Run) -> str:
    """Return what a killed run has lost in excess of an interval and a save."""
    times = {line["step"]: line["time"] for line in ran.of_kind("train")}
    saved = max(ran.steps_saved, default=0)
    if saved not in times:
        return ""  # of this attempt nothing was saved: what it resumed from was
    begun = [int(found[1]) for path in ran.checkpoints.iterdir() if (found := re.search(r"step_(\d{8})", path.name))]
    unfinished = sorted({*begun} - {*ran.steps_saved} & {*times})
    moments = list(times.values())
    longest_step_s = max(after - before for before, after in itertools.pairwise(moments))
    # After the step that was being saved, all that is lost is what was done while it was.
    lost_s = times[unfinished[-1] if unfinished else max(times)] - times[saved]
    allowed_s = max((line["every_s"] for line in ran.of_kind("checkpoint")), default=0.0) + 3 * longest_step_s
    return f"lost {lost_s:.3f} s, at most {allowed_s:.3f} s" if lost_s > allowed_s else ""


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_thirty_kills_lose_at_most_an_interval_and_a_save(tmp_path: Path) -> None:
    draw, wrong = random.Random(5), []
    for number in range(30):
        ran = start(tmp_path / "run", *OFTEN)
        step = max(ran.train("step"), default=0) + draw.randrange(5, 120)
        wait_until(lambda ran=ran, step=step: max(ran.train("step"), default=0) >= step, f"step {step}")
        ran.kill()
        wrong += [f"kill {number}: {found}" for found in [lost(ran)] if found]
    assert wrong == []
    assert num_failures(ran) >= 25
