"""Recomputation changes only memory: no bit of losses and norms, and less is kept, down to the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.cases import in_campaign
from tests.helpers.launch import merged, tiny
from tests.helpers.plan_truth import measure
from tests.helpers.tiny import tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config.rules import check_config
from trainer.model.shard import check_sharding


def losses_and_norms(folder: Path, *overrides: str) -> list[tuple[float, float]]:
    trainer = Trainer(tiny_config(folder, "model.num_layers=3", *overrides))
    batches, found = iter(trainer.loader), []
    for _ in range(3):
        update = trainer.train_step([next(batches) for _ in range(trainer.num_micro_batches)])
        found.append((float(update.loss), float(update.grad_norm)))
    trainer.close()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return losses_and_norms(tmp_path_factory.mktemp("plain"), "train.activation_checkpoint=none")


@pytest.mark.parametrize(
    "policy",
    [
        *("full", "budget:0.2"),
        *in_campaign("selective", "budget:0", "budget:1", "2"),
    ],
)
def test_recomputation_changes_no_bit(policy: str, plain: list[tuple[float, float]], tmp_path: Path) -> None:
    assert losses_and_norms(tmp_path, f"train.activation_checkpoint={policy}") == plain


@pytest.mark.campaign
def test_recomputation_of_compiled_blocks(plain: list[tuple[float, float]], tmp_path: Path) -> None:
    """A compiler may round in a different order."""
    compiled = losses_and_norms(tmp_path, "train.compile=true", "train.activation_checkpoint=budget:0.2")
    for own, expected in zip(compiled, plain, strict=True):
        assert own == pytest.approx(expected, rel=1e-5)


@pytest.mark.campaign
def test_memory_grows_with_the_budget(tmp_path: Path) -> None:
    """From that of full recomputation to at most that of keeping all expensive results.  Of what blocks keep without
    recomputation, a budget allows a share.
    """

    def peak(policy: str) -> int:
        own = [f"train.activation_checkpoint={policy}", "model.num_layers=4", "model.vocab_size=64", "data.seq_len=128"]
        own += ["data.source=synthetic", "train.global_batch_size=2", f"run.dir={tmp_path}"]
        return measure("llama_small", merged(tiny(), own))[0]

    full, selective, everything = (peak(policy) for policy in ("full", "selective", "none"))
    shares = (0.0, 0.2, 0.5, 1.0)
    peaks = [peak(f"budget:{share}") for share in shares]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) > 2
    assert peaks[0] == full
    assert peaks[-1] <= selective < everything
    for share, found in zip(shares, peaks, strict=True):
        assert found <= full + share * (everything - full) + 0.02 * everything, share


def test_a_budget_keeps_what_costs_most_to_recompute(tmp_path: Path) -> None:
    """Per byte: three tenths of the memory spare more than half of the FLOPs."""

    def flops(policy: str) -> int:
        trainer = Trainer(tiny_config(tmp_path, "model.num_layers=3", f"train.activation_checkpoint={policy}"))
        batches = iter(trainer.loader)
        with FlopCounterMode(display=False) as counter:
            trainer.train_step([next(batches) for _ in range(trainer.num_micro_batches)])
        trainer.close()
        return counter.get_total_flops()

    kept, within_budget, recomputed = map(flops, ("none", "budget:0.3", "full"))
    assert kept < within_budget < (kept + recomputed) / 2


@pytest.mark.parametrize(("value", "legal"), [("half", "0.5"), ("nan", "0.5"), ("1.5", "1"), ("-0.1", "0")])
def test_share_must_be_between_0_and_1(value: str, legal: str) -> None:
    config = load_config("llama_small", [f"train.activation_checkpoint=budget:{value}"])
    with pytest.raises(UserError, match=rf"^train\.activation_checkpoint=budget:{value}") as refused:
        check_config(config, 1, 1)
    assert refused.value.proposal == f"train.activation_checkpoint=budget:{legal}"


def test_unit_inside_a_block_is_rejected() -> None:
    own = ["fsdp.wrap=tests.helpers.custom_recipes:every_linear", "train.activation_checkpoint=budget:0.5"]
    with pytest.raises(UserError, match=r"^train\.activation_checkpoint=budget:0\.5"):
        check_sharding(load_config("llama_small", own))
