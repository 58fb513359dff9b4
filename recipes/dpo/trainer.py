"""Old import path and name (`PreferenceTrainer`) of `ObjectiveTrainer`, kept for backward compatibility."""

from __future__ import annotations

from trainer.objective_trainer import ObjectiveTrainer as PreferenceTrainer

__all__ = ["PreferenceTrainer"]
