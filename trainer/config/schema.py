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
"""The Trainer class of each `train.objective` that does not use the default one."""


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run.  `model` is the recipe's dataclass plus a `name` field."""

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
        """Return the Trainer class of the objective, else of the recipe, else `default`."""
        if self.train.objective in OBJECTIVES:
            return cast("type[TrainerType]", resolve(OBJECTIVES[self.train.objective], "train.objective"))
        return self.recipe.trainer_class(default)

    @property
    def rows_per_sample(self) -> int:
        """Sequences per sample: two for a preference pair, else one."""
        return 2 if self.train.objective == "dpo" else 1

    @property
    def step_tokens(self) -> int:
        """Tokens per step over all ranks, including those that are not targets."""
        return self.train.global_batch_size * self.rows_per_sample * self.data.seq_len

    @property
    def context(self) -> int:
        """Number of ranks that split each sequence; `mesh.context` must be resolved already."""
        return int(self.mesh.context)

    def num_groups(self, num_ranks: int) -> int:
        """Return the number of data-parallel groups; with context parallelism each consists of `context` ranks."""
        return num_ranks // self.context

    def num_micro_batches(self, num_ranks: int) -> int:
        """Return the number of micro-batches per step on each of `num_ranks` ranks."""
        return self.train.global_batch_size // (self.num_groups(num_ranks) * int(self.train.micro_batch_size))

    @property
    def has_reference_model(self) -> bool:
        """True if a second, frozen model is held in memory as the reference of DPO."""
        return self.train.objective == "dpo" and not self.lora.rank

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir).absolute()

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the model, or None if its configuration has no such field."""
        return getattr(self.model, "vocab_size", None)

    @property
    def model_path(self) -> str | None:
        """The Hugging Face folder of the model, or None if its configuration has no such field."""
        return getattr(self.model, "path", None) or None

    def with_absolute_paths(self) -> RunConfig:
        """Return the configuration with absolute folders, as a run stores it for use from any working directory."""
        folder = self.checkpoint.dir
        if folder is not None and "://" not in folder:
            folder = str(Path(folder).absolute())
        run = dataclasses.replace(self.run, dir=str(self.run_dir))
        return dataclasses.replace(self, run=run, checkpoint=dataclasses.replace(self.checkpoint, dir=folder))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain dictionaries, lists and scalars, with secrets masked.

        `run.on_end` may contain a secret anywhere, so it is masked entirely unless it looks harmless.
        """
        plain: dict[str, Any] = masked(plain_lists(dataclasses.asdict(self)))
        if self.run.on_end is not None:
            plain["run"]["on_end"] = masked_command(self.run.on_end)
        if self.train.epochs is not None:  # the number of steps follows from the epochs
            del plain["train"]["steps"]
        return plain

    def to_yaml(self) -> str:
        """Return the configuration as YAML: a valid recipe file, except that secrets are masked."""
        plain = self.to_dict()
        plain["model"] = {"name": self.model.name, **plain["model"]}
        return OmegaConf.to_yaml(OmegaConf.create(plain))


def plain_lists(tree: Any) -> Any:
    """Return the tree with tuples converted to lists, the only sequence type of YAML."""
    if isinstance(tree, dict):
        return {key: plain_lists(value) for key, value in tree.items()}
    return [plain_lists(item) for item in tree] if isinstance(tree, (list, tuple)) else tree
