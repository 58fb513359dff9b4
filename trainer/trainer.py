"""The Trainer: builds what a configuration describes, and trains it until it is done.

What a subclass may want to change is one method each: `build_mesh`, `build_model`, `build_optimizer`, `build_loader`,
`loss`, `train_step`, `evaluate`, `on_step`, `fit`.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.checkpoint.manifest import name_of
from trainer.checkpoint.place import SUPERSEDED, find_place, is_same_place
from trainer.checkpoint.schedule import SaveSchedule
from trainer.checkpoint.source import find_checkpoint
from trainer.checkpoint.store import Checkpoints, Facts, Found, SaveResult, Settings
from trainer.config import RunConfig, check_config, compare_configs, find_deadline, stored_value
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.source import Source, gzip_bits_per_byte, held_out_text, open_source
from trainer.data.tokenizer import find_tokenizer
from trainer.environment import take_start
from trainer.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR, TrainingFailed, UserError
from trainer.files import find_folder
from trainer.flops import flops_per_token
from trainer.guard import GarbageCollection, RandomState, SkipCounter, seed_everything
from trainer.history import History
from trainer.inference import ORIGIN, doubts, load_weights, open_weights, origin_of, settle_path
from trainer.loss import count_targets, find_loss
from trainer.materialize import materialize
from trainer.metrics.console import readable_bytes, readable_count
from trainer.metrics.fanout import Metrics
from trainer.metrics.meter import Meter, peak_flops, peak_memory_gib
from trainer.metrics.profile import Profile
from trainer.metrics.record import Record
from trainer.metrics.sinks import warn
from trainer.needs import check_needs
from trainer.optim import Optimizer, Schedule, build_optimizer, bytes_of_training
from trainer.origin import Origin, read_tokenizer
from trainer.parameters import count_parameters, count_trained_parameters, tied_names
from trainer.plan.forecast import Forecast, settle_for_run
from trainer.plan.show import choice_text
from trainer.printable import mask_credentials
from trainer.rundir import RECORD, RunFolder
from trainer.sample import write_sample
from trainer.selfcheck import check_same_run, check_start
from trainer.shard import ShardUnit, apply_sharding, clip_grad_norm, gradient_sync, reshard
from trainer.state import TrainState
from trainer.stop import NOTICE, STOPPING, answer_at_once, find_stop_request, identity, show_cursor, take_stale_notice
from trainer.transfer import Numbers, ahead
from trainer.watchdog import Watchdog
from trainer.weights import fill
from trainer.world import REPLICATE, SHARD, World

Batch = dict[str, torch.Tensor]
"""One micro-batch of a rank: `tokens` and `targets`, int64 of shape (B, T); a target of -100 does not count."""


class Update:
    """What one optimizer update did, the same on all ranks.

    Its numbers may still be on their way from the device when the step returns: reading one of them waits for it.
    `num_targets` are the targets that count, over all ranks.
    """

    def __init__(self, loss: float | torch.Tensor, grad_norm: float | torch.Tensor, num_targets: int) -> None:
        self.num_targets = num_targets
        self._numbers = Numbers(loss, grad_norm)

    def wait(self) -> None:
        """Wait until the device is through with it."""
        self._numbers.read()

    @property
    def waited_s(self) -> float:
        """Seconds that were spent waiting for it so far."""
        return self._numbers.waited_s

    @property
    def loss(self) -> float:
        """Mean over the targets of the global batch."""
        return self._numbers.read()[0]

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        return self._numbers.read()[1]

    @property
    def skipped(self) -> bool:
        """True if loss or gradient was not finite, and the weights were left alone."""
        return not all(map(math.isfinite, self._numbers.read()))


class Trainer:
    """Trains the model of a configuration.

        Trainer(load_config("llama_small", ["train.steps=100"])).fit()

    Every rank makes one, with the same configuration.  `fit()` does everything; `steps()` is a generator of one
    record an update, for loops of one's own.

    Raises UserError, on all ranks alike, for what is wrong with the configuration on this number of ranks.
    """

    def __init__(self, config: RunConfig) -> None:
        self.started = time.monotonic()
        self._earlier_error = sys.exc_info()[1]  # that somebody is handling already
        self.recipe = config.recipe
        self.world = World(config)
        check_same_run(self.world, config, type(self), self.exempt_from_selfcheck())
        env = self.world.env
        shape = self.world.agreed(lambda: check_config(config, self.world.size, env.local_world_size))
        self.world.agreed(lambda: check_needs(config, self.world.device.type))
        if self.world.is_main and (advice := shape.advice(env.local_world_size)):
            warn(advice)
        config, self._choice = settle_for_run(config, shape, self.world)
        self.config = config
        self.forecast = Forecast(config, shape, self.world)
        seed_everything(config.run.seed, self.world.rank)

        self.mesh = self.build_mesh()
        self.units: list[ShardUnit] = []
        self.ties: list[list[str]] = []
        self.model = self.build_model()
        self._batch_loss = find_loss(self.model)
        self.optimizer = self._optimizer()
        self.schedule = Schedule(config)
        self.loader = self.world.agreed(self.build_loader)
        self.eval_loader = self.world.agreed(self.build_eval_loader)

        self.folder = RunFolder(config, self.world.is_main, choice_text(self._choice) if self._choice else "")
        self.history = History(self.folder)
        self.metrics = Metrics(config, self.world.is_main)
        self.skips = SkipCounter(config.train.max_skipped_updates)
        self.stop = find_stop_request()
        if self.world.is_main:
            self.stop.on_ask, self.stop.on_second_interrupt = answer_at_once, self._quit
        self._stale_notice = take_stale_notice(config.run_dir)
        self.world.after_failure.append(self._stop_at_once)
        self.world.before_exit.append(self._note_failure)
        self.stopping = False
        """True on all ranks alike once any of them was asked to stop: the update in hand was the last."""
        self.state = TrainState(
            self, self.model, self.optimizer, self.skips, RandomState(config.run.seed, self.world.rank)
        )
        self._resume_loader_with_state()
        self.state.add("metrics", self.metrics)
        self.origin = Origin()
        """What came with the model: the files beside the weights that training started from, and its tokenizer's."""
        self.state.add(ORIGIN, self.origin)
        self.checkpoints = self._checkpoints()
        self.saving = SaveSchedule(config.checkpoint.every)
        self.watchdog = Watchdog(self.world, config, self._give_up)
        self.watchdog.observe(self.model, self.optimizer.parts)
        self.profile = Profile(config, self.world.rank, self.world.device, self.metrics, self.watchdog)
        self.resumed_step: int | None = None
        self._changed: list[str] = []
        self.phase: Literal["built", "restored", "running", "ended"] = "built"
        self._saved_step: int | None = None
        self._is_from_elsewhere = False
        """Whether what was loaded last lies elsewhere than this run's own checkpoints."""
        self._is_outdated = False
        self._evaluated_step: int | None = None
        self._save_ended = self._may_retry = self._has_exchanged = False
        """What the update's message said: every rank has ended its part of the save in flight (or one never will); a
        failed one may be tried again.  And whether it has been sent."""
        self._has_gone_back = False
        """True after a checkpoint was loaded in mid-run, until the next update or save."""
        self._counted_s = self._step_s = self._save_s = self._load_s = 0.0
        self._unaccounted: tuple[Update, int, float] | None = None
        self._reads_late = self.world.device.type != "cpu"
        """Whether numbers of an update are looked at once the next one is queued; the same on all ranks."""
        weights, _, kept = bytes_of_training(self.model, config.optim)
        self._bytes_to_save = weights + kept

    # -- what is built -------------------------------------------------------------------------------------------

    def build_mesh(self) -> DeviceMesh:
        """Return the device mesh: axes (shard,), or (replicate, shard)."""
        return self.world.build_mesh(self.config)

    def build_model(self, config: RunConfig | None = None) -> torch.nn.Module:
        """Return the sharded, initialised model of `config` (by default this run's): meta device, shard, then fill.

        No rank ever holds more than its shards and one module.  Call it again for a second model, a teacher say.
        """
        config = config or self.config
        recipe = config.recipe

        def build_sharded() -> torch.nn.Module:
            with torch.device("meta"):
                model = recipe.build_model(config.model)
            ties = tied_names(model)
            units = apply_sharding(model, recipe, config, self.mesh)
            if config is self.config:
                self.units, self.ties = units, ties
            return model

        model = self.world.agreed(build_sharded)
        fill = (config.run.seed, self.world.device, recipe.init, config.fsdp.cpu_offload)
        self.world.agreed(lambda: materialize(model, *fill))
        return model

    def build_optimizer(self) -> Optimizer | torch.optim.Optimizer:
        """Return the optimizer over `self.model`.

        Its learning rate is the schedule's at every step; a parameter group's `lr_scale`, if any, multiplies it.
        """
        return build_optimizer(self.model, self.config.optim, self.config.run.seed)

    def build_loader(self) -> Iterable[Batch]:
        """Return the training data: an endless iterable of this rank's micro-batches.

        One update takes `self.num_micro_batches` of them.  A loader with `state_dict` and `load_state_dict` is resumed.
        """
        config = self.config
        return TrainLoader(
            open_source(config.data, config.vocab_size, "train"),
            seed=config.data.seed,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=int(config.train.micro_batch_size),
            dp_rank=self.world.rank,
            num_dp_ranks=self.world.size,
            num_workers=config.data.num_workers,
            pin_memory=self.world.device.type == "cuda",
        )

    def build_eval_loader(self) -> Iterable[Batch] | None:
        """Return the held-out data, a finite iterable with as many micro-batches on every rank; None for none."""
        config = self.config
        source = open_source(config.data, config.vocab_size, "eval") if config.eval.every else None
        if source is None:
            return None
        return EvalLoader(
            source,
            num_batches=config.eval.steps,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=int(config.train.micro_batch_size),
            dp_rank=self.world.rank,
            num_dp_ranks=self.world.size,
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one update on each rank."""
        return self.config.train.global_batch_size // (self.world.size * int(self.config.train.micro_batch_size))

    # -- the step ------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss, summed over the batch's targets; the Trainer scales it."""
        return self._batch_loss(batch)

    def train_step(self, micro_batches: Sequence[Batch]) -> Update:
        """Do one update.  The loss is the mean over the targets of the whole global batch, on any mesh.

        Collectives: one small message on the CPU, those of FSDP with one reduction of the gradients, two scalars.  The
        host waits for the device nowhere, unless parameters are offloaded to it.
        """
        num_targets = self._exchange(sum(count_targets(batch["targets"]) for batch in micro_batches))
        # FSDP averages gradients over the ranks; the loss is divided by the targets of all of them.
        scale = self.world.size / max(1, num_targets)
        total = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(ahead(micro_batches, self.world.device), start=1):
            with gradient_sync(self.model, number == len(micro_batches), self.config.fsdp):
                loss = self.loss(batch)
                (loss * scale).backward()
            total += loss.detach()
        grad_norm = clip_grad_norm(self.model, self.mesh, self.config.optim.max_grad_norm)
        mean_loss = self.world.sum_on_device(total).double() / max(1, num_targets)
        self.optimizer.set_lr(self.schedule.lr(self.state.step + 1))
        self.optimizer.step(is_finite=torch.isfinite(mean_loss + grad_norm))
        self.optimizer.zero_grad()
        return Update(mean_loss, grad_norm, num_targets)

    def _exchange(self, num_targets: int) -> int:
        """Return the sum of `num_targets` over all ranks.

        The same message, one in each update, tells all of them whether one was asked to stop, and how saving stands.
        """
        may_retry = self.world.is_main and self.saving.may_retry()
        saving = self.checkpoints
        message = [
            num_targets,
            self.stop.reason(self._stopping_s()) is not None,
            saving.is_written,
            saving.is_overdue,
            may_retry,
        ]
        total, stops, written, overdue, retries = self.world.sum(message)
        if stops > 0 and not self.stopping:
            self.stopping = True
            if not self.stop.is_answered:
                self.metrics.say(STOPPING, "yellow")
        self._save_ended, self._may_retry = written == self.world.size or overdue > 0, retries > 0
        self._has_exchanged = True
        return int(total)

    def _stopping_s(self) -> float:
        """Return how long it takes to stop: two steps, and a save as long as the longest so far, with room to spare.

        Before the first save of a run it is taken to write a gigabyte in five seconds.
        """
        save_s = self._save_s or 5.0 * self._bytes_to_save / 1e9
        return 2.0 * self._step_s + 1.5 * save_s + 5.0

    def _stop_reason(self) -> str:
        reasons = self.world.gather(self.stop.reason(self._stopping_s()))
        return next((reason for reason in reasons if reason), "asked to stop")

    def _stop_at_once(self) -> None:
        self.stop.at_once = True

    def _quit(self) -> None:
        """Leave the terminal and the folder as they should be; the process ends now, whatever it is doing."""
        show_cursor()
        self._note_failure(2.0, "a second Ctrl-C")
        releasing = threading.Thread(target=self.folder.release, daemon=True)
        releasing.start()
        releasing.join(2.0)

    def _note_failure(self, patience_s: float, reason: str) -> None:
        """Leave word of what has failed elsewhere; this rank's main thread may hang, and so may the storage."""
        if self.phase == "running":
            status = ("failed", EXIT_FAILED, self.state.step, reason)
            writing = threading.Thread(target=self.folder.write_status, args=status, daemon=True)
            writing.start()
            writing.join(max(1.0, patience_s))

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> int:
        """Train until `train.steps`, with evaluation, checkpoints and an orderly stop.  Returns the exit code.

        0: finished; 75: stopped on request, after saving.  Whatever it raises, `status.json` and the end record say so.
        """
        self.stop.install()
        try:
            self.checkpoints.check(self.state)
            with GarbageCollection() as garbage:
                self._resume()
                if self.state.owes_evaluation and not self.stopping:
                    with self.watchdog.running():
                        self._evaluate()
                for record in self.steps():
                    self.on_step(record)
                    if _due(self.config.eval.every, record.step):
                        self._evaluate()
                    if self.saving.is_due(record.step, self._may_retry):
                        self._save()
                    garbage.after(record.step)
                    if self.stopping:
                        break
            return self._finish()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.stop.uninstall()

    def steps(self) -> Iterator[Record]:
        """Resume, then yield one record after each update: the fields of a `train` line.  Logs, but does not save.

        Left early and called again, it goes on; after `load_checkpoint` it goes on from there.  `close` ends the run.
        """
        with self.watchdog.running(), self.profile:
            yield from self._steps()

    def _resume(self) -> None:
        """Take up the newest checkpoint, unless that is done, and begin if there is anything left to do."""
        if self.phase == "built":
            self.load_checkpoint()
        if self.phase != "running" and (self.state.step < self.config.train.steps or self.state.owes_evaluation):
            self._start()

    def _steps(self) -> Iterator[Record]:
        self._resume()
        if self.state.step >= self.config.train.steps:
            return
        random_state = self.state.random.state_dict()
        batches = iter(self.loader)
        self.state.random.load_state_dict(random_state)  # making an iterator may draw from it
        meter = Meter()
        memory_gib = peak_memory_gib(self.world.device)
        num_updates = 0
        while self.state.step < self.config.train.steps and not self.stopping:
            self._leave_behind_if_gone_back()
            self.checkpoints.makes_way = self.world.device.type == "cpu"
            meter.leave_out(self.profile.begin_update(self.state.step + 1))
            started = time.perf_counter()
            self.watchdog.begin_update(self.state.step + 1)
            micro_batches = list(islice(batches, self.num_micro_batches))
            if len(micro_batches) < self.num_micro_batches:
                raise TrainingFailed(f"step {self.state.step + 1}: the loader of build_loader ended; it must not end")
            data_s = time.perf_counter() - started
            self._has_exchanged = False
            self.watchdog.note("forward")
            update = self.train_step(micro_batches)
            if not self._has_exchanged:  # a step of one's own that says nothing
                self._exchange(0)
            self.state.step += 1
            self.state.tokens += update.num_targets
            step = self.state.step
            is_line = step == 1 or _due(self.config.log.every, step) or step == self.config.train.steps or self.stopping
            seconds = self._note_update(update, meter, started, data_s, at_once=is_line or not self._reads_late)
            self._step_s = seconds if num_updates else 0.0  # the first compiles and allocates
            num_updates += 1
            if is_line:
                (memory_gib,) = self.world.max([peak_memory_gib(self.world.device)])
            record = self._train_record(update, meter, memory_gib)
            self.metrics.progress(step)
            if is_line:
                self.metrics.write(record)
                meter.reset()
            self.checkpoints.makes_way = False
            if self._save_ended:
                self._settle()
            self.watchdog.end_update()
            yielded = time.perf_counter()
            self.profile.end_update(step)
            waited_s = update.waited_s
            yield record
            # To read a record's loss is to wait for the update, and part of it.
            meter.leave_out(time.perf_counter() - yielded - (update.waited_s - waited_s))

    def _note_update(self, update: Update, meter: Meter, started: float, data_s: float, at_once: bool) -> float:
        """Take an update into means, plan and goodput, and return how many seconds it took.

        That is until the device was through with it, or, unless `at_once`, with the one before it, which comes to the
        same from update to update.
        """
        self._account()
        # What evaluation and saving take is measured by itself: this update must not be part of it.
        step, config = self.state.step, self.config
        if at_once or _due(config.eval.every, step) or _due(config.checkpoint.every, step):
            update.wait()
        seconds = time.perf_counter() - started
        if self.profile.covers(self.state.step):
            meter.count_profiled(seconds, data_s, update.num_targets)
        else:
            meter.count(data_s, update.num_targets)
            self.forecast.note_step(seconds)
        self._unaccounted = (update, self.state.step, seconds)
        if at_once:
            self._account()
        return seconds

    def _account(self) -> None:
        """Count the update whose numbers have not been looked at yet, as one that counted or was skipped; waits for it.

        Called one update later, when the device has work again.  Raises TrainingFailed, on all ranks alike, after too
        many in a row.
        """
        if self._unaccounted is not None:
            (update, step, seconds), self._unaccounted = self._unaccounted, None
            self._counted_s += seconds * (not update.skipped)
            self.skips.count(update.loss, update.grad_norm, step)

    def on_step(self, record: Record) -> None:
        """Do something of one's own after each update that `fit` makes; nothing by default."""

    def _evaluate(self) -> None:
        with self.watchdog.during("evaluate"):
            self.evaluate()

    def evaluate(self) -> Record | None:
        """Return (and log) the mean loss over the held-out targets; None where nothing is held out.

        Given up, with None, once a rank is asked to stop; `fit` makes up for it when the run goes on.  Collectives:
        those of the forward passes, and one small message for each batch.
        """
        if self.eval_loader is None:
            return None
        started = time.perf_counter()
        self.model.eval()
        total, num_targets = torch.zeros((), device=self.world.device, dtype=torch.float64), 0
        with torch.no_grad():
            for batch in self.eval_loader:
                self._exchange(0)
                if self.stopping:
                    break
                num_targets += count_targets(batch["targets"])
                total += self.loss(next(ahead([batch], self.world.device)))
        reshard(self.model)
        self.model.train()
        if self.stopping:
            self._owe_evaluation(True)
            return None
        self._owe_evaluation(False)
        self._evaluated_step = self.state.step
        loss_sum, all_targets = self.world.sum([float(total), num_targets])
        loss = loss_sum / max(1, all_targets)
        eval_s = time.perf_counter() - started
        record = Record(kind="eval", step=self.state.step, loss=loss, **self._bits_per_byte(loss), eval_s=eval_s)
        return self.metrics.write(record)

    def _owe_evaluation(self, owes: bool) -> None:
        """Note what a checkpoint of this step that is there already, or on its way, says otherwise."""
        self._is_outdated = self._is_outdated or owes != self.state.owes_evaluation
        self.state.owes_evaluation = owes

    def _is_saved(self) -> bool:
        return self._saved_step == self.state.step and not self._is_outdated

    def _bits_per_byte(self, loss: float) -> dict[str, float]:
        source = getattr(self.eval_loader, "source", None)
        bits = source.bits_per_byte(loss) if isinstance(source, Source) else None
        return {} if bits is None else {"bits_per_byte": bits}

    # -- saving and resuming -------------------------------------------------------------------------------------

    def save_checkpoint(self, wait: bool = False) -> Path | str:
        """Save the state as it is; returns the checkpoint's folder (or URL), or where it will be.  Collective.

        With `checkpoint.mode=async` training stands still for a copy in memory only; the folder appears once all is
        written, at the latest when the next save, `close` or `fit` has ended, or now with `wait`.  A failed save in the
        background is reported after the next update and, by `fit`, tried again; otherwise TrainingFailed is raised.
        What was saved before is as it was.
        """
        self._finish_save()
        background = self.config.checkpoint.mode == "async" and not wait
        self._start_save(background)
        if not background and (error := self._settle(warns=False).error):
            raise TrainingFailed(error)
        path = str(self.checkpoints.place / name_of(self.state.step))
        return path if find_folder(path) is None else Path(path)

    def _save(self) -> None:
        """Begin a save as `fit` does it: a failure is counted, not raised, until there are too many in a row.

        While updates are skipped there is nothing good to save: the first that counts makes up for it.
        """
        if self.checkpoints.in_flight and self.config.checkpoint.when_busy == "skip":
            return
        self._account()
        if self.skips.in_a_row:
            self.saving.postpone()
            return
        self._finish_save()
        if self._is_saved() and not self.saving.num_failures:
            return
        self._start_save(background=self.config.checkpoint.mode == "async")
        if self.config.checkpoint.mode == "sync":
            self._settle()

    def _start_save(self, background: bool) -> None:
        if self.phase != "running":
            self.world.agreed(self.folder.own)
        self._leave_behind_if_gone_back()
        self._account()
        self._is_outdated = False
        self.watchdog.save_begins(lambda: self.checkpoints.stage)
        with self.watchdog.during("save"):
            self.checkpoints.start(self.state, background, self.saving.begin(self.state.step))

    def _finish_save(self) -> None:
        """Wait for the save in flight, if there is one, and report it."""
        if self.checkpoints.in_flight:
            self._settle()

    def _settle(self, warns: bool = True) -> SaveResult:
        """Take the result of the save in flight, the same on all ranks, and report it.

        Raises TrainingFailed after too many failures in a row, and where the storage gives no answer.
        """
        with self.watchdog.during("save"):
            result = self.checkpoints.take()
        self.watchdog.save_ends()
        self._save_ended = False
        if result.lost == "storage":
            raise TrainingFailed(f"cannot save: {result.error} (checkpoint.timeout_s)")
        if result.error:
            self.saving.failed()
            limit = self.config.checkpoint.max_failures
            count = f"failure {self.saving.num_failures} of {limit} in a row"
            if self.saving.num_failures >= limit:
                raise TrainingFailed(f"cannot save: {result.error} ({count})")
            if self.world.is_main and warns:
                warn(f"checkpoint not saved, training goes on: {result.error} ({count})")
            return result
        self.saving.succeeded(result.step)
        self._save_s = max(self._save_s, result.total_s)
        self._saved_step = result.step
        if result.warning and self.world.is_main:
            warn(result.warning)
        times = {"blocked_s": result.blocked_s, "total_s": result.total_s}
        self.metrics.write(Record(kind="checkpoint", step=result.step, **times, bytes=result.bytes))
        return result

    def _save_at_the_end(self) -> None:
        """Save for good: wait for what is in flight, and try again a few times if that is what it takes."""
        self._finish_save()
        for pause_s in (0.0, 1.0, 3.0):
            if self._is_saved() or (self.stopping and self.state.step == 0):
                return
            time.sleep(pause_s)
            self._start_save(background=False)
            error = self._settle(warns=False).error
        if not self._is_saved():
            raise TrainingFailed(f"the final save has failed: {error}")

    def load_checkpoint(self, path: str | Path | None = None) -> int | None:
        """Restore the state from `path`, by default from where `checkpoint.resume` says.  Returns its step, or None.

        Any mesh will do.  Nothing is trusted: files are checked, and a damaged checkpoint in this run's folder is set
        aside and the one before it taken.  Raises UserError for a checkpoint that this configuration must not go on
        from, with all that differs; TrainingFailed if none is good.  Collective.
        """
        self._finish_save()
        self.world.agreed(self.folder.own)
        self.world.agreed(self.history.check_place)
        started = time.perf_counter()
        resume = str(path) if path is not None else self.config.checkpoint.resume
        if path is None and self._goes_on(resume):
            resume = "auto"
        allowed = frozenset(self.config.checkpoint.allow_changes)
        if allowed & {"optim", "optim.name", "state.model"}:
            allowed |= {"state.optimizer"}  # begins without moments, if those that are stored do not fit
        how = (self.state, self._compare, allowed, self.phase == "running")
        found: Found | None = None
        if resume == "auto":
            if not self.world.broadcast(self.checkpoints.is_empty):
                found = self.checkpoints.restore(*how)
            if self.phase == "built":
                self.world.agreed(lambda: self.history.check(found))
        elif resume != "none":
            # Rank 0 says which: a run that goes on elsewhere has another newest one in the next moment.
            path = self.world.broadcast(
                self.world.agreed(lambda: str(find_checkpoint(resume)) if self.world.is_main else "")
            )
            found = self.checkpoints.load(find_place(path), *how)
        if found is not None:
            self._unaccounted = None  # an update that is left behind
            self.resumed_step = self.state.step
            self._is_from_elsewhere = not self.world.broadcast(self._is_own(found))
            self._saved_step = None if self._is_from_elsewhere else self.state.step
            if self._is_from_elsewhere or self.world.broadcast(self.history.is_copied(found)):
                self.metrics.wandb_id = None  # another run's line
            if any(line.startswith("data.tokenizer:") for line in self._changed):
                self._keep_tokenizer()
            self._report_found(found)
            self._has_gone_back = self.phase == "running"
            self.phase = "restored" if self.phase == "built" else self.phase
        elif self.phase == "built":
            self._begin_anew()
        self._load_s += time.perf_counter() - started
        return self.resumed_step

    load_weights = staticmethod(load_weights)

    def _begin_anew(self) -> None:
        """Take the weights that the run is to start from, if it names any, and keep what its tokenizer consists of."""
        if self.config.train.init_from is not None:
            self._load_initial_weights(self.config.train.init_from)
        self._keep_tokenizer()

    def _keep_tokenizer(self) -> None:
        tokenizer = self.config.data.tokenizer
        self.origin.tokenizer = self.world.broadcast(
            self.world.agreed(lambda: read_tokenizer(tokenizer) if self.world.is_main else {})
        )

    def _load_initial_weights(self, path: str) -> None:
        """Fill the model from a checkpoint or a folder of safetensors: the weights alone."""
        path = self.world.broadcast(self.world.agreed(lambda: settle_path(path) if self.world.is_main else ""))
        source = self.world.agreed(lambda: open_weights(path, self.config))
        self.world.agreed(lambda: fill(self.model, source, setting="train.init_from"))
        if self.world.is_main and (doubt := doubts(path)):
            warn(doubt)
        self.origin.files = self.world.broadcast(
            self.world.agreed(lambda: origin_of(source).files if self.world.is_main else {})
        )

    def _goes_on(self, resume: str) -> bool:
        """Return whether the newest checkpoint here is of an attempt that had begun as this one is asked to.

        Then this is that attempt started once more, after it was stopped or killed, and what it achieved is not thrown
        away: whoever runs the same command again goes on.  With `none` only if it is the same job, started again.
        """
        if resume == "auto":
            return False

        def is_of_the_same_start() -> bool:
            newest = self.checkpoints.newest_origin() if self.world.is_main else None
            if newest is None or stored_value(newest.config_yaml, "checkpoint.resume") != mask_credentials(resume):
                return False
            env = self.world.env
            is_same_job = newest.job != "" and newest.job == env.job
            return resume != "none" or (is_same_job and newest.restarts < env.num_restarts)

        goes_on: bool = self.world.broadcast(self.world.agreed(is_of_the_same_start))
        if goes_on:
            self.metrics.say(
                f"checkpoint.resume={resume}: {self.config.run.dir} has gone on from there already and does so again; "
                "to begin there once more, take another run.dir"
            )
        return goes_on

    def _compare(self, stored_yaml: str) -> list[str]:
        """Return what in the configuration forbids to go on from a checkpoint."""
        refused, self._changed = compare_configs(self.config, stored_yaml)
        return refused

    def _report_found(self, found: Found) -> None:
        if not self.world.is_main:
            return
        for name, damage in found.damaged.items():
            listed = "\n".join(f"  {line}" for line in damage)
            warn(f"checkpoint {name} is damaged and was set aside:\n{listed}")
        for warning in found.warnings:
            warn(f"{found.path}: {warning}")

    def _is_own(self, found: Found) -> bool:
        return is_same_place(found.path, f"{self.checkpoints.place}/{name_of(found.manifest.step)}")

    def _checkpoints(self) -> Checkpoints:
        config = self.config
        keep = config.checkpoint
        checkpoints = Checkpoints(
            self.world.agreed(lambda: find_place(keep.dir or self.folder.path / "checkpoints")),
            self.world,
            # By then the watchdog has ended the run, unless the process group is somebody else's.
            Settings(keep.keep_last, keep.keep_every, keep.verify == "full", 1.2 * keep.timeout_s + 30.0),
            Facts(config.on_record().to_yaml(), self._mesh_shape(), self.world.env.job, self.world.env.num_restarts),
        )
        # When another rank fails, a save in flight is finished before this process is ended.
        self.world.before_exit.append(lambda patience_s, _: checkpoints.wait(min(patience_s, config.run.timeout_s)))
        return checkpoints

    def _mesh_shape(self) -> dict[str, int]:
        return {REPLICATE: 1, **dict(zip(self.mesh.mesh_dim_names or (SHARD,), self.mesh.shape, strict=True))}

    def _resume_loader_with_state(self) -> None:
        if isinstance(self.loader, TrainLoader):
            self.loader.fingerprint = self.world.broadcast(self.loader.fingerprint)
            self.state.add("loader", self.loader)
        elif hasattr(self.loader, "state_dict"):
            self.state.add("loader", self.loader, per_rank=True)
        self.state.leave_out(self.eval_loader)

    # -- start and end -------------------------------------------------------------------------------------------

    def exempt_from_selfcheck(self) -> Iterable[str]:
        """Return what `run.selfcheck` is to pass over: patterns of parameters' names ("adapter.*"), of keys of the
        configuration and files of code that may differ between ranks, and "data" for the samples; nothing by default.
        """
        return ()

    def _start(self) -> None:
        self.world.agreed(self.folder.own)
        if self.config.run.selfcheck:
            check_start(self.world, self.model, self.mesh, self.ties, self.loader, self.exempt_from_selfcheck())
        opening = (self.folder.metrics, self.resumed_step or 0)
        for work in (
            self._leave_behind,
            self.history.leave_identity,
            self.folder.begin,
            lambda: self.metrics.open(*opening),
        ):
            self.world.agreed(functools.partial(self.folder.using, work))
        self.metrics.wandb_id = self.world.broadcast(self.metrics.wandb_id)
        self.phase = "running"
        self._watch_for_a_stop()
        self._save_s = max(self._save_s, self.metrics.longest_save_s)
        self.folder.write_status("running", None, self.state.step, "")
        self.metrics.start(self._facts())
        if self._choice is not None:
            self.metrics.say(choice_text(self._choice))
        if advice := self.profile.advice(self.state.step):
            self.metrics.say(advice)
        if self._changed:
            self.metrics.say("configuration changed since:\n" + "\n".join(f"  {line}" for line in self._changed))
        self.metrics.write(
            Record(
                kind="start",
                world_size=self.world.size,
                mesh=self._mesh_shape(),
                parameters=count_parameters(self.model),
                trainable_parameters=count_trained_parameters(self.model),
                torch=torch.__version__,
                device=_device_name(self.world.device),
                resumed_step=self.resumed_step,
                started=self._started_at(),
                load_s=self._load_s,
                skipped=self.skips.total,
                **self.metrics.before,
            )
        )
        self._exchange(0)  # whoever asked during the start gets no update, which may compile for minutes

    def _started_at(self) -> float:
        """Return when the command began, or this Trainer, in seconds since 1970."""
        clock, command = self.metrics.clock, take_start()
        return clock.now() - (time.monotonic() - self.started) if command is None else clock.at(command)

    def _watch_for_a_stop(self) -> None:
        """Have rank 0 look for the notice and the deadline.  A notice from before was for an attempt before."""
        if self.world.is_main:
            notice = self.folder.path / NOTICE
            if self._stale_notice and identity(notice) == self._stale_notice:
                notice.unlink(missing_ok=True)
            self.stop.watch(notice, find_deadline(self.config))

    def _leave_behind(self) -> None:
        """Take out of the way what killed attempts have left, and what this attempt is not going on from.

        Asked to start anew (`checkpoint.resume=none`) or from an older checkpoint, the run leaves behind the
        checkpoints past it, which `auto` would otherwise take up again.  Where it goes on from elsewhere, all that are
        here are of another past, and their metrics too.
        """
        if not self.world.is_main:
            return
        self.checkpoints.clean()
        self.folder.clean()
        begins = self.phase != "running" and (self.resumed_step is None or self._is_from_elsewhere)
        step = -1 if begins or self.resumed_step is None else self.resumed_step
        later = [name_of(later) for later in self.checkpoints.steps() if later > step]
        has_past = bool(later)
        if self.config.checkpoint.dir is not None:
            for name in later:
                self.checkpoints.place.set_aside(name, SUPERSEDED)
            later = []
        is_asked = self.config.checkpoint.resume == "none" and self.resumed_step is None
        record = RECORD if begins and (is_asked or has_past) else ()
        self.folder.set_aside(*(f"checkpoints/{name}" for name in later), *record)

    def _leave_behind_if_gone_back(self) -> None:
        """Once training goes on from a checkpoint loaded in mid-run: what came after it is no longer this run's."""
        if self._has_gone_back:
            self._has_gone_back = False
            self.world.agreed(self._leave_behind)
            self.world.agreed(lambda: self.metrics.go_back(self.state.step))

    def _finish(self) -> int:
        if self.phase in ("built", "restored"):
            self.skips.check_end(self.state.step)
            self.metrics.say(
                f"nothing to do: {self.config.run.dir} is at step {self.state.step} of {self.config.train.steps}"
            )
            if self.world.is_main and self.resumed_step is not None and not self.folder.has_finished():
                self.checkpoints.clean()  # of an attempt that was killed after all was saved
                self.folder.write_status("finished", EXIT_FINISHED, self.state.step, "train.steps reached")
            self.folder.release()
            return EXIT_FINISHED
        if self.config.eval.every and self._evaluated_step != self.state.step and not self.stopping:
            self._evaluate()
        self._save_at_the_end()
        if self.stopping:
            reason = self._stop_reason()
            there = "the last good checkpoint: updates were being skipped" if self.skips.in_a_row else "there"
            self.metrics.say(
                f"stopped ({reason}) at step {self.state.step}; the same command goes on from {there}", "yellow"
            )
            self._end("stopped", EXIT_STOPPED, reason)
            return EXIT_STOPPED
        self.skips.check_end(self.state.step)
        self._show_result()
        self._end("finished", EXIT_FINISHED, "train.steps reached")
        return EXIT_FINISHED

    def _end(self, state: str, exit_code: int, reason: str) -> None:
        self.phase = "ended"
        self.watchdog.stop()
        self.checkpoints.wait_for_deleting()
        wall_s = time.monotonic() - self.started
        goodput = min(1.0, self._counted_s / wall_s)
        facts = {"step": self.state.step, "reason": state, "goodput": goodput}
        if self.world.is_main:
            facts |= self.forecast.result()
            for miss in self.forecast.misses():
                self.metrics.say(f"not as planned: {miss}")
        self.metrics.write(Record(kind="end", **facts, **self.metrics.totals()))
        self.folder.write_status(state, exit_code, self.state.step, reason)
        self.metrics.close()
        self.folder.release()
        self.close_loader()

    def _fail(self, error: BaseException) -> None:
        """Record how the run failed.  Calls no collective: the other ranks may be anywhere."""
        self.watchdog.explain(error)
        self.watchdog.stop()
        self.forecast.explain(error)
        first = self.world.announce_failure(error)
        self.checkpoints.wait(self.config.run.timeout_s)  # what is in flight is finished: it is good
        if self.skips.failed_since is not None and (done := self.checkpoints.doubt(self.skips.failed_since)):
            warn(done)
        if isinstance(error, UserError) and self.phase in ("built", "restored"):
            self.folder.release()
            return  # found before training: an existing run stays as it was
        exit_code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
        self._end("failed", exit_code, first or f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        """Record that the run has failed while its main thread hangs, as the watchdog has found.  On another thread."""
        self.folder.write_status("failed", EXIT_FAILED, self.state.step, reason)  # what follows may hang too
        self._end("failed", EXIT_FAILED, reason)

    def close_loader(self) -> None:
        """Stop the loader's worker processes."""
        close = getattr(self.loader, "close", None)
        if callable(close):
            close()

    def close(self) -> None:
        """End the run, if it goes on, and leave the process group, if this Trainer opened it.  All ranks together.

        Called while an exception is on its way (from `finally`), the run has failed: nobody waits for the other ranks.
        """
        error = sys.exc_info()[1]
        if error is not None and error is not self._earlier_error:
            if self.phase != "ended":
                self._fail(error)
            self.close_loader()
            self.folder.release()
            if self.world.size == 1:
                self.world.close()
            return
        try:
            self._finish_save()
            if self.phase == "running":
                self._account()
                if self.state.step >= self.config.train.steps:
                    self.skips.check_end(self.state.step)
        except BaseException as failure:
            self._fail(failure)
            raise
        if self.phase == "running":
            through = self.state.step >= self.config.train.steps
            self._end("finished" if through else "stopped", EXIT_FINISHED if through else EXIT_STOPPED, "closed")
        self.watchdog.stop()
        self.close_loader()
        self.folder.release()
        self.world.close()

    def _show_result(self) -> None:
        """Show what the model has learnt, if it was asked to: bits per byte against gzip, and a sample of its text."""
        if not self.config.log.sample_tokens:
            return
        text = held_out_text(self.config.data) if self.world.is_main else None
        if text:
            self.metrics.say(f"gzip -9 on the same held-out text: {gzip_bits_per_byte(text):.4f} bits/byte", "green")
        tokenizer = find_tokenizer(self.config.data.tokenizer)
        prompt = [*tokenizer.start_ids, *tokenizer.encode("def ").tolist()]
        self.model.eval()
        context = self.config.data.seq_len
        tokens = write_sample(self.model, self.world, prompt, self.config.log.sample_tokens, context)
        reshard(self.model)
        self.model.train()
        self.metrics.say("\na sample that the model wrote:\n", "bold")
        self.metrics.say(tokenizer.decode(tokens))

    # -- what is said --------------------------------------------------------------------------------------------

    def _train_record(self, update: Update, meter: Meter, memory_gib: float) -> Record:
        step_s, data_s, tokens_per_s = meter.read()
        before = self.skips.total - (update.skipped if self._unaccounted is None else 0)  # it is counted late, or now
        return Record(
            kind="train",
            step=self.state.step,
            loss=lambda: update.loss,
            grad_norm=lambda: update.grad_norm,
            lr=self.schedule.lr(self.state.step),
            tokens=self.state.tokens,
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            data_s=data_s,
            mfu=self._mfu(step_s),
            peak_memory_gib=memory_gib,
            skipped=lambda: before + update.skipped,
            **({"profiled": True} if meter.is_profiled else {}),
        )

    def _mfu(self, step_s: float) -> float | None:
        """Return model FLOPs over the devices' peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        peak = peak_flops(self.world.device)
        if peak is None:
            return None
        tokens = self.config.train.global_batch_size * self.config.data.seq_len
        return self.flops_per_token * tokens / step_s / (peak * self.world.size)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of forward and backward for one token, recomputation not counted."""
        return flops_per_token(self.recipe, self.config.model, self.model, self.config.data.seq_len)

    def _facts(self) -> dict[str, str]:
        config, world = self.config, self.world
        axes = zip(self.mesh.mesh_dim_names or (SHARD,), self.mesh.shape, strict=True)
        batch = config.train.global_batch_size
        num_parameters, num_trained = count_parameters(self.model), count_trained_parameters(self.model)
        trained = "" if num_trained == num_parameters else f", {readable_count(num_trained)} of them trained"
        held = sum(bytes_of_training(self.model, config.optim))
        resumed = "" if self.resumed_step is None else f"  (resumed at step {self.resumed_step})"
        return {
            "run": f"{config.run.name} in {config.run.dir}{resumed}",
            "model": f"{config.model.name}, {readable_count(num_parameters)} parameters{trained}, "
            f"{len(self.units)} FSDP units and the root",
            "mesh": " x ".join(f"{name} {size}" for name, size in axes) + f" on {_device_name(world.device)}",
            "memory": f"{readable_bytes(held)} a rank for weights, gradients and optimizer",
            "plan": self.forecast.sentence() if world.is_main else "",
            "update": f"{readable_count(batch * config.data.seq_len)} tokens: {batch} x {config.data.seq_len}, "
            f"{self.num_micro_batches} micro-batches of {config.train.micro_batch_size} on each of {world.size} ranks",
            "data": f"{config.data.source}, {config.train.steps} updates",
        }

    def _optimizer(self) -> Optimizer:
        built = self.world.agreed(self.build_optimizer)
        return built if isinstance(built, Optimizer) else Optimizer(built)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
