"""LoRA adapters: trainable low-rank updates to frozen linear layers, each the product of two small matrices.

The parameters of adapted layers have peft's names, so that adapters can be exchanged with peft:
`<layer>.base_layer.weight` is the layer's own weight; `<layer>.lora_A.default.weight` (rank, in) and
`<layer>.lora_B.default.weight` (out, rank) are the adapter.  Adapters of stacked experts are defined in
`trainer.experts`.  Their names are not peft's: `<experts>.adapters.<matrix>.lora_A.default.weight` (E, rank, in), and
the same with `lora_B` (E, out, rank).  This module needs no model spec, mesh or files.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from trainer.config.schema import LoraSection
from trainer.errors import UserError, nearest, setting_error
from trainer.experts import ADAPTER_NAME, ExpertAdapter, ExpertFactor, add_adapter, matrices_of
from trainer.model.head import is_score_name
from trainer.model.packed import PackedLinear, pack_experts

ALL_LINEAR = "all-linear"
"""The value of `lora.targets` that selects the linear layers in all blocks."""

_MIN_SIMILARITY = 0.75
"""Minimum similarity for suggesting a layer's name, so that gate_proj is not taken for a misspelling of v_proj."""

_WEIGHT = re.compile(rf"(?P<layer>.+)\.lora_(?P<letter>[AB])\.{ADAPTER_NAME}\.weight")


class LoraFactor(nn.Module):
    """One of an adapter's two matrices, A or B: `weight` (out, in), in float32.  `AdaptedLinear` does the matmul."""

    def __init__(self, in_features: int, out_features: int, zero_init: bool) -> None:
        super().__init__()
        self.zero_init = zero_init
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.zero_init:
            nn.init.zeros_(self.weight)
        else:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))


FACTORS = (LoraFactor, ExpertFactor)
"""The classes of the modules that hold adapter parameters."""


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter: `base_layer(x) + scaling * lora_B(lora_A(dropout(x)))`.

    Maps x (..., in) to (..., out).  B starts at zero, so the initial output equals that of the base layer.
    """

    def __init__(self, base_layer: nn.Module, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        if isinstance(base_layer, (nn.Linear, PackedLinear)):
            self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        else:  # Conv1D
            self.in_features, self.out_features = int(base_layer.nx), int(base_layer.nf)  # type: ignore[arg-type]
        self.scaling = scaling
        self.is_enabled = True
        """Whether the adapter is applied; see `without_adapters`."""
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({ADAPTER_NAME: nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({ADAPTER_NAME: LoraFactor(self.in_features, rank, zero_init=False)})
        self.lora_B = nn.ModuleDict({ADAPTER_NAME: LoraFactor(rank, self.out_features, zero_init=True)})

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices of the adapter: (rank, in) and (out, rank)."""
        return self.lora_A[ADAPTER_NAME].weight, self.lora_B[ADAPTER_NAME].weight  # type: ignore[return-value]

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the whole layer, with the adapter's product added, in the base layer's layout and dtype.

        Computed at each access, and differentiable: code that uses a layer's weight instead of calling the layer,
        as fused kernels of state-space layers do, trains the adapter too.  Only its dropout has no effect there.
        """
        down, up = self.factors
        base: torch.Tensor = self.base_layer.weight  # type: ignore[assignment]
        if isinstance(self.base_layer, PackedLinear):
            base = self.base_layer.unpacked(base, down.dtype)  # (out, in)
        if not self.is_enabled:
            return base
        is_transposed = not isinstance(self.base_layer, (nn.Linear, PackedLinear))  # Conv1D
        factors = (down.t(), up.t()) if is_transposed else (up, down)
        return torch.addmm(base.to(up.dtype), *factors, alpha=self.scaling).to(base.dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        """The base layer's bias."""
        bias: torch.Tensor | None = self.base_layer.bias  # type: ignore[assignment]
        return bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_enabled:
            return self.base_layer(x)  # type: ignore[no-any-return]
        down, up = self.factors
        packed = self.base_layer if isinstance(self.base_layer, PackedLinear) else None
        base_weight: torch.Tensor = self.base_layer.weight  # type: ignore[assignment]
        is_frozen = packed is not None or (_is_plain_linear(self.base_layer) and not base_weight.requires_grad)
        # The fused operator does not convert dtypes or support DTensors.
        operands = (down, up) if packed is not None else (base_weight, down, up)
        if is_frozen and all(t.dtype == x.dtype and not isinstance(t, DTensor) for t in operands):
            flat = x.flatten(0, -2)
            dropped = (
                None
                if isinstance(self.lora_dropout[ADAPTER_NAME], nn.Identity)
                else self.lora_dropout[ADAPTER_NAME](flat)
            )
            is_conv = packed is None and not isinstance(self.base_layer, nn.Linear)
            weight = base_weight.t() if is_conv else base_weight
            output = _AdaptedMatmul.apply(flat, dropped, weight, packed, self.bias, down, up, self.scaling)  # type: ignore[no-untyped-call]
            return output.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
        base_output = self.base_layer(x)
        low = F.linear(self.lora_dropout[ADAPTER_NAME](x.to(down.dtype)), down)
        # A single addmm instead of a matmul, a scaling and a sum over (..., out).
        output = torch.addmm(base_output.flatten(0, -2).to(up.dtype), low.flatten(0, -2), up.t(), alpha=self.scaling)
        return output.view(base_output.shape).to(base_output.dtype)


