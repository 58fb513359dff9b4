"""Hugging Face's names of a model's parameters, from its recipe (`Recipe.hf`)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from trainer.config.pretrained import find_huggingface
from trainer.errors import UserError
from trainer.recipe import Recipe, Stacked, Transposed


class Place(NamedTuple):
    """The place of one of their tensors here: the tensor that it is or is a row of, and whether it is transposed."""

    name: str
    is_transposed: bool = False
    row: str | None = None


class Names:
    """The names of one model's tensors, from ours to theirs and back."""

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
        """Return their name of our tensor `name`, `Transposed` or `Stacked` if it is one; None if there is none.

        In a stacked one the number of the row is still `*`.
        """
        for ours, theirs in self._pairs:
            found = _translate(name, ours, theirs)
            if found is not None:
                return type(theirs)(found[0])
        return None

    def ours(self, name: str) -> Place | None:
        """Return where their tensor `name`, with or without the prefix, is here; None if it is nowhere."""
        for full_name in (name, self._hf.prefix + name):
            for ours, theirs in self._pairs:
                found = _translate(full_name, theirs, ours)
                if found is not None:
                    row = found[1] if isinstance(theirs, Stacked) else None
                    return Place(found[0], isinstance(theirs, Transposed), row)
        return None

    def is_ignored(self, name: str) -> bool:
        """Return whether their tensor `name` is one that no model needs."""
        full_names = (name, self._hf.prefix + name)
        return any(_translate(n, ignored, ignored) for n in full_names for ignored in self._hf.ignored)


def _translate(name: str, pattern: str, other: str) -> tuple[str, str | None] | None:
    """Return `name` in the form of `other` if it has that of `pattern`, and what is left over.

    What each * stands for is carried over; a * of `other` that nothing is left for stays.
    """
    match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    if match is None:
        return None
    parts = iter(match.groups())
    return re.sub(r"\*", lambda _: next(parts, "*"), other), next(parts, None)
