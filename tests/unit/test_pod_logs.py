"""Logs of pods: from a real server that sends recorded replies of a kubelet, and those of crashed pods.

Of a thousand crashed pods, a few logs are read, including that of the root cause.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing

import anyio
import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.objects import Object, ended, pod
from tests.serving import serving

from trainjob import JobRef, LogLine
from trainjob._backends.base import Snapshot
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ServerError, Unreachable
from trainjob._backends.kubernetes.logs import RankLogs
from trainjob._backends.kubernetes.pod_watch import Pod, PodWatch
from trainjob._backends.kubernetes.pods import gather, list_pods, tails_of
from trainjob._diagnosis import diagnosis_of
from trainjob._support.retrying import Backoff
from trainjob.status import Observation, Phase

pytestmark = [pytest.mark.timeout(60), pytest.mark.anyio]

REF = JobRef("ns", "x", "uid")
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
        if "watch=true" in asked.path:
            return as_json({}, 503)
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
    ended, pods = anyio.Event(), PodWatch(client, "ns")

    async def job() -> AsyncGenerator[Snapshot]:
        await ended.wait()
        yield Snapshot(objects.trainjob(objects.COMPLETE))

    lines: list[LogLine] = []
    with anyio.fail_after(30):
        async with aclosing(RankLogs(pods, REF, (), "", None).follow(job())) as following:
            async for line in following:
                lines.append(line)
                if line.transient and len(kubelet.replies) == 0:
                    kubelet.stalled.set()
                if line.text == "done":
                    ended.set()
    await pods.aclose()
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


async def test_pods_that_come_with_the_end_of_the_job_are_read(kubelet: Kubelet, client: ApiClient) -> None:
    """Of a job that has ended before, one turn of the event loop may bring the job and its pods."""
    kubelet.replies = [[f"{FIRST} done\n".encode()]]
    ended = asyncio.Event()

    class Pods(PodWatch):
        def kept_of(self, item: Pod) -> Pod:
            ended.set()
            return super().kept_of(item)

    async def job() -> AsyncGenerator[Snapshot]:
        await ended.wait()
        yield Snapshot(objects.trainjob(objects.COMPLETE))

    reader = RankLogs(Pods(client, "ns"), REF, (), "", None)
    async with aclosing(reader.follow(job())) as lines:
        assert [line.text async for line in lines] == ["done"]


async def test_stored_lines_have_the_last_state(kubelet: Kubelet, client: ApiClient) -> None:
    kubelet.replies = [[f"{FIRST} 1%\r2%\r".encode(), b"3%\r", b"4%\r\n", f"{SECOND} done\r\n".encode()]]
    lines = [line async for line in RankLogs(PodWatch(client, "ns"), REF, (), "", None).stored(kubelet.pods)]
    assert [line.text for line in lines] == ["4%", "done"]


class LongLogs:
    """Pods that have each written a line every second; counts those that were sent, and the open connections."""

    def __init__(self, lines: int) -> None:
        self.lines = lines
        self.sent = self.open = 0

    async def pieces(self, request: Request) -> AsyncGenerator[tuple[bytes, bool]]:
        rank = request.path.split("/")[-2][-1]
        self.open += 1
        try:
            for second in range(self.lines):
                self.sent += 1
                time = f"2026-11-21T{10 + second // 3600}:{second // 60 % 60:02}:{second % 60:02}.{rank}Z"
                yield f"{time} {second}".encode(), True
        finally:
            self.open -= 1

    def stored(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[LogLine]:
        """The lines of a job whose ranks have these logs."""
        backend = DirectBackend()
        monkeypatch.setattr(backend._client, "pieces", self.pieces)
        for rank in range(ranks):
            backend.pod(REF, rank)
        return backend.logs(REF)


@pytest.mark.parametrize(("ranks", "lines"), [(3, 5000), (5, 199), (1, 1), (4, 0)])
async def test_stored_lines_are_shown_by_time_without_holding_all_of_them(
    ranks: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = LongLogs(lines)
    shown, most = [], 0
    async with aclosing(logs.stored(ranks, monkeypatch)) as stored:
        async for line in stored:
            shown.append(line.time)
            most = max(most, logs.sent - len(shown))
    assert shown == sorted(shown)
    assert len(shown) == ranks * lines
    assert most <= 201 * ranks
    assert logs.open == 0


async def test_connections_of_short_logs_are_closed_before_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job can have more ranks than a process may have open files."""
    logs = LongLogs(10)
    async with aclosing(logs.stored(9, monkeypatch)) as stored:
        await anext(stored)
        assert (logs.sent, logs.open) == (90, 0)


