"""The defects: each replaces one object of the product, and names the tests that must find it.

Choose an object that will outlive a redesign: a public class or function rather than a helper. Tests that replace the
same object hide the defect.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tests.defects import Defect, Kind, replace
from trainer import Trainer
from trainer.checkpoint.retention import RetentionPolicy
from trainer.checkpoint.stager import Staging
from trainer.checkpoint.storage import LocalStorage, _SyncedFile
from trainer.config.changes import compare_configs
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig, RunSection
from trainer.data.chat.masking import Encoder
from trainer.data.loader import TrainLoader
from trainer.data.mixture import Mixture, make_order, sample_at
from trainer.data.source import sample_content
from trainer.distributed.exchange import scale_gradient
from trainer.distributed.rank_status import find_late
from trainer.distributed.world import World
from trainer.experts import shard_experts
from trainer.experts.dispatch import GROUP_ATTRIBUTE
from trainer.files import crc32
from trainer.lifecycle.owner import _try_to_lock
from trainer.lifecycle.resume import Resume
from trainer.lifecycle.state import RandomState
from trainer.model.gradients import norm_and_clip_factor
from trainer.model.lora import without_adapters
from trainer.model.parameters import local, seed_of, tied_names
from trainer.model.tensor import _Weights
from trainer.optim.adamw import random_bits
from trainer.optim.muon import _assemble
from trainer.optim.optimizer import Optimizer
from trainer.run import report_error
from trainer.sequence import Cache, attend, attention_positions, full_sequences
from trainer.stopping import Stop
from trainer.weights.adapters import MergedSource

DEFECTS: dict[str, Defect] = {}


def defect(
    acts_in: Kind, file: str, words: str = "", timeout_s: int = 0
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function that plants a defect; see `Defect` for the arguments."""

    def register(plant: Callable[[], None]) -> Callable[[], None]:
        name = plant.__name__.replace("_", "-")
        DEFECTS[name] = Defect(name, plant, acts_in, f"tests/{file}", words, timeout_s)
        return plant

    return register


TABLE = "exactness/test_table.py"

# ---------------------------------------------------------------------------------------------------------------
# The step


@defect("ranks", "trainer/test_exactness.py", "plain_pytorch")
def target_miscounted() -> None:
    count = Trainer.count
    Trainer.count = lambda self, batch: count(self, batch) + 1


@defect("ranks", "trainer/test_exactness.py", "plain_pytorch")
def lr_one_late() -> None:
    set_lr, previous = Optimizer.set_lr, WeakKeyDictionary[Optimizer, float]()

    def set_previous(self: Optimizer, lr: float) -> None:
        set_lr(self, previous.get(self, lr))
        previous[self] = lr

    Optimizer.set_lr = set_previous


@defect("ranks", "trainer/test_exactness.py", "plain_pytorch")
def not_clipped() -> None:
    replace(norm_and_clip_factor, lambda model, mesh, max_norm: norm_and_clip_factor(model, mesh, None))


@defect("ranks", TABLE, "replicas and not whole and trains")
def norm_over_replicas() -> None:
    def norm_over_all(model: Any, mesh: Any, max_norm: Any) -> Any:
        norm, factor = norm_and_clip_factor(model, mesh, max_norm)
        return (norm * mesh.size(0) ** 0.5, factor) if mesh.ndim == 2 else (norm, factor)

    replace(norm_and_clip_factor, norm_over_all)


@defect("tests", "trainer/test_host_waits.py", "non_finite")
def skip_forgotten() -> None:
    step = Optimizer.step
    Optimizer.step = lambda self, is_finite=None, scale=None: step(self, None, scale)


@defect("tests", "trainer/test_custom_loops.py", "padding")
def padding_evaluated() -> None:
    count = Trainer.count

    def count_all(self: Trainer, batch: Any) -> float:
        return count(self, batch) if self.model.training else batch["targets"].numel()

    Trainer.count = count_all


# ---------------------------------------------------------------------------------------------------------------
# The model


@defect("tests", "model/test_sharding.py", "weights_depend_on_the_name")
def start_everywhere_alike() -> None:
    replace(seed_of, lambda seed, name: seed)


@defect("tests", "model/test_sharding.py", "tied_table")
def ties_parted() -> None:
    replace(tied_names, lambda model: [])


@defect("tests", "sequence/test_document_isolation.py", "separate_row")
def documents_see_each_other() -> None:
    def attend_to_all(q: Any, k: Any, v: Any, documents: Any = None, dropout: float = 0.0, **options: Any) -> Any:
        return attend(q, k, v, documents if isinstance(documents, Cache) else None, dropout, **options)

    replace(attend, attend_to_all)


