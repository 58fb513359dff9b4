"""Creates the records of a run's metrics, such as one per logged step, and sends them to record writers.

Metrics are reduced across ranks once, for all writers.  Only rank 0 has record writers: for metrics.jsonl, samples.txt,
the console, Prometheus, and each tracker.  The writer for a tracker, such as Weights & Biases, follows metrics.jsonl in
a separate thread, so an unreachable server neither stops nor delays training.
"""
