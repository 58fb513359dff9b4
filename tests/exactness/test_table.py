"""Each row of the table trains on its mesh as on one rank, and a checkpoint of one rank is resumed there exactly.

Three steps here, after which the same Trainer goes back to the checkpoint. The campaign takes twenty, on more meshes,
and resumes in the middle with a Trainer of its own.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="three of the models are those of transformers")

from tests.exactness import inputs
from tests.exactness.table import FEATURES, ROWS, Row
from tests.exactness.walk import Training, attempt, differences, on_each
from tests.helpers.cases import needs_torch

CHUNK = 6
"""Cases that share their ranks, one after another. Other workers train other chunks meanwhile."""


@dataclass(frozen=True)
class Case:
    """A row on a mesh, and how long it trains."""

    row: Row
    ranks: int
    mesh: tuple[str, ...]
    steps: int = 3
    saved_step: int = 2
    sequences: int = 4
    """Per step, a multiple of the ranks."""
    rounding: float = 1.0
    """By how much more rounding may grow than the row's tolerances say."""
    resumes_anew: bool = False
    """Whether it is resumed by a Trainer of its own."""

    def __str__(self) -> str:
        return f"{self.row.name}, {self.ranks} ranks, {' '.join(self.mesh) or 'all shards'}, {self.steps} steps"

    def training(
        self, folder: Path, mesh: tuple[str, ...], save_at: int = 0, resume: str = "", go_back_to: str = ""
    ) -> Training:
        """Return what is trained, on one rank or on the mesh."""
        name = f"{self.row.name} {'-'.join(self.mesh)} {'resumed' if resume else 'saved' if save_at else 'mesh'}"
        overrides = (*mesh, f"train.global_batch_size={self.sequences}")
        return Training(self.row, folder, name, overrides, self.steps, save_at, resume, go_back_to)


EVERYDAY = [Case(row, row.ranks, row.mesh) for row in ROWS if row.everyday]


def _long(row: Row, ranks: int, mesh: tuple[str, ...]) -> Case:
    if not any(item.startswith("optim.lr=") for item in row.overrides):
        # At the default rate rounding grows: after twenty steps, the norm of qwen3_next would differ by 2e-3.
        row = replace(row, overrides=(*row.overrides, "optim.lr=1e-4"))
    sequences = math.lcm(12, ranks)
    return Case(row, ranks, mesh, steps=20, saved_step=10, sequences=sequences, rounding=10, resumes_anew=True)


def _campaign() -> Iterator[Case]:
    for row in ROWS:
        yield _long(row, row.ranks, row.mesh)
        if not row.mesh:
            yield _long(row, 3, ())
            yield _long(row, 4, ())
            yield _long(row, 4, ("mesh.replicate=2",))
        elif row.ranks == 2 and "mesh.replicate=2" not in row.mesh:
            yield _long(row, 4, (*row.mesh, "mesh.replicate=2"))


CAMPAIGN = list(_campaign())