@defect("ranks", TABLE, "context-by-gather and trains")
def slices_from_0() -> None:
    def count_from_0(tokens_BT: Any, positions_BT: Any = None, documents: Any = None) -> torch.Tensor:
        with full_sequences():
            return attention_positions(tokens_BT, positions_BT, documents)[..., : tokens_BT.shape[1]]

    replace(attention_positions, count_from_0)


@defect("ranks", TABLE, "tensor-and-context and trains")
def split_weights_with_gradients_of_all_ranks() -> None:
    replace(scale_gradient, lambda x, factor: x)


@defect("ranks", TABLE, "tensor-of-gpt2 and trains")
def biases_added_by_every_rank() -> None:
    parts = _Weights.parts
    _Weights.parts = lambda self: {**parts(self), **{key: self._current(key) for key in self.added_once}}


@defect("ranks", TABLE, "experts-by-gather and trains")
def tokens_of_wrong_experts() -> None:
    def shard_in_reverse(modules: Any, mesh: Any, method: str) -> None:
        shard_experts(modules, mesh, method)
        for module in modules:
            group = getattr(module, GROUP_ATTRIBUTE)
            setattr(module, GROUP_ATTRIBUTE, dataclasses.replace(group, rank=group.size - 1 - group.rank))

    replace(shard_experts, shard_in_reverse)


@defect("ranks", TABLE, "biases-of-experts and trains")
def balance_of_one_rank() -> None:
    sum_on_device = World.sum_on_device
    World.sum_on_device = lambda self, value: value if value.dtype == torch.int64 else sum_on_device(self, value)


@defect("tests", "model/test_lora.py", "merge")
def merged_with_another_scale() -> None:
    init = MergedSource.__init__

    def init_with_twice_the_scale(
        self: MergedSource, base: Any, adapters: Any, scaling: float, *more: Any, **options: Any
    ) -> None:
        init(self, base, adapters, 2 * scaling, *more, **options)

    MergedSource.__init__ = init_with_twice_the_scale


@defect("tests", "trainer/test_objectives.py", "training_follows and dpo and lora")
def reference_with_adapters() -> None:
    @contextmanager
    def with_adapters(model: torch.nn.Module) -> Iterator[None]:
        yield

    replace(without_adapters, with_adapters)


# ---------------------------------------------------------------------------------------------------------------
# The optimizer


@defect("ranks", TABLE, "muon and not normuon and trains")
def muon_rows_of_next_rank() -> None:
    def assemble_from_next(parts: Any, rows: int, columns: int) -> torch.Tensor:
        (first, _), *_ = parts[0]
        return _assemble(parts, rows, columns).roll(first.rows % rows, dims=1)

    replace(_assemble, assemble_from_next)


@defect("tests", "optim/test_rounding.py", "bits")
def rounding_alike() -> None:
    def bits_of_a_shard(origin: torch.Tensor, count: int) -> torch.Tensor:
        is_position = torch.arange(len(origin), device=origin.device) == 1
        return random_bits(torch.where(is_position, 0, origin), count)

    replace(random_bits, bits_of_a_shard)


# ---------------------------------------------------------------------------------------------------------------
# The data


@defect("tests", "data/test_data.py", "order")
def epochs_alike() -> None:
    replace(sample_at, lambda positions, num_samples, seed: sample_at(positions % num_samples, num_samples, seed))


@defect("tests", "trainer/test_custom_loops.py", "data_seed")
def seed_ignored() -> None:
    def order_of_seed_0(source: Any, config: RunConfig) -> Any:
        return make_order(source, dataclasses.replace(config, data=dataclasses.replace(config.data, seed=0)))

    replace(make_order, order_of_seed_0)


@defect("tests", "data/test_data.py", "ranks")
def shares_overlap() -> None:
    init = TrainLoader.__init__
    TrainLoader.__init__ = lambda self, source, *, dp_rank=0, **options: init(self, source, **options)


@defect("tests", "data/test_mixture.py", "across_phases")
def phases_begin_anew() -> None:
    init = Mixture.__init__

    def init_without_totals(self: Mixture, sizes: Any, phases: Any, seed: int) -> None:
        init(self, sizes, phases, seed)
        self._totals = [np.zeros_like(total) for total in self._totals]

    Mixture.__init__ = init_without_totals


@defect("tests", "data/test_chats.py", "mask")
def prompt_trained_on() -> None:
    encode = Encoder.encode

    def encode_with_one_more(self: Encoder, sample: Any, max_tokens: int | None = None) -> Any:
        encoded = encode(self, sample, max_tokens)
        mask = encoded.loss_mask | np.append(encoded.loss_mask[1:], False)
        return dataclasses.replace(encoded, loss_mask=mask)

    Encoder.encode = encode_with_one_more


@defect("tests", "data/test_chats.py", "mask")
def end_of_turn_not_trained_on() -> None:
    encode = Encoder.encode

    def encode_with_one_less(self: Encoder, sample: Any, max_tokens: int | None = None) -> Any:
        encoded = encode(self, sample, max_tokens)
        mask = encoded.loss_mask & np.append(encoded.loss_mask[1:], False)
        return dataclasses.replace(encoded, loss_mask=mask)

    Encoder.encode = encode_with_one_less


