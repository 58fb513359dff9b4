"""The mean number of keys per query in causal attention, for counting FLOPs."""

from __future__ import annotations


def mean_num_keys(seq_len: float, window: int | None) -> float:
    """Return the mean number of keys per query in causal attention.  The result is too low by at most half a key.

    seq_len: number of tokens in a sequence; may be a mean.
    window: maximum number of keys per query, including the query's own token; None if there is no window.
    """
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)
