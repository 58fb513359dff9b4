"""Makes `trainer.experts` compute the experts of transformers' mixture-of-experts models.

In most of these models, one module holds the stacked experts of a layer.  Its inputs are tokens, and the indices and
weights of each token's experts.  Its class declares the layout of the experts through the decorator
`use_experts_implementation`.  A module for which `_is_supported` is true supports expert parallelism (`mesh.expert`),
and its matrices can have adapters (`lora.targets`).
Source: transformers, integrations/moe.py.

Shape suffixes: S tokens, D model width, F hidden width of an expert, E experts, A experts per token, M token-expert
pairs (S x A).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from trainer.experts import apply_experts, expert_matmuls, grouped_bias


def dispatch_experts(model: nn.Module) -> None:
    """Make `trainer.experts` compute the expert modules in `model` for which `_is_supported` is true."""
    module: Any
    for module in model.modules():
        if _is_supported(module):
            inner = _first_matrix_name(module)
            module.matrices = {inner: (inner,), "down_proj": ("down_proj",)}
            original_class: Any = type(module)
            module.__class__ = _with_dispatch(original_class)


def expert_modules(model: nn.Module) -> list[str]:
    """Return the names of the expert modules that `trainer.experts` computes."""
    return [name for name, module in model.named_modules() if "matrices" in vars(module)]


def _first_matrix_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _is_supported(module: Any) -> bool:
    """Return whether `_outputs` can compute the experts in a module.

    The module must declare the layout of its experts, with no norm after them, and its only parameters must be the
    experts' stacked matrices and biases.
    """
    declared = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "num_experts")
    if not all(hasattr(module, name) for name in declared) or module.has_post_expert_norm:
        return False
    names = [_first_matrix_name(module), "down_proj"]
    dims = dict.fromkeys(names, 3) | (dict.fromkeys((f"{name}_bias" for name in names), 2) if module.has_bias else {})
    actual_dims = {name: parameter.ndim for name, parameter in module.named_parameters()}
    return actual_dims == dims and {p.shape[0] for p in module.parameters()} == {module.num_experts}


@functools.cache
def _with_dispatch(original: Any) -> Any:
    """Return a subclass of the transformers class `original`, with the same name, that uses `apply_experts`."""

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs for tokens (S, D), their experts (S, A) and weights (S, A), as the original does.

        `apply_experts` calls this without weights: then `hidden_states` are rows (M, D) sorted by expert, and
        `top_k_index` holds the end of each expert's rows, (E,).
        """
        if top_k_weights is None:
            return _outputs(self, hidden_states, top_k_index)
        return apply_experts(self, hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)

    subclass = type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
    subclass.__qualname__, subclass.__doc__ = original.__qualname__, original.__doc__
    return subclass


def _outputs(experts: Any, x_MD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    inner = _first_matrix_name(experts)
    (hidden_MF,) = expert_matmuls(experts, inner, x_MD, ends_E)
    if experts.has_bias:
        hidden_MF = hidden_MF + grouped_bias(getattr(experts, f"{inner}_bias"), ends_E, len(x_MD))
    hidden_MF = experts._apply_gate(hidden_MF) if experts.has_gate else experts.act_fn(hidden_MF)
    (out_MD,) = expert_matmuls(experts, "down_proj", hidden_MF, ends_E)
    return out_MD + grouped_bias(experts.down_proj_bias, ends_E, len(x_MD)) if experts.has_bias else out_MD
