"""Checks that documents which are packed into one row do not influence each other, and finds the modules that mix them.

A model may accept document ids but ignore them in one layer, without any visible effect on its loss or outputs: with
fresh weights, the state that a recurrent layer carries across a document boundary is below bfloat16's rounding error.
So comparing the model's outputs is not enough.  The check runs any model itself, in two ways:

1. *Gradients.*  The gradient of one document's loss with respect to another document's embeddings must be exactly zero.
   A token that takes no part in a computation gets exactly zero in any dtype; a token that does gets nonzero values,
   however small its contribution.  The inputs and outputs of all modules are added to the loss, so that a module is
   tested even if the next weight is zero, as in fresh adapters and some projections.
2. *Swapped documents.*  A dependence on absolute positions does not show up in these gradients.  So two rows hold the
   same two documents, of equal length, in opposite order.  For each document, every module with parameters must compute
   the same output in both rows.  After each of these modules, its outputs are copied from one row to the other, so that
   the next module gets the same input in both and rounding errors do not accumulate.

With rows of at least 320 tokens, document boundaries lie both within and between the chunks that recurrent layers
process, and documents are longer than any convolution.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.data.loader import Batch
from trainer.errors import UserError
from trainer.loss import IGNORE, find_loss
from trainer.model.gradients import evaluation_mode
from trainer.model.sample import max_seq_len
from trainer.sequence import compute_cu_seqlens, full_sequences

_LENGTHS = (70, 150, 100)
"""Lengths in tokens of the three documents in a row, scaled down in proportion if the run's rows are too short.
Recurrent layers process chunks of 64 to 256 tokens: the second document starts and ends within chunks and spans the
boundaries of chunks of 64 and 128 tokens, and the third one crosses token 256."""

_MAX_SWAPPED = 128
"""Maximum length of a swapped document, in tokens: a multiple of common chunk sizes and of kernels' block sizes."""

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Maximum RMS difference between a module's outputs in the two rows, relative to the RMS of the outputs, by dtype.
For other dtypes, `_HALF_TOLERANCE` applies."""
_HALF_TOLERANCE = 2.0**-9
"""Tolerance for bfloat16 and float16: at most half the difference that would result if every element were rounded to
bfloat16 in the opposite direction.  Most modules return identical outputs, and kernels that sum in a different order
round only a few elements differently."""


class Leak(NamedTuple):
    """Where the documents of a row influence each other: a description, and the modules' names, if they were found."""

    description: str
    modules: tuple[str, ...] = ()


class KeepsDocumentsApart(Protocol):
    """A model that can keep documents apart in modules that would mix them, such as those of a library."""

    def reset_at_documents(self, modules: Sequence[str]) -> Callable[[], None] | None:
        """Make the named modules, and all others like them, process each document apart.

        Returns a function that undoes it, or None if that is not possible.
        """
        ...


def separate_documents(model: nn.Module, vocab_size: int, seq_len: int, device: torch.device) -> str | None:
    """Make `model` keep the documents of a row apart, and return a description of what still mixes them, or None.

    The modules of a `KeepsDocumentsApart` that mix documents are found by what they do, one kind after another.  Any
    other model, or a model in which that does not help, is only checked, and left as it was.
    Collectives: those of `find_leak`, once more than there are kinds of such modules.
    """
    found, undo = find_leak(model, vocab_size, seq_len, device), list[Callable[[], None]]()
    while found is not None:
        reset = getattr(model, "reset_at_documents", None)
        undo_one = reset(found.modules) if reset is not None and found.modules else None
        if undo_one is None:
            break
        undo.append(undo_one)
        try:
            found = find_leak(model, vocab_size, seq_len, device)
        except Exception:  # the library's code cannot call such a module with documents as rows
            break
    if found is None:
        return None
    for undo_one in reversed(undo):
        undo_one()
    return found.description


