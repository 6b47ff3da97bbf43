"""Connections to an API server: those of ready-made requests, and of a request that is cancelled."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import anyio.to_thread
import pytest
from tests.fakes.scripted import Answer, Asked, ScriptedServer
from tests.serving import serving

from trainjob._backends.credentials import Access, Credentials
from trainjob._backends.kubernetes.client import MERGE_PATCH, ApiClient, Request, Timings
from trainjob._backends.kubernetes.pods import disruption_of
from trainjob._backends.kubernetes.prepared import PreparedRequest

pytestmark = pytest.mark.anyio

BODY = {"metadata": {"uid": "u"}, "spec": {"suspend": True}}
DELETE = Request("DELETE", "/apis/jobs/a", body={"preconditions": {"uid": "u"}})
PATCH = Request("PATCH", "/apis/jobs/a", {"fieldManager": "trainjob"}, body=BODY, content_type=MERGE_PATCH)


class Server(ScriptedServer):
    """An API server that can hold replies back, refuse methods and close connections."""

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.body = b"{}"
        self.status = 200
        self.statuses: dict[str, int] = {}  # by method
        self.held: str | None = None  # a method that is answered after `stalled`
        self.closes = False
        self.opened: list[PreparedRequest] = []

    def reply(self, asked: Asked) -> Answer:
        if asked.method == self.held:
            self.stalled.wait(30)
        if asked.method == "DELETE":
            self.stalled.set()
        return Answer(self.statuses.get(asked.method, self.status), self.body, closes=self.closes)

    @property
    def methods(self) -> list[str]:
        """Methods of the requests, without those that keep connections open."""
        return [each.method for each in self.asked if each.method != "GET" and "dryRun" not in each.path]

    def prepared(self, request: Request = PATCH) -> PreparedRequest:
        """A prepared request to this server, which is closed with it."""
        access = Access(f"{self.url}/behind", ssl.create_default_context(), "Bearer t", None, ())

        class Client:
            timings = Timings()

            async def access(self) -> Access:
                return access

        self.opened.append(PreparedRequest(cast(ApiClient, Client()), request))
        return self.opened[-1]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as made:
        yield made
        for request in made.opened:
            request.close()


async def test_a_request_uses_the_open_connection(server: Server) -> None:
    request = server.prepared()
    await request.warm()
    await request.warm()
    assert request.send()
    one, two, sent = server.asked
    assert one.client == two.client == sent.client, "one connection"
    path = "/behind/apis/jobs/a?fieldManager=trainjob"
    assert (two.method, two.path) == ("PATCH", f"{path}&dryRun=All")
    assert (sent.method, sent.path, json.loads(sent.body)) == ("PATCH", path, BODY)
    assert (sent.headers["Authorization"], sent.headers["Content-Type"]) == ("Bearer t", MERGE_PATCH)


@pytest.mark.parametrize("refused", [[], ["PATCH"], ["DELETE"], ["PATCH", "DELETE"]])
@pytest.mark.parametrize(
    ("late", "took", "asked", "by"),
    [
        (False, 0.1, ["PATCH"], "PATCH"),
        (True, 0.1, ["PATCH", "DELETE"], "DELETE"),  # the PATCH waits in a webhook until the DELETE has its response
        (True, 0.3, ["DELETE"], "DELETE"),  # known from dry runs
    ],
    ids=["in time", "late", "known to be late"],
)
async def test_a_patch_without_a_timely_response_becomes_a_deletion(
    server: Server, *, late: bool, took: float, asked: list[str], by: str, refused: list[str]
) -> None:
    patch, delete = server.prepared(), server.prepared(DELETE)
    await patch.warm()
    await delete.warm()
    patch.took = took
    server.statuses = dict.fromkeys(refused, 403)
    server.held = "PATCH" if late else None
    found = patch.send_or(delete, 0.2 if late else 30)
    if by in refused:  # then the other request counts, and is sent if it was not yet
        other = "DELETE" if by == "PATCH" else "PATCH"
        asked, by = [*asked, *({other} - set(asked))], other
    assert found is (None if by in refused else patch if by == "PATCH" else delete)
    assert server.methods == asked


def pod(*conditions: dict[str, str]) -> bytes:
    return json.dumps({"kind": "PodList", "items": [{"status": {"conditions": list(conditions)}}]}).encode()


DRAINED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (pod({"type": "Ready", "status": "True"}, DRAINED), "EvictionByEvictionAPI"),
        (pod({**DRAINED, "status": "False"}), ""),  # the eviction did not happen
        (pod(), ""),
        (b'{"kind": "PodList", "items": null}', ""),
        (b'{"kind": "PodList", "items": [{"metadata": {"deletionTimestamp": "2026-11-25T14:00:00Z"}}]}', ""),
    ],
    ids=["drained", "not any more", "running", "gone", "deleted"],
)
async def test_disruption_of_a_pod_is_read(server: Server, reply: bytes, reason: str) -> None:
    request = server.prepared(Request("GET", "/api/pods", {"fieldSelector": "metadata.name=a"}))
    server.body = reply
    await request.warm()
    assert disruption_of(request.read(5) or b"") == reason
    one, two = server.asked
    assert one.client == two.client, "one connection"
    assert one.method == two.method == "GET"
    assert one.path == two.path == "/behind/api/pods?fieldSelector=metadata.name%3Da"


async def test_a_read_without_a_timely_response_returns_none(server: Server) -> None:
    request = server.prepared(Request("GET", "/api/pods"))
    assert request.read(0.1) is None, "no connection is open"
    await request.warm()
    server.held = "GET"
    assert request.read(0.1) is None
    assert not server.stalled.is_set(), "the server has not responded"
    server.stalled.set()
    server.status = 403
    await request.warm()
    assert request.forbidden
    assert request.read(5) is None


async def test_dry_runs_measure_the_time_of_a_patch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.3, 0.1, 0.3, 0.2, 0.4]  # the server's time for each
    clock = SimpleNamespace(monotonic=lambda: sum(seconds[: len(server.asked)]))
    monkeypatch.setattr("trainjob._backends.kubernetes.prepared.time", clock)
    request = server.prepared()
    shortest = []
    for _ in seconds:
        await request.warm()
        shortest.append(request.took)
    assert shortest == pytest.approx([0.3, 0.1, 0.1, 0.1, 0.2]), "the minimum of the last three"


async def test_a_rejected_dry_run_is_not_measured_and_a_closed_connection_opened_again(server: Server) -> None:
    request = server.prepared()
    server.status, server.closes = 400, True  # a webhook with side effects
    await request.warm()
    assert request.took is None
    server.status, server.closes = 200, False
    await request.warm()
    assert request.send()
    assert len({asked.client for asked in server.asked}) == 2


@pytest.mark.parametrize(("status", "done"), [(200, True), (202, True), (404, True), (403, False), (503, False)])
async def test_send_returns_whether_the_request_succeeded(server: Server, status: int, done: bool) -> None:
    request = server.prepared(DELETE)
    await request.warm()
    server.status = status
    assert request.send() is done
    assert [asked.method for asked in server.asked] == ["GET", "DELETE"], "a deletion has no dry run"
    assert request.took is None


async def test_send_without_a_connection_returns_false(server: Server) -> None:
    assert not server.prepared().send()
    request = server.prepared()
    server.closes = True
    await request.warm()
    assert not request.send(), "the server closed the connection"
    request.close()
    assert not request.send()


async def test_a_request_that_is_cancelled_during_its_tls_handshake_closes_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        client = ApiClient(Credentials(host=f"https://127.0.0.1:{server.getsockname()[1]}", token="t"))
        request = asyncio.create_task(client.send(Request("GET", "/version")))
        accepted, _ = await anyio.to_thread.run_sync(server.accept)
        with accepted:
            accepted.settimeout(20)
            assert await anyio.to_thread.run_sync(accepted.recv, 65536), "the client's part of the handshake"
            request.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await request
            await client.aclose()
            # Without `caught`, the garbage collector might close what the client has left.
            assert caught.tb is not None
            assert await anyio.to_thread.run_sync(accepted.recv, 65536) == b"", "the connection is closed"
