"""The Kubernetes backend with real controllers: what is beyond the contract of all backends (test_contract.py)."""

from __future__ import annotations

from importlib import resources
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml
from tests.cluster import failing as make
from tests.cluster.backends import both_watches, opened
from tests.cluster.waits import phases_of, until_phase
from tests.cluster.wires import Wires
from tests.fakes.faults import Fault, Kind
from tests.testcluster import images, kueue
from tests.testcluster.access import RULES, TRAINER, Access
from tests.testcluster.nodes import simulate

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
from trainjob.errors import Category, RankCrashed, Rejected, RuntimeNotFound, SpecMismatch, Stuck

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 2, **fields})


# ---------------------------------------------------------------- launches


@both_watches
async def test_launch_wait_and_adopt(backend: KubernetesBackend, namespace: str) -> None:
    """A spec is compared with the stored object, which has the server's defaults."""
    asked = spec(env=simulate(run="1s"))
    ref = await launch(backend, asked, "dag/run/train", namespace=namespace)
    assert (await phases_of(backend, ref))[-1] is Phase.COMPLETE
    assert await launch(backend, asked, "dag/run/train", namespace=namespace) == ref, "complete, not delivered: adopted"
    other = spec(env=simulate(run="1s"), num_nodes=3)
    with pytest.raises(SpecMismatch, match=r"spec\.trainer\.numNodes: 2 -> 3"):
        await launch(backend, other, "dag/run/train", namespace=namespace)
    stored = await dry_run(backend, other, "a", namespace=namespace)
    assert stored["spec"]["managedBy"] == "trainer.kubeflow.org/trainjob-controller", "with the server's defaults"
    await mark_delivered(backend, ref)
    again = await launch(backend, asked, "dag/run/train", namespace=namespace)
    assert (again.attempt, again.name != ref.name) == (2, True)


async def test_refused_launches_report_the_reason(backend: KubernetesBackend, namespace: str) -> None:
    with pytest.raises(RuntimeNotFound, match="no ClusterTrainingRuntime 'nosuch'"):
        await launch(backend, spec(runtime="nosuch"), "a", namespace=namespace)
    with pytest.raises(Rejected, match='namespaces "nosuch" not found'):
        await launch(backend, spec(), "a", namespace="nosuch")
    fields = {"runtimeRef": {"name": "torch-distributed"}, "podTemplateOverrides": []}
    unknown = TrainJobSpec.parse({"apiVersion": TRAINER, "kind": "TrainJob", "spec": fields})
    with pytest.raises(Rejected, match=r"spec\.podTemplateOverrides: is not supported.* whose fields here are: active"):
        await launch(backend, unknown, "a", namespace=namespace)
    assert await backend.find(namespace, {}) == []


