"""The configuration as one typed, frozen tree of sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    DpoSection,
    EvalSection,
    FsdpSection,
    LogSection,
    LoraSection,
    MeshSection,
    OptimSection,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from trainer.errors import masked, masked_command
from trainer.recipe import Recipe, TrainerType, find_recipe, resolve

OBJECTIVES = {"dpo": "trainer.recipes.dpo.trainer:PreferenceTrainer"}
"""The Trainer classes of what is trained for, where that is another than the default."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run is told.  `model` is the recipe's own dataclass, with a `name` beside its fields."""

    run: RunSection = field(default_factory=RunSection)
    model: Any = None
    mesh: MeshSection = field(default_factory=MeshSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    lora: LoraSection = field(default_factory=LoraSection)
    dpo: DpoSection = field(default_factory=DpoSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.model.name)

    def trainer_class(self, default: type[TrainerType]) -> type[TrainerType]:
        """Return the Trainer class of the objective, or of the recipe, or `default`."""
        if self.train.objective in OBJECTIVES:
            return cast("type[TrainerType]", resolve(OBJECTIVES[self.train.objective], "train.objective"))
        return self.recipe.trainer_class(default)

    @property
    def rows_per_sample(self) -> int:
        """Sequences of one sample: of a pair, two."""
        return 2 if self.train.objective == "dpo" else 1

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, over all ranks, those that are no targets included."""
        return self.train.global_batch_size * self.rows_per_sample * self.data.seq_len

    @property
    def context(self) -> int:
        """The number of ranks that hold slices of the same sequences, once it is settled."""
        return int(self.mesh.context)

    def num_groups(self, num_ranks: int) -> int:
        """Return how many groups of ranks read samples of their own: all ranks, where none shares its sequences."""
        return num_ranks // self.context

    def num_micro_batches(self, num_ranks: int) -> int:
        """Return how many micro-batches each of `num_ranks` ranks has in a step."""
        return self.train.global_batch_size // (self.num_groups(num_ranks) * int(self.train.micro_batch_size))

    @property
    def has_reference_model(self) -> bool:
        """True if a second, frozen model lies beside the one that is trained."""
        return self.train.objective == "dpo" and not self.lora.rank

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir).absolute()

    @property
    def vocab_size(self) -> int | None:
        """Size of the model's vocabulary, or None for a model whose configuration has no such field."""
        return getattr(self.model, "vocab_size", None)

    @property
    def model_path(self) -> str | None:
        """The Hugging Face folder that the model is from, or None for a model whose configuration has no such field."""
        return getattr(self.model, "path", None) or None

    def with_absolute_paths(self) -> RunConfig:
        """Return it as a run writes it down: its folders mean the same from wherever it is read."""
        kept = self.checkpoint.dir
        if kept is not None and "://" not in kept:
            kept = str(Path(kept).absolute())
        run = dataclasses.replace(self.run, dir=str(self.run_dir))
        return dataclasses.replace(self, run=run, checkpoint=dataclasses.replace(self.checkpoint, dir=kept))

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain dictionaries, lists and scalars, as a run stores it: secrets are masked.

        `run.on_end` may hold them anywhere: unless it looks harmless it is masked as a whole.
        """
        plain: dict[str, Any] = masked(plain_lists(dataclasses.asdict(self)))
        if self.run.on_end is not None:
            plain["run"]["on_end"] = masked_command(self.run.on_end)
        if self.train.epochs is not None:  # which decides about the steps
            del plain["train"]["steps"]
        return plain

    def to_yaml(self) -> str:
        """Return the tree as YAML: a valid recipe file, but for secrets, which are masked."""
        plain = self.to_dict()
        plain["model"] = {"name": self.model.name, **plain["model"]}
        return OmegaConf.to_yaml(OmegaConf.create(plain))


def plain_lists(tree: Any) -> Any:
    """Return the tree with lists for tuples: YAML has one kind of sequence."""
    if isinstance(tree, dict):
        return {key: plain_lists(value) for key, value in tree.items()}
    return [plain_lists(item) for item in tree] if isinstance(tree, (list, tuple)) else tree
