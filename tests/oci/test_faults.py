"""Faults between a client and a container registry, and pushes that are killed; two campaigns (`tests.campaigns`)."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests import campaigns
from tests.fakes.faults import Fault, Kind, Proxy, Seen
from tests.oci.conftest import MEBI, Repository
from tests.trees import files

from trainjob._support import retrying
from trainjob.data import copy, read_manifest
from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.oci import client, uploads
from trainjob.data.transfer import scan
from trainjob.errors import ConfigurationError, OutOfSpace, SourceNotFound, StoreUnavailable

RUNS = campaigns.runs(50, 3)

PART = MEBI


@pytest.fixture(scope="module")
def content() -> dict[str, bytes]:
    """Two files of several parts and a bundle; it is small, as it is sent more than a hundred times."""
    chance = random.Random(8)
    return {
        "model-00001-of-00002.safetensors": chance.randbytes(4 * PART + 17),
        "model-00002-of-00002.safetensors": chance.randbytes(5 * PART // 2),
        "tokenizer.model": chance.randbytes(70_000),
        "config.json": b"{}",
        "README.md": b"# A model\n",
        "empty": b"",
    }


@pytest.fixture
def chance(record_property: campaigns.Record) -> random.Random:
    campaigns.begin(record_property, RUNS)
    return random.Random(campaigns.SEED)


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small parts instead of few large ones."""
    monkeypatch.setattr(uploads, "PART", PART)
    monkeypatch.setattr(uploads, "SINGLE", 2 * PART)
    monkeypatch.setattr(client, "READ", 1.0)
    monkeypatch.setattr(uploads, "FINISH", 1.0)


def nth(method: str, number: int, fault: Fault, part: str = "") -> Callable[[Seen], Fault | None]:
    """Apply a fault to the n-th request of a method, counted over all threads."""
    lock, count = threading.Lock(), 0

    def plan(seen: Seen) -> Fault | None:
        nonlocal count
        if seen.method != method or part not in seen.target:
            return None
        with lock:
            count += 1
            return fault if count == number else None

    return plan


