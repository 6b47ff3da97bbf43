"""The APIs of S3, Google Cloud Storage and Azure Blob Storage in this process: the parts that obstore uses.

No package index has an emulator that works with obstore. These follow the vendors' references, without checks of
signatures; obstore would fail in the same way with the real services.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

from tests.fakes.scripted import Answer, AnsweringServer, Asked, faulty, span

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


class Clouds(AnsweringServer):
    """Buckets and containers by name; parts of uploads that are not finished.

    ``fault`` is called before every response, with the request and its number; its result replaces the response
    (`tests.fakes.scripted.faulty`).
    """

    def __init__(self) -> None:
        super().__init__(self._reply)
        self.buckets: dict[str, dict[str, bytes]] = {"models": {}}
        self.parts: dict[tuple[str, str], bytes] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str, int], dict[str, Any]] = lambda request, number: {}

    def _reply(self, asked: Asked) -> Answer:
        path, _, text = asked.path.partition("?")
        query = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
        self.requests.append(f"{asked.method} {unquote(path)} {' '.join(sorted(query))}".strip())
        fault = self.fault(self.requests[-1], len(self.requests))
        return faulty(
            fault, lambda: self._found(asked, *unquote(path).lstrip("/").partition("/")[::2], query), self.stalled
        )

    def _found(self, asked: Asked, name: str, key: str, query: dict[str, str]) -> Answer:
        bucket = self.buckets.get(name)
        if bucket is None:
            code = "ContainerNotFound" if "x-ms-version" in asked.headers else "NoSuchBucket"
            return Answer(404, f"<Error><Code>{code}</Code></Error>".encode())
        if asked.method == "GET" and not key:
            return _listing(bucket, query)
        if asked.method in ("GET", "HEAD"):
            return _content(bucket.get(key), asked.headers.get("Range") or asked.headers.get("x-ms-range") or "")
        if asked.method == "DELETE":
            bucket.pop(key, None)
            return Answer(204)
        if query.get("comp") == "batch" or "delete" in query:
            return _deleted(bucket, asked.body.decode())
        return self._written(bucket, key, query, asked)

    def _written(self, bucket: dict[str, bytes], key: str, query: dict[str, str], asked: Asked) -> Answer:
        if asked.method == "POST" and "uploads" in query:
            return Answer(200, b"<R><Bucket>b</Bucket><Key>k</Key><UploadId>up</UploadId></R>")
        if part := query.get("partNumber") or query.get("blockid"):
            self.parts[key, part] = asked.body
            return Answer(201 if "blockid" in query else 200, b"", {"ETag": _tag(asked.body)})
        if "uploadId" in query or query.get("comp") == "blocklist":
            text = asked.body.decode()
            order = re.findall(r"<PartNumber>(\d+)", text) or re.findall(r"<(?:Uncommitted|Latest)>([^<]+)", text)
            bucket[key] = b"".join(self.parts.pop((key, unescape(part))) for part in order)
            done = f"<R><ETag>{escape(_tag(bucket[key]))}</ETag></R>".encode()
            return Answer(201 if "comp" in query else 200, done, _headers(bucket[key]))
        bucket[key] = asked.body
        return Answer(201, b"", _headers(asked.body))


def _content(data: bytes | None, asked: str) -> Answer:
    if data is None:
        return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
    status, body, headers = span(data, asked)
    return Answer(status, body, {**_headers(data), **headers})


def _listing(bucket: dict[str, bytes], query: dict[str, str]) -> Answer:
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
    return Answer(200, text.encode())


def _deleted(bucket: dict[str, bytes], body: str) -> Answer:
    """Delete several: S3 has a list of keys, Azure a multipart body of requests and responses."""
    if keys := re.findall(r"<Key>([^<]+)</Key>", body):
        for key in keys:
            bucket.pop(unescape(key), None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return Answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
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
    return Answer(202, f"{''.join(parts)}--batch_1--\r\n".encode(), form)


def _headers(data: bytes) -> dict[str, str]:
    return {"ETag": _tag(data), "Last-Modified": _DATE}


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
