"""Quantized weights of published models: read as transformers dequantizes them, and exported in bfloat16."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.ranks import run_command
from tests.model.test_native_models import PLAIN
from tests.weights.test_huggingface import difference, load_here, their_deepseek_v3, their_gpt_oss
from trainer import UserError, load_weights
from trainer.config.pretrained import model_config_of
from trainer.export import command_line as export
from trainer.recipe import all_recipes
from trainer.weights.sources import SafetensorsFolder

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


def change_config(folder: Path, **entries: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | entries))


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

    write(folder, their_gpt_oss(intermediate_size=64), quantize)
    change_config(folder, quantization_config=MXFP4)
    return folder


def deepseek_v3(folder: Path) -> Path:
    """Write a DeepSeek-V3 with matrices in fp8, and with a block for multi-token prediction, as published."""

    def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor.ndim != 2 or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            return {name: tensor}
        sizes = [math.ceil(size / BLOCK) for size in tensor.shape]
        scales = torch.rand(sizes, generator=torch.Generator().manual_seed(len(name))) / 100 + 1e-3
        whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        return {name: (tensor.float() / whole).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    write(folder, their_deepseek_v3(), quantize)
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.mlp.experts.0.up_proj.weight": None}
    extra["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.ones(16, 32).to(torch.float8_e4m3fn)
    save_file(tensors | extra, file, {"format": "pt"})  # type: ignore[operator]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    change_config(folder, quantization_config=FP8, num_nextn_predict_layers=1, auto_map=code)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def opened(folder: Path) -> SafetensorsFolder:
    recipe, config = model_config_of(folder, all_recipes())
    return SafetensorsFolder(folder, recipe, config)


def test_numbers_of_four_bits_are_those_of_transformers(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    source, tensors = opened(gpt_oss(tmp_path)), stored(tmp_path)
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        name = f"model.layers.1.mlp.experts.{theirs}"
        expected = mxfp4.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).mT
        mine = f"layers.1.moe.experts.{ours}"
        assert source.shapes[mine] == expected.shape
        assert source.dtypes[mine] == torch.bfloat16
        assert torch.equal(source.read(mine), expected)
        assert torch.equal(source.read(mine, 3, 5), expected[3:5])
    assert source.remarks == ["dequantized from mxfp4 to bfloat16"]


def test_numbers_of_eight_bits_are_multiplied_by_their_block(tmp_path: Path) -> None:
    """Element by element; sizes need not be multiples of the block's."""
    source, tensors = opened(deepseek_v3(tmp_path)), stored(tmp_path)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    numbers, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    assert numbers.shape[0] % BLOCK
    expected = torch.empty_like(numbers)
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            expected[row, column] = numbers[row, column] * scales[row // BLOCK, column // BLOCK]
    mine = "layers.1.attention.wkv_a.weight"
    assert torch.equal(source.read(mine), expected.bfloat16())
    for start, stop in ((0, 7), (5, 18), (16, 18), (17, 17)):
        assert torch.equal(source.read(mine, start, stop), expected[start:stop].bfloat16())
    assert source.dtypes["layers.1.moe.experts.w1"] == torch.bfloat16
    assert source.remarks == [
        "without its multi-token prediction (2 tensors)",
        "dequantized from fp8 to bfloat16",
    ]


@pytest.mark.slow
def test_gpt_oss_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpt_oss(tmp_path)
    dequantize = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=dequantize, dtype=torch.float32
    )
    assert difference(load_here(tmp_path), theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [gpt_oss, deepseek_v3])
def test_a_run_says_what_it_dequantizes_and_exports_full_precision(
    kind: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = kind(tmp_path / "source")
    model = [f"model.name={kind.__name__}", f"train.init_from={folder}", "optim.lr=0", "train.steps=1"]
    ran = run_command(tmp_path / "run", "recipe=llama_small", *PLAIN[:-1], *model, "fsdp.param_dtype=float32")
    assert ran.exit_code == 0, ran.stderr
    said = [line for line in ran.stdout.splitlines() if line.strip().startswith("weights")]
    assert "dequantized from" in said[0]
    assert ("without its multi-token prediction" in said[0]) == (kind is deepseek_v3)
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["dtype"] == "bfloat16"
    assert not content.keys() & {"quantization_config", "auto_map"}
    tensors = stored(tmp_path / "out")
    in_fp32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert in_fp32 == {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert {tensor.dtype for tensor in tensors.values()} <= {torch.float32, torch.bfloat16}
    read, source = opened(tmp_path / "out"), opened(folder)
    assert read.shapes == source.shapes
    assert all(torch.equal(read.read(name), source.read(name)) for name in read.shapes)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert difference(load_weights(tmp_path / "run"), theirs) < 1e-5


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (gpt_oss, {"quant_method": "awq"}, "quant_method=awq: this recipe supports only mxfp4"),
        (deepseek_v3, {"quant_method": "mxfp4"}, "quant_method=mxfp4: this recipe supports only fp8"),
        (deepseek_v3, {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]: must be two whole numbers"),
        (deepseek_v3, {"weight_block_size": [8, 8]}, r"is \[.*\] with scales \[.*\], but blocks of \[8, 8\] need"),
    ],
)
def test_mistakes(kind: Callable[[Path], Path], change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = kind(tmp_path)
    change_config(folder, quantization_config=(MXFP4 if kind is gpt_oss else FP8) | change)
    with pytest.raises(UserError, match=said):
        opened(folder)


def test_scales_are_missing(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.0.mlp.experts.down_proj_scales"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"down_proj_blocks: cannot be dequantized, because .*down_proj_scales is"):
        opened(tmp_path)


def test_other_recipes_refuse_quantized_weights(tmp_path: Path) -> None:
    from tests.weights.test_huggingface import LLAMA, TINY, build, export_model

    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path)
    change_config(tmp_path, quantization_config=FP8)
    with pytest.raises(UserError, match="quantized weights are not supported"):
        model_config_of(tmp_path, all_recipes())
