"""The same losses and weights on any mesh and as in a plain loop without FSDP; bit-identical resumes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.helpers.cases import in_campaign
from tests.helpers.comparing import differing, load_tensors, relative
from tests.helpers.launch import on_ranks, run, tiny
from tests.helpers.runs import MESHES, STEPS, SharedRun
from tests.helpers.tiny import full
from trainer import Trainer, TrainLoader, load_config, load_weights
from trainer.data.opening import open_source
from trainer.data.source import IGNORE
from trainer.model.initial_weights import materialize

pytestmark = pytest.mark.slow

LAST = f"checkpoints/step_{STEPS:08d}"


# ---------------------------------------------------------------------------------------------------------------
# A plain loop


def test_a_plain_pytorch_loop_gives_the_same_losses(one: SharedRun) -> None:
    """With rows of different lengths: a step's loss is the mean over all its targets."""
    losses, norms, tokens = plain_loop(load_config(str(one.folder)))
    assert relative(one.train("loss"), losses) < 1e-5
    assert relative(one.train("grad_norm"), norms) < 1e-5
    assert one.train("tokens") == tokens


def plain_loop(config: Any) -> tuple[list[float], list[float], list[int]]:
    """Train as a plain script would: no FSDP, no trainer, full batches, plain cross-entropy and AdamW."""
    with torch.device("meta"):
        model = config.spec.build_model(config.model)
    materialize(model, config.run.seed, torch.device("cpu"))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "tok_embeddings" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "tok_embeddings" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
    )
    size, warmup = config.train.global_batch_size, 5
    loader = iter(
        TrainLoader(
            open_source(config.data, config.model.vocab_size, "train"),
            seed=0,
            global_batch_size=size,
            micro_batch_size=size,
            dp_rank=0,
            num_dp_ranks=1,
            num_workers=0,
        )
    )
    losses, norms, tokens = [], [], []
    for step in range(1, STEPS + 1):
        batch = next(loader)
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORE)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * (step / warmup if step <= warmup else cosine)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens.append(int((batch["targets"] != IGNORE).sum()) + (tokens[-1] if tokens else 0))
    return losses, norms, tokens


# ---------------------------------------------------------------------------------------------------------------
# Meshes


@pytest.mark.parametrize("name", ["two", "four"])
def test_runs_agree_on_every_mesh(name: str, one: SharedRun, request: pytest.FixtureRequest) -> None:
    """Ranks have different numbers of targets, since each row has one document."""
    other: SharedRun = request.getfixturevalue(name)
    for field in ("step", "tokens", "lr"):
        assert other.train(field) == one.train(field), field
    assert relative(other.train("loss"), one.train("loss")) < 1e-5
    assert relative(other.train("grad_norm"), one.train("grad_norm")) < 1e-5
    evaluated = [[line["loss"] for line in each.of_kind("eval")] for each in (other, one)]
    assert relative(*evaluated) < 1e-5
    samples = [
        [(line["step"], line["prompt"], line["text"]) for line in each.of_kind("sample")] for each in (other, one)
    ]
    assert samples[0] == samples[1] != []
    ours, alone = (load_weights(each.folder).state_dict() for each in (other, one))
    for weight, tensor in alone.items():
        torch.testing.assert_close(ours[weight], tensor, rtol=1e-4, atol=1e-5, msg=weight)


ODD_LLAMA = tiny("model.vocab_size=263", "train.global_batch_size=12")
ODD_GPT2 = [
    "data.source=synthetic",
    "data.seq_len=32",
    "fsdp.param_dtype=float32",
    "model.vocab_size=263",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "train.global_batch_size=12",
    "train.micro_batch_size=1",
]


def initial_weights(meshes: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    """Return the full initial weights of a llama and a tied gpt2 on each mesh."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    found = []
    for mesh in meshes:
        whole = {}
        for recipe, overrides in (("llama_small", ODD_LLAMA), ("gpt2", ODD_GPT2)):
            trainer = Trainer(load_config(recipe, overrides + mesh))
            for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
                whole[f"{recipe}.{name}"] = full(parameter).detach().clone()
            trainer.close()
        found.append(whole)
    return found


@pytest.mark.campaign
@pytest.mark.parametrize(("ranks", "mesh"), [(3, []), (4, ["mesh.replicate=2"])], ids=["3", "2x2"])
def test_initial_weights_are_bit_identical_on_every_mesh(ranks: int, mesh: list[str]) -> None:
    """An odd vocabulary gives uneven shards; gpt2 has a tied table."""
    one, other_seed = initial_weights([[], ["run.seed=1"]])
    assert torch.equal(one["gpt2.wte.weight"], one["gpt2.head.output.weight"])
    for name, tensor in one.items():
        is_constant = tensor.eq(tensor.flatten()[0]).all()
        assert is_constant or not torch.equal(other_seed[name], tensor), name
    for (found,) in on_ranks(ranks, initial_weights, [mesh]):
        assert differing(found, one) == []


# ---------------------------------------------------------------------------------------------------------------
# Resumes


@pytest.mark.parametrize("name", ["two", *in_campaign("one", "four")])
def test_resume_is_bit_identical(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """From step 8, as after a crash: losses, weights and moments."""
    straight: SharedRun = request.getfixturevalue(name)
    resumed = run(straight.copy_to(tmp_path / "run", up_to=8), *straight.overrides)
    assert [line["resumed_step"] for line in resumed.of_kind("start")] == [None, 8]
    for field in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert resumed.train(field) == straight.train(field), field
    found, expected = (load_tensors(each.folder / LAST) for each in (resumed, straight))
    assert len(expected) > 30
    assert differing(found, expected) == []


@pytest.mark.parametrize("to", ["two", *in_campaign("one", "four")])
def test_checkpoint_of_four_ranks_resumes_on_other_meshes(
    to: str, tmp_path: Path, four: SharedRun, one: SharedRun
) -> None:
    """No sample is repeated or missed: the losses are those of the undisturbed run."""
    own = [item for item in four.overrides if item not in MESHES["four"]]
    resumed = run(four.copy_to(tmp_path / "run", up_to=8), *own, *MESHES[to])
    assert [line["resumed_step"] for line in resumed.of_kind("start")] == [None, 8]
    assert relative(resumed.train("loss"), one.train("loss")) < 1e-5
    assert resumed.train("tokens") == one.train("tokens")
