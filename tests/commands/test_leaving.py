"""Commands that will leave the project: each still starts, and refuses what it cannot do."""

from __future__ import annotations

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.runs import SharedRun


@pytest.mark.campaign
def test_runs_lists_a_run(one: SharedRun) -> None:
    listed = meshtrainer("runs", one.folder.parent)
    assert listed.code == 0, listed.err
    assert one.folder.name in listed.out


@pytest.mark.parametrize("command", ["submit", "sweep", "widths"])
def test_without_arguments_it_is_a_mistake(command: str) -> None:
    refused = meshtrainer(command)
    assert refused.code == 2
    assert "Traceback" not in refused.err
