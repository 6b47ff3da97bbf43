"""An S3 server for large objects of zeros: it keeps only the length of long objects."""

from __future__ import annotations

import http.server
import re
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
_KEPT = 4 << 20  # the bytes of shorter objects are kept


class SparseS3(http.server.ThreadingHTTPServer):
    """One bucket, ``zeros``: contents by key, or the lengths of long objects."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.held: dict[str, bytes | int] = {}
        self.parts: dict[str, dict[int, bytes | int]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip


def _length(data: bytes | int) -> int:
    return data if isinstance(data, int) else len(data)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one segment
    timeout = 30
    server: SparseS3

    def log_message(self, *args: object) -> None:
        pass

    def _any(self) -> None:
        path, _, text = self.path.partition("?")
        query = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
        key, held, parts = unquote(path).removeprefix("/zeros").lstrip("/"), self.server.held, self.server.parts
        body = self._body(int(self.headers.get("Content-Length") or 0))
        if "delete" in query:
            assert isinstance(body, bytes)
            keys = re.findall(r"<Key>[^<]+</Key>", body.decode())
            for each in keys:
                held.pop(each[5:-6], None)
            gone = "".join(f"<Deleted>{each}</Deleted>" for each in keys)
            self._reply(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        elif "list-type" in query:
            self._list(query.get("prefix", ""))
        elif "uploads" in query:
            parts[key] = {}
            self._reply(200, b"<R><Bucket>b</Bucket><Key>k</Key><UploadId>up</UploadId></R>")
        elif "partNumber" in query:
            parts[key][int(query["partNumber"])] = body
            self._reply(200)
        elif "uploadId" in query:
            held[key] = sum(map(_length, parts.pop(key).values()))
            self._reply(200, b'<R><ETag>"1"</ETag></R>')
        elif self.command == "PUT":
            held[key] = body
            self._reply(200)
        else:
            self._get(key)

    do_GET = do_HEAD = do_PUT = do_POST = _any  # noqa: N815 - names of http.server

    def _body(self, length: int) -> bytes | int:
        if length < _KEPT:
            return self.rfile.read(length)
        piece, left = bytearray(_PIECE), length
        while left:
            count = min(left, _PIECE)
            assert self.rfile.readinto(memoryview(piece)[:count]) == count
            assert piece == _ZEROS, "not zeros"
            left -= count
        return length

    def _list(self, prefix: str) -> None:
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            f'<ETag>"1"</ETag><Size>{_length(data)}</Size></Contents>'
            for key, data in list(self.server.held.items())
            if key.startswith(prefix)
        )
        self._reply(200, f"<ListBucketResult>{contents}<IsTruncated>false</IsTruncated></ListBucketResult>".encode())

    def _get(self, key: str) -> None:
        if key not in self.server.held:
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data = self.server.held[key]
        size = _length(data)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(span[1]), min(int(span[2] or size - 1), size - 1)) if span else (0, size - 1)
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(data, bytes):
            self.wfile.write(data[start : end + 1])
            return
        for at in range(start, end + 1, _PIECE):
            self.wfile.write(_ZEROS[: end + 1 - at])

    def _reply(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
