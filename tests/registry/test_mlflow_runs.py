"""One MLflow run for each TrainJob whose model is registered."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.registry.conftest import on

from trainjob.registry import ModelVersion, connect
from trainjob.registry.mlflow import MlflowRegistry
from trainjob.registry.runs import run_of

DIGEST = "sha256:" + "a" * 64
HISTORY = {
    "loss": [(10, 1769860800.0, 0.9), (20, 1769860801.5, 0.5), (30, 1769860803.0, 0.25)],
    "val@acc": [(30, 1769860803.0, 0.7)],
}


@pytest.fixture
def file(database: Path) -> str:
    return f"sqlite:///{database}"


@pytest.fixture
def uid() -> str:
    return f"uid-{random.getrandbits(60):x}"


def register(uri: str, uid: str, model: str = "", registry: MlflowRegistry | None = None, **job: Any) -> ModelVersion:
    given = {
        "trainjob": {"namespace": "ml", "name": "digits-1", "uid": uid, "attempt": 1, "runtime": "torch", **job},
        "parameters": {"lr": 0.1, "layers": [64, 10], "optimizer": "sgd"},
        "code": {"uri": "git+https://example.com/digits", "revision": "c" * 40},
        "run": {"kfp": "run-7"},
    }
    tags = {f"trainjob.provenance.{name}": json.dumps(value) for name, value in given.items()}
    return (registry or MlflowRegistry(uri)).register(
        model or f"m {uid}",
        "s3://b/1",
        export_id="a",
        digest=DIGEST,
        metrics={"loss": 0.25, "accuracy": 0.93},
        tags=tags,
        history=HISTORY,
    )


def runs(uri: str, uid: str) -> list[Any]:
    """All runs of the job that are not deleted."""
    client = MlflowRegistry(uri)._client
    experiment = client.get_experiment_by_name("trainjob")
    found = client.search_runs([experiment.experiment_id], f"tags.`trainjob.dev/uid` = '{uid}'") if experiment else []
    return list(found)


def recorded(uri: str, uid: str) -> dict[str, Any]:
    """What the one run of the job records."""
    (run,) = runs(uri, uid)
    curve = MlflowRegistry(uri)._client.get_metric_history(run.info.run_id, "loss")
    return {
        "id": run.info.run_id,
        "name": run.info.run_name,
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time),
        "params": run.data.params,
        "metrics": run.data.metrics,
        "tags": {tag: text for tag, text in run.data.tags.items() if tag.startswith(("trainjob.", "mlflow.source"))},
        "loss": [(point.step, point.timestamp, point.value) for point in curve],
    }


def complete(uid: str, version: ModelVersion) -> dict[str, Any]:
    """What the run of a version records that `register` registered."""
    return {
        "id": version.run_id,
        "name": "digits-1",
        "status": "FINISHED",
        "times": (1769860800000, 1769860803000),
        "params": {"lr": "0.1", "layers": "[64, 10]", "optimizer": "sgd"},
        "metrics": {"loss": 0.25, "val_acc": 0.7, "accuracy": 0.93},
        "tags": {
            "trainjob.dev/uid": uid,
            "trainjob.dev/namespace": "ml",
            "trainjob.dev/name": "digits-1",
            "trainjob.dev/attempt": "1",
            "trainjob.dev/runtime": "torch",
            "trainjob.dev/run": '{"kfp": "run-7"}',
            "mlflow.source.git.commit": "c" * 40,
            "mlflow.source.name": "git+https://example.com/digits",
        },
        "loss": [(10, 1769860800000, 0.9), (20, 1769860801500, 0.5), (30, 1769860803000, 0.25)],
    }


@on("mlflow-file", "mlflow-server")
def test_one_run_for_a_job(registry_uri: str, uid: str) -> None:
    uri = registry_uri.removeprefix("mlflow+")
    version = register(uri, uid)
    assert recorded(uri, uid) == complete(uid, version)
    assert register(uri, uid) == version
    # Another model of the same job.
    assert register(uri, uid, model=f"n {uid}").run_id == version.run_id
    assert recorded(uri, uid) == complete(uid, version)
    assert connect(uri).resolve(f"m {uid}", "latest").run_id == version.run_id


class Killed(BaseException):
    """An exception that no code handles, like SIGKILL."""


class Interrupted:
    """A client that calls `event` between the reply of call number `number` and the next call."""

    def __init__(self, client: Any, number: int, event: Callable[[str], Any]) -> None:
        self._client, self._left, self._event = client, number, event

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = getattr(self._client, name)(*arguments, **options)
            self._left -= 1
            if self._left == 0:
                self._event(name)
            return result

        return call


def at_each_call(uri: str, uid: str, event: Callable[[str, str], Any]) -> Iterator[tuple[str, str]]:
    """Register a model of a new job for each call, with an event after the call; yield the job's UID and the call."""
    names: list[str] = []
    while True:
        job = f"{uid}-{len(names)}"
        registry = MlflowRegistry(uri)

        def happen(name: str, job: str = job) -> None:
            names.append(name)
            event(name, job)

        registry._client = Interrupted(registry._client, count := len(names) + 1, happen)
        with suppress(Killed):
            register(uri, job, registry=registry)
        if len(names) < count:
            return
        yield job, names[-1]


