"""The unchanged examples of dags_examples/airflow that need a cluster, on real controllers with simulated nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.launchers import airflow_environment, launcher_environment
from tests.cluster.pods import JOBSET, REPLICATED_JOB
from tests.processes import Component, wait_until
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access, condition, trainjob
from tests.testcluster.nodes import GPU, simulate

from trainjob._install import objects

_TIMEOUT = 200  # seconds for each step; the whole test took 310 at a load of 25
pytestmark = pytest.mark.timeout(5 * _TIMEOUT)

EXAMPLES = Path(__file__).parents[2] / "dags_examples" / "airflow"
Object = dict[str, Any]

PROGRAM = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

dags = DagBag(sys.argv[1]).dags
for dag_id, conf in json.loads(sys.argv[2]).items():
    run = dags[dag_id].test(run_conf=conf)
    states = {task.task_id: str(task.state) for task in run.get_task_instances()}
    print(dag_id, "is", run.state, json.dumps(states, sort_keys=True), flush=True)
"""


def test_gang_fine_tuning_and_adoption(
    cluster: Access, namespace: str, small_queue: str, airflow_home: Path, tmp_path: Path
) -> None:
    """Run the examples one after the other in one Airflow with the permissions of `trainjob install`.

    The gang waits in its queue, where six of eight GPUs are free. The adopted job was created suspended by another
    user, and is resumed when the sensor has reported it.
    """
    taken = trainjob(
        "taken",
        namespace,
        trainer={"numNodes": 1, "resourcesPerNode": {"limits": {GPU: "2"}}, "env": simulate(run="never")},
    )
    taken["metadata"]["labels"] = {kueue.QUEUE_LABEL: small_queue}
    cluster.api.create(taken)
    running = lambda: admitted(cluster, namespace, "taken")  # noqa: E731
    wait_until("two GPUs are taken", running)
    report = {"trainjob": 1, "metrics": [{"name": "accuracy", "value": "0.5"}], "outputs": {"model": "s3://models/x"}}
    theirs = {"suspend": True, "trainer": {"env": simulate(run="300ms", message=json.dumps(report))}}
    cluster.api.create(trainjob("theirs", namespace, runtime="jax-distributed", **theirs))

    asked = {"train_gang": {"queue": small_queue}, "finetune_llm": {}, "adopt_training": {"job": "theirs"}}
    (role, *_) = (each for each in objects("rbac") if each["kind"] == "Role")
    environment = {
        **launcher_environment(),
        "KUBECONFIG": str(cluster.kubeconfig_for(role["rules"], namespace)),
        "TRAINJOB_BACKEND": "kubernetes",
        "TRAINJOB_NAMESPACE": namespace,
        **airflow_environment(airflow_home, EXAMPLES),
    }
    airflow = Component(
        "airflow", [sys.executable, "-c", PROGRAM, str(EXAMPLES), json.dumps(asked)], tmp_path, environment
    )

    def wait_for_log(text: str) -> None:
        def logged() -> bool:
            alive = airflow.alive  # checked before the log is read: it can write its last lines in between
            found = text in airflow.log.read_text()
            assert found or alive, airflow.tail()
            return found

        wait_until(f"{text!r} is in its log", logged, _TIMEOUT)

    airflow.start()
    try:
        wait_for_log(f"waiting for admission in queue {small_queue}")
        wait_for_log("insufficient unused quota for nvidia.com/gpu in flavor default, 2 more needed")
        (gang,) = {job["metadata"]["name"] for job in jobs(cluster, namespace)} - {"taken", "theirs"}
        assert not pods(cluster, namespace, gang), "none of the four has started"
        cluster.api.delete(TRAINER, "TrainJob", namespace, "taken")
        wait_for_log('train_gang is success {"train": "success"}')
        wait_for_log('finetune_llm is success {"finetune": "success"}')
        wait_for_log("TrainJob theirs is Suspended")
        cluster.api.patch(TRAINER, "TrainJob", namespace, "theirs", {"spec": {"suspend": False}})
        states = {"export_model": "skipped", "good_enough": "success", "result": "success", "wait": "success"}
        wait_for_log(f"adopt_training is success {json.dumps(states)}")
    finally:
        airflow.kill()

    ended = {job["spec"]["runtimeRef"]["name"]: job for job in jobs(cluster, namespace)}
    assert all(condition(job, "Complete") for job in ended.values())
    ranks = [pod["spec"]["containers"] for pod in pods(cluster, namespace, gang)["node"]]
    assert [container["resources"]["limits"][GPU] for (container,) in ranks] == ["2"] * 4
    tuned = pods(cluster, namespace, ended["torchtune-llama3.2-1b"]["metadata"]["name"])
    assert {name: len(each) for name, each in tuned.items()} == {
        "dataset-initializer": 1, "model-initializer": 1, "node": 1,
    }  # fmt: skip
    (container,) = tuned["node"][0]["spec"]["containers"]
    assert {"model.lora_rank=8", "epochs=1", "dataset.split=train[:95%]"} <= {*container["command"], *container["args"]}


def jobs(cluster: Access, namespace: str) -> list[Object]:
    return cluster.api.find(TRAINER, "TrainJob", namespace)


def pods(cluster: Access, namespace: str, job: str) -> dict[str, list[Object]]:
    """The pods of a job, by replicated job."""
    found: dict[str, list[Object]] = {}
    for pod in cluster.api.find("v1", "Pod", namespace, labels=f"{JOBSET}={job}"):
        found.setdefault(pod["metadata"]["labels"][REPLICATED_JOB], []).append(pod)
    return found


def admitted(cluster: Access, namespace: str, name: str) -> bool:
    job = cluster.api.get(TRAINER, "TrainJob", namespace, name) or {}
    return bool((job.get("spec") or {}).get("suspend") is False and cluster.api.find("v1", "Pod", namespace))
