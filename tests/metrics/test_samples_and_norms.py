"""Optional outputs of a run: samples for prompts, norms by layer, the mean loss, and the current phase."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console

import trainer.trainer as module
from tests.helpers.ranks import run_tiny, tiny_overrides
from tests.helpers.tiny import fit, full, lines, tiny_config
from trainer import Trainer, UserError, load_config, load_weights
from trainer.config import check_config
from trainer.data.tokenizer import find_tokenizer
from trainer.metrics.callbacks import Callback
from trainer.metrics.console import ConsoleWriter, PlainScreen
from trainer.metrics.record import Record
from trainer.metrics.terminal import Terminal
from trainer.model.sample import Sampling, generate_batch

PROMPTS = ["def ", "class A:\n    "]
SAMPLED = [f"log.prompts={json.dumps(PROMPTS)}", "log.prompt_tokens=5", "eval.every=2", "eval.steps=1", "train.steps=3"]


def samples(run: Path) -> list[tuple[int, str, str]]:
    return [(x["step"], x["prompt"], x["text"]) for x in lines(run) if x["kind"] == "sample"]


def continued(run: Path, prompts: Sequence[str], ema: bool) -> list[str]:
    """Return the texts that the run's newest checkpoint generates, as in `trainer.generate`."""
    model, tokenizer = load_weights(run, ema=ema), find_tokenizer("bytes")
    given = [[*tokenizer.start_ids, *tokenizer.encode(prompt).tolist()] for prompt in prompts]
    texts = generate_batch(model, given, 5, Sampling(), ends={tokenizer.end_id})
    return [tokenizer.decode([token for token in text.tokens if token != tokenizer.end_id]) for text in texts]


@pytest.mark.slow
def test_prompts_are_continued_at_each_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the evaluated weights, the same on two ranks, and without an effect on training."""
    one, two, plain = tmp_path / "one", tmp_path / "two", tmp_path / "plain"
    own = [*SAMPLED, "train.ema=0.5", "optim.lr=0.05"]
    for folder, overrides in ((one, own), (plain, [item for item in own if not item.startswith("log.")])):
        trainer = Trainer(load_config("llama_small", tiny_overrides(*overrides, f"run.dir={folder}")))
        assert trainer.fit() == 0
        trainer.close()
    found = samples(one)
    assert [(step, prompt) for step, prompt, _ in found] == [(step, prompt) for step in (2, 3) for prompt in PROMPTS]
    assert [text for step, _, text in found if step == 3] == continued(one, PROMPTS, ema=True)
    losses = [[x["loss"] for x in lines(run) if x["kind"] in ("train", "eval")] for run in (one, plain)]
    assert losses[0] == losses[1]
    kept = (one / "samples.txt").read_text()
    assert kept.startswith(f"-- step 2: def \n{found[0][2]}\n")
    assert "sample step     2  def " in capsys.readouterr().out
    assert not (plain / "samples.txt").exists()
    run_tiny(two, *own, "nproc=2")
    assert samples(two) == found


@pytest.mark.slow
def test_norms_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients before clipping, and of weights after the step; the same on two ranks."""
    own = ["log.norms_every=2", "optim.max_grad_norm=0.01", "train.steps=4"]
    seen: list[dict[str, float]] = []
    clip = module.norm_and_clip_factor

    def noting(model: torch.nn.Module, *arguments: Any) -> Any:
        squares: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
            assert parameter.grad is not None
            squares[unit] = squares.get(unit, 0.0) + float(full(parameter.grad).double().square().sum())
        seen.append({unit: math.sqrt(square) for unit, square in squares.items()})
        return clip(model, *arguments)

    monkeypatch.setattr(module, "norm_and_clip_factor", noting)
    found = [line for line in fit(tmp_path / "one", *own) if line["kind"] == "norms"]
    monkeypatch.undo()
    assert [line["step"] for line in found] == [2, 4]
    for line in found:
        expected = seen[line["step"] - 1]
        for unit, norm in line["grad_norm"].items():
            parts = [expected[name] for name in unit.split(" + ")]
            assert norm == pytest.approx(math.sqrt(sum(part**2 for part in parts)), rel=1e-5)
        assert line["grad_norm"].keys() == line["param_norm"].keys()
    named = dict(load_weights(tmp_path / "one").named_parameters())
    for unit, norm in found[-1]["param_norm"].items():
        own_names = [name for name in named if name.startswith(tuple(f"{part}." for part in unit.split(" + ")))]
        assert norm == pytest.approx(
            math.sqrt(sum(float(named[n].double().square().sum()) for n in own_names)), rel=1e-5
        )
    one, two = (run_tiny(tmp_path / f"run-{n}", *own, f"nproc={n}") for n in (1, 2))
    of_one, of_two = ([x for x in ran.metrics if x["kind"] == "norms"] for ran in (one, two))
    for first, second in zip(of_one, of_two, strict=True):
        for kind in ("grad_norm", "param_norm"):
            assert second[kind] == pytest.approx(first[kind], rel=1e-5)


