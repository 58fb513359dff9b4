"""A fake Hugging Face Hub: a local server for the parts of the protocol that downloads and uploads use.

Repositories are in memory.  A commit's id is a hash of its files.  Files ending in `.safetensors`, `.gguf`, `.bin` or
`.parquet` are LFS files, identified by SHA-256; all others are git blobs.  The server records every request, and counts
the bytes sent of each file.  `delay` slows downloads down, so that a test can kill a process during one.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LARGE = (".safetensors", ".gguf", ".bin", ".parquet")
_BLOCK = 1 << 14


@dataclass
class FakeRepository:
    """Commits by id, and the branches and tags that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        """Replace the files of a branch, and return the id of the new commit."""
        digest = hashlib.sha1()
        for name, content in sorted(files.items()):
            digest.update(f"{name}:{len(content)}:".encode() + content)
        self.commits[digest.hexdigest()] = dict(files)
        self.refs[revision] = digest.hexdigest()
        return digest.hexdigest()


def checksum_of(name: str, content: bytes) -> str:
    if name.endswith(_LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class FakeHub:
    """The server, to be used as a context manager.  `url` is the value for HF_ENDPOINT."""

    token = "hf_aTokenThatMayDoEverything"

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], FakeRepository] = {}
        self.requests: list[str] = []
        self.sent: Counter[str] = Counter()
        """Bytes of files sent, by path."""
        self.delay = 0.0
        """Seconds between two blocks of a file."""
        self.is_down = False
        self.breaks_after = 0
        """Number of bytes after which the connection of a download is cut; 0: never."""
        self.num_damaged = 0
        """Number of files that are still to be sent with a flipped bit."""
        self.uploads: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, files: dict[str, bytes], kind: str = "model", **settings: bool) -> str:
        """Commit files to the main branch of a repository, creating it if necessary; return the commit's id."""
        repository = self.repositories.setdefault((kind, repo), FakeRepository(**settings))
        return repository.commit(files)

    def add_folder(self, repo: str, folder: Path, kind: str = "model", **settings: bool) -> str:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.add(repo, files, kind, **settings)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with its cache in `home`."""
        cleared = dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), "")
        proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        own = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        folders = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        return {**cleared, **proxies, **own, **folders, **more}


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    # -- answers

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(content).encode(), Content_Type="application/json")

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._answer(status, body, X_Error_Code=code, X_Error_Message=message, Content_Type="application/json")

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _repository(self, kind: str, repo: str) -> FakeRepository | None:
        """Return the repository, or None after refusing the request as the Hub does."""
        found = self.hub.repositories.get((kind, repo))
        if found is None or (found.is_private and not self._has_token):
            self._refuse(401 if not self._has_token else 404, "RepoNotFound", "Repository not found")
        elif found.is_gated and not self._has_token:
            self._refuse(401, "GatedRepo", f"Access to {kind} {repo} is restricted.")
        else:
            return found
        return None

    def _begin(self) -> urllib.parse.SplitResult | None:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.is_down:
            self._answer(503)
            return None
        return urllib.parse.urlsplit(self.path)

    # -- reading

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if (url := self._begin()) is None:
            return
        path = urllib.parse.unquote(url.path)
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2], found[3] or "main")
        elif found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/tree/(.+)", path):
            self._tree(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file("dataset" if found[1] else "model", found[2], found[3], found[4])
        elif path == "/api/whoami-v2":
            self._json({"name": "tester", "type": "user"}) if self._has_token else self._answer(401)
        else:
            self._answer(404)

    def _info(self, kind: str, repo: str, revision: str) -> None:
        if (repository := self._repository(kind, repo)) is None:
            return
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        siblings = []
        for name, content in sorted(repository.commits[commit].items()):
            row: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if name.endswith(_LARGE):
                row["lfs"] = {"sha256": checksum_of(name, content), "size": len(content), "pointerSize": 130}
            else:
                row["blobId"] = checksum_of(name, content)
            siblings.append(row)
        self._json({"id": repo, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def _tree(self, kind: str, repo: str, revision: str) -> None:
        if (repository := self._repository(kind, repo)) is None:
            return
        rows = []
        for name, content in sorted(repository.commits[repository.refs.get(revision, revision)].items()):
            oid = checksum_of(name, content)
            lfs = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if name.endswith(_LARGE) else {}
            rows.append({"type": "file", "path": name, "size": len(content), "oid": oid, **lfs})
        self._json(rows)

    def _file(self, kind: str, repo: str, revision: str, name: str) -> None:
        if (repository := self._repository(kind, repo)) is None:
            return
        commit = repository.refs.get(revision, revision)
        content = repository.commits.get(commit, {}).get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        start = 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{checksum_of(name, content)}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.num_damaged:
            self.hub.num_damaged -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        for offset in range(start, len(content), _BLOCK):
            if self.hub.breaks_after and offset - start >= self.hub.breaks_after:
                self.close_connection = True
                self.connection.close()
                return
            block = content[offset : offset + _BLOCK]
            try:
                self.wfile.write(block)
                self.wfile.flush()
            except OSError:
                return
            self.hub.sent[name] += len(block)
            if self.hub.delay:
                time.sleep(self.hub.delay)

    # -- publishing

    def do_POST(self) -> None:
        if (url := self._begin()) is None:
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urllib.parse.unquote(url.path)
        if path == "/api/validate-yaml":  # of a model card
            is_card = json.loads(body)["content"].startswith("---\n")
            self._json({"warnings": [], "errors": []} if is_card else {"errors": [{"message": "no metadata"}]})
        elif not self._has_token:
            self._refuse(401, "", "Invalid username or password.")
        elif path == "/api/repos/create":
            request = json.loads(body)
            repo = f"{request.get('organization') or 'tester'}/{request['name']}"
            is_private = bool(request.get("private")) or request.get("visibility") == "private"
            if ("model", repo) in self.hub.repositories:
                self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}, 409)
                return
            self.hub.repositories["model", repo] = FakeRepository(is_private=is_private)
            self.hub.repositories["model", repo].commit({})
            self._json({"url": f"{self.hub.url}/{repo}", "name": repo})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", path):
            files = [
                {
                    **{"path": each["path"], "shouldIgnore": False},
                    "uploadMode": "lfs" if each["path"].endswith(_LARGE) else "regular",
                }
                for each in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._upload_of(each) for each in json.loads(body)["objects"]]
            self._json({"transfer": "basic", "objects": objects})
        elif path == "/lfs/verify":
            request = json.loads(body)
            is_there = len(self.hub.uploads.get(request["oid"], b"")) == request["size"]
            self._answer(200 if is_there else 422)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(found[1], found[2], body)
        else:
            self._answer(404)

    def _upload_of(self, each: dict[str, Any]) -> dict[str, Any]:
        if each["oid"] in self.hub.uploads:
            return each
        upload = {"href": f"{self.hub.url}/lfs/upload/{each['oid']}", "header": {}}
        return {**each, "actions": {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/verify", "header": {}}}}

    def do_PUT(self) -> None:
        if (url := self._begin()) is None:
            return
        oid = url.path.rpartition("/")[2]
        content = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if hashlib.sha256(content).hexdigest() != oid:
            self._answer(400)
            return
        self.hub.uploads[oid] = content
        self._answer(200)

    def _commit(self, repo: str, revision: str, body: bytes) -> None:
        repository = self.hub.repositories["model", repo]
        files = dict(repository.commits[repository.refs[revision]])
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif row["key"] == "deletedFile":
                files.pop(value["path"], None)
        commit = repository.commit(files, revision)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo}/commit/{commit}"})
