"""A Hugging Face Hub in this process: the parts of its API that the real client uses to read and write repositories.

Every test uses it through huggingface-hub itself; `test_fake.py` compares the client's results with the content of the
server. Tests cannot reach the real Hub.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.fakes.settling import Settling

LFS = (".bin", ".safetensors", ".gz")
"""Suffixes in the repositories' .gitattributes."""
_REPO = r"(?:(?P<kind>datasets|spaces)/)?(?P<repo>[^/]+/[^/]+)"
_API = r"/api/(?P<kind>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)"


@dataclass
class Repo:
    """Commits and branches of a repository; files are their contents."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    private: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit that has exactly these files."""
        parent = self.branches.get(branch, "")
        hashes = sorted((path, hashlib.sha1(data).digest()) for path, data in files.items())
        oid = hashlib.sha1(repr((hashes, parent)).encode()).hexdigest()
        self.commits[oid], self.branches[branch], self.parents[oid] = dict(files), oid, parent
        return oid

    def at(self, revision: str) -> str | None:
        """The commit of a branch; a commit id returns itself."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub(Settling, http.server.HTTPServer):
    """The server. ``fault`` is called before every response; its result replaces the response.

    ``{"status": 503, "headers": {...}}`` sends that, ``{"cut": 100}`` ends a body after that many bytes,
    ``{"lost": True}`` serves the request and closes the connection without a response, ``{"stall": True}`` sends
    nothing and closes it later.
    """

    daemon_threads = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[str] = []
        self.counts: Counter[str] = Counter()
        self.tokens: list[str] = []
        self.needs_token = ""
        # "localhost" is another host than 127.0.0.1: the client must not send the token there.
        self.cdn = f"http://localhost:{self.server_port}"
        self.part_size: int | None = None
        self.fault: Callable[[str, str, int], dict[str, Any]] = lambda method, path, count: {}
        self.lock = threading.Lock()
        self.stalled = threading.Event()
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repo(self, name: str, **files: bytes) -> Repo:
        """A repository with one commit of files whose names have no dots."""
        repo = self.repos[name] = Repo()
        repo.commit({".gitattributes": b"*.bin filter=lfs\n", **files})
        return repo

    def asked(self, pattern: str) -> int:
        """Count the requests that match."""
        return sum(re.search(pattern, each) is not None for each in self.requests)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a response is two packets; like real servers, do not wait between them
    timeout = 5  # of an idle connection, so that no test hangs
    server: Hub
    fault: dict[str, Any]

    def log_message(self, *args: object) -> None:
        pass

    def _any(self) -> None:
        path, _, query = self.path.partition("?")
        body = self._body()
        hub = self.server
        with hub.lock:
            hub.requests.append(f"{self.command} {unquote(path)}")
            hub.tokens.append(self.headers.get("Authorization", ""))
            hub.counts[hub.requests[-1]] += 1
            self.fault = hub.fault(self.command, unquote(path), hub.counts[hub.requests[-1]])
        if "stall" in self.fault:
            hub.stalled.wait(20)
            self.close_connection = True
            return
        if "status" in self.fault:
            self._send(self.fault["status"], self.fault.get("body", b"{}"), self.fault.get("headers", {}))
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hub.needs_token and not path.startswith(("/cdn/", "/put/")) and token != hub.needs_token:
            self._error(401, "RepoNotFound" if path.startswith("/api") else "GatedRepo")
            return
        for method, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == {"HEAD": "GET"}.get(self.command, self.command):
                action(self, {**match.groupdict(), "query": query}, body)
                return
        self._error(404, "")

    do_GET = do_POST = do_PUT = do_HEAD = _any  # noqa: N815 - names of http.server

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.fault.get("lost"):
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = body[: self.fault.get("cut", len(body))]
        if self.command != "HEAD":
            self.wfile.write(cut)
        if cut != body:
            self.close_connection = True

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code} if code else {})

    def _found(self, at: dict[str, str]) -> tuple[Repo, str] | None:
        """The repository and the commit; otherwise send an error and return None."""
        prefix = {"datasets": "datasets/", "spaces": "spaces/"}.get(at.get("kind") or "", "")
        repo = self.server.repos.get(prefix + at["repo"])
        if repo is None:
            self._error(404, "RepoNotFound")
            return None
        commit = repo.at(unquote(at.get("revision") or "main"))
        if commit is None:
            self._error(404, "RevisionNotFound")
            return None
        return repo, commit

    # ------------------------------------------------------------ reading

    def _info(self, at: dict[str, str], body: bytes) -> None:
        if found := self._found(at):
            self._json({"id": at["repo"], "sha": found[1], "private": found[0].private, "tags": [], "siblings": []})

    def _tree(self, at: dict[str, str], body: bytes) -> None:
        if not (found := self._found(at)):
            return
        items = [_item(path, data) for path, data in sorted(found[0].commits[found[1]].items())]
        cursor = int(parse_qs(at["query"]).get("cursor", ["0"])[0])
        headers = {}
        if cursor + 1000 < len(items):  # the Hub's page size
            link = f"{self.server.url}{self.path.partition('?')[0]}?recursive=True&cursor={cursor + 1000}"
            headers = {"Link": f'<{link}>; rel="next"'}
        self._json(items[cursor : cursor + 1000], headers=headers)

    def _file(self, at: dict[str, str], body: bytes) -> None:
        if not (found := self._found(at)):
            return
        data = found[0].commits[found[1]].get(unquote(at["path"]))
        if data is None:
            self._error(404, "EntryNotFound")
            return
        item = _item(unquote(at["path"]), data)
        headers = {"X-Repo-Commit": found[1], "Accept-Ranges": "bytes"}
        if "lfs" in item:
            self.server.blobs.setdefault(item["lfs"]["oid"], data)
            headers |= {"X-Linked-Etag": f'"{item["lfs"]["oid"]}"', "X-Linked-Size": str(len(data))}
            place = f"{self.server.cdn}/cdn/{item['lfs']['oid']}"
            self._send(302, b"", {**headers, "Location": place})
            return
        self._ranged(data, {**headers, "ETag": f'"{item["oid"]}"'})

    def _cdn(self, at: dict[str, str], body: bytes) -> None:
        self._ranged(self.server.blobs[at["oid"]], {"ETag": '"of-the-cdn"'})

    def _ranged(self, data: bytes, headers: dict[str, str]) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            self.server.sent += len(data)
            self._send(200, data, headers)
            return
        start, end = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
        if start >= len(data):
            self._send(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        self.server.sent += end + 1 - start
        self._send(206, data[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"})

    # ------------------------------------------------------------ writing

    def _create(self, at: dict[str, str], body: bytes) -> None:
        asked = json.loads(body)
        prefix = {"dataset": "datasets/", "space": "spaces/"}.get(asked.get("type", "model"), "")
        name = f"{prefix}{asked['organization']}/{asked['name']}"
        if name in self.server.repos:
            self._json({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
            return
        self.server.repo(name).private = asked.get("private", asked.get("visibility") == "private")
        self._json({"url": f"{self.server.url}/{name}"})

    def _branch(self, at: dict[str, str], body: bytes) -> None:
        if found := self._found({**at, "revision": "main"}):
            found[0].branches[unquote(at["branch"])] = found[1]
            self._json({})

    def _preupload(self, at: dict[str, str], body: bytes) -> None:
        if not (found := self._found(at)):
            return
        files = []
        for each in json.loads(body)["files"]:
            large = each["path"].endswith(LFS) or each["size"] > 5_000_000
            ignored = each["path"] in found[0].ignored
            files.append({"path": each["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": ignored})
        self._json({"files": files})

    def _batch(self, at: dict[str, str], body: bytes) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            oid, size, answer = each["oid"], each["size"], dict(each)
            if oid not in self.server.blobs:
                place = f"{self.server.url}/put/{oid}"
                upload: dict[str, Any] = {"href": place}
                step = self.server.part_size
                if step and size > step:
                    header = {f"{n + 1:05}": f"{place}/{n + 1}" for n in range(-(-size // step))}
                    upload = {"href": f"{place}/complete", "header": {"chunk_size": str(step), **header}}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.server.url}/verify"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _put(self, at: dict[str, str], body: bytes) -> None:
        if at["part"]:
            self.server.parts[at["oid"], int(at["part"])] = body
            self._send(200, b"", {"ETag": hashlib.md5(body).hexdigest()})
        else:
            self._keep(at["oid"], body)

    def _complete(self, at: dict[str, str], body: bytes) -> None:
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        self._keep(at["oid"], b"".join(self.server.parts[at["oid"], number] for number in numbers))

    def _keep(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            self._send(400, b"{}")
            return
        self.server.blobs[oid] = data
        self._send(200)

    def _verify(self, at: dict[str, str], body: bytes) -> None:
        self._json({})

    def _commit(self, at: dict[str, str], body: bytes) -> None:
        if not (found := self._found(at)):
            return
        repo, head = found
        files = dict(repo.commits[head])
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", head) != head:
                self._json({"error": "A commit has happened since"}, 412)
                return
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(files, unquote(at["revision"]))
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{at['repo']}/commit/{oid}"})


@lru_cache(maxsize=100_000)
def _item(path: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    item: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git}
    if data and (path.endswith(LFS) or len(data) > 5_000_000):
        item["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return item


_ROUTES: list[tuple[str, str, Callable[[_Handler, dict[str, str], bytes], None]]] = [
    ("GET", _API, _Handler._info),
    ("GET", _API + r"/revision/(?P<revision>[^/]+)", _Handler._info),
    ("GET", _API + r"/tree/(?P<revision>[^/]+)", _Handler._tree),
    ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler._file),
    ("GET", r"/cdn/(?P<oid>\w+)", _Handler._cdn),
    ("POST", r"/api/repos/create", _Handler._create),
    ("POST", _API + r"/branch/(?P<branch>[^/]+)", _Handler._branch),
    ("POST", _API + r"/preupload/(?P<revision>[^/]+)", _Handler._preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler._batch),
    ("PUT", r"/put/(?P<oid>\w+)(?:/(?P<part>\d+))?", _Handler._put),
    ("POST", r"/put/(?P<oid>\w+)/complete", _Handler._complete),
    ("POST", r"/verify", _Handler._verify),
    ("POST", _API + r"/commit/(?P<revision>[^/]+)", _Handler._commit),
]
