"""Private parts of torch: where they are used, and that this torch still has them as they are relied upon.

A new use fails the first test until it is in the table with its reason; a torch that has changed one of them fails
the check of its own.
"""

from __future__ import annotations
