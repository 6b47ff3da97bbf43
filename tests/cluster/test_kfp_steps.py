"""KFP components in pods of the real node, with the permissions of `trainjob install`: killed, retried, terminated.

test_kfp_terminate.py measures how often a step can stop its job after Terminate.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tests.cluster.kfp_steps import (
    ACCOUNT,
    ARGO,
    DELETED,
    KEPT,
    SUSPEND_REQUESTED,
    WORKFLOWS,
    Execution,
    Steps,
    create_account,
    kill_python,
    owner_reference,
    suspended,
)
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, condition
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import variable

from trainjob._install import objects
from trainjob.status import CANCELLED

pytestmark = pytest.mark.timeout(400)

# Without a handler, the first process of a container ignores SIGTERM and runs 30 s longer.
TRAINING = """
import os, signal, sys, time
from trainjob import progress
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("training on rank", os.environ["JOB_COMPLETION_INDEX"], flush=True)
progress.report(progress=50, metrics={"loss": 0.5})
time.sleep(float(sys.argv[1]))
"""


def training(seconds: float) -> Execution:
    """A job with a real training of this length."""
    command = ["python", "-c", TRAINING, str(seconds)]
    return Execution("train", {"runtime": "trainjob-step", "command": command})


def wait_for_training(kfp_steps: Steps, execution: Execution) -> dict[str, Any]:
    wait_until("the training runs", lambda: kfp_steps.pods(execution), 90, poll=0.2)
    job = kfp_steps.job(execution)
    assert job is not None
    return job


def only_job(kfp_steps: Steps, execution: Execution) -> dict[str, Any]:
    """The only job of all tries of an execution."""
    found = kfp_steps.cluster.api.find(TRAINER, "TrainJob", kfp_steps.namespace)
    (job,) = [each for each in found if execution.run in each["metadata"]["annotations"]["trainjob.dev/key"]]
    return job


def test_a_killed_and_retried_step_returns_the_result_of_one_job(kfp_steps: Steps) -> None:
    execution = training(20)
    first = kfp_steps.start(execution)
    wait_until("the job exists", lambda: kfp_steps.job(execution), 60, poll=0.2)
    kfp_steps.force_delete(first)  # its process keeps running for a while; KFP restarts the step, without a retry index

    second = kfp_steps.start(execution)
    known = f"TrainJob {kfp_steps.namespace}/{execution.job} (attempt 1"
    wait_until("the second try adopts the job", lambda: known in kfp_steps.log(second), 60, poll=0.2)
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
    assert "HTTP Request" not in third.log, "httpx would log a line for each request"
    again = kfp_steps.run(execution)  # "Retry run", of a run in which another step has failed
    assert again.code == 0, again.log
    assert again.output["parameterValues"] == third.output["parameterValues"]
    assert again.output["artifacts"]["model"] == third.output["artifacts"]["model"]
    only_job(kfp_steps, execution)


def test_a_terminated_step_suspends_its_job_and_retry_run_resumes_it(kfp_steps: Steps) -> None:
    """A busy control plane may have it deleted instead; test_kfp_terminate.py has slow webhooks."""
    execution = training(8)
    pod = kfp_steps.start(execution, seconds_left=1.0)
    before = wait_for_training(kfp_steps, execution)
    wait_until("the step waits", lambda: "is Running" in kfp_steps.log(pod), 30, poll=0.2)
    kfp_steps.signal(pod)
    ended = kfp_steps.end(pod)
    assert ended.code == 143
    deleted = ended.message.startswith(DELETED) and ended.message.endswith(
        "the API server takes too long to suspend it"
    )
    assert deleted or (ended.message == SUSPEND_REQUESTED and suspended(kfp_steps.job(execution)))
    wait_until("the pods are gone", lambda: not kfp_steps.pods(execution), 60, poll=0.2)

    retried = kfp_steps.run(execution)
    assert retried.code == 0, retried.log
    job = only_job(kfp_steps, execution)
    assert (job["metadata"]["uid"] == before["metadata"]["uid"]) is not deleted
    assert CANCELLED not in job["metadata"]["annotations"]
    assert condition(job, "Complete")


def test_the_next_pod_of_an_evicted_step_adopts_its_job(kfp_steps: Steps) -> None:
    """The step must read its pod within 20 ms, which can take longer beside other tests; five tries were too few."""
    for _ in range(15):
        execution = training(20)
        first = kfp_steps.start(execution, seconds_left=1.0)
        before = wait_for_training(kfp_steps, execution)
        wait_until("the step waits", lambda first=first: "is Running" in kfp_steps.log(first), 30, poll=0.2)  # type: ignore[misc]  # bound at once
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
    assert ended.log.count("training on rank 0") == 1, "the training was not restarted"


def test_deleting_the_pod_of_a_step_stops_its_job(kfp_steps: Steps) -> None:
    """The deletion of a run deletes its pods, and no other step waits for the job then."""
    execution = training(600)
    pod = kfp_steps.start(execution, seconds_left=1.0)
    wait_for_training(kfp_steps, execution)
    kfp_steps.cluster.api.delete("v1", "Pod", kfp_steps.namespace, pod.pod)
    wait_until("the job is stopped", lambda: (job := kfp_steps.job(execution)) is None or suspended(job), 30, poll=0.2)


def test_a_step_without_permission_to_read_its_pod_logs_what_a_drain_does(
    own_cluster: Cluster, step_image: str
) -> None:
    with own_cluster.namespace("pipeline", real=True) as namespace, own_cluster.namespace("jobs") as jobs:
        create_account(own_cluster, namespace, grant=False)
        for each in objects("rbac", namespace=jobs, service_accounts=[(namespace, ACCOUNT)]):
            own_cluster.api.apply(each)
        parameters = {"runtime": "trainjob-step", "command": ["true"], "namespace": jobs}
        ended = Steps(own_cluster, namespace, step_image).run(Execution("train", parameters))
    assert ended.code == 0, ended.log
    assert "no permission to list pods, so a drain that evicts pod " in ended.log


def test_a_step_without_permissions_reports_how_to_grant_them(own_cluster: Cluster, step_image: str) -> None:
    with own_cluster.namespace("pipeline", real=True) as namespace:
        create_account(own_cluster, namespace, grant=False)
        ended = Steps(own_cluster, namespace, step_image).run(training(0))
    assert ended.code == 1, ended.log
    assert 'cannot list resource "trainjobs"' in ended.message
    assert f"trainjob install --only rbac -n {namespace} --service-account {namespace}:{ACCOUNT}" in ended.message
    assert "kubectl apply" in ended.message
    assert "Traceback" not in ended.log


def test_the_exit_component_stops_the_job_of_a_killed_step(kfp_steps: Steps) -> None:
    execution = training(600)
    pod = kfp_steps.start(execution)
    wait_for_training(kfp_steps, execution)
    kfp_steps.signal(pod, signal.SIGKILL)
    assert kfp_steps.end(pod).code == 137
    assert not suspended(kfp_steps.job(execution))
    assert kfp_steps.pods(execution)

    cleaned = kfp_steps.run(Execution("cleanup", {"run_id": execution.run}, run=execution.run))
    assert cleaned.code == 0, cleaned.log
    assert suspended(kfp_steps.job(execution))
    assert not kfp_steps.pods(execution)


# ---------------------------------------------------------------- jobs that belong to a run


@pytest.fixture(scope="module")
def workflows(own_cluster: Cluster) -> None:
    """A minimal definition of Argo's Workflows, enough for owner references."""
    own_cluster.define([WORKFLOWS])