class Stumbling(Trainer):
    """Its fourth step has no finite loss."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (math.nan if self.state.step == 3 else 1.0)


@pytest.mark.slow
def test_mean_loss_is_over_the_steps_since_the_previous_line(tmp_path: Path) -> None:
    trainer = Stumbling(tiny_config(tmp_path / "run", "log.every=3", "train.steps=7"))
    records = [(record.step, record.loss, record.mean_loss) for record in trainer.steps()]
    trainer.close()
    losses = {step: loss for step, loss, _ in records}
    since = {1: [1], 2: [2], 3: [2, 3], 4: [], 5: [5], 6: [5, 6], 7: [7]}  # 4 was skipped
    for step, _, mean in records:
        steps = since[step]
        assert mean == pytest.approx(sum(losses[s] for s in steps) / len(steps)) if steps else math.isnan(mean)
    written = {line["step"]: line for line in lines(tmp_path / "run") if line["kind"] == "train"}
    assert written[6]["mean_loss"] == {step: mean for step, _, mean in records}[6]
    assert written[6]["loss"] == losses[6] != written[6]["mean_loss"]


def test_status_bar_shows_the_current_phase() -> None:
    file = StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    screen = Terminal(console)
    sink = ConsoleWriter(10, screen)
    sink.first_step_label = "compiling"
    sink.start({"run": "mine"})
    assert screen._live is not None

    def shown() -> str:
        with console.capture() as captured:
            console.print(screen._live.renderable if screen._live else "")
        return captured.get()

    for phase in ("data", "forward", "backward"):
        sink.enter_phase(phase)
        assert "compiling" in shown()
    sink.progress(1)
    sink.enter_phase("forward")
    assert "compiling" not in shown()
    for phase, word in (("evaluate", "evaluating"), ("save", "saving"), ("between steps", "")):
        sink.enter_phase(phase)
        assert word in shown()
    assert not [word for word in ("evaluating", "saving") if word in shown()]
    sink.close()


@pytest.mark.slow
def test_phases_are_reported_to_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(ConsoleWriter, "enter_phase", lambda self, phase: seen.append(phase))
    fit(tmp_path / "run", "train.steps=2", "eval.every=2")
    assert {"forward", "backward", "optimizer", "evaluate", "save"} <= set(seen)


def test_norms_and_samples_on_the_console() -> None:
    file = StringIO()
    sink = ConsoleWriter(10, PlainScreen(file))
    norms = {"embed": 0.01, "layers.0": 2.0, "head": None}
    sink.write(Record(kind="norms", step=3, grad_norm=norms, param_norm=norms))
    sink.write(Record(kind="sample", step=3, prompt="def \x1b[2J", text="pass"))
    assert file.getvalue().splitlines() == [
        "norms step      3  gradients 0.01 to 2  largest: layers.0  smallest: embed",
        "sample step     3  def ",
        "pass",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["log.prompts=[a]", "eval.every=0"], r"log.prompts=.*eval.every=0"),
        (["log.prompts=[a]", "eval.every=1", "data.source=synthetic"], r"log.prompts=.*synthetic"),
        (["log.prompt_tokens=0"], r"log.prompt_tokens=0: must be at least 1"),
        (["log.norms_every=-1"], r"log.norms_every=-1: must be at least 0"),
    ],
)
def test_mistakes(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(load_config("llama_small", overrides), 1, 1)


class Told(Callback):
    """Notes each hook that is called, and whether Python may collect garbage then."""

    def __init__(self, name: str, told: list[str]) -> None:
        for hook in ("begin_fit", "begin_step", "end_step", "after_evaluation", "end_loop", "end_fit"):
            setattr(self, hook, partial(self.note, f"{name} {hook}"))
        self.told, self.collects = told, set[bool]()

    def note(self, *what: object) -> None:
        self.told.append(" ".join(map(str, what)))
        self.collects.add(gc.isenabled())


@pytest.mark.slow
def test_callbacks_run_in_order_and_end_in_reverse(tmp_path: Path) -> None:
    told: list[str] = []
    trainer = Trainer(tiny_config(tmp_path, "train.steps=2", "eval.every=2", "eval.steps=1", "log.sample_tokens=0"))
    outer, inner = Told("outer", told), Told("inner", told)
    trainer._run.callbacks[1:] = [outer, *trainer._run.callbacks[1:], inner]
    assert trainer.fit() == 0
    trainer.close()

    def both(hook: str, is_end: bool = False) -> list[str]:
        return [f"{name} {hook}" for name in (("inner", "outer") if is_end else ("outer", "inner"))]

    steps = [line for step in (1, 2) for line in (*both(f"begin_step {step}"), *both(f"end_step {step}", True))]
    assert told == [
        *both("begin_fit"),
        *steps,
        *both("after_evaluation 2"),
        *both("end_loop False", True),
        *both("end_fit", True),
    ]
    assert outer.collects == {False}, "inside fit, garbage is collected at the same steps on all ranks alone"
    assert gc.isenabled()


@pytest.mark.slow
def test_callbacks_get_the_outcome_of_a_custom_loop(tmp_path: Path) -> None:
    told: list[str] = []
    trainer = Trainer(tiny_config(tmp_path, "train.steps=3", "eval.every=0", "log.sample_tokens=0"))
    trainer._run.callbacks.append(Told("own", told))
    for _ in trainer.steps():
        break
    assert told[-1] == "own end_loop False", "left early"
    told.clear()

    def fail_in_the_body() -> None:
        for _ in trainer.steps():
            fail(())

    with pytest.raises(ZeroDivisionError):
        fail_in_the_body()
    assert told[-1] == "own end_loop False", "a generator sees an exception in the loop's body as leaving it early"
    trainer._run.callbacks.append(Told("other", told))
    trainer.train_step = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        next(trainer.steps())
    assert told[-2:] == ["other end_loop True", "own end_loop True"]
    assert not any("fit" in line for line in told)


def fail(micro_batches: object) -> NoReturn:
    raise ZeroDivisionError
