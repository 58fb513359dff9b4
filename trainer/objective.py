"""The base class of training objectives, and their registry.

An objective is plain data that does not depend on the mesh, a rank or the size of a micro-batch: a frozen dataclass,
whose fields are the keys of the section `objective`.  The Trainer class named by `Objective.trainer` computes its
inputs (`ObjectiveInputs`), and divides the sum of the losses it returns by the number of samples in the global batch.

This module does not import torch, and neither do the built-in objectives, so that `--help` lists them quickly.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from trainer.errors import choice_error, setting_error
from trainer.recipe import check_import, import_object

if TYPE_CHECKING:
    import torch

ENTRY_POINTS = "meshtrainer.objectives"
"""Entry-point group in which other distributions list modules that register objectives."""

ExtraInput = Literal["reference", "labels", "scores", "teacher"]
Direction = Literal["higher", "lower"]


def log_nothing(name: str, values: torch.Tensor, over: torch.Tensor | None = None) -> None:
    """Do nothing: the `ObjectiveInputs.log` of passes that log no metrics."""


@dataclass(frozen=True)
class ObjectiveInputs:
    """The inputs of an objective: a micro-batch of S samples with `Objective.rows_per_sample` sequences each, R in
    total.

    logps: log-probability of each sequence's targets, (R,), in float64.
    lengths: number of targets in each sequence, (R,), at least 1.
    reference: like `logps`, from the reference model; only if `needs` includes "reference".
    labels: label of each sample, (S,), int64; only if `needs` includes "labels".
    scores: output of the head for each sequence, (R, outputs), in float64; only if `needs` includes "scores", and then
        `logps` is empty.
    mean_statistic: mean of `Objective.statistic` over the samples of the global batch.
    log: `log(name, values, over)` adds a field to the metrics: the mean of `values` (S,) over all samples, or over
        those selected by the mask `over` (S,).
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: Any = None
    labels: Any = None
    scores: Any = None
    mean_statistic: Any = None
    log: Callable[..., None] = log_nothing


Rows = ObjectiveInputs
"""The old name, which keeps working for one version."""


@dataclass(frozen=True)
class Objective:
    """Base class of objectives: a frozen dataclass, whose fields are its settings (`objective.NAME`).

    rows_per_sample: sequences per sample.  With two, rows 2i and 2i + 1 are the two sequences of sample i.
    needs: the fields of `ObjectiveInputs` to compute, apart from `logps` and `lengths`.
    outputs: number of outputs of a new head that replaces the output projection; 0 keeps the projection.  May be a
        property.
    num_classes: number of different labels, numbered from 0; 0: any number, or `outputs` if that is set.
    better: whether higher or lower values are better, for each logged field; `eval.metric` may name any of them.
    context: whether the loss is a sum over tokens, so that ranks may hold slices of sequences (`mesh.context`).
    trainer: the Trainer class that computes the `ObjectiveInputs`, as "package.module:class".
    """

    rows_per_sample: ClassVar[int] = 1
    needs: ClassVar[tuple[ExtraInput, ...]] = ()
    outputs: ClassVar[int] = 0
    num_classes: ClassVar[int] = 0
    better: ClassVar[Mapping[str, Direction]] = {}
    context: ClassVar[bool] = False
    trainer: ClassVar[str | None] = "trainer.objective_trainer:ObjectiveTrainer"

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        """Return the loss of each sample, (S,)."""
        raise NotImplementedError

    def statistic(self, inputs: ObjectiveInputs) -> torch.Tensor:
        """Return a value for each sample, (S,).

        The loss gets its mean over the global batch as `inputs.mean_statistic`.

        Overriding this costs one more forward pass, without gradients.
        """
        raise NotImplementedError

    @property
    def has_statistic(self) -> bool:
        return type(self).statistic is not Objective.statistic


@dataclass(frozen=True)
class TokenObjective(Objective):
    """Base class of objectives that compare next-token probabilities with those of a teacher.

    The loss of a token is `hard` times its cross-entropy, plus 1 - `hard` times the divergence.  The loss of a step is
    the mean over the targets of the global batch, as for `tokens`.  `teacher` is a path.
    """

    needs: ClassVar[tuple[ExtraInput, ...]] = ("teacher",)
    teacher: str | None = None
    hard: float = 0.0

    context: ClassVar[bool] = True
    trainer: ClassVar[str | None] = "trainer.distillation:DistillationTrainer"

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of the student from the teacher at each token, (n,).

        student, teacher: next-token log-probabilities, (n, V), in fp32.
        """
        raise NotImplementedError


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split one value per row, (2 S,), into those of the first and the second row of each pair, (S,) each."""
    return values[0::2], values[1::2]


def log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 / (1 + exp(-values))), accurate for values of any size."""
    from torch.nn.functional import logsigmoid  # imported here because this module must not import torch

    return logsigmoid(values)


# ---------------------------------------------------------------------------------------------------------------
# The registry

ObjectiveType = TypeVar("ObjectiveType", bound="type[Objective]")
_registry: dict[str, type[Objective]] = {}


def register_objective(name: str) -> Callable[[ObjectiveType], ObjectiveType]:
    """Register the decorated objective as `train.objective=NAME`, replacing any earlier one of that name."""

    def add(objective: ObjectiveType) -> ObjectiveType:
        _registry[name] = objective
        return objective

    return add


@register_objective("tokens")
@dataclass(frozen=True)
class Tokens(Objective):
    """Predict the next token; no settings."""

    context, trainer = True, None


def all_objectives() -> dict[str, type[Objective]]:
    """Return all objectives by name: built-in ones, those of installed distributions, and any others registered."""
    package = importlib.import_module("trainer.objectives")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"trainer.objectives.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    return {name: _registry[name] for name in sorted(_registry)}


def find_objective(name: str, allowed_modules: Collection[str] | None = None) -> type[Objective]:
    """Return the objective named by `train.objective`: a registered name, or "package.module:class".

    allowed_modules: the modules that may be imported, as in `find_recipe`; None for any.  Raises UserError.
    """
    if ":" in name:
        if allowed_modules is not None:
            check_import("train.objective", name, allowed_modules)
        objective = import_object(name, "train.objective")
        if not (isinstance(objective, type) and issubclass(objective, Objective)):
            rule = "must be a subclass of trainer.Objective"
            raise setting_error("train.objective", name, rule, fix="see docs/objectives.md for an example")
        return objective
    if name not in _registry:
        all_objectives()
    if name not in _registry:
        raise choice_error("train.objective", name, sorted(_registry), "module:class, or one of")
    return _registry[name]
