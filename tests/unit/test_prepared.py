"""A ready-made request with a separate connection."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainjob._backends.credentials import Access
from trainjob._backends.kubernetes.client import MERGE_PATCH, ApiClient, Request, Timings
from trainjob._backends.kubernetes.pods import disruption_of
from trainjob._backends.kubernetes.prepared import PreparedRequest

pytestmark = pytest.mark.anyio

BODY = {"metadata": {"uid": "u"}, "spec": {"suspend": True}}
DELETE = Request("DELETE", "/apis/jobs/a", body={"preconditions": {"uid": "u"}})
PATCH = Request("PATCH", "/apis/jobs/a", {"fieldManager": "trainjob"}, body=BODY, content_type=MERGE_PATCH)


class Server:
    """Records its requests with their connections."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, int], str, str, dict[str, str], bytes]] = []
        self.reply = b"{}"
        self.status = 200
        self.statuses: dict[str, int] = {}  # by method
        self.held: str | None = None  # a method that is answered after `release`
        self.release = Event()
        self.closes = False
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                recorder.asked.append((self.client_address, self.command, self.path, dict(self.headers), body))
                if self.command == recorder.held:
                    recorder.release.wait(30)
                if self.command == "DELETE":
                    recorder.release.set()
                self.close_connection = recorder.closes  # set before the client has its response
                self.send_response(recorder.statuses.get(self.command, recorder.status))
                self.send_header("Content-Length", str(len(recorder.reply)))
                self.end_headers()
                with suppress(OSError):  # the client did not wait
                    self.wfile.write(recorder.reply)

            do_GET = do_PATCH = do_DELETE = answer  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    @property
    def methods(self) -> list[str]:
        """Methods of the requests, without those that keep connections open."""
        return [method for _, method, path, *_ in self.asked if method != "GET" and "dryRun" not in path]

    def prepared_request(self, request: Request = PATCH, token: str = "t") -> PreparedRequest:
        access = Access(f"{self.url}/behind", ssl.create_default_context(), f"Bearer {token}", None, None, ())

        class Client:
            timings = Timings()

            async def access(self) -> Access:
                return access

        return PreparedRequest(cast(ApiClient, Client()), request)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.release.set()
    made.http.shutdown()
    thread.join()
    made.http.server_close()


async def test_a_request_uses_the_open_connection(server: Server) -> None:
    prepared = server.prepared_request()
    await prepared.warm()
    await prepared.warm()
    assert prepared.send()
    (one, *_), (two, rehearsal, rehearsed, _, _), (three, patch, sent, headers, body) = server.asked
    assert one == two == three, "one connection"
    path = "/behind/apis/jobs/a?fieldManager=trainjob"
    assert (rehearsal, rehearsed, patch, sent) == ("PATCH", f"{path}&dryRun=All", "PATCH", path)
    assert (headers["Authorization"], headers["Content-Type"]) == ("Bearer t", MERGE_PATCH)
    assert json.loads(body) == BODY
    prepared.close()


async def test_a_deletion_is_warmed_up_by_a_get(server: Server) -> None:
    prepared = server.prepared_request(DELETE)
    await prepared.warm()
    assert prepared.send()
    assert [method for _, method, *_ in server.asked] == ["GET", "DELETE"]
    assert prepared.took is None
    prepared.close()


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
    patch, delete = server.prepared_request(), server.prepared_request(DELETE)
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
    patch.close()
    delete.close()


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
    prepared = server.prepared_request(Request("GET", "/api/pods", {"fieldSelector": "metadata.name=a"}))
    server.reply = reply
    await prepared.warm()
    assert disruption_of(prepared.read(5) or b"") == reason
    one, two = server.asked
    assert one[:3] == two[:3] == (one[0], "GET", "/behind/api/pods?fieldSelector=metadata.name%3Da"), "one connection"
    prepared.close()


async def test_a_read_without_a_timely_response_returns_none(server: Server) -> None:
    prepared = server.prepared_request(Request("GET", "/api/pods"))
    assert prepared.read(0.1) is None, "no connection is open"
    await prepared.warm()
    server.held = "GET"
    assert prepared.read(0.1) is None
    assert not server.release.is_set(), "the server has not responded"
    server.release.set()
    server.status = 403
    await prepared.warm()
    assert prepared.forbidden
    assert prepared.read(5) is None
    prepared.close()


async def test_dry_runs_measure_the_time_of_a_patch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.3, 0.1, 0.3, 0.2, 0.4]  # the server's time for each
    clock = SimpleNamespace(monotonic=lambda: sum(seconds[: len(server.asked)]))
    monkeypatch.setattr("trainjob._backends.kubernetes.prepared.time", clock)
    prepared = server.prepared_request()
    shortest = []
    for _ in seconds:
        await prepared.warm()
        shortest.append(prepared.took)
    assert shortest == pytest.approx([0.3, 0.1, 0.1, 0.1, 0.2]), "the minimum of the last three"
    prepared.close()


async def test_a_rejected_dry_run_is_not_measured(server: Server) -> None:
    prepared = server.prepared_request()
    server.status = 400  # a webhook with side effects
    await prepared.warm()
    assert prepared.took is None
    server.status = 200
    assert prepared.send()
    prepared.close()


async def test_a_closed_connection_is_opened_again(server: Server) -> None:
    prepared = server.prepared_request()
    server.closes = True
    await prepared.warm()
    server.closes = False
    await prepared.warm()
    assert prepared.send()
    assert len({asked[0] for asked in server.asked}) == 2
    prepared.close()


@pytest.mark.parametrize(("status", "done"), [(200, True), (202, True), (404, True), (403, False), (503, False)])
async def test_send_returns_whether_the_request_succeeded(server: Server, status: int, done: bool) -> None:
    prepared = server.prepared_request(DELETE)
    await prepared.warm()
    server.status = status
    assert prepared.send() is done
    prepared.close()


async def test_send_without_a_connection_returns_false(server: Server) -> None:
    assert not server.prepared_request().send()
    prepared = server.prepared_request()
    server.closes = True
    await prepared.warm()
    assert not prepared.send(), "the server closed the connection"
    prepared.close()
    assert not prepared.send()
