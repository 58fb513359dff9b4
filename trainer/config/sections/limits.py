"""Limits and value aliases shared by several sections."""

from __future__ import annotations

WEEK_S = 7 * 24 * 3600.0
"""The longest time limit.  Waiting for ranks counts milliseconds in 32 bits, and up to three such limits add up."""

MAX_SIZE = 2**31 - 1
"""The largest value of a key that becomes the size of a tensor dimension."""

DTYPES = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "torch.float32"), "float32"),
}
"""Other spellings of dtypes, for which error messages suggest ours."""

AUTO = "auto"
"""The value that leaves a setting to the trainer; the planner resolves most of these before anything is built."""

NUMBER_OR = "a whole number or "
"""Start of the `form` of keys that take a number or one word."""
