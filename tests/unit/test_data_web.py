from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serving import serving

from trainjob._support import retrying
from trainjob.data import copy, initialize, ranges, read_manifest
from trainjob.data.locations import parse_store
from trainjob.data.stores.base import WritableStore
from trainjob.data.stores.opening import open_store, open_writable
from trainjob.data.stores.web import Web
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, StoreUnavailable

BIG = bytes(range(256)) * 50_000  # 12.8 MB
SHA256 = hashlib.sha256(BIG).hexdigest()
WEB = "https://host.example/x"


class _Server(http.server.ThreadingHTTPServer):
    """Tests set its content and its faults."""

    daemon_threads = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.accepted = 0
        self.stalled = threading.Event()
        self.sent = 0
        self.ranges = True
        self.tag: Callable[[int], str] = lambda _: '"1"'
        self.faults: Callable[[int, str], dict[str, Any]] = lambda number, path: {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.accepted += 1
        super().process_request(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5  # of an idle connection, so that no test hangs
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        number = len(self.server.asked)
        self.server.asked.append(f"{path} {self.headers.get('Range', '')}".strip())
        body = query.encode() if path == "/query.csv" else b"" if path == "/empty" else BIG
        status: int = {"/404.csv": 404, "/403.csv": 403, "/500.csv": 500, "/418.csv": 418}.get(path, 200)
        fault = self.server.faults(number, self.headers.get("Range", ""))
        status = fault.get("status", status)
        tag = self.server.tag(number)
        headers = {"ETag": tag} if tag else {}
        headers |= fault.get("headers", {})
        if path == "/around":
            status, headers = 302, {"Location": "/around"}
        shown = body if status == 200 else b""
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if status == 200 and self.server.ranges and span and self.headers.get("If-Range", tag) == tag:
            start, end = int(span[1]), min(int(span[2] or len(body) - 1), len(body) - 1)
            if start >= len(body):
                status, shown, headers["Content-Range"] = 416, b"", f"bytes */{len(body)}"
            else:
                status, shown = 206, body[start : end + 1]
                headers["Content-Range"] = f"bytes {start}-{end}/{fault.get('whole', len(body))}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "chunked" not in fault:
            self.send_header("Content-Length", str(len(shown)))
        self.end_headers()
        cut = shown[: fault.get("cut", len(shown))]
        if "stall" in fault:
            self.server.stalled.wait(20)
            self.close_connection = True
            return
        try:
            if len(shown) > 1:
                self.server.sent += len(cut)
            self.wfile.write(cut)
        except OSError:
            self.close_connection = True
        if cut != shown or "chunked" in fault:
            self.close_connection = True


@pytest.fixture
def web() -> Iterator[_Server]:
    with serving(_Server()) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.data.ranges.PART", 1_000_000)


def test_connections_are_reused_by_all_threads(web: _Server) -> None:
    """With the default limits of httpx, 12 of 32 connections are closed after each file and opened again."""
    together = threading.Barrier(32)

    def all_at_once(number: int, span: str) -> dict[str, Any]:
        together.wait(20)
        return {}

    web.faults = all_at_once
    client = Web(web.url)
    read = [lambda: b"".join(client.read(f"{web.url}/query.csv?some", "it", 0, None, ""))] * 32
    with ThreadPoolExecutor(32) as pool:
        for _ in range(3):
            assert [each.result() for each in [pool.submit(one) for one in read]] == [b"some"] * 32
    client.close()
    assert web.accepted == 32


def test_copy_of_a_file_verifies_its_digest(web: _Server, tmp_path: Path) -> None:
    manifest = copy(f"{web.url}/dir/good.csv", str(tmp_path / "t"), digest=SHA256)
    assert (tmp_path / "t/good.csv").read_bytes() == BIG
    assert copy(f"{web.url}/dir/good.csv", str(tmp_path / "t")) == manifest
    copy(f"{web.url}/query.csv?download=1", str(tmp_path / "q"))
    assert (tmp_path / "q/query.csv").read_bytes() == b"download=1"
    assert copy(f"{web.url}/empty", str(tmp_path / "e")).size == 0


@pytest.mark.usefixtures("small_parts", "by_ranges")
def test_large_files_are_downloaded_by_ranges(web: _Server, tmp_path: Path) -> None:
    copy(f"{web.url}/x", str(tmp_path / "t"), digest=SHA256)
    assert len({asked for asked in web.asked if "0-0" not in asked}) == 13
    assert web.sent == len(BIG)


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("404.csv", SourceNotFound, "does not exist"),
        ("403.csv", ConfigurationError, "denied"),
        ("500.csv", StoreUnavailable, "500"),
        ("418.csv", ConfigurationError, "418"),
        ("around", ConfigurationError, "perhaps in a loop"),
        ("", SourceNotFound, "is not a file"),
    ],
)
def test_error_statuses_are_mapped(web: _Server, tmp_path: Path, path: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        copy(f"{web.url}/{path}", str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None
    assert len(web.asked) <= 30


@pytest.mark.parametrize("parallel", [False, True])
def test_retries_of_cut_responses_are_limited(
    web: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    monkeypatch.setattr(ranges, "PART", 1_000_000 if parallel else 100_000_000)
    web.faults = lambda number, span: {} if span == "bytes=0-0" else {"cut": 0}
    with pytest.raises(StoreUnavailable, match="cut"):
        copy(f"{web.url}/x", str(tmp_path / "t"))
    assert not (tmp_path / "t/x").exists()
    assert len(web.asked) < 60


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("supported", [False, True])
def test_download_resumes_after_a_cut(
    web: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool, parallel: bool
) -> None:
    monkeypatch.setattr(ranges, "PART", 1_000_000 if parallel else 100_000_000)
    web.ranges = supported
    web.faults = lambda number, span: {"cut": 5_000_000 if number > 1 else 2_500_000} if number in (1, 2) else {}
    copy(f"{web.url}/x", str(tmp_path / "t"), digest=SHA256)
    assert (tmp_path / "t/x").read_bytes() == BIG
    if supported:
        assert web.sent <= len(BIG) + 2 * 1024 * 1024, "at most one buffer is sent again"


def test_stalled_responses_are_retried(web: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.data.stores.web._TIMEOUT", httpx.Timeout(0.2))
    web.faults = lambda number, span: {"stall": True} if number in (0, 1) else {}
    copy(f"{web.url}/x", str(tmp_path / "t"), digest=SHA256)
    web.faults = lambda number, span: {"stall": True}
    with pytest.raises(StoreUnavailable, match="stopped sending"):
        copy(f"{web.url}/x", str(tmp_path / "t2"))


@pytest.mark.parametrize(("asked", "seconds"), [("7", 7), ("99999999", 3600)])
def test_retry_after_is_obeyed(
    web: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, seconds: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    web.faults = lambda number, span: {"status": 429, "headers": {"Retry-After": asked}} if number < 2 else {}
    copy(f"{web.url}/x", str(tmp_path / "t"), digest=SHA256)
    assert len(pauses) == 2
    assert all(seconds <= pause <= seconds + 1 for pause in pauses)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_file_that_changes_is_rejected(
    web: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    monkeypatch.setattr(ranges, "PART", 1_000_000 if parallel else 100_000_000)
    web.tag = lambda number: '"1"' if number < 3 else '"2"'
    web.faults = lambda number, span: {"cut": 500_000} if number in (1, 2) else {}
    with pytest.raises(CorruptData, match="changed"):
        copy(f"{web.url}/x", str(tmp_path / "t"))
    assert len(web.asked) < 20, "not retried"
    assert not (tmp_path / "t/x").exists()


def test_a_cut_file_without_an_etag_is_not_resumed(web: _Server, tmp_path: Path) -> None:
    web.tag = lambda _: ""
    web.faults = lambda number, span: {"cut": 5_000_000} if number == 1 else {}
    with pytest.raises(StoreUnavailable, match="cut"):
        copy(f"{web.url}/x", str(tmp_path / "t"))


def test_a_file_of_unknown_size_is_rejected(web: _Server, tmp_path: Path) -> None:
    web.faults = lambda number, span: {"whole": "*"}  # RFC 9110, 14.4
    with pytest.raises(ConfigurationError, match="does not report the size"):
        copy(f"{web.url}/x", str(tmp_path / "t"))
    web.ranges = False
    web.faults = lambda number, span: {"chunked": True}
    with pytest.raises(ConfigurationError, match="does not report the size"):
        copy(f"{web.url}/x", str(tmp_path / "t"))


def test_a_truncated_gzip_is_rejected(web: _Server, tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match="gzip"):
        copy(f"{web.url}/x.gz", str(tmp_path / "t"))


def test_an_unreachable_server_is_reported_without_the_query(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        copy("http://127.0.0.1:1/x?secret=1", str(tmp_path / "t"))


@pytest.mark.parametrize(
    "act", [lambda url, tmp: copy(str(tmp), f"{url}/x"), lambda url, tmp: read_manifest(f"{url}/x")]
)
def test_a_web_server_cannot_be_a_target(web: _Server, tmp_path: Path, act: Callable[[str, Path], object]) -> None:
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises((ConfigurationError, CorruptData)):
        act(web.url, tmp_path)


def test_missing_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "trainjob.data.stores.web", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigurationError, match=r"trainjob\[storage\]"):
        copy("https://host/x", str(tmp_path / "t"))


@pytest.mark.parametrize("act", [lambda source: copy(source, WEB), lambda source: initialize(source, WEB)])
def test_a_read_only_target_is_rejected_before_the_source_is_read(act: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="https:// can only be read") as refused:
        act(str(tmp_path / "missing"))
    assert WEB in str(refused.value)


def test_a_web_store_has_no_methods_that_write() -> None:
    assert not isinstance(open_store(parse_store(WEB)), WritableStore)
    with pytest.raises(ConfigurationError, match="https:// can only be read"):
        open_writable(parse_store(WEB))
