"""Export to a real MLflow server, as a team runs one, with the model on S3."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.seaweedfs import SeaweedFS

from trainjob.data import export, initialize
from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict, RegistryUnavailable
from trainjob.registry import connect

DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def server(mlflow_url: str) -> str:
    return mlflow_url


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with SeaweedFS() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        yield s3.uri("exports")


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
def test_a_server_refuses_local_files(server: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://.*mlflow\+sqlite"):
        export(_model(tmp_path / "out", 1), str(tmp_path / "models"), name="local", export_id="a", registry=server)
    assert connect(server).list("local") == []


@pytest.mark.timeout(240)
def test_registrations_at_once_give_one_version(server: str, tmp_path: Path, python: str) -> None:
    (tmp_path / "script").write_text(
        "import sys; from trainjob.registry import connect; r = connect(sys.argv[1]); r.list('race'); print('ready');"
        "sys.stdout.flush(); sys.stdin.readline();"
        "[print(r.register('race', 's3://b/1', export_id=f'e{n}', digest='d').version) for n in range(8)]"
    )
    running = [
        subprocess.Popen(
            [python, f"{tmp_path}/script", server],
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


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_server_that_stops_answering(server: str) -> None:
    registry = connect(server)
    assert registry.list("none") == []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent = connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "1"
        try:
            began = time.monotonic()
            with pytest.raises(RegistryUnavailable):
                silent.resolve("m", "1")
            assert time.monotonic() - began < 30
        finally:
            del os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
