"""Models float8 matrix products: the casts before each product, and the product itself.

Reproduces what torchao's float8 layers do, without importing torchao.  Each product casts both of its factors.  With
tensorwise scaling, the largest element of the tensor must be found first; with rowwise scaling, one kernel finds the
scales and casts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainer.plan.fusion import Operator
from trainer.plan.kernels import Work

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_MULTIPLE = 16
"""A layer is converted to float8 only if both of its dimensions are multiples of this."""


class Float8Casts:
    """Adds the float8 casts to the matrix products inside blocks; a no-op if `setting` is `none`."""

    def __init__(self, setting: str, are_fused: bool) -> None:
        self._setting, self._are_fused = setting, are_fused
        self._num_made = 0
        self._cast: dict[int, int] = {}

    def clear(self) -> None:
        """Forget which tensors have been cast; called at the start of each segment."""
        self._cast.clear()

    def around(self, func: Any, args: Sequence[Any], operator: Operator, serials: Sequence[int]) -> Iterator[Operator]:
        """Yield the operators that run in place of `operator`, a call of `func` inside a block.

        Yields `operator` unchanged if it is not a matrix product that is converted to float8.  `serials` are the serial
        numbers of the storages of the tensors in `args`, in order.
        """
        factors = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
        if self._setting == "none" or func not in _PRODUCTS or any(n % _MULTIPLE for f in factors for n in f.shape):
            yield operator
            return
        reads: dict[int, int] = {}
        for factor, serial in zip(factors, serials[-2:], strict=True):
            # Each use of a tensor scales it along another dimension if rowwise, so casts cannot be shared.
            if serial not in self._cast or self._setting == "rowwise":
                yield from self._cast_of(serial, factor.numel())
            reads[self._cast[serial]] = factor.numel()
        num_bytes = sum(reads.values()) + sum(operator.writes.values())
        yield Operator(operator.work._replace(num_bytes=num_bytes, element_size=1), reads, operator.writes, False)

    def _cast_of(self, serial: int, numel: int) -> Iterator[Operator]:
        reads, cast = {serial: 2 * numel}, self._serial()
        if self._setting == "tensorwise":
            largest, scale = self._serial(), self._serial()
            yield self._moving(reads, {largest: 4}, self._are_fused)
            yield self._moving({largest: 4}, {scale: 4}, False)
            reads = {**reads, scale: 4}
        yield self._moving(reads, {cast: numel}, self._are_fused)
        self._cast[serial] = cast

    def _moving(self, reads: dict[int, int], writes: dict[int, int], is_fused: bool) -> Operator:
        num_bytes = sum(reads.values()) + sum(writes.values())
        return Operator(Work("memory", 0, num_bytes, 1), reads, writes, is_fused)

    def _serial(self) -> int:
        """Return a serial number for a storage that exists only in this model of the kernels."""
        self._num_made += 1
        return 10**15 + self._num_made