def test_a_job_owned_by_its_run_is_deleted_with_it(kfp_steps: Steps, workflows: None) -> None:
    cluster, namespace = kfp_steps.cluster, kfp_steps.namespace
    metadata = {"name": "nightly", "namespace": namespace}
    workflow = cluster.api.create({"apiVersion": ARGO, "kind": "Workflow", "metadata": metadata, "spec": {}})
    parameters = {"runtime": "trainjob-step", "command": ["sleep", "600"], "env": {variable("run"): "never"}}
    execution = Execution("train", {**parameters, "owned_by_run": True, "on_kill_action": "keep"})
    tried = kfp_steps.start(execution, workflow=workflow)
    job = wait_until("the job exists", lambda: kfp_steps.job(execution), 60, poll=0.2)
    assert job["metadata"]["ownerReferences"] == [owner_reference(workflow)]

    cluster.api.delete(ARGO, "Workflow", namespace, "nightly")
    # The garbage collector discovers new kinds of objects every 30 s.
    wait_until("the job is deleted", lambda: kfp_steps.job(execution) is None, 90, poll=0.5)
    kfp_steps.force_delete(tried)


def test_a_job_in_another_namespace_cannot_be_owned_by_its_run(kfp_steps: Steps, workflows: None) -> None:
    with kfp_steps.cluster.namespace("jobs") as other:
        create_account(kfp_steps.cluster, kfp_steps.namespace, other)
        parameters = {"runtime": "trainjob-step", "command": ["x"], "owned_by_run": True, "namespace": other}
        ended = kfp_steps.run(Execution("train", parameters))
        assert kfp_steps.cluster.api.find(TRAINER, "TrainJob", other) == []
    assert ended.code == 1, ended.log
    assert f"the run is in namespace {kfp_steps.namespace} and the job in {other}" in ended.message
