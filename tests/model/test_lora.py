"""Adapters: what they compute, what their checkpoints contain, and what is exported for peft."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.adapters import config_of, overrides_of, plain_loop, trained
from tests.helpers.cases import in_campaign
from tests.helpers.launch import tiny
from tests.helpers.native_models import BESIDE, GPT2, LLAMA, SOURCE, TINY, edit, folder_of
from tests.helpers.tiny import lines
from trainer import ModelSpec, Trainer, UserError, load_config, load_weights, run
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.weights import StoredWeights
from trainer.config.schema import LoraSection
from trainer.export import command_line as export_command
from trainer.model.initial_weights import materialize
from trainer.model.lora import add_adapters, parse_adapter, without_adapters
from trainer.model.network import build_network
from trainer.model.parameters import local


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama folder in Hugging Face format, with its tokenizer files."""
    folder = folder_of(tmp_path / "base")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes(BESIDE[name])
    return folder


def stored(folder: Path) -> StoredWeights:
    return StoredWeights(find_checkpoint(folder))


# ---------------------------------------------------------------------------------------------------------------
# The layers


def network(targets: str | Sequence[str] = "all-linear", **lora: Any) -> nn.Module:
    config = load_config("llama_small", tiny())
    section = replace(LoraSection(rank=4, alpha=8.0, targets=targets), **lora)
    return build_network(replace(config, lora=section))


def adapted(model: nn.Module) -> set[str]:
    """Return the names of the layers that have an adapter."""
    found = (parse_adapter(name) for name, _ in model.named_parameters())
    return {part[0] for part in found if part}


def test_an_adapter_adds_the_product_of_two_small_matrices() -> None:
    layer = nn.Linear(6, 10)
    whole = nn.Sequential(layer)
    add_adapters(whole, [], LoraSection(rank=2, alpha=6.0))
    adapted: Any = whole[0]
    x = torch.randn(3, 5, 6)
    assert torch.equal(whole(x), layer(x)), "the second factor starts at zero"
    with torch.no_grad():
        adapted.lora_B["default"].weight.normal_()
    down, up = adapted.factors
    assert (down.shape, up.shape) == ((2, 6), (10, 2))
    torch.testing.assert_close(whole(x), layer(x) + 3.0 * x @ down.T @ up.T)
    with without_adapters(whole):
        assert torch.equal(whole(x), layer(x))
    names = ["0.lora_A.default.weight", "0.lora_B.default.weight"]
    assert [name for name, p in whole.named_parameters() if p.requires_grad] == names


def test_dropout_applies_only_to_the_adapters_input() -> None:
    whole = nn.Sequential(nn.Linear(8, 8, bias=False))
    add_adapters(whole, [], LoraSection(rank=8, alpha=8.0, dropout=0.5))
    adapted: Any = whole[0]
    with torch.no_grad():
        adapted.lora_A["default"].weight.copy_(torch.eye(8))
        adapted.lora_B["default"].weight.copy_(torch.eye(8))
    x = torch.ones(64, 8)
    added = whole(x) - adapted.base_layer(x)
    assert set(added.round().unique().tolist()) == {0.0, 2.0}
    whole.eval()
    torch.testing.assert_close(whole(x) - adapted.base_layer(x), x)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_follow_the_formula(bias: bool, dropout: float) -> None:
    whole = nn.Sequential(nn.Linear(6, 10, bias=bias, dtype=torch.float64))
    add_adapters(whole, [], LoraSection(rank=2, alpha=6.0, dropout=dropout))
    adapted: Any = whole[0].double()
    factors = [factor.detach().normal_().requires_grad_() for factor in adapted.factors]
    for part, factor in zip((adapted.lora_A, adapted.lora_B), factors, strict=True):
        part["default"].weight = nn.Parameter(factor.detach().clone())
    x, other = (torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    leaves = [x.requires_grad_(), other.requires_grad_()]
    torch.manual_seed(1)
    whole(leaves[0]).sin().sum().backward()
    torch.manual_seed(1)
    into = F.dropout(other.flatten(0, 1), dropout).view_as(other)
    (adapted.base_layer(other) + 3.0 * into @ factors[0].T @ factors[1].T).sin().sum().backward()
    found = [x.grad, *(part["default"].weight.grad for part in (adapted.lora_A, adapted.lora_B))]
    torch.testing.assert_close(found, [other.grad, *(factor.grad for factor in factors)])
    assert adapted.base_layer.weight.grad is None


def test_targets_are_module_names_or_suffixes() -> None:
    of_a_block = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    of_a_block += ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]
    assert adapted(network()) == {f"layers.{n}.{part}" for n in range(2) for part in of_a_block}, "not the head"
    expected = {"layers.0.attention.wq", "layers.1.attention.wq", "layers.1.feed_forward.w2"}
    assert adapted(network(["wq", "layers.1.feed_forward.w2"])) == expected
    assert adapted(network(["q_proj", "down_proj"])) == adapted(network(["wq", "w2"])), "transformers' names"


