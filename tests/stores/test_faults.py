"""Faults of transfers from and to a real S3: cuts, stalls, refusals, kills, and objects that change meanwhile."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.faults import Fault, Kind, Proxy, Seen
from tests.seaweedfs import SeaweedFS
from tests.trees import tree

from trainjob.data import copy, file_manifest, ranges, read_manifest, transfer
from trainjob.data.locations import Location, parse_store
from trainjob.data.stores import opening
from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.files import FileStore
from trainjob.data.stores.parts import BLOCK, Part
from trainjob.errors import CorruptData, StoreUnavailable

BIG = os.urandom(1_000_003) * 30  # 30 MB: three ranges and more
SHA256 = hashlib.sha256(BIG).hexdigest()


@pytest.fixture
def proxy(
    seaweedfs: SeaweedFS, start_proxy: Callable[[str], Proxy], bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> Proxy:
    """A proxy through which the bucket is read and written, without retries of obstore."""
    proxy = start_proxy(seaweedfs.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.host}")
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    return proxy


@pytest.fixture(params=["alone", "by ranges"])
def connections(request: pytest.FixtureRequest) -> None:
    """Over one connection, and over several."""
    if request.param != "alone":
        request.getfixturevalue("by_ranges")


def reads_big(seen: Seen) -> bool:
    return seen.method == "GET" and seen.path.endswith("/d/big")


def one_each(matches: Callable[[Seen], bool], faults: list[Fault]) -> Callable[[Seen], Fault | None]:
    """A plan: one of these faults for each request that matches; removes them from the list."""
    return lambda seen: faults.pop() if matches(seen) and faults else None


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault(Kind.BREAK, after=size) for size in (700_000, 3_000_000, 0, 5_000_000)], id="cuts"),
        pytest.param([Fault(Kind.STALL_BODY, after=size) for size in (2_000_000, 0)], id="stalls"),
        *(pytest.param([Fault(Kind.ANSWER, status)] * 3, id=f"{status}") for status in (429, 500, 503)),
    ],
)
def test_faults_of_a_download_are_survived(
    bucket: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: list[Fault]
) -> None:
    monkeypatch.setattr("trainjob.data.stores.clouds.STALL", "500ms")
    bucket.put_object(Key="d/big", Body=BIG)
    left = list(faults)
    proxy.plan = one_each(reads_big, left)
    copy(f"s3://{bucket.name}/d/big", str(tmp_path / "t"), digest=SHA256)
    assert not left
    assert proxy.received < len(BIG) + 8 * 1024 * 1024


def test_several_connections_where_one_is_slow(
    bucket: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "TRIAL", 0.1)
    bucket.put_object(Key="d/big", Body=BIG)
    proxy.plan = lambda seen: Fault(Kind.SLOW, seconds=0.02) if reads_big(seen) else None
    copy(f"s3://{bucket.name}/d/big", str(tmp_path / "t"), digest=SHA256)
    assert 3 <= len(proxy.injected) <= 6


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize("size", [1000, len(BIG)])
def test_an_upload_survives_cuts(
    bucket: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, status: int, size: int
) -> None:
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 6})
    source, target = tree(tmp_path / "source", {"big": BIG[:size]}), f"s3://{bucket.name}/up"
    left = [Fault(Kind.DROP), Fault(Kind.ANSWER, status)] * 2
    proxy.plan = one_each(lambda seen: seen.method == "PUT" and seen.path.endswith("/up/big"), left)
    there = copy(str(source), target)
    assert not left
    assert transfer.scan(target).digest == there.digest
    assert not bucket.meta.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])


# ---------------------------------------------------------------- kills


_COPY = "import sys; from trainjob.data import copy; copy(sys.argv[1], sys.argv[2], progress=print)"


def kill_after(arguments: list[str], happened: Callable[[], bool], number: int) -> int:
    """Copy in a process, and send it a signal once something has happened; return its exit status."""
    process = subprocess.Popen([sys.executable, "-c", _COPY, *arguments], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(60)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_download_is_resumed(bucket: Any, proxy: Proxy, tmp_path: Path, number: signal.Signals) -> None:
    data, source, target = BIG * 2, f"s3://{bucket.name}/d/", tmp_path / "t"  # 60 MB
    bucket.put_object(Key="d/big", Body=data)
    proxy.plan = lambda seen: Fault(Kind.SLOW, seconds=0.004) if reads_big(seen) else None

    def noted() -> bool:
        return any(len(note.read_text().splitlines()) > 3 for note in target.glob(".trainjob/*.noted"))

    assert kill_after([source, str(target)], noted, number) != 0, "the process ended before the signal"
    assert read_manifest(str(target)) is None
    assert not (target / "big").exists()
    proxy.plan = lambda _: None
    proxy.requests.clear()
    copy(source, str(target))
    assert (target / "big").read_bytes() == data
    assert not (target / file_manifest.WORK).exists()
    assert proxy.received < len(data) - 2 * BLOCK, f"{proxy.received} of {len(data)} bytes were sent again"


def test_a_killed_upload_starts_again(bucket: Any, proxy: Proxy, tmp_path: Path) -> None:
    source, target = tree(tmp_path / "source", {"big": BIG}), f"s3://{bucket.name}/up"
    begun = threading.Event()

    def stall(seen: Seen) -> Fault | None:
        if seen.query.get("partNumber") != "3":
            return None
        begun.set()
        return Fault(Kind.STALL)

    proxy.plan = stall
    assert kill_after([str(source), target], begun.is_set, signal.SIGKILL) != 0
    assert [each.key for each in bucket.objects.filter(Prefix="up/")] == [f"up/{file_manifest.MARK}"]
    proxy.plan = lambda _: None
    there = copy(str(source), target)
    assert transfer.scan(target).digest == there.digest
    assert {each.key for each in bucket.objects.filter(Prefix="up/")} == {"up/big", f"up/{file_manifest.NAME}"}


# ---------------------------------------------------------------- parts that are kept


def damage_bytes(part: Path) -> None:
    with part.open("r+b") as file:
        file.seek(BLOCK + 17)
        byte = file.read(1)[0]
        file.seek(BLOCK + 17)
        file.write(bytes([byte ^ 1]))


def shorten_note(part: Path) -> None:
    note = part.with_suffix(".noted")
    note.write_text(note.read_text()[:-20])


DAMAGE: dict[str, tuple[Callable[[Path], object], int]] = {
    "bytes": (damage_bytes, 1),
    "note": (shorten_note, 1),
    "shorter": (lambda part: os.truncate(part, BLOCK + 1), 1),
    "longer": (lambda part: part.write_bytes(part.read_bytes() + b"garbage" * 1000), 2),
    "other state": (lambda part: None, 0),
    "no note": (lambda part: part.with_suffix(".noted").unlink(), 0),
}
"""How a part is damaged, and how many of its blocks remain."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_is_kept_up_to_its_last_valid_hash(tmp_path: Path, damage: str) -> None:
    data, (spoil, blocks) = os.urandom(5 * BLOCK // 2), DAMAGE[damage]
    first = Part(tmp_path, "x", "state")
    list(first.held())
    digests = (hashlib.sha256(data[: count * BLOCK]).hexdigest() for count in (1, 2))
    with pytest.raises(StoreUnavailable):
        first.append(_failing(data), lambda: next(digests))
    spoil(first.path)
    again = Part(tmp_path, "x", "another" if damage == "other state" else "state")
    held = b"".join(again.held())
    assert held == data[: blocks * BLOCK]
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
        copy(f"s3://{bucket.name}/d/", str(tmp_path / "t"))
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
    tree(tmp_path / "from", {"big": BIG})
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
