"""Translates parameter names between ours and Hugging Face's, as defined in `Recipe.hf`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from trainer.config.pretrained import find_huggingface
from trainer.errors import UserError
from trainer.recipe import Recipe, Stacked, Transposed


class MappedTensor(NamedTuple):
    """Our counterpart of one of their tensors: our tensor's name, whether theirs is transposed, and which row it is, if
    any.
    """

    name: str
    is_transposed: bool = False
    row: str | None = None


class HuggingFaceNames:
    """Translates the tensor names of one model, in both directions."""

    def __init__(self, recipe: Recipe, model_config: Any) -> None:
        self._hf = find_huggingface(recipe)
        names = self._hf.names(model_config) if callable(self._hf.names) else self._hf.names
        self._pairs = list(names.items())
        for ours, theirs in self._pairs:
            if ours.count("*") + isinstance(theirs, Stacked) != theirs.count("*"):
                raise UserError(
                    f"recipe {recipe.name!r}: hf.names: {ours!r} and {theirs!r} have a different number of *"
                )

    def theirs(self, name: str) -> str | None:
        """Return their name for our tensor `name` (`Transposed` or `Stacked` if applicable), or None.

        The name of a stacked tensor still has `*` as the row number.
        """
        for ours, theirs in self._pairs:
            found = _translate(name, ours, theirs)
            if found is not None:
                return type(theirs)(found[0])
        return None

    def ours(self, name: str) -> MappedTensor | None:
        """Return our counterpart of their tensor `name`, with or without the prefix; None if there is none."""
        for full_name in (name, self._hf.prefix + name):
            for ours, theirs in self._pairs:
                found = _translate(full_name, theirs, ours)
                if found is not None:
                    row = found[1] if isinstance(theirs, Stacked) else None
                    return MappedTensor(found[0], isinstance(theirs, Transposed), row)
        return None

    def is_ignored(self, name: str) -> bool:
        """Return whether their tensor `name` can be ignored."""
        full_names = (name, self._hf.prefix + name)
        return any(_translate(n, ignored, ignored) for n in full_names for ignored in self._hf.ignored)


def _translate(name: str, pattern: str, other: str) -> tuple[str, str | None] | None:
    """Match `name` against `pattern` and return it in the form of `other`, plus any unused match; None without a match.

    The text matched by each * is carried over; a * of `other` without a counterpart stays.
    """
    match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    if match is None:
        return None
    parts = iter(match.groups())
    return re.sub(r"\*", lambda _: next(parts, "*"), other), next(parts, None)
