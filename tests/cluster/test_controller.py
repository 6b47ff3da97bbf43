"""The controller, with the Role that it is installed with, on a real API server with Workflows of Argo."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from tests.cluster.backends import opened
from tests.cluster.kfp_steps import ARGO, WORKFLOWS
from tests.cluster.waits import until, until_phase
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._install import objects
from trainjob._jobs.controller import Controller
from trainjob._jobs.launching import launch
from trainjob._manifest.unattended import ON_KILL
from trainjob._manifest.workflow_labels import KFP_RUN

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

(ROLE,) = [each for each in objects("controller", namespace="x") if each["kind"] == "Role"]


@pytest.fixture(scope="module")
def argo(own_cluster: Cluster) -> Cluster:
    """A cluster with a minimal definition of Argo's Workflows."""
    own_cluster.define([WORKFLOWS])
    return own_cluster


@pytest.fixture
def namespace(argo: Cluster) -> Iterator[str]:
    with argo.namespace() as name:
        yield name


@asynccontextmanager
async def controller(cluster: Access, namespace: str) -> AsyncIterator[list[str]]:
    """A controller with its own account, that has seen the namespace; what it reports."""
    done: list[str] = []
    async with opened(cluster.kubeconfig_for(ROLE["rules"], namespace)) as backend:
        made = Controller(backend, namespace, on_done=lambda each: done.append(str(each)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await until(lambda: made.counters.decided is not None)
            yield done
            tasks.cancel_scope.cancel()


async def launched(backend: KubernetesBackend, namespace: str, run: str, action: str) -> JobRef:
    asked: dict[str, Any] = {"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never")}
    ref = await launch(
        backend,
        TrainJobSpec.parse(asked),
        f"kfp/{run}/train-{action}",
        namespace=namespace,
        origin={KFP_RUN: run, ON_KILL: action},
    )
    await until_phase(backend, ref, Phase.RUNNING)
    return ref


def workflow(cluster: Access, namespace: str, run: str) -> str:
    name = f"pipe-{secrets.token_hex(3)}"
    metadata = {"name": name, "namespace": namespace, "labels": {KFP_RUN: run}}
    cluster.api.create({"apiVersion": ARGO, "kind": "Workflow", "metadata": metadata, "spec": {}})
    return name


@pytest.mark.parametrize("end", ["terminated", "deleted"])
async def test_jobs_end_with_their_run(argo: Cluster, namespace: str, end: str) -> None:
    mine, other = secrets.token_hex(4), secrets.token_hex(4)
    name, _ = workflow(argo, namespace, mine), workflow(argo, namespace, other)
    async with opened(argo.kubeconfig) as backend:
        jobs = {action: await launched(backend, namespace, mine, action) for action in ("suspend", "cancel", "keep")}
        of_another = await launched(backend, namespace, other, "cancel")
        async with controller(argo, namespace) as done:
            if end == "deleted":
                argo.api.delete(ARGO, "Workflow", namespace, name)
            else:
                argo.api.patch(ARGO, "Workflow", namespace, name, {"spec": {"activeDeadlineSeconds": 0}})
            await until_phase(backend, jobs["suspend"], Phase.SUSPENDED)
            await until(lambda: _gone(argo, jobs["cancel"]))
            await until(lambda: len(done) == 2)
        await until_phase(backend, jobs["keep"], Phase.RUNNING)
        await until_phase(backend, of_another, Phase.RUNNING)
        again = await launch(
            backend,
            TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never")}),
            f"kfp/{mine}/train-suspend",
            namespace=namespace,
        )
        assert again == jobs["suspend"], '"Retry run" resumes it'
        await until_phase(backend, again, Phase.RUNNING)
    assert sorted(each.partition(" was ")[2].partition(":")[0] for each in done) == ["deleted", "suspended"]
    events = argo.api.find("v1", "Event", namespace)
    about = {each["involvedObject"]["uid"] for each in events if each["reason"] == "StoppedWithRun"}
    assert about == {jobs["suspend"].uid, jobs["cancel"].uid}


def _gone(cluster: Access, ref: JobRef) -> bool:
    found = cluster.api.get(TRAINER, "TrainJob", ref.namespace, ref.name)
    return found is None or found["metadata"]["uid"] != ref.uid
