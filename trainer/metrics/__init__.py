"""Metrics: one record a step, reduced once, handed to sinks (console, metrics.jsonl, W&B, TensorBoard).

Only rank 0 has sinks.  A sink that loses its server never stops or holds up training.
"""
