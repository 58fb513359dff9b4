"""The Trainer: builds the model, optimizer and data that a configuration describes, and trains the model.

Override one method to change one thing: `build_mesh`, `build_model`, `build_optimizer`, `build_loader`,
`build_eval_loader`, `build_hooks`, `loss`, `count`, `train_step`, `evaluate`, `on_step` or `fit`.  Saving, resuming,
metrics, and the start and end of a run are handled by the parts that `_build_run` creates; the Trainer decides when
they act.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.checkpoint.manifest import RunInfo
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.saves import Checkpoints
from trainer.checkpoint.storage import open_storage
from trainer.config.changes import has_changed
from trainer.config.requirements import compiles_blocks
from trainer.config.schema import RunConfig
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.opening import open_source, resolve_from_data
from trainer.data.transfer import prefetch_to_device
from trainer.distributed.monitor import watch_phases
from trainer.distributed.world import EXPERT, TENSOR, World, name_of_group
from trainer.experts import BALANCE, ExpertBalance, find_balance, global_balance
from trainer.hooks import Hook
from trainer.lifecycle.checks import check_same_run, check_shape, check_start
from trainer.lifecycle.folder import RunFolder
from trainer.lifecycle.probes import check_context, check_documents, check_experts, check_tensor
from trainer.lifecycle.resume import Resume
from trainer.lifecycle.run import Run
from trainer.lifecycle.state import EMA, AverageState, RandomState, TrainState, seed_everything
from trainer.lifecycle.summary import mesh_sizes, show_result, start_facts, start_notes, start_record
from trainer.loss import count_targets, find_loss
from trainer.metrics.hooks import CollectGarbage, Samples, UnitNorms, loss_by_source
from trainer.metrics.profile import Profile
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import Amount, SkipCounter, StepMetrics, Update
from trainer.metrics.stop_criterion import RangeTest, StopCriterion
from trainer.metrics.writers import Metrics
from trainer.model.gradients import evaluation_mode, gradient_sync, norm_and_clip_factor, replicate
from trainer.model.mup import find_growth
from trainer.model.network import build_network, training_flops_per_token
from trainer.model.parameters import tied_names
from trainer.model.shard import apply_sharding
from trainer.model.units import ShardUnit
from trainer.optim.ema import WeightAverage
from trainer.optim.optimizer import Optimizer, Schedule, build_optimizer, training_bytes
from trainer.plan.forecast import Forecast, describe_choice, resolve_on_device
from trainer.sequence import enable_slices
from trainer.stopping import stop
from trainer.weights.loading import init_weights, load_base, load_initial_weights, load_weights
from trainer.weights.model_files import MODEL_FILES, ModelFiles


class Trainer:
    """Trains the model that a configuration describes.

        Trainer(load_config("llama_small", ["train.steps=100"])).fit()

    Every rank constructs a Trainer with the same configuration.  `fit` runs training from start to finish;
    `steps` is a generator that yields one record per step, for your own training loop.

    Raises UserError on all ranks if the configuration is invalid, for example because it does not fit the number of
    ranks.
    """

    load_weights = staticmethod(load_weights)

    def __init__(self, config: RunConfig) -> None:
        start_time = time.monotonic()
        self.spec = config.spec
        self.world = World(config)
        with self.world.building():
            self._build(config)
            self._build_run(start_time)

    def _build(self, config: RunConfig) -> None:
        """Build the model, the optimizer and the data.  Collective."""
        check_same_run(self.world, config, type(self), self.exempt_from_selfcheck())
        self.shape = check_shape(self.world, config)
        self.config, self.plan_choice = resolve_on_device(resolve_from_data(config), self.shape, self.world)
        self.forecast = Forecast(self.config, self.shape, self.world)
        seed_everything(self.config.run.seed, self.world.rank)

        self.mesh = self.build_mesh()
        group_sizes = {EXPERT: self.config.expert, TENSOR: self.config.tensor}
        self.split_meshes = self.world.build_split_meshes(self.shape, group_sizes)
        tensor_group = name_of_group(self.split_meshes[TENSOR][TENSOR]) if TENSOR in self.split_meshes else ""
        enable_slices(self.config, self.world, tensor_group)
        self.units: list[ShardUnit] = []
        self.ties: list[list[str]] = []
        self.model = self.build_model()
        self.optimizer = Optimizer.of(self.world.agreed(self.build_optimizer))
        self.schedule = Schedule(self.config)
        self.loader = self.world.agreed(self.build_loader)
        self.eval_loader = self.world.agreed(self.build_eval_loader)
        self._batch_loss = loss_by_source(find_loss(self.model), (self.loader, self.eval_loader), self.log)

    def _build_run(self, start_time: float) -> None:
        """Build all other parts of the run, each from those before it.  Collective.

        The order in which state is added is its order in checkpoints.

        start_time: when the Trainer was created, by `time.monotonic`.
        """
        config, world, model, optimizer = self.config, self.world, self.model, self.optimizer
        is_range_test = config.schedule.name == "range"
        self.skips = SkipCounter(config.train.max_skipped_updates, is_range_test)
        self.metrics = Metrics(config, world.is_main)
        self.stop_criterion = RangeTest(config) if is_range_test else StopCriterion(config)
        base = load_base(model, config, world) if config.lora.rank else None
        self.state = TrainState(self, model, optimizer, self.skips, RandomState(config.run.seed, world.rank), base)
        self.state.add_loaders(self.loader, self.eval_loader, world)
        self.state.add("stop_criterion", self.stop_criterion)
        self.average = WeightAverage(self.state.trained, config.train.ema, config.eval.ema)
        self.state.add(EMA, AverageState(self.average))
        self.expert_balance: list[ExpertBalance] = []
        if find_balance(model) is not None:
            self.expert_balance = [ExpertBalance(model, world, self.log)]
            self.state.add(BALANCE, self.expert_balance[0])
        self.model_files = ModelFiles()
        """The files that came with the initial weights, including those of the tokenizer."""
        self.state.add(MODEL_FILES, self.model_files)

        self.folder = RunFolder(config, world.is_main, describe_choice(self.plan_choice))
        self.storage_to_check = world.agreed(lambda: open_storage(config.checkpoint.dir or self.folder.checkpoints))
        """The storage to check for free space; in a dry run, that of the actual run."""
        run_info = RunInfo(
            config.stored_yaml(),
            mesh_sizes(self.mesh, config),
            world.env.job,
            world.env.num_restarts,
            str(config.run_dir),
        )
        self.checkpoints = Checkpoints(
            self.storage_to_check, world, config.checkpoint, config.eval.metric, config.higher_is_better, run_info
        )
        self.resume = Resume(config, world, self.checkpoints, self.folder, self.metrics)
        self.step_metrics = StepMetrics(
            config, world, self.state, self.metrics, self.stop_criterion, self.forecast, self.loader
        )
        weight_bytes, _, optimizer_bytes = training_bytes(model, config.optim, config.train.ema > 0)
        self.saver = Saver(
            self.checkpoints,
            config,
            folder=self.folder,
            resume=self.resume,
            step_metrics=self.step_metrics,
            metrics=self.metrics,
            expected_bytes=weight_bytes + optimizer_bytes,
        )
        watch_phases(world.monitor, model, optimizer.parts)
        if self.metrics.console is not None:
            is_compiling = compiles_blocks(config.train.compile, world.device.type)
            self.metrics.console.first_step_label = "compiling" if is_compiling else ""
            world.monitor.observers.append(self.metrics.console.enter_phase)
        self.hooks = world.agreed(self.build_hooks)
        optimizer.step_listeners = [hook.after_update for hook in self.hooks]
        self.initial_weights_source = ""
        """Where the initial weights came from; empty if a checkpoint was loaded."""
        self.stopping = False
        """Whether the current step is the last one on all ranks, because a stop was requested.  You may set it."""
        self._has_loaded = self._has_agreed = False
        self.run = Run(self, start_time)

    # -- build ---------------------------------------------------------------------------------------------------

    def build_mesh(self) -> DeviceMesh:
        """Return the device mesh: axes (shard,), or (replicate, shard)."""
        return self.world.build_mesh(self.shape)

    def build_model(self, config: RunConfig | None = None) -> torch.nn.Module:
        """Return the sharded, initialized model of `config` (default: this run's).

        The model is built on the meta device, sharded, then initialized: a rank holds at most its shards and one full
        module.  Weights that the run loads later are only allocated.  Call it again for a second model, such as a
        teacher.  Collective.
        """
        config = config or self.config
        spec = config.spec

        def build_sharded() -> tuple[torch.nn.Module, list[ShardUnit]]:
            model = build_network(config)
            ties = tied_names(model)
            units = apply_sharding(model, spec, config, self.mesh, self.split_meshes, self.world.copy_mesh)
            if config is self.config:
                self.units, self.ties = units, ties
            return model, units

        model, units = self.world.agreed(build_sharded)
        self.world.agreed(lambda: init_weights(model, config, self.world.device, load_later=config is self.config))
        replicate(model, units, self.mesh)
        return model

    def build_optimizer(self) -> Optimizer | torch.optim.Optimizer:
        """Return the optimizer over `self.model`.

        Every step sets the learning rate of each parameter group to the schedule's, times the group's `lr_scale` if it
        has one.
        """
        growth = find_growth(self.config, self.model)
        return build_optimizer(self.model, self.config.optim, self.config.run.seed, self.spec.blocks, growth)

    def build_loader(self) -> Iterable[Batch]:
        """Return the training data: an infinite iterable of this rank's micro-batches.

        One step takes `self.num_micro_batches` of them.  A loader with `state_dict` and `load_state_dict` is saved in
        checkpoints, and restored from them.
        """
        source = open_source(self.config.data, self.config.vocab_size, "train")
        return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)

    def build_eval_loader(self) -> Iterable[Batch] | None:
        """Return the held-out data: a finite iterable with the same length on every rank; None to skip evaluation."""
        if not self.config.eval.every:
            return None
        source = open_source(self.config.data, self.config.vocab_size, "eval")
        return None if source is None else EvalLoader.from_config(source, self.config, self.world.rank, self.world.size)

    def build_hooks(self) -> list[Hook]:
        """Return what the run does beside training, in this order.  Override it to add hooks of your own."""
        config, world, metrics = self.config, self.world, self.metrics
        samples = Samples(config, world, self.model, self.average, metrics)
        samples.check()
        return [
            CollectGarbage(),
            Profile(config, world.rank, world.device, metrics, world.monitor),
            self.average,
            *self.expert_balance,
            UnitNorms(config.log, self.model, self.units, self.mesh, metrics, config.optim.max_grad_norm),
            samples,
        ]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return self.config.num_micro_batches(self.world.size)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per token for forward and backward, without recomputation."""
        attended = self.loader.source.attended if isinstance(self.loader, TrainLoader) else None
        return training_flops_per_token(self.config, self.model, attended or self.config.data.seq_len)

    # -- the step ------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss, summed over the batch's targets; the Trainer scales it.

        The model's `forward` receives the batch's tokens, and the other entries that are named like its parameters.
        """
        return self._batch_loss(batch)

    def count(self, batch: Batch) -> float:
        """Return what this batch adds to the divisor of the summed loss: by default, its number of targets."""
        return count_targets(batch["targets"])

    def global_sums(self, micro_batches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Return a context in which `loss` can use sums over the global batch, computed before the first backward pass.

        By default, these are the sums for the experts' load-balancing loss.  Collective.
        """
        return global_balance(self.model, micro_batches, self._batch_loss, self.world)

    def log(self, name: str, value: Amount, over: Amount | None = None) -> None:
        """Add `value` to a field of the next metrics line, which sums it over steps, micro-batches and ranks.

        With `over`, the field is the ratio of the two sums: `log("accuracy", num_right, over=num)`.  During an
        evaluation, the field goes to the evaluation's line.  Values on a GPU cause no host sync.
        """
        self.step_metrics.log(name, value, over)

    def train_step(self, micro_batches: Sequence[Batch]) -> Update:
        """Do one optimizer step.  On any mesh, the loss is the sum over the global batch divided by the sum of `count`.

        By default, that is the mean over targets; most objectives count samples instead.  If nothing counts, there is
        no mean, and no gradient to follow: the loss is then not a number, so the update is skipped.

        Collectives: one small CPU all-reduce (`agree`); those of `global_sums`, which may run additional forward
        passes; FSDP's all-gathers and one gradient reduction (for an unsharded model, only the reduction), whose
        reduce-scatter runs for every micro-batch with `fsdp.accumulate=sharded`; a scalar all-reduce of the loss, and
        with several shards one of the norm; those of the optimizer (Muon), and of models with experts or split
        sequences.

        The host waits for the device only if parameters are offloaded to the CPU, ranks exchange tokens
        (`mesh.expert_method=exchange`), the optimizer is neither our AdamW nor our Muon (`Optimizer.step` then reads
        `is_finite`), a parameter of an unsharded replica got no gradient on this rank (`Replicas`), or the model itself
        causes a host sync, as `apply_by_document` does for packed documents.
        """
        counts = [(self.count(batch), count_targets(batch["targets"])) for batch in micro_batches]
        count, num_targets = self.agree(*map(sum, zip(*counts, strict=True)))
        scale = self.world.size / (count or 1)  # FSDP averages over ranks; multiplying by their number gives the sum
        total = torch.zeros((), device=self.world.device, dtype=torch.float64)
        with self.global_sums(micro_batches):
            for number, batch in enumerate(prefetch_to_device(micro_batches, self.world.device), start=1):
                with gradient_sync(self.model, number == len(micro_batches), self.config.fsdp):
                    loss = self.loss(batch)
                    (loss * scale).backward()
                total += loss.detach()
        grad_norm, clipping = norm_and_clip_factor(self.model, self.mesh, self.config.optim.max_grad_norm)
        mean_loss = self.world.sum_on_device(total) / count
        self.optimizer.set_lr(self.schedule.lr(self.state.step + 1))
        self.optimizer.step(torch.isfinite(mean_loss + grad_norm), clipping)
        self.optimizer.zero_grad()
        return Update(mean_loss, grad_norm, int(num_targets), is_empty=count == 0)

    def agree(self, *amounts: float) -> list[float]:
        """Return the sum of each amount over all ranks, and learn what the ranks must agree on.

        That is: whether any rank was asked to stop, and the `Saver`'s votes.  All ranks must pass the same number of
        amounts.  This is the only message of a step through host memory, one small all-reduce; `steps` sends it if a
        custom `train_step` does not.  An evaluation sends it before each batch.
        """
        is_asked_to_stop = bool(stop.reason(self._stopping_s()))
        *sums, num_asked, num_written, num_overdue, num_time = self.world.sum(
            [*amounts, is_asked_to_stop, *self.saver.votes()]
        )
        self.saver.take_votes(num_written, num_overdue, num_time)
        if num_asked and not self.stopping:
            self.stopping = True
            stop.acknowledge()
        self._has_agreed = True
        return sums

    def _stopping_s(self) -> float:
        """Return how long stopping may take, in seconds: two steps and the longest save so far, with a margin."""
        return 2.0 * self.step_metrics.step_s + 1.5 * self.saver.expected_save_s + 5.0

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> int:
        """Train to the end, with evaluation and checkpoints; stop cleanly on request.  Returns the exit code.

        0: finished; 75: stopped on request after saving.  An exception is recorded in `status.json` and the end record.
        """
        with self.run.attempt():
            self.checkpoints.check(self.state)
            self.start()
            if self.state.eval_pending and not self.stopping:
                self._run_evaluation()
            for record in self.steps():
                self.on_step(record)
                if self.config.eval.is_due(record.step):
                    self._run_evaluation()
                if self.saver.is_due(record.step):
                    self.saver.try_save(self.state)
                if self.stopping:
                    break
            return self.finish()

    def steps(self) -> Iterator[Record]:
        """Resume, then yield one record per step: the fields of a `train` line.  Logs, but does not save.

        If you leave the loop early and call `steps` again, training continues where it stopped, or from the
        checkpoint that you have loaded in between with `load_checkpoint`.  `close` ends the run.
        """
        has_failed = True
        try:
            self.start()
            if not self.stop_criterion.is_reached(self.state.step):
                batches = self._iterate_loader()
                self.step_metrics.restart()
                while not self.stop_criterion.is_reached(self.state.step) and not self.stopping:
                    yield self._step(batches)
            has_failed = False
        except GeneratorExit:  # the caller has left the loop
            has_failed = False
            raise
        finally:
            for hook in reversed(self.hooks):
                hook.close(has_failed)

    def _iterate_loader(self) -> Iterator[Batch]:
        random_state = self.state.random.state_dict()
        batches = iter(self.loader)
        self.state.random.load_state_dict(random_state)  # a custom loader's iterator may have drawn random numbers
        return batches

    def _step(self, batches: Iterator[Batch]) -> Record:
        """Do one step, with everything around it, and return its record.  Collective."""
        step, monitor = self.state.step + 1, self.world.monitor
        self.resume.supersede_if_rolled_back(self.state.step)
        self._has_agreed = False
        with self.checkpoints.throttled(), monitor.step(step):
            for hook in self.hooks:
                hook.begin_step(step)
            micro_batches = self.step_metrics.take_micro_batches(batches, self.num_micro_batches)
            monitor.enter("forward")
            update = self.train_step(micro_batches)
            if not self._has_agreed:
                self.agree()
            self.state.advance(update.num_targets)
            stop.has_state = True  # before the step is recorded, since its record says that there is one to save
            is_followed = self.config.eval.is_due(step) or self.saver.may_be_due(step)
            lr = self.schedule.lr(step)
            record = self.step_metrics.record(update, lr, lambda: self.flops_per_token, self.stopping, is_followed)
            for hook in reversed(self.hooks):
                hook.end_step(step, update)
        self.saver.take_finished_save()
        return record

    def on_step(self, record: Record) -> None:
        """Do nothing by default; `fit` calls this hook after each step."""

    def evaluate(self) -> Record | None:
        """Return and log the loss over the held-out data, divided by the sum of `count`; None if there is no such data.

        A stop request aborts the evaluation and returns None; `fit` repeats it after the next start.  Collectives:
        those of the forward passes, one small CPU all-reduce (`agree`) per batch, and one of the sums at the end.
        """
        if self.eval_loader is None:
            return None
        start_time = time.perf_counter()
        total, count = torch.zeros((), device=self.world.device, dtype=torch.float64), 0.0
        with self.average.swapped_in(), evaluation_mode(self.model), self.step_metrics.evaluation():
            for batch in self.eval_loader:
                self.agree()
                if self.stopping:
                    break
                count += self.count(batch)
                total += self.loss(next(prefetch_to_device([batch], self.world.device)))
            self.state.eval_pending = self.stopping
            if self.stopping:
                return None
            return self.step_metrics.record_evaluation(self.state.step, total, count, self.eval_loader, start_time)

    def _run_evaluation(self) -> None:
        """Evaluate, generate sample texts, and save a checkpoint if this evaluation is among the best.

        Does nothing more if `evaluate` returns None: no held-out data, or a stop request.  Collective.
        """
        with self.world.monitor.during("evaluate"):
            record = self.evaluate()
            if record is None:
                return
            for hook in self.hooks:
                hook.after_evaluation(self.state.step)
        self.state.record_evaluation(record, self.config.eval.metric)
        self.stop_criterion.add_evaluation(record, self.state.step)
        self.saver.save_if_best(self.state)

    # -- start, save, resume, end --------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume and start the run, unless it has started already or has no steps left.  Collective."""
        if not self._has_loaded:
            self.load_checkpoint()
        has_work = not self.stop_criterion.is_reached(self.state.step) or self.state.eval_pending
        if self.run.is_running or not has_work:
            return
        self.run.check_may_begin()
        self.world.agreed(self.folder.acquire)
        if self.config.run.selfcheck:
            check_start(self.world, self.model, self.mesh, self.ties, self.loader, self.exempt_from_selfcheck())
            check_context(self.world, self.model, self.loader, self.config)
            check_tensor(self.world, self.model, self.loader, self.config)
            check_experts(self.world, self.model, self.mesh, self.loader, self.config)
        check_documents(self.world, self.model, self.loader, self.config)
        self.resume.supersede()
        self.forecast.begin(self.model, self.optimizer)
        is_evaluated = self.eval_loader is not None or type(self).evaluate is not Trainer.evaluate
        notes = start_notes(self, [hook.note(self.state.step) for hook in self.hooks], is_evaluated)
        self.run.begin(start_facts(self), start_record(self), notes)
        self.agree()  # stop before the first step, which may compile for minutes

    def save_checkpoint(self, wait: bool = False) -> Path | str:
        """Save the current state and return the (future) folder or URL of the checkpoint.  Collective.

        With `checkpoint.mode=async`, training waits only for a copy in memory.  The folder is published once it is
        complete: with `wait`, before this method returns; otherwise before the next save, `close` or `fit` ends.  A
        failed background save is reported after the next step: `fit` retries it, otherwise TrainingFailed is raised.

        State that cannot be saved, or that differs between ranks although it must not, is a UserError on all ranks: at
        the first call, and afterwards with the result.
        """
        return self.saver.save(self.state, wait)

    def load_checkpoint(self, path: str | Path | None = None) -> int | None:
        """Restore the state from `path` (default: as `checkpoint.resume` selects).  Returns its step, or None.

        Works on any mesh.  Files are verified; a corrupt checkpoint of this run is quarantined, and the previous one is
        used.  Raises UserError for an incompatible checkpoint, TrainingFailed if no checkpoint is intact.  Collective.
        """
        self.saver.finish()
        self.world.agreed(self.folder.acquire)
        start_time = time.perf_counter()
        restored = self.resume.load(self.state, path, self.run.is_running)
        if restored is not None:
            self.step_metrics.discard_pending_step()
            self.saver.record_loaded(self.state, self.resume.is_own_checkpoint)
            self.stop_criterion.after_load(self.resume.is_own_checkpoint)
            if has_changed(self.config, restored.config_yaml, "data.tokenizer", "data.chat_template"):
                self.model_files.store_tokenizer(self.config, self.world)
        elif not self._has_loaded:
            self.initial_weights_source = load_initial_weights(self.model, self.model_files, self.config, self.world)
        self._has_loaded = True
        self.resume.seconds += time.perf_counter() - start_time
        return self.resume.step

    def finish(self) -> int:
        """Evaluate unless done at this step, save the final checkpoint, and end the run.  Returns the exit code."""
        stop.has_state = True  # the rest is short, and must not be cut off
        if not self.run.is_running:
            self.skips.check_end(self.state.step)
            return self.run.end_without_work(self.resume.step, self.checkpoints.clean)
        if self.config.eval.every and self.step_metrics.evaluated_step != self.state.step and not self.stopping:
            self._run_evaluation()
        self.saver.finish()
        if self.state.step > 0 or not self.stopping:
            self.saver.save_final(self.state)
        if self.stopping:
            return self.run.end_stopped()
        self.skips.check_end(self.state.step)
        with self.average.swapped_in():
            show_result(self.config, self.world, self.model, self.metrics)
        return self.run.finish()

    def close(self) -> None:
        """End the run if it is still running, and destroy the process group if this Trainer created it.  Collective.

        If called while an exception propagates (from `finally`), the run counts as failed, and ranks do not wait for
        each other.
        """
        self.run.close()

    def exempt_from_selfcheck(self) -> Iterable[str]:
        """Return the items that `run.selfcheck` skips; by default none.

        Each item is a pattern of names of parameters ("adapter.*"), configuration keys or source files that may differ
        between ranks, or "data" for the samples.
        """
        return ()
