"""A request that is ready to go, on a connection of its own."""

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

from trainjob.backends.kubernetes.client import MERGE_PATCH, ApiClient, Request, Timings
from trainjob.backends.kubernetes.credentials import Access
from trainjob.backends.kubernetes.pods import disruption_of
from trainjob.backends.kubernetes.prepared import PreparedRequest

pytestmark = pytest.mark.anyio

BODY = {"metadata": {"uid": "u"}, "spec": {"suspend": True}}
DELETE = Request("DELETE", "/apis/jobs/a", body={"preconditions": {"uid": "u"}})
PATCH = Request("PATCH", "/apis/jobs/a", {"fieldManager": "trainjob"}, body=BODY, content_type=MERGE_PATCH)


class Server:
    """Notes what it is asked, by connection."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, int], str, str, dict[str, str], bytes]] = []
        self.reply = b"{}"
        self.status = 200
        self.statuses: dict[str, int] = {}  # by method
        self.held: str | None = None  # a method that is answered after `release`
        self.release = Event()
        self.hangs_up = False
        noting = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                noting.asked.append((self.client_address, self.command, self.path, dict(self.headers), body))
                if self.command == noting.held:
                    noting.release.wait(30)
                if self.command == "DELETE":
                    noting.release.set()
                self.close_connection = noting.hangs_up  # before the client has its answer, and changes that
                self.send_response(noting.statuses.get(self.command, noting.status))
                self.send_header("Content-Length", str(len(noting.reply)))
                self.end_headers()
                with suppress(OSError):  # the client has not waited
                    self.wfile.write(noting.reply)

            do_GET = do_PATCH = do_DELETE = answer  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    @property
    def methods(self) -> list[str]:
        """What was asked, without the requests that keep connections open."""
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


async def test_it_goes_over_the_connection_that_is_open(server: Server) -> None:
    urgent = server.prepared_request()
    await urgent.warm()
    await urgent.warm()
    assert urgent.send()
    (one, *_), (two, rehearsal, rehearsed, _, _), (three, patch, sent, headers, body) = server.asked
    assert one == two == three, "one connection"
    path = "/behind/apis/jobs/a?fieldManager=trainjob"
    assert (rehearsal, rehearsed, patch, sent) == ("PATCH", f"{path}&dryRun=All", "PATCH", path)
    assert (headers["Authorization"], headers["Content-Type"]) == ("Bearer t", MERGE_PATCH)
    assert json.loads(body) == BODY
    urgent.close()


async def test_a_deletion_is_kept_ready_by_reading(server: Server) -> None:
    urgent = server.prepared_request(DELETE)
    await urgent.warm()
    assert urgent.send()
    assert [method for _, method, *_ in server.asked] == ["GET", "DELETE"]
    assert urgent.took is None
    urgent.close()


@pytest.mark.parametrize("refused", [[], ["PATCH"], ["DELETE"], ["PATCH", "DELETE"]])
@pytest.mark.parametrize(
    ("late", "took", "asked", "by"),
    [
        (False, 0.1, ["PATCH"], "PATCH"),
        (True, 0.1, ["PATCH", "DELETE"], "DELETE"),  # the PATCH is in a webhook until the DELETE was answered
        (True, 0.3, ["DELETE"], "DELETE"),  # dry runs have shown it
    ],
    ids=["in time", "late", "known to be late"],
)
async def test_a_patch_that_is_not_answered_in_time_becomes_a_deletion(
    server: Server, *, late: bool, took: float, asked: list[str], by: str, refused: list[str]
) -> None:
    patch, delete = server.prepared_request(), server.prepared_request(DELETE)
    await patch.warm()
    await delete.warm()
    patch.took = took
    server.statuses = dict.fromkeys(refused, 403)
    server.held = "PATCH" if late else None
    found = patch.send_or(delete, 0.2 if late else 30)
    if by in refused:  # then the other one counts, and is sent if it was not
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
        (pod({**DRAINED, "status": "False"}), ""),  # it was not carried out
        (pod(), ""),
        (b'{"kind": "PodList", "items": null}', ""),
        (b'{"kind": "PodList", "items": [{"metadata": {"deletionTimestamp": "2026-11-25T14:00:00Z"}}]}', ""),
    ],
    ids=["drained", "not any more", "running", "gone", "deleted"],
)
async def test_a_pod_is_read(server: Server, reply: bytes, reason: str) -> None:
    urgent = server.prepared_request(Request("GET", "/api/pods", {"fieldSelector": "metadata.name=a"}))
    server.reply = reply
    await urgent.warm()
    assert disruption_of(urgent.read(5) or b"") == reason
    one, two = server.asked
    assert one[:3] == two[:3] == (one[0], "GET", "/behind/api/pods?fieldSelector=metadata.name%3Da"), "one connection"
    urgent.close()


async def test_a_pod_that_cannot_be_read_in_time_is_unknown(server: Server) -> None:
    urgent = server.prepared_request(Request("GET", "/api/pods"))
    assert urgent.read(0.1) is None, "there is no connection"
    await urgent.warm()
    server.held = "GET"
    assert urgent.read(0.1) is None
    assert not server.release.is_set(), "it was not answered"
    server.release.set()
    server.status = 403
    await urgent.warm()
    assert urgent.forbidden
    assert urgent.read(5) is None
    urgent.close()


async def test_a_dry_run_shows_how_long_a_patch_takes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.3, 0.1, 0.3, 0.2, 0.4]  # what the server takes for each
    clock = SimpleNamespace(monotonic=lambda: sum(seconds[: len(server.asked)]))
    monkeypatch.setattr("trainjob.backends.kubernetes.prepared.time", clock)
    urgent = server.prepared_request()
    shortest = []
    for _ in seconds:
        await urgent.warm()
        shortest.append(urgent.took)
    assert shortest == pytest.approx([0.3, 0.1, 0.1, 0.1, 0.2]), "of the last three"
    urgent.close()


async def test_a_dry_run_that_is_refused_shows_nothing(server: Server) -> None:
    urgent = server.prepared_request()
    server.status = 400  # a webhook with side effects
    await urgent.warm()
    assert urgent.took is None
    server.status = 200
    assert urgent.send()
    urgent.close()


async def test_a_connection_that_was_closed_is_opened_again(server: Server) -> None:
    urgent = server.prepared_request()
    server.hangs_up = True
    await urgent.warm()
    server.hangs_up = False
    await urgent.warm()
    assert urgent.send()
    assert len({asked[0] for asked in server.asked}) == 2
    urgent.close()


@pytest.mark.parametrize(("status", "done"), [(200, True), (202, True), (404, True), (403, False), (503, False)])
async def test_what_is_answered(server: Server, status: int, done: bool) -> None:
    urgent = server.prepared_request(DELETE)
    await urgent.warm()
    server.status = status
    assert urgent.send() is done
    urgent.close()


async def test_without_a_connection_it_says_so(server: Server) -> None:
    assert not server.prepared_request().send()
    urgent = server.prepared_request()
    server.hangs_up = True
    await urgent.warm()
    assert not urgent.send(), "the server has hung up"
    urgent.close()
    assert not urgent.send()
