"""No plans in tests whose subject is something else: a plan takes as long as three steps, and changes none.

`tests/conftest.py` applies this to runs in the test's own process. Runs that are started as processes of their own
make plans, and so do the tests in `tests/plan/`.
"""

from __future__ import annotations

from trainer import UserError
from trainer.plan import forecast


def refuse(*arguments: object, **options: object) -> None:
    """Do what a plan does for a model that cannot be traced."""
    raise UserError("this test makes no plan")


def make_no_plan() -> None:
    """Let this process train without plans: for ranks that a test has forked to call a function."""
    forecast.make_plan = refuse  # type: ignore[assignment]
