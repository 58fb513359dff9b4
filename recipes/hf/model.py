"""Transformers models that also accept `tokens` and `targets`, for which they return logits or the summed loss.

This file also contains the model spec's functions for FSDP units, random initialization and FLOPs, and for the notes
that a run prints when it starts.

The modules, the parameters and their names come from transformers ("the library").  Without `tokens`, the model behaves
like the library's: it returns the library's output, and `generate` works as usual.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.config.model_folder import why_not_native
from trainer.errors import nearest, reason_of, setting_error
from trainer.loss import cross_entropy, linear_cross_entropy
from trainer.model.documents import checked_call
from trainer.model.head import ScoreHead
from trainer.model.parameters import num_writes, storage_id
from trainer.sequence import Documents, apply_by_document, gather_tokens, own_tokens

from .._flops import mean_num_keys
from .config import HfConfig
from .experts import dispatch_experts

_LIBRARY_ATTENTION = {"flex": "flex_attention"}
"""Maps each value of `HfConfig.attention` that the library spells differently to the library's spelling."""


def build(config: HfConfig) -> transformers.PreTrainedModel:
    """Return the model that config.json describes, with float32 weights, on the current default device.

    Raises UserError if the library has no causal language model of this type or cannot build it, or if the model does
    not support the requested attention implementation.
    """
    attention = _LIBRARY_ATTENTION.get(config.attention or "", config.attention)
    chosen = {} if attention is None else {"attn_implementation": attention}  # else what config.json names, if anything
    settings = library_config(config)
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            settings, dtype=torch.float32, trust_remote_code=False, **chosen
        )
    except Exception as error:  # inconsistent sizes can raise any error, in the library or a torch layer
        if config.attention is None or not isinstance(error, (ImportError, ValueError)):
            rule = f"transformers cannot build it ({reason_of(error)})"
            raise setting_error("model.path", config.path, rule) from error
        rule = f"transformers cannot compute attention this way ({reason_of(error)})"
        raise setting_error("model.attention", config.attention, rule, None) from error
    _train_padding_embedding(model)
    dispatch_experts(model)
    model_class: Any = type(model)
    model.__class__ = _with_loss(model_class)
    if _head_computes_logits(model):
        model.get_output_embeddings().__class__ = LossHead
    return model


def _train_padding_embedding(model: transformers.PreTrainedModel) -> None:
    """Train the embedding of the padding token wherever the token occurs.

    The library drops the gradient of this row, because it expects this token only as padding.  Here padding has no
    targets, and in many chat models the same token ends each turn, so it must be trained, as in the native models.
    `init` restores `padding_idx` for the library's `_init_weights`, which zeroes the row of a new model.
    """
    embedding = model.get_input_embeddings()
    for module in model.modules():
        are_tables = isinstance(module, nn.Embedding) and isinstance(embedding, nn.Embedding)
        if are_tables and module.num_embeddings == embedding.num_embeddings and module.padding_idx is not None:
            module.padding_row, module.padding_idx = module.padding_idx, None


