"""The Kubernetes backend with real controllers: the flow of the local backend, with both kinds of watch."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml
from tests.certificates import Authority
from tests.cluster import failing as make
from tests.cluster.waits import phases_of, until_phase
from tests.fakes.faults import Fault, FaultProxy, Kind, Plan
from tests.testcluster import images, kueue
from tests.testcluster.access import RULES, Access
from tests.testcluster.api import write_kubeconfig
from tests.testcluster.nodes import run_until_finished, simulate

from trainjob import Diagnosis, JobRef, Phase, RetryVerdict, TrainJobFailed, TrainJobSpec, WaitOptions
from trainjob._backends.base import TrainJob
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes import pods
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request, Timings
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import dry_run, launch
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import render
from trainjob._support.log_lines import LogLine
from trainjob.errors import (
    ConfigurationError,
    NotFound,
    QueueTimeout,
    RankCrashed,
    Rejected,
    RuntimeNotFound,
    SpecMismatch,
    Stuck,
)
from trainjob.status import observe
from trainjob.verdicts import Category

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 2, **fields})


async def test_launch_wait_and_adopt(backend: KubernetesBackend, cluster: Access, namespace: str) -> None:
    asked = spec(runtime_patches=[run_until_finished()])
    ref = await launch(backend, asked, "dag/run/train", namespace=namespace)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(finish_once_it_runs, cluster, backend, ref)
        phases = await phases_of(backend, ref)
    assert phases[-2:] == [Phase.RUNNING, Phase.COMPLETE]
    assert await launch(backend, asked, "dag/run/train", namespace=namespace) == ref, "complete, not delivered: adopted"
    other = spec(runtime_patches=[run_until_finished()], num_nodes=3)
    with pytest.raises(SpecMismatch, match=r"spec\.trainer\.numNodes: 2 -> 3"):
        await launch(backend, other, "dag/run/train", namespace=namespace)
    await mark_delivered(backend, ref)
    again = await launch(backend, asked, "dag/run/train", namespace=namespace)
    assert (again.attempt, again.name != ref.name) == (2, True)


async def finish_once_it_runs(cluster: Access, backend: KubernetesBackend, ref: JobRef) -> None:
    await until_phase(backend, ref, Phase.RUNNING)
    await anyio.sleep(0.5)  # other waiters must see it, too
    await anyio.to_thread.run_sync(cluster.finish, ref.namespace)


async def test_one_job_from_many_launches_at_once(backend: KubernetesBackend, namespace: str) -> None:
    found: list[JobRef] = []

    async def one() -> None:
        found.append(await launch(backend, spec(env=simulate(run="never")), "same", namespace=namespace))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(one)
    assert len({ref.uid for ref in found}) == 1
    assert len(await backend.find(namespace, {})) == 1


async def test_refused_launches_report_the_reason(backend: KubernetesBackend, namespace: str) -> None:
    with pytest.raises(RuntimeNotFound, match="no ClusterTrainingRuntime 'nosuch'"):
        await launch(backend, spec(runtime="nosuch"), "a", namespace=namespace)
    with pytest.raises(Rejected, match='namespaces "nosuch" not found'):
        await launch(backend, spec(), "a", namespace="nosuch")
    unknown = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "podTemplateOverrides": []},
    }
    with pytest.raises(Rejected, match=r"spec\.podTemplateOverrides: is not supported.* whose fields here are: active"):
        await launch(backend, TrainJobSpec.parse(unknown), "a", namespace=namespace)
    assert await backend.find(namespace, {}) == []


async def test_refusals_of_the_api_server_are_not_retried(cluster: Access, namespace: str) -> None:
    """Refusals of a real server: forbidden, too large, invalid, exceeded quota. No request is repeated."""
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    reading = [{**RULES[0], "verbs": ["get", "list", "watch"]}]
    reader = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig_for(reading, namespace))))
    with pytest.raises(Rejected, match='cannot create resource "trainjobs"') as forbidden:
        await launch(reader, spec(), "a", namespace=namespace)
    with pytest.raises(Rejected, match=r"[Tt]oo large") as too_large:  # for etcd
        await backend.create(_with_env(render(spec(), "a", 1, namespace), "BIG", "x" * 2_000_000))
    with pytest.raises(Rejected, match=r"is 3\.3 MiB of JSON, and an API server accepts 3"):
        await backend.create(_with_env(render(spec(), "a", 1, namespace), "BIG", "x" * 3_500_000))
    with pytest.raises(Rejected, match="PET_NNODES") as invalid:
        await backend.create(_with_env(render(spec(), "a", 1, namespace), "PET_NNODES"))
    for refused in (forbidden, too_large, invalid):
        assert refused.value.retry is RetryVerdict.CONFIGURATION
    cluster.forbid_trainjobs(namespace)
    with pytest.raises(Rejected, match="exceeded quota") as over:
        await launch(backend, spec(), "a", namespace=namespace)
    assert over.value.retry is RetryVerdict.QUOTA
    assert await backend.find(namespace, {}) == []
    await backend.aclose()
    await reader.aclose()


def _with_env(trainjob: TrainJob, name: str, value: str = "1") -> TrainJob:
    trainer = {**trainjob["spec"]["trainer"], "env": [{"name": name, "value": value}]}
    return {**trainjob, "spec": {**trainjob["spec"], "trainer": trainer}}


async def test_warnings_of_the_server_are_shown(
    backend: KubernetesBackend, cluster: Access, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = cluster.api.get("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", "", "jax-distributed") or {}
    labels = {**runtime["metadata"]["labels"], "trainer.kubeflow.org/support": "deprecated"}
    old = {**runtime, "metadata": {"name": f"old-{namespace}", "labels": labels}}
    cluster.add_runtime(old)
    await launch(backend, spec(runtime=f"old-{namespace}"), "a", namespace=namespace)
    assert any("API server: " in each.message and "deprecated" in each.message for each in caplog.records)
    cluster.api.delete("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", "", f"old-{namespace}")


async def test_a_dry_run_creates_nothing(backend: KubernetesBackend, namespace: str) -> None:
    ref = await launch(backend, spec(env=simulate(run="100ms")), "a", namespace=namespace)
    stored = await dry_run(backend, spec(num_nodes=3), "a", namespace=namespace)
    assert (stored["metadata"]["name"], stored["spec"]["trainer"]["numNodes"]) == (ref.name, 3)
    assert stored["spec"]["managedBy"] == "trainer.kubeflow.org/trainjob-controller", "with the server's defaults"
    with pytest.raises(RuntimeNotFound):
        await dry_run(backend, spec(runtime="nosuch"), "a", namespace=namespace)
    jobs = await backend.find(namespace, {})
    assert [job["metadata"]["name"] for job in jobs] == [ref.name]


async def test_a_job_is_suspended_resumed_and_deleted(backend: KubernetesBackend, namespace: str) -> None:
    asked = spec(env=simulate(run="never"), labels={})
    ref = await launch(backend, asked, "a", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    await backend.patch(ref, {"spec": {"suspend": True}})
    await until_phase(backend, ref, Phase.SUSPENDED) if not await _queued(backend, ref) else None
    await backend.patch(ref, {"spec": {"suspend": False}})
    await until_phase(backend, ref, Phase.RUNNING)

    other = replace(ref, uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(NotFound):
        await backend.patch(other, {"spec": {"suspend": True}})
    await backend.delete(other)
    assert await backend.get(namespace, ref.name) is not None, "a job of another UID is another job"

    assert await cancel(backend, ref)
    assert await backend.get(namespace, ref.name) is None
    assert await backend.stopped(ref)


async def test_no_pod_is_created_after_a_cancel(backend: KubernetesBackend, namespace: str) -> None:
    """A controller that has just seen a resumed job creates its pods, even if the job is deleted at that moment."""
    for number in range(6):
        ref = await launch(backend, spec(env=simulate(run="never"), suspend=True), f"{number}", namespace=namespace)
        await until_phase(backend, ref, Phase.SUSPENDED)
        await backend.patch(ref, {"spec": {"suspend": False}})
        await anyio.sleep(0.05 * number)
        assert await cancel(backend, ref)
        with anyio.move_on_after(0.7):
            while await backend.stopped(ref):
                await anyio.sleep(0.02)
            pytest.fail(f"a pod of {ref} was created after the cancel ({0.05 * number:.2f} s after it was resumed)")


async def _queued(backend: KubernetesBackend, ref: JobRef) -> bool:
    """Kueue manages the jobs of every namespace with its default queue, and controls their suspension."""
    return observe(await backend.get(ref.namespace, ref.name)).phase is Phase.QUEUED


async def test_a_job_deleted_while_waiting_is_reported(backend: KubernetesBackend, namespace: str) -> None:
    ref = await launch(backend, spec(env=simulate(run="never")), "a", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)

    async def delete_soon() -> None:
        await anyio.sleep(0.5)
        await backend.delete(ref)

    errors: list[TrainJobFailed] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(delete_soon)
        try:
            await phases_of(backend, ref)
        except TrainJobFailed as error:
            errors.append(error)
    assert "the TrainJob was deleted before it finished" in str(errors[0])


async def test_the_first_crash_is_kept_for_the_end(backend: KubernetesBackend, namespace: str) -> None:
    """With the shipped runtimes a rank is restarted in place, and at the end the Job's pods are deleted."""
    ref = await launch(backend, spec(env=simulate(run="1s", exit_code=3, ranks="1")), "a", namespace=namespace)
    crashes: list[Diagnosis] = []
    with anyio.fail_after(240), pytest.raises(TrainJobFailed) as failed:
        await wait(backend, ref, on_crash=crashes.append)
    assert (crashes[0].rank, crashes[0].exit_code) == ("node-1", 3)
    diagnosis = failed.value.diagnosis
    assert (diagnosis.rank, diagnosis.exit_code, diagnosis.category) == ("node-1", 3, Category.USER_CODE)
    assert failed.value.retry is RetryVerdict.UNKNOWN


