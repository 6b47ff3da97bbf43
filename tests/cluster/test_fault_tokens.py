"""Real tokens that expire while a job is waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.certificates import Authority
from tests.cluster.backends import opened
from tests.cluster.wires import LONG, busiest
from tests.fakes.faults import FaultProxy
from tests.testcluster.access import RULES, Access
from tests.testcluster.api import write_kubeconfig

from trainjob import JobRef, TrainJobFailed
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._support.retrying import REQUEST
from trainjob.errors import BackendUnavailable, Rejected

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

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


def connected(kubeconfig: Path, failures: int, seconds: float) -> AbstractAsyncContextManager[KubernetesBackend]:
    backoff = partial(REQUEST, failures=failures, seconds=seconds)
    return opened(kubeconfig, timings=Timings(watch_read=2, healthy_after=1, request_backoff=backoff))


async def failure_of(backend: KubernetesBackend, ref: JobRef, ends: list[Exception]) -> None:
    try:
        await wait(backend, ref)
    except (TrainJobFailed, BackendUnavailable) as error:
        ends.append(error)


async def test_an_expired_token_is_reloaded(
    kubeconfig: Callable[[str], Path], tokens: Tokens, proxy: FaultProxy
) -> None:
    ends: list[Exception] = []
    async with connected(kubeconfig(tokens.new("first")), 5, 60) as backend:
        ref = await launch(backend, LONG, "a", namespace=tokens.namespace)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(failure_of, backend, ref, ends)
            await tokens.end("first", proxy)
            kubeconfig(tokens.new("second"))
            with anyio.fail_after(240):
                await backend.delete(ref)
    assert "the TrainJob was deleted before it finished" in str(ends[0])
    assert max(busiest(proxy).values()) <= 8


async def test_a_token_that_stays_expired_fails_soon(
    kubeconfig: Callable[[str], Path], tokens: Tokens, proxy: FaultProxy
) -> None:
    ends: list[Exception] = []
    async with connected(kubeconfig(tokens.new("first")), 3, 3) as backend:
        ref = await launch(backend, LONG, "a", namespace=tokens.namespace)
        with anyio.fail_after(240):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(failure_of, backend, ref, ends)
                await tokens.end("first", proxy)
        assert isinstance(ends[0], BackendUnavailable)
        assert MESSAGE in str(ends[0])
        assert max(busiest(proxy).values()) <= 8
        before = len(proxy.requests)
        with pytest.raises(Rejected, match=MESSAGE):
            await launch(backend, LONG, "b", namespace=tokens.namespace)
        assert len(proxy.requests) - before == 8, "four requests of a look, with the old and the reloaded token"
