"""Trainer 2.1 and 2.2: the same flow as on 2.3 for supported fields, and a refusal of unsupported fields."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import yaml
from tests.cluster import failing as make
from tests.cluster.backends import opened
from tests.cluster.commands import applied, examined, failures, of, printed
from tests.cluster.conftest import KUBECONFIG
from tests.cluster.pods import pods_of
from tests.cluster.policies import asked as why_refused, key, patch, protected
from tests.cluster.waits import phases_of, until_phase, wait_for_queue
from tests.cluster.work import begin
from tests.processes import wait_until
from tests.testcluster import build, images
from tests.testcluster.access import RULES, TRAINER, refused, trainjob, wait_for_runtime
from tests.testcluster.api import Api, ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.kueue import API, QUEUE, QUEUE_LABEL
from tests.testcluster.manifests import load, point
from tests.testcluster.nodes import simulate
from tests.unit.schemas import cut, recorded

from trainjob import Phase, RetryVerdict, TrainJobFailed, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob.errors import Rejected

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

OPENAPI = f"/openapi/v3/apis/{TRAINER}"
RUNTIME = "never-restarting-with-sidecar"


class Older(Cluster):
    """A cluster with an older Trainer, two simulated nodes, and a runtime that has a sidecar and fails at once."""

    def __init__(self, release: str) -> None:
        super().__init__(simulated_nodes=2, older=f"trainer-{release}")
        self.release = release

    def start(self) -> None:
        super().start()
        runtime = make.stages("node", pod={"containers": [{"name": n, "image": "none"} for n in ("node", "sidecar")]})
        metadata = {"name": RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}}
        self.api.apply({"apiVersion": TRAINER, "kind": "ClusterTrainingRuntime", "metadata": metadata, "spec": runtime})


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def older(request: pytest.FixtureRequest) -> Iterator[Older]:
    if KUBECONFIG in os.environ:
        pytest.skip(f"{KUBECONFIG} names one cluster, with one Trainer; these tests start their own")
    with Older(request.param) as started:
        yield started


@pytest.fixture
def namespace(older: Older) -> Iterator[str]:
    with older.namespace() as name:
        yield name


@pytest.fixture
async def backend(older: Older, namespace: str) -> AsyncIterator[KubernetesBackend]:
    """A backend with only the permissions of Trainer's editor role."""
    async with opened(older.kubeconfig_for(RULES, namespace)) as found:
        yield found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Method and path of every request of the backends of this test, without what a launch reads of a key."""
    requests: list[str] = []
    send = httpx.AsyncClient.send

    async def counting(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        of_key = re.search(r"/(trainjobs|leases|pods|jobsets/[^/]+)$", request.url.path)
        if request.method != "GET" or of_key is None:
            requests.append(f"{request.method} {request.url.path}")
        return await send(self, request, **options)

    monkeypatch.setattr(httpx.AsyncClient, "send", counting)
    return requests


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": RUNTIME, "num_nodes": 2, **fields})


def patches(pod: dict[str, Any] | None = None, **template: Any) -> list[dict[str, Any]]:
    """One patch of the pods of `node`, and of the JobSet."""
    labels = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    node = {"name": "node", "template": {"spec": {"template": {"metadata": labels, "spec": pod or {}}}}}
    template = {"metadata": {"labels": {"jobset-label": "c"}}, "spec": {"replicatedJobs": [node]}, **template}
    return [{"manager": "example.com/team", "trainingRuntimeSpec": {"template": template}}]


POD: dict[str, Any] = {
    "nodeSelector": {"kubernetes.io/hostname": "simulated-1"},
    "tolerations": [{"key": "gpus", "operator": "Exists", "effect": "NoSchedule"}],
    "containers": [{"name": "sidecar", "env": [{"name": "LEVEL", "value": "debug"}]}],
    "volumes": [{"name": "scratch", "emptyDir": {}}],
}


def posts(namespace: str) -> str:
    return f"POST /apis/{TRAINER}/namespaces/{namespace}/trainjobs"


async def test_the_cluster_runs_the_requested_release(older: Older) -> None:
    assert older.versions()["trainer"].startswith(f"v{older.release}.")
    document = older.api.request("GET", OPENAPI)
    schema = document["components"]["schemas"]["org.kubeflow.trainer.v1alpha1.TrainJob"]["properties"]["spec"]
    assert cut(schema) == recorded(older.release), "tests/unit/schemas has the schema of this server"


async def test_a_job_runs_to_its_end_and_is_adopted(
    backend: KubernetesBackend, namespace: str, sent: list[str]
) -> None:
    asked = spec(env=simulate(start="3s", run="3s"))
    ref = await launch(backend, asked, "a", namespace=namespace)
    assert sent == [posts(namespace)]
    assert [phase for phase in await phases_of(backend, ref) if phase is not Phase.NOT_STARTED] == [
        Phase.STARTING,
        Phase.RUNNING,
        Phase.COMPLETE,
    ]
    assert await launch(backend, asked, "a", namespace=namespace) == ref


async def test_a_failed_rank_fails_the_job(backend: KubernetesBackend, namespace: str) -> None:
    ref = await launch(backend, spec(env=simulate(run="3s", exit_code=3, ranks="1")), "a", namespace=namespace)
    seen: list[Phase] = []
    with pytest.raises(TrainJobFailed, match="exited with code 3") as failed:
        await phases_of(backend, ref, seen=seen)
    assert seen[-2:] == [Phase.RUNNING, Phase.FAILED]
    assert (failed.value.diagnosis.rank, failed.value.diagnosis.exit_code) == ("node-1", 3)
    assert (await launch(backend, spec(env=simulate(run="100ms")), "a", namespace=namespace)).attempt == 2


async def test_the_admission_policy_checks_changes_of_pods(older: Older, namespace: str) -> None:
    def changed(**pod: Any) -> dict[str, Any]:
        if older.release == "2.1":
            return {"podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": pod}]}
        return patch(**pod)

    def why(**pod: Any) -> str:
        return why_refused(older, namespace, **changed(**pod))

    with protected(older, namespace):
        claim = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
        assert why(serviceAccountName="trainer", nodeSelector={"pool": "gpu"}, volumes=[claim]) == ""
        assert "ServiceAccount admin is not allowed" in why(serviceAccountName="admin")
        assert "Secret other is not allowed" in why(initContainers=[{"name": "any", "env": [key("other")]}])
        assert "pod.volumes.hostPath" in why(volumes=[{"name": "root", "hostPath": {"path": "/"}}])


async def test_patches_reach_the_pods_and_a_second_launch_reads_no_schema(
    older: Older, backend: KubernetesBackend, namespace: str, sent: list[str]
) -> None:
    asked = spec(env=simulate(run="never"), runtime_patches=patches(POD))
    first = await launch(backend, asked, "a", namespace=namespace)
    schema_reads = {"2.1": [OPENAPI, "/openapi/v3/apis/kueue.x-k8s.io/v1beta2"], "2.2": []}[older.release]
    again = [posts(namespace)] if schema_reads else []
    assert sent == [posts(namespace), *(f"GET {path}" for path in schema_reads), *again]
    sent.clear()
    assert await launch(backend, asked, "a", namespace=namespace) == first, "the same spec, so the same job"
    sent.clear()
    second = await launch(backend, asked, "b", namespace=namespace)
    assert sent == [posts(namespace)]
    for ref in (first, second):
        await until_phase(backend, ref, Phase.RUNNING)
        pods = pods_of(older, ref)
        assert len(pods) == 2
        for pod in pods:
            assert pod["spec"]["nodeName"] == "simulated-1"
            assert (
                POD["tolerations"][0].items()
                <= next(t for t in pod["spec"]["tolerations"] if t["key"] == "gpus").items()
            )
            assert {"name": "scratch", "emptyDir": {}} in pod["spec"]["volumes"]
            sidecar = next(each for each in pod["spec"]["containers"] if each["name"] == "sidecar")
            assert {"name": "LEVEL", "value": "debug"} in sidecar["env"]
            assert pod["metadata"]["labels"]["team"] == "a"
            assert pod["metadata"]["annotations"]["note"] == "b"
        jobset = older.api.get("jobset.x-k8s.io/v1alpha2", "JobSet", namespace, ref.name) or {}
        assert jobset["metadata"]["labels"]["jobset-label"] == "c"


async def test_unsupported_fields_are_refused_before_a_job_is_created(
    older: Older, backend: KubernetesBackend, namespace: str
) -> None:
    pod = "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec"
    grace = spec(runtime_patches=patches({"terminationGracePeriodSeconds": 5}), active_deadline_seconds=600)
    for _ in ("first", "with the cached schema"):
        with pytest.raises(Rejected) as error:
            await launch(backend, grace, "a", namespace=namespace)
        lines = str(error.value).splitlines()[1:]
        named = [line.removeprefix("  - ").partition(": ")[0] for line in lines]
        deadline = ["spec.activeDeadlineSeconds"] if older.release == "2.1" else []
        assert named == [*deadline, f"{pod}.terminationGracePeriodSeconds"]
        assert all("whose fields here are: " in line for line in lines)
        assert error.value.retry is RetryVerdict.CONFIGURATION
    assert await backend.find(namespace, {}) == []


async def test_a_job_is_suspended_resumed_and_deleted(older: Older, backend: KubernetesBackend, namespace: str) -> None:
    """Also with patches: 2.1 refuses changes of `podTemplateOverrides` unless the job is suspended."""
    asked = spec(env=simulate(run="never"), runtime_patches=patches(POD))
    ref = await launch(backend, asked, "a", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    assert await cancel(backend, ref, "suspend")
    await until_phase(backend, ref, Phase.SUSPENDED)
    wait_until("its pods are gone", lambda: not pods_of(older, ref), 60)
    assert await launch(backend, asked, "a", namespace=namespace) == ref, "the same key resumes the job"
    await until_phase(backend, ref, Phase.RUNNING)
    assert await cancel(backend, ref)
    assert await backend.get(namespace, ref.name) is None
    assert await backend.stopped(ref)


async def test_a_queued_job_runs_or_is_refused(
    older: Older, backend: KubernetesBackend, namespace: str, sent: list[str]
) -> None:
    """Kueue 0.18 admits a job of Trainer 2.1 but never starts it; it would stay suspended, without an event."""
    queued = spec(env=simulate(run="1s"), labels={QUEUE_LABEL: QUEUE}, resources_per_node={"gpu": 1})
    if older.release == "2.1":
        with pytest.raises(Rejected, match=f"the job would wait in queue {QUEUE} for ever: this cluster's Kueue"):
            await launch(backend, queued, "a", namespace=namespace)
        assert await backend.find(namespace, {}) == []
    else:
        ref = await launch(backend, queued, "a", namespace=namespace)
        assert sent == [posts(namespace)]
        assert (await phases_of(backend, ref))[-1] is Phase.COMPLETE
        (workload,) = older.api.find(API, "Workload", namespace)
        assert workload["status"]["admission"]["clusterQueue"] == QUEUE


async def test_pvc_volumes_are_mounted_also_in_a_queue(
    older: Older, backend: KubernetesBackend, namespace: str, tmp_path: Path
) -> None:
    """On 2.2 Kueue adds its patch to those of two managers; on 2.1 they are overrides, here without a queue."""
    queue = {} if older.release == "2.1" else {QUEUE_LABEL: QUEUE}
    fields = {"inputs": {"data": "pvc://data/digits"}, "runtime_patches": patches(), "labels": queue}
    asked = spec(env=simulate(run="1s"), resources_per_node={"gpu": 1}, **fields)
    with older.volume(namespace, "data", tmp_path):
        ref = await launch(backend, asked, "a", namespace=namespace)
        assert (await phases_of(backend, ref))[-1] is Phase.COMPLETE
    stored = await backend.get(namespace, ref.name) or {}
    managers = [each["manager"] for each in stored["spec"].get("runtimePatches", [])]
    assert managers == (["example.com/team", "trainjob.dev/claims", "kueue.x-k8s.io/manager"] if queue else [])
    for pod in pods_of(older, ref):
        claims = [each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]]
        assert {"claimName": "data"} in claims


async def test_the_doctor_reports_the_release_and_incompatible_queues(older: Older, namespace: str) -> None:
    """With Trainer 2.1, Kueue would never start the job."""
    wait_for_queue(older, namespace)
    found = await examined(older.kubeconfig, namespace, [RUNTIME], QUEUE)
    assert of(found, "trainer").message.startswith(f"Kubeflow Trainer {older.release}, ")
    assert failures(found) == (["admission"] if older.release == "2.1" else [])
    never = f"the job would wait in queue {QUEUE} for ever: this cluster's Kueue"
    assert (never in of(found, "admission").message) == (older.release == "2.1")


async def test_installed_runtimes_are_accepted_and_work(
    older: Older, backend: KubernetesBackend, namespace: str
) -> None:
    words = ("-n", namespace, "--image", images.PYTHON)
    documents = printed(*words, "--trainer", older.release)
    unknown = [each for each in printed(*words) if each not in documents]
    newer = {"jax-resilient": r"mlPolicy\.jax", "torch-initialized": "volumeClaimPolicies"}
    names = [yaml.safe_load(each)["metadata"]["name"] for each in unknown]
    assert set(names) == (newer.keys() if older.release == "2.1" else set())
    for name, each in zip(names, unknown, strict=True):
        with pytest.raises(AssertionError, match=f"{newer[name]}: field not declared in schema"):
            applied(older, [each])
    applied(older, documents)
    for each in map(yaml.safe_load, documents):
        if each["kind"] == "ClusterTrainingRuntime":
            wait_for_runtime(older.api, each)

    asked: dict[str, Any] = {"runtime": "torch-resilient"}
    crashing = simulate(run="300ms", exit_code=1, ranks="1")
    failed = await begin(older, backend, namespace, "failed", **asked, env=crashing)
    disrupted = await begin(older, backend, namespace, "disrupted", **asked, env=simulate(run="never", start="3s"))
    async with anyio.create_task_group() as tasks:
        for work in (failed, disrupted):
            tasks.start_soon(work.follow, backend)
        await disrupted.until(Phase.RUNNING)
        older.api.delete("v1", "Pod", namespace, disrupted.pod(0)["metadata"]["name"])
        await disrupted.until(Phase.RUNNING, times=2)
        await failed.until(Phase.FAILED)
        tasks.cancel_scope.cancel()
    assert disrupted.restarts == (1, 0)
    assert failed.restarts == (0, 0)


@contextmanager
def undiscoverable(older: Older) -> Iterator[None]:
    """Revoke everyone's permission to discover the API."""
    kind = ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "", "system:discovery")
    subjects = (older.api.get(*kind) or {})["subjects"]
    older.api.patch(*kind, {"subjects": []})
    try:
        yield
    finally:
        older.api.patch(*kind, {"subjects": subjects})


