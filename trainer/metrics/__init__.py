"""Metrics: one record per logged step, reduced across ranks once and sent to the record writers.

Only rank 0 has record writers: metrics.jsonl, the console, Prometheus, and one per tracker.  A tracker, such as Weights
& Biases, follows metrics.jsonl in a separate thread, so an unreachable server neither stops nor delays training.
"""
