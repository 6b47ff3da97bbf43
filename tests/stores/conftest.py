from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import random
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import debian
from tests.azurite import Azurite
from tests.certificates import Authority
from tests.fakes import clouds as fake_clouds, hub as fake_hub
from tests.fakes.faults import Proxy
from tests.oci import registry as registries
from tests.oci.registry import Server
from tests.seaweedfs import SeaweedFS
from tests.serving import serving
from tests.stores import kinds
from tests.stores.kinds import Store
from tests.trees import tree

from trainjob._support import retrying
from trainjob.data.stores.base import CHUNK

USER = "somebody:the-password-of-this-registry"
SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "HF_", "DOCKER_", "REGISTRY_AUTH_FILE", "SSL_CERT_")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove settings and credentials of this machine; shorten the pauses between retries."""
    for name in list(os.environ):
        if name.startswith(SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture(scope="module")
def own_bucket(seaweedfs: SeaweedFS, request: pytest.FixtureRequest) -> Any:
    """A bucket of this module: SeaweedFS has not enough volumes for one of each test."""
    made = seaweedfs.resource.Bucket(Path(request.node.name).stem.removeprefix("test_") + "-bucket")
    made.create()
    return made


@pytest.fixture
def bucket(own_bucket: Any, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3's object of a bucket that is empty at first; the environment has its server and keys."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    yield own_bucket
    own_bucket.objects.all().delete()


@pytest.fixture(scope="session")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    debian.program("skopeo")
    with registries.registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def closed_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A registry in which only `USER` can authenticate."""
    debian.program("skopeo")
    with registries.registry_with_password(tmp_path_factory.mktemp("registry"), *USER.split(":")) as running:
        yield running


@pytest.fixture(scope="session")
def peers() -> str:
    """Python with kserve-storage."""
    python = Path(__file__).parents[2] / ".venv-peers/bin/python"
    assert python.exists(), "the environment of the peers is missing: make .venv-peers/stamp"
    return str(python)


@pytest.fixture(scope="session")
def clouds() -> Iterator[fake_clouds.Clouds]:
    with serving(fake_clouds.Clouds()) as running:
        yield running


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with Azurite(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    with fake_hub.served(monkeypatch) as running:
        yield running


@pytest.fixture(scope="session")
def web(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kinds.Web]:
    """Python's HTTP server with TLS."""
    folder = tmp_path_factory.mktemp("web")
    pair = authority.issue("web", addresses=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, *_: object) -> None:
            """Ignore clients that disconnect."""

    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        yield kinds.Web(folder, f"https://127.0.0.1:{server.server_port}")


@pytest.fixture
def start_proxy() -> Iterator[Callable[[str], Proxy]]:
    """Start a counting proxy in front of a server, given as ``host:port`` or URL."""
    with ExitStack() as running:

        def start(server: str) -> Proxy:
            proxy = Proxy(server.rpartition("/")[2])
            running.enter_context(proxy.running())
            return proxy

        yield start


MakeStore = Callable[[str], Store]


@pytest.fixture
def make_store(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    start_proxy: Callable[[str], Proxy],
    tmp_path: Path,
) -> MakeStore:
    """Prepare a store, given by the name of its kind."""

    def settings(**given: str) -> None:
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    def s3(kind: str) -> Store:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        proxy = start_proxy(server.endpoint)
        settings(**{**server.environment(), "AWS_ENDPOINT_URL": f"http://{proxy.host}"})
        return kinds.S3(proxy, server.client, server.bucket)

    def filer(kind: str) -> Store:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        return kinds.Filer(start_proxy(server.filer), server.client, server.bucket)

    def oci(kind: str) -> Store:
        closed = kind == "oci-password"
        server: Server = request.getfixturevalue("closed_registry" if closed else "open_registry")
        proxy = start_proxy(server.host)
        if closed:
            auth = {"auths": {proxy.host: {"auth": base64.b64encode(USER.encode()).decode()}}}
            tree(tmp_path / "docker", {"config.json": json.dumps(auth).encode()})
            settings(DOCKER_CONFIG=str(tmp_path / "docker"))
        return kinds.Oci(proxy, USER if closed else "")

    def cloud(kind: str) -> Store:
        server: fake_clouds.Clouds = request.getfixturevalue("clouds")
        proxy = start_proxy(server.url)
        if kind == "gs":
            settings(GOOGLE_BASE_URL=f"http://{proxy.host}", GOOGLE_ALLOW_HTTP="true", GOOGLE_BEARER_TOKEN="t")
        else:
            settings(AZURE_STORAGE_ENDPOINT=f"http://{proxy.host}", AZURE_ALLOW_HTTP="true")
            settings(AZURE_STORAGE_ACCOUNT_NAME="acc", AZURE_STORAGE_ACCOUNT_KEY="c2VjcmV0")
        return kinds.Cloud(proxy, server, kind)

    def azure(kind: str) -> Store:
        server: Azurite = request.getfixturevalue("azurite")
        proxy = start_proxy(server.host)
        settings(**server.environment(proxy.host))
        return kinds.Azure(proxy, server)

    def hub(kind: str) -> Store:
        server: fake_hub.Hub = request.getfixturevalue("hub")
        proxy = start_proxy(server.url)
        settings(HF_ENDPOINT=f"http://{proxy.host}")
        return kinds.FakeHub(proxy, server)

    def https(kind: str) -> Store:
        settings(SSL_CERT_FILE=str(request.getfixturevalue("authority").certificate))
        found: kinds.Web = request.getfixturevalue("web")
        return found

    made: dict[str, Callable[[str], Store]] = {
        "file": lambda _: kinds.Files(tmp_path / "store"),
        "s3": s3, "http": filer, "https": https, "oci": oci, "oci-password": oci, "gs": cloud, "az": cloud,
        "azurite": azure, "hf": hub,
    }  # fmt: skip
    return lambda kind: made[kind](kind)


@pytest.fixture
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> Store:
    """The store that the parameter of the test names."""
    return make_store(request.param)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses in any store; also valid as a repository."""
    letters = (char if char.isalnum() else "-" for char in request.node.name.lower().replace("test_", ""))
    return "t-" + "-".join(part for part in "".join(letters).split("-") if part)


@pytest.fixture(scope="session")
def given() -> dict[str, bytes]:
    """Files of many kinds and sizes, with names as people give them."""
    chance = random.Random(7)
    return {
        "model-00001-of-00002.safetensors": chance.randbytes(6 * CHUNK + 17),  # more than a part of an upload
        "sub/dir/model-00002-of-00002.bin": chance.randbytes(2 * CHUNK),
        "config.json": b"{}",
        "tokenizer.model": chance.randbytes(70_000),
        "empty": b"",
        "sub/empty, too": b"",
        ".hidden/.file": b"hidden",
        "-option --like": b"o",
        "n" * 120 + ".json": b"[]",
        "ünï cödé/模型 🚀.txt": b"u",
        "e\u0301 is not \u00e9": b"decomposed",
        "sp ace/%20?#é+&=;,@~!$'()[]{}^`|*.txt": b"signs",
        'a < b > c " d : e': b"more of them",
        "dots/.../..x": b"...",
    }
