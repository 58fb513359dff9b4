"""`meshtrainer sweep`: each run is trained once, even if the sweep or a run is killed; the report names the best."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forked import REPOSITORY, popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import CommandResult, tiny_overrides
from trainer import sweep
from trainer.runs import RunSummary
from trainer.sweep import find_best, name_of, names_of, scores_of, split_values

MODEL = [
    "model.name=tests.helpers.slow_trainer:slow_llama",
    *("model.vocab_size=257", "model.num_kv_heads=2", "eval.every=5", "eval.steps=1", "checkpoint.every=2"),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[0.9,0.95]", ["[0.9,0.95]"]),
        ("[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("{a: x, b: y}", ["{a: x, b: y}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("a,", ["a,"]),
        ("", [""]),
    ],
)
def test_values(text: str, expected: list[str]) -> None:
    assert split_values(text) == expected


def test_names_are_folders() -> None:
    assert name_of(["optim.lr=3e-4", "data.path=a b/*.bin"]) == "lr=3e-4,path=a-b-.bin"
    names = names_of([["data.path=a/x"], ["data.path=a-x"], [f"data.path={'x' * 300}"], [f"data.path={'x' * 301}"]])
    assert names[:2] == ["path=a-x", "path=a-x-2"], "each run has its own folder"
    assert len(set(names)) == 4
    assert max(map(len, names)) < 200


def summary(state: str, loss: float | None, eval_loss: float | None) -> RunSummary:
    return RunSummary("f", "n", state, 1, 1, loss, eval_loss, None, "", "", 0.0)


def test_the_best_run() -> None:
    """The finished run with the lowest loss on held-out data, or in training if one has no such loss."""
    runs = [summary("finished", 1.0, 3.0), summary("finished", 2.0, 2.5), summary("stopped", 0.1, 0.1)]
    assert find_best(runs) == (runs[1], 2.5)
    not_evaluated = summary("finished", 1.5, None)
    assert find_best([*runs, not_evaluated]) == (runs[0], 1.0), "the loss that was compared"
    assert scores_of([*runs, not_evaluated]) == [1.0, 2.0, 0.1, 1.5]
    assert find_best([summary("failed", 1.0, 1.0)]) is None
    assert find_best([summary("finished", None, None)]) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1e-4"], "no key has several values"),
        (["optim.lr=1e-4,abc"], "optim.lr=abc"),
        (["optim.lr=1e-4,1e-3", "run.name=a"], "run.name=a: differs for each run of a sweep"),
        (["optim.lr=1e-4,1e-3", "--parallel=0"], "--parallel=0: must be at least 1"),
        (["optim.lr=1e-4,1e-3", "--report"], "has no run of this sweep yet"),
        ([f"run.seed={','.join(map(str, range(1001)))}"], "sweep=1001: must be at most 1000 runs"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.command_line(["recipe=llama_small", f"--dir={tmp_path / 'sweep'}", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text('{"recipe": "llama_small", "fixed": [], "runs": []}')
    assert sweep.command_line(["recipe=llama_small", "optim.lr=1e-4,1e-3", f"--dir={tmp_path}"]) == 2
    assert "belongs to a different sweep" in capsys.readouterr().err
    assert sweep.command_line(["recipe=llama_small", "optim.lr=1e-4,1e-3", f"--dir={tmp_path / 'sweep.json'}"]) == 2
    assert "sweep.json: is a file, not a folder" in capsys.readouterr().err


def test_a_dry_run_prints_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama_small", "optim.lr=1e-4,1e-3", "run.seed=1,2", "train.steps=5", f"--dir={tmp_path / 's'}"]
    assert sweep.command_line([*words, "--dry-run"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[5:7] for line in lines] == [
        [f"optim.lr={lr}", f"run.seed={seed}"] for lr in ("1e-4", "1e-3") for seed in (1, 2)
    ]
    assert len({line[-1] for line in lines}) == 4
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_job_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Task N gets the folder and the settings of run N, whatever characters they have."""
    words = [
        "recipe=llama_small",
        "run.device=cpu",
        "optim.betas=[0.9,0.95],[0.9,0.99]",
        "data.cache_dir=a b",
        "--slurm",
    ]
    assert sweep.command_line([*words, f"--dir={tmp_path / 's'}", "--parallel=1", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 15
    assert re.search(r"^#SBATCH --array=0-1%1$", text, re.MULTILINE)
    assert re.search(r"^#SBATCH --job-name=s$", text, re.MULTILINE)
    shown = re.sub(r"^exec env .* -m trainer.slurm", r'printf "%s\\n" "$RUN_DIR"', text, flags=re.MULTILINE)
    for number, beta in enumerate(("0.95", "0.99")):
        env = os.environ | {"SLURM_ARRAY_TASK_ID": str(number)}
        ran = subprocess.run(["bash"], input=shown, env=env, text=True, capture_output=True, check=True)
        folder, *arguments = ran.stdout.splitlines()
        assert Path(folder).parent == tmp_path / "s"
        expected = ["recipe=llama_small", "run.device=cpu", "data.cache_dir=a b", f"optim.betas=[0.9,{beta}]"]
        assert arguments == [*expected, f"run.name={Path(folder).name}"]


# ---------------------------------------------------------------------------------------------------------------
# They train


def start(folder: Path, *words: str, rest_s: float = 0.0) -> subprocess.Popen[str]:
    own = {"PYTHONPATH": str(REPOSITORY), "MESHTRAINER_TEST_REST_S": str(rest_s)}
    command = [sys.executable, "-m", "trainer.sweep", "recipe=llama_small", *tiny_overrides(*MODEL), *words]
    with open(f"{folder}.log", "a") as log:
        return popen([*command, f"--dir={folder}"], env=os.environ | own, stdout=log, stderr=log)


def states(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("*/status.json")):
        found.append(json.loads(path.read_text())["state"])
    return found


def steps_of(folder: Path) -> int:
    return sum(path.read_text().count('"kind": "train"') for path in folder.glob("*/metrics.jsonl"))


def assert_complete(folder: Path, output: str, rates: list[str], steps: int) -> None:
    """Demand that each run finished, trained each step once, and was started as often as it had to be; one best."""
    runs = {rate: CommandResult(0, "", "", folder / f"lr={rate}") for rate in rates}
    assert sorted(path.parent.name for path in folder.glob("*/status.json")) == sorted(f"lr={rate}" for rate in rates)
    for rate, ran in runs.items():
        assert ran.status["state"] == "finished"
        assert ran.train("step") == list(range(1, steps + 1))
        assert math.isclose(max(ran.train("lr")), float(rate))
        assert [line["reason"] for line in ran.metrics if line["kind"] == "end"].count("finished") == 1
    losses = {rate: [line["loss"] for line in ran.metrics if line["kind"] == "eval"][-1] for rate, ran in runs.items()}
    best = min(losses, key=lambda rate: losses[rate])
    last = output.splitlines()[-1]
    assert last == f"best: lr={best}, loss {losses[best]:.4f}: {folder}/lr={best}"
    assert output.count("report: ") == 1
    page = (folder / "report.html").read_text()
    assert all(f"lr={rate}" in page for rate in rates)


@pytest.mark.slow
def test_two_runs_and_again_nothing_to_do(tmp_path: Path) -> None:
    folder, words = tmp_path / "sweep", ["optim.lr=1e-4,1e-2", "train.steps=5", "--parallel=2"]
    assert start(folder, *words).wait(240) == 0, Path(f"{folder}.log").read_text()
    first = Path(f"{folder}.log").read_text()
    assert_complete(folder, first, ["1e-4", "1e-2"], 5)
    assert start(folder, *words).wait(240) == 0
    again = Path(f"{folder}.log").read_text()[len(first) :]
    assert "started" not in again
    assert_complete(folder, again, ["1e-4", "1e-2"], 5)


RATES = ["1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2"]


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["the sweep alone", "everything", "notice"])
def test_six_runs_two_at_a_time_killed_and_restarted(what: str, tmp_path: Path) -> None:
    """Killed alone, its two runs train on, and the restarted sweep waits for them instead of starting them again."""
    folder = tmp_path / "sweep"
    words = [f"optim.lr={','.join(RATES)}", "train.steps=12", "--parallel=2"]
    process = start(folder, *words, rest_s=0.5)
    # Two have finished, and two are in the middle.
    wait_until(lambda: states(folder).count("finished") >= 2 and steps_of(folder) >= 2 * 12 + 4, "the second pair")
    assert states(folder).count("running") <= 2
    if what == "notice":
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
        assert "stopped" in states(folder)
        assert "running" not in states(folder)
    else:
        process.kill()
        process.wait()
        if what == "everything":
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    command = path.read_bytes()
                except OSError:
                    continue
                if f"run.dir={folder}/".encode() in command:
                    os.kill(int(path.parent.name), signal.SIGKILL)
    before = Path(f"{folder}.log").read_text()
    assert start(folder, *words, rest_s=0.05).wait(300) == 0, Path(f"{folder}.log").read_text()
    output = Path(f"{folder}.log").read_text()[len(before) :]
    assert_complete(folder, output, RATES, 12)
    attempts = [
        sum(line["kind"] == "start" for line in CommandResult(0, "", "", folder / f"lr={rate}").metrics)
        for rate in RATES
    ]
    assert attempts.count(1) >= (6 if what == "the sweep alone" else 4), "none was started again for nothing"


@pytest.mark.campaign
def test_a_run_that_fails_is_named_and_the_others_train(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    rates = "optim.lr=1e30,1e-2"  # with the first, no loss is finite after the first step
    assert start(folder, rates, "train.steps=8", "train.max_skipped_updates=2").wait(240) == 1
    output = Path(f"{folder}.log").read_text()
    assert "lr=1e30: exit code 1, see " in output
    assert "lr=1e30: failed" in output
    assert output.splitlines()[-1].startswith("best: lr=1e-2, ")
