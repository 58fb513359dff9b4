"""The writer of a run's checkpoints: adds the run's own files, and deletes obsolete checkpoints if the disk is full."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.checked_writer import CheckedWriter
from trainer.checkpoint.manifest import CONFIG, STATE, checkpoint_name, rank_file
from trainer.checkpoint.messages import DiskFull
from trainer.checkpoint.planner import ColumnSavePlanner
from trainer.checkpoint.snapshot import Snapshot

if TYPE_CHECKING:
    from trainer.checkpoint.saves import Checkpoints
    from trainer.lifecycle.state import TrainState


class RunWriter(CheckedWriter):
    """Writes the checkpoints of a run, one after another.  It is given each by `begin`, on the main thread."""

    def __init__(self, checkpoints: Checkpoints, planner: ColumnSavePlanner, torch_metadata: bool) -> None:
        super().__init__(f"{checkpoints.storage}/{checkpoint_name(0)}", torch_metadata)
        self._checkpoints, self._planner = checkpoints, planner
        self.throttle = self._pause_during_steps

    def begin(self, state: TrainState, snapshot: Snapshot) -> None:
        """Write this snapshot of the state next."""
        self._state, self._snapshot, self.limits = state, snapshot, snapshot.limits
        self._parent, self._name = self._checkpoints.storage, checkpoint_name(snapshot.step)
        self.checkpoint_id = f"{self._parent}/{self._name}"

    def end(self) -> None:
        """Release the state."""
        self._snapshot, self.limits = Snapshot(self._snapshot.step), {}

    @property
    def may_prune(self) -> bool:
        """False if steps were being skipped at the snapshot or are now: older checkpoints may be the only good ones."""
        return self._snapshot.num_skipped == 0 and self._state.num_skipped == 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._checkpoints.doing(f"creating {self.checkpoint_id}"):
            return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._checkpoints.doing(f"writing {self.checkpoint_id}"):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._checkpoints.doing(f"publishing {self.checkpoint_id}"):
            super().finish(metadata, results)
        self._checkpoints.retention.record_published(self.manifest)

    def make_room(self, plans: Sequence[SavePlan]) -> None:
        """Check the free space; delete checkpoints that this one will make obsolete if the disk is too full for it."""
        self._checkpoints.wait_for_deletion()
        num_bytes = self._planner.num_bytes
        try:
            self.check_space(num_bytes)
        except DiskFull:
            if not self.may_prune:
                raise
            for name in self._checkpoints.retention.obsolete(before_next=True):
                self._parent.delete(self._parent.unpublish(name))
            self.check_space(num_bytes)

    def rank_files(self) -> Mapping[str, bytes]:
        return {rank_file(self._rank): self._snapshot.rank_state(self._planner.differing_keys)}

    def shared_files(self) -> Mapping[str, bytes]:
        return {
            STATE: self._snapshot.shared_state(self._planner.differing_keys),
            CONFIG: self._checkpoints.run_info.config_yaml.encode(),
        }

    def manifest_fields(self) -> Mapping[str, Any]:
        info, snapshot, retention = self._checkpoints.run_info, self._snapshot, self._checkpoints.retention
        return {
            "mesh": dict(info.mesh),
            "job": info.job,
            "restarts": info.restarts,
            "run_dir": info.run_dir,
            "num_skipped": snapshot.num_skipped,
            "replaced_steps": list(snapshot.replaced_steps),
            "evaluation": dict(snapshot.evaluation),
            "metric": retention.metric,
            "higher_is_better": retention.higher_is_better,
        }

    def _pause_during_steps(self, worked_s: float) -> None:
        """Pause for as long as the write took, to leave memory bandwidth and caches to the current step."""
        if self._checkpoints.is_throttled:
            time.sleep(worked_s)
