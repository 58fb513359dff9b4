"""Tensor parallelism: the ranks of a group share each layer's matrices, and between layers its tokens.

A model spec's plan (`ModelSpec.tensor`) gives modules one of these styles:

columns: a linear layer whose outputs are divided, such as the projections to attention heads.  Each rank computes its
    outputs for all tokens.  Of a weight that fuses several matrices (`ModelSpec.blocks`), each rank computes its part
    of each of them; such a weight is not divided in memory.
rows: a linear layer whose inputs are divided, as the outputs of `columns` are.  The ranks' results are summed; each
    rank keeps its tokens.
rows_gathered: the same, but each rank gets the results for all tokens, for models between whose layers all tokens must
    be there.
input: a module that needs all tokens: its first argument is gathered.
vocabulary: an embedding, or the projection that computes the loss, whose rows are divided.
sequence: a module with whole weights that works on each token by itself.

A module may have two styles: ("input", "columns") gathers the input of a linear layer.

Weights that are whole may be used anywhere, by all ranks for the same tokens or by each for its own: FSDP sums their
gradients over all ranks, and the gradient of each collective is its adjoint, so every product counts once.

Layers compute on plain tensors, not DTensors.  torch's styles (`torch.distributed.tensor.parallel`) hand tensors that
are still being communicated to the next layer, and a compiled layer that receives one computes no gradient for it;
quantized and adapted layers have operators that do not take DTensors.

Sources: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198 (tokens are
divided between layers).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from trainer.config.parallel import Slices, nearest_divisor
from trainer.distributed.exchange import gather_parts, scale_gradient
from trainer.errors import UserError, reason_of, setting_error
from trainer.experts import ADAPTER_NAME, fake_tensors
from trainer.loss import VocabularyPart, is_loss_replaced, split_vocabulary
from trainer.model.lora import AdaptedLinear
from trainer.model.packed import BLOCK_SIZE, PackedLinear, Packing
from trainer.model.placement import chunk_of
from trainer.model_spec import ModelSpec, TensorStyle, matches_pattern
from trainer.sequence import gather_tokens, sum_tokens, tensor_slices, use_slices

_GROUP_ATTRIBUTE = "tensor_group"
"""Name of the attribute that holds the `TensorGroup` of a module whose weights are divided among ranks."""


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share a model's matrices, and this rank's index among them."""

    size: int
    rank: int
    name: str
    """Name of the process group, for `trainer.distributed.exchange`."""


def split_model(model: nn.Module, spec: ModelSpec, group: TensorGroup, mesh: DeviceMesh | None) -> None:
    """Divide the matrices of `model`, which is on the meta device, as the spec's plan says, in place.

    mesh: the mesh of the group, with one axis.  Divided parameters become DTensors on it.  None for the planner: they
        become plain tensors, this rank's parts.

    Raises UserError if the plan does not fit the model, or if `mesh.tensor` does not divide one of the matrices.
    """
    divided: dict[nn.Parameter, nn.Parameter] = {}
    for name, style in find_plan(model, spec, group.size):
        module = model.get_submodule(name)
        if style == "input":
            module.register_forward_pre_hook(_gather_input)
        elif style != "sequence":
            weights = _Weights.of(module, name, style, spec, group)
            weights.divide(mesh, divided)
            setattr(module, _GROUP_ATTRIBUTE, group)
            module.forward = _FORWARD[style](_Layer(module), weights)  # type: ignore[method-assign]


def is_split(module: nn.Module) -> bool:
    """Return whether ranks share the weights of `module`, so that its forward pass is collective."""
    return hasattr(module, _GROUP_ATTRIBUTE)


def check_plan(model: nn.Module, spec: ModelSpec, slices: Slices) -> None:
    """Raise UserError if `model` runs on whole sequences but not on `slices` as its plan says.

    Finds plans that lead to wrong shapes; `trainer.lifecycle.probes.check_tensor` finds wrong results.  A model whose
    code does not run on fake tensors at all is left to that check.
    """
    split = copy.deepcopy(model)
    split_model(split, spec, TensorGroup(slices.tensor_count, rank=0, name=""), mesh=None)
    error = _error_on_fake_tensors(split, slices)
    if error is not None and _error_on_fake_tensors(model, None) is None:
        rule = f"model {spec.name!r} does not run with its plan (ModelSpec.tensor): {reason_of(error)}"
        raise setting_error("mesh.tensor", slices.tensor_count, rule, 1) from error


