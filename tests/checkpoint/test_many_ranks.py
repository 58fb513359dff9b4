"""What each of several ranks writes and reads: its own share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.runs import RUN
from tests.helpers.faults import Fault
from tests.helpers.launch import merged, run
from tests.helpers.runs import SharedRun
from trainer import load_weights

pytestmark = pytest.mark.slow


def test_each_rank_writes_an_equal_share(four: SharedRun) -> None:
    """On 2 x 2 ranks, two have the same rows: of these, each writes half, and nothing is there twice."""
    sizes = [path.stat().st_size for path in (four.checkpoints / "step_00000012").glob("*.distcp")]
    weights_and_moments = 3 * sum(tensor.nbytes for tensor in load_weights(four.folder).state_dict().values())
    assert len(sizes) == 4
    assert weights_and_moments <= sum(sizes) < 2 * weights_and_moments, "each tensor has a header"
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_rank_reads_only_its_own_rows(ranks: int, tmp_path: Path) -> None:
    """And what all ranks have alike, which the first one has written."""
    folder, own = tmp_path / "run", merged(RUN, [f"nproc={ranks}", "train.global_batch_size=4"])
    run(folder, *merged(own, ["train.steps=2"]))
    fault = Fault(tmp_path / "notes", below=folder / "checkpoints" / "step_00000002")
    run(folder, *merged(own, ["train.steps=3", "checkpoint.verify=sizes"]), variables=fault.variables)
    for rank in range(ranks):
        opened = {line.rpartition("/")[2] for line in fault.files(rank) if line.endswith(".distcp")}
        assert opened | {"__0_0.distcp"} == {"__0_0.distcp", f"__{rank}_0.distcp"}
