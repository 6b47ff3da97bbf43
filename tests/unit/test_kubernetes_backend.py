"""`KubernetesBackend` over the fake API server: requests that are refused, lost or late; what its watch keeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.objects import JOBSET, Object
from tests.fakes.kube.server import Refused
from tests.objects import COMPLETE, SUSPENDED, counts

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.kubernetes.blockers import PRIORITY_LABEL, needed
from trainjob._backends.kubernetes.client import Timings
from trainjob._backends.kubernetes.job_watch import projection
from trainjob._manifest.attempts import Cancel
from trainjob._manifest.render import render
from trainjob._support import retrying
from trainjob.errors import AlreadyExists, NotFound, Rejected
from trainjob.job import job_name, key_hash
from trainjob.status import QUEUE_LABEL, observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
NAME, WORK = job_name("key", 1), key_hash("key")
QUOTA = Refused(
    409,
    "Conflict",
    'Operation cannot be fulfilled on resourcequotas "gpus": the object has been modified; please apply your changes '
    "to the latest version and try again",
)
SUSPEND = {"spec": {"suspend": True}}


def forbidden(what: str) -> Refused:
    return Refused(403, "Forbidden", f"{what} is forbidden")


class Backend(DirectBackend):
    """The backend with its API server, some of whose replies are faults.

    Attributes:
        refusals: Request, as in `requests` -> errors of the next ones, which are not served.
        lost: Request -> so many next ones are served without a reply.
        meanwhile: Called with each request. It may change the store, or raise `Refused`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._client.timings = Timings(request_backoff=partial(retrying.REQUEST, failures=6, seconds=0.0))
        self.refusals: dict[str, list[Refused]] = {}
        self.lost: Counter[str] = Counter()
        self.meanwhile: Callable[[str], object] = lambda request: None
        self.before, self.after = self._refuse, self._lose

    def _refuse(self, request: str) -> None:
        self.meanwhile(request)
        if self.refusals.get(request):
            raise self.refusals[request].pop(0)

    def _lose(self, request: str) -> None:
        if self.lost[request]:
            self.lost[request] -= 1
            raise httpx.ReadError("no reply")

    def put(self, plural: str, name: str, **fields: Any) -> None:
        """Another client stores an object."""
        metadata = {"name": name, "namespace": "ns", "uid": "another", **fields.pop("metadata", {})}
        self.store.put(plural, {"metadata": metadata, "spec": {}, **fields}, "ADDED")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between requests, which take no time."""
    taken: list[float] = []
    sleep = anyio.sleep

    async def no_sleep(seconds: float) -> None:
        taken.append(seconds)
        await sleep(0)

    monkeypatch.setattr(anyio, "sleep", no_sleep)
    return taken


@pytest.fixture
def backend(pauses: list[float]) -> Backend:
    return Backend()


async def created(backend: Backend) -> JobRef:
    return JobRef.of(await backend.create(render(SPEC, "key", 1, "ns")))


@pytest.fixture
async def ref(backend: Backend) -> JobRef:
    """A job that exists."""
    made = await created(backend)
    backend.requests.clear()
    return made


# ---------------------------------------------------------------- create


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_a_lost_reply_is_found_by_the_mark_of_its_request(backend: Backend, count: int) -> None:
    backend.refusals["POST trainjobs"] = [Refused(503, "", "busy")] * (count - 1)
    backend.lost["POST trainjobs"] = 1
    ref = await created(backend)
    assert backend.job(ref)["metadata"]["name"] == NAME
    assert backend.requests.count("POST trainjobs") == count
    assert backend.requests[-1] == "GET trainjobs"


def _deleted(backend: Backend) -> None:
    """A cancel has deleted the job, and its JobSet is being deleted."""
    backend.store.put("trainjobs", backend.store.find("trainjobs", NAME, "ns"), "DELETED")
    backend.put("jobsets", NAME)


@pytest.mark.parametrize(
    ("fault", "at", "change", "posts"),
    [
        ("lost", "GET trainjobs", _deleted, 1),
        ("quota", "GET trainjobs", lambda backend: backend.put("trainjobs", NAME), 1),
        ("quota", "POST trainjobs", lambda backend: backend.put("trainjobs", NAME), 2),
    ],
    ids=["deleted since", "another launcher before the look", "another launcher after it"],
)
async def test_a_repeated_create_does_not_take_the_place_of_another_job(
    backend: Backend, fault: str, at: str, change: Callable[[Backend], None], posts: int
) -> None:
    backend.refusals["POST trainjobs"] = [QUOTA] if fault == "quota" else []
    backend.lost["POST trainjobs"] = fault == "lost"

    def meanwhile(request: str) -> None:
        if request == at and len(backend.requests) > 1:
            backend.meanwhile = lambda _: None
            change(backend)

    backend.meanwhile = meanwhile
    with pytest.raises(AlreadyExists, match="exists, or existed and is being deleted"):
        await created(backend)
    assert backend.requests.count("POST trainjobs") == posts


# ---------------------------------------------------------------- names


async def test_a_name_is_free_without_a_jobset(backend: Backend) -> None:
    assert await backend.is_free("ns", NAME)
    backend.put("jobsets", NAME)
    assert not await backend.is_free("ns", NAME)
    backend.refusals["GET jobsets"] = [forbidden("jobsets")]
    assert await backend.is_free("ns", NAME), "this account may not see it"


@pytest.mark.parametrize(
    ("owners", "own"), [(None, None), ([], None), (["{uid}"], True), (["other", "{uid}"], True), (["earlier"], False)]
)
async def test_a_jobset_belongs_to_its_owner(
    backend: Backend, ref: JobRef, owners: list[str] | None, own: bool | None
) -> None:
    if owners is not None:
        uids = [{"uid": owner.format(uid=ref.uid)} for owner in owners]
        backend.put("jobsets", ref.name, metadata={"ownerReferences": uids})
    assert await backend.has_own_jobset(ref) is own


async def test_remaining_pods_are_those_that_may_still_write(backend: Backend) -> None:
    phases = {"a": "Pending", "b": "Running", "c": "Unknown", "d": "Succeeded", "e": "Failed", "f": "Running"}
    for name, phase in phases.items():
        labels = {JOBSET: "another" if name == "f" else NAME}
        backend.put("pods", name, metadata={"labels": labels}, status={"phase": phase})
    found = await backend.remaining_pods("ns", [NAME, job_name("key", 2)])
    assert [pod["metadata"]["name"] for pod in found] == ["a", "b", "c"]
    assert backend.requests == ["LIST pods"]
    backend.refusals["LIST pods"] = [forbidden("pods")]
    assert await backend.remaining_pods("ns", [NAME]) == []


# ---------------------------------------------------------------- patch and delete


@pytest.mark.parametrize(
    "error",
    [
        None,
        Refused(409, "Conflict", "Precondition failed: UID in precondition: a, UID in object meta: b"),
        Refused(422, "Invalid", "metadata.uid: Invalid value: field is immutable"),
        Refused(404, "NotFound", "not found"),
    ],
)
async def test_a_patch_of_another_job_of_that_name_is_not_repeated(
    backend: Backend, ref: JobRef, error: Refused | None
) -> None:
    job = backend.job(ref)
    backend.store.put("trainjobs", {**job, "metadata": {**job["metadata"], "uid": "another"}})
    backend.refusals["PATCH trainjobs"] = [error] if error is not None else []
    with pytest.raises(NotFound, match="is gone"):
        await backend.patch(ref, SUSPEND)
    assert len(backend.requests) == 1


async def test_a_refused_request_is_rejected(backend: Backend, ref: JobRef) -> None:
    for method in ("DELETE", "LIST"):
        backend.refusals[f"{method} trainjobs"] = [forbidden("trainjobs")]
    denied = Refused(403, "Forbidden", 'admission webhook "x" denied the request: no')
    backend.refusals["PATCH trainjobs"] = [denied]
    with pytest.raises(Rejected, match='could not be changed: admission webhook "x" denied the request: no'):
        await backend.patch(ref, SUSPEND)
    with pytest.raises(Rejected, match="could not be deleted: trainjobs is forbidden"):
        await backend.delete(ref)
    with pytest.raises(Rejected, match="TrainJobs in namespace ns cannot be listed: trainjobs is forbidden"):
        await backend.find("ns", {})


@pytest.mark.parametrize("stop", ["delete", "suspend"])
async def test_stops_that_have_settled_are_forgotten(backend: Backend, stop: str) -> None:
    """A triggerer stops jobs for months."""
    backend._client.timings = Timings(settle=0)
    for attempt in range(1, 20):
        ref = JobRef.of(await backend.create(render(SPEC, "key", attempt, "ns")))
        await (backend.delete(ref) if stop == "delete" else backend.patch(ref, SUSPEND))
        assert ref.uid in backend._stop_requested
    backend._client.timings = Timings(settle=60)
    assert not await backend.stopped(ref)
    assert len(backend._stop_requested) < 3


# ---------------------------------------------------------------- records of cancels


def lease(backend: Backend) -> Object:
    """The only Lease."""
    (found,) = backend.store.items("leases")
    return found


async def test_the_record_of_a_cancel_is_a_lease(backend: Backend) -> None:
    made = await backend.announce_cancel("ns", WORK, Cancel(0))
    assert backend.requests == ["POST leases"]
    metadata = lease(backend)["metadata"]
    assert metadata["name"].startswith(f"trainjob-cancelled-{WORK}-")
    assert metadata["labels"] == {"trainjob.dev/cancelled-key": WORK}
    assert made is not None
    assert (made.version, made.tried, made.uid, made.action) == (backend.store.version, None, "", "cancel")
    assert made.record == metadata["name"]
    # When it arrived: the process that sent it may have been frozen, so its own time is no age.
    assert made.at == datetime.fromisoformat(metadata["creationTimestamp"])
    backend.requests.clear()
    await backend.cancels("ns", WORK)
    assert backend.requests == ["LIST leases"]


@pytest.mark.parametrize("refused", [0, 2])
async def test_a_record_whose_reply_was_lost_has_its_version_without_a_get(backend: Backend, refused: int) -> None:
    """The Role has no `get` for Leases. A conflict of a quota before it is repeated."""
    backend.refusals["POST leases"] = [QUOTA] * refused
    backend.lost["POST leases"] = 1

    backend.refusals["GET leases"] = [forbidden("leases")] * 100
    made = await backend.announce_cancel("ns", WORK, Cancel(0, 2))
    metadata = lease(backend)["metadata"]
    assert made is not None
    assert (str(made.version), made.record) == (metadata["resourceVersion"], metadata["name"])
    assert made.tried == 2
    assert backend.requests.count("POST leases") == refused + 2


async def test_without_permission_there_are_no_records(backend: Backend) -> None:
    backend.refusals = {"LIST leases": [forbidden("leases")], "POST leases": [forbidden("leases")]}
    assert await backend.cancels("ns", WORK) == (None, [])
    assert await backend.announce_cancel("ns", WORK, Cancel(0)) is None


# ---------------------------------------------------------------- the projection that the watch keeps of each job


RUNNING = {"jobsStatus": [counts(ready=1, active=1)]}
REPORTED = {"progressPercentage": 42, "metrics": [{"name": "loss", "value": "0.3"}]}


def stored(key: str, status: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A job as parsed from a separate reply of an API server."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], **fields})
    trainjob = render(spec, key, 3, "team")
    trainjob["metadata"] |= {"uid": f"uid of {key}", "creationTimestamp": "2026-11-21T10:00:00Z", "managedFields": [{}]}
    found: dict[str, Any] = json.loads(json.dumps(trainjob | ({} if status is None else {"status": status})))
    return found


@pytest.mark.parametrize(
    "trainjob",
    [
        stored("new"),
        stored("running", RUNNING),
        stored("reporting", {**RUNNING, "trainerStatus": REPORTED}),
        stored(
            "queued", {"conditions": [SUSPENDED]}, labels={QUEUE_LABEL: "gpus", PRIORITY_LABEL: "urgent"}, suspend=True
        ),
        stored("suspended", {"conditions": [SUSPENDED]}, suspend=True),
        stored("complete", {**RUNNING, "conditions": [COMPLETE]}),
    ],
    ids=lambda trainjob: trainjob["metadata"]["uid"],
)
def test_projection_has_the_same_observation(trainjob: dict[str, Any]) -> None:
    assert observe(projection(trainjob)) == observe(trainjob)
    assert JobRef.of(projection(trainjob)) == JobRef.of(trainjob)
    assert needed(projection(trainjob), None) == needed(trainjob, None), "what blocks it if it does not exist"


def test_equal_parts_of_projections_are_shared() -> None:
    one, other = projection(stored("one", RUNNING)), projection(stored("other", RUNNING))
    assert one["status"] is other["status"]
    assert one["metadata"]["labels"] is other["metadata"]["labels"]
    assert projection(stored("third", {"conditions": [COMPLETE]}))["status"] != one["status"]


def test_projection_omits_a_large_spec() -> None:
    trainjob = stored("large", RUNNING, env={"BLOB": "x" * 100_000})
    assert len(json.dumps(projection(trainjob))) < 1000
