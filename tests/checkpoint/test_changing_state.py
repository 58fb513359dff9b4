"""State that changes its form between saves, or differs between ranks, is stored as it is or refused on all ranks."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.helpers.gate import wait_until
from tests.helpers.launch import on_ranks, tiny
from trainer import Trainer, UserError, load_config
from trainer.checkpoint import CheckedWriter, VerifiedReader
from trainer.checkpoint.layout import PlannedTensor
from trainer.checkpoint.planner import ColumnMetadata

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class Own:
    """State of the user's own, of any form."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class OwnTrainer(Trainer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own = Own()
        self.state.add("own", self.own)


def trainer_in(folder: Path | str) -> OwnTrainer:
    return OwnTrainer(load_config("llama_small", [*tiny("train.steps=9", "checkpoint.every=0"), f"run.dir={folder}"]))


FORMS = [
    np.array([0, 0]),
    np.array([0.5, 0.25]),
    torch.ones(2, dtype=torch.int64),
    torch.zeros(0, 2, 2, 2),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    {"a": torch.ones(3), "b": torch.zeros(0)},
    torch.arange(12.0).reshape(3, 4).T,
]


def test_state_may_change_its_form_from_save_to_save(tmp_path: Path) -> None:
    """Its dtype too, with as many bytes as before: a plan or a layout of the save before would be wrong."""
    first = trainer_in(tmp_path)
    for _, form in zip(first.steps(), FORMS, strict=False):
        first.own.value = form
        first.save_checkpoint(wait=True)
        second = trainer_in(tmp_path)
        second.load_checkpoint()
        torch.testing.assert_close(second.own.value, form, rtol=0, atol=0)
        second.close()
    first.close()


DTYPES = (torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def test_writer_is_kept_while_the_state_changes(tmp_path: Path) -> None:
    writer = CheckedWriter(tmp_path / "0")
    for number, dtype in enumerate(DTYPES):
        saved = {"a": {"b": torch.arange(4).to(dtype)}, "empty": torch.zeros(0, 1 + number, dtype=dtype)}
        dcp.save(saved, checkpoint_id=tmp_path / str(number), storage_writer=writer, no_dist=True)
        state = {"a": {"b": torch.zeros(4, dtype=dtype)}, "empty": torch.zeros(0, 1 + number, dtype=dtype)}
        dcp.load(state, storage_reader=VerifiedReader(tmp_path / str(number)), no_dist=True)
        assert torch.equal(state["a"]["b"], saved["a"]["b"]), dtype


def save_empty_parts(folder: Path) -> None:
    """Save tensors of which torch's planner gives the empty one to a rank by itself."""
    torch.distributed.init_process_group("gloo")
    dcp.save({"w": torch.ones(4), "e": torch.zeros(0)}, storage_writer=CheckedWriter(folder / "checkpoint"))
    state = {"w": torch.zeros(4), "e": torch.zeros(0)}
    dcp.load(state, storage_reader=VerifiedReader(folder / "checkpoint"))
    assert state["w"].tolist() == [1, 1, 1, 1]


def test_rank_with_nothing_but_an_empty_tensor(tmp_path: Path) -> None:
    on_ranks(2, save_empty_parts, tmp_path)


def errors_of_three_saves(folder: str) -> tuple[list[str], int]:
    """Return the errors of saves of a state that differs between ranks, that is missing on one, and that is good."""
    trainer = trainer_in(folder)
    rank, errors = trainer.world.rank, []
    steps = trainer.steps()
    next(steps)
    trainer.save_checkpoint(wait=True)
    for value in (rank, object() if rank else 0, 0):
        trainer.own.value = value
        try:
            trainer.save_checkpoint(wait=True)
        except UserError as raised:
            errors.append(str(raised))
        next(steps)
    trainer.save_checkpoint(wait=True)
    trainer.close()
    return errors, max(int(path.name[5:]) for path in Path(folder, "checkpoints").glob("step_*"))


def test_mistake_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """After a good save too; and then the run goes on."""
    (errors, step), (other_errors, _) = on_ranks(2, errors_of_three_saves, str(tmp_path))
    assert errors == other_errors
    assert len(errors) == 2
    assert "state 'own': rank 1 does not hold the same values" in errors[0]
    assert "rank 1: own.value is a object" in errors[1]
    assert step == 4


def test_saved_state_is_released(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    next(iter(trainer.steps()))
    trainer.own.value = torch.ones(1000)
    trainer.save_checkpoint(wait=True)
    saved = weakref.ref(trainer.own.value)
    trainer.own.value = None
    wait_until(lambda: gc.collect() >= 0 and saved() is None, "the thread that saves lets go of it")
    trainer.close()


def test_metadata_are_a_few_bytes_on_the_wire() -> None:
    """torch sends them to every rank."""
    columns = np.zeros((1000, 2), dtype=np.int64)
    metadata = ColumnMetadata({}, planned={"a": PlannedTensor(torch.float32, (9, 9), columns, columns)})
    assert len(pickle.dumps(metadata)) < 200
