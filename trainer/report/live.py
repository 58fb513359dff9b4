"""Live report pages: rewritten while runs are in progress, or generated when a browser asks for them."""

from __future__ import annotations

import http.server
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer.errors import UserError, setting_error
from trainer.files import symlink_target_outside
from trainer.report.history import read_run
from trainer.report.page import REFRESH_S, render_comparison, render_page

ADDRESS = "127.0.0.1"
"""The only address on which pages are served."""
PORT = 8123
"""The default port."""
_CONTENT_TYPES = {".gz": "application/gzip", ".pickle": "application/octet-stream"}
"""Content types of profile files, by suffix."""


def watch(folders: Sequence[Path], write: Callable[[], object], pause: Callable[[float], None] = time.sleep) -> None:
    """Write the page, then rewrite it whenever the runs have new data, until no run is in progress."""
    written = None
    while True:
        states = [read_run(folder).state for folder in folders]
        current = data_version(folders), states  # a killed run's files do not change, but its state does
        if current != written:
            write()
            written = current
        if "running" not in states:
            return
        pause(REFRESH_S)


def data_version(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Return a value that changes whenever a run records new data: the modification times and sizes of its files."""
    stamps = []
    for path in (folder / name for folder in folders for name in ("metrics.jsonl", "status.json")):
        try:
            stat = path.stat()
            stamps.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            stamps.append((0, 0))
    return stamps


class PageCache:
    """Generates the page for the given runs, and caches it until there is new data, for at most `REFRESH_S` seconds."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._stamp: object = None
        self._page = b""

    def page(self) -> bytes:
        # The files of a killed run no longer change, so the page is also regenerated periodically.
        stamp = data_version(self._folders), int(time.monotonic() / REFRESH_S)
        if stamp != self._stamp:
            runs = [read_run(folder) for folder in self._folders]
            is_single = len(runs) == 1
            html = render_page(runs[0], runs[0].folder, is_served=True) if is_single else render_comparison(runs)
            self._page, self._stamp = html.encode(), stamp
        return self._page

    def file(self, path: str) -> Path | None:
        """Return the profile file at `path`, the path in the URL of a request.

        Returns None if there is no such file, or if the page shows several runs.
        """
        parts = path.strip("/").split("/")
        if len(self._folders) != 1 or len(parts) != 2 or parts[0] != "profile":
            return None
        folder = self._folders[0] / "profile"
        is_inside = symlink_target_outside(self._folders[0], "profile") is None  # a symlink may point anywhere
        names = [file.name for file in folder.glob("*") if file.is_file()] if is_inside else []
        files = {name: folder / name for name in names if symlink_target_outside(folder, name) is None}
        return files.get(parts[1])


class Server(http.server.ThreadingHTTPServer):
    """Serves the page of the given runs, on localhost only; other machines can connect through an SSH tunnel."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = PORT) -> None:
        self.page_cache = PageCache(folders)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            rule = f"cannot be used ({getattr(error, 'strerror', None) or error})"
            raise setting_error("--serve", port, rule, fix="choose another, or 0 for any free port") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (ADDRESS, "localhost"):  # reject DNS rebinding by other sites
            return self.send_error(HTTPStatus.FORBIDDEN)
        path = unquote(urlsplit(self.path).path)
        try:
            if path == "/":
                return self._answer(self.server.page_cache.page(), "text/html; charset=utf-8")
            if path == "/favicon.ico":  # requested by browsers, which log an error on 404
                return self._answer(b"", "image/x-icon")
            if (file := self.server.page_cache.file(path)) is not None:
                return self._answer(file.read_bytes(), _CONTENT_TYPES.get(file.suffix, "application/octet-stream"))
        except (OSError, UserError) as error:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
        return self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, content: bytes, content_type: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because a page that refreshes itself would flood the terminal."""


def serve(folders: Sequence[Path], port: int, print_line: Callable[[str], object]) -> None:
    """Serve the page until Ctrl-C.  Raises UserError if the port is taken or a folder does not hold a run."""
    for folder in folders:
        read_run(folder)
    with Server(folders, port) as server:
        print_line(f"{server.url} (press Ctrl-C to stop)")
        port = server.server_port
        print_line(f"from another machine: ssh -L {port}:{ADDRESS}:{port} THIS_MACHINE, then open the same address")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
