"""Runs Python's garbage collector at the same steps on all ranks."""

from __future__ import annotations

import gc


class GarbageCollection:
    """Collects at the same steps on all ranks, since a collection at a random moment on one rank delays all others."""

    def __init__(self, every: int = 100, full_every: int = 1000) -> None:
        self.every, self.full_every = every, full_every

    def __enter__(self) -> GarbageCollection:
        gc.collect()
        gc.disable()
        return self

    def after(self, step: int) -> None:
        if step % self.full_every == 0:
            gc.collect()
        elif step % self.every == 0:
            gc.collect(1)

    def __exit__(self, *exception: object) -> None:
        gc.enable()
