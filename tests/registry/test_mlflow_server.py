"""A real MLflow server, which moves an alias to the version requested last, and serves several processes at once."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.registry.conftest import on
from tests.trees import model

from trainjob.data import export
from trainjob.errors import ConfigurationError, RegistryUnavailable
from trainjob.registry import connect
from trainjob.registry.alias_claims import Claim

DIGEST = "sha256:" + "a" * 64


def test_a_promotion_leaves_a_claim(mlflow_url: str) -> None:
    """Concurrent promotions detect each other by it."""
    registry, name = connect(mlflow_url), f"claims {random.getrandbits(40):x}"
    registry.register(name, "s3://b/1", export_id="a", digest=DIGEST, metrics={"acc": 0.5})
    assert registry.promote(name, "1", alias="champion", metric="acc").promoted
    claim = Claim.parse(registry.resolve(name, "champion").tags["trainjob.claim.champion"])
    assert (claim.metric, claim.mode) == ("acc", "max")
    assert abs(claim.order - time.time()) < 60
    assert registry.promote(name, "1", alias="champion", metric="acc").promoted, "a retry"


def test_a_server_refuses_local_files(mlflow_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://.*mlflow\+sqlite"):
        export(model(tmp_path / "out"), str(tmp_path / "models"), name="local", export_id="a", registry=mlflow_url)
    assert connect(mlflow_url).list("local") == []


@pytest.mark.full
@on("mlflow-file", "mlflow-server")
def test_two_processes_that_register_the_same_exports_at_once(registry_uri: str, tmp_path: Path, python: str) -> None:
    """Each export becomes one version. In a file both processes create the database, too."""
    if "sqlite" in registry_uri:
        registry_uri = f"mlflow+sqlite:///{tmp_path}/new/registry.db"
    (tmp_path / "script").write_text(
        "import sys; from trainjob.registry import connect\nprint('ready', flush=True); sys.stdin.readline()\n"
        "r = connect(sys.argv[1])\n"
        "for n in range(8): print(r.register('race', 's3://b/1', export_id=f'e{n}', digest='d').version)"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([python, f"{tmp_path}/script", registry_uri], **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in running if process.stdout] == ["ready\n"] * 2
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=100) for process in running]
    assert [(process.returncode, error) for process, (_, error) in zip(running, results, strict=True)] == [(0, "")] * 2
    assert results[0] == results[1]
    exports = [version.tags["trainjob.export_id"] for version in connect(registry_uri).list("race")]
    assert sorted(exports) == [f"e{number}" for number in range(8)]
    assert {path.name for path in tmp_path.glob("new/*")} <= {"registry.db", "registry.db.lock"}


@pytest.mark.full
@pytest.mark.timeout(60)
def test_a_server_that_stops_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent = connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(RegistryUnavailable):
            silent.resolve("m", "1")
