"""Cases of parametrized tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion


def in_campaign(*cases: Any) -> list[Any]:
    """Return cases that only the campaign runs. A tuple is a case of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.campaign) for case in cases]


def campaign_except(names: Iterable[str], everyday: Collection[str]) -> list[Any]:
    """Return a case for each name; only the campaign runs those that are not in `everyday`."""
    return [name if name in everyday else pytest.param(name, marks=pytest.mark.campaign) for name in names]


def needs_torch(version: str) -> pytest.MarkDecorator:
    """Skip a test with an older torch, which the project refuses for what is tested."""
    return pytest.mark.skipif(TorchVersion(torch.__version__) < version, reason=f"needs torch {version}")
