"""Each row of the table trains on its mesh as on one rank, and a checkpoint of one rank is resumed there exactly.

Three steps here; the campaign takes twenty, on more meshes and with the resume in the middle.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="three of the models are those of transformers")

from tests.exactness import inputs
from tests.exactness.table import ROWS, Row
from tests.exactness.walk import attempt, differences, on_each

STEPS, SAVED_STEP = 3, 2
CHUNK = 6
"""Rows that share their ranks, one after another. Other workers train other chunks meanwhile."""


class Table:
    """What the rows did, each trained once for all workers of pytest-xdist."""

    def __init__(self, folder: Path, chosen: Iterable[Row]) -> None:
        self.folder = folder
        self.chosen = {row.name for row in chosen}
        folder.mkdir(exist_ok=True)

    def of(self, row: Row) -> dict[str, Any]:
        """Return what `row` did: `alone`, on its `mesh`, and `resumed` there; the text of an error instead of each."""
        same_ranks = [other for other in ROWS if other.ranks == row.ranks]
        number = same_ranks.index(row) // CHUNK
        rows = [other for other in same_ranks[number * CHUNK :][:CHUNK] if other.name in self.chosen]
        name = f"{row.ranks}-{number}"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = self.folder / f"{name}.json"
            if not results.exists():
                results.write_text(json.dumps(self._train(rows, self.folder / name)))
        return json.loads(results.read_text())[row.name]

    def _train(self, rows: list[Row], folder: Path) -> dict[str, dict[str, Any]]:
        folder.mkdir()
        inputs.write_data(folder)
        kinds = {kind: (kind, folder) for kind in sorted({kind for row in rows for kind in row.weights})}
        on_each(1, inputs.write_weights, kinds, folder)
        runs = {row.name: (row, folder, f"{row.name} alone", (), STEPS, SAVED_STEP, "") for row in rows}
        alone = {name: _of_first_rank(found) for name, found in on_each(1, attempt, runs, folder).items()}
        runs = {row.name: (row, folder, f"{row.name} on its mesh", row.mesh, STEPS, 0, "") for row in rows}
        resumed = {
            f"{row.name} resumed": (row, folder, f"{row.name} resumed", row.mesh, STEPS, 0, alone[row.name]["saved"])
            for row in rows
            if "saved" in alone[row.name]
        }
        found = on_each(rows[0].ranks, attempt, runs | resumed, folder)
        found = {name: _of_first_rank(results) for name, results in found.items()}
        return {
            row.name: {
                "alone": alone[row.name],
                "mesh": found[row.name],
                "resumed": found.get(f"{row.name} resumed", alone[row.name]),
            }
            for row in rows
        }


def _of_first_rank(found: list[Any] | str) -> dict[str, Any]:
    return {"error": found} if isinstance(found, str) else found[0]


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Table:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    return Table(shared / "table", [each.params["row"] for each in params if each])


def assert_same(row: Row, found: dict[str, Any], expected: dict[str, Any], first_step: int = 1) -> None:
    for result in (expected, found):
        assert "error" not in result, result["error"]
    differ = differences(found, expected, first_step)
    assert max(differ.values()) <= row.tolerance, differ


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_row_trains_on_its_mesh_as_on_one_rank(row: Row, table: Table) -> None:
    trained = table.of(row)
    assert_same(row, trained["mesh"], trained["alone"])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_row_is_resumed_on_its_mesh(row: Row, table: Table) -> None:
    """From the checkpoint of one rank after the second of three steps."""
    trained = table.of(row)
    assert_same(row, trained["resumed"], trained["alone"], first_step=SAVED_STEP + 1)
