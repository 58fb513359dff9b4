"""Deprecated aliases that keep the old names of public attributes and methods working for one more version."""

from __future__ import annotations

import warnings
from typing import Any


class Renamed:
    """The old name of an attribute or method of a class.  Reading it emits a DeprecationWarning.

    class Loader:
        of = Renamed("from_config")  # `Loader.of` is the old name of `Loader.from_config`
    """

    def __init__(self, new_name: str) -> None:
        self._old_name, self._new_name = "", new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self._old_name = name

    def __get__(self, instance: object, owner: type) -> Any:
        message = f"{owner.__name__}.{self._old_name} is now called {self._new_name}; the old name will be removed"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(owner if instance is None else instance, self._new_name)