class Table:
    """What the cases did, each trained once for all workers of pytest-xdist."""

    def __init__(self, folder: Path, chosen: Iterable[Case]) -> None:
        self.folder = folder
        self.chosen = set(chosen)
        folder.mkdir(exist_ok=True)

    def of(self, case: Case) -> dict[str, Any]:
        """Return what `case` did: `alone`, on its `mesh`, and `resumed` there; the text of an error instead of each."""
        alike = [each for each in (*EVERYDAY, *CAMPAIGN) if (each.ranks, each.steps) == (case.ranks, case.steps)]
        number = alike.index(case) // CHUNK
        cases = [each for each in alike[number * CHUNK :][:CHUNK] if each in self.chosen]
        name = f"{case.ranks}-{case.steps}-{number}"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = self.folder / f"{name}.json"
            if not results.exists():
                results.write_text(json.dumps(self._train(cases, self.folder / name)))
        return json.loads(results.read_text())[str(case)]

    def _train(self, cases: list[Case], folder: Path) -> dict[str, dict[str, Any]]:
        shutil.rmtree(folder, ignore_errors=True)  # left by an attempt that failed
        folder.mkdir()
        inputs.write_data(folder)
        kinds = {kind: kind for case in cases for kind in sorted(case.row.weights)}
        for written in on_each(1, partial(inputs.write_weights, folder), kinds, folder).values():
            assert not isinstance(written, str), written
        saving = {str(case): case.training(folder, (), save_at=case.saved_step) for case in cases}
        alone = {name: _of_first_rank(found) for name, found in on_each(1, attempt, saving, folder).items()}
        training, resuming = {}, {}
        for case in cases:
            saved, name = alone[str(case)].get("saved", ""), str(case)
            training[name] = case.training(folder, case.mesh, go_back_to="" if case.resumes_anew else saved)
            if case.resumes_anew and saved:
                resuming[f"{name} resumed"] = case.training(folder, case.mesh, resume=saved)
        on_mesh = on_each(cases[0].ranks, attempt, training | resuming, folder)
        found = {name: _of_first_rank(results) for name, results in on_mesh.items()}
        return {
            name: {
                "alone": own,
                "mesh": found[name],
                "resumed": found.get(f"{name} resumed") or found[name].get("resumed") or found[name],
            }
            for name, own in alone.items()
        }


def _of_first_rank(found: list[Any] | str) -> dict[str, Any]:
    return {"error": found} if isinstance(found, str) else found[0]


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Table:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    own = [item for item in request.session.items if item.path == Path(__file__)]
    run = [item for item in own if not any(mark.args[0] for mark in item.iter_markers("skipif"))]
    specs = [getattr(item, "callspec", None) for item in run]
    return Table(shared / "table", [spec.params["case"] for spec in specs if spec])


TRIED_IN_PAIRS = {"float8", "classify"}
"""Features without a row: `tests/compatibility.py` trains with them, and their own tests compare what they compute."""
MESHES = {"replicate", "context", "tensor", "exchange", "gather"}
"""Features that are meshes of rows."""


def test_every_feature_has_a_row() -> None:
    assert {name for row in ROWS for name in row.features} == FEATURES.keys() - TRIED_IN_PAIRS - MESHES


def assert_same(case: Case, found: dict[str, Any], expected: dict[str, Any], first_step: int = 1) -> None:
    for result in (expected, found):
        assert "error" not in result, result["error"]
    differ, row = differences(found, expected, first_step), case.row
    limits = {"grad_norm": row.norm_tolerance or row.tolerance}
    assert all(differ[name] <= case.rounding * limits.get(name, row.tolerance) for name in differ), differ


def _name(case: Case) -> str:
    return case.row.name.replace(", ", "-").replace(" ", "-")


def _needs_torch(case: Case) -> pytest.MarkDecorator:
    """Skip a case for which this torch is too old: older ones refuse it."""
    overrides = {*case.row.overrides, *case.mesh}.union(*(FEATURES[name].overrides for name in case.row.features))
    needed = "2.11"
    if any(item.startswith("mesh.expert=") for item in overrides) or "few experts" in case.row.name:
        needed = "2.12"
    if any(item.startswith("lora.base_dtype=") for item in overrides):
        needed = "2.13"
    return needs_torch(needed)


CASES = [
    *(pytest.param(case, id=_name(case), marks=_needs_torch(case)) for case in EVERYDAY),
    *(
        pytest.param(case, id=f"{_name(case)}-{case.ranks}-{number}", marks=[pytest.mark.campaign, _needs_torch(case)])
        for number, case in enumerate(CAMPAIGN)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_row_trains_on_its_mesh_as_on_one_rank(case: Case, table: Table) -> None:
    trained = table.of(case)
    assert_same(case, trained["mesh"], trained["alone"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_row_is_resumed_on_its_mesh(case: Case, table: Table) -> None:
    """From a checkpoint of one rank, after the second of three steps, or in the middle."""
    trained = table.of(case)
    assert_same(case, trained["resumed"], trained["alone"], first_step=case.saved_step + 1)
