"""Serves a run's current state in Prometheus's text format at `http://HOST:PORT/metrics`, on rank 0.

The endpoint exposes what alerts and dashboards need: whether the run is making progress, how well it trains, and where
its time goes.  Everything else is in `metrics.jsonl`.
"""

from __future__ import annotations

import http.server
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from trainer.metrics.goodput import TimeLedger
from trainer.metrics.record import Record, RecordWriter

PREFIX = "meshtrainer"

_GAUGES = (
    ("loss", "loss", "Loss of the last recorded step."),
    ("grad_norm", "grad_norm", "Gradient norm of the last recorded step, before clipping."),
    ("lr", "learning_rate", "Learning rate of the last recorded step."),
    ("tokens_per_s", "tokens_per_second", "Target tokens per second over all ranks."),
    ("step_s", "step_seconds", "Mean step time in seconds."),
    ("data_s", "data_wait_seconds", "Mean time per step spent waiting for data, in seconds."),
    ("mfu", "mfu", "Model FLOPs utilization."),
    ("peak_memory_gib", "peak_memory_gib", "Peak memory in GiB, maximum over ranks."),
)
"""The metrics taken from `train` records: the record's field, the metric's name, and its help text."""


class Prometheus(RecordWriter):
    """Serves the metrics over HTTP.  If the port cannot be used, only prints a warning."""

    def __init__(self, port: int, run: str, warn: Callable[[str], None]) -> None:
        """Start serving.  port: 0 for any free port.  run: the run's name, attached to every metric as a label."""
        self._run = run
        self._lock = threading.Lock()
        self._ledger = TimeLedger()
        self._latest: dict[str, Record] = {}
        self._step = 0
        self._last_step_at = 0.0
        self._server: _Server | None = None
        try:
            self._server = _Server(port, self.render)
        except (OSError, OverflowError) as error:
            warn(f"log.prometheus={port}: cannot listen on this port ({error}); continuing without it")

    @property
    def port(self) -> int:
        """The port in use, or 0 if nothing is served."""
        return 0 if self._server is None else int(self._server.server_address[1])

    def progress(self, step: int) -> None:
        """Record that a step has completed."""
        self._step, self._last_step_at = step, time.time()

    def write(self, record: Record) -> None:
        with self._lock:
            self._ledger.add(record)
            self._latest[record.kind] = record
            if record.kind == "start":
                self._step = record.get("resumed_step") or 0

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def render(self) -> str:
        """Return the metrics in Prometheus's text format."""
        with self._lock:
            return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        train, evaluation = self._latest.get("train"), self._latest.get("eval")
        self._ledger.add(Record(time=time.time()))
        total = self._ledger.total()
        yield from self._metric("step", "Completed steps.", self._step)
        yield from self._metric(
            "last_step_timestamp_seconds", "Time of the last completed step; its age shows a stall.", self._last_step_at
        )
        if train is not None:
            yield from self._metric("tokens_total", "Target tokens so far.", train["tokens"], kind="counter")
            yield from self._metric("skipped_steps_total", "Skipped steps.", train.get("skipped"), kind="counter")
            for field, name, help_text in _GAUGES:
                yield from self._metric(name, help_text, train.get(field))
        if evaluation is not None:
            yield from self._metric("eval_loss", "Loss of the last evaluation.", evaluation["loss"])
        yield from self._metric(
            "goodput", "Fraction of wall time spent in productive steps, over all attempts.", total.fraction
        )
        yield from self._metric("restarts_total", "Restarts.", total.restarts, kind="counter")
        yield from self._metric(
            "lost_steps_total", "Steps that were repeated after a crash.", total.lost_steps, kind="counter"
        )
        name = f"{PREFIX}_time_seconds"
        yield f"# HELP {name} Wall time of all attempts by activity; all parts but update are overhead.\n"
        yield f"# TYPE {name} gauge\n"
        for part, seconds in {**total.parts(), "other_s": total.other_s}.items():
            yield f'{name}{{run="{_escape_label(self._run)}",part="{part.removesuffix("_s")}"}} {seconds:.10g}\n'

    def _metric(self, name: str, help_text: str, value: Any, kind: str = "gauge") -> Iterator[str]:
        if not isinstance(value, (int, float)):
            return
        number = value if isinstance(value, int) else _format_number(value)
        yield f"# HELP {PREFIX}_{name} {help_text}\n# TYPE {PREFIX}_{name} {kind}\n"
        yield f'{PREFIX}_{name}{{run="{_escape_label(self._run)}"}} {number}\n'


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.10g}"
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Server(http.server.ThreadingHTTPServer):
    """Answers GET /metrics in threads that end with the process."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, render: Callable[[], str]) -> None:
        super().__init__(("", port), _Handler)
        self.render = render
        threading.Thread(target=self.serve_forever, name="prometheus", args=(0.2,), daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10.0
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        content = self.server.render().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass  # keep the console for the run
