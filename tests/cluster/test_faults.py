"""One fault at a time between a backend and a real API server: every fault occurs, and none changes the outcome."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from tests.certificates import Authority
from tests.cluster import failing as make
from tests.cluster.backends import opened
from tests.cluster.waits import until, until_phase
from tests.cluster.wires import FAST, LONG, Wires, busiest
from tests.fakes.faults import Fault, FaultProxy, Kind, Plan, Seen
from tests.processes import free_port
from tests.testcluster.access import RULES, Access
from tests.testcluster.api import write_kubeconfig
from tests.testcluster.nodes import run_until_finished, simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobResult, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._support.retrying import REQUEST
from trainjob.errors import BackendUnavailable, Rejected

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(400),
    # httpcore 1.0 leaves the socket of a cancelled TLS handshake to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MOST_A_SECOND = 8

BEFORE = {  # the request does not reach the server
    "cut": Fault(Kind.CUT),
    "stall": Fault(Kind.STALL),
    "429": Fault(Kind.ANSWER, 429, retry_after=1),
    "500": Fault(Kind.ANSWER, 500),
    "503": Fault(Kind.ANSWER, 503),
}
REFUSED = {"401": Fault(Kind.ANSWER, 401)}
AFTER = {  # the request reaches the server, and its reply is lost
    "drop": Fault(Kind.DROP),
    "break": Fault(Kind.BREAK, after=100),
    "shorten": Fault(Kind.SHORTEN, after=100),
    "empty": Fault(Kind.SHORTEN),
    "stall-reply": Fault(Kind.STALL_REPLY),
    "stall-body": Fault(Kind.STALL_BODY, after=100),
    "502-after": Fault(Kind.ANSWER_AFTER, 502),
}
GONE = {"410": Fault(Kind.ANSWER, 410)}
EVENTS = {"410-event": Fault(Kind.EVENT, 410), "500-event": Fault(Kind.EVENT, 500)}
DELAY = {"delay": Fault(Kind.DELAY, seconds=1)}


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, **fields})


SHORT = spec(env=simulate(run="3s"))
UNTIL_FINISHED = spec(runtime_patches=[run_until_finished()])


def first(method: str, *faults: Fault, ending: str = "") -> Plan:
    """Inject the faults into the first requests of a method, one each."""
    left = list(faults)

    def plan(seen: Seen) -> Fault | None:
        return left.pop(0) if left and seen.method == method and seen.path.endswith(ending) else None

    return plan


each_watch = pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])


async def ended(backend: KubernetesBackend, ref: JobRef) -> TrainJobResult:
    with anyio.fail_after(240):
        return await wait(backend, ref)


# ---------------------------------------------------------------------- launch and cancel


async def test_a_launch_with_a_fault_creates_one_job(wires: Wires) -> None:
    async def check(backend: KubernetesBackend, proxy: FaultProxy, name: str, fault: Fault) -> None:
        proxy.plan = first("POST", fault)
        ref = await launch(backend, LONG, name, namespace=wires.namespace)
        assert [job["metadata"]["uid"] for job in wires.jobs(name)] == [ref.uid]
        assert ref.attempt == 1
        posts = proxy.seen("POST")
        created = fault.kind is Kind.DELAY or fault in AFTER.values()  # after a lost reply the job is looked up
        assert [seen.fault for seen in posts] == ([fault] if created else [fault, None])
        if fault.retry_after is not None:
            assert posts[1].at - posts[0].at >= fault.retry_after

    await wires.each({**BEFORE, **REFUSED, **AFTER}, check, replace(FAST, read=10))
    # A busy server adds to the delay, and a request that takes longer than `read` would be retried.
    await wires.each(DELAY, check, replace(FAST, read=30))


@pytest.mark.parametrize(("action", "method", "left"), [("cancel", "DELETE", []), ("suspend", "PATCH", [True])])
async def test_a_cancel_with_a_fault_stops_the_job(
    wires: Wires, action: Literal["cancel", "suspend"], method: str, left: list[bool]
) -> None:
    async def check(backend: KubernetesBackend, proxy: FaultProxy, name: str, fault: Fault) -> None:
        ref = await launch(backend, LONG, name, namespace=wires.namespace)
        proxy.plan = first(method, fault)
        assert await cancel(backend, ref, action)
        assert [job["spec"]["suspend"] for job in wires.jobs(name)] == left
        assert len(proxy.injected) == 1

    await wires.each({**BEFORE, **REFUSED, **AFTER, **DELAY}, check)


async def test_a_403_of_a_restarted_api_server_is_retried(wires: Wires) -> None:
    """An API server answers 403 until it has read the roles."""

    async def check(backend: KubernetesBackend, proxy: FaultProxy, name: str, fault: Fault) -> None:
        proxy.plan = first("POST", fault, Fault(Kind.ANSWER, 403))
        await launch(backend, LONG, name, namespace=wires.namespace)
        assert len(proxy.injected) == 2

    await wires.each({"cut": BEFORE["cut"], "503": BEFORE["503"]}, check)


# ---------------------------------------------------------------------- waiting


async def finish_after_a_fault(wires: Wires, proxy: FaultProxy, ref: JobRef) -> None:
    """Let a job end once a fault was injected, so that it does not end before its waiter gets the fault."""
    await until(lambda: proxy.injected)
    while True:  # its pods may not run yet
        await anyio.to_thread.run_sync(wires.cluster.finish, ref.namespace, ref.name)
        await anyio.sleep(0.5)


@each_watch
@pytest.mark.parametrize(("method", "times", "more"), [("WATCH", 2, EVENTS), ("GET", 1, {})])
async def test_a_wait_survives_a_fault_of_its_watch_or_list(
    wires: Wires, method: str, times: int, more: dict[str, Fault], shared: bool
) -> None:
    async def check(backend: KubernetesBackend, proxy: FaultProxy, name: str, fault: Fault) -> None:
        proxy.plan = first(method, *[fault] * times, ending="/trainjobs")
        ref = await launch(backend, UNTIL_FINISHED, name, namespace=wires.namespace)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish_after_a_fault, wires, proxy, ref)
            assert (await ended(backend, ref)).uid == ref.uid
            tasks.cancel_scope.cancel()
        assert 1 <= len(proxy.injected) <= times

    await wires.each({**BEFORE, **REFUSED, **AFTER, **GONE, **more}, check, shared=shared)


async def test_a_first_request_that_is_not_answered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    unreachable = Credentials(host=f"https://127.0.0.1:{free_port()}", token="x")
    backend = KubernetesBackend(
        unreachable, timings=Timings(connect=1, request_backoff=partial(REQUEST, failures=2, seconds=1))
    )
    with pytest.raises(BackendUnavailable):
        await backend.get("default", "a")
    assert "the API server cannot be reached, retrying" in caplog.text
    await backend.aclose()


async def test_connections_have_tcp_keepalive(wires: Wires) -> None:
    """The connection has a timer of kind 2 (keep-alive, see Linux' proc_net_tcp.rst), which first fires after 4 s."""
    async with wires.open() as (backend, proxy):
        await backend.get(wires.namespace, "a")
        port = f":{int(proxy.url.rpartition(':')[2]):04X}"
        table = await anyio.Path("/proc/net/tcp").read_text()
        # The kernel prints the table in pieces, and a connection twice if others open or close between two pieces.
        rows = {row.split()[1]: row.split() for row in table.splitlines() if row.split()[2].endswith(port)}
        assert [row[5].partition(":")[0] for row in rows.values()] == ["02"], rows


async def test_cut_idle_watches_are_no_outage(wires: Wires) -> None:
    """Load balancers cut connections that are idle for a minute or less; bookmarks arrive once a minute."""
    async with wires.open(Timings(healthy_after=1, watch_backoff=partial(REQUEST, failures=2, seconds=2))) as (
        backend,
        proxy,
    ):
        proxy.plan = lambda seen: Fault(Kind.BREAK, seconds=1.5) if seen.method == "WATCH" else None
        ref = await launch(backend, spec(env=simulate(run="8s")), "a", namespace=wires.namespace)
        assert (await ended(backend, ref)).uid == ref.uid
        assert len(proxy.seen("WATCH", "/trainjobs")) >= 3


async def test_lists_replace_failing_watches_without_a_request_storm(wires: Wires) -> None:
    async def check(backend: KubernetesBackend, proxy: FaultProxy, name: str, fault: Fault) -> None:
        proxy.plan = lambda seen: fault if seen.method == "WATCH" else None
        ref = await launch(backend, SHORT, name, namespace=wires.namespace)
        assert (await ended(backend, ref)).uid == ref.uid
        assert max(busiest(proxy).values()) <= MOST_A_SECOND

    await wires.each({**BEFORE, **GONE, **EVENTS, "end": Fault(Kind.SHORTEN)}, check)


async def test_a_total_outage_exhausts_the_retry_budget_without_a_request_storm(wires: Wires) -> None:
    async def check(backend: KubernetesBackend, proxy: FaultProxy, name: str, fault: Fault) -> None:
        ref = await launch(backend, LONG, name, namespace=wires.namespace)
        await until_phase(backend, ref, Phase.RUNNING)
        proxy.plan = lambda _: fault
        with pytest.raises(BackendUnavailable, match=r"could not be reached \d+ times in a row"):
            await ended(backend, ref)
        assert len(proxy.injected) >= 3, "the budget is three failures and four seconds"
        assert max(busiest(proxy).values()) <= MOST_A_SECOND

    timings = Timings(
        connect=3,
        read=3,
        watch_read=1,
        watch_backoff=partial(REQUEST, failures=3, seconds=4),
        request_backoff=partial(REQUEST, failures=3, seconds=4),
    )
    await wires.each({**BEFORE, **GONE, "drop": AFTER["drop"]}, check, timings)


async def test_the_result_does_not_wait_for_unreadable_logs(wires: Wires) -> None:
    """As when the API server cannot reach the kubelet of a node."""
    with make.own(make.stages("node"))(wires.cluster, wires.namespace):
        async with wires.open(Timings()) as (backend, proxy):
            proxy.plan = lambda seen: Fault(Kind.STALL) if seen.path.endswith("/log") else None
            fields = make.OWN | {"num_nodes": 1, "env": simulate(run="1s", exit_code=3)}
            ref = await launch(backend, TrainJobSpec.parse(fields), "a", namespace=wires.namespace)
            lines: list[str] = []
            with pytest.raises(TrainJobFailed, match="node-0 exited with code 3") as failed:
                await wait(backend, ref, on_log=lambda line: lines.append(line.text))
        assert any("no answer within 5 s" in line for line in failed.value.diagnosis.unseen)
        assert lines == ["the last lines of node-0 could not be read"]


async def test_stored_logs_are_complete_after_failed_requests(wires: Wires, caplog: pytest.LogCaptureFixture) -> None:
    async with wires.open() as (backend, proxy):
        ref = await launch(backend, SHORT, "a", namespace=wires.namespace)
        await ended(backend, ref)

        async def read(*faults: Fault) -> list[str]:
            left = list(faults)
            proxy.plan = lambda seen: left.pop(0) if left and seen.path.endswith("/log") else None
            return [line.text async for line in backend.logs(ref)]

        complete = await read()
        assert complete
        assert await read(Fault(Kind.ANSWER, 500), Fault(Kind.CUT)) == complete
        assert await read(Fault(Kind.BREAK, after=50)) == complete
        assert len(proxy.injected) == 3
        assert "cannot be read" not in caplog.text
        assert await read(*[Fault(Kind.ANSWER, 500)] * 3) == []
        assert "cannot be read completely: 500 InternalError: injected 500" in caplog.text


# ---------------------------------------------------------------- expired tokens


PLUGIN = """printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
printf '"status": {"token": "%s"}}' "$(cat "$0")" """
MESSAGE = "credentials are refused, also after they were reloaded: log in again or renew the token"


@dataclass
class Tokens:
    """Tokens of a service account, each bound to a Secret: its deletion ends the token before its minimum of 10 min."""

    cluster: Access
    namespace: str
    account: str

    def new(self, secret: str) -> str:
        metadata = {"name": secret, "namespace": self.namespace}
        self.cluster.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
        bound = {"kind": "Secret", "apiVersion": "v1", "name": secret}
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {},
            "spec": {"expirationSeconds": 600, "boundObjectRef": bound},
        }
        path = self.cluster.api.path("v1", "ServiceAccount", self.namespace, self.account)
        return str(self.cluster.api.request("POST", f"{path}/token", request)["status"]["token"])

    async def end(self, secret: str, proxy: FaultProxy) -> None:
        """Delete the Secret and wait until the server answers 401; it caches checked tokens for 10 s."""
        self.cluster.api.delete("v1", "Secret", self.namespace, secret)
        before = len(refusals(proxy))
        with anyio.fail_after(240):
            while len(refusals(proxy)) == before:
                await anyio.sleep(0.05)


