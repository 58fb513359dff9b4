"""The recipe's hooks: FSDP units, initialisation of weights, FLOPs, and notes for the start block."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from trainer.recipes.hf.config import HfConfig
from trainer.recipes.hf.model import LossHead, architecture, build, settings_of
from transformers import initialization


def units(model: Any) -> list[nn.Module | tuple[nn.Module, nn.Module]]:
    """Return the FSDP units: the embedding (with the head if they share weights), each block, and the head.

    Blocks are the modules that transformers lists in `_no_split_modules`; if there are none, the elements of the
    longest `nn.ModuleList`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kinds, inside = set(model._no_split_modules or ()), ""
    blocks: list[nn.Module] = []
    for name, module in model.named_modules():  # the outermost ones, in the order of the model
        if type(module).__name__.removeprefix("FSDP") in kinds and not (inside and name.startswith(inside)):
            inside = f"{name}."
            blocks.append(module)
    if not blocks:
        lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=len, default=[])
    if embedding.weight is head.weight:
        return [(embedding, head), *blocks]
    return [embedding, *blocks, head]


def init(module: nn.Module, name: str, model: Any) -> None:
    """Initialise the parameters that `module` directly owns, as transformers does, and leave all others unchanged.

    The library initialises a module after its children, and redraws some of their weights: GPT-2's projections back
    into the residual stream, for example.  `_init_weights` is therefore also called for each ancestor of `module`, from
    the inside out.  A module that is neither the library's nor torch's, such as an adapter, is initialised by its own
    `reset_parameters`.
    """
    kinds = [kind for kind in type(module).__mro__ if kind is not nn.Module]
    if not any(kind.__module__.startswith(("transformers.", "torch.nn.modules.")) for kind in kinds):
        module.reset_parameters()  # type: ignore[operator]
        return
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter._is_hf_initialized = True  # the library's own flag: do not initialise this parameter
    parts = name.split(".") if name else []
    path = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    with initialization.guard_torch_init_functions():
        for depth in reversed(range(len(path))):
            owner = next(part for part in reversed(path[: depth + 1]) if isinstance(part, transformers.PreTrainedModel))
            with _padding_of_the_library(path[depth]):
                owner._init_weights(path[depth])


@contextmanager
def _padding_of_the_library(module: nn.Module) -> Iterator[None]:
    """Restore `padding_idx` of an embedding inside the block, because the library zeroes that row of a new model."""
    row = getattr(module, "padding_row", None)
    if row is None:
        yield
        return
    module.padding_idx = row  # type: ignore[assignment]
    try:
        yield
    finally:
        module.padding_idx = None  # type: ignore[assignment]


def notes(config: HfConfig, model: Any) -> list[str]:
    """Return what the start block says about the model: its class, how its loss is computed, and what is left out."""
    found = [f"{architecture(config)} of transformers {transformers.__version__}"]
    if config.fresh:
        found.append("fresh weights")
    if not isinstance(model.get_output_embeddings(), LossHead):
        found.append("loss of whole logits, as these are not its head's output alone")
    if config.config.get("output_router_logits"):
        found.append("without its router's auxiliary loss, which depends on how a batch is split")
    return found


def flops(config: HfConfig, seq_len: int) -> float:
    """Return model FLOPs per token of forward and backward: 6 per matrix weight, plus causal attention.

    Of a mixture of experts, only the experts that process the token count.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    matrices, widths = _work(json.dumps(config.config, sort_keys=True))
    scores = sum(2 * width * _mean_keys(seq_len, window) for width, window in widths)
    return 6.0 * (matrices + scores)


def _mean_keys(seq_len: int, window: int | None) -> float:
    """Return the mean number of keys that a query attends to: those before it, at most `window`."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)


@functools.lru_cache(maxsize=8)
def _work(content: str) -> tuple[float, list[tuple[int, int | None]]]:
    """Return the number of matrix weights used per token, and the width and window of each attention layer."""
    config = HfConfig(config=json.loads(content))
    with torch.device("meta"):
        model = build(config)
    text = settings_of(config).get_text_config()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = 0.0
    for parameter in model.parameters():
        if parameter.ndim == 3:  # a stack of matrices, one per expert
            matrices += parameter.numel() * min(1.0, getattr(text, "num_experts_per_tok", 1) / parameter.shape[0])
        elif parameter.ndim == 2 and (parameter is not table or parameter is head):
            matrices += parameter.numel()
    heads = getattr(text, "num_attention_heads", 0)
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding" if window else "full"] * text.num_hidden_layers
    windows = {"full": None, "full_attention": None, "sliding": window, "sliding_attention": window}
    return matrices, [(width, windows[kind]) for kind in kinds if kind in windows]
