"""Model FLOPs per token, without recomputation."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from torch import nn

from trainer.config import RunConfig
from trainer.model.lora import adapter_part
from trainer.model.parameters import count_matrix_parameters
from trainer.model.units import find_blocks
from trainer.recipe import Recipe


def flops_of(config: RunConfig, model: nn.Module, seq_len: float) -> float:
    """Return the model FLOPs per token of a training step, including the forward pass of a reference model, if any."""
    total = flops_per_token(config.recipe, config.model, model, seq_len)
    return total + (
        _flops_if_all_trained(config.recipe, config.model, model, seq_len) / 3 if config.rows_per_sample > 1 else 0.0
    )


def _flops_if_all_trained(recipe: Recipe, model_config: Any, model: nn.Module, seq_len: float) -> float:
    """Return the FLOPs per token of forward and backward passes if every weight is trained, without adapters."""
    if recipe.flops:
        return recipe.flops(model_config, seq_len)
    return 6.0 * (count_matrix_parameters(model) - _num_adapter_parameters(model))


def _num_adapter_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if adapter_part(name))


def flops_per_token(recipe: Recipe, model_config: Any, model: nn.Module, seq_len: float) -> float:
    """Return the model FLOPs per token of forward and backward passes: 6 per weight in a matrix, plus attention.

    `Recipe.flops` covers the recipe's own model; adapters are added.  seq_len: the number of tokens that attention
    spans; if documents are masked, the mean over tokens of their document's length, usually not an integer.

    A frozen weight has no gradient, so it costs 4.  The backward pass stops at the first trained parameter; weights
    before it cost 2, and their attention costs a third.  "Before" refers to the order of `model.parameters()`.  Source:
    Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    total = _flops_if_all_trained(recipe, model_config, model, seq_len) + 6.0 * _num_adapter_parameters(model)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return total
    matrices = _matrices(model, with_tied_tables=recipe.flops is not None)
    # In a mixture of experts, a token uses only a share of the weights.
    share = min(1.0, total / (6.0 * sum(p.numel() for p in matrices)))
    below = {id(p) for p in takewhile(lambda parameter: not parameter.requires_grad, model.parameters())}
    frozen = sum(p.numel() for p in matrices if not p.requires_grad)
    without_backward = sum(p.numel() for p in matrices if id(p) in below)
    attention = max(0.0, total - 6.0 * sum(p.numel() for p in matrices))
    blocks = find_blocks(model, recipe)
    blocks_below = [block for block in blocks if all(id(p) in below for p in block.parameters())]
    attention_below = attention * len(blocks_below) / max(1, len(blocks))
    return total - 2.0 * share * (frozen + without_backward) - 2.0 / 3.0 * attention_below


def _matrices(model: nn.Module, with_tied_tables: bool) -> list[nn.Parameter]:
    """Return the matrices that tokens are multiplied with; an embedding table counts only if a head shares it."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    others = {id(p) for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    counted = others if with_tied_tables else others - tables
    return [p for p in model.parameters() if id(p) in counted and p.ndim >= 2]
