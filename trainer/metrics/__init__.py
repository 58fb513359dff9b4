"""Metrics: one record per step, reduced once across ranks and passed to sinks (console, metrics.jsonl, W&B, TensorBoard).

Only rank 0 has sinks.  A sink that loses its server never stops or delays training.
"""
