"""Assembles a run: creates all parts of a Trainer except its model, optimizer and data, in dependency order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.checkpoint.manifest import RunInfo
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.saves import Checkpoints
from trainer.checkpoint.storage import open_storage
from trainer.config import RunConfig
from trainer.config.rules import compiles_blocks
from trainer.distributed.channel import StepSync
from trainer.distributed.world import World
from trainer.experts import BALANCE, ExpertBalance, find_balance
from trainer.lifecycle.folder import RunFolder
from trainer.lifecycle.lifecycle import Lifecycle
from trainer.lifecycle.resume import Resume
from trainer.lifecycle.state import EMA, AverageState, RandomState, TrainState
from trainer.lifecycle.summary import mesh_sizes
from trainer.lifecycle.watchdog import Watchdog, watch_phases
from trainer.metrics.callbacks import Callback, GarbageCollection, Samples, UnitNorms
from trainer.metrics.profile import Profile
from trainer.metrics.step_metrics import SkipCounter, StepMetrics
from trainer.metrics.stop_criterion import RangeTest, StopCriterion
from trainer.metrics.writers import Metrics
from trainer.optim.ema import WeightAverage
from trainer.optim.optimizer import training_bytes
from trainer.plan.forecast import Forecast, describe_choice
from trainer.weights.exporting import ModelFiles
from trainer.weights.loading import MODEL_FILES, load_base

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@dataclass
class TrainingRun:
    """All parts of a Trainer except its model, optimizer and data.

    `assemble_run` sets the `init=False` fields last, in the order below: each of these parts may use the previous ones.
    """

    config: RunConfig
    world: World
    forecast: Forecast
    metrics: Metrics
    stop_criterion: StopCriterion
    """Decides when the run ends."""
    state: TrainState
    """The state that a resume restores."""
    average: WeightAverage
    model_files: ModelFiles
    """The files that came with the initial weights, including those of the tokenizer."""
    folder: RunFolder
    watchdog: Watchdog
    checkpoints: Checkpoints
    step_sync: StepSync
    callbacks: list[Callback]
    """The watchdog and optional features.  `begin_` hooks are called in list order, `end_` hooks in reverse."""
    step_metrics: StepMetrics = field(init=False)
    resume: Resume = field(init=False)
    saver: Saver = field(init=False)
    lifecycle: Lifecycle = field(init=False)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Call every callback's `begin_fit` before the block (the body of `Trainer.fit`) and its `end_fit` after it."""
        for callback in self.callbacks:
            callback.begin_fit()
        try:
            yield
        finally:
            for callback in reversed(self.callbacks):
                callback.end_fit()

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Call every callback's `end_loop` after the block (the loop of `Trainer.steps`)."""
        has_failed = True
        try:
            yield
            has_failed = False
        except GeneratorExit:  # the caller has left the loop
            has_failed = False
            raise
        finally:
            for callback in reversed(self.callbacks):
                callback.end_loop(has_failed)


def assemble_run(trainer: Trainer, start_time: float) -> TrainingRun:
    """Create the parts that `trainer` does not have yet, and return all of them.  Collective.

    The order of registration matters: it is the order of the state's parts in checkpoints, and of the votes in each
    step's all-reduce.  start_time: when the Trainer was created, by `time.monotonic`.
    """
    config, world, model, optimizer = trainer.config, trainer.world, trainer.model, trainer.optimizer
    is_range_test = config.schedule.name == "range"
    skips = SkipCounter(config.train.max_skipped_updates, is_range_test)
    metrics = Metrics(config, world.is_main)
    stop_criterion = RangeTest(config) if is_range_test else StopCriterion(config)
    random_state = RandomState(config.run.seed, world.rank)
    base = load_base(model, config, world) if config.lora.rank else None
    state = TrainState(trainer, model, optimizer, skips, random_state, base)
    state.add_loaders(trainer.loader, trainer.eval_loader, world)
    state.add("metrics", metrics)
    state.add("stop_criterion", stop_criterion)
    average = WeightAverage(state.trained, config.train.ema, config.eval.ema)
    optimizer.step_listeners.append(average.after_step)
    state.add(EMA, AverageState(average))
    if find_balance(model) is not None:
        expert_balance = ExpertBalance(model, world, trainer.log)
        optimizer.step_listeners.append(expert_balance.after_step)
        state.add(BALANCE, expert_balance)
    model_files = ModelFiles()
    state.add(MODEL_FILES, model_files)

    folder = RunFolder(config, world.is_main, describe_choice(trainer.plan_choice))
    watchdog = Watchdog(world, config)
    watch_phases(watchdog, model, optimizer.parts)
    if metrics.console is not None:
        metrics.console.first_step_label = (
            "compiling" if compiles_blocks(config.train.compile, world.device.type) else ""
        )
        watchdog.observers.append(metrics.console.enter_phase)
    profile = Profile(config, world.rank, world.device, metrics, watchdog)
    storage = world.agreed(lambda: open_storage(config.checkpoint.dir or folder.path / "checkpoints"))
    sizes = mesh_sizes(trainer.mesh, config)
    run_info = RunInfo(config.with_absolute_paths().to_yaml(), sizes, world.env.job, world.env.num_restarts)
    checkpoints = Checkpoints(storage, world, config.checkpoint, config.eval.metric, config.higher_is_better, run_info)

    norms = UnitNorms(
        config.log,
        model,
        trainer.units,
        trainer.mesh,
        metrics,
        lambda: run.step_metrics.grad_norm,
        config.optim.max_grad_norm,
    )
    optimizer.step_listeners.append(norms.after_step)
    samples = Samples(config, world, model, average, metrics)
    run = TrainingRun(
        config=config,
        world=world,
        forecast=trainer.forecast,
        metrics=metrics,
        stop_criterion=stop_criterion,
        state=state,
        average=average,
        model_files=model_files,
        folder=folder,
        watchdog=watchdog,
        checkpoints=checkpoints,
        step_sync=StepSync(world),
        # The watchdog's limit for a step includes reading the norms, but not starting or writing a profile.
        callbacks=[GarbageCollection(), profile, watchdog, norms, samples],
    )
    run.step_metrics = StepMetrics(run, trainer.loader)
    run.resume = Resume(config, world, checkpoints, folder, metrics)
    weight_bytes, _, optimizer_bytes = training_bytes(model, config.optim, config.train.ema > 0)
    run.saver = Saver(
        checkpoints,
        config,
        run.step_sync,
        folder=folder,
        resume=run.resume,
        step_metrics=run.step_metrics,
        watchdog=watchdog,
        metrics=metrics,
        expected_bytes=weight_bytes + optimizer_bytes,
    )
    world.agreed(samples.check)
    run.lifecycle = Lifecycle(run, trainer.loader, start_time)
    return run
