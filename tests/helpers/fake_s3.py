"""A small S3 server for tests: it stores objects in memory and accepts signatures of a single key and secret."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape


class FakeS3:
    """An S3 server that runs during a `with` block; `objects` maps `bucket/key` to the stored bytes."""

    def __init__(self, key: str, secret: str) -> None:
        self.key, self.secret = key, secret
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"s3": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeS3:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    s3: FakeS3
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - names from http.server

    def _serve(self) -> None:
        body = self._body()
        if not self._is_signed():
            return self._error(403, "SignatureDoesNotMatch")
        split = urlsplit(self.path)
        path, query = unquote(split.path).strip("/"), parse_qs(split.query, keep_blank_values=True)
        bucket, _, key = path.partition("/")
        with self.s3.lock:
            return self._answer(bucket, key, query, body)

    def _answer(self, bucket: str, key: str, query: dict[str, list[str]], body: bytes) -> None:
        objects, name = self.s3.objects, f"{bucket}/{key}"
        if self.command == "POST" and "delete" in query:
            for item in ElementTree.fromstring(body).iter():
                if item.tag.endswith("Key"):
                    objects.pop(f"{bucket}/{item.text}", None)
            return self._xml("<DeleteResult/>")
        if self.command == "POST" and "uploads" in query:
            return self._xml(
                f"<InitiateMultipartUploadResult><UploadId>{quote(key)}</UploadId></InitiateMultipartUploadResult>"
            )
        if self.command == "POST" and "uploadId" in query:
            numbers = sorted(number for upload, number in self.s3.parts if upload == name)
            objects[name] = b"".join(self.s3.parts.pop((name, number)) for number in numbers)
            return self._xml("<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        if self.command == "PUT" and "partNumber" in query:
            self.s3.parts[name, int(query["partNumber"][0])] = body
            return self._send(200, b"", {"ETag": '"part"'})
        if self.command == "PUT":
            if source := self.headers.get("x-amz-copy-source"):
                objects[name] = objects[unquote(source).strip("/")]
                return self._xml("<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
            if key:
                objects[name] = body
            return self._send(200, b"", {"ETag": _etag(body)})
        if self.command == "DELETE":
            objects.pop(name, None)
            return self._send(204, b"", {})
        if not key:
            return self._list(bucket, query) if self.command == "GET" else self._send(200, b"", {})
        if name not in objects:
            return self._error(404, "NoSuchKey")
        data = objects[name]
        facts = {"ETag": _etag(data), "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if found := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(found[1]), min(int(found[2]) + 1 if found[2] else len(data), len(data))
            return self._send(206, data[start:stop], facts | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})
        return self._send(200, data, facts)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        keys = [name.partition("/")[2] for name in sorted(self.s3.objects) if name.startswith(f"{bucket}/{prefix}")]
        folders, files = set(), []
        for key in keys:
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                files.append(key)
        entries = ""
        for key in files:
            data = self.s3.objects[f"{bucket}/{key}"]
            entries += f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{_etag(data)}</ETag>"
            entries += "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
        entries += "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)
        )
        count = len(files) + len(folders)
        self._xml(
            f"<ListBucketResult><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        )

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        else:
            body = b""
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return body
        whole = b""
        while body:
            line, _, body = body.partition(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            if not size:
                break
            whole, body = whole + body[:size], body[size + 2 :]
        return whole

    def _is_signed(self) -> bool:
        """Check the version 4 signature, which proves that the client knows the secret.

        Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        form = r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), ?SignedHeaders=([^,]+), ?Signature=(\w+)"
        found = re.match(form, self.headers.get("Authorization") or "")
        if found is None or found[1] != self.s3.key:
            return False
        split = urlsplit(self.path)
        query = "&".join(sorted(part if "=" in part else f"{part}=" for part in split.query.split("&") if part))
        headers = "".join(f"{name}:{(self.headers.get(name) or '').strip()}\n" for name in found[3].split(";"))
        payload = self.headers.get("x-amz-content-sha256") or ""
        request = "\n".join([self.command, split.path, query, headers, found[3], payload])
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", self.headers.get("x-amz-date") or "", found[2], digest])
        key = f"AWS4{self.s3.secret}".encode()
        for part in found[2].split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest() == found[4]

    def _error(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), {})

    def _xml(self, text: str) -> None:
        self._send(200, f"<?xml version='1.0'?>{text}".encode(), {"Content-Type": "application/xml"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
