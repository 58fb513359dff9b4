"""Packed experts (lora.base_dtype=nf4): their products, which of them are packed, and their exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers import adapters
from tests.helpers.cases import campaign_except
from tests.helpers.hf_models import load_with_transformers
from tests.helpers.launch import on_ranks
from tests.helpers.native_models import MODELS, folder_of
from trainer import Trainer, UserError, load_weights
from trainer.experts import add_adapter, expert_matmuls
from trainer.export import command_line as export_command
from trainer.model.packed import Packing, find_packings, pack_experts
from trainer.model.parameters import local

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


def trainer_on(base: Path, folder: Path, kind: str, *overrides: str) -> Trainer:
    return Trainer(adapters.config_of(base, folder, f"model.name={kind}", "lora.base_dtype=nf4", *overrides))


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
    """Large stacks are unpacked in pieces of some of their rows."""
    if in_pieces:
        monkeypatch.setattr("trainer.experts.grouped._PIECE_WEIGHTS", 3 * 40 * (64 if is_transposed else 192))
    torch.manual_seed(0)
    stack, ends = Stack(is_transposed), torch.tensor([3, 3, 8], dtype=torch.int32)
    if with_adapters:
        add_adapter(stack, "both", rank=2, scaling=1.5)
        nn.init.normal_(stack.get_parameter("adapters.both.lora_B.default.weight"))
    weights = []
    for name in ("first", "second"):
        weight = stack.get_parameter(name).detach()
        packing = Packing("nf4", weight.shape[-1])
        pack_experts(stack, name, name, "nf4")
        stack.get_parameter(name).copy_(packing.pack(weight))
        rounded = packing.rounded(weight)
        weights.append(rounded if is_transposed else rounded.transpose(1, 2))
    ours, theirs = (torch.randn(8, 192, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = torch.cat(expert_matmuls(stack, "both", ours.requires_grad_(), ends), dim=1)
    found.sin().sum().backward()

    whole, parts = torch.cat(weights, 2), []
    for expert, rows in ((0, theirs.requires_grad_()[:3]), (2, theirs[3:])):
        parts.append(rows @ whole[expert])
        if with_adapters:
            down, up = (stack.get_parameter(f"adapters.both.lora_{x}.default.weight").detach() for x in "AB")
            parts[-1] = parts[-1] + 1.5 * rows @ down[expert].T @ up[expert].T
    expected = torch.cat(parts)
    expected.sin().sum().backward()
    torch.testing.assert_close((found, ours.grad), (expected, theirs.grad), rtol=1e-5, atol=1e-5)
    assert sum(tensor.dtype == torch.uint8 for tensor in saved) == 2
    assert not any(tensor.is_floating_point() and tensor.numel() >= 3 * 64 * 192 for tensor in saved)


def test_experts_are_packed_whether_adapted_or_not(tmp_path: Path) -> None:
    base = wide_folder(tmp_path / "base", "gpt_oss")
    for targets in ("[o_proj]", "[o_proj,down_proj]"):
        trainer = trainer_on(base, tmp_path / "run", "gpt_oss", f"lora.targets={targets}")
        packed = {name.partition(".moe.")[2] for name in find_packings(trainer.model)}
        assert packed == {"", "experts.gate_up", "experts.down"}
        weight = trainer.model.get_parameter("layers.0.moe.experts.down")
        stored = load_file(base / "model.safetensors")["model.layers.0.mlp.experts.down_proj"]
        assert torch.equal(local(weight), Packing("nf4", 64).pack(stored.transpose(1, 2)))
        trainer.close()


def test_experts_whose_rows_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    base = wide_folder(tmp_path / "base", "qwen3_moe", expert_dim=96)
    with pytest.raises(UserError, match=r"^lora\.base_dtype=nf4: .* 96 .*experts\.w2"):
        trainer_on(base, tmp_path / "run", "qwen3_moe")


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize(("experts", "parts"), [(3, 4), (2, 2), (4, 4)])
def test_ranks_hold_their_share_of_the_bytes_of_few_experts(experts: int, parts: int, tmp_path: Path) -> None:
    """Of two experts, each of two pairs of ranks holds a copy; the losses are those of one rank."""
    base = wide_folder(tmp_path / "base", "gpt_oss", num_experts=experts)
    ((alone, whole),) = on_ranks(1, losses_and_bytes, base, tmp_path / "alone")
    for losses, held in on_ranks(4, losses_and_bytes, base, tmp_path / "four"):
        assert losses == pytest.approx(alone, rel=1e-6)
        assert held == whole / parts


def losses_and_bytes(base: Path, folder: Path) -> tuple[list[float], int]:
    """Return the losses, and the bytes that this rank holds of packed experts."""
    steps = ["train.steps=3", "train.micro_batch_size=1"]
    trainer = trainer_on(base, folder, "gpt_oss", "lora.targets=[o_proj,experts]", *steps)
    names = [name for name in find_packings(trainer.model) if ".experts." in name]
    held = sum(local(trainer.model.get_parameter(name)).nbytes for name in names)
    losses = [record.loss for record in trainer.steps()]
    trainer.close()
    return losses, held


# ---------------------------------------------------------------------------------------------------------------
# Exports

ATTENTION, EXPERTS = "lora.targets=[o_proj]", "lora.targets=[o_proj,experts]"


@pytest.mark.campaign
@pytest.mark.parametrize("targets", [ATTENTION, EXPERTS])
@pytest.mark.parametrize("kind", campaign_except(SIZES, ["gpt_oss"]))
def test_exports_are_the_function_that_was_trained(kind: str, targets: str, tmp_path: Path) -> None:
    """In transformers too; and the adapter on the rounded base, in peft."""
    peft = pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    base = wide_folder(tmp_path / "base", kind)
    trainer = trainer_on(base, tmp_path / "run", kind, targets, "optim.lr=0.1", "train.steps=3")
    assert trainer.fit() == 0
    trainer.close()

    def exported(name: str, *options: str) -> Path:
        assert export_command([str(tmp_path / "run"), str(tmp_path / name), *options]) == 0
        return tmp_path / name

    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = load_weights(tmp_path / "run")(tokens)
        close = {"rtol": 0, "atol": 1e-5 * float(expected.abs().max())}
        merged, _ = load_with_transformers(exported("merged", "--merged"))
        torch.testing.assert_close(merged.eval()(tokens).logits, expected, **close)
        original = load_weights(exported("original", "--merged=original"))(tokens)
        assert (original - expected).abs().max() > 1e-3 * expected.abs().max(), "another function"

        # What is merged into is the rounded base: peft's product of the exported adapter is the rest.
        settings = json.loads((exported("adapter") / "adapter_config.json").read_text())
        assert ("target_parameters" in settings) == (targets == EXPERTS)
        before, weights = load_with_transformers(base)[0], merged.state_dict()
        with_adapter = peft.PeftModel.from_pretrained(load_with_transformers(base)[0], tmp_path / "adapter")
        of_peft = with_adapter.merge_and_unload().state_dict()
        for name, weight in before.state_dict().items():
            product = of_peft[name] - weight
            torch.testing.assert_close(weights[name] - product, rounded(name, weight, kind), **close, msg=name)


def rounded(name: str, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what packing leaves of a weight in transformers' model."""
    is_matrix = ".layers." in name and weight.ndim >= 2 and "router" not in name and "mlp.gate.weight" not in name
    if not is_matrix or name.endswith("bias") or "conv1d" in name:
        return weight
    is_transposed = kind == "gpt_oss" and ".experts." in name
    rows = weight.transpose(1, 2) if is_transposed else weight
    found = Packing("nf4", rows.shape[-1]).rounded(rows.contiguous())
    return found.transpose(1, 2) if is_transposed else found