async def test_an_unreadable_schema_is_named_in_the_refusal(older: Older, namespace: str) -> None:
    narrow = older.kubeconfig_for(RULES, namespace)
    async with opened(narrow) as backend:
        with undiscoverable(older), closing(Api(narrow)) as api:
            wait_until("the schema cannot be read", lambda: "403" in refused(lambda: api.request("GET", OPENAPI)), 20)
            grace = spec(runtime_patches=patches({"terminationGracePeriodSeconds": 5}))
            with pytest.raises(Rejected, match=r"unknown field .* cannot be read \(403 .*system:discovery"):
                await launch(backend, grace, "a", namespace=namespace)
            ref = await launch(backend, spec(env=simulate(run="never")), "a", namespace=namespace)
            assert await cancel(backend, ref)


async def test_after_an_upgrade_new_fields_are_supported(
    older: Older, backend: KubernetesBackend, namespace: str, sent: list[str]
) -> None:
    """Must be the last test: it installs the definitions of 2.3."""
    grace = spec(env=simulate(run="never"), runtime_patches=patches({"terminationGracePeriodSeconds": 5}))
    with pytest.raises(Rejected):
        await launch(backend, grace, "a", namespace=namespace)
    plain = spec(env=simulate(run="never"), runtime_patches=patches(POD))
    before = await launch(backend, plain, "b", namespace=namespace)

    definitions = point(load(build.rendered("trainer"), "crds"), older.layout.ports["trainer"], "")
    older.api.apply(next(each for each in definitions if each["spec"]["names"]["kind"] == "TrainJob"))
    probe = trainjob("probe", namespace, runtime=RUNTIME, activeDeadlineSeconds=5)
    path, strict = older.api.path(TRAINER, "TrainJob", namespace), {"fieldValidation": "Strict", "dryRun": "All"}
    upgraded = lambda: older.api.request("POST", path, probe, params=strict)  # noqa: E731
    wait_until("the new definition is in force", upgraded, 20, ignore=(ApiError,))
    assert await launch(backend, plain, "b", namespace=namespace) == before, "the same spec, so the same job"
    sent.clear()
    ref = await launch(backend, grace, "c", namespace=namespace)
    assert sent == [posts(namespace)]
    stored = await backend.get(namespace, ref.name) or {}
    assert stored["spec"]["runtimePatches"][0]["manager"] == "example.com/team"