def _error_on_fake_tensors(model: nn.Module, slices: Slices | None) -> Exception | None:
    """Return what the model's code raises in a forward pass; None if it runs.  None for `slices`: whole sequences."""
    num_tokens = 4 if slices is None else slices.seq_len // slices.num_ranks
    names = [name for name in ("tokens", "targets") if name in inspect.signature(model.forward).parameters]
    fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")
    fake_tensor_log.disabled = True  # it prints the stack of an operator that fails
    try:
        with fake_tensors(), torch.no_grad(), use_slices(slices):
            named = (*model.named_parameters(), *model.named_buffers())
            fakes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in named}
            batch = {name: torch.zeros(1, num_tokens, dtype=torch.int64) for name in names}
            functional_call(model, fakes, kwargs=batch)
    except Exception as error:  # of any kind: the code is the user's
        return error
    finally:
        fake_tensor_log.disabled = False
    return None


def split_parameters(model: nn.Module, spec: ModelSpec, num_ranks: int) -> dict[str, int]:
    """Return the dimension along which each divided parameter of an undivided model would be divided, by name."""
    dims: dict[str, int] = {}
    for name, style in find_plan(model, spec, num_ranks):
        if style not in ("input", "sequence"):
            module_dims = _Weights.of(model.get_submodule(name), name, style, spec, TensorGroup(num_ranks, 0, "")).dims
            dims |= {f"{name}.{parameter}": dim for parameter, dim in module_dims.items()}
    return dims


def find_plan(model: nn.Module, spec: ModelSpec, num_ranks: int) -> list[tuple[str, TensorStyle]]:
    """Return the modules that the spec's plan for `num_ranks` ranks names, each with a style.

    Raises UserError if the spec has no plan for this model, if a pattern matches no module, or if a matrix belongs to
    no module that the plan names.
    """
    assert spec.tensor is not None  # `trainer.config.parallel.check_tensor`
    try:
        entries = spec.tensor(model) if callable(spec.tensor) else spec.tensor
    except UserError as error:
        raise setting_error("mesh.tensor", num_ranks, str(error), 1) from error
    names = [name for name, _ in model.named_modules()]
    plan: list[tuple[str, TensorStyle]] = []
    for pattern, styles in entries.items():
        matches = [name for name in names if matches_pattern(name, pattern)]
        if not matches:
            raise UserError(f"model {spec.name!r}: tensor: the model has no module {pattern!r}")
        for style in (styles,) if isinstance(styles, str) else styles:
            if style not in _STYLES:
                known = ", ".join(_STYLES)
                raise UserError(f"model {spec.name!r}: tensor: {pattern!r}: unknown style {style!r}; there are {known}")
            plan += [(name, style) for name in matches]
    owners = tuple(f"{name}." for name, style in plan if style != "input")
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not name.startswith(owners):
            fix = "give its module a style; `sequence` if it works on each token by itself"
            raise UserError(f"model {spec.name!r}: tensor: no entry covers the matrix {name}\n  try: {fix}")
    return plan


def _gather_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return gather_tokens(args[0], -2), *args[1:]


# ---------------------------------------------------------------------------------------------------------------
# The weights of one layer


