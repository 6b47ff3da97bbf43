"""A request that is ready to go, on a connection of its own."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

import pytest

from trainjob.backends.kubernetes.client import MERGE_PATCH, ApiClient, Request, Timings
from trainjob.backends.kubernetes.credentials import Access
from trainjob.backends.kubernetes.urgent import Urgent

pytestmark = pytest.mark.anyio

BODY = {"metadata": {"uid": "u"}, "spec": {"suspend": True}}
PATCH = Request("PATCH", "/apis/jobs/a", {"fieldManager": "trainjob"}, body=BODY, content_type=MERGE_PATCH)


class Server:
    """Notes what it is asked, by connection."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, int], str, str, dict[str, str], bytes]] = []
        self.status = 200
        self.hangs_up = False
        noting = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                noting.asked.append((self.client_address, self.command, self.path, dict(self.headers), body))
                self.close_connection = noting.hangs_up  # before the client has its answer, and changes that
                self.send_response(noting.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_PATCH = do_DELETE = answer  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def urgent(self, request: Request = PATCH, token: str = "t") -> Urgent:
        access = Access(f"{self.url}/behind", ssl.create_default_context(), f"Bearer {token}", None, None, ())

        class Client:
            timings = Timings()

            async def access(self) -> Access:
                return access

        return Urgent(cast(ApiClient, Client()), request)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


async def test_it_goes_over_the_connection_that_is_open(server: Server) -> None:
    urgent = server.urgent()
    await urgent.warm()
    assert urgent.send()
    await urgent.warm()
    (one, get, path, _, _), (two, patch, sent, headers, body), (three, *_) = server.asked
    assert one == two == three, "one connection"
    assert (get, path, patch, sent) == (
        "GET",
        "/behind/apis/jobs/a",
        "PATCH",
        "/behind/apis/jobs/a?fieldManager=trainjob",
    )
    assert (headers["Authorization"], headers["Content-Type"]) == ("Bearer t", MERGE_PATCH)
    assert json.loads(body) == BODY
    urgent.close()


async def test_a_connection_that_was_closed_is_opened_again(server: Server) -> None:
    urgent = server.urgent()
    server.hangs_up = True
    await urgent.warm()
    server.hangs_up = False
    await urgent.warm()
    assert urgent.send()
    assert len({asked[0] for asked in server.asked}) == 2
    urgent.close()


@pytest.mark.parametrize(("status", "done"), [(200, True), (202, True), (404, True), (403, False), (503, False)])
async def test_what_is_answered(server: Server, status: int, done: bool) -> None:
    urgent = server.urgent(Request("DELETE", "/apis/jobs/a", body={"preconditions": {"uid": "u"}}))
    await urgent.warm()
    server.status = status
    assert urgent.send() is done
    urgent.close()


async def test_without_a_connection_it_says_so(server: Server) -> None:
    assert not server.urgent().send()
    urgent = server.urgent()
    server.hangs_up = True
    await urgent.warm()
    assert not urgent.send(), "the server has hung up"
    urgent.close()
    assert not urgent.send()