def guard_documents(model: nn.Module) -> None:
    """Check at the first call with documents that `model` keeps them apart, for use outside `Trainer`.

    The call raises UserError if it does not: its results would be silently wrong.  No-op for a model that checks this
    itself (`checked_call`), or whose forward pass takes no documents.
    """
    if not hasattr(model, "reset_at_documents") and "documents" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_check_call, with_kwargs=True)


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        require_documents_apart(model, args, kwargs)


def checked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `__call__` method of a class of models, given that of its base class.

    The first call with documents makes sure that the model keeps them apart, before the hooks of the forward pass, such
    as FSDP's.  It raises UserError if the model does not.
    """

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        require_documents_apart(self, args, kwargs)
        return call(self, *args, **kwargs)

    return checked


def require_documents_apart(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Make sure that `model` keeps documents apart, if a call with these arguments is the first one with documents."""
    if getattr(model, "are_documents_apart", False):
        return
    arguments = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | dict(kwargs)
    if isinstance(arguments.get("documents"), torch.Tensor):
        _separate_or_raise(model, arguments["tokens"])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _separate_or_raise(model: Any, tokens_BT: torch.Tensor) -> None:
    model.are_documents_apart = True  # for the calls below
    leak: str | None = "the check has failed"
    try:
        with torch.inference_mode(False):
            seq_len = max_seq_len(model) or sum(_LENGTHS)
            leak = separate_documents(model, int(tokens_BT.max()) + 1, seq_len, tokens_BT.device)
        is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
        if leak is None and is_compiled and getattr(model, "has_recurrent_layers", False):
            leak = "its blocks are compiled, and transformers' recurrent layers cannot be compiled with documents"
    finally:
        model.are_documents_apart = leak is None
    if leak is not None:
        rule = f"{type(model).__name__.removeprefix('FSDP')} lets documents in one row influence each other: {leak}"
        raise UserError(f"{rule}\n  to fix: call it with one document in each row, without `documents`")


def find_leak(model: nn.Module, vocab_size: int, seq_len: int, device: torch.device) -> Leak | None:
    """Return the modules that let documents in a row of up to `seq_len` tokens affect each other, or None.

    Parameter gradients are neither computed nor changed.
    Collectives: a forward and backward pass over two rows of at most 320 tokens, then, unless that finds something, a
    forward pass over two rows of at most 256 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"), full_sequences():
        num_tokens = _num_tokens(model, min(sum(_LENGTHS), seq_len))
        if num_tokens >= len(_LENGTHS):
            first, second = (max(1, length * num_tokens // sum(_LENGTHS)) for length in _LENGTHS[:2])
            lengths = (first, second, num_tokens - first - second)
            batch = _make_batch(lengths, vocab_size, generator, device)
            if (leak := _find_crossing_gradients(model, batch)) is not None:
                return leak
        length = min(_MAX_SWAPPED, seq_len // 2)
        return _compare_swapped(model, _make_batch((length, length), vocab_size, generator, device)) if length else None


def _num_tokens(model: nn.Module, maximum: int) -> int:
    """Return the largest number of tokens up to `maximum` that is not also a size of a tensor of the model.

    Hidden states are recognized by their shape (B, T, ...), and a convolution has inputs of shape (B, D, T).
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    return next((number for number in range(maximum, len(_LENGTHS) - 1, -1) if number not in sizes), maximum)