class _AdaptedMatmul(torch.autograd.Function):
    """A frozen layer and its adapter fused into one differentiable operator, x (N, in) to (N, out).

    Saves the adapter's input, the output of its first factor, and the weights (packed ones as bytes).  The adapter's
    matmuls accumulate into the layer's, which avoids separate sums over (N, in) and (N, out).  Gradients of inputs are
    computed only if needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        packed: PackedLinear | None,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """dropped: the adapter's input, x after dropout; None if that equals x.
        packed: the layer, if `weight` is packed.
        """
        adapter_input = x if dropped is None else dropped
        low = F.linear(adapter_input, down)
        ctx.save_for_backward(adapter_input, low, weight, down, up)
        ctx.scaling, ctx.drops, ctx.packed = scaling, dropped is not None, packed
        if packed is not None:
            weight = packed.unpacked(weight, x.dtype)
        # Not in place: selective activation checkpointing may save the layer's own output.
        return torch.addmm(F.linear(x, weight, bias), low, up.t(), alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        adapter_input, low, weight, down, up = ctx.saved_tensors
        needs_x_grad, needs_dropped_grad = ctx.needs_input_grad[:2]
        grad_low = torch.mm(grad, up).mul_(ctx.scaling)
        if ctx.packed is not None and needs_x_grad:
            weight = ctx.packed.unpacked(weight, grad.dtype)
        grad_x = torch.mm(grad, weight) if needs_x_grad else None
        if grad_x is not None and not ctx.drops:
            grad_x.addmm_(grad_low, down)
        grad_dropped = torch.mm(grad_low, down) if needs_dropped_grad else None
        grad_up = torch.mm(grad.t(), low).mul_(ctx.scaling)
        return grad_x, grad_dropped, None, None, None, torch.mm(grad_low.t(), adapter_input), grad_up, None


def add_adapters(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    lora: LoraSection,
    alias: Callable[[str], str | None] = lambda layer: None,
) -> None:
    """Freeze `model`, and add an adapter to each layer that `lora.targets` names, in place.

    `blocks` are the model's repeated blocks.  `all-linear` means the linear layers in the blocks or, in a model without
    blocks, all linear layers.  `alias` returns a layer's other name, if it has one; targets may use it too.  No-op with
    `lora.rank=0`.  With a packed `lora.base_dtype`, the weights of the adapted layers are packed, and so are those of
    all other linear layers and experts in the blocks.

    Raises UserError for a target that matches no layer (suggesting the nearest name), for a layer that cannot be
    packed, and for dropout on experts.
    """
    if not lora.rank:
        return
    names, stacks = find_layers(model, blocks, lora.targets, alias), expert_matrices(model)
    chosen = [name for name in names if name not in stacks]
    model.requires_grad_(False)
    for name in names:
        if name in stacks:
            if lora.dropout:
                rule = f"does not apply to the adapters of experts, such as {name}: peft has no dropout there"
                raise setting_error("lora.dropout", lora.dropout, rule, 0.0)
            module, _, matrix = name.rpartition(".")
            add_adapter(model.get_submodule(module), matrix, lora.rank, lora.alpha / lora.rank)
    replaced: dict[int, nn.Module] = {}
    for name in weights_to_pack(model, blocks, names) if lora.packs else ():
        owner_name, _, parameter = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if matrices_of(owner):
            pack_experts(owner, parameter, name, str(lora.base_dtype))
        else:
            replaced[id(owner)] = PackedLinear(owner, owner_name, str(lora.base_dtype))
    for layer in [model.get_submodule(name) for name in chosen]:
        base_layer = replaced.get(id(layer), layer)
        replaced[id(layer)] = AdaptedLinear(base_layer, lora.rank, lora.alpha / lora.rank, lora.dropout)
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])


def weights_to_pack(model: nn.Module, blocks: Sequence[nn.Module], adapted: Collection[str]) -> list[str]:
    """Return the names of the weights to pack for a packed `lora.base_dtype`.

    These are the matrices of linear layers and stacked experts in the blocks, and all matrices with adapters.
    `adapted`: the layers with adapters, as returned by `find_layers`.  `model` must not have packed weights yet.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    names = []
    for name, module in model.named_modules():
        if _is_plain_linear(module) and (id(module) in inside or name in adapted):
            names.append(f"{name}.weight")
        for matrix, parameters in matrices_of(module).items():
            if id(module) in inside or f"{name}.{matrix}" in adapted:
                names += [f"{name}.{parameter}" for parameter in parameters]
    return names


