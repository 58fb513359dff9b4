"""Linear layers in float8: which settings go with it, and that a converted model is the same model."""

from __future__ import annotations

import functools
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import run, tiny
from tests.helpers.tiny import full, tiny_config
from trainer import Trainer, UserError, load_config
from trainer import run as run_command
from trainer.config.rules import check_config
from trainer.model import shard

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao warns about its kernels

WAYS = ["tensorwise", "rowwise"]
BFLOAT16 = "fsdp.param_dtype=bfloat16"


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_without_torchao_one_message_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["recipe=llama_small", *tiny("train.float8=rowwise", BFLOAT16), f"run.dir={tmp_path / 'run'}"]
    assert run_command.main(given) == 2
    printed = capsys.readouterr().err
    assert printed.count("meshtrainer[float8]") == 1
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", WAYS)
def test_device_without_float8_is_rejected(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def with_torchao(name: str, package: str | None = None) -> Any:
        return ModuleSpec(name, None) if name == "torchao" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", with_torchao)
    with pytest.raises(UserError, match=rf"^train\.float8={way}") as refused:
        Trainer(tiny_config(tmp_path / "run", f"train.float8={way}", BFLOAT16))
    assert "cpu" in str(refused.value)
    assert "train.float8=none" in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["fsdp.param_dtype=float32"], "train.float8=rowwise"),
        ([BFLOAT16, "data.seq_len=33"], "train.float8=rowwise"),
        ([BFLOAT16, "train.activation_checkpoint=budget:0.5"], "train.activation_checkpoint=budget:0.5"),
    ],
)
def test_settings_that_do_not_go_with_float8_are_rejected(overrides: list[str], setting: str) -> None:
    config = load_config("llama_small", tiny("train.float8=rowwise", *overrides))
    with pytest.raises(UserError) as refused:
        check_config(config, 1, 1)
    assert str(refused.value).startswith(setting)


@needs_torchao
@pytest.mark.parametrize("way", WAYS)
def test_converted_layers_keep_their_names_weights_and_losses(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With products that torchao emulates on the CPU, with and without recomputation."""
    monkeypatch.setattr(shard, "apply_float8", functools.partial(shard.apply_float8, emulate=True))
    found = []
    for own in ([], [f"train.float8={way}"], [f"train.float8={way}", "train.activation_checkpoint=full"]):
        trainer = Trainer(tiny_config(tmp_path, "train.steps=4", "model.dim=32", BFLOAT16, *own))
        kinds = {name: type(module).__name__ for name, module in trainer.model.named_modules()}
        before = {name: full(weight).clone() for name, weight in trainer.model.state_dict().items()}
        found.append((kinds, before, [record.loss for record in trainer.steps()]))
        trainer.close()
    (_, weights, losses), (kinds, before, converted), (_, _, recomputed) = found
    assert {name.rpartition(".")[0] for name, kind in kinds.items() if kind == "Float8Linear"} == {
        f"layers.{layer}.{part}" for layer in range(2) for part in ("attention", "feed_forward")
    }, "not the output projection"
    assert before.keys() == weights.keys()
    assert all(torch.equal(before[name], weight) for name, weight in weights.items())
    assert recomputed == converted != losses
    assert converted == pytest.approx(losses, rel=0.02)


@pytest.mark.slow
@needs_torchao
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", WAYS)
def test_float8_training_on_a_gpu(way: str, tmp_path: Path) -> None:
    own = ["train.steps=10", BFLOAT16, "run.device=cuda"]
    plain = run(tmp_path / "plain", *own, fresh=True).train("loss")
    compiled = run(tmp_path / "float8", *own, f"train.float8={way}", "train.compile=true", fresh=True)
    assert compiled.train("loss") == pytest.approx(plain, rel=0.02)
