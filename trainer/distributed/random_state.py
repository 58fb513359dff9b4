"""Seeds, saves and restores the random states of one rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed Python, numpy and torch with a value that differs between ranks (and so does dropout)."""
    mixed = int(np.random.SeedSequence([seed, rank, step] if step else [seed, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


class RandomState:
    """The random states of this rank as one resumable object."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def restart(self, step: int) -> None:
        """Reseed at `step`, if this rank has no stored state, so that the first steps' noise does not repeat."""
        seed_everything(self._seed, self._rank, step)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