def test_a_kill_at_any_call_and_a_retry_give_one_complete_run(file: str, uid: str) -> None:
    def kill(name: str, job: str) -> None:
        raise Killed(name, job)

    killed_at = set()
    for job, name in at_each_call(file, uid, kill):
        version = register(file, job)
        assert recorded(file, job) == complete(job, version)
        assert [version.version for version in connect(file).list(f"m {job}")] == ["1"]
        killed_at.add(name)
    assert {"create_run", "log_batch", "set_terminated", "create_model_version"} <= killed_at


def test_the_same_export_between_any_two_calls_gives_one_run(file: str, uid: str) -> None:
    """As on a server that several processes use at once: the lock of a file does not exclude its own process."""

    def again(name: str, job: str) -> None:
        register(file, job)

    calls = set()
    for job, name in at_each_call(file, uid, again):
        (version,) = connect(file).list(f"m {job}")
        assert recorded(file, job) == complete(job, version)
        calls.add(name)
    assert {"get_experiment_by_name", "search_runs", "create_run", "create_model_version"} <= calls


def test_an_experiment_that_another_export_creates_at_the_same_moment(
    file: str, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"digits {uid}")
    registry = MlflowRegistry(file)
    find = registry._client.get_experiment_by_name

    def just_before(name: str) -> Any:
        found = find(name)
        if found is None:
            MlflowRegistry(file)._client.create_experiment(name)
        return found

    registry._client.get_experiment_by_name = just_before
    assert register(file, uid, registry=registry).run_id


@on("mlflow-file", "mlflow-server")
def test_a_duplicate_run_is_deleted_unless_a_version_names_it(registry_uri: str, uid: str) -> None:
    uri = registry_uri.removeprefix("mlflow+")
    version = register(uri, uid)
    (run,) = runs(uri, uid)
    client = MlflowRegistry(uri)._client
    for _ in range(2):
        duplicate = client.create_run(run.info.experiment_id, 1, {"trainjob.dev/uid": uid}).info.run_id
    client.create_registered_model(f"other {uid}")
    client.create_model_version(f"other {uid}", "s3://b/2", run_id=duplicate)
    register(uri, uid)
    assert {run.info.run_id for run in runs(uri, uid)} == {version.run_id, duplicate}


def test_without_permission_to_create_runs_the_model_is_registered(
    file: str, uid: str, caplog: pytest.LogCaptureFixture
) -> None:
    register(file, f"{uid}-before")
    client = MlflowRegistry(file)._client
    experiment = client.create_experiment(f"closed {uid}")
    client.delete_experiment(experiment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_EXPERIMENT_NAME", f"closed {uid}")
        version = register(file, uid)
    assert (version.version, version.run_id) == ("1", "")
    assert "registered without an MLflow run" in caplog.text


def test_without_a_job_no_run_is_created(file: str, uid: str) -> None:
    version = MlflowRegistry(file).register(f"m {uid}", "s3://b/1", export_id="a", digest=DIGEST, metrics={"a": 1})
    assert version.run_id == ""


@pytest.mark.parametrize("job", ["x", '["x"]', "{}", '{"uid": ""}', "{\"uid\": \"a' OR '1'='1\"}", '{"uid": null}'])
def test_an_invalid_job_record_creates_no_run(job: str) -> None:
    assert run_of({"trainjob.provenance.trainjob": job}, {}, {}) is None


def test_names_that_mlflow_refuses_are_replaced(file: str, uid: str) -> None:
    names = ["a@b", "/a", "a/../b", "..", "a//b", "a/", "é", "x" * 300]
    tags = {"trainjob.provenance.trainjob": json.dumps({"uid": uid, "what?": 1})}
    history = {name: [(1, 1769860800.0, 0.5)] for name in names}
    tags["trainjob.provenance.parameters"] = json.dumps(
        dict.fromkeys(names, "x" * 7000) | {f"p{i}": i for i in range(250)}
    )
    MlflowRegistry(file).register(f"m {uid}", "s3://b/1", export_id="a", digest=DIGEST, tags=tags, history=history)
    (run,) = runs(file, uid)
    assert len(run.data.metrics) == len(names)
    assert len(run.data.params) == len(names) + 250
    assert run.info.status == "FINISHED"
