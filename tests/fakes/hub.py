"""A Hugging Face Hub in this process: the parts of its API that the real client uses to read and write repositories.

Every test uses it through huggingface-hub itself. Tests cannot reach the real Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from tests.fakes.scripted import Answer, AnsweringServer, Asked, as_json, faulty, span
from tests.serving import serving

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


class Hub(AnsweringServer):
    """The server. ``fault`` is called before every response; its result replaces the response (`faulty`)."""

    def __init__(self) -> None:
        super().__init__(self._reply)
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
        self.sent = 0

    def repo(self, name: str, **files: bytes) -> Repo:
        """A repository with one commit of files whose names have no dots."""
        repo = self.repos[name] = Repo()
        repo.commit({".gitattributes": b"*.bin filter=lfs\n", **files})
        return repo

    def asked(self, pattern: str) -> int:
        """Count the requests that match."""
        return sum(re.search(pattern, each) is not None for each in self.requests)

    def _reply(self, asked: Asked) -> Answer:
        path, _, query = asked.path.partition("?")
        with self.lock:
            self.requests.append(f"{asked.method} {unquote(path)}")
            self.tokens.append(asked.headers.get("Authorization", ""))
            self.counts[self.requests[-1]] += 1
            fault = self.fault(asked.method, unquote(path), self.counts[self.requests[-1]])
        if "status" in fault:
            fault = {"body": b"{}", **fault}
        return faulty(fault, lambda: self._routed(asked, path, query), self.stalled)

    def _routed(self, asked: Asked, path: str, query: str) -> Answer:
        token = asked.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.needs_token and not path.startswith(("/cdn/", "/put/")) and token != self.needs_token:
            return _error(401, "RepoNotFound" if path.startswith("/api") else "GatedRepo")
        for method, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == {"HEAD": "GET"}.get(asked.method, asked.method):
                try:
                    return action(self, {**match.groupdict(), "query": query}, asked)
                except _Missing as missing:
                    return _error(404, str(missing))
        return _error(404, "")

    def _found(self, at: dict[str, str]) -> tuple[Repo, str]:
        """The repository and the commit."""
        prefix = {"datasets": "datasets/", "spaces": "spaces/"}.get(at.get("kind") or "", "")
        repo = self.repos.get(prefix + at["repo"])
        if repo is None:
            raise _Missing("RepoNotFound")
        commit = repo.at(unquote(at.get("revision") or "main"))
        if commit is None:
            raise _Missing("RevisionNotFound")
        return repo, commit

    # ------------------------------------------------------------ reading

    def _info(self, at: dict[str, str], asked: Asked) -> Answer:
        repo, commit = self._found(at)
        return as_json({"id": at["repo"], "sha": commit, "private": repo.private, "tags": [], "siblings": []})

    def _tree(self, at: dict[str, str], asked: Asked) -> Answer:
        found = self._found(at)
        items = [_item(path, data) for path, data in sorted(found[0].commits[found[1]].items())]
        cursor = int(parse_qs(at["query"]).get("cursor", ["0"])[0])
        headers = {}
        if cursor + 1000 < len(items):  # the Hub's page size
            link = f"{self.url}{asked.path.partition('?')[0]}?recursive=True&cursor={cursor + 1000}"
            headers = {"Link": f'<{link}>; rel="next"'}
        return as_json(items[cursor : cursor + 1000], headers=headers)

    def _file(self, at: dict[str, str], asked: Asked) -> Answer:
        found = self._found(at)
        data = found[0].commits[found[1]].get(unquote(at["path"]))
        if data is None:
            return _error(404, "EntryNotFound")
        item = _item(unquote(at["path"]), data)
        headers = {"X-Repo-Commit": found[1], "Accept-Ranges": "bytes"}
        if "lfs" in item:
            self.blobs.setdefault(item["lfs"]["oid"], data)
            headers |= {"X-Linked-Etag": f'"{item["lfs"]["oid"]}"', "X-Linked-Size": str(len(data))}
            place = f"{self.cdn}/cdn/{item['lfs']['oid']}"
            return Answer(302, b"", {**headers, "Location": place})
        return self._ranged(asked, data, {**headers, "ETag": f'"{item["oid"]}"'})

    def _cdn(self, at: dict[str, str], asked: Asked) -> Answer:
        return self._ranged(asked, self.blobs[at["oid"]], {"ETag": '"of-the-cdn"'})

    def _ranged(self, asked: Asked, data: bytes, headers: dict[str, str]) -> Answer:
        status, body, own = span(data, asked.headers.get("Range", ""))
        self.sent += len(body)
        return Answer(status, body, {**headers, **own})

    # ------------------------------------------------------------ writing

    def _create(self, at: dict[str, str], asked: Asked) -> Answer:
        given = json.loads(asked.body)
        prefix = {"dataset": "datasets/", "space": "spaces/"}.get(given.get("type", "model"), "")
        name = f"{prefix}{given['organization']}/{given['name']}"
        if name in self.repos:
            return as_json({"error": "exists", "url": f"{self.url}/{name}"}, 409)
        self.repo(name).private = given.get("private", given.get("visibility") == "private")
        return as_json({"url": f"{self.url}/{name}"})

    def _branch(self, at: dict[str, str], asked: Asked) -> Answer:
        repo, commit = self._found({**at, "revision": "main"})
        repo.branches[unquote(at["branch"])] = commit
        return as_json({})

    def _preupload(self, at: dict[str, str], asked: Asked) -> Answer:
        found = self._found(at)
        files = []
        for each in json.loads(asked.body)["files"]:
            large = each["path"].endswith(LFS) or each["size"] > 5_000_000
            ignored = each["path"] in found[0].ignored
            files.append({"path": each["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": ignored})
        return as_json({"files": files})

    def _batch(self, at: dict[str, str], asked: Asked) -> Answer:
        objects = []
        for each in json.loads(asked.body)["objects"]:
            oid, size, answer = each["oid"], each["size"], dict(each)
            if oid not in self.blobs:
                place = f"{self.url}/put/{oid}"
                upload: dict[str, Any] = {"href": place}
                step = self.part_size
                if step and size > step:
                    header = {f"{n + 1:05}": f"{place}/{n + 1}" for n in range(-(-size // step))}
                    upload = {"href": f"{place}/complete", "header": {"chunk_size": str(step), **header}}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/verify"}}
            objects.append(answer)
        return as_json({"transfer": "basic", "objects": objects})

    def _put(self, at: dict[str, str], asked: Asked) -> Answer:
        if at["part"]:
            self.parts[at["oid"], int(at["part"])] = asked.body
            return Answer(200, b"", {"ETag": hashlib.md5(asked.body).hexdigest()})
        return self._keep(at["oid"], asked.body)

    def _complete(self, at: dict[str, str], asked: Asked) -> Answer:
        numbers = [part["partNumber"] for part in json.loads(asked.body)["parts"]]
        return self._keep(at["oid"], b"".join(self.parts[at["oid"], number] for number in numbers))

    def _keep(self, oid: str, data: bytes) -> Answer:
        if hashlib.sha256(data).hexdigest() != oid:
            return Answer(400, b"{}")
        self.blobs[oid] = data
        return Answer()

    def _verify(self, at: dict[str, str], asked: Asked) -> Answer:
        return as_json({})

    def _commit(self, at: dict[str, str], asked: Asked) -> Answer:
        found = self._found(at)
        repo, head = found
        files = dict(repo.commits[head])
        lines = [json.loads(line) for line in asked.body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", head) != head:
                return as_json({"error": "A commit has happened since"}, 412)
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(files, unquote(at["revision"]))
        return as_json({"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{at['repo']}/commit/{oid}"})


class _Missing(Exception):
    """A repository or revision does not exist; its text is the Hub's code."""