def refusals(proxy: FaultProxy) -> list[object]:
    return [seen for seen in proxy.requests if b'"code":401' in seen.reply]


@pytest.fixture
async def proxy(cluster: Access, authority: Authority) -> AsyncIterator[FaultProxy]:
    pair = authority.issue("proxy", addresses=["127.0.0.1"])
    async with FaultProxy(cluster.api.server, cluster.api.authority, pair) as opened:
        yield opened


@pytest.fixture
def tokens(cluster: Access, namespace: str) -> Tokens:
    cluster.kubeconfig_for(RULES, namespace)
    accounts = (each["metadata"]["name"] for each in cluster.api.find("v1", "ServiceAccount", namespace))
    return Tokens(cluster, namespace, next(name for name in accounts if name.startswith("limited-")))


@pytest.fixture(params=["file", "plugin"])
def kubeconfig(
    request: pytest.FixtureRequest, proxy: FaultProxy, authority: Authority, tmp_path: Path
) -> Callable[[str], Path]:
    """Writes the token to the place from which the kubeconfig reads it."""
    token = tmp_path / "token"
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", PLUGIN, str(token)],
        "interactiveMode": "Never",
    }
    user: dict[str, Any] = {"tokenFile": str(token)} if request.param == "file" else {"exec": plugin}
    config = write_kubeconfig(tmp_path / "kubeconfig", proxy.url, authority.certificate.read_bytes(), user)

    def renewed(content: str) -> Path:
        token.write_text(content)
        return config

    return renewed


