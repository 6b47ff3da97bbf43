"""Uploads of trainjob, read by KServe's storage initializer as it runs in the pods of a model server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.oci.registry import TokenServer, registry
from tests.stores.conftest import MakeStore
from tests.trees import files, tree

from trainjob.data import copy, export
from trainjob.data.locations import parse_store
from trainjob.data.stores.oci import OciStore

_DOWNLOAD = "import sys; from kserve_storage import Storage; Storage.download(sys.argv[1], sys.argv[2])"


@pytest.fixture
def model(given: dict[str, bytes]) -> dict[str, bytes]:
    """The files except empty ones, which KServe skips."""
    return {path: data for path, data in given.items() if data}


def download(peers: str, uri: str, target: Path, **environment: str) -> None:
    done = subprocess.run(
        [peers, "-c", _DOWNLOAD, uri, str(target)],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_image(make_store: MakeStore, peers: str, name: str, model: Mapping[str, bytes], tmp_path: Path) -> None:
    """By its tag, and by its digest, which a registry records."""
    uri = make_store("oci").uri(name)
    copy(str(tree(tmp_path / "source", model)), uri)
    for number, at in enumerate((uri, OciStore(parse_store(uri)).resolved().uri)):
        download(peers, at, tmp_path / str(number), KSERVE_OCI_INSECURE_REGISTRY="true")
        assert files(tmp_path / str(number)) == model


def test_an_image_in_a_registry_with_authentication(
    peers: str,
    authority: Authority,
    name: str,
    model: Mapping[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With token authentication, as in companies; KServe supports no other."""
    tokens = TokenServer(authority.issue("tokens"), {"somebody": "hunter2"})
    with tokens.running():
        auth = {"realm": tokens.url, "service": "registry", "issuer": "tests"}
        auth["rootcertbundle"] = str(authority.certificate)
        with registry(tmp_path / "registry", token=auth) as server:
            credentials = {"auths": {server.host: {"auth": base64.b64encode(b"somebody:hunter2").decode()}}}
            tree(tmp_path / "docker", {"config.json": json.dumps(credentials).encode()})
            monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
            copy(str(tree(tmp_path / "source", model)), server.uri(f"{name}:1"))
            config = {"KSERVE_OCI_DOCKER_CONFIG": str(tmp_path / "docker/config.json")}
            download(peers, server.uri(f"{name}:1"), tmp_path / "t", KSERVE_OCI_INSECURE_REGISTRY="true", **config)
    assert files(tmp_path / "t") == model


def test_a_prefix_of_s3(
    make_store: MakeStore, peers: str, name: str, model: Mapping[str, bytes], tmp_path: Path
) -> None:
    uri = make_store("s3").uri(name)
    copy(str(tree(tmp_path / "source", model)), uri)
    settings = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    download(peers, f"{uri}/", tmp_path / "t", **settings, AWS_DEFAULT_REGION=settings["AWS_REGION"])
    assert files(tmp_path / "t") == model


@pytest.mark.parametrize("kind", ["oci", "s3"])
def test_an_export(kind: str, make_store: MakeStore, peers: str, name: str, tmp_path: Path) -> None:
    """KServe finds the model at its registered location."""
    made = make_store(kind)
    source = tree(tmp_path / "source", {"model.txt": b"weights"})
    target = made.uri(name).removesuffix(":1")
    registry = f"mlflow+sqlite:///{tmp_path}/registry.db"
    done = export(str(source), target, name="digits", export_id="run-1", registry=registry)
    settings = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    settings |= {"AWS_DEFAULT_REGION": "us-east-1", "KSERVE_OCI_INSECURE_REGISTRY": "true"}
    download(peers, done.uri, tmp_path / "t", **settings)
    found = files(tmp_path / "t")
    assert found["model.txt"] == b"weights"
    assert kind == "s3" or found.keys() == {"model.txt"}
