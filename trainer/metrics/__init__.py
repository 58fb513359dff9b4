"""Metrics: one record per step, reduced once across ranks and sent to the sinks.

Only rank 0 has sinks: metrics.jsonl, the console, Prometheus, and trackers such as Weights & Biases, which follow
metrics.jsonl in separate threads.  A tracker that loses its server never stops or delays training.
"""
