"""Quantized weights of published models: read as transformers dequantizes them, and exported in bfloat16."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.hf_models import settings_of
from tests.helpers.launch import run
from tests.helpers.native_models import difference, edit, folder_of, load_with_transformers
from trainer import UserError, load_weights
from trainer.export import export_checkpoint

BLOCK = 16
"""Block size of the matrices in fp8; it divides only some of their sizes."""

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write(folder: Path, config: Any, quantize: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> Path:
    """Write a transformers model in bfloat16, with some tensors replaced by quantized ones, into two files."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in sorted(load_file(file).items()):
        tensors |= quantize(name, tensor)
    file.unlink()
    # Scales are in a different file from the values they belong to.
    files = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}  # type: ignore[var-annotated]
    for name, tensor in tensors.items():
        files[[*files][name.endswith(("_scales", "_scale_inv"))]][name] = tensor.contiguous()
    for name, content in files.items():
        save_file(content, folder / name, {"format": "pt"})
    weight_map = {key: name for name, content in files.items() for key in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def gpt_oss(folder: Path) -> Path:
    """Write a gpt-oss with experts of random numbers in MXFP4."""
    generator = torch.Generator().manual_seed(1)

    def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        num_experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (num_experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    write(folder, settings_of("gpt_oss", hidden_size=32, intermediate_size=64, initializer_range=0.2), quantize)
    edit(folder, quantization_config=MXFP4)
    return folder


def deepseek_v3(folder: Path) -> Path:
    """Write a DeepSeek-V3 with matrices in fp8, and with a block for multi-token prediction, as published."""

    def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("gate.weight"):
            return {name: tensor.bfloat16()}  # as published; transformers 5.24 writes float32
        if tensor.ndim != 2 or "embed" in name or "lm_head" in name:
            return {name: tensor}
        sizes = [math.ceil(size / BLOCK) for size in tensor.shape]
        scales = torch.rand(sizes, generator=torch.Generator().manual_seed(len(name))) / 100 + 1e-3
        whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        return {name: (tensor.float() / whole).clamp(-448, 448).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    write(folder, settings_of("deepseek_v3", hidden_size=32, intermediate_size=40, initializer_range=0.2), quantize)
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.mlp.experts.0.up_proj.weight": None}
    extra["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.ones(16, 32).to(torch.float8_e4m3fn)
    save_file(tensors | extra, file, {"format": "pt"})  # type: ignore[operator]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    edit(folder, quantization_config=FP8, num_nextn_predict_layers=1, auto_map=code)
    return folder


FORMATS = {gpt_oss: "mxfp4", deepseek_v3: "fp8"}
"""What a run says of each."""


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_numbers_of_four_bits_are_those_of_transformers(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    model, tensors = load_weights(gpt_oss(tmp_path)), stored(tmp_path)
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        name = f"model.layers.1.mlp.experts.{theirs}"
        expected = mxfp4.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).mT
        assert torch.equal(model.get_parameter(f"layers.1.moe.experts.{ours}"), expected.float())


def test_numbers_of_eight_bits_are_multiplied_by_their_block(tmp_path: Path) -> None:
    """Element by element; sizes need not be multiples of the block's."""
    model, tensors = load_weights(deepseek_v3(tmp_path)), stored(tmp_path)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    numbers, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    assert numbers.shape[0] % BLOCK
    expected = torch.empty_like(numbers)
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            expected[row, column] = numbers[row, column] * scales[row // BLOCK, column // BLOCK]
    assert torch.equal(model.get_parameter("layers.1.attention.wkv_a.weight"), expected.bfloat16().float())


def test_gpt_oss_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    dequantize = transformers.Mxfp4Config(dequantize=True)
    theirs = load_with_transformers(gpt_oss(tmp_path), quantization_config=dequantize)
    assert difference(load_weights(tmp_path), theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(gpt_oss, 2), (deepseek_v3, 2), pytest.param(gpt_oss, 1, marks=pytest.mark.campaign)],
)
def test_a_run_says_what_it_dequantizes_and_exports_full_precision(
    kind: Callable[[Path], Path], ranks: int, tmp_path: Path
) -> None:
    """Two ranks read their own rows of the codes and scales."""
    folder = kind(tmp_path / "source")
    own = [f"model.name={kind.__name__}", f"train.init_from={folder}", "optim.lr=0", "train.steps=1"]
    own += ["recipe=llama_small", "data.source=synthetic", "data.seq_len=16", "train.global_batch_size=4"]
    own += ["train.micro_batch_size=2", "eval.every=0", "log.sample_tokens=0", "run.threads=1", "run.device=cpu"]
    ran = run(tmp_path / "run", *own, "fsdp.param_dtype=float32", f"nproc={ranks}")
    (said,) = (line for line in ran.out.splitlines() if line.strip().startswith("weights"))
    assert FORMATS[kind] in said
    assert ("2 tensors" in said) == (kind is deepseek_v3), "those of multi-token prediction are left out"
    export_checkpoint(ran.folder, tmp_path / "out", dtype=torch.bfloat16)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["dtype"] == "bfloat16"
    assert not content.keys() & {"quantization_config", "auto_map"}
    tensors = stored(tmp_path / "out")
    in_fp32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert in_fp32 == {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert {tensor.dtype for tensor in tensors.values()} <= {torch.float32, torch.bfloat16}
    source, out = load_weights(folder).state_dict(), load_weights(tmp_path / "out").state_dict()
    assert [name for name in source if not torch.equal(source[name], out[name])] == []
    assert difference(load_weights(ran.folder), load_with_transformers(tmp_path / "out")) < 1e-5


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (gpt_oss, {"quant_method": "awq"}, "quant_method=awq"),
        (deepseek_v3, {"quant_method": "mxfp4"}, "quant_method=mxfp4"),
        (deepseek_v3, {"weight_block_size": [128, 0]}, "weight_block_size=[128, 0]"),
        (deepseek_v3, {"weight_block_size": [8, 8]}, "[8, 8]"),
    ],
)
def test_mistakes(kind: Callable[[Path], Path], change: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = kind(tmp_path)
    edit(folder, quantization_config=(MXFP4 if kind is gpt_oss else FP8) | change)
    with pytest.raises(UserError) as refused:
        load_weights(folder)
    assert named in str(refused.value)


def test_missing_scales_are_named(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    name, index_file = "model.layers.0.mlp.experts.down_proj_scales", tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = tmp_path / index["weight_map"].pop(name)
    index_file.write_text(json.dumps(index))
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\.down_proj_scales"):
        load_weights(tmp_path)


def test_other_recipes_refuse_quantized_weights(tmp_path: Path) -> None:
    folder_of(tmp_path, quantization_config=FP8)
    with pytest.raises(UserError, match="quantization_config"):
        load_weights(tmp_path)