@defect("tests", "data/test_data_changes.py", "each_change")
def changed_data_unseen() -> None:
    replace(sample_content, lambda shards: "")


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


@defect("tests", "checkpoint/test_checkpoints.py", "resumes_bit_equal")
def resumed_one_late() -> None:
    load = Trainer.load_checkpoint

    def load_the_next(self: Trainer, path: Any = None) -> int | None:
        step = load(self, path)
        self.state.step += step is not None
        return step

    Trainer.load_checkpoint = load_the_next


@defect("tests", "checkpoint/test_checkpoints.py", "resumes_bit_equal")
def dropout_repeats() -> None:
    RandomState.load_state_dict = lambda self, state: self.restart(0)


@defect("tests", "checkpoint/test_checkpoints.py", "on_disk")
def not_flushed() -> None:
    _SyncedFile.close = lambda self: self._file.close()


@defect("ranks", "checkpoint/test_faults.py", "flipped_bit")
def checksums_alike() -> None:
    replace(crc32, lambda data, value=0: 0)


@defect("ranks", "checkpoint/test_faults.py", "flipped_bit")
def damaged_left_there() -> None:
    LocalStorage.quarantine = lambda self, name, why: None


@defect("tests", "checkpoint/test_faults.py", "retention")
def one_too_many_pruned() -> None:
    obsolete = RetentionPolicy.obsolete
    RetentionPolicy.obsolete = lambda self, before_next=False: obsolete(self, before_next=True)


@defect("ranks", "checkpoint/test_faults.py", "continues_while_storage_hangs")
def saved_while_changing() -> None:
    Staging.copy = lambda self, tensors, boxes: {box.key: local(tensors[box.key]).detach() for box in boxes}


@defect("tests", "lifecycle/test_run_folders.py", "checkpoints_deleted")
def anew_without_a_word() -> None:
    Resume._check_not_lost = lambda self: None


@defect("tests", "config/test_config.py", "resume")
def batch_may_change() -> None:
    def compare_all_but_the_batch(config: RunConfig, stored_yaml: str) -> tuple[list[str], list[str]]:
        refused, permitted = compare_configs(config, stored_yaml)
        return [line for line in refused if not line.startswith("train.global_batch_size")], permitted

    replace(compare_configs, compare_all_but_the_batch)


# ---------------------------------------------------------------------------------------------------------------
# Stops and failures


@defect("ranks", "lifecycle/test_stopping.py", "notice_stops")
def stopped_with_0() -> None:
    fit = Trainer.fit
    Trainer.fit = lambda self: 0 * fit(self)


@defect("tests", "lifecycle/test_stopping.py", "each_signal")
def usr1_not_caught() -> None:
    set_handler = signal.signal

    def set_handler_of_others(signalnum: Any, handler: Any) -> Any:
        return set_handler(signalnum, signal.SIG_IGN if signalnum == signal.SIGUSR1 else handler)

    signal.signal = set_handler_of_others


@defect("tests", "lifecycle/test_stopping.py", "time_to_save")
def no_time_to_save() -> None:
    reason = Stop.reason
    Stop.reason = lambda self, needs_s=0.0: reason(self, needs_s - 1000.0)


@defect("ranks", "lifecycle/test_owner.py", "belongs_to_one_run")
def living_owner_taken_for_dead() -> None:
    replace(_try_to_lock, lambda descriptor, is_new: "ours")


@defect("ranks", "lifecycle/test_watchdog.py", "hanging_rank and data", timeout_s=60)
def hang_unnoticed() -> None:
    RunSection.step_limit_s = property(lambda self: 1e6)  # type: ignore[assignment]  # mypy takes it for a method


@defect("ranks", "distributed/test_processes.py", "names_a_killed")
def dead_rank_unnamed() -> None:
    def find_late_among_answers(statuses: Any) -> Any:
        return find_late([status for status in statuses if status.is_responding])

    replace(find_late, find_late_among_answers)


# ---------------------------------------------------------------------------------------------------------------
# Messages


@defect("ranks", "distributed/test_processes.py", "one_message")
def said_by_every_rank() -> None:
    def report_as_rank_0(error: Any, env: Any, exit_code: int = 2) -> int:
        return report_error(error, dataclasses.replace(env, rank=0), exit_code)

    replace(report_error, report_as_rank_0)


@defect("tests", "config/test_mistakes.py", "one_message")
def folder_touched_by_a_mistake() -> None:
    def check_after_writing(config: RunConfig, *more: Any) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "config.yaml").write_text(config.to_yaml())
        check_config(config, *more)

    replace(check_config, check_after_writing)