@pytest.mark.parametrize(
    ("targets", "proposal"),
    [
        (["wq", "wvv"], "lora.targets=[wq,wv]"),
        (["feed_forwrd.w1"], "lora.targets=[layers.1.feed_forward.w1]"),
        (["q_porj"], "lora.targets=[q_proj]"),
        (["lm_head"], ""),
        (["all-linear"], "lora.targets=all-linear"),
        ("all_linear", "lora.targets=all-linear"),
    ],
)
def test_a_target_without_a_layer_is_rejected(targets: list[str] | str, proposal: str) -> None:
    """A list for other models may have names that this one lacks; they are not passed over."""
    with pytest.raises(UserError, match=r"^lora\.targets=") as refused:
        network(targets)
    assert refused.value.proposal == proposal


def test_adapters_are_initialized_like_pefts() -> None:
    model, plain = network(), build_network(load_config("llama_small", tiny()))
    for each in (model, plain):
        materialize(each, 7, torch.device("cpu"))
    weights = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        own = weights.get(name)
        assert torch.equal(weight, weights[name.replace(".weight", ".base_layer.weight")] if own is None else own)
    for name, weight in weights.items():
        if part := parse_adapter(name):
            assert weight.dtype == torch.float32
            bound = 1 / math.sqrt(weight.shape[1]) if part[1] == "A" else 0.0  # kaiming's with a = sqrt(5)
            assert 0.9 * bound <= float(weight.detach().abs().max()) <= bound, name