async def test_tails_cost_one_list_and_one_bounded_request_for_each_pod(kubelet: Kubelet, client: ApiClient) -> None:
    kubelet.pods = [
        objects.pod(n, metadata={"name": f"x-node-0-{n}", "creationTimestamp": f"2026-11-21T10:00:{59 - n:02}Z"})
        for n in range(12)
    ]
    kubelet.refused = "x-node-0-7"
    kubelet.replies = [[f"{FIRST} a line\n".encode()] for _ in range(11)]
    async with aclosing(tails_of(client, await list_pods(client, REF), 5)) as tails:
        found = [(each["metadata"]["name"], [line.text for line in lines]) async for each, lines in tails]
    assert [name for name, _ in found] == [f"x-node-0-{number}" for number in range(11, -1, -1)], "the oldest first"
    assert dict(found) == {f"x-node-0-{number}": [] if number == 7 else ["a line"] for number in range(12)}
    logs = [asked.path for asked in kubelet.asked if "/log?" in asked.path]
    assert (len(kubelet.asked), len(logs)) == (13, 12)
    assert all("tailLines=5" in path and "limitBytes=" in path and "follow" not in path for path in logs)


# ---------------------------------------------------------------- logs of crashed pods


LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [{}]:4711"
PODS = 1000
NAME = "x-node-0-0-abcde"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses before retries take a tenth of their time."""
    pause = Backoff.pause
    monkeypatch.setattr(Backoff, "pause", lambda backoff, asked=None: pause(backoff, asked) / 10)


class Runs(ApiClient):
    """A container that has crashed twice. The node has removed the first run; the pod status is not updated yet.

    Args:
        late: Number of requests until the status is updated.
        second: Output of the second run.
        written: Whether the node has written the output, by whether each request so far was one for the previous run.
    """

    def __init__(self, late: int, second: str, written: Callable[[list[bool]], bool] = bool) -> None:
        super().__init__(Credentials())
        self.late = late
        self.second = second
        self.written = written
        self.asked: list[bool] = []

    async def lines(self, request: Request, *, unended: bool = False) -> AsyncGenerator[bytes]:
        previous = request.params.get("previous") == "true"
        self.asked.append(previous)
        if not self.written(self.asked):
            return
        if previous and len(self.asked) <= self.late:
            yield b"unable to retrieve container logs for containerd://0123"
        elif self.second:
            yield f"2026-11-21T10:00:12.5Z {self.second}".encode()


class Logs(ApiClient):
    """Serves only the logs of pods, by rank."""

    def __init__(self, culprit: int, accused: str, refuse: Exception | None = None) -> None:
        super().__init__(Credentials())
        self.culprit = culprit
        self.accused = accused
        self.refuse, self.refusals = refuse, sys.maxsize
        self.read: list[int] = []
        self.after: tuple[str, ...] = ()  # lines of the other ranks after they lost one

    async def lines(self, request: Request, *, unended: bool = False) -> AsyncGenerator[bytes]:
        assert unended
        rank = int(request.path.split("/")[-2].split("-")[3])
        self.read.append(rank)
        if self.refuse is not None and len(self.read) <= self.refusals:
            raise self.refuse
        error = "ValueError: no labels" if rank == self.culprit else LOST.format(self.accused)
        for line in ("Traceback (most recent call last):", "  x", error, *(() if rank == self.culprit else self.after)):
            yield f"2026-11-21T10:00:08.{rank:09}Z {line}".encode()


def crash(rank: int, code: int = 1, second: int = 9) -> Object:
    state = ended(code, finishedAt=f"2026-11-21T10:00:{second:02}Z")
    return pod(rank, state, podIP=f"10.88.{rank // 256}.{rank % 256}")


@pytest.mark.parametrize(
    ("culprit", "code", "second", "accused", "most"),
    [
        (700, 1, 9, "10.88.2.188", 32),  # identified only by the address that the others lost
        (700, 3, 9, "10.88.9.9", 16),  # another exit code than all others
        (700, 1, 8, "10.88.9.9", 16),  # ended first
        (700, 1, 10, "10.88.2.188", 32),  # its clock is ahead
        (40, 1, 9, "10.88.9.9", 64),  # nothing distinguishes it from the others
    ],
)
async def test_the_root_cause_is_among_the_logs_read(
    culprit: int, code: int, second: int, accused: str, most: int
) -> None:
    found = [crash(rank, *((code, second) if rank == culprit else (1, 9))) for rank in range(PODS)]
    client = Logs(culprit, accused)
    evidence = await gather(client, found, None)
    assert culprit in client.read
    assert len(client.read) == len(set(client.read)) <= most
    assert diagnosis_of(evidence, Observation(Phase.FAILED)).rank == f"node-{culprit}"


async def test_a_rank_that_lost_another_and_wrote_more_is_not_the_last_that_is_read() -> None:
    client = Logs(40, "10.88.9.9")
    client.after = ("cleaning up", "ending")
    evidence = await gather(client, [crash(rank) for rank in range(PODS)], None)
    assert diagnosis_of(evidence, Observation(Phase.FAILED)).rank == "node-40"


async def test_number_of_logs_read_is_limited() -> None:
    many = Logs(-1, "10.88.9.9")
    await gather(many, [crash(rank) for rank in range(PODS)], None)
    assert len(many.read) == 64
    few = Logs(-1, "10.88.9.9")
    await gather(few, [crash(rank) for rank in range(3)], None)
    assert sorted(few.read) == [0, 1, 2]


@pytest.mark.parametrize(
    ("refusal", "most"), [(Forbidden(403, "Forbidden", "no pods/log"), 16), (Unreachable(0, "", "no route"), 128)]
)
async def test_unreadable_logs_are_reported_once(
    refusal: Exception, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob._backends.kubernetes.pods._TAIL_SECONDS", 0.5)
    client = Logs(1, "", refusal)
    evidence = await gather(client, [crash(rank) for rank in range(PODS)], None)
    assert len(client.read) <= most
    assert len(evidence.unseen) == len(set(evidence.unseen)) == 1
    assert diagnosis_of(evidence, Observation(Phase.FAILED)).rank == "node-0"


async def test_logs_of_a_busy_node_are_requested_again() -> None:
    """A kubelet under load responds with 500 for a while, and a crash without its log is hard to explain."""
    client = Logs(0, "", ServerError(500, "InternalError", "proxy error"))
    client.refusals = 3
    evidence = await gather(client, [crash(0)], None)
    assert (evidence.unseen, len(client.read)) == ([], 4)
    assert diagnosis_of(evidence, Observation(Phase.FAILED)).log[-1] == "ValueError: no labels"


RESTARTED = pod(0, {"running": {}}, ended(1, finishedAt="2026-11-21T10:00:09Z"))
SECOND_RUN = "ValueError: no labels"


@pytest.mark.parametrize("late", [0, 2, 6])
async def test_log_of_the_second_run_replaces_a_removed_first_run(late: int) -> None:
    """On a busy machine the read is late: the second run has crashed, too, and only its output is left."""
    client = Runs(late, SECOND_RUN)
    evidence = await gather(client, [RESTARTED], None)
    assert (evidence.unseen, evidence.logs) == ([], {NAME: [SECOND_RUN]})
    assert len(client.asked) == late + 2


async def test_a_log_that_the_node_has_removed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob._backends.kubernetes.pods._REMOVED_SECONDS", 0.1)
    evidence = await gather(Runs(sys.maxsize, ""), [RESTARTED], None)
    assert evidence.logs == {}
    assert evidence.unseen == [f"logs: {NAME}: unable to retrieve container logs for containerd://0123"]
    assert diagnosis_of(evidence, Observation(Phase.FAILED)).rank == "node-0"


async def test_an_empty_log_is_requested_twice_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob._backends.kubernetes.pods._EMPTY_SECONDS", 0.01)
    client = Runs(sys.maxsize, "")
    evidence = await gather(client, [pod(0, ended(1), ended(1))], None)
    assert (evidence.unseen, evidence.logs) == ([], {NAME: []})
    assert client.asked == [False, True, False] * 3


@pytest.mark.parametrize(
    ("late", "written"),
    [
        pytest.param(0, lambda asked: len(asked) > 1, id="a busy node writes both logs late"),
        pytest.param(0, lambda asked: len(asked) > 4, id="a busy node writes both logs very late"),
        pytest.param(sys.maxsize, lambda asked: len(asked) > 1, id="the run crashes while the previous log is removed"),
        pytest.param(2, lambda asked: asked[-1], id="two more runs have started, and the latest log is empty"),
    ],
)
async def test_a_log_that_is_empty_at_first_is_read_again(
    monkeypatch: pytest.MonkeyPatch, late: int, written: Callable[[list[bool]], bool]
) -> None:
    monkeypatch.setattr("trainjob._backends.kubernetes.pods._EMPTY_SECONDS", 0.01)
    evidence = await gather(Runs(late, SECOND_RUN, written), [crash(0)], None)
    assert (evidence.unseen, evidence.logs) == ([], {NAME: [SECOND_RUN]})
