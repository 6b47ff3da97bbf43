"""`trainjob.progress` and Trainer's status server: reports of running pods, and their effects."""

from __future__ import annotations

import re
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from tests.cluster.backends import backend_of
from tests.cluster.launchers import launcher_environment, run
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access, trainjob
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate
from tests.testcluster.real_node import why_unsupported

from trainjob import JobRef, Observation, Phase, TrainJobClient
from trainjob._jobs.waiting import wait
from trainjob.progress import trainer_api

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def reporting(own_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with Trainer's feature gate on."""
    if why := why_unsupported():
        pytest.skip(f"NO STATUS SERVER OF TRAINER: {why}")
    with own_cluster.status_api():
        yield own_cluster


def status(cluster: Access, namespace: str, name: str) -> dict[str, Any]:
    found = cluster.api.get(TRAINER, "TrainJob", namespace, name) or {}
    return dict(found.get("status", {}).get("trainerStatus") or {})


def metrics(reported: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in reported.get("metrics") or []}


# ---------------------------------------------------------------- reports from this machine, as from a pod


def address(cluster: Cluster, namespace: str, job: str) -> tuple[str, str]:
    """URL of the status of a job, and a token like that of the API server for one of its pods."""
    audience = f"trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs/{job}/status"
    now = int(time.time())
    claims = {
        "iss": cluster.layout.server,
        "aud": [audience],
        "iat": now,
        "nbf": now,
        "exp": now + 3600,
        "sub": f"system:serviceaccount:{namespace}:default",
        "kubernetes.io": {"namespace": namespace},
    }
    token = jwt.encode(claims, cluster.layout.service_accounts.key.read_text(), algorithm="ES256")
    return f"https://127.0.0.1:{cluster.layout.ports['trainer-status']}/apis/{audience}", token


def test_trainer_accepts_reports(reporting: Cluster, namespace: str, tmp_path: Path) -> None:
    reporting.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": simulate(run="never")}))
    url, token = address(reporting, namespace, "job")
    (tmp_path / "token").write_text(token)
    server = {
        "KUBEFLOW_TRAINER_SERVER_URL": url,
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(reporting.layout.authority.certificate),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    script = """
from trainjob import progress
progress.report(progress=12.9, metrics={"loss": float("nan"), "step": 3}, remaining_seconds=60)
progress.report(metrics={f"m{i}": i for i in range(200)})
"""
    run({**launcher_environment(), **server}, tmp_path, sys.executable, "-c", script)
    reported = status(reporting, namespace, "job")
    assert (reported["progressPercentage"], reported["estimatedRemainingSeconds"]) == (12, 60)
    assert metrics(reported) == {"loss": "nan", "step": "3"} | {f"m{i}": str(i) for i in range(200)}


# The reports of Hugging Face's KubeflowCallback (transformers 5, integrations/integration_utils.py): the names, the
# format of the time, and complete states, each of which replaces the previous one.
HUGGING_FACE: list[tuple[int, dict[str, str]]] = [
    (0, {"total_steps": "10"}),
    (50, {"loss": "0.5", "learning_rate": "5e-05", "current_step": "5", "total_steps": "10"}),
    (100, {"loss": "0.25", "learning_rate": "0.0", "train_runtime": "14.2"}),
]


def test_reports_of_hugging_face_are_read(reporting: Cluster, namespace: str) -> None:
    backend = backend_of(reporting.kubeconfig)
    with TrainJobClient(backend, namespace) as client:
        spec = {"runtime": "torch-distributed", "env": simulate(run="10s")}
        ref = client.launch(spec, "hugging-face")
        url, token = address(reporting, namespace, ref.name)
        seen: list[Observation] = []
        waiting = client.start(lambda: wait(backend, ref, on_change=lambda latest, _: seen.append(latest)))
        wait_until("the job runs", lambda: any(each.phase is Phase.RUNNING for each in seen), 60)
        tls = ssl.create_default_context(cafile=reporting.layout.authority.certificate)
        with httpx.Client(verify=tls, headers={"Authorization": f"Bearer {token}"}) as http:
            for percent, named in HUGGING_FACE:
                state: dict[str, Any] = {"estimatedRemainingSeconds": (100 - percent) // 7}
                state |= {"progressPercentage": percent, "lastUpdatedTime": "2026-11-21T10:00:00.123456+00:00"}
                state["metrics"] = [{"name": name, "value": value} for name, value in named.items()]
                assert http.post(url, json={"trainerStatus": state}).status_code == 200
                wait_until(f"the waiter sees {percent} %", lambda: percent in [each.progress for each in seen], 30)  # noqa: B023
        result = waiting.result(60)
    half = next(each for each in seen if each.progress == 50)
    assert (half.phase, half.remaining_seconds, half.metrics["current_step"]) == (Phase.RUNNING, 7, 5)
    assert result.metrics == {"loss": 0.25, "learning_rate": 0.0, "train_runtime": 14.2}


# ---------------------------------------------------------------- reports from real pods

# Prints the duration of the longest update. The last ten updates are sent in a burst, then the program ends.
REPORTS = """
import time
from trainjob import progress
costs = []
for step in range(1, 81):
    began = time.perf_counter()
    progress.report(progress=90 * step / 81, metrics={"loss": 1 / step, "step": step})
    costs.append(time.perf_counter() - began)
    time.sleep(0.1)
for number in range(10):
    progress.report(progress=100, metrics={"loss": 0.001, "last_report": number}, outputs={"model": "s3://m"})
print(f"the longest update took {1000 * max(costs):.1f} ms")
"""
REPORTED = {"loss": 0.001, "last_report": 9.0, "step": 80.0}


def test_progress_is_shown_while_a_job_runs_and_the_last_report_is_kept(
    reporting: Cluster, real_namespace: str, step_image: str, tmp_path: Path
) -> None:
    settings = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": real_namespace}
    environment = {**launcher_environment(), **settings, "KUBECONFIG": str(reporting.kubeconfig)}
    spec = ["--runtime", "torch-distributed", "--image", step_image, "--key", "cli"]
    output = run(environment, tmp_path, "trainjob", "run", *spec, "--", "python", "-c", REPORTS)
    shown = [float(percent) for percent in re.findall(r" progress ([0-9]+)%", output)]
    assert [percent for percent in shown if 0 < percent < 90], output
    assert shown == sorted(shown)
    (longest,) = re.findall(r"the longest update took ([0-9.]+) ms", output)
    assert float(longest) < 1000 * trainer_api._POST_TIMEOUT, "an update waited for a request"
    (job,) = reporting.api.find(TRAINER, "TrainJob", real_namespace)
    with TrainJobClient(backend_of(reporting.kubeconfig), real_namespace) as client:
        assert client.wait(JobRef.of(job)).metrics == REPORTED
    if "status API failed" not in output:  # a server that is busy for the last 5 s has only earlier reports
        last = status(reporting, real_namespace, job["metadata"]["name"])
        assert last["progressPercentage"] == 100
        named = metrics(last)
        assert named.pop("trainjob.estimate") == "speed"
        assert {name: float(value) for name, value in named.items()} == REPORTED
