"""Export to a real MLflow server, as a team has one, with the model on S3."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from moto.server import ThreadedMotoServer
from tests.registry import mlflow_server

from trainjob.data import export, initialize
from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict, RegistryUnavailable
from trainjob.registry import connect

DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server.running(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="models")
    yield "s3://models/exports"
    moto.stop()


def _model(folder: Path, value: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value] * 4))
    return str(folder)


@pytest.mark.timeout(240)
def test_export_and_back(server: str, bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {
        "name": "digits", "registry": f"mlflow+{server}", "alias": "champion", "metric": "acc",
        "provenance": {"run": "r", "datasets": [{"uri": "s3://d"}]},
    }  # fmt: skip
    with pytest.raises(ModelNotFound):
        initialize("models:/digits@champion", str(tmp_path / "in"), registry=server)
    first = export(_model(tmp_path / "out", 1), bucket, export_id="a", metrics={"acc": 0.8}, **options)
    again = export(_model(tmp_path / "out", 1), bucket, export_id="a", metrics={"acc": 0.8}, **options)
    assert (again.version, again.uri, again.digest, again.promoted) == ("1", first.uri, first.digest, True)
    worse = export(_model(tmp_path / "out", 2), bucket, export_id="b", metrics={"acc": 0.7}, **options)
    assert (worse.version, worse.promoted) == ("2", False)
    got = initialize("models:/digits@champion", str(tmp_path / "in"), registry=server)
    assert (got.version, got.digest) == ("1", first.digest)
    registry = connect(server)
    assert [(each.version, each.aliases) for each in registry.list("digits")] == [("1", ("champion",)), ("2", ())]
    assert registry.list("none") == []
    with pytest.raises(RegistryConflict):
        registry.register("digits", first.uri, export_id="a", digest=DIGEST)
    for version in ("9", "challenger"):
        with pytest.raises(ModelNotFound):
            registry.resolve("digits", version)
    assert capfd.readouterr().err == ""


@pytest.mark.timeout(240)
def test_a_server_takes_no_local_files(server: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://.*mlflow\+sqlite"):
        export(_model(tmp_path / "out", 1), str(tmp_path / "models"), name="local", export_id="a", registry=server)
    assert connect(server).list("local") == []


@pytest.mark.timeout(240)
def test_registrations_at_once_give_one_version(server: str) -> None:
    program = (
        "import sys; from trainjob.registry import connect; r = connect(sys.argv[1]); r.list('race'); print('ready');"
        "sys.stdout.flush(); sys.stdin.readline();"
        "[print(r.register('race', 's3://b/1', export_id=f'e{n}', digest='d').version) for n in range(8)]"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, server],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert results[0][0] == results[1][0]
    exports = [version.tags["trainjob.export_id"] for version in connect(server).list("race")]
    assert sorted(exports) == [f"e{number}" for number in range(8)]


@pytest.mark.timeout(240)
def test_a_server_that_stops_answering(server: str) -> None:
    registry = connect(server)
    assert registry.list("none") == []
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        silent = connect(f"http://127.0.0.1:{deaf.getsockname()[1]}")
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "1"
        try:
            began = time.monotonic()
            with pytest.raises(RegistryUnavailable):
                silent.resolve("m", "1")
            assert time.monotonic() - began < 30
        finally:
            del os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
