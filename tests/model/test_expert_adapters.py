"""Adapters of stacked experts: what they compute, and that peft computes the same and loads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers import hf_models
from tests.helpers.adapters import config_of, plain_loop
from tests.helpers.cases import campaign_except
from tests.helpers.native_models import MODELS, folder_of
from trainer import Trainer, UserError, load_config, load_weights
from trainer.config.schema import LoraSection
from trainer.experts import ExpertAdapter, adapters_of, add_adapter, expert_matmuls, grouped_mm
from trainer.export import command_line as export_command
from trainer.model.lora import add_adapters, find_layers, without_adapters
from trainer.model.network import build_network, training_flops_per_token
from trainer.model.parameters import local


def test_grouped_product_equals_separate_products() -> None:
    """With an empty group, and gradients of both factors."""
    x = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    expected = torch.cat([x[:3] @ weight[0], x[3:9] @ weight[2], x[9:] @ weight[3]])
    assert torch.equal(grouped_mm(x, weight, ends), expected)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_mm(x, weight, ends), (x, weight))


class Stack(nn.Module):
    """Three experts with two matrices of one name, (E, out, in) or transposed."""

    matrices = {"both": ("first", "second")}

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        for name, num_outputs in (("first", 4), ("second", 6)):
            shape = (3, 5, num_outputs) if is_transposed else (3, num_outputs, 5)
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_are_multiplied_with_the_adapters_of_their_experts(is_transposed: bool) -> None:
    torch.manual_seed(0)
    stack, rows, ends = Stack(is_transposed), torch.randn(8, 5), torch.tensor([3, 3, 8], dtype=torch.int32)
    plain = torch.cat(expert_matmuls(stack, "both", rows, ends), dim=1)
    add_adapter(stack, "both", rank=2, scaling=1.5)
    assert torch.equal(torch.cat(expert_matmuls(stack, "both", rows, ends), dim=1), plain), "they begin as zero"
    down, up = (next(part.parameters()) for part in adapters_of(stack)["both"].children())
    assert (tuple(down.shape), tuple(up.shape)) == ((3, 2, 5), (3, 10, 2))
    assert 0.5 / 5**0.5 < float(down.detach().abs().max()) <= 1 / 5**0.5, "as of a linear layer with five inputs"
    nn.init.normal_(up)
    found = torch.cat(expert_matmuls(stack, "both", rows, ends), dim=1)
    expected = plain.clone()
    for expert, span in ((0, slice(0, 3)), (2, slice(3, 8))):
        expected[span] += 1.5 * rows[span] @ down[expert].T @ up[expert].T
    torch.testing.assert_close(found, expected)
    with without_adapters(stack):
        assert torch.equal(torch.cat(expert_matmuls(stack, "both", rows, ends), dim=1), plain)


def network(targets: Sequence[str] | str, **lora: Any) -> nn.Module:
    config = load_config("qwen3_moe_small", ["model.num_layers=2"])
    return build_network(replace(config, lora=replace(LoraSection(rank=4, alpha=8.0, targets=targets), **lora)))


def test_experts_are_chosen_by_name() -> None:
    def adapted(targets: Sequence[str] | str) -> set[str]:
        names = [name for name, module in network(targets).named_modules() if isinstance(module, ExpertAdapter)]
        return {name.removeprefix("layers.") for name in names}

    both = {f"{layer}.moe.experts.adapters.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")}
    assert adapted(["experts"]) == adapted(["gate_up_proj", "down_proj"]) == adapted(["mlp.experts"]) == both
    assert adapted(["layers.1.moe.experts.down_proj", "q_proj"]) == {"1.moe.experts.adapters.down_proj"}
    assert adapted(["model.layers.0.mlp.experts.gate_up_proj"]) == {"0.moe.experts.adapters.gate_up_proj"}
    assert adapted("all-linear") == set(), "they are not linear layers"
    with pytest.raises(UserError, match=r"^lora\.targets=\[gate_proj\]") as refused:
        network(["gate_proj"])
    assert refused.value.proposal == "lora.targets=[gate_up_proj]"
    with pytest.raises(UserError, match=r"^lora\.dropout=0\.1"):
        network(["experts"], dropout=0.1)


def test_modules_that_do_not_ask_for_adapters_get_none() -> None:
    """An adapter that the module's code does not apply would be trained in vain."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.empty(3, 4, 5))

    model = nn.ModuleDict({"experts": Other(), "q_proj": nn.Linear(2, 2)})
    with pytest.raises(UserError, match=r"^lora\.targets"):
        find_layers(model, [], ["experts"])
    add_adapters(model, [], LoraSection(rank=2, targets="all-linear"))
    assert not model["experts"].w1.requires_grad


def test_flops_count_the_adapters_of_chosen_experts() -> None:
    config = load_config("qwen3_moe_small", ["model.num_layers=2", "lora.rank=4", "lora.targets=[down_proj]"])
    model, of_layer = build_network(config), 4 * (config.model.dim + config.model.expert_dim)
    other = replace(config, lora=replace(config.lora, rank=8))
    found = training_flops_per_token(other, build_network(other), 64) - training_flops_per_token(config, model, 64)
    assert found == pytest.approx(6 * 2 * of_layer * config.model.num_chosen)


# ---------------------------------------------------------------------------------------------------------------
# Against peft

