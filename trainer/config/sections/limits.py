"""Limits and spellings that several sections share."""

from __future__ import annotations

WEEK_S = 7 * 24 * 3600.0
"""The longest time limit: what waits for ranks counts milliseconds in 32 bits, and three of these."""

MAX_SIZE = 2**31 - 1
"""The largest count of what becomes a size of a tensor."""

DTYPES = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "torch.float32"), "float32"),
}
"""What dtypes are called elsewhere."""

AUTO = "auto"
"""The value of the keys that the planner settles, before anything is built."""

NUMBER_OR = "a whole number or "
"""What keys are like that take a number or one word."""
