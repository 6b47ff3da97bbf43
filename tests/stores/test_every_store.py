"""Faults and names that every store handles in the same way; `tests.oci` tests container registries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from tests.stores.faulty import Fault, FaultyStore, faulty_store, sha256
from tests.trees import files, tree

from trainjob._support import retrying
from trainjob.data import copy, file_manifest, read_manifest
from trainjob.data.transfer import scan
from trainjob.errors import ConfigurationError, CorruptData, DataError, OutOfSpace, StoreUnavailable, UnsafePath

# huggingface-hub warns while it uploads files.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

BIG = os.urandom(100_003) * 60  # 6 MB: several ranges, two parts of an upload, in Git LFS
CLOUDS = ["s3", "gs", "az"]


@pytest.fixture
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyStore]:
    monkeypatch.setattr("trainjob.data.ranges.PART", 1_000_000)
    with faulty_store(request.param, monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def _times(count: int, fault: Fault) -> Callable[[int], Fault]:
    """The fault for ``count`` requests, from the second one on."""
    return lambda number: fault if 2 <= number < 2 + count else {}


# Read large files by several requests on every machine: with one request there is no second one to fail.
by_ranges = pytest.mark.usefixtures("by_ranges")
reading = pytest.mark.parametrize("store", [*CLOUDS, "http", "hf"], indirect=True)
writing = pytest.mark.parametrize("store", [*CLOUDS, "hf"], indirect=True)
NOT_NOW = {"Retry-After": "0"}


@pytest.fixture(params=["alone", "by ranges"])
def connections(request: pytest.FixtureRequest) -> None:
    """Over one connection, and over several."""
    if request.param != "alone":
        request.getfixturevalue("by_ranges")


# ------------------------------------------------------------ failing reads


@by_ranges
@pytest.mark.timeout(60)  # a stalled connection is not waited for
@reading
@pytest.mark.parametrize(
    "fault",
    [{"cut": 300_000}, {"cut": 0}, {"stall": True}, {"status": 500}]
    + [{"status": status, "headers": NOT_NOW} for status in (429, 503)],
    ids=lambda fault: "-".join(str(each) for each in next(iter(fault.items()))),
)
def test_temporary_faults_of_reads_are_survived(store: FaultyStore, target: Path, fault: Fault) -> None:
    store.put({"big": BIG})
    store.on_read(_times(2, fault))
    copy(store.uri("big"), str(target), digest=sha256(BIG))
    assert store.matched > 3


@pytest.mark.usefixtures("connections")
@reading
@pytest.mark.parametrize("fault", [{"cut": 0}, {"status": 503}])
def test_a_lasting_fault_of_reads_is_reported(
    store: FaultyStore, target: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.002))
    store.put({"big": BIG})
    store.on_read(lambda number: fault)
    with pytest.raises(StoreUnavailable):
        copy(store.uri("big"), str(target))
    assert store.matched <= 2 * retrying.TRANSFER().failures * 6
    assert files(target).keys() <= {".trainjob/lock", file_manifest.MARK}
    assert read_manifest(str(target)) is None
    store.on_read(lambda number: {})
    copy(store.uri("big"), str(target), digest=sha256(BIG))


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("store", "connections"),
    [*product([*CLOUDS, "http"], ["alone", "by ranges"]), ("hf", "by ranges")],  # alone, it reads the earlier file
    indirect=True,
)
def test_a_file_that_changes_while_it_is_read(store: FaultyStore, target: Path) -> None:
    """Its length stays the same: only the entity tag shows the change."""
    store.put({"big": BIG})

    def change(number: int) -> Fault:
        if number == 2:
            store.replace("big", BIG[::-1])
        return {"cut": 300_000} if number == 1 else {}

    store.on_read(change)
    with pytest.raises(CorruptData, match="changed"):
        copy(store.uri("big"), str(target))
    assert store.matched < 20, "reported without retries"
    assert not (target / "big").exists()
    copy(store.uri("big"), str(target), digest=sha256(BIG[::-1]))


@by_ranges
@reading
@pytest.mark.parametrize(
    ("status", "body"), [(403, b""), (401, b""), (400, b"<Error><Code>ExpiredToken</Code></Error>")]
)
def test_keys_rejected_while_reading(store: FaultyStore, target: Path, status: int, body: bytes) -> None:
    store.put({"big": BIG})
    store.on_read(lambda number: {"status": status, "body": body} if number > 2 else {})
    with pytest.raises(ConfigurationError):
        copy(store.uri("big"), str(target))
    assert store.matched < 20, "reported without retries"
    assert read_manifest(str(target)) is None
    store.on_read(lambda number: {})
    copy(store.uri("big"), str(target), digest=sha256(BIG))


# ------------------------------------------------------------ failing writes


@pytest.mark.full
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
def test_a_failed_upload_is_incomplete_and_can_be_repeated(
    store: FaultyStore,
    tmp_path: Path,
    target: Path,
    fault: Fault,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.002))
    source = tree(tmp_path / "source", {"big": BIG, "a": b"a"})
    store.on_write(lambda number: fault if number > 1 else {})
    if store.scheme == "hf":
        store.on_write(lambda number: fault)
    with pytest.raises(error):
        copy(str(source), store.uri())
    assert file_manifest.NAME not in store.held()
    store.on_write(lambda number: {})
    there = copy(str(source), store.uri())
    assert store.held() == {"big": BIG, "a": b"a", file_manifest.NAME: there.to_json()}


@pytest.mark.parametrize("store", ["s3"], indirect=True)
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
def test_error_codes_of_s3_servers(
    store: FaultyStore, tmp_path: Path, status: int, code: str, error: type[Exception]
) -> None:
    source = tree(tmp_path / "source", {"big": BIG})
    store.on_write(lambda number: {"status": status, "body": f"<Error><Code>{code}</Code></Error>".encode()})
    with pytest.raises(error):
        copy(str(source), store.uri())
    assert store.matched == 1


@pytest.mark.timeout(60)
@reading
def test_a_full_disk(store: FaultyStore, small_disk: Path) -> None:
    store.put({"big": BIG})
    with pytest.raises(OutOfSpace, match=r"no space left for .*/big"):
        copy(store.uri("big"), str(small_disk / "t"))
    assert not list(small_disk.rglob("*.part"))
    assert read_manifest(str(small_disk / "t")) is None


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_full_disk_keeps_no_part_to_resume(
    store: FaultyStore, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob.data.transfer._RESUMED", 1)
    store.put({"big": BIG})
    with pytest.raises(OutOfSpace, match=r"no space left for .*/big"):
        copy(store.uri("big"), str(small_disk / "t"))
    assert not [path for path in small_disk.rglob("*") if path.suffix in (".resume", ".noted")], (
        "the disk is still full"
    )


@pytest.mark.parametrize("store", ["hf"], indirect=True)
def test_a_full_temporary_directory_of_an_upload(
    store: FaultyStore, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pytest.raises(OutOfSpace, match="no space left for"):
        copy(str(tree(tmp_path / "source", {"big": BIG})), store.uri())
    assert not list(small_disk.iterdir())
    assert file_manifest.NAME not in store.held()


# ------------------------------------------------------------ names


BAD = ["../evil", "a/../../evil", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\nb", ".trainjob/x", "MANIFEST.json/x"]


@pytest.mark.parametrize(
    ("store", "name"),
    # Only JSON can contain the last two.
    [*((store, name) for store in (*CLOUDS, "hf") for name in BAD), ("hf", "a\0b"), ("hf", "\ud800")],
    indirect=["store"],
)
def test_unsafe_names_are_refused(store: FaultyStore, target: Path, name: str) -> None:
    store.put({name: b"x", "good": b"y"})
    with pytest.raises(DataError):
        copy(store.uri(), str(target))
    assert not target.exists()
    assert not (target.parent / "evil").exists()


@writing
def test_long_names(store: FaultyStore, target: Path, tmp_path: Path) -> None:
    """A file system allows names of 255 bytes and paths of 4096; an object store allows longer ones."""
    longest = "é" * 127 + "x"
    store.put({longest: b"x", f"d/{longest}": b"y"})
    copy(store.uri(), str(target))
    assert (target / "d" / longest).read_bytes() == b"y"
    for name in (f"{longest}x", "/".join(["d" * 200] * 25)):
        store.put({name: b"x"})
        with pytest.raises(UnsafePath, match="too long for this file system; rename or exclude the file"):
            copy(store.uri(), str(tmp_path / "t2"))
        assert read_manifest(str(tmp_path / "t2")) is None
        assert scan(store.uri()).files[0].path == name


FORMS = ["e\u0301", "A\u030a", *"\u00e9\u00c5\u212bK\u212a\ufb01I\u0130\u0131\U0001f600"]


@writing
def test_unicode_forms_are_different_names(store: FaultyStore, target: Path, tmp_path: Path) -> None:
    """Names that some systems treat as equal are different files, and each keeps its form."""
    given = {f"{form}/{form}": form.encode() + b"%d" % number for number, form in enumerate(FORMS)}
    source = tree(tmp_path / "source", given)
    there = copy(str(source), store.uri())
    assert store.held() == given | {file_manifest.NAME: there.to_json()}
    assert copy(store.uri(), str(target)).digest == there.digest
    assert files(target) == given
