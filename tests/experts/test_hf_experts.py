"""Mixtures of transformers with their experts distributed over ranks: the same losses and the same exports."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.experts.test_expert_parallel import EXCHANGE, FOUR, GATHER, TWO
from tests.helpers.hf_models import MIXTURES, folder_of, load_with_transformers, plain_losses
from tests.helpers.ranks import merged, run_ranks
from tests.trainer.test_exactness import relative
from trainer import Trainer, UserError, load_config, load_weights
from trainer.config import check_config
from trainer.export import export_checkpoint
from trainer.model.shard import check_sharding

CAMPAIGN = pytest.mark.campaign
LR, STEPS = 1e-3, 6
SETTINGS = [
    *("data.source=synthetic", "data.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=1"),
    *(f"optim.lr={LR}", "optim.weight_decay=0", "optim.max_grad_norm=null", "schedule.name=constant"),
    *("schedule.warmup_steps=0", "eval.every=0", "checkpoint.every=0", "log.every=1", "log.sample_tokens=0"),
    *("run.threads=1", "run.device=cpu", "train.compile=false", f"train.steps={STEPS}", "model.attention=eager"),
]
LORA = ["lora.rank=3", "lora.alpha=6", "lora.targets=[experts,o_proj]"]


def config_of(base: Path, folder: Path | str, *overrides: str) -> Any:
    own = [*merged(SETTINGS, overrides), f"run.dir={folder}"]
    return load_config("llama_small", ["model.name=hf", f"model.path={base}", *own])


def train_each(base: Path, folder: Path, runs: list[list[str]]) -> list[dict[str, list[float]]]:
    """Train with each list of overrides, one after another in one process group, and save."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for number, overrides in enumerate(runs):
        trainer = Trainer(config_of(base, folder / str(number), *overrides))
        records = list(trainer.steps())
        trainer.save_checkpoint(wait=True)
        trainer.close()
        found.append({field: [record[field] for record in records] for field in ("loss", "grad_norm")})
    return found


RUNS = [
    *([TWO, EXCHANGE, "mesh.replicate=2"], [FOUR, GATHER, "train.activation_checkpoint=full"], [TWO, GATHER, *LORA]),
    *([FOUR, EXCHANGE], [TWO, EXCHANGE, *LORA], ["mesh.shard=4"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(k, marks=CAMPAIGN) for k in list(MIXTURES)[1:])])
def test_losses_are_those_of_one_rank_and_of_transformers(kind: str, tmp_path: Path) -> None:
    base, is_everyday = folder_of(tmp_path / "base", kind), kind == "qwen3_moe"
    alone = run_ranks(1, train_each, base, tmp_path / "one", [[], LORA])[0]
    by_ranks = {4: RUNS[:3]} if is_everyday else {4: RUNS, 2: [[TWO, EXCHANGE], [TWO, GATHER]]}
    for number, runs in by_ranks.items():
        found = run_ranks(number, train_each, base, tmp_path / str(number), runs, timeout_s=900)[-1]
        for run, ours in zip(runs, found, strict=True):
            theirs = alone["lora.rank=3" in run]
            off = {field: relative(ours[field], theirs[field]) for field in ours}
            print(kind, number, run, off)
            assert off["loss"] < 1e-6, run
            assert off["grad_norm"] < 1e-5, run

    # Without adapters, what a plain loop of transformers computes.
    trainer = Trainer(config_of(base, tmp_path / "unused"))
    batches = list(itertools.islice(iter(trainer.build_loader()), STEPS * trainer.num_micro_batches))
    trainer.close()
    size = len(batches) // STEPS
    whole = [
        {name: torch.cat([batch[name] for batch in batches[step * size : (step + 1) * size]]) for name in batches[0]}
        for step in range(STEPS)
    ]
    losses, _ = plain_losses(base, whole, LR)
    torch.testing.assert_close(alone[0]["loss"], losses, rtol=1e-5, atol=0)


def export_untrained(base: Path, folder: Path, overrides: list[str]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    trainer = Trainer(config_of(base, folder, *overrides))
    trainer.load_checkpoint()
    trainer.save_checkpoint(wait=True)
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", *(pytest.param(k, marks=CAMPAIGN) for k in MIXTURES if k != "gpt_oss")])
def test_weights_read_by_the_owners_of_experts_are_exported_bit_for_bit(kind: str, tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", kind)
    run_ranks(2, export_untrained, base, tmp_path / "run", [TWO, EXCHANGE])
    export_checkpoint(tmp_path / "run", tmp_path / "export")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_with_transformers(base)[0].eval()(tokens).logits
        torch.testing.assert_close(load_weights(tmp_path / "run")(tokens), expected, rtol=1e-5, atol=1e-5)


def test_models_without_such_experts_are_refused(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path / "dense", "llama"), tmp_path / "run", TWO, EXCHANGE)
    with pytest.raises(UserError, match=r"^mesh\.expert=2: recipe 'hf' declares no experts(.|\n)*mesh\.expert=1"):
        check_config(config, 4, 4)
    config = config_of(folder_of(tmp_path / "mixture", "qwen3_moe"), tmp_path / "run", FOUR, EXCHANGE)
    check_config(config, 4, 4)
    check_sharding(config, 4)
