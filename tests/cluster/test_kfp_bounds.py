"""KFP steps whose job cannot run report why; jobs that are owned by a run are deleted with it."""

from __future__ import annotations

import pytest
from tests.cluster.kfp_steps import ARGO, WORKFLOWS, Execution, Steps, create_account, owner_reference
from tests.processes import wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import variable

pytestmark = pytest.mark.timeout(300)


def test_a_job_that_cannot_run_fails_the_step(kfp_steps: Steps) -> None:
    image = {"runtime": "trainjob-step", "image": "127.0.0.1:1/nosuch:1", "start_timeout": 20}
    ended = kfp_steps.run(Execution("train", {**image, "command": ["train"]}))
    assert (ended.code, ended.output) == (1, {}), ended.log
    assert "no rank was running within start_timeout of 20s" in ended.message
    assert "ImagePull" in ended.message, "the blocker"
    assert "Traceback" not in ended.log


@pytest.fixture(scope="module")
def workflows(own_cluster: Cluster) -> None:
    """A minimal definition of Argo's Workflows, enough for owner references."""
    own_cluster.define([WORKFLOWS])


def test_a_job_owned_by_its_run_is_deleted_with_it(kfp_steps: Steps, workflows: None) -> None:
    cluster, namespace = kfp_steps.cluster, kfp_steps.namespace
    metadata = {"name": "nightly", "namespace": namespace}
    workflow = cluster.api.create({"apiVersion": ARGO, "kind": "Workflow", "metadata": metadata, "spec": {}})
    execution = Execution(
        "train",
        {
            "runtime": "trainjob-step",
            "command": ["sleep", "600"],
            "env": {variable("run"): "never"},
            "owned_by_run": True,
            "on_kill_action": "keep",
        },
    )
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
