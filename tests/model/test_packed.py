"""Packed base weights (lora.base_dtype=nf4, fp8): their values, on any mesh, in exports, in memory and in the plan."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.hf_models import model_of
from tests.helpers.launch import start, start_command, tiny
from tests.helpers.native_models import TINY, folder_of
from tests.helpers.plan_truth import CollectiveLog, fake_model, update
from tests.model.test_lora import config_of, stored, trained
from trainer import RunConfig, Trainer, UserError, load_config, load_weights, run
from trainer.config import LoraSection, MeshShape
from trainer.export import command_line as export_command
from trainer.model.lora import AdaptedLinear, add_adapters
from trainer.model.network import build_network, training_flops_per_token
from trainer.model.packed import BLOCK_SIZE, PackedLinear, Packing, find_packings
from trainer.model.parameters import count_parameters, count_trained_parameters, local

WIDE = replace(TINY, dim=64, ffn_dim=192)
"""Its rows have 64 or 192 weights.  Three ranks do not divide its 32 or 64 rows evenly."""
PACKINGS = ["nf4", "fp8"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama folder in Hugging Face format, in float32."""
    return folder_of(tmp_path / "base", config=WIDE)


# ---------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize(("packing", "bits", "most"), [("nf4", 4.5, 0.16), ("fp8", 8.5, 1 / 16)])
def test_error_of_a_value_is_bounded(packing: str, bits: float, most: float) -> None:
    """By half the largest gap between two codes of NF4; by half a unit in the last place of e4m3."""
    weight = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(0))
    weight[0, 0, :64] = 0
    form = Packing(packing, 256)
    packed = form.pack(weight)
    assert packed.shape == (4, 8, 256 * bits / 8)
    difference = (form.unpack(packed, torch.float32) - weight).abs().view(-1, BLOCK_SIZE)
    largest = weight.abs().view(-1, BLOCK_SIZE).amax(dim=1, keepdim=True)
    allowed = most * (largest if packing == "nf4" else weight.abs().view(-1, BLOCK_SIZE).clamp(min=largest / 448))
    assert (difference <= allowed).all()
    assert not form.unpack(packed, torch.float32)[0, 0, :64].any()
    assert torch.equal(form.unpack(packed[1], torch.float32), form.unpack(packed, torch.float32)[1])
    assert torch.equal(form.rounded(form.rounded(weight)), form.rounded(weight)) or packing == "fp8"


