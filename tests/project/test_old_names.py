"""Public names of the previous version can still be used."""

from __future__ import annotations

import importlib
import warnings

import pytest

import trainer
import trainer.experts
import trainer.objective
from trainer import RunConfig, Source, TrainLoader, load_config
from trainer.checkpoint.saver import Saver
from trainer.config.schema import EvalSection, LogSection

_PACKAGE = """HuggingFace Recipe RunConfig Source Stacked TrainLoader Trainer Transposed UserError WeightSource fill
linear_cross_entropy load_config load_weights main register"""
_MODULES = {
    "trainer.sequence": """Cache Documents attend current_slices find_borders forget_slices positions slice_sequences
        sliced whole""",
    "trainer.experts": "mix load_of products",
    "trainer.loss": "IGNORE by_row count_targets cross_entropy find_loss linear_cross_entropy row_losses",
    "trainer.recipe": "HuggingFace Recipe Stacked Transposed WeightSource declare register",
    "trainer.errors": "UserError setting_error",
    "trainer.recipes.dpo.trainer": "PreferenceTrainer",
}
_TRAINER = """build_eval_loader build_loader build_mesh build_model build_optimizer close count evaluate
exempt_from_selfcheck finish fit flops_per_token load_checkpoint load_weights log loss num_micro_batches on_step
save_checkpoint start steps stopping train_step"""
_RENAMED: dict[type, dict[str, str]] = {
    RunConfig: {"holds_reference": "has_reference_model", "on_record": "with_absolute_paths"},
    Source: {"stretch": "read_tokens", "is_here": "is_local", "sentence": "summary"},
    TrainLoader: {
        "of": "from_config",
        "beginning": "first_tokens",
        "take_back": "rewind_step",
        "micro_batches_per_update": "micro_batches_per_step",
        "portions": "usage_by_phase",
    },
    Saver: {"due": "is_due", "collect": "take_finished_save"},
    EvalSection: {"due": "is_due"},
    LogSection: {"due": "is_due"},
}


def test_old_names_can_be_imported() -> None:
    assert set(_PACKAGE.split()) <= set(trainer.__all__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in _PACKAGE.split():
            assert getattr(trainer, name) is not None
    for module, names in _MODULES.items():
        for name in names.split():
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for name in _TRAINER.split():
        assert hasattr(trainer.Trainer, name), name


def test_old_class_names_are_the_same_classes() -> None:
    assert trainer.objective.Rows is trainer.objective.ObjectiveInputs
    assert trainer.experts.Choice is trainer.experts.TopKExperts


def test_old_function_names_are_the_same_functions() -> None:
    assert trainer.experts.mix is trainer.experts.apply_experts
    assert trainer.experts.products is trainer.experts.expert_matmuls


def test_old_attribute_names_work_with_a_warning() -> None:
    for owner, names in _RENAMED.items():
        for old, new in names.items():
            with pytest.warns(DeprecationWarning, match=f"{old} is now called {new};"):
                assert getattr(owner, old) == getattr(owner, new)
    config = load_config("llama_small")
    with pytest.warns(DeprecationWarning, match="RunConfig.holds_reference is now called has_reference_model"):
        assert config.holds_reference is False
    with pytest.warns(DeprecationWarning, match="on_record"):
        assert config.on_record() == config.with_absolute_paths()


def test_old_attributes_of_a_trainer_work_with_a_warning() -> None:
    built = object.__new__(trainer.Trainer)
    built.step_metrics, built.stop_criterion = object(), object()  # type: ignore[assignment]
    with pytest.warns(DeprecationWarning, match=r"Trainer\.accounts is now called step_metrics"):
        assert built.accounts is built.step_metrics
    with pytest.warns(DeprecationWarning, match=r"Trainer\.horizon is now called stop_criterion"):
        assert built.horizon is built.stop_criterion
