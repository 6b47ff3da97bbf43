"""Leases of waiting processes: for any number of jobs, with few requests, none above the limits of an API server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st
from tests.fakes.kube.objects import Object
from tests.fakes.kube.server import Refused, Server as ApiServer
from tests.unit.virtually import virtually

from trainjob import JobRef
from trainjob._backends.base import Waiter
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes import leases
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request, Timings
from trainjob._backends.kubernetes.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    ObjectNotFound,
    Unreachable,
    error_of,
)
from trainjob._backends.kubernetes.leases import JOBS, Attendance, waiters
from trainjob.errors import ConfigurationError, TrainJobError

BEGIN = datetime(2026, 11, 28, 12, tzinfo=UTC)
ANNOTATIONS = 256 << 10  # TotalAnnotationSizeLimitB of k8s.io/apimachinery, for names and values of all annotations
LARGEST = 2000
RENEW = Timings().renew


class Leases(ApiServer):
    """The Leases, whose size is limited, with the time of their latest change."""

    def defaulted(self, plural: str, item: Object) -> Object:
        size = sum(len(key) + len(value) for key, value in item["metadata"]["annotations"].items())
        if size > ANNOTATIONS:
            raise Refused(422, "Invalid", f"metadata.annotations: Too long: may not be more than {ANNOTATIONS} bytes")
        fields = [{"manager": "trainjob", "operation": "Update", "time": self.timestamp()}]
        return {**item, "metadata": {**item["metadata"], "managedFields": fields}}


class Server:
    """The connection of a process to the Leases, in the time of the event loop.

    Attributes:
        refusal: The error of a request, if it is refused.
        ahead: By how much the clock of the process is ahead.
    """

    timings = Timings()

    def __init__(self, store: Leases | None = None) -> None:
        self.store = store or Leases(lambda: asyncio.get_running_loop().time(), BEGIN.timestamp())
        self.requests: list[Request] = []
        self.refusal: Callable[[Request], TrainJobError | None] = lambda _: None
        self.ahead = timedelta(0)

    @property
    def client(self) -> ApiClient:
        return cast(ApiClient, self)

    @property
    def present(self) -> datetime:
        return BEGIN + timedelta(seconds=asyncio.get_running_loop().time())

    @property
    def leases(self) -> list[Object]:
        return self.store.items("leases")

    def now(self) -> datetime:
        return self.present + self.ahead

    async def send(self, request: Request) -> dict[str, Any]:
        self.requests.append(request)
        await asyncio.sleep(0.01)
        if (refusal := self.refusal(request)) is not None:
            raise refusal
        try:
            reply = self.store.handle("process", request.method, request.path, request.params, request.body)
        except Refused as refused:
            raise error_of(refused.status, json.loads(refused.body)) from refused
        found: dict[str, Any] = json.loads(reply)
        return found

    async def items(self, path: str, params: Mapping[str, str]) -> list[dict[str, Any]]:
        return [*(await self.send(Request("GET", path, params)))["items"]]

    def put(self, name: str, spec: Mapping[str, Any], jobs: str) -> None:
        """Another process stores a Lease."""
        own = {"name": name, "namespace": "team", "labels": {"app.kubernetes.io/managed-by": "trainjob"}}
        self.store.put("leases", {"metadata": {**own, "annotations": {JOBS: jobs}}, "spec": spec}, "ADDED")

    def named(self) -> dict[str, list[str | None]]:
        """UID of a job -> its times in all Leases."""
        found: dict[str, list[str | None]] = {}
        for lease in self.leases:
            jobs = json.loads(lease["metadata"]["annotations"][JOBS])
            assert len(jobs) <= leases.LARGEST
            for uid, at in jobs.items():
                found.setdefault(uid, []).append(at)
        return found


def job(number: int) -> JobRef:
    return JobRef("team", f"job-{number}-1", f"{number:08x}-0000-4000-8000-000000000000")


async def kept(ref: JobRef) -> None:
    raise AssertionError(f"{ref} must not be excluded")


async def settled() -> None:
    """Until all changes are written, and before the next renewal."""
    await asyncio.sleep(5)


# ---------------------------------------------------------------- any number of jobs


@virtually
async def test_a_full_lease_has_room_for_the_times_at_which_its_jobs_were_left() -> None:
    server = Server()
    process = Attendance(server.client, "team", kept)
    refs = [job(number) for number in range(LARGEST + 1)]
    for ref in refs:
        process.attend(ref)
    await settled()
    assert (server.named(), len(server.leases)) == ({ref.uid: [None] for ref in refs}, 2)
    for ref in refs:
        process.leave(ref, ended=False)
    await settled()
    found = server.named()
    assert found.keys() == {ref.uid for ref in refs}
    assert None not in [at for times in found.values() for at in times]
    assert not any(waiter.waiting for waiter in await waiters(server.client, "team"))
    await process.aclose()


@settings(max_examples=60)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(("attend", "end", "leave", "pause", "delete")), st.integers(0, 11)), max_size=60
    )
)
@patch.object(leases, "LARGEST", 3)
@virtually
async def test_leases_follow_any_sequence_of_waits(actions: list[tuple[str, int]]) -> None:
    """With room for three jobs in a Lease, so that Leases fill and empty often."""
    server = Server()
    process = Attendance(server.client, "team", kept)
    waits: dict[int, int] = {}
    expected: dict[str, bool] = {}  # UID -> whether a process waits
    peak, deleted = 0, False
    for action, number in actions:
        if action == "pause":
            await asyncio.sleep(0.3 * number)
        elif action == "delete":  # by a person
            for lease in server.leases[:1]:
                server.store.put("leases", lease, "DELETED")
                deleted = True
        elif action == "attend":
            process.attend(job(number))
            waits[number] = waits.get(number, 0) + 1
            expected[job(number).uid] = True
        elif waits.get(number):
            process.leave(job(number), ended=action == "end")
            waits[number] -= 1
            if not waits[number] and action == "end":
                expected.pop(job(number).uid)
            elif not waits[number]:
                expected[job(number).uid] = False
        peak = max(peak, len(expected))
    await asyncio.sleep(RENEW + 5)  # a Lease that a person has deleted is written by the next renewal
    found = server.named()
    assert all(len(times) == 1 for times in found.values()), "a job is in one Lease"
    waited = {uid for uid, waiting in expected.items() if waiting}
    assert {uid for uid, times in found.items() if times == [None]} == waited
    assert found.keys() <= expected.keys(), "no Lease names a job that has ended"
    assert found.keys() == expected.keys() or deleted
    assert len(server.leases) <= peak
    await process.aclose()
    assert server.named().keys() == found.keys()


@pytest.mark.parametrize("count", [1, LARGEST, LARGEST + 1])
@virtually
async def test_an_hour_costs_one_renewal_per_lease_and_interval(count: int) -> None:
    server = Server()
    process = Attendance(server.client, "team", kept)
    for number in range(count):
        process.attend(job(number))
    await settled()
    server.requests.clear()
    await asyncio.sleep(3600)
    leases = ceil(count / LARGEST)
    # The interval begins after the reply to the last renewal.
    assert 119 * leases <= len(server.requests) <= 120 * leases
    assert not any(each.method != "PATCH" or "metadata" in each.body for each in server.requests)
    assert max(len(json.dumps(each.body)) for each in server.requests) < 100
    await process.aclose()
    assert len(server.leases) == leases


@virtually
async def test_the_end_of_a_job_changes_one_lease_and_an_empty_one_is_deleted() -> None:
    server = Server()
    process = Attendance(server.client, "team", kept)
    for number in range(3 * LARGEST):
        process.attend(job(number))
    await settled()
    server.requests.clear()
    process.leave(job(4_321), ended=True)
    process.leave(job(4_322), ended=False)
    await settled()
    (request,) = server.requests
    assert len(json.dumps(request.body)) < 50 * LARGEST
    process.attend(job(4_322))
    process.attend(job(10_001))
    await settled()
    assert len(server.requests) == 2, "a job that is waited for again stays in its Lease"
    assert len(server.leases) == 3, "a new job takes the place of one that has ended"
    for number in range(LARGEST):
        process.leave(job(number), ended=True)
    await settled()
    assert len(server.leases) == 2, "an empty Lease is deleted"
    await process.aclose()


# ---------------------------------------------------------------- Leases that cannot be written


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def refused(error: TrainJobError, *, seconds: float) -> tuple[Server, list[JobRef]]:
    """A process that waits for jobs of two Leases for an hour; requests fail with `error` in the first `seconds`."""
    excluded: list[JobRef] = []
    server = Server()

    async def exclude(ref: JobRef) -> None:
        excluded.append(ref)

    async def main() -> None:
        server.refusal = lambda _: error if asyncio.get_running_loop().time() < seconds else None
        process = Attendance(server.client, "team", exclude)
        for number in range(LARGEST + 1):
            process.attend(job(number))
        await asyncio.sleep(3600 + RENEW)
        await process.aclose()

    virtually(main)()
    return server, excluded


@pytest.mark.parametrize(
    "error",
    [Forbidden(403, "Forbidden", "leases are forbidden"), Invalid(422, "Invalid", "a policy has refused the Lease")],
)
def test_jobs_are_kept_if_leases_are_refused(error: ApiError, caplog: pytest.LogCaptureFixture) -> None:
    server, excluded = refused(error, seconds=9e9)
    (warning,) = warnings_of(caplog)
    assert warning.endswith(f"a Lease in namespace team was refused: {error}")
    assert "unattended jobs are kept" in warning
    assert sorted(ref.uid for ref in excluded) == [job(number).uid for number in range(LARGEST + 1)], "each once"
    assert len(server.requests) <= 2 * (3600 / (10 * RENEW) + 2), "refused requests are rare"


@pytest.mark.parametrize(
    ("error", "seconds", "reported"),
    [
        (Unreachable(0, "", "no reply"), 3600, False),  # reported by the watch
        (Conflict(409, "Conflict", "the quota was changed"), 5, False),
        (Conflict(409, "Conflict", "Operation cannot be fulfilled on resourcequotas"), 3600, True),
        (ObjectNotFound(404, "NotFound", "the server could not find the requested resource"), 3600, True),
        (ConfigurationError("the certificate is not trusted"), 3600, True),
    ],
)
def test_a_failure_is_reported_once_and_the_requests_are_repeated(
    error: TrainJobError, seconds: float, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server, excluded = refused(error, seconds=seconds)
    warnings = [message.split("; ")[0] for message in warnings_of(caplog)]
    assert warnings == ([f"a Lease in namespace team cannot be written: {error}"] if reported else [])
    assert excluded == []
    assert len(server.named()) == LARGEST + 1


# ---------------------------------------------------------------- times in the future


async def one_waiter(server: Server) -> Waiter:
    (found,) = await waiters(server.client, "team")
    assert found.renewed <= server.present, "no time is in the future"
    assert all(at <= found.renewed for at in found.jobs.values())
    return found


@virtually
async def test_a_renewal_in_the_future_counts_from_its_arrival() -> None:
    """Of a process whose clock is wrong: otherwise its job would count as attended until that time."""
    writer = Server()
    reader, writer.ahead = Server(writer.store), timedelta(days=400)
    process = Attendance(writer.client, "team", kept)
    process.attend(job(1))
    process.attend(job(2))
    await asyncio.sleep(600)
    process.leave(job(2), ended=False)
    await settled()
    alive = await one_waiter(reader)
    assert reader.present - alive.renewed < timedelta(seconds=RENEW)
    assert alive.waiting == {job(1).uid}
    process.stop()  # killed
    died = reader.present
    await asyncio.sleep(3600)
    dead = await one_waiter(reader)
    assert dead.jobs.keys() == {job(1).uid, job(2).uid}
    assert all(died - timedelta(seconds=RENEW) <= at <= died for at in dead.jobs.values())


@pytest.mark.parametrize("seconds", [59, 61])
@virtually
async def test_a_renewal_in_the_future_without_a_time_of_arrival_counts_as_now(seconds: float) -> None:
    server = Server()
    await asyncio.sleep(10)
    at = server.present + timedelta(seconds=seconds)
    jobs = {"a": None, "b": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}", "c": "2026-11-28T11:00:00Z"}
    server.put("x", {"renewTime": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}"}, json.dumps(jobs))
    found = await one_waiter(server)
    assert found.jobs == {"a": found.renewed, "b": found.renewed, "c": BEGIN - timedelta(hours=1)}
    assert server.present - found.renewed < timedelta(seconds=1)


@pytest.mark.parametrize("text", ["[" * 20_000, "null", "[]", '{"a": 1, "b": "soon"}', '{"a": {}}', "{", '"\\ud800"'])
@virtually
async def test_a_malformed_lease_names_no_job(text: str) -> None:
    server = Server()
    time = {"renewTime": "2026-11-28T11:00:00Z"}
    server.put("x", time, text)
    server.put("y", time, '{"a": null}')
    bad, good = await waiters(server.client, "team")
    assert (bad.jobs, bad.waiting) == ({}, frozenset())
    assert good.waiting == {"a"}


@virtually
async def test_a_process_tells_its_own_leases_from_those_of_others() -> None:
    """So a terminated process knows whether another one waits for its jobs."""
    server = Server()
    mine, other = (Attendance(server.client, "team", kept) for _ in range(2))
    mine.attend(job(1))
    assert mine.names == set(), "not written yet"
    await settled()
    other.attend(job(1))
    await settled()
    found = await waiters(server.client, "team")
    assert len(found) == 2
    assert mine.names | other.names == {each.lease for each in found}
    assert len(mine.names) == len(other.names) == 1
    assert {each.holder for each in found} == {socket.gethostname()}
    assert {each.lasts for each in found} == {timedelta(seconds=3 * RENEW)}
    backend = KubernetesBackend(Credentials(host="http://localhost:1"))
    backend._client = server.client
    assert not any(each.own for each in await backend.waiters("team"))
    backend._attendances["team"] = mine
    assert {each.lease for each in await backend.waiters("team") if each.own} == mine.names


@pytest.mark.parametrize("seconds", [None, "90", 30])
@virtually
async def test_a_lease_without_a_duration_lasts_no_longer_than_its_renewal(seconds: object) -> None:
    server = Server()
    server.put("x", {"renewTime": "2026-11-28T11:00:00Z", "leaseDurationSeconds": seconds}, "{}")
    found = await one_waiter(server)
    assert found.lasts == timedelta(seconds=30 if seconds == 30 else 0)
    assert found.holder == ""
