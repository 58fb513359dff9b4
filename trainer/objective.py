"""Training objectives: what one says about itself, and the registry of their names.

An objective is plain data that does not depend on the mesh, a rank or the size of a micro-batch: a frozen dataclass,
whose fields are the keys of the section `objective`.  The Trainer class named by `Objective.trainer` computes what it
needs, adds up the losses that it returns, and divides them by their number in the global batch.

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
from trainer.recipe import check_import, resolve

if TYPE_CHECKING:
    import torch

ENTRY_POINTS = "meshtrainer.objectives"
"""Entry-point group in which other distributions list modules that register objectives."""

Need = Literal["reference", "labels", "scores", "teacher"]
Direction = Literal["higher", "lower"]


def log_nothing(name: str, values: torch.Tensor, over: torch.Tensor | None = None) -> None:
    """Take the place of `Rows.log` where nothing is to be logged."""


@dataclass(frozen=True)
class Rows:
    """What an objective sees of a micro-batch of S samples, each of which is `Objective.rows` sequences: R in all.

    logps: log-probability of each sequence's targets, (R,), in float64.
    lengths: number of targets of each sequence, (R,), at least 1.
    reference: as `logps`, under the reference model; with the need "reference".
    labels: label of each sample, (S,), int64; with the need "labels".
    scores: output of the head for each sequence, (R, outputs), in float64; with the need "scores", in
        place of `logps`.
    known: mean of `Objective.statistic` over the samples of the global batch.
    log: `log(name, values, over)` adds a field to the metrics: the mean of `values` (S,) over the samples, or over
        those in the mask `over` (S,).
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: Any = None
    labels: Any = None
    scores: Any = None
    known: Any = None
    log: Callable[..., None] = log_nothing


@dataclass(frozen=True)
class Objective:
    """Base class of objectives: a frozen dataclass, whose fields are its settings (`objective.NAME`).

    rows: sequences per sample.  With two, row 2i is the first of sample i, and row 2i + 1 the second.
    needs: what `Rows` must hold besides `logps` and `lengths`.
    outputs: number of outputs of a new head, which takes the place of the output projection; 0: it stays.  May be a
        property.
    num_kinds: number of different labels that it knows, numbered from 0; 0: any, or as many as `outputs`.
    better: for the fields that it logs, which direction is better; `eval.metric` may name any of them.
    context: whether its loss is a sum over tokens, so that ranks may hold slices of sequences (`mesh.context`).
    trainer: the Trainer class that computes what the objective needs, as "package.module:class".
    """

    rows: ClassVar[int] = 1
    needs: ClassVar[tuple[Need, ...]] = ()
    outputs: ClassVar[int] = 0
    num_kinds: ClassVar[int] = 0
    better: ClassVar[Mapping[str, Direction]] = {}
    context: ClassVar[bool] = False
    trainer: ClassVar[str | None] = "trainer.objective_trainer:ObjectiveTrainer"

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return the loss of each sample, (S,)."""
        raise NotImplementedError

    def statistic(self, rows: Rows) -> torch.Tensor:
        """Return a value of each sample, (S,), whose mean over the global batch the loss needs as `rows.known`.

        An objective that overrides this costs one more forward pass, without gradients.
        """
        raise NotImplementedError

    @property
    def has_statistic(self) -> bool:
        return type(self).statistic is not Objective.statistic


@dataclass(frozen=True)
class TokenObjective(Objective):
    """Base class of objectives that compare the probabilities of each next token with a teacher's.

    The loss of a token is `hard` times the cross-entropy of its target, and 1 - `hard` times the divergence; that of a
    step is the mean over the targets of the global batch, as for `tokens`.  `teacher` is a path.
    """

    needs: ClassVar[tuple[Need, ...]] = ("teacher",)
    teacher: str | None = None
    hard: float = 0.0

    context: ClassVar[bool] = True
    trainer: ClassVar[str | None] = "trainer.distillation:DistillationTrainer"

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return how much the student differs from the teacher at each token, (n,).

        student, teacher: log-probabilities of all next tokens, (n, V), in fp32.
        """
        raise NotImplementedError


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split values of the rows of pairs, (2 S,), into those of the first and of the second of each pair, (S,) each."""
    return values[0::2], values[1::2]


def log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 / (1 + exp(-values))), accurate for values of any size."""
    from torch.nn.functional import logsigmoid  # see the module's docstring

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
    """Return the objectives by name: built-in ones, those of installed distributions, and any others registered."""
    package = importlib.import_module("trainer.objectives")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"trainer.objectives.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    return {name: _registry[name] for name in sorted(_registry)}


def find_objective(name: str, allowed_modules: Collection[str] | None = None) -> type[Objective]:
    """Return the objective that `train.objective` names: a registered one, or "package.module:class".

    allowed_modules: the modules that may be imported, as for `find_recipe`; None for any.  Raises UserError.
    """
    if ":" in name:
        if allowed_modules is not None:
            check_import("train.objective", name, allowed_modules)
        found = resolve(name, "train.objective")
        if not (isinstance(found, type) and issubclass(found, Objective)):
            rule = "must be a subclass of trainer.Objective"
            raise setting_error("train.objective", name, rule, fix="see docs/objectives.md for an example")
        return found
    if name not in _registry:
        all_objectives()
    if name not in _registry:
        raise choice_error("train.objective", name, sorted(_registry), "module:class, or one of")
    return _registry[name]
