"""Reads of web servers, and the certificates that they must have."""

from __future__ import annotations

import hashlib
import os
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
from tests.fakes.scripted import Answer, Asked, ScriptedServer, span
from tests.serving import serving

from trainjob._support import retrying
from trainjob.data import copy, initialize, ranges, read_manifest
from trainjob.data.locations import parse_store
from trainjob.data.stores import trust
from trainjob.data.stores.opening import open_writable
from trainjob.data.stores.web import Web as Client
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, StoreUnavailable

BIG = bytes(range(256)) * 50_000  # 12.8 MB
SHA256 = hashlib.sha256(BIG).hexdigest()
WEB = "https://host.example/x"


class Web(ScriptedServer):
    """Serves one file, or what the path names. `faults` are called with the number of a request."""

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.sent, self.ranges, self.tag = 0, True, '"1"'
        self.faults: Callable[[int], dict[str, Any]] = lambda number: {}

    def reply(self, asked: Asked) -> Answer:
        path, _, query = asked.path.partition("?")
        fault, headers = dict(self.faults(len(self.asked) - 1)), {"ETag": self.tag} if self.tag else {}
        if fault.pop("stall", False):
            self.stalled.wait(20)
            return Answer(closes=True)
        status = fault.pop("status", int(path[1:4]) if path[1:4].isdigit() else 200)
        if status != 200:
            return Answer(status, headers=headers | fault.pop("headers", {}))
        body = query.encode() if path == "/query.csv" else BIG
        whole = fault.pop("whole", f"{len(body)}")
        if self.ranges and asked.headers.get("If-Range", self.tag) == self.tag:
            status, body, described = span(body, asked.headers.get("Range", ""))
            headers |= {name: value.replace(f"/{len(BIG)}", f"/{whole}") for name, value in described.items()}
        self.sent += len(body[: fault.get("cut")]) if len(body) > 1 else 0
        return Answer(status, body, headers, **fault)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))


def test_connections_are_reused_by_all_threads(web: Web) -> None:
    """With the default limits of httpx, 12 of 32 connections are closed after each file and opened again."""
    together = threading.Barrier(32)

    def all_at_once(number: int) -> dict[str, Any]:
        together.wait(20)
        return {}

    web.faults = all_at_once
    client = Client(web.url)
    read = [lambda: b"".join(client.read(f"{web.url}/query.csv?some", "it", 0, None, ""))] * 32
    with ThreadPoolExecutor(32) as pool:
        for _ in range(3):
            assert [each.result() for each in [pool.submit(one) for one in read]] == [b"some"] * 32
    client.close()
    assert len({asked.client for asked in web.asked}) == 32


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("404.csv", SourceNotFound, "does not exist"),
        ("403.csv", ConfigurationError, "denied"),
        ("500.csv", StoreUnavailable, "500"),
        ("418.csv", ConfigurationError, "418"),
        ("", SourceNotFound, "is not a file"),
    ],
)
def test_error_statuses_are_mapped(web: Web, tmp_path: Path, path: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        copy(f"{web.url}/{path}", str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None
    assert len(web.asked) <= 30


@pytest.fixture(params=[False, True], ids=["one request", "alone or by ranges"])
def parallel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the file as one, or as a large file: over one connection that is fast enough."""
    monkeypatch.setattr(ranges, "PART", 1_000_000 if request.param else 100_000_000)


@pytest.mark.usefixtures("parallel")
@pytest.mark.parametrize("supported", [False, True])
def test_download_resumes_after_a_cut(web: Web, tmp_path: Path, supported: bool) -> None:
    """`tests/stores` reads large files by several ranges."""
    web.ranges = supported
    web.faults = lambda number: {"cut": 5_000_000 if number > 1 else 2_500_000} if number in (1, 2) else {}
    copy(f"{web.url}/x", str(tmp_path / "t"), digest=SHA256)
    assert (tmp_path / "t/x").read_bytes() == BIG
    if supported:
        assert web.sent <= len(BIG) + 2 * 1024 * 1024, "at most one buffer is sent again"


def test_a_server_that_stalls_is_reported(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.data.stores.web._TIMEOUT", httpx.Timeout(0.2))
    web.faults = lambda number: {"stall": True}
    with pytest.raises(StoreUnavailable, match="stopped sending"):
        copy(f"{web.url}/x", str(tmp_path / "t2"))


@pytest.mark.parametrize(("asked", "seconds"), [("7", 7), ("99999999", 3600)])
def test_retry_after_is_obeyed(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, seconds: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    web.faults = lambda number: {"status": 429, "headers": {"Retry-After": asked}} if number < 2 else {}
    copy(f"{web.url}/x", str(tmp_path / "t"), digest=SHA256)
    assert len(pauses) == 2
    assert all(seconds <= pause <= seconds + 1 for pause in pauses)


@pytest.mark.parametrize(
    ("tag", "ranges", "fault", "error", "words"),
    [
        ("", True, {"cut": 5_000_000}, StoreUnavailable, "cut"),
        ('"1"', True, {"whole": "*"}, ConfigurationError, "does not report the size"),  # RFC 9110, 14.4
        ('"1"', False, {"chunks": [BIG]}, ConfigurationError, "does not report the size"),
    ],
    ids=["cut without an ETag", "range of an unknown size", "chunks"],
)
def test_a_file_that_cannot_be_resumed_or_measured_is_rejected(
    web: Web, tmp_path: Path, tag: str, ranges: bool, fault: dict[str, Any], error: type[Exception], words: str
) -> None:
    web.tag, web.ranges = tag, ranges
    web.faults = lambda number: fault if number == 1 or "cut" not in fault else {}
    with pytest.raises(error, match=words):
        copy(f"{web.url}/x", str(tmp_path / "t"))


def test_a_web_server_can_only_be_read(web: Web, tmp_path: Path) -> None:
    for act in (copy, initialize):
        with pytest.raises(ConfigurationError, match="https:// can only be read") as refused:
            act(str(tmp_path / "missing"), WEB)
        assert WEB in str(refused.value)
    with pytest.raises(ConfigurationError, match="https:// can only be read"):
        open_writable(parse_store(WEB))
    with pytest.raises(CorruptData):
        read_manifest(f"{web.url}/x")


@pytest.mark.parametrize(
    ("package", "source", "extra"),
    [
        ("httpx", "https://host/x", "storage"),
        ("obstore.store", "s3://models/x", "storage"),
        ("huggingface_hub", "hf://org/model", "hf"),
    ],
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, source: str, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, "trainjob.data.stores.web", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"trainjob\[{extra}\]"):
        copy(source, str(tmp_path / "t"))


END = "-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("load", [trust.by_httpx, trust.by_system])
def test_certificates_are_loaded_again_when_they_change(
    load: Callable[[], ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    default = load()
    assert load() is default
    one, two, *_ = (each + END for each in Path(certifi.where()).read_text().split(END))
    file = tmp_path / "ca.pem"
    file.write_text(one)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    only = load()
    assert load() is only
    assert only.cert_store_stats()["x509_ca"] == 1
    before = file.stat().st_mtime_ns
    file.write_text(one + two)
    os.utime(file, ns=(before + 1, before + 1))
    assert load().cert_store_stats()["x509_ca"] == 2
    monkeypatch.delenv("SSL_CERT_FILE")
    assert load() is default


def test_a_file_without_certificates_is_an_error_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").write_text("none")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for _ in range(2):
        with pytest.raises(ssl.SSLError):
            trust.by_httpx()
