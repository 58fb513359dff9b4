"""Checks that the model is causal and that it learns.  Run these tests with `python -m pytest`."""

from pathlib import Path

import my_model
import torch

from trainer import Trainer, load_config

RECIPE = str(Path(__file__).with_name("my_model.yaml"))


def test_it_is_causal() -> None:
    """Changing tokens leaves the logits at all earlier positions unchanged."""
    model = my_model.MyModel(my_model.MyConfig(width=16, num_layers=2)).eval()
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 8:] += 1
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])


def test_it_learns(tmp_path: Path) -> None:
    """The model's loss on Python source code falls by more than 1 within 40 steps."""
    small = ["model.width=32", "data.seq_len=32", "train.steps=40", "schedule.warmup_steps=5", "optim.lr=1e-2"]
    trainer = Trainer(load_config(RECIPE, [*small, "eval.every=0", "run.threads=1", f"run.dir={tmp_path / 'run'}"]))
    losses = [record["loss"] for record in trainer.steps()]
    trainer.close()
    assert losses[-1] < losses[0] - 1
