"""KFP components in pods of the real node, with the rights that `trainjob install` gives: killed, retried, terminated.

How often what Terminate leaves them is enough: test_kfp_terminate.py; how soon a step has created its job:
tests/bench/kfp_step.py.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from tests.certificates import Authority
from tests.cluster.kfp_steps import ACCOUNT, ASKED, DELETED, KEPT, Execution, Steps, admit, kill_python, suspended
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access, condition
from tests.testcluster.control_plane import Cluster
from tests.testcluster.slow_webhook import slow_changes

from trainjob.install import objects
from trainjob.status import CANCELLED

pytestmark = pytest.mark.timeout(400)

# The first process of a container has to ask for SIGTERM; otherwise it lives on for 30 s.
TRAINING = """
import os, signal, sys, time
from trainjob import progress
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("training on rank", os.environ["JOB_COMPLETION_INDEX"], flush=True)
progress.report(progress=50, metrics={"loss": 0.5})
time.sleep(float(sys.argv[1]))
"""
FAILING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if os.environ["JOB_COMPLETION_INDEX"] == "1":
    raise ValueError("the data is wrong")
time.sleep(600)
"""


def training(seconds: float) -> Execution:
    """A real job that takes so long."""
    command = ["python", "-c", TRAINING, str(seconds)]
    return Execution("train", {"runtime": "trainjob-step", "command": command})


def pods(cluster: Access, namespace: str, job: str) -> list[str]:
    """Phases of a job's pods."""
    found = cluster.api.find("v1", "Pod", namespace, labels=f"jobset.sigs.k8s.io/jobset-name={job}")
    return [pod["status"]["phase"] for pod in found]


def until_training(kfp_steps: Steps, execution: Execution) -> dict[str, Any]:
    running = lambda: "Running" in pods(kfp_steps.cluster, kfp_steps.namespace, execution.job)  # noqa: E731
    wait_until("the training runs", running, 90, poll=0.2)
    job = kfp_steps.job(execution)
    assert job is not None
    return job


def only_job(kfp_steps: Steps, execution: Execution) -> dict[str, Any]:
    """The one job that all tries of an execution have made together."""
    found = kfp_steps.cluster.api.find(TRAINER, "TrainJob", kfp_steps.namespace)
    (job,) = [each for each in found if execution.run in each["metadata"]["annotations"]["trainjob.dev/key"]]
    return job


def test_a_step_is_killed_and_retried_and_returns_the_result_of_one_job(kfp_steps: Steps) -> None:
    execution = training(20)
    first = kfp_steps.start(execution)
    wait_until("its job is there", lambda: kfp_steps.job(execution), 60, poll=0.2)
    kfp_steps.vanish(first)  # its process lives on for a while; KFP runs the step again, without a word of a retry

    second = kfp_steps.start(execution)
    known = f"TrainJob {kfp_steps.namespace}/{execution.job} (attempt 1"
    wait_until("the second try has found it", lambda: known in kfp_steps.log(second), 60, poll=0.2)
    kill_python(second)
    killed = kfp_steps.end(second)
    assert (killed.code, killed.output) == (137, {}), killed.log

    third = kfp_steps.run(execution, retry=1)
    assert third.code == 0, third.log
    assert known in third.log
    assert "[node-0] training on rank 0" in third.log
    job = only_job(kfp_steps, execution)
    assert condition(job, "Complete")
    result = third.output["parameterValues"]["result"]
    assert (result["name"], result["uid"]) == (execution.job, job["metadata"]["uid"])
    assert result["metrics"] == {"loss": 0.5}
    assert third.output["parameterValues"]["model_uri"] == f"s3://{execution.place}/model"
    (model,) = third.output["artifacts"]["model"]["artifacts"]
    assert model["uri"] == f"minio://{execution.place}/model"
    assert model["metadata"]["trainjob_uid"] == job["metadata"]["uid"]
    assert "httpx" not in third.log, "a line for each request"
    assert "HTTP Request" not in third.log

    again = kfp_steps.run(execution)  # "Retry run", of a run in which another step has failed
    assert again.code == 0, again.log
    assert again.output["parameterValues"] == third.output["parameterValues"]
    assert again.output["artifacts"]["model"] == third.output["artifacts"]["model"]
    only_job(kfp_steps, execution)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_terminated_step_stops_its_job_and_retry_run_continues(
    own_cluster: Cluster, step_image: str, authority: Authority, delay: int
) -> None:
    """Where the control plane is busy or its webhooks are slow, the job is deleted; see test_kfp_terminate.py."""
    with own_cluster.namespace("pipeline", real=True) as namespace:
        admit(own_cluster, namespace)
        kfp_steps = Steps(own_cluster, namespace, step_image)
        execution = training(8)
        with slow_changes(own_cluster.api, authority, namespace, delay):
            pod = kfp_steps.start(execution, seconds_left=1.0)
            before = until_training(kfp_steps, execution)
            wait_until("it waits", lambda: "is Running" in kfp_steps.log(pod), 30, poll=0.2)
            time.sleep(2 * delay)  # the first dry run
            kfp_steps.signal(pod)
            ended = kfp_steps.end(pod)
        assert ended.code == 143
        deleted = ended.message.startswith(DELETED)
        if deleted:
            assert ended.message.endswith("the API server takes too long to suspend it")
            assert kfp_steps.job(execution) is None
        else:
            assert ended.message == ASKED
            assert suspended(kfp_steps.job(execution))
        assert deleted or not delay

        def gone() -> bool:
            return "Running" not in pods(kfp_steps.cluster, kfp_steps.namespace, execution.job)

        wait_until("its pods are gone", gone, 60, poll=0.2)

        retried = kfp_steps.run(execution)
        assert retried.code == 0, retried.log
        job = only_job(kfp_steps, execution)
        assert (job["metadata"]["uid"] == before["metadata"]["uid"]) is not deleted
        assert CANCELLED not in job["metadata"]["annotations"]
        assert condition(job, "Complete")


