"""The APIs of S3, Google Cloud Storage and Azure Blob Storage in this process: the parts that obstore uses.

No package index has an emulator that works with obstore. These follow the vendors' references, without checks of
signatures; obstore would fail in the same way with the real services.
"""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

from tests.serving import EndsConnections

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


class Clouds(EndsConnections):
    """Buckets and containers by name; parts of uploads that are not finished.

    ``fault`` is called before every response, with the request and its number; its result replaces the response.
    ``{"status": 503, "headers": {...}, "body": b""}`` sends that, ``{"cut": 100}`` ends a body after that many bytes,
    ``{"stall": True}`` sends nothing and closes the connection later.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets: dict[str, dict[str, bytes]] = {"models": {}}
        self.parts: dict[tuple[str, str], bytes] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str, int], dict[str, Any]] = lambda request, number: {}
        self.stalled = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5  # of an idle connection, so that no test hangs
    server: Clouds
    fault: dict[str, Any]

    def log_message(self, *args: object) -> None:
        pass

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, text = self.path.partition("?")
        query = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
        name, _, key = unquote(path).lstrip("/").partition("/")
        self.server.requests.append(f"{self.command} {unquote(path)} {' '.join(sorted(query))}".strip())
        bucket = self.server.buckets.get(name)
        if self._failed():
            return
        if bucket is None:
            code = "ContainerNotFound" if "x-ms-version" in self.headers else "NoSuchBucket"
            self._send(404, f"<Error><Code>{code}</Code></Error>".encode())
        elif self.command == "GET" and not key:
            self._list(bucket, query)
        elif self.command in ("GET", "HEAD"):
            self._get(bucket, key)
        elif self.command == "DELETE":
            bucket.pop(key, None)
            self._send(204)
        elif query.get("comp") == "batch" or "delete" in query:
            self._delete(bucket, body.decode())
        elif self.command == "POST" and "uploads" in query:
            self._send(200, b"<R><Bucket>b</Bucket><Key>k</Key><UploadId>up</UploadId></R>")
        elif part := query.get("partNumber") or query.get("blockid"):
            self.server.parts[key, part] = body
            self._send(201 if "blockid" in query else 200, b"", {"ETag": _tag(body)})
        elif "uploadId" in query or query.get("comp") == "blocklist":
            text = body.decode()
            order = re.findall(r"<PartNumber>(\d+)", text) or re.findall(r"<(?:Uncommitted|Latest)>([^<]+)", text)
            bucket[key] = b"".join(self.server.parts.pop((key, unescape(part))) for part in order)
            done = f"<R><ETag>{escape(_tag(bucket[key]))}</ETag></R>".encode()
            self._send(201 if "comp" in query else 200, done, {"ETag": _tag(bucket[key]), "Last-Modified": _DATE})
        else:
            bucket[key] = body
            self._send(201, b"", {"ETag": _tag(body), "Last-Modified": _DATE})

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any  # noqa: N815 - names of http.server

    def _list(self, bucket: dict[str, bytes], query: dict[str, str]) -> None:
        found = [(key, data) for key, data in sorted(bucket.items()) if key.startswith(query.get("prefix", ""))]
        if query.get("comp") == "list":
            blobs = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
                f"<Etag>{_tag(data)[1:-1]}</Etag><Content-Length>{len(data)}</Content-Length>"
                "<Content-Type>x/y</Content-Type><ResourceType>file</ResourceType></Properties></Blob>"
                for key, data in found
            )
            text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        else:
            contents = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
                f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size></Contents>"
                for key, data in found
            )
            text = f"<ListBucketResult>{contents}<IsTruncated>false</IsTruncated></ListBucketResult>"
        self._send(200, text.encode())

    def _failed(self) -> bool:
        """Apply the fault; return whether it replaced the response."""
        self.fault = self.server.fault(self.server.requests[-1], len(self.server.requests))
        if "stall" in self.fault:
            self.server.stalled.wait(20)
            self.close_connection = True
        elif "status" in self.fault:
            self._send(self.fault["status"], self.fault.get("body", b""), self.fault.get("headers"))
        return "stall" in self.fault or "status" in self.fault

    def _delete(self, bucket: dict[str, bytes], body: str) -> None:
        """Delete several: S3 has a list of keys, Azure a multipart body of requests and responses."""
        if keys := re.findall(r"<Key>([^<]+)</Key>", body):
            for key in keys:
                bucket.pop(unescape(key), None)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._send(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
            return
        parts = []
        for number, path in re.findall(r"Content-ID: *(\d+).*?DELETE +(\S+)", body, re.DOTALL | re.IGNORECASE):
            there = bucket.pop(unquote(path.partition("?")[0]).lstrip("/").partition("/")[2], None)
            missing = "404 The specified blob does not exist.\r\nx-ms-error-code: BlobNotFound"
            status = "202 Accepted" if there is not None else missing
            parts.append(
                f"--batch_1\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
                "Content-Length: 0\r\n\r\n"
            )
        form = {"Content-Type": "multipart/mixed; boundary=batch_1"}
        self._send(202, f"{''.join(parts)}--batch_1--\r\n".encode(), form)

    def _get(self, bucket: dict[str, bytes], key: str) -> None:
        if key not in bucket:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data, headers = bucket[key], {"ETag": _tag(bucket[key]), "Last-Modified": _DATE}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or self.headers.get("x-ms-range") or "")
        if span:
            start, end = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self._send(206, data[start : end + 1], headers)
        else:
            self._send(200, data, headers)

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = body[: self.fault.get("cut", len(body))]
        if self.command != "HEAD":
            self.wfile.write(cut)
        if cut != body:
            self.close_connection = True


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
