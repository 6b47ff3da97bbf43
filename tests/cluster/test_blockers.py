"""Blockers of a job are reported while waiting, and can end the wait at once; with real controllers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tests.cluster.corpus import error_of_wait
from tests.testcluster import kueue
from tests.testcluster.access import RULES, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Observation, Phase, TrainJobSpec, WaitOptions
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._diagnosis.blockers import event_time
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import render

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


_SECONDS = 180  # long, because the controllers also serve all other tests on a busy machine


def spec(gpus: int = 0, queue: str = "", **fields: Any) -> TrainJobSpec:
    asked: dict[str, Any] = {"runtime": "torch-distributed", "num_nodes": 2, **fields}
    if gpus:
        asked["resources_per_node"] = {"gpu": gpus}
    if queue:
        asked["labels"] = {kueue.QUEUE_LABEL: queue, **fields.get("labels", {})}
    return TrainJobSpec.parse(asked)


async def until(
    backend: KubernetesBackend, ref: JobRef, enough: Callable[[Observation], bool], seen: list[Observation]
) -> None:
    """Wait for the job until `enough` is true for an observation."""
    found = False
    with anyio.move_on_after(_SECONDS) as scope:

        def look(observation: Observation, _: str) -> None:
            nonlocal found
            seen.append(observation)
            if enough(observation):
                found = True
                scope.cancel()

        await wait(backend, ref, on_change=look)
    assert found, f"not seen within {_SECONDS} s; last observation: {seen[-1:]}"


async def test_a_queued_job_reports_its_blocker(backend: KubernetesBackend, namespace: str, small_queue: str) -> None:
    first = await launch(backend, spec(4, small_queue, env=simulate(run="never")), "a", namespace=namespace)
    await until(backend, first, lambda seen: seen.phase is Phase.RUNNING, [])
    second = await launch(backend, spec(4, small_queue, env=simulate(run="never")), "b", namespace=namespace)
    seen: list[Observation] = []
    async with anyio.create_task_group() as tasks:

        def make_room(observation: Observation) -> bool:
            if observation.reason == "Pending" and not any(each.phase is Phase.STARTING for each in seen):
                tasks.start_soon(cancel, backend, first)
            return observation.phase is Phase.RUNNING

        await until(backend, second, make_room, seen)
    waiting = next(each for each in seen if each.reason == "Pending")
    assert waiting.phase is Phase.QUEUED
    assert waiting.message.startswith(f"waiting for admission in queue {small_queue}: couldn't assign flavors")
    assert "insufficient unused quota for nvidia.com/gpu" in waiting.message
    assert not waiting.stuck, "it waits for another job, which will end"
    # Pods may wait for those of the first job to end, which is another blocker.
    assert not any("flavors" in each.message for each in seen if each.phase is not Phase.QUEUED), (
        "the blocker is gone once the job is admitted"
    )


async def test_a_preempted_job_is_queued_and_runs_again(
    backend: KubernetesBackend, cluster: Access, namespace: str, small_queue: str
) -> None:
    cluster.api.apply(kueue.priority_class("urgent", 1000))
    low = await launch(backend, spec(4, small_queue, env=simulate(run="10s")), "low", namespace=namespace)
    seen: list[Observation] = []
    async with anyio.create_task_group() as tasks:

        async def urgent() -> None:
            asked = spec(4, small_queue, env=simulate(run="8s"), labels={kueue.PRIORITY_LABEL: "urgent"})
            await wait(backend, await launch(backend, asked, "high", namespace=namespace))

        def preempt(observation: Observation, _: str) -> None:
            if observation.phase is Phase.RUNNING and not any(each.phase is Phase.RUNNING for each in seen):
                tasks.start_soon(urgent)
            seen.append(observation)

        with anyio.fail_after(240):
            result = await wait(backend, low, on_change=preempt)
    assert result.uid == low.uid
    phases = [each.phase for each in seen]
    ran = phases.index(Phase.RUNNING)
    assert Phase.RUNNING in phases[phases.index(Phase.QUEUED, ran) :], "and ran again"
    assert phases[-1] is Phase.COMPLETE
    queued = [each.message for each in seen[ran:] if each.phase is Phase.QUEUED]
    assert queued[0].startswith(f"preempted, waiting again in queue {small_queue}")
    assert any("Preempted to accommodate a workload" in message for message in queued)


async def test_a_refused_jobset_is_a_permanent_blocker(
    backend: KubernetesBackend, cluster: Access, namespace: str
) -> None:
    """Such a job never gets a status; only Events have the reason. The names of `launch` are short enough."""
    message = ""
    for letter in "nopqr":
        trainjob = {**render(spec(), letter, 1, namespace)}
        trainjob["metadata"] = {**trainjob["metadata"], "name": letter * 60}
        ref = JobRef.of(cluster.api.create(trainjob))
        try:
            with anyio.fail_after(60):
                message = await error_of_wait(backend, ref)
            break
        except TimeoutError:
            # On a busy machine the first refusal may be a passing one: JobSet's webhook answers too late, or Kueue's
            # does not know the TrainJob yet. Later refusals are counted in the same Event, which keeps the message of
            # the first (seen with Trainer 2.3, events.k8s.io/v1).
            events = str((await backend.evidence(ref)).events)
            assert re.search(r"failed calling webhook|denied the request: TrainJob.* not found", events), events
    assert "is NotStarted and cannot proceed" in message
    assert "denied the request" in message
    evidence = await backend.evidence(ref)
    assert "TrainJobResourcesCreationFailed" in {event["reason"] for event in evidence.events}
    assert all(event_time(event) for event in evidence.events)


async def test_unavailable_gpus_are_a_temporary_blocker(backend: KubernetesBackend, namespace: str) -> None:
    """The cluster can grow, so the blocker is reported and the wait continues."""
    ref = await launch(backend, spec(1000), "a", namespace=namespace)
    seen: list[Observation] = []
    # Before the JobSet controller counts the pods, the job has not started.
    await until(backend, ref, lambda each: (each.phase, each.reason) == (Phase.STARTING, "Unschedulable"), seen)
    assert not seen[-1].stuck
    assert "Insufficient nvidia.com/gpu" in seen[-1].message


async def test_an_unreachable_registry_is_a_temporary_blocker(real_node: Access) -> None:
    """The registry can come back, so the blocker is reported and the wait continues."""
    backend = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
    with real_node.namespace("real", real=True) as namespace:
        ref = await launch(backend, spec(image="127.0.0.1:1/nosuch:1"), "a", namespace=namespace)
        seen: list[Observation] = []
        await until(backend, ref, lambda each: each.phase is Phase.STARTING and "ImagePull" in each.reason, seen)
        assert not seen[-1].stuck
        assert "nosuch" in seen[-1].message
        await cancel(backend, ref)
    await backend.aclose()


async def test_missing_permissions_are_logged_once(
    cluster: Access, namespace: str, small_queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer's role for users may not list Workloads: that is logged once, and the wait continues."""
    narrow = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig_for(RULES, namespace))))
    ref = await launch(narrow, spec(8, small_queue), "a", namespace=namespace)
    with anyio.move_on_after(9):
        await wait(narrow, ref, WaitOptions(fail_fast=True))
    message = [
        record.message for record in caplog.records if "permission to list workloads.kueue.x-k8s.io" in record.message
    ]
    assert len(message) == 1
    await cancel(narrow, ref)
    await narrow.aclose()
