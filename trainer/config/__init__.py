"""The configuration: one typed, frozen tree, and the rules for its values.

Recipe files override defaults, and the command line overrides both.  This package does not import torch, so `--help`
is fast, and a mistake in a setting is reported quickly.
"""

from __future__ import annotations

from trainer.config.changes import compare_configs, compare_stored, has_changed, stored_value
from trainer.config.experts import advice_on_shards, expert_parallel_choices, resolve_expert_method
from trainer.config.keys import declared_keys
from trainer.config.load import config_from_yaml, load_config
from trainer.config.mesh import (
    MeshShape,
    Slices,
    context_choices,
    find_slices,
    resolve_context_method,
    resolve_mesh_shape,
    smallest_mesh,
)
from trainer.config.messages import type_name
from trainer.config.recipe_files import read_yaml, recipe_description, recipe_files
from trainer.config.rules import MIXTURE_BLOCK, Phase, budget_of, check_config, find_deadline, find_phases
from trainer.config.schema import (
    AUTO,
    CheckpointSection,
    DataSection,
    FsdpSection,
    LoraSection,
    MeshSection,
    OptimSection,
    RunConfig,
    ScheduleSection,
    TrainSection,
)
from trainer.config.stored import declared_model

__all__ = [
    "AUTO",
    "MIXTURE_BLOCK",
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
    "advice_on_shards",
    "budget_of",
    "check_config",
    "compare_configs",
    "compare_stored",
    "config_from_yaml",
    "context_choices",
    "declared_keys",
    "declared_model",
    "expert_parallel_choices",
    "find_deadline",
    "find_phases",
    "find_slices",
    "has_changed",
    "load_config",
    "read_yaml",
    "recipe_description",
    "recipe_files",
    "resolve_context_method",
    "resolve_expert_method",
    "resolve_mesh_shape",
    "smallest_mesh",
    "stored_value",
    "type_name",
]