def architecture(config: HfConfig) -> str:
    """Return the class name of the library's model."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.config["model_type"])
    architectures = config.config.get("architectures") or [None]
    return str(architectures[0] if class_name is None else class_name)


def library_config(config: HfConfig) -> transformers.PreTrainedConfig:
    """Return the library's configuration object.  Raises UserError for an unknown `model_type` or an invalid entry."""
    kind = config.config["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        best = nearest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        suggestion = f"; it has {best}" if best else ""
        rule = f"transformers {transformers.__version__} has no causal language model for model_type={kind}{suggestion}"
        raise setting_error("model.path", config.path, rule)
    # In config.json the library writes infinity, which JSON does not have, as {"__float__": "Infinity"}.
    content = json.loads(
        json.dumps(config.config),
        object_hook=lambda entries: float(entries["__float__"]) if [*entries] == ["__float__"] else entries,
    )
    if content.get("return_dict") is False:
        rule = "config.json: return_dict=false: the library's models cannot compute logits with it"
        raise setting_error("model.path", config.path, rule, fix="remove the entry")
    for entry in ("output_hidden_states", "output_attentions"):  # only what is returned beside the logits
        content.pop(entry, None)
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(content)
    except Exception as error:  # the library raises errors of any type for an invalid entry
        raise setting_error("model.path", config.path, f"config.json: {reason_of(error)}") from error


# ---------------------------------------------------------------------------------------------------------------
# The forward pass


class LossHead(nn.Linear):
    """The projection onto the vocabulary.

    With targets, it returns their summed loss without materializing all logits.
    """

    def forward(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        if targets_BT is None:
            return super().forward(hidden_BTD)
        return linear_cross_entropy(hidden_BTD, self.weight, targets_BT)


@functools.cache
def _with_loss(library: Any) -> Any:
    """Return a subclass of the library's class, with the same name, whose forward pass also accepts `tokens`."""

    def forward(
        self: Any,
        tokens: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return logits (B, T, V) of `tokens` (B, T), or with `targets` (B, T) their summed loss.

        With a new head (`ScoreHead`), return its scores (B, T, outputs) instead.

        positions (B, T): the positions of the tokens; ignored if `documents` is given.
        documents (B, T): see `trainer.sequence`.  Positions restart at zero in each document, from which the library
            infers that attention must not cross documents.  The first call with documents finds the layers that let
            them influence each other anyway, and resets the state of these at each document (`reset_at_documents`).
            It raises UserError if that does not help.
        cu_seqlens: see `trainer.sequence`.

        Without `tokens`, calls the library's own forward pass.
        """
        if tokens is None:
            return library.forward(self, **kwargs)
        # With tensor parallelism, all tokens of the group pass through the model, and this rank's through the head.
        inputs = {"input_ids": gather_tokens(tokens, 1), "use_cache": False, **kwargs}
        packed = Documents.of(documents, cu_seqlens)
        if packed is not None:
            inputs["position_ids"] = packed.positions_BT
        elif positions is not None:
            inputs["position_ids"] = gather_tokens(positions, 1)
        if packed is not None and getattr(self, "has_recurrent_layers", False):
            inputs["documents"] = packed  # passed on to all layers
        head = self.get_output_embeddings()
        if isinstance(head, ScoreHead) or (targets is not None and isinstance(head, LossHead)):
            return head(own_tokens(self.base_model(**inputs).last_hidden_state, -2), targets)
        logits = own_tokens(library.forward(self, **inputs).logits, -2)
        return logits if targets is None else cross_entropy(logits, targets)

    # `generate` inspects the signature to find out which arguments it may pass.
    own_parameters = [p for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*inspect.signature(library.forward).parameters.values()][1:]
    by_keyword = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in parameters]
    forward.__signature__ = inspect.Signature([*own_parameters, *by_keyword])  # type: ignore[attr-defined]
    members = {
        "forward": forward,
        "__call__": checked_call(library.__call__),
        "reset_at_documents": _reset_at_documents,
    }
    subclass = type(library.__name__, (library,), {**members, "__module__": library.__module__})
    subclass.__qualname__, subclass.__doc__ = library.__qualname__, library.__doc__
    return subclass


def _reset_at_documents(model: Any, modules: Sequence[str]) -> Callable[[], None] | None:
    """Make the named modules, and all others of the same classes, reset their state at each document.

    Returns a function that undoes it, or None if one of them already does or is the model itself.  See
    `trainer.model.documents.KeepsDocumentsApart`.
    """
    classes = {type(model.get_submodule(name)) for name in modules}
    if type(model) in classes or any(getattr(cls, "resets_at_documents", False) for cls in classes):
        return None
    changed: list[tuple[nn.Module, Any]] = [(m, type(m)) for m in model.modules() if type(m) in classes]
    had_recurrent_layers = getattr(model, "has_recurrent_layers", False)

    def undo() -> None:
        model.has_recurrent_layers = had_recurrent_layers
        for module, original_class in changed:
            module.__class__ = original_class

    for module, original_class in changed:
        module.__class__ = _with_document_resets(original_class)
    model.has_recurrent_layers = True
    return undo


@functools.cache
def _with_document_resets(library: Any) -> Any:
    """Return a subclass of a recurrent layer's class, with the same name, that resets the state at each document.

    The library passes document boundaries to the layers' kernels, but its plain torch code ignores them.
    """

    def forward(self: Any, *args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
        """Call the layer with documents as rows of its first hidden states (B, T, D), whatever the argument's name."""
        if documents is None:
            return library.forward(self, *args, **kwargs)
        arguments: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        key = next(_hidden_arguments(arguments, documents), None)
        if key is None:
            shape = (*documents.numbers_BT.shape, "width")
            raise ValueError(f"{library.__name__} has to reset its state at documents, but gets no argument of {shape}")
        num_outputs = 0

        def call(rows_NLD: torch.Tensor) -> torch.Tensor:
            nonlocal num_outputs
            replaced = {**arguments, key: rows_NLD}
            output = library.forward(
                self, *(replaced[n] for n in range(len(args))), **{name: replaced[name] for name in kwargs}
            )
            if isinstance(output, tuple):
                num_outputs, output = len(output), output[0]
            if output.shape[:2] != rows_NLD.shape[:2]:
                raise ValueError(f"{library.__name__} returned {tuple(output.shape)} for {tuple(rows_NLD.shape)}")
            return output

        hidden_BTD = apply_by_document(call, arguments[key], documents)
        return (hidden_BTD, *[None] * (num_outputs - 1)) if num_outputs else hidden_BTD

    members = {"forward": forward, "resets_at_documents": True, "__module__": library.__module__}
    subclass = type(library.__name__, (library,), members)
    subclass.__qualname__, subclass.__doc__ = library.__qualname__, library.__doc__
    return subclass


def _hidden_arguments(arguments: Mapping[int | str, Any], documents: Documents) -> Iterator[int | str]:
    """Yield the keys of the arguments that are hidden states (B, T, D), in the order of the call."""
    for key, value in arguments.items():
        is_hidden = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3
        if is_hidden and value.shape[:2] == documents.numbers_BT.shape:
            yield key


@torch.no_grad()
def _head_computes_logits(model: Any) -> bool:
    """Return whether the logits are exactly the head's output for the last hidden state of the base model.

    If so, the loss is `linear_cross_entropy` of the hidden state and the head's weight.  The check runs the library's
    forward pass on the meta device with the base model replaced by a stub: if the library scales, caps, slices or
    modifies the hidden state or the logits, the tensors before and after are not identical.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or head.bias is not None or base is model:
        return False
    hidden = torch.empty(1, 2, head.in_features, dtype=head.weight.dtype, device="meta")
    base_arguments: dict[str, Any] = {}
    head_calls: list[tuple[torch.Tensor, Any, Any]] = []

    def stub_forward(*args: Any, **kwargs: Any) -> Any:
        base_arguments.update(kwargs, **({"input_ids": args[0]} if args else {}))
        return _Outputs(last_hidden_state=hidden)

    def record_call(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # Keeps `output` alive, so that its storage is not reused.
        head_calls.append((output, _identity(output), _identity(inputs[0])))

    tokens, hook = torch.zeros(1, 2, dtype=torch.int64, device="meta"), head.register_forward_hook(record_call)
    base.forward = stub_forward
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    except Exception:  # the model needs more from its base model than the hidden state
        return False
    finally:
        hook.remove()
        del base.forward
    other_arguments = [
        name for name, value in base_arguments.items() if name not in ("input_ids", "use_cache") and value
    ]
    return len(head_calls) == 1 and not other_arguments and head_calls[0][1:] == (_identity(logits), _identity(hidden))


class _Outputs:
    """The output of the stub base model: it has a last hidden state, and every other attribute is None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, number: int) -> torch.Tensor:
        return (self.last_hidden_state,)[number]

    def __getattr__(self, name: str) -> None:
        return None


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for two views of the same elements, and changes with every in-place write."""
    storage = storage_id(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), num_writes(tensor)


# ---------------------------------------------------------------------------------------------------------------
# Units, initial weights, notes and FLOPs


def units(model: Any) -> list[nn.Module | tuple[nn.Module, nn.Module]]:
    """Return the FSDP units: the embedding (with the head if they share weights), each block, and the head.

    Blocks are the modules that transformers lists in `_no_split_modules`, or else the elements of the longest
    `nn.ModuleList`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kinds, block_prefix = set(model._no_split_modules or ()), ""
    blocks: list[nn.Module] = []
    for name, module in model.named_modules():  # the outermost ones, in the order of the model
        if type(module).__name__.removeprefix("FSDP") in kinds and not (block_prefix and name.startswith(block_prefix)):
            block_prefix = f"{name}."
            blocks.append(module)
    if not blocks:
        lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=len, default=[])
    if embedding.weight is head.weight:
        return [(embedding, head), *blocks]
    return [embedding, *blocks, head]


def init(module: nn.Module, name: str, model: Any) -> None:
    """Initialize the parameters that `module` directly owns, as transformers does, and leave all others unchanged.

    The library initializes a module after its children, and redraws some of their weights: GPT-2's projections back
    into the residual stream, for example.  `_init_weights` is therefore also called for each ancestor of `module`, from
    the inside out.  A module that is neither the library's nor torch's, such as an adapter, is initialized by its own
    `reset_parameters`.
    """
    kinds = [kind for kind in type(module).__mro__ if kind is not nn.Module]
    if not any(kind.__module__.startswith(("transformers.", "torch.nn.modules.")) for kind in kinds):
        module.reset_parameters()  # type: ignore[operator]
        return
    direct = {id(parameter) for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in direct:
            parameter._is_hf_initialized = True  # the library's own flag: do not initialize this parameter
    parts = name.split(".") if name else []
    path = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    with initialization.guard_torch_init_functions():
        for depth in reversed(range(len(path))):
            owner = next(part for part in reversed(path[: depth + 1]) if isinstance(part, transformers.PreTrainedModel))
            with _padding_index_restored(path[depth]):
                owner._init_weights(path[depth])


@contextmanager
def _padding_index_restored(module: nn.Module) -> Iterator[None]:
    """Restore an embedding's `padding_idx` during the block, in which the library initializes this row to zero."""
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
    """Return lines about the model for the start block: its class, how its loss is computed, and omitted loss terms."""
    lines = [f"{architecture(config)} from transformers {transformers.__version__}"]
    if reason := why_not_native(config.config):
        lines.append(f"because of {reason}")
    if config.fresh:
        lines.append("fresh weights")
    if not isinstance(model.get_output_embeddings(), (LossHead, ScoreHead)):
        lines.append("loss computed from full logits, because the model modifies its head's output")
    if config.config.get("output_router_logits"):
        lines.append("without the router's auxiliary loss, which depends on how a batch is split")
    return lines


def flops(config: HfConfig, seq_len: float) -> float:
    """Return model FLOPs per token for forward and backward: 6 per matrix weight, plus causal attention.

    In a mixture of experts, only the experts that process a token count.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    matrices, widths = _flop_terms(json.dumps(config.config, sort_keys=True))
    scores = sum(2 * width * mean_num_keys(seq_len, window) for width, window in widths)
    return 6.0 * (matrices + scores)


@functools.lru_cache(maxsize=8)
def _flop_terms(content: str) -> tuple[float, list[tuple[int, int | None]]]:
    """Return the number of matrix weights used per token, and the width and window of each attention layer."""
    config = HfConfig(config=json.loads(content))
    with torch.device("meta"):
        model = build(config)
    text_config = library_config(config).get_text_config()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = 0.0
    for parameter in model.parameters():
        if parameter.ndim == 3:  # a stack of matrices, one per expert
            matrices += parameter.numel() * min(
                1.0, getattr(text_config, "num_experts_per_tok", 1) / parameter.shape[0]
            )
        elif parameter.ndim == 2 and (parameter is not table or parameter is head):
            matrices += parameter.numel()
    heads = getattr(text_config, "num_attention_heads", 0)
    width = heads * (getattr(text_config, "head_dim", None) or text_config.hidden_size // max(1, heads))
    window = getattr(text_config, "sliding_window", None)
    kinds = (
        getattr(text_config, "layer_types", None) or ["sliding" if window else "full"] * text_config.num_hidden_layers
    )
    windows = {"full": None, "full_attention": None, "sliding": window, "sliding_attention": window}
    return matrices, [(width, windows[kind]) for kind in kinds if kind in windows]
