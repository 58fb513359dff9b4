"""Linear layers in float8: which are converted, which stay, and the message if float8 is impossible."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers.launch import on_ranks, run, tiny
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.config import check_config
from trainer.model.float8 import apply_float8
from trainer.model.parameters import local
from trainer.model.units import find_blocks

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao warns about its kernels

WAYS = ["tensorwise", "rowwise"]
BFLOAT16 = "fsdp.param_dtype=bfloat16"


def float8_config(folder: Path, *overrides: str) -> RunConfig:
    return load_config("llama_small", tiny(BFLOAT16, "run.threads=1", *overrides, f"run.dir={folder}"))


def small_llama() -> tuple[nn.Module, list[nn.Module]]:
    config = load_config("llama_small", tiny())
    with torch.device("meta"):
        model = config.recipe.build_model(config.model)
    return model, find_blocks(model, config.recipe)


# ---------------------------------------------------------------------------------------------------------------
# What is rejected


@pytest.mark.slow
@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
@pytest.mark.parametrize("launch", [["nproc=2"], pytest.param([], marks=pytest.mark.campaign)])
def test_without_torchao_one_message_says_what_to_install(launch: list[str], tmp_path: Path) -> None:
    ran = run(tmp_path / "run", "train.float8=rowwise", BFLOAT16, *launch, code=2)
    assert ran.err.count("pip install 'meshtrainer[float8]'") == 1
    assert "Traceback" not in ran.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", WAYS)
def test_device_without_float8_is_rejected(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    _, blocks = small_llama()
    with pytest.raises(
        UserError, match=rf"train\.float8={way}: needs a GPU .* this run is on cpu\n.*train\.float8=none"
    ):
        apply_float8(blocks, way, "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(UserError, match=r"compute capability (8\.9|9\.0) or higher; A100 has 8\.0"):
        apply_float8(blocks, way, "cuda")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fsdp.param_dtype=float32"], r"train\.float8=rowwise: needs layers that compute in bfloat16"),
        ([BFLOAT16, "data.seq_len=33"], r"must be a multiple of 16"),
        ([BFLOAT16, "train.activation_checkpoint=budget:0.5"], r"selection by budget does not support float8"),
    ],
)
def test_layers_that_are_converted(overrides: list[str], message: str) -> None:
    config = load_config("llama_small", tiny("train.float8=rowwise", *overrides))
    with pytest.raises(UserError, match=message):
        check_config(config, 1, 1)


# ---------------------------------------------------------------------------------------------------------------
# With torchao


@needs_torchao
@pytest.mark.parametrize("way", WAYS)
def test_layers_of_blocks_are_converted_and_keep_their_names(way: str) -> None:
    model, blocks = small_llama()
    names, head = list(model.state_dict()), type(model.head.output)  # type: ignore[union-attr]
    assert apply_float8(blocks, way, "cpu", emulate=True) == 2 * 7
    assert list(model.state_dict()) == names
    assert type(model.head.output) is head  # type: ignore[union-attr]
    assert type(model.layers[0].attention.wq).__name__ == "Float8Linear"  # type: ignore[union-attr, index]


class _Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


@needs_torchao
def test_unsuitable_layers_are_not_converted() -> None:
    block = nn.Sequential(nn.Linear(16, 24), _Own(16, 16), nn.Linear(16, 32))
    assert apply_float8([block], "tensorwise", "cpu", emulate=True) == 1
    assert [type(child).__name__ for child in block] == ["Linear", "_Own", "Float8Linear"]
    with pytest.raises(UserError, match="no block has a linear layer whose dimensions are both multiples of 16"):
        apply_float8([nn.Sequential(nn.Linear(16, 24))], "tensorwise", "cpu", emulate=True)


def train(folder: Path, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Train with emulated products; return initial weights, losses and the content of a checkpoint."""
    import torch.distributed as dist

    from tests.helpers.comparing import load_tensors

    dist.init_process_group("gloo")
    found = []
    with mock.patch("trainer.model.shard.apply_float8", functools.partial(apply_float8, emulate=True)):
        for number, own in enumerate(runs):
            trainer = Trainer(float8_config(folder / str(number), "train.steps=10", *own))
            before = {name: local(p).detach().clone() for name, p in trainer.model.named_parameters()}
            losses = [record.loss for record in trainer.steps()]
            path = trainer.save_checkpoint(wait=True)
            trainer.close()
            found.append({"before": before, "losses": losses, "stored": sorted(load_tensors(Path(path)))})
    return found


@pytest.mark.slow
@needs_torchao
def test_float8_run_has_the_same_initial_weights_and_names(tmp_path: Path) -> None:
    runs = [[], *([f"train.float8={way}"] for way in WAYS)]
    runs += [["train.float8=tensorwise", f"train.activation_checkpoint={kind}"] for kind in ("full", "selective")]
    runs += [["train.float8=tensorwise", "train.compile=true"]]
    plain, *others = on_ranks(2, train, tmp_path, runs)[0]
    for found in others:
        assert found["stored"] == plain["stored"]
        assert all(torch.equal(found["before"][name], tensor) for name, tensor in plain["before"].items())
        assert found["losses"] != plain["losses"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=0.02)
    tensorwise, _, full, selective, _ = others
    assert full["losses"] == tensorwise["losses"]
    assert selective["losses"] == tensorwise["losses"]


@pytest.mark.slow
@needs_torchao
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", WAYS)
def test_float8_training_on_a_gpu(way: str, tmp_path: Path) -> None:
    own = ["train.steps=10", BFLOAT16]
    plain = run(tmp_path / "plain", *own).train("loss")
    compiled = run(tmp_path / "float8", *own, f"train.float8={way}", "train.compile=true")
    assert compiled.train("loss") == pytest.approx(plain, rel=0.02)
