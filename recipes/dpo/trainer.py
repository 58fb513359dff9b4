"""The old name of the Trainer for direct preference optimization."""

from __future__ import annotations

from trainer.objective_trainer import ObjectiveTrainer as PreferenceTrainer

__all__ = ["PreferenceTrainer"]
