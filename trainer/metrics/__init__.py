"""Creates a run's metrics records, such as one per logged step, and sends them to record writers.

Metrics are reduced across ranks once, for all writers.  Only rank 0 has record writers: for metrics.jsonl, samples.txt,
the console, Prometheus, and each tracker.  The writer for a tracker, such as Weights & Biases, has a thread of its own,
so an unreachable server neither stops nor delays training.

The package also contains hooks, the profiler, the stop criterion, the computation of goodput, and the
specifications of devices.
"""
