"""Cases of parametrized tests."""

from __future__ import annotations

from typing import Any

import pytest


def in_campaign(*cases: Any) -> list[Any]:
    """Return cases that only the campaign runs. A tuple is a case of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.campaign) for case in cases]