async def test_a_failed_rank_fails_the_job(backend: KubernetesBackend, namespace: str) -> None:
    ref = await launch(backend, spec(env=simulate(run="2s", exit_code=3)), "a", namespace=namespace)
    with pytest.raises(TrainJobFailed, match="exited with code 3"):
        await phases_of(backend, ref)
    next_attempt = await launch(backend, spec(env=simulate(run="100ms")), "a", namespace=namespace)
    assert next_attempt.attempt == 2, "after a failure, another spec starts the next attempt, with a new name"


async def test_a_queue_is_not_a_failure(backend: KubernetesBackend, namespace: str, small_queue: str) -> None:
    """The queue has 8 GPUs, and two jobs ask for 8 each, so that one waits for the other."""
    gpus = {"labels": {kueue.QUEUE_LABEL: small_queue}, "resources_per_node": {"gpu": 4}}
    first = await launch(backend, spec(env=simulate(run="never"), **gpus), "a", namespace=namespace)
    await until_phase(backend, first, Phase.RUNNING)
    second = await launch(backend, spec(env=simulate(run="100ms"), **gpus), "b", namespace=namespace)
    with pytest.raises(QueueTimeout, match=f"waiting for admission in queue {small_queue}"):
        await phases_of(backend, second, WaitOptions(queue_timeout=timedelta(seconds=1)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel, backend, first)
        phases = await phases_of(backend, second)
    assert phases[0] is Phase.QUEUED
    assert phases[-1] is Phase.COMPLETE


async def test_the_editor_role_of_trainer_suffices(cluster: Access, namespace: str) -> None:
    """``kubeflow-trainer-edit``: no update, no JobSets, no Jobs."""
    narrow = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig_for(RULES, namespace))))
    ref = await launch(narrow, spec(env=simulate(run="300ms")), "a", namespace=namespace)
    assert (await phases_of(narrow, ref))[-1] is Phase.COMPLETE
    second = await launch(narrow, spec(env=simulate(run="never")), "b", namespace=namespace)
    await until_phase(narrow, second, Phase.RUNNING)
    assert await cancel(narrow, second)
    await narrow.aclose()


