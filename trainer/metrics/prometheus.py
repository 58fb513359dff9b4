"""Serves the numbers of a run's last records to Prometheus, at `http://HOST:PORT/metrics` on rank 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from trainer.metrics.record import Record, RecordWriter, numeric_fields


class Prometheus(RecordWriter):
    """Serves a gauge for each number of the last `train`, `eval` and `end` record: `meshtrainer_<kind>_<field>`.

    If the port cannot be used, only prints a warning.
    """

    _KINDS = ("train", "eval", "end")

    def __init__(
        self, port: int, run: str, totals: Callable[[], Mapping[str, object]], warn: Callable[[str], None]
    ) -> None:
        """Start serving.

        port: 0 for any free port.
        run: the run's name, attached to every metric as a label.
        totals: returns the end record's fields about all attempts, which are served from the first step on.
        """
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._run, self._totals, self._new_gauge = run, totals, Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self.port = 0
        """The port in use, or 0 if nothing is served."""
        try:
            self._server, _ = start_http_server(port, registry=self._registry)
            self.port = self._server.server_port
        except OSError as error:
            warn(f"log.prometheus={port}: cannot listen on this port ({error}); continuing without it")

    def write(self, record: Record) -> None:
        if record.kind in self._KINDS:
            self._set(record.kind, numeric_fields(record))
        if record.kind == "train":
            self._set("end", numeric_fields(self._totals()))

    def _set(self, kind: str, values: Mapping[str, float]) -> None:
        for field, value in values.items():
            name = re.sub(r"\W", "_", f"meshtrainer_{kind}_{field}", flags=re.ASCII)
            if name not in self._gauges:
                text = f"{field} in the run's {kind} records"
                self._gauges[name] = self._new_gauge(name, text, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def close(self) -> None:
        if self.port:
            self._server.shutdown()
            self._server.server_close()