@dataclass
class _Weights:
    """How the ranks of a group divide the weights of one module.  Parameters are named as within the module."""

    module: nn.Module
    group: TensorGroup
    dims: dict[str, int] = field(default_factory=dict)
    """The dimension along which a parameter is divided."""
    fused: dict[str, int | Sequence[int]] = field(default_factory=dict)
    """For a whole parameter that fuses several matrices: their number, or the rows of each."""
    packed: dict[str, Packing] = field(default_factory=dict)
    """For a whole parameter of quantized rows, of which each rank uses some columns: their format."""
    added_once: tuple[str, ...] = ()
    """Biases that are added to a sum over the ranks, and so by the first rank alone."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The size of a divided parameter along its dimension."""

    @classmethod
    def of(cls, module: nn.Module, name: str, style: TensorStyle, spec: ModelSpec, group: TensorGroup) -> _Weights:
        """Return how a module's weights are divided.  Raises UserError if they cannot be."""
        adapter = module if isinstance(module, AdaptedLinear) else None
        layer: Any = module if adapter is None else adapter.base_layer
        prefix = "" if adapter is None else "base_layer."
        required = (nn.Embedding, nn.Linear) if style == "vocabulary" else (nn.Linear, PackedLinear)
        if not isinstance(layer, required):
            rule = f"cannot split {name} by {style}: it is a {type(layer).__name__}"
            raise setting_error("mesh.tensor", group.size, rule, 1)
        weights = cls(module, group)
        biases = [] if getattr(layer, "bias", None) is None else [f"{prefix}bias"]
        if style in ("rows", "rows_gathered"):
            if isinstance(layer, PackedLinear):
                weights.packed[f"{prefix}weight"] = layer.packings["weight"]
            else:
                weights.dims[f"{prefix}weight"] = 1
            weights.added_once = tuple(biases)
            if adapter is not None:
                weights.dims[f"lora_A.{ADAPTER_NAME}.weight"] = 1
        else:
            names = [f"{prefix}weight", *biases]
            if adapter is not None:
                names.append(f"lora_B.{ADAPTER_NAME}.weight")
            blocks = next((b for p, b in spec.blocks.items() if fnmatchcase(f"{name}.weight", p)), None)
            if blocks is None:
                weights.dims = dict.fromkeys(names, 0)
            else:
                weights.fused = dict.fromkeys(names, blocks)
        weights.sizes = {key: module.get_parameter(key).shape[dim] for key, dim in weights.dims.items()}
        weights._check_sizes(name, style)
        return weights

    def _check_sizes(self, name: str, style: str) -> None:
        """Raise UserError unless the ranks have equal parts of the weights; those of a vocabulary may differ."""
        parts = {} if style == "vocabulary" else {key: (self.sizes[key], _SIDES[dim]) for key, dim in self.dims.items()}
        for key, blocks in self.fused.items():
            rows = self.module.get_parameter(key).shape[0]
            parts[key] = (min(blocks) if not isinstance(blocks, int) else rows // blocks, "rows of each matrix")
        for key, packing in self.packed.items():
            parts[key] = (packing.width // BLOCK_SIZE, f"blocks of {BLOCK_SIZE} columns")
        for key, (number, what) in parts.items():
            if number % self.group.size:
                rule = f"must divide the {number} {what} of {name}.{key}"
                raise setting_error("mesh.tensor", self.group.size, rule, nearest_divisor(self.group.size, number))

    def span(self, key: str) -> tuple[int, int]:
        """Return the range of a divided parameter that this rank holds along its dimension."""
        return chunk_of((0, self.sizes[key]), self.group.rank, self.group.size)

    def divide(self, mesh: DeviceMesh | None, divided: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace the divided parameters by this rank's parts.

        divided: the parts, by the parameter that they replace; a tied parameter is divided once.
        """
        for key, dim in self.dims.items():
            owner, name = self._owner(key)
            parameter = owner.get_parameter(name)
            if parameter not in divided:
                start, stop = self.span(key)
                part: torch.Tensor = parameter.detach().narrow(dim, start, stop - start).contiguous()
                if mesh is not None:
                    part = DTensor.from_local(
                        *(part, mesh, [Shard(dim)]),
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                divided[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, divided[parameter])

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the weights with which this rank computes its part of the layer."""
        weights = {key: self._part(key) for key in self.dims}
        for key, blocks in self.fused.items():
            parameter = self._current(key)
            matrices = parameter.chunk(blocks) if isinstance(blocks, int) else parameter.split([*blocks])
            weights[key] = torch.cat([matrix.chunk(self.group.size)[self.group.rank] for matrix in matrices])
        for key, packing in self.packed.items():
            width = packing.width // self.group.size
            weights[key] = packing.columns(self._current(key), self.group.rank * width, (self.group.rank + 1) * width)
        for key in self.added_once:  # a product, so that every rank has a gradient to reduce
            weights[key] = self._current(key) * float(self.group.rank == 0)
        return weights

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the divided weights in full.  One all-gather each; in the backward pass, one reduce-scatter each."""
        weights = {}
        for key, dim in self.dims.items():
            part = self._part(key)
            num_ranks, size = self.group.size, self.sizes[key]
            missing = -(-size // num_ranks) - part.shape[dim]
            if missing:
                part = torch.cat((part, part.new_zeros(*part.shape[:dim], missing, *part.shape[dim + 1 :])), dim)
            parts = gather_parts(part, num_ranks, self.group.name)
            weights[key] = torch.cat(parts.unbind(), dim).narrow(dim, 0, size)
        return weights

    def _owner(self, key: str) -> tuple[nn.Module, str]:
        """Return the module that owns a parameter directly, and the parameter's name there."""
        path, _, name = key.rpartition(".")
        return self.module.get_submodule(path), name

    def _current(self, key: str) -> torch.Tensor:
        """Return a parameter, or the tensor that replaces it at the moment (`torch.func.functional_call`)."""
        owner, name = self._owner(key)
        current: torch.Tensor = getattr(owner, name)
        return current

    def _part(self, key: str) -> torch.Tensor:
        """Return this rank's part of a divided parameter.

        Its gradient is a sum over the tokens of all ranks of the group, but FSDP averages it only over the ranks with
        the same part.  These are fewer than all ranks by a factor of the group's size, by which it is divided here.
        """
        parameter = self._current(key)
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return scale_gradient(part, 1 / self.group.size)


_SIDES = ("rows", "columns")
"""What a matrix is divided into along each dimension."""


class _Layer(nn.Module):
    """Calls a module's own forward pass, which the module's attribute `forward` hides, with other weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return type(self.module).forward(self.module, *args)

    def run(self, weights: Mapping[str, torch.Tensor], *args: Any) -> Any:
        """Return the output for `args`; weights: replacements, by their names in the module."""
        return functional_call(self, {f"module.{key}": weight for key, weight in weights.items()}, args)


# ---------------------------------------------------------------------------------------------------------------
# The forward passes, which replace those of the modules.  If models are called with full sequences, each rank may have
# other ones: then the weights are gathered, not the tokens.


def _run_whole(layer: _Layer, weights: _Weights, x_BTD: torch.Tensor) -> Any:
    """Return the output of the whole layer.  The backward pass gathers the weights again, so that none are kept."""
    return checkpoint(lambda x: layer.run(weights.whole(), x), x_BTD, use_reentrant=False)


def _columns(layer: _Layer, weights: _Weights) -> Callable[..., Any]:
    def forward(x_BTD: torch.Tensor) -> Any:
        if tensor_slices() is None:
            return _run_whole(layer, weights, x_BTD)
        return layer.run(weights.parts(), x_BTD)

    return forward


def _rows(layer: _Layer, weights: _Weights, gathers: bool = False) -> Callable[..., Any]:
    def forward(x_BTD: torch.Tensor) -> Any:
        if tensor_slices() is None:
            return _run_whole(layer, weights, x_BTD)
        out_BtD = sum_tokens(layer.run(weights.parts(), x_BTD), -2)
        return gather_tokens(out_BtD, -2) if gathers else out_BtD

    return forward


def _vocabulary(layer: _Layer, weights: _Weights) -> Callable[..., Any]:
    start, stop = weights.span("weight")

    def embed(tokens_Bt: torch.Tensor) -> Any:
        if tensor_slices() is None:
            return layer.run(weights.whole(), tokens_Bt)
        tokens_BT = gather_tokens(tokens_Bt, -1)
        is_here_BT = (tokens_BT >= start) & (tokens_BT < stop)
        rows_BTD = layer.run(weights.parts(), (tokens_BT - start).where(is_here_BT, 0))
        return sum_tokens(rows_BTD.masked_fill(~is_here_BT.unsqueeze(-1), 0), -2)

    def project(hidden_BtD: torch.Tensor, targets_Bt: torch.Tensor | None = None) -> Any:
        if tensor_slices() is None or targets_Bt is None or is_loss_replaced():
            return layer.run(weights.whole(), hidden_BtD, targets_Bt)
        group = weights.group
        with split_vocabulary(VocabularyPart(start, group.rank, group.size, group.name)):
            return layer.run(weights.parts(), gather_tokens(hidden_BtD, -2), gather_tokens(targets_Bt, -1))

    return embed if isinstance(layer.module, nn.Embedding) else project


_FORWARD: dict[TensorStyle, Callable[[_Layer, _Weights], Callable[..., Any]]] = {
    "columns": _columns,
    "rows": _rows,
    "rows_gathered": partial(_rows, gathers=True),
    "vocabulary": _vocabulary,
}
"""Returns a module's forward pass for each style that divides weights."""

_STYLES = (*_FORWARD, "input", "sequence")
