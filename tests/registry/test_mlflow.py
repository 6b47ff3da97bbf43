"""MLflow on a SQLite file and on a server: locks, settings, content of other programs, the translation of errors."""

from __future__ import annotations

import logging
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes
from mlflow.store.entities.paged_list import PagedList
from mlflow.tracking import MlflowClient
from tests.fakes.mlflow import MemoryMlflow
from tests.registry.conftest import on

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryUnavailable
from trainjob.registry import Registry, connect
from trainjob.registry.alias_claims import Claim
from trainjob.registry.base import ModelVersion, Promotion
from trainjob.registry.mlflow import _METRIC, MlflowRegistry, _Locked, _version
from trainjob.registry.mlflow_environment import without_warnings
from trainjob.registry.moves import MOVED

DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def registry(database: Path) -> Registry:
    return connect(f"sqlite:///{database}")


def register(registry: Registry) -> ModelVersion:
    return registry.register("m", "s3://b/1", export_id="a", digest=DIGEST, metrics={"acc": 0.5})


def test_a_promotion_on_sqlite_needs_no_claim(registry: Registry) -> None:
    """A lock serializes the writers of a file, so no conflict has to be resolved afterwards."""
    before = register(registry).tags
    assert registry.promote("m", "1", alias="champion", metric="acc").promoted
    moved = {"trainjob.moving.champion": "from nothing", "trainjob.moved.champion": "settled"}
    assert registry.resolve("m", "champion").tags == {**before, **moved}


def test_duplicate_versions_are_removed(registry: Registry, database: Path) -> None:
    first = register(registry)
    client = MlflowClient(f"sqlite:///{database}", f"sqlite:///{database}")
    # The duplicate that a lost reply and MLflow's retry leave behind.
    client.create_model_version("m", "s3://b/1", tags=dict(first.tags), await_creation_for=0)
    assert len(registry.list("m")) == 2
    assert register(registry) == first
    assert registry.list("m") == [first]


def test_an_invalid_metric_does_not_hide_the_others() -> None:
    tags = {f"{_METRIC}a": "edited", f"{_METRIC}b": "0.5", "stage": "trial"}
    rest = {"run_id": None, "source": "s3://x", "aliases": ["b", "a"], "creation_timestamp": 1000}
    version = _version(SimpleNamespace(name="m", version=1, tags=tags, **rest))
    assert (version.metrics, version.tags, version.aliases) == ({"b": 0.5}, {"stage": "trial"}, ("a", "b"))


# ---------------------------------------------------------------- locks and files


@pytest.fixture
def lock(database: Path) -> Iterator[sqlite3.Connection]:
    """A lock on the database, which closing the connection releases."""
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    yield connection
    connection.close()


@pytest.mark.timeout(30)
def test_registering_in_a_locked_database_fails_after_the_timeout(
    database: Path, request: pytest.FixtureRequest
) -> None:
    registry = MlflowRegistry(f"sqlite:///{database}", lock_timeout=1)
    request.getfixturevalue("lock")
    with pytest.raises(RegistryUnavailable, match="locked"):
        register(registry)


def test_registering_waits_for_a_lock_that_is_released(database: Path, request: pytest.FixtureRequest) -> None:
    registry = MlflowRegistry(f"sqlite:///{database}", lock_timeout=20)
    timer = threading.Timer(1.0, request.getfixturevalue("lock").close)
    timer.start()
    assert register(registry).version == "1"
    timer.join()


# ---------------------------------------------------------------- MLflow's settings and errors


def test_the_settings_of_mlflow_are_restored(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    level = logging.getLogger("mlflow").level
    registry.list("m")
    assert logging.getLogger("mlflow").level == level
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_mlflow_logs_nothing_and_retries_twice_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    with without_warnings():
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            assert not logging.getLogger(name).isEnabledFor(logging.CRITICAL)
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7", "the user's own limit wins"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"


def test_without_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigurationError, match=r"trainjob\[mlflow\]"):
        connect(f"sqlite:///{tmp_path}/x.db")


