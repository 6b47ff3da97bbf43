"""What we write, read by KServe's storage initializer, as it runs in the pods of a server of models."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.stores.conftest import Make
from tests.stores.places import Oci, files, tree

from trainjob.data import copy, export
from trainjob.data.locations import parse_store
from trainjob.data.oci import OciStore

_DOWNLOAD = "import sys; from kserve_storage import Storage; Storage.download(sys.argv[1], sys.argv[2])"


@pytest.fixture
def model(given: dict[str, bytes]) -> dict[str, bytes]:
    """Without empty files, which KServe leaves out."""
    return {path: data for path, data in given.items() if data}


def download(peers: str, uri: str, target: Path, **environment: str) -> None:
    done = subprocess.run(
        [peers, "-c", _DOWNLOAD, uri, str(target)],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["oci", "oci-password"])
def test_an_image(kind: str, make: Make, peers: str, name: str, model: Mapping[str, bytes], tmp_path: Path) -> None:
    """By its tag, and by its digest, which is what is registered."""
    place = make(kind)
    assert isinstance(place, Oci)
    uri = place.uri(name)
    copy(str(tree(tmp_path / "source", model)), uri)
    environment = {"KSERVE_OCI_INSECURE_REGISTRY": "true"}
    if kind == "oci-password":
        environment["KSERVE_OCI_DOCKER_CONFIG"] = f"{os.environ['DOCKER_CONFIG']}/config.json"
    for number, at in enumerate((uri, OciStore(parse_store(uri)).pinned.uri)):
        download(peers, at, tmp_path / str(number), **environment)
        assert files(tmp_path / str(number)) == model


def test_a_prefix_of_s3(make: Make, peers: str, name: str, model: Mapping[str, bytes], tmp_path: Path) -> None:
    uri = make("s3").uri(name)
    copy(str(tree(tmp_path / "source", model)), uri)
    settings = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    download(peers, f"{uri}/", tmp_path / "t", **settings, AWS_DEFAULT_REGION=settings["AWS_REGION"])
    assert files(tmp_path / "t") == model


@pytest.mark.parametrize("kind", ["oci", "s3"])
def test_an_export(kind: str, make: Make, peers: str, name: str, tmp_path: Path) -> None:
    """What a registry says of it is where KServe finds it."""
    made = make(kind)
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
