"""No plans in tests whose subject is something else: a plan takes as long as three steps, and changes none."""

from __future__ import annotations

import pytest

from trainer import UserError
from trainer.plan import forecast


def refuse(*arguments: object, **options: object) -> None:
    raise UserError("this test makes no plan")


def make_no_plan() -> None:
    """Let this process train without plans, as a model that cannot be traced: for ranks that a test has forked."""
    forecast.make_plan = refuse  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for runs in this process, until the end of the test."""
    monkeypatch.setattr(forecast, "make_plan", refuse)
