"""Trainer does not answer, so its webhook hangs, and with it the creation of a job."""

from __future__ import annotations

import pytest
from tests.cluster.commands import run_trainjob
from tests.testcluster.access import TRAINER
from tests.testcluster.control_plane import Cluster

pytestmark = pytest.mark.timeout(400)


def test_timeouts_end_the_creation_of_a_job_and_the_next_launch_creates_it(
    own_cluster: Cluster, namespace: str
) -> None:
    words = ("run", "--runtime", "torch-distributed", "--num-nodes", "1", "--key", "key", "-n", namespace)
    limits = ("--start-timeout", "15s", "--queue-timeout", "20s")
    kubeconfig = str(own_cluster.kubeconfig)
    own_cluster.pause("trainer")
    try:
        hung = run_trainjob(*words, *limits, "--", "true", code=4, KUBECONFIG=kubeconfig)
    finally:
        own_cluster.resume("trainer")
    assert "is not created yet" in hung.stderr
    assert "could not be created within start_timeout of 15s, and it does not exist" in hung.stderr
    created = run_trainjob(*words, "--detach", "--", "true", code=0, KUBECONFIG=kubeconfig)
    (job,) = own_cluster.api.find(TRAINER, "TrainJob", namespace)
    assert job["metadata"]["name"].endswith("-1")
    assert job["metadata"]["name"] in created.stdout