@pytest.mark.parametrize("kind", ["linear", "Conv1D"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_gradients_follow_the_formula_and_only_bytes_are_saved(packing: str, kind: str) -> None:
    from transformers.pytorch_utils import Conv1D

    layer = nn.Linear(64, 128) if kind == "linear" else Conv1D(128, 64)
    whole: Any = nn.Sequential(layer)
    add_adapters(whole, [whole], LoraSection(rank=2, alpha=6.0, base_dtype=packing))  # type: ignore[arg-type]
    adapted = whole[0]
    form = adapted.base_layer.packings["weight"]
    adapted.base_layer.weight.data.copy_(form.pack(layer.weight.detach()))  # type: ignore[arg-type]
    rounded = form.rounded(layer.weight.detach())  # type: ignore[arg-type]
    rounded = rounded if kind == "linear" else rounded.t()
    down, up = adapted.factors
    nn.init.normal_(up)
    x = torch.randn(3, 5, 64)
    for is_enabled in (True, False):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        adapted.is_enabled = is_enabled
        saved: list[torch.Tensor] = []

        def note(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = whole(ours)
        output.sin().sum().backward()
        expected = F.linear(theirs, rounded, layer.bias) + is_enabled * 3.0 * theirs @ down.detach().T @ up.detach().T
        expected.sin().sum().backward()
        torch.testing.assert_close((output, ours.grad), (expected, theirs.grad))
        assert any(tensor.dtype == torch.uint8 for tensor in saved)
        assert not any(tensor.is_floating_point() and tensor.numel() >= 64 * 128 for tensor in saved)


def test_linear_layers_of_the_blocks_are_packed_whether_adapted_or_not() -> None:
    def network(*overrides: str) -> tuple[RunConfig, nn.Module]:
        config = load_config("llama_small", tiny("model.dim=64", "model.ffn_dim=192", *overrides))
        lora = replace(config.lora, rank=4, targets=["wq"], base_dtype="nf4")
        return replace(config, lora=lora), build_network(replace(config, lora=lora))

    config, model = network()
    assert {name.partition(".")[2].partition(".")[2] for name in find_packings(model)} == {
        *("attention.wq.base_layer.weight", "attention.wk.weight", "attention.wv.weight", "attention.wo.weight"),
        *("feed_forward.w1.weight", "feed_forward.w2.weight", "feed_forward.w3.weight"),
    }
    assert {parameter.dtype for parameter in model.parameters()} == {torch.uint8, torch.float32}
    plain = build_network(replace(config, lora=replace(config.lora, base_dtype="float32")))
    assert count_parameters(model) == count_parameters(plain)
    assert count_trained_parameters(model) == count_trained_parameters(plain)
    assert training_flops_per_token(config, model, 32) == training_flops_per_token(config, plain, 32)
    _, half = network("fsdp.param_dtype=bfloat16")
    dtypes = Counter(parameter.dtype for parameter in half.parameters() if not parameter.requires_grad)
    assert dtypes.keys() == {torch.uint8, torch.bfloat16}, "the others in the dtype of computation"


# ---------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["lora.rank=0"], "only applies to adapters"),
        (["train.init_from=null", "model.dim=64"], "quantizes pretrained weights, but this model starts"),
        (["lora.base_dtype=int4"], "lora.base_dtype=int4"),
    ],
)
def test_mistakes(overrides: list[str], says: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [*tiny(f"train.init_from={base}", "lora.rank=4", "lora.base_dtype=nf4", *overrides)]
    given = {item.partition("=")[0]: item for item in own if "null" not in item and not item.startswith("model.ffn")}
    if any("null" in item for item in overrides):
        del given["train.init_from"]
    else:
        given = {key: item for key, item in given.items() if not key.startswith("model.")}
    assert run.main(["recipe=llama_small", *given.values(), f"run.dir={base.parent / 'run'}"]) == 2
    assert says in capsys.readouterr().err
    assert not (base.parent / "run").exists()


def test_row_that_blocks_do_not_divide_is_refused(tmp_path: Path) -> None:
    narrow = folder_of(tmp_path / "narrow", config=replace(WIDE, ffn_dim=96))
    with pytest.raises(UserError, match=r"lora.base_dtype=nf4: packs each row in blocks of 64 .* length 96 of .*w2"):
        Trainer(config_of(narrow, tmp_path / "run", "lora.base_dtype=nf4"))


def test_torch_that_converts_bytes_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(UserError, match=r"lora.base_dtype=nf4: needs torch 2.13"):
        Trainer(config_of(base, tmp_path / "run", "lora.base_dtype=nf4", "fsdp.param_dtype=bfloat16"))


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_that_are_not_finite_are_refused(packing: str, base: Path, tmp_path: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] = torch.nan
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"NaN or infinity in layers.1.feed_forward.w2"):
        Trainer(config_of(base, tmp_path / "run", f"lora.base_dtype={packing}"))


# ---------------------------------------------------------------------------------------------------------------
# Meshes


def train_here(base: str, runs: list[tuple[str, list[str]]]) -> list[tuple[list[float], int, int]]:
    """Train each run to its end, or on.

    Return the losses of its steps, the bytes that this rank holds of packed weights, and the number of these weights.
    """
    found = []
    for folder, overrides in runs:
        trainer = Trainer(config_of(base, Path(folder), *overrides))
        packed = [trainer.model.get_parameter(name) for name in find_packings(trainer.model)]
        num_bytes = sum(local(parameter).nbytes for parameter in packed)
        num_weights = sum(
            parameter.shape[0] * packing.width
            for parameter, packing in zip(packed, find_packings(trainer.model).values(), strict=True)
        )
        assert trainer.fit() == 0
        trainer.close()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        found.append(([line["loss"] for line in lines if line["kind"] == "train"], num_bytes, num_weights))
    return found


@pytest.mark.campaign
def test_packed_layers_compile_in_one_graph(base: Path, tmp_path: Path) -> None:
    plain, compiled = (["lora.base_dtype=nf4", f"train.compile={word}", "train.steps=2"] for word in ("false", "true"))
    (expected, _, _), (found, _, _) = train_here(
        str(base), [(str(tmp_path / "a"), plain), (str(tmp_path / "b"), compiled)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("packing", "most"), [("nf4", 0.30), ("fp8", 0.55)])
def test_gathers_bring_the_bytes_of_packed_weights(packing: str, most: float) -> None:
    """A step's all-gathers beside those of a base in bfloat16, without what is not packed in either."""

    def gathered(base_dtype: str) -> tuple[int, int]:
        own = ["model.dim=256", "model.ffn_dim=512", "fsdp.param_dtype=bfloat16", f"lora.base_dtype={base_dtype}"]
        own += ["lora.rank=4", "fsdp.reshard_after_forward=always"]
        config = load_config("llama_small", tiny(*own), needs_weights=False)
        with fake_model(config, MeshShape(1, 2)) as (model, _), CollectiveLog() as log:
            update(model, config, 1)
            packed = find_packings(model).items()
            weights = sum(model.get_parameter(name).shape[0] * packing.width for name, packing in packed)
        return sum(size * count for (kind, _, size), count in log.counts.items() if kind == "all_gather"), weights

    whole, (small, num_weights) = gathered("bfloat16")[0], gathered(packing)
    of_packed = 2 * 2 * num_weights  # bytes in bfloat16, in the forward and in the backward pass
    share = (small - (whole - of_packed)) / of_packed
    print(f"{packing}: {share:.3f} of the bytes in bfloat16")
    assert 0 < share <= most


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints and exports


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["nf4", pytest.param("fp8", marks=pytest.mark.campaign)])
def test_exports_are_the_function_that_was_trained(
    packing: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"lora.base_dtype={packing}", "lora.targets=[wq,w2]", "optim.lr=0.1", "train.steps=3"]
    folder = trained(base, tmp_path / "run", *own)
    checkpoint = stored(folder)
    assert all(".lora_" in name for name in checkpoint.shapes), "no byte of the base"
    assert checkpoint.parts["base"]["path"] == str(base)

    def exported(name: str, *options: str) -> Path:
        assert export_command([str(folder), str(tmp_path / name), *options]) == 0, capsys.readouterr().err
        return tmp_path / name

    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = load_weights(folder)(tokens)
        merged = load_weights(exported("merged", "--merged"))(tokens)
        original = load_weights(exported("original", "--merged=original"))(tokens)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert (original - expected).abs().max() > 1e-3 * expected.abs().max(), "another function"

    before, after, into = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged", "original"))
    only_packed, adapted = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(after[only_packed], Packing(packing, 64).rounded(before[only_packed]))
    torch.testing.assert_close(
        after[adapted] - Packing(packing, 192).rounded(before[adapted]), into[adapted] - before[adapted]
    )
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert (exported("adapter") / "adapter_model.safetensors").exists()
    with pytest.raises(SystemExit, match="2"):
        export_command([str(folder), str(tmp_path / "none"), "--merged=foo"])
    assert "--merged=foo: the only value is original: use --merged, or --merged=original" in capsys.readouterr().err

    own = ["lora.rank=0", "lora.alpha=16", "train.steps=1", "optim.lr=1e-12", "optim.weight_decay=0"]
    again = trained(folder, tmp_path / "again", *own)
    with torch.no_grad():
        torch.testing.assert_close(load_weights(again)(tokens), merged)
    assert export_command([str(again), str(tmp_path / "none"), "--merged=original"]) == 2
    assert "were not quantized" in capsys.readouterr().err


@pytest.mark.campaign
def test_what_else_a_run_does_with_its_model(base: Path, tmp_path: Path) -> None:
    """Evaluations, norms by layer, an average of the weights, a sample; then the commands that load it."""
    (tmp_path / "text.txt").write_text("so many words, one after another, are read from a file. " * 200)
    given = [f"train.init_from={base}", "lora.rank=4", "lora.base_dtype=nf4", f"data.path={tmp_path / 'text.txt'}"]
    given += [f"data.eval_path={tmp_path / 'text.txt'}", "data.tokenizer=bytes", f"data.cache_dir={tmp_path / 'cache'}"]
    given += ["eval.every=2", "eval.steps=1", "log.norms_every=2", "train.ema=0.5", "log.sample_tokens=4"]
    shaped = [item for item in tiny(*given, "train.steps=4") if not item.startswith("model.")]
    ran = start(tmp_path / "run", "recipe=llama_small", *shaped, "nproc=2").wait()
    assert ran.code == 0, ran.err + ran.out
    assert {"eval", "norms", "train", "end"} <= {line["kind"] for line in ran.metrics}
    assert "frozen, packed as nf4; adapters of rank 4" in ran.out
    for command in (
        ["trainer.evaluate", tmp_path / "run"],
        ["trainer.generate", tmp_path / "run", "--prompt", "so many", "--greedy", "--max-tokens", 3],
        ["trainer.export", tmp_path / "run", tmp_path / "merged", "--merged", "--ema"],
    ):
        done = start_command(*command).wait()
        assert done.code == 0, done.err + done.out


@pytest.mark.slow
def test_base_in_bfloat16_is_merged_in_bfloat16_unless_told_otherwise(base: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    folder = trained(base, tmp_path / "run", "lora.base_dtype=nf4", "optim.lr=0.1")
    model = load_weights(folder)
    layer: Any = model.get_submodule("layers.0.feed_forward.w2")
    assert isinstance(layer, AdaptedLinear)
    assert isinstance(layer.base_layer, PackedLinear)
    down, up = layer.factors
    expected = layer.base_layer.unpacked(layer.base_layer.weight, torch.float32) + layer.scaling * up @ down
    for options, dtype in (([], torch.bfloat16), (["--dtype", "float32"], torch.float32)):
        assert export_command([str(folder), str(tmp_path / "out"), "--merged", "--overwrite", *options]) == 0
        found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-9)


@pytest.mark.slow
def test_resume_with_another_base_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if it packs to the same bytes: the checksum is that of the weights before packing."""
    folder = trained(base, tmp_path / "run", "lora.base_dtype=nf4")
    tensors = load_file(base / "model.safetensors")
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    changed = weight.clone()
    changed[0, 1 if weight[0, 0] == weight[0].abs().max() else 0] *= 1 + 1e-6
    form = Packing("nf4", 192)
    assert torch.equal(form.pack(weight), form.pack(changed))
    assert not torch.equal(weight, changed)
    tensors["model.layers.1.mlp.down_proj.weight"] = changed
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not the base model that the run was trained with"):
        trained(base, folder, "lora.base_dtype=nf4", "train.steps=4")
    assert export_command([str(folder), str(tmp_path / "out"), "--merged"]) == 2
    assert "is not the base model" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"lora.base_dtype"):
        trained(base, folder, "lora.base_dtype=fp8", "train.steps=4")
    save_file({**tensors, "model.layers.1.mlp.down_proj.weight": weight}, base / "model.safetensors", {"format": "pt"})
    allowed = "checkpoint.allow_changes=[lora.base_dtype]"
    assert stored(trained(base, folder, "lora.base_dtype=fp8", "train.steps=4", allowed)).manifest.step == 4


def test_any_part_of_the_rows_packs_to_the_same_bytes(base: Path) -> None:
    form, weight = Packing("nf4", 192), load_file(base / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    whole = form.pack(weight)
    for parts in (2, 3, 64):
        assert torch.equal(torch.cat([form.pack(part) for part in weight.chunk(parts)]), whole)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_models_of_transformers_are_packed(kind: str, tmp_path: Path) -> None:
    """Trained, merged, and loaded by transformers: the logits of the run."""
    from transformers import AutoModelForCausalLM

    sizes = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
    if kind == "qwen3_moe":
        sizes["moe_intermediate_size"] = 64
    model_of(kind, **sizes).save_pretrained(tmp_path / "base")
    own = ["model.name=hf", f"model.path={tmp_path / 'base'}", "lora.rank=4", "lora.base_dtype=nf4", "optim.lr=0.05"]
    common = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=2"]
    config = load_config(
        "llama_small", [*own, *common, "train.steps=3", "run.device=cpu", f"run.dir={tmp_path / 'run'}"]
    )
    trainer = Trainer(config)
    assert find_packings(trainer.model)
    assert trainer.fit() == 0
    trainer.close()
    tokens = torch.arange(40).view(2, 20)
    assert export_command([str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0
    with torch.no_grad():
        expected = load_weights(tmp_path / "run")(tokens)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
