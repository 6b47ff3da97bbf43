"""Logs of pods from a real server that sends recorded replies of a kubelet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import anyio
import pytest
from tests import objects
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.serving import serving

from trainjob import JobRef, LogLine
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.logs import RankLogs
from trainjob._backends.kubernetes.pods import list_pods, tails_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.anyio]

FIRST = "2026-11-21T10:00:00.000000001Z"
SECOND = "2026-11-21T10:00:02.000000001Z"


class Kubelet(ScriptedServer):
    """Sends the `replies`, one for each request for the log, chunk by chunk; then empty logs.

    `None` in a reply waits for `stalled`, and breaks the connection in any reply but the last.
    """

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.replies: list[list[bytes | None]] = []
        self.pods = [objects.pod()]
        self.refused = "none"  # name of a pod whose log may not be read

    def reply(self, asked: Asked) -> Answer:
        if f"/{self.refused}/log?" in asked.path:
            return as_json({}, 403)
        if "/log?" not in asked.path:
            return as_json({"metadata": {}, "items": self.pods})
        chunks = self.replies.pop(0) if self.replies else []
        if None in chunks and self.replies:
            return Answer(chunks=[chunk for chunk in chunks[: chunks.index(None)] if chunk], cut=0)
        return Answer(chunks=self.late(chunks))

    def late(self, chunks: list[bytes | None]) -> Iterator[bytes]:
        for chunk in chunks:
            if chunk is None:
                self.stalled.wait(30)
            else:
                yield chunk


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    with serving(Kubelet()) as server:
        yield server


@pytest.fixture
async def client(kubelet: Kubelet) -> AsyncIterator[ApiClient]:
    made = ApiClient(Credentials(host=kubelet.url))
    yield made
    await made.aclose()


async def followed(kubelet: Kubelet, client: ApiClient) -> list[LogLine]:
    """Follow the log until `done`; open the server's gate when a state arrives."""
    logs = RankLogs(client, JobRef("ns", "x", "uid"), (), "", None)
    lines: list[LogLine] = []
    with anyio.fail_after(30):
        async with aclosing(logs.follow()) as following:
            async for line in following:
                lines.append(line)
                if line.transient and len(kubelet.replies) == 0:
                    kubelet.stalled.set()
                if line.text == "done":
                    logs.finish()
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
    assert [line.text for line in lines] == ["4%", "done"]


async def test_tails_cost_one_list_and_one_bounded_request_for_each_pod(kubelet: Kubelet, client: ApiClient) -> None:
    kubelet.pods = [
        objects.pod(n, metadata={"name": f"x-node-0-{n}", "creationTimestamp": f"2026-11-21T10:00:{59 - n:02}Z"})
        for n in range(40)
    ]
    kubelet.refused = "x-node-0-7"
    kubelet.replies = [[f"{FIRST} a line\n".encode()] for _ in range(39)]
    async with aclosing(tails_of(client, await list_pods(client, JobRef("ns", "x", "uid")), 5)) as tails:
        found = [(each["metadata"]["name"], [line.text for line in lines]) async for each, lines in tails]
    assert [name for name, _ in found] == [f"x-node-0-{number}" for number in range(39, -1, -1)], "the oldest first"
    assert dict(found) == {f"x-node-0-{number}": [] if number == 7 else ["a line"] for number in range(40)}
    logs = [asked.path for asked in kubelet.asked if "/log?" in asked.path]
    assert (len(kubelet.asked), len(logs)) == (41, 40)
    assert all("tailLines=5" in path and "limitBytes=" in path and "follow" not in path for path in logs)
