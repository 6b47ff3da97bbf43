"""Faults of transfers from and to S3: cuts, stalls, refusals, kills, and objects that change during a download."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.seaweedfs import SeaweedFS

from trainjob._support import retrying
from trainjob.data import copy, file_manifest, ranges, read_manifest, transfer
from trainjob.data.locations import Location, parse_store
from trainjob.data.stores import opening
from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.files import FileStore
from trainjob.data.stores.parts import BLOCK, Part
from trainjob.errors import CorruptData, StoreUnavailable

BIG = os.urandom(1_000_003) * 30  # 30 MB: three ranges and more
SHA256 = hashlib.sha256(BIG).hexdigest()


class _Proxy:
    """A proxy between the copy and S3. It forwards bytes, or cuts, stalls or answers by itself as `decide` returns."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.down = 0
        self.requests: list[bytes] = []
        self.decide: Callable[[bytes], dict[str, Any]] = lambda head: {}
        self.threads: list[threading.Thread] = []
        self.connections: list[socket.socket] = []
        self.stalled = threading.Event()
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self.socket.accept()
            except OSError:
                return
            self.connections.append(here)
            self._start(self._serve, here)

    def _serve(self, here: socket.socket) -> None:
        """One request a connection."""
        with here, socket.create_connection(self.target) as there:
            head = b""
            while b"\r\n\r\n" not in head:
                data = here.recv(65536)
                if not data:
                    return
                head += data
            head, _, rest = head.partition(b"\r\n\r\n")
            self.requests.append(head)
            fault = self.decide(head)
            if "answer" in fault:
                here.sendall(fault["answer"])
                return
            head = re.sub(rb"\r\n[Cc]onnection:[^\r]*", b"", head) + b"\r\nConnection: close\r\n\r\n"
            there.sendall(head + rest)
            left = int((re.search(rb"[Cc]ontent-[Ll]ength: (\d+)", head) or [b"", b"0"])[1]) - len(rest)
            while left > 0 and (data := here.recv(65536)):
                there.sendall(data)
                left -= len(data)
            if left > 0:
                return  # the client is gone
            passed = 0
            try:
                while data := there.recv(65536):
                    if passed + len(data) > fault.get("stall", 1 << 60):
                        self.stalled.wait(20)
                        return
                    if passed + len(data) > fault.get("cut", 1 << 60):
                        return
                    here.sendall(data)
                    passed += len(data)
                    self.down += len(data)
                    time.sleep(fault.get("pause", 0))
            except OSError:
                return

    def close(self) -> None:
        self.stalled.set()
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.threads[0].join(5)  # `_accept`: from here on there are no more connections
        for connection in self.connections:
            with suppress(OSError):  # most are closed already; a client keeps others open, and sends nothing more
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[_Proxy]:
    host, _, port = seaweedfs.endpoint.rpartition("/")[2].partition(":")
    made = _Proxy((host, int(port)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_bucket(seaweedfs: SeaweedFS) -> Any:
    made = seaweedfs.resource.Bucket("faults")
    made.create()
    return made


@pytest.fixture
def bucket(seaweedfs: SeaweedFS, own_bucket: Any, proxy: _Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {**seaweedfs.environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    yield own_bucket
    own_bucket.objects.all().delete()


@pytest.fixture(params=["alone", "by ranges"])
def connections(request: pytest.FixtureRequest) -> None:
    """Over one connection, and over several."""
    if request.param != "alone":
        request.getfixturevalue("by_ranges")


def _get(head: bytes) -> bool:
    return head.startswith(b"GET /faults/d/big")


@pytest.mark.usefixtures("connections")
def test_cuts(bucket: Any, proxy: _Proxy, tmp_path: Path) -> None:
    bucket.put_object(Key="d/big", Body=BIG)
    left = [700_000, 3_000_000, 0, 5_000_000]
    proxy.decide = lambda head: {"cut": left.pop()} if _get(head) and left else {}
    copy("s3://faults/d/", str(tmp_path / "t"))
    assert hashlib.sha256((tmp_path / "t/big").read_bytes()).hexdigest() == SHA256
    assert not left
    assert proxy.down < len(BIG) + 8 * 1024 * 1024


@pytest.mark.usefixtures("connections")
def test_stalls(bucket: Any, proxy: _Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.data.stores.clouds.STALL", "500ms")
    bucket.put_object(Key="d/big", Body=BIG)
    left = [2_000_000, 0]
    proxy.decide = lambda head: {"stall": left.pop()} if _get(head) and left else {}
    began = time.monotonic()
    copy("s3://faults/d/big", str(tmp_path / "t"), digest=SHA256)
    assert not left
    assert time.monotonic() - began < 15, "the stalled server is not waited for"


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Slow Down", "500 Internal Server Error"])
def test_refusals(bucket: Any, proxy: _Proxy, tmp_path: Path, status: str) -> None:
    bucket.put_object(Key="d/big", Body=BIG)
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    left = [answer] * 3
    proxy.decide = lambda head: {"answer": left.pop()} if _get(head) and left else {}
    copy("s3://faults/d/big", str(tmp_path / "t"), digest=SHA256)
    assert not left


@pytest.mark.usefixtures("connections")
def test_a_lasting_outage_is_reported(bucket: Any, proxy: _Proxy, tmp_path: Path) -> None:
    bucket.put_object(Key="d/big", Body=BIG)
    proxy.decide = lambda head: {"cut": 0} if _get(head) else {}
    with pytest.raises(StoreUnavailable):
        copy("s3://faults/d/", str(tmp_path / "t"))
    assert sum(map(_get, proxy.requests)) <= 6 * ranges.AT_ONCE
    assert read_manifest(str(tmp_path / "t")) is None


@pytest.mark.usefixtures("connections")
def test_an_object_that_changes_during_a_download(bucket: Any, proxy: _Proxy, tmp_path: Path) -> None:
    bucket.put_object(Key="d/big", Body=BIG)
    cut = [len(BIG) // 2]
    seen: list[bytes] = []

    def change(head: bytes) -> dict[str, Any]:
        if _get(head):
            seen.append(head)
            if len(seen) == 2:
                bucket.put_object(Key="d/big", Body=BIG[::-1])
            if cut:
                return {"cut": cut.pop()}
        return {}

    proxy.decide = change
    with pytest.raises(CorruptData, match="changed"):
        copy("s3://faults/d/", str(tmp_path / "t"))
    assert len(seen) <= 12, "reported without retries"
    assert not (tmp_path / "t/big").exists()


def test_several_connections_where_one_is_slow(
    bucket: Any, proxy: _Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "TRIAL", 0.1)
    bucket.put_object(Key="d/big", Body=BIG)
    proxy.decide = lambda head: {"pause": 0.02} if _get(head) else {}
    copy("s3://faults/d/big", str(tmp_path / "t"), digest=SHA256)
    assert 3 <= sum(map(_get, proxy.requests)) <= 6


@pytest.mark.parametrize("status", ["503 Slow Down", "429 Too Many Requests"])
@pytest.mark.parametrize("size", [1000, len(BIG)])
def test_an_upload_survives_cuts(
    bucket: Any, proxy: _Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, status: str, size: int
) -> None:
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 6})
    (tmp_path / "source").mkdir()
    (tmp_path / "source/big").write_bytes(BIG[:size])
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    left: list[dict[str, Any]] = [{"cut": 0}, {"answer": answer}] * 2
    proxy.decide = lambda head: left.pop() if head.startswith(b"PUT /faults/up/big") and left else {}
    there = copy(str(tmp_path / "source"), "s3://faults/up")
    assert not left
    assert transfer.scan("s3://faults/up").digest == there.digest
    assert not bucket.meta.client.list_multipart_uploads(Bucket="faults").get("Uploads", [])


_COPY = "import sys; from trainjob.data import copy; copy(sys.argv[1], sys.argv[2], progress=print)"


def _killed_after(arguments: list[str], happened: Callable[[], bool], number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", _COPY, *arguments], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) != 0, "the process ended before the signal"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_download_is_resumed(bucket: Any, proxy: _Proxy, tmp_path: Path, number: signal.Signals) -> None:
    data = BIG * 2  # 60 MB
    bucket.put_object(Key="d/big", Body=data)
    target = tmp_path / "t"
    proxy.decide = lambda head: {"pause": 0.004} if _get(head) else {}

    def noted() -> bool:
        return any(len(note.read_text().splitlines()) > 3 for note in target.glob(".trainjob/*.noted"))

    _killed_after(["s3://faults/d/", str(target)], noted, number)
    assert read_manifest(str(target)) is None
    assert not (target / "big").exists()
    proxy.decide, proxy.down = lambda head: {}, 0
    copy("s3://faults/d/", str(target))
    assert (target / "big").read_bytes() == data
    assert not (target / file_manifest.WORK).exists()
    assert proxy.down < len(data) - 2 * BLOCK, f"{proxy.down} of {len(data)} bytes were sent again"


def test_a_killed_upload_starts_again(bucket: Any, proxy: _Proxy, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/big").write_bytes(BIG)
    begun = threading.Event()

    def slow(head: bytes) -> dict[str, Any]:
        if b"partNumber=3" in head:
            begun.set()
            time.sleep(2)
        return {}

    proxy.decide = slow
    _killed_after([str(tmp_path / "source"), "s3://faults/up"], begun.is_set, signal.SIGKILL)
    assert [each.key for each in bucket.objects.filter(Prefix="up/")] == [f"up/{file_manifest.MARK}"]
    proxy.decide = lambda head: {}
    there = copy(str(tmp_path / "source"), "s3://faults/up")
    assert transfer.scan("s3://faults/up").digest == there.digest
    assert {each.key for each in bucket.objects.filter(Prefix="up/")} == {"up/big", f"up/{file_manifest.NAME}"}


@pytest.mark.parametrize("damage", ["bytes", "note", "shorter", "longer", "other state", "no note"])
def test_a_part_is_kept_up_to_its_last_valid_hash(tmp_path: Path, damage: str) -> None:
    data = os.urandom(5 * BLOCK // 2)
    first = Part(tmp_path, "x", "state")
    list(first.held())
    digests = (hashlib.sha256(data[: count * BLOCK]).hexdigest() for count in (1, 2))
    with pytest.raises(StoreUnavailable):
        first.append(_failing(data), lambda: next(digests))
    noted = next(tmp_path.glob("*.noted"))
    if damage == "bytes":
        with first.path.open("r+b") as file:
            file.seek(BLOCK + 17)
            file.write(bytes([data[BLOCK + 17] ^ 1]))
    elif damage == "note":
        noted.write_text(noted.read_text()[:-20])
    elif damage == "shorter":
        os.truncate(first.path, BLOCK + 1)
    elif damage == "longer":
        with first.path.open("ab") as file:
            file.write(b"garbage" * 1000)
    elif damage == "no note":
        noted.unlink()
    again = Part(tmp_path, "x", "another" if damage == "other state" else "state")
    held = b"".join(again.held())
    assert held == data[: {"longer": 2, "other state": 0, "no note": 0}.get(damage, 1) * BLOCK]
    again.append([data[len(held) :]], lambda: "")
    again.move(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == data
    assert {path.name for path in tmp_path.iterdir()} == {"whole"}


def _failing(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]
    raise StoreUnavailable("cut")


def test_a_part_of_wrong_data_is_not_kept(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="d/big.gz", Body=BIG * 2)
    with pytest.raises(CorruptData, match="gzip"):
        copy("s3://faults/d/", str(tmp_path / "t"))
    assert not list((tmp_path / "t").rglob("*.resume"))


class _ResumingStore(FileStore):
    """Like a container registry: it resumes reads itself, and can check a file only if it reads all of it."""

    resumes_reads = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self.starts: list[int] = []
        self.available = False

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        if path != "big":
            yield from super().read(path, start=start, length=length, etag=etag)
            return
        self.starts.append(start)
        yield from super().read(path, start=start, length=None if self.available else 2 * BLOCK, etag=etag)
        if not self.available:
            raise StoreUnavailable("an outage longer than the retries")


@pytest.mark.parametrize("known", [False, True])
def test_a_store_that_resumes_itself_needs_a_digest_to_resume_a_copy(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "big").write_bytes(BIG)
    source = _ResumingStore(parse_store(str(tmp_path / "from") + "/"))
    monkeypatch.setattr(opening, "open_store", lambda at: source if at == source.location else FileStore(at))
    monkeypatch.setattr(transfer, "_RESUMED", 1)
    options: dict[str, Any] = {"digest": SHA256} if known else {}
    with pytest.raises(StoreUnavailable):
        copy(source.location.uri, str(tmp_path / "to"), **options)
    assert source.starts == [0], "the copy does not retry"
    source.available = True
    assert copy(source.location.uri, str(tmp_path / "to"), **options).files[0].sha256 == SHA256
    assert source.starts == [0, 2 * BLOCK if known else 0]