NUM_STEPS = 3
CASES = {
    "native": ("native qwen3_moe", ["lora.targets=[q_proj,gate_up_proj,down_proj]"]),
    "native, one layer": ("native qwen3_moe", ["lora.targets=[layers.1.moe.experts]"]),
    "native gpt_oss": ("native gpt_oss", ["lora.targets=[v_proj,experts]"]),
    "native deepseek_v3": ("native deepseek_v3", ["lora.targets=[o_proj,experts]"]),
    "qwen3_moe": ("qwen3_moe", ["lora.targets=[q_proj,gate_up_proj,down_proj]"]),
    "gpt_oss": ("gpt_oss", ["lora.targets=[v_proj,experts]", "model.attention=eager"]),
    "deepseek_v3": ("deepseek_v3", ["lora.targets=[o_proj,gate_up_proj]"]),
}


def trainer_on(folder: Path, kind: str, *overrides: str) -> Trainer:
    """Return a Trainer of adapters on a mixture, which is written to `folder`/base."""
    if kind.startswith("native "):
        base = folder_of(folder / "base", *MODELS[kind.removeprefix("native ")])
        of_model = [f"model.name={kind.removeprefix('native ')}", "model.balance=0"]
        return Trainer(config_of(base, folder / "run", *of_model, *overrides))
    base = hf_models.folder_of(folder / "base", kind)
    config = config_of(base, folder / "run", "model.name=hf", f"model.path={base}", *overrides, "train.init_from=null")
    return Trainer(config)


def in_peft(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a factor in the shape that peft has, written out by expert and rank."""
    if weight.ndim == 2:
        return weight
    num_experts = weight.shape[0]
    if "lora_A" in name:
        return torch.cat([weight[expert] for expert in range(num_experts)])
    columns = [weight[expert, :, rank] for rank in range(weight.shape[2]) for expert in range(num_experts)]
    return torch.stack(columns, dim=1)


def load(folder: Path) -> Any:
    """Load with transformers. The other implementations of experts do not multiply in float64."""
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("case", campaign_except(CASES, ["native"]))
def test_peft_computes_the_same_and_loads_the_export(case: str, tmp_path: Path) -> None:
    """Losses and gradients from the same adapters; then logits of the exports, and merged weights."""
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    from peft import LoraConfig, PeftModel, get_peft_model

    kind, overrides = CASES[case]
    trainer = trainer_on(tmp_path, kind, *overrides, f"train.steps={NUM_STEPS}")
    batches = list(islice(iter(trainer.build_loader()), NUM_STEPS * trainer.num_micro_batches))
    own = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    with torch.no_grad():  # no zeros, so that both factors have gradients from the start
        for number, parameter in enumerate(own.values()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            local(parameter).add_(noise / 20)
    first = {name: local(p.detach()).clone() for name, p in own.items()}
    trainer.save_checkpoint(wait=True)
    assert export_command([str(tmp_path / "run"), str(tmp_path / "before")]) == 0
    for batch in batches[: trainer.num_micro_batches]:
        trainer.loss(batch).backward()
    gradients = {name: local(p.grad).clone() for name, p in own.items() if p.grad is not None}
    trainer.optimizer.zero_grad()
    records = list(trainer.steps())
    trainer.save_checkpoint(wait=True)
    trainer.close()
    assert export_command([str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert export_command([str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0

    # The file has peft's names, and the factors in peft's order.
    settings = LoraConfig.from_pretrained(tmp_path / "before")
    settings.inference_mode = False
    model = get_peft_model(load(tmp_path / "base"), settings)
    tensors = load_file(tmp_path / "before" / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert theirs.keys() == tensors.keys()
    key_of = {name: [key for key in tensors if _same(tensors[key], in_peft(name, first[name]))] for name in own}
    assert sorted(key for keys in key_of.values() for key in keys) == sorted(tensors), "each is there once"

    # Gradients and losses, from the same adapters, against peft in float64.  In float32 both are up to 1.2e-6 from it
    # in the gradient of a parameter, and peft's losses 3e-6 after three steps.
    model.double()
    with torch.no_grad():
        for key, parameter in theirs.items():
            parameter.copy_(tensors[key])
    tokens, targets = (
        torch.cat([batch[name] for batch in batches[: trainer.num_micro_batches]]) for name in ("tokens", "targets")
    )
    loss = nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    for name, gradient in gradients.items():
        expected = theirs[key_of[name][0]].grad
        assert expected is not None
        assert (in_peft(name, gradient) - expected).norm() <= 2e-6 * expected.norm() + 1e-9, name
    model.zero_grad()
    losses = plain_loop(model, list(theirs.values()), batches, [record.lr for record in records], trainer.config)
    torch.testing.assert_close([record.loss for record in records], losses, rtol=1e-6, atol=0)

    # The exports.
    ours = load_weights(tmp_path / "run")
    loaded, base = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval(), tmp_path / "base"
    with torch.no_grad():
        logits = ours(tokens)
        assert not torch.allclose(logits, load(base).eval()(tokens).logits, rtol=1e-3, atol=1e-3)
        # In float64, where rounding hides nothing.
        exact = load_weights(tmp_path / "run").double()(tokens)
        in_float64 = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval().double()
        torch.testing.assert_close(in_float64(tokens).logits, exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(load(tmp_path / "merged").eval()(tokens).logits, logits, rtol=1e-5, atol=1e-5)
        with without_adapters(ours):
            torch.testing.assert_close(ours(tokens), load(base).eval()(tokens).logits, rtol=1e-5, atol=1e-6)
    whole = load(tmp_path / "merged").state_dict()
    for key, weight in loaded.merge_and_unload().state_dict().items():
        torch.testing.assert_close(weight, whole[key], rtol=1e-6, atol=1e-7, msg=key)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
