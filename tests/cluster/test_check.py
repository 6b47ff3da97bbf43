"""`trainjob check --cluster` on a real API server, Trainer and Kueue."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.launchers import airflow_environment, launcher_environment
from tests.cluster.waits import wait_for_queue
from tests.testcluster.access import TRAINER, Access

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._doctor import Level
from trainjob._doctor.cluster import examine_jobs
from trainjob._install import objects

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

(ROLE,) = [each for each in objects("rbac") if each["kind"] == "Role"]
SECRETS = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
QUEUES = {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get", "list"]}
CONTENT = "c0ntent-of-the-secret"

DAGS = """
from airflow.sdk import DAG, task
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

def env(secret, **more):
    return {"KEY": {"valueFrom": {"secretKeyRef": {"name": secret, "key": "k", **more}}}}

def train(task_id, runtime="torch-distributed", queue=None, **arguments):
    labels = {"labels": {"kueue.x-k8s.io/queue-name": queue}} if queue else {}
    return TrainJobOperator(task_id=task_id, runtime=runtime, **labels, **arguments)

with DAG("d"):
    train("right", queue="gpus", env=env("there"), pod={"volumes": [{"name": "v", "secret": {"secretName": "there"}}]})
    train("open", runtime="{{ var.value.runtime }}", env=env("{{ var.value.secret }}"), num_nodes="{{ var.value.n }}")
    train("optional", env=env("gone", optional=True))
    train("runtime", runtime="no-such-runtime")
    train("queue", queue="no-such-queue")
    train("secret", env=env("gone"), queue="gpus")
    train("volume", pod={"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "gone"}}]}}]})
    train("storage", initializer={"dataset": {"storage_uri": "s3://b/d", "secret_ref": {"name": "gone"}}})
    train("pull", pod={"imagePullSecrets": [{"name": "gone"}]})
    train("elsewhere", namespace="{{ var.value.namespace }}")
    train("unknown", trainjob_conn_id="not_here")
    train("local", trainjob_conn_id="laptop")
    TrainJobOperator.partial(task_id="many").expand(runtime=["torch-distributed", "no-such-runtime"])
    TrainJobSensor(task_id="sensor", job="x")

    @task.trainjob(runtime="torch-distributed", env=env("gone"))
    def function():
        pass

    function()
"""
WRONG = {
    "runtime": "ClusterTrainingRuntime no-such-runtime does not exist",
    "many[1]": "ClusterTrainingRuntime no-such-runtime does not exist",
    "queue": "LocalQueue no-such-queue does not exist in {namespace}: its jobs would never start",
    **dict.fromkeys(("secret", "volume", "storage", "function"), "Secret gone does not exist in {namespace}: pods"),
}
NOTED = {
    "elsewhere": "the namespace or connection is known only at run time",
    "unknown": "connection 'not_here' does not exist",
    "local": "the job runs on the local backend",
}


@pytest.fixture
def dags(cluster: Access, namespace: str, tmp_path: Path) -> Path:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "there", "namespace": namespace}}
    cluster.api.create({**secret, "stringData": {"k": CONTENT}})
    wait_for_queue(cluster, namespace)
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "d.py").write_text(DAGS)
    return folder


def checked(dags: Path, airflow_home: Path, kubeconfig: Path, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, each result by its task, and the complete output."""
    env = {
        **launcher_environment(),
        "PATH": os.environ["PATH"],
        "KUBECONFIG": str(kubeconfig),
        **airflow_environment(airflow_home, dags, laptop={"backend": "local"}),
        **environment,
    }
    command = [str(Path(sys.executable).parent / "trainjob"), "check", "--cluster", "--json", str(dags)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return done.returncode, {each["where"].removeprefix("d."): each for each in lines}, done.stdout + done.stderr


async def test_missing_objects_of_tasks_are_reported(
    cluster: Access, namespace: str, dags: Path, airflow_home: Path
) -> None:
    kubeconfig = cluster.kubeconfig_for([*ROLE["rules"], SECRETS, QUEUES], namespace)
    code, found, text = checked(dags, airflow_home, kubeconfig, TRAINJOB_NAMESPACE=namespace)
    assert code == 2
    problems = {where: each["problem"] for where, each in found.items() if each["problem"]}
    assert problems.keys() == WRONG.keys(), problems
    for where, part in WRONG.items():
        assert part.format(namespace=namespace) in problems[where]
    for where, part in NOTED.items():
        assert part in "".join(found[where]["notes"])
    (note,) = found["pull"]["notes"]
    assert "images of private registries cannot be pulled" in note
    assert {"right", "open", "optional", "many[0]", "sensor", f"namespace {namespace}"} <= found.keys()
    assert found[f"namespace {namespace}"]["notes"] == [], "no permission is missing"
    token = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"]
    for secret in (CONTENT, base64.b64encode(CONTENT.encode()).decode(), token):
        assert secret not in text
    assert cluster.api.find(TRAINER, "TrainJob", namespace) == [], "nothing was created"


async def test_unreadable_objects_are_no_failure(
    cluster: Access, namespace: str, dags: Path, airflow_home: Path
) -> None:
    """Uses the task's connection and the permissions of `trainjob install`, which do not include Secrets and queues."""
    kubeconfig = cluster.kubeconfig_for(ROLE["rules"], namespace)
    extra = {"namespace": namespace, "kube_config_path": str(kubeconfig)}
    connection = json.dumps({"conn_type": "trainjob", "extra": extra})
    code, found, _ = checked(dags, airflow_home, Path("/dev/null"), AIRFLOW_CONN_TRAINJOB_DEFAULT=connection)
    assert code == 2
    assert {where for where, each in found.items() if each["problem"]} == {"runtime", "many[1]"}
    for where in ("secret", "volume", "storage", "function", "pull"):
        note = found[where]["notes"][-1]
        assert note.startswith("Secret gone in "), found[where]
        assert "cannot be checked" in note
    assert "localqueues" in "".join(found["queue"]["notes"])


@pytest.mark.parametrize(
    ("server", "code", "problem"),
    [("", 2, "may not create trainjobs in {0}"), ("https://127.0.0.1:1", 3, "")],
    ids=["without permissions", "unreachable"],
)
async def test_a_namespace_that_cannot_be_used_is_the_only_problem(
    cluster: Access, namespace: str, dags: Path, airflow_home: Path, server: str, code: int, problem: str
) -> None:
    kubeconfig = cluster.kubeconfig_for([], namespace)
    config = yaml.safe_load(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = server or cluster.api.server
    kubeconfig.write_text(yaml.safe_dump(config))
    exit_code, found, _ = checked(dags, airflow_home, kubeconfig, TRAINJOB_NAMESPACE=namespace)
    assert exit_code == code
    assert problem.format(namespace) in found[f"namespace {namespace}"]["problem"]
    assert {where for where, each in found.items() if each["problem"]} == {f"namespace {namespace}"}


async def test_the_content_of_a_secret_is_not_even_requested(
    cluster: Access, namespace: str, dags: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del dags
    replies: list[tuple[str, Any]] = []
    send = ApiClient.send

    async def recorded(self: ApiClient, request: Request) -> Any:
        reply = await send(self, request)
        replies.append((request.path, reply))
        return reply

    monkeypatch.setattr(ApiClient, "send", recorded)
    source = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "there", "key": "k"}}}
    job = {"spec": {"trainer": {"env": [source]}}}
    async with aclosing(examine_jobs(Credentials(kubeconfig=str(cluster.kubeconfig)), namespace, {"job": job})) as all_:
        found = [finding async for name, finding in all_ if name == "job"]
    assert [(each.check, each.level) for each in found] == [("secret", Level.OK)]
    (reply,) = [reply for path, reply in replies if "/secrets/" in path]
    assert reply["kind"] == "PartialObjectMetadata"
    assert not {"data", "stringData"} & reply.keys()