def test_an_evicted_step_leaves_its_job_to_the_next_pod(kfp_steps: Steps) -> None:
    """Where the step reads its pod within 20 ms, which beside other tests takes some of them longer."""
    for _ in range(5):
        execution = training(20)
        first = kfp_steps.start(execution, seconds_left=1.0)
        before = until_training(kfp_steps, execution)
        wait_until("it waits", lambda first=first: "is Running" in kfp_steps.log(first), 30, poll=0.2)  # type: ignore[misc]  # bound at once
        evicted, _ = kfp_steps.evict(first)
        assert evicted.code == 143
        if evicted.message == KEPT:
            break
    assert evicted.message == KEPT
    assert (kfp_steps.job(execution) or {})["spec"].get("suspend") is not True

    ended = kfp_steps.run(execution)
    assert ended.code == 0, ended.log
    job = only_job(kfp_steps, execution)
    assert job["metadata"]["uid"] == before["metadata"]["uid"]
    assert ended.log.count("training on rank 0") == 1, "it has not started again"


def test_a_deleted_pod_of_a_step_stops_the_job_as_terminate_does(kfp_steps: Steps) -> None:
    """As the deletion of a run does, behind which nobody waits."""
    execution = training(600)
    pod = kfp_steps.start(execution, seconds_left=1.0)
    until_training(kfp_steps, execution)
    kfp_steps.cluster.api.delete("v1", "Pod", kfp_steps.namespace, pod.pod)
    wait_until("it is stopped", lambda: (job := kfp_steps.job(execution)) is None or suspended(job), 30, poll=0.2)


def test_a_step_that_may_not_read_its_pod_says_what_a_drain_does(own_cluster: Cluster, step_image: str) -> None:
    with own_cluster.namespace("pipeline", real=True) as namespace, own_cluster.namespace("jobs") as jobs:
        admit(own_cluster, namespace, grant=False)
        for each in objects("rbac", namespace=jobs, service_accounts=[(namespace, ACCOUNT)]):
            own_cluster.api.apply(each)
        parameters = {"runtime": "trainjob-step", "command": ["true"], "namespace": jobs}
        ended = Steps(own_cluster, namespace, step_image).run(Execution("train", parameters))
    assert ended.code == 0, ended.log
    assert "no permission to list pods, so a drain that evicts pod " in ended.log


def test_a_failed_training_is_explained_in_the_termination_message(kfp_steps: Steps) -> None:
    command = ["python", "-c", FAILING]
    execution = Execution("train", {"runtime": "trainjob-step", "command": command, "num_nodes": 2})
    ended = kfp_steps.run(execution)
    assert (ended.code, ended.output) == (1, {}), ended.log
    summary, *rest = ended.message.splitlines()
    assert summary.startswith(f"TrainJob {kfp_steps.namespace}/{execution.job} failed: node-1 exited with code 1"), (
        summary
    )
    assert "  | ValueError: the data is wrong" in rest
    assert any(line.startswith("what to do: ") for line in rest), ended.message
    assert "category: user code; can be retried: the failure may not repeat" in rest
    assert ended.log.rstrip().endswith(ended.message.rstrip()), "what everybody sees ends with it"
    assert "Traceback" not in ended.log.replace("  | Traceback", "").replace("[node-1] Traceback", "")


def test_without_rights_the_message_says_which_and_how_to_grant_them(own_cluster: Cluster, step_image: str) -> None:
    with own_cluster.namespace("pipeline", real=True) as namespace:
        admit(own_cluster, namespace, grant=False)
        ended = Steps(own_cluster, namespace, step_image).run(training(0))
    assert ended.code == 1, ended.log
    assert 'cannot create resource "trainjobs"' in ended.message
    assert f"trainjob install --only rbac -n {namespace} --service-account {namespace}:{ACCOUNT}" in ended.message
    assert "kubectl apply" in ended.message
    assert "Traceback" not in ended.log


def test_the_exit_component_stops_what_a_killed_step_has_left(kfp_steps: Steps) -> None:
    execution = training(600)
    pod = kfp_steps.start(execution)
    until_training(kfp_steps, execution)
    kfp_steps.signal(pod, signal.SIGKILL)
    assert kfp_steps.end(pod).code == 137
    assert not suspended(kfp_steps.job(execution))
    assert "Running" in pods(kfp_steps.cluster, kfp_steps.namespace, execution.job)

    cleaned = kfp_steps.run(Execution("cleanup", {"run_id": execution.run}, run=execution.run))
    assert cleaned.code == 0, cleaned.log
    assert suspended(kfp_steps.job(execution))
    assert "Running" not in pods(kfp_steps.cluster, kfp_steps.namespace, execution.job)
