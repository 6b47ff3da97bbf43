"""The client of the Kubeflow Model Registry with faults of server and network, and when it is killed."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.certificates import Authority
from tests.endpoints import proxy
from tests.fakes.model_registry import LOST, FakeRegistry, Fault, Request
from tests.fakes.model_registry_store import Store
from tests.registry.conftest import at_once

from trainjob.errors import ConfigurationError, RegistryUnavailable
from trainjob.registry import ModelVersion, connect
from trainjob.registry.rest import Endpoint, Session

T = TypeVar("T")

DIGEST = "sha256:" + "a" * 64
PAGE = Fault(200, {"Content-Type": "text/html"}, "<html>log in</html>")


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between retries in seconds; none is actually slept."""
    pauses: list[float] = []
    monkeypatch.setattr("trainjob.registry.rest.sleep", pauses.append)
    return pauses


def register(fake: FakeRegistry, **fields: Any) -> ModelVersion:
    given = {"export_id": "a", "digest": DIGEST, "metrics": {"acc": 0.5}, **fields}
    return connect(f"kubeflow+{fake.url}").register("m", "s3://b/1", **given)


def registered(fake: FakeRegistry) -> dict[str, Any]:
    """What the registry holds."""
    found = connect(f"kubeflow+{fake.url}").list("m")
    return {
        "versions": [(each.version, each.uri, each.digest, dict(each.metrics)) for each in found],
        "artifacts": [each["state"] for each in fake.call("GET", "artifacts")["items"]],
        "objects": [len(fake.call("GET", kind)["items"]) for kind in ("registered_models", "model_versions")],
    }


ONCE = {"versions": [("1", "s3://b/1", DIGEST, {"acc": 0.5})], "artifacts": ["LIVE"], "objects": [1, 1]}
"""Exactly one version, which is complete."""


def requests_of_an_export() -> int:
    with FakeRegistry() as fake:
        register(fake)
        return len(fake.requests)


REQUESTS = requests_of_an_export()


@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("number", range(REQUESTS))
def test_killed_at_each_request(number: int, arrived: bool) -> None:
    """All later requests fail, as those of a killed process; the next export completes the registration."""
    with FakeRegistry() as fake:
        dead = Fault(cut=True)
        fake.faults(*[None] * number, Fault(cut=True, done=arrived), *[dead] * 20)
        with pytest.raises(RegistryUnavailable):
            register(fake)
        fake.fault = lambda _: None
        assert [each.version for each in connect(f"kubeflow+{fake.url}").list("m")] in ([], ["1"])
        assert register(fake).version == "1"
        assert registered(fake) == ONCE


@pytest.mark.parametrize("fault", [LOST, Fault(cut=True), Fault(503), Fault(500), Fault(429), Fault(502, done=True)])
@pytest.mark.parametrize("number", range(REQUESTS))
def test_each_request_fails_once(number: int, fault: Fault) -> None:
    with FakeRegistry() as fake:
        fake.faults(*[None] * number, fault)
        assert register(fake).version == "1"
        assert registered(fake) == ONCE


def retrying(call: Callable[[], T]) -> Callable[[], T]:
    """Repeat the call after an outage, as a step's retry does: by chance all tries of one request may fail."""

    def call_with_retries() -> T:
        for _ in range(5):
            with suppress(RegistryUnavailable):
                return call()
        return call()

    return call_with_retries


