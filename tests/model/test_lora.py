"""Adapters: what they compute, what their checkpoints contain, and what is exported for peft."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tests.helpers.launch import merged, tiny
from tests.helpers.native_models import BESIDE, GPT2, LLAMA, SOURCE, TINY, edit, folder_of
from trainer import Trainer, UserError, load_config, load_weights, run
from trainer.checkpoint.reader import StoredWeights, find_checkpoint
from trainer.config import LoraSection
from trainer.export import command_line as export_command
from trainer.model.lora import add_adapters, find_layers, parse_adapter, without_adapters
from trainer.model.materialize import materialize
from trainer.model.network import build_network
from trainer.model.parameters import local
from trainer.recipe import Recipe
from trainer.weights.adapters import adapted_layers

OWN = [
    *("data.source=synthetic", "data.seq_len=16", "train.global_batch_size=4", "optim.lr=1e-2"),
    *("schedule.warmup_steps=0", "lora.rank=4", "lora.alpha=8", "fsdp.param_dtype=float32"),
]


def overrides_of(base: Path | str | None, folder: Path, *overrides: str) -> list[str]:
    own = [f"train.init_from={base}", *OWN] if base is not None else OWN
    shaped = tiny(*merged(own, [*overrides, f"run.dir={folder}"]))
    return [item for item in shaped if base is None or not item.startswith("model.")]


def config_of(base: Path | str | None, folder: Path, *overrides: str, recipe: str = "llama_small") -> Any:
    return load_config(recipe, overrides_of(base, folder, *overrides))


def trained(base: Path | str | None, folder: Path, *overrides: str, recipe: str = "llama_small") -> Path:
    """Train, for two steps by default, and return the run's folder."""
    trainer = Trainer(config_of(base, folder, *merged(["train.steps=2"], overrides), recipe=recipe))
    try:
        assert trainer.fit() == 0
    finally:
        trainer.close()
    return folder


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
    assert [name for name, p in whole.named_parameters() if p.requires_grad] == [
        "0.lora_A.default.weight",
        "0.lora_B.default.weight",
    ]


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


def test_all_linear_is_every_linear_layer_of_the_blocks() -> None:
    names = [name for name, _ in network().named_parameters()]
    of_a_block = [f"attention.{part}" for part in ("wq", "wk", "wv", "wo")] + ["feed_forward.w1", "feed_forward.w3"]
    of_a_block.append("feed_forward.w2")
    assert adapted_layers(names) == {f"layers.{n}.{part}" for n in range(2) for part in of_a_block}
    assert "head.output.weight" in names, "and not the projection onto the vocabulary"


def test_targets_are_module_names_or_suffixes() -> None:
    found = adapted_layers(name for name, _ in network(["wq", "layers.1.feed_forward.w2"]).named_parameters())
    assert found == {"layers.0.attention.wq", "layers.1.attention.wq", "layers.1.feed_forward.w2"}
    with pytest.raises(
        UserError, match=r"^lora\.targets=\[wq,wvv\]: no layer is named 'wvv'(.|\n)*did you mean .*\[wq,wv\]"
    ):
        network(["wq", "wvv"])
    with pytest.raises(UserError, match=r"^lora\.targets=\[feed_forwrd\.w1\](.|\n)*did you mean .*feed_forward\.w1"):
        network(["feed_forwrd.w1"])
    for output in ("output", "lm_head"):
        with pytest.raises(UserError, match=r"head\.output is not a layer that can have an adapter"):
            network([output])
    for all_linear in (["all-linear"], "all_linear"):
        with pytest.raises(UserError, match=r"did you mean lora\.targets=all-linear\?"):
            network(all_linear)


def test_target_without_a_layer_is_rejected() -> None:
    """Common lists contain gate_proj, which mixtures of experts do not have as a layer for adapters."""
    layers = nn.ModuleDict({"q_proj": nn.Linear(2, 2), "v_proj": nn.Linear(2, 2)})
    for targets in (["q_proj", "v_proj", "gate_proj"], ["gate_proj"]):
        with pytest.raises(UserError, match=r"no layer is named 'gate_proj'; .*: q_proj, v_proj$"):
            find_layers(layers, [], targets)