async def failure_of(backend: KubernetesBackend, ref: JobRef, ends: list[BackendUnavailable]) -> None:
    try:
        await wait(backend, ref)
    except BackendUnavailable as error:
        ends.append(error)


async def test_an_expired_token_is_reloaded_and_one_that_stays_expired_fails_soon(
    kubeconfig: Callable[[str], Path], tokens: Tokens, proxy: FaultProxy
) -> None:
    backoff = partial(REQUEST, failures=5, seconds=60)
    timings = Timings(watch_read=2, healthy_after=1, request_backoff=backoff)
    ends: list[BackendUnavailable] = []
    async with opened(kubeconfig(tokens.new("first")), timings=timings) as backend:
        ref = await launch(backend, LONG, "a", namespace=tokens.namespace)
        with anyio.fail_after(240):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(failure_of, backend, ref, ends)
                await tokens.end("first", proxy)
                kubeconfig(tokens.new("second"))
                assert await backend.get(ref.namespace, ref.name)
                watches = len(proxy.seen("WATCH"))
                await until(lambda: len(proxy.seen("WATCH")) >= watches + 2)
                assert ends == []
                await tokens.end("second", proxy)
        assert MESSAGE in str(ends[0])
        assert max(busiest(proxy).values()) <= 8
        before = len(proxy.requests)
        with pytest.raises(Rejected, match=MESSAGE):
            await launch(backend, LONG, "b", namespace=tokens.namespace)
        assert len(proxy.requests) - before == 8, "four requests of a look, with the old and the reloaded token"