async def test_refusals_of_the_api_server_are_not_retried(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    """Refusals of a real server: forbidden, too large, invalid, exceeded quota. No request is repeated."""
    reading = cluster.kubeconfig_for([{**RULES[0], "verbs": ["get", "list", "watch"]}], namespace)
    async with opened(reading) as reader:
        with pytest.raises(Rejected, match='cannot create resource "trainjobs"') as forbidden:
            await launch(reader, spec(), "a", namespace=namespace)
    with pytest.raises(Rejected, match=r"[Tt]oo large") as too_large:  # for etcd
        await backend.create(_with_env(namespace, "BIG", "x" * 2_000_000))
    with pytest.raises(Rejected, match=r"is 3\.3 MiB of JSON, and an API server accepts 3"):
        await backend.create(_with_env(namespace, "BIG", "x" * 3_500_000))
    with pytest.raises(Rejected, match="PET_NNODES") as invalid:
        await backend.create(_with_env(namespace, "PET_NNODES", "1"))
    for refused in (forbidden, too_large, invalid):
        assert refused.value.retry is RetryVerdict.CONFIGURATION
    cluster.forbid_trainjobs(namespace)
    with pytest.raises(Rejected, match="exceeded quota") as over:
        await launch(backend, spec(), "a", namespace=namespace)
    assert over.value.retry is RetryVerdict.QUOTA
    assert await backend.find(namespace, {}) == []


def _with_env(namespace: str, name: str, value: str) -> TrainJob:
    """A manifest with a variable that the spec would refuse."""
    trainjob = render(spec(), "a", 1, namespace)
    trainer = {**trainjob["spec"]["trainer"], "env": [{"name": name, "value": value}]}
    return {**trainjob, "spec": {**trainjob["spec"], "trainer": trainer}}


async def test_warnings_of_the_server_are_shown(
    backend: KubernetesBackend, cluster: Access, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", "jax-distributed") or {}
    labels = {**runtime["metadata"]["labels"], "trainer.kubeflow.org/support": "deprecated"}
    cluster.add_runtime({**runtime, "metadata": {"name": f"old-{namespace}", "labels": labels}})
    await launch(backend, spec(runtime=f"old-{namespace}"), "a", namespace=namespace)
    assert any("API server: " in each.message and "deprecated" in each.message for each in caplog.records)
    cluster.api.delete(TRAINER, "ClusterTrainingRuntime", "", f"old-{namespace}")


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


# ---------------------------------------------------------------- permissions

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
    async with opened(cluster.kubeconfig_for(ROLE["rules"], namespace), timings=Timings(renew=0.1)) as narrow:
        await _use_everything(narrow, cluster, namespace, small_queue)
    assert used == {
        (group, name, verb)
        for rule in ROLE["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    }


async def _use_everything(narrow: KubernetesBackend, cluster: Access, namespace: str, queue: str) -> None:
    """Complete a job, and cancel one that its queue never admits; check that nothing was hidden."""
    asked = spec(env=simulate(run="1s"), labels={kueue.QUEUE_LABEL: queue}, unattended="suspend")
    ref = await launch(narrow, asked, "a", namespace=namespace)
    assert await launch(narrow, asked, "a", namespace=namespace) == ref
    lines: list[str] = []
    await wait(narrow, ref, on_log=lambda line: lines.append(line.text))
    assert lines
    await mark_delivered(narrow, ref)
    assert (await narrow.evidence(ref)).unseen == []
    with make.own(make.NODE)(cluster, namespace):
        own = spec(**make.OWN, labels={kueue.QUEUE_LABEL: "nosuch"})
        waiting = await launch(narrow, own, "b", namespace=namespace)
    with pytest.raises(Stuck, match="LocalQueue nosuch doesn't exist"):
        await wait(narrow, waiting, WaitOptions(fail_fast=True))
    assert (await narrow.evidence(waiting)).unseen == []
    assert await narrow.usage(waiting) is None
    assert await narrow.queue_position(waiting, queue) is None
    assert await cancel(narrow, waiting)


# ---------------------------------------------------------------- crashes of real pods

CRASH = """
import os, sys, time
if os.environ["PET_NODE_RANK"] == "1":
    time.sleep(SECONDS)
    print("ValueError: the answer is not 42", file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(600)
"""


def crashing(seconds: int, deadline: int) -> TrainJobSpec:
    """Rank 1 crashes after that time, and is restarted until the deadline."""
    command = ["python3", "-c", CRASH.replace("SECONDS", str(seconds))]
    return spec(image=images.PYTHON, command=command, active_deadline_seconds=deadline)


async def test_a_crash_of_a_real_pod_is_reported_at_once_and_kept_for_the_diagnosis(
    backend: KubernetesBackend, real_namespace: str
) -> None:
    """At the deadline the JobSet is deleted with its pods and their logs."""
    ref = await launch(backend, crashing(0, 40), "a", namespace=real_namespace)
    crashes: list[Diagnosis] = []
    with anyio.fail_after(240), pytest.raises(TrainJobFailed) as failed:
        await wait(backend, ref, on_crash=crashes.append)
    assert (crashes[0].rank, crashes[0].exit_code) == ("node-1", 3)
    assert (crashes[0].log, crashes[0].unseen) == (("ValueError: the answer is not 42",), ())
    assert failed.value.diagnosis.category is Category.DEADLINE
    assert failed.value.diagnosis.log == ("ValueError: the answer is not 42",)


async def test_a_log_that_a_real_node_writes_late_is_read_again(
    real_node: Access, backend: KubernetesBackend, real_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first look at the log of the run that crashed finds it empty; the next run writes nothing for 25 s.

    Its end would make the kubelet delete the log of the first one.
    """
    looks: list[list[LogLine]] = []
    looked, read = anyio.Event(), pods._Tails._lines

    async def lines(tails: pods._Tails, *which: Any) -> list[LogLine] | None:
        found = await read(tails, *which)
        looks.append(found or [])
        looked.set()
        return found

    monkeypatch.setattr(pods._Tails, "_lines", lines)
    ref = await launch(backend, crashing(25, 100), "a", namespace=real_namespace)
    container = await anyio.to_thread.run_sync(make.container_of_rank_1, real_node, ref)

    async def write_late() -> None:
        with make.node_of(real_node).unwritten_log(container):
            await looked.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_late)
        with anyio.fail_after(240), pytest.raises(RankCrashed) as failed:
            await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    assert [[line.text for line in each] for each in looks] == [[], ["ValueError: the answer is not 42"]]
    assert failed.value.diagnosis.log == ("ValueError: the answer is not 42",)


async def test_a_crash_caused_by_a_probe_names_the_probe(
    real_node: Access, backend: KubernetesBackend, real_namespace: str
) -> None:
    """The pod's status has only SIGKILL; the Event with the reason is requested before the crash is reported."""
    runtime = make.stages("node", node={"livenessProbe": make.PROBE}, pod=make.RESTARTS)
    with make.own(runtime)(real_node, real_namespace):
        asked = spec(**make.python(make.SLEEP) | make.OWN | {"image": images.PYTHON})
        ref = await launch(backend, asked, "a", namespace=real_namespace)
        with anyio.fail_after(240), pytest.raises(RankCrashed, match="because its liveness probe failed") as failed:
            await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
        assert failed.value.diagnosis.exit_code == 137


# ---------------------------------------------------------------- logs and lists


async def test_a_delayed_log_is_read(wires: Wires) -> None:
    """The log is read even after the job's end, when nothing else is waited for."""
    async with wires.open(Timings()) as (slow, proxy):
        proxy.plan = lambda seen: Fault(Kind.DELAY, seconds=3) if seen.path.endswith("/log") else None
        ref = await launch(slow, spec(env=simulate(run="100ms")), "a", namespace=wires.namespace)
        await until_phase(slow, ref, Phase.COMPLETE)
        with anyio.fail_after(30):
            lines = [line.rank async for line in slow.logs(ref, follow=True)]
        assert sorted(lines) == ["node-0", "node-1"]
        assert len(proxy.injected) == 2


async def test_logs_of_many_jobs_share_one_watch_of_pods(
    cluster: Access, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A triggerer waits for a thousand jobs: their shared watch provides the list of pods."""
    lists: list[str] = []
    read: dict[str, list[str]] = {}
    async with opened(cluster.kubeconfig, shared=True) as triggers:
        stream = triggers._client.stream

        def counting(request: Request) -> Any:
            lists.extend([request.path] if request.path.endswith("/pods") and "watch" not in request.params else [])
            return stream(request)

        async def follow(ref: JobRef) -> None:
            read[ref.name] = [line.rank async for line in triggers.logs(ref, follow=True)]

        monkeypatch.setattr(triggers._client, "stream", counting)
        asked = spec(env=simulate(run="12s"))
        refs = [await launch(triggers, asked, f"key {n}", namespace=namespace) for n in range(5)]
        with anyio.fail_after(240):
            async with anyio.create_task_group() as tasks:
                for ref in refs:
                    tasks.start_soon(follow, ref)
    assert {name: sorted(ranks) for name, ranks in read.items()} == {ref.name: ["node-0", "node-1"] for ref in refs}
    assert len(lists) <= 1 + 2 * len(refs), "one at the start, at most one for each launch, and one for each end"


def writes(name: str, depends: list[str]) -> dict[str, Any]:
    """A replicated job that starts after others and writes its name."""
    container: dict[str, Any] = {"name": name, "image": images.PYTHON}
    container["command"] = ["sh", "-c", f"echo {name} writes; sleep 1"]
    if name.endswith("-initializer"):
        container["volumeMounts"] = [{"name": "initializer", "mountPath": "/workspace"}]
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": [{"name": "initializer", "emptyDir": {}}]}
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer" if name == "node" else name}
    labels = {} if name == "launcher" else {"metadata": {"labels": ancestor}}
    first = {"dependsOn": [{"name": each, "status": "Complete"} for each in depends]} if depends else {}
    return {"name": name, "template": {**labels, "spec": {"template": {"spec": pod}}}, **first}


async def test_logs_of_initializers_and_of_a_launcher(
    cluster: Access, backend: KubernetesBackend, real_namespace: str
) -> None:
    steps = ("dataset-initializer", "model-initializer", "node", "launcher")
    jobs = [writes(name, [*steps[:i]][-1:]) for i, name in enumerate(steps)]
    metadata = {"name": "stages", "labels": {"trainer.kubeflow.org/framework": "test"}}
    runtime = {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": jobs}}}
    cluster.add_runtime(
        {"apiVersion": TRAINER, "kind": "ClusterTrainingRuntime", "metadata": metadata, "spec": runtime}
    )
    initializer = {"dataset": {"storage_uri": "s3://b/d"}, "model": {"storage_uri": "s3://b/m"}}
    asked = spec(runtime="stages", num_nodes=1, initializer=initializer)
    ref = await launch(backend, asked, "a", namespace=real_namespace)
    lines: list[str] = []
    phases: list[Phase] = []
    with anyio.fail_after(240):
        await wait(
            backend,
            ref,
            on_change=lambda observation, _: phases.append(observation.phase),
            on_log=lambda line: lines.append(str(line)),
        )
    assert lines == [f"[{step}-0] {step} writes" for step in steps]
    assert Phase.INITIALIZING in phases
    only = [str(line) async for line in backend.logs(ref, ranks=["model-initializer-0", "launcher-0"])]
    assert only == ["[model-initializer-0] model-initializer writes", "[launcher-0] launcher writes"]


@both_watches
async def test_lists_of_several_pages_are_complete(
    cluster: Access, backend: KubernetesBackend, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("client", "reflector"):
        monkeypatch.setattr(f"trainjob._backends.kubernetes.{module}.PAGE", 2)
    refs = [await launch(backend, spec(suspend=True), f"page-{number}", namespace=namespace) for number in range(5)]
    client = ApiClient(Credentials(kubeconfig=str(cluster.kubeconfig)))
    assert len(await client.items(cluster.api.path(TRAINER, "TrainJob", namespace), {}, page=2)) == 5
    await client.aclose()
    names = {ref.name for ref in refs}
    assert (await backend.refs(namespace, names))[0].keys() == names
    assert {job["metadata"]["name"] for job in await backend.find(namespace, {})} == names
