"""Metrics: one record per step, reduced once across ranks and sent to the record writers.

Only rank 0 has record writers: metrics.jsonl, the console, Prometheus, and one per tracker.  A tracker, such as Weights
& Biases, follows metrics.jsonl in a separate thread: if it loses its server, it neither stops nor delays training.
"""
