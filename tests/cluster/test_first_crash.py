"""Crashes of jobs that keep running, since Trainer's runtimes restart ranks: reported at once, fatal on request."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.cluster.backends import opened
from tests.cluster.pods import pods_of
from tests.cluster.waits import until, until_phase
from tests.cluster.wires import Wires
from tests.testcluster import images
from tests.testcluster.access import RULES, TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobSpec, WaitOptions
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.cancellation import cancel, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.report import diagnose as report_of
from trainjob._jobs.waiting import wait
from trainjob.errors import Diagnosis, RankCrashed
from trainjob.status import Observation, observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

# One crash only: after six more the job would fail, and its pods would be deleted before all listeners see them.
CRASHING = simulate(run="200ms", exit_code=3, ranks="1", failures="1")


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 2, **fields})


# ---------------------------------------------------------------- the watch of pods


async def first_crash(backend: KubernetesBackend, ref: JobRef) -> Evidence:
    with anyio.fail_after(60):
        async with aclosing(backend.crashes(ref)) as found:
            return await anext(found)


def first_failure(evidence: Evidence) -> tuple[str, int | None]:
    diagnosis = diagnosis_of(evidence, Observation(Phase.FAILED))
    return diagnosis.rank, diagnosis.exit_code


async def test_all_listeners_of_a_namespace_share_one_watch_of_pods(wires: Wires) -> None:
    async with wires.open(Timings(), shared=True) as (backend, proxy):
        crashing = [await launch(backend, spec(env=CRASHING), key, namespace=wires.namespace) for key in ("a", "b")]
        quiet = await launch(backend, spec(env=simulate(run="never")), "quiet", namespace=wires.namespace)
        looks = len(proxy.seen("GET", "/pods"))  # of launches, for ranks of earlier attempts
        found: dict[int, tuple[str, int | None]] = {}

        async def listen(number: int, ref: JobRef) -> None:
            found[number] = first_failure(await first_crash(backend, ref))

        async with anyio.create_task_group() as tasks:
            for number, ref in enumerate([*crashing, *crashing, quiet]):
                tasks.start_soon(listen, number, ref)
            await until(lambda: len(found) == 4)
            assert found == dict.fromkeys(range(4), ("node-1", 3)), "the fifth listener's job has no crash"
            # A later listener gets the earlier crash without a request: the watch has the pods.
            assert first_failure(await first_crash(backend, crashing[0])) == ("node-1", 3)
            assert len(proxy.seen("WATCH", "/pods")) == 1
            assert len(proxy.seen("GET", "/pods")) == looks + 1
            tasks.cancel_scope.cancel()
        await first_crash(backend, crashing[1])
        assert len(proxy.seen("WATCH", "/pods")) == 2, "the watch was closed when it had no listener"


async def test_a_terminated_rank_has_not_crashed(backend: KubernetesBackend, namespace: str) -> None:
    """The containers of suspended, preempted and cancelled jobs end by SIGTERM."""
    ref = await launch(backend, spec(env=simulate(run="never")), "a", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    found: list[Evidence] = []

    async def listen() -> None:
        async with aclosing(backend.crashes(ref)) as crashes:
            async for evidence in crashes:
                found.append(evidence)  # noqa: PERF401 - a comprehension would lose the crashes found before the cancellation

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await backend.patch(ref, {"spec": {"suspend": True}})
        with anyio.fail_after(60):
            while not await backend.stopped(ref):
                await anyio.sleep(0.1)
        await anyio.sleep(2)  # longer than the interval in which crashes are reported together
        tasks.cancel_scope.cancel()
    assert found == []


async def test_without_permission_to_list_pods_a_warning_is_logged(
    cluster: Access, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(cluster.kubeconfig_for(RULES[:1], namespace)) as backend:
        ref = await launch(backend, spec(env=simulate(run="3s")), "a", namespace=namespace)
        with anyio.fail_after(90):
            assert (await wait(backend, ref, WaitOptions(fail_on_first_crash=True))).uid == ref.uid
    assert f"crashes of ranks of TrainJob {ref} cannot be reported while it runs: 403" in caplog.text


# ---------------------------------------------------------------- real pods

# Without a handler, the first process of a container ignores SIGTERM and runs 30 s longer.
CRASH = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if os.environ["PET_NODE_RANK"] == "1":
    time.sleep(1)
    print("ValueError: the data is wrong", flush=True)
    sys.exit(3)
time.sleep(600)
"""
REAL = {"image": images.PYTHON, "command": ["python3", "-c", CRASH]}


async def first_crash_of(backend: KubernetesBackend, ref: JobRef) -> Diagnosis:
    with anyio.fail_after(120), pytest.raises(RankCrashed) as caught:
        await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    return caught.value.diagnosis


async def test_a_crashed_job_keeps_running_until_it_is_given_up_with_its_diagnosis(
    real_node: Access, backend: KubernetesBackend, real_namespace: str
) -> None:
    ref = await launch(backend, spec(**REAL), "a", namespace=real_namespace)
    diagnosis = await first_crash_of(backend, ref)
    assert (diagnosis.rank, diagnosis.exit_code) == ("node-1", 3)
    assert diagnosis.log == ("ValueError: the data is wrong",), diagnosis
    job = real_node.api.get(TRAINER, "TrainJob", ref.namespace, ref.name)
    assert observe(job).phase in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING), "it keeps running"
    assert await give_up(backend, ref, diagnosis) == f"{ref} was suspended"
    await until(lambda: not pods_of(real_node, ref), 90)
    report = await report_of(backend, ref.namespace, ref.name)
    assert report.ranks == [], "the pods are deleted, but the report keeps the diagnosis"
    assert (report.given_up, report.diagnosis.log) == (True, diagnosis.log)
    second = await launch(backend, spec(**REAL), "a", namespace=real_namespace)
    assert second.attempt == 2


async def test_a_restarted_waiter_finds_a_past_crash(
    real_node: Access, backend: KubernetesBackend, real_namespace: str
) -> None:
    """The kubelet has removed the container of the first run, but the pod's status still has its end."""
    ref = await launch(backend, spec(**REAL), "a", namespace=real_namespace)

    def crashed_again() -> bool:
        statuses = [each for pod in pods_of(real_node, ref) for each in pod["status"].get("containerStatuses", [])]
        return any("terminated" in each["state"] and "terminated" in each["lastState"] for each in statuses)

    await until(crashed_again, 90)
    diagnosis = await first_crash_of(backend, ref)
    assert (diagnosis.rank, diagnosis.exit_code, diagnosis.log) == ("node-1", 3, ("ValueError: the data is wrong",))
    await cancel(backend, ref)