@pytest.mark.parametrize(
    "override", ["lora.targets=[]", "lora.targets=[q_porj]", "lora.rank=-1", "lora.dropout=1", "lora.rank=0"]
)
def test_mistakes(override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = overrides_of(None, tmp_path / "run", override, "train.steps=1")
    assert run.main(["recipe=llama_small", *arguments]) == 2
    setting = "lora.alpha" if override == "lora.rank=0" else override  # which has no use without adapters
    assert capsys.readouterr().err.startswith(f"error: {setting}")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_checkpoint_has_the_adapters_and_names_the_base(tmp_path: Path) -> None:
    """It is hardly larger than they and their moments."""
    base = folder_of(tmp_path / "base", config=replace(SOURCE, dim=128, ffn_dim=256, num_layers=2))
    folder = trained(base, tmp_path / "run", "train.steps=2", "lora.rank=64")
    checkpoint, before = stored(folder), load_weights(base).state_dict()
    after = load_weights(folder).state_dict()
    assert set(checkpoint.shapes) == {name for name in after if parse_adapter(name)}
    for name, weight in after.items():
        if not parse_adapter(name):
            assert torch.equal(weight, before[name.replace(".base_layer", "")]), name
    assert checkpoint.parts["base"]["path"] == str(base)
    moments = [key for key in checkpoint.layout if key.startswith("optimizer.")]
    assert moments
    assert all(parse_adapter(key.split(".", 2)[2].rpartition(".")[0]) for key in moments), moments
    adapters = sum(weight.numel() for name, weight in after.items() if parse_adapter(name))
    start = lines(folder)[0]
    assert start["trainable_parameters"] == adapters < start["parameters"] == sum(w.numel() for w in after.values())
    found = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    assert 3 * 4 * adapters < found <= 1.2 * 3 * 4 * adapters


def test_different_base_is_rejected_and_moved_base_is_accepted(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(base, tmp_path / "run")
    moved, other = Path(shutil.move(base, tmp_path / "moved")), folder_of(tmp_path / "other")
    tensors = load_file(moved / "model.safetensors")
    [*tensors.values()][-1].flatten()[-1].add_(1e-3)  # one number of all
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    assert run.main(["recipe=llama_small", *overrides_of(other, folder, "train.steps=3")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert f"train.init_from={other}" in printed
    assert str(base) in printed, "that the run was trained with"
    with pytest.raises(UserError, match="missing") as refused:
        load_weights(folder)
    assert str(base) in str(refused.value)
    trained(moved, folder, "train.steps=3")
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert stored(folder).parts["base"]["path"] == str(moved)


@pytest.mark.campaign
def test_checkpoint_contains_a_randomly_initialized_base(tmp_path: Path) -> None:
    """Random weights exist nowhere else."""
    folder = trained(None, tmp_path / "run")
    assert set(stored(folder).shapes) == set(load_weights(folder).state_dict())
    trained(None, folder, "train.steps=3")


@pytest.mark.campaign
def test_training_from_a_run_with_adapters_merges_them(base: Path, tmp_path: Path) -> None:
    first = trained(base, tmp_path / "first")
    assert export_command([str(first), str(tmp_path / "merged"), "--merged"]) == 0
    merged_weights = load_weights(tmp_path / "merged").state_dict()
    again = trained(first, tmp_path / "again")
    for name, weight in load_weights(again).state_dict().items():
        if not parse_adapter(name):
            assert torch.equal(weight, merged_weights[name.replace(".base_layer", "")]), name
    assert export_command([str(again), str(tmp_path / "twice")]) == 0
    assert (tmp_path / "twice" / "chat_template.jinja").read_bytes() == BESIDE["chat_template.jinja"]


@pytest.mark.campaign
def test_base_in_bfloat16(base: Path, tmp_path: Path) -> None:
    """On request, and without one if the folder has it in bfloat16; exports keep that."""
    expected, found = [], []
    for losses, own in ((expected, []), (found, ["lora.base_dtype=bfloat16"])):
        trainer = Trainer(config_of(base, tmp_path / str(len(own)), "train.steps=3", *own))
        losses.extend(record.loss for record in trainer.steps())
        dtypes = {bool(parse_adapter(name)): p.dtype for name, p in trainer.model.named_parameters()}
        assert dtypes == {True: torch.float32, False: torch.bfloat16 if own else torch.float32}
        trainer.close()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
    assert found != expected

    half = {name: weight.bfloat16() for name, weight in load_file(base / "model.safetensors").items()}
    save_file(half, base / "model.safetensors")
    edit(base, dtype="bfloat16", torch_dtype="bfloat16")
    assert config_of(base, tmp_path / "run").lora.base_dtype == "bfloat16", "and it is on record"
    folder = trained(base, tmp_path / "run")
    assert export_command([str(folder), str(tmp_path / "merged"), "--merged"]) == 0
    exported = load_file(tmp_path / "merged" / "model.safetensors")
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------------
# Exports


def test_export_has_only_the_adapter_unless_merged(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = trained(base, tmp_path / "run"), tmp_path / "out"
    assert export_command([str(folder), str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json", "chat_template.jinja")
    }
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")
    model = load_weights(folder).state_dict()
    tensors = load_file(out / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(tensors[key], model["layers.1.feed_forward.w2.lora_B.default.weight"])
    assert len(tensors) == 2 * 2 * 7

    assert export_command([str(folder), str(out)]) == 2, "an earlier export is there"
    assert export_command([str(folder), str(out), "--overwrite", "--merged", "--dtype", "bfloat16"]) == 0
    assert not (out / "adapter_model.safetensors").exists()
    whole = load_file(out / "model.safetensors")
    scaled = 2.0 * model["layers.1.feed_forward.w2.lora_B.default.weight"]
    product = scaled @ model["layers.1.feed_forward.w2.lora_A.default.weight"]
    expected = (model["layers.1.feed_forward.w2.base_layer.weight"] + product).bfloat16()
    torch.testing.assert_close(whole["model.layers.1.mlp.down_proj.weight"], expected)
    capsys.readouterr()
    assert export_command([str(folder), str(tmp_path / "weights.pt")]) == 2
    assert "--merged" in capsys.readouterr().err
    assert export_command([str(folder), str(tmp_path / "weights.pt"), "--merged"]) == 0
    plain = torch.load(tmp_path / "weights.pt")
    torch.testing.assert_close(plain["layers.1.feed_forward.w2.weight"].bfloat16(), expected)


MODELS: dict[str, tuple[ModelSpec, Any, str, list[str]]] = {
    "llama": (LLAMA, SOURCE, "llama_small", []),
    "llama tied, some layers": (LLAMA, replace(TINY, tie_embeddings=True), "llama_small", ["lora.targets=[wq,w2]"]),
    "gpt2": (GPT2, GPT2.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_seq_len=64), "gpt2", []),
}


@pytest.mark.parametrize("name", ["llama", *in_campaign(*list(MODELS)[1:])])
def test_peft_computes_the_same_and_loads_the_merged_export(name: str, tmp_path: Path) -> None:
    """Four steps from the same adapters; then both kinds of export, bit for bit."""
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    recipe, model_config, yaml, overrides = MODELS[name]
    base = folder_of(tmp_path / "base", recipe, model_config)
    config = config_of(base, tmp_path / "run", "train.steps=4", *overrides, recipe=yaml)
    trainer = Trainer(config)
    batches = list(islice(iter(trainer.build_loader()), 4 * trainer.num_micro_batches))
    first = {name: local(p.detach()).clone() for name, p in trainer.model.named_parameters() if parse_adapter(name)}
    records = list(trainer.steps())
    trainer.save_checkpoint(wait=True)
    trainer.close()
    assert export_command([str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert export_command([str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = {key.replace(".default", ""): weight for key, weight in loaded.state_dict().items() if "lora_" in key}
    assert theirs.keys() == tensors.keys()
    assert all(torch.equal(weight, tensors[key]) for key, weight in theirs.items())
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for key, weight in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(weight, ours[key]), key

    settings = LoraConfig.from_pretrained(tmp_path / "adapter")
    settings.inference_mode = False
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    trained_there = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        # Both list a layer's A before its B, in the order of the layers.
        for parameter, weight in zip(trained_there, first.values(), strict=True):
            parameter.copy_(weight)
    losses = plain_loop(model, trained_there, batches, [record.lr for record in records], config)
    torch.testing.assert_close([record.loss for record in records], losses, rtol=1e-6, atol=0)


@pytest.mark.campaign
def test_adapters_compile_in_one_graph(tmp_path: Path, base: Path) -> None:
    losses = []
    for word in ("false", "true"):
        folder = trained(base, tmp_path / word, f"train.compile={word}")
        losses.append([line["loss"] for line in lines(folder) if line["kind"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
