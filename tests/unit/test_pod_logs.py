"""Logs of pods from a real server that sends recorded replies of a kubelet."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.serving import EndsConnections, serving

from trainjob import JobRef, LogLine
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.logs import RankLogs
from trainjob._backends.kubernetes.pods import list_pods, tails_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.anyio]

POD: dict[str, Any] = {
    "metadata": {
        "name": "x-node-0-0-abcde",
        "namespace": "ns",
        "uid": "u",
        "labels": {
            "jobset.sigs.k8s.io/replicatedjob-name": "node",
            "batch.kubernetes.io/job-completion-index": "0",
        },
    },
    "spec": {"containers": [{"name": "node"}]},
    "status": {"phase": "Running"},
}
FIRST = "2026-11-21T10:00:00.000000001Z"
SECOND = "2026-11-21T10:00:02.000000001Z"


class Kubelet(EndsConnections):
    """Sends the `replies`, one for each request for the log, chunk by chunk; then empty logs.

    `None` in a reply waits for `opened`, and breaks the connection in any reply but the last.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.opened = self.stalled = threading.Event()
        self.replies: list[list[bytes | None]] = []
        self.pods = [POD]
        self.refused = ""  # name of a pod whose log may not be read
        self.requests: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Kubelet

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        refused = bool(self.server.refused) and f"/{self.server.refused}/log?" in self.path
        if "/log?" not in self.path or refused:
            body = json.dumps({"metadata": {}, "items": self.server.pods}).encode()
            self.send_response(403 if refused else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in self.server.replies.pop(0) if self.server.replies else ():
            if chunk is None and self.server.replies:
                self.close_connection = True
                return
            if chunk is None:
                self.server.opened.wait(30)
                continue
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    with serving(Kubelet()) as server:
        yield server


@pytest.fixture
def client(kubelet: Kubelet, tmp_path: Path) -> ApiClient:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{kubelet.server_address[1]}"}}],
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    return ApiClient(Credentials(kubeconfig=str(path)))


async def followed(kubelet: Kubelet, client: ApiClient) -> list[LogLine]:
    """Follow the log until `done`; open the server's gate when a state arrives."""
    logs = RankLogs(client, JobRef("ns", "x", "uid"), (), "", None)
    lines: list[LogLine] = []
    with anyio.fail_after(30):
        async with aclosing(logs.follow()) as following:
            async for line in following:
                lines.append(line)
                if line.transient and len(kubelet.replies) == 0:
                    kubelet.opened.set()
                if line.text == "done":
                    logs.finish()
    await client.aclose()
    return lines


async def test_states_of_a_bar_are_passed_on_before_the_line_ends(kubelet: Kubelet, client: ApiClient) -> None:
    # containerd holds a line back until it ends or has 16 KiB, which are then sent without an end.
    states = b"".join(b"\r%5d%%" % i for i in range(2600))
    kubelet.replies = [[f"{FIRST} ".encode() + states, None, b"\r 100%\n", f"{SECOND} done\n".encode()]]
    lines = await followed(kubelet, client)
    assert [line.text for line in lines if not line.transient] == [" 100%", "done"]
    assert [line.text for line in lines if line.transient][-1] == " 2598%"  # the last state may be incomplete
    assert {line.time for line in lines[:-1]} == {FIRST}


async def test_a_bar_is_completed_after_a_broken_connection(kubelet: Kubelet, client: ApiClient) -> None:
    begin = f"{FIRST}   0%\r 10%\r".encode()
    kubelet.replies = [[begin, None], [begin, None, b" 20%\r\n", f"{SECOND} done\r\n".encode()]]
    lines = await followed(kubelet, client)
    assert [(line.text, line.transient) for line in lines if not line.transient] == [(" 20%", False), ("done", False)]
    assert {line.text for line in lines if line.transient} == {" 10%"}


async def test_stored_lines_have_the_last_state(kubelet: Kubelet, client: ApiClient) -> None:
    kubelet.replies = [[f"{FIRST} 1%\r2%\r".encode(), b"3%\r", b"4%\r\n", f"{SECOND} done\r\n".encode()]]
    lines = await RankLogs(client, JobRef("ns", "x", "uid"), (), "", None).stored()
    await client.aclose()
    assert [line.text for line in lines] == ["4%", "done"]


def pod(number: int, created: str) -> dict[str, Any]:
    metadata = POD["metadata"] | {"name": f"x-node-0-{number}", "creationTimestamp": created, "uid": f"u{number}"}
    labels = POD["metadata"]["labels"] | {"batch.kubernetes.io/job-completion-index": str(number)}
    return POD | {"metadata": metadata | {"labels": labels}}


async def test_tails_cost_one_list_and_one_bounded_request_for_each_pod(kubelet: Kubelet, client: ApiClient) -> None:
    kubelet.pods = [pod(number, f"2026-11-21T10:00:{59 - number:02}Z") for number in range(40)]
    kubelet.refused = "x-node-0-7"
    kubelet.replies = [[f"{FIRST} a line\n".encode()] for _ in range(39)]
    async with aclosing(tails_of(client, await list_pods(client, JobRef("ns", "x", "uid")), 5)) as tails:
        found = [(each["metadata"]["name"], [line.text for line in lines]) async for each, lines in tails]
    await client.aclose()
    assert [name for name, _ in found] == [f"x-node-0-{number}" for number in range(39, -1, -1)], "the oldest first"
    assert dict(found) == {f"x-node-0-{number}": [] if number == 7 else ["a line"] for number in range(40)}
    logs = [path for path in kubelet.requests if "/log?" in path]
    assert (len(kubelet.requests), len(logs)) == (41, 40)
    assert all("tailLines=5" in path and "limitBytes=" in path and "follow" not in path for path in logs)
