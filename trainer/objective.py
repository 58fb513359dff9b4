"""Training objectives: their base classes, inputs and registry.

An objective is a frozen dataclass whose fields are the keys of the configuration section `objective`.  It knows nothing
of the mesh, the rank or the micro-batch size.  The Trainer class named by `Objective.trainer` computes the objective's
inputs (`ObjectiveInputs`), sums the losses that the objective returns, and divides the sum by the number of samples in
the global batch.  For a `TokenObjective`, the Trainer computes the log-probabilities that `divergence` takes, and
divides by the number of targets.

Importing this module or the built-in objectives does not import torch, so that `--help` lists them quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from trainer.errors import setting_error
from trainer.registry import Registry, check_import, import_object

if TYPE_CHECKING:
    import torch

ExtraInput = Literal["reference", "labels", "scores", "teacher"]
"""An input that the Trainer computes only for objectives that need it (`Objective.needs`)."""

Direction = Literal["higher", "lower"]
"""Which values of a metric are better (`Objective.better`)."""


def log_nothing(name: str, values: torch.Tensor, over: torch.Tensor | None = None) -> None:
    """Do nothing.  This is `ObjectiveInputs.log` in forward passes whose metrics are not logged."""


@dataclass(frozen=True)
class ObjectiveInputs:
    """The inputs of an objective for one micro-batch: R sequences, which form S samples of `rows_per_sample` each.

    logps: log-probability of each sequence's targets, summed over the sequence, (R,), in float64.
    lengths: number of targets in each sequence, (R,); 1 for a sequence without targets.
    reference: like `logps`, from the reference model; only if `needs` includes "reference".
    labels: label of each sample, (S,), int64; only if `needs` includes "labels".
    scores: output of the head for each sequence, (R, outputs), in float64; only if `needs` includes "scores", in which
        case `logps` is empty.
    mean_statistic: mean of `Objective.statistic` over the samples of the global batch or, in an evaluation, over all
        held-out samples; None in calls of `statistic` itself, and if the objective has no statistic.
    log: `log(name, values, over)` adds a field to the metrics: the mean of `values` (S,) over all samples, or over
        those selected by the boolean mask `over` (S,).
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: Any = None
    labels: Any = None
    scores: Any = None
    mean_statistic: Any = None
    log: Callable[..., None] = log_nothing


@dataclass(frozen=True)
class Objective:
    """Base class of objectives: frozen dataclasses whose fields are their settings (`objective.FIELD`).

    rows_per_sample: sequences per sample.  With two, rows 2i and 2i + 1 are the two sequences of sample i.
    needs: inputs to compute besides `logps` and `lengths`: fields of `ObjectiveInputs`, or "teacher".
    outputs: number of outputs of a new head that replaces the output projection; 0 keeps the projection.  May be a
        property.
    num_classes: number of classes; labels are 0 to `num_classes` - 1.  If this is 0, `outputs` takes its place; if both
        are 0, the objective accepts any label.
    better: whether higher or lower values are better, by logged field; `eval.metric` may name any of these fields.
    sums_tokens: whether the loss is a sum over tokens, not over samples.
    trainer: the Trainer class that computes the objective's inputs, as "package.module:class"; None for next-token
        prediction (`Tokens`), which needs no such class.
    """

    rows_per_sample: ClassVar[int] = 1
    needs: ClassVar[tuple[ExtraInput, ...]] = ()
    outputs: ClassVar[int] = 0
    num_classes: ClassVar[int] = 0
    better: ClassVar[Mapping[str, Direction]] = {}
    sums_tokens: ClassVar[bool] = False
    trainer: ClassVar[str | None] = "trainer.objective_trainer:ObjectiveTrainer"

    def __call__(self, inputs: ObjectiveInputs) -> torch.Tensor:
        """Return the loss of each sample, (S,)."""
        raise NotImplementedError

    def statistic(self, inputs: ObjectiveInputs) -> torch.Tensor:
        """Return one value per sample, (S,).  The loss receives their mean over the global batch as `mean_statistic`.

        Overriding this method costs one more forward pass per micro-batch, without gradients.
        """
        raise NotImplementedError

    @property
    def has_statistic(self) -> bool:
        return type(self).statistic is not Objective.statistic


@dataclass(frozen=True)
class TokenObjective(Objective):
    """Base class of objectives that match a teacher's next-token distribution.

    The loss of a token is `hard` times its cross-entropy with the target, plus (1 - `hard`) times the divergence.  The
    loss of a step is the mean over the targets of the global batch, as for `tokens`.  `teacher`: the path of the
    teacher model.
    """

    needs: ClassVar[tuple[ExtraInput, ...]] = ("teacher",)
    teacher: str | None = None
    hard: float = 0.0

    sums_tokens: ClassVar[bool] = True
    trainer: ClassVar[str | None] = "trainer.distillation:DistillationTrainer"

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of the student from the teacher at each token, (n,).

        student, teacher: next-token log-probabilities, (n, V), in fp32.
        """
        raise NotImplementedError


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split per-row values, (2 S,), into those of the first and those of the second row of each pair, (S,) each."""
    return values[0::2], values[1::2]


def log_sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 / (1 + exp(-values))), accurate for values of any magnitude."""
    from torch.nn.functional import logsigmoid  # imported here because this module must not import torch

    return logsigmoid(values)


# ---------------------------------------------------------------------------------------------------------------
# The registry

ObjectiveType = TypeVar("ObjectiveType", bound="type[Objective]")
OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective", "train.objective", "trainer.objectives", "meshtrainer.objectives"
)


def register_objective(name: str) -> Callable[[ObjectiveType], ObjectiveType]:
    """Register the decorated objective as `train.objective=NAME`, replacing any earlier one of that name."""

    def add(objective: ObjectiveType) -> ObjectiveType:
        OBJECTIVES.add(name, objective, objective.__module__)
        return objective

    return add


def find_objective(name: str, allowed_modules: Collection[str] | None = None) -> type[Objective]:
    """Return the objective that `train.objective` names: a registered name, or "package.module:class".

    allowed_modules: the modules that may be imported, as in `Registry.find`; None for any.  Raises UserError.
    """
    if ":" not in name:
        return OBJECTIVES.find(name, allowed_modules)
    if allowed_modules is not None:
        check_import("train.objective", name, allowed_modules)
    objective = import_object(name, "train.objective")
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        rule = "must be a subclass of trainer.Objective"
        raise setting_error("train.objective", name, rule, fix="see docs/objectives.md for an example")
    return objective


def all_objectives() -> dict[str, type[Objective]]:
    """Return all objectives by name: built-in ones, those of installed distributions, and any others registered."""
    return OBJECTIVES.all()


@register_objective("tokens")
@dataclass(frozen=True)
class Tokens(Objective):
    """Predict the next token; no settings."""

    sums_tokens: ClassVar[bool] = True
    trainer: ClassVar[str | None] = None