ROLE = yaml.safe_load((resources.files("trainjob") / "_install" / "role.yaml").read_text())


async def test_the_shipped_role_is_needed_and_suffices(
    cluster: Access, namespace: str, small_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[tuple[str, str, str]] = set()
    stream = ApiClient.stream

    def recording(self: ApiClient, request: Request) -> Any:
        version, _, path = request.path.partition(f"/namespaces/{namespace}/")
        group = version.split("/")[2] if version.startswith("/apis/") else ""
        collection, _, rest = path.partition("/")
        _, _, subresource = rest.partition("/")
        resource = f"{collection}/{subresource}" if subresource else collection
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "get" if rest else "list")
        if resource:  # a waiter also requests the ClusterTrainingRuntime after a second; no Role can allow that
            used.add((group, resource, "watch" if "watch" in request.params else verb))
        return stream(self, request)

    monkeypatch.setattr(ApiClient, "stream", recording)
    credentials = Credentials(kubeconfig=str(cluster.kubeconfig_for(ROLE["rules"], namespace)))
    narrow = KubernetesBackend(credentials, timings=Timings(renew=0.1))
    asked = spec(env=simulate(run="1s"), labels={kueue.QUEUE_LABEL: small_queue}, unattended="suspend")
    ref = await launch(narrow, asked, "a", namespace=namespace)
    assert await launch(narrow, asked, "a", namespace=namespace) == ref
    lines: list[str] = []
    await wait(narrow, ref, on_log=lambda line: lines.append(line.text))
    assert lines
    await mark_delivered(narrow, ref)
    assert (await narrow.evidence(ref)).unseen == []
    shipped = cluster.api.get("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", "", "torch-distributed") or {}
    metadata = {"name": "own", "namespace": namespace, "labels": shipped["metadata"]["labels"]}
    cluster.add_runtime({**shipped, "kind": "TrainingRuntime", "metadata": metadata})
    own = spec(runtime={"name": "own", "kind": "TrainingRuntime"}, labels={kueue.QUEUE_LABEL: "nosuch"})
    waiting = await launch(narrow, own, "b", namespace=namespace)
    with pytest.raises(Stuck, match="LocalQueue nosuch doesn't exist"):
        await wait(narrow, waiting, WaitOptions(fail_fast=True))
    assert (await narrow.evidence(waiting)).unseen == []
    assert await narrow.usage(waiting) is None
    assert await narrow.queue_position(waiting, small_queue) is None
    assert await cancel(narrow, waiting)
    allowed = {
        (group, name, verb)
        for rule in ROLE["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == allowed
    await narrow.aclose()


async def test_wrong_credentials_and_no_cluster(cluster: Access, tmp_path: Path) -> None:
    nowhere = KubernetesBackend(Credentials(kubeconfig=str(tmp_path / "nosuch")))
    with pytest.raises(ConfigurationError, match="TRAINJOB_BACKEND=local"):
        await nowhere.get("default", "x")


CRASH = """
import os, sys, time
if os.environ["PET_NODE_RANK"] == "1":
    print("ValueError: the answer is not 42", file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(600)
"""


async def test_a_crash_of_a_real_pod_is_reported_at_once_and_kept_for_the_diagnosis(real_node: Access) -> None:
    """The rank is restarted until the deadline; then the JobSet is deleted with its pods and their logs."""
    connected = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
    with real_node.namespace("real", real=True) as namespace:
        asked = spec(image=images.PYTHON, command=["python3", "-c", CRASH], active_deadline_seconds=40)
        ref = await launch(connected, asked, "a", namespace=namespace)
        crashes: list[Diagnosis] = []
        with anyio.fail_after(240), pytest.raises(TrainJobFailed) as failed:
            await wait(connected, ref, on_crash=crashes.append)
        assert (crashes[0].rank, crashes[0].exit_code) == ("node-1", 3)
        assert (crashes[0].log, crashes[0].unseen) == (("ValueError: the answer is not 42",), ())
        assert failed.value.diagnosis.category is Category.DEADLINE
        assert failed.value.diagnosis.log == ("ValueError: the answer is not 42",)
    await connected.aclose()


LATE = """
import os, sys, time
if os.environ["PET_NODE_RANK"] == "1":
    time.sleep(25)
    print("ValueError: the answer is not 42", file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(600)
"""


async def test_a_log_that_a_real_node_writes_late_is_read_again(
    real_node: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first look at the log of the run that crashed finds it empty; the next run writes nothing for 25 s.

    Its end would make the kubelet delete the log of the first one.
    """
    connected = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
    looks: list[list[LogLine]] = []
    looked, read = anyio.Event(), pods._Tails._lines

    async def lines(tails: pods._Tails, *which: Any) -> list[LogLine] | None:
        found = await read(tails, *which)
        looks.append(found or [])
        looked.set()
        return found

    monkeypatch.setattr(pods._Tails, "_lines", lines)
    with real_node.namespace("late", real=True) as namespace:
        asked = spec(image=images.PYTHON, command=["python3", "-c", LATE], active_deadline_seconds=100)
        ref = await launch(connected, asked, "a", namespace=namespace)
        container = await anyio.to_thread.run_sync(make.container_of_rank_1, real_node, ref)

        async def write_late() -> None:
            with make.node_of(real_node).unwritten_log(container):
                await looked.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write_late)
            with anyio.fail_after(240), pytest.raises(RankCrashed) as failed:
                await wait(connected, ref, WaitOptions(fail_on_first_crash=True))
        assert [[line.text for line in each] for each in looks] == [[], ["ValueError: the answer is not 42"]]
        assert failed.value.diagnosis.log == ("ValueError: the answer is not 42",)
        await cancel(connected, ref)
    await connected.aclose()


async def test_a_crash_caused_by_a_probe_names_the_probe(real_node: Access) -> None:
    """The pod's status has only SIGKILL; the Event with the reason is requested before the crash is reported."""
    connected = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
    runtime = make.stages("node", node={"livenessProbe": make.PROBE}, pod=make.RESTARTS)
    with real_node.namespace("probe", real=True) as namespace, make.own(runtime)(real_node, namespace):
        asked = spec(**make.python("import time; time.sleep(600)") | make.OWN | {"image": images.PYTHON})
        ref = await launch(connected, asked, "a", namespace=namespace)
        with anyio.fail_after(240), pytest.raises(RankCrashed, match="because its liveness probe failed") as failed:
            await wait(connected, ref, WaitOptions(fail_on_first_crash=True))
        assert failed.value.diagnosis.exit_code == 137
        await cancel(connected, ref)
    await connected.aclose()


async def test_a_delayed_log_is_read(
    cluster: Access, namespace: str, authority: Authority, token: str, tmp_path: Path
) -> None:
    """The log is read even after the job's end, when nothing else is waited for."""
    late = Fault(Kind.DELAY, seconds=3)
    pair = authority.issue("proxy", addresses=["127.0.0.1"])
    plan: Plan = lambda seen: late if seen.path.endswith("/log") else None  # noqa: E731
    async with FaultProxy(cluster.api.server, cluster.api.authority, pair, plan) as proxy:
        certificate = authority.certificate.read_bytes()
        through = write_kubeconfig(tmp_path / "config", proxy.url, certificate, {"token": token}, namespace)
        slow = KubernetesBackend(Credentials(kubeconfig=str(through)))
        ref = await launch(slow, spec(env=simulate(run="100ms")), "a", namespace=namespace)
        await until_phase(slow, ref, Phase.COMPLETE)
        with anyio.fail_after(30):
            lines = [line.rank async for line in slow.logs(ref, follow=True)]
        assert sorted(lines) == ["node-0", "node-1"]
        assert len(proxy.injected) == 2
        await slow.aclose()


async def test_logs_of_many_jobs_share_one_watch_of_pods(
    cluster: Access, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A triggerer waits for a thousand jobs: their shared watch provides the list of pods."""
    lists: list[str] = []
    stream = ApiClient.stream

    def counting(self: ApiClient, request: Request) -> Any:
        if request.path.endswith("/pods") and "watch" not in request.params:
            lists.append(request.path)
        return stream(self, request)

    monkeypatch.setattr(ApiClient, "stream", counting)
    triggers = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)), shared=True)
    refs = [await launch(triggers, spec(env=simulate(run="12s")), f"key {n}", namespace=namespace) for n in range(5)]
    read: dict[str, list[str]] = {}

    async def follow(ref: JobRef) -> None:
        read[ref.name] = [line.rank async for line in triggers.logs(ref, follow=True)]

    with anyio.fail_after(240):
        async with anyio.create_task_group() as tasks:
            for ref in refs:
                tasks.start_soon(follow, ref)
    assert {name: sorted(ranks) for name, ranks in read.items()} == {ref.name: ["node-0", "node-1"] for ref in refs}
    assert len(lists) <= 1 + 2 * len(refs), "one at the start, at most one for each late start, and one for each end"
    await triggers.aclose()


REPORT = {
    "trainjob": 1,
    "lastUpdatedTime": "2026-01-31T12:00:00Z",
    "progressPercentage": 100,
    "metrics": [{"name": "accuracy", "value": "0.97"}],
    "outputs": {"model": "s3://models/1"},
}
REAL = f"""
import os, sys, time
rank = os.environ["PET_NODE_RANK"]
for n in range(5):
    print("rank", rank, "line", n, flush=True)
    time.sleep(0.2)
if rank == "0":
    open("/dev/termination-log", "w").write({json.dumps(REPORT)!r})
"""


@pytest.mark.parametrize("shared", [False, True])
async def test_logs_and_results_of_real_pods(real_node: Access, shared: bool) -> None:
    connected = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)), shared=shared)
    with real_node.namespace("real", real=True) as namespace:
        asked = spec(image=images.PYTHON, command=["python3", "-c", REAL])
        ref = await launch(connected, asked, "a", namespace=namespace)
        lines: list[str] = []
        with anyio.fail_after(240):
            result = await wait(connected, ref, on_log=lambda line: lines.append(str(line)))
        assert sorted(lines) == [f"[node-{rank}] rank {rank} line {n}" for rank in (0, 1) for n in range(5)]
        assert result.metrics == {"accuracy": 0.97}
        assert result.outputs == {"model": "s3://models/1"}
        stored = [line async for line in connected.logs(ref, ranks=["node-1"], tail=2)]
        assert [line.text for line in stored] == ["rank 1 line 3", "rank 1 line 4"]
        later = [line async for line in connected.logs(ref, ranks=["node-1"], since=stored[0].time)]
        assert [line.text for line in later] == ["rank 1 line 4"]
    await connected.aclose()


def stages(name: str, *steps: str) -> dict[str, Any]:
    """A runtime whose replicated jobs run one after the other, each writing its name."""
    jobs: list[dict[str, Any]] = []
    for step in steps:
        command = ["sh", "-c", f"echo {step} writes; sleep 1"]
        container: dict[str, Any] = {"name": step, "image": images.PYTHON, "command": command}
        if step.endswith("-initializer"):
            container["volumeMounts"] = [{"name": "initializer", "mountPath": "/workspace"}]
        template: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
        template["volumes"] = [{"name": "initializer", "emptyDir": {}}]
        ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer" if step == "node" else step}
        job: dict[str, Any] = {"spec": {"template": {"spec": template}}}
        if step != "launcher":
            job["metadata"] = {"labels": ancestor}
        depends = [{"name": jobs[-1]["name"], "status": "Complete"}] if jobs else []
        jobs.append({"name": step, "template": job, **({"dependsOn": depends} if depends else {})})
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "test"}},
        "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": jobs}}},
    }


async def test_logs_of_initializers_and_of_a_launcher(real_node: Access) -> None:
    steps = ("dataset-initializer", "model-initializer", "node", "launcher")
    connected = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
    real_node.add_runtime(stages("stages", *steps))
    initializer = {"dataset": {"storage_uri": "s3://b/d"}, "model": {"storage_uri": "s3://b/m"}}
    with real_node.namespace("real", real=True) as namespace:
        asked = spec(runtime="stages", num_nodes=1, initializer=initializer)
        ref = await launch(connected, asked, "a", namespace=namespace)
        lines: list[str] = []
        phases: list[Phase] = []
        with anyio.fail_after(240):
            await wait(
                connected,
                ref,
                on_change=lambda observation, _: phases.append(observation.phase),
                on_log=lambda line: lines.append(str(line)),
            )
        assert lines == [f"[{step}-0] {step} writes" for step in steps]
        assert Phase.INITIALIZING in phases
        only = [str(line) async for line in connected.logs(ref, ranks=["model-initializer-0", "launcher-0"])]
        assert only == ["[model-initializer-0] model-initializer writes", "[launcher-0] launcher writes"]
    await connected.aclose()


async def test_lists_of_several_pages_are_complete(
    cluster: Access, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("client", "reflector"):
        monkeypatch.setattr(f"trainjob._backends.kubernetes.{module}.PAGE", 2)
    backends = [KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)), shared=yes) for yes in (False, True)]
    refs = [await launch(backends[0], spec(suspend=True), f"page-{number}", namespace=namespace) for number in range(5)]
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    client = ApiClient(Credentials(kubeconfig=str(cluster.kubeconfig)))
    assert len(await client.items(path, {}, page=2)) == 5
    await client.aclose()
    names = {ref.name for ref in refs}
    for backend in backends:
        assert (await backend.refs(namespace, names))[0].keys() == names
        assert {job["metadata"]["name"] for job in await backend.find(namespace, {})} == names
        await backend.aclose()
