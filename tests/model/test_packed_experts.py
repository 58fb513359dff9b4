"""Packed experts (lora.base_dtype=nf4, fp8): their values, products, on any mesh, and in exports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers.launch import merged
from tests.helpers.native_models import MODELS, folder_of
from tests.model.test_expert_adapters import QUIET
from tests.model.test_lora import OWN
from trainer import Trainer, UserError, load_config, load_weights
from trainer.experts import add_adapter, expert_matmuls
from trainer.export import command_line as export_command
from trainer.model.packed import Packing, find_packings, pack_experts
from trainer.model.parameters import local, local_box

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16, "num_layers": 2},
    "deepseek_v3": {
        **{"num_layers": 2, "q_rank": 64, "kv_rank": 64, "ffn_dim": 64, "nope_dim": 16, "value_dim": 16},
        **{"num_groups": 1, "num_chosen_groups": 1},
    },
    "qwen3_next": {"num_layers": 2, "delta_value_dim": 16, "shared_dim": 64},
}
"""Their rows have 64 weights, the fewest that can be packed."""


def wide_folder(path: Path, kind: str, **sizes: Any) -> Path:
    """Write a mixture in Hugging Face's format, in float32."""
    recipe, config = MODELS[kind]
    sizes = {"dim": 64, "expert_dim": 64, "num_experts": 4, "num_chosen": 2, **SIZES[kind], **sizes}
    return folder_of(path, recipe, replace(config, **sizes))


def config_of(base: Path | str, folder: Path | str, kind: str, *overrides: str) -> Any:
    own = [*OWN, *QUIET, "lora.base_dtype=nf4", f"run.dir={folder}"]
    return load_config("llama_small", [f"model.name={kind}", f"train.init_from={base}", *merged(own, overrides)])


# ---------------------------------------------------------------------------------------------------------------
# Values and products


class Stack(nn.Module):
    """Three experts with two matrices of one name, (E, out, in) or transposed."""

    matrices = {"both": ("first", "second")}

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        for name, num_outputs in (("first", 128), ("second", 64)):
            shape = (3, 192, num_outputs) if is_transposed else (3, num_outputs, 192)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 14))


