"""Runs models on fake tensors, which have only shapes and dtypes: in milliseconds, without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""Torch's grouped matrix product, used by mixture-of-experts models."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor created inside the block a fake tensor."""
    with _FakeTensors():
        yield


class _FakeTensors(FakeTensorMode):
    """Supports grouped products in any dtype; torch's own fake kernel is for GPUs and only supports bfloat16."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not GROUPED_PRODUCT:
            return super().dispatch(func, types, args, kwargs)
        first, second, *rest = args
        ends = rest[0] if rest else kwargs["offs"]
        sizes = first.shape[-2], second.shape[-1]
        if first.ndim == second.ndim:  # 2D: groups along the shared dimension; 3D: one product per matrix
            return first.new_empty(first.shape[0] if first.ndim == 3 else ends.shape[0], *sizes)
        return first.new_empty(sizes)
