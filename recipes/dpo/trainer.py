"""Old import path of `ObjectiveTrainer`, kept for backward compatibility."""

from __future__ import annotations

from trainer.objective_trainer import ObjectiveTrainer as PreferenceTrainer

__all__ = ["PreferenceTrainer"]