@pytest.mark.parametrize("seed", [random.randrange(2**32) for _ in range(10)], ids=lambda _: "seed")
def test_promotions_at_once_while_replies_are_late_or_lost(fake: FakeRegistry, seed: int) -> None:
    """The best version holds the alias in the end, and its promotion reports success."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    registry = connect(f"kubeflow+{fake.url}")
    merits = [chance.random() for _ in range(6)]
    for number, merit in enumerate(merits):
        registry.register("m", f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics={"acc": merit})

    def late(_: Request) -> Fault | None:
        time.sleep(chance.uniform(0, 0.02))
        return LOST if chance.random() < 0.1 else None

    fake.fault = late

    def promote(number: int) -> bool:
        return registry.promote("m", str(number), alias="champion", metric="acc").promoted

    promoted = at_once(*[retrying(partial(promote, number)) for number in range(1, 7)])
    fake.fault = lambda _: None
    best = merits.index(max(merits))
    assert registry.resolve("m", "champion").version == str(best + 1)
    assert promoted[best]


# --- retries


def test_retry_after(fake: FakeRegistry, slept: list[float]) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    fake.faults(Fault(429, {"Retry-After": "7"}), Fault(503, {"Retry-After": date}), Fault(503, {"Retry-After": "?"}))
    register(fake)
    assert 7 <= slept[0] <= 8
    assert 18 <= slept[1] <= 22
    assert slept[2] <= 4
    assert len(slept) == 3


def test_a_retry_after_of_an_hour_is_not_waited_for(fake: FakeRegistry, slept: list[float]) -> None:
    fake.faults(Fault(429, {"Retry-After": "3600"}))
    with pytest.raises(RegistryUnavailable, match="a retry after 3600 s"):
        register(fake)
    assert slept == []


def test_an_outage_is_reported_after_the_retries(fake: FakeRegistry, slept: list[float]) -> None:
    fake.fault = lambda _: Fault(503, {"Content-Type": "text/plain"}, "database is not there")
    with pytest.raises(RegistryUnavailable, match="503 database is not there"):
        register(fake)
    assert len(fake.requests) == 7
    assert 0 < sum(slept) <= 1 + 2 + 4 + 8 + 16 + 20


def test_a_refused_connection_is_reported_after_the_retries(slept: list[float]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        registry = connect(f"kubeflow+http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:\d+ is unavailable: ConnectError: .*refused"):
            registry.resolve("m", "champion")
    assert len(slept) == 6


@pytest.mark.timeout(60)
def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.registry.rest._TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RegistryUnavailable, match="ReadTimeout"):
            connect(f"kubeflow+http://127.0.0.1:{silent.getsockname()[1]}").list("m")


# --- errors that are not retried


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(401), r"denied GET .* \(HTTP 401\); set KUBEFLOW_REGISTRY_TOKEN"),
        (Fault(403, {}, "RBAC: access denied"), r"denied GET .* \(HTTP 403\)"),
        (
            Fault(302, {"Location": "https://dex.example/auth?state=hunter2"}),
            "redirects to dex.example, which may be a login page",
        ),
        (Fault(400, {}, '{"code": "Bad Request", "message": "no"}'), "rejected GET .*: 400 no"),
        (Fault(422, {"Content-Type": "text/html"}, "<html>"), "422 Unprocessable"),
    ],
)
def test_refusals(fake: FakeRegistry, fault: Fault, words: str, slept: list[float]) -> None:
    fake.fault = lambda _: fault
    with pytest.raises(ConfigurationError, match=words) as caught:
        register(fake)
    assert "hunter2" not in str(caught.value)
    assert slept == []


def test_an_html_page_is_not_a_registry(fake: FakeRegistry) -> None:
    fake.fault = lambda _: PAGE
    with pytest.raises(ConfigurationError, match="is not a Kubeflow Model Registry"):
        register(fake)
    fake.faults(None, PAGE)
    with pytest.raises(ConfigurationError, match="is not a model registry"):
        register(fake)


def test_a_permanent_conflict_is_reported(fake: FakeRegistry) -> None:
    """Retries of HTTP 409 end with an error."""
    fake.fault = lambda request: Fault(409, {}, '{"message": "exists"}') if request.method == "PATCH" else None
    with pytest.raises(Exception, match="rejected the artifact"):
        register(fake)


# --- credentials


@pytest.fixture
def guarded() -> Any:
    with FakeRegistry(token="hunter2") as fake:
        yield fake


def test_token(guarded: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="KUBEFLOW_REGISTRY_TOKEN"):
        register(guarded)
    monkeypatch.setenv("KUBEFLOW_REGISTRY_TOKEN", "wrong-secret")
    with pytest.raises(ConfigurationError) as caught:
        register(guarded)
    assert "wrong-secret" not in str(caught.value)
    monkeypatch.setenv("KUBEFLOW_REGISTRY_TOKEN", " hunter2\n")
    register(guarded)
    monkeypatch.delenv("KUBEFLOW_REGISTRY_TOKEN")
    for name in ("KUBEFLOW_REGISTRY_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "token"))
        (tmp_path / "token").unlink(missing_ok=True)
        with pytest.raises(ConfigurationError, match=f"of {name} cannot be read"):
            register(guarded)
        (tmp_path / "token").write_text("hunter2\n")
        register(guarded)
        monkeypatch.delenv(name)


def test_a_replaced_token_is_read_again(guarded: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kubernetes replaces the token in the file; the server refuses the one that was read before."""
    monkeypatch.setenv("KUBEFLOW_REGISTRY_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text("hunter2")

    def rotate(request: Request) -> None:
        if request.method == "POST":
            guarded.token = "fresh"
            (tmp_path / "token").write_text("fresh")
            guarded.fault = lambda _: None

    guarded.fault = rotate
    assert register(guarded).version == "1"


def test_no_error_contains_the_token(fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_REGISTRY_TOKEN", "hunter2")
    for fault in (Fault(400, {}, "Bearer hunter2 is bad"), Fault(503, {}, '{"message": "Bearer hunter2"}')):
        fake.fault = lambda _, fault=fault: fault  # type: ignore[misc]
        with pytest.raises(Exception, match=r"Bearer \*\*\*") as caught:
            register(fake)
        assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("KUBEFLOW_REGISTRY_TOKEN", "hunter2\nX-Other: 1")
    with pytest.raises(ConfigurationError, match="not allowed in a bearer token") as caught:
        register(fake)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["socks4://h:1", "http://u:hunter2#x@h:1", " http://h:1"])
def test_a_proxy_that_httpx_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ConfigurationError, match=r"HTTP_PROXY\) is not a URL with scheme http") as caught:
        Session(Endpoint("https://registry.test")).__enter__()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:hunter2@host", "credentials"),
        ("https://host?token=hunter2", "credentials"),
        ("https://host#hunter2", "credentials"),
        ("https://", "no host"),
        ("https://host:99999", "an invalid port"),
        ("https://a..b", "is not a URL with scheme"),
        ("https://a b", "is not a URL with scheme"),
    ],
)
def test_addresses(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        connect(f"kubeflow+{url}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://host", "http://host:8080"),
        ("https://host/", "https://host:443"),
        ("http://[::1]:80/prefix/", "http://[::1]:80/prefix"),
    ],
)
def test_ports_are_those_of_the_official_client(given: str, used: str) -> None:
    assert Endpoint(given).url == used


def test_tls_and_the_token_of_the_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("registry", addresses=["127.0.0.1"])
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "token").write_text("hunter2")
    with FakeRegistry(token="hunter2", pair=pair) as fake:
        with pytest.raises(ConfigurationError, match="not trusted; set KUBEFLOW_REGISTRY_CA_FILE"):
            register(fake)
        (pod / "ca.crt").write_bytes(authority.certificate.read_bytes())
        assert register(fake).version == "1"
        (pod / "ca.crt").unlink()
        monkeypatch.setenv("KUBEFLOW_REGISTRY_CA_FILE", str(authority.certificate))
        assert register(fake).version == "1"
        monkeypatch.setenv("KUBEFLOW_REGISTRY_CA_FILE", str(pair.key))
        with pytest.raises(ConfigurationError, match="contains no valid certificates"):
            register(fake)
    with FakeRegistry(store=Store()) as clear:
        register(clear)
        assert {request.authorization for request in clear.requests} == {""}, "the pod's token is sent over TLS only"


def test_a_registry_that_no_proxy_excepts_is_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry() as fake, proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
        monkeypatch.setenv("no_proxy", "")
        assert register(fake).version == "1"
    assert asked == []