UPLOADS = [
    (method, number, fault)
    for method, numbers in {"POST": (1,), "PATCH": (1, 4), "PUT": (1,), "HEAD": (2,)}.items()
    for number in numbers
    for fault in (
        Fault(Kind.CUT),
        Fault(Kind.DROP),
        Fault(Kind.STALL),
        Fault(Kind.ANSWER, status=500),
        Fault(Kind.ANSWER, status=503, retry_after=0),
        Fault(Kind.ANSWER, status=429, retry_after=1),
    )
] + [("PATCH", 2, Fault(Kind.CUT_BODY, after=after)) for after in (0, 1, PART // 2, PART - 1)]


@pytest.mark.parametrize(("method", "number", "fault"), UPLOADS, ids=lambda each: str(getattr(each, "kind", each)))
def test_a_push_survives_a_fault(proxy: Proxy, repository: Repository, method: str, number: int, fault: Fault) -> None:
    proxy.plan = nth(method, number, fault)
    pushed = repository.push()
    (failed,) = proxy.injected
    if fault.retry_after:  # other blobs are sent meanwhile; the last request of the push waits for the one that failed
        assert proxy.requests[-1].at - failed.at >= fault.retry_after
    proxy.plan = lambda _: None
    assert repository.pulled(digest=pushed.digest) == repository.content


@pytest.mark.parametrize("fault", [Fault(Kind.CUT), Fault(Kind.ANSWER, status=503)])
def test_an_upload_resumes_at_its_last_acknowledged_byte(proxy: Proxy, repository: Repository, fault: Fault) -> None:
    """Nothing that the registry has received is sent again."""
    repository.push("/reference:1")
    without = proxy.sent
    proxy.requests.clear()
    proxy.plan = nth("PATCH", 5, fault)
    repository.push("/other:1")
    assert len(proxy.injected) == 1
    assert len([each for each in proxy.seen("GET", "/blobs/uploads/") if each.status == 204]) == 1
    assert proxy.sent == without


def test_a_copy_from_a_registry_in_one_pass_survives_faults(proxy: Proxy, repository: Repository) -> None:
    """The digest is not known yet, so lost data is read again from the source."""
    origin = f"{repository.at}/a:1".replace(proxy.host, proxy.upstream)
    copy(str(repository.source), origin)
    for number, fault in enumerate((Fault(Kind.CUT_BODY, after=PART // 2), Fault(Kind.DROP), Fault(Kind.CUT))):
        proxy.plan = nth("PATCH", 3, fault)
        copy(origin, f"{repository.at}/b{number}:1")
        assert scan(f"{repository.at}/b{number}:1").digest == scan(str(repository.source)).digest
    assert len(proxy.injected) == 3


PULLS = [
    Fault(Kind.CUT),
    Fault(Kind.DROP),
    Fault(Kind.STALL),
    Fault(Kind.BREAK, after=0),
    Fault(Kind.BREAK, after=100_000),
    Fault(Kind.ANSWER, status=500),
    Fault(Kind.ANSWER, status=429, retry_after=1),
]


@pytest.mark.parametrize("fault", PULLS, ids=lambda each: f"{each.kind}-{each.after}-{each.status}")
@pytest.mark.parametrize("part", ["/manifests/", "/blobs/"])
def test_a_pull_survives_a_fault(proxy: Proxy, repository: Repository, fault: Fault, part: str) -> None:
    repository.push()
    proxy.requests.clear()
    proxy.plan = nth("GET", 2, fault, part)
    assert repository.pulled() == repository.content
    assert len(proxy.injected) == 1


def test_a_pull_resumes_where_it_was_cut(proxy: Proxy, repository: Repository) -> None:
    repository.push()
    proxy.requests.clear()
    # A multiple of CHUNK: an incomplete chunk is requested again.
    proxy.plan = lambda seen: Fault(Kind.BREAK, after=2 * CHUNK) if "/blobs/" in seen.target else None
    assert repository.pulled() == repository.content
    assert sum(each.received for each in proxy.requests) < sum(map(len, repository.content.values())) + 100_000


@pytest.mark.parametrize(
    ("method", "fault"),
    [("PATCH", Fault(Kind.CUT_BODY, after=1000)), ("PATCH", Fault(Kind.ANSWER)), ("HEAD", Fault(Kind.CUT))],
)
def test_a_lasting_outage_fails_the_copy(
    proxy: Proxy, repository: Repository, monkeypatch: pytest.MonkeyPatch, method: str, fault: Fault
) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, longest_pause=0.1))
    proxy.plan = lambda seen: fault if seen.method == method else None
    with pytest.raises(StoreUnavailable):
        repository.push()
    proxy.plan = lambda _: None
    assert read_manifest(repository.uri) is None
    repository.push()
    assert read_manifest(repository.uri) is not None


@pytest.mark.parametrize(
    ("method", "part", "first", "status", "error"),
    [
        *(("POST", "", 1, status, ConfigurationError) for status in (403, 405, 413)),
        ("POST", "", 1, 400, StoreUnavailable),
        ("PATCH", "", 2, 403, ConfigurationError),
        ("PATCH", "", 2, 401, ConfigurationError),
        ("PATCH", "", 2, 507, OutOfSpace),
        ("PUT", "/manifests/", 2, 507, OutOfSpace),
        ("PUT", "/manifests/", 2, 403, ConfigurationError),
    ],
)
def test_a_refused_push_is_not_visible_and_can_be_repeated(
    proxy: Proxy, repository: Repository, method: str, part: str, first: int, status: int, error: type[Exception]
) -> None:
    """A credential rejected halfway, a full registry: the tag does not exist, and the next push completes it."""
    count = 0

    def plan(seen: Seen) -> Fault | None:
        nonlocal count
        count += seen.method == method and part in seen.target
        return Fault(Kind.ANSWER, status=status) if count >= first and seen.method == method else None

    proxy.plan = plan
    with pytest.raises(error):
        repository.push()
    assert len(proxy.injected) <= (4 if method == "POST" else 8), "one for each file in transfer, without retries"
    proxy.plan = lambda _: None
    assert read_manifest(repository.uri) is None
    repository.push()
    assert scan(repository.uri).digest == scan(str(repository.source)).digest


@pytest.mark.parametrize("status", [401, 403])
def test_a_credential_rejected_during_a_pull(proxy: Proxy, repository: Repository, tmp_path: Path, status: int) -> None:
    repository.push()

    def plan(seen: Seen) -> Fault | None:
        late = len(proxy.seen("GET", "/blobs/")) > 1 and "/blobs/" in seen.target
        return Fault(Kind.ANSWER, status=status) if late else None

    proxy.plan = plan
    proxy.requests.clear()
    with pytest.raises(ConfigurationError):
        copy(repository.uri, str(tmp_path / "back"))
    assert 0 < len(proxy.injected) <= 8, "no retries"
    assert read_manifest(str(tmp_path / "back")) is None
    proxy.plan = lambda _: None
    copy(repository.uri, str(tmp_path / "back"))
    assert files(tmp_path / "back") == repository.content


def test_a_pull_to_a_full_disk(repository: Repository, small_disk: Path) -> None:
    repository.push()
    with pytest.raises(OutOfSpace, match="no space left for"):
        copy(repository.uri, str(small_disk / "back"))
    assert not list(small_disk.rglob("*.part"))
    assert read_manifest(str(small_disk / "back")) is None


def test_a_lost_reply_to_the_tag_is_not_a_failure(proxy: Proxy, repository: Repository) -> None:
    proxy.plan = nth("PUT", 1, Fault(Kind.DROP), "/manifests/1")
    repository.push()
    assert len(proxy.injected) == 1
    assert scan(repository.uri).digest == scan(str(repository.source)).digest


@pytest.mark.timeout(900)
def test_random_schedules(
    proxy: Proxy, repository: Repository, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of all requests fails in some way: the copy succeeds or reports its failure."""
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, longest_pause=0.1))
    kinds = [Kind.CUT, Kind.DROP, Kind.CUT_BODY, Kind.BREAK, Kind.ANSWER, Kind.STALL]
    lock = threading.Lock()

    def plan(seen: Seen) -> Fault | None:
        with lock:
            if chance.random() > 0.1:
                return None
            kind = chance.choices(kinds, weights=[4, 4, 4, 4, 4, 1])[0]
            return Fault(kind, after=chance.randrange(PART), status=chance.choice([429, 500, 502, 503, 504]))

    failed = 0
    for run in range(RUNS):
        proxy.plan = plan
        try:
            repository.push(f"/{run}:1")
            found = repository.pulled(f"/{run}:1")
        except StoreUnavailable:
            failed += 1
            proxy.plan = lambda _: None
            repository.push(f"/{run}:1")
            found = repository.pulled(f"/{run}:1")
        assert found == repository.content
    print(f"{RUNS} copies and back, {len(proxy.injected)} faults, {failed} copies failed and were repeated")
    assert failed <= RUNS // 2
    assert len(proxy.injected) > RUNS


@pytest.mark.timeout(900)
def test_kills(proxy: Proxy, repository: Repository, chance: random.Random) -> None:
    """SIGKILL at random instants of a push: the tag does not exist, and the next push completes it."""
    total = sum(map(len, repository.content.values()))
    incomplete = 0
    for run in range(RUNS):
        uri = f"{repository.at}/{run}:1"
        script = f"from trainjob.data import copy; copy({str(repository.source)!r}, {uri!r})"
        until = chance.randrange(total)
        proxy.requests.clear()
        process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while proxy.sent < until and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        process.wait()
        puts = [each for each in proxy.seen("PUT", "/manifests/1") if each.target.endswith("/1")]
        if not any(each.status == 201 for each in puts):
            incomplete += proxy.sent > 0
            with pytest.raises(SourceNotFound):
                scan(uri)
        repository.push(f"/{run}:1")
        assert repository.pulled(f"/{run}:1") == repository.content
    print(f"{incomplete} of {RUNS} kills left half a push")
    assert incomplete or RUNS < 5


def test_concurrent_pushes_of_the_same_model(repository: Repository) -> None:
    """docker-registry then has empty links for a moment, and reports their blobs as unknown."""
    for run in range(max(1, RUNS // 2)):
        with ThreadPoolExecutor() as threads:
            assert len({done.digest for done in threads.map(repository.push, [f"/{run}:1"] * 3)}) == 1
        assert repository.pulled(f"/{run}:1") == repository.content