def find_layers(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    targets: str | Sequence[str],
    alias: Callable[[str], str | None] = lambda layer: None,
) -> list[str]:
    """Return the names of the layers that `lora.targets` matches.  Raises UserError for a target without a match.

    Besides stacked experts, only plain linear layers can have adapters; an output projection that also computes the
    loss, for example, cannot.  Matrices of stacked experts get adapters only if named, as `<experts>.<matrix>` or by
    their module.
    """
    candidates = [name for name, module in model.named_modules() if _is_plain_linear(module)]
    if targets == ALL_LINEAR:
        inside = {id(module) for block in blocks for module in block.modules()}
        candidates = [name for name in candidates if not blocks or id(model.get_submodule(name)) in inside]
        if not candidates:
            rule = "the model has no linear layer that can have an adapter"
            raise setting_error("lora.targets", targets, rule, fix="train all weights: leave out lora.rank")
        return candidates
    requested = [targets] if isinstance(targets, str) else list(targets)
    names_of = {name: [name, *filter(None, [alias(name)])] for name in candidates}
    for name, parameter in expert_matrices(model).items():
        module, _, matrix = name.rpartition(".")
        names_of[name] = [name, module]
        if other_module := huggingface_module(alias(parameter) or ""):
            names_of[name] += [f"{other_module}.{matrix}", other_module]
    matches = {
        target: [name for name, spellings in names_of.items() if any(_matches_target(s, target) for s in spellings)]
        for target in requested
    }
    for target, names in matches.items():
        if not names:
            raise _no_match(model, names_of, target, requested, alias)
    return [name for name in names_of if any(name in names for names in matches.values())]


def expert_matrices(model: nn.Module) -> dict[str, str]:
    """Map each matrix of stacked experts that can have an adapter, `<experts>.<name>`, to its first parameter."""
    return {
        f"{module_name}.{matrix}": f"{module_name}.{parameters[0]}"
        for module_name, module in model.named_modules()
        for matrix, parameters in matrices_of(module).items()
    }


def huggingface_module(parameter: str) -> str:
    """Return the name of the experts' module in transformers, given a parameter's name.

    The parameter's name may have `*` in place of the expert's number.
    """
    return parameter.partition(".*.")[0] if ".*." in parameter else parameter.rpartition(".")[0]


def _matches_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _no_match(
    model: nn.Module,
    names_of: Mapping[str, Sequence[str]],
    target: str,
    requested: Sequence[str],
    alias: Callable[[str], str | None],
) -> UserError:
    if target.replace("_", "-") == ALL_LINEAR:
        return setting_error("lora.targets", list(requested), "must be the only target", proposal=ALL_LINEAR)
    names = [name for name, _ in model.named_modules() if name]
    modules = [name for name in names if any(_matches_target(each, target) for each in (name, alias(name) or ""))]
    all_names = [each for names in names_of.values() for each in names]
    short_names = [*dict.fromkeys(each.rpartition(".")[2] for each in all_names)]
    rule = f"{modules[0]} is not a layer that can have an adapter" if modules else f"no layer is named {target!r}"
    best = nearest(target, short_names, _MIN_SIMILARITY) or nearest(target, [name for name in all_names if "." in name])
    suggestion = [best if item == target else item for item in requested] if best and best not in requested else None
    rule += f"; layers that can have an adapter: {', '.join(short_names)}"
    return setting_error("lora.targets", list(requested), rule, proposal=suggestion)


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer: torch's `Linear`, or the `Conv1D` of transformers' GPT-2.

    Modules with `takes_adapter = False`, such as the routers of experts, are excluded.
    """
    if "forward" in vars(module) or not getattr(module, "takes_adapter", True):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def transposed_layers(model: nn.Module) -> set[str]:
    """Return the names, without adapters, of the layers whose weight has shape (in, out)."""
    return {name_without_adapters(name) for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}


# ---------------------------------------------------------------------------------------------------------------
# Names


def parse_adapter(name: str) -> tuple[str, str] | None:
    """Return the layer's name and the letter (A or B) of an adapter parameter; None for any other parameter."""
    match = _WEIGHT.fullmatch(name)
    return (match["layer"], match["letter"]) if match else None


def name_without_adapters(name: str) -> str:
    """Return the name of a parameter or module in the model without adapters."""
    return name.replace(".base_layer.", ".").removesuffix(".base_layer")


def is_base_weight(name: str) -> bool:
    """Return whether a parameter belongs to the base model, not to an adapter or a new head."""
    return parse_adapter(name) is None and not is_score_name(name)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable all adapters inside the block."""
    layers = [module for module in model.modules() if isinstance(module, (AdaptedLinear, ExpertAdapter))]
    for layer in layers:
        layer.is_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_enabled = True
