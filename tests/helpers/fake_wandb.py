"""A minimal Weights & Biases server: just enough for its client to record a run's history and to resume the run."""

from __future__ import annotations

import http.server
import json
import threading
import time
from typing import Any


class FakeWandbServer(http.server.ThreadingHTTPServer):
    """Stores the rows of one run.

    While `is_unresponsive` is set, clients wait for an answer.  To simulate an outage, `stop` the server, and later
    start another one on the same port.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0, rows: dict[int, str] | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.rows: dict[int, str] = {} if rows is None else rows
        """The lines of the run's history by their number, as the client has sent them."""
        self.is_unresponsive = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(self.rows[number]) for number in sorted(self.rows)]

    @property
    def losses(self) -> list[float | None]:
        return [row.get("train/loss") for row in self.history]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeWandbServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.is_unresponsive.is_set():
            time.sleep(60)
        answer: dict[str, Any] = {}
        if self.path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            self.server.rows |= dict(enumerate(history["content"], start=history["offset"]))
        if self.path == "/graphql":
            asked = json.loads(body)
            answer = {"data": self._data(asked["query"], asked["variables"])}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_POST  # noqa: N815

    def _data(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            project = {"id": "1", "name": "project", "entity": {"id": "2", "name": "entity"}}
            bucket = {"id": "3", "name": variables["name"], "displayName": "run", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "RunResumeStatus" in query and self.server.rows:
            rows = [self.server.rows[number] for number in sorted(self.server.rows)]
            bucket = {
                "name": variables["name"],
                "displayName": "run",
                "summaryMetrics": rows[-1],
                "historyLineCount": len(rows),
                "logLineCount": 0,
                "eventsLineCount": 0,
                "historyTail": json.dumps(rows[-1:]),
                "eventsTail": "[]",
                "config": "{}",
                "tags": [],
                "notes": None,
                "wandbConfig": json.dumps({"t": 1}),
            }
            return {"model": {"name": "project", "entity": {"name": "entity"}, "bucket": bucket}}
        if "createRunFiles" in query:
            host, port = self.server.server_address[:2]
            files = [{"name": name, "uploadUrl": f"http://{host!s}:{port}/file"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return {}
