"""`gathered`: many forward passes of a sharded model after one all-gather; and generation in step on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import on_ranks
from tests.helpers.no_plan import make_no_plan
from tests.helpers.plan_truth import CollectiveLog
from tests.helpers.tiny import tiny_config
from trainer import Sampling, Trainer, gathered, generate_batch
from trainer.model.gradients import reshard

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [11, 2]]


def num_collectives(run: Callable[[], Any]) -> int:
    with CollectiveLog() as log:
        run()
    return sum(log.counts.values())


def generate_and_train(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train a step, generate in and outside `gathered`, and train another step."""
    make_no_plan()
    trainer = Trainer(tiny_config(folder, "train.steps=3", "train.micro_batch_size=1", *overrides))
    model, rank, size = trainer.model, trainer.world.rank, trainer.world.size
    own = list(range(len(PROMPTS)))[rank::size]

    def generate(indices: list[int]) -> list[Any]:
        return generate_batch(
            model, [PROMPTS[i] for i in indices], 6 + 3 * rank, Sampling(1.0), indices=indices, ends={7}
        )

    def forward() -> None:
        """Twice: what stays gathered after the first pass is not gathered again in the second."""
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.int64))
            model(torch.zeros(1, 4, dtype=torch.int64))
        reshard(model)

    steps = trainer.steps()
    losses, found = [next(steps).loss], {}
    found["forward"] = num_collectives(forward)
    sharded = generate(own)
    with gathered(model):
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        inside: list[Any] = []
        found["inside"] = num_collectives(lambda: inside.extend(generate(own[: 2 - rank])))  # ranks need not agree
        found["same inside"] = [text.tokens for text in inside] == [text.tokens for text in sharded][: 2 - rank]
    found["forward afterwards"] = num_collectives(forward)
    found["same afterwards"] = generate(own) == sharded
    losses.append(next(steps).loss)
    steps.close()
    trainer.close()
    texts = {index: text.tokens[:6] for index, text in zip(own, sharded, strict=True)}
    return {"losses": losses, "texts": texts, **found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, []),
        pytest.param(2, ["fsdp.reshard_after_forward=never"], marks=pytest.mark.campaign),
        pytest.param(4, ["fsdp.reshard_after_forward=2"], marks=pytest.mark.campaign),
        pytest.param(4, ["mesh.replicate=2"], marks=pytest.mark.campaign),
        pytest.param(2, ["fsdp.param_dtype=bfloat16"], marks=pytest.mark.campaign),
    ],
)
def test_gathered_model_generates_without_collectives(ranks: int, overrides: list[str], tmp_path: Path) -> None:
    """The texts of one rank, and the losses of training without generation; afterwards units reshard as before.

    Units that reshard to a number of ranks are gathered again, so that all ranks must generate together.
    """
    gathers_again = "fsdp.reshard_after_forward=2" in overrides
    in_half = "fsdp.param_dtype=bfloat16" in overrides  # with 8 bits, texts may differ
    alone = generate_and_train(tmp_path / "one", overrides if in_half else [])
    found = on_ranks(ranks, generate_and_train, tmp_path / "ranks", overrides)
    texts: dict[int, list[int]] = {}
    for each in found:
        assert (each["inside"] > 0) == gathers_again
        assert each["forward"] == each["forward afterwards"] > 0
        assert each["same inside"]
        assert each["same afterwards"]
        assert each["parameters"] == alone["parameters"]
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-2 if in_half else 1e-5)
        texts |= each["texts"]
    assert alone["forward"] == alone["inside"] == 0
    assert in_half or texts == alone["texts"]