def test_layer_names_of_transformers_are_recognized() -> None:
    config = load_config("llama_small", tiny())
    theirs = build_network(replace(config, lora=LoraSection(rank=4, targets=["q_proj", "down_proj"])))
    ours = build_network(replace(config, lora=LoraSection(rank=4, targets=["wq", "w2"])))
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.named_parameters()]


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
            assert 0.9 * bound <= float(weight.abs().max()) <= bound, name


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lora.targets=[]", "lora.targets=[]: must name at least one layer"),
        ("lora.targets=[q_porj]", "did you mean 'lora.targets=[q_proj]'?"),
        ("lora.rank=-1", "nearest legal value: lora.rank=0"),
        ("lora.dropout=1", "lora.dropout=1.0: must be below 1"),
        ("lora.rank=0", "lora.alpha=8.0: only applies to adapters, and lora.rank=0 means no adapters"),
    ],
)
def test_mistakes(override: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = overrides_of(None, tmp_path / "run", override, "train.steps=1")
    assert run.main(["recipe=llama_small", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.slow
def test_checkpoint_has_the_adapters_and_names_the_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(base, tmp_path / "run", "train.steps=2")
    checkpoint = stored(folder)
    before = load_weights(base).state_dict()
    model = load_weights(folder)
    after = model.state_dict()
    assert set(checkpoint.shapes) == {name for name in after if parse_adapter(name)}
    for name, weight in after.items():
        if not parse_adapter(name):
            assert torch.equal(weight, before[name.replace(".base_layer", "")]), name
    assert checkpoint.parts["base"]["path"] == str(base)
    moments = [key for key in checkpoint.layout if key.startswith("optimizer.")]
    assert moments
    assert all(parse_adapter(key.split(".", 2)[2].rpartition(".")[0]) for key in moments), moments
    start = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    adapters = sum(weight.numel() for name, weight in after.items() if parse_adapter(name))
    assert start["trainable_parameters"] == adapters < start["parameters"] == sum(w.numel() for w in after.values())
    assert "4.1 k of them trained" in capsys.readouterr().out


@pytest.mark.slow
def test_checkpoint_is_hardly_larger_than_adapters_and_moments(tmp_path: Path) -> None:
    wide = replace(SOURCE, dim=256, ffn_dim=512, num_layers=2)
    folder = trained(folder_of(tmp_path / "base", config=wide), tmp_path / "run", "train.steps=1", "lora.rank=32")
    adapters = sum(weight.numel() for name, weight in load_weights(folder).state_dict().items() if parse_adapter(name))
    found = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    assert 3 * 4 * adapters < found <= 1.2 * 3 * 4 * adapters


@pytest.mark.slow
def test_different_base_is_rejected_and_moved_base_is_accepted(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(base, tmp_path / "run")
    moved = shutil.move(base, tmp_path / "moved")
    other = folder_of(tmp_path / "other", config=replace(SOURCE, init_std=0.06))
    tensors = load_file(other / "model.safetensors")
    last = list(tensors)[-1]
    same = load_file(Path(moved) / "model.safetensors")
    edit(other, initializer_range=0.05)
    from safetensors.torch import save_file

    same[last].flatten()[-1].add_(1e-3)  # one number of all
    save_file(same, other / "model.safetensors")

    arguments = overrides_of(other, folder, "train.steps=3")
    assert run.main(["recipe=llama_small", *arguments]) == 2
    said = capsys.readouterr().err
    assert f"train.init_from={other}: is not the base model that the run was trained with; that was {base}" in said
    assert f"cannot resume from {folder}/checkpoints/step_00000002" in said
    with pytest.raises(UserError, match=re.escape(f"for the weights of {base}, which is missing")):
        load_weights(folder)
    trained(moved, folder, "train.steps=3")
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert stored(folder).parts["base"]["path"] == str(moved)


@pytest.mark.campaign
def test_checkpoint_contains_a_randomly_initialized_base(tmp_path: Path) -> None:
    """Random weights exist nowhere else."""
    folder = trained(None, tmp_path / "run")
    whole = load_weights(folder).state_dict()
    assert set(stored(folder).shapes) == set(whole)
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
    trainer = Trainer(config_of(base, tmp_path / "run", "train.steps=3", "lora.base_dtype=bfloat16"))
    losses = [record.loss for record in trainer.steps()]
    dtypes = {bool(parse_adapter(name)): p.dtype for name, p in trainer.model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    trainer.close()
    whole = Trainer(config_of(base, tmp_path / "whole", "train.steps=3"))
    expected = [record.loss for record in whole.steps()]
    whole.close()
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert losses != expected


@pytest.mark.campaign
def test_base_stored_in_bfloat16_stays_in_bfloat16(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    half = {name: weight.bfloat16() for name, weight in load_file(base / "model.safetensors").items()}
    save_file(half, base / "model.safetensors")
    edit(base, dtype="bfloat16", torch_dtype="bfloat16")
    config = config_of(base, tmp_path / "run")
    assert config.lora.base_dtype == "bfloat16", "and it is on record"
    folder = trained(base, tmp_path / "run")
    assert export_command([str(folder), str(tmp_path / "merged"), "--merged"]) == 0
    assert {weight.dtype for weight in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.bfloat16
    }


# ---------------------------------------------------------------------------------------------------------------
# Exports


@pytest.mark.slow
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

    full = trained(base, tmp_path / "full", "lora.rank=0", "lora.alpha=16", "train.steps=1")
    assert export_command([str(full), str(tmp_path / "none"), "--adapter"]) == 2
    assert "without adapters" in capsys.readouterr().err


MODELS: dict[str, tuple[Recipe, Any, str, list[str]]] = {
    "llama": (LLAMA, SOURCE, "llama_small", []),
    "llama tied, some layers": (LLAMA, replace(TINY, tie_embeddings=True), "llama_small", ["lora.targets=[wq,w2]"]),
    "gpt2": (GPT2, GPT2.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_seq_len=64), "gpt2", []),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.campaign) for name in list(MODELS)[1:])]
)
def test_peft_computes_the_same_and_loads_the_export(name: str, tmp_path: Path) -> None:
    """Twenty steps from the same adapters; then both kinds of export, bit for bit."""
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    recipe, model_config, yaml, overrides = MODELS[name]
    base = folder_of(tmp_path / "base", recipe, model_config)
    config = config_of(base, tmp_path / "run", "train.steps=20", *overrides, recipe=yaml)
    trainer = Trainer(config)
    batches = list(islice(iter(trainer.build_loader()), 20 * trainer.num_micro_batches))
    first = {name: local(p.detach()).clone() for name, p in trainer.model.named_parameters() if parse_adapter(name)}
    records = list(trainer.steps())
    trainer.save_checkpoint(wait=True)
    trainer.close()
    assert export_command([str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert export_command([str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = {key: weight for key, weight in loaded.state_dict().items() if "lora_" in key}
    assert {key.replace(".default", ""): None for key in theirs} == dict.fromkeys(tensors)
    assert all(torch.equal(weight, tensors[key.replace(".default", "")]) for key, weight in theirs.items())
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


def plain_loop(
    model: nn.Module, parameters: list[nn.Parameter], batches: list[Any], lrs: list[float], config: Any
) -> list[float]:
    """Train as a plain script would."""
    optim = config.optim
    optimizer = torch.optim.AdamW(parameters, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    losses, per_step = [], len(batches) // len(lrs)
    for step, lr in enumerate(lrs):
        ours = batches[step * per_step : (step + 1) * per_step]
        tokens, targets = (torch.cat([batch[name] for batch in ours]) for name in ("tokens", "targets"))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------------------------
# Meshes


def train_here(base: str, runs: list[tuple[str, list[str]]]) -> list[list[float]]:
    """Train each run to its end, or on; return the losses of its steps.  On every rank."""
    found = []
    for folder, overrides in runs:
        trainer = Trainer(config_of(base, Path(folder), *overrides))
        assert trainer.fit() == 0
        trainer.close()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        found.append([line["loss"] for line in lines if line["kind"] == "train"])
    return found


@pytest.mark.campaign
def test_adapters_compile_in_one_graph(tmp_path: Path, base: Path) -> None:
    plain, compiled = ([f"train.compile={word}", "train.steps=2"] for word in ("false", "true"))
    expected, found = train_here(str(base), [(str(tmp_path / "a"), plain), (str(tmp_path / "b"), compiled)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