@pytest.mark.timeout(60)
def test_an_unreachable_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        registry = connect(f"mlflow+http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1"):
            registry.resolve("m", "champion")


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        ("no such model", codes.RESOURCE_DOES_NOT_EXIST, ModelNotFound),
        ("Registered model alias champion not found.", codes.INVALID_PARAMETER_VALUE, ModelNotFound),
        ("who are you", codes.UNAUTHENTICATED, ConfigurationError),
        ("no", codes.PERMISSION_DENIED, ConfigurationError),
        ("API request failed with error code 401", codes.INTERNAL_ERROR, ConfigurationError),
        ("API request failed with error code 403", codes.INTERNAL_ERROR, ConfigurationError),
        ("a name with %", codes.INVALID_PARAMETER_VALUE, ConfigurationError),
        ("Detected out-of-date database schema", codes.INTERNAL_ERROR, ConfigurationError),
        ("API request failed with error code 503", codes.INTERNAL_ERROR, RegistryUnavailable),
        ("(sqlite3.OperationalError) database is locked", codes.TEMPORARILY_UNAVAILABLE, _Locked),
        ("(sqlite3.OperationalError) database table is locked", codes.INTERNAL_ERROR, _Locked),
    ],
)
def test_errors_are_translated_by_code_and_message(
    message: str, code: int, kind: type[Exception], tmp_path: Path
) -> None:
    error = MlflowException(message, error_code=code)
    assert type(MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db")._translated(error, "read")) is kind
    of_server = MlflowRegistry("http://mlflow.example")._translated(error, "read")
    assert type(of_server) is (RegistryUnavailable if kind is _Locked else kind)
    assert "http://mlflow.example" in str(of_server)


LOCAL = "Invalid model version source: 'file:///m'"


@pytest.mark.parametrize(
    ("code", "message", "kind", "words"),
    [
        (codes.INVALID_PARAMETER_VALUE, LOCAL, ConfigurationError, "such as s3://"),
        (codes.INVALID_PARAMETER_VALUE, "a tag is too long", MlflowException, "a tag is too long"),
        (codes.INTERNAL_ERROR, LOCAL, MlflowException, "Invalid model version"),
    ],
)
def test_a_server_that_refuses_local_files(code: int, message: str, kind: type[Exception], words: str) -> None:
    registry = MlflowRegistry("http://mlflow.example")

    def refuse(*_: object, **__: object) -> None:
        raise MlflowException(message, error_code=code)

    registry._client = SimpleNamespace(
        create_registered_model=lambda _: None,
        search_model_versions=lambda *_, **__: PagedList([], None),
        create_model_version=refuse,
    )
    with pytest.raises(kind, match=words):
        registry._create("m", "file:///m", "key", {}, None)


# ---------------------------------------------------------------- concurrent promotions


@pytest.fixture
def race(memory_mlflow: MemoryMlflow) -> MlflowRegistry:
    """A model with versions of accuracy 0.5, which is champion, 0.7 and 0.9; a server cannot compare and set."""
    registry = MlflowRegistry("http://memory")
    for number, accuracy in enumerate((0.5, 0.7, 0.9), 1):
        metrics = {"acc": accuracy, "f1": accuracy}
        registry.register("m", f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics=metrics)
    promote(registry, 1)
    return registry


def promote(registry: MlflowRegistry, version: int, metric: str | None = "acc") -> Promotion:
    return registry.promote("m", str(version), alias="champion", metric=metric)


def interrupted(method: str, action: Callable[[], object]) -> MlflowRegistry:
    """A registry that runs ``action`` before the first call of one of its methods."""
    registry = MlflowRegistry("http://memory")
    original, left = getattr(registry, method), [action]

    def call(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return original(*arguments, **options)

    setattr(registry, method, call)
    return registry


def die() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("moment", "slow", "quick", "metrics", "holds"),
    [
        ("_set_alias", 2, 3, ("acc", "acc"), "3"),
        ("_set_alias", 3, 2, ("acc", "acc"), "3"),
        ("_settled", 2, 3, ("acc", "acc"), "3"),
        ("_settled", 3, 2, ("acc", "acc"), "3"),
        ("_set_alias", 2, 3, ("acc", "f1"), "2"),  # another metric is not compared
        ("_settled", 3, 2, (None, None), "2"),  # without one, the last promotion holds the alias
    ],
)
def test_the_best_of_two_promotions_holds_the_alias_in_any_order(
    race: MlflowRegistry, moment: str, slow: int, quick: int, metrics: tuple[str | None, str | None], holds: str
) -> None:
    others: list[Promotion] = []
    registry = interrupted(moment, lambda: others.append(promote(race, quick, metrics[1])))
    verdict = promote(registry, slow, metrics[0])
    assert race.resolve("m", "champion").version == holds
    assert (verdict.promoted, verdict.previous) == (holds == str(slow), "1")
    assert ("moved to version 3 at the same time" in verdict.reason) is (holds == "3" != str(slow))
    assert others[0].promoted or holds == str(slow)


def test_a_better_promotion_that_was_killed_before_its_move_gets_the_alias(race: MlflowRegistry) -> None:
    with pytest.raises(KeyboardInterrupt):
        promote(interrupted("_set_alias", die), 3)
    verdict = promote(race, 2)
    assert (verdict.promoted, race.resolve("m", "champion").version) == (False, "3")
    assert f"{MOVED}champion" in race.resolve("m", "3").tags, "a retry of its export finds it"


def test_the_retry_of_a_promotion_killed_before_its_check_moves_the_alias_back(race: MlflowRegistry) -> None:
    other = interrupted("_set_alias", lambda: promote(race, 3))
    other._settled = lambda *_, **__: die()  # type: ignore[assignment,method-assign]  # the process ends here
    with pytest.raises(KeyboardInterrupt):
        promote(other, 2)
    assert race.resolve("m", "champion").version == "2", "the worse one came last"
    assert not promote(race, 2).promoted
    assert race.resolve("m", "champion").version == "3"


def test_an_alias_moved_by_a_person_at_the_same_moment_stays(race: MlflowRegistry) -> None:
    verdict = promote(interrupted("_settled", lambda: race._set_alias(race.resolve("m", "2"), "champion")), 3)
    assert (verdict.promoted, "moved to version 2" in verdict.reason) == (False, True)
    assert race.resolve("m", "champion").version == "2"


# ---------------------------------------------------------------- a real server


def test_a_promotion_leaves_a_claim(mlflow_url: str) -> None:
    """Concurrent promotions detect each other by it."""
    registry, name = connect(mlflow_url), f"claims {random.getrandbits(40):x}"
    registry.register(name, "s3://b/1", export_id="a", digest=DIGEST, metrics={"acc": 0.5})
    assert registry.promote(name, "1", alias="champion", metric="acc").promoted
    claim = Claim.parse(registry.resolve(name, "champion").tags["trainjob.claim.champion"])
    assert (claim.metric, claim.mode) == ("acc", "max")
    assert abs(claim.order - time.time()) < 60
    assert registry.promote(name, "1", alias="champion", metric="acc").promoted, "a retry"


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
