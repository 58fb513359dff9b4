"""The tests of this folder compute with one thread, and make no plans."""

from __future__ import annotations

from tests.helpers.no_plan import no_plan
from tests.helpers.threads import one_thread

__all__ = ["no_plan", "one_thread"]
