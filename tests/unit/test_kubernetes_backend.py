"""Requests of `KubernetesBackend` that are refused, lost or late, against a server in memory."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import pytest

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Request, Timings
from trainjob._backends.kubernetes.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    ObjectNotFound,
    ServerError,
    Unreachable,
)
from trainjob._jobs.launching import launch
from trainjob._manifest.attempts import Cancel
from trainjob._manifest.render import render
from trainjob._support import retrying
from trainjob.errors import AlreadyExists, BackendUnavailable, NotFound, Rejected
from trainjob.job import job_name, key_hash

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns/trainjobs"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ns/jobsets"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
PODS = "/api/v1/namespaces/ns/pods"
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})

QUOTA = Conflict(
    409,
    "Conflict",
    'Operation cannot be fulfilled on resourcequotas "gpus": the object has been modified; please apply your changes '
    "to the latest version and try again",
)
LOST = Unreachable(0, "", "no reply")


class Server:
    """Objects by path, with versions and preconditions, as an API server keeps them."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.requests: list[tuple[str, str]] = []
        self.refusals: dict[str, list[ApiError]] = {}
        """Method and collection -> errors of the next such requests, which are not applied."""
        self.lost: dict[str, int] = {}
        """Method and collection -> so many next such requests are applied without a reply."""
        self.before: Callable[[Request], None] = lambda _: None

    def asked(self, *methods: str) -> list[str]:
        return [
            f"{method} {path.rpartition('/namespaces/ns/')[2]}" for method, path in self.requests if method in methods
        ]

    async def send(self, request: Request, _: Any = None) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.requests.append((request.method, request.path))
        self.before(request)
        kind = f"{request.method} {request.path.rpartition('/namespaces/ns/')[2].partition('/')[0]}"
        if self.refusals.get(kind):
            raise self.refusals[kind].pop(0)
        reply = self._apply(request)
        if self.lost.get(kind):
            self.lost[kind] -= 1
            raise LOST
        return reply

    async def items(self, path: str, params: Mapping[str, str], **_: Any) -> list[dict[str, Any]]:
        return list((await self.send(Request("GET", path, params)))["items"])

    def next(self) -> str:
        self.version += 1
        return str(self.version)

    def _apply(self, request: Request) -> dict[str, Any]:
        if request.method == "POST":
            path = f"{request.path}/{request.body['metadata']['name']}"
            if path in self.objects:
                raise Conflict(409, "AlreadyExists", f"{path} already exists")
            stored = copy.deepcopy(request.body)
            stored["metadata"] |= {"uid": f"uid-{self.next()}", "resourceVersion": str(self.version)}
            stored["metadata"].setdefault("creationTimestamp", f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
            if not request.params.get("dryRun"):
                self.objects[path] = stored
            return copy.deepcopy(stored)
        if request.method == "GET" and request.path.rpartition("/")[2] in ("trainjobs", "leases", "pods"):
            selector = request.params.get("labelSelector", "")
            found = [
                copy.deepcopy(each)
                for path, each in self.objects.items()
                if path.startswith(request.path + "/") and _selected(each, selector)
            ]
            return {"items": found, "metadata": {"resourceVersion": str(self.version)}}
        if request.path not in self.objects:
            raise ObjectNotFound(404, "NotFound", f"{request.path} not found")
        present = self.objects[request.path]
        if request.method == "DELETE":
            conditions = (request.body or {}).get("preconditions") or {}
            for name, value in conditions.items():
                if present["metadata"][name] != value:
                    raise Conflict(409, "Conflict", f"the {name} in the precondition does not match")
            return self.objects.pop(request.path)
        if request.method == "PATCH":
            wanted = request.body["metadata"]
            if wanted.get("uid", present["metadata"]["uid"]) != present["metadata"]["uid"]:
                raise Conflict(
                    409, "Conflict", "Precondition failed: UID in precondition: old, UID in object meta: new"
                )
            if (
                wanted.get("resourceVersion", present["metadata"]["resourceVersion"])
                != present["metadata"]["resourceVersion"]
            ):
                raise Conflict(409, "Conflict", "the object has been modified; please apply your changes")
            merged = _merged(present, request.body)
            merged["metadata"]["resourceVersion"] = self.next()
            self.objects[request.path] = merged
            return copy.deepcopy(merged)
        return copy.deepcopy(present)


def _selected(stored: Mapping[str, Any], selector: str) -> bool:
    labels = stored["metadata"].get("labels") or {}
    if " in (" in selector:
        name, _, values = selector.partition(" in (")
        return labels.get(name) in values.rstrip(")").split(",")
    for each in filter(None, selector.split(",")):
        name, equal, value = each.partition("=")
        if name not in labels or (equal and labels[name] != value):
            return False
    return True


def _merged(value: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    merged = {**(value or {}), **{name: _merged((value or {}).get(name), part) for name, part in patch.items()}}
    return {name: part for name, part in merged.items() if part is not None}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between requests, which take no time."""
    taken: list[float] = []

    async def sleep(seconds: float) -> None:
        taken.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    return taken


@pytest.fixture
def backend(server: Server, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> KubernetesBackend:
    timings = Timings(request_backoff=partial(retrying.REQUEST, failures=6, seconds=0.0))
    made = KubernetesBackend(Credentials(host="http://localhost:1"), timings=timings)
    monkeypatch.setattr(made._client, "send", server.send)
    monkeypatch.setattr(made._client, "items", server.items)
    return made


def manifest(attempt: int = 1) -> dict[str, Any]:
    return render(SPEC, "key", attempt, "ns")


def named(attempt: int = 1) -> str:
    return job_name("key", attempt)


async def created(backend: KubernetesBackend) -> JobRef:
    return JobRef.of(await backend.create(manifest()))


def stored(server: Server, ref: JobRef) -> dict[str, Any]:
    return server.objects[f"{JOBS}/{ref.name}"]


# ---------------------------------------------------------------- create


async def test_a_create_without_trouble_is_one_request(backend: KubernetesBackend, server: Server) -> None:
    await created(backend)
    assert server.requests == [("POST", JOBS)]


async def test_a_name_that_is_taken_is_reported_at_once(
    backend: KubernetesBackend, server: Server, pauses: list[float]
) -> None:
    await created(backend)
    server.requests.clear()
    with pytest.raises(AlreadyExists, match=named()):
        await created(backend)
    assert (server.requests, pauses) == ([("POST", JOBS)], [])


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_a_conflict_of_a_quota_is_repeated_under_the_same_name(
    backend: KubernetesBackend, server: Server, pauses: list[float], count: int
) -> None:
    server.refusals["POST trainjobs"] = [QUOTA] * count
    ref = await created(backend)
    assert (ref.name, len(server.objects), len(pauses)) == (named(), 1, count)
    assert all(pause > 0 for pause in pauses)
    once = [f"POST {JOBS}", f"GET {JOBS}/{named()}", f"GET {JOBSETS}/{named()}"]
    assert [f"{method} {path}" for method, path in server.requests] == [*(once * count), f"POST {JOBS}"]


async def test_a_conflict_that_lasts_is_an_outage_not_a_taken_name(backend: KubernetesBackend, server: Server) -> None:
    server.refusals["POST trainjobs"] = [QUOTA] * 100
    with pytest.raises(BackendUnavailable, match=r"could not be created: .*resourcequotas"):
        await created(backend)
    assert len(server.asked("POST")) == 6
    assert server.objects == {}


async def test_a_conflict_does_not_change_the_number_of_the_attempt(backend: KubernetesBackend, server: Server) -> None:
    server.refusals["POST trainjobs"] = [QUOTA] * 3
    ref = await launch(backend, SPEC, "key", namespace="ns", last_try=1)
    assert (ref.attempt, ref.name) == (1, named())
    assert [*server.objects] == [f"{JOBS}/{named()}"]


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_a_lost_reply_is_found_by_the_mark_of_its_request(
    backend: KubernetesBackend, server: Server, count: int
) -> None:
    server.refusals["POST trainjobs"] = [ServerError(503, "", "busy")] * (count - 1)
    server.lost["POST trainjobs"] = 1
    ref = await created(backend)
    assert stored(server, ref)["metadata"]["uid"] == ref.uid
    assert len(server.asked("POST")) == count
    assert server.asked("GET")[-1] == f"GET trainjobs/{named()}"


async def test_a_lost_reply_of_a_job_that_was_deleted_since_is_not_repeated(
    backend: KubernetesBackend, server: Server
) -> None:
    """The first create has arrived, a cancel has deleted the job, and its JobSet is being deleted."""
    server.lost["POST trainjobs"] = 1

    def deleted(request: Request) -> None:
        if request.method == "GET" and request.path.startswith(JOBS):
            server.objects.pop(f"{JOBS}/{named()}", None)
            server.objects[f"{JOBSETS}/{named()}"] = {"metadata": {"name": named()}}

    server.before = deleted
    with pytest.raises(AlreadyExists, match="exists, or existed and is being deleted"):
        await created(backend)
    assert len(server.asked("POST")) == 1


async def test_a_name_that_another_launcher_took_meanwhile_is_reported(
    backend: KubernetesBackend, server: Server
) -> None:
    server.refusals["POST trainjobs"] = [QUOTA]

    def taken(request: Request) -> None:
        if request.method == "GET" and request.path == f"{JOBS}/{named()}":
            server.objects.setdefault(request.path, {"metadata": {"name": named(), "uid": "another"}})

    server.before = taken
    with pytest.raises(AlreadyExists):
        await created(backend)
    assert len(server.asked("POST")) == 1


async def test_a_repeated_create_that_meets_its_own_job_is_the_first_one(
    backend: KubernetesBackend, server: Server
) -> None:
    """The first create arrives after the look at its name."""
    late: list[dict[str, Any]] = []

    def arrive(request: Request) -> None:
        if request.method == "POST" and not late:
            late.append(copy.deepcopy(request.body))
            raise LOST
        if request.method == "POST":
            server._apply(Request("POST", JOBS, body=late[0]))

    server.before = arrive
    ref = await created(backend)
    assert stored(server, ref)["metadata"]["uid"] == ref.uid
    assert len(server.objects) == 1


async def test_a_repeated_create_that_meets_another_job_is_refused(backend: KubernetesBackend, server: Server) -> None:
    server.refusals["POST trainjobs"] = [LOST]
    posts = 0

    def another(request: Request) -> None:
        nonlocal posts
        posts += request.method == "POST"
        if posts == 2:
            server.objects.setdefault(f"{JOBS}/{named()}", {"metadata": {"name": named(), "uid": "another"}})

    server.before = another
    with pytest.raises(AlreadyExists):
        await created(backend)


async def test_a_dry_run_is_one_request(backend: KubernetesBackend, server: Server) -> None:
    await backend.create(manifest(), dry_run=True)
    assert (server.requests, server.objects) == ([("POST", JOBS)], {})


# ---------------------------------------------------------------- names


async def test_a_name_is_free_without_a_jobset(backend: KubernetesBackend, server: Server) -> None:
    assert await backend.is_free("ns", named())
    server.objects[f"{JOBSETS}/{named()}"] = {"metadata": {"name": named()}}
    assert not await backend.is_free("ns", named())
    server.refusals["GET jobsets"] = [Forbidden(403, "Forbidden", "jobsets is forbidden")]
    assert await backend.is_free("ns", named()), "this account may not see it"


@pytest.mark.parametrize(
    ("owners", "own"),
    [
        (None, None),
        ([], None),
        ([{"uid": "uid-1"}], True),
        ([{"uid": "other"}, {"uid": "uid-1"}], True),
        ([{"uid": "earlier"}], False),
    ],
)
async def test_a_jobset_belongs_to_its_owner(
    backend: KubernetesBackend, server: Server, owners: list[dict[str, str]] | None, own: bool | None
) -> None:
    ref = await created(backend)
    if owners is not None:
        server.objects[f"{JOBSETS}/{ref.name}"] = {"metadata": {"ownerReferences": owners}}
    assert await backend.has_own_jobset(ref) is own


async def test_remaining_pods_are_those_that_may_still_write(backend: KubernetesBackend, server: Server) -> None:
    phases = {"a": "Pending", "b": "Running", "c": "Unknown", "d": "Succeeded", "e": "Failed"}
    for name, phase in phases.items():
        labels = {"jobset.sigs.k8s.io/jobset-name": named()}
        server.objects[f"{PODS}/{name}"] = {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase}}
    other = {"jobset.sigs.k8s.io/jobset-name": "another"}
    server.objects[f"{PODS}/f"] = {"metadata": {"name": "f", "labels": other}, "status": {"phase": "Running"}}
    found = await backend.remaining_pods("ns", [named(), named(2)])
    assert [pod["metadata"]["name"] for pod in found] == ["a", "b", "c"]
    assert server.asked("GET") == ["GET pods"]
    server.refusals["GET pods"] = [Forbidden(403, "Forbidden", "pods is forbidden")]
    assert await backend.remaining_pods("ns", [named()]) == []


# ---------------------------------------------------------------- patch and delete


async def test_a_conflict_of_a_quota_repeats_a_patch(
    backend: KubernetesBackend, server: Server, pauses: list[float]
) -> None:
    ref = await created(backend)
    server.refusals["PATCH trainjobs"] = [QUOTA, QUOTA]
    await backend.patch(ref, {"spec": {"suspend": True}})
    assert stored(server, ref)["spec"]["suspend"] is True
    assert (len(server.asked("PATCH")), len(pauses)) == (3, 2)


async def test_a_conflict_that_lasts_fails_a_patch(backend: KubernetesBackend, server: Server) -> None:
    ref = await created(backend)
    server.refusals["PATCH trainjobs"] = [QUOTA] * 100
    with pytest.raises(BackendUnavailable, match="resourcequotas"):
        await backend.patch(ref, {"spec": {"suspend": True}})


@pytest.mark.parametrize("conflict", ["version", "quota"])
async def test_a_conflict_of_a_patch_with_a_version_means_look_again(
    backend: KubernetesBackend, server: Server, conflict: str
) -> None:
    ref = await created(backend)
    version = stored(server, ref)["metadata"]["resourceVersion"]
    if conflict == "version":
        await backend.patch(ref, {"metadata": {"annotations": {"a": "1"}}})
    else:
        server.refusals["PATCH trainjobs"] = [QUOTA]
    server.requests.clear()
    with pytest.raises(NotFound, match="is gone or was changed"):
        await backend.patch(ref, {"metadata": {"resourceVersion": version}, "spec": {"suspend": True}})
    assert len(server.requests) == 1
    assert not stored(server, ref)["spec"].get("suspend")


async def test_a_patch_with_the_present_version_is_applied(backend: KubernetesBackend, server: Server) -> None:
    ref = await created(backend)
    version = stored(server, ref)["metadata"]["resourceVersion"]
    await backend.patch(ref, {"metadata": {"resourceVersion": version}, "spec": {"suspend": True}})
    assert stored(server, ref)["spec"]["suspend"] is True


@pytest.mark.parametrize(
    "error",
    [
        None,
        Conflict(409, "Conflict", "Precondition failed: UID in precondition: a, UID in object meta: b"),
        Invalid(422, "Invalid", "metadata.uid: Invalid value: field is immutable"),
        ObjectNotFound(404, "NotFound", "not found"),
    ],
)
async def test_a_patch_of_another_job_of_that_name_is_not_repeated(
    backend: KubernetesBackend, server: Server, error: ApiError | None
) -> None:
    ref = await created(backend)
    stored(server, ref)["metadata"]["uid"] = "another"
    server.requests.clear()
    if error is not None:
        server.refusals["PATCH trainjobs"] = [error]
    with pytest.raises(NotFound, match="is gone"):
        await backend.patch(ref, {"spec": {"suspend": True}})
    assert len(server.requests) == 1


async def test_a_refused_patch_is_rejected(backend: KubernetesBackend, server: Server) -> None:
    ref = await created(backend)
    server.refusals["PATCH trainjobs"] = [Forbidden(403, "Forbidden", 'admission webhook "x" denied the request: no')]
    with pytest.raises(Rejected, match="could not be changed"):
        await backend.patch(ref, {"spec": {"suspend": True}})


@pytest.mark.parametrize(
    ("changed", "with_version", "gone"), [(False, True, True), (True, True, False), (True, False, True)]
)
async def test_a_delete_with_an_old_version_does_nothing(
    backend: KubernetesBackend, server: Server, changed: bool, with_version: bool, gone: bool
) -> None:
    ref = await created(backend)
    version = stored(server, ref)["metadata"]["resourceVersion"]
    if changed:
        await backend.patch(ref, {"metadata": {"annotations": {"a": "1"}}})
    await backend.delete(ref, version if with_version else "")
    assert (f"{JOBS}/{ref.name}" not in server.objects) is gone


async def test_a_refused_delete_is_rejected(backend: KubernetesBackend, server: Server) -> None:
    ref = await created(backend)
    server.refusals = {"DELETE trainjobs": [Forbidden(403, "Forbidden", "trainjobs is forbidden")]}
    with pytest.raises(Rejected, match="could not be deleted: trainjobs is forbidden"):
        await backend.delete(ref)


async def test_a_refused_list_is_rejected(backend: KubernetesBackend, server: Server) -> None:
    server.refusals = {"GET trainjobs": [Forbidden(403, "Forbidden", "trainjobs is forbidden")]}
    with pytest.raises(Rejected, match="TrainJobs in namespace ns cannot be listed: trainjobs is forbidden"):
        await backend.find("ns", {})


# ---------------------------------------------------------------- records of cancels

WORK = key_hash("key")


async def test_the_record_of_a_cancel_is_a_lease(backend: KubernetesBackend, server: Server) -> None:
    made = await backend.announce_cancel("ns", WORK, Cancel(0))
    assert server.requests == [("POST", LEASES)]
    ((path, lease),) = server.objects.items()
    assert path.startswith(f"{LEASES}/trainjob-cancelled-{WORK}-")
    assert lease["metadata"]["labels"] == {"trainjob.dev/cancelled-key": WORK}
    assert made is not None
    assert (made.version, made.tried, made.uid, made.action) == (server.version, None, "", "cancel")
    assert made.record == lease["metadata"]["name"]
    # When it arrived: the process that sent it may have been frozen, so its own time is no age.
    assert made.at == datetime.fromisoformat(lease["metadata"]["creationTimestamp"])


@pytest.mark.parametrize(
    "cancel", [Cancel(0), Cancel(0, 3), Cancel(0, None, "u", "suspend"), Cancel(0, 2, "u")], ids=str
)
async def test_records_are_read_as_they_were_written(backend: KubernetesBackend, cancel: Cancel) -> None:
    made = await backend.announce_cancel("ns", WORK, cancel)
    version, found = await backend.cancels("ns", WORK)
    assert found == [made]
    assert made is not None
    assert (made.tried, made.uid, made.action) == (cancel.tried, cancel.uid, cancel.action)
    assert version == made.version, "a launch that begins now is not concerned"
    assert not made.applies(version, 99, cancel.uid)
    assert await backend.all_cancels("ns") == {WORK: [made]}


async def test_each_cancel_has_a_record_of_its_own(backend: KubernetesBackend) -> None:
    """A kill of try 2 that arrives after that of try 3 leaves that one's record."""
    made = [await backend.announce_cancel("ns", WORK, Cancel(0, tried)) for tried in (3, 2, None)]
    _, found = await backend.cancels("ns", WORK)
    assert found == made
    assert any(cancel.applies(0, 3) for cancel in found)


@pytest.mark.parametrize("refused", [0, 2])
async def test_a_record_whose_reply_was_lost_has_its_version_without_a_get(
    backend: KubernetesBackend, server: Server, refused: int
) -> None:
    """The Role has no `get` for Leases. A conflict of a quota before it is repeated."""
    server.refusals["POST leases"] = [QUOTA] * refused
    server.lost["POST leases"] = 1
    original = server.send

    async def without_get(request: Request, decode: Any = None) -> dict[str, Any]:
        if request.method == "GET" and request.path.startswith(f"{LEASES}/"):
            raise Forbidden(403, "Forbidden", "leases is forbidden")
        return await original(request, decode)

    backend._client.send = without_get  # type: ignore[method-assign]
    made = await backend.announce_cancel("ns", WORK, Cancel(0, 2))
    ((_, lease),) = server.objects.items()
    assert made is not None
    assert (str(made.version), made.record) == (lease["metadata"]["resourceVersion"], lease["metadata"]["name"])
    assert made.tried == 2
    assert len(server.asked("POST")) == refused + 2


async def test_records_of_other_keys_and_leases_of_waiters_are_left_out(
    backend: KubernetesBackend, server: Server
) -> None:
    await backend.announce_cancel("ns", "another", Cancel(0))
    server.objects[f"{LEASES}/waiter"] = {"metadata": {"name": "waiter", "resourceVersion": "1"}}
    assert (await backend.cancels("ns", WORK))[1] == []
    assert [*await backend.all_cancels("ns")] == ["another"]


async def test_one_request_reads_the_records(backend: KubernetesBackend, server: Server) -> None:
    await backend.cancels("ns", WORK)
    assert server.requests == [("GET", LEASES)]


async def test_without_permission_there_are_no_records(backend: KubernetesBackend, server: Server) -> None:
    forbidden = Forbidden(403, "Forbidden", "leases is forbidden")
    server.refusals = {"GET leases": [forbidden], "POST leases": [forbidden]}
    assert await backend.cancels("ns", WORK) == (None, [])
    assert await backend.announce_cancel("ns", WORK, Cancel(0)) is None


async def test_a_record_that_nothing_has_removed_concerns_nobody_after_an_hour(
    backend: KubernetesBackend, server: Server
) -> None:
    await backend.announce_cancel("ns", WORK, Cancel(0))
    ((_, lease),) = server.objects.items()
    lease["metadata"]["creationTimestamp"] = f"{datetime.now(UTC) - timedelta(minutes=61):%Y-%m-%dT%H:%M:%SZ}"
    version, found = await backend.cancels("ns", WORK)
    assert (version is None, found) == (False, [])


async def test_records_are_removed_one_by_one(backend: KubernetesBackend) -> None:
    first = await backend.announce_cancel("ns", WORK, Cancel(0))
    second = await backend.announce_cancel("ns", WORK, Cancel(0))
    assert first is not None
    assert second is not None
    await backend.forget_cancel("ns", first)
    assert await backend.all_cancels("ns") == {WORK: [second]}
    await backend.forget_cancel("ns", second)
    assert await backend.all_cancels("ns") == {}
    await backend.forget_cancel("ns", second)  # another run of the reaper has removed it


# ---------------------------------------------------------------- a launch


async def test_requests_of_a_launch(backend: KubernetesBackend, server: Server) -> None:
    """The documented cost: four requests side by side, the create, and two side by side."""
    ref = await launch(backend, SPEC, "key", namespace="ns")
    first = ["GET leases", "GET trainjobs", f"GET jobsets/{ref.name}", "GET pods"]
    assert sorted(server.asked("GET")[:4]) == sorted(first)
    assert sorted(server.asked("GET")[4:]) == ["GET leases", "GET trainjobs"]
    assert server.asked("POST") == ["POST trainjobs"]
    server.requests.clear()
    await launch(backend, SPEC, "key", namespace="ns", tried=2)
    assert sorted(server.asked("GET")) == ["GET leases", "GET trainjobs"]
    assert server.asked("PATCH") == [f"PATCH trainjobs/{ref.name}"]
    assert len(server.requests) == 3


async def test_requests_of_a_launch_of_a_new_key(backend: KubernetesBackend, server: Server) -> None:
    await launch(backend, SPEC, "key", namespace="ns", is_new=True)
    assert server.requests[0] == ("POST", JOBS)
    assert sorted(server.requests[1:]) == sorted([("GET", JOBS), ("GET", LEASES)])