@pytest.mark.parametrize(("with_adapters", "in_pieces"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_packed_products_follow_the_formula_and_only_bytes_are_saved(
    is_transposed: bool, with_adapters: bool, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only 40 rows of the matrices of all experts are unpacked at a time."""
    torch.manual_seed(0)
    if in_pieces:
        monkeypatch.setattr("trainer.experts.grouped._PIECE_WEIGHTS", 3 * 40 * (64 if is_transposed else 192))
    stack, ends = Stack(is_transposed), torch.tensor([3, 3, 8], dtype=torch.int32)
    if with_adapters:
        add_adapter(stack, "both", rank=2, scaling=1.5)
        nn.init.normal_(stack.get_parameter("adapters.both.lora_B.default.weight"))
    plain = {name: stack.get_parameter(name).detach() for name in ("first", "second")}
    for name, weight in plain.items():
        pack_experts(stack, name, name, "nf4")
        packing = Packing("nf4", weight.shape[-1])
        stack.get_parameter(name).copy_(packing.pack(weight))
        plain[name] = packing.rounded(weight)
    ours, theirs = (torch.randn(8, 192, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = torch.cat(expert_matmuls(stack, "both", ours.requires_grad_(), ends), dim=1)
    found.sin().sum().backward()
    reference = Stack(is_transposed)
    if with_adapters:
        add_adapter(reference, "both", rank=2, scaling=1.5)
        reference.load_state_dict({**dict(stack.state_dict()), **plain})
    reference.load_state_dict(plain, strict=False)
    expected = torch.cat(expert_matmuls(reference, "both", theirs.requires_grad_(), ends), dim=1)
    expected.sin().sum().backward()
    torch.testing.assert_close((found, ours.grad), (expected, theirs.grad))
    assert sum(tensor.dtype == torch.uint8 for tensor in saved) == 2
    assert not any(tensor.is_floating_point() and tensor.numel() >= 3 * 64 * 192 for tensor in saved)


def test_experts_are_packed_whether_adapted_or_not(tmp_path: Path) -> None:
    base = wide_folder(tmp_path / "base", "gpt_oss")
    for targets in ("[o_proj]", "[o_proj,down_proj]"):
        trainer = Trainer(config_of(base, tmp_path / "run", "gpt_oss", f"lora.targets={targets}"))
        packed = {name.partition(".moe.")[2] for name in find_packings(trainer.model)}
        assert packed == {"", "experts.gate_up", "experts.down"}
        weight = trainer.model.get_parameter("layers.0.moe.experts.down")
        stored = load_file(base / "model.safetensors")["model.layers.0.mlp.experts.down_proj"]
        assert torch.equal(local(weight), Packing("nf4", 64).pack(stored.transpose(1, 2)))
        trainer.close()


def test_experts_whose_rows_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    base = wide_folder(tmp_path / "base", "qwen3_moe", expert_dim=96)
    with pytest.raises(UserError, match=r"lora.base_dtype=nf4: packs .* blocks of 64 .* length 96 of .*experts.w2"):
        Trainer(config_of(base, tmp_path / "run", "qwen3_moe"))


# ---------------------------------------------------------------------------------------------------------------
# Meshes


def train_here(base: str, folder: str, kind: str, overrides: list[str]) -> tuple[list[float], int, int, bool]:
    """Train to the end, or on.

    Return the losses of the steps, the bytes that this rank holds of packed experts, those of all experts, and whether
    one of them is divided along a later dimension than the first.
    """
    trainer = Trainer(config_of(base, folder, kind, *overrides))
    experts = {name: trainer.model.get_parameter(name) for name in find_packings(trainer.model) if ".experts." in name}
    held = sum(local(parameter).nbytes for parameter in experts.values())
    total = sum(math.prod(parameter.shape) for parameter in experts.values())
    boxes = {name: local_box(parameter) for name, parameter in experts.items()}
    is_inner = any(box is not None and box[1] != (0, experts[name].shape[1]) for name, box in boxes.items())
    assert trainer.fit() == 0
    trainer.close()
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"], held, total, is_inner


EXPERTS = "lora.targets=[o_proj,experts]"
ATTENTION = "lora.targets=[o_proj]"


@pytest.mark.campaign
def test_packed_experts_compile(tmp_path: Path) -> None:
    base = str(wide_folder(tmp_path / "base", "gpt_oss"))
    expected, found = (
        train_here(base, str(tmp_path / word), "gpt_oss", [f"train.compile={word}", "train.steps=2", EXPERTS])[0]
        for word in ("false", "true")
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------
# Exports


@pytest.mark.campaign
@pytest.mark.parametrize("targets", [ATTENTION, EXPERTS])
@pytest.mark.parametrize("kind", SIZES)
def test_exports_are_the_function_that_was_trained(kind: str, targets: str, tmp_path: Path) -> None:
    """In transformers too; and the adapter on the rounded base, in peft."""
    peft = pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    from transformers import AutoModelForCausalLM

    base = wide_folder(tmp_path / "base", kind)
    trainer = Trainer(config_of(base, tmp_path / "run", kind, targets, "optim.lr=0.1", "train.steps=3"))
    assert trainer.fit() == 0
    trainer.close()

    def exported(name: str, *options: str) -> Path:
        assert export_command([str(tmp_path / "run"), str(tmp_path / name), *options]) == 0
        return tmp_path / name

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = load_weights(tmp_path / "run")(tokens)
        close = {"rtol": 0, "atol": 1e-5 * float(expected.abs().max())}
        torch.testing.assert_close(load(exported("merged", "--merged"))(tokens).logits, expected, **close)
        original = load_weights(exported("original", "--merged=original"))(tokens)
    assert (original - expected).abs().max() > 1e-3 * expected.abs().max(), "another function"

    # What is merged into is the rounded base: peft's product of the exported adapter is the rest.
    settings = json.loads((exported("adapter") / "adapter_config.json").read_text())
    assert ("target_parameters" in settings) == (targets == EXPERTS)
    with torch.no_grad():
        merged_weights = load(tmp_path / "merged").state_dict()
        of_peft = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter").merge_and_unload().state_dict()
        for name, weight in load(base).state_dict().items():
            product = of_peft[name] - weight
            torch.testing.assert_close(merged_weights[name] - product, rounded(name, weight, kind), **close, msg=name)


def rounded(name: str, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what packing leaves of a weight in transformers' model."""
    is_matrix = ".layers." in name and weight.ndim >= 2 and "router" not in name and "mlp.gate.weight" not in name
    if not is_matrix or name.endswith("bias") or "conv1d" in name:
        return weight
    is_transposed = kind == "gpt_oss" and ".experts." in name
    rows = weight.transpose(1, 2) if is_transposed else weight
    found = Packing("nf4", rows.shape[-1]).rounded(rows.contiguous())
    return found.transpose(1, 2) if is_transposed else found
