"""Products in float8: what a layer casts before each, and what it multiplies then.

Knows how torchao's layers work, without torchao: each product casts its two factors, scaled by the tensor, whose
largest element must be known first, or by the row, where one kernel does both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainer.plan.fusion import Operator
from trainer.plan.kernels import Work

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_MULTIPLE = 16
"""Both sizes of a layer that is replaced are multiples of it."""


class Casts:
    """Casts around the products of blocks; with `setting` none there are none."""

    def __init__(self, setting: str, are_fused: bool) -> None:
        self._setting, self._are_fused = setting, are_fused
        self._num_made = 0
        self._cast: dict[int, int] = {}

    def clear(self) -> None:
        """Forget what has been cast already: another pass begins."""
        self._cast.clear()

    def around(self, func: Any, args: Sequence[Any], operator: Operator, serials: Sequence[int]) -> Iterator[Operator]:
        """Yield the operators that run for `operator`, a call of `func` inside a block: itself, if it is no product.

        serials: those of the storages of the tensors in `args`, in order.
        """
        factors = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
        if self._setting == "none" or func not in _PRODUCTS or any(n % _MULTIPLE for f in factors for n in f.shape):
            yield operator
            return
        reads: dict[int, int] = {}
        for factor, serial in zip(factors, serials[-2:], strict=True):
            if serial not in self._cast or self._setting == "rowwise":  # by row: another direction each time
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
        """Return a serial number for a storage that only a kernel knows."""
        self._num_made += 1
        return 10**15 + self._num_made
