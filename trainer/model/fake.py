"""Fake tensors: only shapes and dtypes, on which a model runs in milliseconds without memory.

Source: FakeTensorMode, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""One product for each group of rows, as a mixture of experts has it."""


@contextmanager
def without_values() -> Iterator[None]:
    """Make every tensor inside the block one without values."""
    with _WithoutValues():
        yield


class _WithoutValues(FakeTensorMode):
    """Answers for grouped products in any dtype: torch's own answer is a GPU kernel's, which has bfloat16 alone."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not GROUPED_PRODUCT:
            return super().dispatch(func, types, args, kwargs)
        first, second, *rest = args
        ends = rest[0] if rest else kwargs["offs"]
        sizes = first.shape[-2], second.shape[-1]
        if first.ndim == second.ndim:  # groups of columns of one and rows of the other; or one product for each matrix
            return first.new_empty(first.shape[0] if first.ndim == 3 else ends.shape[0], *sizes)
        return first.new_empty(sizes)
