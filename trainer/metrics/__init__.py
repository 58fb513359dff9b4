"""Metrics: one record per step, reduced once across ranks and sent to the sinks.

The sinks are the console, metrics.jsonl, Weights & Biases and TensorBoard; only rank 0 has them.  A sink that loses its
server never stops or delays training.
"""
