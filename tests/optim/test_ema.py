"""The moving average of weights: equal to a plain loop's on any mesh, resumed bit for bit, evaluated and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.tiny import full, lines, tiny_config
from trainer import Trainer, UserError, load_config, load_weights
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.weights import StoredWeights
from trainer.checkpoints import command_line as checkpoints
from trainer.data.opening import open_source
from trainer.evaluate import main as evaluate
from trainer.export import command_line as export

DECAY = 0.6
OWN = (f"train.ema={DECAY}", "optim.lr=0.05", "schedule.warmup_steps=0")


class SkipsThirdStep(Trainer):
    """The third step has no finite loss."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * (float("nan") if self.state.step == 2 else 1.0)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(p).detach().clone() for name, p in trainer.state.trained.items()}


def averages_in(folder: Path) -> dict[str, torch.Tensor]:
    stored = StoredWeights(find_checkpoint(folder), averaged=True)
    return {name: stored.read(name) for name in stored.shapes}


def test_average_equals_a_plain_loops_and_is_evaluated(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = SkipsThirdStep(tiny_config(run, *OWN, "train.steps=6", "eval.every=6", "train.max_skipped_updates=2"))
    expected: dict[str, torch.Tensor] = {}
    for record in trainer.steps():
        now = weights_of(trainer)
        if record.step != 3:  # which was skipped
            expected = {n: DECAY * expected.get(n, w).double() + (1 - DECAY) * w.double() for n, w in now.items()}
    before = weights_of(trainer)
    found = trainer.evaluate()
    assert found is not None
    assert all(torch.equal(w, before[name]) for name, w in weights_of(trainer).items())
    trainer.save_checkpoint(wait=True)
    trainer.close()

    averages = averages_in(run)
    assert averages.keys() == expected.keys()
    for name, average in averages.items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.allclose(average, before[name], rtol=1e-3)
    tokens, targets = map(torch.from_numpy, open_source(trainer.config.data, 32, "eval").batch(torch.arange(4).numpy()))
    for ema, is_it in ((True, True), (False, False)):
        logits = load_weights(run, ema=ema)(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        assert (abs(loss / found.loss - 1) < 1e-5) is is_it


def test_average_resumes_bit_for_bit_and_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, ends in ((whole, [5]), (parts, [3, 5])):
        for end in ends:
            schedule = ("schedule.name=constant", f"train.steps={end}", "eval.every=5", "eval.steps=1")
            trainer = Trainer(tiny_config(folder, *OWN, *schedule))
            assert trainer.fit() == 0
            trainer.close()
    averages = averages_in(whole)
    assert all(torch.equal(average, averages[name]) for name, average in averages_in(parts).items())
    (first,), (second,) = (
        [x["loss"] for x in lines(run) if x["kind"] == "eval" and x["step"] == 5] for run in (whole, parts)
    )
    assert first == second

    assert export([str(whole), str(tmp_path / "out.pt"), "--ema"]) == 0
    exported = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(exported[name], average) for name, average in averages.items())
    capsys.readouterr()
    assert evaluate([str(whole), "--json"]) == 0
    assert f'"loss": {first!r}' in capsys.readouterr().out
    assert evaluate([str(whole), "eval.ema=false", "--json"]) == 0
    assert f'"loss": {first!r}' not in capsys.readouterr().out
    assert checkpoints([str(whole)]) == 0

    with pytest.raises(UserError, match=r"train\.ema"):
        Trainer(tiny_config(whole, "train.steps=6")).fit()
    without = Trainer(tiny_config(whole, "train.steps=6", "checkpoint.allow_changes=[state.ema]"))
    assert without.fit() == 0
    without.close()
    assert export([str(whole), str(tmp_path / "none.pt"), "--ema"]) == 2


@pytest.mark.parametrize("decay", [1, 1.5, -0.1])
def test_invalid_decay(decay: float) -> None:
    with pytest.raises(UserError, match=r"train.ema"):
        load_config("llama_small", [f"train.ema={decay}"])
