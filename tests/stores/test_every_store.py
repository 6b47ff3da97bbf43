"""What every store gets over and what it refuses, whichever it is; the container registries' own is in `tests.oci`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.stores.shelves import Fault, Shelf, opened, sha256
from tests.trees import files, tree

from trainjob import retrying
from trainjob.data import content, copy, read_manifest
from trainjob.data.transfer import scan
from trainjob.errors import (
    ConfigurationError,
    CorruptData,
    DataError,
    OutOfSpace,
    StoreUnavailable,
    UnsafePath,
)

# Of huggingface-hub, as it sends files.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    # Large files by several requests, whatever the machine: otherwise one is enough, and the second never fails.
    pytest.mark.usefixtures("by_ranges"),
]

BIG = os.urandom(100_003) * 60  # 6 MB: several ranges, two parts of an upload, in Git LFS
CLOUDS = ["s3", "gs", "az"]


@pytest.fixture
def shelf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Shelf]:
    monkeypatch.setattr("trainjob.data.ranges.PART", 1_000_000)
    with opened(request.param, monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def _times(count: int, fault: Fault) -> Callable[[int], Fault]:
    """From the second request on, so many times."""
    return lambda number: fault if 2 <= number < 2 + count else {}


reading = pytest.mark.parametrize("shelf", [*CLOUDS, "http", "hf"], indirect=True)
writing = pytest.mark.parametrize("shelf", [*CLOUDS, "hf"], indirect=True)
NOT_NOW = {"Retry-After": "0"}


# ------------------------------------------------------------ servers that fail while they are read


@reading
@pytest.mark.parametrize(
    "fault",
    [
        {"cut": 300_000},
        {"cut": 0},
        {"stall": True},
        {"status": 429, "headers": NOT_NOW},
        {"status": 500},
        {"status": 503, "headers": NOT_NOW},
    ],
    ids=lambda fault: "-".join(str(each) for each in next(iter(fault.items()))),
)
def test_what_passes_while_reading(shelf: Shelf, target: Path, fault: Fault) -> None:
    shelf.put({"big": BIG})
    shelf.on_read(_times(2, fault))
    began = time.monotonic()
    copy(shelf.uri("big"), str(target), digest=sha256(BIG))
    assert shelf.asked > 3
    assert time.monotonic() - began < 20, "it did not wait until the server hung up"


@reading
@pytest.mark.parametrize("fault", [{"cut": 0}, {"status": 503}])
def test_what_does_not_pass_ends_soon(
    shelf: Shelf, target: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "STORE", partial(retrying.STORE, first_pause=0.002))
    shelf.put({"big": BIG})
    shelf.on_read(lambda number: fault)
    with pytest.raises(StoreUnavailable):
        copy(shelf.uri("big"), str(target))
    assert shelf.asked <= 2 * retrying.STORE().failures * 6
    assert files(target).keys() <= {".trainjob/lock", content.MARK}
    assert read_manifest(str(target)) is None
    shelf.on_read(lambda number: {})
    copy(shelf.uri("big"), str(target), digest=sha256(BIG))


@reading
def test_a_file_that_changes_while_it_is_read(shelf: Shelf, target: Path) -> None:
    """Of the same length: only its entity tag tells."""
    shelf.put({"big": BIG})

    def change(number: int) -> Fault:
        if number == 3:
            shelf.replace("big", BIG[::-1])
        return {}

    shelf.on_read(change)
    with pytest.raises(CorruptData, match="changed"):
        copy(shelf.uri("big"), str(target))
    assert shelf.asked < 20, "it is an error at once"
    assert not (target / "big").exists()
    copy(shelf.uri("big"), str(target), digest=sha256(BIG[::-1]))


@reading
@pytest.mark.parametrize(
    ("status", "body"), [(403, b""), (401, b""), (400, b"<Error><Code>ExpiredToken</Code></Error>")]
)
def test_keys_that_are_rejected_while_reading(shelf: Shelf, target: Path, status: int, body: bytes) -> None:
    shelf.put({"big": BIG})
    shelf.on_read(lambda number: {"status": status, "body": body} if number > 2 else {})
    with pytest.raises(ConfigurationError):
        copy(shelf.uri("big"), str(target))
    assert shelf.asked < 20, "it is an error at once"
    assert read_manifest(str(target)) is None
    shelf.on_read(lambda number: {})
    copy(shelf.uri("big"), str(target), digest=sha256(BIG))


# ------------------------------------------------------------ servers that fail while they are written to


@writing
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"status": 403}, ConfigurationError),
        ({"status": 401}, ConfigurationError),
        ({"status": 507}, OutOfSpace),
        ({"status": 503}, StoreUnavailable),
        ({"cut": 0, "status": 500, "body": b"x"}, StoreUnavailable),
        ({"stall": True}, StoreUnavailable),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else each.__name__,
)
def test_what_ends_an_upload(
    shelf: Shelf, tmp_path: Path, target: Path, fault: Fault, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "STORE", partial(retrying.STORE, first_pause=0.002))
    source = tree(tmp_path / "source", {"big": BIG, "a": b"a"})
    shelf.on_write(lambda number: fault if number > 1 else {})
    if shelf.scheme == "hf":
        shelf.on_write(lambda number: fault)
    with pytest.raises(error):
        copy(str(source), shelf.uri())
    assert content.NAME not in shelf.held()
    shelf.on_write(lambda number: {})
    there = copy(str(source), shelf.uri())
    assert shelf.held() == {"big": BIG, "a": b"a", content.NAME: there.to_json()}


@pytest.mark.parametrize("shelf", ["s3"], indirect=True)
@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "ExpiredToken", ConfigurationError),
        (403, "InvalidAccessKeyId", ConfigurationError),
        (403, "QuotaExceeded", OutOfSpace),
        (507, "XMinioStorageFull", OutOfSpace),
        (400, "KeyTooLongError", UnsafePath),
    ],
)
def test_what_s3_servers_say(shelf: Shelf, tmp_path: Path, status: int, code: str, error: type[Exception]) -> None:
    source = tree(tmp_path / "source", {"big": BIG})
    shelf.on_write(lambda number: {"status": status, "body": f"<Error><Code>{code}</Code></Error>".encode()})
    with pytest.raises(error):
        copy(str(source), shelf.uri())
    assert shelf.asked == 1


@reading
def test_a_disk_that_is_full(shelf: Shelf, small_disk: Path) -> None:
    shelf.put({"big": BIG})
    began = time.monotonic()
    with pytest.raises(OutOfSpace, match=r"no space left for .*/big"):
        copy(shelf.uri("big"), str(small_disk / "t"))
    assert time.monotonic() - began < 30
    assert not list(small_disk.rglob("*.part"))
    assert read_manifest(str(small_disk / "t")) is None


@pytest.mark.parametrize("shelf", ["s3"], indirect=True)
def test_a_disk_that_is_full_of_a_part_that_could_be_gone_on_with(
    shelf: Shelf, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob.data.transfer._RESUMED", 1)
    shelf.put({"big": BIG})
    with pytest.raises(OutOfSpace, match=r"no space left for .*/big"):
        copy(shelf.uri("big"), str(small_disk / "t"))
    assert not [path for path in small_disk.rglob("*") if path.suffix in (".resume", ".noted")], "it is still full"


@pytest.mark.parametrize("shelf", ["hf"], indirect=True)
def test_no_room_for_what_is_to_be_sent(
    shelf: Shelf, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pytest.raises(OutOfSpace, match="no space left for"):
        copy(str(tree(tmp_path / "source", {"big": BIG})), shelf.uri())
    assert not list(small_disk.iterdir())
    assert content.NAME not in shelf.held()


# ------------------------------------------------------------ names


BAD = [
    "../evil",
    "a/../../evil",
    "/etc/passwd",
    "a//b",
    "a/./b",
    "a\\b",
    "a\nb",
    "a\tb",
    ".trainjob/x",
    "MANIFEST.json/x",
]


@writing
@pytest.mark.parametrize("name", BAD)
def test_names_that_are_refused(shelf: Shelf, target: Path, name: str) -> None:
    shelf.put({name: b"x", "good": b"y"})
    with pytest.raises(DataError):
        copy(shelf.uri(), str(target))
    assert not target.exists()
    assert not (target.parent / "evil").exists()


@pytest.mark.parametrize("shelf", ["hf"], indirect=True)
@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_only_json_can_say(shelf: Shelf, target: Path, name: str) -> None:
    shelf.put({name: b"x"})
    with pytest.raises(DataError):
        copy(shelf.uri(), str(target))
    assert not target.exists()


@writing
def test_long_names(shelf: Shelf, target: Path, tmp_path: Path) -> None:
    """A file system takes 255 bytes, and 4096 of a whole path; an object store has longer ones."""
    longest = "é" * 127 + "x"
    shelf.put({longest: b"x", f"d/{longest}": b"y"})
    copy(shelf.uri(), str(target))
    assert (target / "d" / longest).read_bytes() == b"y"
    for name in (f"{longest}x", "/".join(["d" * 200] * 25)):
        shelf.put({name: b"x"})
        with pytest.raises(UnsafePath, match="too long"):
            copy(shelf.uri(), str(tmp_path / "t2"))
        assert read_manifest(str(tmp_path / "t2")) is None
        assert scan(shelf.uri()).files[0].path == name


FORMS = [
    "\u00e9",
    "e\u0301",
    "\u00c5",
    "A\u030a",
    "\u212b",
    "K",
    "\u212a",
    "\ufb01",
    "I",
    "\u0130",
    "\u0131",
    "\U0001f600",
]


@writing
def test_forms_of_unicode_stay_apart(shelf: Shelf, target: Path, tmp_path: Path) -> None:
    """What some systems take for the same name are several files, and each stays what it is."""
    given = {f"{form}/{form}": form.encode() + b"%d" % number for number, form in enumerate(FORMS)}
    source = tree(tmp_path / "source", given)
    there = copy(str(source), shelf.uri())
    assert shelf.held() == given | {content.NAME: there.to_json()}
    assert copy(shelf.uri(), str(target)).digest == there.digest
    assert files(target) == given
