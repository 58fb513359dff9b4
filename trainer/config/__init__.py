"""The configuration: one typed, frozen tree, and the rules for its values.

Defaults < recipe YAML < command line.  Imports no torch, so that `--help` is quick and a mistake is reported before
anything is spawned.
"""

from __future__ import annotations

from trainer.config.advice import type_name
from trainer.config.changes import compare_configs, compare_stored, stored_value
from trainer.config.context import Slices, context_choices, find_slices, with_method
from trainer.config.load import (
    config_from_yaml,
    declared_keys,
    description,
    load_config,
    read_yaml,
    recipe_files,
    told_by_yaml,
)
from trainer.config.mesh import MeshShape, find_mesh_shape, least_mesh
from trainer.config.mixture import BLOCK, Phase, find_phases, source_names
from trainer.config.rules import budget_of, check_config, find_deadline
from trainer.config.schema import RunConfig
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    FsdpSection,
    LoraSection,
    MeshSection,
    OptimSection,
    ScheduleSection,
    TrainSection,
)
from trainer.config.sections.limits import AUTO

__all__ = [
    "AUTO",
    "BLOCK",
    "CheckpointSection",
    "DataSection",
    "FsdpSection",
    "LoraSection",
    "MeshSection",
    "MeshShape",
    "OptimSection",
    "Phase",
    "RunConfig",
    "ScheduleSection",
    "Slices",
    "TrainSection",
    "budget_of",
    "check_config",
    "compare_configs",
    "compare_stored",
    "config_from_yaml",
    "context_choices",
    "declared_keys",
    "description",
    "find_deadline",
    "find_mesh_shape",
    "find_phases",
    "find_slices",
    "least_mesh",
    "load_config",
    "read_yaml",
    "recipe_files",
    "source_names",
    "stored_value",
    "told_by_yaml",
    "type_name",
    "with_method",
]
