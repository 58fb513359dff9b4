"""The sections of the configuration: every key with its type, default, limits and meaning."""

from trainer.config.sections.data import DataSection
from trainer.config.sections.running import CheckpointSection, LogSection, RunSection
from trainer.config.sections.sharding import FsdpSection, MeshSection
from trainer.config.sections.training import (
    DpoSection,
    EvalSection,
    LoraSection,
    OptimSection,
    ScheduleSection,
    TrainSection,
)

__all__ = [
    "CheckpointSection",
    "DataSection",
    "DpoSection",
    "EvalSection",
    "FsdpSection",
    "LogSection",
    "LoraSection",
    "MeshSection",
    "OptimSection",
    "RunSection",
    "ScheduleSection",
    "TrainSection",
]