def _error(status: int, code: str) -> Answer:
    headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
    return as_json({"error": code}, status, headers)


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose URL is in the environment, without a token, pauses between retries and the Xet protocol."""
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    close_session()
    with serving(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
        close_session()


@lru_cache(maxsize=100_000)
def _item(path: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    item: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git}
    if data and (path.endswith(LFS) or len(data) > 5_000_000):
        item["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return item


_ROUTES: list[tuple[str, str, Callable[[Hub, dict[str, str], Asked], Answer]]] = [
    ("GET", _API, Hub._info),
    ("GET", _API + r"/revision/(?P<revision>[^/]+)", Hub._info),
    ("GET", _API + r"/tree/(?P<revision>[^/]+)", Hub._tree),
    ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Hub._file),
    ("GET", r"/cdn/(?P<oid>\w+)", Hub._cdn),
    ("POST", r"/api/repos/create", Hub._create),
    ("POST", _API + r"/branch/(?P<branch>[^/]+)", Hub._branch),
    ("POST", _API + r"/preupload/(?P<revision>[^/]+)", Hub._preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", Hub._batch),
    ("PUT", r"/put/(?P<oid>\w+)(?:/(?P<part>\d+))?", Hub._put),
    ("POST", r"/put/(?P<oid>\w+)/complete", Hub._complete),
    ("POST", r"/verify", Hub._verify),
    ("POST", _API + r"/commit/(?P<revision>[^/]+)", Hub._commit),
]