def _make_batch(
    lengths: Sequence[int], vocab_size: int, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return two rows of random tokens in documents of these lengths, as a batch with all entries that a loader adds.

    Only two documents have targets: the second to last of the first row, and the last of the second row.  Targets are
    random: gradients would vanish if the model predicted them with certainty.
    """
    shape, numbers_D = (2, sum(lengths)), torch.arange(len(lengths))
    documents = numbers_D.repeat_interleave(torch.tensor(lengths)).expand(shape).contiguous()
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(shape).contiguous()
    tokens, targets = (torch.randint(vocab_size, shape, generator=generator) for _ in range(2))
    targets[documents != numbers_D[-2:, None]] = IGNORE
    batch = {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}
    batch["cu_seqlens"] = compute_cu_seqlens(documents)
    return {name: entry.to(device) for name, entry in batch.items()}


# ---------------------------------------------------------------------------------------------------------------
# Gradients


def _find_crossing_gradients(model: nn.Module, batch: Batch) -> Leak | None:
    """Return a leak if the documents with targets depend on the embeddings of other documents in any module.

    Its modules are those in which gradients cross to other documents: nonzero at their input, zero at their output.  If
    several layers leak, these are the modules of the last one: the gradients that it passes on hide the others.
    """
    embeddings, watch = _SeparatedEmbeddings(batch["tokens"]), _HiddenStates(batch["targets"] != IGNORE)
    with torch.enable_grad(), _hooks(model, watch.inputs, watch.outputs):
        with embeddings:
            loss = find_loss(model)(batch)
        if not embeddings.leaves:
            return None
        gradients = torch.autograd.grad(sum(watch.close(), loss.float()), embeddings.leaves, allow_unused=True)
    if not any(watch.reaches_others(gradient) for gradient in gradients if gradient is not None):
        return None
    outputs = watch.reached_outputs
    names = [name for name, is_reached in watch.reached_inputs.items() if is_reached and not outputs.get(name, False)]
    # Modules without outputs of this shape, such as routers, are named only if there are no others.
    names = [name for name in names if name in outputs] or names
    innermost = [
        name
        for name in names
        if not any(other.startswith(f"{name}." if name else "") for other in names if other != name)
    ]
    return _describe(model, innermost)


class _SeparatedEmbeddings(TorchFunctionMode):
    """Collects the embeddings that torch looks up for the tokens, and makes them leaves, so that they get gradients.

    This works for an embedding table in any form: a module, a function, or an indexed parameter.
    """

    def __init__(self, tokens_BT: torch.Tensor) -> None:
        super().__init__()
        self._tokens_BT = tokens_BT
        self.leaves: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        shape = self._tokens_BT.shape
        if result.shape[:2] != shape or not any(map(self._is_tokens, tree_leaves((args, kwargs)))):
            return result
        leaf = result.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def _is_tokens(self, argument: Any) -> bool:
        if not isinstance(argument, torch.Tensor) or argument.is_floating_point():
            return False
        return argument is self._tokens_BT or (
            argument.shape == self._tokens_BT.shape
            and argument.dtype == self._tokens_BT.dtype
            and torch.equal(argument, self._tokens_BT)
        )


class _HiddenStates:
    """Sums the hidden states of all modules at the tokens with targets, and records where gradients reach other tokens.

    `inputs` and `outputs` are hooks for `_hooks`.
    """

    def __init__(self, counted_BT: torch.Tensor) -> None:
        self.reached_inputs: dict[str, bool | torch.Tensor] = {}
        """Whether the gradients of a module's inputs, as far as they come from this module, reach other tokens."""
        self.reached_outputs: dict[str, bool | torch.Tensor] = {}
        self._counted_BT = counted_BT
        self._sums: list[torch.Tensor] | None = []

    def inputs(self, name: str, inputs: Any) -> Any:
        def alias(leaf: torch.Tensor) -> torch.Tensor:
            """Return an alias of a hidden state that receives its gradient from this module alone."""
            if not _is_hidden(leaf, self._counted_BT) or not leaf.requires_grad:
                return leaf
            leaf_alias = leaf.view_as(leaf)
            self._watch(self.reached_inputs, name, leaf_alias)
            return leaf_alias

        return tree_map_only(torch.Tensor, alias, inputs)

    def outputs(self, name: str, outputs: Any) -> None:
        for leaf in tree_leaves(outputs):
            if _is_hidden(leaf, self._counted_BT) and leaf.requires_grad:
                self._watch(self.reached_outputs, name, leaf)

    def _watch(self, reached: dict[str, bool | torch.Tensor], name: str, hidden: torch.Tensor) -> None:
        # Also computed in a recomputed forward pass, so that both passes save the same tensors.
        total = torch.where(self._counted(hidden), hidden, 0).sum(dtype=torch.float32)
        if self._sums is not None:
            self._sums.append(total)
        reached.setdefault(name, False)

        def record(gradient: torch.Tensor) -> None:
            reached[name] = reached[name] | self.reaches_others(gradient)

        hidden.register_hook(record)

    def close(self) -> list[torch.Tensor]:
        """Return the sums.  From now on, recomputed forward passes add nothing."""
        sums, self._sums = self._sums or [], None
        return sums

    def reaches_others(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return whether a gradient is not zero at tokens without targets, a scalar; true for NaN."""
        return gradient.masked_fill(self._counted(gradient), 0).any()

    def _counted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the mask of the tokens with targets, to be broadcast to hidden states: (B, T, 1, ...)."""
        return self._counted_BT.view(*self._counted_BT.shape, *[1] * (hidden.ndim - 2))


def _describe(model: nn.Module, names: Sequence[str]) -> Leak:
    if not names:
        return Leak("through a module whose inputs or outputs are not (B, T, ...)")
    modules = dict(model.named_modules())
    parts = [
        f"{name or 'the model itself'} ({type(modules[name]).__name__.removeprefix('FSDP')})" for name in names[:3]
    ]
    description = f"through {', '.join(parts)}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    return Leak(description, tuple(names))


# ---------------------------------------------------------------------------------------------------------------
# Swapped documents


def _compare_swapped(model: nn.Module, batch: Batch) -> Leak | None:
    """Return a description of the first module whose output depends on a document's place in the row, or None."""
    length = batch["tokens"].shape[1] // 2
    tokens_BT = torch.stack((batch["tokens"][0], batch["tokens"][0].roll(length)))
    parameters_of = {name: any(True for _ in module.parameters()) for name, module in model.named_modules()}
    differing: list[str] = []

    def differ(values: Any) -> bool:
        for hidden in tree_leaves(values):
            if _is_hidden(hidden, tokens_BT):
                expected, actual = hidden[0].roll(length, 0).float(), hidden[1].float()
                tolerance = _TOLERANCE.get(hidden.dtype, _HALF_TOLERANCE)
                if not (actual - expected).norm() <= tolerance * expected.norm():
                    return True
        return False

    def compare_inputs(name: str, inputs: Any) -> None:
        if not differing and differ(inputs):
            differing.append(name.rpartition(".")[0])  # the fault lies in the enclosing module's own code

    def compare_outputs(name: str, outputs: Any) -> Any:
        if not parameters_of[name]:
            return None  # a function of positions alone, such as rotary angles, may differ
        if not differing and differ(outputs):
            differing.append(name)

        def exchange(leaf: torch.Tensor) -> torch.Tensor:
            return torch.stack((leaf[0], leaf[0].roll(length, 0))) if _is_hidden(leaf, tokens_BT) else leaf

        return tree_map_only(torch.Tensor, exchange, outputs)

    named = inspect.signature(model.forward).parameters
    entries = {name: batch[name] for name in ("documents", "positions", "cu_seqlens") if name in named}
    with _hooks(model, compare_inputs, compare_outputs):
        logits = model(tokens_BT, **entries)
    if not differing and differ(logits):
        differing.append("")
    return _describe(model, differing) if differing else None


# ---------------------------------------------------------------------------------------------------------------
# Hooks


def _is_hidden(leaf: Any, like_BT: torch.Tensor) -> bool:
    """Return whether a leaf of nested values is a floating-point tensor of shape (B, T, ...).  like_BT: (B, T)."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[:2] == like_BT.shape


@contextlib.contextmanager
def _hooks(model: nn.Module, before: Callable[[str, Any], Any], after: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside the block, call `before` and `after` around the forward pass of every module, with the module's name.

    before: also receives the positional and keyword arguments; returns replacements for them or None.
    after: also receives the outputs; returns replacements for them or None.

    Both are also called in recomputed forward passes.
    """
    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, (args, kwargs)), with_kwargs=True
            ),
            module.register_forward_hook(lambda _, args, outputs, name=name: after(name, outputs)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
